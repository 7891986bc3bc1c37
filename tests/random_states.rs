//! Random states and HF Trainer: the real programs take what launch makes for another number of ranks.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::Value;
use std::{fs, path::Path, process::Command};
use support::{
    JobDirectory,
    fork_server::{ForkServer, TRAINERS},
    scripts::{Script, assert_continues, contents},
};

/// Losses of the same batches, split over another number of ranks.
const CLOSE: f64 = 1e-5;

fn oracle(python: &Path, calls: &[Vec<String>]) -> Vec<Value> {
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/random_states.py"));
    command.args(calls.join(&"--".to_owned())).env("HF_HUB_OFFLINE", "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Python, numpy and torch accept the files, and the next 1,000 draws of each are those of the rule.
#[test]
fn python_draws_what_the_rule_says() {
    let Some(python) = support::python("python_draws_what_the_rule_says") else { return };
    let place = JobDirectory::new();
    // name, writer, ranks, what differs between ranks
    let sources = [
        ("a", "trainer 2", 2, "--per-rank torch_cpu torch_cuda --cuda all"),
        ("b", "trainer 1", 1, "--cuda one"),
        ("c", "accelerate 3", 3, "--per-rank python"),
        ("d", "trainer 4", 4, "--per-rank numpy torch_cpu"),
        // nothing differs: strict can be had for any number of ranks
        ("e", "trainer 2", 2, ""),
        ("f", "accelerate 3", 3, "--cuda one"),
    ];
    let dir = |name: &str| place.path(&format!("{name}/checkpoint-5"));
    let mut calls = Vec::new();
    for (name, style, _, differs) in sources {
        fs::create_dir_all(dir(name)).unwrap();
        fs::write(dir(name).join("weights"), "as they were").unwrap();
        calls.push(words(&format!("make {} {style} {differs}", dir(name).display())));
    }
    oracle(&python, &calls);
    let originals: Vec<_> = sources.iter().flat_map(|s| contents(&dir(s.0))).collect();
    let mut checks = Vec::new();
    for (name, _, world, differs) in sources {
        for new in [1, 2, 3, 4] {
            // as many ranks, or nothing that each rank has of its own
            let strict = new == world || (world > 1 && !differs.contains("per-rank"));
            let strict = strict.then_some("--strict");
            for option in ["--seed=99", "--reseed"].into_iter().chain(strict) {
                let out = place.path(&format!("{name}-{new}{option}"));
                let (world_size, out) = (format!("--world-size={new}"), out.display().to_string());
                let from = dir(name).display().to_string();
                let made = place.launch(&["ckpt", "rng", &from, &world_size, "--out", &out, option]);
                assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
                assert_eq!(fs::read(Path::new(&out).join("weights")).unwrap(), b"as they were");
                checks.push(words(&format!("check {out} {new} {from} {world}")));
            }
        }
    }
    let judged = oracle(&python, &checks);
    assert_eq!(judged.len(), checks.len());
    for (check, judged) in checks.iter().zip(&judged) {
        let (new, old) = (check[2].parse::<u64>().unwrap(), check[4].parse::<u64>().unwrap());
        let (reseeded, strict) = (check[1].ends_with("--reseed"), check[1].ends_with("--strict"));
        assert_eq!(judged["record"]["generation"], 1);
        for (kind, mode) in judged["modes"].as_object().unwrap() {
            let expected: &[&str] = match (reseeded, new == old) {
                (true, _) => &["reseeded"],
                (false, true) => &["restored"],
                (false, false) if strict => &["replicated"],
                (false, false) => &["reseeded", "replicated"],
            };
            assert!(expected.contains(&mode.as_str().unwrap()), "{kind}: {judged}");
            let scope =
                judged["record"]["streams"].as_array().unwrap().iter().find(|s| s["kind"] == *kind).unwrap();
            let different = if scope["scope"] == "replicated" { 1 } else { new };
            assert_eq!(judged["different"][kind], different, "{kind}: {judged}");
        }
    }
    let accelerate = checks.iter().position(|check| check[3].contains("/c/")).unwrap();
    assert!(judged[accelerate]["steps"] == 7, "Accelerate's counter stays: {}", judged[accelerate]);
    let after: Vec<_> = sources.iter().flat_map(|s| contents(&dir(s.0))).collect();
    assert!(originals == after, "an original was changed");
    refusals(&place, &dir("a"));
}

/// `a` has two ranks, each with its own torch streams.
fn refusals(place: &JobDirectory, a: &Path) {
    let from = a.display().to_string();
    let said = |args: &[&str], code: i32| {
        let ran = place.launch(&[&["ckpt", "rng", from.as_str()], args].concat());
        let text = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(code), "{text}");
        text
    };
    assert!(said(&["--world-size=3", "--strict"], 4).contains("policy strict does not reseed"));
    said(&["--world-size=2", "--strict", "--reseed"], 2);
    let before = contents(a);
    said(&["--world-size=2", "--strict"], 0);
    assert!(contents(a) == before, "the original was changed");
    let text = said(&["--world-size=3", "--replicated=torch_cpu"], 4);
    assert!(text.contains("differs from rank 0 on rank 1"), "{text}");
    assert!(said(&["--world-size=3", "--out=corpus.txt"], 2).contains("the path exists"));
    // replaced in one go, then what is there is what counts
    said(&["--world-size=3", "--in-place"], 0);
    assert_eq!(
        support::files_below(a),
        ["launch_rng.json", "rng_state_0.pth", "rng_state_1.pth", "rng_state_2.pth", "weights"]
    );
    said(&["--world-size=2"], 0);
    let record =
        fs::read_to_string(a.parent().unwrap().join("launch-w2/checkpoint-5/launch_rng.json")).unwrap();
    assert!(record.contains("\"generation\": 2"), "{record}");
    fs::remove_file(a.join("rng_state_1.pth")).unwrap();
    assert!(said(&["--world-size=2"], 4).contains("rng_state_1.pth, the RNG state of rank 1 of 3"));
    let mut torn = fs::read(a.join("rng_state_0.pth")).unwrap();
    let at = torn.len() / 2;
    torn[at] ^= 4;
    fs::write(a.join("rng_state_1.pth"), &torn).unwrap();
    assert!(said(&["--world-size=2"], 4).contains("damaged"));
    assert_eq!(support::files_below(&place.path("")).iter().find(|f| f.contains(".saving")), None);
}

/// Saved by two ranks, resumed by one and by four: the unmodified script goes on as if nothing had happened.
#[test]
fn a_trainer_script_resumes_with_another_number_of_ranks() {
    let Some(python) = support::deepspeed("a_trainer_script_resumes_with_another_number_of_ranks") else {
        return;
    };
    let fork_server = ForkServer::start(&python, &TRAINERS);
    let trained = Script::new(&fork_server.python(), "trainer.py", 9);
    let (_, whole) = trained.run(2, "whole", "", &[]);
    assert_eq!(whole.len(), 9, "nine steps");
    let saved = trained.place.path("out-whole/checkpoint-3");
    let before = contents(&saved);
    for step in [6, 9] {
        fs::remove_file(trained.place.path(&format!("out-whole/checkpoint-{step}/trainer_state.json")))
            .unwrap();
    }
    let named = "resume: {from: out-whole/checkpoint-3}";
    // once by the environment, twice by an argument, once as the newest
    let by_argument: &[&str] = &["--resume_from_checkpoint", "{resume}"];
    for (report, old, workers, from, step, resume, more) in [
        ("w1", 2, 1, "out-whole", 3, named, &[][..]),
        ("w4", 2, 4, "out-whole", 3, named, by_argument),
        ("w2", 2, 2, "out-whole", 3, "resume: {from: auto}\ncheckpoint: {dir: out-whole}", &[]),
        ("back", 4, 2, "out-w4", 6, "resume: {from: out-w4/checkpoint-6}", by_argument),
    ] {
        let (ran, rest) = trained.run(workers, report, resume, more);
        let said = ran.succeeded().notices().join("\n");
        let same = old == workers;
        let within = if same { from.to_owned() } else { format!("{from}/launch-w{workers}") };
        let folder = trained.place.path(&format!("{within}/checkpoint-{step}"));
        assert!(said.contains(&format!("resumes from {}", folder.display())), "{said}");
        let saved_by = format!("saved by {old} ranks, resuming with {workers}");
        match same {
            true => assert!(said.contains("skipped") && said.contains("checkpoint-6"), "{said}"),
            false => {
                let streams = format!("RNG states of {old} ranks");
                assert!(said.contains(&saved_by) && said.contains(&streams), "{said}");
            }
        }
        assert_eq!(rest.len(), 9, "the steps of before, and the rest: {rest:?}");
        assert_continues(&rest, &whole, CLOSE);
        assert_eq!(
            trained.distinct_values(report, workers, "torch"),
            workers as usize,
            "each rank has its own stream"
        );
        assert_eq!(
            trained.distinct_values(report, workers, "python"),
            1,
            "what was the same on all ranks stays so"
        );
        for rank in 0..workers {
            let seen = trained.first_step(report, rank);
            assert_eq!(
                (&seen["step"], &seen["weight_decay"]),
                (&step.into(), &serde_json::json!([0.1, 0.0]))
            );
        }
    }
    assert!(before == contents(&saved), "the original was changed");
    // what can't be had is refused before anything starts
    let strict = "resume: {from: out-whole/checkpoint-3, rng: strict}";
    let (ran, _) = trained.run(4, "strict", strict, &[]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("policy strict does not reseed"), "{}", ran.stderr);
    fs::remove_file(saved.join("rng_state_0.pth")).unwrap();
    let (ran, _) = trained.run(2, "torn", named, &[]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("rng_state_0.pth, the RNG state of rank 0 of 2"), "{}", ran.stderr);
}
