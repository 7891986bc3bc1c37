//! [`StatusMemory`]: the memory in which the built-in workers of a host publish what they do, so
//! that the agent can diagnose hangs.
use crate::agent::process;
use jobspec::ids::Rank;
use protocol::{
    hang::{CollectiveEntry, GroupCounters, RankEvidence, ThreadState},
    worker_status::{STATUS_BYTES, WorkerStatus},
};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileExt,
    },
    thread,
    time::Duration,
};

/// The name of the group of all ranks in the evidence about hanging built-in workers.
const WORLD_GROUP_NAME: &str = "world";
/// The name of launch's own communication backend in the evidence about hanging built-in workers.
const BACKEND_NAME: &str = "launch";
/// The largest number of attempts to read a worker's status, of which some may fail because the
/// worker is just writing the status.
const MAX_READ_TRIES: usize = 5;
/// The pause between two attempts of the agent to read a worker's status, which the worker may be
/// changing at that moment.
const READ_PAUSE: Duration = Duration::from_millis(1);

/// The memory in which the built-in workers of a host publish their status (what they do, and their
/// counts of collectives). It outlives attempts.
pub(in crate::agent) struct StatusMemory(File);

impl StatusMemory {
    /// Creates an empty memory file in which built-in workers can publish their status.
    pub(in crate::agent) fn create() -> io::Result<StatusMemory> {
        process::create_status_memory().map(|memory| StatusMemory(memory.into()))
    }

    /// Enlarges the memory file so that each of `workers` built-in workers of the host can publish
    /// its status in it.
    pub(in crate::agent) fn reserve(&self, workers: usize) -> io::Result<()> {
        let bytes = (workers * STATUS_BYTES) as u64;
        if self.0.metadata()?.len() < bytes { self.0.set_len(bytes) } else { Ok(()) }
    }

    /// Reads the status (collectives and current work) that the built-in worker with this local
    /// rank has published in the attempt (start of all workers) `attempt`. Returns `None` if the
    /// worker has written none in this attempt.
    pub(in crate::agent) fn read(&self, local_rank: u32, attempt: u32) -> Option<WorkerStatus> {
        let mut bytes = [0; STATUS_BYTES];
        for _ in 0..MAX_READ_TRIES {
            self.0.read_exact_at(&mut bytes, u64::from(local_rank) * STATUS_BYTES as u64).ok()?;
            if let Some(status) = WorkerStatus::decode(&bytes) {
                return Some(status).filter(|status| status.attempt == attempt);
            }
            thread::sleep(READ_PAUSE);
        }
        None
    }
}

impl AsFd for StatusMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Builds the evidence about a hanging built-in worker from the status that the worker has
/// published.
pub(super) fn build_evidence(
    status: WorkerStatus,
    (rank, world): (Rank, u32),
    thread: Option<ThreadState>,
) -> RankEvidence {
    let to_number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let (entered, completed) = (to_number(status.entered), status.completed.map_or(-1, to_number));
    let entry = CollectiveEntry {
        group: WORLD_GROUP_NAME.to_owned(),
        seq: entered,
        operation: status.collective.into_owned(),
        // A device may still run the collective.
        retired: completed < 0 || completed >= entered,
        ..CollectiveEntry::default()
    };
    RankEvidence {
        rank,
        groups: vec![GroupCounters {
            name: WORLD_GROUP_NAME.to_owned(),
            backend: BACKEND_NAME.to_owned(),
            ranks: (0..world).collect(),
            enqueued: entered,
            completed,
        }],
        entries: if entered > 0 { vec![entry] } else { Vec::new() },
        answered: true,
        in_native_call: true,
        thread,
        task: Some(format!("{} (step {})", status.task, status.step.saturating_add(1))),
        ..RankEvidence::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_the_attempt_is_read() {
        let memory = StatusMemory::create().expect("memory");
        memory.reserve(2).expect("reserved");
        assert_eq!(memory.read(1, 0), None, "nothing was written");
        let status = WorkerStatus {
            attempt: 4,
            entered: 9,
            completed: Some(8),
            collective: "all_reduce".into(),
            task: "training".into(),
            ..WorkerStatus::default()
        };
        memory.0.write_all_at(&status.encode(), STATUS_BYTES as u64).expect("written");
        memory.reserve(1).expect("kept");
        assert_eq!(memory.read(1, 4), Some(status.clone()));
        assert_eq!((memory.read(1, 5), memory.read(0, 4), memory.read(2, 4)), (None, None, None));
        let evidence = build_evidence(status, (6, 8), None);
        assert_eq!((evidence.groups[0].enqueued, evidence.groups[0].completed), (9, 8));
        assert_eq!((evidence.entries[0].seq, evidence.entries[0].retired), (9, false));
        assert_eq!(evidence.task.as_deref(), Some("training (step 1)"));
    }
}
