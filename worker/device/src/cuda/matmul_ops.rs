//! The ops for matmuls and grouped matmuls on a GPU ([`MatmulOps`] and [`GroupedMatmulOps`]).
use super::backend::Cuda;
use super::matmul::VaryingSize;
use super::matmul_operand::{MatmulOperand, matmul, matmul_with_bias, matmul_with_varying_size};
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::ops::{GroupedMatmulOps, MatmulOps, RowGroup, VectorOps, WriteMode, expect_lens};

impl MatmulOps for Cuda {
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: WriteMode) {
        expect_lens("matmul_forward", [("y", y.len(), m * n), ("x", x.len(), m * k), ("w", w.len(), n * k)]);
        let (a, b) = (MatmulOperand::from_rows(x, k), MatmulOperand::from_transposed(w, k));
        matmul(self, MatmulOperand::from_rows(y.as_view(), n), a, b, [m, n, k], write);
    }

    fn matmul_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    ) {
        let lens = [("dx", dx.len(), m * k), ("dy", dy.len(), m * n), ("w", w.len(), n * k)];
        expect_lens("matmul_backward_input", lens);
        let (a, b) = (MatmulOperand::from_rows(dy, n), MatmulOperand::from_rows(w, k));
        matmul(self, MatmulOperand::from_rows(dx.as_view(), k), a, b, [m, k, n], write);
    }

    fn matmul_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    ) {
        let lens = [("dw", dw.len(), n * k), ("dy", dy.len(), m * n), ("x", x.len(), m * k)];
        expect_lens("matmul_backward_weight", lens);
        let (a, b) = (MatmulOperand::from_transposed(dy, n), MatmulOperand::from_rows(x, k));
        matmul(self, MatmulOperand::from_rows(dw.as_view(), k), a, b, [n, k, m], write);
    }

    fn matmul_bias_forward(
        &self,
        y: ViewMut,
        x: View,
        w: View,
        bias: Option<View>,
        m: usize,
        n: usize,
        k: usize,
    ) {
        let Some(bias) = bias else { return self.matmul_forward(y, x, w, m, n, k, WriteMode::Overwrite) };
        let lens = [("y", y.len(), m * n), ("x", x.len(), m * k), ("w", w.len(), n * k)];
        expect_lens("matmul_bias_forward", lens);
        let (a, b) = (MatmulOperand::from_rows(x, k), MatmulOperand::from_transposed(w, k));
        matmul_with_bias(self, y, a, b, bias, [m, n, k]);
    }

    fn conv1d_bias_forward(
        &self,
        y: ViewMut,
        x: View,
        w: View,
        bias: View,
        m: usize,
        inp: usize,
        out: usize,
    ) {
        let lens = [("y", y.len(), m * out), ("x", x.len(), m * inp), ("w", w.len(), inp * out)];
        expect_lens("conv1d_bias_forward", lens);
        let (a, b) = (MatmulOperand::from_rows(x, inp), MatmulOperand::from_rows(w, out));
        matmul_with_bias(self, y, a, b, bias, [m, out, inp]);
    }

    fn convert_to_matmul_dtype<'a>(&self, x: View<'a>, buf: &'a mut Buf) -> View<'a> {
        if (x.dtype(), buf.dtype()) != (Dtype::F32, Dtype::Bf16) {
            return x;
        }
        let n = x.len();
        self.cast(buf.view_mut().slice(0..n), x);
        buf.view().slice(0..n)
    }
}

impl GroupedMatmulOps for Cuda {
    fn grouped_forward(&self, mut y: ViewMut, x: View, w: View, groups: &[RowGroup], n: usize, k: usize) {
        for g in groups {
            let (y, x, w) = (
                y.slice_mut(g.row_element_range(n)),
                x.slice(g.row_element_range(k)),
                w.slice(g.matrix_element_range(n * k)),
            );
            let (a, b) = (MatmulOperand::from_rows(x, k), MatmulOperand::from_transposed(w, k));
            let operands = [MatmulOperand::from_rows(y.as_view(), n), a, b];
            self.multiply_group(operands, [g.rows.len(), n, k], VaryingSize::M);
        }
    }

    fn grouped_backward_input(
        &self,
        mut dx: ViewMut,
        dy: View,
        w: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        for g in groups {
            let (dx, dy) = (dx.slice_mut(g.row_element_range(k)), dy.slice(g.row_element_range(n)));
            let w = MatmulOperand::from_rows(w.slice(g.matrix_element_range(n * k)), k);
            let operands = [MatmulOperand::from_rows(dx.as_view(), k), MatmulOperand::from_rows(dy, n), w];
            self.multiply_group(operands, [g.rows.len(), k, n], VaryingSize::M);
        }
    }

    fn grouped_backward_weight(
        &self,
        mut dw: ViewMut,
        dy: View,
        x: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        for g in groups {
            let (dy, x) = (dy.slice(g.row_element_range(n)), x.slice(g.row_element_range(k)));
            let dw = dw.slice_mut(g.matrix_element_range(n * k));
            let (a, b) = (MatmulOperand::from_transposed(dy, n), MatmulOperand::from_rows(x, k));
            let operands = [MatmulOperand::from_rows(dw.as_view(), k), a, b];
            self.multiply_group(operands, [n, k, g.rows.len()], VaryingSize::K);
        }
    }
}

impl Cuda {
    /// Multiplies the rows of one expert by the expert's matrix, as one of the matmuls of a grouped
    /// matmul. The number of rows of the expert, which is the size `varying`, differs from call to
    /// call.
    fn multiply_group(&self, operands: [MatmulOperand; 3], sizes: [usize; 3], varying: VaryingSize) {
        matmul_with_varying_size(self, operands, sizes, WriteMode::Overwrite, Some(varying));
    }
}
