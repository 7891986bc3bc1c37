//! Tests of dropout: losses have the same bits for every number of workers and ZeRO stage, with and
//! without recomputation, and after a resume. Gradients match finite differences, and evaluation
//! has no dropout.
use crate::common::{
    families::{create_pretrained_model_spec, golden_model_directory, start_from_pretrained},
    golden::read_json,
    *,
};
use jobspec::*;
use serde_json::json;

/// The number of training steps of each run whose losses are compared.
const STEPS: u64 = 3;

/// Creates the `train.model` section of a new GPT-2 model.
fn create_gpt2_model() -> ModelSpec {
    ModelSpec {
        family: "gpt2".into(),
        num_key_value_heads: 3,
        intermediate_size: 168,
        tie_word_embeddings: true,
        ..create_odd_sized_model()
    }
}

/// Creates the `train` section of `model` with dropout rate `rate`.
fn create_dropout_spec(model: ModelSpec, rate: f64, stage: u8) -> TrainSpec {
    create_train_spec(ModelSpec { dropout: Some(rate), ..model }, stage, 8, 1, 11)
}

#[test]
fn losses_with_dropout_have_the_same_bits_for_every_world_size_stage_and_recomputation() {
    for (name, model, rate, precision) in [
        ("gpt2", create_gpt2_model(), 0.1, Precision::Fp32),
        ("gpt2", create_gpt2_model(), 0.3, Precision::Bf16),
        ("llama", create_odd_sized_model(), 0.2, Precision::Fp32),
    ] {
        let create_dropout_spec =
            |stage| TrainSpec { precision, ..create_dropout_spec(model.clone(), rate, stage) };
        let expected = train_new_run(&create_dropout_spec(0), 1, 1, STEPS);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
        for stage in 0..=3 {
            for world in [1, 2, 3, 4] {
                let mut spec = create_dropout_spec(stage);
                if (stage as usize + world).is_multiple_of(2) {
                    spec.recompute = RecomputeMode::Block;
                }
                let losses = train_new_run(&spec, world, 1 + world % 2, STEPS);
                assert_eq!(losses, expected, "{name}, {precision:?}: world {world}, stage {stage}");
            }
        }
        let without =
            TrainSpec { model: ModelSpec { dropout: Some(0.0), ..model.clone() }, ..create_dropout_spec(0) };
        let plain = train_new_run(&without, 1, 1, STEPS);
        assert_ne!(plain, expected, "{name}: dropout changes the losses");
        let absent =
            TrainSpec { model: ModelSpec { dropout: None, ..model.clone() }, ..create_dropout_spec(0) };
        assert_eq!(
            train_new_run(&absent, 1, 1, STEPS),
            plain,
            "{name}: a new model has no dropout by default"
        );
    }
}

/// Checks that another micro-batch size changes only the order of sums, because the dropout mask
/// depends on the sample and not on its micro-batch.
#[test]
fn dropout_masks_do_not_depend_on_the_micro_batch_size() {
    for model in [create_gpt2_model(), create_odd_sized_model()] {
        let first_loss = |micro| {
            let mut spec = create_dropout_spec(model.clone(), 0.3, 0);
            spec.batch.micro = micro;
            f64::from_bits(train_new_run(&spec, 1, 1, 1)[0].0)
        };
        let reference = first_loss(1);
        for micro in [2, 4, 8] {
            let loss = first_loss(micro);
            assert!((loss / reference - 1.0).abs() < 1e-6, "micro-batch {micro}: {loss}, {reference}");
        }
    }
}

#[test]
fn dropout_with_sliding_windows_packing_and_experts_has_the_same_bits_on_any_world_size() {
    for name in
        ["mistral_packed", "mistral_window", "qwen2_sliding_layers", "gemma2", "gpt2_packed", "qwen3_moe"]
    {
        let create_dropout_spec = |stage| {
            let model = ModelSpec {
                dropout: Some(0.25),
                ..create_pretrained_model_spec(&golden_model_directory(name))
            };
            create_train_spec(model, stage, 4, 1, 13)
        };
        let run = |spec: &TrainSpec, world| {
            expect_equal_on_all_ranks(run_on_ranks(world, |c| {
                train_steps(&mut start_from_pretrained(spec, c), 2)
            }))
        };
        let expected = run(&create_dropout_spec(0), 1);
        let mut recomputed = create_dropout_spec(3);
        recomputed.recompute = RecomputeMode::Block;
        for (spec, world) in [(create_dropout_spec(1), 2), (recomputed, 3), (create_dropout_spec(2), 4)] {
            assert_eq!(run(&spec, world), expected, "{name}: world {world}");
        }
        let mut parallel = create_dropout_spec(3);
        if name == "qwen3_moe" {
            parallel.experts.expert_parallel_size = 2;
            assert_eq!(run(&parallel, 2), expected, "expert-parallel size 2");
        }
        let mut plain = create_dropout_spec(0);
        plain.model.dropout = Some(0.0);
        assert_ne!(run(&plain, 1), expected, "{name}: dropout changes the losses");
    }
}

#[test]
fn a_run_with_dropout_resumes_with_the_same_bits() {
    let expected = train_new_run(&create_dropout_spec(create_gpt2_model(), 0.1, 0), 1, 1, 5).split_off(3);
    for (from, n, to, m) in [(3, 3, 1, 2), (0, 2, 3, 4), (2, 1, 3, 3)] {
        let dir = tempfile::tempdir().unwrap();
        run_on_ranks(n, |c| {
            let spec = create_dropout_spec(create_gpt2_model(), 0.1, from);
            let mut running = build_trainer(&spec, c, 1).start_with_random_params();
            train_steps(&mut running, 3);
            save_checkpoint(&mut running, &spec, dir.path());
        });
        let resume_with = |rate| {
            expect_equal_on_all_ranks(run_on_ranks(m, |c| {
                let (mut running, notices) = resume_newest_checkpoint(
                    &create_dropout_spec(create_gpt2_model(), rate, to),
                    c,
                    dir.path(),
                );
                (train_steps(&mut running, 2), notices)
            }))
        };
        let (losses, notices) = resume_with(0.1);
        assert_eq!(losses, expected, "{n} workers at stage {from} to {m} at stage {to}");
        assert!(notices.is_empty(), "{notices:?}");
        let (losses, notices) = resume_with(0.2);
        assert_ne!(losses, expected);
        assert_notices_match_snapshot("dropout_another_rate", &notices, dir.path());
    }
}

#[test]
fn gradients_with_dropout_equal_finite_differences() {
    for (name, model, rate) in [("gpt2", create_gpt2_model(), 0.3), ("llama", create_odd_sized_model(), 0.4)]
    {
        let mut running = build_trainer(&create_dropout_spec(model, rate, 0), create_single_rank_comm(), 1)
            .start_with_random_params();
        train_steps(&mut running, 4);
        let (slope, norm) = measure_slope_and_gradient_norm(&mut running, 0.01);
        assert!(
            (slope - norm).abs() < 0.005 * norm,
            "{name}: finite difference {slope}, norm of the gradient {norm}"
        );
    }
}

#[test]
fn evaluation_has_no_dropout() {
    for model in [create_gpt2_model(), create_odd_sized_model()] {
        let source = SyntheticSamples { vocab: 131 };
        let loss = |rate| {
            let mut running =
                build_trainer(&create_dropout_spec(model.clone(), rate, 0), create_single_rank_comm(), 1)
                    .start_with_random_params();
            // Training must not leave dropout enabled.
            running
                .trainer
                .compute_global_batch_gradients(&source, 0, worker::train::step::RankStepReport::default())
                .unwrap();
            running.trainer.evaluate(&source, 0, 3, &|| false).unwrap().unwrap().loss.to_bits()
        };
        assert_eq!(loss(0.5), loss(0.0));
    }
}

/// Checks that each dropout rate in config.json changes the losses: the three rates of GPT-2, and
/// the single rate of other families. `train.model.dropout` overrides the rates of config.json.
#[test]
fn every_dropout_rate_of_config_json_has_an_effect() {
    let losses = |name: &str, rates: &[(&str, f64)], dropout: Option<f64>, seed| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = read_json(&golden_model_directory(name).join("config.json"));
        for (key, rate) in rates {
            config[*key] = json!(rate);
        }
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let weights = "model.safetensors";
        std::fs::copy(golden_model_directory(name).join(weights), dir.path().join(weights)).unwrap();
        let mut spec = create_train_spec(create_pretrained_model_spec(dir.path()), 3, 4, 1, 13);
        (spec.model.dropout, spec.seed) = (dropout, seed);
        run_on_ranks(2, |c| train_steps(&mut start_from_pretrained(&spec, c), 2)).remove(0)
    };
    for (name, keys) in [
        ("gpt2", &["attn_pdrop", "embd_pdrop", "resid_pdrop"][..]),
        ("qwen3", &["attention_dropout"]),
        ("gemma3", &["attention_dropout"]),
        ("mixtral", &["attention_dropout"]),
    ] {
        let plain = losses(name, &[], None, 7);
        let all_rates: Vec<(&str, f64)> = keys.iter().map(|key| (*key, 0.1)).collect();
        let mut distinct = vec![plain.clone()];
        for rate in &all_rates {
            let with_rate = losses(name, &[*rate], None, 7);
            assert!(!distinct.contains(&with_rate), "{name}: {rate:?} has no effect");
            distinct.push(with_rate);
        }
        let whole = losses(name, &all_rates, None, 7);
        assert_ne!(whole, plain, "{name}");
        assert_ne!(losses(name, &all_rates, None, 8), whole, "{name}: the seed selects the masks");
        assert_eq!(losses(name, &[], Some(0.1), 7), whole, "{name}: `train.model.dropout` sets all rates");
        assert_eq!(losses(name, &all_rates, Some(0.0), 7), plain, "{name}: rate 0");
    }
    // If config.json of a GPT-2 has no dropout rates, the rates are 0.1.
    let config = read_json(&golden_model_directory("gpt2").join("config.json"));
    let dir = tempfile::tempdir().unwrap();
    let mut without_rates = config.as_object().unwrap().clone();
    without_rates.retain(|key, _| !key.ends_with("_pdrop"));
    std::fs::write(dir.path().join("config.json"), serde_json::Value::Object(without_rates).to_string())
        .unwrap();
    std::fs::copy(
        golden_model_directory("gpt2").join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    let spec = create_train_spec(create_pretrained_model_spec(dir.path()), 3, 4, 1, 13);
    let default_rates = run_on_ranks(1, |c| train_steps(&mut start_from_pretrained(&spec, c), 2)).remove(0);
    assert_eq!(default_rates, losses("gpt2", &[], Some(0.1), 7));
}

/// Checks that embedding, attention and MLP of each layer of GPT-2 have different dropout masks, by
/// the elements that add zero to the residual stream. Dropped elements of the embedding get no
/// gradient.
#[test]
fn each_dropout_module_of_gpt2_has_its_own_mask() {
    let rate = 0.3;
    let mut spec = create_dropout_spec(create_gpt2_model(), rate, 0);
    spec.batch = BatchSpec { global: 1, micro: 1 };
    let mut running = build_trainer(&spec, create_single_rank_comm(), 1).start_with_random_params();
    running
        .trainer
        .compute_global_batch_gradients(
            &SyntheticSamples { vocab: 131 },
            0,
            worker::train::step::RankStepReport::default(),
        )
        .unwrap();
    let positions = running.trainer.engine.shards[0].unit.tensor_range(1);
    let gradients = running.trainer.engine.finish_gradient(0).unwrap().owned;
    let (work, layers) = (&running.trainer.activations, spec.model.num_hidden_layers as usize);
    let assert_share = |module: &str, dropped: &[bool]| {
        let share = dropped.iter().filter(|d| **d).count() as f64 / dropped.len() as f64;
        // Four standard errors of 11 rows of 42 elements.
        assert!((share - rate).abs() < 0.086, "{module}: {share}");
    };
    let dropped: Vec<bool> = work.layer_inputs[0].host_slice().iter().map(|x| *x == 0.0).collect();
    assert_share("embedding", &dropped);
    let gradients = &gradients.host_slice()[positions][..dropped.len()];
    assert!(gradients.iter().any(|g| *g != 0.0));
    assert!(dropped.iter().zip(gradients).all(|(dropped, g)| !dropped || *g == 0.0), "position embeddings");
    let unchanged = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a == b).collect::<Vec<_>>();
    let mut masks = vec![dropped];
    for l in 0..layers {
        let (before, middle, after) = (
            work.layer_inputs[l].host_slice(),
            work.saved[l].find_buffer("residual").unwrap().host_slice(),
            work.layer_inputs[l + 1].host_slice(),
        );
        for (name, mask) in [("attention", unchanged(before, middle)), ("mlp", unchanged(middle, after))] {
            assert_share(&format!("{name} of layer {l}"), &mask);
            assert!(!masks.contains(&mask), "{name} of layer {l} has the mask of another module");
            masks.push(mask);
        }
    }
}
