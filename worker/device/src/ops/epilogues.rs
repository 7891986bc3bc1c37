//! [`EpilogueOps`]: linear layers together with GELU or the gradient of the bias, which a backend
//! may compute in the epilogue of the matmul.
use super::{ActivationOps, BiasOps, MatmulOps, WriteMode};
use crate::buffer::{View, ViewMut};

/// The matmul `c[m, n] = a[m, k] · b[k, n]` with an epilogue.
pub struct EpilogueMatmul<'a> {
    /// The result.
    pub c: ViewMut<'a>,
    /// The left operand, and whether it is stored transposed.
    pub a: (View<'a>, bool),
    /// The right operand, and whether it is stored transposed.
    pub b: (View<'a>, bool),
    /// The sizes m, n and k.
    pub sizes: [usize; 3],
    /// What is computed in addition to the matmul.
    pub epilogue: MatmulEpilogue<'a>,
}

/// What a matmul computes from its operands or its result before it stores the result.
pub enum MatmulEpilogue<'a> {
    /// Adds the bias to each row, writes the sum to `pre`, which has the shape of the result, and
    /// applies GELU to the sum.
    Gelu {
        /// The bias, `[n]`.
        bias: View<'a>,
        /// The input of GELU, `[m, n]`, which is written.
        pre: ViewMut<'a>,
    },
    /// Multiplies the result by the derivative of GELU at `pre`, `[m, n]`.
    GeluGradient {
        /// The input of GELU, `[m, n]`.
        pre: View<'a>,
    },
    /// Writes the sum of each row of `a` to `[m]`.
    RowSumsOfA(ViewMut<'a>),
    /// Writes the sum of each column of `b` to `[n]`.
    ColumnSumsOfB(ViewMut<'a>),
}

/// Ops that consist of a matmul and an operation on its operands or its result. Usually the two are
/// separate ops, with the same bits as if the caller used these. A backend with matmul epilogues
/// computes both in one kernel, and may round differently.
pub trait EpilogueOps: MatmulOps + ActivationOps + BiasOps {
    /// Returns whether matmuls compute GELU and bias gradients in their epilogues.
    fn has_matmul_epilogues(&self) -> bool {
        false
    }

    /// Computes a matmul with its epilogue in one kernel. Returns false without computing anything
    /// if the backend cannot do so.
    fn compute_with_epilogue(&self, matmul: EpilogueMatmul) -> bool {
        let _ = matmul;
        false
    }

    /// Computes a Conv1D layer with bias, followed by GELU: `pre[m,out] = x[m,inp] · w[inp,out] +
    /// bias[out]`, then `y = gelu(pre)`. `sizes` are m, inp and out. An epilogue computes GELU
    /// before `pre` is rounded.
    fn conv1d_gelu_forward(
        &self,
        mut y: ViewMut,
        mut pre: ViewMut,
        x: View,
        w: View,
        bias: View,
        sizes: [usize; 3],
    ) {
        let [m, inp, out] = sizes;
        let epilogue = MatmulEpilogue::Gelu { bias, pre: pre.reborrow() };
        let (a, b, sizes) = ((x, false), (w, false), [m, out, inp]);
        if self.compute_with_epilogue(EpilogueMatmul { c: y.reborrow(), a, b, sizes, epilogue }) {
            return;
        }
        self.conv1d_bias_forward(pre.reborrow(), x, w, bias, m, inp, out);
        self.gelu_forward(y, pre.as_view());
    }

    /// Computes the gradient of GELU's input, where the output of GELU is the input of a Conv1D
    /// layer: `dpre[m,inp] = (dy[m,out] · w[inp,out]ᵀ) · gelu′(pre)`. Also writes `gelu(pre)` to
    /// `y[m,inp]`, which the gradient of the layer's weight needs. `sizes` are m, inp and out. An
    /// epilogue applies the derivative before the product is rounded.
    fn conv1d_gelu_backward_input(
        &self,
        mut dpre: ViewMut,
        mut y: ViewMut,
        dy: View,
        w: View,
        pre: View,
        sizes: [usize; 3],
    ) {
        let [m, inp, out] = sizes;
        let epilogue = MatmulEpilogue::GeluGradient { pre };
        let (a, b, sizes) = ((dy, false), (w, true), [m, inp, out]);
        if self.compute_with_epilogue(EpilogueMatmul { c: dpre.reborrow(), a, b, sizes, epilogue }) {
            return self.gelu_forward(y, pre);
        }
        self.conv1d_backward_input(y.reborrow(), dy, w, m, inp, out);
        self.gelu_backward(dpre, y, pre);
    }

    /// Computes the gradients of a linear layer's weight and bias: `dw[n,k] = dy[m,n]ᵀ · x[m,k]`
    /// and `dbias[n] = Σ_m dy[m,n]`. `dbias` must contain zeros on entry. `sizes` are m, n and k.
    fn matmul_backward_weight_and_bias(
        &self,
        mut dw: ViewMut,
        mut dbias: ViewMut,
        dy: View,
        x: View,
        sizes: [usize; 3],
    ) {
        let [m, n, k] = sizes;
        let epilogue = MatmulEpilogue::RowSumsOfA(dbias.reborrow());
        let (a, b, sizes) = ((dy, true), (x, false), [n, k, m]);
        if !self.compute_with_epilogue(EpilogueMatmul { c: dw.reborrow(), a, b, sizes, epilogue }) {
            self.bias_backward(dbias, dy, m, n);
            self.matmul_backward_weight(dw, dy, x, m, n, k, WriteMode::Overwrite);
        }
    }

    /// Computes the gradients of a Conv1D layer's weight and bias: `dw[inp,out] = x[m,inp]ᵀ ·
    /// dy[m,out]` and `dbias[out] = Σ_m dy[m,out]`. `dbias` must contain zeros on entry. `sizes`
    /// are m, inp and out.
    fn conv1d_backward_weight_and_bias(
        &self,
        mut dw: ViewMut,
        mut dbias: ViewMut,
        dy: View,
        x: View,
        sizes: [usize; 3],
    ) {
        let [m, inp, out] = sizes;
        let epilogue = MatmulEpilogue::ColumnSumsOfB(dbias.reborrow());
        let (a, b, sizes) = ((x, true), (dy, false), [inp, out, m]);
        if !self.compute_with_epilogue(EpilogueMatmul { c: dw.reborrow(), a, b, sizes, epilogue }) {
            self.bias_backward(dbias, dy, m, out);
            self.conv1d_backward_weight(dw, dy, x, m, inp, out);
        }
    }
}
