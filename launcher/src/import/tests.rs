//! Each file in tests/import has the job and the notes that are made of it; `UPDATE_EXPECTED=1` writes them.
use super::*;
use contract::{
    JobSpec, Source,
    job::{Document, Syntax},
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/import").join(name)
}

/// Files of a folder with this ending, sorted, without what was made of them.
fn inputs(name: &str, ending: &str) -> Vec<PathBuf> {
    let made = |path: &Path| {
        path.to_string_lossy().ends_with(".job.yaml") || path.to_string_lossy().ends_with(".env.json")
    };
    let files = fs::read_dir(folder(name)).expect("a folder").filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|e| e == ending) && !made(path)).collect();
    files.sort();
    assert!(!files.is_empty(), "nothing in {name}");
    files
}

/// The file's last two components: what stands in messages must not depend on the machine.
fn named(path: &Path) -> String {
    path.file_name().expect("a name").to_string_lossy().into_owned()
}

fn document(path: &Path, syntax: Syntax) -> Document {
    let text = fs::read_to_string(path).expect("a file");
    Document::parse(&named(path), &text, syntax).expect("a document")
}

fn loaded(text: &str) -> JobSpec {
    let source = Source::Text { name: "job.yaml".to_owned(), text: text.to_owned() };
    contract::load(source, &[]).expect("what is imported loads").0
}

/// Lines that depend on what this version of the built-in training can do, and have a test of their own.
fn of_the_version(line: &str) -> bool {
    let words = ["precision:", "not carried: fp16.enabled:", "not carried: bf16.enabled:"];
    words.iter().any(|word| line.trim_start().starts_with(word))
}

/// Compares with the files beside `path`.
fn check(path: &Path, imported: &Imported) {
    let notes: String = imported.notes.iter().map(|note| format!("{note}\n")).collect();
    for (ending, made) in [("job.yaml", &imported.job), ("notes", &notes)] {
        let lines = made.lines().filter(|line| !of_the_version(line));
        let made: String = lines.map(|line| format!("{line}\n")).collect();
        let beside = path.with_extension(ending);
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            fs::write(&beside, &made).expect("written");
        }
        let expected = fs::read_to_string(&beside).unwrap_or_default();
        assert_eq!(made, expected, "{}", beside.display());
    }
    loaded(&imported.job);
}

/// What a version can't do yet is in the notes, what it can is in the job: never neither.
#[test]
fn a_precision_is_had_or_named() {
    for (config, key, line) in [
        (r#"{"bf16": {"enabled": true}}"#, "bf16.enabled", "precision: bf16"),
        (r#"{"fp16": {"enabled": true}}"#, "fp16.enabled", "precision: fp16"),
    ] {
        let document = Document::parse("ds.json", config, Syntax::Json).expect("JSON");
        let imported = deepspeed(&document, None, &Beside::default()).expect("a job");
        let named = imported.notes.iter().any(|note| note.starts_with(&format!("not carried: {key}: ")));
        let had = imported.job.lines().any(|l| l.trim() == line);
        assert!(named != had, "{config}: {} {:?}", imported.job, imported.notes);
    }
}

#[test]
fn states_on_a_disk_are_carried_and_other_places_named() {
    let place = |zero: &str| {
        let config = format!(r#"{{"zero_optimization": {{"stage": 3, {zero}}}}}"#);
        let document = Document::parse("ds.json", &config, Syntax::Json).expect("JSON");
        let imported = deepspeed(&document, None, &Beside::default()).expect("a job");
        let notes: Vec<String> = imported.notes.into_iter().filter(|n| n.contains("offload")).collect();
        (loaded(&imported.job).train.expect("a train section").zero.offload, notes)
    };
    let path = "/nvme 1/{states}, mine";
    let (offload, notes) = place(&format!(
        r#""offload_optimizer": {{"device": "nvme", "nvme_path": "{path}", "buffer_count": 4}}"#
    ));
    assert_eq!(offload, Some(contract::job::Offload::Files(path.into())));
    let unknown = "not carried: zero_optimization.offload_optimizer.buffer_count: ";
    assert!(notes.len() == 1 && notes[0].starts_with(unknown), "{notes:?}");
    for (zero, key) in [
        (r#""offload_optimizer": {"device": "nvme"}"#, "offload_optimizer.device: it names no nvme_path"),
        (
            r#""offload_optimizer": {"device": "cpu"}"#,
            "offload_optimizer.device: launch keeps optimizer states in",
        ),
        (
            r#""offload_param": {"device": "nvme", "nvme_path": "/x"}"#,
            "offload_param.device: launch keeps parameters in",
        ),
        (r#""cpu_offload": true"#, "cpu_offload: launch keeps optimizer states in"),
    ] {
        let (offload, notes) = place(zero);
        assert_eq!(offload, None, "{zero}");
        let expected = format!("not carried: zero_optimization.{key}");
        assert!(notes.len() == 1 && notes[0].starts_with(&expected), "{zero}: {notes:?}");
    }
    let (offload, notes) = place(r#""offload_optimizer": {"device": "none", "nvme_path": "/x"}"#);
    assert!(offload.is_none() && notes.is_empty(), "{notes:?}");
}

#[test]
fn the_loss_scale_of_fp16_is_carried() {
    let config = r#"{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
        "min_loss_scale": 4, "hysteresis": 2}}"#;
    let document = Document::parse("ds.json", config, Syntax::Json).expect("JSON");
    let imported = deepspeed(&document, None, &Beside::default()).expect("a job");
    let scale = loaded(&imported.job).train.expect("a train section").loss_scale;
    assert_eq!((scale.initial_scale_power, scale.loss_scale_window, scale.min_loss_scale), (12, 500, 4.0));
    let left: Vec<_> = imported.notes.iter().filter(|n| n.contains("fp16.")).collect();
    assert!(left.len() == 1 && left[0].starts_with("not carried: fp16.hysteresis: "), "{left:?}");
}

#[test]
fn accelerates_configs() {
    for path in inputs("accelerate", "yaml") {
        let imported = accelerate(&document(&path, Syntax::Yaml), &Beside::default()).expect("a job");
        check(&path, &imported);
        // the environment is what Accelerate itself makes of the file (scripts/golden/accelerate_env.py)
        let env = fs::read_to_string(path.with_extension("env.json")).expect("a golden environment");
        let golden: BTreeMap<String, String> = serde_json::from_str(&env).expect("JSON");
        let mut ours: BTreeMap<String, String> = loaded(&imported.job).run.env.into_iter().collect();
        // read by Accelerate's library, forgotten by its launcher
        for extra in ["OPTIMIZER", "PARAM"] {
            ours.remove(&format!("ACCELERATE_DEEPSPEED_OFFLOAD_{extra}_NVME_PATH"));
        }
        let golden: BTreeMap<_, _> = golden.into_iter().filter(|(name, _)| !name.starts_with('_')).collect();
        assert_eq!(ours, golden, "{}", path.display());
    }
}

#[test]
fn deepspeeds_configs() {
    for path in inputs("deepspeed", "json") {
        let imported = deepspeed(&document(&path, Syntax::Json), None, &Beside::default()).expect("a job");
        check(&path, &imported);
    }
}

#[test]
fn torchruns_arguments() {
    for path in inputs("torchrun", "args") {
        let text = fs::read_to_string(&path).expect("a file");
        let args: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        check(&path, &torchrun(&args, &Beside::default()).expect("a job"));
    }
}

fn wrong(text: &str, of: fn(&Document) -> Result<Imported, Refused>, syntax: Syntax) -> String {
    let document = match Document::parse("f", text, syntax) {
        Ok(document) => document,
        Err(problem) => return problem.message,
    };
    let problems = of(&document).expect_err(text);
    problems.iter().map(|p| p.to_string()).collect::<Vec<_>>().join("\n")
}

#[test]
fn what_is_no_config_is_refused() {
    let accelerate = |document: &Document| accelerate(document, &Beside::default());
    for (text, part) in [
        ("[a", ""),
        ("just text", "must be a mapping"),
        ("num_processes: 2", "`distributed_type` is missing"),
        ("distributed_type: XLA", "doesn't run"),
        ("distributed_type: [1]", "must be one value"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO", "AMAZON_SAGEMAKER"),
        ("distributed_type: MULTI_GPU\nnum_processes: many", "f:2:16: `num_processes` must be an integer"),
        ("distributed_type: FSDP\nfsdp_config: 3\nuse_cpu: maybe", "`fsdp_config` must be a mapping"),
    ] {
        let said = wrong(text, accelerate, Syntax::Yaml);
        assert!(said.contains(part), "{text}: {said}");
    }
    let deepspeed = |document: &Document| deepspeed(document, None, &Beside::default());
    for (text, part) in [
        ("{\"train_batch_size\": \"x\"}", "`train_batch_size` must be an integer of 1 or more"),
        ("{\"zero_optimization\": []}", "must be a mapping"),
        ("{\"zero_optimization\": {\"stage\": -1}}", "`zero_optimization.stage` must be"),
        ("{\"optimizer\": {\"type\": \"AdamW\", \"params\": 3}}", "`optimizer.params` must be a mapping"),
        ("{\"fp16\": {\"enabled\": 3}}", "`fp16.enabled` must be true or false"),
        ("train_batch_size: 3", "no `{`"),
    ] {
        let said = wrong(text, deepspeed, Syntax::Json);
        assert!(said.contains(part), "{text}: {said}");
    }
}

#[test]
fn what_torchrun_would_refuse_is_refused() {
    for (args, part) in [
        ("--nnodes x a.py", "`--nnodes` needs a number of hosts, or a range such as 1:4, not `x`"),
        ("--nnodes 3:2 a.py", "not `3:2`"),
        ("--nnodes 0 a.py", "not `0`"),
        ("--nnodes 2: a.py", "not `2:`"),
        ("--nproc-per-node many a.py", "`--nproc-per-node` needs a number of workers, auto, gpu, cpu or xpu"),
        ("--nproc-per-node 0 a.py", "not `0`"),
        ("--max-restarts -1 a.py", "`--max-restarts` needs"),
        ("--master-port 70000 a.py", "a port, from 0 to 65535, not `70000`"),
        ("--shutdown-timeout soon a.py", "a whole number of seconds"),
        ("--monitor-interval inf a.py", "a number of seconds"),
    ] {
        let words: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
        let problems = torchrun(&words, &Beside::default()).expect_err(args);
        let said = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(problems.len() == 1 && said.contains(part), "{args}: {said}");
    }
}

/// DeepSpeed's rule: a step's samples are micro × accumulation × workers.
#[test]
fn batch_arithmetic() {
    let of = |text: &str, hosts: Option<&str>| {
        let document = Document::parse("ds.json", text, Syntax::Json).expect("a document");
        let file = Path::new("hostfile");
        let beside = Beside { hostfile: hosts.map(|_| file), ..Beside::default() };
        let imported = deepspeed(&document, hosts, &beside).expect("a job");
        let batch = loaded(&imported.job).train.expect("train").batch;
        (batch.global, batch.micro, imported.notes.join("\n"))
    };
    const HOSTS: &str = "a slots=4\nb slots=4\n";
    let (global, micro, _) =
        of(r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}"#, Some(HOSTS));
    assert_eq!((global, micro), (48, 2));
    let (global, micro, notes) = of(r#"{"train_micro_batch_size_per_gpu": 2}"#, None);
    assert!((global, micro) == (2, 2) && notes.contains("multiply it"), "{notes}");
    let (global, micro, _) = of(r#"{"train_batch_size": 64, "gradient_accumulation_steps": 2}"#, Some(HOSTS));
    assert_eq!((global, micro), (64, 4));
    let (_, _, notes) = of(
        r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}"#,
        Some(HOSTS),
    );
    assert!(notes.contains("isn't 64"), "{notes}");
    let (global, micro, notes) = of(r#"{"train_batch_size": "auto"}"#, None);
    assert!((global, micro) == (64, 4) && notes.contains("HF Trainer"), "{notes}");
}

#[test]
fn programs_and_hostfiles() {
    let document = Document::parse("ds.json", "{\"fp16\": {\"enabled\": true}}", Syntax::Json).expect("JSON");
    let words: Vec<String> = ["train.py", "--deepspeed_config", "ds.json"].map(str::to_owned).to_vec();
    let beside = Beside { hostfile: Some(Path::new("hosts")), program: &words };
    let job = loaded(&deepspeed(&document, Some("a slots=2\n"), &beside).expect("a job").job);
    assert_eq!(job.cluster.hosts, contract::job::Hosts::File("hosts".into()));
    assert!(job.train.is_none() && job.run.local_rank_argument);
    assert_eq!(job.run.command.expect("a command"), ["python", "train.py", "--deepspeed_config", "ds.json"]);
    let args: Vec<String> = ["--nnodes=2:3", "--nproc-per-node", "2", "a.py"].map(str::to_owned).to_vec();
    let beside = Beside { hostfile: Some(Path::new("hosts")), program: &[] };
    let job = loaded(&torchrun(&args, &beside).expect("a job").job);
    assert_eq!(job.run.min_hosts, contract::job::MinHosts::AtLeast(2));
}

proptest::proptest! {
    /// Whatever a config holds: a job that loads, or a refusal.
    #[test]
    fn any_config_makes_a_job_or_is_refused(
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
        let mut seen = std::collections::BTreeSet::new();
        let entries = keys.iter().filter(|(name, _)| seen.insert(*name));
        let entries: Vec<_> = entries.map(|(name, value)| format!("\"{}\": {}", NAMES[*name], VALUES[*value])).collect();
        let document = Document::parse("f.json", &format!("{{{}}}", entries.join(", ")), Syntax::Json).expect("JSON");
        for imported in [deepspeed(&document, None, &Beside::default()), accelerate(&document, &Beside::default())] {
            match imported {
                Ok(imported) => { loaded(&imported.job); }
                Err(problems) => proptest::prop_assert!(!problems.is_empty()),
            }
        }
    }
}
