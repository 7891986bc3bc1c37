//! Compares the calls of one collective by several ranks: their names, and the sizes and types of
//! their tensors. This module does no I/O.
use super::hang_waits::{
    EvidenceByRank, PendingCall, find_last_entered_collective_seq, is_in_collective, split_operation,
};
use jobspec::ids::Rank;
use protocol::hang::{CollectiveCallOfRanks, CollectiveEntry, HangKind, RankEvidence, StackFrame};

/// Parts of source paths by which a stack frame of Python or a Python library is distinguished from
/// a frame of the user's program.
const LIBRARY_PATH_PARTS: [&str; 3] = ["/lib/python", "/lib64/python", "<frozen "];
/// The parts of the names of collectives in which each rank may pass and receive another number of
/// elements.
const UNEVEN_OPERATIONS: [&str; 4] = ["all_to_all", "alltoall", "all_gather_v", "reduce_scatter_v"];
/// The collective in which only one rank passes the elements of all ranks.
const SCATTER: &str = "scatter";
/// The collective in which only one rank receives the elements of all ranks.
const GATHER: &str = "gather";

/// Compares the calls of an incomplete collective by the ranks that have entered it, to find calls
/// of different collectives or with different inputs. Returns the kind of the difference, and the
/// different calls, that of most ranks first. Returns `None` if the calls are equal.
pub(super) fn compare_collective_calls(
    p: &PendingCall<'_>,
    ranks: &EvidenceByRank<'_>,
) -> Option<(HangKind, Vec<CollectiveCallOfRanks>)> {
    // Several collectives that run together (coalesced) have the same number.
    let recorded: Vec<(Rank, Vec<&CollectiveEntry>)> =
        p.entered.iter().map(|rank| (*rank, list_recorded_entries(p, ranks.get(rank).copied()))).collect();
    let longest = recorded.iter().map(|(_, entries)| entries.len()).max()?;
    let at = |index: usize| {
        recorded
            .iter()
            .filter_map(move |(rank, entries)| Some((*rank, *entries.get(index)?)))
            .collect::<Vec<_>>()
    };
    (0..longest).find_map(|index| {
        let entries = at(index);
        let calls = group_calls(&entries, ranks, |first, second| !differ(first, second));
        if calls.len() > 1 {
            let (_, name) = split_operation(&entries.first()?.1.operation);
            let is_same = |call: &CollectiveCallOfRanks| split_operation(&call.operation).1 == name;
            let is_order = !calls.iter().all(is_same);
            return Some((
                if is_order { HangKind::DifferentOrder } else { HangKind::DifferentShapes },
                calls,
            ));
        }
        let is_complete =
            entries.len() == recorded.len() && p.not_entered.is_empty() && p.undetermined.is_empty();
        (is_complete && has_unequal_totals(&entries)).then(|| {
            let has_same_sizes = |first: &CollectiveEntry, second: &CollectiveEntry| {
                (&first.inputs, &first.outputs) == (&second.inputs, &second.outputs)
            };
            (HangKind::DifferentShapes, group_calls(&entries, ranks, has_same_sizes))
        })
    })
}

/// Returns what torch's flight recorder (a list of recent collectives) of one rank contains about
/// the given incomplete collective. There are several entries if the collective is coalesced.
fn list_recorded_entries<'a>(
    p: &PendingCall<'_>,
    evidence: Option<&'a RankEvidence>,
) -> Vec<&'a CollectiveEntry> {
    let entries = evidence.map_or(&[][..], |evidence| evidence.entries.as_slice());
    entries.iter().filter(|entry| p.has_group_of(entry) && entry.seq == p.seq).collect()
}

/// Returns the calls of the ranks, with equal calls combined, that of most ranks first.
fn group_calls(
    entries: &[(Rank, &CollectiveEntry)],
    ranks: &EvidenceByRank<'_>,
    is_equal: impl Fn(&CollectiveEntry, &CollectiveEntry) -> bool,
) -> Vec<CollectiveCallOfRanks> {
    let mut groups: Vec<(&CollectiveEntry, Vec<Rank>)> = Vec::new();
    for (rank, entry) in entries {
        match groups.iter_mut().find(|(first, _)| is_equal(first, entry)) {
            Some((_, callers)) => callers.push(*rank),
            None => groups.push((*entry, vec![*rank])),
        }
    }
    groups.sort_by_key(|(_, callers)| std::cmp::Reverse(callers.len()));
    groups.into_iter().map(|(entry, callers)| build_collective_call(callers, entry, ranks)).collect()
}

/// Returns whether the calls of a collective by two ranks do not match, by the rules of torch's
/// analyzer of flight recorders.
fn differ(first: &CollectiveEntry, second: &CollectiveEntry) -> bool {
    let (_, name) = split_operation(&first.operation);
    if name != split_operation(&second.operation).1 {
        return true;
    }
    let is_known = |text: &str| !matches!(text, "" | "None" | "[]");
    let differs = |first: &str, second: &str| is_known(first) && is_known(second) && first != second;
    let is_uneven = UNEVEN_OPERATIONS.iter().any(|part| name.contains(part));
    let (has_equal_inputs, has_equal_outputs) = (name != SCATTER, name != GATHER);
    let has_other_inputs = has_equal_inputs
        && (differs(&first.inputs, &second.inputs) && !is_uneven || differs(&first.dtypes, &second.dtypes));
    let has_other_outputs = has_equal_outputs
        && (differs(&first.outputs, &second.outputs) && !is_uneven
            || differs(&first.output_dtypes, &second.output_dtypes));
    has_other_inputs || has_other_outputs
}

/// Returns whether the ranks of an all-to-all pass another number of elements than they receive.
fn has_unequal_totals(entries: &[(Rank, &CollectiveEntry)]) -> bool {
    let is_all_to_all = |entry: &CollectiveEntry| {
        let (_, name) = split_operation(&entry.operation);
        name.contains("all_to_all") || name.contains("alltoall")
    };
    let sum = |sizes: fn(&CollectiveEntry) -> &str| {
        entries.iter().try_fold(0i64, |sum, (_, entry)| sum.checked_add(count_elements(sizes(entry))?))
    };
    let (inputs, outputs) = (sum(|entry| &entry.inputs), sum(|entry| &entry.outputs));
    entries.iter().all(|(_, entry)| is_all_to_all(entry))
        && matches!((inputs, outputs), (Some(inputs), Some(outputs)) if inputs != outputs)
}

/// Returns the number of elements of tensors with sizes such as `[[4, 2], [3]]`; `None` if the
/// text is incomplete.
fn count_elements(sizes: &str) -> Option<i64> {
    let sizes: Vec<Vec<i64>> = serde_json::from_str(sizes).ok()?;
    let count = |size: &Vec<i64>| size.iter().try_fold(1i64, |product, n| product.checked_mul(*n));
    sizes.iter().try_fold(0i64, |sum, size| sum.checked_add(count(size)?))
}

/// Describes a collective that the ranks `callers` have called: the operation, its inputs, and the
/// stack frame of the call in the user's program.
fn build_collective_call(
    callers: Vec<Rank>,
    entry: &CollectiveEntry,
    ranks: &EvidenceByRank<'_>,
) -> CollectiveCallOfRanks {
    let first = callers.first().and_then(|rank| ranks.get(rank));
    // The stack of a rank that has left the call, or waits in a later one, does not show the call.
    let is_in_call = |e: &&&RankEvidence| {
        let group = (entry.group.as_str(), split_operation(&entry.operation).0);
        is_in_collective(e)
            && find_last_entered_collective_seq(e, group).is_some_and(|last| last == entry.seq)
    };
    CollectiveCallOfRanks {
        frame: first.filter(is_in_call).and_then(|e| find_program_frame(e)),
        ranks: callers,
        group: entry.group.clone(),
        operation: entry.operation.clone(),
        inputs: entry.inputs.clone(),
        dtypes: entry.dtypes.clone(),
        outputs: entry.outputs.clone(),
    }
}

/// Describes how those ranks that have entered an incomplete call called it, from the flight
/// recorder of the first such rank that has an entry about it. Returns `None` if no flight recorder
/// has recorded it.
pub(super) fn build_entered_call(
    p: &PendingCall<'_>,
    ranks: &EvidenceByRank<'_>,
) -> Option<CollectiveCallOfRanks> {
    let callers: Vec<Rank> = p.entered.iter().copied().collect();
    if let Some(operation) = &p.operation {
        // The stack shows calls that are not recorded for a group.
        let first = callers.first().filter(|_| p.group.is_empty()).and_then(|rank| ranks.get(rank));
        return Some(CollectiveCallOfRanks {
            frame: first.and_then(|evidence| find_program_frame(evidence)),
            ranks: callers,
            group: p.group.to_owned(),
            operation: operation.clone(),
            inputs: String::new(),
            dtypes: String::new(),
            outputs: String::new(),
        });
    }
    let find = |rank: &Rank| list_recorded_entries(p, ranks.get(rank).copied()).first().copied();
    let entry = p.entered.iter().find_map(find)?;
    Some(build_collective_call(callers, entry, ranks))
}

/// Returns the innermost stack frame of a rank that belongs to the user's program, or the innermost
/// frame if all belong to libraries.
pub(super) fn find_program_frame(evidence: &RankEvidence) -> Option<StackFrame> {
    let is_library = |frame: &StackFrame| LIBRARY_PATH_PARTS.iter().any(|part| frame.file.contains(part));
    evidence.stack.iter().find(|frame| !is_library(frame)).or(evidence.stack.first()).cloned()
}
