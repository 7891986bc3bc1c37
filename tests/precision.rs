//! Training in bf16 and fp16, end to end, with real processes: the losses are bit-equal for every
//! number of workers and after a resume, and every overflow is reported.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::Value;
use std::fs;
use support::{FinishedRun, JobDirectory};

const NEVER: [&str; 2] = ["resume.from=never", "checkpoint.every=never"];
const FROM_10: [&str; 2] = ["resume.from=runs/tiny/checkpoints/step-00000010", "checkpoint.dir=elsewhere"];

fn run(place: &JobDirectory, set: &[&[&str]]) -> FinishedRun {
    place.run(&set.concat()).succeeded()
}

#[test]
fn bf16_is_bit_equal_and_its_checkpoints_resume_in_fp32() {
    let place = JobDirectory::new();
    let bf16 = ["train.precision=bf16"];
    let whole = run(&place, &[&bf16, &NEVER]).losses();
    assert_ne!(whole, run(&place, &[&NEVER]).losses(), "16 bits are not 32");
    for set in [
        ["cluster.workers_per_host=1", "train.zero.stage=0", "train.recompute=none"],
        ["cluster.workers_per_host=3", "train.zero.stage=1", "train.recompute=block"],
        ["cluster.workers_per_host=4", "train.zero.stage=2", "train.recompute=none"],
    ] {
        assert_eq!(run(&place, &[&bf16, &NEVER, &set]).losses(), whole, "{set:?}");
    }
    run(&place, &[&bf16, &["resume.from=never", "checkpoint.keep=0"]]);
    let other = ["cluster.workers_per_host=3", "train.zero.stage=1"];
    assert_eq!(run(&place, &[&bf16, &FROM_10, &other]).losses(), whole[10..]);
    // the gathered weights are the master weights, rounded once
    let config = fs::read_to_string(place.path("elsewhere/weights/config.json")).unwrap();
    assert!(config.contains("\"bfloat16\""), "{config}");

    let fp32 = run(&place, &[&FROM_10]);
    assert_ne!(fp32.losses(), whole[10..]);
    place.assert_snapshot("bf16_resumes_in_fp32", &fp32.notices().join("\n"));
}

#[test]
fn bf16_without_master_weights_is_bit_equal_and_resumes_with_and_without_them() {
    let place = JobDirectory::new();
    let alone = ["train.precision=bf16", "train.master_weights=false"];
    let masters = ["train.precision=bf16"];
    let whole = run(&place, &[&alone, &NEVER]).losses();
    assert_ne!(whole, run(&place, &[&masters, &NEVER]).losses());
    for set in [
        ["cluster.workers_per_host=1", "train.zero.stage=0", "train.recompute=none"],
        ["cluster.workers_per_host=3", "train.zero.stage=1", "train.recompute=block"],
        ["cluster.workers_per_host=4", "train.zero.stage=2", "train.recompute=none"],
    ] {
        assert_eq!(run(&place, &[&alone, &NEVER, &set]).losses(), whole, "{set:?}");
    }
    run(&place, &[&alone, &["resume.from=never", "checkpoint.keep=0"]]);
    let verified = place.launch(&["ckpt", "verify", "runs/tiny/checkpoints"]);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    let other = ["cluster.workers_per_host=3", "train.zero.stage=1"];
    assert_eq!(run(&place, &[&alone, &FROM_10, &other]).losses(), whole[10..]);
    let gathered = place.launch(&["ckpt", "gather", "runs/tiny/checkpoints/step-00000020", "gathered"]);
    assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
    // the weights that the run gathered have the same bytes: bf16 weights are not rounded
    let weights = |directory: &str| fs::read(place.path(directory).join("model.safetensors")).unwrap();
    assert!(weights("gathered") == weights("runs/tiny/checkpoints/weights"));

    let back = run(&place, &[&masters, &FROM_10, &["checkpoint.dir=another"]]);
    place.assert_snapshot("master_weights_appear", &back.notices().join("\n"));
    let from = ["resume.from=another/step-00000020", "checkpoint.dir=third", "train.steps=22"];
    let again = run(&place, &[&alone, &from]);
    place.assert_snapshot("master_weights_disappear", &again.notices().join("\n"));
}

#[test]
fn fp16_skips_steps_that_overflow_and_reports_each() {
    let place = JobDirectory::new();
    let fp16 = ["train.precision=fp16", "train.loss_scale.initial_scale_power=32"];
    let ran = run(&place, &[&fp16, &["resume.from=never", "checkpoint.keep=0"]]);
    let whole = ran.losses();
    assert_eq!(whole.len(), 20, "skipped steps are not counted");
    let overflows: Vec<u64> = ran.named("overflow").iter().map(|e| e["skipped"].as_u64().unwrap()).collect();
    assert!(overflows.len() > 2 && overflows.iter().copied().eq(1..=overflows.len() as u64), "{overflows:?}");
    let scales: Vec<f64> = ran.named("overflow").iter().map(|e| e["loss_scale"].as_f64().unwrap()).collect();
    assert!(scales.windows(2).all(|s| s[1] == s[0] / 2.0), "{scales:?}");
    place.assert_snapshot("fp16_skipped_steps", &ran.notices().join("\n"));
    let files = support::files_below(&place.path("runs"));
    let metrics = files.iter().find(|f| f.ends_with("metrics.jsonl")).expect("a run directory");
    let metrics = fs::read_to_string(place.path("runs").join(metrics)).unwrap();
    let metrics = metrics.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    assert_eq!(metrics.filter(|e| e["event"] == "overflow").count(), overflows.len());

    let three = ["cluster.workers_per_host=3", "train.zero.stage=1"];
    let again = run(&place, &[&fp16, &FROM_10, &three]);
    assert_eq!(again.losses(), whole[10..], "the loss scale is resumed");
    let after: Vec<u64> = again.named("overflow").iter().map(|e| e["skipped"].as_u64().unwrap()).collect();
    assert!(overflows.ends_with(&after), "{after:?} of {overflows:?}");

    let least = "train.loss_scale.min_loss_scale=2147483648";
    let failed = place.run(&[fp16[0], fp16[1], least, NEVER[0], NEVER[1]]);
    assert_eq!(failed.code, 1, "{}", failed.stderr);
    assert_eq!(failed.failure_code(), "gradient-not-finite", "{}", failed.failure());
    place.assert_snapshot("fp16_smallest_scale_overflows", failed.failure_message());
}
