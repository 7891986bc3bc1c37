//! Traits for matmuls: those of linear and Conv1D layers, matmuls in fp8, and grouped matmuls,
//! which multiply each group of rows by a different matrix.
use super::arguments::{WriteMode, expect_lens};
use crate::buffer::{Buf, View, ViewMut};
use crate::fp8::Fp8Format;
use std::ops::Range;

/// Ops for linear layers and for GPT-2's Conv1D layers, which store their weight as `w[in, out]`:
/// matmuls and their backward passes.
pub trait MatmulOps {
    /// Computes a linear layer without bias: `y[m,n] (=|+=) x[m,k] · w[n,k]ᵀ`.
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: WriteMode);
    /// Computes the gradient of a linear layer's input: `dx[m,k] (=|+=) dy[m,n] · w[n,k]`.
    fn matmul_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    );
    /// Computes the gradient of a linear layer's weight: `dw[n,k] (=|+=) dy[m,n]ᵀ · x[m,k]`.
    fn matmul_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    );
    /// Computes a linear layer: `y[m,n] = x[m,k] · w[n,k]ᵀ + bias[n]`. Without `bias`, only the
    /// matmul is computed. A CPU rounds the result once, after the bias was added.
    fn matmul_bias_forward(
        &self,
        y: ViewMut,
        x: View,
        w: View,
        bias: Option<View>,
        m: usize,
        n: usize,
        k: usize,
    );
    /// Computes a Conv1D layer without bias: `y[m,out] = x[m,inp] · w[inp,out]`.
    fn conv1d_forward(&self, y: ViewMut, x: View, w: View, m: usize, inp: usize, out: usize) {
        self.matmul_backward_input(y, x, w, m, inp, out, WriteMode::Overwrite);
    }
    /// Computes a Conv1D layer with bias: `y[m,out] = x[m,inp] · w[inp,out] + bias[out]`. The
    /// result is rounded once, after the bias was added.
    fn conv1d_bias_forward(&self, y: ViewMut, x: View, w: View, bias: View, m: usize, inp: usize, out: usize);
    /// Computes the gradient of a Conv1D layer's input: `dx[m,inp] = dy[m,out] · w[inp,out]ᵀ`.
    fn conv1d_backward_input(&self, dx: ViewMut, dy: View, w: View, m: usize, inp: usize, out: usize) {
        self.matmul_forward(dx, dy, w, m, inp, out, WriteMode::Overwrite);
    }
    /// Computes the gradient of a Conv1D layer's weight: `dw[inp,out] = x[m,inp]ᵀ · dy[m,out]`.
    fn conv1d_backward_weight(&self, dw: ViewMut, dy: View, x: View, m: usize, inp: usize, out: usize) {
        self.matmul_backward_weight(dw, x, dy, m, inp, out, WriteMode::Overwrite);
    }
    /// Converts `x` to the element type that this CPU or GPU uses for matmuls, in the buffer `buf`,
    /// or returns `x` if no conversion is needed. Returns `x` itself if it has the type already.
    /// `buf` must have the length of `x`. Converting a gradient before several matmuls rounds it
    /// only once.
    fn convert_to_matmul_dtype<'a>(&self, x: View<'a>, buf: &'a mut Buf) -> View<'a> {
        let _ = buf;
        x
    }
}

/// Ops for matmuls whose operands are rounded to fp8.
pub trait Fp8Ops {
    /// Computes a matmul whose operands are rounded to fp8: `c[m,n] (=|+=) a[m,k] · b[k,n]`.
    ///
    /// Each operand is divided by its scale and rounded to its format. The scale is
    /// [`Fp8Format::compute_scale`] of the largest finite magnitude of the operand. The terms are
    /// summed in `f32`, and the sum is multiplied by both scales. An element of `c` is NaN if a NaN
    /// is among its terms. E4M3 has no infinity, so an infinite element of an E4M3 operand counts
    /// as NaN.
    ///
    /// Panics unless `n` is a multiple of [`FP8_COLUMN_MULTIPLE`] and at most one operand is E5M2.
    fn fp8_matmul(
        &self,
        c: ViewMut,
        a: Fp8Operand,
        b: Fp8Operand,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    );
}

/// An operand of an fp8 matmul: a matrix with elements of any type, and the fp8 format to which the
/// op rounds them.
#[derive(Clone, Copy)]
pub struct Fp8Operand<'a> {
    /// The matrix's elements, of any type.
    pub x: View<'a>,
    /// The format to which the op rounds the elements.
    pub format: Fp8Format,
    /// True if the matrix is stored transposed.
    pub transposed: bool,
}

/// The number of columns of an fp8 matmul's result must be a multiple of this number, as cuBLASLt
/// requires.
pub const FP8_COLUMN_MULTIPLE: usize = 16;

impl Fp8Operand<'_> {
    /// Panics unless the matrices `a` and `b` and the result length `c` have the right sizes for
    /// the fp8 matmul `c[m,n] = a[m,k] · b[k,n]`. `c` is the length of the result.
    #[track_caller]
    pub(crate) fn check_matmul_operands(c: usize, a: &Self, b: &Self, [m, n, k]: [usize; 3]) {
        let op = "fp8_matmul";
        assert!(
            n.is_multiple_of(FP8_COLUMN_MULTIPLE),
            "{op}: n is {n}, not a multiple of {FP8_COLUMN_MULTIPLE}"
        );
        assert!((a.format, b.format) != (Fp8Format::E5M2, Fp8Format::E5M2), "{op}: both operands are E5M2");
        expect_lens(op, [("c", c, m * n), ("a", a.x.len(), m * k), ("b", b.x.len(), k * n)]);
    }
}

/// Ops for grouped matmuls, in which each group of rows is multiplied by a separate matrix.
pub trait GroupedMatmulOps {
    /// Computes a grouped matmul, which multiplies each group of rows of `x` by the matrix of that
    /// group in `w`. For each group: `y[rows, n] = x[rows, k] · w[n, k]ᵀ`, where the matrix begins
    /// at element `matrix_offset` of `w`. Empty groups cost nothing.
    fn grouped_forward(&self, y: ViewMut, x: View, w: View, groups: &[RowGroup], n: usize, k: usize);
    /// Computes the gradient of a grouped matmul with respect to its input `x`. For each group:
    /// `dx[rows, k] = dy[rows, n] · w[n, k]`.
    fn grouped_backward_input(&self, dx: ViewMut, dy: View, w: View, groups: &[RowGroup], n: usize, k: usize);
    /// Computes the gradient of a grouped matmul with respect to the matrices of its groups. For
    /// each group: `dw[n, k] = dy[rows, n]ᵀ · x[rows, k]`, which is zero for an empty group.
    /// Elements of `dw` outside the groups' matrices are not written.
    fn grouped_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    );
}

/// A group of consecutive rows that a grouped matmul multiplies by the group's matrix, for example
/// the tokens of one expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroup {
    /// The group's rows. Groups are sorted by their rows and do not overlap.
    pub rows: std::ops::Range<usize>,
    /// Index of the matrix's first element in the vector of all groups' matrices.
    pub matrix_offset: usize,
}

impl RowGroup {
    /// Returns the index range of this group's elements in a matrix with `width` elements per row.
    pub(crate) fn row_element_range(&self, width: usize) -> Range<usize> {
        self.rows.start * width..self.rows.end * width
    }

    /// Returns the index range of this group's matrix (`len` elements) within the vector that
    /// contains the matrices of all groups.
    pub(crate) fn matrix_element_range(&self, len: usize) -> Range<usize> {
        self.matrix_offset..self.matrix_offset + len
    }
}
