//! Tests built-in training, end to end, with real processes. The losses are bit-equal for every
//! number of workers, and after a stop and a resume.
use crate::support::{
    FinishedRun, JobDirectory, TINY_JOB,
    environment::{LAUNCH_EXECUTABLE, isolated_command},
    list_files_below, parse_rejection, report_skip,
    token_cache_locks::TokenCacheLocks,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    thread,
    time::{Duration, Instant},
};

/// The tested numbers of workers.
const WORKER_COUNTS: [u32; 5] = [1, 2, 3, 4, 8];

/// Returns the setting (`path=value`) that runs a job with `n` workers per host.
fn format_workers_setting(n: u32) -> String {
    format!("cluster.workers_per_host={n}")
}

#[test]
fn twenty_losses_are_bit_equal_for_every_number_of_workers_and_stage() {
    let job_dir = JobDirectory::new();
    let never = ["resume.from=never", "checkpoint.every=never"];
    let expected = job_dir.run(&never).expect_success().collect_losses();
    assert_eq!(expected.len(), 20);
    for n in WORKER_COUNTS {
        for stage in 0..=3 {
            for recompute in ["none", "block"] {
                let (w, s, r) = (
                    format_workers_setting(n),
                    format!("train.zero.stage={stage}"),
                    format!("train.recompute={recompute}"),
                );
                let got = job_dir.run(&[never[0], never[1], &w, &s, &r]).expect_success();
                assert_eq!(
                    got.collect_losses(),
                    expected,
                    "{n} workers, stage {stage}, recompute {recompute}"
                );
            }
        }
    }
}

#[test]
fn a_run_saved_by_n_workers_resumes_bit_equal_on_m_workers() {
    let job_dir = JobDirectory::new();
    let whole =
        job_dir.run(&["resume.from=never", "checkpoint.every=never"]).expect_success().collect_losses();
    for n in WORKER_COUNTS {
        job_dir.delete_checkpoints();
        let w = format_workers_setting(n);
        let asynchronous = format!("checkpoint.async={}", n % 2 == 0);
        // both runs have the schedule of all 20 steps; the second one starts at the checkpoint of
        // step 10
        job_dir
            .run(&[&w, &asynchronous, "resume.from=never", "checkpoint.every=10", "checkpoint.keep=0"])
            .expect_success();
        for m in WORKER_COUNTS {
            let (w, stage) = (format_workers_setting(m), format!("train.zero.stage={}", (n + m) % 4));
            let from = "resume.from=runs/tiny/checkpoints/step-00000010";
            let got = job_dir.run(&[&w, &stage, from, "checkpoint.dir=elsewhere"]).expect_success();
            assert_eq!(got.collect_losses(), whole[10..], "{n} workers to {m}, {stage}");
            let resume = got.events_named("resume");
            assert_eq!((resume[0]["step"].as_u64(), resume[0]["world"].as_u64()), (Some(10), Some(n.into())));
        }
    }
}

/// Reads lines up to the first event of `kind` at `step` or a later step. Returns all lines that
/// were read.
fn read_events_until(reader: &mut impl BufRead, kind: &str, step: u64) -> String {
    let mut lines = String::new();
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).expect("readable") > 0, "no {kind} event in:\n{lines}");
        let event: serde_json::Value = serde_json::from_str(&line).expect("an event");
        lines.push_str(&line);
        if event["event"] == kind && event["step"].as_u64().unwrap_or(0) >= step {
            return lines;
        }
    }
}

#[test]
fn a_signal_saves_at_the_next_step_and_the_same_command_resumes_there() {
    let job_dir = JobDirectory::new();
    let long = "train.steps=400";
    let whole =
        job_dir.run(&[long, "resume.from=never", "checkpoint.every=never"]).expect_success().collect_losses();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        job_dir.delete_checkpoints();
        let mut child = job_dir.start(&[long, "checkpoint.every=never"]);
        let mut reader = BufReader::new(child.stdout.take().expect("piped"));
        let mut out = read_events_until(&mut reader, "step", 3);
        kill(Pid::from_raw(child.id() as i32), signal).expect("the controller is alive");
        reader.read_to_string(&mut out).expect("readable");
        let status = child.wait().expect("an exit status");
        assert_eq!(status.code(), Some(code), "{out}");
        let first = FinishedRun::from_output(&std::process::Output {
            status,
            stdout: out.into_bytes(),
            stderr: Vec::new(),
        });
        let done = first.collect_losses().len();
        assert!(done < 400, "the run ended before the signal");
        assert_eq!(first.events_named("checkpoint").last().expect("saved")["step"], done);
        assert_eq!(first.collect_losses(), whole[..done]);
        let rest =
            job_dir.run(&[long, "checkpoint.every=never", &format_workers_setting(3)]).expect_success();
        assert_eq!(rest.collect_losses(), whole[done..]);
    }
}

#[test]
fn the_printed_command_resumes_a_run_that_began_without_a_checkpoint() {
    let job_dir = JobDirectory::new();
    let mut child = job_dir.start(&["train.steps=400", "resume.from=never", "checkpoint.every=never"]);
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    read_events_until(&mut reader, "step", 3);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).expect("the controller is alive");
    reader.read_to_string(&mut String::new()).expect("readable");
    let output = child.wait_with_output().expect("an exit status");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let command = stderr.lines().find_map(|line| line.trim_start().strip_prefix("resume with"));
    let words: Vec<&str> = command.expect(&stderr).split_whitespace().skip(1).collect();
    let from: Vec<&&str> = words.iter().filter(|word| word.starts_with("resume.from=")).collect();
    assert_eq!(from, [&"resume.from=auto"], "{words:?}");
    let resumed = FinishedRun::from_output(&job_dir.run_launch(&words)).expect_success();
    assert_eq!(resumed.events_named("resume").len(), 1);
}

#[test]
fn a_write_beyond_the_limit_of_file_sizes_is_reported() {
    let job_dir = JobDirectory::new();
    // The shard of the only rank has more than 4 MiB, and the other files have less.
    let set = ["cluster.workers_per_host=1", "train.steps=2", "train.model.hidden_size=252"];
    let set = set.into_iter().chain(["train.model.intermediate_size=512"]);
    let arguments: Vec<&str> =
        ["job.yaml", "--json"].into_iter().chain(set.flat_map(|set| ["--set", set])).collect();
    let run_limited = |arguments: &[&str], kib: u32| {
        let mut shell = isolated_command("bash", &job_dir.path(""));
        let script = format!("ulimit -f {kib} && exec \"$0\" \"$@\"");
        shell.args(["-c", &script, LAUNCH_EXECUTABLE]).args(arguments).output().expect("launch starts")
    };
    let ran = FinishedRun::from_output(&run_limited(&arguments, 4096));
    assert_eq!((ran.code, ran.failure_code()), (3, "checkpoint-limit-exceeded"), "{}", ran.stderr);
    let fields = &ran.failure_diagnostics()[0]["fields"];
    assert_eq!(fields["limit_bytes"], 4 << 20, "{fields}");
    assert!(fields["path"].as_str().is_some_and(|path| path.contains("checkpoints")), "{fields}");

    // The commands for checkpoints report the limit, too.
    FinishedRun::from_output(&job_dir.run_launch(&arguments)).expect_success();
    let checkpoint = job_dir.checkpoint_dir().join("step-00000002");
    let gather = ["--json", "ckpt", "gather", checkpoint.to_str().expect("UTF-8"), "out"];
    let (code, error) = parse_rejection(&run_limited(&gather, 1024));
    assert_eq!((code, &error["code"]), (1, &"checkpoint-limit-exceeded".into()), "{error}");
    assert_eq!(error["fields"]["limit_bytes"], 1 << 20, "{error}");
}

/// Stops a run whose rank 0 waits for a token cache, while the other ranks wait for rank 0.
#[test]
fn a_stop_before_the_first_step_ends_the_run_at_once() {
    let job_dir = JobDirectory::new();
    let set = ["train.steps=2", "checkpoint.every=never", "run.logs.dir=logs"];
    job_dir.run(&set).expect_success();
    job_dir.delete_checkpoints();
    let locks = TokenCacheLocks::lock_all(&job_dir.path(".launch-cache"));
    for (workers, signal, code) in [(1, Signal::SIGINT, 130), (3, Signal::SIGTERM, 143)] {
        _ = fs::remove_dir_all(job_dir.path("logs"));
        let child = job_dir.start(&[&set[..], &[&format_workers_setting(workers)]].concat());
        let read_log = || fs::read_to_string(job_dir.path("logs/logs/rank-0.log")).unwrap_or_default();
        while !read_log().starts_with("rank 0 of") {
            thread::sleep(Duration::from_millis(10));
        }
        let began = Instant::now();
        kill(Pid::from_raw(child.id() as i32), signal).expect("the controller is alive");
        let ran = FinishedRun::from_output(&child.wait_with_output().expect("an exit status"));
        assert_eq!((ran.code, ran.events_named("failure").len()), (code, 0), "{}", ran.stderr);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        let notices = ran.notice_messages();
        assert!(notices.iter().any(|notice| notice.contains("before the first step")), "{notices:?}");
        assert!(!list_files_below(&job_dir.checkpoint_dir()).iter().any(|file| file.contains("step-")));
    }
    drop(locks);
    assert_eq!(job_dir.run(&set).expect_success().collect_losses().len(), 2);
}

#[test]
fn sigusr1_saves_and_the_run_continues() {
    let job_dir = JobDirectory::new();
    let long = "train.steps=300";
    let whole =
        job_dir.run(&[long, "resume.from=never", "checkpoint.every=never"]).expect_success().collect_losses();
    job_dir.delete_checkpoints();
    let mut child = job_dir.start(&[long, "checkpoint.every=never"]);
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    let mut out = read_events_until(&mut reader, "step", 3);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGUSR1).expect("the controller is alive");
    reader.read_to_string(&mut out).expect("readable");
    let status = child.wait().expect("an exit status");
    let ran = FinishedRun::from_output(&std::process::Output {
        status,
        stdout: out.into_bytes(),
        stderr: Vec::new(),
    })
    .expect_success();
    assert_eq!(ran.collect_losses(), whole);
    let saved: Vec<u64> =
        ran.events_named("checkpoint").iter().map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(saved.len(), 2, "one on SIGUSR1, one at the end: {saved:?}");
    assert!(saved[0] < 300 && saved[1] == 300, "{saved:?}");
}

#[test]
fn json_lines_train_with_a_tokenizer_file_and_held_out_documents() {
    let job_dir = JobDirectory::new();
    let lines = (0..300).map(|i| {
        format!("{{\"id\": {i}, \"body\": \"line {i} of \\u00e9t\\u00e9 and snow {}\"}}\n", i * 7 % 13)
    });
    fs::write(job_dir.path("data.jsonl"), lines.collect::<String>()).unwrap();
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
    fs::write(job_dir.path("tokenizer.json"), tokenizer.to_string()).unwrap();
    let set = [
        "train.data={files: [data.jsonl], field: body, tokenizer: tokenizer.json, seq_len: 24, held_out: 0.2}",
        "train.eval={every: 10, samples: 8}",
        "train.steps=30",
        "checkpoint.gather_16bit_weights_on_model_save=true",
    ];
    let ran = job_dir.run(&set).expect_success();
    let loss = |kind: &str, i: usize| ran.events_named(kind)[i]["loss"].as_f64().unwrap();
    assert!(
        (loss("step", 0) - (words.len() as f64).ln()).abs() < 0.2,
        "the first loss is that of a uniform guess among seven words: {}",
        loss("step", 0)
    );
    assert!(loss("eval", 2) < loss("eval", 0), "the held-out loss decreases too");
    let written = fs::read(job_dir.checkpoint_dir().join("weights/tokenizer.json")).unwrap();
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&written).unwrap(), tokenizer);
    let wrong = job_dir.run(&["train.data={files: [data.jsonl], field: text, seq_len: 24}"]);
    assert_eq!(wrong.code, 2, "{}", wrong.stderr);
    job_dir.assert_snapshot("json_lines_without_the_field", &wrong.stderr);
}

#[test]
fn a_full_disk_is_reported_before_the_first_step() {
    let job_dir = JobDirectory::new();
    let mount = job_dir.path("small");
    fs::create_dir(&mount).unwrap();
    let flags = nix::mount::MsFlags::empty();
    if nix::mount::mount(Some("none"), &mount, Some("tmpfs"), flags, Some("size=64k")).is_err() {
        return report_skip("a_full_disk_is_reported_before_the_first_step", "mounting requires root");
    }
    let ran = job_dir.run(&["checkpoint.dir=small"]);
    nix::mount::umount(&mount).unwrap();
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.collect_losses().is_empty());
    assert_eq!(ran.failure_code(), "checkpoint-space-insufficient", "{}", ran.expect_failure());
    job_dir.assert_snapshot("full_disk", ran.failure_message());
}

#[test]
fn a_finished_run_trains_no_step_until_train_steps_is_raised() {
    let job_dir = JobDirectory::new();
    job_dir.run(&["checkpoint.gather_16bit_weights_on_model_save=true"]).expect_success();
    let weights = job_dir.checkpoint_dir().join("weights");
    assert!(list_files_below(&weights).contains(&"model.safetensors".into()));
    let again = job_dir.run(&["checkpoint.gather_16bit_weights_on_model_save=true"]).expect_success();
    assert!(again.collect_losses().is_empty());
    let longer = job_dir.run(&["train.steps=23"]).expect_success();
    assert_eq!(longer.collect_losses().iter().map(|l| l.0).collect::<Vec<_>>(), [21, 22, 23]);
}

#[test]
fn only_the_checkpoints_that_keep_asks_for_remain() {
    let job_dir = JobDirectory::new();
    job_dir
        .run(&[
            "checkpoint.every=2",
            "checkpoint.keep=2",
            "checkpoint.async=true",
            "checkpoint.gather_16bit_weights_on_model_save=false",
        ])
        .expect_success();
    let mut names: Vec<String> = fs::read_dir(job_dir.checkpoint_dir())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["latest", "step-00000018", "step-00000020"]);
    let verified = job_dir.run_launch(&["ckpt", "verify", "runs/tiny/checkpoints"]);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_keeps_valid_checkpoints() {
    let job_dir = JobDirectory::new();
    let divergent = [
        "train.optimizer.lr=1e30",
        "train.schedule.warmup_steps=0",
        "train.schedule.name=constant",
        "train.clip_norm=off",
        "checkpoint.every=1",
    ];
    let ran = job_dir.run(&divergent);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert_eq!(ran.failure_reason_kind(), "worker_error");
    assert!(
        ["loss-not-finite", "gradient-not-finite"].contains(&ran.failure_code()),
        "{}",
        ran.expect_failure()
    );
    let fields = &ran.failure_diagnostics()[0]["fields"];
    let last_checkpoint = ran.events_named("checkpoint").last().expect("a checkpoint")["path"].clone();
    assert_eq!(fields["checkpoint"], last_checkpoint, "the last good checkpoint: {}", ran.expect_failure());
    assert!(job_dir.run_launch(&["ckpt", "verify", "runs/tiny/checkpoints"]).status.success());
}

#[test]
fn more_workers_than_cores_run_with_a_warning() {
    let job_dir = JobDirectory::new();
    let cores = std::thread::available_parallelism().unwrap().get();
    let many = cores as u32 + 3;
    let ran = job_dir.run(&[&format_workers_setting(many), "train.steps=2"]).expect_success();
    let notices = ran.notice_messages().join("\n").replace(&format!("{many}"), "[N]");
    job_dir.assert_snapshot("more_workers_than_cores", &notices.replace(&format!("{cores} CPU"), "[N] CPU"));
}

#[test]
fn wrong_inputs_have_specific_codes() {
    let job_dir = JobDirectory::new();
    let cases: [(&[&str], i32, &str); 7] = [
        (&["train.data.files=[nothing/*.txt]"], 2, "data-file-missing"),
        (&["train.data.seq_len=1000000"], 2, "data-too-short"),
        (&["train.batch.global=7", "train.batch.micro=2"], 2, "job-value-not-multiple"),
        (&["train.model.vocab_size=100"], 2, "job-values-inconsistent"),
        (&["train.optimizers.lr=1"], 2, "job-key-unknown"),
        (&["resume.from=nowhere"], 4, "checkpoint-not-found"),
        (&["checkpoint.dir=/proc/nothing"], 3, "checkpoint-io-failed"),
    ];
    let mut messages = String::new();
    for (set, exit_code, code) in cases {
        let ran = job_dir.run(set);
        assert_eq!(ran.code, exit_code, "{set:?}: {}", ran.stderr);
        let codes: Vec<&Value> = ran.failure_diagnostics().iter().map(|d| &d["code"]).collect();
        assert_eq!(codes, [code], "{set:?}: {}", ran.expect_failure());
        messages += &format!("--set {}\n{}\n", set.join(" --set "), ran.failure_message());
    }
    job_dir.assert_snapshot("wrong_inputs", &messages);
}

#[test]
fn a_checkpoint_of_another_model_is_rejected_with_its_first_tensor() {
    let job_dir = JobDirectory::new();
    job_dir.run(&["train.steps=2"]).expect_success();
    let ran = job_dir.run(&["train.steps=4", "train.model.intermediate_size=64"]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert_eq!(ran.failure_code(), "checkpoint-model-mismatch", "{}", ran.expect_failure());
    let tensor = &ran.failure_diagnostics()[0]["fields"]["tensor"];
    assert_eq!(tensor, "model.layers.0.mlp.gate_proj.weight", "{}", ran.expect_failure());
    assert!(TINY_JOB.contains("intermediate_size: 57"));
}

#[test]
fn a_damaged_newest_checkpoint_is_skipped_with_a_notice() {
    let job_dir = JobDirectory::new();
    let whole = job_dir.run(&["resume.from=never"]).expect_success().collect_losses();
    let shard = job_dir.checkpoint_dir().join("step-00000020/shard-00000-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let half = bytes.len() / 2;
    for (name, length) in [("flipped_bit", bytes.len()), ("truncated_shard", half)] {
        bytes.truncate(length);
        bytes[half - 1] ^= 4;
        fs::write(&shard, &bytes).unwrap();
        let ran = job_dir
            .run(&["checkpoint.dir=runs/tiny/checkpoints", "train.steps=20", "checkpoint.every=never"])
            .expect_success();
        assert_eq!(ran.collect_losses(), whole[10..]);
        job_dir.assert_snapshot(name, &ran.notice_messages().join("\n"));
    }
}
