//! Tests RNG state files of HF Trainer and Accelerate. The real programs load the files that launch
//! writes for another number of ranks.
use crate::support::{
    self, JobDirectory,
    environment::isolated_command,
    fork_server::{ForkServer, TRAINER_MODULES},
    trainer_script::{TrainerScript, assert_losses_continue, read_files_below},
};
use serde_json::Value;
use std::{fs, path::Path};

/// The largest accepted relative difference between losses of the same batches, when these are
/// split over different numbers of ranks.
const MAX_LOSS_DIFFERENCE: f64 = 1e-5;

/// Runs scripts/oracle/random_states.py once for all `calls`, each of which is a list of arguments.
/// Returns the JSON value that each call prints. Panics if the script fails.
fn run_oracle(job_dir: &JobDirectory, python: &Path, calls: &[Vec<String>]) -> Vec<Value> {
    let mut command = isolated_command(python, &job_dir.path(""));
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/random_states.py"));
    command.args(calls.join(&"--".to_owned())).env("HF_HUB_OFFLINE", "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// Splits a line at white space.
fn split_words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Checks that Python, numpy and torch load the RNG state files that `launch ckpt rng` writes for
/// another number of ranks, and that each RNG stream is restored, replicated or reseeded as the
/// files record.
#[test]
fn draws_from_prepared_files_follow_the_rule() {
    let Some(python) = support::find_python_or_skip("draws_from_prepared_files_follow_the_rule") else {
        return;
    };
    let job_dir = JobDirectory::new();
    // name, writer, ranks, streams that differ between ranks
    let sources = [
        ("a", "trainer 2", 2, "--per-rank torch_cpu torch_cuda --cuda all"),
        ("b", "trainer 1", 1, "--cuda one"),
        ("c", "accelerate 3", 3, "--per-rank python"),
        ("d", "trainer 4", 4, "--per-rank numpy torch_cpu"),
        // without differences, `--strict` works for any number of ranks
        ("e", "trainer 2", 2, ""),
        ("f", "accelerate 3", 3, "--cuda one"),
    ];
    let dir = |name: &str| job_dir.path(&format!("{name}/checkpoint-5"));
    let mut calls = Vec::new();
    for (name, style, _, differs) in sources {
        fs::create_dir_all(dir(name)).unwrap();
        fs::write(dir(name).join("weights"), "unchanged").unwrap();
        calls.push(split_words(&format!("make {} {style} {differs}", dir(name).display())));
    }
    run_oracle(&job_dir, &python, &calls);
    let originals: Vec<_> = sources.iter().flat_map(|s| read_files_below(&dir(s.0))).collect();
    let mut checks = Vec::new();
    for (name, _, world, differs) in sources {
        for new in [1, 2, 3, 4] {
            // `--strict` needs an equal number of ranks, or streams that are equal on all ranks
            let strict = new == world || (world > 1 && !differs.contains("per-rank"));
            let strict = strict.then_some("--strict");
            for option in ["--seed=99", "--reseed"].into_iter().chain(strict) {
                let out = job_dir.path(&format!("{name}-{new}{option}"));
                let (world_size, out) = (format!("--world-size={new}"), out.display().to_string());
                let from = dir(name).display().to_string();
                let made = job_dir.run_launch(&["ckpt", "rng", &from, &world_size, "--out", &out, option]);
                assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
                assert_eq!(fs::read(Path::new(&out).join("weights")).unwrap(), b"unchanged");
                checks.push(split_words(&format!("check {out} {new} {from} {world}")));
            }
        }
    }
    let results = run_oracle(&job_dir, &python, &checks);
    assert_eq!(results.len(), checks.len());
    for (check, result) in checks.iter().zip(&results) {
        let (new, old) = (check[2].parse::<u64>().unwrap(), check[4].parse::<u64>().unwrap());
        let (reseeded, strict) = (check[1].ends_with("--reseed"), check[1].ends_with("--strict"));
        assert_eq!(result["record"]["generation"], 1);
        for (kind, mode) in result["modes"].as_object().unwrap() {
            let expected: &[&str] = match (reseeded, new == old) {
                (true, _) => &["reseeded"],
                (false, true) => &["restored"],
                (false, false) if strict => &["replicated"],
                (false, false) => &["reseeded", "replicated"],
            };
            assert!(expected.contains(&mode.as_str().unwrap()), "{kind}: {result}");
            let scope =
                result["record"]["streams"].as_array().unwrap().iter().find(|s| s["kind"] == *kind).unwrap();
            let different = if scope["scope"] == "replicated" { 1 } else { new };
            assert_eq!(result["different"][kind], different, "{kind}: {result}");
        }
    }
    let accelerate = checks.iter().position(|check| check[3].contains("/c/")).unwrap();
    assert!(results[accelerate]["steps"] == 7, "the counter of Accelerate changed: {}", results[accelerate]);
    let after: Vec<_> = sources.iter().flat_map(|s| read_files_below(&dir(s.0))).collect();
    assert!(originals == after, "an original was changed");
    assert_rejections(&job_dir, &dir("a"));
}

/// Checks which calls of `launch ckpt rng` succeed and which are rejected for the directory `a`,
/// which has the files of two ranks with different torch streams. Changes that directory.
fn assert_rejections(job_dir: &JobDirectory, a: &Path) {
    let from = a.display().to_string();
    let succeeds = |args: &[&str]| {
        let ran = job_dir.run_launch(&[&["ckpt", "rng", from.as_str()], args].concat());
        assert!(ran.status.success(), "{args:?}: {}", support::output_to_text(&ran));
    };
    let mut messages = String::new();
    let mut is_rejected = |args: &[&str], exit_code: i32, code: &str| {
        let (exit, error) = job_dir.expect_rejection(&[&["ckpt", "rng", from.as_str()], args].concat());
        assert_eq!((exit, error["code"].as_str()), (exit_code, Some(code)), "{args:?}: {error}");
        messages += &format!("{args:?}: {}\n", error["message"].as_str().unwrap());
    };
    is_rejected(&["--world-size=3", "--strict"], 4, "rng-strict-would-reseed");
    is_rejected(&["--world-size=2", "--strict", "--reseed"], 2, "usage");
    let before = read_files_below(a);
    succeeds(&["--world-size=2", "--strict"]);
    assert!(read_files_below(a) == before, "the original was changed");
    is_rejected(&["--world-size=3", "--replicated=torch_cpu"], 4, "rng-stream-not-replicated");
    is_rejected(&["--world-size=3", "--out=corpus.txt"], 2, "checkpoint-output-exists");
    // the directory is replaced, and the next call reads the new one
    succeeds(&["--world-size=3", "--in-place"]);
    assert_eq!(
        support::list_files_below(a),
        ["launch_rng.json", "rng_state_0.pth", "rng_state_1.pth", "rng_state_2.pth", "weights"]
    );
    succeeds(&["--world-size=2"]);
    let record = fs::read(a.parent().unwrap().join("launch-w2/checkpoint-5/launch_rng.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    assert_eq!(record["generation"], 2, "{record}");
    fs::remove_file(a.join("rng_state_1.pth")).unwrap();
    is_rejected(&["--world-size=2"], 4, "rng-state-missing");
    let mut torn = fs::read(a.join("rng_state_0.pth")).unwrap();
    let at = torn.len() / 2;
    torn[at] ^= 4;
    fs::write(a.join("rng_state_1.pth"), &torn).unwrap();
    is_rejected(&["--world-size=2"], 4, "zip-crc-mismatch");
    assert_eq!(support::list_files_below(&job_dir.path("")).iter().find(|f| f.contains(".saving")), None);
    job_dir.assert_snapshot("rejected", &messages);
}

/// Checks that an HF Trainer script resumes on one and on four ranks from checkpoints of two ranks.
/// The script is unmodified, and its losses equal those of the uninterrupted run.
#[test]
fn a_trainer_script_resumes_with_another_number_of_ranks() {
    let Some(python) =
        support::find_deepspeed_python_or_skip("a_trainer_script_resumes_with_another_number_of_ranks")
    else {
        return;
    };
    let fork_server = ForkServer::start(&python, &TRAINER_MODULES);
    let trained = TrainerScript::new(&fork_server.client_command(), "trainer.py", 9);
    let (_, whole) = trained.run(2, "whole", "", &[]);
    assert_eq!(whole.len(), 9, "nine steps");
    let saved = trained.job_dir.path("out-whole/checkpoint-3");
    let before = read_files_below(&saved);
    for step in [6, 9] {
        fs::remove_file(trained.job_dir.path(&format!("out-whole/checkpoint-{step}/trainer_state.json")))
            .unwrap();
    }
    let named = "resume: {from: out-whole/checkpoint-3}";
    // the script receives the path in the environment or as an argument, also that of the newest
    // checkpoint
    let by_argument: &[&str] = &["--resume_from_checkpoint", "{resume}"];
    for (report, workers, step, resume, more) in [
        ("w1", 1, 3, named, &[][..]),
        ("w4", 4, 3, named, by_argument),
        ("w2", 2, 3, "resume: {from: auto}\ncheckpoint: {dir: out-whole}", &[]),
        ("back", 2, 6, "resume: {from: out-w4/checkpoint-6}", by_argument),
    ] {
        let (ran, rest) = trained.run(workers, report, resume, more);
        let snapshot = format!("notices_{report}");
        trained.assert_notices(&snapshot, &ran.expect_success());
        assert_eq!(rest.len(), 9, "the steps of the first run and the rest: {rest:?}");
        assert_losses_continue(&rest, &whole, MAX_LOSS_DIFFERENCE);
        assert_eq!(
            trained.count_distinct_values(report, workers, "torch"),
            workers as usize,
            "streams of torch differ between ranks"
        );
        assert_eq!(
            trained.count_distinct_values(report, workers, "python"),
            1,
            "streams of Python stay equal on all ranks"
        );
        for rank in 0..workers {
            let first = trained.read_rank_report(report, rank);
            assert_eq!(
                (&first["step"], &first["weight_decay"]),
                (&step.into(), &serde_json::json!([0.1, 0.0]))
            );
        }
    }
    assert!(before == read_files_below(&saved), "the original was changed");
    // RNG states that cannot be restored are rejected before a worker starts
    let strict = "resume: {from: out-whole/checkpoint-3, rng: strict}";
    let (ran, _) = trained.run(4, "strict", strict, &[]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert_eq!(ran.failure_diagnostics()[0]["code"], "rng-strict-would-reseed", "{}", ran.expect_failure());
    fs::remove_file(saved.join("rng_state_0.pth")).unwrap();
    let (ran, _) = trained.run(2, "incomplete", named, &[]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert_eq!(ran.failure_diagnostics()[0]["code"], "rng-state-missing", "{}", ran.expect_failure());
}
