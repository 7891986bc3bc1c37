//! Golden tests of imports. Each input in tests/import is converted, and the job and the notes are
//! compared with golden files. `UPDATE_EXPECTED=1` rewrites the golden files.
use super::{import_options::ImportErrors, job_draft::NoteKind, *};
use diagnostic::{Diagnostic, codes::command};
use jobspec::{Document, DocumentSyntax, JobSource, JobSpec};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

fn input_directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/import").join(name)
}

/// Returns the input files with the extension `ending` in the directory `name`, sorted by path.
/// Panics if there are none.
fn list_inputs(name: &str, ending: &str) -> Vec<PathBuf> {
    let is_expected_output = |path: &Path| {
        path.to_string_lossy().ends_with(".job.yaml") || path.to_string_lossy().ends_with(".env.json")
    };
    let files = fs::read_dir(input_directory(name))
        .expect("a directory")
        .filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|e| e == ending) && !is_expected_output(path))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "nothing in {name}");
    files
}

/// Returns the file name of `path`, for messages. Messages use this name, so that they do not
/// depend on the machine.
fn display_name(path: &Path) -> String {
    path.file_name().expect("a name").to_string_lossy().into_owned()
}

/// Reads and parses an input file. Panics if the file is malformed.
fn parse_document(path: &Path, syntax: DocumentSyntax) -> Document {
    let text = fs::read_to_string(path).expect("a file");
    Document::parse(&display_name(path), &text, syntax).expect("a document")
}

/// Loads the job.yaml `text` that an import has returned. Panics if the job is rejected.
fn load_imported(text: &str) -> JobSpec {
    let source = JobSource::Text { name: "job.yaml".to_owned(), text: text.to_owned() };
    jobspec::load_job(source, &[]).expect("an imported job loads").0
}

/// Returns whether a line of a job or note depends on the features of this version of the built-in
/// training. Golden files do not contain such lines.
fn depends_on_version(line: &str) -> bool {
    let words = ["precision:", "not converted: fp16.enabled:", "not converted: bf16.enabled:"];
    words.iter().any(|word| line.trim_start().starts_with(word))
}

/// Compares an imported job and its notes with the golden files of the input `path`. Also checks
/// that the job can be loaded.
fn assert_matches_golden(path: &Path, imported: &ImportedJob) {
    let notes: String = imported.notes.iter().map(|note| format!("{note}\n")).collect();
    for (ending, made) in [("job.yaml", &imported.job), ("notes", &notes)] {
        let lines = made.lines().filter(|line| !depends_on_version(line));
        let made: String = lines.map(|line| format!("{line}\n")).collect();
        let file = path.with_extension(ending);
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            fs::write(&file, &made).expect("written");
        }
        let expected = fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(made, expected, "{}", file.display());
    }
    load_imported(&imported.job);
}

/// Checks that a precision is either part of the job or named in a note, but not both.
#[test]
fn a_precision_is_converted_or_noted() {
    for (config, key, line) in [
        (r#"{"bf16": {"enabled": true}}"#, "bf16.enabled", "precision: bf16"),
        (r#"{"fp16": {"enabled": true}}"#, "fp16.enabled", "precision: fp16"),
    ] {
        let document = Document::parse("ds.json", config, DocumentSyntax::Json).expect("JSON");
        let imported = convert_deepspeed_config(&document, None, &ImportOptions::default()).expect("a job");
        let is_noted =
            imported.notes.iter().any(|note| note.kind == NoteKind::NotConverted && note.key == key);
        let is_converted = imported.job.lines().any(|l| l.trim() == line);
        assert!(is_noted != is_converted, "{config}: {} {:?}", imported.job, imported.notes);
    }
}

#[test]
fn offloading_to_files_is_converted_and_other_devices_are_noted() {
    let import_zero = |zero: &str| {
        let config = format!(r#"{{"zero_optimization": {{"stage": 3, {zero}}}}}"#);
        let document = Document::parse("ds.json", &config, DocumentSyntax::Json).expect("JSON");
        let imported = convert_deepspeed_config(&document, None, &ImportOptions::default()).expect("a job");
        let notes = imported.notes.into_iter().filter(|n| n.key.contains("offload"));
        let notes: Vec<String> = notes.map(|n| n.key).collect();
        (load_imported(&imported.job).train.expect("a train section").zero.offload, notes)
    };
    let path = "/nvme 1/{states}, mine";
    let (offload, notes) = import_zero(&format!(
        r#""offload_optimizer": {{"device": "nvme", "nvme_path": "{path}", "buffer_count": 4}}"#
    ));
    assert_eq!(offload, Some(jobspec::OffloadTarget::Files(path.into())));
    assert_eq!(notes, ["zero_optimization.offload_optimizer.buffer_count"]);
    for (zero, key) in [
        (r#""offload_optimizer": {"device": "nvme"}"#, "offload_optimizer.device"),
        (r#""offload_optimizer": {"device": "cpu"}"#, "offload_optimizer.device"),
        (r#""offload_param": {"device": "nvme", "nvme_path": "/x"}"#, "offload_param.device"),
        (r#""cpu_offload": true"#, "cpu_offload"),
    ] {
        let (offload, notes) = import_zero(zero);
        assert_eq!(offload, None, "{zero}");
        assert_eq!(notes, [format!("zero_optimization.{key}")], "{zero}");
    }
    let (offload, notes) = import_zero(r#""offload_optimizer": {"device": "none", "nvme_path": "/x"}"#);
    assert!(offload.is_none() && notes.is_empty(), "{notes:?}");
}

#[test]
fn the_dynamic_loss_scale_is_converted() {
    let config = r#"{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
        "min_loss_scale": 4, "hysteresis": 2}}"#;
    let document = Document::parse("ds.json", config, DocumentSyntax::Json).expect("JSON");
    let imported = convert_deepspeed_config(&document, None, &ImportOptions::default()).expect("a job");
    let scale = load_imported(&imported.job).train.expect("a train section").loss_scale;
    assert_eq!((scale.initial_scale_power, scale.loss_scale_window, scale.min_loss_scale), (12, 500, 4.0));
    let noted = imported.notes.iter().map(|n| n.key.as_str()).filter(|key| key.starts_with("fp16."));
    assert_eq!(noted.collect::<Vec<_>>(), ["fp16.hysteresis"]);
}

#[test]
fn accelerate_configs_give_the_expected_jobs() {
    for path in list_inputs("accelerate", "yaml") {
        let imported = convert_accelerate_config(
            &parse_document(&path, DocumentSyntax::Yaml),
            &ImportOptions::default(),
        )
        .expect("a job");
        assert_matches_golden(&path, &imported);
        // The expected environment was recorded from `accelerate launch`
        // (scripts/golden/accelerate_env.py).
        let env = fs::read_to_string(path.with_extension("env.json")).expect("a golden environment");
        let golden: BTreeMap<String, String> = serde_json::from_str(&env).expect("JSON");
        let mut ours: BTreeMap<String, String> = load_imported(&imported.job).run.env.into_iter().collect();
        // Accelerate's library reads these two variables, but its launcher does not set them.
        for extra in ["OPTIMIZER", "PARAM"] {
            ours.remove(&format!("ACCELERATE_DEEPSPEED_OFFLOAD_{extra}_NVME_PATH"));
        }
        let golden: BTreeMap<_, _> = golden.into_iter().filter(|(name, _)| !name.starts_with('_')).collect();
        assert_eq!(ours, golden, "{}", path.display());
    }
}

#[test]
fn deepspeed_configs_give_the_expected_jobs() {
    for path in list_inputs("deepspeed", "json") {
        let imported = convert_deepspeed_config(
            &parse_document(&path, DocumentSyntax::Json),
            None,
            &ImportOptions::default(),
        )
        .expect("a job");
        assert_matches_golden(&path, &imported);
    }
}

#[test]
fn torchrun_arguments_give_the_expected_jobs() {
    for path in list_inputs("torchrun", "args") {
        let text = fs::read_to_string(&path).expect("a file");
        let args: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        assert_matches_golden(
            &path,
            &convert_torchrun_args(&args, &ImportOptions::default()).expect("a job"),
        );
    }
}

/// Imports `text`, which is not a valid configuration. Returns the first error. Panics if the
/// import succeeds.
fn expect_first_error(
    text: &str,
    import: fn(&Document) -> Result<ImportedJob, ImportErrors>,
    syntax: DocumentSyntax,
) -> Diagnostic {
    match Document::parse("f", text, syntax) {
        Ok(document) => import(&document).expect_err(text).remove(0),
        Err(error) => error,
    }
}

#[test]
fn invalid_configs_are_rejected() {
    let accelerate = |document: &Document| convert_accelerate_config(document, &ImportOptions::default());
    for (text, code, subject) in [
        ("just text", command::IMPORT_VALUE_INVALID, Some("")),
        ("num_processes: 2", command::IMPORT_NOT_A_CONFIG, None),
        ("distributed_type: XLA", command::IMPORT_UNSUPPORTED, None),
        ("distributed_type: [1]", command::IMPORT_VALUE_INVALID, Some("distributed_type")),
        ("compute_environment: SAGEMAKER\ndistributed_type: NO", command::IMPORT_UNSUPPORTED, None),
        (
            "distributed_type: FSDP\nfsdp_config: 3\nuse_cpu: maybe",
            command::IMPORT_VALUE_INVALID,
            Some("use_cpu"),
        ),
    ] {
        let error = expect_first_error(text, accelerate, DocumentSyntax::Yaml);
        assert_eq!((error.code(), error.subject()), (code, subject), "{text}: {error}");
    }
    expect_first_error("[a", accelerate, DocumentSyntax::Yaml);
    let error = expect_first_error(
        "distributed_type: MULTI_GPU\nnum_processes: many",
        accelerate,
        DocumentSyntax::Yaml,
    );
    assert_eq!(error.location().map(ToString::to_string).as_deref(), Some("f:2:16"));
    let deepspeed = |document: &Document| convert_deepspeed_config(document, None, &ImportOptions::default());
    for (text, subject) in [
        ("{\"train_batch_size\": \"x\"}", "train_batch_size"),
        ("{\"zero_optimization\": []}", "zero_optimization"),
        ("{\"zero_optimization\": {\"stage\": -1}}", "zero_optimization.stage"),
        ("{\"optimizer\": {\"type\": \"AdamW\", \"params\": 3}}", "optimizer.params"),
        ("{\"fp16\": {\"enabled\": 3}}", "fp16.enabled"),
    ] {
        let error = expect_first_error(text, deepspeed, DocumentSyntax::Json);
        let expected = (command::IMPORT_VALUE_INVALID, Some(subject));
        assert_eq!((error.code(), error.subject()), expected, "{text}: {error}");
    }
    let error = expect_first_error("train_batch_size: 3", deepspeed, DocumentSyntax::Json);
    assert_eq!(error.code(), command::IMPORT_NOT_A_CONFIG);
}

#[test]
fn values_that_torchrun_rejects_are_rejected() {
    for (args, option) in [
        ("--nnodes x a.py", "nnodes"),
        ("--nnodes 3:2 a.py", "nnodes"),
        ("--nnodes 0 a.py", "nnodes"),
        ("--nnodes 2: a.py", "nnodes"),
        ("--nproc-per-node many a.py", "nproc-per-node"),
        ("--nproc-per-node 0 a.py", "nproc-per-node"),
        ("--max-restarts -1 a.py", "max-restarts"),
        ("--master-port 70000 a.py", "master-port"),
        ("--shutdown-timeout soon a.py", "shutdown-timeout"),
        ("--monitor-interval inf a.py", "monitor-interval"),
    ] {
        let words: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
        let errors = convert_torchrun_args(&words, &ImportOptions::default()).expect_err(args);
        assert_eq!((errors.len(), errors[0].code()), (1, command::IMPORT_ARGUMENTS_INVALID), "{args}");
        assert_eq!(errors[0].field("option"), Some(&option.into()), "{args}");
    }
}

/// Checks that a missing batch size follows from DeepSpeed's rule: global batch = micro-batch ×
/// accumulation steps × workers.
#[test]
fn missing_batch_sizes_are_computed() {
    let import_batch = |text: &str, hosts: Option<&str>| {
        let document = Document::parse("ds.json", text, DocumentSyntax::Json).expect("a document");
        let file = Path::new("hostfile");
        let context = ImportOptions { hostfile: hosts.map(|_| file), ..ImportOptions::default() };
        let imported = convert_deepspeed_config(&document, hosts, &context).expect("a job");
        let batch = load_imported(&imported.job).train.expect("train").batch;
        let keys: Vec<String> = imported.notes.into_iter().map(|n| n.key).collect();
        (batch.global, batch.micro, keys)
    };
    const HOSTS: &str = "a slots=4\nb slots=4\n";
    let (global, micro, _) = import_batch(
        r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}"#,
        Some(HOSTS),
    );
    assert_eq!((global, micro), (48, 2));
    let (global, micro, notes) = import_batch(r#"{"train_micro_batch_size_per_gpu": 2}"#, None);
    assert!((global, micro) == (2, 2) && notes.contains(&"train.batch.global".into()), "{notes:?}");
    let (global, micro, _) =
        import_batch(r#"{"train_batch_size": 64, "gradient_accumulation_steps": 2}"#, Some(HOSTS));
    assert_eq!((global, micro), (64, 4));
    let (_, _, notes) = import_batch(
        r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}"#,
        Some(HOSTS),
    );
    assert!(notes.contains(&"train_batch_size".into()), "{notes:?}");
    let (global, micro, notes) = import_batch(r#"{"train_batch_size": "auto"}"#, None);
    assert!((global, micro) == (64, 4) && notes.contains(&"train_batch_size".into()), "{notes:?}");
}

#[test]
fn programs_and_hostfiles_are_converted() {
    let document =
        Document::parse("ds.json", "{\"fp16\": {\"enabled\": true}}", DocumentSyntax::Json).expect("JSON");
    let words: Vec<String> = ["train.py", "--deepspeed_config", "ds.json"].map(str::to_owned).to_vec();
    let context = ImportOptions { hostfile: Some(Path::new("hosts")), program: &words };
    let job = load_imported(
        &convert_deepspeed_config(&document, Some("a slots=2\n"), &context).expect("a job").job,
    );
    assert_eq!(job.cluster.hosts, jobspec::HostSelection::File("hosts".into()));
    assert!(job.train.is_none() && job.run.local_rank_argument);
    assert_eq!(job.run.command.expect("a command"), ["python", "train.py", "--deepspeed_config", "ds.json"]);
    let args: Vec<String> = ["--nnodes=2:3", "--nproc-per-node", "2", "a.py"].map(str::to_owned).to_vec();
    let context = ImportOptions { hostfile: Some(Path::new("hosts")), program: &[] };
    let job = load_imported(&convert_torchrun_args(&args, &context).expect("a job").job);
    assert_eq!(job.run.min_hosts, jobspec::MinHosts::AtLeast(2));
}

proptest::proptest! {
    /// Checks that any configuration gives a job that can be loaded, or at least one error.
    #[test]
    fn any_config_gives_a_job_or_errors(
        keys in proptest::collection::vec((0usize..14, 0usize..9), 0..12),
    ) {
        const NAMES: [&str; 14] = [
            "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization",
            "fp16", "bf16", "optimizer", "scheduler", "gradient_clipping", "elasticity", "x y", "checkpoint", "num_processes",
            "distributed_type",
        ];
        const VALUES: [&str; 9] = [
            "1", "-3", "\"auto\"", "true", "null", "{\"stage\": 2, \"type\": \"AdamW\", \"enabled\": true}", "[1, 2]",
            "\"FSDP\"", "1e300",
        ];
        let mut names = std::collections::BTreeSet::new();
        let entries = keys.iter().filter(|(name, _)| names.insert(*name));
        let entries: Vec<_> = entries.map(|(name, value)| format!("\"{}\": {}", NAMES[*name], VALUES[*value])).collect();
        let document = Document::parse("f.json", &format!("{{{}}}", entries.join(", ")), DocumentSyntax::Json).expect("JSON");
        for imported in [convert_deepspeed_config(&document, None, &ImportOptions::default()), convert_accelerate_config(&document, &ImportOptions::default())] {
            match imported {
                Ok(imported) => { load_imported(&imported.job); }
                Err(errors) => proptest::prop_assert!(!errors.is_empty()),
            }
        }
    }
}
