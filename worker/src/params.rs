//! What a parameter is before it has values: its name, shape, initialisation and treatment by the optimizer.
//!
//! Identity is the Hugging Face name, never an address or an index. A [`Unit`] is what is fetched, computed with and
//! reduced together: one flat vector, its tensors one after the other without padding.

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
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
    /// Where each tensor stands among those of all experts; `None` in other units.
    places: Option<Vec<usize>>,
    offsets: Vec<usize>,
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
        Unit { name: name.into(), params, owners: Owners::ALL, places: None, offsets }
    }

    /// Experts that only `owners` have; `places` puts their tensors in an order that doesn't depend on who has them.
    pub fn of_experts(
        name: impl Into<String>,
        params: Vec<ParamSpec>,
        owners: Owners,
        places: Vec<usize>,
    ) -> Self {
        assert_eq!(params.len(), places.len(), "a place for each tensor");
        Unit { owners, places: Some(places), ..Unit::new(name, params) }
    }

    /// Is it a unit of experts?
    pub fn holds_experts(&self) -> bool {
        self.places.is_some()
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
    spread.sort_by_key(|&(u, i)| units[u].places.as_ref().map(|places| places[i]));
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
