//! Tests that a training step on the emulated GPU makes the host wait only once, or once more for
//! each layer with experts, and allocates no memory after the first steps. There is one test
//! function, because the call counts and the lag apply to the whole process.
use crate::call_counts::call_count;
use crate::common::*;
use crate::emulated::*;
use crate::own_process::is_own_process;
use device::Storage;
use jobspec::*;
use std::sync::{Arc, atomic::Ordering::Relaxed};
use worker::train::step::RankStepReport;

/// The calls of the driver with which the host waits for the GPU. The driver also waits in copies
/// between GPU memory and host memory that is not pinned.
const WAITING_CALLS: [&str; 3] = ["cuStreamSynchronize", "cuEventSynchronize", "pageableCopy"];
/// Number of steps before the calls are counted: enough that every graph is captured.
const WARM_UP_STEPS: u64 = 6;
/// Number of steps in which calls are counted.
const COUNTED_STEPS: u64 = 3;
/// Largest number of times that the test counts the calls, until no memory was allocated meanwhile.
/// The ring of inputs grows if the GPU lags more than before, up to the inputs of one step.
const MAX_MEASUREMENTS: usize = 20;

/// Creates test jobs with several micro-batches per step and one rank. Returns the number of waits
/// of each step.
fn create_cases() -> Vec<(&'static str, TrainSpec, i64)> {
    let gpt2 = families::create_pretrained_model_spec(&families::golden_model_directory("gpt2"));
    let mut windows = create_train_spec(
        families::create_pretrained_model_spec(&families::golden_model_directory("gemma2")),
        0,
        4,
        1,
        7,
    );
    windows.precision = Precision::Bf16;
    let recomputed = TrainSpec { recompute: RecomputeMode::Block, ..create_moe_train_spec() };
    vec![
        ("a Llama in fp32", create_llama_train_spec(0, Precision::Fp32), 1),
        ("stage 3 in bf16", create_llama_train_spec(3, Precision::Bf16), 1),
        ("GPT-2", create_train_spec(gpt2, 0, 4, 1, 7), 1),
        ("sliding windows", windows, 1),
        // The host needs the chosen experts of two layers in four micro-batches. Each is one copy
        // to memory that is not pinned, and a call for the stream, which is then idle.
        ("experts", create_moe_train_spec(), 1 + 2 * (2 * 4)),
        // the backward pass computes the layers again, but does not read the experts again
        ("recomputed experts", recomputed, 1 + 2 * (2 * 4)),
    ]
}

#[test]
fn the_host_waits_once_per_step() {
    if !is_own_process("cuda_host_waits::the_host_waits_once_per_step") {
        return;
    }
    // SAFETY: no other thread is running. The GPU lags behind the host, so that events are reached
    // later than the host could query them.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "main:100") };
    for (what, spec, expected) in create_cases() {
        for graphs in [false, true] {
            USE_CUDA_GRAPHS.store(graphs, Relaxed);
            let cuda = open_emulated_gpu();
            let comm = Arc::new(comm::thread_comm::create_thread_group(1).remove(0));
            let comm = Arc::new(comm::staged::StagedComm::new(comm, cuda.clone()));
            let mut running = build_trainer_on(&spec, comm, cuda.clone()).start_with_random_params();
            // with these samples, the inputs of kernels have the same sizes in every step
            let source = LearnableSamples { vocab: running.train_spec().model.vocab_size, ignored: None };
            let mut train = |steps| {
                for _ in 0..steps {
                    running.run_step(&source, RankStepReport::default()).unwrap();
                }
            };
            train(WARM_UP_STEPS);
            // memory is freed when the stream reaches the call
            cuda.synchronize().unwrap();
            let count = || (WAITING_CALLS.map(call_count), call_count("cuMemHostAlloc"));
            let is_memory_stable = (0..MAX_MEASUREMENTS).any(|_| {
                let memory = cuda.query_memory_info().unwrap();
                let (waits, pinned) = count();
                train(COUNTED_STEPS);
                let (waits_after, pinned_after) = count();
                cuda.synchronize().unwrap();
                let waits: Vec<i64> =
                    waits_after.iter().zip(waits).map(|(after, before)| after - before).collect();
                println!("{what}, graphs: {graphs}: {waits:?} waits in {COUNTED_STEPS} steps");
                assert_eq!(
                    waits.iter().sum::<i64>(),
                    expected * COUNTED_STEPS as i64,
                    "{what}, {graphs}: {waits:?}"
                );
                pinned_after == pinned && cuda.query_memory_info().unwrap() == memory
            });
            assert!(is_memory_stable, "{what}, graphs: {graphs}: memory grows");
        }
    }
}
