//! HF Trainer and Accelerate, with real DeepSpeed inside and without: what some ranks saved, others resume. The script and its
//! config are the same in every run; by themselves these programs refuse such a folder, or lose their random states.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
};
use support::{
    fork_server::{ForkServer, TRAINERS},
    scripts::{Script, assert_continues, contents},
};

/// Losses of the same batches in fp32, split over another number of ranks.
const CLOSE: f64 = 1e-5;
/// The same when weights are multiplied in bf16.
const CLOSE_BF16: f64 = 1e-3;
const RESUME: &str = "resume: {from: out-whole/checkpoint-3}";

fn links(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(&fs::metadata(path).unwrap())
}

fn inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap())
}

/// Every rank begins at `step` with the weight decay of both groups.
fn begins_right(script: &Script, report: &str, workers: u32, step: u64) {
    for rank in 0..workers {
        let seen = script.first_step(report, rank);
        assert_eq!((&seen["step"], &seen["weight_decay"]), (&step.into(), &json!([0.1, 0.0])), "{report}");
    }
}

fn goes_on(python: &[String], stage: u8, bf16: bool) {
    let close = if bf16 { CLOSE_BF16 } else { CLOSE };
    let trained = Script::new(python, "trainer.py", 9).with_deepspeed(stage, bf16);
    let resume_argument: &[&str] = &["--resume_from_checkpoint", "{resume}"];
    let (ran, whole) = trained.run(2, "whole", "", &[]);
    ran.succeeded();
    assert_eq!(whole.len(), 9, "nine steps");
    let saved = trained.place.path("out-whole/checkpoint-3");
    let before = contents(&saved);
    let others: &[u32] = if bf16 { &[1] } else { &[1, 4] };
    for &workers in others {
        let report = format!("w{workers}");
        let (ran, rest) = trained.run(workers, &report, RESUME, resume_argument);
        let said = ran.succeeded().notices().join("\n");
        let cut = format!(
            "saved by 2 ranks, resuming with {workers}; DeepSpeed state (ZeRO-{stage}) resharded for {workers} rank"
        );
        assert!(said.contains(&cut) && said.contains("RNG states of 2 ranks"), "{said}");
        let folder = trained.place.path(&format!("out-whole/launch-w{workers}/checkpoint-3"));
        assert!(said.contains(&format!("resumes from {}", folder.display())), "{said}");
        assert_eq!(rest.len(), 9, "three steps of before, six more: {rest:?}");
        assert_continues(&rest, &whole, close);
        begins_right(&trained, &report, workers, 3);
        // what did not change is the same file, what did is another
        let same = |name: &str| links(&folder.join(name)) > 1;
        assert!(same("trainer_state.json") && same("config.json") && !same("latest"), "{workers} ranks");
    }
    assert!(before == contents(&saved), "the original was changed");
    if stage == 3 {
        // four ranks saved this one
        let (ran, rest) = trained.run(2, "fewer", "resume: {from: out-w4/checkpoint-6}", resume_argument);
        assert!(ran.succeeded().notices().join("\n").contains("saved by 4 ranks, resuming with 2"));
        assert_continues(&rest, &whole, close);
        begins_right(&trained, "fewer", 2, 6);
    }
    if bf16 {
        // what one rank saved goes on with two again
        let (ran, rest) = trained.run(2, "back", "resume: {from: out-w1/checkpoint-6}", resume_argument);
        assert!(ran.succeeded().notices().join("\n").contains("saved by 1 rank, resuming with 2"));
        assert_continues(&rest, &whole, close);
        begins_right(&trained, "back", 2, 6);
    }
    // the next start with as many ranks uses what was made, whatever program it is
    let folder = trained.place.path("out-whole/launch-w1/checkpoint-3");
    let made = inode(&folder.join("latest"));
    let job = format!("cluster: {{workers_per_host: 1}}\nrun: {{command: [sh, -c, exit 0]}}\n{RESUME}\n");
    fs::write(trained.place.path("job.yaml"), job).unwrap();
    let again = trained.place.run(&[]).succeeded();
    assert!(
        again.notices().join("\n").contains("(prepared at an earlier start)"),
        "{}",
        again.notices().join("\n")
    );
    assert_eq!(made, inode(&folder.join("latest")));
}

#[test]
fn trainer_scripts_with_deepspeed_go_on_with_another_number_of_ranks() {
    let test = "trainer_scripts_with_deepspeed_go_on_with_another_number_of_ranks";
    let Some(python) = support::deepspeed(test) else { return };
    let fork_server = ForkServer::start(&python, &TRAINERS);
    for (stage, bf16) in [(2, false), (3, false), (2, true)] {
        goes_on(&fork_server.python(), stage, bf16);
    }
}

#[test]
fn loops_with_accelerate_go_on_with_another_number_of_ranks() {
    let test = "loops_with_accelerate_go_on_with_another_number_of_ranks";
    let Some(python) = support::deepspeed(test) else { return };
    let fork_server = ForkServer::start(&python, &TRAINERS);
    let script = || Script::new(&fork_server.python(), "accelerate_loop.py", 9);
    again_and_again(&script());
    let deepspeed = script().with_deepspeed(3, false);
    loop_goes_on(&deepspeed, CLOSE, &[1], "DeepSpeed state (ZeRO-3) resharded for 1 rank");
    let deepspeed = script().with_deepspeed(2, true);
    loop_goes_on(&deepspeed, CLOSE_BF16, &[4], "DeepSpeed state (ZeRO-2) resharded for 4 ranks");
    // FSDP's own states fit any number of ranks; what lies beside them doesn't
    loop_goes_on(&script().with_fsdp("full"), CLOSE, &[1], "RNG states of 2 ranks");
    loop_goes_on(&script().with_fsdp("sharded"), CLOSE, &[4], "RNG states of 2 ranks");
}

/// 2 ranks → 4 → 2 → 1, each from what the one before saved.
fn again_and_again(script: &Script) {
    let (ran, whole) = script.run(2, "whole", "", &[]);
    ran.succeeded();
    assert_eq!(whole.len(), 9, "nine steps");
    for (from, old, workers, step) in [("whole", 2, 4, 3), ("w4", 4, 2, 6), ("whole", 2, 1, 3)] {
        let saved: PathBuf = script.place.path(&format!("out-{from}/step_{step}"));
        let before = contents(&saved);
        let (report, resume) = (format!("w{workers}"), format!("resume: {{from: out-{from}/step_{step}}}"));
        let (ran, rest) = script.run(workers, &report, &resume, &[]);
        let said = ran.succeeded().notices().join("\n");
        let line = format!("saved by {old} ranks, resuming with {workers}");
        assert!(said.contains(&line) && said.contains(&format!("RNG states of {old} ranks")), "{said}");
        let (now, then) = (step * u64::from(workers), step * old);
        let rescaled = format!("rescaled from {then} to {now} ({step} steps;");
        assert!(said.contains(&rescaled), "{said}");
        assert_eq!(rest.len() as u64, 9 - step, "{rest:?}");
        assert_continues(&rest, &whole, CLOSE);
        begins_right(script, &report, workers, step);
        assert_eq!(
            script.distinct_values(&report, workers, "torch"),
            workers as usize,
            "each has its own stream"
        );
        assert_eq!(
            script.distinct_values(&report, workers, "python"),
            1,
            "what was the same on all ranks stays so"
        );
        assert!(before == contents(&saved), "the original was changed");
    }
}

/// What two ranks saved one goes on from, and four: in one run for each.
fn loop_goes_on(script: &Script, close: f64, others: &[u32], cut: &str) {
    let (ran, whole) = script.run(2, "whole", "", &[]);
    ran.succeeded();
    assert_eq!(whole.len(), 9, "nine steps");
    let saved = script.place.path("out-whole/step_3");
    let before = contents(&saved);
    for &workers in others {
        let report = format!("w{workers}");
        let (ran, rest) = script.run(workers, &report, "resume: {from: out-whole/step_3}", &[]);
        let said = ran.succeeded().notices().join("\n");
        let counted = format!("rescaled from 6 to {} (3 steps;", 3 * workers);
        for part in [cut, &counted, &format!("saved by 2 ranks, resuming with {workers}")] {
            assert!(said.contains(part), "{said}");
        }
        assert_continues(&rest, &whole, close);
        begins_right(script, &report, workers, 3);
    }
    assert!(before == contents(&saved), "the original was changed");
}

/// Every process of it is a Python of its own.
#[test]
fn a_trainer_script_with_fsdp_goes_on_with_another_number_of_ranks() {
    let test = "a_trainer_script_with_fsdp_goes_on_with_another_number_of_ranks";
    let Some(python) = support::deepspeed(test) else { return };
    let python = [python.to_str().unwrap().to_owned()];
    let script = Script::new(&python, "trainer.py", 9).with_fsdp("sharded");
    let (ran, whole) = script.run(2, "whole", "", &[]);
    ran.succeeded();
    let (ran, rest) = script.run(1, "w1", RESUME, &["--resume_from_checkpoint", "{resume}"]);
    let said = ran.succeeded().notices().join("\n");
    assert!(said.contains("saved by 2 ranks, resuming with 1"), "{said}");
    assert_eq!(rest.len(), 9, "three steps of before, six more: {rest:?}");
    assert_continues(&rest, &whole, CLOSE);
    begins_right(&script, "w1", 1, 3);
}
