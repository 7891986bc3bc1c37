//! Training while one stream of the emulated GPU lags behind the others: an operation that doesn't
//! wait for its inputs reads NaN or freed memory. There is one test, because the lag applies to the
//! whole process.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
mod emulated;

use comm::{
    Comm,
    nccl::{NcclComm, NcclLibrary},
};
use common::*;
use contract::job::*;
use device::{Dtype, Ops, Storage};
use emulated::*;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed, mpsc},
    time::Duration,
};
use worker::zero::collective_queue::CollectiveQueue;

/// Enough that the losses depend on the optimizer states of earlier steps.
const STEPS: u64 = 3;

/// Jobs that use streams and collectives in different ways: name, spec and number of ranks.
fn cases() -> Vec<(&'static str, TrainSpec, usize)> {
    let mut muon = llama_spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let mut frozen = llama_spec(2, Precision::Fp32);
    frozen.freeze = vec!["*q_proj*".into(), "*norm*".into(), "*embed*".into()];
    let mut few_live = llama_spec(3, Precision::Fp32);
    (few_live.zero.prefetch, few_live.zero.max_live_parameters) = (0, 0);
    let mut mixture = mixture_spec();
    mixture.experts.expert_parallel_size = 2;
    let offloaded = |stage, name| {
        let mut spec = llama_spec(stage, Precision::Bf16);
        spec.zero.offload = Some(Offload::Cpu);
        (spec.optimizer.name, spec.optimizer.momentum) = (name, 0.9);
        spec
    };
    vec![
        ("states on the host", offloaded(3, OptimizerName::Adamw), 2),
        ("momenta on the host", offloaded(0, OptimizerName::Muon), 2),
        ("stage 0", llama_spec(0, Precision::Fp32), 2),
        ("stage 2 in bf16", llama_spec(2, Precision::Bf16), 2),
        ("stage 3", llama_spec(3, Precision::Fp32), 4),
        ("stage 3 in bf16", llama_spec(3, Precision::Bf16), 2),
        ("no parameter stays gathered", few_live, 2),
        ("frozen in part", frozen, 2),
        ("Muon", muon, 2),
        ("expert parallelism", mixture, 4),
    ]
}

#[test]
fn streams_wait_for_their_inputs() {
    let cases = cases();
    let expected = cases.iter().map(|(_, spec, _)| {
        let mut reference = spec.clone();
        (reference.experts.expert_parallel_size, reference.zero.offload) = (1, None);
        train_on_gpu(&reference, 1, STEPS)
    });
    let expected: Vec<Curve> = expected.collect();
    for lag in ["side:1000", "main:100"] {
        // SAFETY: no other thread is running.
        unsafe { std::env::set_var("EMULATED_GPU_LAG", lag) };
        for ((what, spec, world), expected) in cases.iter().zip(&expected) {
            for graphs in [false, true] {
                USE_GRAPHS.store(graphs, Relaxed);
                let mode = if graphs { "with graphs" } else { "without graphs" };
                assert_eq!(train_on_gpu(spec, *world, STEPS), *expected, "{what}, {lag}, host, {mode}");
                assert_eq!(train_over_nccl(spec, *world, STEPS), *expected, "{what}, {lag}, NCCL, {mode}");
            }
        }
        check_background_saves(lag);
    }
    // SAFETY: no other thread is running.
    unsafe { std::env::remove_var("EMULATED_GPU_LAG") };
    check_that_a_blocked_collective_does_not_block_the_main_stream();
}

/// A background save stores the state at its beginning, though its copies lag behind the next step.
fn check_background_saves(lag: &str) {
    let spec = |stage| llama_spec(stage, Precision::Bf16);
    let expected = train_on_gpu(&spec(0), 1, BEFORE + AFTER);
    for world in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&|n, f| on_shared_gpu(n, f), &spec(2), world, dir.path(), true);
        let rest = resume_and_train(&|n, f| on_shared_gpu(n, f), &spec(1), 2, dir.path());
        assert_eq!(rest, expected[BEFORE as usize..], "saved by {world}, {lag}");
    }
}

/// A collective that waits for a peer blocks the stream of the communication thread, not the main
/// stream.
fn check_that_a_blocked_collective_does_not_block_the_main_stream() {
    let nccl = NcclLibrary::open(&[emulated_nccl::library_directory().to_owned()]).unwrap();
    on_ranks(2, |hosts| {
        let cuda = open_gpu();
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
        cuda.synchronize(); // returns while the gather is blocked
        comm.abort("rank 1 died");
        drop(gathered.wait().unwrap());
        cuda.synchronize();
    });
}
