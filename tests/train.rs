//! The main job, end to end, with real processes: same losses however it is cut up, stopped and resumed.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    io::{BufRead, BufReader, Read},
};
use support::{FinishedRun, JobDirectory, TINY, files_below};

const WORKERS: [u32; 5] = [1, 2, 3, 4, 8];

fn workers(n: u32) -> String {
    format!("cluster.workers_per_host={n}")
}

#[test]
fn twenty_losses_are_bit_equal_for_every_number_of_workers_and_stage() {
    let place = JobDirectory::new();
    let never = ["resume.from=never", "checkpoint.every=never"];
    let expected = place.run(&never).succeeded().losses();
    assert_eq!(expected.len(), 20);
    for n in WORKERS {
        for stage in 0..=3 {
            for recompute in ["none", "block"] {
                let (w, s, r) =
                    (workers(n), format!("train.zero.stage={stage}"), format!("train.recompute={recompute}"));
                let got = place.run(&[never[0], never[1], &w, &s, &r]).succeeded();
                assert_eq!(got.losses(), expected, "{n} workers, stage {stage}, recompute {recompute}");
            }
        }
    }
}

#[test]
fn stopped_at_step_10_on_n_resumed_on_m() {
    let place = JobDirectory::new();
    let whole = place.run(&["resume.from=never", "checkpoint.every=never"]).succeeded().losses();
    for n in WORKERS {
        place.delete_checkpoints();
        let w = workers(n);
        let async_ = format!("checkpoint.async={}", n % 2 == 0);
        // The schedule knows the whole run; the run is cut off at a checkpoint.
        place
            .run(&[&w, &async_, "resume.from=never", "checkpoint.every=10", "checkpoint.keep=0"])
            .succeeded();
        for m in WORKERS {
            let (w, stage) = (workers(m), format!("train.zero.stage={}", (n + m) % 4));
            let from = "resume.from=runs/tiny/checkpoints/step-00000010";
            let got = place.run(&[&w, &stage, from, "checkpoint.dir=elsewhere"]).succeeded();
            assert_eq!(got.losses(), whole[10..], "{n} workers to {m}, {stage}");
            let resume = got.named("resume");
            assert_eq!((resume[0]["step"].as_u64(), resume[0]["world"].as_u64()), (Some(10), Some(n.into())));
        }
    }
}

/// Reads events until one of `kind` has come at or after `step`.
fn wait_for(reader: &mut impl BufRead, kind: &str, step: u64) -> String {
    let mut seen = String::new();
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).expect("readable") > 0, "no {kind} event in:\n{seen}");
        let event: serde_json::Value = serde_json::from_str(&line).expect("an event");
        seen.push_str(&line);
        if event["event"] == kind && event["step"].as_u64().unwrap_or(0) >= step {
            return seen;
        }
    }
}

#[test]
fn a_signal_saves_at_the_step_boundary_and_the_run_goes_on_later() {
    let place = JobDirectory::new();
    let long = "train.steps=400";
    let whole = place.run(&[long, "resume.from=never", "checkpoint.every=never"]).succeeded().losses();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        place.delete_checkpoints();
        let mut child = place.start(&[long, "checkpoint.every=never"]);
        let mut reader = BufReader::new(child.stdout.take().expect("piped"));
        let mut out = wait_for(&mut reader, "step", 3);
        kill(Pid::from_raw(child.id() as i32), signal).expect("it runs");
        reader.read_to_string(&mut out).expect("readable");
        let status = child.wait().expect("it ends");
        assert_eq!(status.code(), Some(code), "{out}");
        let first = FinishedRun::from_output(&std::process::Output {
            status,
            stdout: out.into_bytes(),
            stderr: Vec::new(),
        });
        let done = first.losses().len();
        assert!(done < 400, "the stop came too late to show anything");
        assert_eq!(first.named("checkpoint").last().expect("saved")["step"], done);
        assert_eq!(first.losses(), whole[..done]);
        let rest = place.run(&[long, "checkpoint.every=never", &workers(3)]).succeeded();
        assert_eq!(rest.losses(), whole[done..]);
    }
}

#[test]
fn sigusr1_saves_and_the_run_goes_on() {
    let place = JobDirectory::new();
    let long = "train.steps=300";
    let whole = place.run(&[long, "resume.from=never", "checkpoint.every=never"]).succeeded().losses();
    place.delete_checkpoints();
    let mut child = place.start(&[long, "checkpoint.every=never"]);
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    let mut out = wait_for(&mut reader, "step", 3);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGUSR1).expect("it runs");
    reader.read_to_string(&mut out).expect("readable");
    let status = child.wait().expect("it ends");
    let ran = FinishedRun::from_output(&std::process::Output {
        status,
        stdout: out.into_bytes(),
        stderr: Vec::new(),
    })
    .succeeded();
    assert_eq!(ran.losses(), whole);
    let saved: Vec<u64> = ran.named("checkpoint").iter().map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(saved.len(), 2, "one when asked, one at the end: {saved:?}");
    assert!(saved[0] < 300 && saved[1] == 300, "{saved:?}");
}

#[test]
fn json_lines_and_a_tokenizer_file_with_held_out_documents() {
    let place = JobDirectory::new();
    let lines = (0..300).map(|i| {
        format!("{{\"id\": {i}, \"body\": \"line {i} of \\u00e9t\\u00e9 and snow {}\"}}\n", i * 7 % 13)
    });
    fs::write(place.path("data.jsonl"), lines.collect::<String>()).unwrap();
    let words = ["line", "of", "and", "snow", "été", "<|endoftext|>", "?"];
    let vocabulary: serde_json::Map<_, _> =
        words.iter().enumerate().map(|(i, w)| (w.to_string(), i.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null, "decoder": null,
        "added_tokens": [{"id": 5, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    });
    fs::write(place.path("tokenizer.json"), tokenizer.to_string()).unwrap();
    let set = [
        "train.data={files: [data.jsonl], field: body, tokenizer: tokenizer.json, seq_len: 24, held_out: 0.2}",
        "train.eval={every: 10, samples: 8}",
        "train.steps=30",
        "checkpoint.gather_16bit_weights_on_model_save=true",
    ];
    let ran = place.run(&set).succeeded();
    let loss = |kind: &str, i: usize| ran.named(kind)[i]["loss"].as_f64().unwrap();
    assert!(
        (loss("step", 0) - (words.len() as f64).ln()).abs() < 0.2,
        "seven words are guessed at first: {}",
        loss("step", 0)
    );
    assert!(loss("eval", 2) < loss("eval", 0), "the held-out loss falls too");
    let written = fs::read(place.checkpoints().join("weights/tokenizer.json")).unwrap();
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&written).unwrap(), tokenizer);
    let wrong = place.run(&["train.data={files: [data.jsonl], field: text, seq_len: 24}"]);
    assert_eq!(wrong.code, 2, "{}", wrong.stderr);
    assert!(wrong.stderr.contains("data.jsonl:1") && wrong.stderr.contains("text"), "{}", wrong.stderr);
}

#[test]
fn a_full_disk_is_found_out_before_the_first_step() {
    let place = JobDirectory::new();
    let mount = place.path("small");
    fs::create_dir(&mount).unwrap();
    let flags = nix::mount::MsFlags::empty();
    if nix::mount::mount(Some("none"), &mount, Some("tmpfs"), flags, Some("size=64k")).is_err() {
        return skipped("a_full_disk_is_found_out_before_the_first_step", "mounting needs root");
    }
    let ran = place.run(&["checkpoint.dir=small"]);
    nix::mount::umount(&mount).unwrap();
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.losses().is_empty());
    let cause = ran.failure_message();
    assert!(cause.contains("small") && cause.contains("free"), "{cause}");
}

/// Says that a test was skipped; with `LAUNCH_TEST_REQUIRE=all` that is a failure.
fn skipped(test: &str, why: &str) {
    assert!(
        std::env::var_os("LAUNCH_TEST_REQUIRE").is_none_or(|v| v != "all"),
        "{test} can't be skipped: {why}"
    );
    if let Some(list) = std::env::var_os("LAUNCH_TEST_SKIPS") {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(list).unwrap();
        std::io::Write::write_all(&mut file, format!("{test}: {why}\n").as_bytes()).unwrap();
    }
    eprintln!("skipped {test}: {why}");
}

#[test]
fn a_finished_run_has_nothing_left_to_do_and_can_be_made_longer() {
    let place = JobDirectory::new();
    place.run(&["checkpoint.gather_16bit_weights_on_model_save=true"]).succeeded();
    let weights = place.checkpoints().join("weights");
    assert!(files_below(&weights).contains(&"model.safetensors".into()));
    let again = place.run(&["checkpoint.gather_16bit_weights_on_model_save=true"]).succeeded();
    assert!(again.losses().is_empty());
    let longer = place.run(&["train.steps=23"]).succeeded();
    assert_eq!(longer.losses().iter().map(|l| l.0).collect::<Vec<_>>(), [21, 22, 23]);
}

#[test]
fn keep_removes_old_checkpoints_and_leaves_nothing_else() {
    let place = JobDirectory::new();
    place
        .run(&[
            "checkpoint.every=2",
            "checkpoint.keep=2",
            "checkpoint.async=true",
            "checkpoint.gather_16bit_weights_on_model_save=false",
        ])
        .succeeded();
    let mut names: Vec<String> = fs::read_dir(place.checkpoints())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["latest", "step-00000018", "step-00000020"]);
    let verified = place.launch(&["ckpt", "verify", "runs/tiny/checkpoints"]);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
}

#[test]
fn a_loss_that_is_not_a_number_stops_the_run_and_spoils_nothing() {
    let place = JobDirectory::new();
    let hot = [
        "train.optimizer.lr=1e30",
        "train.schedule.warmup_steps=0",
        "train.schedule.name=constant",
        "train.clip_norm=off",
        "checkpoint.every=1",
    ];
    let ran = place.run(&hot);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let cause = ran.failure_message();
    assert!(cause.contains("step") && (cause.contains("NaN") || cause.contains("inf")), "{cause}");
    assert!(cause.contains("step-0000"), "names the last good checkpoint: {cause}");
    assert!(place.launch(&["ckpt", "verify", "runs/tiny/checkpoints"]).status.success());
}

#[test]
fn eight_workers_on_few_cores_work_with_a_warning() {
    let place = JobDirectory::new();
    let cores = std::thread::available_parallelism().unwrap().get();
    let many = cores as u32 + 3;
    let ran = place.run(&[&workers(many), "train.steps=2"]).succeeded();
    let said = format!("{} {:?}", ran.stderr, ran.named("notice"));
    assert!(
        said.contains(&format!("{many} workers")) && said.contains("core")
            || said.contains("cpu")
            || said.contains("CPU"),
        "{said}"
    );
}

#[test]
fn wrong_inputs_have_their_own_errors() {
    let place = JobDirectory::new();
    let cases: [(&[&str], i32, &[&str]); 7] = [
        (&["train.data.files=[nothing/*.txt]"], 2, &["nothing/*.txt"]),
        (&["train.data.seq_len=1000000"], 2, &["1000000", "tokens"]),
        (&["train.batch.global=7", "train.batch.micro=2"], 2, &["batch", "7", "2"]),
        (&["train.model.vocab_size=100"], 2, &["vocab_size", "257"]),
        (&["train.optimzer.lr=1"], 2, &["optimzer", "optimizer"]),
        (&["resume.from=nowhere"], 4, &["nowhere"]),
        (&["checkpoint.dir=/proc/nothing"], 3, &["/proc/nothing"]),
    ];
    for (set, code, words) in cases {
        let ran = place.run(set);
        assert_eq!(ran.code, code, "{set:?}: {}", ran.stderr);
        for word in words {
            assert!(ran.stderr.contains(word), "{set:?} should say {word}:\n{}", ran.stderr);
        }
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_by_its_first_tensor() {
    let place = JobDirectory::new();
    place.run(&["train.steps=2"]).succeeded();
    let ran = place.run(&["train.steps=4", "train.model.intermediate_size=64"]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(
        ran.failure_message().contains("model.layers.0.mlp.gate_proj.weight"),
        "{}",
        ran.failure_message()
    );
    assert!(TINY.contains("intermediate_size: 57"));
}

#[test]
fn a_damaged_newest_checkpoint_is_passed_over_and_said_so() {
    let place = JobDirectory::new();
    let whole = place.run(&["resume.from=never"]).succeeded().losses();
    let shard = place.checkpoints().join("step-00000020/shard-00000-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let half = bytes.len() / 2;
    for cut in [bytes.len(), half] {
        bytes.truncate(cut);
        bytes[half - 1] ^= 4;
        fs::write(&shard, &bytes).unwrap();
        let ran = place
            .run(&["checkpoint.dir=runs/tiny/checkpoints", "train.steps=20", "checkpoint.every=never"])
            .succeeded();
        assert_eq!(ran.losses(), whole[10..]);
        let notices = format!("{:?}", ran.named("notice"));
        assert!(
            notices.contains("step-00000020") && notices.contains("skipped damaged checkpoint"),
            "{notices}"
        );
    }
}
