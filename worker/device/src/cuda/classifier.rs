//! The classifier: logits, cross-entropy and their gradients, one chunk of rows at a time, so that
//! the full logits are never in memory.
use super::backend::Cuda;
use super::compile::CLASSIFIER;
use super::launch::KernelArg;
use super::matmul_operand::{MatmulOperand, matmul};
use super::tensor_arg::{dtype_code, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::expect_len;
use crate::ops::{ClassifierGrads, IGNORE_LABEL, WriteMode};
use crate::storage::Storage;

/// Maximum number of logits in a chunk, unless the chunk has the minimum number of rows. Chunks are
/// large because each chunk reads and writes the whole gradient of the matrix, and because matmuls
/// are efficient with many rows.
const MAX_CHUNK_LOGITS: usize = 256 << 20;
/// Minimum number of rows in a chunk.
const MIN_CHUNK_ROWS: usize = 1024;
/// Alignment of rows of logits, in elements. Matmuls are slow on rows that are not aligned to 16
/// bytes.
const ROW_ALIGNMENT: usize = 64;

/// Sizes of one call of the classifier: `m` rows of `d` elements and a vocabulary of `v`, and the
/// softcap of the logits.
#[derive(Clone, Copy)]
pub(super) struct ClassifierShape {
    pub(super) m: usize,
    pub(super) d: usize,
    pub(super) v: usize,
    pub(super) cap: Option<f32>,
}

/// Returns the number of rows per chunk of the GPU's classifier, for `m` rows of `v` logits in
/// total.
fn choose_chunk_rows(m: usize, v: usize) -> usize {
    (MAX_CHUNK_LOGITS / v.max(1)).max(MIN_CHUNK_ROWS).min(m)
}

/// Returns the size in bytes of the logits of one chunk in GPU memory, for `m` rows in total and a
/// vocabulary of `v`. Memory estimates use the result.
pub fn count_classifier_workspace_bytes(m: usize, v: usize) -> usize {
    choose_chunk_rows(m, v) * v.next_multiple_of(ROW_ALIGNMENT) * size_of::<f32>()
}

/// Implements [`crate::Ops::compute_softcapped_classifier_loss`].
pub(super) fn compute_loss_in_chunks(
    cuda: &Cuda,
    loss: ViewMut,
    x: View,
    w: View,
    labels: &[u32],
    shape: ClassifierShape,
    mut grads: Option<ClassifierGrads>,
) {
    let ClassifierShape { m, d, v, cap } = shape;
    check_arguments(loss.len(), x.len(), w.len(), labels, shape, grads.as_ref());
    if let Some(g) =
        grads.as_mut().filter(|g| g.dw_write == WriteMode::Overwrite && !g.dw.is_empty() && m == 0)
    {
        cuda.clear(g.dw.reborrow());
    }
    let (rows, stride) = (choose_chunk_rows(m, v), v.next_multiple_of(ROW_ALIGNMENT));
    let logits = cuda.alloc_scratch(count_classifier_workspace_bytes(m, v));
    // The matmuls of the backward pass need operands of one type, so dlogits are rounded to the
    // type of the activations and weights. They overwrite the logits, row by row.
    let gradient_dtype = if x.dtype() == w.dtype() { x.dtype() } else { Dtype::F32 };
    let dlogits = MatmulOperand {
        at: logits.address(),
        dtype: gradient_dtype,
        stride: stride * size_of::<f32>() / gradient_dtype.size(),
        transposed: false,
    };
    let loss = f32_gpu_address(loss.as_view());
    let all_labels = cuda.upload_input("labels", labels);
    for start in (0..m).step_by(rows.max(1)) {
        let count = rows.min(m - start);
        let x = MatmulOperand::new(x.slice(start * d..(start + count) * d), d, false);
        let f32_logits = MatmulOperand { dtype: Dtype::F32, stride, ..dlogits };
        matmul(cuda, f32_logits, x, MatmulOperand::new(w, d, true), [count, v, d], WriteMode::Overwrite);
        // the type of the gradient that overwrites the logits; -1 for no gradient
        let gradient_code = if grads.is_some() { dtype_code(gradient_dtype) } else { -1 };
        let (loss, labels) = (loss + (start * 4) as u64, all_labels + (start * 4) as u64);
        let scale = grads.as_ref().map_or(0.0, |g| g.scale);
        let sizes = [v as i64, stride as i64, gradient_code];
        let arguments: [&dyn KernelArg; 8] =
            [&loss, &logits.address(), &labels, &sizes[0], &sizes[1], &sizes[2], &cap.unwrap_or(0.0), &scale];
        let kernel = if cap.is_some() { c"cross_entropy_softcapped" } else { c"cross_entropy" };
        cuda.launch_row_blocks(CLASSIFIER, kernel, count, v, &arguments);
        if let Some(g) = &grads {
            let dx = MatmulOperand::new(g.dx.as_view().slice(start * d..(start + count) * d), d, false);
            matmul(cuda, dx, dlogits, MatmulOperand::new(w, d, false), [count, d, v], WriteMode::Overwrite);
            if !g.dw.is_empty() {
                let write = if start == 0 { g.dw_write } else { WriteMode::Accumulate };
                let dw = MatmulOperand::new(g.dw.as_view(), d, false);
                matmul(cuda, dw, MatmulOperand { transposed: true, ..dlogits }, x, [v, d, count], write);
            }
        }
    }
}

/// Panics if a length or a label does not fit the shape.
fn check_arguments(
    loss: usize,
    x: usize,
    w: usize,
    labels: &[u32],
    shape: ClassifierShape,
    grads: Option<&ClassifierGrads>,
) {
    let ClassifierShape { m, d, v, .. } = shape;
    assert!(v > 0 && d > 0, "classifier: the vocabulary or the model dimension is 0");
    expect_len("classifier", "loss", loss, m);
    expect_len("classifier", "x", x, m * d);
    expect_len("classifier", "w", w, v * d);
    expect_len("classifier", "labels", labels.len(), m);
    let outside = labels.iter().find(|&&l| l != IGNORE_LABEL && l as usize >= v);
    assert!(outside.is_none(), "classifier: label {outside:?} is not below the vocabulary size {v}");
    if let Some(g) = grads {
        expect_len("classifier", "dx", g.dx.len(), m * d);
        if !g.dw.is_empty() {
            expect_len("classifier", "dw", g.dw.len(), v * d);
        }
    }
}
