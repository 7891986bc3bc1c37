//! `launch ckpt diff`: compares two checkpoints of any format.
use super::{
    open::open_checkpoint,
    output::{report_to_json, run_with_progress, write_stderr_line},
};
use crate::cmd::output::{print_json, print_text};
use ckpt::{DiffOptions, DiffReport, DiffSide, FloatTensorDiff, OpenedCheckpoint, RoundingCast, TiedWeight};
use clap::Args;
use diagnostic::terminal_text::filter_line;
use protocol::exit;
use std::path::PathBuf;

/// The largest number of differing tensors that the text output lists. The JSON output lists all.
const MAX_LISTED_TENSORS: usize = 40;

/// Arguments of `launch ckpt diff`.
#[derive(Debug, Args)]
pub(super) struct DiffArgs {
    /// First checkpoint
    a: PathBuf,
    /// Second checkpoint
    b: PathBuf,
    /// Compare only the weights, not the optimizer states
    #[arg(long)]
    weights_only: bool,
}

/// Runs `launch ckpt diff`: compares two checkpoints and prints the differences. Returns exit code
/// 0 if they are equal and 1 if they differ.
pub(super) fn run(args: DiffArgs, json: bool) -> diagnostic::Result<u8> {
    let (a, b) = (open_checkpoint(&args.a)?, open_checkpoint(&args.b)?);
    let options = DiffOptions { weights_only: args.weights_only };
    let report = run_with_progress("comparing", |progress| {
        ckpt::diff_checkpoints(to_diff_side(&a), to_diff_side(&b), &options, progress)
    })?;
    if json {
        let mut value = report_to_json(&report);
        value["is_equal"] = report.is_equal().into();
        print_json(&value)?;
    } else {
        print_text(&format_diff_report(&report))?;
        if let Some(note) = describe_common_rounding(&report) {
            write_stderr_line(format_args!("note: {note}"));
        }
    }
    Ok(if report.is_equal() { exit::DONE } else { exit::FAILED })
}

/// Returns an opened checkpoint in the form that the comparison of two checkpoints expects: its
/// tensors and its tied weights.
fn to_diff_side(found: &OpenedCheckpoint) -> DiffSide<'_> {
    let ties: &[TiedWeight] = match found {
        OpenedCheckpoint::Native(newest) => &newest.checkpoint.run_facts().model.ties,
        OpenedCheckpoint::External(external) => &external.facts().state.ties,
    };
    DiffSide { source: found.tensor_source(), ties }
}

/// Formats the result of comparing two checkpoints as text, with one line for each tensor that
/// differs and a summary.
fn format_diff_report(report: &DiffReport) -> String {
    let mut lines = vec![format!("a  {}", report.a.display()), format!("b  {}", report.b.display())];
    let mut list = |what: &str, names: &[String]| {
        lines.extend(names.iter().map(|name| format!("{what}  {}", filter_line(name))));
    };
    list("only in a   ", &report.only_a);
    list("only in b   ", &report.only_b);
    list("tied        ", &report.tied);
    list("not compared", &report.not_compared);
    for s in &report.shapes {
        lines.push(format!("other shape   {}  a {:?}, b {:?}", filter_line(&s.tensor), s.a, s.b));
    }
    for d in &report.other_bytes {
        lines.push(format!(
            "differs       {}  {} of {} elements ({}), first {}",
            filter_line(&d.tensor),
            d.differing,
            d.shape.iter().product::<u64>(),
            d.dtype,
            format_index(d.first, &d.shape)
        ));
    }
    for d in report.different.iter().take(MAX_LISTED_TENSORS) {
        lines.push(format_tensor_diff(d));
    }
    if report.different.len() > MAX_LISTED_TENSORS {
        lines.push(format!(
            "… and {} more tensors (all of them with --json)",
            report.different.len() - MAX_LISTED_TENSORS
        ));
    }
    lines.push(format!(
        "{}: {} of {} tensors are bit-equal",
        if report.is_equal() { "equal" } else { "different" },
        report.equal,
        report.compared
    ));
    lines.join("\n") + "\n"
}

/// Formats the differences between the two values of one tensor as a line: the number of differing
/// elements, the first difference, and the largest and mean difference.
fn format_tensor_diff(d: &FloatTensorDiff) -> String {
    let v = &d.values;
    let mut text = format!(
        "differs       {}  {} of {} elements, first {} ({:e} / {:e})",
        filter_line(&d.tensor),
        v.differing,
        v.elements,
        format_index(v.first.element, &d.shape),
        v.first.a,
        v.first.b
    );
    if let Some(max) = v.max_abs {
        text += &format!(", |a-b| max {max:.3e} mean {:.3e}, max {} ulp", v.mean_abs, v.max_ulp);
    }
    if v.not_finite > 0 {
        text += &format!(", {} with NaN or infinity", v.not_finite);
    }
    if let Some(cast) = v.cast {
        text += &format!("; {}", describe_rounding(cast));
    }
    text
}

/// Converts the row-major index of an element to one index for each dimension, and formats the
/// indices as `[1, 3]`.
fn format_index(mut element: u64, shape: &[u64]) -> String {
    let mut indices: Vec<u64> = Vec::with_capacity(shape.len());
    for &size in shape.iter().rev() {
        indices.push(element % size.max(1));
        element /= size.max(1);
    }
    indices.reverse();
    format!("{indices:?}")
}

/// Returns a text that states which of the two compared checkpoints has the rounded values of the
/// other one, and the dtype of the rounding. Example: `b is a rounded to bf16`.
fn describe_rounding(cast: RoundingCast) -> &'static str {
    match cast {
        RoundingCast::BIsBf16OfA => "b is a rounded to bf16",
        RoundingCast::BIsF16OfA => "b is a rounded to fp16",
        RoundingCast::AIsBf16OfB => "a is b rounded to bf16",
        RoundingCast::AIsF16OfB => "a is b rounded to fp16",
    }
}

/// Returns a text about the rounding (such as from fp32 to bf16) by which all differing tensors of
/// two checkpoints differ. Returns `None` if no single rounding explains all differences.
fn describe_common_rounding(report: &DiffReport) -> Option<String> {
    let cast = report.different.first()?.values.cast?;
    let is_common = report.different.iter().all(|d| d.values.cast == Some(cast));
    is_common.then(|| format!("one rounding explains all different values: {}", describe_rounding(cast)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::save_sample_checkpoint;
    use super::*;

    #[test]
    fn an_element_has_an_index_for_each_dimension() {
        assert_eq!(format_index(0, &[]), "[]");
        assert_eq!(format_index(7, &[2, 4]), "[1, 3]");
    }

    #[test]
    fn the_exit_code_reports_whether_checkpoints_are_equal() {
        let dir = tempfile::tempdir().expect("a directory");
        let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden");
        let ours = save_sample_checkpoint(dir.path());
        let diff = |b: PathBuf, json| run(DiffArgs { a: ours.clone(), b, weights_only: false }, json).ok();
        for json in [false, true] {
            assert_eq!(diff(ours.clone(), json), Some(exit::DONE));
            assert_eq!(diff(golden.join("z2_frozen"), json), Some(exit::FAILED));
        }
        assert_eq!(diff(dir.path().join("nowhere"), false), None);
    }

    #[test]
    fn a_row_shows_the_first_differing_element_and_the_rounding() {
        let values = ckpt::ElementDiff {
            differing: 3,
            elements: 8,
            first: ckpt::ElementPair { element: 5, a: 1.0, b: 1.5 },
            max_abs: Some(0.5),
            max_at: None,
            mean_abs: 0.125,
            max_ulp: 4,
            not_finite: 0,
            cast: Some(RoundingCast::BIsBf16OfA),
        };
        let row =
            format_tensor_diff(&FloatTensorDiff { tensor: "weight/w".into(), shape: vec![2, 4], values });
        assert_eq!(
            row,
            "differs       weight/w  3 of 8 elements, first [1, 1] (1e0 / 1.5e0), |a-b| max 5.000e-1 mean 1.250e-1, max 4 ulp; b is a rounded to bf16"
        );
    }
}
