//! Tests of the network transport, with one rank per host and with shared memory inside the hosts.
//! A "host" is a group of ranks on this machine that shares no memory with the other ranks.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]
use super::checks::{self, CheckFailure};
use comm::{
    AbortReason, CallMismatch, CollectiveKind, Comm, CommError, ConnectFailureReason, GroupError,
    RejectReason, TransferUnit,
    shm::ShmLimits as Shm,
    tcp::{AbortHandle, GroupMember, GroupSpec, RankListener, TcpComm, TcpLimits},
};
use device::Buf;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::fd::OwnedFd,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Returns the default limits of the network transport, but with timeouts that no test reaches.
pub(crate) fn make_tcp_limits() -> TcpLimits {
    let shm = Shm {
        join_timeout: Duration::from_secs(50),
        collective_timeout: Duration::from_secs(50),
        ..Shm::default()
    };
    TcpLimits { shm, ..TcpLimits::default() }
}

/// Returns limits of the network transport with the smallest shared memory for staging, so that
/// collectives need many rounds. No test reaches their timeouts.
fn make_small_limits() -> TcpLimits {
    let mut small = make_tcp_limits();
    small.shm.staging_bytes = 4096;
    small
}

/// One rank that has not joined its group yet.
struct PendingRank {
    listener: RankListener,
    group: GroupSpec,
    memory: Option<OwnedFd>,
}

impl PendingRank {
    /// Joins the rank's group with these limits, and returns the communicator.
    fn join(self, limits: TcpLimits) -> comm::Result<TcpComm> {
        let abort_handle = AbortHandle::new(self.group.rank, self.group.members.len())?;
        self.listener.join(&self.group, self.memory, limits, &abort_handle)
    }
}

/// Creates a listener and a group description for each rank of a group. No rank has joined yet, and
/// rank r is on host `hosts[r]`.
fn create_pending_ranks(hosts: &[usize]) -> Vec<PendingRank> {
    let listeners: Vec<RankListener> = hosts.iter().map(|_| RankListener::bind(LOOPBACK).unwrap()).collect();
    let member = |(e, host): (&RankListener, &usize)| GroupMember {
        host: *host,
        addresses: vec![e.address().unwrap()],
    };
    let members: Vec<GroupMember> = listeners.iter().zip(hosts).map(member).collect();
    let mut memory: HashMap<usize, OwnedFd> = HashMap::new();
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    for host in hosts {
        memory.entry(*host).or_insert_with(|| memfd_create("comm-test", flags).unwrap());
    }
    let rank = |(rank, listener): (usize, RankListener)| PendingRank {
        listener,
        group: GroupSpec { rank, members: members.clone(), run: "test".into(), attempt: 3, key: [7; 32] },
        memory: Some(memory[&hosts[rank]].try_clone().unwrap()),
    };
    listeners.into_iter().enumerate().map(rank).collect()
}

/// Runs `f` in one thread per rank. Returns the results by rank, with `None` for a thread that
/// panicked.
fn run_pending_ranks<T: Send>(
    pending: Vec<PendingRank>,
    f: impl Fn(PendingRank) -> T + Sync,
) -> Vec<Option<T>> {
    thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> = pending.into_iter().map(|rank| s.spawn(move || f(rank))).collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    })
}

/// Joins all ranks of a group and runs `f` as each of them, in one thread per rank. Returns the
/// results by rank, with `None` for a thread that panicked.
fn run_ranks<T: Send>(hosts: &[usize], limits: TcpLimits, f: impl Fn(TcpComm) -> T + Sync) -> Vec<Option<T>> {
    run_pending_ranks(create_pending_ranks(hosts), |rank| f(rank.join(limits).unwrap()))
}

/// Test cases for assignments of ranks to hosts. Each lists the host of each rank: one rank per
/// host, equal and unequal hosts, and mixed orders.
const HOSTS_OF_RANKS: &[&[usize]] = &[
    &[0],
    &[0, 0],
    &[0, 1],
    &[0, 0, 1],
    &[0, 1, 2],
    &[0, 0, 0, 1],
    &[0, 0, 1, 1],
    &[0, 1, 2, 3],
    &[4, 2, 4, 4, 2],
    &[0, 1, 2, 3, 4, 5],
    &[0, 1, 1, 1, 1, 1, 0],
    &[0, 0, 0, 0, 1, 1, 1, 1],
    &[0, 1, 0, 1, 0, 1, 0, 1],
];

fn to_aborted_error(reason: AbortReason) -> CommError {
    CommError::Aborted(reason)
}

fn make_request_reason(reason: &str) -> AbortReason {
    AbortReason::Requested { reason: reason.to_owned() }
}

#[test]
fn every_collective_conforms_for_every_assignment_to_hosts() {
    for hosts in HOSTS_OF_RANKS {
        for (seed, limits) in [(1, make_small_limits()), (2, make_tcp_limits())] {
            let results = run_ranks(hosts, limits, |c| checks::check_random_collectives(&c, seed, 40, 700));
            assert!(results.iter().all(|r| r == &Some(Ok(()))), "hosts {hosts:?}: {results:?}");
        }
    }
}

#[test]
fn every_collective_conforms_for_megabytes() {
    for hosts in [&[0, 1][..], &[0, 0, 1], &[0, 1, 0, 1]] {
        let results =
            run_ranks(hosts, make_tcp_limits(), |c| checks::check_random_collectives(&c, 9, 12, 600_000));
        assert!(results.iter().all(|r| r == &Some(Ok(()))), "hosts {hosts:?}: {results:?}");
    }
}

#[test]
fn no_rank_passes_a_barrier_before_all_have_entered() {
    for hosts in [&[0, 1, 2, 3][..], &[0, 0, 0, 1, 1]] {
        let rounds = 100;
        let entered = AtomicUsize::new(0);
        run_ranks(hosts, make_tcp_limits(), |c| {
            for round in 1..=rounds {
                entered.fetch_add(1, SeqCst);
                c.barrier().unwrap();
                assert!(entered.load(SeqCst) >= hosts.len() * round);
            }
        })
        .into_iter()
        .for_each(|r| r.unwrap());
    }
}

#[test]
fn an_abort_reaches_every_host_within_a_second() {
    for hosts in [&[0, 1, 2][..], &[0, 0, 1, 1], &[0, 1, 1]] {
        for aborter in 0..hosts.len() {
            let errors = run_ranks(hosts, make_tcp_limits(), |c| {
                c.barrier().unwrap();
                if c.rank() == aborter {
                    thread::sleep(Duration::from_millis(100));
                    c.abort("the disk is full");
                    c.abort("a later reason");
                }
                let began = Instant::now();
                let errors = [c.barrier().unwrap_err(), c.all_reduce(Buf::zeroed(3).view_mut()).unwrap_err()];
                assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
                errors
            });
            let error = to_aborted_error(make_request_reason("the disk is full"));
            assert!(errors.iter().all(|e| e.as_ref() == Some(&[error.clone(), error.clone()])), "{errors:?}");
        }
    }
}

/// Returns the errors in which ranks report that their calls of a collective do not match. Panics
/// if another error is not an abort by a rank with such an error.
fn expect_mismatches(results: Vec<Option<Result<(), CommError>>>) -> Vec<CallMismatch> {
    let results = results.into_iter().map(|r| r.expect("no rank panics"));
    // a rank that sent and received what it expected may finish before its peer aborts
    let errors: Vec<CommError> = results.filter_map(Result::err).collect();
    let reported: Vec<&CommError> = errors.iter().filter(|e| matches!(e, CommError::Mismatch(_))).collect();
    let messages: Vec<String> = reported.iter().map(|e| e.to_string()).collect();
    for error in &errors {
        match error {
            CommError::Mismatch(_) => {}
            CommError::Aborted(AbortReason::RankFailed { message, .. }) if messages.contains(message) => {}
            other => panic!("{other}"),
        }
    }
    assert!(!reported.is_empty());
    let mismatch = |e: CommError| match e {
        CommError::Mismatch(mismatch) => Some(mismatch),
        _ => None,
    };
    errors.into_iter().filter_map(mismatch).collect()
}

#[test]
fn a_mismatch_is_reported_on_every_host() {
    for hosts in [&[0, 1, 2][..], &[0, 0, 1], &[0, 1, 1, 1]] {
        for odd in 0..hosts.len() {
            let results = run_ranks(hosts, make_tcp_limits(), |c| match c.rank() == odd {
                true => c.barrier(),
                false => c.all_reduce(Buf::zeroed(50_000).view_mut()),
            });
            for mismatch in expect_mismatches(results) {
                let CallMismatch::Call { rank, call, peer, peer_call } = mismatch else {
                    panic!("{mismatch}")
                };
                let (barrier, all_reduce) = if rank == odd { (call, peer_call) } else { (peer_call, call) };
                assert!(rank == odd || peer == odd, "{mismatch}");
                assert_eq!(barrier.collective, Some(CollectiveKind::Barrier));
                assert_eq!(all_reduce.collective, Some(CollectiveKind::AllReduce));
                assert_eq!((barrier.call_number, all_reduce.call_number), (0, 0));
            }
        }
    }
    for hosts in [[0, 1], [0, 0]] {
        let results = run_ranks(&hosts, make_tcp_limits(), |c| {
            let (mut recv, send) = (Buf::zeroed(3 + c.rank()), Buf::zeroed(4));
            let recv_counts = [[2, 1], [2, 2]][c.rank()];
            c.all_to_all(recv.view_mut(), &recv_counts, send.view(), &[2, 2])
        });
        let unit = TransferUnit::Elements;
        let expected = CallMismatch::Transfer { from: 1, to: 0, sent: 2, expected: 1, unit };
        assert!(expect_mismatches(results).iter().all(|mismatch| *mismatch == expected));
    }
}

#[test]
fn a_rank_that_panics_or_leaves_unblocks_the_others() {
    for hosts in [&[0, 1, 2][..], &[0, 1, 0], &[0, 0, 1]] {
        let errors = run_ranks(hosts, make_tcp_limits(), |c| {
            assert!(c.rank() != 1, "intended");
            c.barrier().unwrap_err()
        });
        assert_eq!(errors[2], Some(to_aborted_error(AbortReason::RankPanicked { rank: 1 })));
        let errors = run_ranks(hosts, make_tcp_limits(), |c| match c.rank() {
            1 => None,
            _ => Some(c.barrier().unwrap_err()),
        });
        let left = AbortReason::PeerLeft { rank: 1, collective: "barrier (call 0)".into() };
        assert_eq!(errors[0], Some(Some(to_aborted_error(left.clone()))));
        assert_eq!(errors[2], Some(Some(to_aborted_error(left))));
        let errors = run_ranks(hosts, make_tcp_limits(), |c| {
            let partial = Buf::zeroed(3000);
            let sink = &mut |rank: usize, _: usize, _: device::View<'_>| {
                assert!(c.rank() != 0 || rank != 1, "intended");
            };
            c.reduce_scatter_ordered(&[partial.view(), partial.view()], &[2; 3], &[1000; 3], sink)
                .and_then(|()| c.barrier())
                .unwrap_err()
        });
        assert_eq!(errors[0], None);
        assert_eq!(errors[1], Some(to_aborted_error(AbortReason::RankPanicked { rank: 0 })));
    }
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let timeout = Duration::from_millis(100);
    let mut limits = make_tcp_limits();
    limits.shm.collective_timeout = timeout;
    let timed_out = std::sync::Barrier::new(3);
    let errors = run_ranks(&[0, 1, 2], limits, |c| {
        let first = (c.rank() == 0).then(|| c.barrier().unwrap_err());
        timed_out.wait(); // the others stay in the group until the wait of rank 0 has timed out
        // rank 0 had entered its barrier: one may still pass before its abort arrives
        first.unwrap_or_else(|| {
            loop {
                if let Err(e) = c.barrier() {
                    break e;
                }
            }
        })
    });
    let expected = CommError::Timeout {
        rank: 0,
        world: 3,
        collective: CollectiveKind::Barrier,
        call_number: 0,
        timeout,
        missing: vec![1, 2],
    };
    let reason = AbortReason::RankFailed { rank: 0, message: expected.to_string() };
    assert_eq!(errors[0], Some(expected));
    assert_eq!(errors[1], Some(to_aborted_error(reason)));
}

#[test]
fn a_slow_reader_loses_no_data() {
    let len = 4_000_000; // more than socket buffers hold
    let results = run_ranks(&[0, 1, 2], make_tcp_limits(), |c| {
        let counts = [len; 3];
        for id in 0..3 {
            if c.rank() == 1 {
                thread::sleep(Duration::from_millis(300));
            }
            checks::check_all_gather(&c, id, &counts)?;
        }
        Ok::<(), CheckFailure>(())
    });
    assert!(results.iter().all(|r| r == &Some(Ok(()))), "{results:?}");
}

#[test]
fn connections_of_other_programs_do_not_disturb_a_group() {
    let mut pending = create_pending_ranks(&[0, 1, 0]);
    let last = pending.pop().unwrap();
    let targets: Vec<SocketAddr> = pending.iter().map(|s| s.listener.address().unwrap()).collect();
    let idle: Vec<TcpStream> = (0..40).map(|i| TcpStream::connect(targets[i % 2]).unwrap()).collect();
    for target in &targets {
        for garbage in [&b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"[..], &[0; 5000], b"launchtc", b""] {
            TcpStream::connect(target).unwrap().write_all(garbage).unwrap();
        }
    }
    pending.push(last);
    let results = run_pending_ranks(pending, |rank| {
        checks::check_random_collectives(&rank.join(make_tcp_limits()).unwrap(), 5, 30, 500)
    });
    assert!(results.iter().all(|r| r == &Some(Ok(()))), "{results:?}");
    drop(idle);
    // after joining, a rank no longer listens
    assert!(targets.iter().all(|t| TcpStream::connect(t).is_err()));
}

/// Lets two ranks join one group, of which rank 1 has a description that `change` has altered.
/// Returns the errors of both ranks.
fn join_with_changed_group(change: impl Fn(&mut GroupSpec)) -> [CommError; 2] {
    let mut pending = create_pending_ranks(&[0, 1]);
    change(&mut pending[1].group);
    let mut short = make_tcp_limits();
    short.shm.join_timeout = Duration::from_millis(700);
    let errors = run_pending_ranks(pending, |rank| rank.join(short).err().unwrap());
    [errors[0].clone().unwrap(), errors[1].clone().unwrap()]
}

fn make_rejected_error(reason: RejectReason) -> CommError {
    CommError::Rejected { rank: 1, peer: 0, reason }
}

#[test]
fn another_key_attempt_or_run_is_rejected() {
    let [acceptor, connector] = join_with_changed_group(|g| g.key[31] ^= 1);
    let CommError::JoinTimeout { rank: 1, missing, last_failure, .. } = connector else {
        panic!("{connector}")
    };
    assert_eq!(missing, [0]);
    assert_eq!(last_failure.map(|f| f.error), Some(ConnectFailureReason::WrongKey));
    match acceptor {
        CommError::JoinTimeout { rank: 0, missing, .. } => assert_eq!(missing, [1]),
        other => panic!("{other}"),
    }
    let [_, connector] = join_with_changed_group(|g| g.attempt = 2);
    assert_eq!(connector, make_rejected_error(RejectReason::OtherAttempt));
    let [_, connector] = join_with_changed_group(|g| g.run = "other".into());
    assert_eq!(connector, make_rejected_error(RejectReason::UnexpectedRank));
}

#[test]
fn a_late_rank_of_an_old_attempt_changes_nothing() {
    let mut now = create_pending_ranks(&[0, 1, 2]);
    let mut old = create_pending_ranks(&[0, 1, 2]).pop().unwrap();
    old.group.members = now[0].group.members.clone();
    old.group.attempt = 2;
    let late = now.pop().unwrap();
    thread::scope(|s| {
        let waiting: Vec<_> = now
            .into_iter()
            .map(|rank| {
                s.spawn(move || {
                    checks::check_random_collectives(&rank.join(make_tcp_limits()).unwrap(), 3, 20, 300)
                })
            })
            .collect();
        let error = old.join(make_tcp_limits()).err().unwrap();
        let reason = RejectReason::OtherAttempt;
        assert!(matches!(error, CommError::Rejected { rank: 2, reason: r, .. } if r == reason), "{error}");
        checks::check_random_collectives(&late.join(make_tcp_limits()).unwrap(), 3, 20, 300).unwrap();
        waiting.into_iter().for_each(|t| t.join().unwrap().unwrap());
    });
}

#[test]
fn a_listener_without_the_key_is_not_accepted() {
    let mut pending = create_pending_ranks(&[0, 1]);
    let honest = pending.pop().unwrap();
    let fake = pending.pop().unwrap();
    drop(fake.listener);
    let listener = std::net::TcpListener::bind((LOOPBACK, 0)).unwrap();
    let mut group = honest.group.clone();
    group.members[0].addresses = vec![listener.local_addr().unwrap()];
    let mut short = make_tcp_limits();
    short.shm.join_timeout = Duration::from_millis(700);
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            listener.set_nonblocking(true).unwrap();
            while !stop.load(SeqCst) {
                let Ok((mut stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                };
                stream.set_nonblocking(false).unwrap();
                let mut hello = [0; 92];
                stream.read_exact(&mut hello).unwrap();
                // a challenge that accepts, with a nonce; then 64 bytes that are no proofs
                let mut answer = b"launchtc\0\0\0\0".to_vec();
                answer.extend_from_slice(&[1; 96]);
                _ = stream.write_all(&answer);
            }
        });
        let abort_handle = AbortHandle::new(1, 2).unwrap();
        let error = honest.listener.join(&group, None, short, &abort_handle).err().unwrap();
        stop.store(true, SeqCst);
        let CommError::JoinTimeout { last_failure: Some(failure), .. } = error else { panic!("{error}") };
        assert_eq!(failure.error, ConnectFailureReason::WrongKey);
    });
}

#[test]
fn joining_can_be_aborted() {
    let rank = create_pending_ranks(&[0, 1]).remove(0);
    let abort_handle = AbortHandle::new(0, 2).unwrap();
    let began = Instant::now();
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            abort_handle.abort("rank 1 could not start");
        });
        let error = rank.listener.join(&rank.group, None, make_tcp_limits(), &abort_handle).err().unwrap();
        assert_eq!(error, to_aborted_error(make_request_reason("rank 1 could not start")));
    });
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[test]
fn several_ranks_of_a_host_need_shared_memory() {
    let rank = create_pending_ranks(&[0, 0]).remove(0);
    let abort_handle = AbortHandle::new(0, 2).unwrap();
    let error = rank.listener.join(&rank.group, None, make_tcp_limits(), &abort_handle).err().unwrap();
    assert_eq!(error, GroupError::NoSharedMemory { rank: 0, world: 2, local_ranks: vec![0, 1] }.into());
}

#[test]
fn every_rank_knows_which_ranks_share_a_host() {
    for hosts in HOSTS_OF_RANKS {
        for numbers in run_ranks(hosts, make_small_limits(), |c| c.list_rank_hosts()) {
            let numbers = numbers.expect("no rank panics");
            assert_eq!(numbers.len(), hosts.len());
            for (a, b) in (0..hosts.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                assert_eq!(numbers[a] == numbers[b], hosts[a] == hosts[b], "ranks {a} and {b} of {hosts:?}");
            }
        }
    }
}
