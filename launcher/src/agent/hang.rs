//! Collects evidence about ranks that hang: counters of collectives, torch's flight recorder,
//! Python stacks, and the state of the main thread.
//!
//! Programs in Python get a hook (`hang/sitecustomize.py`) by the variable `PYTHONPATH`. The hook
//! publishes the numbers of collectives in a file, and answers requests that arrive on a FIFO. If a
//! rank does not answer, because native code holds Python's lock, the agent sends the signal
//! `STACKS_SIGNAL`, for which the hook has registered Python's faulthandler.
mod dump_path;
mod faulthandler;
mod flight_recorder;
mod hook_directory;
mod output_evidence;
mod status_memory;
mod system_call;
mod thread_state;
mod timeout_evidence;

pub(super) use hook_directory::{HookDirectory, choose_directory_path};
pub(super) use status_memory::StatusMemory;
pub(super) use timeout_evidence::TimeoutEvidence;

use flight_recorder::FlightRecorderDump;
use hook_directory::{HookAnswer, HookProcess};
use jobspec::ids::Rank;
use protocol::{failure::GpuFault, hang::RankEvidence};
use std::{
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use thread_state::{CPU_TIME_WINDOW, MainThread};

/// How long the agent waits until all hanging ranks have answered its request for evidence.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(6);
/// The pause between two checks whether the hanging ranks have answered the agent's request for
/// evidence.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Returns whether `bytes` are a valid dump of torch's flight recorder.
pub(crate) fn is_flight_recorder_dump(bytes: &[u8]) -> bool {
    FlightRecorderDump::parse(bytes, Rank::MAX).is_some()
}

/// The request to collect evidence about the hanging workers of a host, which may come from their
/// processes, the hang hook's files and the workers' status memory.
pub(super) struct EvidenceRequest {
    /// The workers.
    pub(super) workers: Vec<HangingWorker>,
    /// The directory of the hook; `None` if the programs have no hook.
    pub(super) hook_directory: Option<PathBuf>,
    /// The memory with the status of built-in workers; `None` if there are none.
    pub(super) status: Option<Arc<StatusMemory>>,
    /// The number of the attempt.
    pub(super) attempt: u32,
    /// The number of workers of the job on all hosts.
    pub(super) world: u32,
}

/// A hanging worker about which evidence is to be collected: its rank, its processes, and the GPU
/// errors that the driver has reported.
pub(super) struct HangingWorker {
    pub(super) rank: Rank,
    pub(super) pid: u32,
    pub(super) local_rank: u32,
    /// Whether the worker runs the built-in training instead of a program.
    pub(super) is_builtin: bool,
    /// The processes of the worker, beginning with `pid`.
    pub(super) tree: Vec<i32>,
    /// The errors that the GPU driver has reported for these processes.
    pub(super) gpu_faults: Vec<GpuFault>,
    /// The errors that the GPU driver has reported without a process.
    pub(super) host_gpu_faults: Vec<GpuFault>,
    /// What the worker has printed about its collectives, and the dump of its flight recorder;
    /// `None` if its output is not searched.
    pub(super) timeout_evidence: Option<TimeoutEvidence>,
}

/// A hanging worker, and the process of this worker from which evidence is collected, such as a
/// child process that uses torch.
struct ObservedWorker {
    worker: HangingWorker,
    pid: u32,
    process: Option<HookProcess>,
    thread: MainThread,
    answer: Option<HookAnswer>,
}

/// Collects evidence about the hanging workers that `request` lists, such as their stacks and their
/// last collectives. Blocks for little more than [`ANSWER_TIMEOUT`] at most.
pub(super) fn collect_evidence(request: EvidenceRequest) -> Vec<RankEvidence> {
    let EvidenceRequest { workers, hook_directory, status, attempt, world } = request;
    let begin = Instant::now();
    let directory = hook_directory.as_deref();
    let find = |worker: HangingWorker| {
        let process =
            directory.and_then(|directory| HookProcess::find_for_rank(directory, worker.rank, &worker.tree));
        let pid = process.as_ref().map_or_else(|| find_python(&worker), |process| process.pid());
        ObservedWorker { pid, process, thread: MainThread::observe(pid), answer: None, worker }
    };
    let mut subjects: Vec<ObservedWorker> = workers.into_iter().map(find).collect();
    for subject in &subjects {
        subject.process.iter().for_each(HookProcess::request_answer);
    }
    loop {
        for subject in subjects.iter_mut().filter(|s| s.answer.is_none()) {
            subject.answer = subject.process.as_ref().and_then(HookProcess::read_answer);
        }
        let is_waiting =
            |s: &ObservedWorker| s.answer.is_none() && s.process.is_some() && !s.thread.is_stopped();
        let elapsed = begin.elapsed();
        let may_end = !subjects.iter().any(is_waiting) || elapsed >= ANSWER_TIMEOUT;
        if may_end && elapsed >= CPU_TIME_WINDOW {
            break;
        }
        thread::sleep(POLL_INTERVAL);
    }
    let is_silent = |s: &&ObservedWorker| s.answer.is_none() && !s.worker.is_builtin;
    let silent: Vec<(Rank, u32)> =
        subjects.iter().filter(is_silent).map(|s| (s.worker.rank, s.pid)).collect();
    let stacks = match directory {
        Some(directory) => faulthandler::request_stacks(directory, &silent),
        None => vec![Vec::new(); silent.len()],
    };
    let mut stacks: Vec<_> = silent.into_iter().zip(stacks).collect();
    let build = |subject: ObservedWorker| {
        let status = status.as_ref().filter(|_| subject.worker.is_builtin);
        match status.and_then(|memory| memory.read(subject.worker.local_rank, attempt)) {
            Some(status) => {
                let thread = subject.thread.finish_observation_of_any_thread();
                let evidence = status_memory::build_evidence(status, (subject.worker.rank, world), thread);
                add_gpu_faults_and_output(evidence, subject.worker)
            }
            None => build_program_evidence(subject, &mut stacks),
        }
    };
    subjects.into_iter().map(build).collect()
}

/// Returns the pid of the first process of a worker that loads the hang hook and has no process
/// groups, such as a child process of a shell. Returns the pid of the worker if there is none.
fn find_python(worker: &HangingWorker) -> u32 {
    let mut pids = worker.tree.iter().filter_map(|pid| u32::try_from(*pid).ok());
    let found = pids.find(|pid| faulthandler::handles_stacks_signal(*pid));
    found.filter(|_| !worker.is_builtin).unwrap_or(worker.pid)
}

/// Builds the evidence about one hanging rank that runs a program (not the built-in training).
/// `stacks` are the stacks of the ranks that did not answer.
fn build_program_evidence(
    subject: ObservedWorker,
    stacks: &mut [((Rank, u32), Vec<protocol::hang::StackFrame>)],
) -> RankEvidence {
    let thread = subject.thread.finish_observation();
    let rank = subject.worker.rank;
    let evidence = match subject.answer {
        Some(answer) => answer.into_evidence(rank, thread),
        None => RankEvidence {
            rank,
            groups: subject.process.as_ref().map_or_else(Vec::new, HookProcess::read_groups),
            stack: stacks
                .iter_mut()
                .find(|((silent, _), _)| *silent == rank)
                .map_or_else(Vec::new, |(_, stack)| std::mem::take(stack)),
            thread,
            ..RankEvidence::default()
        },
    };
    add_gpu_faults_and_output(evidence, subject.worker)
}

/// Adds GPU errors from the kernel log, NCCL warnings and timed-out collectives of a hanging worker
/// to the evidence about the worker. If the worker did not answer, also adds the dump that torch
/// may have written.
fn add_gpu_faults_and_output(mut evidence: RankEvidence, worker: HangingWorker) -> RankEvidence {
    if let Some(timeout_evidence) = &worker.timeout_evidence {
        timeout_evidence.output().add_to(&mut evidence);
        if !evidence.answered
            && let Some(dump) = timeout_evidence.read_dump()
        {
            dump.add_to(&mut evidence);
        }
    }
    RankEvidence { gpu_faults: worker.gpu_faults, host_gpu_faults: worker.host_gpu_faults, ..evidence }
}
