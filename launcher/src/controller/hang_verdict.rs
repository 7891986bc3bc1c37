//! Finds out which ranks of a hanging job block the others, from the stacks, collective counters
//! and GPU errors that agents have collected. This module does no I/O.
//! [`describe_verdict`](super::hang_verdict_text::describe_verdict) formats the result.
//!
//! A rank is blocked if it has entered a collective that is not complete. It waits for the ranks of
//! the group that have not entered the collective. A rank for which others wait, and that is not
//! blocked itself, holds up the job. No rank is named without evidence: a rank that has not
//! answered, and whose stack is unknown, is undetermined.
use jobspec::ids::Rank;
use protocol::hang::{
    CollectiveCallOfRanks, CollectiveEntry, HangKind, HangVerdict, RankActivity, RankEvidence, RankGpuFault,
    RankNcclWarning, RankPosition, StackFrame, ThreadState, WaitKind, WaitingCollective,
};
use std::collections::{BTreeMap, BTreeSet};

/// The collectives whose inputs must have the same sizes and types on all ranks, by their names
/// without the backend (`allreduce`, not `nccl:allreduce`).
const EQUAL_INPUT_COLLECTIVES: [&str; 9] = [
    "all_reduce",
    "allreduce",
    "all_gather",
    "_all_gather_base",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
];
/// The part of a source path, `/torch/distributed/`, by which a stack frame of a function of
/// `torch.distributed` is recognized.
const TORCH_COLLECTIVE_PATH_PART: &str = "/torch/distributed/";
/// Parts of source paths by which a stack frame of Python or a Python library is distinguished from
/// a frame of the user's program.
const LIBRARY_PATH_PARTS: [&str; 3] = ["/lib/python", "/lib64/python", "<frozen "];

/// The largest number of GPU errors of one rank that the analysis of a hanging job reports.
const MAX_GPU_FAULTS: usize = 8;

/// The first collective of a process group that some rank has entered but not completed, with the
/// ranks that have and have not entered it.
struct PendingCollective<'a> {
    group: &'a str,
    seq: i64,
    entered: BTreeSet<Rank>,
    not_entered: BTreeSet<Rank>,
    undetermined: BTreeSet<Rank>,
}

/// Finds out which ranks of a hanging job keep the other ranks waiting, and why. `evidence` is what
/// is known about each rank, one item per rank.
pub(super) fn find_hang_verdict(evidence: &[RankEvidence]) -> HangVerdict {
    let ranks: BTreeMap<Rank, &RankEvidence> = evidence.iter().map(|e| (e.rank, e)).collect();
    let pending = find_pending_collectives(&ranks);
    let different = pending.iter().find_map(|p| {
        let (kind, calls) = compare_collective_calls(p, &ranks)?;
        Some(build_hang_verdict(kind, Some(p), calls, &ranks))
    });
    if let Some(verdict) = different {
        return verdict;
    }
    let blocked: BTreeSet<Rank> = pending.iter().flat_map(|p| p.entered.iter().copied()).collect();
    let holds_up = |p: &&PendingCollective<'_>| p.not_entered.iter().any(|rank| !blocked.contains(rank));
    if let Some(first) = pending.iter().find(holds_up) {
        return build_hang_verdict(HangKind::NotEntered, Some(first), Vec::new(), &ranks);
    }
    if let Some(first) = pending.iter().find(|p| !p.undetermined.is_empty()) {
        return build_hang_verdict(HangKind::NotEntered, Some(first), Vec::new(), &ranks);
    }
    if let Some(first) = pending.iter().find(|p| !p.not_entered.is_empty()) {
        // Each rank that has not entered a collective waits in a collective of another group.
        let calls = pending.iter().filter_map(|p| build_entered_call(p, &ranks)).collect();
        return build_hang_verdict(HangKind::DifferentOrder, Some(first), calls, &ranks);
    }
    let kind = if pending.is_empty() { HangKind::Unknown } else { HangKind::AllEntered };
    build_hang_verdict(kind, pending.first(), Vec::new(), &ranks)
}

/// Returns the first incomplete collective of each process group, in the order of the groups'
/// names.
fn find_pending_collectives<'a>(ranks: &BTreeMap<Rank, &'a RankEvidence>) -> Vec<PendingCollective<'a>> {
    let mut groups: BTreeMap<(&str, &[Rank]), i64> = BTreeMap::new();
    for evidence in ranks.values().filter(|e| e.answered) {
        for group in &evidence.groups {
            if let Some(seq) =
                find_pending_collective_seq(evidence, &group.name, group.completed, group.enqueued)
            {
                let first = groups.entry((&group.name, &group.ranks)).or_insert(seq);
                *first = seq.min(*first);
            }
        }
    }
    for (group, seq) in find_pending_builtin_collectives(ranks) {
        let first = groups.entry(group).or_insert(seq);
        *first = seq.min(*first);
    }
    let build = |((group, members), seq): ((&'a str, &'a [Rank]), i64)| {
        let mut pending = PendingCollective {
            group,
            seq,
            entered: BTreeSet::new(),
            not_entered: BTreeSet::new(),
            undetermined: BTreeSet::new(),
        };
        for rank in members {
            let set = match ranks.get(rank).map(|e| has_entered_collective(e, group, seq)) {
                Some(Some(true)) => &mut pending.entered,
                Some(Some(false)) => &mut pending.not_entered,
                _ => &mut pending.undetermined,
            };
            set.insert(*rank);
        }
        pending
    };
    groups.into_iter().map(build).collect()
}

/// Finds, for a job without a user program, the process groups in which some ranks have entered a
/// collective that other ranks have not entered. A rank does not know whether its GPU has completed
/// a collective, but a collective that a rank has not entered is not complete.
fn find_pending_builtin_collectives<'a>(
    ranks: &BTreeMap<Rank, &'a RankEvidence>,
) -> BTreeMap<(&'a str, &'a [Rank]), i64> {
    let mut counts: BTreeMap<(&str, &[Rank]), (i64, i64)> = BTreeMap::new();
    for evidence in ranks.values().filter(|e| e.answered && e.task.is_some()) {
        for group in evidence.groups.iter().filter(|group| group.completed < 0) {
            let (least, most) =
                counts.entry((&group.name, &group.ranks)).or_insert((group.enqueued, group.enqueued));
            (*least, *most) = (group.enqueued.min(*least), group.enqueued.max(*most));
        }
    }
    let differing = counts.into_iter().filter(|(_, (least, most))| least < most);
    differing.map(|(group, (least, _))| (group, least.saturating_add(1))).collect()
}

/// Returns the sequence number of the oldest collective of a process group that the rank has
/// entered but not completed; `None` if there is none.
fn find_pending_collective_seq(
    evidence: &RankEvidence,
    group: &str,
    completed: i64,
    enqueued: i64,
) -> Option<i64> {
    let entries = evidence.entries.iter().filter(|e| e.group == group && !e.p2p);
    if entries.clone().next().is_some() {
        return entries.filter(|e| !e.retired).map(|e| e.seq).min();
    }
    if completed < 0 {
        // Without a flight recorder, only the stack shows that the rank waits in a collective.
        return (enqueued > 0 && is_in_collective(evidence)).then_some(enqueued);
    }
    (completed < enqueued).then_some(completed + 1)
}

/// Returns whether a rank has entered the collective number `seq` of a process group; `None` if the
/// evidence does not show this.
fn has_entered_collective(evidence: &RankEvidence, group: &str, seq: i64) -> Option<bool> {
    let counted = evidence.groups.iter().find(|g| g.name == group).map(|g| g.enqueued);
    if find_last_entered_collective_seq(evidence, group).is_some_and(|last| last >= seq) {
        return Some(true);
    }
    let is_outside = !evidence.stack.is_empty() && !is_in_collective(evidence);
    // Without an answer, the counters are old, and only the stack shows where the rank is.
    let is_known = if evidence.answered { counted.is_some() } else { is_outside };
    is_known.then_some(false)
}

/// Returns the sequence number of the collective that a rank has entered last in the process group
/// `group`; `None` if the evidence does not contain this number.
fn find_last_entered_collective_seq(evidence: &RankEvidence, group: &str) -> Option<i64> {
    let counted = evidence.groups.iter().find(|g| g.name == group).map(|g| g.enqueued);
    let recorded = evidence.entries.iter().filter(|e| e.group == group && !e.p2p).map(|e| e.seq).max();
    counted.max(recorded)
}

/// Returns whether the main thread of a rank is inside a function of `torch.distributed`, as the
/// thread's stack shows.
fn is_in_collective(evidence: &RankEvidence) -> bool {
    evidence.stack.iter().any(|frame| frame.file.contains(TORCH_COLLECTIVE_PATH_PART))
}

/// Returns the name of a collective without the prefix of the backend, such as `nccl:`.
fn strip_backend(operation: &str) -> &str {
    operation.split_once(':').map_or(operation, |(_, name)| name)
}

/// Returns what torch's flight recorder (a list of recent collectives) of one rank contains about
/// the given incomplete collective.
fn find_flight_recorder_entry<'a>(
    p: &PendingCollective<'_>,
    evidence: &'a RankEvidence,
) -> Option<&'a CollectiveEntry> {
    evidence.entries.iter().find(|e| e.group == p.group && e.seq == p.seq && !e.p2p)
}

/// Compares the calls of an incomplete collective by the ranks that have entered it, to find calls
/// of different collectives or with different inputs. Returns the kind of the difference, and the
/// different calls, that of most ranks first. Returns `None` if the calls are equal.
fn compare_collective_calls(
    p: &PendingCollective<'_>,
    ranks: &BTreeMap<Rank, &RankEvidence>,
) -> Option<(HangKind, Vec<CollectiveCallOfRanks>)> {
    let mut calls: Vec<CollectiveCallOfRanks> = Vec::new();
    for rank in &p.entered {
        let Some(entry) = ranks.get(rank).and_then(|e| find_flight_recorder_entry(p, e)) else { continue };
        let operation = strip_backend(&entry.operation);
        let matches = |call: &&mut CollectiveCallOfRanks| {
            strip_backend(&call.operation) == operation
                && (!EQUAL_INPUT_COLLECTIVES.contains(&operation)
                    || (call.inputs == entry.inputs && call.dtypes == entry.dtypes))
        };
        match calls.iter_mut().find(matches) {
            Some(call) => call.ranks.push(*rank),
            None => calls.push(build_collective_call(vec![*rank], entry, ranks)),
        }
    }
    let first = strip_backend(&calls.first()?.operation).to_owned();
    let kind = match calls.iter().all(|call| strip_backend(&call.operation) == first) {
        true => HangKind::DifferentShapes,
        false => HangKind::DifferentOrder,
    };
    calls.sort_by_key(|call| std::cmp::Reverse(call.ranks.len()));
    (calls.len() > 1).then_some((kind, calls))
}

/// Describes a collective that the ranks `callers` have called: the operation, its inputs, and the
/// stack frame of the call in the user's program.
fn build_collective_call(
    callers: Vec<Rank>,
    entry: &CollectiveEntry,
    ranks: &BTreeMap<Rank, &RankEvidence>,
) -> CollectiveCallOfRanks {
    let first = callers.first().and_then(|rank| ranks.get(rank));
    // The stack of a rank that has left the call, or waits in a later one, does not show the call.
    let is_in_call = |e: &&&RankEvidence| {
        is_in_collective(e)
            && find_last_entered_collective_seq(e, &entry.group).is_some_and(|last| last == entry.seq)
    };
    CollectiveCallOfRanks {
        frame: first.filter(is_in_call).and_then(|e| find_program_frame(e)),
        ranks: callers,
        group: entry.group.clone(),
        operation: entry.operation.clone(),
        inputs: entry.inputs.clone(),
        dtypes: entry.dtypes.clone(),
    }
}

/// Describes how those ranks that have entered an incomplete collective called it, from the flight
/// recorder of the first such rank that has an entry about it. Returns `None` if no flight recorder
/// has recorded it.
fn build_entered_call(
    p: &PendingCollective<'_>,
    ranks: &BTreeMap<Rank, &RankEvidence>,
) -> Option<CollectiveCallOfRanks> {
    let entry = p.entered.iter().find_map(|rank| find_flight_recorder_entry(p, ranks.get(rank)?))?;
    Some(build_collective_call(p.entered.iter().copied().collect(), entry, ranks))
}

/// Builds the result of the analysis of a hanging job: the ranks that block the job, and what each
/// of them does. Without a collective, all ranks are undetermined.
fn build_hang_verdict(
    kind: HangKind,
    pending: Option<&PendingCollective<'_>>,
    calls: Vec<CollectiveCallOfRanks>,
    ranks: &BTreeMap<Rank, &RankEvidence>,
) -> HangVerdict {
    let locate = |set: &BTreeSet<Rank>| -> Vec<RankPosition> {
        set.iter().map(|rank| find_rank_activity(*rank, ranks.get(rank).copied())).collect()
    };
    let all_ranks: BTreeSet<Rank> = ranks.keys().copied().collect();
    let undetermined = match (kind, pending) {
        // Ranks that cannot run, although they have entered the collective.
        (HangKind::AllEntered, _) => {
            // A rank that has left its collectives behind has ended because it waited for too long.
            let mut candidates = all_ranks;
            candidates.retain(|rank| ranks.get(rank).is_none_or(|e| e.thread.is_some() || !e.answered));
            let mut places = locate(&candidates);
            places.retain(|place| is_blocking_activity(&place.activity));
            places
        }
        (_, Some(p)) => locate(&p.undetermined),
        (_, None) => locate(&all_ranks),
    };
    HangVerdict {
        kind,
        collective: pending.map(|p| WaitingCollective {
            group: p.group.to_owned(),
            seq: p.seq,
            operation: build_entered_call(p, ranks).map(|call| call.operation),
        }),
        entered: pending.map_or_else(Vec::new, |p| p.entered.iter().copied().collect()),
        not_entered: pending.map_or_else(Vec::new, |p| locate(&p.not_entered)),
        undetermined,
        calls,
        gpu_faults: ranks.values().flat_map(|evidence| list_gpu_faults(evidence)).collect(),
        nccl_warnings: ranks.values().filter_map(|evidence| find_nccl_warning(evidence)).collect(),
        collective_timeouts: ranks.values().filter_map(|e| e.collective_timeouts.first().cloned()).collect(),
    }
}

/// Returns whether an activity, such as loading data, prevents a rank from taking part in a
/// collective.
fn is_blocking_activity(activity: &RankActivity) -> bool {
    matches!(activity, RankActivity::Stopped | RankActivity::Uninterruptible { .. } | RankActivity::Ended)
}

/// Returns the newest NCCL warning of one rank of a hanging job, or `None` if the rank has printed
/// no warning.
fn find_nccl_warning(evidence: &RankEvidence) -> Option<RankNcclWarning> {
    let text = evidence.nccl_warnings.last()?.clone();
    Some(RankNcclWarning { rank: evidence.rank, text })
}

/// Lists the GPU driver errors of one rank's process, and those errors on the rank's host that the
/// driver assigned to no known process.
fn list_gpu_faults(evidence: &RankEvidence) -> Vec<RankGpuFault> {
    let of_rank = evidence.gpu_faults.iter().map(|fault| (false, fault));
    let of_host = evidence.host_gpu_faults.iter().map(|fault| (true, fault));
    let build = |(is_of_host, fault): (bool, &_)| RankGpuFault {
        rank: evidence.rank,
        is_of_host,
        fault: Clone::clone(fault),
    };
    of_rank.chain(of_host).take(MAX_GPU_FAULTS).map(build).collect()
}

/// Determines what a rank of a hanging job does, such as loading data, and at which place in its
/// program.
fn find_rank_activity(rank: Rank, evidence: Option<&RankEvidence>) -> RankPosition {
    let Some(evidence) = evidence else {
        return RankPosition {
            rank,
            activity: RankActivity::Unknown,
            frame: None,
            file: None,
            task: None,
            wait_channel: None,
            kernel_stack: Vec::new(),
        };
    };
    let thread = evidence.thread.as_ref();
    // The kernel reports `0` for a thread that does not wait.
    let is_known = |channel: &&String| !channel.is_empty() && *channel != "0";
    let activity = match &evidence.thread {
        None => RankActivity::Ended,
        Some(thread) => classify_activity(thread, evidence),
    };
    RankPosition {
        rank,
        activity,
        frame: find_program_frame(evidence),
        file: thread.and_then(|thread| thread.file.clone()),
        task: evidence.task.clone(),
        wait_channel: thread.map(|thread| &thread.wait_channel).filter(is_known).cloned(),
        kernel_stack: thread.map(|thread| thread.kernel_stack.clone()).unwrap_or_default(),
    }
}

/// Returns the innermost stack frame of a rank that belongs to the user's program, or the innermost
/// frame if all belong to libraries.
fn find_program_frame(evidence: &RankEvidence) -> Option<StackFrame> {
    let is_library = |frame: &StackFrame| LIBRARY_PATH_PARTS.iter().any(|part| frame.file.contains(part));
    evidence.stack.iter().find(|frame| !is_library(frame)).or(evidence.stack.first()).cloned()
}

/// Finds out what the main thread of a rank of a job that hangs does, such as waiting in a
/// collective or loading data.
fn classify_activity(thread: &ThreadState, evidence: &RankEvidence) -> RankActivity {
    match (thread.state, thread.wait) {
        ('T' | 't', _) => RankActivity::Stopped,
        ('D', _) => RankActivity::Uninterruptible { wait_channel: thread.wait_channel.clone() },
        _ if thread.busy && evidence.answered && !evidence.in_native_call => RankActivity::RunsPython,
        // A thread that cannot answer and uses CPU time holds Python's lock in native code.
        _ if thread.busy => RankActivity::RunsNative,
        (_, WaitKind::Futex) => RankActivity::WaitsForLock,
        (_, WaitKind::Io) => RankActivity::WaitsForData,
        (_, WaitKind::Sleep) => RankActivity::Sleeps,
        (_, WaitKind::Poll) => RankActivity::Polls,
        (_, WaitKind::Other) => RankActivity::Unknown,
    }
}

#[cfg(test)]
#[path = "hang_verdict_tests.rs"]
mod tests;
