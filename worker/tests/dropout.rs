//! Dropout of a model: the same bits for any number of workers, any stage, with and without recomputation, over stop and resume; gradients
//! against differences of the loss; none in evaluation.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::{
    families::{folder, from, started},
    golden::json,
    *,
};
use contract::job::*;
use serde_json::json;
use std::{path::Path, sync::Arc};
use worker::{
    resume::{CheckpointDirs, resume},
    stages::RunningTrainer,
    storage_layout::StorageLayout,
};

const STEPS: u64 = 3;

/// A new GPT-2 whose sizes nothing divides.
fn gpt2() -> ModelSpec {
    ModelSpec {
        family: "gpt2".into(),
        num_key_value_heads: 3,
        intermediate_size: 168,
        tie_word_embeddings: true,
        ..odd_model()
    }
}

fn spec(model: ModelSpec, rate: f64, stage: u8) -> TrainSpec {
    train_spec(ModelSpec { dropout: Some(rate), ..model }, stage, 8, 1, 11)
}

fn alone() -> Arc<dyn comm::Comm> {
    Arc::new(comm::local::group(1).remove(0))
}

#[test]
fn any_world_stage_threads_and_recomputation() {
    for (what, model, rate, precision) in [
        ("gpt2", gpt2(), 0.1, Precision::Fp32),
        ("gpt2", gpt2(), 0.3, Precision::Bf16),
        ("llama", odd_model(), 0.2, Precision::Fp32),
    ] {
        let spec = |stage| TrainSpec { precision, ..spec(model.clone(), rate, stage) };
        let expected = fresh_run(&spec(0), 1, 1, STEPS);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
        for stage in 0..=3 {
            for world in [1, 2, 3, 4] {
                let mut spec = spec(stage);
                if (stage as usize + world).is_multiple_of(2) {
                    spec.recompute = Recompute::Block;
                }
                let got = fresh_run(&spec, world, 1 + world % 2, STEPS);
                assert_eq!(got, expected, "{what}, {precision:?}: world {world}, stage {stage}");
            }
        }
        let without = TrainSpec { model: ModelSpec { dropout: Some(0.0), ..model.clone() }, ..spec(0) };
        let plain = fresh_run(&without, 1, 1, STEPS);
        assert_ne!(plain, expected, "{what}: dropout changes the losses");
        let absent = TrainSpec { model: ModelSpec { dropout: None, ..model.clone() }, ..spec(0) };
        assert_eq!(
            fresh_run(&absent, 1, 1, STEPS),
            plain,
            "{what}: a new model drops nothing unless it is told to"
        );
    }
}

/// A mask belongs to a sample, so samples may be put into micro-batches in any way: sums differ in their order alone.
#[test]
fn other_micro_batches_drop_the_same() {
    for model in [gpt2(), odd_model()] {
        let of = |micro| {
            let mut spec = spec(model.clone(), 0.3, 0);
            spec.batch.micro = micro;
            f64::from_bits(fresh_run(&spec, 1, 1, 1)[0].0)
        };
        let one = of(1);
        for micro in [2, 4, 8] {
            assert!((of(micro) / one - 1.0).abs() < 1e-6, "{micro}: {} and {one}", of(micro));
        }
    }
}

#[test]
fn windows_packing_and_experts() {
    for name in
        ["mistral_packed", "mistral_window", "qwen2_sliding_layers", "gemma2", "gpt2_packed", "qwen3_moe"]
    {
        let spec = |stage| {
            let model = ModelSpec { dropout: Some(0.25), ..from(&folder(name)) };
            train_spec(model, stage, 4, 1, 13)
        };
        let run = |spec: &TrainSpec, world| {
            let all = on_ranks(world, |c| steps(&mut started(spec, c), 2));
            assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
            all.into_iter().next().unwrap()
        };
        let expected = run(&spec(0), 1);
        let mut recomputed = spec(3);
        recomputed.recompute = Recompute::Block;
        for (spec, world) in [(spec(1), 2), (recomputed, 3), (spec(2), 4)] {
            assert_eq!(run(&spec, world), expected, "{name}: world {world}");
        }
        let mut parallel = spec(3);
        if name == "qwen3_moe" {
            parallel.experts.expert_parallel_size = 2;
            assert_eq!(run(&parallel, 2), expected, "experts of two ranks");
        }
        let mut plain = spec(0);
        plain.model.dropout = Some(0.0);
        assert_ne!(run(&plain, 1), expected, "{name}: dropout changes the losses");
    }
}

fn go_on(spec: &TrainSpec, comm: Arc<dyn comm::Comm>, root: &Path) -> (RunningTrainer, Vec<String>) {
    let world = comm.world();
    let mut bound = build(spec, comm, 1);
    let place = CheckpointDirs { root, workdir: root, layout: &StorageLayout::shared(world) };
    let mut said = Vec::new();
    let resumed = resume(&mut bound, &job(spec, root, false), &place, "made up", &mut |event| {
        said.push(format!("{event:?}"));
        Ok(())
    });
    let cursor = resumed.unwrap().expect("a checkpoint to resume from").cursor;
    (bound.start_at(cursor), said)
}

#[test]
fn a_run_goes_on_with_the_same_bits() {
    let expected = fresh_run(&spec(gpt2(), 0.1, 0), 1, 1, 5).split_off(3);
    for (from, n, to, m) in [(3, 3, 1, 2), (0, 2, 3, 4), (2, 1, 3, 3)] {
        let dir = tempfile::tempdir().unwrap();
        on_ranks(n, |c| {
            let spec = spec(gpt2(), 0.1, from);
            let mut running = build(&spec, c, 1).start_fresh();
            steps(&mut running, 3);
            let mut saver = saver(&running, &job(&spec, dir.path(), false), dir.path());
            saver.begin(&mut running).unwrap();
            saver.finish(&running).unwrap();
        });
        let go_on = |rate| {
            on_ranks(m, |c| {
                let (mut running, said) = go_on(&spec(gpt2(), rate, to), c, dir.path());
                (steps(&mut running, 2), said)
            })
            .remove(0)
        };
        let (after, said) = go_on(0.1);
        assert_eq!(after, expected, "{n} workers at stage {from} to {m} at stage {to}");
        assert_eq!(said.len(), 1, "nothing but the resume to tell: {said:?}");
        let (other, said) = go_on(0.2);
        assert_ne!(other, expected);
        assert!(said.iter().any(|s| s.contains("train.model.dropout is 0.2 here and 0.1 in")), "{said:?}");
    }
}

#[test]
fn the_loss_changes_as_the_gradient_says() {
    for (what, model, rate) in [("gpt2", gpt2(), 0.3), ("llama", odd_model(), 0.4)] {
        let mut running = build(&spec(model, rate, 0), alone(), 1).start_fresh();
        steps(&mut running, 4);
        let (slope, norm) = slope_and_norm(&mut running, 0.01);
        assert!(
            (slope - norm).abs() < 0.005 * norm,
            "{what}: {slope} by differences, {norm} by the backward"
        );
    }
}

#[test]
fn evaluation_drops_nothing() {
    for model in [gpt2(), odd_model()] {
        let source = MadeUp { vocab: 131 };
        let loss = |rate| {
            let mut running = build(&spec(model.clone(), rate, 0), alone(), 1).start_fresh();
            // A step of training before it leaves nothing behind.
            running.trainer.accumulate(&source, 0, worker::train::step::StepReport::default()).unwrap();
            running.trainer.evaluate(&source, 0, 3).unwrap().loss.to_bits()
        };
        assert_eq!(loss(0.5), loss(0.0));
    }
}

/// Each rate of GPT-2's config.json by itself, as the Hub has them, and the one of the others; the job's word counts before the
/// folder's.
#[test]
fn every_rate_of_a_folder_is_had() {
    let losses = |name: &str, rates: &[(&str, f64)], dropout: Option<f64>, seed| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = json(&folder(name).join("config.json"));
        for (key, rate) in rates {
            config[*key] = json!(rate);
        }
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let weights = "model.safetensors";
        std::fs::copy(folder(name).join(weights), dir.path().join(weights)).unwrap();
        let mut spec = train_spec(from(dir.path()), 3, 4, 1, 13);
        (spec.model.dropout, spec.seed) = (dropout, seed);
        on_ranks(2, |c| steps(&mut started(&spec, c), 2)).remove(0)
    };
    for (name, keys) in [
        ("gpt2", &["attn_pdrop", "embd_pdrop", "resid_pdrop"][..]),
        ("qwen3", &["attention_dropout"]),
        ("gemma3", &["attention_dropout"]),
        ("mixtral", &["attention_dropout"]),
    ] {
        let plain = losses(name, &[], None, 7);
        let all: Vec<(&str, f64)> = keys.iter().map(|key| (*key, 0.1)).collect();
        let mut seen = vec![plain.clone()];
        for only in &all {
            let one = losses(name, &[*only], None, 7);
            assert!(!seen.contains(&one), "{name}: {only:?} changes nothing");
            seen.push(one);
        }
        let whole = losses(name, &all, None, 7);
        assert_ne!(whole, plain, "{name}");
        assert_ne!(losses(name, &all, None, 8), whole, "{name}: the seed decides");
        assert_eq!(losses(name, &[], Some(0.1), 7), whole, "{name}: the job's rate for all");
        assert_eq!(losses(name, &all, Some(0.0), 7), plain, "{name}: none");
    }
    // GPT-2's own rates are 0.1 where config.json names none.
    let config = json(&folder("gpt2").join("config.json"));
    let dir = tempfile::tempdir().unwrap();
    let mut bare = config.as_object().unwrap().clone();
    bare.retain(|key, _| !key.ends_with("_pdrop"));
    std::fs::write(dir.path().join("config.json"), serde_json::Value::Object(bare).to_string()).unwrap();
    std::fs::copy(folder("gpt2").join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let spec = train_spec(from(dir.path()), 3, 4, 1, 13);
    let absent = on_ranks(1, |c| steps(&mut started(&spec, c), 2)).remove(0);
    assert_eq!(absent, losses("gpt2", &[], Some(0.1), 7));
}

/// Embedding, attention and MLP of GPT-2 each drop their own output, which then adds nothing and passes no gradient on.
#[test]
fn each_module_of_gpt2_drops_its_output() {
    let rate = 0.3;
    let mut spec = spec(gpt2(), rate, 0);
    spec.batch = BatchSpec { global: 1, micro: 1 };
    let mut running = build(&spec, alone(), 1).start_fresh();
    running
        .trainer
        .accumulate(&MadeUp { vocab: 131 }, 0, worker::train::step::StepReport::default())
        .unwrap();
    let positions = running.trainer.engine.shards[0].unit.range(1);
    let gradients = running.trainer.engine.finish_gradient(0).unwrap();
    let (work, layers) = (&running.trainer.work, spec.model.num_hidden_layers as usize);
    let share = |what: &str, dropped: &[bool]| {
        let share = dropped.iter().filter(|d| **d).count() as f64 / dropped.len() as f64;
        // four standard errors of 11 rows of 42
        assert!((share - rate).abs() < 0.086, "{what}: {share}");
    };
    let dropped: Vec<bool> = work.x[0].host().iter().map(|x| *x == 0.0).collect();
    share("embedding", &dropped);
    let gradients = &gradients.host()[positions][..dropped.len()];
    assert!(gradients.iter().any(|g| *g != 0.0));
    assert!(dropped.iter().zip(gradients).all(|(dropped, g)| !dropped || *g == 0.0), "of positions");
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a == b).collect::<Vec<_>>();
    let mut masks = vec![dropped];
    for l in 0..layers {
        let (before, middle, after) = (work.x[l].host(), work.saved[l].0[4].host(), work.x[l + 1].host());
        for (what, mask) in [("attention", same(before, middle)), ("mlp", same(middle, after))] {
            share(&format!("{what} of layer {l}"), &mask);
            assert!(!masks.contains(&mask), "{what} of layer {l} has a mask of its own");
            masks.push(mask);
        }
    }
}
