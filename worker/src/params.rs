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

/// Tensors that are fetched and released together, laid out one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// For messages, e.g. `layer 3`.
    pub name: String,
    /// In the order of the flat vector.
    pub params: Vec<ParamSpec>,
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
        Unit { name: name.into(), params, offsets }
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
