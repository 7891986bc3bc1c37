//! `launch ckpt diff`: what differs between two checkpoints.
use super::{Failure, Progress, describe::clean, open, print, say};
use ckpt::{Cast, DiffOptions, DiffReport, Found, Side, TensorDiff, Tie};
use contract::exit;
use serde_json::Value;
use std::path::Path;

/// Differing tensors that are shown one by one.
const SHOWN: usize = 40;

/// Runs it; exit code 0 when they are equal, 1 when not.
pub(super) fn diff(a: &Path, b: &Path, weights_only: bool, json: bool) -> Result<u8, Failure> {
    let (a, b) = (open(a)?, open(b)?);
    let mut progress = Progress::of("comparing");
    let options = DiffOptions { weights_only };
    let report = ckpt::diff(side(&a), side(&b), &options, |done, total| progress.show(done, total));
    progress.end();
    let report = report?;
    if json {
        let mut value = serde_json::to_value(&report).unwrap_or(Value::Null);
        value["is_equal"] = report.is_equal().into();
        print(&format!("{value}\n"))?;
    } else {
        print(&table(&report))?;
        if let Some(why) = explained(&report) {
            say(format_args!("note: {why}"));
        }
    }
    Ok(if report.is_equal() { exit::DONE } else { exit::FAILED })
}

fn side(found: &Found) -> Side<'_> {
    let ties: &[Tie] = match found {
        Found::Native(newest) => &newest.checkpoint.facts().model.ties,
        Found::Foreign(foreign) => &foreign.facts().ties,
    };
    Side { source: found.source(), ties }
}

fn table(report: &DiffReport) -> String {
    let mut lines = vec![format!("a  {}", report.a.display()), format!("b  {}", report.b.display())];
    let mut list = |what: &str, names: &[String]| {
        lines.extend(names.iter().map(|name| format!("{what}  {}", clean(name))));
    };
    list("only in a   ", &report.only_a);
    list("only in b   ", &report.only_b);
    list("tied        ", &report.tied);
    list("not compared", &report.not_compared);
    for s in &report.shapes {
        lines.push(format!("other shape   {}  a {:?}, b {:?}", clean(&s.tensor), s.a, s.b));
    }
    for d in &report.other_bytes {
        lines.push(format!(
            "differs       {}  {} of {} elements ({}), first {}",
            clean(&d.tensor),
            d.differing,
            d.shape.iter().product::<u64>(),
            d.dtype,
            index(d.first, &d.shape)
        ));
    }
    for d in report.different.iter().take(SHOWN) {
        lines.push(row(d));
    }
    if report.different.len() > SHOWN {
        lines
            .push(format!("… and {} more tensors (all of them with --json)", report.different.len() - SHOWN));
    }
    lines.push(format!(
        "{}: {} of {} tensors have the same bits",
        if report.is_equal() { "equal" } else { "different" },
        report.equal,
        report.compared
    ));
    lines.join("\n") + "\n"
}

fn row(d: &TensorDiff) -> String {
    let v = &d.values;
    let mut text = format!(
        "differs       {}  {} of {} elements, first {} ({:e} / {:e})",
        clean(&d.tensor),
        v.differing,
        v.elements,
        index(v.first.element, &d.shape),
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
        text += &format!("; {}", rounding(cast));
    }
    text
}

/// A row-major index as one per dimension.
fn index(mut element: u64, shape: &[u64]) -> String {
    let mut place: Vec<u64> = Vec::with_capacity(shape.len());
    for &size in shape.iter().rev() {
        place.push(element % size.max(1));
        element /= size.max(1);
    }
    place.reverse();
    format!("{place:?}")
}

fn rounding(cast: Cast) -> &'static str {
    match cast {
        Cast::BIsBf16OfA => "b is a rounded to bf16",
        Cast::BIsF16OfA => "b is a rounded to fp16",
        Cast::AIsBf16OfB => "a is b rounded to bf16",
        Cast::AIsF16OfB => "a is b rounded to fp16",
    }
}

/// The one reason behind all differing elements, if there is one.
fn explained(report: &DiffReport) -> Option<String> {
    let cast = report.different.first()?.values.cast?;
    let all = report.different.iter().all(|d| d.values.cast == Some(cast));
    all.then(|| format!("every difference in values is one rounding: {}", rounding(cast)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::saved;
    use super::*;

    #[test]
    fn elements_have_their_indices() {
        assert_eq!(index(0, &[]), "[]");
        assert_eq!(index(7, &[2, 4]), "[1, 3]");
    }

    #[test]
    fn the_exit_code_says_whether_they_are_equal() {
        let dir = tempfile::tempdir().expect("a directory");
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden");
        let ours = saved(dir.path());
        for json in [false, true] {
            assert_eq!(diff(&ours, &ours, false, json).ok(), Some(exit::DONE));
            assert_eq!(diff(&ours, &golden.join("z2_frozen"), false, json).ok(), Some(exit::FAILED));
        }
        assert!(diff(&ours, &dir.path().join("nowhere"), false, false).is_err());
    }

    #[test]
    fn rows_name_the_first_element_and_the_cause() {
        let values = ckpt::Values {
            differing: 3,
            elements: 8,
            first: ckpt::At { element: 5, a: 1.0, b: 1.5 },
            max_abs: Some(0.5),
            max_at: None,
            mean_abs: 0.125,
            max_ulp: 4,
            not_finite: 0,
            cast: Some(Cast::BIsBf16OfA),
        };
        let row = row(&TensorDiff { tensor: "weight/w".into(), shape: vec![2, 4], values });
        assert_eq!(
            row,
            "differs       weight/w  3 of 8 elements, first [1, 1] (1e0 / 1.5e0), |a-b| max 5.000e-1 mean 1.250e-1, max 4 ulp; b is a rounded to bf16"
        );
    }
}
