//! Streams of the emulated card that lag behind one another: what doesn't wait for what it needs finds numbers that are none, or
//! memory that isn't there. One test: the lag counts for the whole process.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
mod emulated;

use comm::{
    Comm,
    nccl::{Nccl, NcclComm},
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

/// The third shows the states that the first left.
const STEPS: u64 = 3;

/// What needs collectives in different ways, and its number of ranks.
fn cases() -> Vec<(&'static str, TrainSpec, usize)> {
    let mut muon = spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let mut frozen = spec(2, Precision::Fp32);
    frozen.freeze = vec!["*q_proj*".into(), "*norm*".into(), "*embed*".into()];
    let mut few_live = spec(3, Precision::Fp32);
    (few_live.zero.prefetch, few_live.zero.max_live_parameters) = (0, 0);
    let mut mixture = mixture();
    mixture.experts.expert_parallel_size = 2;
    let offloaded = |stage, name| {
        let mut spec = spec(stage, Precision::Bf16);
        spec.zero.offload = Some(Offload::Cpu);
        (spec.optimizer.name, spec.optimizer.momentum) = (name, 0.9);
        spec
    };
    vec![
        ("states on the host", offloaded(3, OptimizerName::Adamw), 2),
        ("momenta on the host", offloaded(0, OptimizerName::Muon), 2),
        ("stage 0", spec(0, Precision::Fp32), 2),
        ("stage 2 in bf16", spec(2, Precision::Bf16), 2),
        ("stage 3", spec(3, Precision::Fp32), 4),
        ("stage 3 in bf16", spec(3, Precision::Bf16), 2),
        ("nothing stays gathered", few_live, 2),
        ("frozen in part", frozen, 2),
        ("Muon", muon, 2),
        ("experts on their own ranks", mixture, 4),
    ]
}

#[test]
fn streams_wait_for_what_they_need() {
    let cases = cases();
    let expected = cases.iter().map(|(_, spec, _)| {
        let mut alone = spec.clone();
        (alone.experts.expert_parallel_size, alone.zero.offload) = (1, None);
        run(&alone, 1, STEPS)
    });
    let expected: Vec<Curve> = expected.collect();
    for lag in ["side:1000", "main:100"] {
        // SAFETY: no other thread runs.
        unsafe { std::env::set_var("EMULATED_GPU_LAG", lag) };
        for ((what, spec, world), expected) in cases.iter().zip(&expected) {
            for graphs in [false, true] {
                GRAPHS.store(graphs, Relaxed);
                let how = if graphs { "with graphs" } else { "without graphs" };
                assert_eq!(run(spec, *world, STEPS), *expected, "{what}, {lag}, by way of the host, {how}");
                assert_eq!(run_over_nccl(spec, *world, STEPS), *expected, "{what}, {lag}, NCCL, {how}");
            }
        }
        saves_hold_what_was(lag);
    }
    // SAFETY: as above.
    unsafe { std::env::remove_var("EMULATED_GPU_LAG") };
    a_collective_that_waits_holds_up_nobody();
}

/// A save in the background, whose copies lag behind the next step.
fn saves_hold_what_was(lag: &str) {
    let of = |stage| spec(stage, Precision::Bf16);
    let whole = run(&of(0), 1, BEFORE + AFTER);
    for world in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&|n, f| on_card(n, f), &of(2), world, dir.path(), true);
        let rest = resume_and_train(&|n, f| on_card(n, f), &of(1), 2, dir.path());
        assert_eq!(rest, whole[BEFORE as usize..], "saved by {world}, {lag}");
    }
}

/// What a peer keeps waiting is the communication thread's stream, not the one that computes.
fn a_collective_that_waits_holds_up_nobody() {
    let nccl = Nccl::open(&[stand_in::folder().to_owned()]).unwrap();
    on_ranks(2, |hosts| {
        let cuda = cuda();
        let comm = NcclComm::meet(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        let comm: Arc<dyn Comm> = Arc::new(comm);
        if comm.rank() == 1 {
            return; // never sends its part
        }
        let queue = CollectiveQueue::new(comm.clone(), cuda.clone()).unwrap();
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 4), cuda.zeroed(Dtype::F32, 8));
        let (tell, given) = mpsc::channel();
        let gathered = queue.submit(move |comm| {
            comm.all_gather(recv.view_mut(), send.view(), &[4, 4])?;
            tell.send(()).unwrap();
            Ok((recv, send))
        });
        given.recv().unwrap();
        let mut other = cuda.zeroed(Dtype::F32, 4);
        cuda.scale(other.view_mut(), 2.0);
        cuda.synchronize(); // returns though the gather doesn't end
        comm.abort("rank 1 died");
        drop(gathered.wait().unwrap());
        cuda.synchronize();
    });
}
