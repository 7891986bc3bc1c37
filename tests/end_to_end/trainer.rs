//! Checks that scripts with HF Trainer and Accelerate, with and without DeepSpeed and FSDP, resume
//! with another number of ranks. The script and its config are the same in every run. Without
//! launch, these programs reject a checkpoint of another number of ranks, or lose their RNG states.
use crate::support::{
    self,
    fork_server::{ForkServer, TRAINER_MODULES},
    trainer_script::{TrainerScript, assert_losses_continue, read_files_below},
};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The largest accepted relative difference between fp32 losses of the same batches, when these are
/// split over different numbers of ranks.
const MAX_LOSS_DIFFERENCE: f64 = 1e-5;
/// The largest accepted relative difference between losses, if matmuls are computed in bf16.
const MAX_LOSS_DIFFERENCE_BF16: f64 = 1e-3;
/// The `resume:` section of a run that resumes from the checkpoint of step 3.
const RESUME: &str = "resume: {from: out-whole/checkpoint-3}";

/// Returns the number of hard links of a file.
fn count_hard_links(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(&fs::metadata(path).unwrap())
}

/// Returns the inode number of a file.
fn read_inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap())
}

/// Checks that every rank begins at `step`, and that both parameter groups have their weight decay.
#[track_caller]
fn assert_begins_at(script: &TrainerScript, report: &str, workers: u32, step: u64) {
    for rank in 0..workers {
        let first = script.read_rank_report(report, rank);
        assert_eq!((&first["step"], &first["weight_decay"]), (&step.into(), &json!([0.1, 0.0])), "{report}");
    }
}

/// Runs a script with HF Trainer and DeepSpeed on two ranks, and resumes it with other numbers of
/// ranks. Checks losses, notices and which files of the prepared checkpoint are hard links.
fn resume_trainer_script(python: &[String], stage: u8, bf16: bool) {
    let dtype = if bf16 { "bf16" } else { "fp32" };
    let snapshot = |report: &str| format!("trainer_z{stage}_{dtype}_{report}");
    let close = if bf16 { MAX_LOSS_DIFFERENCE_BF16 } else { MAX_LOSS_DIFFERENCE };
    let trained = TrainerScript::new(python, "trainer.py", 9).with_deepspeed(stage, bf16);
    let resume_argument: &[&str] = &["--resume_from_checkpoint", "{resume}"];
    let (ran, whole) = trained.run(2, "whole", "", &[]);
    ran.expect_success();
    assert_eq!(whole.len(), 9, "nine steps");
    let saved = trained.job_dir.path("out-whole/checkpoint-3");
    let before = read_files_below(&saved);
    let others: &[u32] = if bf16 { &[1] } else { &[1, 4] };
    for &workers in others {
        let report = format!("w{workers}");
        let (ran, rest) = trained.run(workers, &report, RESUME, resume_argument);
        trained.assert_notices(&snapshot(&report), &ran.expect_success());
        let resharded = trained.job_dir.path(&format!("out-whole/launch-w{workers}/checkpoint-3"));
        assert_eq!(rest.len(), 9, "three steps of the first run and six more: {rest:?}");
        assert_losses_continue(&rest, &whole, close);
        assert_begins_at(&trained, &report, workers, 3);
        // unchanged files are hard links to the original
        let is_linked = |name: &str| count_hard_links(&resharded.join(name)) > 1;
        assert!(
            is_linked("trainer_state.json") && is_linked("config.json") && !is_linked("latest"),
            "{workers} ranks"
        );
    }
    assert!(before == read_files_below(&saved), "the original was changed");
    if stage == 3 {
        // a checkpoint of four ranks
        let (ran, rest) = trained.run(2, "fewer", "resume: {from: out-w4/checkpoint-6}", resume_argument);
        trained.assert_notices(&snapshot("fewer"), &ran.expect_success());
        assert_losses_continue(&rest, &whole, close);
        assert_begins_at(&trained, "fewer", 2, 6);
    }
    if bf16 {
        // a checkpoint of one rank
        let (ran, rest) = trained.run(2, "back", "resume: {from: out-w1/checkpoint-6}", resume_argument);
        trained.assert_notices(&snapshot("back"), &ran.expect_success());
        assert_losses_continue(&rest, &whole, close);
        assert_begins_at(&trained, "back", 2, 6);
    }
    // the next start with as many ranks uses the prepared checkpoint, also for another program
    let resharded = trained.job_dir.path("out-whole/launch-w1/checkpoint-3");
    let prepared = read_inode(&resharded.join("latest"));
    let job = format!("cluster: {{workers_per_host: 1}}\nrun: {{command: [sh, -c, exit 0]}}\n{RESUME}\n");
    fs::write(trained.job_dir.path("job.yaml"), job).unwrap();
    let again = trained.job_dir.run(&[]).expect_success();
    trained.assert_notices(&snapshot("prepared"), &again);
    assert_eq!(prepared, read_inode(&resharded.join("latest")));
}

#[test]
fn trainer_scripts_with_deepspeed_resume_with_another_number_of_ranks() {
    let test = "trainer_scripts_with_deepspeed_resume_with_another_number_of_ranks";
    let Some(python) = support::find_deepspeed_python_or_skip(test) else { return };
    let fork_server = ForkServer::start(&python, &TRAINER_MODULES);
    for (stage, bf16) in [(2, false), (3, false), (2, true)] {
        resume_trainer_script(&fork_server.client_command(), stage, bf16);
    }
}

#[test]
fn loops_with_accelerate_resume_with_another_number_of_ranks() {
    let test = "loops_with_accelerate_resume_with_another_number_of_ranks";
    let Some(python) = support::find_deepspeed_python_or_skip(test) else { return };
    let fork_server = ForkServer::start(&python, &TRAINER_MODULES);
    let script = || TrainerScript::new(&fork_server.client_command(), "accelerate_loop.py", 9);
    resume_accelerate_loop_repeatedly(&script());
    resume_accelerate_loop(&script().with_deepspeed(3, false), "z3_fp32", MAX_LOSS_DIFFERENCE, 1);
    resume_accelerate_loop(&script().with_deepspeed(2, true), "z2_bf16", MAX_LOSS_DIFFERENCE_BF16, 4);
    // the states of FSDP fit any number of ranks, but the RNG states and the scheduler do not
    resume_accelerate_loop(&script().with_fsdp("full"), "fsdp_full", MAX_LOSS_DIFFERENCE, 1);
    resume_accelerate_loop(&script().with_fsdp("sharded"), "fsdp_sharded", MAX_LOSS_DIFFERENCE, 4);
}

/// Resumes a script three times: on 4 ranks from a checkpoint of 2, on 2 from one of 4, and on 1
/// from one of 2. Compares the losses.
fn resume_accelerate_loop_repeatedly(script: &TrainerScript) {
    let (ran, whole) = script.run(2, "whole", "", &[]);
    ran.expect_success();
    assert_eq!(whole.len(), 9, "nine steps");
    for (from, old, workers, step) in [("whole", 2, 4, 3), ("w4", 4, 2, 6), ("whole", 2, 1, 3)] {
        let saved: PathBuf = script.job_dir.path(&format!("out-{from}/step_{step}"));
        let before = read_files_below(&saved);
        let (report, resume) = (format!("w{workers}"), format!("resume: {{from: out-{from}/step_{step}}}"));
        let (ran, rest) = script.run(workers, &report, &resume, &[]);
        let snapshot = format!("accelerate_{old}_ranks_to_{workers}");
        script.assert_notices(&snapshot, &ran.expect_success());
        assert_eq!(rest.len() as u64, 9 - step, "{rest:?}");
        assert_losses_continue(&rest, &whole, MAX_LOSS_DIFFERENCE);
        assert_begins_at(script, &report, workers, step);
        assert_eq!(
            script.count_distinct_values(&report, workers, "torch"),
            workers as usize,
            "streams of torch differ between ranks"
        );
        assert_eq!(
            script.count_distinct_values(&report, workers, "python"),
            1,
            "streams of Python stay equal on all ranks"
        );
        assert!(before == read_files_below(&saved), "the original was changed");
    }
}

/// Runs the script on two ranks without interruption. Then resumes the run's checkpoint of step 3
/// with `workers` ranks, and compares notices and losses. Losses may differ by the relative
/// difference `close`. `name` is part of the name of the snapshot with the notices.
fn resume_accelerate_loop(script: &TrainerScript, name: &str, close: f64, workers: u32) {
    let (ran, whole) = script.run(2, "whole", "", &[]);
    ran.expect_success();
    assert_eq!(whole.len(), 9, "nine steps");
    let saved = script.job_dir.path("out-whole/step_3");
    let before = read_files_below(&saved);
    let report = format!("w{workers}");
    let (ran, rest) = script.run(workers, &report, "resume: {from: out-whole/step_3}", &[]);
    let snapshot = format!("accelerate_{name}_{report}");
    script.assert_notices(&snapshot, &ran.expect_success());
    assert_losses_continue(&rest, &whole, close);
    assert_begins_at(script, &report, workers, 3);
    assert!(before == read_files_below(&saved), "the original was changed");
}

/// Checks that an HF Trainer script with FSDP resumes on one rank from a checkpoint of two ranks.
/// Every process runs a separate Python, without a fork server.
#[test]
fn a_trainer_script_with_fsdp_resumes_with_another_number_of_ranks() {
    let test = "a_trainer_script_with_fsdp_resumes_with_another_number_of_ranks";
    let Some(python) = support::find_deepspeed_python_or_skip(test) else { return };
    let python = [python.to_str().unwrap().to_owned()];
    let script = TrainerScript::new(&python, "trainer.py", 9).with_fsdp("sharded");
    let (ran, whole) = script.run(2, "whole", "", &[]);
    ran.expect_success();
    let (ran, rest) = script.run(1, "w1", RESUME, &["--resume_from_checkpoint", "{resume}"]);
    script.assert_notices("trainer_fsdp_sharded_w1", &ran.expect_success());
    assert_eq!(rest.len(), 9, "three steps of the first run and six more: {rest:?}");
    assert_losses_continue(&rest, &whole, MAX_LOSS_DIFFERENCE);
    assert_begins_at(&script, "w1", 1, 3);
}
