//! Elementwise ops on vectors, dropout, rounding to bf16, and sums of squares.
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::storage::{DeviceError, Download};

/// Ops on vectors (arithmetic, rounding, dropout, sums), and the transposition of matrices.
pub trait VectorOps {
    /// Converts the elements of `x` to the type of `y` and stores them in `y`. If `y` has fewer
    /// bits, elements are rounded to nearest, ties to even.
    fn cast(&self, y: ViewMut, x: View);
    /// Rounds `f32` numbers to bf16 stochastically, so that the expected value of `y` is `x`.
    /// Values that bf16 can represent stay unchanged, including infinities and NaN. Finite values
    /// stay finite.
    fn round_stochastically(&self, y: ViewMut, x: View, rounding: &StochasticRounding);
    /// Adds the elements of `x` to those of `y`: `y += x`.
    fn add(&self, y: ViewMut, x: View);
    /// Multiplies every element of `y` by the number `s`.
    fn scale(&self, y: ViewMut, s: f32);
    /// Adds the number `s` to every element of `y`.
    fn add_scalar(&self, y: ViewMut, s: f32);
    /// Computes the weighted sum of two vectors in place: `y = a·y + b·x`. Both products and the
    /// sum are rounded.
    fn axpby(&self, y: ViewMut, a: f32, x: View, b: f32);
    /// Limits elements smoothly to ±`cap`: `y = cap·tanh(y / cap)`.
    fn softcap(&self, y: ViewMut, cap: f32);
    /// Transposes a matrix: `y[columns, rows] = x[rows, columns]ᵀ`.
    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize);
    /// Applies dropout in place: sets random elements to 0 and multiplies the others by `1 / (1 −
    /// probability)`.
    fn dropout(&self, x: ViewMut, dropout: &SampleDropout);
    /// Returns the sum of the squares of all elements, computed in `f64`.
    fn sum_squares(&self, x: View) -> f64;
    /// Computes the sum of squares of each block of [`NORM_BLOCK_LEN`] elements of `x`, and writes
    /// the sums to `out`. The last block may be shorter. The elements of a block are summed in
    /// `f64`, in one fixed order.
    fn sum_squares_by_block(&self, out: &mut [f64], x: View);
    /// Computes the sum of squares of each block of [`NORM_BLOCK_LEN`] elements of all `vectors`,
    /// and returns all sums in order.
    fn sum_squares_by_block_concat(&self, vectors: &[View]) -> Vec<f64> {
        let count = |x: &View| x.len().div_ceil(NORM_BLOCK_LEN);
        let mut sums = vec![0.0; vectors.iter().map(count).sum()];
        let mut rest = &mut sums[..];
        for x in vectors {
            let (out, after) = rest.split_at_mut(count(x));
            self.sum_squares_by_block(out, *x);
            rest = after;
        }
        sums
    }
    /// Starts to compute the sum of squares of each block of [`NORM_BLOCK_LEN`] elements of all
    /// `vectors`, and returns a handle to wait for the sums. `staging` is a buffer that an earlier
    /// [`PendingSumsOfSquares::wait`] returned, or an empty one.
    fn start_sum_squares_by_block(&self, vectors: &[View], staging: Buf) -> PendingSumsOfSquares {
        PendingSumsOfSquares::Complete(self.sum_squares_by_block_concat(vectors), staging)
    }
}

/// Handle to the sums of squares of blocks of vectors, which are already in host memory or are
/// still being computed by the GPU.
pub enum PendingSumsOfSquares {
    /// The sums, and the staging buffer, which was not used.
    Complete(Vec<f64>, Buf),
    /// A running copy of this number of sums to a staging buffer.
    Copying(Download, usize),
}

impl PendingSumsOfSquares {
    /// Blocks until the sums of squares of all blocks are computed and copied to host memory.
    /// Returns the sums and the staging buffer. Fails if this work failed.
    pub fn wait(self) -> Result<(Vec<f64>, Buf), DeviceError> {
        let (download, count) = match self {
            PendingSumsOfSquares::Complete(sums, staging) => return Ok((sums, staging)),
            PendingSumsOfSquares::Copying(download, count) => (download, count),
        };
        let staging = download.wait()?.pop().expect("a download returns its buffer");
        let sums = staging.view().host_bytes().chunks_exact(size_of::<f64>()).take(count);
        let sums = sums.map(|bits| f64::from_ne_bytes(bits.try_into().expect("8 bytes"))).collect();
        Ok((sums, staging))
    }
}

/// Number of consecutive elements of a gradient in one block; the squared gradient norm is the sum
/// of the blocks' sums of squares. Sharding does not change these blocks, and therefore does not
/// change the norm.
pub const NORM_BLOCK_LEN: usize = 4096;

/// Probability and random key of dropout for a vector that consists of samples of equal length, one
/// after another.
///
/// Element `i` of a sample takes word `i mod 4` of the Philox block `⌊i / 4⌋` at the step 0
/// ([`crate::philox::compute_random_words`]). The element is dropped if the word is below
/// `⌊probability·2³²⌋`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleDropout {
    /// Key of the Philox generator.
    pub key: [u32; 2],
    /// Probability of dropping an element, at least 0 and below 1.
    pub probability: f64,
    /// Number of elements of a sample.
    pub sample_len: usize,
    /// Number of the vector's first sample among all training samples, from which random numbers
    /// are derived.
    pub first_sample: u64,
}

impl SampleDropout {
    /// Returns the number below which a random 32-bit word causes an element to be dropped: the
    /// dropout probability times 2³².
    pub(crate) fn drop_threshold(&self) -> u64 {
        (self.probability * 4_294_967_296.0) as u64
    }

    /// Returns the factor `1 / (1 − probability)` by which dropout multiplies the elements that are
    /// kept.
    pub(crate) fn keep_scale(&self) -> f32 {
        (1.0 / (1.0 - self.probability)) as f32
    }
}

/// Random key, optimizer step and first element's index, from which the random numbers for the
/// stochastic rounding of a range of a tensor are computed. A value between two neighboring bf16
/// numbers becomes the number with the larger magnitude with a probability of `(|value| − |lower|)
/// / (|upper| − |lower|)`, where `|lower|` and `|upper|` are the magnitudes of the two numbers.
///
/// Element `i` of the tensor takes the upper 16 bits of word `i mod 4` of the Philox block `⌊i /
/// 4⌋` at the sample 0 and the step `step` ([`crate::philox::compute_random_words`]). The result
/// therefore does not depend on how the tensor is divided into ranges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StochasticRounding {
    /// Key of the Philox generator.
    pub key: [u32; 2],
    /// Index of the range's first element in its tensor.
    pub first_element: u64,
    /// Number of the optimizer step.
    pub step: u64,
}

impl StochasticRounding {
    /// Panics if the output of stochastic rounding is not bf16, or if the element index (up to 2⁴⁵)
    /// or the step (below 2⁴²) is too large.
    #[track_caller]
    pub(crate) fn check_output_and_range(&self, y: &ViewMut) {
        let (op, dtype) = ("round_stochastically", y.dtype());
        let end = self.first_element.saturating_add(y.len() as u64);
        assert!(dtype == Dtype::Bf16, "{op}: the result is {dtype:?}, not Bf16");
        assert!(
            end <= 1 << 45 && self.step < 1 << 42,
            "{op}: element {end} at step {} is beyond the range of the random generator",
            self.step
        );
    }
}
