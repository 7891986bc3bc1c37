//! The built-in runtime goes on from what HF Trainer, Accelerate, torch and DeepSpeed saved (scripts/golden/resume), with the
//! losses with which those programs went on.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::Value;
use std::path::Path;
use support::{
    continued::{Continued, notices, numbers},
    scripts::contents,
};

/// Programs, what their folders are called, and how many ranks wrote them.
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
    // the experts of a layer as one tensor in the optimizer, one by one among the weights
    ("trainer_mixtral", "HF Trainer", 1),
    ("trainer_qwen3_moe", "HF Trainer", 1),
    ("z2_mixtral", "DeepSpeed", 2),
    ("z3_qwen3_moe", "DeepSpeed", 2),
];
/// SGD as those programs had it.
const SGD: &str = "train.optimizer={name: sgd, lr: 5e-2, momentum: 0.9, weight_decay: 0.1}";
/// And Lion, which keeps one moment.
const LION: &str = "train.optimizer={name: lion, lr: 1e-4, betas: [0.9, 0.99], weight_decay: 0.1}";

/// Where a program stopped the built-in runtime goes on: on any number of workers, at any stage, with the same bits.
#[test]
fn the_losses_are_those_with_which_trainer_accelerate_and_torch_went_on() {
    for (name, kind, world) in PROGRAMS {
        let (continued, told) = Continued::program(name);
        let inspected =
            continued.place.launch(&["ckpt", "inspect", "--json", continued.from.to_str().unwrap()]);
        let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
        assert_eq!((&inspected["kind"], &told["world"]), (&kind.into(), &world.into()), "{name}");
        let before = contents(&continued.from);
        let mut bits = Vec::new();
        let (own, rate) = match name.rsplit_once('_') {
            Some((_, "sgd")) => (&[SGD][..], 5e-2),
            Some((_, "lion")) => (&[LION][..], 1e-4),
            _ => (&[][..], 2e-3),
        };
        for (workers, stage) in [(1, 0), (2, 2), (3, 3)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(["checkpoint.every=never"]).collect();
            let ran = continued.run(&[&set, own].concat()).succeeded();
            let resumed = ran.kind("resume")[0];
            assert_eq!((&resumed["step"], &resumed["world"]), (&3.into(), &world.into()), "{name}");
            continued.follows(&ran);
            let lr = ran.kind("step")[0]["lr"].as_f64().unwrap();
            assert!((lr - rate * 17.0 / 18.0).abs() < 1e-12, "{name}: {lr}");
            let said = notices(&ran);
            let differs: Vec<&String> = said
                .iter()
                .filter(|m| {
                    m.contains("goes on with") || m.contains("learning rate") || m.contains("scheduler")
                })
                .collect();
            match name {
                // its one group decays norms as well
                "accelerate_ddp" => {
                    let decays = "`no_decay` goes on with weight_decay 0 (checkpoint: 0.1)";
                    assert!(differs.len() == 1 && differs[0].contains(decays), "{differs:?}");
                }
                _ => assert!(differs.is_empty(), "{name}: {differs:?}"),
            }
            assert!(said.iter().any(|m| m.contains("data goes on at sample 12 ")), "{name}: {said:?}");
            bits.push(ran.losses());
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "{name}: the number of workers changes the losses");
        assert!(before == contents(&continued.from), "{name}: the original was changed");
    }
}

/// SGD's momentum by way of the universal format, which DeepSpeed's own converter has for Adam alone.
#[test]
fn momentum_goes_through_the_universal_format() {
    let (mut continued, _) = Continued::program("z3_sgd");
    let (universal, native) = (continued.place.path("universal"), continued.place.path("native"));
    let convert = |from: &Path, to: &Path, kind: &str| {
        let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
        let made = continued.place.launch(&["ckpt", "convert", from, to, "--to", kind]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    };
    convert(&continued.from, &universal, "universal");
    convert(&universal, &native, "native");
    let direct = continued.run(&[SGD, "checkpoint.every=never"]).succeeded();
    for from in [universal, native] {
        continued.from = from;
        let ran = continued.run(&[SGD, "checkpoint.every=never"]).succeeded();
        continued.follows(&ran);
        assert_eq!(ran.losses(), direct.losses(), "{}", continued.from.display());
    }
}

/// Folders from which a run can't go on as it was: one error that says what, where and why; never a silent new beginning.
#[test]
fn what_is_not_whole_or_not_the_job_s_is_refused() {
    let refused = |name: &str, left_out: &[&str], set: &[&str], parts: &[&str]| {
        let (mut continued, _) = Continued::program(name);
        continued.from = continued.copy_without(left_out);
        let why = continued.refused(set);
        assert!(why.contains(continued.from.to_str().unwrap()), "{why} doesn't say where");
        for part in parts {
            assert!(why.contains(part), "{name} without {left_out:?}: {why} lacks {part}");
        }
    };
    let lost = "it is the training state of step 3 but lacks the optimizer's";
    refused("trainer_fsdp_full", &["optimizer.bin"], &[], &[lost]);
    refused("trainer_1", &["optimizer.pt"], &[], &[lost]);
    refused("trainer_fsdp_sharded", &["optimizer_0"], &[], &[lost]);
    refused(
        "accelerate_ddp",
        &["optimizer.bin"],
        &[],
        &["it is the training state of step unknown but lacks"],
    );
    let frozen = "the optimizer's state in optimizer.pt isn't read: it has states of 12 weights, the model has 21 (some may be frozen)";
    refused("trainer_frozen", &[], &[], &[lost, frozen]);
    // nor can they be those of other weights than the ones that were trained
    let other = "nor is it of the weights trained here: it has states of 12 weights, the model has 3";
    refused("trainer_frozen", &[], &["train.freeze=[model.layers.*]"], &[lost, frozen, other]);
    refused("z2_lion", &[], &[], &["lacks the optimizer's exp_avg_sq of model.embed_tokens.weight"]);
    refused("trainer_sgd", &[], &[], &["lacks the optimizer's exp_avg of model.embed_tokens.weight"]);
    refused(
        "trainer_2",
        &[],
        &["train.model.family=llama"],
        &[
            "its config.json says qwen2, the job's model is llama",
            "the job's model hasn't model.layers.0.self_attn.q_proj.bias",
        ],
    );
    refused("dcp", &[], &["train.model.family=llama"], &["the job's model hasn't"]);
    for name in ["trainer_2", "accelerate_fsdp_full", "accelerate_fsdp_sharded", "dcp"] {
        refused(
            name,
            &[],
            &["train.model.hidden_size=24"],
            &["of other shapes are model.embed_tokens.weight [257, 16] (the job: [257, 24])"],
        );
    }
    refused("dcp", &["__1_0.distcp"], &[], &["__1_0.distcp"]);
    refused("trainer_z3", &["global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"], &[], &["rank 0 of 2"]);
}

/// Programs that froze a layer go on with it frozen. Where the optimizer's states have numbers alone they are those of what
/// the job trains; where they have names, a job that trains everything begins the others anew, and says so.
#[test]
fn what_was_frozen_stays_frozen() {
    let freeze = "train.freeze=[model.layers.0.*]";
    for name in ["trainer_frozen", "accelerate_frozen", "z2_frozen", "z3_frozen"] {
        let (continued, _) = Continued::program(name);
        let mut bits = Vec::new();
        for (workers, stage) in [(1, 0), (3, 3)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> =
                set.iter().map(String::as_str).chain([freeze, "checkpoint.every=never"]).collect();
            let ran = continued.run(&set).succeeded();
            continued.follows(&ran);
            let said = notices(&ran);
            let guessed = said.iter().any(|m| m.contains("numbers the states of 12 of 21 weights"));
            assert_eq!(guessed, name == "trainer_frozen", "{name}: {said:?}");
            assert!(!said.iter().any(|m| m.contains("begin anew")), "{name}: {said:?}");
            bits.push(ran.losses());
        }
        assert_eq!(bits[0], bits[1], "{name}: the number of workers changes the losses");
    }
    let (continued, _) = Continued::program("z3_frozen");
    let said = notices(&continued.run(&["train.steps=4", "checkpoint.every=never"]).succeeded());
    assert!(said.iter().any(|m| m.contains("9 parameters have no optimizer state")), "{said:?}");
}

/// Weights without a training state begin one: a new optimizer, step 0, the first sample. So does a checkpoint of ours that
/// was made of them.
#[test]
fn weights_alone_begin_at_step_0_and_say_so() {
    let (mut continued, told) = Continued::program("trainer_1");
    let state = ["optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"];
    continued.from = continued.copy_without(&state);
    let ran = continued.run(&["train.steps=3", "checkpoint.every=never"]).succeeded();
    assert_eq!((&ran.kind("resume")[0]["step"], &ran.kind("step")[0]["step"]), (&0.into(), &1.into()));
    let said = notices(&ran);
    let alone = "holds weights alone: the optimizer, the learning rate and the data begin at step 0";
    assert!(said.iter().any(|m| m.contains(alone)), "{said:?}");
    // the same samples with weights that have learnt from them
    let first = ran.kind("step")[0]["loss"].as_f64().unwrap();
    assert!(first < numbers(&told["losses"])[0], "{first}");
    let native = continued.place.path("native");
    let (from, to) = (continued.from.to_str().unwrap(), native.to_str().unwrap());
    let made = continued.place.launch(&["ckpt", "convert", from, to, "--to", "native", "--world", "3"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    continued.from = native;
    let again = continued.run(&["train.steps=3", "checkpoint.every=never"]).succeeded();
    assert_eq!(again.losses(), ran.losses());
    let said = notices(&again);
    assert!(said.len() == 1 && said[0].contains(alone), "{said:?}");
}

/// A run in fp16 goes on with the loss scale that the program's own had found, and counts the steps that updated the weights.
#[test]
fn the_loss_scale_goes_on() {
    let (continued, told) = Continued::program("z2_fp16");
    let told = &told["loss_scale"];
    let set = ["train.precision=fp16", "train.steps=4", "train.loss_scale.initial_scale_power=4"];
    let ran = continued.run(&set).succeeded();
    assert!(told["skipped"].as_u64().unwrap() > 0, "{told}");
    let done = told["updates"].as_u64().unwrap();
    assert_eq!(
        (&ran.kind("resume")[0]["step"], &ran.kind("step")[0]["step"]),
        (&done.into(), &(done + 1).into())
    );
    let path = continued.place.checkpoints();
    let inspected = continued.place.launch(&["ckpt", "inspect", "--json", path.to_str().unwrap()]);
    let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
    let scale = &inspected["cursor"]["loss_scale"];
    assert_eq!(scale["scale"], told["scale"], "{scale}");
    // by way of a checkpoint of ours it is the same
    let native = continued.place.path("native");
    let made = continued.place.launch(&[
        "ckpt",
        "convert",
        continued.from.to_str().unwrap(),
        native.to_str().unwrap(),
        "--to",
        "native",
    ]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let again = Continued { from: native, ..continued };
    let through = again.run(&set).succeeded();
    assert_eq!(through.losses(), ran.losses());
}
