//! Tests of hang verdicts.
use super::*;
use crate::controller::hang_verdict_text::describe_verdict;
use proptest::prelude::*;
use protocol::hang::{CollectiveTimeout, GroupCounters};

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
    silent.stack.insert(0, StackFrame { file: "/torch/distributed/x.py".into(), ..Default::default() });
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
