//! [`TimeoutEvidence`]: determines whether torch has ended a worker because a collective timed out,
//! and reads what the worker recorded about its collectives.
use super::{
    dump_path::{build_dump_path, build_dump_path_of_user},
    flight_recorder::FlightRecorderDump,
    hook_directory::{is_written_since, read_timeout_answer},
    output_evidence::OutputEvidence,
};
use jobspec::ids::Rank;
use protocol::hang::{CollectiveTimeout, RankEvidence};
use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// The output, dump path and hang hook directory of a worker, from which the agent determines
/// whether a timeout of torch has ended the worker.
#[derive(Clone, Debug)]
pub(in crate::agent) struct TimeoutEvidence {
    rank: Rank,
    world: u32,
    output: OutputEvidence,
    /// The path of the dump of torch's flight recorder.
    dump: PathBuf,
    /// The directory of the hang hook; `None` if the program has no hook.
    hook_directory: Option<PathBuf>,
    /// When the worker was started. Older files are those of earlier attempts.
    started_at: SystemTime,
}

impl TimeoutEvidence {
    /// Prepares to find out later whether a timeout of torch has ended the worker of the rank
    /// `rank`, which is started now. `log` is the path of the worker's log.
    pub(in crate::agent) fn new(
        (rank, world): (Rank, u32),
        attempt: u32,
        log: &Path,
        hook_directory: Option<&Path>,
    ) -> TimeoutEvidence {
        TimeoutEvidence {
            rank,
            world,
            output: OutputEvidence::new(rank),
            dump: build_dump_path(log, attempt, rank),
            hook_directory: hook_directory.map(Path::to_owned),
            started_at: SystemTime::now(),
        }
    }

    /// Sets the prefix of the path of the flight recorder's dump, to which torch appends the rank.
    /// `None` stands for the prefix that launch has set.
    pub(in crate::agent) fn with_dump_prefix(mut self, prefix: Option<PathBuf>) -> TimeoutEvidence {
        if let Some(prefix) = prefix {
            self.dump = build_dump_path_of_user(prefix, self.rank);
        }
        self
    }

    /// Returns the collector of the NCCL warnings and timed-out collectives in the output of the
    /// worker.
    pub(in crate::agent) fn output(&self) -> &OutputEvidence {
        &self.output
    }

    /// Reads the evidence that torch has ended the worker because a collective timed out, after the
    /// end of the worker. Returns `None` if nothing shows that torch has detected a hang.
    pub(in crate::agent) fn read(&self) -> Option<Box<RankEvidence>> {
        let directory = self.hook_directory.as_deref();
        let answer =
            directory.and_then(|directory| read_timeout_answer(directory, self.rank, self.started_at));
        let of_hook = answer.map(|answer| answer.into_evidence(self.rank, None));
        let read_dump = || self.read_dump().map(|dump| dump.into_evidence(self.rank));
        let mut evidence = of_hook
            .map(add_timeout_of_exception)
            .or_else(read_dump)
            .unwrap_or_else(|| RankEvidence { rank: self.rank, ..RankEvidence::default() });
        self.output.add_to(&mut evidence);
        let is_timeout = evidence.answered || self.output.has_timeout();
        is_timeout.then(|| Box::new(evidence))
    }

    /// Reads the dump that torch's flight recorder has written for the worker after a timeout of a
    /// collective.
    pub(super) fn read_dump(&self) -> Option<FlightRecorderDump> {
        // The user may have given all attempts and runs the same path.
        let is_new = fs::metadata(&self.dump).is_ok_and(|file| is_written_since(&file, self.started_at));
        is_new.then(|| FlightRecorderDump::read(&self.dump, self.world)).flatten()
    }
}

impl FlightRecorderDump {
    /// Converts the flight recorder's dump of an ended worker with the rank `rank` to evidence
    /// about the rank's collectives.
    fn into_evidence(self, rank: Rank) -> RankEvidence {
        let mut evidence = RankEvidence { rank, ..RankEvidence::default() };
        self.add_to(&mut evidence);
        evidence
    }

    /// Replaces the process groups and collectives in a rank's `evidence` by those of the flight
    /// recorder's dump, because the rank did not report them itself. A stack that is known is newer
    /// than that of the dump.
    pub(super) fn add_to(self, evidence: &mut RankEvidence) {
        (evidence.groups, evidence.entries, evidence.answered) = (self.groups, self.entries, true);
        if evidence.stack.is_empty() {
            evidence.stack = self.stack;
        }
    }
}

/// Records the rank's newest unfinished collective as timed out, because Python raised a timeout
/// exception while the rank waited in it. Backends without a watchdog, such as Gloo, log no
/// timeout.
fn add_timeout_of_exception(mut evidence: RankEvidence) -> RankEvidence {
    let pending = evidence.entries.iter().rfind(|entry| !entry.retired && !entry.p2p);
    evidence.collective_timeouts.extend(pending.map(|entry| CollectiveTimeout {
        rank: evidence.rank,
        seq: entry.seq,
        operation: entry.operation.clone(),
    }));
    evidence
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the evidence about rank 0 of the third attempt of three ranks.
    fn create(directory: &Path) -> TimeoutEvidence {
        TimeoutEvidence::new((0, 3), 2, &directory.join("rank-0.log"), Some(directory))
    }

    #[test]
    fn a_worker_without_a_timeout_leaves_no_evidence() {
        let directory = tempfile::tempdir().expect("a directory");
        let evidence = create(directory.path());
        evidence.output().add_output(b"n1:77:90 [0] x.cc:1 NCCL WARN no route\nloss 3.2\n");
        assert_eq!(evidence.read(), None);
    }

    #[test]
    fn a_dump_of_this_attempt_and_the_output_are_evidence() {
        let directory = tempfile::tempdir().expect("a directory");
        let evidence = create(directory.path());
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hangs/never_entered-0.dump");
        fs::copy(&golden, directory.path().join("flight-recorder-1-0")).expect("copied");
        assert_eq!(evidence.read(), None, "the dump is that of an earlier attempt");
        fs::copy(&golden, directory.path().join("flight-recorder-2-0")).expect("copied");
        let line = b"[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, \
                     OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600020 milliseconds\n";
        evidence.output().add_output(line);
        let found = evidence.read().expect("evidence");
        assert!(found.answered && found.thread.is_none());
        assert_eq!((found.groups[0].enqueued, found.groups[0].completed), (3, 2));
        assert_eq!(found.entries.len(), 3);
        assert_eq!((found.collective_timeouts[0].seq, found.collective_timeouts.len()), (3, 1));
        assert!(!found.stack.is_empty());
    }

    #[test]
    fn a_new_dump_at_the_path_of_the_user_is_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hangs/never_entered-0.dump");
        fs::copy(&golden, directory.path().join("nccl_trace_rank_0")).expect("copied");
        let evidence = create(directory.path());
        assert_eq!(evidence.read_dump(), None, "launch has set another path");
        let evidence = evidence.with_dump_prefix(Some(directory.path().join("nccl_trace_rank_")));
        assert!(evidence.read_dump().is_some());
        let started_at = SystemTime::now() + std::time::Duration::from_secs(9);
        let later = TimeoutEvidence { started_at, ..evidence };
        assert_eq!(later.read_dump(), None, "the dump is that of an earlier run");
    }

    #[test]
    fn an_exception_that_the_hook_reports_is_evidence() {
        let directory = tempfile::tempdir().expect("a directory");
        let evidence = create(directory.path());
        let entry = r#"{"group": "0", "seq": 4, "p2p": false, "operation": "gloo:all_reduce",
                        "retired": false, "inputs": "[[4]]", "dtypes": "['Float']"}"#;
        let write = |timeout: bool| {
            let text = format!(
                r#"{{"groups": [], "entries": [{entry}], "stacks": [], "in_call": true, "timeout": {timeout}}}"#
            );
            fs::write(directory.path().join("rank-0.77.evidence"), text).expect("written");
        };
        write(false);
        assert_eq!(evidence.read(), None, "an answer to the agent is no timeout");
        write(true);
        let timeouts = evidence.read().expect("evidence").collective_timeouts;
        assert_eq!((timeouts[0].seq, timeouts[0].operation.as_str()), (4, "gloo:all_reduce"));
        let later =
            TimeoutEvidence { started_at: SystemTime::now() + std::time::Duration::from_secs(9), ..evidence };
        assert_eq!(later.read(), None, "the file is that of an earlier attempt");
    }
}
