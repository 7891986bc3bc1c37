//! [`ExternalTensor`] describes one tensor in a checkpoint of another program, and [`TensorPart`]
//! describes which range of a file stores some of its elements.
use crate::catalog::model::TensorInfo;
use crate::codec::safetensors::SafetensorsEntry;
use crate::codec::torch_file::TensorView;
use crate::error::Result;
use crate::tensor::{Dtype, TensorRole, count_elements};
use std::ops::Range;
use std::sync::Arc;

/// A tensor of another program's checkpoint, and the parts of files that hold its elements.
pub(crate) struct ExternalTensor {
    pub(crate) info: TensorInfo,
    /// The parts, sorted by their first element. Together the parts cover the tensor.
    pub(crate) parts: Vec<TensorPart>,
}

impl ExternalTensor {
    /// Describes a checkpoint tensor that consists of all elements of the torch tensor `view`, and
    /// is a weight, buffer or optimizer state as `role` states. `file` is the index of the view's
    /// file in `StoredFiles`.
    pub(crate) fn from_whole_view(
        name: &str,
        role: TensorRole,
        file: usize,
        view: &TensorView,
    ) -> ExternalTensor {
        ExternalTensor::from_view_elements(name, role, &view.shape, file, view, 0..view.element_count())
    }

    /// Describes a checkpoint tensor that consists of those elements of the torch tensor `view`
    /// whose row-major indices are in the range `taken`. `file` is the index of the view's file in
    /// `StoredFiles`.
    pub(crate) fn from_view_elements(
        name: &str,
        role: TensorRole,
        shape: &[u64],
        file: usize,
        view: &TensorView,
        taken: Range<u64>,
    ) -> ExternalTensor {
        let part = (!taken.is_empty()).then(|| TensorPart::new(file, view, taken, 0));
        ExternalTensor::from_parts(name, role, view.dtype, shape, part.into_iter().collect())
    }

    /// Describes a checkpoint tensor that a safetensors file stores, with the name, dtype and shape
    /// that the header of the file states. The elements of the tensor are the whole span `span` of
    /// this file.
    pub(crate) fn from_safetensors_entry(
        entry: SafetensorsEntry,
        role: TensorRole,
        file: usize,
        span: usize,
    ) -> ExternalTensor {
        let SafetensorsEntry { name, dtype, shape, .. } = entry;
        let count = count_elements(&shape).unwrap_or(0);
        let part = TensorPart { start: 0, count, file, span, offset: 0, skip: 0, strided: None };
        let parts = if count > 0 { vec![part] } else { Vec::new() };
        ExternalTensor { info: TensorInfo { name, role, dtype, shape }, parts }
    }

    /// Describes a checkpoint tensor whose elements are stored in `parts`, which the caller must
    /// sort by the index of the first element in each.
    pub(crate) fn from_parts(
        name: &str,
        role: TensorRole,
        dtype: Dtype,
        shape: &[u64],
        parts: Vec<TensorPart>,
    ) -> ExternalTensor {
        ExternalTensor {
            info: TensorInfo { name: name.to_owned(), role, dtype, shape: shape.to_vec() },
            parts,
        }
    }
}

/// A range of consecutive elements of one checkpoint tensor, together with the file and the offset
/// at which the elements are stored.
#[derive(Clone, Debug)]
pub(crate) struct TensorPart {
    /// Index of the first element in the tensor.
    pub(crate) start: u64,
    /// Number of elements of the part.
    pub(crate) count: u64,
    /// Index of the file in `StoredFiles`.
    pub(super) file: usize,
    /// Index, in the file, of the span that contains the part. A span is, for example, a zip member
    /// of a torch file.
    pub(super) span: usize,
    /// Index of the part's first element, counted from the start of the span. If the view is not
    /// contiguous, the index of the view's first element.
    pub(super) offset: u64,
    /// If the part belongs to a view whose elements are not contiguous, the number of elements of
    /// the view before the part; otherwise 0.
    skip: u64,
    /// The shape and strides of the view to which the part belongs, or `None` if the view is
    /// contiguous.
    pub(super) strided: Option<Arc<StridedLayout>>,
}

/// The shape and the strides of a torch tensor whose elements are not stored contiguously in its
/// file, such as a transposed matrix.
#[derive(Debug)]
pub(super) struct StridedLayout {
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl TensorPart {
    /// Describes where a torch file stores the elements with the row-major indices `taken` of the
    /// tensor `view`. The first of these elements has the index `start` in the tensor. `file` is
    /// the index of the view's file in `StoredFiles`.
    pub(crate) fn new(file: usize, view: &TensorView, taken: Range<u64>, start: u64) -> TensorPart {
        let contiguous = view.is_contiguous();
        let strided = || Arc::new(StridedLayout { shape: view.shape.clone(), strides: view.strides.clone() });
        TensorPart {
            start,
            count: taken.end - taken.start,
            file,
            span: view.member,
            offset: view.offset + if contiguous { taken.start } else { 0 },
            skip: if contiguous { 0 } else { taken.start },
            strided: (!contiguous).then(strided),
        }
    }

    /// Describes where some elements of this part are stored, as the description of a part of
    /// another tensor that begins with index `start`. The elements must be in this part.
    pub(crate) fn slice_for_tensor(&self, taken: Range<u64>, start: u64) -> TensorPart {
        let before = taken.start - self.start;
        let mut part = TensorPart { start, count: taken.end - taken.start, ..self.clone() };
        match part.strided.is_some() {
            true => part.skip += before,
            false => part.offset += before,
        }
        part
    }

    /// Returns the indices of the tensor's elements that this part stores.
    pub(crate) fn element_range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.count)
    }

    /// Calls `run(first, count)` for each group of `count` tensor elements that are contiguous in
    /// the file, until all elements with indices in `range` are covered. `first` is the index of
    /// the group's first element in the span.
    ///
    /// # Errors
    /// Fails with the first error that `run` returns, and makes no further calls.
    pub(super) fn for_each_run(
        &self,
        range: Range<u64>,
        mut run: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let (first, count) = (range.start - self.start, range.end - range.start);
        let Some(strided) = &self.strided else { return run(self.offset + first, count) };
        let inner = match (strided.shape.last(), strided.strides.last()) {
            (Some(&size), Some(1)) => size,
            _ => 1,
        };
        let (mut at, end) = (self.skip + first, self.skip + first + count);
        while at < end {
            let len = (inner - at % inner).min(end - at);
            run(self.offset + strided.locate_element(at), len)?;
            at += len;
        }
        Ok(())
    }
}

impl StridedLayout {
    /// Returns the distance in the file, in elements, from the first element of a strided tensor to
    /// the element with the row-major index `index`.
    fn locate_element(&self, mut index: u64) -> u64 {
        let mut position = 0;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            position += index % size * stride;
            index /= size;
        }
        position
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Dtype;
    use proptest::prelude::*;

    /// Creates a part from the range `taken` of the elements of a view. The part's first element is
    /// element 100 of the tensor.
    fn make_part(shape: &[u64], strides: &[u64], offset: u64, taken: Range<u64>) -> TensorPart {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        TensorPart::new(0, &TensorView { dtype: Dtype::F32, shape, strides, member: 0, offset }, taken, 100)
    }

    /// Lists the positions of the tensor's elements `range` within the span that stores them.
    fn list_positions(part: &TensorPart, range: Range<u64>) -> Vec<u64> {
        let mut positions = Vec::new();
        let result = part.for_each_run(range, |at, n| {
            positions.extend(at..at + n);
            Ok(())
        });
        result.expect("runs");
        positions
    }

    #[test]
    fn transposed_and_sliced_views_have_the_right_runs() {
        assert_eq!(list_positions(&make_part(&[2, 3], &[1, 2], 5, 0..6), 100..106), [5, 7, 9, 6, 8, 10]);
        assert_eq!(list_positions(&make_part(&[2, 3], &[10, 1], 0, 1..6), 100..105), [1, 2, 10, 11, 12]);
        assert_eq!(list_positions(&make_part(&[4], &[0], 3, 0..4), 101..103), [3, 3]);
    }

    #[test]
    fn a_slice_of_a_part_has_the_elements_of_the_part() {
        for part in [make_part(&[2, 3], &[1, 2], 5, 0..6), make_part(&[6], &[1], 5, 0..6)] {
            let sliced = part.slice_for_tensor(102..105, 7);
            assert_eq!(sliced.element_range(), 7..10);
            assert_eq!(list_positions(&sliced, 7..10), list_positions(&part, 102..105));
        }
    }

    proptest! {
        #[test]
        fn runs_equal_multi_dimensional_indexing(
            dims in proptest::collection::vec((1u64..4, 0u64..12), 0..4), offset in 0u64..5, a in 0u64..64, b in 0u64..64,
        ) {
            let (shape, strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
            let total: u64 = shape.iter().product();
            let (from, to) = (a.min(b) % (total + 1), a.max(b) % (total + 1));
            let (from, to) = (from.min(to), from.max(to));
            let whole: Vec<u64> = (0..total).map(|mut i| {
                let mut at = offset;
                for (&n, &s) in shape.iter().zip(&strides).rev() { at += i % n * s; i /= n; }
                at
            }).collect();
            let part = make_part(&shape, &strides, offset, 0..total);
            prop_assert_eq!(list_positions(&part, 100 + from..100 + to), &whole[from as usize..to as usize]);
        }
    }
}
