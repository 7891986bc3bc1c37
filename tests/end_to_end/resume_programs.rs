//! Checks that the built-in runtime resumes from checkpoints of HF Trainer, Accelerate, torch and
//! DeepSpeed (scripts/golden/resume) with the losses that these programs computed in their next
//! steps.
use crate::support::{
    resumed_job::{ResumedJob, parse_numbers},
    trainer_script::read_files_below,
};
use serde_json::Value;
use std::path::Path;

/// The programs whose runs were recorded. The fields are the directory, the kind of checkpoint that
/// `ckpt inspect` reports, and the number of ranks.
const PROGRAMS: [(&str, &str, u32); 19] = [
    ("trainer_1", "HF Trainer", 1),
    ("trainer_2", "HF Trainer", 2),
    ("trainer_z3", "HF Trainer with DeepSpeed", 2),
    ("trainer_z2_bf16", "HF Trainer with DeepSpeed", 2),
    ("trainer_fsdp_full", "HF Trainer with FSDP, full", 2),
    ("trainer_fsdp_sharded", "HF Trainer with FSDP, sharded", 2),
    ("accelerate_ddp", "Accelerate", 2),
    ("accelerate_fsdp_full", "Accelerate with FSDP, full", 2),
    ("accelerate_fsdp_sharded", "Accelerate with FSDP, sharded", 2),
    ("accelerate_z3_bf16", "Accelerate with DeepSpeed", 2),
    ("dcp", "torch distributed checkpoint", 2),
    ("trainer_sgd", "HF Trainer", 1),
    ("z2_sgd", "DeepSpeed", 2),
    ("z3_sgd", "DeepSpeed", 2),
    ("z2_lion", "DeepSpeed", 2),
    // the optimizer stores the experts of a layer as one tensor, the weights store them separately
    ("trainer_mixtral", "HF Trainer", 1),
    ("trainer_qwen3_moe", "HF Trainer", 1),
    ("z2_mixtral", "DeepSpeed", 2),
    ("z3_qwen3_moe", "DeepSpeed", 2),
];
/// The optimizer setting of a job that resumes from the recorded checkpoint of a program that
/// trained with SGD.
const SGD: &str = "train.optimizer={name: sgd, lr: 5e-2, momentum: 0.9, weight_decay: 0.1}";
/// The optimizer setting of a job that resumes from the recorded checkpoint of a program that
/// trained with Lion.
const LION: &str = "train.optimizer={name: lion, lr: 1e-4, betas: [0.9, 0.99], weight_decay: 0.1}";

/// Compares the losses of launch after a resume with those that the recorded program computed. The
/// losses must have the same bits for any number of workers and any ZeRO stage.
#[test]
fn resumed_losses_equal_those_of_the_programs() {
    for (name, kind, world) in PROGRAMS {
        let (resumed, recording) = ResumedJob::from_program(name);
        let inspected =
            resumed.job_dir.run_launch(&["ckpt", "inspect", "--json", resumed.from.to_str().unwrap()]);
        let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
        assert_eq!((&inspected["kind"], &recording["world"]), (&kind.into(), &world.into()), "{name}");
        let before = read_files_below(&resumed.from);
        let mut bits = Vec::new();
        let (optimizer, rate) = match name.rsplit_once('_') {
            Some((_, "sgd")) => (&[SGD][..], 5e-2),
            Some((_, "lion")) => (&[LION][..], 1e-4),
            _ => (&[][..], 2e-3),
        };
        for (workers, stage) in [(1, 0), (2, 2), (3, 3)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(["checkpoint.every=never"]).collect();
            let ran = resumed.run(&[&set, optimizer].concat()).expect_success();
            let event = ran.events_named("resume")[0];
            assert_eq!((&event["step"], &event["world"]), (&3.into(), &world.into()), "{name}");
            resumed.assert_losses(&ran);
            let lr = ran.events_named("step")[0]["lr"].as_f64().unwrap();
            assert!((lr - rate * 17.0 / 18.0).abs() < 1e-12, "{name}: {lr}");
            if workers == 1 {
                resumed
                    .job_dir
                    .assert_snapshot(&format!("notices_{name}"), &ran.notice_messages().join("\n"));
            }
            bits.push(ran.collect_losses());
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "{name}: losses depend on the number of workers");
        assert!(before == read_files_below(&resumed.from), "{name}: the original was changed");
    }
}

/// Checks that the momentum of SGD survives the conversion of a DeepSpeed checkpoint to the
/// universal and then to the native format. DeepSpeed's own converter to the universal format
/// supports only Adam.
#[test]
fn momentum_of_sgd_is_converted_through_the_universal_format() {
    let (mut resumed, _) = ResumedJob::from_program("z3_sgd");
    let (universal, native) = (resumed.job_dir.path("universal"), resumed.job_dir.path("native"));
    let convert = |from: &Path, to: &Path, kind: &str| {
        let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
        let converted = resumed.job_dir.run_launch(&["ckpt", "convert", from, to, "--to", kind]);
        assert!(converted.status.success(), "{}", String::from_utf8_lossy(&converted.stderr));
    };
    convert(&resumed.from, &universal, "universal");
    convert(&universal, &native, "native");
    let direct = resumed.run(&[SGD, "checkpoint.every=never"]).expect_success();
    for from in [universal, native] {
        resumed.from = from;
        let ran = resumed.run(&[SGD, "checkpoint.every=never"]).expect_success();
        resumed.assert_losses(&ran);
        assert_eq!(ran.collect_losses(), direct.collect_losses(), "{}", resumed.from.display());
    }
}

/// Checks that a checkpoint that is incomplete or of another model is rejected. The run must not
/// start from scratch.
#[test]
fn incomplete_and_mismatched_checkpoints_are_rejected() {
    let every_part: &[&str] = &[];
    let freeze: &[&str] = &["train.freeze=[model.layers.*]"];
    let (llama, wide): (&[&str], &[&str]) = (&["train.model.family=llama"], &["train.model.hidden_size=24"]);
    let shard = "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt";
    let cases = [
        ("trainer_fsdp_full", &["optimizer.bin"][..], &[][..]),
        ("trainer_1", &["optimizer.pt"], &[]),
        ("trainer_fsdp_sharded", &["optimizer_0"], &[]),
        ("accelerate_ddp", &["optimizer.bin"], &[]),
        ("trainer_frozen", every_part, &[]),
        ("trainer_frozen", every_part, freeze),
        ("z2_lion", every_part, &[]),
        ("trainer_sgd", every_part, &[]),
        ("trainer_2", every_part, llama),
        ("dcp", every_part, llama),
        ("trainer_2", every_part, wide),
        ("accelerate_fsdp_full", every_part, wide),
        ("accelerate_fsdp_sharded", every_part, wide),
        ("dcp", every_part, wide),
        ("dcp", &["__1_0.distcp"], &[]),
        ("trainer_z3", &[shard], &[]),
    ];
    for (number, (name, excluded, set)) in cases.into_iter().enumerate() {
        let (mut resumed, _) = ResumedJob::from_program(name);
        resumed.from = resumed.copy_checkpoint_without(excluded);
        let rejected = resumed.expect_rejection(set);
        let failure = rejected.expect_failure();
        let text = format!(
            "{name} without {excluded:?}, {set:?}: {}\n{}\n{}",
            failure["code"],
            failure["message"].as_str().unwrap(),
            failure["help"]
        );
        resumed.job_dir.assert_snapshot(&format!("rejected_{number:02}"), &text);
    }
}

/// Checks that layers that another program froze while it trained stay frozen when a job with the
/// same frozen layer resumes from that program's checkpoint. First, a job freezes the same layer.
/// If a recording stores optimizer states by number, without names, the run must assign them to the
/// parameters that the job trains.
///
/// Then resumes a recording whose optimizer states are stored by parameter name with a job that
/// trains every parameter. The states that the recording lacks start at zero, and the run reports
/// this.
#[test]
fn frozen_parameters_stay_frozen() {
    let freeze = "train.freeze=[model.layers.0.*]";
    for name in ["trainer_frozen", "accelerate_frozen", "z2_frozen", "z3_frozen"] {
        let (resumed, _) = ResumedJob::from_program(name);
        let mut bits = Vec::new();
        for (workers, stage) in [(1, 0), (3, 3)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> =
                set.iter().map(String::as_str).chain([freeze, "checkpoint.every=never"]).collect();
            let ran = resumed.run(&set).expect_success();
            resumed.assert_losses(&ran);
            if workers == 1 {
                resumed
                    .job_dir
                    .assert_snapshot(&format!("notices_{name}"), &ran.notice_messages().join("\n"));
            }
            bits.push(ran.collect_losses());
        }
        assert_eq!(bits[0], bits[1], "{name}: losses depend on the number of workers");
    }
    let (resumed, _) = ResumedJob::from_program("z3_frozen");
    let ran = resumed.run(&["train.steps=4", "checkpoint.every=never"]).expect_success();
    resumed.job_dir.assert_snapshot("notices_of_missing_states", &ran.notice_messages().join("\n"));
}

/// Checks that a run from weights without a training state begins at step 0 with a new optimizer
/// and the first sample, also after conversion to a native checkpoint.
#[test]
fn weights_without_a_training_state_start_at_step_0() {
    let (mut resumed, recording) = ResumedJob::from_program("trainer_1");
    let state = ["optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"];
    resumed.from = resumed.copy_checkpoint_without(&state);
    let ran = resumed.run(&["train.steps=3", "checkpoint.every=never"]).expect_success();
    assert_eq!(
        (&ran.events_named("resume")[0]["step"], &ran.events_named("step")[0]["step"]),
        (&0.into(), &1.into())
    );
    let mut messages = ran.notice_messages().join("\n");
    // the same samples with weights that were trained on them
    let first = ran.events_named("step")[0]["loss"].as_f64().unwrap();
    assert!(first < parse_numbers(&recording["losses"])[0], "{first}");
    let native = resumed.job_dir.path("native");
    let (from, to) = (resumed.from.to_str().unwrap(), native.to_str().unwrap());
    let converted =
        resumed.job_dir.run_launch(&["ckpt", "convert", from, to, "--to", "native", "--world", "3"]);
    assert!(converted.status.success(), "{}", String::from_utf8_lossy(&converted.stderr));
    resumed.from = native;
    let again = resumed.run(&["train.steps=3", "checkpoint.every=never"]).expect_success();
    assert_eq!(again.collect_losses(), ran.collect_losses());
    messages += &format!("\nconverted:\n{}", again.notice_messages().join("\n"));
    resumed.job_dir.assert_snapshot("notices_of_weights_only", &messages);
}

/// Checks that a run in fp16 resumes with the program's loss scale and counts only the steps that
/// updated weights.
#[test]
fn the_loss_scale_is_resumed() {
    let (resumed, recording) = ResumedJob::from_program("z2_fp16");
    let loss_scale = &recording["loss_scale"];
    let set = ["train.precision=fp16", "train.steps=4", "train.loss_scale.initial_scale_power=4"];
    let ran = resumed.run(&set).expect_success();
    assert!(loss_scale["skipped"].as_u64().unwrap() > 0, "{loss_scale}");
    let done = loss_scale["updates"].as_u64().unwrap();
    assert_eq!(
        (&ran.events_named("resume")[0]["step"], &ran.events_named("step")[0]["step"]),
        (&done.into(), &(done + 1).into())
    );
    let path = resumed.job_dir.checkpoint_dir();
    let inspected = resumed.job_dir.run_launch(&["ckpt", "inspect", "--json", path.to_str().unwrap()]);
    let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
    let scale = &inspected["cursor"]["loss_scale"];
    assert_eq!(scale["scale"], loss_scale["scale"], "{scale}");
    // also after conversion to a native checkpoint
    let native = resumed.job_dir.path("native");
    let converted = resumed.job_dir.run_launch(&[
        "ckpt",
        "convert",
        resumed.from.to_str().unwrap(),
        native.to_str().unwrap(),
        "--to",
        "native",
    ]);
    assert!(converted.status.success(), "{}", String::from_utf8_lossy(&converted.stderr));
    let again = ResumedJob { from: native, ..resumed };
    let through = again.run(&set).expect_success();
    assert_eq!(through.collect_losses(), ran.collect_losses());
}
