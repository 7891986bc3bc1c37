//! The classifier (output layer and cross-entropy loss in one op) on the GPU. Logits are computed
//! for one chunk of rows at a time, so that the full logits are never in memory.
use super::backend::{Cuda, LaunchSize};
use super::compile::CLASSIFIER_SOURCE;
use super::launch::KernelArg;
use super::matmul_operand::{MatmulOperand, matmul};
use super::memory::DeviceMemory;
use super::tensor_arg::{dtype_code, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::{ClassifierGrads, ClassifierOps, ClassifierShape, WriteMode};
use crate::storage::Storage;

/// Maximum number of logits that the classifier keeps in GPU memory at a time, unless this would be
/// less than [`MIN_CHUNK_ROWS`] rows of logits. Chunks are large because each chunk reads and
/// writes the whole gradient of the matrix, and because matmuls are efficient with many rows.
const MAX_CHUNK_LOGITS: usize = 256 << 20;
/// Minimum number of rows (tokens) whose logits the classifier computes and keeps in GPU memory at
/// a time.
const MIN_CHUNK_ROWS: usize = 1024;
/// The length of each row of logits in memory is rounded up to a multiple of this number of
/// elements. Matmuls are slow on rows that are not aligned to 16 bytes.
const ROW_ALIGNMENT: usize = 64;
/// A vocabulary with 16-bit output weights is padded to a multiple of this number of entries (16
/// bytes), to keep the classifier's matmuls fast.
const VOCABULARY_ALIGNMENT: usize = 8;
/// If the vocabulary is padded, the classifier computes logits in chunks whose number of tokens is
/// a multiple of this number.
const CHUNK_ROW_ALIGNMENT: usize = 128;

/// The number of tokens whose logits the classifier computes at a time, and the padded size of the
/// vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClassifierLayout {
    /// Number of rows whose logits are in memory at a time.
    chunk_rows: usize,
    /// Number of elements from one row of logits to the next one.
    stride: usize,
    /// Number of logits per row in the matmuls: the size of the vocabulary, padded if that size is
    /// unaligned.
    columns: usize,
    /// Size in bytes of the padded copy of the output matrix; 0 without a copy.
    copy_bytes: usize,
}

impl ClassifierLayout {
    /// Chooses how the classifier divides `m` tokens of `d` elements into chunks, and to which size
    /// it pads its vocabulary of `v` entries. `dtype` is the type of the output matrix.
    ///
    /// A matrix with 16-bit elements and an unaligned number of rows is copied and padded with rows
    /// of zeros.
    fn new([m, d, v]: [usize; 3], dtype: Dtype) -> ClassifierLayout {
        let stride = v.next_multiple_of(ROW_ALIGNMENT);
        let chunk_rows = (MAX_CHUNK_LOGITS / v.max(1)).max(MIN_CHUNK_ROWS).min(m);
        if dtype == Dtype::F32 || v.is_multiple_of(VOCABULARY_ALIGNMENT) {
            return ClassifierLayout { chunk_rows, stride, columns: v, copy_bytes: 0 };
        }
        // chunks of nearly equal size
        let chunk_rows = m.div_ceil(m.div_ceil(chunk_rows.max(1)).max(1));
        let chunk_rows = chunk_rows.next_multiple_of(CHUNK_ROW_ALIGNMENT).min(m);
        ClassifierLayout { chunk_rows, stride, columns: stride, copy_bytes: stride * d * dtype.size() }
    }

    /// Returns how many bytes the `f32` logits of one chunk of tokens take, the only logits that
    /// the classifier keeps in memory at a time.
    fn count_chunk_logits_bytes(&self) -> usize {
        self.chunk_rows * self.stride * size_of::<f32>()
    }
}

/// Returns the size in bytes of the temporary GPU memory of the classifier, which holds logits and,
/// if necessary, a padded weight matrix. `m` is the number of rows in total, `d` their number of
/// elements, `v` the size of the vocabulary, and `dtype` the type of the output matrix. Memory
/// estimates use the result.
pub fn count_classifier_workspace_bytes([m, d, v]: [usize; 3], dtype: Dtype) -> usize {
    let layout = ClassifierLayout::new([m, d, v], dtype);
    layout.count_chunk_logits_bytes() + layout.copy_bytes
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
            self.fill_with_zeros(g.dw.reborrow());
        }
        let layout = ClassifierLayout::new([m, d, v], w.dtype());
        let ClassifierLayout { chunk_rows: rows, stride, columns, .. } = layout;
        let logits = self.alloc_scratch(layout.count_chunk_logits_bytes());
        let (w, _padded_memory) = self.pad_output_matrix(w, d, layout);
        let transposed_w = MatmulOperand { transposed: true, ..w };
        // The matmuls of the backward pass need operands of one type, so dlogits are rounded to the
        // type of the activations and weights. They overwrite the logits, row by row.
        let gradient_dtype = if x.dtype() == w.dtype { x.dtype() } else { Dtype::F32 };
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
            let sizes = [count, columns, d];
            matmul(self, f32_logits, x, transposed_w, sizes, WriteMode::Overwrite);
            let (loss, labels) = (loss + (start * 4) as u64, all_labels + (start * 4) as u64);
            let arguments: [&dyn KernelArg; 9] =
                [&loss, &logits.address(), &labels, &v, &columns, &stride, &gradient_code, &cap, &scale];
            self.launch(
                CLASSIFIER_SOURCE,
                kernel,
                LaunchSize::RowBlocks { rows: count, width: v },
                &arguments,
            );
            let Some(g) = &grads else { continue };
            let dx = MatmulOperand::from_rows(g.dx.as_view().slice(elements), d);
            matmul(self, dx, dlogits, w, [count, d, columns], WriteMode::Overwrite);
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

impl Cuda {
    /// Returns a copy of the output layer's weight `w` with added rows of zeros, if `layout`
    /// requires a padded vocabulary. Returns the matrix that the matmuls read, and the memory of
    /// the copy, which the caller must keep until the matmuls are enqueued.
    fn pad_output_matrix(
        &self,
        w: View,
        d: usize,
        layout: ClassifierLayout,
    ) -> (MatmulOperand, Option<DeviceMemory>) {
        let from = MatmulOperand::from_rows(w, d);
        if layout.copy_bytes == 0 {
            return (from, None);
        }
        let memory = self.alloc_scratch(layout.copy_bytes);
        let (at, bytes) = (memory.address(), w.len() * w.dtype().size());
        let copy = || {
            self.gpu.enqueue_copy(at, from.at, bytes)?;
            self.gpu.enqueue_zero_fill(at + bytes as u64, layout.copy_bytes - bytes)
        };
        self.run_profiled(|| "pad the output matrix".to_owned(), copy);
        (MatmulOperand { at, ..from }, Some(memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_16_bit_matrices_with_an_unaligned_vocabulary_are_padded() {
        let gpt2 = [32 * 1024, 768, 50257];
        let layout = ClassifierLayout::new(gpt2, Dtype::Bf16);
        let columns = 50304;
        let expected =
            ClassifierLayout { chunk_rows: 4736, stride: columns, columns, copy_bytes: columns * 768 * 2 };
        assert_eq!(layout, expected, "seven chunks, which are as large as six and a smaller one");
        let bytes = 4736 * columns * 4 + columns * 768 * 2;
        assert_eq!(count_classifier_workspace_bytes(gpt2, Dtype::Bf16), bytes);
        for (v, dtype) in [(50256, Dtype::Bf16), (50257, Dtype::F32)] {
            let layout = ClassifierLayout::new([32 * 1024, 768, v], dtype);
            let chunk_rows = (256 << 20) / v;
            assert_eq!(layout, ClassifierLayout { chunk_rows, stride: columns, columns: v, copy_bytes: 0 });
        }
        for m in [0, 1, 5, 127, 129, 1000, 1025, 5000] {
            for v in [1, 3, 700, 50257, 400_001] {
                let layout = ClassifierLayout::new([m, 8, v], Dtype::F16);
                assert!(layout.chunk_rows <= m && (m == 0 || layout.chunk_rows > 0), "{m} {v}");
            }
        }
    }
}
