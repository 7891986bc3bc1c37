//! Which elements of a file a tensor is made of.
use crate::error::Result;
use crate::formats::torch_file::TensorView;
use std::ops::Range;

/// Consecutive elements of a tensor, in one file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// First element, in the tensor.
    pub(crate) start: u64,
    pub(crate) count: u64,
    pub(super) file: usize,
    pub(super) stretch: usize,
    /// Element of the stretch at which the view begins.
    pub(super) offset: u64,
    /// How a view that isn't contiguous is laid out, and how many of its elements come before this part.
    pub(super) strided: Option<Box<Strided>>,
}

#[derive(Clone, Debug)]
pub(super) struct Strided {
    shape: Vec<u64>,
    strides: Vec<u64>,
    skip: u64,
}

impl Part {
    /// Elements `taken` of a view in a file, as elements `start..` of a tensor.
    pub(crate) fn of(file: usize, view: &TensorView, taken: Range<u64>, start: u64) -> Part {
        let contiguous = view.is_contiguous();
        let strided = || {
            Box::new(Strided { shape: view.shape.clone(), strides: view.strides.clone(), skip: taken.start })
        };
        Part {
            start,
            count: taken.end - taken.start,
            file,
            stretch: view.member,
            offset: view.offset + if contiguous { taken.start } else { 0 },
            strided: (!contiguous).then(strided),
        }
    }

    /// Elements `taken` of the tensor that are in this part, as elements `start..` of another.
    pub(super) fn slice(&self, taken: Range<u64>, start: u64) -> Part {
        let before = taken.start - self.start;
        let mut part = Part { start, count: taken.end - taken.start, ..self.clone() };
        match &mut part.strided {
            Some(strided) => strided.skip += before,
            None => part.offset += before,
        }
        part
    }

    /// Elements of the tensor.
    pub(crate) fn elements(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.count)
    }

    /// True when its bytes are in this stretch of this file.
    pub(super) fn is_in(&self, file: usize, stretch: usize) -> bool {
        (self.file, self.stretch) == (file, stretch)
    }

    /// Calls `run(element in the stretch, elements)` for each run of neighbours in elements `range` of the tensor.
    pub(super) fn runs(&self, range: Range<u64>, mut run: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
        let (first, count) = (range.start - self.start, range.end - range.start);
        let Some(strided) = &self.strided else { return run(self.offset + first, count) };
        let inner = match (strided.shape.last(), strided.strides.last()) {
            (Some(&size), Some(1)) => size,
            _ => 1,
        };
        let (mut at, end) = (strided.skip + first, strided.skip + first + count);
        while at < end {
            let len = (inner - at % inner).min(end - at);
            run(self.offset + strided.position(at), len)?;
            at += len;
        }
        Ok(())
    }
}

impl Strided {
    /// Where element `index` of the view is, from its beginning.
    fn position(&self, mut index: u64) -> u64 {
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
    use crate::dtype::Dtype;
    use proptest::prelude::*;

    fn part(shape: &[u64], strides: &[u64], offset: u64, taken: Range<u64>) -> Part {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        Part::of(0, &TensorView { dtype: Dtype::F32, shape, strides, member: 0, offset }, taken, 100)
    }

    fn positions(part: &Part, range: Range<u64>) -> Vec<u64> {
        let mut all = Vec::new();
        let ok = part.runs(range, |at, n| {
            all.extend(at..at + n);
            Ok(())
        });
        ok.expect("nothing fails");
        all
    }

    #[test]
    fn runs_of_a_transposed_and_of_a_sliced_view() {
        assert_eq!(positions(&part(&[2, 3], &[1, 2], 5, 0..6), 100..106), [5, 7, 9, 6, 8, 10]);
        assert_eq!(positions(&part(&[2, 3], &[10, 1], 0, 1..6), 100..105), [1, 2, 10, 11, 12]);
        assert_eq!(positions(&part(&[4], &[0], 3, 0..4), 101..103), [3, 3]);
    }

    #[test]
    fn a_slice_is_the_same_elements() {
        for part in [part(&[2, 3], &[1, 2], 5, 0..6), part(&[6], &[1], 5, 0..6)] {
            let sliced = part.slice(102..105, 7);
            assert_eq!(sliced.elements(), 7..10);
            assert_eq!(positions(&sliced, 7..10), positions(&part, 102..105));
        }
    }

    proptest! {
        #[test]
        fn runs_are_what_indexing_gives(
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
            let part = part(&shape, &strides, offset, 0..total);
            prop_assert_eq!(positions(&part, 100 + from..100 + to), &whole[from as usize..to as usize]);
        }
    }
}
