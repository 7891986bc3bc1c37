//! Tests of loading jobs: defaults, `--set`, locations, files, round trips, and arbitrary input,
//! which must not cause a panic.
use diagnostic::{Code, Diagnostic, Location, Severity, codes::job as codes, render_all};
use jobspec::{
    HangTimeout, JobSource, JobSpec, KEYS, KeyDefault, OptimizerName, ResumeFrom, SaveInterval, ScheduleName,
    SourceMap, StopSignal, TokenizerSpec, WorkersPerHost, load_job,
};
use proptest::prelude::*;

const TRAIN: &str = "train: {data: {files: [a.txt]}}";

/// Loads the job in `text` with the `--set` arguments `set`. Returns the job, the locations of its
/// keys and the warnings. Panics if the job is rejected.
fn load_text(text: &str, set: &[&str]) -> (JobSpec, SourceMap, Vec<Diagnostic>) {
    try_load_text(text, set).unwrap_or_else(|p| panic!("{}", render_all(&p, false)))
}

/// Loads the job in `text` with the `--set` arguments `set`. Returns the job, the locations of its
/// keys and the warnings, or the errors.
fn try_load_text(text: &str, set: &[&str]) -> Result<(JobSpec, SourceMap, Vec<Diagnostic>), Vec<Diagnostic>> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    load_job(JobSource::Text { name: "dir/tiny.yaml".to_owned(), text: text.to_owned() }, &set)
}

#[test]
fn the_shortest_jobs_load_with_defaults() {
    let (command, _, _) = load_text("run: {command: [echo, 1, true, 3e-4, \"\"]}", &[]);
    assert_eq!(
        command.run.command.as_deref(),
        Some(&["echo", "1", "true", "3e-4", ""].map(String::from)[..])
    );
    assert!(command.train.is_none());
    assert_eq!(command.name, "tiny");
    assert!(command.run.workdir.is_absolute());

    let (trained, _, warnings) = load_text(TRAIN, &[]);
    let train = trained.train.expect("train");
    assert!(warnings.is_empty());
    assert_eq!(train.optimizer.lr, 3e-4);
    assert_eq!(train.optimizer.momentum, 0.0);
    assert_eq!(train.schedule.min_lr, 3e-4 / 10.0);
    assert_eq!((train.model.head_dim, train.model.num_key_value_heads), (64, 4));
    assert_eq!(train.model.intermediate_size, 688);
    assert_eq!(train.clip_norm, Some(1.0));
    assert_eq!(trained.checkpoint.dir.to_str(), Some("runs/tiny/checkpoints"));
}

#[test]
fn every_default_in_the_table_of_keys_is_the_default() {
    let plain = load_text("train: {data: {files: [a.txt]}, eval: {files: [b.txt]}}", &[]).0;
    let command = load_text("run: {command: [a]}", &[]).0;
    for key in KEYS.iter() {
        let KeyDefault::Yaml(default) = key.default else { continue };
        let set = format!("{}={default}", key.path);
        match key.path.as_str() {
            "train.eval.files" => {
                let text = "train: {data: {files: [a.txt], held_out: 0.5}, eval: {}}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0);
            }
            path if path.starts_with("train.loss_scale.") => {
                let text = "train: {data: {files: [a.txt]}, precision: fp16}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0, "{set}");
            }
            "train.optimizer.beta2_decay" | "train.optimizer.clip_threshold" => {
                let text = "train: {data: {files: [a.txt]}, optimizer: {name: adafactor}}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0, "{set}");
            }
            "train.master_weights" => {
                let text = "train: {data: {files: [a.txt]}, precision: bf16}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0, "{set}");
            }
            path if path.starts_with("train.lora.") || path.starts_with("train.eval.sample.") => {
                let text =
                    "train: {data: {files: [a.txt]}, lora: {}, eval: {files: [b.txt], sample: {prompt: a}}}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0, "{set}");
            }
            path if path.starts_with("observe.mlflow.") => {
                let text = "train: {data: {files: [a.txt]}}\nobserve: {mlflow: {}}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0, "{set}");
            }
            path if path.starts_with("checkpoint.memory.") => {
                let text = "train: {data: {files: [a.txt]}}\ncheckpoint: {memory: {}}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0, "{set}");
            }
            "cluster.workers_per_gpu" | "cluster.comm_backend" | "cluster.cuda_library_paths" => {
                let text = "cluster: {devices: cuda}\ntrain: {data: {files: [a.txt]}}";
                assert_eq!(load_text(text, &[&set]).0, load_text(text, &[]).0, "{set}");
            }
            path if path.starts_with("run.") || path.starts_with("cluster.") => {
                assert_eq!(load_text("run: {command: [a]}", &[&set]).0, command, "{set}");
            }
            _ => {
                let text = "train: {data: {files: [a.txt]}, eval: {files: [b.txt]}}";
                assert_eq!(load_text(text, &[&set]).0, plain, "{set}");
            }
        }
    }
}

#[test]
fn values_of_every_kind_are_decoded() {
    let text = "
name: my-run_1.0
cluster: {workers_per_host: 3, devices: cpu, master_port: 29500}
run: {grace_period: 1.5m, env: {A: 1, B: 'x y', C: true}, logs: {show: [0, 2], max_size: 2MB}}
train:
  data: {files: [a.txt, 'b/**/*.md'], tokenizer: t/tokenizer.json, held_out: 0.1}
  optimizer: {name: sgd, lr: 1}
  schedule: {name: wsd, decay_steps: 7}
  clip_norm: off
  steps: 0x10
  eval: {}
checkpoint: {every: 10m, stage3_gather_16bit_weights_on_model_save: false}
resume: {from: runs/x/checkpoints/step-10, rng: strict}
";
    let (spec, _, warnings) = load_text(text, &[]);
    assert!(warnings.is_empty());
    assert_eq!(spec.cluster.workers_per_host, WorkersPerHost::Exactly(3));
    assert_eq!(spec.run.grace_period_ms, 90_000);
    assert_eq!(spec.run.env, [("A", "1"), ("B", "x y"), ("C", "true")].map(|(a, b)| (a.into(), b.into())));
    assert_eq!(spec.run.logs.max_size, 2_000_000);
    let train = spec.train.as_ref().expect("train");
    assert_eq!(train.data.tokenizer, TokenizerSpec::File("t/tokenizer.json".into()));
    assert_eq!((train.optimizer.name, train.optimizer.lr), (OptimizerName::Sgd, 1.0));
    assert_eq!(train.optimizer.momentum, 0.9);
    assert_eq!((train.schedule.name, train.schedule.decay_steps), (ScheduleName::Wsd, 7));
    assert_eq!((train.clip_norm, train.steps), (None, 16));
    assert_eq!(spec.checkpoint.every, SaveInterval::Duration(600_000));
    assert!(!spec.checkpoint.gather_16bit_weights_on_model_save);
    assert_eq!(spec.resume.from, ResumeFrom::Path("runs/x/checkpoints/step-10".into()));
}

#[test]
fn later_overrides_replace_earlier_ones_and_the_file() {
    let set = [
        "train.steps=7",
        "train.steps=9",
        "train.optimizer={lr: 1e-2}",
        "train.optimizer.weight_decay=0",
        "train.data.files[1]=b.txt",
        "cluster.workers_per_host=2",
        "train.batch.train_batch_size=8",
        "run.env.A_B=x=y",
        "name=over",
    ];
    let (spec, map, _) = load_text("train: {batch: {global: 16}, data: {files: [a.txt]}}", &set);
    let train = spec.train.as_ref().expect("train");
    assert_eq!(train.steps, 9);
    assert_eq!((train.optimizer.lr, train.optimizer.weight_decay), (1e-2, 0.0));
    assert_eq!(train.data.sources[0].files, ["a.txt", "b.txt"]);
    assert_eq!(spec.cluster.workers_per_host, WorkersPerHost::Exactly(2));
    assert_eq!(train.batch.global, 8);
    assert_eq!(spec.run.env, [("A_B".to_owned(), "x=y".to_owned())]);
    assert_eq!(spec.name, "over");
    let Location::Override { column, text, .. } = map.locate_key("train.steps") else {
        panic!("not from --set")
    };
    assert_eq!((column, text.as_str()), (13, "train.steps=9"));
}

#[test]
fn diagnostics_point_at_their_key() {
    let text = "train:\n  data:\n    files: [a.txt, b.txt]\n  batch: {global: 8}\n";
    let (_, map, _) = load_text(text, &[]);
    let at = |path: &str| {
        let place = map.locate_key(path);
        (place.line(), place.column())
    };
    assert_eq!(at("train.batch.global"), (4, 19));
    assert_eq!(at("train.batch.micro"), (4, 3), "the nearest parent that was written");
    assert_eq!(at("train.data.files[1]"), (3, 20));
    assert_eq!(at("train.data.files[7]"), (3, 5));
    assert_eq!(at("train.data"), (2, 3));
    assert_eq!(at("cluster.hosts"), (0, 0), "the file");
    let error = Diagnostic::error(codes::JOB_INVALID, "no such family").with_subject("train.model.family");
    assert_eq!(map.add_location(error).to_string(), "dir/tiny.yaml:1:1: no such family");
}

#[test]
fn unused_held_out_share_is_a_warning() {
    let (_, _, warnings) = load_text("train: {data: {files: [a], held_out: 0.1}}", &[]);
    assert_eq!(warnings.len(), 1);
    assert_eq!(warnings[0].subject(), Some("train.data.held_out"));
    assert_eq!(warnings[0].severity(), Severity::Warning);
}

#[test]
fn aliases_of_yaml_stand_for_their_value() {
    let text = "train:\n  data: {files: &f [a.txt]}\n  eval: {files: *f}\n";
    let (spec, _, _) = load_text(text, &[]);
    assert_eq!(spec.train.and_then(|t| t.eval).map(|e| e.files), Some(vec!["a.txt".to_owned()]));
}

#[test]
fn files_that_are_not_jobs_are_rejected() {
    let directory = tempfile::tempdir().expect("directory");
    let error = |name: &str, bytes: Option<&[u8]>| {
        let path = directory.path().join(name);
        if let Some(bytes) = bytes {
            std::fs::write(&path, bytes).expect("written");
        }
        let mut errors = load_job(JobSource::File(path), &[]).expect_err("rejected");
        assert_eq!(errors.len(), 1);
        errors.remove(0)
    };
    assert_eq!(error("absent.yaml", None).code(), codes::JOB_FILE_NOT_FOUND);
    assert_eq!(error("", None).code(), codes::JOB_FILE_UNREADABLE, "a directory");
    assert_eq!(error("empty.yaml", Some(b"")).code(), codes::JOB_EMPTY);
    let binary = error("bytes.yaml", Some(b"a: 1\nb: \xff\n"));
    assert_eq!(binary.code(), codes::JOB_NOT_UTF8);
    assert_eq!((binary.field("offset"), binary.field("line")), (Some(&8.into()), Some(&2.into())));
    let nul = error("nul.yaml", Some(b"run: {command: [a]}\n\0garbage"));
    assert_eq!(nul.code(), codes::JOB_CONTROL_CHARACTER);
    let large = directory.path().join("large.yaml");
    // The file is sparse. It is rejected because of its length.
    std::fs::File::create(&large).and_then(|f| f.set_len(100 << 20)).expect("sparse file");
    let large = error("large.yaml", None);
    assert_eq!(large.code(), codes::JOB_TOO_LARGE);
    assert_eq!(large.field("bytes"), Some(&(100u64 << 20).into()));
}

#[test]
fn deprecated_names_are_accepted_with_a_warning() {
    const PROGRAM: &str = "run: {command: [a]}";
    const GPUS: &str = "cluster: {devices: cuda}\ntrain: {data: {files: [a]}}";
    const EXPERTS: &str = "train: {data: {files: [a]}}";
    for (text, old, new) in [
        (GPUS, "cluster.collectives=host", "cluster.comm_backend=host"),
        (GPUS, "cluster.cuda_libs=[x]", "cluster.cuda_library_paths=[x]"),
        (PROGRAM, "cluster.ssh.config=usual", "cluster.ssh.config=default"),
        (PROGRAM, "cluster.ssh.parallel=3", "cluster.ssh.fanout=3"),
        (PROGRAM, "run.bind=cores", "run.cpu_bind=cores"),
        (PROGRAM, "run.grace=5s", "run.grace_period=5s"),
        (PROGRAM, "run.progress=step", "run.progress_pattern=step"),
        (EXPERTS, "train.numerics=fast", "train.deterministic=false"),
        (EXPERTS, "train.numerics=reproducible", "train.deterministic=true"),
        (EXPERTS, "train.experts.parallel=2", "train.experts.expert_parallel_size=2"),
        (PROGRAM, "slurm.notice=9s", "slurm.signal_time=9s"),
    ] {
        let (expected, _, warnings) = load_text(text, &[new]);
        assert_eq!(warnings, [], "{new}");
        let (found, map, warnings) = load_text(text, &[old]);
        assert_eq!(found, expected, "{old}");
        let key = new.split('=').next().expect("a key");
        assert!(map.is_key_given(key), "{old}");
        assert_eq!(warnings.len(), 1, "{old}");
        assert_eq!((warnings[0].code(), warnings[0].subject()), (codes::JOB_KEY_DEPRECATED, Some(key)));
    }
    // The message names the present key, and the help the name that the user wrote.
    let errors = try_load_text(EXPERTS, &["train.numerics=slow"]).expect_err("not a value");
    assert_eq!((errors[0].code(), errors[0].subject()), (codes::JOB_VALUE_TYPE, Some("train.deterministic")));
    assert_eq!(errors[0].help(), ["`train.numerics` is the deprecated name of `train.deterministic`"]);
}

/// Loads the job in `text` with the `--set` arguments `set`, and returns the codes of its errors.
/// Panics if the job is accepted.
fn load_error_codes(text: &str, set: &[&str]) -> Vec<Code> {
    try_load_text(text, set).expect_err("rejected").iter().map(Diagnostic::code).collect()
}

/// Checks that a job with very many mistakes in one long line gets some of the errors, without the
/// text of the line. The search for secrets in the line once per mistake would take hours.
#[test]
fn a_long_line_with_many_mistakes_is_rejected_at_once() {
    let numbers = vec!["-1"; 45_000].join(",");
    let text = format!("run: {{command: [true], logs: {{show: [{numbers}]}}}}");
    let errors = try_load_text(&text, &[]).expect_err("a wrong job");
    assert!((1..=200).contains(&errors.len()), "{}", errors.len());
    let shown = render_all(&errors[..1], false);
    assert!(shown.len() < 1000, "{shown}");
}

#[test]
fn secrets_in_the_job_are_reported_once_and_not_shown() {
    let env =
        "A: 'https://user:hunter2@h', B: 'https://h/x@y', HF_TOKEN: hunter2, C_KEY: 'https://hunter2@h'";
    let (_, _, warnings) = load_text(&format!("run: {{command: [a], env: {{{env}}}}}"), &[]);
    let found: Vec<_> = warnings.iter().map(|warning| (warning.code(), warning.subject())).collect();
    let expected = ["run.env.A", "run.env.HF_TOKEN", "run.env.C_KEY"];
    assert_eq!(found, expected.map(|key| (codes::JOB_SECRET_IN_FILE, Some(key))));
    assert!(!render_all(&warnings, false).contains("hunter2"));
    let wrong = "observe: {mlflow: {uri: 'https://user:hunter2@h'}}\nrun: {env: {D_KEY: [hunter2]}}";
    assert!(!render_all(&try_load_text(wrong, &[]).expect_err("rejected"), false).contains("hunter2"));
}

#[test]
fn secrets_of_several_lines_are_not_shown() {
    for wrong in [
        "run:\n  command: [a]\n  env:\n    HF_TOKEN: |\n      hunter2 \u{1}\n",
        "run:\n  command: [a]\n  env:\n    HF_TOKEN: >\n      a\n        hunter2 \u{1}\n",
        "run:\n  command: [a]\n  env:\n    HF_TOKEN: \"a\n      hunter2 \u{1}\"\n",
        "run:\n  command:\n    - a\n    - --token\n    - hunter2 \u{1}\n",
    ] {
        let errors = try_load_text(wrong, &[]).expect_err("a control character");
        assert_eq!(errors[0].code(), codes::JOB_CONTROL_CHARACTER);
        assert!(errors[0].location().is_some_and(|location| location.line() >= 5), "{errors:?}");
        assert!(!render_all(&errors, false).contains("hunter2"), "{}", render_all(&errors, false));
    }
    let set = ["run.env.HF_TOKEN=a\nhunter2 \u{1}"];
    let errors = try_load_text("run: {command: [a]}", &set).expect_err("a control character");
    assert!(!render_all(&errors, false).contains("hunter2"), "{}", render_all(&errors, false));
    let (_, _, warnings) =
        load_text("run:\n  command: [a]\n  env:\n    DOTENV: |\n      A=b\n      HF_TOKEN=hunter2\n", &[]);
    let found: Vec<_> = warnings.iter().map(|warning| (warning.code(), warning.subject())).collect();
    assert_eq!(found, [(codes::JOB_SECRET_IN_FILE, Some("run.env.DOTENV"))]);
    assert!(!render_all(&warnings, false).contains("hunter2"));
}

#[test]
fn a_key_by_its_present_and_its_deprecated_name_is_a_conflict() {
    let text = "run: {command: [a], grace: 5s, grace_period: 6s}";
    let errors = try_load_text(text, &[]).expect_err("a conflict");
    assert_eq!(errors.len(), 1);
    assert_eq!((errors[0].code(), errors[0].subject()), (codes::JOB_KEYS_CONFLICT, Some("run.grace_period")));
    // A `--set` replaces the value in the file, whichever of the two names each of them uses.
    let (spec, _, warnings) = load_text("run: {command: [a], grace: 5s}", &["run.grace_period=6s"]);
    assert_eq!((spec.run.grace_period_ms, warnings.len()), (6000, 0));
    let (spec, _, warnings) = load_text("run: {command: [a], grace_period: 5s}", &["run.grace=6s"]);
    assert_eq!((spec.run.grace_period_ms, warnings.len()), (6000, 1));
}

#[test]
fn a_program_has_a_stop_signal_and_a_time_until_sigterm() {
    let load = |run: &str| load_text(&format!("run: {{command: [a]{run}}}"), &[]);
    for (run, signal, delay_ms) in [
        ("", StopSignal::Term, 0),
        (", stop_signal: SIGUSR1", StopSignal::Usr1, 60_000),
        (", stop_signal: SIGUSR2, stop_timeout: 1500ms", StopSignal::Usr2, 1500),
        (", stop_signal: SIGINT, stop_timeout: 0s", StopSignal::Int, 0),
        (", stop_signal: SIGHUP, stop_timeout: 2m", StopSignal::Hup, 120_000),
    ] {
        let (spec, _, warnings) = load(run);
        assert_eq!((spec.run.stop_signal, spec.run.sigterm_delay_ms()), (signal, delay_ms), "{run}");
        assert_eq!(warnings, [], "{run}");
    }
    // Jobs that earlier versions have stored lack both keys.
    let mut stored = serde_json::to_value(load(", stop_signal: SIGUSR1").0).expect("a job is JSON");
    let run = stored["run"].as_object_mut().expect("the section `run`");
    assert!(run.remove("stop_signal").is_some() && run.remove("stop_timeout_ms").is_some());
    let spec: JobSpec = serde_json::from_value(stored).expect("a stored job");
    assert_eq!((spec.run.stop_signal, spec.run.sigterm_delay_ms()), (StopSignal::Term, 0));
}

#[test]
fn a_program_that_may_run_until_the_time_limit_of_slurm_is_a_warning() {
    for (run, slurm, warns) in [
        ("stop_signal: SIGUSR1", "slurm: {signal_time: 60s}", true),
        ("stop_signal: SIGUSR1, stop_timeout: 30s", "slurm: {signal_time: 60s}", false),
        ("stop_signal: SIGUSR1", "slurm: {nodes: 2}", false),
        ("stop_signal: SIGUSR1, stop_timeout: 10m", "slurm: {nodes: 2}", true),
        ("stop_signal: SIGUSR1, stop_timeout: 10m", "", false),
        ("grace_period: 10m", "slurm: {nodes: 2}", false),
    ] {
        let (_, _, warnings) = load_text(&format!("run: {{command: [a], {run}}}\n{slurm}"), &[]);
        let found: Vec<_> = warnings.iter().map(|warning| (warning.code(), warning.subject())).collect();
        let expected = (codes::JOB_KEYS_CONFLICT, Some("run.stop_signal"));
        assert_eq!(found, if warns { vec![expected] } else { vec![] }, "{run} {slurm}");
    }
}

#[test]
fn settings_without_effect_on_the_result_are_warnings() {
    let train = "train: {data: {files: [a]}}";
    for (text, set, code) in [
        (train, "train.schedule.warmup_steps=1000", codes::JOB_SCHEDULE_TRUNCATED),
        (train, "train.loss_scale.min_loss_scale=2", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "train.master_weights=false", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "train.zero.offload={optimizer: cpu}", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "cluster.cuda_library_paths=[/x]", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "cluster.comm_backend=host", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "run.visible_devices=one", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "run.local_rank_argument=true", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "run.stop_signal=SIGUSR1", codes::JOB_KEY_HAS_NO_EFFECT),
        (train, "run.stop_timeout=9s", codes::JOB_KEY_HAS_NO_EFFECT),
        ("run: {command: [a]}", "run.stop_timeout=9s", codes::JOB_KEY_HAS_NO_EFFECT),
        ("run: {command: [a]}", "resume.rng=strict", codes::JOB_KEY_HAS_NO_EFFECT),
        ("cluster: {hosts: local}\nrun: {command: [a]}", "run.host_lease=9s", codes::JOB_KEY_HAS_NO_EFFECT),
        (
            "run: {command: [a], on_controller_loss: stop}",
            "run.controller_timeout=1m",
            codes::JOB_KEY_HAS_NO_EFFECT,
        ),
    ] {
        let (_, _, warnings) = load_text(text, &[set]);
        assert_eq!(warnings.iter().map(Diagnostic::code).collect::<Vec<_>>(), [code], "{set}");
    }
    let wsd =
        "train: {data: {files: [a]}, steps: 100, schedule: {name: wsd, warmup_steps: 60, decay_steps: 50}}";
    assert_eq!(load_text(wsd, &[]).2[0].code(), codes::JOB_SCHEDULE_TRUNCATED);
    // A setting that cannot be honoured stays an error.
    assert_eq!(load_error_codes(train, &["cluster.comm_backend=nccl"]), [codes::JOB_KEY_HAS_NO_EFFECT]);
    assert_eq!(
        load_error_codes(train, &["train.precision=fp16", "train.master_weights=false"]),
        [codes::JOB_KEYS_CONFLICT]
    );
}

/// Checks that the job in checkpoint manifests keeps the names of the first checkpoints, and that
/// [`JobSpec::to_key_json`] shows the present names.
#[test]
fn the_stored_names_of_renamed_keys_stay() {
    let set = [
        "cluster.comm_backend=host",
        "cluster.cuda_library_paths=[x]",
        "cluster.ssh.fanout=3",
        "run.cpu_bind=cores",
        "run.grace_period=5s",
        "run.progress_pattern=step",
        "train.deterministic=false",
        "train.experts.expert_parallel_size=2",
        "slurm.signal_time=9s",
    ];
    let (spec, _, _) = load_text("cluster: {devices: cuda}\ntrain: {data: {files: [a]}}", &set);
    let json = serde_json::to_value(&spec).expect("JSON");
    for (pointer, value) in [
        ("/cluster/collectives", serde_json::json!("Host")),
        ("/cluster/cuda_libs", serde_json::json!(["x"])),
        ("/cluster/ssh/parallel", serde_json::json!(3)),
        ("/cluster/ssh/config", serde_json::json!("Usual")),
        ("/run/bind", serde_json::json!("Cores")),
        ("/run/grace_ms", serde_json::json!(5000)),
        ("/run/progress", serde_json::json!("step")),
        ("/train/numerics", serde_json::json!("Fast")),
        ("/train/experts/parallel", serde_json::json!(2)),
        ("/slurm/notice_ms", serde_json::json!(9000)),
    ] {
        assert_eq!(json.pointer(pointer), Some(&value), "{pointer}");
    }
    assert_eq!(serde_json::from_value::<JobSpec>(json).expect("a job"), spec);
    let shown = spec.to_key_json();
    for (pointer, value) in [
        ("/cluster/comm_backend", serde_json::json!("Host")),
        ("/cluster/cuda_library_paths", serde_json::json!(["x"])),
        ("/cluster/ssh/fanout", serde_json::json!(3)),
        ("/cluster/ssh/config", serde_json::json!("Default")),
        ("/run/cpu_bind", serde_json::json!("Cores")),
        ("/run/grace_period_ms", serde_json::json!(5000)),
        ("/run/progress_pattern", serde_json::json!("step")),
        ("/train/deterministic", serde_json::json!(false)),
        ("/train/experts/expert_parallel_size", serde_json::json!(2)),
        ("/slurm/signal_time_ms", serde_json::json!(9000)),
    ] {
        assert_eq!(shown.pointer(pointer), Some(&value), "{pointer}");
    }
}

#[test]
fn a_byte_order_mark_and_crlf_are_accepted() {
    let (spec, map, _) = load_text("\u{feff}name: x\r\nrun:\r\n  command: [a]\r\n", &[]);
    assert_eq!(spec.name, "x");
    assert_eq!((map.locate_key("run.command").line(), map.locate_key("run.command").column()), (3, 12));
}

#[test]
fn adversarial_texts_are_rejected_quickly() {
    let deep_path = format!("{}=1", "a.".repeat(50_000) + "a");
    assert!(try_load_text(TRAIN, &[&deep_path]).is_err());
    for text in [
        "[".repeat(100_000),
        "{a: ".repeat(100_000),
        "- ".repeat(300_000),
        "a: &a [*a]".to_owned(),
        format!("a: &a \"{}\"\nb: [{}]", "x".repeat(900_000), "*a, ".repeat(1000)),
        format!("train: {{{}}}", (0..60_000).map(|i| format!("k{i}: 1, ")).collect::<String>()),
        (0..45_000).map(|i| format!("key_number_{i}: 1\n")).collect(),
    ] {
        let problems = try_load_text(&text, &[]).expect_err("rejected");
        assert!(render_all(&problems, false).len() < 200_000);
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Err(problems) = try_load_text(&text, &[&text]) {
            render_all(&problems, true);
        }
    }

    #[test]
    fn no_yaml_like_text_panics(
        text in r#"([a-z]{1,3}|train|run|data|files|:|: |\n|\n  |\n    |- |\[|\]|\{|\}|,|"|'|&a|\*a|#|\||>|!|%|\?|\t|1|é|---|<<){0,40}"#,
        set in r#"(train|run|\.|\[0\]|=|\[|\]|[a-z]|1|é){0,8}"#,
    ) {
        if let Err(problems) = try_load_text(&text, &[&set]) {
            prop_assert!(!problems.is_empty());
            render_all(&problems, false);
        }
    }

    #[test]
    fn a_cut_job_never_panics(cut in 0usize..400) {
        let text = "name: a\ntrain:\n  data: {files: [\"é.txt\"]}\n  optimizer: {betas: [0.9, 0.95]}\nrun: {env: {A: |\n  x}}\n";
        let cut = (0..=cut.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        if let Err(problems) = try_load_text(&text[..cut], &[]) {
            render_all(&problems, false);
        }
    }
}

#[test]
fn a_hang_timeout_is_automatic_off_or_a_duration() {
    for (run, expected) in [
        ("command: [a]", HangTimeout::Auto),
        ("command: [a], hang_timeout: auto", HangTimeout::Auto),
        ("command: [a], hang_timeout: off", HangTimeout::Off),
        ("command: [a], hang_timeout: 3h", HangTimeout::After(10_800_000)),
    ] {
        let text = format!("run: {{{run}}}");
        let (job, _, _) = load_job(JobSource::Text { name: "a.yaml".to_owned(), text }, &[])
            .unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(job.run.hang_timeout, expected, "{run}");
        let (printed, _, _) =
            load_job(JobSource::Text { name: "b.yaml".to_owned(), text: job.to_yaml() }, &[])
                .unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(printed.run.hang_timeout, expected, "{run}");
    }
}
