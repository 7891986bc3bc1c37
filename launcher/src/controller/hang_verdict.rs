//! Finds out which ranks of a hanging job block the others, from the stacks, collective counters
//! and GPU errors that agents have collected. This module does no I/O.
//! [`describe_verdict`](super::hang_verdict_text::describe_verdict) formats the result.
//!
//! A rank is blocked if it has entered a collective that is not complete. It waits for the ranks of
//! the group that have not entered the collective. A rank for which others wait, and that is not
//! blocked itself, holds up the job. No rank is named without evidence: a rank that has not
//! answered, and whose stack is unknown, is undetermined.
use super::{
    hang_calls::{build_entered_call, compare_collective_calls, find_program_frame},
    hang_waits::{EvidenceByRank, PendingCall, find_pending_calls},
};
use jobspec::ids::Rank;
use protocol::hang::{
    CollectiveCallOfRanks, HangKind, HangVerdict, RankActivity, RankEvidence, RankGpuFault, RankNcclWarning,
    RankPosition, ThreadState, WaitKind, WaitingCollective,
};
use std::collections::BTreeSet;

/// The largest number of GPU errors of one rank that the analysis of a hanging job reports.
const MAX_GPU_FAULTS: usize = 8;

/// Finds out which ranks of a hanging job keep the other ranks waiting, and why. `evidence` is what
/// is known about each rank, one item per rank.
pub(super) fn find_hang_verdict(evidence: &[RankEvidence]) -> HangVerdict {
    let ranks: EvidenceByRank<'_> = evidence.iter().map(|e| (e.rank, e)).collect();
    let pending = find_pending_calls(&ranks);
    let different = pending.iter().find_map(|p| {
        let (kind, calls) = compare_collective_calls(p, &ranks)?;
        Some(build_hang_verdict(kind, Some(p), calls, &ranks))
    });
    if let Some(verdict) = different {
        return verdict;
    }
    let blocked: BTreeSet<Rank> = pending.iter().flat_map(|p| p.entered.iter().copied()).collect();
    let is_free = |rank: &Rank| !blocked.contains(rank);
    // A rank that waits in another call is not the reason, but may be late in this one.
    let has_only_free_ranks =
        |p: &&PendingCall<'_>| !p.not_entered.is_empty() && p.not_entered.iter().all(is_free);
    let has_free_rank = |p: &&PendingCall<'_>| p.not_entered.iter().any(is_free);
    if let Some(first) =
        pending.iter().find(has_only_free_ranks).or_else(|| pending.iter().find(has_free_rank))
    {
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

/// Builds the result of the analysis of a hanging job: the ranks that block the job, and what each
/// of them does. Without a collective, all ranks are undetermined.
fn build_hang_verdict(
    kind: HangKind,
    pending: Option<&PendingCall<'_>>,
    calls: Vec<CollectiveCallOfRanks>,
    ranks: &EvidenceByRank<'_>,
) -> HangVerdict {
    let locate = |set: &BTreeSet<Rank>| -> Vec<RankPosition> {
        set.iter().map(|rank| find_rank_activity(*rank, ranks.get(rank).copied())).collect()
    };
    let all_ranks: BTreeSet<Rank> = ranks.keys().copied().collect();
    let undetermined = match (kind, pending) {
        // Ranks that cannot run, although they have entered the collective.
        (HangKind::AllEntered, pending) => {
            // A rank that has left its collectives behind has ended because it waited for too long.
            let mut candidates = pending.map_or(all_ranks, |p| p.entered.clone());
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
        (_, WaitKind::Child) => RankActivity::WaitsForChild,
        (_, WaitKind::Other) => RankActivity::Unknown,
    }
}

#[cfg(test)]
#[path = "hang_verdict_tests.rs"]
mod tests;
