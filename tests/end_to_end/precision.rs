//! Tests training in bf16 and fp16, end to end, with real processes. The losses are bit-equal for
//! every number of workers and after a resume, and every overflow is reported.
use crate::{
    emulated_amx,
    support::{self, FinishedRun, JobDirectory},
};
use serde_json::Value;
use std::fs;

/// The `--set` arguments of a run that neither loads nor saves a checkpoint.
const WITHOUT_CHECKPOINTS: [&str; 2] = ["resume.from=never", "checkpoint.every=never"];
/// The `--set` arguments of a run that resumes from step 10 and saves to another directory.
const RESUME_FROM_STEP_10: [&str; 2] =
    ["resume.from=runs/tiny/checkpoints/step-00000010", "checkpoint.dir=elsewhere"];

/// Runs the job with the settings (`path=value`) in all slices of `set`. Panics if the run fails.
fn run_successfully(job_dir: &JobDirectory, set: &[&[&str]]) -> FinishedRun {
    job_dir.run(&set.concat()).expect_success()
}

#[test]
fn bf16_is_bit_equal_and_its_checkpoints_resume_in_fp32() {
    let job_dir = JobDirectory::new();
    let bf16 = ["train.precision=bf16"];
    let whole = run_successfully(&job_dir, &[&bf16, &WITHOUT_CHECKPOINTS]).collect_losses();
    assert_ne!(
        whole,
        run_successfully(&job_dir, &[&WITHOUT_CHECKPOINTS]).collect_losses(),
        "16 bits are not 32"
    );
    for set in [
        ["cluster.workers_per_host=1", "train.zero.stage=0", "train.recompute=none"],
        ["cluster.workers_per_host=3", "train.zero.stage=1", "train.recompute=block"],
        ["cluster.workers_per_host=4", "train.zero.stage=2", "train.recompute=none"],
    ] {
        assert_eq!(
            run_successfully(&job_dir, &[&bf16, &WITHOUT_CHECKPOINTS, &set]).collect_losses(),
            whole,
            "{set:?}"
        );
    }
    run_successfully(&job_dir, &[&bf16, &["resume.from=never", "checkpoint.keep=0"]]);
    let other = ["cluster.workers_per_host=3", "train.zero.stage=1"];
    assert_eq!(
        run_successfully(&job_dir, &[&bf16, &RESUME_FROM_STEP_10, &other]).collect_losses(),
        whole[10..]
    );
    // the gathered weights are the master weights, rounded once
    let config = fs::read_to_string(job_dir.path("elsewhere/weights/config.json")).unwrap();
    assert!(config.contains("\"bfloat16\""), "{config}");

    let fp32 = run_successfully(&job_dir, &[&RESUME_FROM_STEP_10]);
    assert_ne!(fp32.collect_losses(), whole[10..]);
    job_dir.assert_snapshot("bf16_resumes_in_fp32", &fp32.notice_messages().join("\n"));
}

#[test]
fn bf16_without_master_weights_is_bit_equal_and_resumes_with_and_without_them() {
    let job_dir = JobDirectory::new();
    let alone = ["train.precision=bf16", "train.master_weights=false"];
    let masters = ["train.precision=bf16"];
    let whole = run_successfully(&job_dir, &[&alone, &WITHOUT_CHECKPOINTS]).collect_losses();
    assert_ne!(whole, run_successfully(&job_dir, &[&masters, &WITHOUT_CHECKPOINTS]).collect_losses());
    for set in [
        ["cluster.workers_per_host=1", "train.zero.stage=0", "train.recompute=none"],
        ["cluster.workers_per_host=3", "train.zero.stage=1", "train.recompute=block"],
        ["cluster.workers_per_host=4", "train.zero.stage=2", "train.recompute=none"],
    ] {
        assert_eq!(
            run_successfully(&job_dir, &[&alone, &WITHOUT_CHECKPOINTS, &set]).collect_losses(),
            whole,
            "{set:?}"
        );
    }
    run_successfully(&job_dir, &[&alone, &["resume.from=never", "checkpoint.keep=0"]]);
    let verified = job_dir.run_launch(&["ckpt", "verify", "runs/tiny/checkpoints"]);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    let other = ["cluster.workers_per_host=3", "train.zero.stage=1"];
    assert_eq!(
        run_successfully(&job_dir, &[&alone, &RESUME_FROM_STEP_10, &other]).collect_losses(),
        whole[10..]
    );
    let gathered = job_dir.run_launch(&["ckpt", "gather", "runs/tiny/checkpoints/step-00000020", "gathered"]);
    assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
    // the weights that the run gathered have the same bytes: bf16 weights are not rounded
    let weights = |directory: &str| fs::read(job_dir.path(directory).join("model.safetensors")).unwrap();
    assert!(weights("gathered") == weights("runs/tiny/checkpoints/weights"));

    let back = run_successfully(&job_dir, &[&masters, &RESUME_FROM_STEP_10, &["checkpoint.dir=another"]]);
    job_dir.assert_snapshot("master_weights_appear", &back.notice_messages().join("\n"));
    let from = ["resume.from=another/step-00000020", "checkpoint.dir=third", "train.steps=22"];
    let again = run_successfully(&job_dir, &[&alone, &from]);
    job_dir.assert_snapshot("master_weights_disappear", &again.notice_messages().join("\n"));
}

#[test]
fn fp16_skips_steps_that_overflow_and_reports_each() {
    let job_dir = JobDirectory::new();
    let fp16 = ["train.precision=fp16", "train.loss_scale.initial_scale_power=32"];
    let ran = run_successfully(&job_dir, &[&fp16, &["resume.from=never", "checkpoint.keep=0"]]);
    let whole = ran.collect_losses();
    assert_eq!(whole.len(), 20, "skipped steps are not counted");
    let overflows: Vec<u64> =
        ran.events_named("overflow").iter().map(|e| e["skipped"].as_u64().unwrap()).collect();
    assert!(overflows.len() > 2 && overflows.iter().copied().eq(1..=overflows.len() as u64), "{overflows:?}");
    let scales: Vec<f64> =
        ran.events_named("overflow").iter().map(|e| e["loss_scale"].as_f64().unwrap()).collect();
    assert!(scales.windows(2).all(|s| s[1] == s[0] / 2.0), "{scales:?}");
    job_dir.assert_snapshot("fp16_skipped_steps", &ran.notice_messages().join("\n"));
    let files = support::list_files_below(&job_dir.path("runs"));
    let metrics = files.iter().find(|f| f.ends_with("metrics.jsonl")).expect("a run directory");
    let metrics = fs::read_to_string(job_dir.path("runs").join(metrics)).unwrap();
    let metrics = metrics.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    assert_eq!(metrics.filter(|e| e["event"] == "overflow").count(), overflows.len());

    let three = ["cluster.workers_per_host=3", "train.zero.stage=1"];
    let again = run_successfully(&job_dir, &[&fp16, &RESUME_FROM_STEP_10, &three]);
    assert_eq!(again.collect_losses(), whole[10..], "the loss scale is resumed");
    let after: Vec<u64> =
        again.events_named("overflow").iter().map(|e| e["skipped"].as_u64().unwrap()).collect();
    assert!(overflows.ends_with(&after), "{after:?} of {overflows:?}");

    let least = "train.loss_scale.min_loss_scale=2147483648";
    let failed = job_dir.run(&[fp16[0], fp16[1], least, WITHOUT_CHECKPOINTS[0], WITHOUT_CHECKPOINTS[1]]);
    assert_eq!(failed.code, 1, "{}", failed.stderr);
    assert_eq!(failed.failure_code(), "gradient-not-finite", "{}", failed.expect_failure());
    job_dir.assert_snapshot("fp16_smallest_scale_overflows", failed.failure_message());
}

/// AMX is emulated on CPUs with AVX-512, and the emulator can compute wrong results.
#[test]
fn a_host_whose_amx_computes_wrong_results_is_reported() {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap();
    if flags.contains("amx_tile") || !flags.contains("avx512bw") {
        return;
    }
    let job_dir = JobDirectory::new();
    let set = ["train.precision=bf16", "train.steps=2"].into_iter().chain(WITHOUT_CHECKPOINTS);
    let arguments: Vec<&str> =
        ["job.yaml", "--json"].into_iter().chain(set.flat_map(|set| ["--set", set])).collect();
    let run = |error: Option<&str>| {
        let mut command = job_dir.launch_command(&arguments);
        command.env("LD_PRELOAD", emulated_amx::library());
        error.map(|value| command.env(emulated_amx::ERROR_VARIABLE, value));
        FinishedRun::from_output(&command.output().unwrap()).expect_success()
    };
    let list_warnings = |ran: &FinishedRun| -> Vec<Value> {
        let notices = ran.events_named("notice").into_iter().cloned();
        notices.filter(|notice| notice["diagnostics"][0]["code"] == "cpu-instructions-wrong").collect()
    };
    let (sound, wrong) = (run(None), run(Some("1")));
    assert_eq!(list_warnings(&sound), [] as [Value; 0]);
    let warnings = list_warnings(&wrong);
    assert_eq!((warnings.len(), &warnings[0]["rank"]), (1, &0.into()), "{warnings:?}");
    assert_eq!(warnings[0]["diagnostics"][0]["severity"], "warning");
    assert_eq!(wrong.collect_losses(), sound.collect_losses(), "the wrong results are not used");
}
