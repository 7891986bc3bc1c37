//! Tests of training while one stream of the emulated GPU lags behind the others: an operation that
//! does not wait for its inputs reads NaN or freed memory. Each test runs in a separate process,
//! because the lag applies to the whole process.

use crate::emulated::*;
use crate::own_process::is_own_process;
use crate::{common::*, emulated_nccl};
use comm::{
    Comm,
    nccl::{NcclComm, NcclLibrary},
};
use device::{Dtype, Storage, ops::VectorOps};
use jobspec::*;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed, mpsc},
    time::{Duration, Instant},
};
use worker::zero::collective_queue::CollectiveQueue;

/// Number of steps of a run: enough that the losses depend on the optimizer states of earlier
/// steps.
const STEPS: u64 = 3;

/// Creates test jobs that use CUDA streams and collectives in different ways. Returns name, spec
/// and number of ranks of each.
fn create_training_cases() -> Vec<(&'static str, TrainSpec, usize)> {
    let mut muon = create_llama_train_spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let mut frozen = create_llama_train_spec(2, Precision::Fp32);
    frozen.freeze = vec!["*q_proj*".into(), "*norm*".into(), "*embed*".into()];
    let mut few_live = create_llama_train_spec(3, Precision::Fp32);
    (few_live.zero.prefetch, few_live.zero.max_live_parameters) = (0, 0);
    let mut mixture = create_moe_train_spec();
    mixture.experts.expert_parallel_size = 2;
    let offloaded = |stage, name| {
        let mut spec = create_llama_train_spec(stage, Precision::Bf16);
        spec.zero.offload = Some(OffloadTarget::Cpu);
        (spec.optimizer.name, spec.optimizer.momentum) = (name, 0.9);
        spec
    };
    vec![
        ("states on the host", offloaded(3, OptimizerName::Adamw), 2),
        ("momenta on the host", offloaded(0, OptimizerName::Muon), 2),
        ("stage 0", create_llama_train_spec(0, Precision::Fp32), 2),
        ("stage 2 in bf16", create_llama_train_spec(2, Precision::Bf16), 2),
        ("stage 3", create_llama_train_spec(3, Precision::Fp32), 4),
        ("stage 3 in bf16", create_llama_train_spec(3, Precision::Bf16), 2),
        ("no parameter stays gathered", few_live, 2),
        ("frozen in part", frozen, 2),
        ("Muon", muon, 2),
        ("expert parallelism", mixture, 4),
    ]
}

#[test]
fn streams_wait_for_their_inputs() {
    if !is_own_process("cuda_streams::streams_wait_for_their_inputs") {
        return;
    }
    let cases = create_training_cases();
    let expected = cases.iter().map(|(_, spec, _)| {
        let mut reference = spec.clone();
        (reference.experts.expert_parallel_size, reference.zero.offload) = (1, None);
        train_on_emulated_gpu(&reference, 1, STEPS)
    });
    let expected: Vec<LossCurve> = expected.collect();
    for (i, lag) in ["side:1000", "main:100"].into_iter().enumerate() {
        // SAFETY: no other thread is running.
        unsafe { std::env::set_var("EMULATED_GPU_LAG", lag) };
        for ((what, spec, world), expected) in cases.iter().zip(&expected) {
            for graphs in [false, true] {
                USE_CUDA_GRAPHS.store(graphs, Relaxed);
                // Of lag, graphs and backend, each pair of values occurs; all triples would take
                // twice as long.
                let uses_nccl = graphs == (i == 0);
                let train = if uses_nccl { train_over_emulated_nccl } else { train_on_emulated_gpu };
                let losses = train(spec, *world, STEPS);
                assert_eq!(losses, *expected, "{what}, {lag}, graphs: {graphs}, NCCL: {uses_nccl}");
            }
        }
        assert_background_saves_are_consistent(lag);
    }
    // SAFETY: no other thread is running. Without threads of streams, the call that records an
    // event after the collective would block the host, which it does not do on a GPU.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "side:1") };
    assert_blocked_collective_does_not_block_main_stream();
}

/// Asserts that a background save stores the state at the beginning of the save, although its
/// copies lag behind the next step.
fn assert_background_saves_are_consistent(lag: &str) {
    let spec = |stage| create_llama_train_spec(stage, Precision::Bf16);
    let expected = train_on_emulated_gpu(&spec(0), 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME);
    for world in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&|n, f| run_on_shared_gpu(n, f), &spec(2), world, dir.path(), true);
        let rest = resume_and_train(&|n, f| run_on_shared_gpu(n, f), &spec(1), 2, dir.path());
        assert_eq!(rest, expected[STEPS_BEFORE_SAVE as usize..], "saved by {world}, {lag}");
    }
}

/// Asserts that a collective that waits for a peer blocks the stream of the communication thread,
/// but not the main stream.
fn assert_blocked_collective_does_not_block_main_stream() {
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    run_on_ranks(2, |hosts| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        let comm: Arc<dyn Comm> = Arc::new(comm);
        if comm.rank() == 1 {
            return; // never joins the collective
        }
        let queue = CollectiveQueue::new(comm.clone(), cuda.clone()).unwrap();
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 4), cuda.zeroed(Dtype::F32, 8));
        let (submitted_tx, submitted_rx) = mpsc::channel();
        let gathered = queue.submit(move |comm| {
            comm.all_gather(recv.view_mut(), send.view(), &[4, 4])?;
            submitted_tx.send(()).unwrap();
            Ok((recv, send))
        });
        submitted_rx.recv().unwrap();
        let mut other = cuda.zeroed(Dtype::F32, 4);
        cuda.scale(other.view_mut(), 2.0);
        cuda.synchronize().expect("no call failed"); // returns while the gather is blocked
        comm.abort("rank 1 died");
        drop(gathered.wait().unwrap());
        cuda.synchronize().expect("no call failed");
    });
}

/// Checks training although the driver waits for all work before it loads a kernel. The kernels for
/// heads of more than 128 elements are loaded when the first layer needs them, while the parameters
/// of the next layers are gathered. There is one rank: ranks in one process would wait for the work
/// of each other, which ranks in separate processes do not.
#[test]
fn kernels_are_loaded_although_the_driver_waits_for_all_work() {
    if !is_own_process("cuda_streams::kernels_are_loaded_although_the_driver_waits_for_all_work") {
        return;
    }
    const LAG: Duration = Duration::from_millis(300);
    let set_lag = |micros: u128| {
        // SAFETY: no other thread is running.
        unsafe { std::env::set_var("EMULATED_GPU_LAG", format!("side:{micros}")) };
    };
    let mut spec = create_llama_train_spec(3, Precision::Bf16);
    spec.model.head_dim = 136;
    set_lag(100);
    let expected = train_over_emulated_nccl(&spec, 1, 2);
    // SAFETY: no other thread is running.
    unsafe { std::env::set_var("EMULATED_GPU_IDLE_LOADING", "1") };
    assert_eq!(train_over_emulated_nccl(&spec, 1, 2), expected);
    set_lag(LAG.as_micros());
    let cuda = open_emulated_gpu();
    let mut buffer = cuda.zeroed(Dtype::F32, 4);
    cuda.with_separate_stream(&mut || {
        cuda.fill_with_zeros(buffer.view_mut());
        let began = Instant::now();
        cuda.load_all_kernels().unwrap();
        assert!(began.elapsed() >= LAG, "the driver has not waited");
    });
}
