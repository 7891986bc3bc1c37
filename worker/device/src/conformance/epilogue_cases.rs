//! Compares matmuls with epilogues (GELU, bias gradients) on the GPU with the CPU.
use super::comparison::{
    Backends, CaseResult, CaseRng, make_buffer_of_tested_type, make_f32_buffer, make_nan_values,
};
use crate::Cuda;

/// Enables matmul epilogues of a GPU until it is dropped.
struct EnabledEpilogues<'a>(&'a Cuda);

impl<'a> EnabledEpilogues<'a> {
    fn new(cuda: &'a Cuda) -> Self {
        cuda.set_matmul_epilogues_enabled(true);
        EnabledEpilogues(cuda)
    }
}

impl Drop for EnabledEpilogues<'_> {
    fn drop(&mut self) {
        self.0.set_matmul_epilogues_enabled(false);
    }
}

/// Compares the forward and the backward pass of linear and Conv1D layers with GELU and bias on the
/// GPU with the CPU as the reference: `m` rows, `inp` inputs and `out` outputs.
pub(super) fn compare_epilogues(backends: &Backends, seed: u64, [m, inp, out]: [usize; 3]) -> CaseResult {
    let _enabled = EnabledEpilogues::new(backends.cuda);
    let mut rng = CaseRng::new(seed);
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * out)),
        make_buffer_of_tested_type(make_nan_values(m * out)),
        make_buffer_of_tested_type(rng.draw_vector(m * inp)),
        make_buffer_of_tested_type(rng.draw_vector(inp * out)),
        make_buffer_of_tested_type(rng.draw_vector(out)),
    ];
    let mut errors = backends.compare(
        &format!("GELU in the epilogue {m} {inp} {out}"),
        buffers,
        |ops, [y, pre, x, w, bias]| {
            let (x, w, bias) = (x.view(), w.view(), bias.view());
            ops.conv1d_gelu_forward(y.view_mut(), pre.view_mut(), x, w, bias, [m, inp, out]);
        },
    )?;
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * inp)),
        make_buffer_of_tested_type(make_nan_values(m * inp)),
        make_buffer_of_tested_type(rng.draw_vector(m * out)),
        make_buffer_of_tested_type(rng.draw_vector(inp * out)),
        make_buffer_of_tested_type(rng.draw_vector(m * inp)),
    ];
    errors += backends.compare(
        &format!("gradient of GELU in the epilogue {m} {inp} {out}"),
        buffers,
        |ops, [dpre, y, dy, w, pre]| {
            let (dy, w, pre) = (dy.view(), w.view(), pre.view());
            ops.conv1d_gelu_backward_input(dpre.view_mut(), y.view_mut(), dy, w, pre, [m, inp, out]);
        },
    )?;
    let buffers = [
        make_f32_buffer(make_nan_values(inp * out)),
        make_f32_buffer(vec![0.0; out]),
        make_f32_buffer(make_nan_values(inp * out)),
        make_f32_buffer(vec![0.0; out]),
        make_buffer_of_tested_type(rng.draw_vector(m * out)),
        make_buffer_of_tested_type(rng.draw_vector(m * inp)),
    ];
    errors += backends.compare(
        &format!("bias gradients in the epilogue {m} {inp} {out}"),
        buffers,
        |ops, [dw, dbias, conv1d_dw, conv1d_dbias, dy, x]| {
            let (dy, x) = (dy.view(), x.view());
            let (dw, dbias) = (dw.view_mut(), dbias.view_mut());
            ops.matmul_backward_weight_and_bias(dw, dbias, dy, x, [m, out, inp]);
            let (dw, dbias) = (conv1d_dw.view_mut(), conv1d_dbias.view_mut());
            ops.conv1d_backward_weight_and_bias(dw, dbias, dy, x, [m, inp, out]);
        },
    )?;
    Ok(errors)
}
