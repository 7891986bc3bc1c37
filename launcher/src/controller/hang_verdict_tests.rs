//! Tests of hang verdicts.
use super::*;
use crate::controller::hang_verdict_text::describe_verdict;
use proptest::prelude::*;
use protocol::hang::{
    CollectiveEntry, CollectiveTimeout, GroupCounters, StackFrame, Transfer, TransferOperation,
};
use std::collections::BTreeMap;

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
        ..RankEvidence::default()
    }
}

const SUM: (&str, &str) = ("all_reduce", "[[4]]");

/// Returns a frame of a function of `torch.distributed`.
fn collective_frame(function: &str) -> StackFrame {
    let file = "/x/torch/distributed/distributed_c10d.py".to_owned();
    StackFrame { file, line: 1, function: function.to_owned() }
}

/// Returns the ranks that the verdict names as those that have not entered the call.
fn list_not_entered(verdict: &HangVerdict) -> Vec<Rank> {
    verdict.not_entered.iter().map(|place| place.rank).collect()
}

#[test]
fn a_rank_that_never_enters_is_named_with_its_place() {
    let ranks =
        [evidence(0, 3, &[SUM, SUM], true), evidence(1, 3, &[SUM], false), evidence(2, 3, &[SUM, SUM], true)];
    insta::assert_snapshot!(describe_verdict(&find_hang_verdict(&ranks)), @"rank 1 has not entered gloo:all_reduce (number 2 of group 0), in which ranks 0, 2 wait; rank 1 waits for a lock in load (/x/train.py:7)");
}

#[test]
fn a_rank_without_answer_is_named_only_if_its_stack_shows_where_it_is() {
    let mut silent = evidence(1, 2, &[SUM], false);
    (silent.answered, silent.entries) = (false, Vec::new());
    let waiting = evidence(0, 2, &[SUM, SUM], true);
    let verdict = find_hang_verdict(&[waiting.clone(), silent.clone()]);
    assert_eq!((verdict.not_entered.len(), verdict.undetermined.len()), (1, 0));
    silent.stack.insert(0, collective_frame("all_reduce"));
    let verdict = find_hang_verdict(&[waiting.clone(), silent]);
    assert_eq!((verdict.not_entered.len(), verdict.undetermined.len()), (0, 1));
    let verdict = find_hang_verdict(&[waiting]);
    assert_eq!((verdict.not_entered.len(), verdict.undetermined.len()), (0, 1));
}

#[test]
fn without_a_recorder_the_stack_shows_which_rank_waits() {
    let mut ranks = [evidence(0, 2, &[SUM, SUM], true), evidence(1, 2, &[SUM], false)];
    for rank in &mut ranks {
        rank.entries.clear();
        rank.groups[0].completed = -1;
    }
    assert_eq!(find_hang_verdict(&ranks).kind, HangKind::Unknown, "no rank is known to wait");
    ranks[0].stack[0].file = "/x/torch/distributed/distributed_c10d.py".to_owned();
    let verdict = find_hang_verdict(&ranks);
    assert_eq!((verdict.kind, &verdict.entered[..]), (HangKind::NotEntered, &[0][..]));
    assert_eq!(verdict.not_entered[0].rank, 1);
}

#[test]
fn different_calls_are_named_as_such() {
    let gather = ("all_gather", "[[4]]");
    let order = [evidence(0, 2, &[SUM, SUM], true), evidence(1, 2, &[SUM, gather], true)];
    assert_eq!(find_hang_verdict(&order).kind, HangKind::DifferentOrder);
    let shapes = [
        evidence(0, 3, &[("all_reduce", "[[8]]")], true),
        evidence(1, 3, &[SUM], true),
        evidence(2, 3, &[SUM], true),
    ];
    let verdict = find_hang_verdict(&shapes);
    assert_eq!(verdict.kind, HangKind::DifferentShapes);
    assert_eq!(verdict.calls.iter().map(|c| c.ranks.clone()).collect::<Vec<_>>(), [vec![1, 2], vec![0]]);
    let equal = [evidence(0, 2, &[SUM], true), evidence(1, 2, &[SUM], true)];
    assert_eq!(find_hang_verdict(&equal).kind, HangKind::AllEntered);
}

#[test]
fn a_call_has_a_frame_only_if_the_rank_waits_in_it() {
    // Rank 1 has completed its call, and waits in the next one.
    let mut ranks = [evidence(0, 2, &[("all_reduce", "[[8]]")], true), evidence(1, 2, &[SUM, SUM], true)];
    for rank in &mut ranks {
        let file = "/x/torch/distributed/distributed_c10d.py".to_owned();
        rank.stack.insert(0, StackFrame { file, ..Default::default() });
    }
    let verdict = find_hang_verdict(&ranks);
    assert_eq!(verdict.kind, HangKind::DifferentShapes);
    let has_frame: Vec<_> = verdict.calls.iter().map(|call| (call.ranks[0], call.frame.is_some())).collect();
    assert_eq!(has_frame, [(0, true), (1, false)]);
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
    let verdict = find_hang_verdict(&ranks);
    assert_eq!((verdict.kind, verdict.calls.len()), (HangKind::DifferentOrder, 2));
}

/// Builds the evidence of a built-in worker that has entered `entered` collectives. On a GPU, the
/// number of completed ones is unknown.
fn builtin_evidence(rank: Rank, entered: i64, completed: i64, state: char) -> RankEvidence {
    let mut e = evidence(rank, 3, &vec![SUM; entered as usize], completed >= 0 && completed < entered);
    e.groups[0].completed = completed;
    e.stack.clear();
    e.task = Some("reading samples (step 5)".to_owned());
    e.thread =
        Some(ThreadState { state, wait: WaitKind::Io, file: Some("/data/x".into()), ..Default::default() });
    e
}

#[test]
fn a_built_in_worker_is_named_with_its_task_and_file() {
    let ranks =
        [builtin_evidence(0, 4, 3, 'S'), builtin_evidence(1, 3, 3, 'D'), builtin_evidence(2, 4, 3, 'S')];
    insta::assert_snapshot!(describe_verdict(&find_hang_verdict(&ranks)), @"rank 1 has not entered gloo:all_reduce (number 4 of group 0), in which ranks 0, 2 wait; rank 1 is in uninterruptible I/O (state D, ) (/data/x) while reading samples (step 5)");
}

#[test]
fn ranks_with_fewer_collectives_hold_up_ranks_on_gpus() {
    let ranks =
        [builtin_evidence(0, 9, -1, 'S'), builtin_evidence(1, 5, -1, 'S'), builtin_evidence(2, 8, -1, 'S')];
    let verdict = find_hang_verdict(&ranks);
    assert_eq!(verdict.collective.map(|c| c.seq), Some(6));
    assert_eq!((verdict.kind, verdict.entered), (HangKind::NotEntered, vec![0, 2]));
    assert_eq!(verdict.not_entered.iter().map(|place| place.rank).collect::<Vec<_>>(), [1]);
    let equal = [0, 1, 2].map(|rank| builtin_evidence(rank, 5, -1, 'S'));
    assert_eq!(find_hang_verdict(&equal).kind, HangKind::Unknown);
}

#[test]
fn a_rank_that_is_stopped_within_a_collective_is_named() {
    // Rank 0 has the data of collective 4, and rank 1 has not noticed its end.
    let ranks =
        [builtin_evidence(0, 5, 4, 'S'), builtin_evidence(1, 4, 3, 'T'), builtin_evidence(2, 4, 3, 'S')];
    let verdict = find_hang_verdict(&ranks);
    assert_eq!((verdict.kind, verdict.collective.as_ref().map(|c| c.seq)), (HangKind::AllEntered, Some(4)));
    insta::assert_snapshot!(describe_verdict(&verdict), @"all ranks have entered gloo:all_reduce (number 4 of group 0), which does not complete; rank 1 is stopped by a signal or a debugger (state T) (/data/x) while reading samples (step 5)");
}

#[test]
fn errors_of_gpus_and_nccl_are_part_of_the_verdict() {
    let fault = |xid, description: Option<&str>| protocol::failure::GpuFault {
        xid,
        pci_address: "0000:17:00".to_owned(),
        description: description.map(str::to_owned),
    };
    let mut ranks = [evidence(0, 2, &[SUM], true), evidence(1, 2, &[SUM], true)];
    ranks[0].host_gpu_faults = vec![fault(79, Some("the GPU fell off the bus"))];
    ranks[1].gpu_faults = vec![fault(13, None)];
    ranks[1].nccl_warnings = vec!["old".to_owned(), "NET/IB : Got completion with status=12".to_owned()];
    let timeout = |seq| CollectiveTimeout { rank: 0, seq, operation: "ALLREDUCE".to_owned() };
    ranks[0].collective_timeouts = vec![timeout(1), timeout(2)];
    assert_eq!(find_hang_verdict(&ranks).collective_timeouts, [timeout(1)]);
    insta::assert_snapshot!(describe_verdict(&find_hang_verdict(&ranks)), @"all ranks have entered gloo:all_reduce (number 1 of group 0), which does not complete; GPU errors: the host of rank 0: NVIDIA's driver reported Xid 79 (the GPU fell off the bus) on the GPU at 0000:17:00; rank 1: NVIDIA's driver reported Xid 13 on the GPU at 0000:17:00; NCCL warnings: rank 1: NET/IB : Got completion with status=12; timeouts of torch: rank 0: ALLREDUCE (number 1)");
}

#[test]
fn outer_frames_of_torch_do_not_show_that_a_rank_is_in_a_collective() {
    let mut silent = evidence(1, 2, &[SUM], false);
    (silent.answered, silent.entries) = (false, Vec::new());
    // FSDP has called a function of the program.
    silent.stack.push(StackFrame { file: "/x/torch/distributed/fsdp/api.py".into(), ..Default::default() });
    let verdict = find_hang_verdict(&[evidence(0, 2, &[SUM, SUM], true), silent]);
    assert_eq!((verdict.kind, list_not_entered(&verdict)), (HangKind::NotEntered, vec![1]));
}

#[test]
fn a_rank_that_has_ended_holds_up_the_others() {
    let ended = RankEvidence { rank: 1, ..RankEvidence::default() };
    let ranks = [evidence(0, 3, &[SUM, SUM], true), ended, evidence(2, 3, &[SUM, SUM], true)];
    insta::assert_snapshot!(describe_verdict(&find_hang_verdict(&ranks)), @"rank 1 has not entered gloo:all_reduce (number 2 of group 0), in which ranks 0, 2 wait; rank 1 has ended");
    // All ranks of the other group have entered a collective that does not complete.
    let mut members = [evidence(0, 2, &[SUM], true), evidence(1, 2, &[SUM], true)];
    members[1].thread = Some(ThreadState { state: 'T', ..ThreadState::default() });
    let [first, second] = members;
    let outside = RankEvidence { rank: 2, ..RankEvidence::default() };
    let verdict = find_hang_verdict(&[first, second, outside]);
    let named: Vec<Rank> = verdict.undetermined.iter().map(|place| place.rank).collect();
    assert_eq!((verdict.kind, named), (HangKind::AllEntered, vec![1]));
}

#[test]
fn only_the_rank_that_waits_in_no_group_is_named() {
    // Rank 0 waits for rank 1 in group a, and ranks 2 and 3 wait for both in the group of all.
    let mut ranks = [0, 1, 2, 3].map(|rank| evidence(rank, 4, &[SUM], false));
    for rank in [2, 3] {
        ranks[rank] = evidence(rank as Rank, 4, &[SUM, SUM], true);
    }
    for (rank, entered) in [(0, 1), (1, 0)] {
        let group = GroupCounters {
            name: "a".into(),
            backend: "gloo".into(),
            ranks: vec![0, 1],
            enqueued: entered,
            completed: 0,
        };
        ranks[rank].groups.push(group);
    }
    let verdict = find_hang_verdict(&ranks);
    assert_eq!(verdict.collective.as_ref().map(|c| c.group.as_str()), Some("a"));
    assert_eq!((verdict.kind, list_not_entered(&verdict)), (HangKind::NotEntered, vec![1]));
}

#[test]
fn the_backends_of_a_group_number_their_collectives_separately() {
    // Both ranks have called 9 collectives of NCCL. Rank 0 waits in the second one of Gloo.
    let build = |rank, of_gloo: &[(&str, &str)], pending| {
        let mut e = evidence(rank, 2, of_gloo, pending);
        let counters =
            GroupCounters { backend: "nccl".into(), enqueued: 9, completed: 9, ..e.groups[0].clone() };
        e.groups.insert(0, counters);
        e.entries.push(CollectiveEntry {
            group: "0".into(),
            seq: 9,
            operation: "nccl:all_gather".into(),
            retired: true,
            ..CollectiveEntry::default()
        });
        e
    };
    let verdict = find_hang_verdict(&[build(0, &[SUM, SUM], true), build(1, &[SUM], false)]);
    assert_eq!(verdict.collective.as_ref().map(|c| c.seq), Some(2), "{verdict:?}");
    assert_eq!((verdict.kind, list_not_entered(&verdict)), (HangKind::NotEntered, vec![1]));
}

/// Builds the evidence of a rank that waits in a transfer with another rank, if there is one.
fn transfer_evidence(rank: Rank, world: u32, transfer: Option<(TransferOperation, Rank)>) -> RankEvidence {
    let transfer = transfer.map(|(operation, peer)| Transfer { operation, peer });
    RankEvidence { transfer, ..evidence(rank, world, &[SUM], false) }
}

#[test]
fn a_rank_for_which_a_transfer_waits_is_named() {
    use TransferOperation::{Recv, Send};
    let ranks = [(Some((Recv, 1))), (Some((Recv, 2))), None]
        .into_iter()
        .zip(0..)
        .map(|(t, r)| transfer_evidence(r, 3, t));
    let verdict = find_hang_verdict(&ranks.collect::<Vec<_>>());
    insta::assert_snapshot!(describe_verdict(&verdict), @"rank 1 waits in recv for rank 2; rank 2 waits for a lock in load (/x/train.py:7)");
    let cycle = [transfer_evidence(0, 2, Some((Recv, 1))), transfer_evidence(1, 2, Some((Recv, 0)))];
    let verdict = find_hang_verdict(&cycle);
    assert_eq!((verdict.kind, verdict.calls.len()), (HangKind::DifferentOrder, 2));
    insta::assert_snapshot!(describe_verdict(&verdict), @"ranks have called different collectives: rank 0 recv in load (/x/train.py:7); rank 1 recv in load (/x/train.py:7); rank 1 waits for a lock in load (/x/train.py:7)");
    let matching = [transfer_evidence(0, 2, Some((Recv, 1))), transfer_evidence(1, 2, Some((Send, 0)))];
    assert_eq!(find_hang_verdict(&matching).kind, HangKind::AllEntered);
}

#[test]
fn recorded_transfers_name_ranks_within_their_group() {
    // The ranks 2 and 3 are 0 and 1 in group p.
    let build = |rank, operation: Option<&str>| {
        let mut e = evidence(rank, 4, &[SUM], false);
        e.groups.push(GroupCounters { name: "p".into(), ranks: vec![2, 3], ..GroupCounters::default() });
        e.entries.extend(operation.map(|operation| CollectiveEntry {
            group: "p".into(),
            p2p: true,
            operation: operation.to_owned(),
            ..CollectiveEntry::default()
        }));
        e
    };
    let ranks = [build(0, None), build(1, None), build(2, Some("nccl:recv 0<-1")), build(3, None)];
    let verdict = find_hang_verdict(&ranks);
    assert_eq!((verdict.kind, &verdict.entered[..]), (HangKind::NotEntered, &[2][..]));
    assert_eq!(list_not_entered(&verdict), [3]);
    let group = verdict.collective.as_ref().map(|c| (c.group.as_str(), c.operation.as_deref()));
    assert_eq!(group, Some(("p", Some("nccl:recv 0<-1"))));
    // The sender of a message from any rank is unknown.
    let any = [build(2, Some("gloo:recv 0<-?")), build(3, None)];
    assert_eq!(find_hang_verdict(&any).kind, HangKind::Unknown);
}

#[test]
fn a_rank_that_does_not_create_its_group_is_named() {
    let build = |rank, function: &str| {
        let frames = [collective_frame("_new_process_group_helper"), collective_frame(function)];
        let mut e = RankEvidence { rank, thread: Some(ThreadState::default()), ..RankEvidence::default() };
        e.stack = if function.is_empty() { Vec::new() } else { frames.to_vec() };
        e.stack.push(StackFrame { file: "/x/train.py".into(), line: 7, function: "main".into() });
        e
    };
    let ranks = [build(0, "init_process_group"), build(1, ""), build(2, "init_process_group")];
    insta::assert_snapshot!(describe_verdict(&find_hang_verdict(&ranks)), @"ranks 0, 2 wait in init_process_group for rank 1; rank 1 is in an unknown state in main (/x/train.py:7)");
    let mut unknown = ranks;
    unknown[1].stack.clear();
    assert_eq!(find_hang_verdict(&unknown).undetermined.len(), 1, "the stack of rank 1 is unknown");
    let mut created = [evidence(0, 2, &[SUM], false), evidence(1, 2, &[SUM], false)];
    created[0].stack.insert(0, collective_frame("new_group"));
    let verdict = find_hang_verdict(&created);
    assert_eq!((verdict.kind, list_not_entered(&verdict)), (HangKind::NotEntered, vec![1]));
}

/// Returns the kind of the verdict on two ranks that have called the last collective of a group
/// with these names, inputs and outputs.
fn compare_calls(first: (&str, &str, &str), second: (&str, &str, &str)) -> HangKind {
    let build = |rank, (name, inputs, outputs): (&str, &str, &str)| {
        let mut e = evidence(rank, 2, &[(name, inputs)], true);
        e.entries[0].outputs = outputs.to_owned();
        e
    };
    find_hang_verdict(&[build(0, first), build(1, second)]).kind
}

#[test]
fn sizes_are_compared_as_the_collective_requires() {
    let one = "[[4]]";
    for (first, second, kind) in [
        (
            ("_reduce_scatter_base", "[[8]]", one),
            ("_reduce_scatter_base", "[[8]]", "[[2]]"),
            HangKind::DifferentShapes,
        ),
        (("all_reduce", "[[]]", "[[]]"), ("all_reduce", one, one), HangKind::DifferentShapes),
        // Only the root passes the inputs of a scatter, and gets the outputs of a gather.
        (("scatter", "[[4], [4]]", one), ("scatter", "[]", one), HangKind::AllEntered),
        (("gather", one, "[[4], [4]]"), ("gather", one, "[]"), HangKind::AllEntered),
        // What one rank sends, the others receive.
        (("all_to_all", "[[6]]", "[[2]]"), ("all_to_all", "[[2]]", "[[6]]"), HangKind::AllEntered),
        (("all_to_all", "[[6]]", "[[2]]"), ("all_to_all", "[[2]]", "[[5]]"), HangKind::DifferentShapes),
        (("all_to_all", "[[6]]", "[[2]]"), ("all_gather", "[[6]]", "[[2]]"), HangKind::DifferentOrder),
    ] {
        assert_eq!(compare_calls(first, second), kind, "{first:?} {second:?}");
    }
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
        let verdict = find_hang_verdict(&evidence);
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

/// What torch's analyzer has found about one collective.
#[derive(serde::Deserialize)]
struct AnalyzerFinding {
    group: String,
    seq: i64,
    missing: Vec<Rank>,
    culprits: BTreeMap<Rank, String>,
}

/// The hangs in `tests/golden/hangs/nccl`, with the kinds of the verdicts, and the ranks that have
/// not entered the collective or have called another one than most ranks.
const NCCL_HANGS: [(&str, HangKind, &[Rank]); 11] = [
    ("subgroup_missing", HangKind::NotEntered, &[3]),
    ("two_missing", HangKind::NotEntered, &[1, 3]),
    ("dtypes", HangKind::DifferentShapes, &[2]),
    ("output_sizes", HangKind::DifferentShapes, &[3]),
    ("subgroup_order", HangKind::DifferentOrder, &[3]),
    ("all_to_all_totals", HangKind::DifferentShapes, &[1]),
    ("all_to_all_missing", HangKind::NotEntered, &[1]),
    ("coalesced_sizes", HangKind::DifferentShapes, &[1]),
    ("coalesced_missing", HangKind::NotEntered, &[1]),
    ("send_without_recv", HangKind::NotEntered, &[3]),
    ("batch_without_peer", HangKind::NotEntered, &[1]),
];

#[test]
fn verdicts_about_dumps_of_nccl_equal_those_of_the_analyzer_of_torch() {
    #[derive(serde::Deserialize)]
    struct RecordedHang {
        evidence: Vec<RankEvidence>,
        analyzer: Vec<AnalyzerFinding>,
    }
    let mut compared = 0;
    for (name, kind, named) in NCCL_HANGS {
        let path = format!("{}/../tests/golden/hangs/nccl/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).expect("a golden file");
        let RecordedHang { evidence, analyzer } = serde_json::from_str(&text).expect("valid");
        let verdict = find_hang_verdict(&evidence);
        assert_eq!(verdict.kind, kind, "{name}");
        let missing = list_not_entered(&verdict);
        // The first call is that of most ranks.
        let culprits: Vec<Rank> = verdict.calls.iter().skip(1).flat_map(|c| c.ranks.clone()).collect();
        let of_verdict: Vec<Rank> = missing.iter().chain(&culprits).copied().collect();
        assert_eq!(of_verdict, named, "{name}");
        if analyzer.is_empty() {
            // The analyzer fails if a rank does not take part in a batch of transfers.
            assert_eq!(name, "batch_without_peer");
            continue;
        }
        let collective = verdict.collective.expect("a collective");
        let is_equal = |finding: &AnalyzerFinding| {
            // The analyzer reports a rank as missing whose part of a coalesced collective differs.
            let mut ranks: Vec<Rank> = finding.missing.clone();
            ranks.extend(finding.culprits.keys());
            // A transfer has no number in the verdict.
            finding.group == collective.group
                && [0, finding.seq].contains(&collective.seq)
                && ranks == of_verdict
        };
        assert!(analyzer.iter().any(is_equal), "{name}");
        compared += 1;
    }
    assert_eq!(compared, NCCL_HANGS.len() - 1);
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
        let verdict = find_hang_verdict(&ranks);
        for place in &verdict.not_entered {
            let (n, answered) = last[place.rank as usize];
            prop_assert!(answered && n < newest);
        }
    }
}
