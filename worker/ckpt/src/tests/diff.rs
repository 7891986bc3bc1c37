//! Tests that a comparison of two checkpoints reports all differences and no others.
use super::{make_facts, make_memory_dir, save_checkpoint};
use crate::catalog::{F32ReadRequest, TensorInfo, TensorSource, TiedWeight};
use crate::diff::{DiffOptions, DiffSide, RoundingCast, diff_checkpoints};
use crate::error::Result;
use crate::layout::native::Checkpoint;
use crate::tensor::{Dtype, TensorRole};
use half::bf16;
use std::path::Path;

const WEIGHTS: [(&str, &[u64]); 3] = [("a", &[7, 3]), ("big", &[1100, 1000]), ("z", &[1])];

fn make_diff_side<'a>(source: &'a dyn TensorSource, ties: &'a [TiedWeight]) -> DiffSide<'a> {
    DiffSide { source, ties }
}

/// Presents the weights of a checkpoint rounded to BF16 and under other names. `rename` returns the
/// new name of a weight, or `None` to leave out the weight.
struct RenamedBf16Weights<'a> {
    inner: &'a Checkpoint,
    rename: fn(&str) -> Option<&'static str>,
}

impl TensorSource for RenamedBf16Weights<'_> {
    fn training_state(&self) -> crate::TrainingState {
        crate::TrainingState::default()
    }
    fn path(&self) -> &Path {
        Path::new("cut")
    }
    fn tensors(&self) -> Vec<TensorInfo> {
        let weights = self.inner.tensors().filter(|t| t.role == TensorRole::Weight);
        let renamed = weights.filter_map(|t| {
            Some(TensorInfo { name: (self.rename)(&t.name)?.to_owned(), dtype: Dtype::BF16, ..t })
        });
        renamed.collect()
    }
    fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        for request in requests {
            let names = self.inner.tensors().map(|t| t.name).collect::<Vec<_>>();
            let name = names.iter().find(|n| (self.rename)(n) == Some(request.name)).expect("a known name");
            let range = request.start_element..request.start_element + request.out.len() as u64;
            self.inner.read_f32(name, request.role, range, request.out)?;
            request.out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        Ok(())
    }
    fn completed_steps(&self) -> Option<u64> {
        None
    }
}

#[test]
fn checkpoints_of_different_world_sizes_are_equal() {
    let dir = make_memory_dir();
    let (one, three) = (make_facts(5, 1, &WEIGHTS), make_facts(5, 3, &WEIGHTS));
    let a =
        Checkpoint::open(&save_checkpoint(&dir.path().join("a"), &one).expect("saved").path).expect("open");
    let b =
        Checkpoint::open(&save_checkpoint(&dir.path().join("b"), &three).expect("saved").path).expect("open");
    let report = diff_checkpoints(
        make_diff_side(&a, &[]),
        make_diff_side(&b, &[]),
        &DiffOptions::default(),
        |_, _| {},
    )
    .expect("read");
    assert!(report.is_equal(), "{report:?}");
    assert_eq!((report.compared, report.equal), (9, 9));
}

#[test]
fn differences_between_two_steps_are_counted_exactly() {
    let dir = make_memory_dir();
    let (old, new) = (make_facts(5, 2, &WEIGHTS), make_facts(6, 2, &WEIGHTS));
    let a = Checkpoint::open(&save_checkpoint(dir.path(), &old).expect("saved").path).expect("open");
    let b = Checkpoint::open(&save_checkpoint(dir.path(), &new).expect("saved").path).expect("open");
    let mut last = (0, 0);
    let options = DiffOptions { weights_only: true };
    let report =
        diff_checkpoints(make_diff_side(&a, &[]), make_diff_side(&b, &[]), &options, |done, total| {
            last = (done, total)
        })
        .expect("read");
    assert_eq!(last, (1_100_022, 1_100_022));
    let names: Vec<&str> = report.different.iter().map(|d| d.tensor.as_str()).collect();
    assert_eq!(names, ["weight/a", "weight/big", "weight/z"], "no moments");
    // compare with a direct computation, for the tensor that is longer than one window
    let (x, y) = (
        crate::tests::compute_values(TensorRole::Weight, "big", &old, 1_100_000),
        crate::tests::compute_values(TensorRole::Weight, "big", &new, 1_100_000),
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
fn rounding_and_ties_are_recognized() {
    let dir = make_memory_dir();
    let facts = make_facts(5, 2, &WEIGHTS);
    let a = Checkpoint::open(&save_checkpoint(dir.path(), &facts).expect("saved").path).expect("open");
    let b = RenamedBf16Weights {
        inner: &a,
        rename: |name| match name {
            "a" => Some("a"),
            "big" => Some("alias"),
            _ => None,
        },
    };
    let ties = [TiedWeight { alias: "alias".into(), target: "big".into() }];
    let options = DiffOptions { weights_only: true };
    let report = diff_checkpoints(make_diff_side(&a, &ties), make_diff_side(&b, &[]), &options, |_, _| {})
        .expect("read");
    assert_eq!(report.tied, ["weight/alias = weight/big in a"]);
    assert_eq!(report.only_a, ["weight/z"], "big is compared under its second name");
    assert_eq!(report.dtypes.len(), 2);
    assert!(report.different.iter().all(|d| d.values.cast == Some(RoundingCast::BIsBf16OfA)), "{report:?}");
    assert!(!report.is_equal());
}

#[test]
fn damage_is_an_error_and_not_a_difference() {
    let dir = make_memory_dir();
    let facts = make_facts(5, 1, &WEIGHTS);
    let a = save_checkpoint(&dir.path().join("a"), &facts).expect("saved").path;
    let b = save_checkpoint(&dir.path().join("b"), &facts).expect("saved").path;
    let shard = b.join("shard-00000-of-00001.safetensors");
    let mut bytes = std::fs::read(&shard).expect("there");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).expect("written");
    let (a, b) = (Checkpoint::open(&a).expect("open"), Checkpoint::open(&b).expect("open"));
    assert!(
        diff_checkpoints(
            make_diff_side(&a, &[]),
            make_diff_side(&b, &[]),
            &DiffOptions::default(),
            |_, _| {}
        )
        .is_err()
    );
}
