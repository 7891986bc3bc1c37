//! Tests of training on the emulated GPU: losses are close to those of the CPU and have the same
//! bits for any number of ranks. Checkpoints move between GPU and CPU.

use crate::emulated::*;
use crate::{common::*, emulated_nccl, own_process::is_own_process};
use comm::{
    AbortReason, Comm, CommError,
    nccl::{NcclComm, NcclLibrary},
    staged::StagedComm,
};
use device::{Dtype, Storage};
use jobspec::*;
use protocol::preflight::Preflight;
use std::{sync::Arc, time::Duration};

#[test]
fn fp32_losses_are_near_those_of_the_cpu_and_equal_for_any_stage_and_world_size() {
    let cpu = train_new_run(&create_llama_train_spec(0, Precision::Fp32), 1, 1, 3);
    let expected = train_on_emulated_gpu(&create_llama_train_spec(0, Precision::Fp32), 1, 3);
    assert_curves_near(&expected, &cpu, 1e-5, "fp32");
    for (stage, world) in [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2), (3, 4), (1, 4)] {
        assert_eq!(
            train_on_emulated_gpu(&create_llama_train_spec(stage, Precision::Fp32), world, 3),
            expected,
            "stage {stage}, {world} ranks"
        );
    }
}

#[test]
fn bf16_losses_are_near_those_of_the_cpu_and_equal_for_any_stage_and_world_size() {
    let cpu = train_new_run(&create_llama_train_spec(0, Precision::Bf16), 1, 1, 3);
    let expected = train_on_emulated_gpu(&create_llama_train_spec(0, Precision::Bf16), 1, 3);
    assert_curves_near(&expected, &cpu, 2e-2, "bf16");
    for (stage, world) in [(0, 2), (2, 2), (3, 4)] {
        assert_eq!(
            train_on_emulated_gpu(&create_llama_train_spec(stage, Precision::Bf16), world, 3),
            expected,
            "stage {stage}, {world} ranks"
        );
    }
}

/// Compares fp8 losses on the emulated GPU with those on the CPU, and losses of several stages and
/// world sizes. GPU and CPU are compared with a tolerance: their sums differ in the last bit, which
/// changes the fp8 values of some operands.
#[test]
fn fp8_losses_are_near_those_of_the_cpu_and_equal_for_any_stage_and_world_size() {
    let sizes = ModelSpec {
        hidden_size: 16,
        intermediate_size: 32,
        num_key_value_heads: 2,
        head_dim: 8,
        ..create_small_llama_model()
    };
    for model in [sizes.clone(), ModelSpec { family: "gpt2".into(), ..sizes }] {
        let spec =
            |stage| TrainSpec { model: model.clone(), ..create_llama_train_spec(stage, Precision::Fp8) };
        let cpu = train_new_run(&spec(0), 1, 1, 2);
        let expected = train_on_emulated_gpu(&spec(0), 1, 2);
        assert_curves_near(&expected, &cpu, 1e-2, &model.family);
        let others = if model.family == "gpt2" { &[(3, 2)][..] } else { &[(0, 2), (3, 4)] };
        for &(stage, world) in others {
            assert_eq!(
                train_on_emulated_gpu(&spec(stage), world, 2),
                expected,
                "{}: stage {stage}, {world} ranks",
                model.family
            );
        }
    }
}

/// Compares losses on the emulated GPU and on the CPU for models that differ from Llama. GPT-2 has
/// learned positions and biases. Gemma 2 has norm weights with an offset of one, softcaps and
/// sliding windows.
#[test]
fn losses_of_other_families_adapters_and_optimizers_are_near_those_of_the_cpu() {
    let family = |name| {
        create_train_spec(
            families::create_pretrained_model_spec(&families::golden_model_directory(name)),
            0,
            2,
            1,
            7,
        )
    };
    let mut muon = create_llama_train_spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let mut adafactor = create_llama_train_spec(2, Precision::Fp32);
    (adafactor.optimizer.name, adafactor.optimizer.beta1) = (OptimizerName::Adafactor, Some(0.9));
    let mut adapters = create_llama_train_spec(1, Precision::Fp32);
    let targets = LoraTargets::AllLinear;
    let lora = LoraSpec { from: None, rank: 2, alpha: 4.0, dropout: Some(0.3), rslora: false, targets };
    adapters.lora = Some(lora);
    let mut frozen = create_llama_train_spec(2, Precision::Fp32);
    frozen.freeze = vec!["*q_proj*".into(), "*norm*".into(), "*embed*".into()];
    let with_dropout = |spec: TrainSpec| {
        let model = ModelSpec { dropout: Some(0.2), ..spec.model.clone() };
        TrainSpec { model, ..spec }
    };
    for (what, spec) in [
        ("gpt2", family("gpt2")),
        ("gpt2 with dropout", with_dropout(family("gpt2"))),
        ("gemma2 with dropout", with_dropout(family("gemma2"))),
        ("gemma2", family("gemma2")),
        ("muon", muon),
        ("adafactor", adafactor),
        ("adapters", adapters),
        ("frozen in part", frozen),
    ] {
        let cpu = train_new_run(&spec, 1, 1, 2);
        let one = train_on_emulated_gpu(&spec, 1, 2);
        assert_curves_near(&one, &cpu, 2e-5, what);
        assert_eq!(train_on_emulated_gpu(&spec, 2, 2), one, "{what}: 2 ranks");
    }
}

/// Checks that offloading does not change losses and checkpoints. Offloaded optimizer states are
/// stored in host memory or in files, and copied to the GPU for each update.
#[test]
fn offloaded_optimizer_states_do_not_change_losses_and_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let offloads = [OffloadTarget::Cpu, OffloadTarget::Files(dir.path().join("states"))];
    for name in [
        OptimizerName::Adamw,
        OptimizerName::Sgd,
        OptimizerName::Lion,
        OptimizerName::Muon,
        OptimizerName::Adafactor,
    ] {
        let with_offload = |stage, offload: Option<&OffloadTarget>| {
            let mut spec = create_llama_train_spec(stage, Precision::Fp32);
            spec.freeze = vec!["*.1.mlp.*".into()];
            spec.optimizer.name = name;
            spec.optimizer.momentum = if name == OptimizerName::Adamw { 0.0 } else { 0.9 };
            spec.zero.offload = offload.cloned();
            spec
        };
        let expected =
            train_on_emulated_gpu(&with_offload(0, None), 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME);
        for (i, offload) in offloads.iter().enumerate() {
            let spec = |stage| with_offload(stage, Some(offload));
            for (stage, world) in [(0, 2), (3, 1)] {
                let losses =
                    train_on_emulated_gpu(&spec(stage), world, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME);
                assert_eq!(losses, expected, "{name:?}, {offload:?}, stage {stage}");
            }
            let root = dir.path().join(format!("{name:?} {i}"));
            train_and_save(&|n, f| run_on_shared_gpu(n, f), &spec(3), 2, &root, true);
            let rest = resume_and_train(&|n, f| run_on_shared_gpu(n, f), &spec(1), 2, &root);
            assert_eq!(rest, expected[STEPS_BEFORE_SAVE as usize..], "{name:?}, {offload:?}, resumed");
        }
    }
}

/// Checks that dropout in the bf16 kernels, which use tensor cores, drops the same elements on GPU
/// and CPU.
#[test]
fn bf16_losses_with_dropout_are_near_those_of_the_cpu() {
    let model = |rate| ModelSpec {
        dropout: Some(rate),
        ..families::create_pretrained_model_spec(&families::golden_model_directory("gpt2"))
    };
    let spec = |rate| TrainSpec { precision: Precision::Bf16, ..create_train_spec(model(rate), 0, 2, 1, 7) };
    let cpu = train_new_run(&spec(0.3), 1, 1, 2);
    let one = train_on_emulated_gpu(&spec(0.3), 1, 2);
    assert_curves_near(&one, &cpu, 2e-2, "gpt2");
    assert_eq!(train_on_emulated_gpu(&spec(0.3), 2, 2), one, "2 ranks");
    assert!(
        compute_max_relative_difference(&train_on_emulated_gpu(&spec(0.0), 1, 2), &cpu) > 5e-2,
        "dropout is seen at this tolerance"
    );
}

#[test]
fn expert_parallelism_does_not_change_losses() {
    let mut spec = create_moe_train_spec();
    spec.experts = ExpertsSpec { aux_loss: Some(0.1), z_loss: 0.01, ..ExpertsSpec::default() };
    let cpu = train_new_run(&spec, 1, 1, 2);
    let one = train_on_emulated_gpu(&spec, 1, 2);
    assert_curves_near(&one, &cpu, 2e-5, "a mixture of experts");
    assert_eq!(train_on_emulated_gpu(&spec, 2, 2), one, "2 ranks");
    spec.experts.expert_parallel_size = 2;
    assert_eq!(train_on_emulated_gpu(&spec, 2, 2), one, "one expert-parallel group of two ranks");
    spec.recompute = RecomputeMode::Block;
    assert_eq!(train_on_emulated_gpu(&spec, 4, 2), one, "two expert-parallel groups of two ranks");
}

#[test]
fn checkpoints_move_between_gpu_and_cpu() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let spec = |stage| create_llama_train_spec(stage, precision);
        let limit = if precision == Precision::Fp32 { 1e-5 } else { 2e-2 };
        let rest = |curve: LossCurve| curve[STEPS_BEFORE_SAVE as usize..].to_vec();
        let gpu = rest(train_on_emulated_gpu(&spec(0), 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME));
        let cpu = rest(train_new_run(&spec(0), 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME));
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&|n, f| run_on_shared_gpu(n, f), &spec(3), 2, dir.path(), true);
        // Saved and resumed on the GPU, the bits are those of an uninterrupted run on the GPU.
        for (stage, world) in [(0, 1), (1, 2)] {
            let resumed = resume_and_train(&|n, f| run_on_shared_gpu(n, f), &spec(stage), world, dir.path());
            assert_eq!(resumed, gpu, "{precision:?}, stage {stage}");
        }
        let gpu_to_cpu = resume_and_train(&run_on_cpu_ranks, &spec(2), 2, dir.path());
        assert_curves_near(&gpu_to_cpu, &cpu, limit, "saved on the GPU, resumed on the CPU");
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&run_on_cpu_ranks, &spec(1), 2, dir.path(), false);
        let cpu_to_gpu = resume_and_train(&|n, f| run_on_shared_gpu(n, f), &spec(3), 2, dir.path());
        assert_curves_near(&cpu_to_gpu, &gpu, limit, "saved on the CPU, resumed on the GPU");
    }
}

/// Checks that training with the emulated NCCL and training with communication through host memory
/// give the same bits. Both reduce in the same order.
#[test]
fn nccl_gives_the_same_bits_as_communication_through_the_host() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let expected = train_on_emulated_gpu(&create_llama_train_spec(0, precision), 1, 2);
        for (stage, world) in [(3, 1), (0, 2), (2, 2), (3, 2)] {
            let got = train_over_emulated_nccl(&create_llama_train_spec(stage, precision), world, 2);
            assert_eq!(got, expected, "stage {stage}, {world} ranks, {precision:?}");
        }
    }
}

/// Compares training without master weights on GPU and CPU. Stochastic rounding to bf16 draws the
/// same random numbers on both. The loss curves differ only by the rounding of sums.
#[test]
fn losses_without_master_weights_are_near_those_of_the_cpu_and_equal_for_any_world_size() {
    for name in [OptimizerName::Adamw, OptimizerName::Muon] {
        let spec = |stage| {
            let mut spec =
                TrainSpec { master_weights: false, ..create_llama_train_spec(stage, Precision::Bf16) };
            spec.freeze = vec!["*.1.mlp.*".into()];
            spec.optimizer.name = name;
            spec.optimizer.momentum = if name == OptimizerName::Adamw { 0.0 } else { 0.95 };
            spec
        };
        let cpu = train_new_run(&spec(0), 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME);
        let expected = train_on_emulated_gpu(&spec(0), 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME);
        assert_curves_near(&expected, &cpu, 2e-2, "bf16 without master weights");
        for (stage, world) in [(0, 2), (1, 2), (2, 2), (3, 4)] {
            let losses = train_on_emulated_gpu(&spec(stage), world, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME);
            assert_eq!(losses, expected, "{name:?}: stage {stage}, {world} ranks");
        }
        assert_eq!(
            train_over_emulated_nccl(&spec(3), 2, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME),
            expected,
            "{name:?}, NCCL"
        );
        let mut offloaded = spec(3);
        offloaded.zero.offload = Some(OffloadTarget::Cpu);
        assert_eq!(
            train_on_emulated_gpu(&offloaded, 2, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME),
            expected,
            "{name:?}, states on the host"
        );
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&|n, f| run_on_shared_gpu(n, f), &spec(3), 2, dir.path(), true);
        let rest = resume_and_train(&|n, f| run_on_shared_gpu(n, f), &spec(1), 1, dir.path());
        assert_eq!(rest, expected[STEPS_BEFORE_SAVE as usize..], "{name:?}, resumed");
        let gpu_to_cpu = resume_and_train(&run_on_cpu_ranks, &spec(2), 2, dir.path());
        assert_curves_near(
            &gpu_to_cpu,
            &cpu[STEPS_BEFORE_SAVE as usize..].to_vec(),
            2e-2,
            "resumed on the CPU",
        );
    }
}

/// Checks that `launch plan` predicts the GPU memory of training within 5 %. The test ignores the
/// cuBLASLt workspace, because the emulated library requests a smaller one, and the memory of the
/// CUDA context, which the emulated GPU does not have.
#[test]
fn the_planned_gpu_memory_is_within_5_percent_of_the_peak() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("corpus.txt"), "the quick brown fox ".repeat(500)).unwrap();
    for (precision, offload) in [
        ("fp32", "none"),
        ("bf16", "none"),
        ("fp8", "none"),
        ("bf16", "{optimizer: cpu}"),
        ("bf16\n  master_weights: false", "none"),
    ] {
        let text = format!(
            "cluster: {{devices: cuda}}\nrun: {{workdir: {:?}}}\ntrain:\n  precision: {precision}\n  zero: {{offload: {offload}}}\n  \
             batch: {{global: 4, micro: 2}}\n  data: {{files: [corpus.txt], seq_len: 48}}\n  \
             model: {{hidden_size: 96, intermediate_size: 256, num_hidden_layers: 3}}\n",
            dir.path()
        );
        let loaded = jobspec::load_job(jobspec::JobSource::Text { name: "test".into(), text }, &[]);
        let job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
        let report = worker::TrainPreflight.check_job(&job, 1, 1);
        assert!(report.errors.is_empty(), "{:?}", report.errors);
        let emulated_differently = device::cuda::MATMUL_WORKSPACE_BYTES as u64 + worker::CUDA_CONTEXT_BYTES;
        let planned = report.memory[0].total - emulated_differently;
        let mut train = job.train.unwrap();
        train.model.vocab_size = 257;
        for graphs in [false, true] {
            let (cuda, comm) = (open_emulated_gpu(), comm::thread_comm::create_thread_group(1).remove(0));
            cuda.set_graphs_enabled(graphs);
            let comm = Arc::new(StagedComm::new(Arc::new(comm), cuda.clone()));
            train_steps(&mut build_trainer_on(&train, comm, cuda.clone()).start_with_random_params(), 2);
            let excess = cuda.peak_memory_bytes() as f64 / planned as f64 - 1.0;
            println!("{precision}, offload {offload}, graphs {graphs}: {excess:e}");
            assert!(
                excess.abs() < 0.05,
                "{precision}, offload {offload}, graphs {graphs}: {excess:e} above the plan {:?}",
                report.memory[0]
            );
        }
    }
}

/// Checks that an abort ends a collective on the GPU that cannot complete, because a peer is dead.
/// Later collectives must return the reason of the abort.
#[test]
fn an_abort_unblocks_a_rank_that_waits_for_a_collective() {
    if !is_own_process("cuda::an_abort_unblocks_a_rank_that_waits_for_a_collective") {
        return;
    }
    // SAFETY: no other thread is running. Without threads of streams, the call that records an
    // event after the collective would block the host, which it does not do on a GPU.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "side:1") };
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    run_on_ranks(2, |hosts| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        if comm.rank() == 1 {
            return;
        }
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 4), cuda.zeroed(Dtype::F32, 8));
        comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| comm.abort("rank 1 died"));
            cuda.synchronize().expect("no call failed");
        });
        let error = comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap_err();
        assert_eq!(error, CommError::Aborted(AbortReason::Requested { reason: "rank 1 died".into() }));
    });
}
