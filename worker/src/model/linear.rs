//! [`LinearPrecision`]: the matmuls of a layer's matrices, in the compute dtype or in FP8.
//! Adapters, routers and experts don't use it.
use super::error::{ModelError, Result};
use device::{
    Buf, Fp8Format, Ops, View, ViewMut,
    ops::{FP8_COLUMN_MULTIPLE, Fp8Matrix, WriteMode},
};

/// The precision in which the matmuls of a layer's matrices are computed.
///
/// Shapes: input `x`, `[m, inp]`; output `y`, `[m, out]`; weight `w`, `[out, inp]`, or `[inp, out]`
/// in the functions for transformers' `Conv1D`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LinearPrecision {
    /// The dtype of weights and activations.
    #[default]
    ComputeDtype,
    /// FP8 (Micikevicius et al. 2022): weights and activations in E4M3, gradients in E5M2, each
    /// matrix with one scale.
    Fp8,
}

/// The sizes of a matmul: rows, inputs, outputs.
pub(super) type MatmulShape = (usize, usize, usize);

fn fp8_matrix(x: View<'_>, format: Fp8Format, transposed: bool) -> Fp8Matrix<'_> {
    Fp8Matrix { x, format, transposed }
}

/// Checks that FP8 matmuls support these dimensions of a model, given by config keys and size.
///
/// # Errors
/// [`ModelError::Fp8SizeUnsupported`] for the first dimension that is not supported.
pub(super) fn check_fp8_sizes(sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| !size.is_multiple_of(FP8_COLUMN_MULTIPLE)) {
        Some(&(dimension, size)) => Err(ModelError::Fp8SizeUnsupported {
            dimension: dimension.into(),
            size,
            multiple: FP8_COLUMN_MULTIPLE,
        }),
        None => Ok(()),
    }
}

impl LinearPrecision {
    /// `y = x · wᵀ + bias`
    pub(super) fn forward(
        self,
        ops: &dyn Ops,
        mut y: ViewMut,
        x: View,
        w: View,
        bias: Option<View>,
        (m, inp, out): MatmulShape,
    ) {
        if self == LinearPrecision::ComputeDtype {
            return ops.matmul_bias_forward(y, x, w, bias, m, out, inp);
        }
        let (x, w) = (fp8_matrix(x, Fp8Format::E4M3, false), fp8_matrix(w, Fp8Format::E4M3, true));
        ops.fp8_matmul(y.reborrow(), x, w, m, out, inp, WriteMode::Overwrite);
        if let Some(bias) = bias {
            ops.bias_forward(y, bias, m, out);
        }
    }

    /// The gradient `dy` as the operand of the matmuls of the backward pass. A backend that rounds
    /// operands rounds it here into `buffer`, once for both matmuls.
    pub(super) fn round_gradient<'a>(self, ops: &dyn Ops, dy: View<'a>, buffer: &'a mut Buf) -> View<'a> {
        if self == LinearPrecision::ComputeDtype { ops.as_matmul_operand(dy, buffer) } else { dy }
    }

    /// `dx = dy · w`
    pub(super) fn backward_input(
        self,
        ops: &dyn Ops,
        dx: ViewMut,
        dy: View,
        w: View,
        (m, inp, out): MatmulShape,
    ) {
        if self == LinearPrecision::ComputeDtype {
            return ops.matmul_backward_input(dx, dy, w, m, out, inp, WriteMode::Overwrite);
        }
        let (dy, w) = (fp8_matrix(dy, Fp8Format::E5M2, false), fp8_matrix(w, Fp8Format::E4M3, false));
        ops.fp8_matmul(dx, dy, w, m, inp, out, WriteMode::Overwrite);
    }

    /// `dw = dyᵀ · x`
    pub(super) fn backward_weight(
        self,
        ops: &dyn Ops,
        dw: ViewMut,
        dy: View,
        x: View,
        (m, inp, out): MatmulShape,
    ) {
        if self == LinearPrecision::ComputeDtype {
            return ops.matmul_backward_weight(dw, dy, x, m, out, inp, WriteMode::Overwrite);
        }
        let (dy, x) = (fp8_matrix(dy, Fp8Format::E5M2, true), fp8_matrix(x, Fp8Format::E4M3, false));
        ops.fp8_matmul(dw, dy, x, out, inp, m, WriteMode::Overwrite);
    }

    /// `y = x · w + bias`
    pub(super) fn conv1d_forward(
        self,
        ops: &dyn Ops,
        mut y: ViewMut,
        x: View,
        w: View,
        bias: View,
        (m, inp, out): MatmulShape,
    ) {
        if self == LinearPrecision::ComputeDtype {
            return ops.conv1d_bias_forward(y, x, w, bias, m, inp, out);
        }
        let (x, w) = (fp8_matrix(x, Fp8Format::E4M3, false), fp8_matrix(w, Fp8Format::E4M3, false));
        ops.fp8_matmul(y.reborrow(), x, w, m, out, inp, WriteMode::Overwrite);
        ops.bias_forward(y, bias, m, out);
    }

    /// `dx = dy · wᵀ`
    pub(super) fn conv1d_backward_input(
        self,
        ops: &dyn Ops,
        dx: ViewMut,
        dy: View,
        w: View,
        (m, inp, out): MatmulShape,
    ) {
        if self == LinearPrecision::ComputeDtype {
            return ops.conv1d_backward_input(dx, dy, w, m, inp, out);
        }
        let (dy, w) = (fp8_matrix(dy, Fp8Format::E5M2, false), fp8_matrix(w, Fp8Format::E4M3, true));
        ops.fp8_matmul(dx, dy, w, m, inp, out, WriteMode::Overwrite);
    }

    /// `dw = xᵀ · dy`
    pub(super) fn conv1d_backward_weight(
        self,
        ops: &dyn Ops,
        dw: ViewMut,
        dy: View,
        x: View,
        (m, inp, out): MatmulShape,
    ) {
        if self == LinearPrecision::ComputeDtype {
            return ops.conv1d_backward_weight(dw, dy, x, m, inp, out);
        }
        let (x, dy) = (fp8_matrix(x, Fp8Format::E4M3, true), fp8_matrix(dy, Fp8Format::E5M2, false));
        ops.fp8_matmul(dw, x, dy, inp, out, m, WriteMode::Overwrite);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::{Buf, Cpu};

    const SHAPE: MatmulShape = (5, 16, 32);

    fn values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    }

    /// The elements of a matrix after quantization to FP8, by row and column.
    fn quantized(x: &[f32], format: Fp8Format, columns: usize) -> impl Fn(usize, usize) -> f64 {
        let scale = format.scale_for(x.iter().fold(0.0, |most, x| x.abs().max(most)));
        let values: Vec<f64> =
            x.iter().map(|x| f64::from(format.decode(format.encode(x / scale)) * scale)).collect();
        move |row, column| values[row * columns + column]
    }

    #[track_caller]
    fn assert_sums(actual: &Buf, columns: usize, depth: usize, term: impl Fn(usize, usize, usize) -> f64) {
        for (i, actual) in actual.host().iter().enumerate() {
            let expected: f64 = (0..depth).map(|p| term(i / columns, i % columns, p)).sum();
            assert!(
                (f64::from(*actual) - expected).abs() < 1e-4,
                "element {i}: {actual}, expected {expected}"
            );
        }
    }

    /// Weights and activations are rounded to E4M3 and gradients to E5M2 for both storage orders.
    #[test]
    fn every_matmul_equals_its_definition_on_quantized_operands() {
        let (m, inp, out) = SHAPE;
        let (cpu, fp8) = (Cpu::new(1), LinearPrecision::Fp8);
        let [x, dy, w, bias] =
            [(m * inp, 1), (m * out, 2), (inp * out, 3), (out, 4)].map(|(n, s)| values(n, s));
        let (x_at, dy_at) = (quantized(&x, Fp8Format::E4M3, inp), quantized(&dy, Fp8Format::E5M2, out));
        let (w_at, conv1d_w_at) = (quantized(&w, Fp8Format::E4M3, inp), quantized(&w, Fp8Format::E4M3, out));
        let [vx, vdy, vw, vb] = [&x, &dy, &w, &bias].map(|v| View::from(&v[..]));
        let [mut y, mut dx, mut dw] =
            [m * out, m * inp, inp * out].map(|n| Buf::from_slice(&vec![f32::NAN; n]));

        fp8.forward(&cpu, y.view_mut(), vx, vw, Some(vb), SHAPE);
        let with_bias = |j: usize, p: usize| if p == 0 { f64::from(bias[j]) } else { 0.0 };
        assert_sums(&y, out, inp, |i, j, p| x_at(i, p) * w_at(j, p) + with_bias(j, p));
        fp8.backward_input(&cpu, dx.view_mut(), vdy, vw, SHAPE);
        assert_sums(&dx, inp, out, |i, j, p| dy_at(i, p) * w_at(p, j));
        fp8.backward_weight(&cpu, dw.view_mut(), vdy, vx, SHAPE);
        assert_sums(&dw, inp, m, |i, j, p| dy_at(p, i) * x_at(p, j));

        fp8.conv1d_forward(&cpu, y.view_mut(), vx, vw, vb, SHAPE);
        assert_sums(&y, out, inp, |i, j, p| x_at(i, p) * conv1d_w_at(p, j) + with_bias(j, p));
        fp8.conv1d_backward_input(&cpu, dx.view_mut(), vdy, vw, SHAPE);
        assert_sums(&dx, inp, out, |i, j, p| dy_at(i, p) * conv1d_w_at(j, p));
        fp8.conv1d_backward_weight(&cpu, dw.view_mut(), vdy, vx, SHAPE);
        assert_sums(&dw, out, m, |i, j, p| x_at(p, i) * dy_at(p, j));
    }
}
