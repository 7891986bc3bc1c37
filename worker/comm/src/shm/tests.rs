//! Tests of [`ShmComm`], with threads as ranks: invalid shared memory is rejected, and peers that
//! break the protocol cause errors.
use super::*;
use crate::{
    CommError, GroupError, SharedMemoryError, abort_reason::FIXED_FIELDS_BYTES, call::GroupPosition,
};
use device::Buf;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};

fn create_memfd() -> OwnedFd {
    memfd_create("comm-test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap()
}

/// Returns test limits: the smallest staging memory, and timeouts that no test reaches.
fn make_test_limits() -> ShmLimits {
    let timeout = Duration::from_secs(30);
    ShmLimits { join_timeout: timeout, collective_timeout: timeout, staging_bytes: 4096 }
}

/// Joins `world` ranks, one thread each, and runs `f` with the communicator of each. Returns the
/// results by rank.
fn run_ranks<T: Send>(world: usize, limits: ShmLimits, f: impl Fn(ShmComm) -> T + Sync) -> Vec<T> {
    let fd = create_memfd();
    thread::scope(|s| {
        let (f, fd) = (&f, &fd);
        let run = |r: usize| f(ShmComm::join(fd.try_clone().unwrap(), r, world, limits).unwrap());
        let threads: Vec<_> = (0..world).map(|r| s.spawn(move || run(r))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Joins a group as `rank`, and returns the error of joining. Panics if the rank joins
/// successfully.
fn expect_join_error(fd: &OwnedFd, rank: usize, world: usize, limits: ShmLimits) -> CommError {
    ShmComm::join(fd.try_clone().unwrap(), rank, world, limits).err().unwrap()
}

/// Returns the name of the field in which the settings of two ranks differ, according to `error`.
/// Panics if `error` is any other error.
fn expect_mismatched_field(error: &CommError) -> &'static str {
    match error {
        CommError::SharedMemory(SharedMemoryError::HeaderMismatch { field, .. }) => field,
        other => panic!("{other}"),
    }
}

#[test]
fn the_segment_of_another_program_or_group_is_rejected() {
    let fd = create_memfd();
    nix::sys::uio::pwrite(&fd, b"something else", 0).unwrap();
    assert_eq!(
        expect_mismatched_field(&expect_join_error(&fd, 0, 2, make_test_limits())),
        "magic and layout version"
    );
    assert!(abort_group(fd.as_fd(), "x").is_err());
    let fd = create_memfd();
    drop(ShmComm::join(fd.try_clone().unwrap(), 0, 1, make_test_limits()).unwrap());
    assert_eq!(expect_mismatched_field(&expect_join_error(&fd, 0, 2, make_test_limits())), "world size");
    let fd = create_memfd();
    let member = ShmComm::join(fd.try_clone().unwrap(), 0, 1, make_test_limits()).unwrap();
    let rejected = expect_join_error(&fd, 0, 1, ShmLimits { staging_bytes: 8192, ..make_test_limits() });
    assert_eq!(expect_mismatched_field(&rejected), "staging size");
    // a rank that cannot join aborts the group
    let reason = AbortReason::Requested { reason: rejected.to_string() };
    assert_eq!(member.barrier(), Err(CommError::Aborted(reason)));
    let out_of_range = expect_join_error(&create_memfd(), 2, 2, make_test_limits());
    assert_eq!(out_of_range, GroupError::RankOutOfRange { rank: 2, world: 2 }.into());
    let empty_group = expect_join_error(&create_memfd(), 0, 0, make_test_limits());
    assert!(matches!(empty_group, CommError::InvalidGroup(GroupError::WorldSize { world: 0, .. })));
    let not_a_memfd = std::fs::File::open("/dev/null").unwrap();
    assert!(ShmComm::join(not_a_memfd.into(), 0, 1, make_test_limits()).is_err());
}

#[test]
fn a_rank_joins_only_once() {
    let fd = create_memfd();
    let _member = ShmComm::join(fd.try_clone().unwrap(), 0, 1, make_test_limits()).unwrap();
    let pid = std::process::id();
    let error = GroupError::AlreadyJoined { rank: 0, joined_pid: pid, pid };
    assert_eq!(expect_join_error(&fd, 0, 1, make_test_limits()), error.into());
}

#[test]
fn an_abort_before_the_first_rank_joins_makes_joining_fail() {
    let fd = create_memfd();
    abort_group(fd.as_fd(), "no memory").unwrap();
    let error = CommError::Aborted(AbortReason::from_request("no memory"));
    assert_eq!(expect_join_error(&fd, 0, 2, make_test_limits()), error);
}

#[test]
fn a_long_abort_reason_is_cut_at_a_character() {
    let long = "ä".repeat(400);
    let errors = run_ranks(2, make_test_limits(), |c| {
        c.barrier().unwrap(); // both have joined
        if c.rank() == 0 {
            c.abort(&format!("x{long}"));
        }
        c.barrier().unwrap_err()
    });
    let kept = "ä".repeat((segment::MAX_REASON_BYTES - FIXED_FIELDS_BYTES - 1) / 2);
    let error = CommError::Aborted(AbortReason::Requested { reason: format!("x{kept}") });
    assert_eq!(errors, [error.clone(), error]);
}

#[test]
fn ranks_survive_a_peer_that_dies_while_it_stores_an_abort_reason() {
    let errors = run_ranks(2, make_test_limits(), |c| {
        c.barrier().unwrap(); // both have joined
        c.segment.header().abort_state.store(1, SeqCst);
        c.barrier().unwrap_err()
    });
    assert!(errors.iter().all(|e| *e == CommError::Aborted(AbortReason::Lost)), "{errors:?}");
}

#[test]
fn no_rank_passes_a_barrier_before_all_have_entered() {
    let (world, rounds) = (4, 300);
    let entered = AtomicUsize::new(0);
    run_ranks(world, make_test_limits(), |c| {
        for round in 1..=rounds {
            entered.fetch_add(1, SeqCst);
            c.barrier().unwrap();
            assert!(entered.load(SeqCst) >= world * round);
        }
    });
    assert_eq!(entered.load(SeqCst), world * rounds);
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let timeout = Duration::from_millis(50);
    let limits = ShmLimits { collective_timeout: timeout, ..make_test_limits() };
    let timed_out = std::sync::Barrier::new(3);
    let errors = run_ranks(3, limits, |c| {
        let first = (c.rank() == 0).then(|| c.barrier().unwrap_err());
        timed_out.wait(); // the others stay in the group until the wait of rank 0 has timed out
        first.unwrap_or_else(|| c.barrier().unwrap_err())
    });
    let expected = CommError::Timeout {
        rank: 0,
        world: 3,
        collective: crate::CollectiveKind::Barrier,
        call_number: 0,
        timeout,
        missing: vec![1, 2],
    };
    assert_eq!(errors[0], expected);
    let aborted = CommError::Aborted(expected.to_abort_reason(0));
    assert_eq!(errors[1..], [aborted.clone(), aborted]);
}

#[test]
fn a_panic_in_a_sink_unblocks_the_peers() {
    let errors = run_ranks(2, make_test_limits(), |c| {
        let x = Buf::zeroed(8);
        let reduce = || {
            c.reduce_scatter_ordered(&[x.view()], &[1, 1], &[4, 4], &mut |from, _, _| {
                assert!(c.rank() == 0 || from == 0, "intended");
            })
        };
        let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(reduce));
        assert_eq!(first.is_err(), c.rank() == 1);
        c.barrier().unwrap_err()
    });
    let expected = CommError::Aborted(AbortReason::RankPanicked { rank: 1 });
    assert!(errors.iter().all(|e| *e == expected), "{errors:?}");
}

/// Runs the collective `honest` as rank 0 of two ranks and returns its error. Rank 1 breaks the
/// protocol: it takes part in `call`, but publishes `number` where rank 0 reads a length.
fn run_with_invalid_length(
    number: u64,
    call: CollectiveCall,
    honest: impl Fn(&ShmComm) -> Result<()> + Sync,
) -> CommError {
    let mut errors = run_ranks(2, make_test_limits(), |c| {
        if c.rank() == 0 {
            return honest(&c).err();
        }
        let slot = 1;
        c.segment.number_table(1, slot).iter().for_each(|w| w.store(number, SeqCst));
        c.segment.enter_round(1, 1, call.with_call_number(0).to_words());
        while c.check_not_aborted().is_ok() {
            thread::yield_now();
        }
        None
    });
    errors.remove(0).unwrap()
}

#[test]
fn invalid_lengths_of_a_peer_are_rejected() {
    let position = GroupPosition { rank: 1, world: 2 };
    let empty = BufferShape { len: 0, element_bytes: 4 };
    for number in [u64::MAX, 1 << 40] {
        let call = CollectiveCall::summarize_all_gather_bytes(0).unwrap();
        let error = run_with_invalid_length(number, call, |c| c.all_gather_bytes(b"x").map(drop));
        let expected =
            CallMismatch::TooManyBytes { rank: 1, bytes: number, limit: crate::MAX_GATHER_BYTES as u64 };
        assert_eq!(error, CommError::Mismatch(expected));
        let call =
            CollectiveCall::summarize_reduce_scatter_ordered(position, [].into_iter(), &[0, 0], &[1, 1])
                .unwrap();
        let error = run_with_invalid_length(number, call, |c| {
            c.reduce_scatter_ordered(&[], &[0, 0], &[1, 1], &mut |_, _, _| ())
        });
        let CommError::Mismatch(CallMismatch::TooManyPartials { rank: 1, partials, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(partials, number);
        let call = CollectiveCall::summarize_all_to_all(position, empty, &[0, 0], empty, &[0, 0]).unwrap();
        let error = run_with_invalid_length(number, call, |c| {
            let (mut recv, send) = (Buf::zeroed(2), Buf::zeroed(2));
            c.all_to_all(recv.view_mut(), &[1, 1], send.view(), &[1, 1])
        });
        let CommError::Mismatch(CallMismatch::Transfer { from: 1, to: 0, sent, expected: 1, .. }) = error
        else {
            panic!("{error}")
        };
        assert_eq!(sent, number / size_of::<f32>() as u64);
    }
}
