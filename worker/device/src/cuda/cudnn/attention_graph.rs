//! Attention as graphs of cuDNN's operations, in the layout of [`crate::Ops::attention_forward`].
use super::super::bindings::{Address, CudnnApi};
use super::super::context::GpuContext;
use super::super::error::Result;
use super::descriptor::{DataType, PointwiseMode, Reduction};
use super::execution_plan::{ExecutionPlan, PlanTarget, create_plans};
use super::operation_graph::{ALIGNMENT, GraphTensor, OperationGraph, TensorLocation, packed_strides};
use crate::ops::AttentionShape;
use std::{ops::Range, sync::Arc};

// The ids of a graph's tensors, by which cuDNN is given their addresses.
const Q: i64 = 1;
const K: i64 = 2;
const V: i64 = 3;
const O: i64 = 4;
const LSE: i64 = 5;
const SCALE: i64 = 6;
const MASK_VALUE: i64 = 7;
const WINDOW: i64 = 8;
const D_O: i64 = 9;
const D_Q: i64 = 10;
const D_K: i64 = 11;
const D_V: i64 = 12;
const KEEP_SCALE: i64 = 13;
/// Σ dO·O for each query.
const DOTS: i64 = 14;
/// The fp32 buffer in which the gradient of the queries is accumulated.
const D_Q_SUMS: i64 = 15;

/// Largest head dimension that the backward pass supports.
const MAX_HEAD_DIM: usize = 128;
/// Head dimensions are multiples of this.
const HEAD_DIM_STEP: usize = 8;

/// The keys that a query attends to, among those of its sequence up to its own position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mask {
    /// All keys up to the query's position.
    Causal,
    /// This many keys, of which the last is at the query's position.
    Window(usize),
}

impl Mask {
    /// Returns the mask in which the first key of each query is that of `starts`, for sequences of
    /// `t` tokens. Returns `None` if no mask fits, for example if a sequence has several documents.
    fn from_starts(starts: &[u32], t: usize) -> Option<Mask> {
        let first = starts.get(..t)?;
        let window = first.iter().position(|start| *start > 0);
        let has_window = |window: usize| {
            let expected = |at: usize| (at % t + 1).saturating_sub(window) as u32;
            starts.iter().enumerate().all(|(at, start)| *start == expected(at))
        };
        let (window, mask) = window.map_or((t, Mask::Causal), |window| (window, Mask::Window(window)));
        (window > 0 && has_window(window)).then_some(mask)
    }
}

/// Why cuDNN cannot compute an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum UnsupportedAttention {
    #[error("attention of tensors that are not bf16")]
    Dtype,
    #[error("attention with a softcap")]
    Softcap,
    #[error("attention with dropout")]
    Dropout,
    #[error("heads of more than 128 elements")]
    HeadDimTooLarge,
    #[error("heads of a number of elements that is not a multiple of 8")]
    HeadDimNotMultiple,
    #[error("sequences of one token")]
    SequenceTooShort,
    #[error("operands that are not aligned to 16 bytes")]
    Misaligned,
    #[error("several documents in a sequence (`train.data.pack: false` keeps them apart)")]
    Documents,
}

/// One pass of attention, forward or backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct AttentionPass {
    pub(super) shape: AttentionShape,
    pub(super) mask: Mask,
    pub(super) is_backward: bool,
}

/// The addresses of a pass's operands; 0 for operands that only the other pass has.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct AttentionOperands {
    pub(in super::super) qkv: Address,
    pub(in super::super) o: Address,
    pub(in super::super) lse: Address,
    pub(in super::super) d_o: Address,
    pub(in super::super) dqkv: Address,
}

impl AttentionOperands {
    fn are_aligned(&self) -> bool {
        let AttentionOperands { qkv, o, lse, d_o, dqkv } = *self;
        [qkv, o, lse, d_o, dqkv].iter().all(|at| at.is_multiple_of(ALIGNMENT as u64))
    }
}

/// A tensor of `f32` that a pass needs in addition to its operands.
pub(super) struct ExtraTensor {
    pub(super) id: i64,
    pub(super) elements: usize,
    /// True if the tensor must be zero before the pass.
    pub(super) is_zeroed: bool,
}

/// Dimensions and strides of the tensors of an attention shape.
struct Layout {
    b: i64,
    t: i64,
    heads: i64,
    kv_heads: i64,
    dim: i64,
}

impl Layout {
    fn new(s: AttentionShape) -> Self {
        let [b, t, heads, kv_heads, dim] = [s.b, s.t, s.heads, s.kv_heads, s.head_dim].map(|n| n as i64);
        Layout { b, t, heads, kv_heads, dim }
    }

    /// Dimensions of a tensor with a vector for each token and head: `[b, heads, t, dim]`.
    fn rows(&self, heads: i64) -> [i64; 4] {
        [self.b, heads, self.t, self.dim]
    }

    /// Strides for the dimensions of [`Layout::rows`], in memory where each token is a row of
    /// `width` elements and the heads of a row are adjacent.
    fn strides(&self, width: i64) -> [i64; 4] {
        [self.t * width, self.dim, width, 1]
    }

    /// Elements of a row of `qkv`.
    fn qkv_width(&self) -> i64 {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Dimensions of the scores: one per pair of query and key.
    fn scores(&self) -> [i64; 4] {
        [self.b, self.heads, self.t, self.t]
    }

    /// Dimensions of a tensor with one element per query.
    fn per_query(&self) -> [i64; 4] {
        [self.b, self.heads, self.t, 1]
    }
}

impl AttentionPass {
    /// Creates a pass, or returns why cuDNN cannot compute it. `is_bf16` is true if all tensors of
    /// the pass are bf16.
    pub(in super::super) fn new(
        shape: AttentionShape,
        starts: &[u32],
        operands: &AttentionOperands,
        is_bf16: bool,
        is_backward: bool,
    ) -> std::result::Result<AttentionPass, UnsupportedAttention> {
        let checks = [
            (!is_bf16, UnsupportedAttention::Dtype),
            (shape.softcap.is_some(), UnsupportedAttention::Softcap),
            (shape.dropout.is_some(), UnsupportedAttention::Dropout),
            (shape.head_dim > MAX_HEAD_DIM, UnsupportedAttention::HeadDimTooLarge),
            (!shape.head_dim.is_multiple_of(HEAD_DIM_STEP), UnsupportedAttention::HeadDimNotMultiple),
            (shape.t < 2, UnsupportedAttention::SequenceTooShort),
            (!operands.are_aligned(), UnsupportedAttention::Misaligned),
        ];
        if let Some((_, unsupported)) = checks.iter().find(|(applies, _)| *applies) {
            return Err(*unsupported);
        }
        let mask = Mask::from_starts(starts, shape.t).ok_or(UnsupportedAttention::Documents)?;
        Ok(AttentionPass { shape, mask, is_backward })
    }

    /// Returns the id and address of each tensor of the graph that is an operand.
    pub(super) fn operand_tensors(&self, at: &AttentionOperands) -> Vec<(i64, Address)> {
        let s = self.shape;
        let size = size_of::<u16>() as u64;
        let [k, v] = [s.heads, s.heads + s.kv_heads].map(|heads| (heads * s.head_dim) as u64 * size);
        let mut tensors = vec![(Q, at.qkv), (K, at.qkv + k), (V, at.qkv + v), (O, at.o), (LSE, at.lse)];
        if self.is_backward {
            tensors.extend([(D_O, at.d_o), (D_Q, at.dqkv), (D_K, at.dqkv + k), (D_V, at.dqkv + v)]);
        }
        tensors
    }

    /// The tensors that the pass needs in addition to its operands.
    pub(super) fn extra_tensors(&self) -> Vec<ExtraTensor> {
        let s = self.shape;
        let queries = s.b * s.heads * s.t;
        if self.is_backward {
            vec![
                ExtraTensor { id: DOTS, elements: queries, is_zeroed: false },
                ExtraTensor { id: D_Q_SUMS, elements: queries * s.head_dim, is_zeroed: true },
            ]
        } else {
            Vec::new()
        }
    }

    /// Waits for the pass and downloads its results as f32: output and log-sum-exp, or the
    /// gradients of q, k and v.
    pub(super) fn download_results(&self, gpu: &GpuContext, at: &AttentionOperands) -> Result<[Vec<f32>; 3]> {
        let s = self.shape;
        let rows = s.b * s.t;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let download_bf16 = |at, len: usize| {
            let mut bits = vec![0u16; len];
            gpu.download(bytemuck::cast_slice_mut(&mut bits), at)?;
            Ok(bits.into_iter().map(|bits| f32::from_bits(u32::from(bits) << 16)).collect::<Vec<_>>())
        };
        if self.is_backward {
            let gradients = download_bf16(at.dqkv, rows * (queries + 2 * keys))?;
            let rows = gradients.chunks(queries + 2 * keys);
            let columns =
                |range: Range<usize>| rows.clone().flat_map(|row| row[range.clone()].to_vec()).collect();
            return Ok([
                columns(0..queries),
                columns(queries..queries + keys),
                columns(queries + keys..queries + 2 * keys),
            ]);
        }
        let mut lse = vec![0f32; rows * s.heads];
        gpu.download(bytemuck::cast_slice_mut(&mut lse), at.lse)?;
        Ok([download_bf16(at.o, rows * queries)?, lse, Vec::new()])
    }

    /// Returns the ids and values of the scalars that the graph reads from the host.
    fn scalars(&self) -> Vec<(i64, f32)> {
        let mut scalars = vec![(SCALE, self.shape.scale), (MASK_VALUE, f32::NEG_INFINITY)];
        if let Mask::Window(window) = self.mask {
            scalars.push((WINDOW, window as f32));
        }
        if self.is_backward {
            scalars.push((KEEP_SCALE, 1.0)); // no dropout
        }
        scalars
    }

    /// The shape for messages: `attention of 2 × 2048 tokens, 32 and 8 heads of 128`.
    pub(super) fn describe_shape(&self) -> String {
        let s = self.shape;
        let window = if let Mask::Window(window) = self.mask {
            format!(", window of {window}")
        } else {
            String::new()
        };
        format!(
            "attention of {} × {} tokens{window}, {} and {} heads of {}",
            s.b, s.t, s.heads, s.kv_heads, s.head_dim
        )
    }

    /// Shape and direction for messages.
    pub(super) fn describe(&self) -> String {
        format!("{}, {}", self.describe_shape(), if self.is_backward { "backward" } else { "forward" })
    }
}

/// Upper bound of the bytes that cuDNN needs for a pass in addition to its operands.
///
/// The backward pass needs fp32 sums of the queries' gradients, the gradients of keys and values by
/// query head, and on GPUs before Hopper a second set of sums, as cuDNN 9.19 reports for its plans.
pub fn cudnn_workspace_bytes(s: AttentionShape) -> usize {
    let queries = s.b * s.heads * s.t;
    let gradients = if s.heads == s.kv_heads { 0 } else { 2 * size_of::<u16>() };
    queries * (s.head_dim * (2 * size_of::<f32>() + gradients) + 2 * size_of::<f32>())
}

/// Returns cuDNN's execution plans for a pass, the one that cuDNN expects to be the fastest first.
pub(super) fn plans(
    library: &Arc<CudnnApi>,
    pass: &AttentionPass,
    target: PlanTarget,
) -> Result<impl Iterator<Item = Result<ExecutionPlan>> + use<>> {
    let mut graph = OperationGraph::new(library);
    if pass.is_backward {
        add_backward(&mut graph, pass)?
    } else {
        add_forward(&mut graph, pass)?
    };
    create_plans(graph, pass.scalars(), target)
}

/// Queries, keys or values within `qkv` or its gradient.
fn qkv_rows(g: &mut OperationGraph, id: i64, l: &Layout, heads: i64) -> Result<GraphTensor> {
    g.tensor(TensorLocation::Device(id), DataType::Bf16, l.rows(heads), l.strides(l.qkv_width()))
}

/// Keys or values within `qkv`, transposed: tokens are columns.
fn qkv_columns(g: &mut OperationGraph, id: i64, l: &Layout) -> Result<GraphTensor> {
    let ([b, h, t, d], [x, y, z, w]) = (l.rows(l.kv_heads), l.strides(l.qkv_width()));
    g.tensor(TensorLocation::Device(id), DataType::Bf16, [b, h, d, t], [x, y, w, z])
}

/// The output or its gradient.
fn output(g: &mut OperationGraph, id: i64, l: &Layout) -> Result<GraphTensor> {
    g.tensor(TensorLocation::Device(id), DataType::Bf16, l.rows(l.heads), l.strides(l.heads * l.dim))
}

/// A tensor in GPU memory with one `f32` per query.
fn per_query(g: &mut OperationGraph, id: i64, l: &Layout) -> Result<GraphTensor> {
    g.tensor(TensorLocation::Device(id), DataType::F32, l.per_query(), packed_strides(l.per_query()))
}

/// Sets the scores of keys that a query does not attend to, to −∞.
fn apply_mask(g: &mut OperationGraph, mask: Mask, scores: GraphTensor) -> Result<GraphTensor> {
    let masked = g.scalar(MASK_VALUE)?;
    let (query, key) = (g.index(scores, 2)?, g.index(scores, 3)?);
    let is_causal = g.apply(PointwiseMode::GreaterEqual, DataType::Boolean, query, Some(key))?;
    let scores = g.select(is_causal, scores, masked)?;
    let Mask::Window(_) = mask else { return Ok(scores) };
    let (query, key) = (g.index(scores, 2)?, g.index(scores, 3)?);
    let window = g.scalar(WINDOW)?;
    let end = g.apply(PointwiseMode::Add, DataType::F32, key, Some(window))?;
    let is_in_window = g.apply(PointwiseMode::Greater, DataType::Boolean, end, Some(query))?;
    g.select(is_in_window, scores, masked)
}

/// `o = softmax(mask(scale · q · kᵀ)) · v`, and the log-sum-exp of each row.
fn add_forward(g: &mut OperationGraph, pass: &AttentionPass) -> Result<()> {
    let l = Layout::new(pass.shape);
    let (q, k, v) = (qkv_rows(g, Q, &l, l.heads)?, qkv_columns(g, K, &l)?, qkv_rows(g, V, &l, l.kv_heads)?);
    let scale = g.scalar(SCALE)?;
    let scores = g.virtual_tensor(DataType::F32, l.scores())?;
    g.matmul(q, k, scores)?;
    let scores = g.apply(PointwiseMode::Mul, DataType::F32, scores, Some(scale))?;
    let scores = apply_mask(g, pass.mask, scores)?;

    let max = g.virtual_tensor(DataType::F32, l.per_query())?;
    g.reduce(Reduction::Max, scores, max)?;
    let shifted = g.apply(PointwiseMode::Sub, DataType::F32, scores, Some(max))?;
    let exponentials = g.apply(PointwiseMode::Exp, DataType::F32, shifted, None)?;
    let sum = g.virtual_tensor(DataType::F32, l.per_query())?;
    g.reduce(Reduction::Add, exponentials, sum)?;
    let log_sum = g.apply(PointwiseMode::Log, DataType::F32, sum, None)?;
    let lse = per_query(g, LSE, &l)?;
    g.pointwise(PointwiseMode::Add, max, Some(log_sum), lse)?;

    let probabilities = g.apply(PointwiseMode::Div, DataType::Bf16, exponentials, Some(sum))?;
    let o = output(g, O, &l)?;
    g.matmul(probabilities, v, o)
}

/// With p the probabilities and dP = dO·vᵀ: dV = pᵀ·dO, dS = p·(dP − Σ dO·O)·scale, dQ = dS·k,
/// dK = dSᵀ·q.
fn add_backward(g: &mut OperationGraph, pass: &AttentionPass) -> Result<()> {
    let l = Layout::new(pass.shape);
    let (d_o, o) = (output(g, D_O, &l)?, output(g, O, &l)?);
    let rows = l.rows(l.heads);
    let terms = g.tensor(TensorLocation::Virtual, DataType::F32, rows, packed_strides(rows))?;
    g.pointwise(PointwiseMode::Mul, d_o, Some(o), terms)?;
    let dots = g.virtual_tensor(DataType::F32, l.per_query())?;
    g.reduce(Reduction::Add, terms, dots)?;
    let keep_scale = g.scalar(KEEP_SCALE)?;
    let scaled_dots = per_query(g, DOTS, &l)?;
    g.pointwise(PointwiseMode::Mul, dots, Some(keep_scale), scaled_dots)?;

    let (q, k, v) = (qkv_rows(g, Q, &l, l.heads)?, qkv_columns(g, K, &l)?, qkv_columns(g, V, &l)?);
    let scale = g.scalar(SCALE)?;
    let scores = g.virtual_tensor(DataType::F32, l.scores())?;
    g.matmul(q, k, scores)?;
    let scores = g.apply(PointwiseMode::Mul, DataType::F32, scores, Some(scale))?;
    let lse = per_query(g, LSE, &l)?;
    let shifted = g.apply(PointwiseMode::Sub, DataType::F32, scores, Some(lse))?;
    let shifted = apply_mask(g, pass.mask, shifted)?;
    let p = g.apply(PointwiseMode::Exp, DataType::F32, shifted, None)?;
    let p_transposed = g.transpose(DataType::Bf16, p)?;
    add_kv_gradient(g, &l, p_transposed, d_o, D_V)?;

    let d_p = g.virtual_tensor(DataType::F32, l.scores())?;
    g.matmul(d_o, v, d_p)?;
    let d_s = g.apply(PointwiseMode::Sub, DataType::F32, d_p, Some(scaled_dots))?;
    let d_s = g.apply(PointwiseMode::Mul, DataType::F32, d_s, Some(p))?;
    let d_s = g.apply(PointwiseMode::Mul, DataType::F32, d_s, Some(scale))?;
    let d_s_transposed = g.transpose(DataType::Bf16, d_s)?;
    add_kv_gradient(g, &l, d_s_transposed, q, D_K)?;

    let k = g.transpose(DataType::F32, k)?;
    let sums = g.tensor(TensorLocation::Device(D_Q_SUMS), DataType::F32, rows, packed_strides(rows))?;
    g.matmul(d_s, k, sums)?;
    let d_q = qkv_rows(g, D_Q, &l, l.heads)?;
    g.pointwise(PointwiseMode::Identity, sums, None, d_q)
}

/// The gradient of keys or values: `a · b` for each query head, summed over the query heads that
/// share a key head.
fn add_kv_gradient(
    g: &mut OperationGraph,
    l: &Layout,
    a: GraphTensor,
    b: GraphTensor,
    id: i64,
) -> Result<()> {
    let gradient = qkv_rows(g, id, l, l.kv_heads)?;
    if l.heads == l.kv_heads {
        return g.matmul(a, b, gradient);
    }
    let by_query_head = g.virtual_tensor(DataType::Bf16, l.rows(l.heads))?;
    g.matmul(a, b, by_query_head)?;
    g.reduce(Reduction::Add, by_query_head, gradient)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_follows_from_the_first_keys() {
        assert_eq!(Mask::from_starts(&[0, 0, 0, 0], 4), Some(Mask::Causal));
        assert_eq!(Mask::from_starts(&[0, 0, 0, 0], 2), Some(Mask::Causal));
        assert_eq!(Mask::from_starts(&[0, 0, 1, 2, 0, 0, 1, 2], 4), Some(Mask::Window(2)));
        assert_eq!(Mask::from_starts(&[0, 1, 2], 3), Some(Mask::Window(1)));
        assert_eq!(Mask::from_starts(&[0, 0, 2, 2], 4), None, "a document begins");
        assert_eq!(Mask::from_starts(&[0, 0, 0, 0, 0, 0, 1, 2], 4), None, "sequences differ");
        assert_eq!(Mask::from_starts(&[0, 0, 1, 2, 0, 0, 0, 0], 4), None, "sequences differ");
        assert_eq!(Mask::from_starts(&[1, 0], 2), None);
        assert_eq!(Mask::from_starts(&[], 4), None);
    }
}
