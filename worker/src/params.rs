//! [`ParamUnit`], [`ParamSpec`]: names, shapes and initialisation of parameters, and their grouping
//! into units. Values are stored elsewhere.
//!
//! A parameter is identified by its Hugging Face name. A [`ParamUnit`] is the group of parameters
//! that is gathered, used and reduced together: one flat vector, its tensors one after another
//! without padding.
use device::{Ops, ViewMut};

/// The distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamInit {
    /// Normal with mean 0 and the given standard deviation.
    Normal(f32),
    /// Every element is 1.
    Ones,
    /// Every element is 0.
    Zeros,
    /// Uniform between minus and plus the given bound.
    Uniform(f32),
}

/// One logical tensor of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face name, unique in the model.
    pub name: String,
    /// Sizes of the dimensions; elements are stored in row-major order.
    pub shape: Vec<usize>,
    /// The distribution of its initial values.
    pub init: ParamInit,
}

impl ParamSpec {
    /// Number of elements: the product of the shape.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The owner ranks of a unit, among which it is sharded: `first`, `first + stride`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerRanks {
    /// The lowest owner; less than `stride`.
    pub first: usize,
    /// The distance between two owners; 1 if every rank is an owner.
    pub stride: usize,
}

impl OwnerRanks {
    /// Every rank.
    pub const ALL: OwnerRanks = OwnerRanks { first: 0, stride: 1 };

    /// Whether `rank` is an owner.
    pub fn contains(&self, rank: usize) -> bool {
        rank % self.stride == self.first
    }

    /// Number of owners among the ranks below `rank`.
    pub fn count_below(&self, rank: usize) -> usize {
        (rank + self.stride - 1 - self.first) / self.stride
    }

    /// Whether every rank is an owner.
    pub fn includes_all(&self) -> bool {
        self.stride == 1
    }
}

/// A parameter unit: tensors that are gathered, used and released together, in one flat vector.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamUnit {
    /// Name for messages, e.g. `layer 3`.
    pub name: String,
    /// The tensors in the order of the flat vector.
    pub params: Vec<ParamSpec>,
    /// The ranks that have a shard of the unit.
    pub owners: OwnerRanks,
    /// Present if the unit holds experts.
    experts: Option<ExpertTensors>,
    offsets: Vec<usize>,
    /// For each tensor: whether it is trained.
    trained: Vec<bool>,
}

/// The layer and canonical order of the tensors of an expert unit.
#[derive(Clone, Debug, PartialEq)]
struct ExpertTensors {
    layer: usize,
    /// For each tensor: its position among the tensors of all experts.
    positions: Vec<usize>,
}

impl ParamUnit {
    /// A unit of these tensors that all ranks own and train.
    pub fn new(name: impl Into<String>, params: Vec<ParamSpec>) -> Self {
        let mut offsets = Vec::with_capacity(params.len() + 1);
        let mut end = 0;
        offsets.push(0);
        for p in &params {
            end += p.len();
            offsets.push(end);
        }
        let trained = vec![true; params.len()];
        ParamUnit { name: name.into(), params, owners: OwnerRanks::ALL, experts: None, offsets, trained }
    }

    /// A unit of experts of `layer` that only `owners` have. `positions` orders the tensors of all
    /// experts independently of the ranks that own them.
    ///
    /// # Panics
    /// The number of positions differs from the number of tensors.
    pub fn with_experts(
        name: impl Into<String>,
        params: Vec<ParamSpec>,
        owners: OwnerRanks,
        layer: usize,
        positions: Vec<usize>,
    ) -> Self {
        assert_eq!(params.len(), positions.len(), "each tensor needs one position");
        ParamUnit {
            owners,
            experts: Some(ExpertTensors { layer, positions }),
            ..ParamUnit::new(name, params)
        }
    }

    /// The layer whose experts the unit holds; `None` for a dense unit.
    pub fn expert_layer(&self) -> Option<usize> {
        self.experts.as_ref().map(|e| e.layer)
    }

    /// Whether the unit holds experts.
    pub fn holds_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// Decides by name which tensors are trained. Gradients and optimizer states then have the
    /// layout of the *trained vector*: only the trained tensors, in the order of the flat vector.
    pub fn set_trained(&mut self, trained: impl Fn(&str) -> bool) {
        self.trained = self.params.iter().map(|p| trained(&p.name)).collect();
    }

    /// Whether tensor `i` is trained.
    pub fn is_trained(&self, i: usize) -> bool {
        self.trained[i]
    }

    /// Whether at least one tensor is trained.
    pub fn any_trained(&self) -> bool {
        self.trained.contains(&true)
    }

    /// Whether every tensor is trained.
    pub fn all_trained(&self) -> bool {
        !self.trained.contains(&false)
    }

    /// Whether a range of the flat vector contains elements of a trained tensor.
    pub fn has_trained_in(&self, flat: std::ops::Range<usize>) -> bool {
        self.segments(flat).iter().any(|s| self.trained[s.param])
    }

    /// The index in the trained vector that corresponds to index `flat` of the flat vector.
    pub fn trained_offset(&self, flat: usize) -> usize {
        self.trained_segments(0..flat).iter().map(|s| s.flat.len()).sum()
    }

    /// Number of elements of the trained vector.
    pub fn trained_len(&self) -> usize {
        self.trained_offset(self.len())
    }

    /// The range of the trained vector that corresponds to a range of the flat vector.
    pub fn trained_range(&self, flat: std::ops::Range<usize>) -> std::ops::Range<usize> {
        self.trained_offset(flat.start)..self.trained_offset(flat.end)
    }

    /// The segments of trained tensors in a range of the flat vector; see [`ParamUnit::segments`].
    pub fn trained_segments(&self, flat: std::ops::Range<usize>) -> Vec<Segment> {
        let mut segments = self.segments(flat);
        segments.retain(|s| self.trained[s.param]);
        segments
    }

    /// The trained tensors in the order of the flat vector.
    pub fn trained_params(&self) -> impl Iterator<Item = &ParamSpec> + Clone {
        self.params.iter().zip(&self.trained).filter(|(_, trained)| **trained).map(|(p, _)| p)
    }

    /// Converts a vector with the layout of the flat vector to the trained vector, in place: moves
    /// the trained tensors to its front.
    pub fn pack_trained(&self, ops: &dyn Ops, mut flat_vector: ViewMut) {
        let mut end = 0;
        for s in self.trained_segments(0..self.len()) {
            let len = s.flat.len();
            ops.move_down(flat_vector.reborrow(), s.flat, end);
            end += len;
        }
    }

    /// Number of elements of the flat vector.
    pub fn len(&self) -> usize {
        *self.offsets.last().unwrap_or(&0)
    }

    /// Whether the unit has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The range of tensor `i` in the flat vector.
    pub fn tensor_range(&self, i: usize) -> std::ops::Range<usize> {
        self.offsets[i]..self.offsets[i + 1]
    }

    /// The range of tensors `i..=j` in the flat vector. Adjacent matrices can be multiplied as one.
    pub fn tensors_range(&self, i: usize, j: usize) -> std::ops::Range<usize> {
        self.offsets[i]..self.offsets[j + 1]
    }

    /// The parts of tensors inside a range of the flat vector, in order.
    pub fn segments(&self, flat: std::ops::Range<usize>) -> Vec<Segment> {
        (0..self.params.len())
            .filter_map(|i| {
                let r = self.tensor_range(i);
                let (a, b) = (r.start.max(flat.start), r.end.min(flat.end));
                (a < b).then(|| Segment { param: i, elements: a - r.start..b - r.start, flat: a..b })
            })
            .collect()
    }
}

/// Every tensor as (unit, index in the unit), in an order that does not depend on which rank has
/// which expert: first the tensors of dense units in their order, then those of the experts.
pub fn canonical_order(units: &[ParamUnit]) -> Vec<(usize, usize)> {
    let tensors = |experts: bool| {
        let selected = units.iter().enumerate().filter(move |(_, unit)| unit.holds_experts() == experts);
        selected.flat_map(|(u, unit)| (0..unit.params.len()).map(move |i| (u, i)))
    };
    let mut of_experts: Vec<(usize, usize)> = tensors(true).collect();
    of_experts.sort_by_key(|&(u, i)| units[u].experts.as_ref().map(|e| e.positions[i]));
    tensors(false).chain(of_experts).collect()
}

/// The part of one tensor inside a range of its unit's flat vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the tensor in [`ParamUnit::params`].
    pub param: usize,
    /// The elements of the logical tensor.
    pub elements: std::ops::Range<usize>,
    /// The same elements in the unit's flat vector.
    pub flat: std::ops::Range<usize>,
}
