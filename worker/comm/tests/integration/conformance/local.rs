//! Tests of the transport between threads of one process.
use super::checks;
use comm::{
    AbortReason, ArgumentError, CallMismatch, CollectiveKind, Comm, CommError, TransferUnit, thread_comm,
};
use device::Buf;
use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};

/// Runs `f` in one thread per communicator. Returns the results by rank, with `None` for a thread
/// that panicked.
fn run_ranks<T: Send>(
    group: Vec<thread_comm::ThreadComm>,
    f: impl Fn(thread_comm::ThreadComm) -> T + Sync,
) -> Vec<Option<T>> {
    thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> = group.into_iter().map(|c| s.spawn(move || f(c))).collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    })
}

fn to_aborted_error(reason: AbortReason) -> CommError {
    CommError::Aborted(reason)
}

#[test]
fn every_collective_conforms() {
    for world in [1, 2, 3, 4, 5, 8, 16] {
        for seed in 0..4 {
            let results = run_ranks(thread_comm::create_thread_group(world), |c| {
                checks::check_random_collectives(&c, seed, 40, 700)
            });
            assert!(results.iter().all(|r| r == &Some(Ok(()))), "world {world}: {results:?}");
        }
    }
    let results = run_ranks(thread_comm::create_thread_group(2), |c| {
        checks::check_random_collectives(&c, 9, 12, 300_000)
    });
    assert!(results.iter().all(|r| r == &Some(Ok(()))), "{results:?}");
}

#[test]
fn no_rank_passes_a_barrier_before_all_have_entered() {
    let (world, rounds) = (5, 200);
    let entered = AtomicUsize::new(0);
    run_ranks(thread_comm::create_thread_group(world), |c| {
        for round in 1..=rounds {
            entered.fetch_add(1, SeqCst);
            c.barrier().unwrap();
            assert!(entered.load(SeqCst) >= world * round);
        }
    })
    .into_iter()
    .for_each(|r| r.unwrap());
    assert_eq!(entered.load(SeqCst), world * rounds);
}

#[test]
fn an_abort_ends_waiting_and_later_calls() {
    let group = thread_comm::create_thread_group(3);
    let errors = run_ranks(group, |c| {
        if c.rank() == 2 {
            c.abort("the disk is full");
            c.abort("a later reason");
        }
        [c.barrier().unwrap_err(), c.all_reduce(Buf::zeroed(3).view_mut()).unwrap_err()]
    });
    let error = to_aborted_error(AbortReason::Requested { reason: "the disk is full".into() });
    assert!(errors.iter().all(|e| e.as_ref() == Some(&[error.clone(), error.clone()])), "{errors:?}");
}

#[test]
fn another_thread_of_a_waiting_rank_can_abort() {
    let group = thread_comm::create_thread_group(2);
    let (first, _second) = (&group[0], &group[1]);
    thread::scope(|s| {
        let waiting = s.spawn(|| first.barrier());
        s.spawn(|| first.abort("stop"));
        let error = to_aborted_error(AbortReason::Requested { reason: "stop".into() });
        assert_eq!(waiting.join().unwrap(), Err(error));
    });
}

#[test]
fn a_rank_that_panics_or_leaves_unblocks_the_others() {
    let errors = run_ranks(thread_comm::create_thread_group(3), |c| {
        assert!(c.rank() != 1, "intended");
        c.barrier().unwrap_err()
    });
    assert_eq!(errors[0], Some(to_aborted_error(AbortReason::RankPanicked { rank: 1 })));
    let errors = run_ranks(thread_comm::create_thread_group(3), |c| match c.rank() {
        1 => None,
        _ => Some(c.barrier().unwrap_err()),
    });
    let left = AbortReason::PeerLeft { rank: 1, collective: "barrier (call 0)".into() };
    assert_eq!(errors[2], Some(Some(to_aborted_error(left))));
    // inside a sink: memory that peers still read is not freed before they have finished
    let errors = run_ranks(thread_comm::create_thread_group(3), |c| {
        let partial = Buf::zeroed(3000);
        let mut sum = 0.0;
        let sink = &mut |rank: usize, _: usize, piece: device::View<'_>| {
            assert!(c.rank() != 0 || rank != 1, "intended");
            sum += piece.host_slice().iter().sum::<f32>();
        };
        c.reduce_scatter_ordered(&[partial.view(), partial.view()], &[2; 3], &[1000; 3], sink)
            .and_then(|()| c.barrier())
            .unwrap_err()
    });
    let panicked = to_aborted_error(AbortReason::RankPanicked { rank: 0 });
    assert_eq!(errors, [None, Some(panicked.clone()), Some(panicked)]);
}

#[test]
fn every_rank_reports_a_mismatch() {
    let errors = run_ranks(thread_comm::create_thread_group(3), |c| match c.rank() {
        1 => c.barrier().unwrap_err(),
        _ => c.all_reduce(Buf::zeroed(5).view_mut()).unwrap_err(),
    });
    for (reporter, error) in errors.into_iter().flatten().enumerate() {
        let CommError::Mismatch(CallMismatch::Call { rank, call, peer, peer_call }) = error else {
            panic!("{error}")
        };
        assert_eq!((rank, call.call_number, peer_call.call_number), (reporter, 0, 0));
        let (barrier, other) = if rank == 1 { (call, peer_call) } else { (peer_call, call) };
        assert!(rank == 1 || peer == 1, "rank 1 is one of the two");
        assert_eq!(barrier.collective, Some(CollectiveKind::Barrier));
        assert_eq!(other.collective, Some(CollectiveKind::AllReduce));
    }
    let errors = run_ranks(thread_comm::create_thread_group(2), |c| {
        let (mut recv, send) = (Buf::zeroed(3 + c.rank()), Buf::zeroed(4));
        let recv_counts = [[2, 1], [2, 2]][c.rank()];
        c.all_to_all(recv.view_mut(), &recv_counts, send.view(), &[2, 2]).unwrap_err()
    });
    let unit = TransferUnit::Elements;
    let mismatch = CallMismatch::Transfer { from: 1, to: 0, sent: 2, expected: 1, unit };
    let expected = Some(CommError::Mismatch(mismatch));
    assert_eq!(errors, [expected.clone(), expected]);
}

#[test]
fn invalid_arguments_fail_on_the_caller_and_unblock_the_peers() {
    let errors = run_ranks(thread_comm::create_thread_group(2), |c| {
        let (mut recv, send) = (Buf::zeroed(4), Buf::zeroed(3 - c.rank()));
        c.all_gather(recv.view_mut(), send.view(), &[2, 2]).unwrap_err()
    });
    let error = ArgumentError::BufferLength {
        collective: CollectiveKind::AllGather,
        buffer: "send",
        len: 3,
        required: "counts[rank]",
        expected: 2,
    };
    let invalid = CommError::InvalidArguments { rank: 0, error };
    let reason = AbortReason::RankFailed { rank: 0, message: invalid.to_string() };
    assert_eq!(errors, [Some(invalid), Some(to_aborted_error(reason))]);
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let timeout = Duration::from_millis(30);
    let group = thread_comm::create_thread_group_with_timeout(3, timeout);
    let expected = CommError::Timeout {
        rank: 0,
        world: 3,
        collective: CollectiveKind::Barrier,
        call_number: 0,
        timeout,
        missing: vec![1, 2],
    };
    assert_eq!(group[0].barrier(), Err(expected.clone()));
    // a rank that enters later learns the reason
    let reason = AbortReason::RankFailed { rank: 0, message: expected.to_string() };
    assert_eq!(group[1].barrier(), Err(to_aborted_error(reason)));
}
