//! Random states and HF Trainer: the real programs take what launch makes for another number of ranks.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use support::Place;

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
    let place = Place::new();
    // name, writer, ranks, what differs between ranks
    let sources = [
        ("a", "trainer 2", 2, "--per-rank torch_cpu torch_cuda --cuda all"),
        ("b", "trainer 1", 1, "--cuda one"),
        ("c", "accelerate 3", 3, "--per-rank python"),
        ("d", "trainer 4", 4, "--per-rank numpy torch_cpu"),
    ];
    let dir = |name: &str| place.path(&format!("{name}/checkpoint-5"));
    let mut calls = Vec::new();
    for (name, style, _, differs) in sources {
        fs::create_dir_all(dir(name)).unwrap();
        fs::write(dir(name).join("weights"), "as they were").unwrap();
        calls.push(words(&format!("make {} {style} {differs}", dir(name).display())));
    }
    oracle(&python, &calls);
    let originals: Vec<Vec<u8>> = sources.iter().flat_map(|s| contents(&dir(s.0))).collect();
    let mut checks = Vec::new();
    for (name, _, world, _) in sources {
        for new in [1, 2, 3, 4] {
            for option in ["--seed=99", "--reseed"] {
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
        let reseeded = check[1].ends_with("--reseed");
        assert_eq!(judged["record"]["generation"], 1);
        for (kind, mode) in judged["modes"].as_object().unwrap() {
            let expected: &[&str] = match (reseeded, new == old) {
                (true, _) => &["reseeded"],
                (false, true) => &["restored"],
                (false, false) => &["reseeded", "replicated"],
            };
            assert!(expected.contains(&mode.as_str().unwrap()), "{kind}: {judged}");
            let scope =
                judged["record"]["streams"].as_array().unwrap().iter().find(|s| s["kind"] == *kind).unwrap();
            let different = if scope["scope"] == "replicated" { 1 } else { new };
            assert_eq!(judged["different"][kind], different, "{kind}: {judged}");
        }
    }
    assert!(judged[16]["steps"] == 7, "Accelerate's counter stays: {}", judged[16]);
    let after: Vec<Vec<u8>> = sources.iter().flat_map(|s| contents(&dir(s.0))).collect();
    assert!(originals == after, "an original was changed");
    refusals(&place, &dir("a"));
}

fn contents(dir: &Path) -> Vec<Vec<u8>> {
    let files = support::files_below(dir);
    files.iter().map(|f| fs::read(dir.join(f)).unwrap()).collect()
}

/// `a` has two ranks, each with its own torch streams.
fn refusals(place: &Place, a: &Path) {
    let from = a.display().to_string();
    let said = |args: &[&str], code: i32| {
        let ran = place.launch(&[&["ckpt", "rng", from.as_str()], args].concat());
        let text = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(code), "{text}");
        text
    };
    assert!(said(&["--world-size=3", "--strict"], 4).contains("strict refuses to seed new ones"));
    said(&["--world-size=2", "--strict"], 0);
    let text = said(&["--world-size=3", "--replicated=torch_cpu"], 4);
    assert!(text.contains("that of rank 1 isn't that of rank 0"), "{text}");
    assert!(said(&["--world-size=3", "--out=corpus.txt"], 2).contains("it is there already"));
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
    assert!(said(&["--world-size=2"], 4).contains("rng_state_1.pth (the random state of rank 1 of 3)"));
    let mut torn = fs::read(a.join("rng_state_0.pth")).unwrap();
    let at = torn.len() / 2;
    torn[at] ^= 4;
    fs::write(a.join("rng_state_1.pth"), &torn).unwrap();
    assert!(said(&["--world-size=2"], 4).contains("damaged"));
    assert_eq!(support::files_below(&place.path("")).iter().find(|f| f.contains(".saving")), None);
}

/// A directory for a script with HF Trainer.
struct Trained {
    place: Place,
    python: PathBuf,
}

impl Trained {
    /// Runs the script as `workers`; its history of losses.
    fn run(&self, workers: u32, report: &str, resume: &str, more: &str) -> (support::Ran, Vec<Value>) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/trainer.py");
        let python = self.python.display();
        let job = format!(
            "name: tiny\ncluster: {{workers_per_host: {workers}}}\nrun:\n  command: [{python}, {script}, out-{report}, {report}, '6'{more}]\n  \
             env: {{HF_HUB_OFFLINE: '1', OMP_NUM_THREADS: '1'}}\n{resume}\n"
        );
        fs::write(self.place.path("job.yaml"), job).unwrap();
        let ran = self.place.run(&[]);
        let history = fs::read(self.place.path(&format!("{report}/history.json"))).unwrap_or_default();
        (ran, serde_json::from_slice(&history).unwrap_or_default())
    }

    fn first_step(&self, report: &str, rank: u32) -> Value {
        let text = fs::read(self.place.path(&format!("{report}/rank-{rank}.json"))).unwrap();
        serde_json::from_slice(&text).unwrap()
    }
}

/// Saved by two ranks, resumed by one and by four: the unmodified script goes on as if nothing had happened.
#[test]
fn a_trainer_script_resumes_with_another_number_of_ranks() {
    let Some(python) = support::deepspeed("a_trainer_script_resumes_with_another_number_of_ranks") else {
        return;
    };
    let trained = Trained { place: Place::new(), python };
    let (_, whole) = trained.run(2, "whole", "", "");
    assert_eq!(whole.len(), 6, "six steps");
    let saved = trained.place.path("out-whole/checkpoint-3");
    let before = contents(&saved);
    for workers in [1, 4, 2] {
        let report = format!("w{workers}");
        // once by the environment, once by an argument, once as the newest
        let (resume, more) = match workers {
            1 => ("resume: {from: out-whole/checkpoint-3}", ""),
            4 => ("resume: {from: out-whole/checkpoint-3}", ", --resume_from_checkpoint, '{resume}'"),
            _ => {
                fs::remove_file(trained.place.path("out-whole/checkpoint-6/trainer_state.json")).unwrap();
                ("resume: {from: auto}\ncheckpoint: {dir: out-whole}", "")
            }
        };
        let (ran, rest) = trained.run(workers, &report, resume, more);
        let ran = ran.succeeded();
        let told: Vec<String> =
            ran.kind("notice").iter().map(|e| e["message"].as_str().unwrap().to_owned()).collect();
        let folder = if workers == 2 {
            saved.clone()
        } else {
            trained.place.path(&format!("out-whole/launch-w{workers}/checkpoint-3"))
        };
        let has = |part: &str| told.iter().any(|m| m.contains(part));
        assert!(has(&format!("resumes from {}", folder.display())), "{told:?}");
        match workers {
            2 => assert!(has("passed over") && has("checkpoint-6"), "{told:?}"),
            _ => assert!(
                has(&format!("saved by 2 ranks and goes on with {workers}"))
                    && has("random states of 2 ranks"),
                "{told:?}"
            ),
        }
        assert_eq!(rest.len(), 6, "three steps of before, three more: {rest:?}");
        for (got, want) in rest.iter().zip(&whole) {
            let number = |v: &Value, key: &str| v[key].as_f64().unwrap();
            assert_eq!(
                (&got["step"], number(got, "learning_rate")),
                (&want["step"], number(want, "learning_rate"))
            );
            let (got, want) = (number(got, "loss"), number(want, "loss"));
            assert!((got - want).abs() <= CLOSE * want, "{workers} ranks: {got}, uninterrupted {want}");
        }
        let seen: Vec<Value> = (0..workers).map(|rank| trained.first_step(&report, rank)).collect();
        let mut torch: Vec<&str> = seen.iter().map(|s| s["torch"].as_str().unwrap()).collect();
        torch.sort_unstable();
        torch.dedup();
        assert_eq!(torch.len() as u32, workers, "each rank has a torch stream of its own");
        for s in &seen {
            assert_eq!((&s["step"], &s["weight_decay"]), (&3.into(), &serde_json::json!([0.1, 0.0])));
            assert_eq!(s["python"], seen[0]["python"], "what was the same on all ranks stays so");
        }
    }
    assert!(before == contents(&saved), "the original was changed");
    // what can't be had is refused before anything starts
    let (ran, _) = trained.run(4, "strict", "resume: {from: out-whole/checkpoint-3, rng: strict}", "");
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("strict refuses to seed new ones"), "{}", ran.stderr);
    fs::remove_file(saved.join("rng_state_0.pth")).unwrap();
    let (ran, _) = trained.run(2, "torn", "resume: {from: out-whole/checkpoint-3}", "");
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("rng_state_0.pth (the random state of rank 0 of 2)"), "{}", ran.stderr);
}
