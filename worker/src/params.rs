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

/// Tensors that are fetched and released together, laid out one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// For messages, e.g. `layer 3`.
    pub name: String,
    /// In the order of the flat vector.
    pub params: Vec<ParamSpec>,
    offsets: Vec<usize>,
    /// Of each tensor: is it trained?
    trained: Vec<bool>,
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
        Unit { name: name.into(), params, offsets, trained }
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
    pub fn pack_trained(&self, whole: &mut [f32]) {
        let mut at = 0;
        for s in self.trained_segments(0..self.len()) {
            let len = s.flat.len();
            whole.copy_within(s.flat, at);
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
