//! The classifier (output layer and cross-entropy loss in one op) on the GPU. Logits are computed
//! for one chunk of rows at a time, so that the full logits are never in memory.
use super::backend::{Cuda, Work};
use super::compile::CLASSIFIER;
use super::launch::KernelArg;
use super::matmul_operand::{MatmulOperand, matmul};
use super::tensor_arg::{dtype_code, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::{ClassifierGrads, ClassifierOps, ClassifierShape, WriteMode};
use crate::storage::Storage;

/// Maximum number of logits that are in memory at a time, unless a chunk has the minimum number of
/// rows. Chunks are large because each chunk reads and writes the whole gradient of the matrix, and
/// because matmuls are efficient with many rows.
const MAX_CHUNK_LOGITS: usize = 256 << 20;
/// Minimum number of rows of a chunk, the rows whose logits are in memory at a time.
const MIN_CHUNK_ROWS: usize = 1024;
/// The length of each row of logits in memory is rounded up to a multiple of this number of
/// elements. Matmuls are slow on rows that are not aligned to 16 bytes.
const ROW_ALIGNMENT: usize = 64;

/// Returns the number of rows whose logits are in memory at a time, for `m` rows of `v` logits in
/// total.
fn choose_chunk_rows(m: usize, v: usize) -> usize {
    (MAX_CHUNK_LOGITS / v.max(1)).max(MIN_CHUNK_ROWS).min(m)
}

/// Returns the size in bytes of the logits that are in GPU memory at a time, for `m` rows in total
/// and a vocabulary of `v`. Memory estimates use the result.
pub fn count_classifier_workspace_bytes(m: usize, v: usize) -> usize {
    choose_chunk_rows(m, v) * v.next_multiple_of(ROW_ALIGNMENT) * size_of::<f32>()
}

impl ClassifierOps for Cuda {
    fn compute_classifier_loss(
        &self,
        loss: ViewMut,
        x: View,
        w: View,
        labels: &[u32],
        shape: ClassifierShape,
        mut grads: Option<ClassifierGrads>,
    ) {
        let ClassifierShape { m, d, v, softcap } = shape;
        shape.check_arguments([loss.len(), x.len(), w.len()], labels, grads.as_ref());
        if let Some(g) = &mut grads
            && g.dw_write == WriteMode::Overwrite
            && !g.dw.is_empty()
            && m == 0
        {
            self.clear(g.dw.reborrow());
        }
        let (rows, stride) = (choose_chunk_rows(m, v), v.next_multiple_of(ROW_ALIGNMENT));
        let logits = self.alloc_scratch(count_classifier_workspace_bytes(m, v));
        // The matmuls of the backward pass need operands of one type, so dlogits are rounded to the
        // type of the activations and weights. They overwrite the logits, row by row.
        let gradient_dtype = if x.dtype() == w.dtype() { x.dtype() } else { Dtype::F32 };
        let dlogits = MatmulOperand {
            at: logits.address(),
            dtype: gradient_dtype,
            stride: stride * size_of::<f32>() / gradient_dtype.size(),
            transposed: false,
        };
        // the type of the gradient that overwrites the logits; -1 for no gradient
        let gradient_code = if grads.is_some() { dtype_code(gradient_dtype) } else { -1 };
        let kernel = if softcap.is_some() { c"cross_entropy_softcapped" } else { c"cross_entropy" };
        let (cap, scale) = (softcap.unwrap_or(0.0), grads.as_ref().map_or(0.0, |g| g.scale));
        let loss = f32_gpu_address(loss.as_view());
        let all_labels = self.upload_input("labels", labels);
        for start in (0..m).step_by(rows.max(1)) {
            let count = rows.min(m - start);
            let elements = start * d..(start + count) * d;
            let x = MatmulOperand::from_rows(x.slice(elements.clone()), d);
            let f32_logits = MatmulOperand { dtype: Dtype::F32, stride, ..dlogits };
            let sizes = [count, v, d];
            matmul(self, f32_logits, x, MatmulOperand::from_transposed(w, d), sizes, WriteMode::Overwrite);
            let (loss, labels) = (loss + (start * 4) as u64, all_labels + (start * 4) as u64);
            let arguments: [&dyn KernelArg; 8] =
                [&loss, &logits.address(), &labels, &v, &stride, &gradient_code, &cap, &scale];
            self.launch(CLASSIFIER, kernel, Work::RowBlocks { rows: count, width: v }, &arguments);
            let Some(g) = &grads else { continue };
            let dx = MatmulOperand::from_rows(g.dx.as_view().slice(elements), d);
            let sizes = [count, d, v];
            matmul(self, dx, dlogits, MatmulOperand::from_rows(w, d), sizes, WriteMode::Overwrite);
            if !g.dw.is_empty() {
                let write = if start == 0 { g.dw_write } else { WriteMode::Accumulate };
                let (dw, dlogits) = (
                    MatmulOperand::from_rows(g.dw.as_view(), d),
                    MatmulOperand { transposed: true, ..dlogits },
                );
                matmul(self, dw, dlogits, x, [v, d, count], write);
            }
        }
    }
}
