//! [`ParamSpec`], the name, shape and initial distribution of a parameter, and [`ParamUnit`],
//! parameters that ranks gather and release together. Values are stored elsewhere.
//!
//! A parameter is identified by its Hugging Face name. A [`ParamUnit`] is the group of parameters
//! that is gathered, used and reduced together: one flat vector, its tensors one after another
//! without padding.
use device::{Ops, ViewMut};

/// How the initial values of a parameter are drawn, such as from a normal distribution.
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

/// A parameter tensor of the model: its name, shape and initial values.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// The Hugging Face name, unique in the model.
    pub name: String,
    /// The sizes of the dimensions. Elements are stored in row-major order.
    pub shape: Vec<usize>,
    /// The distribution of the initial values.
    pub init: ParamInit,
}

impl ParamSpec {
    /// Returns the number of elements of the parameter tensor.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the parameter tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The ranks among which a parameter unit (tensors that are gathered together) is divided, as the
/// lowest of these ranks and the distance between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerRanks {
    /// The lowest owner, which is less than `stride`.
    pub first: usize,
    /// The distance between two owners; 1 if every rank is an owner.
    pub stride: usize,
}

impl OwnerRanks {
    /// The owners of a parameter unit (tensors that are gathered together) that is divided among
    /// all ranks of the job.
    pub const ALL: OwnerRanks = OwnerRanks { first: 0, stride: 1 };

    /// Returns whether `rank` is one of the ranks among which the parameter unit (tensors that are
    /// gathered together) is divided.
    pub fn contains(&self, rank: usize) -> bool {
        rank % self.stride == self.first
    }

    /// Returns how many ranks lower than `rank` own a part of the parameter unit (tensors that are
    /// gathered together).
    pub fn count_owners_below(&self, rank: usize) -> usize {
        (rank + self.stride - 1 - self.first) / self.stride
    }

    /// Returns whether the parameter unit (tensors that are gathered together) is divided among all
    /// ranks.
    pub fn includes_all_ranks(&self) -> bool {
        self.stride == 1
    }
}

/// A parameter unit: parameter tensors of a model that are gathered, used and released together, as
/// one flat vector.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamUnit {
    /// The name for messages, such as `layer 3`.
    pub name: String,
    /// The tensors in the order of the flat vector.
    pub params: Vec<ParamSpec>,
    /// The ranks that have a shard of the unit.
    pub owners: OwnerRanks,
    /// The layer and the order of the tensors if the unit contains experts.
    experts: Option<ExpertTensors>,
    offsets: Vec<usize>,
    /// For each tensor, whether it is trained.
    trained: Vec<bool>,
}

/// Which experts' tensors a parameter unit contains: the number of their layer, and the position of
/// each tensor in the list of all experts' tensors of the model.
#[derive(Clone, Debug, PartialEq)]
struct ExpertTensors {
    layer: usize,
    /// For each tensor, its position among the tensors of all experts.
    positions: Vec<usize>,
}

impl ParamUnit {
    /// Creates a parameter unit (tensors that are gathered together) of the tensors `params`, which
    /// is divided among all ranks. All ranks own a shard of the unit, and all tensors are trained.
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

    /// Creates a parameter unit (tensors that are gathered together) of experts of the layer
    /// `layer`, which is divided among the ranks `owners` only. `positions` orders the tensors of
    /// all experts independently of the ranks that own them.
    ///
    /// # Panics
    ///
    /// Panics if the number of positions differs from the number of tensors.
    pub fn new_expert_unit(
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

    /// Returns the layer whose experts the parameter unit (tensors that are gathered together)
    /// contains, or `None` for a unit without experts.
    pub fn expert_layer(&self) -> Option<usize> {
        self.experts.as_ref().map(|e| e.layer)
    }

    /// Returns whether the parameter unit (tensors that are gathered together) contains experts of
    /// a mixture-of-experts layer.
    pub fn holds_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// Marks each tensor of the unit as trained if the predicate `trained` accepts its name, and as
    /// frozen otherwise.
    ///
    /// Gradients and optimizer states then have the layout of the *trained vector*: only the
    /// trained tensors, in the order of the flat vector.
    pub fn set_trained(&mut self, trained: impl Fn(&str) -> bool) {
        self.trained = self.params.iter().map(|p| trained(&p.name)).collect();
    }

    /// Returns whether tensor number `i` of the parameter unit is trained, and not frozen.
    pub fn is_trained(&self, i: usize) -> bool {
        self.trained[i]
    }

    /// Returns whether at least one tensor of the parameter unit is trained.
    pub fn has_any_trained(&self) -> bool {
        self.trained.contains(&true)
    }

    /// Returns whether every tensor of the parameter unit is trained, so that none is frozen.
    pub fn is_all_trained(&self) -> bool {
        !self.trained.contains(&false)
    }

    /// Returns whether the range `flat` of the unit's concatenated tensors (flat vector) contains
    /// elements of a trained tensor.
    pub fn has_trained_elements_in(&self, flat: std::ops::Range<usize>) -> bool {
        self.list_segments(flat).iter().any(|s| self.trained[s.param])
    }

    /// Converts an index into the parameter unit's flat vector to the number of trained elements
    /// before this index.
    pub fn to_trained_offset(&self, flat: usize) -> usize {
        self.list_trained_segments(0..flat).iter().map(|s| s.flat.len()).sum()
    }

    /// Returns the number of elements of all trained tensors of the unit, which is the length of
    /// its gradient.
    pub fn trained_len(&self) -> usize {
        self.to_trained_offset(self.len())
    }

    /// Converts a range of the unit's concatenated tensors to the corresponding range in the
    /// concatenation of only the unit's trained elements.
    pub fn to_trained_range(&self, flat: std::ops::Range<usize>) -> std::ops::Range<usize> {
        self.to_trained_offset(flat.start)..self.to_trained_offset(flat.end)
    }

    /// Lists the parts of trained tensors in the range `flat` of the unit's flat vector, in which
    /// all tensors of the unit are concatenated.
    pub fn list_trained_segments(&self, flat: std::ops::Range<usize>) -> Vec<Segment> {
        let mut segments = self.list_segments(flat);
        segments.retain(|s| self.trained[s.param]);
        segments
    }

    /// Returns the trained tensors of the unit in the order in which its tensors are concatenated.
    pub fn list_trained_params(&self) -> impl Iterator<Item = &ParamSpec> + Clone {
        self.params.iter().zip(&self.trained).filter(|(_, trained)| **trained).map(|(p, _)| p)
    }

    /// Moves the elements of trained tensors to the front of `flat_vector`, the unit's concatenated
    /// tensors, so that no frozen elements are between them.
    pub fn pack_trained(&self, ops: &dyn Ops, mut flat_vector: ViewMut) {
        let mut end = 0;
        for s in self.list_trained_segments(0..self.len()) {
            let len = s.flat.len();
            ops.move_elements_to_lower_index(flat_vector.reborrow(), s.flat, end);
            end += len;
        }
    }

    /// Returns the number of elements of all tensors of the parameter unit.
    pub fn len(&self) -> usize {
        *self.offsets.last().unwrap_or(&0)
    }

    /// Returns whether the parameter unit has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the range of tensor number `i` in the unit's concatenated tensors (flat vector).
    pub fn tensor_range(&self, i: usize) -> std::ops::Range<usize> {
        self.offsets[i]..self.offsets[i + 1]
    }

    /// Lists the parts of tensors that are inside the range `flat` of the unit's concatenated
    /// tensors (flat vector), in order.
    pub fn list_segments(&self, flat: std::ops::Range<usize>) -> Vec<Segment> {
        (0..self.params.len())
            .filter_map(|i| {
                let r = self.tensor_range(i);
                let (a, b) = (r.start.max(flat.start), r.end.min(flat.end));
                (a < b).then(|| Segment { param: i, elements: a - r.start..b - r.start, flat: a..b })
            })
            .collect()
    }
}

/// Lists all tensors of the model, each as its unit's index and its index within the unit, in an
/// order that does not depend on which ranks have which experts.
///
/// The tensors of dense units come first, in their order, and then the tensors of the experts.
pub fn list_tensors_in_canonical_order(units: &[ParamUnit]) -> Vec<(usize, usize)> {
    let tensors = |experts: bool| {
        let selected = units.iter().enumerate().filter(move |(_, unit)| unit.holds_experts() == experts);
        selected.flat_map(|(u, unit)| (0..unit.params.len()).map(move |i| (u, i)))
    };
    let mut of_experts: Vec<(usize, usize)> = tensors(true).collect();
    of_experts.sort_by_key(|&(u, i)| units[u].experts.as_ref().map(|e| e.positions[i]));
    tensors(false).chain(of_experts).collect()
}

/// A contiguous part of one tensor of a parameter unit, with its ranges in the tensor and in the
/// unit's flat vector (all tensors concatenated).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The index of the tensor in [`ParamUnit::params`].
    pub param: usize,
    /// The range of the part within the elements of the tensor.
    pub elements: std::ops::Range<usize>,
    /// The range of the part within the unit's flat vector.
    pub flat: std::ops::Range<usize>,
}
