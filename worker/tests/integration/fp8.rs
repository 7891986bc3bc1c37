//! Tests of FP8 training: losses are close to those of bf16, and have the same bits for every
//! number of workers, ZeRO stage and number of threads, with and without recomputation. Unsupported
//! models are rejected.
use crate::common::*;
use diagnostic::codes;
use jobspec::{LoraSpec, LoraTargets, ModelSpec, Precision, RecomputeMode, TrainSpec};
use protocol::preflight::Preflight;
use worker::{train::step::RankStepReport, trainer_stages::ResolvedSpec};

/// Creates the `train.model` section of a tiny Llama. The dimensions of its layers' matrices are
/// multiples of 16, as FP8 requires.
fn create_fp8_llama() -> ModelSpec {
    ModelSpec {
        vocab_size: 61,
        hidden_size: 48,
        intermediate_size: 80,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 16,
        ..create_odd_sized_model()
    }
}

/// Creates the `train.model` section of a GPT-2 with the sizes of [`create_fp8_llama`] and three
/// attention heads.
fn create_fp8_gpt2() -> ModelSpec {
    ModelSpec { family: "gpt2".into(), num_key_value_heads: 3, num_attention_heads: 3, ..create_fp8_llama() }
}

/// Creates the `train` section of `model` in this precision.
fn create_spec_with_precision(model: ModelSpec, stage: u8, precision: Precision) -> TrainSpec {
    let mut spec = TrainSpec { precision, ..create_train_spec(model, stage, 8, 2, 13) };
    (spec.optimizer.lr, spec.steps) = (1e-2, 40);
    spec
}

/// Trains a new run for `steps` steps on learnable samples, and returns the losses.
fn train_and_collect_losses(spec: &TrainSpec, steps: u64) -> Vec<f64> {
    let mut running = build_trainer(spec, create_single_rank_comm(), 2).start_with_random_params();
    let source = LearnableSamples { vocab: spec.model.vocab_size, ignored: Some(7) };
    (0..steps).map(|_| running.run_step(&source, RankStepReport::default()).unwrap().0.loss).collect()
}

/// The largest accepted relative difference between a loss in FP8 and in bf16: about twice the
/// measured differences, 0.029 and 0.040.
const MAX_BF16_DIFFERENCE: f64 = 0.08;

/// Compares the losses of 30 steps in FP8 with those in bf16. The loss falls below 60 % of its
/// first value in these steps.
#[test]
fn fp8_losses_are_close_to_bf16_losses() {
    for (name, model) in [("llama", create_fp8_llama()), ("gpt2", create_fp8_gpt2())] {
        let [fp8, bf16] = [Precision::Fp8, Precision::Bf16]
            .map(|p| train_and_collect_losses(&create_spec_with_precision(model.clone(), 0, p), 30));
        let difference = |(a, b): (&f64, &f64)| ((a - b) / b).abs();
        let differences: Vec<f64> = fp8.iter().zip(&bf16).map(difference).collect();
        let largest = differences.iter().copied().fold(0.0, f64::max);
        println!(
            "{name}: {:.3} to {:.3}, bf16 {:.3}; largest difference {largest:.4}",
            fp8[0], fp8[29], bf16[29]
        );
        assert!(fp8[29] < 0.6 * fp8[0], "{name}: {fp8:?}");
        assert!(largest < MAX_BF16_DIFFERENCE, "{name}: {largest}, {fp8:?}, {bf16:?}");
        assert!(differences.iter().all(|d| *d > 0.0), "{name}: a step has the loss of bf16");
    }
}

#[test]
fn fp8_losses_have_the_same_bits_for_every_world_size_stage_thread_count_and_recomputation() {
    for (name, model) in [("llama", create_fp8_llama()), ("gpt2", create_fp8_gpt2())] {
        let fp8 = |stage| create_spec_with_precision(model.clone(), stage, Precision::Fp8);
        let expected = train_new_run(&fp8(0), 1, 1, 3);
        for (stage, world, threads) in
            [(0, 1, 3), (0, 2, 1), (1, 2, 1), (2, 4, 1), (3, 1, 1), (3, 2, 2), (3, 4, 1)]
        {
            let losses = train_new_run(&fp8(stage), world, threads, 3);
            assert_eq!(losses, expected, "{name}: stage {stage}, {world} ranks, {threads} threads");
        }
        let recompute = TrainSpec { recompute: RecomputeMode::Block, ..fp8(3) };
        assert_eq!(train_new_run(&recompute, 2, 1, 3), expected, "{name}: recomputation");
    }
}

/// Checks LoRA training with FP8, in which the adapters are computed in bf16 and the frozen
/// matrices in FP8.
#[test]
fn lora_losses_with_fp8_matrices_have_the_same_bits_on_every_world_size() {
    let lora_spec = |stage, precision| {
        let targets = LoraTargets::AllLinear;
        let lora = LoraSpec { from: None, rank: 3, alpha: 6.0, dropout: Some(0.2), rslora: false, targets };
        TrainSpec { lora: Some(lora), ..create_spec_with_precision(create_fp8_llama(), stage, precision) }
    };
    let expected = train_new_run(&lora_spec(0, Precision::Fp8), 1, 1, 3);
    assert_eq!(train_new_run(&lora_spec(3, Precision::Fp8), 2, 1, 3), expected);
    assert_ne!(train_new_run(&lora_spec(0, Precision::Bf16), 1, 1, 3), expected);
}

#[test]
fn models_that_fp8_does_not_support_are_rejected() {
    let error = |model: ModelSpec| {
        let spec = create_spec_with_precision(model, 0, Precision::Fp8);
        let model = ResolvedSpec::new(&spec, spec.model.vocab_size).and_then(ResolvedSpec::build_model);
        model.err().unwrap().diagnostic().clone()
    };
    let ModelSpec { head_dim, .. } = create_fp8_llama();
    for (model, dimension, size) in [
        (ModelSpec { hidden_size: 40, ..create_fp8_llama() }, "hidden_size", 40),
        (ModelSpec { intermediate_size: 81, ..create_fp8_llama() }, "intermediate_size", 81),
        (ModelSpec { head_dim: head_dim - 4, ..create_fp8_llama() }, "num_attention_heads * head_dim", 24),
        (ModelSpec { intermediate_size: 100, ..create_fp8_gpt2() }, "n_inner", 100),
    ] {
        let error = error(model);
        assert_eq!(error.code(), codes::model::MODEL_FP8_UNSUPPORTED, "{error}");
        assert_eq!(error.subject(), Some("train.precision"));
        assert_eq!(error.field("dimension").unwrap(), dimension);
        assert_eq!(error.field("size").unwrap(), size);
    }
    let moe = error(ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(4),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(16),
        ..create_fp8_llama()
    });
    assert_eq!(moe.code(), codes::model::MODEL_FP8_UNSUPPORTED, "{moe}");
    assert_eq!((moe.subject(), moe.field("dimension")), (Some("train.precision"), None));
}

/// Checks that the preflight checks reject sizes that FP8 does not support, and that the memory
/// plan counts the FP8 operands.
#[test]
fn preflight_checks_and_memory_plan_consider_fp8() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("corpus.txt"), "the quick brown fox ".repeat(500)).unwrap();
    let check = |precision: &str, intermediate: u32| {
        let text = format!(
            "run: {{workdir: {:?}}}\ntrain:\n  precision: {precision}\n  data: {{files: [corpus.txt], seq_len: 48}}\n  \
             model: {{hidden_size: 96, intermediate_size: {intermediate}, num_hidden_layers: 3}}\n",
            dir.path()
        );
        let loaded = jobspec::load_job(jobspec::JobSource::Text { name: "test".into(), text }, &[]);
        worker::TrainPreflight.check_job(&loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0, 1, 1)
    };
    let errors = check("fp8", 250).errors;
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(errors[0].code(), codes::model::MODEL_FP8_UNSUPPORTED);
    assert_eq!(errors[0].subject(), Some("train.precision"));
    let total = |precision| check(precision, 256).memory[0].total;
    // The largest operands are those of the gradient with respect to the input of gate and up, for
    // 4 × 48 rows, with two bytes per element.
    let operands = 4 * 48 * 512 + 96 * 512;
    assert_eq!(total("fp8") - total("bf16"), 2 * operands);
}
