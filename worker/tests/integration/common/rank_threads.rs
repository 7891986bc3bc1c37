//! Runs the ranks of a group as threads of one process.
use device::storage::extract_panic_message;
use std::{
    any::Any,
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// The time in which all other ranks must end after one of them has panicked. They get an error as
/// soon as they need the rank.
const PEER_LIMIT: Duration = Duration::from_secs(60);

/// The first rank that ended with a panic, the payload of the panic, and the time.
type FirstPanic = (usize, Box<dyn Any + Send>, Instant);

/// Runs the closure of each rank on a separate thread. Returns the results in rank order.
///
/// If ranks panic, waits until all ranks have ended, and continues with the panic of the rank that
/// ended first. Ends the process with a message if another rank has not ended after [`PEER_LIMIT`].
pub(crate) fn run_rank_threads<T: Send>(ranks: Vec<impl FnOnce() -> T + Send>) -> Vec<T> {
    let world = ranks.len();
    thread::scope(|scope| {
        let (sender, ended) = mpsc::channel();
        for (rank, run) in ranks.into_iter().enumerate() {
            let sender = sender.clone();
            scope.spawn(move || sender.send((rank, catch_unwind(AssertUnwindSafe(run)))));
        }
        collect_results(world, &ended)
    })
}

/// Receives the results of all ranks, and sorts them by rank.
fn collect_results<T>(world: usize, ended: &mpsc::Receiver<(usize, thread::Result<T>)>) -> Vec<T> {
    let mut results: Vec<Option<T>> = (0..world).map(|_| None).collect();
    let mut first_panic: Option<FirstPanic> = None;
    for _ in 0..world {
        let (rank, result) = match &first_panic {
            None => ended.recv().expect("each rank sends a result"),
            Some((first, panic, time)) => {
                let limit = PEER_LIMIT.saturating_sub(time.elapsed());
                ended.recv_timeout(limit).unwrap_or_else(|_| end_process(*first, panic.as_ref()))
            }
        };
        match result {
            Ok(result) => results[rank] = Some(result),
            Err(panic) => _ = first_panic.get_or_insert_with(|| (rank, panic, Instant::now())),
        }
    }
    if let Some((_, panic, _)) = first_panic {
        resume_unwind(panic);
    }
    results.into_iter().map(|result| result.expect("each rank has sent a result")).collect()
}

/// Ends the process because the peers of the rank `rank` still run after its panic.
fn end_process(rank: usize, panic: &(dyn Any + Send)) -> ! {
    let message = extract_panic_message(panic);
    // `eprintln` would write to the captured output of the test, which is lost.
    let line = format!("other ranks still run {PEER_LIMIT:?} after rank {rank} panicked: {message}\n");
    _ = std::io::stderr().write_all(line.as_bytes());
    std::process::abort();
}
