//! [`LinearFormat`]: computes the matmuls with a layer's weight matrices, either in the data type
//! of the weights and activations or in fp8. The matmuls of adapters, routers and experts are
//! always in the compute dtype.
use super::error::{ModelError, Result};
use device::{
    Buf, Fp8Format, Ops, View, ViewMut,
    ops::{FP8_COLUMN_MULTIPLE, Fp8Operand, WriteMode},
};

/// The precision in which the matmuls with a layer's weight matrices are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LinearPrecision {
    /// The dtype of weights and activations.
    #[default]
    ComputeDtype,
    /// FP8 (Micikevicius et al. 2022): weights and activations in E4M3, gradients in E5M2, each
    /// matrix with one scale.
    Fp8,
}

/// How the matmuls with weight matrices of layers are computed: their precision, and whether the
/// matrices are stored transposed.
///
/// The input `x` is `[m, inp]`, and the output `y` is `[m, out]`. The weight `w` is `[out, inp]`,
/// or `[inp, out]` if it is transposed.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearFormat {
    pub(super) precision: LinearPrecision,
    /// Whether weights are stored as in `Conv1D` of transformers.
    pub(super) is_transposed: bool,
}

/// The sizes of a matmul: number of rows, inputs per row, outputs per row.
pub(super) type MatmulSizes = (usize, usize, usize);

/// Returns the description of the matrix `x` as an input of an fp8 matmul, which rounds the matrix
/// to the fp8 format `format`. The operand is read transposed if `transposed` is set.
fn create_fp8_operand(x: View<'_>, format: Fp8Format, transposed: bool) -> Fp8Operand<'_> {
    Fp8Operand { x, format, transposed }
}

/// Fails if fp8 matmuls do not support a dimension of the model, such as its width. `sizes` are the
/// config key and the value of each dimension.
///
/// # Errors
///
/// Fails with [`ModelError::Fp8SizeUnsupported`] for the first dimension that is not supported.
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

impl LinearFormat {
    /// Computes the output of a linear layer: `y = x · wᵀ + bias`.
    pub(super) fn forward(
        self,
        ops: &dyn Ops,
        mut y: ViewMut,
        x: View,
        w: View,
        bias: Option<View>,
        (m, inp, out): MatmulSizes,
    ) {
        if self.precision == LinearPrecision::ComputeDtype {
            return match (self.is_transposed, bias) {
                (false, bias) => ops.matmul_bias_forward(y, x, w, bias, m, out, inp),
                (true, Some(bias)) => ops.conv1d_bias_forward(y, x, w, bias, m, inp, out),
                (true, None) => ops.conv1d_forward(y, x, w, m, inp, out),
            };
        }
        let x = create_fp8_operand(x, Fp8Format::E4M3, false);
        let w = create_fp8_operand(w, Fp8Format::E4M3, !self.is_transposed);
        ops.fp8_matmul(y.reborrow(), x, w, m, out, inp, WriteMode::Overwrite);
        if let Some(bias) = bias {
            ops.bias_forward(y, bias, m, out);
        }
    }

    /// Returns whether the matmuls with weight matrices can compute GELU or a bias gradient in
    /// their epilogues on the backend `ops`. fp8 matmuls cannot.
    pub(super) fn has_epilogues(self, ops: &dyn Ops) -> bool {
        self.precision == LinearPrecision::ComputeDtype && ops.has_matmul_epilogues()
    }

    /// Computes the gradients of a linear layer's weight and bias from `dy`, the gradient of its
    /// output. `dbias` must contain zeros on entry. Requires [`LinearFormat::has_epilogues`].
    pub(super) fn backward_weight_and_bias(
        self,
        ops: &dyn Ops,
        dw: ViewMut,
        dbias: ViewMut,
        (x, dy): (View, View),
        (m, inp, out): MatmulSizes,
    ) {
        match self.is_transposed {
            false => ops.matmul_backward_weight_and_bias(dw, dbias, dy, x, [m, out, inp]),
            true => ops.conv1d_backward_weight_and_bias(dw, dbias, dy, x, [m, inp, out]),
        }
    }

    /// Converts `dy`, the gradient of a linear layer's output, to the data type in which the
    /// matmuls of the backward pass read it, or returns it unchanged with fp8. If the backend
    /// rounds operands, writes the rounded gradient to `buffer`, once for both matmuls.
    pub(super) fn round_gradient<'a>(self, ops: &dyn Ops, dy: View<'a>, buffer: &'a mut Buf) -> View<'a> {
        match self.precision {
            LinearPrecision::ComputeDtype => ops.convert_to_matmul_dtype(dy, buffer),
            LinearPrecision::Fp8 => dy,
        }
    }

    /// Computes the gradient of a linear layer's input, `dx = dy · w`.
    pub(super) fn backward_input(
        self,
        ops: &dyn Ops,
        dx: ViewMut,
        dy: View,
        w: View,
        (m, inp, out): MatmulSizes,
    ) {
        if self.precision == LinearPrecision::ComputeDtype {
            return match self.is_transposed {
                false => ops.matmul_backward_input(dx, dy, w, m, out, inp, WriteMode::Overwrite),
                true => ops.conv1d_backward_input(dx, dy, w, m, inp, out),
            };
        }
        let dy = create_fp8_operand(dy, Fp8Format::E5M2, false);
        let w = create_fp8_operand(w, Fp8Format::E4M3, self.is_transposed);
        ops.fp8_matmul(dx, dy, w, m, inp, out, WriteMode::Overwrite);
    }

    /// Computes the gradient of a linear layer's weight, `dw = dyᵀ · x`, and stores it transposed
    /// if the weight is stored transposed.
    pub(super) fn backward_weight(
        self,
        ops: &dyn Ops,
        dw: ViewMut,
        dy: View,
        x: View,
        (m, inp, out): MatmulSizes,
    ) {
        if self.precision == LinearPrecision::ComputeDtype {
            return match self.is_transposed {
                false => ops.matmul_backward_weight(dw, dy, x, m, out, inp, WriteMode::Overwrite),
                true => ops.conv1d_backward_weight(dw, dy, x, m, inp, out),
            };
        }
        let x = create_fp8_operand(x, Fp8Format::E4M3, self.is_transposed);
        let dy = create_fp8_operand(dy, Fp8Format::E5M2, !self.is_transposed);
        match self.is_transposed {
            false => ops.fp8_matmul(dw, dy, x, out, inp, m, WriteMode::Overwrite),
            true => ops.fp8_matmul(dw, x, dy, inp, out, m, WriteMode::Overwrite),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::{Buf, Cpu};

    const SHAPE: MatmulSizes = (5, 16, 32);

    /// Generates test values from −1 to about 1, which depend only on `seed` and the index.
    fn generate_values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    }

    /// Rounds a matrix to fp8, and returns a function from (row, column) to the rounded element.
    fn quantize_matrix(x: &[f32], format: Fp8Format, columns: usize) -> impl Fn(usize, usize) -> f64 {
        let scale = format.compute_scale(x.iter().fold(0.0, |most, x| x.abs().max(most)));
        let values: Vec<f64> =
            x.iter().map(|x| f64::from(format.decode(format.encode(x / scale)) * scale)).collect();
        move |row, column| values[row * columns + column]
    }

    /// Checks that each element of `actual` is the sum over `p < depth` of `term(row, column, p)`.
    #[track_caller]
    fn assert_elements_equal_sums_over_depth(
        actual: &Buf,
        columns: usize,
        depth: usize,
        term: impl Fn(usize, usize, usize) -> f64,
    ) {
        for (i, actual) in actual.host_slice().iter().enumerate() {
            let expected: f64 = (0..depth).map(|p| term(i / columns, i % columns, p)).sum();
            assert!(
                (f64::from(*actual) - expected).abs() < 1e-4,
                "element {i}: {actual}, expected {expected}"
            );
        }
    }

    /// Checks that fp8 matmuls equal their definition on rounded operands: weights and activations
    /// in E4M3, gradients in E5M2.
    #[test]
    fn every_matmul_equals_its_definition_on_quantized_operands() {
        let (m, inp, out) = SHAPE;
        let cpu = Cpu::new(1);
        let [fp8, conv1d_fp8] = [false, true]
            .map(|is_transposed| LinearFormat { precision: LinearPrecision::Fp8, is_transposed });
        let [x, dy, w, bias] =
            [(m * inp, 1), (m * out, 2), (inp * out, 3), (out, 4)].map(|(n, s)| generate_values(n, s));
        let (x_at, dy_at) =
            (quantize_matrix(&x, Fp8Format::E4M3, inp), quantize_matrix(&dy, Fp8Format::E5M2, out));
        let (w_at, conv1d_w_at) =
            (quantize_matrix(&w, Fp8Format::E4M3, inp), quantize_matrix(&w, Fp8Format::E4M3, out));
        let [vx, vdy, vw, vb] = [&x, &dy, &w, &bias].map(|v| View::from(&v[..]));
        let [mut y, mut dx, mut dw] =
            [m * out, m * inp, inp * out].map(|n| Buf::from_slice(&vec![f32::NAN; n]));

        fp8.forward(&cpu, y.view_mut(), vx, vw, Some(vb), SHAPE);
        let with_bias = |j: usize, p: usize| if p == 0 { f64::from(bias[j]) } else { 0.0 };
        assert_elements_equal_sums_over_depth(&y, out, inp, |i, j, p| {
            x_at(i, p) * w_at(j, p) + with_bias(j, p)
        });
        fp8.backward_input(&cpu, dx.view_mut(), vdy, vw, SHAPE);
        assert_elements_equal_sums_over_depth(&dx, inp, out, |i, j, p| dy_at(i, p) * w_at(p, j));
        fp8.backward_weight(&cpu, dw.view_mut(), vdy, vx, SHAPE);
        assert_elements_equal_sums_over_depth(&dw, inp, m, |i, j, p| dy_at(p, i) * x_at(p, j));

        conv1d_fp8.forward(&cpu, y.view_mut(), vx, vw, Some(vb), SHAPE);
        assert_elements_equal_sums_over_depth(&y, out, inp, |i, j, p| {
            x_at(i, p) * conv1d_w_at(p, j) + with_bias(j, p)
        });
        conv1d_fp8.backward_input(&cpu, dx.view_mut(), vdy, vw, SHAPE);
        assert_elements_equal_sums_over_depth(&dx, inp, out, |i, j, p| dy_at(i, p) * conv1d_w_at(j, p));
        conv1d_fp8.backward_weight(&cpu, dw.view_mut(), vdy, vx, SHAPE);
        assert_elements_equal_sums_over_depth(&dw, out, m, |i, j, p| x_at(p, i) * dy_at(p, j));
    }
}
