//! Bandwidth of the collectives between processes, each pinned to a processor, beside memcpy of one process.
//!
//! `cargo run -p comm --release --example comm_bench [-- WORLD [PART_OF_A_NAME]]`; ranks beyond the processors aren't pinned.
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

const MIB: usize = 1 << 20;
const SIZES: [usize; 4] = [MIB, 8 * MIB, 64 * MIB, 256 * MIB];

/// `WORLD PART_OF_A_NAME`, and for a rank's process `RANK DESCRIPTOR` after them.
struct Told {
    world: usize,
    part: String,
    rank: Option<(usize, i32)>,
}

fn told() -> Told {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize| args.get(i).map(|n| n.parse::<usize>().expect("a number"));
    let rank = number(2).zip(number(3)).map(|(rank, fd)| (rank, fd as i32));
    Told { world: number(0).unwrap_or(2), part: args.get(1).cloned().unwrap_or_default(), rank }
}

fn main() {
    let told = told();
    match told.rank {
        Some((rank, fd)) => play(rank, told.world, fd),
        None => parent(&told),
    }
}

fn parent(told: &Told) {
    let fd = memfd_create("comm-bench", MFdFlags::empty()).expect("a memfd");
    let rank = |r: usize| {
        Command::new(std::env::current_exe().expect("a path"))
            .args([told.world.to_string(), told.part.clone(), r.to_string(), fd.as_raw_fd().to_string()])
            .spawn()
            .expect("a process")
    };
    let mut ranks: Vec<_> = (0..told.world).map(rank).collect();
    let right = ranks.iter_mut().all(|r| r.wait().expect("a child").success());
    assert!(right, "a rank failed");
}

/// What one rank does.
fn play(rank: usize, world: usize, fd: i32) {
    if std::thread::available_parallelism().expect("processors").get() >= world {
        let mut cpus = CpuSet::new();
        cpus.set(rank).expect("a processor");
        sched_setaffinity(Pid::from_raw(0), &cpus).expect("a processor for each rank");
    }
    // SAFETY: the parent left this descriptor open for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let comm = ShmComm::join(fd, rank, world, Limits::default()).expect("a group");
    say(rank, "median (best) GB/s       1 MiB          8 MiB         64 MiB        256 MiB");
    let across = (world - 1) as f64 / world as f64;
    row(&comm, "memcpy, rank 0 alone", 1.0, |bytes| {
        let (from, mut to) = (Buf::from_slice(&vec![1.0; bytes / 4]), Buf::zeroed(bytes / 4));
        move |comm: &ShmComm| {
            if comm.rank() == 0 {
                to.host_mut().copy_from_slice(from.host());
            }
        }
    });
    row(&comm, "memcpy, all at once", 1.0, |bytes| {
        let (from, mut to) = (Buf::from_slice(&vec![1.0; bytes / 4]), Buf::zeroed(bytes / 4));
        move |_: &ShmComm| to.host_mut().copy_from_slice(from.host())
    });
    row(&comm, "all_gather", across, |bytes| {
        let n = bytes / 4 / world;
        let (send, mut recv) = (Buf::from_slice(&vec![1.0; n]), Buf::zeroed(n * world));
        move |comm: &ShmComm| comm.all_gather(recv.view_mut(), send.view(), &vec![n; world]).expect("works")
    });
    row(&comm, "reduce_scatter_fold", across, |bytes| {
        let n = bytes / 4 / world;
        let (partial, mut sum) = (Buf::from_slice(&vec![1.0; n * world]), Buf::zeroed(n));
        move |comm: &ShmComm| {
            let sum = sum.host_mut();
            let sink = &mut |rank: usize, _: usize, piece: device::View<'_>| match rank {
                0 => sum.copy_from_slice(piece.host()),
                _ => sum.iter_mut().zip(piece.host()).for_each(|(s, p)| *s += p),
            };
            comm.reduce_scatter_fold(&[partial.view()], &vec![n; world], sink).expect("works");
        }
    });
    row(&comm, "reduce_scatter", across, |bytes| {
        let n = bytes / 4 / world;
        let (send, mut recv) = (Buf::from_slice(&vec![1.0; n * world]), Buf::zeroed(n));
        move |comm: &ShmComm| {
            comm.reduce_scatter(recv.view_mut(), send.view(), &vec![n; world]).expect("works")
        }
    });
    row(&comm, "all_reduce", 2.0 * across, |bytes| {
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
    if !name.contains(&told().part) {
        return;
    }
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
    say(
        comm.rank(),
        &format!(
            "barrier, µs by 1000: median {:.2}, best {:.2}, worst {:.2}",
            us(times[25]),
            us(times[0]),
            us(times[49])
        ),
    );
}
