//! Activation functions as ops: GELU, and the gated linear units SwiGLU and GeGLU.
use crate::buffer::{View, ViewMut};

/// Ops for SwiGLU, GeGLU and GELU, with their backward passes.
pub trait ActivationOps {
    /// Computes SwiGLU (Shazeer, 2020): `y[m,f] = silu(gate)·up`. Each row of `gate_up[m, 2f]` has
    /// the gate, then up.
    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize);
    /// Computes the gradient of SwiGLU with respect to gate and up. Overwrites `dgate_up` with the
    /// gradient, and `dy` with the output `y` of the forward pass, which the gradient of the next
    /// matmul's weight needs.
    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize);
    /// Computes GeGLU (Shazeer, 2020): `y[m,f] = gelu(gate)·up`. Each row of `gate_up[m, 2f]` has
    /// the gate, then up.
    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize);
    /// Computes the gradient of GeGLU with respect to gate and up. Overwrites `dgate_up` with the
    /// gradient, and `dy` with the output `y` of the forward pass.
    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize);
    /// Computes the tanh approximation of GELU (Hendrycks and Gimpel, 2016):
    /// `y = ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
    fn gelu_forward(&self, y: ViewMut, x: View);
    /// Computes the gradient of GELU with respect to its input. Overwrites `dx` with the gradient,
    /// and `dy` with the output `y` of the forward pass.
    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View);
}
