//! What a parameter is before it has values: its name, shape, initialisation and treatment by the optimizer.
//!
//! Identity is the Hugging Face name, never an address or an index. A [`Unit`] is what is fetched, computed with and
//! reduced together: one flat vector, its tensors one after the other without padding.

use device::{Ops, ViewMut};

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
    /// Uniform between minus this and this.
    Uniform(f32),
}

/// One logical tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face name, unique in the model.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: Init,
}

impl ParamSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// No element?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The ranks among which a unit is divided: `first`, `first + stride`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owners {
    /// Below `stride`.
    pub first: usize,
    /// 1: all ranks.
    pub stride: usize,
}

impl Owners {
    /// Every rank.
    pub const ALL: Owners = Owners { first: 0, stride: 1 };

    /// Is `rank` one of them?
    pub fn has(&self, rank: usize) -> bool {
        rank % self.stride == self.first
    }

    /// How many of the ranks below `rank` they are.
    pub fn below(&self, rank: usize) -> usize {
        (rank + self.stride - 1 - self.first) / self.stride
    }

    /// Are these all ranks?
    pub fn all(&self) -> bool {
        self.stride == 1
    }
}

/// Tensors that are fetched and released together, laid out one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// For messages, e.g. `layer 3`.
    pub name: String,
    /// In the order of the flat vector.
    pub params: Vec<ParamSpec>,
    /// Who has a part of it.
    pub owners: Owners,
    /// Of a unit of experts.
    experts: Option<OfExperts>,
    offsets: Vec<usize>,
    /// Of each tensor: is it trained?
    trained: Vec<bool>,
}

/// What a unit of experts has beside its tensors.
#[derive(Clone, Debug, PartialEq)]
struct OfExperts {
    layer: usize,
    /// Where each tensor stands among those of all experts.
    places: Vec<usize>,
}

impl Unit {
    /// Lays the tensors out.
    pub fn new(name: impl Into<String>, params: Vec<ParamSpec>) -> Self {
        let mut offsets = Vec::with_capacity(params.len() + 1);
        let mut at = 0;
        offsets.push(0);
        for p in &params {
            at += p.len();
            offsets.push(at);
        }
        let trained = vec![true; params.len()];
        Unit { name: name.into(), params, owners: Owners::ALL, experts: None, offsets, trained }
    }

    /// Experts of `layer` that only `owners` have; `places` puts their tensors in an order that doesn't depend on who has
    /// them.
    pub fn of_experts(
        name: impl Into<String>,
        params: Vec<ParamSpec>,
        owners: Owners,
        layer: usize,
        places: Vec<usize>,
    ) -> Self {
        assert_eq!(params.len(), places.len(), "a place for each tensor");
        Unit { owners, experts: Some(OfExperts { layer, places }), ..Unit::new(name, params) }
    }

    /// The layer whose experts it holds; `None`: it is one of the model's own units.
    pub fn expert_layer(&self) -> Option<usize> {
        self.experts.as_ref().map(|e| e.layer)
    }

    /// Is it a unit of experts?
    pub fn holds_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// Decides by name which tensors are trained. Gradients and optimizer states are then vectors of the trained tensors
    /// alone, one after the other in the order of the flat vector: the *trained* vector of the unit.
    pub fn train_where(&mut self, trained: impl Fn(&str) -> bool) {
        self.trained = self.params.iter().map(|p| trained(&p.name)).collect();
    }

    /// Is tensor `i` trained?
    pub fn is_trained(&self, i: usize) -> bool {
        self.trained[i]
    }

    /// Is any tensor?
    pub fn any_trained(&self) -> bool {
        self.trained.contains(&true)
    }

    /// Are all?
    pub fn all_trained(&self) -> bool {
        !self.trained.contains(&false)
    }

    /// Is any tensor in this range of the flat vector?
    pub fn trains(&self, flat: std::ops::Range<usize>) -> bool {
        self.segments(flat).iter().any(|s| self.trained[s.param])
    }

    /// Elements of the trained vector that lie before `flat` of the flat vector.
    pub fn trained_before(&self, flat: usize) -> usize {
        let all = self.trained_segments(0..flat);
        all.iter().map(|s| s.flat.len()).sum()
    }

    /// Elements of the trained vector.
    pub fn trained_len(&self) -> usize {
        self.trained_before(self.len())
    }

    /// The range of the trained vector that a range of the flat vector holds.
    pub fn trained_range(&self, flat: std::ops::Range<usize>) -> std::ops::Range<usize> {
        self.trained_before(flat.start)..self.trained_before(flat.end)
    }

    /// As [`Unit::segments`], without those that are frozen.
    pub fn trained_segments(&self, flat: std::ops::Range<usize>) -> Vec<Segment> {
        let mut all = self.segments(flat);
        all.retain(|s| self.trained[s.param]);
        all
    }

    /// The tensors that are trained.
    pub fn trained_params(&self) -> impl Iterator<Item = &ParamSpec> + Clone {
        self.params.iter().zip(&self.trained).filter(|(_, trained)| **trained).map(|(p, _)| p)
    }

    /// Moves what a whole vector holds of the trained tensors to its front.
    pub fn pack_trained(&self, ops: &dyn Ops, mut whole: ViewMut) {
        let mut at = 0;
        for s in self.trained_segments(0..self.len()) {
            let len = s.flat.len();
            ops.move_down(whole.reborrow(), s.flat, at);
            at += len;
        }
    }

    /// Elements of the flat vector.
    pub fn len(&self) -> usize {
        *self.offsets.last().unwrap_or(&0)
    }

    /// No element?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where tensor `i` lies in the flat vector.
    pub fn range(&self, i: usize) -> std::ops::Range<usize> {
        self.offsets[i]..self.offsets[i + 1]
    }

    /// Where tensors `i..=j` lie: adjacent matrices can be multiplied as one.
    pub fn span(&self, i: usize, j: usize) -> std::ops::Range<usize> {
        self.offsets[i]..self.offsets[j + 1]
    }

    /// The parts of tensors inside a range of the flat vector: `(tensor index, its element range, flat range)`.
    pub fn segments(&self, flat: std::ops::Range<usize>) -> Vec<Segment> {
        (0..self.params.len())
            .filter_map(|i| {
                let r = self.range(i);
                let (a, b) = (r.start.max(flat.start), r.end.min(flat.end));
                (a < b).then(|| Segment { param: i, elements: a - r.start..b - r.start, flat: a..b })
            })
            .collect()
    }
}

/// Every tensor as (unit, index in it), in an order that doesn't depend on where experts lie: first the other units' as they
/// come, then the experts'.
pub fn canonical_order(units: &[Unit]) -> Vec<(usize, usize)> {
    let all = |experts: bool| {
        let of = units.iter().enumerate().filter(move |(_, unit)| unit.holds_experts() == experts);
        of.flat_map(|(u, unit)| (0..unit.params.len()).map(move |i| (u, i)))
    };
    let mut spread: Vec<(usize, usize)> = all(true).collect();
    spread.sort_by_key(|&(u, i)| units[u].experts.as_ref().map(|e| e.places[i]));
    all(false).chain(spread).collect()
}

/// A part of one tensor inside a range of its unit's flat vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index into [`Unit::params`].
    pub param: usize,
    /// Element range of the logical tensor.
    pub elements: std::ops::Range<usize>,
    /// The same elements in the unit's flat vector.
    pub flat: std::ops::Range<usize>,
}
