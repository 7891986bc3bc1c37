//! Collects evidence about ranks that hang: the counters and the flight recorder of torch, Python
//! stacks, and the state of the main thread.
//!
//! Programs in Python get a hook (`hang/sitecustomize.py`) by the variable `PYTHONPATH`. The hook
//! publishes the numbers of collectives in a file, and answers requests that arrive on a FIFO. If a
//! rank does not answer, because native code holds Python's lock, the agent sends the signal
//! `STACKS_SIGNAL`, for which the hook has registered Python's faulthandler.
mod faulthandler;
mod hook_directory;
mod thread_state;

pub(super) use hook_directory::{HookDirectory, choose_directory};

use super::activity;
use hook_directory::{HookAnswer, HookProcess};
use jobspec::ids::Rank;
use protocol::hang::RankEvidence;
use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};
use thread_state::{CPU_TIME_WINDOW, MainThread};

/// How long the agent waits for the answers of all ranks.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(6);
/// The pause between two checks for answers.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A rank, and the process to which the evidence refers.
struct Subject {
    rank: Rank,
    pid: u32,
    process: Option<HookProcess>,
    thread: MainThread,
    answer: Option<HookAnswer>,
}

/// Collects evidence about the workers with these ranks and pids. Blocks for little more than
/// [`ANSWER_TIMEOUT`] at most.
pub(super) fn collect_evidence(directory: Option<&Path>, workers: &[(Rank, u32)]) -> Vec<RankEvidence> {
    let begin = Instant::now();
    let find = |(rank, leader): &(Rank, u32)| {
        let tree = activity::list_process_tree(*leader);
        let process = directory.and_then(|directory| HookProcess::find(directory, *rank, &tree));
        let pid = process.as_ref().map_or(*leader, |process| process.pid());
        Subject { rank: *rank, pid, process, thread: MainThread::observe(pid), answer: None }
    };
    let mut subjects: Vec<Subject> = workers.iter().map(find).collect();
    for subject in &subjects {
        subject.process.iter().for_each(HookProcess::request);
    }
    loop {
        for subject in subjects.iter_mut().filter(|s| s.answer.is_none()) {
            subject.answer = subject.process.as_ref().and_then(HookProcess::read_answer);
        }
        let is_waiting = |s: &Subject| s.answer.is_none() && s.process.is_some() && !s.thread.is_stopped();
        let elapsed = begin.elapsed();
        let may_end = !subjects.iter().any(is_waiting) || elapsed >= ANSWER_TIMEOUT;
        if may_end && elapsed >= CPU_TIME_WINDOW {
            break;
        }
        thread::sleep(POLL_INTERVAL);
    }
    let silent: Vec<(Rank, u32)> =
        subjects.iter().filter(|s| s.answer.is_none()).map(|s| (s.rank, s.pid)).collect();
    let stacks = match directory {
        Some(directory) => faulthandler::request_stacks(directory, &silent),
        None => vec![Vec::new(); silent.len()],
    };
    let mut stacks: Vec<_> = silent.into_iter().zip(stacks).collect();
    subjects.into_iter().map(|subject| build_evidence(subject, &mut stacks)).collect()
}

/// Builds the evidence about one rank. `stacks` are the stacks of the ranks that did not answer.
fn build_evidence(
    subject: Subject,
    stacks: &mut [((Rank, u32), Vec<protocol::hang::StackFrame>)],
) -> RankEvidence {
    let thread = subject.thread.describe();
    let rank = subject.rank;
    match subject.answer {
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
    }
}
