//! Tests on the emulated GPU that training computes several operations in one kernel: rounding in
//! the update of AdamW, and GELU and bias gradients in the epilogues of matmuls. The tests count
//! calls, so each runs in a separate process.
use crate::call_counts::call_count;
use crate::common::*;
use crate::emulated::*;
use crate::own_process::is_own_process;
use device::Ops;
use jobspec::*;
use std::sync::Arc;
use worker::train::step::RankStepReport;

/// Creates the `train` section of a GPT-2 whose sizes allow matmul epilogues.
fn create_gpt2_spec(precision: Precision) -> TrainSpec {
    let model = create_sized_model("gpt2", [64, 32, 64, 2, 2, 2], true, 16);
    TrainSpec { precision, ..create_train_spec(model, 0, 2, 1, 16) }
}

/// Trains a new run of one rank for four steps. Returns the losses, and the numbers of kernels and
/// matmuls of the last step.
fn train_and_count(spec: &TrainSpec, has_epilogues: bool) -> (LossCurve, [i64; 2]) {
    let cuda = open_emulated_gpu();
    cuda.set_matmul_epilogues_enabled(has_epilogues);
    let ops: Arc<dyn Ops> = cuda;
    let mut running = build_trainer_on(spec, create_single_rank_comm(), ops).start_with_random_params();
    let source = LearnableSamples { vocab: running.train_spec().model.vocab_size, ignored: None };
    let (mut curve, mut counts) = (LossCurve::new(), [0; 2]);
    for _ in 0..4 {
        let read = || ["cuLaunchKernel", "cublasLtMatmul"].map(call_count);
        let before = read();
        let outcome = running.run_step(&source, RankStepReport::default()).unwrap().0;
        curve.push((outcome.loss.to_bits(), outcome.grad_norm.to_bits()));
        let after = read();
        counts = [after[0] - before[0], after[1] - before[1]];
    }
    (curve, counts)
}

#[test]
fn adamw_rounds_parameters_in_its_kernel() {
    if !is_own_process("cuda_fused_kernels::adamw_rounds_parameters_in_its_kernel") {
        return;
    }
    let with_optimizer = |name, precision| {
        let mut spec = create_llama_train_spec(0, precision);
        spec.optimizer.name = name;
        train_and_count(&spec, false).1[0]
    };
    // In fp32, no optimizer has parameters to round. In bf16, Lion rounds each unit (the embedding,
    // two layers and the head) with one more kernel, and AdamW with none.
    let difference = |precision| {
        with_optimizer(OptimizerName::Lion, precision) - with_optimizer(OptimizerName::Adamw, precision)
    };
    assert_eq!([Precision::Fp32, Precision::Bf16].map(difference), [0, 4]);
}

#[test]
fn gpt2_trains_with_matmul_epilogues() {
    if !is_own_process("cuda_fused_kernels::gpt2_trains_with_matmul_epilogues") {
        return;
    }
    for recompute in [RecomputeMode::None, RecomputeMode::Block] {
        let spec = TrainSpec { recompute, ..create_gpt2_spec(Precision::Bf16) };
        let (separate, [kernels, matmuls]) = train_and_count(&spec, false);
        let (fused, [fewer_kernels, equal_matmuls]) = train_and_count(&spec, true);
        assert_curves_near(&fused, &separate, 2e-2, "epilogues");
        assert_ne!(fused, separate, "epilogues round less often");
        assert_eq!(matmuls, equal_matmuls);
        // In each of two layers and two micro-batches: GELU, and two kernels for each of four bias
        // gradients.
        assert_eq!(kernels - fewer_kernels, 2 * 2 * (1 + 2 * 4), "{recompute:?}");
    }
    let fp32 = create_gpt2_spec(Precision::Fp32);
    assert_eq!(train_and_count(&fp32, true), train_and_count(&fp32, false), "fp32 has no epilogues");
}

#[test]
fn epilogues_keep_the_bits_for_any_number_of_ranks() {
    let spec = create_gpt2_spec(Precision::Bf16);
    let train = |world| {
        expect_equal_on_all_ranks(run_on_ranks(world, |comm| {
            let cuda = open_emulated_gpu();
            cuda.set_matmul_epilogues_enabled(true);
            let comm = Arc::new(comm::staged::StagedComm::new(comm, cuda.clone()));
            train_steps(&mut build_trainer_on(&spec, comm, cuda).start_with_random_params(), 2)
        }))
    };
    assert_eq!(train(2), train(1));
}
