//! Matmuls on a GPU that compute GELU or bias gradients in their epilogues ([`EpilogueOps`]).
use super::backend::Cuda;
use super::matmul::Epilogue;
use super::matmul_operand::{MatmulOperand, matmul_with_epilogue};
use super::tensor_arg::gpu_address;
use crate::buffer::{Dtype, View};
use crate::ops::{EpilogueMatmul, EpilogueOps, MatmulEpilogue, expect_lens};
use std::sync::atomic::Ordering::Relaxed;

/// Lowest compute capability of GPUs on which epilogues are expected to be faster than separate
/// kernels. Others, such as llm.c, use them from the same one on.
const MIN_COMPUTE_CAPABILITY: (u32, u32) = (9, 0);
/// Required alignment in bytes of the vector and the matrix of an epilogue.
const ALIGNMENT: u64 = 16;
/// The rows of GELU's input must have a multiple of this number of elements.
const AUX_STRIDE_MULTIPLE: usize = 8;

impl Cuda {
    /// Enables [`Cuda::set_matmul_epilogues_enabled`] on GPUs on which epilogues are expected to be
    /// faster than separate kernels.
    pub fn enable_matmul_epilogues_where_faster(&self) {
        let is_faster = self.properties().capability >= MIN_COMPUTE_CAPABILITY;
        self.set_matmul_epilogues_enabled(is_faster);
    }

    /// Sets whether matmuls compute GELU and bias gradients in their epilogues. cuBLASLt does not
    /// document its formula of GELU and the order in which it sums gradients of biases.
    pub fn set_matmul_epilogues_enabled(&self, enabled: bool) {
        self.has_matmul_epilogues.store(enabled, Relaxed);
    }
}

impl EpilogueOps for Cuda {
    fn has_matmul_epilogues(&self) -> bool {
        self.has_matmul_epilogues.load(Relaxed)
    }

    fn compute_with_epilogue(&self, matmul: EpilogueMatmul) -> bool {
        let EpilogueMatmul { c, a, b, sizes: [m, n, k], epilogue } = matmul;
        let (c, a, b) = (c.as_view(), a, b);
        expect_lens(
            "compute_with_epilogue",
            [("c", c.len(), m * n), ("a", a.0.len(), m * k), ("b", b.0.len(), k * n)],
        );
        // cuBLASLt requires at least two terms of each sum, and matrices that are not vectors.
        let is_matrix = m > 1 && n > 1 && k > 1;
        let has_half_operands = a.0.dtype() == b.0.dtype() && a.0.dtype() != Dtype::F32;
        if !self.has_matmul_epilogues() || !is_matrix || !has_half_operands {
            return false;
        }
        let Some(epilogue) = select_epilogue(&epilogue, c, a.0.dtype(), [m, n]) else { return false };
        let operand = |(view, is_transposed): (View, bool), rows, columns| match is_transposed {
            false => MatmulOperand::from_rows(view, columns),
            true => MatmulOperand::from_transposed(view, rows),
        };
        let operands = [MatmulOperand::from_rows(c, n), operand(a, m, k), operand(b, k, n)];
        matmul_with_epilogue(self, operands, epilogue, [m, n, k])
    }
}

/// Returns the addresses of an epilogue for a result `c[m, n]` of operands of the type `dtype`.
/// Returns `None` if cuBLASLt does not support the types or the alignment.
fn select_epilogue(epilogue: &MatmulEpilogue, c: View, dtype: Dtype, [m, n]: [usize; 2]) -> Option<Epilogue> {
    let find = |view: View, len: usize| {
        expect_lens("select_epilogue", [("epilogue", view.len(), len)]);
        let at = gpu_address(view);
        (view.dtype() == c.dtype() && at.is_multiple_of(ALIGNMENT)).then_some(at)
    };
    let find_aux = |view: View| {
        let is_supported = c.dtype() == dtype && n.is_multiple_of(AUX_STRIDE_MULTIPLE);
        find(view, m * n).filter(|_| is_supported)
    };
    match epilogue {
        MatmulEpilogue::Gelu { bias, pre } => {
            Some(Epilogue::Gelu { bias: find(*bias, n)?, aux: find_aux(pre.as_view())? })
        }
        MatmulEpilogue::GeluGradient { pre } => Some(Epilogue::GeluGradient { aux: find_aux(*pre)? }),
        MatmulEpilogue::RowSumsOfA(sums) => Some(Epilogue::RowSumsOfA(find(sums.as_view(), m)?)),
        MatmulEpilogue::ColumnSumsOfB(sums) => Some(Epilogue::ColumnSumsOfB(find(sums.as_view(), n)?)),
    }
}
