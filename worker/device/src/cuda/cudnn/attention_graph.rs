//! Describes attention to cuDNN as graphs of its operations, with tensors laid out as in
//! [`crate::ops::AttentionOps::attention_forward`].
use super::super::bindings::cudnn_sys::{
    cudnnBackendAttributeName_t, cudnnBackendDescriptorType_t, cudnnDataType_t::*, cudnnPointwiseMode_t::*,
    cudnnReduceTensorOp_t::*,
};
use super::super::bindings::{Address, CudnnApi};
use super::super::error::Result;
use super::super::gpu::Gpu;
use super::descriptor::Descriptor;
use super::execution_plan::{ExecutionPlan, PlanTarget, create_graph_plans};
use super::library::Cudnn;
use super::operation_graph::{
    ALIGNMENT, GraphTensor, OperationGraph, TensorLocation, compute_packed_strides,
};
use crate::ops::AttentionShape;
use std::{ops::Range, sync::Arc};

// Ids of the tensors of an attention graph. The addresses of tensors are passed to cuDNN by id.
const Q_ID: i64 = 1;
const K_ID: i64 = 2;
const V_ID: i64 = 3;
const O_ID: i64 = 4;
const LSE_ID: i64 = 5;
const SCALE_ID: i64 = 6;
const MASK_VALUE_ID: i64 = 7;
const WINDOW_ID: i64 = 8;
const D_O_ID: i64 = 9;
const D_Q_ID: i64 = 10;
const D_K_ID: i64 = 11;
const D_V_ID: i64 = 12;
const KEEP_SCALE_ID: i64 = 13;
/// Id in cuDNN's graph of the tensor with the dot product of output and output gradient for each
/// query and head.
const DOTS_ID: i64 = 14;
/// Id of the fp32 tensor in cuDNN's graph in which the gradient of the queries is accumulated.
const D_Q_SUMS_ID: i64 = 15;

/// Maximum head dimension that cuDNN's backward pass of attention supports.
const MAX_HEAD_DIM: usize = 128;
/// Every head dimension that cuDNN supports is a multiple of this number.
const HEAD_DIM_MULTIPLE: usize = 8;

/// The mask of attention: a query attends to all keys up to its position (causal), or only to the
/// last few of these keys (window).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AttentionMask {
    /// All keys up to the query's position.
    Causal,
    /// The given number of keys, of which the last is at the query's position.
    Window(usize),
}

impl AttentionMask {
    /// Returns the mask (causal or window) that is equivalent to `starts`, the index of the first
    /// key that each query attends to. Each sequence has `t` tokens. Returns `None` if no mask
    /// fits, for example if a sequence has several documents.
    fn from_starts(starts: &[u32], t: usize) -> Option<AttentionMask> {
        let first = starts.get(..t)?;
        let window = first.iter().position(|start| *start > 0);
        let has_window = |window: usize| {
            let expected = |at: usize| (at % t + 1).saturating_sub(window) as u32;
            starts.iter().enumerate().all(|(at, start)| *start == expected(at))
        };
        let (window, mask) =
            window.map_or((t, AttentionMask::Causal), |window| (window, AttentionMask::Window(window)));
        (window > 0 && has_window(window)).then_some(mask)
    }
}

/// Why cuDNN cannot compute attention: an unsupported shape, option (softcap, dropout), mask,
/// element type or alignment.
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

/// The forward or the backward pass of attention for one shape and mask, from which cuDNN's graph
/// of operations is built.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct AttentionPass {
    pub(super) shape: AttentionShape,
    pub(super) mask: AttentionMask,
    pub(super) is_backward: bool,
}

/// GPU addresses of the tensors that a pass of attention reads and writes. Addresses of tensors
/// that only the other pass has are 0.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct AttentionOperands {
    pub(in super::super) qkv: Address,
    pub(in super::super) o: Address,
    pub(in super::super) lse: Address,
    pub(in super::super) d_o: Address,
    pub(in super::super) dqkv: Address,
}

impl AttentionOperands {
    /// Returns true if all addresses are multiples of 16 bytes, as cuDNN requires ([`ALIGNMENT`]).
    fn are_aligned(&self) -> bool {
        let AttentionOperands { qkv, o, lse, d_o, dqkv } = *self;
        [qkv, o, lse, d_o, dqkv].iter().all(|at| at.is_multiple_of(ALIGNMENT as u64))
    }
}

/// A temporary `f32` tensor in GPU memory that cuDNN needs for a pass of attention in addition to
/// the inputs and outputs.
pub(super) struct ExtraTensor {
    pub(super) id: i64,
    pub(super) elements: usize,
    /// True if the tensor must be filled with zeros before the pass.
    pub(super) is_zeroed: bool,
}

/// The sizes of attention (sequences, tokens, heads, head dimension), from which the dimensions and
/// strides of cuDNN's tensors are computed.
struct AttentionTensorLayout {
    b: i64,
    t: i64,
    heads: i64,
    kv_heads: i64,
    dim: i64,
}

impl AttentionTensorLayout {
    /// Copies the numbers of sequences, tokens, heads and elements per head from the attention
    /// shape `s`.
    fn new(s: AttentionShape) -> Self {
        let [b, t, heads, kv_heads, dim] = [s.b, s.t, s.heads, s.kv_heads, s.head_dim].map(|n| n as i64);
        AttentionTensorLayout { b, t, heads, kv_heads, dim }
    }

    /// Returns the dimensions of a tensor with one vector for each token and head: `[b, heads, t,
    /// dim]`.
    fn row_dims(&self, heads: i64) -> [i64; 4] {
        [self.b, heads, self.t, self.dim]
    }

    /// Returns the strides, in elements, of a tensor `[b, heads, t, dim]` that is stored in memory
    /// with one row of `width` elements per token. The heads of a row are adjacent.
    fn row_strides(&self, width: i64) -> [i64; 4] {
        [self.t * width, self.dim, width, 1]
    }

    /// Returns the number of elements that the queries, keys and values of one token have together
    /// in all heads.
    fn qkv_width(&self) -> i64 {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Returns the dimensions of the attention scores, one for each pair of query and key: `[b,
    /// heads, t, t]`.
    fn score_dims(&self) -> [i64; 4] {
        [self.b, self.heads, self.t, self.t]
    }

    /// Returns the dimensions of a tensor with one element for each query and head: `[b, heads, t,
    /// 1]`.
    fn per_query_dims(&self) -> [i64; 4] {
        [self.b, self.heads, self.t, 1]
    }
}

impl AttentionPass {
    /// Creates the description of a forward or backward pass of attention, from which cuDNN's graph
    /// of operations is built. Fails with the reason if cuDNN cannot compute the pass. `is_bf16` is
    /// true if all tensors of the pass are bf16.
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
            (!shape.head_dim.is_multiple_of(HEAD_DIM_MULTIPLE), UnsupportedAttention::HeadDimNotMultiple),
            (shape.t < 2, UnsupportedAttention::SequenceTooShort),
            (!operands.are_aligned(), UnsupportedAttention::Misaligned),
        ];
        if let Some((_, unsupported)) = checks.iter().find(|(applies, _)| *applies) {
            return Err(*unsupported);
        }
        let mask = AttentionMask::from_starts(starts, shape.t).ok_or(UnsupportedAttention::Documents)?;
        Ok(AttentionPass { shape, mask, is_backward })
    }

    /// Returns the ids in cuDNN's graph and the GPU addresses of all tensors that this attention
    /// pass reads or writes.
    pub(super) fn list_operand_tensors(&self, at: &AttentionOperands) -> Vec<(i64, Address)> {
        let s = self.shape;
        let size = size_of::<u16>() as u64;
        let [k, v] = [s.heads, s.heads + s.kv_heads].map(|heads| (heads * s.head_dim) as u64 * size);
        let mut tensors =
            vec![(Q_ID, at.qkv), (K_ID, at.qkv + k), (V_ID, at.qkv + v), (O_ID, at.o), (LSE_ID, at.lse)];
        if self.is_backward {
            tensors.extend([
                (D_O_ID, at.d_o),
                (D_Q_ID, at.dqkv),
                (D_K_ID, at.dqkv + k),
                (D_V_ID, at.dqkv + v),
            ]);
        }
        tensors
    }

    /// Returns the temporary tensors that cuDNN needs for this attention pass in addition to its
    /// operands.
    pub(super) fn list_extra_tensors(&self) -> Vec<ExtraTensor> {
        let s = self.shape;
        let queries = s.b * s.heads * s.t;
        if self.is_backward {
            vec![
                ExtraTensor { id: DOTS_ID, elements: queries, is_zeroed: false },
                ExtraTensor { id: D_Q_SUMS_ID, elements: queries * s.head_dim, is_zeroed: true },
            ]
        } else {
            Vec::new()
        }
    }

    /// Returns cuDNN's execution plans (compiled graphs) for this attention pass, the presumably
    /// fastest first, or none if cuDNN does not support the pass.
    pub(super) fn create_plans(
        &self,
        cudnn: &Cudnn,
    ) -> Result<impl Iterator<Item = Result<ExecutionPlan>> + use<>> {
        cudnn.with_handle(|handle| create_attention_plans(&cudnn.library, self, PlanTarget::Handle(handle)))
    }

    /// Returns how many bytes of temporary GPU memory cuDNN's preferred plan for this attention
    /// pass needs on a GPU with the given properties. `properties` describes the GPU, which this
    /// machine need not have, as JSON in cuDNN's form. Returns `None` if there is no plan.
    pub(super) fn compute_plan_workspace(&self, cudnn: &Cudnn, properties: &str) -> Result<Option<usize>> {
        let kind = cudnnBackendDescriptorType_t::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR;
        let json = cudnnBackendAttributeName_t::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION;
        let gpu =
            Descriptor::new(&cudnn.library, kind)?.set_attribute(json, properties.as_bytes())?.finalize()?;
        let target = PlanTarget::Properties(gpu);
        let plan = create_attention_plans(&cudnn.library, self, target)?.next().transpose()?;
        let sums = self.list_extra_tensors().iter().map(|t| t.elements * size_of::<f32>()).sum::<usize>();
        Ok(plan.map(|plan| plan.workspace + sums))
    }

    /// Waits until the attention pass is complete, and copies its results from GPU memory to
    /// vectors of `f32` on the host. The results of the forward pass are output and log-sum-exp,
    /// and those of the backward pass the gradients of q, k and v.
    pub(super) fn download_results(&self, gpu: &Gpu, at: &AttentionOperands) -> Result<[Vec<f32>; 3]> {
        let s = self.shape;
        let rows = s.b * s.t;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let download_bf16 = |at, len: usize| {
            let mut bits = vec![0u16; len];
            gpu.download_blocking(bytemuck::cast_slice_mut(&mut bits), at)?;
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
        gpu.download_blocking(bytemuck::cast_slice_mut(&mut lse), at.lse)?;
        Ok([download_bf16(at.o, rows * queries)?, lse, Vec::new()])
    }

    /// Returns the ids and values of the scalars (such as the scale of scores) that cuDNN's graph
    /// reads from host memory.
    fn list_scalars(&self) -> Vec<(i64, f32)> {
        let mut scalars = vec![(SCALE_ID, self.shape.scale), (MASK_VALUE_ID, f32::NEG_INFINITY)];
        if let AttentionMask::Window(window) = self.mask {
            scalars.push((WINDOW_ID, window as f32));
        }
        if self.is_backward {
            scalars.push((KEEP_SCALE_ID, 1.0)); // no dropout
        }
        scalars
    }

    /// Describes the attention shape of this pass for messages: `attention of 2 × 2048 tokens, 32
    /// and 8 heads of 128`.
    pub(super) fn describe_shape(&self) -> String {
        let s = self.shape;
        let window = if let AttentionMask::Window(window) = self.mask {
            format!(", window of {window}")
        } else {
            String::new()
        };
        format!(
            "attention of {} × {} tokens{window}, {} and {} heads of {}",
            s.b, s.t, s.heads, s.kv_heads, s.head_dim
        )
    }

    /// Describes the shape and the direction of this attention pass for messages, such as
    /// `attention of …: forward`.
    pub(super) fn describe(&self) -> String {
        format!("{}, {}", self.describe_shape(), if self.is_backward { "backward" } else { "forward" })
    }
}

/// Returns an upper bound of the bytes of temporary GPU memory that cuDNN needs for the backward
/// pass of attention with the shape `s`.
///
/// The backward pass needs fp32 sums of the queries' gradients, the gradients of keys and values by
/// query head, and on GPUs before Hopper a second set of sums. cuDNN 9.19 reports these sizes for
/// its plans.
pub fn estimate_cudnn_workspace_bytes(s: AttentionShape) -> usize {
    let queries = s.b * s.heads * s.t;
    let gradients = if s.heads == s.kv_heads { 0 } else { 2 * size_of::<u16>() };
    queries * (s.head_dim * (2 * size_of::<f32>() + gradients) + 2 * size_of::<f32>())
}

/// Returns cuDNN's execution plans (compiled graphs) for a pass of attention. The plan that cuDNN
/// expects to be the fastest comes first.
fn create_attention_plans(
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
    create_graph_plans(graph, pass.list_scalars(), target)
}

/// Adds the tensor of queries, keys or values, or of their gradients, to the graph of cuDNN
/// operations.
fn add_qkv_tensor(
    g: &mut OperationGraph,
    id: i64,
    l: &AttentionTensorLayout,
    heads: i64,
) -> Result<GraphTensor> {
    g.add_tensor(
        TensorLocation::Device(id),
        CUDNN_DATA_BFLOAT16,
        l.row_dims(heads),
        l.row_strides(l.qkv_width()),
    )
}

/// Adds the tensor of keys or values to the graph of cuDNN operations, transposed so that tokens
/// are columns.
fn add_transposed_qkv_tensor(
    g: &mut OperationGraph,
    id: i64,
    l: &AttentionTensorLayout,
) -> Result<GraphTensor> {
    let ([b, h, t, d], [x, y, z, w]) = (l.row_dims(l.kv_heads), l.row_strides(l.qkv_width()));
    g.add_tensor(TensorLocation::Device(id), CUDNN_DATA_BFLOAT16, [b, h, d, t], [x, y, w, z])
}

/// Adds a tensor with the shape of the attention output (the output itself or its gradient,
/// depending on `id`) to the graph of cuDNN operations.
fn add_output(g: &mut OperationGraph, id: i64, l: &AttentionTensorLayout) -> Result<GraphTensor> {
    g.add_tensor(
        TensorLocation::Device(id),
        CUDNN_DATA_BFLOAT16,
        l.row_dims(l.heads),
        l.row_strides(l.heads * l.dim),
    )
}

/// Adds a tensor with one `f32` for each query and head, such as the log-sum-exp of the scores, to
/// the graph of cuDNN operations.
fn add_per_query_tensor(g: &mut OperationGraph, id: i64, l: &AttentionTensorLayout) -> Result<GraphTensor> {
    g.add_tensor(
        TensorLocation::Device(id),
        CUDNN_DATA_FLOAT,
        l.per_query_dims(),
        compute_packed_strides(l.per_query_dims()),
    )
}

/// Adds cuDNN operations that set the scores of keys to which a query does not attend (masked keys)
/// to −∞. Returns the masked scores.
fn add_mask(g: &mut OperationGraph, mask: AttentionMask, scores: GraphTensor) -> Result<GraphTensor> {
    let masked = g.add_host_scalar(MASK_VALUE_ID)?;
    let (query, key) = (g.add_index_along_axis(scores, 2)?, g.add_index_along_axis(scores, 3)?);
    let is_causal = g.add_pointwise_result(CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, query, Some(key))?;
    let scores = g.add_select(is_causal, scores, masked)?;
    let AttentionMask::Window(_) = mask else { return Ok(scores) };
    let (query, key) = (g.add_index_along_axis(scores, 2)?, g.add_index_along_axis(scores, 3)?);
    let window = g.add_host_scalar(WINDOW_ID)?;
    let end = g.add_pointwise_result(CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, key, Some(window))?;
    let is_in_window =
        g.add_pointwise_result(CUDNN_POINTWISE_CMP_GT, CUDNN_DATA_BOOLEAN, end, Some(query))?;
    g.add_select(is_in_window, scores, masked)
}

/// Adds the forward pass of attention to the graph of cuDNN operations: `o = softmax(mask(scale · q
/// · kᵀ)) · v`, and the log-sum-exp of each row.
fn add_forward(g: &mut OperationGraph, pass: &AttentionPass) -> Result<()> {
    let l = AttentionTensorLayout::new(pass.shape);
    let (q, k, v) = (
        add_qkv_tensor(g, Q_ID, &l, l.heads)?,
        add_transposed_qkv_tensor(g, K_ID, &l)?,
        add_qkv_tensor(g, V_ID, &l, l.kv_heads)?,
    );
    let scale = g.add_host_scalar(SCALE_ID)?;
    let scores = g.add_virtual_tensor(CUDNN_DATA_FLOAT, l.score_dims())?;
    g.add_matmul(q, k, scores)?;
    let scores = g.add_pointwise_result(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, scores, Some(scale))?;
    let scores = add_mask(g, pass.mask, scores)?;

    let max = g.add_virtual_tensor(CUDNN_DATA_FLOAT, l.per_query_dims())?;
    g.add_reduce(CUDNN_REDUCE_TENSOR_MAX, scores, max)?;
    let shifted = g.add_pointwise_result(CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT, scores, Some(max))?;
    let exponentials = g.add_pointwise_result(CUDNN_POINTWISE_EXP, CUDNN_DATA_FLOAT, shifted, None)?;
    let sum = g.add_virtual_tensor(CUDNN_DATA_FLOAT, l.per_query_dims())?;
    g.add_reduce(CUDNN_REDUCE_TENSOR_ADD, exponentials, sum)?;
    let log_sum = g.add_pointwise_result(CUDNN_POINTWISE_LOG, CUDNN_DATA_FLOAT, sum, None)?;
    let lse = add_per_query_tensor(g, LSE_ID, &l)?;
    g.add_pointwise(CUDNN_POINTWISE_ADD, max, Some(log_sum), lse)?;

    let probabilities =
        g.add_pointwise_result(CUDNN_POINTWISE_DIV, CUDNN_DATA_BFLOAT16, exponentials, Some(sum))?;
    let o = add_output(g, O_ID, &l)?;
    g.add_matmul(probabilities, v, o)
}

/// Adds the backward pass of attention, which computes the gradients of queries, keys and values,
/// to the graph of cuDNN operations. With p the probabilities and dP = dO·vᵀ: dV = pᵀ·dO, dS =
/// p·(dP − Σ dO·O)·scale, dQ = dS·k, and dK = dSᵀ·q.
fn add_backward(g: &mut OperationGraph, pass: &AttentionPass) -> Result<()> {
    let l = AttentionTensorLayout::new(pass.shape);
    let (d_o, o) = (add_output(g, D_O_ID, &l)?, add_output(g, O_ID, &l)?);
    let rows = l.row_dims(l.heads);
    let terms =
        g.add_tensor(TensorLocation::Virtual, CUDNN_DATA_FLOAT, rows, compute_packed_strides(rows))?;
    g.add_pointwise(CUDNN_POINTWISE_MUL, d_o, Some(o), terms)?;
    let dots = g.add_virtual_tensor(CUDNN_DATA_FLOAT, l.per_query_dims())?;
    g.add_reduce(CUDNN_REDUCE_TENSOR_ADD, terms, dots)?;
    let keep_scale = g.add_host_scalar(KEEP_SCALE_ID)?;
    let scaled_dots = add_per_query_tensor(g, DOTS_ID, &l)?;
    g.add_pointwise(CUDNN_POINTWISE_MUL, dots, Some(keep_scale), scaled_dots)?;

    let (q, k, v) = (
        add_qkv_tensor(g, Q_ID, &l, l.heads)?,
        add_transposed_qkv_tensor(g, K_ID, &l)?,
        add_transposed_qkv_tensor(g, V_ID, &l)?,
    );
    let scale = g.add_host_scalar(SCALE_ID)?;
    let scores = g.add_virtual_tensor(CUDNN_DATA_FLOAT, l.score_dims())?;
    g.add_matmul(q, k, scores)?;
    let scores = g.add_pointwise_result(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, scores, Some(scale))?;
    let lse = add_per_query_tensor(g, LSE_ID, &l)?;
    let shifted = g.add_pointwise_result(CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT, scores, Some(lse))?;
    let shifted = add_mask(g, pass.mask, shifted)?;
    let p = g.add_pointwise_result(CUDNN_POINTWISE_EXP, CUDNN_DATA_FLOAT, shifted, None)?;
    let p_transposed = g.add_transpose(CUDNN_DATA_BFLOAT16, p)?;
    add_kv_gradient(g, &l, p_transposed, d_o, D_V_ID)?;

    let d_p = g.add_virtual_tensor(CUDNN_DATA_FLOAT, l.score_dims())?;
    g.add_matmul(d_o, v, d_p)?;
    let d_s = g.add_pointwise_result(CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT, d_p, Some(scaled_dots))?;
    let d_s = g.add_pointwise_result(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, d_s, Some(p))?;
    let d_s = g.add_pointwise_result(CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, d_s, Some(scale))?;
    let d_s_transposed = g.add_transpose(CUDNN_DATA_BFLOAT16, d_s)?;
    add_kv_gradient(g, &l, d_s_transposed, q, D_K_ID)?;

    let k = g.add_transpose(CUDNN_DATA_FLOAT, k)?;
    let sums = g.add_tensor(
        TensorLocation::Device(D_Q_SUMS_ID),
        CUDNN_DATA_FLOAT,
        rows,
        compute_packed_strides(rows),
    )?;
    g.add_matmul(d_s, k, sums)?;
    let d_q = add_qkv_tensor(g, D_Q_ID, &l, l.heads)?;
    g.add_pointwise(CUDNN_POINTWISE_IDENTITY, sums, None, d_q)
}

/// Adds the operations that compute the gradient of keys or values to the graph of cuDNN
/// operations. Computes `a · b` for each query head, and sums over the query heads that share a key
/// head.
fn add_kv_gradient(
    g: &mut OperationGraph,
    l: &AttentionTensorLayout,
    a: GraphTensor,
    b: GraphTensor,
    id: i64,
) -> Result<()> {
    let gradient = add_qkv_tensor(g, id, l, l.kv_heads)?;
    if l.heads == l.kv_heads {
        return g.add_matmul(a, b, gradient);
    }
    let by_query_head = g.add_virtual_tensor(CUDNN_DATA_BFLOAT16, l.row_dims(l.heads))?;
    g.add_matmul(a, b, by_query_head)?;
    g.add_reduce(CUDNN_REDUCE_TENSOR_ADD, by_query_head, gradient)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_follows_from_the_first_keys() {
        assert_eq!(AttentionMask::from_starts(&[0, 0, 0, 0], 4), Some(AttentionMask::Causal));
        assert_eq!(AttentionMask::from_starts(&[0, 0, 0, 0], 2), Some(AttentionMask::Causal));
        assert_eq!(AttentionMask::from_starts(&[0, 0, 1, 2, 0, 0, 1, 2], 4), Some(AttentionMask::Window(2)));
        assert_eq!(AttentionMask::from_starts(&[0, 1, 2], 3), Some(AttentionMask::Window(1)));
        assert_eq!(AttentionMask::from_starts(&[0, 0, 2, 2], 4), None, "a document begins");
        assert_eq!(AttentionMask::from_starts(&[0, 0, 0, 0, 0, 0, 1, 2], 4), None, "sequences differ");
        assert_eq!(AttentionMask::from_starts(&[0, 0, 1, 2, 0, 0, 0, 0], 4), None, "sequences differ");
        assert_eq!(AttentionMask::from_starts(&[1, 0], 2), None);
        assert_eq!(AttentionMask::from_starts(&[], 4), None);
    }
}
