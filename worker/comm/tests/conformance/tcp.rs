//! The network transport, alone (one rank per host) and with shared memory inside the hosts. "Hosts" are groups of ranks on
//! this machine that share no memory with each other.
#![allow(clippy::unwrap_used)] // a test that panics has failed
use crate::checks;
use comm::{
    Comm, CommError,
    shm::Limits as Shm,
    tcp::{Endpoint, Group, Limits, Member, Stopper, TcpComm},
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

pub(crate) fn limits() -> Limits {
    let shm = Shm { join: Duration::from_secs(50), wait: Duration::from_secs(50), ..Shm::default() };
    Limits { shm, ..Limits::default() }
}

fn small() -> Limits {
    let mut small = limits();
    small.shm.staging = 4096;
    small
}

/// One rank before it joins.
struct Seat {
    endpoint: Endpoint,
    group: Group,
    memory: Option<OwnedFd>,
}

impl Seat {
    fn join(self, limits: Limits) -> comm::Result<TcpComm> {
        let stopper = Stopper::new(self.group.rank, self.group.members.len())?;
        self.endpoint.join(&self.group, self.memory, limits, &stopper)
    }
}

/// The ranks of a group whose hosts are as given, by rank.
fn seats(hosts: &[usize]) -> Vec<Seat> {
    let endpoints: Vec<Endpoint> = hosts.iter().map(|_| Endpoint::bind(LOOPBACK).unwrap()).collect();
    let member =
        |(e, host): (&Endpoint, &usize)| Member { host: *host, addresses: vec![e.address().unwrap()] };
    let members: Vec<Member> = endpoints.iter().zip(hosts).map(member).collect();
    let mut memory: HashMap<usize, OwnedFd> = HashMap::new();
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    for host in hosts {
        memory.entry(*host).or_insert_with(|| memfd_create("comm-test", flags).unwrap());
    }
    let seat = |(rank, endpoint): (usize, Endpoint)| Seat {
        endpoint,
        group: Group { rank, members: members.clone(), run: "test".into(), attempt: 3, key: [7; 32] },
        memory: Some(memory[&hosts[rank]].try_clone().unwrap()),
    };
    endpoints.into_iter().enumerate().map(seat).collect()
}

/// Runs `rank` in a thread for each seat; results by rank, None where it panicked.
fn each_joined<T: Send>(seats: Vec<Seat>, rank: impl Fn(Seat) -> T + Sync) -> Vec<Option<T>> {
    thread::scope(|s| {
        let rank = &rank;
        let threads: Vec<_> = seats.into_iter().map(|seat| s.spawn(move || rank(seat))).collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    })
}

fn each<T: Send>(hosts: &[usize], limits: Limits, rank: impl Fn(TcpComm) -> T + Sync) -> Vec<Option<T>> {
    each_joined(seats(hosts), |seat| rank(seat.join(limits).unwrap()))
}

/// Splits of ranks over hosts: alone, even, uneven, in no order.
const SPLITS: &[&[usize]] = &[
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

#[test]
fn conforms_over_every_split() {
    for hosts in SPLITS {
        for (seed, limits) in [(1, small()), (2, limits())] {
            let done = each(hosts, limits, |c| checks::run(&c, seed, 40, 700));
            assert!(done.iter().all(|d| d == &Some(Ok(()))), "hosts {hosts:?}: {done:?}");
        }
    }
}

#[test]
fn conforms_for_megabytes() {
    for hosts in [&[0, 1][..], &[0, 0, 1], &[0, 1, 0, 1]] {
        let done = each(hosts, limits(), |c| checks::run(&c, 9, 12, 600_000));
        assert!(done.iter().all(|d| d == &Some(Ok(()))), "hosts {hosts:?}: {done:?}");
    }
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    for hosts in [&[0, 1, 2, 3][..], &[0, 0, 0, 1, 1]] {
        let rounds = 100;
        let came = AtomicUsize::new(0);
        each(hosts, limits(), |c| {
            for round in 1..=rounds {
                came.fetch_add(1, SeqCst);
                c.barrier().unwrap();
                assert!(came.load(SeqCst) >= hosts.len() * round);
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
            let errors = each(hosts, limits(), |c| {
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
            let aborted = CommError::Aborted("the disk is full".into());
            assert!(
                errors.iter().all(|e| e.as_ref() == Some(&[aborted.clone(), aborted.clone()])),
                "{errors:?}"
            );
        }
    }
}

#[test]
fn disagreement_is_named_everywhere() {
    for hosts in [&[0, 1, 2][..], &[0, 0, 1], &[0, 1, 1, 1]] {
        for odd in 0..hosts.len() {
            let errors = each(hosts, limits(), |c| match c.rank() == odd {
                true => c.barrier().unwrap_err().to_string(),
                false => c.all_reduce(Buf::zeroed(50_000).view_mut()).unwrap_err().to_string(),
            });
            for e in errors.into_iter().flatten() {
                let sides = [format!("rank {odd} calls barrier (call 0"), "calls all_reduce (call 0".into()];
                assert!(sides.iter().all(|s| e.contains(s)), "{e}");
            }
        }
    }
    for hosts in [[0, 1], [0, 0]] {
        let errors = each(&hosts, limits(), |c| {
            let (mut recv, send) = (Buf::zeroed(3 + c.rank()), Buf::zeroed(4));
            let recv_counts = [[2, 1], [2, 2]][c.rank()];
            c.all_to_all(recv.view_mut(), &recv_counts, send.view(), &[2, 2]).unwrap_err().to_string()
        });
        for e in errors.into_iter().flatten() {
            assert!(e.contains("rank 1 sends 2 elements to rank 0, which expects 1"), "{e}");
        }
    }
}

#[test]
fn a_rank_that_panics_or_leaves_frees_the_others() {
    for hosts in [&[0, 1, 2][..], &[0, 1, 0], &[0, 0, 1]] {
        let errors = each(hosts, limits(), |c| {
            assert!(c.rank() != 1, "on purpose");
            c.barrier().unwrap_err().to_string()
        });
        assert!(errors[2].as_ref().unwrap().contains("rank 1 panicked"), "{errors:?}");
        let errors = each(hosts, limits(), |c| match c.rank() {
            1 => String::new(),
            _ => c.barrier().unwrap_err().to_string(),
        });
        assert!(errors[0].as_ref().unwrap().contains("rank 1 left the group before barrier"), "{errors:?}");
        assert!(errors[2].as_ref().unwrap().contains("rank 1 left the group before barrier"), "{errors:?}");
        let errors = each(hosts, limits(), |c| {
            let partial = Buf::zeroed(3000);
            let sink = &mut |rank: usize, _: usize, _: device::View<'_>| {
                assert!(c.rank() != 0 || rank != 1, "on purpose");
            };
            c.reduce_scatter_fold(&[partial.view(), partial.view()], &[1000; 3], sink)
                .and_then(|()| c.barrier())
                .unwrap_err()
                .to_string()
        });
        assert!(errors[0].is_none() && errors[1].as_ref().unwrap().contains("rank 0 panicked"), "{errors:?}");
    }
}

#[test]
fn a_wait_has_a_limit_that_names_the_missing() {
    let mut short = limits();
    short.shm.wait = Duration::from_millis(100);
    let done = std::sync::Barrier::new(3);
    let errors = each(&[0, 1, 2], short, |c| {
        let first = (c.rank() == 0).then(|| c.barrier().unwrap_err());
        done.wait(); // the others stay in the group until rank 0 has given up
        // rank 0 had entered its barrier: one may still pass before its abort arrives
        first.unwrap_or_else(|| {
            loop {
                if let Err(e) = c.barrier() {
                    break e;
                }
            }
        })
    });
    let Some(CommError::Io(error)) = &errors[0] else { panic!("{errors:?}") };
    assert!(error.contains("in barrier (call 0) for ranks 1, 2 of 3"), "{error}");
    assert_eq!(errors[1], Some(CommError::Aborted(error.clone())));
}

#[test]
fn a_slow_reader_loses_nothing() {
    let len = 4_000_000; // more than socket buffers hold
    let done = each(&[0, 1, 2], limits(), |c| {
        let counts = [len; 3];
        for id in 0..3 {
            if c.rank() == 1 {
                thread::sleep(Duration::from_millis(300));
            }
            checks::all_gather(&c, id, &counts)?;
        }
        Ok::<(), String>(())
    });
    assert!(done.iter().all(|d| d == &Some(Ok(()))), "{done:?}");
}

#[test]
fn strangers_do_not_disturb_a_group() {
    let mut seats = seats(&[0, 1, 0]);
    let last = seats.pop().unwrap();
    let targets: Vec<SocketAddr> = seats.iter().map(|s| s.endpoint.address().unwrap()).collect();
    let idle: Vec<TcpStream> = (0..40).map(|i| TcpStream::connect(targets[i % 2]).unwrap()).collect();
    for target in &targets {
        for garbage in [&b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"[..], &[0; 5000], b"launchtc", b""] {
            TcpStream::connect(target).unwrap().write_all(garbage).unwrap();
        }
    }
    seats.push(last);
    let done = each_joined(seats, |seat| checks::run(&seat.join(limits()).unwrap(), 5, 30, 500));
    assert!(done.iter().all(|d| d == &Some(Ok(()))), "{done:?}");
    drop(idle);
    // a group that has met listens no more
    assert!(targets.iter().all(|t| TcpStream::connect(t).is_err()));
}

/// Joins a group of two whose rank 1 is changed; the errors of both.
fn refused(change: impl Fn(&mut Group)) -> [String; 2] {
    let mut seats = seats(&[0, 1]);
    change(&mut seats[1].group);
    let mut short = limits();
    short.shm.join = Duration::from_millis(700);
    let errors = each_joined(seats, |seat| seat.join(short).err().unwrap().to_string());
    [errors[0].clone().unwrap(), errors[1].clone().unwrap()]
}

#[test]
fn another_key_attempt_or_run_is_rejected() {
    let [at, from] = refused(|g| g.key[31] ^= 1);
    assert!(from.contains("for rank 0 of 2") && from.contains("another key"), "{from}");
    assert!(at.contains("in join for rank 1 of 2"), "{at}");
    let [_, from] = refused(|g| g.attempt = 2);
    assert!(from.contains("rank 0 refused rank 1: it belongs to another attempt"), "{from}");
    let [_, from] = refused(|g| g.run = "other".into());
    assert!(from.contains("rank 0 refused rank 1: it does not expect this rank"), "{from}");
}

#[test]
fn a_late_rank_of_an_old_attempt_changes_nothing() {
    let mut now = seats(&[0, 1, 2]);
    let mut old = seats(&[0, 1, 2]).pop().unwrap();
    old.group.members = now[0].group.members.clone();
    old.group.attempt = 2;
    let late = now.pop().unwrap();
    thread::scope(|s| {
        let waiting: Vec<_> = now
            .into_iter()
            .map(|seat| s.spawn(move || checks::run(&seat.join(limits()).unwrap(), 3, 20, 300)))
            .collect();
        let error = old.join(limits()).err().unwrap().to_string();
        assert!(error.contains("another attempt"), "{error}");
        checks::run(&late.join(limits()).unwrap(), 3, 20, 300).unwrap();
        waiting.into_iter().for_each(|t| t.join().unwrap().unwrap());
    });
}

#[test]
fn a_listener_without_the_key_is_not_believed() {
    let mut seats = seats(&[0, 1]);
    let honest = seats.pop().unwrap();
    let fake = seats.pop().unwrap();
    drop(fake.endpoint);
    let listener = std::net::TcpListener::bind((LOOPBACK, 0)).unwrap();
    let mut group = honest.group.clone();
    group.members[0].addresses = vec![listener.local_addr().unwrap()];
    let mut short = limits();
    short.shm.join = Duration::from_millis(700);
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
                // go on, with a nonce; then 32 bytes that are no proof
                let mut answer = b"launchtc\0\0\0\0".to_vec();
                answer.extend_from_slice(&[1; 64]);
                _ = stream.write_all(&answer);
            }
        });
        let stopper = Stopper::new(1, 2).unwrap();
        let error = honest.endpoint.join(&group, None, short, &stopper).err().unwrap().to_string();
        stop.store(true, SeqCst);
        assert!(error.contains("does not know the job's key"), "{error}");
    });
}

#[test]
fn joining_can_be_stopped() {
    let seat = seats(&[0, 1]).remove(0);
    let stopper = Stopper::new(0, 2).unwrap();
    let began = Instant::now();
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            stopper.abort("rank 1 could not start");
        });
        let error = seat.endpoint.join(&seat.group, None, limits(), &stopper).err().unwrap();
        assert_eq!(error, CommError::Aborted("rank 1 could not start".into()));
    });
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[test]
fn several_ranks_of_a_host_need_its_memory() {
    let seat = seats(&[0, 0]).remove(0);
    let stopper = Stopper::new(0, 2).unwrap();
    let error = seat.endpoint.join(&seat.group, None, limits(), &stopper).err().unwrap().to_string();
    assert!(error.contains("no shared memory was given to rank 0"), "{error}");
}
