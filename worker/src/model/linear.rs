//! Products of a layer's matrices: in the type that weights and activations have, or in fp8. Adapters, routers and experts have
//! products of their own.
use device::{
    Fp8, Ops, View, ViewMut,
    ops::{FP8_COLUMNS, Fp8Matrix, Write},
};

/// How they are computed. A matrix is stored as `w[out, inp]`, GPT-2's (`conv1d`) as `w[inp, out]`; `x[m, inp]`, `y[m, out]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Linear {
    #[default]
    AsStored,
    /// Weights and activations in E4M3, gradients in E5M2.
    Fp8,
}

/// Rows, inputs and outputs.
pub(super) type Shape = (usize, usize, usize);

fn matrix(x: View<'_>, kind: Fp8, transposed: bool) -> Fp8Matrix<'_> {
    Fp8Matrix { x, kind, transposed }
}

/// Says which of a model's sizes fp8 can't multiply, by its name in config.json.
pub(super) fn check_fp8(sizes: &[(&str, usize)]) -> Result<(), String> {
    match sizes.iter().find(|(_, size)| !size.is_multiple_of(FP8_COLUMNS)) {
        Some((name, size)) => Err(format!(
            "`train.precision: fp8` multiplies matrices whose sizes are multiples of {FP8_COLUMNS}; {name} is {size}: use bf16"
        )),
        None => Ok(()),
    }
}

impl Linear {
    /// `y = x · wᵀ + bias`
    pub(super) fn forward(
        self,
        ops: &dyn Ops,
        mut y: ViewMut,
        x: View,
        w: View,
        bias: Option<View>,
        (m, inp, out): Shape,
    ) {
        if self == Linear::AsStored {
            return ops.matmul_bias_forward(y, x, w, bias, m, out, inp);
        }
        let (x, w) = (matrix(x, Fp8::E4M3, false), matrix(w, Fp8::E4M3, true));
        ops.fp8_product(y.reborrow(), x, w, m, out, inp, Write::Set);
        if let Some(bias) = bias {
            ops.bias_forward(y, bias, m, out);
        }
    }

    /// `dx = dy · w`
    pub(super) fn backward_input(self, ops: &dyn Ops, dx: ViewMut, dy: View, w: View, (m, inp, out): Shape) {
        if self == Linear::AsStored {
            return ops.matmul_backward_input(dx, dy, w, m, out, inp, Write::Set);
        }
        let (dy, w) = (matrix(dy, Fp8::E5M2, false), matrix(w, Fp8::E4M3, false));
        ops.fp8_product(dx, dy, w, m, inp, out, Write::Set);
    }

    /// `dw = dyᵀ · x`
    pub(super) fn backward_weight(self, ops: &dyn Ops, dw: ViewMut, dy: View, x: View, (m, inp, out): Shape) {
        if self == Linear::AsStored {
            return ops.matmul_backward_weight(dw, dy, x, m, out, inp, Write::Set);
        }
        let (dy, x) = (matrix(dy, Fp8::E5M2, true), matrix(x, Fp8::E4M3, false));
        ops.fp8_product(dw, dy, x, out, inp, m, Write::Set);
    }

    /// `y = x · w + bias`
    pub(super) fn conv1d_forward(
        self,
        ops: &dyn Ops,
        mut y: ViewMut,
        x: View,
        w: View,
        bias: View,
        (m, inp, out): Shape,
    ) {
        if self == Linear::AsStored {
            return ops.conv1d_bias_forward(y, x, w, bias, m, inp, out);
        }
        let (x, w) = (matrix(x, Fp8::E4M3, false), matrix(w, Fp8::E4M3, false));
        ops.fp8_product(y.reborrow(), x, w, m, out, inp, Write::Set);
        ops.bias_forward(y, bias, m, out);
    }

    /// `dx = dy · wᵀ`
    pub(super) fn conv1d_backward_input(
        self,
        ops: &dyn Ops,
        dx: ViewMut,
        dy: View,
        w: View,
        (m, inp, out): Shape,
    ) {
        if self == Linear::AsStored {
            return ops.conv1d_backward_input(dx, dy, w, m, inp, out);
        }
        let (dy, w) = (matrix(dy, Fp8::E5M2, false), matrix(w, Fp8::E4M3, true));
        ops.fp8_product(dx, dy, w, m, inp, out, Write::Set);
    }

    /// `dw = xᵀ · dy`
    pub(super) fn conv1d_backward_weight(
        self,
        ops: &dyn Ops,
        dw: ViewMut,
        dy: View,
        x: View,
        (m, inp, out): Shape,
    ) {
        if self == Linear::AsStored {
            return ops.conv1d_backward_weight(dw, dy, x, m, inp, out);
        }
        let (x, dy) = (matrix(x, Fp8::E4M3, true), matrix(dy, Fp8::E5M2, false));
        ops.fp8_product(dw, x, dy, inp, out, m, Write::Set);
    }
}
