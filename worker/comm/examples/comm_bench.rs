//! Benchmark that measures the bandwidth of collectives between processes. Each process is pinned
//! to a processor, and the results are compared with memcpy in one process.
//!
//! Run `cargo run -p comm --release --example comm_bench [-- WORLD [FILTER]]`. FILTER selects rows
//! by a part of their name. Ranks are pinned only if there are enough processors.
//!
//! The unit is the bus bandwidth of nccl-tests, which does not depend on the number of ranks: the
//! bytes that must cross between ranks per second. For a message of S bytes that is `S · (n − 1) /
//! n / t` for all_gather and reduce_scatter, and twice that for all_reduce.
use comm::{
    Comm,
    shm::{ShmComm, ShmLimits},
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
/// The sizes of the messages that the benchmark measures, in bytes. Each size is one column of the
/// printed table.
const MESSAGE_BYTES: [usize; 4] = [MIB, 8 * MIB, 64 * MIB, 256 * MIB];

/// Command line of the benchmark, `WORLD FILTER`: the number of ranks, and a text that selects the
/// collectives whose names contain it. In the process of a rank, the rank and the file descriptor
/// of the shared memory follow.
struct BenchArgs {
    world: usize,
    filter: String,
    rank: Option<(usize, i32)>,
}

/// Parses the command line of the benchmark, with a default of 2 ranks. Panics if a number is
/// invalid.
fn parse_args() -> BenchArgs {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize| args.get(i).map(|n| n.parse::<usize>().expect("the argument is a number"));
    let rank = number(2).zip(number(3)).map(|(rank, fd)| (rank, fd as i32));
    BenchArgs { world: number(0).unwrap_or(2), filter: args.get(1).cloned().unwrap_or_default(), rank }
}

/// Measures collectives in shared memory between processes of this host, one process per rank, and
/// prints a table of their bandwidths.
fn main() {
    let args = parse_args();
    match args.rank {
        Some((rank, fd)) => run_rank(rank, args.world, fd),
        None => spawn_ranks(&args),
    }
}

/// Starts one process per rank and waits until all have ended. Panics if a process fails.
fn spawn_ranks(args: &BenchArgs) {
    let fd = memfd_create("comm-bench", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd can be created");
    let spawn = |r: usize| {
        Command::new(std::env::current_exe().expect("the path of this executable is known"))
            .args([args.world.to_string(), args.filter.clone(), r.to_string(), fd.as_raw_fd().to_string()])
            .spawn()
            .expect("the process starts")
    };
    let mut ranks: Vec<_> = (0..args.world).map(spawn).collect();
    let succeeded = ranks.iter_mut().all(|r| r.wait().expect("the child can be waited for").success());
    assert!(succeeded, "a rank failed");
}

/// Joins the group of the benchmark's processes as rank `rank`, and measures every collective that
/// the command line selects. Pins the process to one processor if the machine has enough.
fn run_rank(rank: usize, world: usize, fd: i32) {
    if std::thread::available_parallelism().expect("the number of processors is known").get() >= world {
        let mut cpus = CpuSet::new();
        cpus.set(rank).expect("the processor exists");
        sched_setaffinity(Pid::from_raw(0), &cpus).expect("the rank can be pinned");
    }
    // SAFETY: this process inherited the descriptor and no other code uses it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let comm = ShmComm::join(fd, rank, world, ShmLimits::default()).expect("the group can be joined");
    print_on_rank_0(rank, "median (best) GB/s       1 MiB          8 MiB         64 MiB        256 MiB");
    let crossing = (world - 1) as f64 / world as f64;
    measure_bandwidth_row(&comm, "memcpy, rank 0 alone", 1.0, |bytes| {
        let (from, mut to) = (Buf::from_slice(&vec![1.0; bytes / 4]), Buf::zeroed(bytes / 4));
        move |comm: &ShmComm| {
            if comm.rank() == 0 {
                to.host_slice_mut().copy_from_slice(from.host_slice());
            }
        }
    });
    measure_bandwidth_row(&comm, "memcpy, all at once", 1.0, |bytes| {
        let (from, mut to) = (Buf::from_slice(&vec![1.0; bytes / 4]), Buf::zeroed(bytes / 4));
        move |_: &ShmComm| to.host_slice_mut().copy_from_slice(from.host_slice())
    });
    measure_bandwidth_row(&comm, "all_gather", crossing, |bytes| {
        let n = bytes / 4 / world;
        let (send, mut recv) = (Buf::from_slice(&vec![1.0; n]), Buf::zeroed(n * world));
        move |comm: &ShmComm| {
            comm.all_gather(recv.view_mut(), send.view(), &vec![n; world]).expect("the collective succeeds")
        }
    });
    measure_bandwidth_row(&comm, "reduce_scatter_ordered", crossing, |bytes| {
        let n = bytes / 4 / world;
        let (partial, mut sum) = (Buf::from_slice(&vec![1.0; n * world]), Buf::zeroed(n));
        move |comm: &ShmComm| {
            let sum = sum.host_slice_mut();
            let sink = &mut |rank: usize, _: usize, piece: device::View<'_>| match rank {
                0 => sum.copy_from_slice(piece.host_slice()),
                _ => sum.iter_mut().zip(piece.host_slice()).for_each(|(s, p)| *s += p),
            };
            comm.reduce_scatter_ordered(&[partial.view()], &vec![1; world], &vec![n; world], sink)
                .expect("the collective succeeds");
        }
    });
    measure_bandwidth_row(&comm, "reduce_scatter", crossing, |bytes| {
        let n = bytes / 4 / world;
        let (send, mut recv) = (Buf::from_slice(&vec![1.0; n * world]), Buf::zeroed(n));
        move |comm: &ShmComm| {
            comm.reduce_scatter(recv.view_mut(), send.view(), &vec![n; world])
                .expect("the collective succeeds")
        }
    });
    measure_bandwidth_row(&comm, "all_reduce", 2.0 * crossing, |bytes| {
        let mut x = Buf::zeroed(bytes / 4);
        move |comm: &ShmComm| comm.all_reduce(x.view_mut()).expect("the collective succeeds")
    });
    measure_latency(&comm);
}

/// Prints `line` if `rank` is 0, so that the table appears once and not once per rank.
fn print_on_rank_0(rank: usize, line: &str) {
    if rank == 0 {
        println!("{line}");
    }
}

/// Measures the bandwidth of the collective `name` for each message size, and prints one table row
/// with the name and the bandwidths in GB/s. Does nothing if the command line's filter is not a
/// part of `name`.
///
/// `make(bytes)` returns the operation to time for a message size. Bandwidth counts the fraction
/// `share` of the message's bytes.
fn measure_bandwidth_row<F: FnMut(&ShmComm)>(
    comm: &ShmComm,
    name: &str,
    share: f64,
    make: impl Fn(usize) -> F,
) {
    if !name.contains(&parse_args().filter) {
        return;
    }
    let mut line = format!("{name:<22}");
    for bytes in MESSAGE_BYTES {
        let mut run = make(bytes);
        let repeat = (256 * MIB / bytes).clamp(6, 100);
        let mut times: Vec<Duration> = (0..repeat + 2)
            .map(|_| {
                comm.barrier().expect("the collective succeeds");
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
    print_on_rank_0(comm.rank(), &line);
}

/// Measures and prints the latency of a barrier, averaged over batches of 1000 barriers.
fn measure_latency(comm: &ShmComm) {
    const BATCH: u32 = 1000;
    let mut times: Vec<Duration> = (0..50)
        .map(|_| {
            let start = Instant::now();
            (0..BATCH).for_each(|_| comm.barrier().expect("the collective succeeds"));
            start.elapsed() / BATCH
        })
        .collect();
    times.sort();
    let us = |t: Duration| t.as_secs_f64() * 1e6;
    print_on_rank_0(
        comm.rank(),
        &format!(
            "barrier in µs (mean of 1000): median {:.2}, best {:.2}, worst {:.2}",
            us(times[25]),
            us(times[0]),
            us(times[49])
        ),
    );
}
