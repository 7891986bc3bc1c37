//! Reads from a DeepSpeed model or optimizer file the values that a conversion copies unchanged.
use crate::codec::pickle::{PickleView, PythonObject, StoredTensor};
use crate::codec::torch_file::{TensorView, TorchFile};
use std::cell::RefCell;

/// Limit on the number of Python values that a conversion copies from one DeepSpeed file.
const COPIED_VALUES_MAX: usize = 1 << 20;
/// Keys of a DeepSpeed model file whose values must be computed for the converted checkpoint, and
/// are therefore not copied from the source.
const REGENERATED_MODEL_KEYS: [&str; 13] = [
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "universal_checkpoint_info",
];
/// Keys of a DeepSpeed optimizer file whose values a conversion copies unchanged.
const COPIED_OPTIMIZER_KEYS: [&str; 4] = ["loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"];

/// Python values of a DeepSpeed file with their keys, in the order in which the file stores them.
type NamedObjects = Vec<(String, PythonObject)>;

/// The values of a DeepSpeed model file that a conversion copies unchanged.
#[derive(Default)]
pub(crate) struct ModelPassthrough {
    /// Keys and values of the entries that a conversion copies instead of generating them.
    pub(super) other_entries: Vec<(String, PythonObject)>,
    /// State of the learning rate scheduler.
    pub(super) scheduler: PythonObject,
    /// The tensors in `other_entries` and `scheduler`, which refer to them by index.
    pub(super) tensors: Vec<TensorView>,
    /// Keys of entries that cannot be copied, such as entries with byte strings.
    pub(super) dropped: Vec<String>,
}

/// The values of a DeepSpeed optimizer file that a conversion copies unchanged.
#[derive(Default)]
pub(crate) struct OptimizerPassthrough {
    /// For each parameter group, its hyper-parameters and the indices of its flat groups.
    pub(super) groups: Vec<(NamedObjects, Vec<u64>)>,
    /// The entries of the file whose keys are in [`COPIED_OPTIMIZER_KEYS`].
    pub(super) other_entries: NamedObjects,
}

impl ModelPassthrough {
    /// Reads the values of a DeepSpeed model file that a conversion copies unchanged, without the
    /// data of tensors.
    pub(super) fn read(file: &TorchFile) -> ModelPassthrough {
        let tensors = RefCell::new(Vec::new());
        let tensor = |value: PickleView<'_>| {
            let view = file.parse_tensor(value).ok().flatten().filter(TensorView::is_contiguous)?;
            let (dtype, shape) = (view.dtype, view.shape.clone());
            let stored = view.element_count();
            let mut tensors = tensors.borrow_mut();
            tensors.push(view);
            Some(PythonObject::Tensor(StoredTensor {
                storage: tensors.len() - 1,
                dtype,
                storage_elements: stored,
                shape,
            }))
        };
        let mut found = ModelPassthrough::default();
        let mut left = COPIED_VALUES_MAX;
        for (key, value) in file.value().as_pairs().into_iter().flatten() {
            let Some(key) = key.as_short_str() else { continue };
            let scheduler = key == "lr_scheduler";
            if REGENERATED_MODEL_KEYS.contains(&key) && !scheduler {
                continue;
            }
            match value.to_object(&mut left, &tensor) {
                Some(value) if scheduler => found.scheduler = value,
                Some(value) => found.other_entries.push((key.to_owned(), value)),
                None => found.dropped.push(key.to_owned()),
            }
        }
        found.tensors = tensors.into_inner();
        found
    }
}

impl OptimizerPassthrough {
    /// Reads the values of a DeepSpeed optimizer file that a conversion copies unchanged. `root` is
    /// the state of DeepSpeed's optimizer, and `base` the state of the torch optimizer that it
    /// wraps.
    pub(super) fn read(root: PickleView<'_>, base: PickleView<'_>) -> OptimizerPassthrough {
        let mut left = COPIED_VALUES_MAX;
        let mut copied = |v: PickleView<'_>| v.to_object(&mut left, &|_| None);
        let mut groups = Vec::new();
        let listed = match base.as_items() {
            // an elastic checkpoint has a list of states and no parameter groups
            Some(_) => None,
            None => base.get("param_groups"),
        };
        for group in listed.and_then(PickleView::as_items).iter().flat_map(|g| g.iter()) {
            let mut options = Vec::new();
            for (key, value) in group.as_pairs().into_iter().flatten() {
                if let (Some(key), Some(value)) =
                    (key.as_short_str().filter(|k| *k != "params"), copied(value))
                {
                    options.push((key.to_owned(), value));
                }
            }
            let flats = group.get("params").and_then(PickleView::as_items).and_then(|p| p.to_counts());
            groups.push((options, flats.unwrap_or_default()));
        }
        let kept = |key: &&str| Some(((*key).to_owned(), copied(root.get(key)?)?));
        OptimizerPassthrough {
            other_entries: COPIED_OPTIMIZER_KEYS.iter().filter_map(kept).collect(),
            groups,
        }
    }
}
