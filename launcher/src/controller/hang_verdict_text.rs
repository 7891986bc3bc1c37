//! Defines [`describe_verdict`], which describes in one line which ranks of a hanging job keep the
//! others waiting, and what these ranks do.
use crate::format::format_ranks;
use jobspec::ids::Rank;
use protocol::hang::{
    CollectiveCallOfRanks, CollectiveTimeout, HangKind, HangVerdict, RankGpuFault, RankPosition,
};

/// The largest number of ranks, calls or errors that the line about a hang lists.
const MAX_LISTED_ITEMS: usize = 8;

/// Describes in one line which ranks block a hanging job, and where in their program these ranks
/// are.
pub(super) fn describe_verdict(verdict: &HangVerdict) -> String {
    let collective = verdict.collective.as_ref().map_or_else(String::new, |c| {
        let operation = c.operation.as_deref().unwrap_or("a collective");
        match (c.group.as_str(), c.seq) {
            ("", _) => operation.to_owned(),
            (group, 0) => format!("{operation} of group {group}"),
            (group, seq) => format!("{operation} (number {seq} of group {group})"),
        }
    });
    let ranks_of = |places: &[RankPosition]| places.iter().map(|place| place.rank).collect::<Vec<_>>();
    let waiting = match verdict.entered.as_slice() {
        [rank] => format!("rank {rank} waits"),
        ranks => format!("{} wait", format_ranks_with_noun(ranks)),
    };
    let (not_entered, undetermined) = (ranks_of(&verdict.not_entered), ranks_of(&verdict.undetermined));
    let (has, undetermined_has) = (choose_has_or_have(&not_entered), choose_has_or_have(&undetermined));
    let mut clauses = match verdict.kind {
        HangKind::NotEntered if not_entered.is_empty() => vec![format!(
            "{waiting} in {collective}; unknown whether {} {undetermined_has} entered it",
            format_ranks_with_noun(&undetermined)
        )],
        HangKind::NotEntered if verdict.collective.as_ref().is_some_and(|c| c.seq == 0) => {
            vec![format!("{waiting} in {collective} for {}", format_ranks_with_noun(&not_entered))]
        }
        HangKind::NotEntered => {
            vec![format!(
                "{} {has} not entered {collective}, in which {waiting}",
                format_ranks_with_noun(&not_entered)
            )]
        }
        HangKind::DifferentOrder => {
            vec![format!("ranks have called different collectives: {}", format_calls(verdict))]
        }
        HangKind::DifferentShapes => {
            vec![format!(
                "ranks have called {collective} with different shapes or types: {}",
                format_calls(verdict)
            )]
        }
        HangKind::AllEntered => vec![format!("all ranks have entered {collective}, which does not complete")],
        HangKind::Unknown => vec!["no rank is known to wait in a collective".to_owned()],
    };
    clauses.extend(join_first_items(&verdict.not_entered, |place| place.to_string()));
    if verdict.kind == HangKind::NotEntered && !not_entered.is_empty() && !undetermined.is_empty() {
        clauses.push(format!(
            "unknown whether {} {undetermined_has} entered it",
            format_ranks_with_noun(&undetermined)
        ));
    }
    clauses.extend(join_first_items(&verdict.undetermined, |place| place.to_string()));
    let faults = join_first_items(&verdict.gpu_faults, RankGpuFault::to_string);
    clauses.extend(faults.map(|faults| format!("GPU errors: {faults}")));
    let warnings = join_first_items(&verdict.nccl_warnings, |w| format!("rank {}: {}", w.rank, w.text));
    clauses.extend(warnings.map(|warnings| format!("NCCL warnings: {warnings}")));
    let describe = |t: &CollectiveTimeout| format!("rank {}: {} (number {})", t.rank, t.operation, t.seq);
    let timeouts = join_first_items(&verdict.collective_timeouts, describe);
    clauses.extend(timeouts.map(|timeouts| format!("timeouts of torch: {timeouts}")));
    clauses.join("; ")
}

/// Describes how ranks of a hanging job have called a collective in different ways, for example
/// with different inputs.
fn format_calls(verdict: &HangVerdict) -> String {
    let describe = |call: &CollectiveCallOfRanks| {
        let CollectiveCallOfRanks { ranks, group, operation, inputs, dtypes, outputs, frame } = call;
        let arguments = [inputs, dtypes].into_iter().filter(|text| !text.is_empty());
        let arguments: String = arguments.map(|text| format!(" {text}")).collect();
        // The outputs of most collectives have the sizes of the inputs.
        let is_needed = !outputs.is_empty() && outputs != inputs;
        let result = if is_needed { format!(" to {outputs}") } else { String::new() };
        let of_group = if group.is_empty() { String::new() } else { format!(" of group {group}") };
        let place = frame.as_ref().map_or_else(String::new, |frame| format!(" in {frame}"));
        format!("{} {operation}{arguments}{result}{of_group}{place}", format_ranks_with_noun(ranks))
    };
    join_first_items(&verdict.calls, describe).unwrap_or_default()
}

/// Joins the first [`MAX_LISTED_ITEMS`] items of a list with commas, followed by the number of the
/// others. Returns `None` if the list is empty.
fn join_first_items<T>(items: &[T], format: impl Fn(&T) -> String) -> Option<String> {
    let mut texts: Vec<String> = items.iter().take(MAX_LISTED_ITEMS).map(format).collect();
    if items.len() > MAX_LISTED_ITEMS {
        texts.push(format!("and {} more", items.len() - MAX_LISTED_ITEMS));
    }
    (!texts.is_empty()).then(|| texts.join("; "))
}

/// Formats a list of rank numbers as ranges after the noun `rank` or `ranks`, such as `rank 1` or
/// `ranks 0-3,7`.
fn format_ranks_with_noun(ranks: &[Rank]) -> String {
    match ranks {
        [rank] => format!("rank {rank}"),
        ranks => format!("ranks {}", format_ranks(ranks)),
    }
}

/// Returns the verb of a sentence about these ranks: `has` for a single rank, and otherwise `have`.
fn choose_has_or_have(ranks: &[Rank]) -> &'static str {
    if ranks.len() == 1 { "has" } else { "have" }
}
