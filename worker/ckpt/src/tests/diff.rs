//! Whole checkpoints compared.
use super::{facts, fast_dir, save};
use crate::catalog::{Role, TensorInfo, Tie};
use crate::checkpoint::Checkpoint;
use crate::diff::{Cast, DiffOptions, Side, diff};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::source::{Request, Source};
use half::bf16;
use std::path::Path;

const WEIGHTS: [(&str, &[u64]); 3] = [("a", &[7, 3]), ("big", &[1100, 1000]), ("z", &[1])];

fn side<'a>(source: &'a dyn Source, ties: &'a [Tie]) -> Side<'a> {
    Side { source, ties }
}

/// Weights of another checkpoint, stored as bfloat16, under other names.
struct Cut<'a> {
    of: &'a Checkpoint,
    rename: fn(&str) -> Option<&'static str>,
}

impl Source for Cut<'_> {
    fn state(&self) -> crate::TrainingState {
        crate::TrainingState::default()
    }
    fn path(&self) -> &Path {
        Path::new("cut")
    }
    fn tensors(&self) -> Vec<TensorInfo> {
        let weights = self.of.tensors().filter(|t| t.role == Role::Weight);
        let renamed = weights.filter_map(|t| {
            Some(TensorInfo { name: (self.rename)(&t.name)?.to_owned(), dtype: Dtype::BF16, ..t })
        });
        renamed.collect()
    }
    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        for request in requests {
            let names = self.of.tensors().map(|t| t.name).collect::<Vec<_>>();
            let name = names.iter().find(|n| (self.rename)(n) == Some(request.name)).expect("asked for");
            let range = request.start_element..request.start_element + request.out.len() as u64;
            self.of.read_f32(name, request.role, range, request.out)?;
            request.out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        Ok(())
    }
    fn step(&self) -> Option<u64> {
        None
    }
}

#[test]
fn the_number_of_ranks_makes_no_difference() {
    let dir = fast_dir();
    let (one, three) = (facts(5, 1, &WEIGHTS), facts(5, 3, &WEIGHTS));
    let a = Checkpoint::open(&save(&dir.path().join("a"), &one).expect("saved").path).expect("open");
    let b = Checkpoint::open(&save(&dir.path().join("b"), &three).expect("saved").path).expect("open");
    let report = diff(side(&a, &[]), side(&b, &[]), &DiffOptions::default(), |_, _| {}).expect("read");
    assert!(report.is_equal(), "{report:?}");
    assert_eq!((report.compared, report.equal), (9, 9));
}

#[test]
fn steps_differ_everywhere_and_are_told_exactly() {
    let dir = fast_dir();
    let (old, new) = (facts(5, 2, &WEIGHTS), facts(6, 2, &WEIGHTS));
    let a = Checkpoint::open(&save(dir.path(), &old).expect("saved").path).expect("open");
    let b = Checkpoint::open(&save(dir.path(), &new).expect("saved").path).expect("open");
    let mut last = (0, 0);
    let options = DiffOptions { weights_only: true };
    let report = diff(side(&a, &[]), side(&b, &[]), &options, |done, all| last = (done, all)).expect("read");
    assert_eq!(last, (1_100_022, 1_100_022));
    let names: Vec<&str> = report.different.iter().map(|d| d.tensor.as_str()).collect();
    assert_eq!(names, ["weight/a", "weight/big", "weight/z"], "no moments");
    // the same by hand, for the tensor that is more than one window long
    let (x, y) = (
        super::values(Role::Weight, "big", &old, 1_100_000),
        super::values(Role::Weight, "big", &new, 1_100_000),
    );
    let abs: Vec<f64> = x.iter().zip(&y).map(|(x, y)| (f64::from(*x) - f64::from(*y)).abs()).collect();
    let found = &report.different[1].values;
    let max = abs.iter().copied().fold(0.0, f64::max);
    assert_eq!(found.max_abs, Some(max));
    assert_eq!(
        found.max_at.expect("there").element,
        abs.iter().position(|d| *d == max).expect("there") as u64
    );
    assert_eq!(found.differing, x.iter().zip(&y).filter(|(x, y)| x != y).count() as u64);
    assert!((found.mean_abs - abs.iter().sum::<f64>() / 1_100_000.0).abs() < 1e-12);
    assert_eq!(found.cast, None);
}

#[test]
fn a_cast_and_a_tie_are_seen_as_such() {
    let dir = fast_dir();
    let whole = facts(5, 2, &WEIGHTS);
    let a = Checkpoint::open(&save(dir.path(), &whole).expect("saved").path).expect("open");
    let b = Cut {
        of: &a,
        rename: |name| match name {
            "a" => Some("a"),
            "big" => Some("alias"),
            _ => None,
        },
    };
    let ties = [Tie { alias: "alias".into(), target: "big".into() }];
    let options = DiffOptions { weights_only: true };
    let report = diff(side(&a, &ties), side(&b, &[]), &options, |_, _| {}).expect("read");
    assert_eq!(report.tied, ["weight/alias = weight/big in a"]);
    assert_eq!(report.only_a, ["weight/z"], "big is compared under its second name");
    assert_eq!(report.dtypes.len(), 2);
    assert!(report.different.iter().all(|d| d.values.cast == Some(Cast::BIsBf16OfA)), "{report:?}");
    assert!(!report.is_equal());
}

#[test]
fn damage_is_an_error_not_a_difference() {
    let dir = fast_dir();
    let whole = facts(5, 1, &WEIGHTS);
    let a = save(&dir.path().join("a"), &whole).expect("saved").path;
    let b = save(&dir.path().join("b"), &whole).expect("saved").path;
    let shard = b.join("shard-00000-of-00001.safetensors");
    let mut bytes = std::fs::read(&shard).expect("there");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).expect("written");
    let (a, b) = (Checkpoint::open(&a).expect("open"), Checkpoint::open(&b).expect("open"));
    assert!(diff(side(&a, &[]), side(&b, &[]), &DiffOptions::default(), |_, _| {}).is_err());
}
