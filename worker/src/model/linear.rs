//! Products of a layer's matrices: in the type that weights and activations have, or in fp8. Adapters, routers and experts have
//! products of their own.
use device::{
    Buf, Fp8, Ops, View, ViewMut,
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

    /// A gradient as both products with it take it, rounded once for them in `room` where the backend rounds it.
    pub(super) fn gradient<'a>(self, ops: &dyn Ops, dy: View<'a>, room: &'a mut Buf) -> View<'a> {
        if self == Linear::AsStored { ops.operand(dy, room) } else { dy }
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

#[cfg(test)]
mod tests {
    use super::*;
    use device::{Buf, Cpu};

    const SHAPE: Shape = (5, 16, 32);

    fn values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    }

    /// What fp8 keeps of a matrix, by row and column.
    fn kept(x: &[f32], kind: Fp8, columns: usize) -> impl Fn(usize, usize) -> f64 {
        let scale = kind.scale(x.iter().fold(0.0, |most, x| x.abs().max(most)));
        let kept: Vec<f64> =
            x.iter().map(|x| f64::from(kind.decode(kind.encode(x / scale)) * scale)).collect();
        move |row, column| kept[row * columns + column]
    }

    #[track_caller]
    fn assert_sums(got: &Buf, columns: usize, depth: usize, term: impl Fn(usize, usize, usize) -> f64) {
        for (at, got) in got.host().iter().enumerate() {
            let want: f64 = (0..depth).map(|p| term(at / columns, at % columns, p)).sum();
            assert!((f64::from(*got) - want).abs() < 1e-4, "at {at}: {got}, {want}");
        }
    }

    /// Weights and activations are E4M3, gradients E5M2, however matrices are stored.
    #[test]
    fn every_product_is_that_of_its_definition() {
        let (m, inp, out) = SHAPE;
        let (cpu, fp8) = (Cpu::new(1), Linear::Fp8);
        let [x, dy, w, bias] =
            [(m * inp, 1), (m * out, 2), (inp * out, 3), (out, 4)].map(|(n, s)| values(n, s));
        let (of_x, of_dy) = (kept(&x, Fp8::E4M3, inp), kept(&dy, Fp8::E5M2, out));
        let (as_hf, as_conv) = (kept(&w, Fp8::E4M3, inp), kept(&w, Fp8::E4M3, out));
        let [vx, vdy, vw, vb] = [&x, &dy, &w, &bias].map(|v| View::from(&v[..]));
        let [mut y, mut dx, mut dw] =
            [m * out, m * inp, inp * out].map(|n| Buf::from_slice(&vec![f32::NAN; n]));

        fp8.forward(&cpu, y.view_mut(), vx, vw, Some(vb), SHAPE);
        let with_bias = |j: usize, p: usize| if p == 0 { f64::from(bias[j]) } else { 0.0 };
        assert_sums(&y, out, inp, |i, j, p| of_x(i, p) * as_hf(j, p) + with_bias(j, p));
        fp8.backward_input(&cpu, dx.view_mut(), vdy, vw, SHAPE);
        assert_sums(&dx, inp, out, |i, j, p| of_dy(i, p) * as_hf(p, j));
        fp8.backward_weight(&cpu, dw.view_mut(), vdy, vx, SHAPE);
        assert_sums(&dw, inp, m, |i, j, p| of_dy(p, i) * of_x(p, j));

        fp8.conv1d_forward(&cpu, y.view_mut(), vx, vw, vb, SHAPE);
        assert_sums(&y, out, inp, |i, j, p| of_x(i, p) * as_conv(p, j) + with_bias(j, p));
        fp8.conv1d_backward_input(&cpu, dx.view_mut(), vdy, vw, SHAPE);
        assert_sums(&dx, inp, out, |i, j, p| of_dy(i, p) * as_conv(j, p));
        fp8.conv1d_backward_weight(&cpu, dw.view_mut(), vdy, vx, SHAPE);
        assert_sums(&dw, out, m, |i, j, p| of_x(p, i) * of_dy(p, j));
    }
}
