//! Finds what the ranks of a hanging job wait for: incomplete collectives, transfers between two
//! ranks, and calls that create process groups. This module does no I/O.
use jobspec::ids::Rank;
use protocol::hang::{CollectiveEntry, RankEvidence, TransferOperation};
use std::collections::{BTreeMap, BTreeSet};

/// The ends of the paths of torch's source files whose functions call collectives.
const COLLECTIVE_FILES: [&str; 2] =
    ["/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py"];
/// The ends of the paths of torch's source files whose functions wrap those in
/// [`COLLECTIVE_FILES`].
const WRAPPER_FILES: [&str; 1] = ["/torch/distributed/c10d_logger.py"];
/// The functions of `torch.distributed` that create process groups, in which a rank waits until
/// the other ranks have called the same function.
const GROUP_FUNCTIONS: [&str; 2] = [INIT_FUNCTION, "new_group"];
/// The function of `torch.distributed` that creates the group of all ranks.
const INIT_FUNCTION: &str = "init_process_group";
/// The functions in [`COLLECTIVE_FILES`] that call no collective.
const OTHER_FUNCTIONS: [&str; 2] = ["destroy_process_group", "abort_process_group"];

/// The number of process groups from which on the evidence about a rank may lack some.
const MAX_LISTED_GROUPS: usize = 64;

/// The evidence about each rank of a hanging job.
pub(super) type EvidenceByRank<'a> = BTreeMap<Rank, &'a RankEvidence>;

/// A collective or another call in which some ranks wait for others, with the ranks that have and
/// have not entered it.
pub(super) struct PendingCall<'a> {
    /// The name of the process group; empty for a call that creates a group.
    pub(super) group: &'a str,
    /// The backend of the group; empty if unknown.
    pub(super) backend: &'a str,
    /// The number of the collective in the group; 0 for other calls.
    pub(super) seq: i64,
    /// The name of the call; `None` for a collective, whose name is in the flight recorders.
    pub(super) operation: Option<String>,
    pub(super) entered: BTreeSet<Rank>,
    pub(super) not_entered: BTreeSet<Rank>,
    pub(super) undetermined: BTreeSet<Rank>,
}

impl<'a> PendingCall<'a> {
    /// Creates a call that no rank is known to have entered.
    fn new(group: &'a str, backend: &'a str, seq: i64, operation: Option<String>) -> PendingCall<'a> {
        let (entered, not_entered, undetermined) = Default::default();
        PendingCall { group, backend, seq, operation, entered, not_entered, undetermined }
    }

    /// Returns whether a recorded collective belongs to the process group of this call.
    pub(super) fn has_group_of(&self, entry: &CollectiveEntry) -> bool {
        belongs_to_group(entry, self.group, self.backend)
    }

    /// Adds a rank that has entered the call, has not entered it, or may have entered it (`None`).
    fn add_rank(&mut self, rank: Rank, has_entered: Option<bool>) {
        let set = match has_entered {
            Some(true) => &mut self.entered,
            Some(false) => &mut self.not_entered,
            None => &mut self.undetermined,
        };
        set.insert(rank);
    }
}

/// Returns the calls in which ranks wait: the first incomplete collective of each process group,
/// the transfers between two ranks, and the calls that create process groups.
pub(super) fn find_pending_calls<'a>(ranks: &EvidenceByRank<'a>) -> Vec<PendingCall<'a>> {
    let mut calls = find_pending_collectives(ranks);
    calls.extend(find_pending_transfers(ranks));
    let blocked: BTreeSet<Rank> = calls.iter().flat_map(|call| call.entered.iter().copied()).collect();
    for function in GROUP_FUNCTIONS {
        calls.extend(find_group_creation(function, ranks).map(|mut call| {
            // Such a rank may have left the function already.
            call.not_entered.retain(|rank| !blocked.contains(rank));
            call
        }));
    }
    calls
}

/// Returns the first incomplete collective of each process group, in the order of the groups'
/// names.
fn find_pending_collectives<'a>(ranks: &EvidenceByRank<'a>) -> Vec<PendingCall<'a>> {
    let mut groups: BTreeMap<GroupKey<'a>, i64> = BTreeMap::new();
    for evidence in ranks.values().filter(|e| e.answered) {
        for group in &evidence.groups {
            let (name, backend) = (group.name.as_str(), group.backend.as_str());
            let counters = (group.completed, group.enqueued);
            if let Some(seq) = find_pending_collective_seq(evidence, (name, backend), counters) {
                let first = groups.entry((name, backend, &group.ranks)).or_insert(seq);
                *first = seq.min(*first);
            }
        }
    }
    for (group, seq) in find_pending_builtin_collectives(ranks) {
        let first = groups.entry(group).or_insert(seq);
        *first = seq.min(*first);
    }
    let build = |((group, backend, members), seq): (GroupKey<'a>, i64)| {
        let mut pending = PendingCall::new(group, backend, seq, None);
        for rank in members {
            let has_entered = ranks.get(rank).and_then(|e| has_entered_collective(e, (group, backend), seq));
            pending.add_rank(*rank, has_entered);
        }
        pending
    };
    groups.into_iter().map(build).collect()
}

/// The name, the backend and the ranks of a process group.
type GroupKey<'a> = (&'a str, &'a str, &'a [Rank]);

/// Finds, for a job without a user program, the process groups in which some ranks have entered a
/// collective that other ranks have not entered. A rank does not know whether its GPU has completed
/// a collective, but a collective that a rank has not entered is not complete.
fn find_pending_builtin_collectives<'a>(ranks: &EvidenceByRank<'a>) -> BTreeMap<GroupKey<'a>, i64> {
    let mut counts: BTreeMap<GroupKey<'a>, (i64, i64)> = BTreeMap::new();
    for evidence in ranks.values().filter(|e| e.answered && e.task.is_some()) {
        for group in evidence.groups.iter().filter(|group| group.completed < 0) {
            let key = (group.name.as_str(), group.backend.as_str(), group.ranks.as_slice());
            let (least, most) = counts.entry(key).or_insert((group.enqueued, group.enqueued));
            (*least, *most) = (group.enqueued.min(*least), group.enqueued.max(*most));
        }
    }
    let differing = counts.into_iter().filter(|(_, (least, most))| least < most);
    differing.map(|(group, (least, _))| (group, least.saturating_add(1))).collect()
}

/// Returns the sequence number of the oldest collective of a process group that the rank has
/// entered but not completed; `None` if there is none. `group` are the name and the backend of the
/// group.
fn find_pending_collective_seq(
    evidence: &RankEvidence,
    group: (&str, &str),
    (completed, enqueued): (i64, i64),
) -> Option<i64> {
    let entries = evidence.entries.iter().filter(|e| belongs_to_group(e, group.0, group.1));
    if let Some(oldest) = entries.clone().map(|e| e.seq).min() {
        let pending = entries.filter(|e| !e.retired).map(|e| e.seq).min()?;
        // Only the newest entries are known.
        let is_older = pending == oldest && completed >= 0 && completed + 1 < pending;
        return Some(if is_older { completed + 1 } else { pending });
    }
    if completed < 0 {
        // Without a flight recorder, only the stack shows that the rank waits in a collective.
        return (enqueued > 0 && is_in_collective(evidence)).then_some(enqueued);
    }
    (completed < enqueued).then_some(completed + 1)
}

/// Returns whether a rank has entered the collective number `seq` of a process group; `None` if the
/// evidence does not show this.
fn has_entered_collective(evidence: &RankEvidence, (name, backend): (&str, &str), seq: i64) -> Option<bool> {
    if find_last_entered_collective_seq(evidence, (name, backend)).is_some_and(|last| last >= seq) {
        return Some(true);
    }
    let is_listed = evidence.groups.iter().any(|g| g.name == name);
    // A flight recorder does not list a group whose collectives the rank has not called.
    let is_complete = evidence.groups.len() < MAX_LISTED_GROUPS;
    // Without an answer, the counters are old, and only the stack shows where the rank is.
    let is_known = match evidence.answered {
        true => is_listed || is_complete,
        false => is_outside_of_collectives(evidence),
    };
    is_known.then_some(false)
}

/// Returns the sequence number of the collective that a rank has entered last in a process group
/// with this name and backend; `None` if the evidence does not contain this number.
pub(super) fn find_last_entered_collective_seq(
    evidence: &RankEvidence,
    (name, backend): (&str, &str),
) -> Option<i64> {
    let is_group =
        |g: &&protocol::hang::GroupCounters| g.name == name && is_same_backend(&g.backend, backend);
    let counted = evidence.groups.iter().find(is_group).map(|g| g.enqueued);
    let entries = evidence.entries.iter().filter(|e| belongs_to_group(e, name, backend));
    counted.max(entries.map(|e| e.seq).max())
}

/// Returns whether a rank without an answer is outside of collectives, according to its stack or
/// because its process has ended.
fn is_outside_of_collectives(evidence: &RankEvidence) -> bool {
    let has_stack = !evidence.stack.is_empty();
    (has_stack && !is_in_collective(evidence) && find_group_function(evidence).is_none())
        || has_ended_silently(evidence)
}

/// Returns whether the process of a rank has ended, and has left nothing about its collectives.
fn has_ended_silently(evidence: &RankEvidence) -> bool {
    evidence.thread.is_none() && !evidence.answered && evidence.groups.is_empty() && evidence.stack.is_empty()
}

/// Returns whether the main thread of a rank is in a call of a collective, as the innermost frame
/// of the thread's stack shows. Outer frames do not show this, because `torch.distributed` also
/// calls functions of the program.
pub(super) fn is_in_collective(evidence: &RankEvidence) -> bool {
    let is_of = |file: &str, files: &[&str]| files.iter().any(|end| file.ends_with(end));
    let innermost = evidence.stack.iter().find(|frame| !is_of(&frame.file, &WRAPPER_FILES));
    innermost.is_some_and(|frame| {
        let is_other = |name: &&str| *name == frame.function;
        is_of(&frame.file, &COLLECTIVE_FILES)
            && !GROUP_FUNCTIONS.iter().chain(&OTHER_FUNCTIONS).any(is_other)
            && find_group_function(evidence).is_none()
    })
}

/// Returns the function of [`GROUP_FUNCTIONS`] in which the main thread of a rank is.
fn find_group_function(evidence: &RankEvidence) -> Option<&'static str> {
    let mut frames = evidence.stack.iter().filter(|frame| frame.file.ends_with(COLLECTIVE_FILES[0]));
    frames.find_map(|frame| GROUP_FUNCTIONS.into_iter().find(|name| *name == frame.function))
}

/// Returns whether a recorded collective belongs to the process group with this name and backend.
/// A group may have several backends, each of which numbers its collectives.
fn belongs_to_group(entry: &CollectiveEntry, group: &str, backend: &str) -> bool {
    !entry.p2p && entry.group == group && is_same_backend(split_operation(&entry.operation).0, backend)
}

/// Returns whether two names of backends, of which one may be unknown, can be those of the same
/// backend.
fn is_same_backend(first: &str, second: &str) -> bool {
    first == second || first.is_empty() || second.is_empty()
}

/// Returns the backend and the name of a collective such as `nccl:all_reduce`.
pub(super) fn split_operation(operation: &str) -> (&str, &str) {
    operation.rsplit_once(':').unwrap_or(("", operation))
}

/// A transfer of a tensor to or from another rank in which a rank waits.
struct PendingTransfer<'a> {
    group: &'a str,
    name: String,
    operation: TransferOperation,
    peer: Rank,
}

/// Returns the transfers between two ranks that are not complete.
fn find_pending_transfers<'a>(ranks: &EvidenceByRank<'a>) -> Vec<PendingCall<'a>> {
    let find = |(rank, evidence): (&Rank, &&'a RankEvidence)| Some((*rank, find_pending_transfer(evidence)?));
    let transfers: BTreeMap<Rank, PendingTransfer<'a>> = ranks.iter().filter_map(find).collect();
    let build = |(rank, transfer): (&Rank, &PendingTransfer<'a>)| {
        let mut call = PendingCall::new(transfer.group, "", 0, Some(transfer.name.clone()));
        call.add_rank(*rank, Some(true));
        let answers =
            |of_peer: &PendingTransfer<'_>| of_peer.peer == *rank && of_peer.operation != transfer.operation;
        let is_known = |e: &&RankEvidence| e.answered || is_outside_of_collectives(e);
        let has_entered = match transfers.get(&transfer.peer).is_some_and(answers) {
            true => Some(true),
            false => ranks.get(&transfer.peer).filter(|e| is_known(e)).map(|_| false),
        };
        call.add_rank(transfer.peer, has_entered);
        call
    };
    transfers.iter().map(build).collect()
}

/// Returns the oldest transfer of a rank that is not complete, according to its stack or to its
/// flight recorder.
fn find_pending_transfer(evidence: &RankEvidence) -> Option<PendingTransfer<'_>> {
    if let Some(transfer) = &evidence.transfer {
        let name = match transfer.operation {
            TransferOperation::Send => "send",
            TransferOperation::Recv => "recv",
        };
        let (name, peer) = (name.to_owned(), transfer.peer);
        return Some(PendingTransfer { group: "", name, operation: transfer.operation, peer });
    }
    let parse = |entry: &'_ CollectiveEntry| {
        let (name, ranks) = split_operation(&entry.operation).1.split_once(' ')?;
        let (operation, peer) = match name {
            "send" => (TransferOperation::Send, ranks.split_once("->")?.1),
            "recv" => (TransferOperation::Recv, ranks.split_once("<-")?.1),
            _ => return None,
        };
        // The numbers are those of the ranks within the group.
        let group = evidence.groups.iter().find(|group| group.name == entry.group)?;
        let peer = *group.ranks.get(peer.parse::<usize>().ok()?)?;
        Some((operation, peer))
    };
    let mut pending = evidence.entries.iter().filter(|entry| entry.p2p && !entry.retired);
    pending.find_map(|entry| {
        let (operation, peer) = parse(entry)?;
        Some(PendingTransfer { group: &entry.group, name: entry.operation.clone(), operation, peer })
    })
}

/// Returns the call of `function`, which creates process groups, if some rank waits in it. All
/// ranks of the job must call such a function.
fn find_group_creation<'a>(function: &str, ranks: &EvidenceByRank<'a>) -> Option<PendingCall<'a>> {
    let mut call = PendingCall::new("", "", 0, Some(function.to_owned()));
    for (rank, evidence) in ranks {
        let is_caller = find_group_function(evidence) == Some(function);
        // A rank that has groups has left the function that creates the first one.
        if is_caller || function != INIT_FUNCTION || evidence.groups.is_empty() {
            let is_known = is_caller || evidence.answered || is_outside_of_collectives(evidence);
            call.add_rank(*rank, is_known.then_some(is_caller));
        }
    }
    (!call.entered.is_empty()).then_some(call)
}
