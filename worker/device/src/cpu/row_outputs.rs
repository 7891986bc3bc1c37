//! [`RowOutputs`]: access to the outputs of an op on the CPU for parallel tasks, each of which
//! writes different rows.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{F32Output, OutputElements, PriorContents};
use crate::buffer::ViewMut;
use crate::ops::WriteMode;
use std::ops::Range;

/// Number of matrix rows that are added to each partial sum when an op on the CPU sums over all
/// rows, as for a bias gradient. The partial sums are then added in the order of the rows.
const ROWS_PER_PARTIAL_SUM: usize = 32;

/// One or more outputs of an op on the CPU, in which each parallel task writes different rows.
pub(crate) trait RowOutputs: Sync {
    /// Type through which one task writes its rows of the outputs, such as a slice.
    type Rows;

    /// Returns the rows of the outputs with the indices `rows`, for one task to write.
    ///
    /// # Safety
    ///
    /// While the returned rows are in use, no overlapping rows may be in use.
    unsafe fn get_rows(&self, rows: &Range<usize>) -> Self::Rows;
}

/// An output of an op, with elements of any type, whose rows parallel tasks write as `f32` numbers.
/// The rows may be limited to some columns.
pub(crate) struct ElementRows<'a> {
    elements: OutputElements<'a>,
    /// Index of the first row's first element.
    first: usize,
    /// Number of elements in a row.
    width: usize,
    /// Number of elements from one row to the next. It equals `width` unless tasks write single
    /// rows.
    stride: usize,
    prior: PriorContents,
}

impl<'a> RowOutputs for ElementRows<'a> {
    type Rows = F32Output<'a>;

    unsafe fn get_rows(&self, rows: &Range<usize>) -> F32Output<'a> {
        let first = self.first + rows.start * self.stride;
        let len = (rows.len() - 1) * self.stride + self.width;
        // SAFETY: guaranteed by the caller.
        unsafe { self.elements.slice_as_f32(first..first + len, self.prior) }
    }
}

/// An op's output in the form of a slice of `T`, of which parallel tasks write different rows.
pub(crate) struct SliceRows<'a, T> {
    slices: DisjointSlices<'a, T>,
    width: usize,
}

impl<'a, T> SliceRows<'a, T> {
    /// Divides `x`, an output of an op, into rows of `width` elements.
    pub(crate) fn new(x: &'a mut [T], width: usize) -> Self {
        SliceRows { slices: DisjointSlices::new(x), width }
    }
}

impl<'a, T: Send> RowOutputs for SliceRows<'a, T> {
    type Rows = &'a mut [T];

    unsafe fn get_rows(&self, rows: &Range<usize>) -> &'a mut [T] {
        // SAFETY: guaranteed by the caller.
        unsafe { self.slices.slice_mut(rows.start * self.width..rows.end * self.width) }
    }
}

impl<A: RowOutputs, B: RowOutputs> RowOutputs for (A, B) {
    type Rows = (A::Rows, B::Rows);

    unsafe fn get_rows(&self, rows: &Range<usize>) -> Self::Rows {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.0.get_rows(rows), self.1.get_rows(rows)) }
    }
}

impl<A: RowOutputs, B: RowOutputs, C: RowOutputs> RowOutputs for (A, B, C) {
    type Rows = (A::Rows, B::Rows, C::Rows);

    unsafe fn get_rows(&self, rows: &Range<usize>) -> Self::Rows {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.0.get_rows(rows), self.1.get_rows(rows), self.2.get_rows(rows)) }
    }
}

impl Cpu {
    /// Divides the output `y` into rows of `width` elements for parallel tasks, which overwrite the
    /// rows or add to them according to `write`.
    pub(super) fn as_output_rows<'a>(
        &'a self,
        y: ViewMut<'a>,
        width: usize,
        write: WriteMode,
    ) -> ElementRows<'a> {
        ElementRows { elements: self.as_output(y), first: 0, width, stride: width, prior: write.into() }
    }

    /// Divides the output `y` into rows of `width` elements, which tasks overwrite without reading
    /// them.
    pub(super) fn as_rows_to_overwrite<'a>(&'a self, y: ViewMut<'a>, width: usize) -> ElementRows<'a> {
        self.as_output_rows(y, width, WriteMode::Overwrite)
    }

    /// Divides the output `y` into rows of `width` elements, which tasks read and write.
    pub(super) fn as_rows_to_update<'a>(&'a self, y: ViewMut<'a>, width: usize) -> ElementRows<'a> {
        self.as_output_rows(y, width, WriteMode::Accumulate)
    }

    /// Returns the columns `columns` of the output `y` as rows that parallel tasks read and change,
    /// where the rows of `y` have `stride` elements.
    pub(super) fn as_columns_to_update<'a>(
        &'a self,
        y: ViewMut<'a>,
        columns: Range<usize>,
        stride: usize,
    ) -> ElementRows<'a> {
        let (first, width) = (columns.start, columns.len());
        ElementRows { first, width, stride, ..self.as_rows_to_update(y, 0) }
    }

    /// Runs `work` on blocks of rows of an op's outputs in parallel, and returns when all rows are
    /// done. Processing a row is assumed to cost as much as copying `cost` elements.
    pub(super) fn run_over_output_rows<O: RowOutputs>(
        &self,
        rows: usize,
        cost: usize,
        outputs: O,
        work: impl Fn(Range<usize>, O::Rows) + Sync,
    ) {
        self.run_over_rows(rows, cost, |rows| {
            // SAFETY: this call owns the outputs, and each task has different rows.
            let outputs = unsafe { outputs.get_rows(&rows) };
            work(rows, outputs);
        });
    }

    /// Runs `work` on each row of an op's outputs in parallel, and returns when all rows are done.
    /// Processing a row is assumed to cost as much as copying `cost` elements.
    pub(super) fn run_over_each_output_row<O: RowOutputs>(
        &self,
        rows: usize,
        cost: usize,
        outputs: O,
        work: impl Fn(usize, O::Rows) + Sync,
    ) {
        self.run_over_rows(rows, cost, |rows| {
            for row in rows {
                // SAFETY: this call owns the outputs, and each task has different rows.
                work(row, unsafe { outputs.get_rows(&(row..row + 1)) });
            }
        });
    }

    /// Calls `work` in parallel on index ranges of the output `y`, so that `work` can read and
    /// change the elements of each range as `f32`.
    pub(super) fn update_elements(&self, y: ViewMut, work: impl Fn(Range<usize>, &mut [f32]) + Sync) {
        let len = y.len();
        self.run_over_output_rows(len, 1, self.as_rows_to_update(y, 1), |range, mut y| work(range, &mut y));
    }

    /// Runs `work` on blocks of rows in parallel, and adds the sums that `work` computes for each
    /// block, such as a weight's gradient, to `totals`.
    ///
    /// `work` also writes the chunk's rows of the outputs. It adds the chunk's contributions to its
    /// last argument, which contains one sum after another in the order of `totals`. The chunks'
    /// sums are added in order.
    pub(super) fn run_over_rows_and_sum<O: RowOutputs, const N: usize>(
        &self,
        rows: usize,
        outputs: O,
        totals: [&mut [f32]; N],
        work: impl Fn(Range<usize>, O::Rows, &mut [f32]) + Sync,
    ) {
        let chunks = rows.div_ceil(ROWS_PER_PARTIAL_SUM);
        let width = totals.iter().map(|total| total.len()).sum();
        let mut sums = self.scratch.borrow_buf(chunks * width);
        let sums = &mut sums[..chunks * width];
        let parts = DisjointSlices::new(sums);
        self.pool.run(chunks, &|chunk| {
            let rows = chunk * ROWS_PER_PARTIAL_SUM..((chunk + 1) * ROWS_PER_PARTIAL_SUM).min(rows);
            // SAFETY: this call owns the outputs, and each task has different rows of them and of
            // the partial sums.
            let (outputs, sum) =
                unsafe { (outputs.get_rows(&rows), parts.slice_mut(chunk * width..(chunk + 1) * width)) };
            sum.fill(0.0);
            work(rows, outputs, sum);
        });
        if let Some((first, rest)) = sums.split_at_mut_checked(width) {
            for sum in rest.chunks_exact(width.max(1)) {
                first.iter_mut().zip(sum).for_each(|(a, b)| *a += b);
            }
            let totals = totals.into_iter().flatten();
            totals.zip(first).for_each(|(total, sum)| *total += *sum);
        }
    }
}

/// No outputs, for ops that only compute sums over rows.
impl RowOutputs for () {
    type Rows = ();

    unsafe fn get_rows(&self, _: &Range<usize>) {}
}
