//! [`find_verdict`]: why the ranks of a job hang, from the evidence that agents have collected.
//! This module does no I/O.
//!
//! A rank is blocked if it has entered a collective that is not complete. It waits for the ranks of
//! the group that have not entered the collective. A rank for which others wait, and that is not
//! blocked itself, holds up the job. No rank is named without evidence: a rank that has not
//! answered, and whose stack is unknown, is undetermined.
use jobspec::ids::Rank;
use protocol::hang::{
    CollectiveEntry, HangKind, HangVerdict, RankActivity, RankCall, RankEvidence, RankPlace, StackFrame,
    ThreadState, WaitKind, WaitingCollective,
};
use std::collections::{BTreeMap, BTreeSet};

/// The collectives whose inputs must have the same sizes and types on all ranks, without the name
/// of the backend.
const EQUAL_INPUTS: [&str; 9] = [
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
/// The parts of the paths of torch's modules for collectives.
const TORCH_DISTRIBUTED: &str = "/torch/distributed/";
/// The parts of the paths of modules that do not belong to the program.
const LIBRARY_PATHS: [&str; 3] = ["/lib/python", "/lib64/python", "<frozen "];

/// The largest number of ranks whose places the message for the user contains.
const MAX_PLACES: usize = 8;

/// The first collective of a group that is not complete, and the ranks of the group.
struct PendingCollective<'a> {
    group: &'a str,
    seq: i64,
    entered: BTreeSet<Rank>,
    not_entered: BTreeSet<Rank>,
    undetermined: BTreeSet<Rank>,
}

/// Finds out why ranks hang. `evidence` is what is known about each rank, one item per rank.
pub(super) fn find_verdict(evidence: &[RankEvidence]) -> HangVerdict {
    let ranks: BTreeMap<Rank, &RankEvidence> = evidence.iter().map(|e| (e.rank, e)).collect();
    let pending = find_pending(&ranks);
    let different = pending.iter().find_map(|p| {
        let (kind, calls) = compare_calls(p, &ranks)?;
        Some(build_verdict(kind, Some(p), calls, &ranks))
    });
    if let Some(verdict) = different {
        return verdict;
    }
    let blocked: BTreeSet<Rank> = pending.iter().flat_map(|p| p.entered.iter().copied()).collect();
    let holds_up = |p: &&PendingCollective<'_>| p.not_entered.iter().any(|rank| !blocked.contains(rank));
    if let Some(first) = pending.iter().find(holds_up) {
        return build_verdict(HangKind::NotEntered, Some(first), Vec::new(), &ranks);
    }
    if let Some(first) = pending.iter().find(|p| !p.undetermined.is_empty()) {
        return build_verdict(HangKind::NotEntered, Some(first), Vec::new(), &ranks);
    }
    if let Some(first) = pending.iter().find(|p| !p.not_entered.is_empty()) {
        // Each rank that has not entered a collective waits in a collective of another group.
        let calls = pending.iter().filter_map(|p| describe_call(p, &ranks)).collect();
        return build_verdict(HangKind::DifferentOrder, Some(first), calls, &ranks);
    }
    let kind = if pending.is_empty() { HangKind::Unknown } else { HangKind::AllEntered };
    build_verdict(kind, pending.first(), Vec::new(), &ranks)
}

/// Formats a verdict as one line for the user.
pub(super) fn describe_verdict(verdict: &HangVerdict) -> String {
    let list = |ranks: &[Rank]| crate::format::format_ranks(ranks);
    let places = |places: &[RankPlace]| {
        let mut texts: Vec<String> = places.iter().take(MAX_PLACES).map(RankPlace::to_string).collect();
        if let Some(more) = places.len().checked_sub(MAX_PLACES).filter(|more| *more > 0) {
            texts.push(format!("and {more} more ranks"));
        }
        texts.join("; ")
    };
    let name = verdict.collective.as_ref().map_or_else(String::new, |c| {
        let operation = c.operation.as_deref().unwrap_or("a collective");
        format!("{operation} (number {} of group {})", c.seq, c.group)
    });
    let calls = || {
        let call = |c: &RankCall| {
            format!(
                "{} {} {} of group {} on ranks {}",
                c.operation,
                c.inputs,
                c.dtypes,
                c.group,
                list(&c.ranks)
            )
        };
        verdict.calls.iter().map(call).collect::<Vec<_>>().join("; ")
    };
    match verdict.kind {
        HangKind::NotEntered if verdict.not_entered.is_empty() => format!(
            "ranks {} wait in {name}; unknown whether the others have entered it: {}",
            list(&verdict.entered),
            places(&verdict.undetermined)
        ),
        HangKind::NotEntered => {
            let undetermined = match verdict.undetermined.as_slice() {
                [] => String::new(),
                unknown => format!("; unknown whether these have entered it: {}", places(unknown)),
            };
            format!(
                "ranks {} wait in {name}, which other ranks have not entered: {}{undetermined}",
                list(&verdict.entered),
                places(&verdict.not_entered)
            )
        }
        HangKind::DifferentOrder => format!("ranks have called different collectives: {}", calls()),
        HangKind::DifferentShapes => {
            format!("ranks have called {name} with different shapes or types: {}", calls())
        }
        HangKind::AllEntered => format!("all ranks have entered {name}, which does not complete"),
        HangKind::Unknown => {
            format!("no rank is known to wait in a collective: {}", places(&verdict.undetermined))
        }
    }
}

/// Returns the first incomplete collective of each group, in the order of the groups' names.
fn find_pending<'a>(ranks: &BTreeMap<Rank, &'a RankEvidence>) -> Vec<PendingCollective<'a>> {
    let mut groups: BTreeMap<(&str, &[Rank]), i64> = BTreeMap::new();
    for evidence in ranks.values().filter(|e| e.answered) {
        for group in &evidence.groups {
            if let Some(seq) = find_pending_seq(evidence, &group.name, group.completed, group.enqueued) {
                let first = groups.entry((&group.name, &group.ranks)).or_insert(seq);
                *first = seq.min(*first);
            }
        }
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
            let set = match ranks.get(rank).map(|e| has_entered(e, group, seq)) {
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

/// Returns the number of the first collective of a group that a rank has entered and not completed.
fn find_pending_seq(evidence: &RankEvidence, group: &str, completed: i64, enqueued: i64) -> Option<i64> {
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

/// Returns whether a rank has entered the collective `seq` of a group; `None` if unknown.
fn has_entered(evidence: &RankEvidence, group: &str, seq: i64) -> Option<bool> {
    let counted = evidence.groups.iter().find(|g| g.name == group).map(|g| g.enqueued);
    let recorded = evidence.entries.iter().filter(|e| e.group == group && !e.p2p).map(|e| e.seq).max();
    if counted.max(recorded).is_some_and(|last| last >= seq) {
        return Some(true);
    }
    let is_outside = !evidence.stack.is_empty() && !is_in_collective(evidence);
    // Without an answer, the counters are old, and only the stack shows where the rank is.
    let is_known = if evidence.answered { counted.is_some() } else { is_outside };
    is_known.then_some(false)
}

/// Returns whether the main thread of a rank is in a function of torch's collectives.
fn is_in_collective(evidence: &RankEvidence) -> bool {
    evidence.stack.iter().any(|frame| frame.file.contains(TORCH_DISTRIBUTED))
}

/// Returns the name of a collective without the name of the backend.
fn strip_backend(operation: &str) -> &str {
    operation.split_once(':').map_or(operation, |(_, name)| name)
}

/// Returns the entry of a pending collective on a rank.
fn find_entry<'a>(p: &PendingCollective<'_>, evidence: &'a RankEvidence) -> Option<&'a CollectiveEntry> {
    evidence.entries.iter().find(|e| e.group == p.group && e.seq == p.seq && !e.p2p)
}

/// Compares the calls of the ranks that have entered a collective. Returns the kind of the
/// difference, and the different calls, that of most ranks first. Returns `None` if the calls are
/// equal.
fn compare_calls(
    p: &PendingCollective<'_>,
    ranks: &BTreeMap<Rank, &RankEvidence>,
) -> Option<(HangKind, Vec<RankCall>)> {
    let mut calls: Vec<RankCall> = Vec::new();
    for rank in &p.entered {
        let Some(entry) = ranks.get(rank).and_then(|e| find_entry(p, e)) else { continue };
        let operation = strip_backend(&entry.operation);
        let matches = |call: &&mut RankCall| {
            strip_backend(&call.operation) == operation
                && (!EQUAL_INPUTS.contains(&operation)
                    || (call.inputs == entry.inputs && call.dtypes == entry.dtypes))
        };
        match calls.iter_mut().find(matches) {
            Some(call) => call.ranks.push(*rank),
            None => calls.push(build_call(vec![*rank], entry)),
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

/// Builds the call of `ranks` that a flight recorder has recorded as `entry`.
fn build_call(ranks: Vec<Rank>, entry: &CollectiveEntry) -> RankCall {
    RankCall {
        ranks,
        group: entry.group.clone(),
        operation: entry.operation.clone(),
        inputs: entry.inputs.clone(),
        dtypes: entry.dtypes.clone(),
    }
}

/// Returns the call of the ranks that have entered a collective. Returns `None` if no flight
/// recorder has recorded it.
fn describe_call(p: &PendingCollective<'_>, ranks: &BTreeMap<Rank, &RankEvidence>) -> Option<RankCall> {
    let entry = p.entered.iter().find_map(|rank| find_entry(p, ranks.get(rank)?))?;
    Some(build_call(p.entered.iter().copied().collect(), entry))
}

/// Builds a verdict about a collective. Without a collective, all ranks are undetermined.
fn build_verdict(
    kind: HangKind,
    pending: Option<&PendingCollective<'_>>,
    calls: Vec<RankCall>,
    ranks: &BTreeMap<Rank, &RankEvidence>,
) -> HangVerdict {
    let locate = |set: &BTreeSet<Rank>| -> Vec<RankPlace> {
        set.iter().map(|rank| locate_rank(*rank, ranks.get(rank).copied())).collect()
    };
    match pending {
        Some(p) => HangVerdict {
            kind,
            collective: Some(WaitingCollective {
                group: p.group.to_owned(),
                seq: p.seq,
                operation: describe_call(p, ranks).map(|call| call.operation),
            }),
            entered: p.entered.iter().copied().collect(),
            not_entered: locate(&p.not_entered),
            undetermined: locate(&p.undetermined),
            calls,
        },
        None => HangVerdict {
            kind,
            collective: None,
            entered: Vec::new(),
            not_entered: Vec::new(),
            undetermined: locate(&ranks.keys().copied().collect()),
            calls,
        },
    }
}

/// Finds out where a rank is.
fn locate_rank(rank: Rank, evidence: Option<&RankEvidence>) -> RankPlace {
    let Some(evidence) = evidence else {
        return RankPlace { rank, activity: RankActivity::Unknown, frame: None };
    };
    let is_library = |frame: &StackFrame| LIBRARY_PATHS.iter().any(|part| frame.file.contains(part));
    let frame = evidence.stack.iter().find(|frame| !is_library(frame)).or(evidence.stack.first());
    let activity = match &evidence.thread {
        None => RankActivity::Ended,
        Some(thread) => classify_activity(thread, evidence),
    };
    RankPlace { rank, activity, frame: frame.cloned() }
}

/// Finds out what the main thread of a rank does.
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
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::hang::GroupCounters;

    /// Builds the evidence of a rank of one group whose last collective is `calls`' last item.
    fn evidence(rank: Rank, world: u32, calls: &[(&str, &str)], pending: bool) -> RankEvidence {
        let last = calls.len() as i64;
        let entry = |(seq, (operation, inputs)): (i64, &(&str, &str))| CollectiveEntry {
            group: "0".to_owned(),
            seq,
            operation: format!("gloo:{operation}"),
            retired: !pending || seq < last,
            inputs: (*inputs).to_owned(),
            ..CollectiveEntry::default()
        };
        let completed = if pending { last - 1 } else { last };
        RankEvidence {
            rank,
            groups: vec![GroupCounters {
                name: "0".to_owned(),
                backend: "gloo".to_owned(),
                ranks: (0..world).collect(),
                enqueued: last,
                completed,
            }],
            entries: (1..).zip(calls).map(entry).collect(),
            answered: true,
            stack: vec![StackFrame { file: "/x/train.py".into(), line: 7, function: "load".into() }],
            in_native_call: true,
            thread: Some(ThreadState { state: 'S', wait: WaitKind::Futex, ..ThreadState::default() }),
        }
    }

    const SUM: (&str, &str) = ("all_reduce", "[[4]]");

    #[test]
    fn a_rank_that_never_enters_is_named_with_its_place() {
        let ranks = [
            evidence(0, 3, &[SUM, SUM], true),
            evidence(1, 3, &[SUM], false),
            evidence(2, 3, &[SUM, SUM], true),
        ];
        insta::assert_snapshot!(describe_verdict(&find_verdict(&ranks)), @"ranks 0, 2 wait in gloo:all_reduce (number 2 of group 0), which other ranks have not entered: rank 1: waits for a lock in load (/x/train.py:7)");
    }

    #[test]
    fn a_rank_without_answer_is_named_only_if_its_stack_shows_where_it_is() {
        let mut silent = evidence(1, 2, &[SUM], false);
        (silent.answered, silent.entries) = (false, Vec::new());
        let waiting = evidence(0, 2, &[SUM, SUM], true);
        let verdict = find_verdict(&[waiting.clone(), silent.clone()]);
        assert_eq!((verdict.not_entered.len(), verdict.undetermined.len()), (1, 0));
        silent.stack.insert(0, StackFrame { file: "/torch/distributed/x.py".into(), ..Default::default() });
        let verdict = find_verdict(&[waiting.clone(), silent]);
        assert_eq!((verdict.not_entered.len(), verdict.undetermined.len()), (0, 1));
        let verdict = find_verdict(&[waiting]);
        assert_eq!((verdict.not_entered.len(), verdict.undetermined.len()), (0, 1));
    }

    #[test]
    fn without_a_recorder_the_stack_shows_which_rank_waits() {
        let mut ranks = [evidence(0, 2, &[SUM, SUM], true), evidence(1, 2, &[SUM], false)];
        for rank in &mut ranks {
            rank.entries.clear();
            rank.groups[0].completed = -1;
        }
        assert_eq!(find_verdict(&ranks).kind, HangKind::Unknown, "no rank is known to wait");
        ranks[0].stack[0].file = "/x/torch/distributed/distributed_c10d.py".to_owned();
        let verdict = find_verdict(&ranks);
        assert_eq!((verdict.kind, &verdict.entered[..]), (HangKind::NotEntered, &[0][..]));
        assert_eq!(verdict.not_entered[0].rank, 1);
    }

    #[test]
    fn different_calls_are_named_as_such() {
        let gather = ("all_gather", "[[4]]");
        let order = [evidence(0, 2, &[SUM, SUM], true), evidence(1, 2, &[SUM, gather], true)];
        assert_eq!(find_verdict(&order).kind, HangKind::DifferentOrder);
        let shapes = [
            evidence(0, 3, &[("all_reduce", "[[8]]")], true),
            evidence(1, 3, &[SUM], true),
            evidence(2, 3, &[SUM], true),
        ];
        let verdict = find_verdict(&shapes);
        assert_eq!(verdict.kind, HangKind::DifferentShapes);
        assert_eq!(verdict.calls.iter().map(|c| c.ranks.clone()).collect::<Vec<_>>(), [vec![1, 2], vec![0]]);
        let equal = [evidence(0, 2, &[SUM], true), evidence(1, 2, &[SUM], true)];
        assert_eq!(find_verdict(&equal).kind, HangKind::AllEntered);
    }

    #[test]
    fn ranks_that_wait_in_two_groups_for_each_other_are_a_different_order() {
        let mut ranks = [evidence(0, 2, &[SUM], false), evidence(1, 2, &[SUM], false)];
        for (rank, group) in ranks.iter_mut().zip(["a", "b"]) {
            let counters = |name: &str| GroupCounters {
                name: name.to_owned(),
                ranks: vec![0, 1],
                enqueued: i64::from(name == group),
                ..GroupCounters::default()
            };
            rank.groups = vec![counters("a"), counters("b")];
            rank.entries[0].group = group.to_owned();
            rank.entries[0].retired = false;
        }
        let verdict = find_verdict(&ranks);
        assert_eq!((verdict.kind, verdict.calls.len()), (HangKind::DifferentOrder, 2));
    }

    /// What torch's analyzer has found in the dumps of the ranks.
    #[derive(serde::Deserialize)]
    struct AnalyzerFindings {
        seq: i64,
        missing: Vec<Rank>,
        culprits: BTreeMap<Rank, String>,
    }

    #[test]
    fn verdicts_equal_those_of_the_analyzer_of_torch() {
        #[derive(serde::Deserialize)]
        struct RecordedHang {
            evidence: Vec<RankEvidence>,
            analyzer: AnalyzerFindings,
        }
        for name in ["never_entered", "two_never_entered", "different_order", "different_shapes"] {
            let path = format!("{}/../tests/golden/hangs/{name}.json", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(path).expect("a golden file");
            let RecordedHang { evidence, analyzer } = serde_json::from_str(&text).expect("valid");
            let verdict = find_verdict(&evidence);
            assert_eq!(verdict.collective.as_ref().map(|c| c.seq), Some(analyzer.seq), "{name}");
            let missing: Vec<Rank> = verdict.not_entered.iter().map(|place| place.rank).collect();
            assert_eq!((missing, verdict.undetermined.len()), (analyzer.missing, 0), "{name}");
            // The first call is that of most ranks.
            let culprits: Vec<Rank> = verdict.calls.iter().skip(1).flat_map(|c| c.ranks.clone()).collect();
            assert_eq!(culprits, analyzer.culprits.keys().copied().collect::<Vec<_>>(), "{name}");
            let kind = match analyzer.culprits.values().next().map(String::as_str) {
                None => HangKind::NotEntered,
                Some("COLLECTIVE_TYPE_MISMATCH") => HangKind::DifferentOrder,
                Some(_) => HangKind::DifferentShapes,
            };
            assert_eq!(verdict.kind, kind, "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_rank_is_named_that_has_entered_or_is_unknown(
            last in prop::collection::vec((1usize..4, any::<bool>()), 1..8)
        ) {
            let world = last.len() as u32;
            let newest = last.iter().map(|(n, _)| *n).max().unwrap_or(1);
            let ranks: Vec<RankEvidence> = (0..).zip(&last).map(|(rank, (n, answered))| {
                let mut e = evidence(rank, world, &vec![SUM; *n], *n == newest);
                if !answered {
                    (e.answered, e.stack) = (false, Vec::new());
                }
                e
            }).collect();
            let verdict = find_verdict(&ranks);
            for place in &verdict.not_entered {
                let (n, answered) = last[place.rank as usize];
                prop_assert!(answered && n < newest);
            }
        }
    }
}
