//! Computes the matmuls of linear and Conv1D layers on the CPU, after checking the arguments
//! ([`MatmulOps`]).
use super::backend::Cpu;
use super::matmul::{MatmulShape, matmul, matmul_with_bias};
use super::packing::Operand;
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::ops::{MatmulOps, VectorOps, WriteMode, expect_lens};

impl MatmulOps for Cpu {
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: WriteMode) {
        expect_lens("matmul_forward", [("y", y.len(), m * n), ("x", x.len(), m * k), ("w", w.len(), n * k)]);
        let (a, b) = (Operand::from_rows(x, k), Operand::from_rows(w, k));
        matmul(self, self.as_output(y), a, b, MatmulShape { m, n, k, ldc: n, write });
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
        let (a, b) = (Operand::from_rows(dy, n), Operand::from_transposed(w, k));
        matmul(self, self.as_output(dx), a, b, MatmulShape { m, n: k, k: n, ldc: k, write });
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
        let (a, b) = (Operand::from_transposed(dy, n), Operand::from_transposed(x, k));
        matmul(self, self.as_output(dw), a, b, MatmulShape { m: n, n: k, k: m, ldc: k, write });
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
        let (a, b) = (Operand::from_rows(x, k), Operand::from_rows(w, k));
        check_and_matmul_with_bias(self, "matmul_bias_forward", y, a, b, bias, [m, n, k]);
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
        let (a, b) = (Operand::from_rows(x, inp), Operand::from_transposed(w, out));
        check_and_matmul_with_bias(self, "conv1d_bias_forward", y, a, b, Some(bias), [m, out, inp]);
    }

    fn convert_to_matmul_dtype<'a>(&self, x: View<'a>, buf: &'a mut Buf) -> View<'a> {
        // Products with a bf16 matrix are computed by the rule for bf16 only if both operands are.
        if (x.dtype(), buf.dtype()) != (Dtype::F32, Dtype::Bf16) {
            return x;
        }
        let n = x.len();
        self.cast(buf.view_mut().slice(0..n), x);
        buf.view().slice(0..n)
    }
}

/// Checks the lengths of the arguments, and computes a matmul with bias: `y[m,n] = a·b + bias`.
/// Panics if a length does not fit the shape. `op` is the op's name in panics.
fn check_and_matmul_with_bias(
    cpu: &Cpu,
    op: &str,
    y: ViewMut,
    a: Operand,
    b: Operand,
    bias: Option<View>,
    [m, n, k]: [usize; 3],
) {
    expect_lens(op, [("y", y.len(), m * n), ("x", a.data.len(), m * k), ("w", b.data.len(), n * k)]);
    expect_lens(op, [("bias", bias.map_or(n, |b| b.len()), n)]);
    let shape = MatmulShape { m, n, k, ldc: n, write: WriteMode::Overwrite };
    matmul_with_bias(cpu, cpu.as_output(y), a, b, bias, shape);
}
