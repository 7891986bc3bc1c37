//! Bandwidth of the collectives between two processes, each pinned to a processor, beside memcpy of one process.
//!
//! `cargo run -p comm --release --example comm_bench`
//!
//! "Bus GB/s" is the usual measure: bytes that must cross between the ranks, by the size of the whole message and
//! independent of the number of ranks: all_gather and reduce_scatter `S · (n − 1) / n / t`, all_reduce twice that.
use comm::{
    Comm,
    shm::{Limits, ShmComm},
};
use device::Buf;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::Pid,
};
use std::{
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::Command,
    time::{Duration, Instant},
};

const WORLD: usize = 2;
const MIB: usize = 1 << 20;
const SIZES: [usize; 4] = [MIB, 8 * MIB, 64 * MIB, 256 * MIB];
const RANK: &str = "COMM_BENCH_RANK";

fn main() {
    match std::env::var(RANK) {
        Ok(told) => rank(&told),
        Err(_) => parent(),
    }
}

fn parent() {
    let fd = memfd_create("comm-bench", MFdFlags::empty()).expect("a memfd");
    let rank = |r: usize| {
        Command::new(std::env::current_exe().expect("a path"))
            .env(RANK, format!("{r} {}", fd.as_raw_fd()))
            .spawn()
            .expect("a process")
    };
    let mut ranks: Vec<_> = (0..WORLD).map(rank).collect();
    let right = ranks.iter_mut().all(|r| r.wait().expect("a child").success());
    assert!(right, "a rank failed");
}

fn rank(told: &str) {
    let (rank, fd) = told.split_once(' ').expect("rank and descriptor");
    let (rank, fd): (usize, i32) = (rank.parse().expect("a number"), fd.parse().expect("a number"));
    let mut cpus = CpuSet::new();
    cpus.set(rank).expect("a processor");
    sched_setaffinity(Pid::from_raw(0), &cpus).expect("a processor for each rank");
    // SAFETY: the parent left this descriptor open for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let comm = ShmComm::join(fd, rank, WORLD, Limits::default()).expect("a group");
    say(rank, "median (best) GB/s       1 MiB          8 MiB         64 MiB        256 MiB");
    row(&comm, "memcpy, rank 0 alone", 1.0, |bytes| {
        let (from, mut to) = (Buf::from_slice(&vec![1.0; bytes / 4]), Buf::zeroed(bytes / 4));
        move |comm: &ShmComm| {
            if comm.rank() == 0 {
                to.host_mut().copy_from_slice(from.host());
            }
        }
    });
    row(&comm, "memcpy, both at once", 1.0, |bytes| {
        let (from, mut to) = (Buf::from_slice(&vec![1.0; bytes / 4]), Buf::zeroed(bytes / 4));
        move |_: &ShmComm| to.host_mut().copy_from_slice(from.host())
    });
    row(&comm, "all_gather", 0.5, |bytes| {
        let n = bytes / 4 / WORLD;
        let (send, mut recv) = (Buf::from_slice(&vec![1.0; n]), Buf::zeroed(n * WORLD));
        move |comm: &ShmComm| comm.all_gather(recv.view_mut(), send.view(), &[n; WORLD]).expect("works")
    });
    row(&comm, "reduce_scatter_fold", 0.5, |bytes| {
        let n = bytes / 4 / WORLD;
        let (partial, mut sum) = (Buf::from_slice(&vec![1.0; n * WORLD]), Buf::zeroed(n));
        move |comm: &ShmComm| {
            let sum = sum.host_mut();
            let sink = &mut |rank: usize, _: usize, piece: device::View<'_>| match rank {
                0 => sum.copy_from_slice(piece.host()),
                _ => sum.iter_mut().zip(piece.host()).for_each(|(s, p)| *s += p),
            };
            comm.reduce_scatter_fold(&[partial.view()], &[n; WORLD], sink).expect("works");
        }
    });
    row(&comm, "reduce_scatter", 0.5, |bytes| {
        let n = bytes / 4 / WORLD;
        let (send, mut recv) = (Buf::from_slice(&vec![1.0; n * WORLD]), Buf::zeroed(n));
        move |comm: &ShmComm| comm.reduce_scatter(recv.view_mut(), send.view(), &[n; WORLD]).expect("works")
    });
    row(&comm, "all_reduce", 1.0, |bytes| {
        let mut x = Buf::zeroed(bytes / 4);
        move |comm: &ShmComm| comm.all_reduce(x.view_mut()).expect("works")
    });
    latency(&comm);
}

fn say(rank: usize, line: &str) {
    if rank == 0 {
        println!("{line}");
    }
}

/// One line of the table: `make(bytes)` gives what is measured at that size; `share` of the bytes count.
fn row<F: FnMut(&ShmComm)>(comm: &ShmComm, name: &str, share: f64, make: impl Fn(usize) -> F) {
    let mut line = format!("{name:<22}");
    for bytes in SIZES {
        let mut run = make(bytes);
        let repeat = (256 * MIB / bytes).clamp(6, 100);
        let mut times: Vec<Duration> = (0..repeat + 2)
            .map(|_| {
                comm.barrier().expect("works");
                let start = Instant::now();
                run(comm);
                start.elapsed()
            })
            .skip(2)
            .collect();
        times.sort();
        let rate = |t: Duration| bytes as f64 * share / t.as_secs_f64() / 1e9;
        line += &format!("  {:5.1} ({:5.1})", rate(times[times.len() / 2]), rate(times[0]));
    }
    say(comm.rank(), &line);
}

fn latency(comm: &ShmComm) {
    const BATCH: u32 = 1000;
    let mut times: Vec<Duration> = (0..50)
        .map(|_| {
            let start = Instant::now();
            (0..BATCH).for_each(|_| comm.barrier().expect("works"));
            start.elapsed() / BATCH
        })
        .collect();
    times.sort();
    let us = |t: Duration| t.as_secs_f64() * 1e6;
    say(comm.rank(), &format!("barrier: median {:.2} µs, best {:.2} µs", us(times[25]), us(times[0])));
}
