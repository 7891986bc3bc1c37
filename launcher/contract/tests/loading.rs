//! Loading jobs that are right: defaults, `--set`, places, files, round trips; and that no input panics.
use contract::{
    JobSpec, Problem, Source, SourceMap,
    job::{Count, Default, Every, KEYS, OptimizerName, ResumeFrom, ScheduleName, Tokenizer},
    preflight::Finding,
    load,
    problem::{Place, Severity, render},
};
use proptest::prelude::*;

const TRAIN: &str = "train: {data: {files: [a.txt]}}";

fn job(text: &str, set: &[&str]) -> (JobSpec, SourceMap, Vec<Problem>) {
    try_job(text, set).unwrap_or_else(|p| panic!("{}", render(&p, Severity::Error, false)))
}

fn try_job(text: &str, set: &[&str]) -> Result<(JobSpec, SourceMap, Vec<Problem>), Vec<Problem>> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    load(Source::Text { name: "dir/tiny.yaml".to_owned(), text: text.to_owned() }, &set)
}

#[test]
fn the_shortest_jobs() {
    let (command, _, _) = job("run: {command: [echo, 1, true, 3e-4, \"\"]}", &[]);
    assert_eq!(
        command.run.command.as_deref(),
        Some(&["echo", "1", "true", "3e-4", ""].map(String::from)[..])
    );
    assert!(command.train.is_none());
    assert_eq!(command.name, "tiny");
    assert!(command.run.workdir.is_absolute());

    let (trained, _, warnings) = job(TRAIN, &[]);
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
fn every_shown_default_is_the_default() {
    let plain = job("train: {data: {files: [a.txt]}, eval: {files: [b.txt]}}", &[]).0;
    let command = job("run: {command: [a]}", &[]).0;
    for key in KEYS {
        let Default::Yaml(default) = key.default else { continue };
        let set = format!("{}={default}", key.path);
        match key.path {
            "train.eval.files" => {
                let text = "train: {data: {files: [a.txt], held_out: 0.5}, eval: {}}";
                assert_eq!(job(text, &[&set]).0, job(text, &[]).0);
            }
            path if path.starts_with("train.loss_scale.") => {
                let text = "train: {data: {files: [a.txt]}, precision: fp16}";
                assert_eq!(job(text, &[&set]).0, job(text, &[]).0, "{set}");
            }
            "train.master_weights" => {
                let text = "train: {data: {files: [a.txt]}, precision: bf16}";
                assert_eq!(job(text, &[&set]).0, job(text, &[]).0, "{set}");
            }
            path if path.starts_with("train.lora.") || path.starts_with("train.eval.sample.") => {
                let text =
                    "train: {data: {files: [a.txt]}, lora: {}, eval: {files: [b.txt], sample: {prompt: a}}}";
                assert_eq!(job(text, &[&set]).0, job(text, &[]).0, "{set}");
            }
            "cluster.workers_per_gpu" | "cluster.collectives" | "cluster.cuda_libs" => {
                let text = "cluster: {devices: cuda}\ntrain: {data: {files: [a.txt]}}";
                assert_eq!(job(text, &[&set]).0, job(text, &[]).0, "{set}");
            }
            path if path.starts_with("run.") || path.starts_with("cluster.") => {
                assert_eq!(job("run: {command: [a]}", &[&set]).0, command, "{set}");
            }
            _ => {
                let text = "train: {data: {files: [a.txt]}, eval: {files: [b.txt]}}";
                assert_eq!(job(text, &[&set]).0, plain, "{set}");
            }
        }
    }
}

#[test]
fn values_of_every_kind() {
    let text = "
name: my-run_1.0
cluster: {workers_per_host: 3, devices: cpu, master_port: 29500}
run: {grace: 1.5m, env: {A: 1, B: 'x y', C: true}, logs: {show: [0, 2], max_size: 2MB}}
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
    let (spec, _, warnings) = job(text, &[]);
    assert!(warnings.is_empty());
    assert_eq!(spec.cluster.workers_per_host, Count::Exactly(3));
    assert_eq!(spec.run.grace_ms, 90_000);
    assert_eq!(spec.run.env, [("A", "1"), ("B", "x y"), ("C", "true")].map(|(a, b)| (a.into(), b.into())));
    assert_eq!(spec.run.logs.max_size, 2_000_000);
    let train = spec.train.as_ref().expect("train");
    assert_eq!(train.data.tokenizer, Tokenizer::File("t/tokenizer.json".into()));
    assert_eq!((train.optimizer.name, train.optimizer.lr), (OptimizerName::Sgd, 1.0));
    assert_eq!(train.optimizer.momentum, 0.9);
    assert_eq!((train.schedule.name, train.schedule.decay_steps), (ScheduleName::Wsd, 7));
    assert_eq!((train.clip_norm, train.steps), (None, 16));
    assert_eq!(spec.checkpoint.every, Every::Duration(600_000));
    assert!(!spec.checkpoint.gather_16bit_weights_on_model_save);
    assert_eq!(spec.resume.from, ResumeFrom::Path("runs/x/checkpoints/step-10".into()));
}

#[test]
fn overrides_win_in_order() {
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
    let (spec, map, _) = job("train: {batch: {global: 16}, data: {files: [a.txt]}}", &set);
    let train = spec.train.as_ref().expect("train");
    assert_eq!(train.steps, 9);
    assert_eq!((train.optimizer.lr, train.optimizer.weight_decay), (1e-2, 0.0));
    assert_eq!(train.data.sources[0].files, ["a.txt", "b.txt"]);
    assert_eq!(spec.cluster.workers_per_host, Count::Exactly(2));
    assert_eq!(train.batch.global, 8);
    assert_eq!(spec.run.env, [("A_B".to_owned(), "x=y".to_owned())]);
    assert_eq!(spec.name, "over");
    let Place::Override { column, text, .. } = map.locate("train.steps") else { panic!("not from --set") };
    assert_eq!((column, text.as_str()), (13, "train.steps=9"));
}

#[test]
fn findings_are_located() {
    let text = "train:\n  data:\n    files: [a.txt, b.txt]\n  batch: {global: 8}\n";
    let (_, map, _) = job(text, &[]);
    let at = |path: &str| {
        let place = map.locate(path);
        (place.line(), place.column())
    };
    assert_eq!(at("train.batch.global"), (4, 19));
    assert_eq!(at("train.batch.micro"), (4, 3), "the nearest parent that was written");
    assert_eq!(at("train.data.files[1]"), (3, 20));
    assert_eq!(at("train.data.files[7]"), (3, 5));
    assert_eq!(at("train.data"), (2, 3));
    assert_eq!(at("cluster.hosts"), (0, 0), "the file");
    let finding = Finding { path: "train.model.family".into(), message: "no such family".into(), hint: None };
    assert_eq!(map.problem(&finding).to_string(), "dir/tiny.yaml:1:1: no such family");
}

#[test]
fn unused_held_out_share_is_a_warning() {
    let (_, _, warnings) = job("train: {data: {files: [a], held_out: 0.1}}", &[]);
    assert_eq!(warnings.len(), 1);
    assert_eq!(warnings[0].path, "train.data.held_out");
}

#[test]
fn aliases_of_yaml_stand_for_their_value() {
    let text = "train:\n  data: {files: &f [a.txt]}\n  eval: {files: *f}\n";
    let (spec, _, _) = job(text, &[]);
    assert_eq!(spec.train.and_then(|t| t.eval).map(|e| e.files), Some(vec!["a.txt".to_owned()]));
}

#[test]
fn files_that_are_no_jobs() {
    let directory = tempfile::tempdir().expect("directory");
    let message = |name: &str, bytes: Option<&[u8]>| {
        let path = directory.path().join(name);
        if let Some(bytes) = bytes {
            std::fs::write(&path, bytes).expect("written");
        }
        let problems = load(Source::File(path), &[]).expect_err("refused");
        assert_eq!(problems.len(), 1);
        problems[0].message.clone()
    };
    assert_eq!(message("absent.yaml", None), "there is no such job file");
    assert_eq!(message("", None), "this is a directory, not a job file");
    assert_eq!(message("empty.yaml", Some(b"")), "the job is empty");
    assert!(message("bytes.yaml", Some(b"a: 1\nb: \xff\n")).ends_with("byte 0xff at offset 8, line 2"));
    assert!(message("nul.yaml", Some(b"run: {command: [a]}\n\0garbage")).contains("U+0000"));
    let large = directory.path().join("large.yaml");
    // Sparse: its size alone refuses it.
    std::fs::File::create(&large).and_then(|f| f.set_len(100 << 20)).expect("sparse file");
    assert_eq!(
        message("large.yaml", None),
        "the job file is too large: 100.0 MiB or more, at most 1 MiB is read"
    );
}

#[test]
fn a_byte_order_mark_and_crlf_are_fine() {
    let (spec, map, _) = job("\u{feff}name: x\r\nrun:\r\n  command: [a]\r\n", &[]);
    assert_eq!(spec.name, "x");
    assert_eq!((map.locate("run.command").line(), map.locate("run.command").column()), (3, 12));
}

#[test]
fn a_job_round_trips() {
    let text = "train: {data: {files: [a]}, eval: {files: [b]}, clip_norm: off, optimizer: {lr: 0.1}}";
    for spec in [job(text, &[]).0, job("run: {command: [a], env: {A: b}}", &[]).0] {
        let packed = rmp_serde::to_vec_named(&spec).expect("packs");
        assert_eq!(rmp_serde::from_slice::<JobSpec>(&packed).expect("unpacks"), spec);
        let json = serde_json::to_string(&spec).expect("prints");
        assert_eq!(serde_json::from_str::<JobSpec>(&json).expect("parses"), spec);
    }
}

#[test]
fn hostile_texts_end_quickly() {
    let deep_path = format!("{}=1", "a.".repeat(50_000) + "a");
    assert!(try_job(TRAIN, &[&deep_path]).is_err());
    for text in [
        "[".repeat(100_000),
        "{a: ".repeat(100_000),
        "- ".repeat(300_000),
        "a: &a [*a]".to_owned(),
        format!("a: &a \"{}\"\nb: [{}]", "x".repeat(900_000), "*a, ".repeat(1000)),
        format!("train: {{{}}}", (0..60_000).map(|i| format!("k{i}: 1, ")).collect::<String>()),
        (0..45_000).map(|i| format!("key_number_{i}: 1\n")).collect(),
    ] {
        let problems = try_job(&text, &[]).expect_err("refused");
        assert!(render(&problems, Severity::Error, false).len() < 200_000);
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Err(problems) = try_job(&text, &[&text]) {
            render(&problems, Severity::Error, true);
        }
    }

    #[test]
    fn no_yaml_like_text_panics(
        text in r#"([a-z]{1,3}|train|run|data|files|:|: |\n|\n  |\n    |- |\[|\]|\{|\}|,|"|'|&a|\*a|#|\||>|!|%|\?|\t|1|é|---|<<){0,40}"#,
        set in r#"(train|run|\.|\[0\]|=|\[|\]|[a-z]|1|é){0,8}"#,
    ) {
        if let Err(problems) = try_job(&text, &[&set]) {
            prop_assert!(!problems.is_empty());
            render(&problems, Severity::Error, false);
        }
    }

    #[test]
    fn a_cut_job_never_panics(cut in 0usize..400) {
        let text = "name: a\ntrain:\n  data: {files: [\"é.txt\"]}\n  optimizer: {betas: [0.9, 0.95]}\nrun: {env: {A: |\n  x}}\n";
        let cut = (0..=cut.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        if let Err(problems) = try_job(&text[..cut], &[]) {
            render(&problems, Severity::Error, false);
        }
    }
}
