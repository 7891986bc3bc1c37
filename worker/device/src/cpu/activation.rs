//! GELU (Hendrycks and Gimpel, 2016) in its tanh approximation, and the gated linear units SwiGLU
//! and GeGLU (Shazeer, 2020), on the CPU.
use super::backend::Cpu;
use super::elements::InputElements;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, exp, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{ActivationOps, expect_lens};

/// The constant 2·√(2/π) of GELU's tanh approximation.
const TWO_SQRT_2_OVER_PI: f32 = core::f32::consts::FRAC_2_SQRT_PI * core::f32::consts::SQRT_2;
/// Coefficient of x³ in GELU's tanh approximation.
const CUBIC_COEFFICIENT: f32 = 0.044715;

/// Activation function of the gate in a gated linear unit: SiLU in SwiGLU, or GELU in GeGLU.
#[derive(Clone, Copy)]
enum Activation {
    Silu,
    Gelu,
}

impl Activation {
    /// Returns the approximate cost of this function per element, where copying an element costs 1,
    /// for dividing work into tasks.
    fn relative_cost(self) -> usize {
        match self {
            Activation::Silu => 4,
            Activation::Gelu => 8,
        }
    }
}

impl ActivationOps for Cpu {
    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_forward(self, "swiglu_forward", Activation::Silu, y, gate_up, [m, f]);
    }

    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_backward(self, "swiglu_backward", Activation::Silu, dgate_up, dy, gate_up, [m, f]);
    }

    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_forward(self, "geglu_forward", Activation::Gelu, y, gate_up, [m, f]);
    }

    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_backward(self, "geglu_backward", Activation::Gelu, dgate_up, dy, gate_up, [m, f]);
    }

    fn gelu_forward(&self, y: ViewMut, x: View) {
        let len = y.len();
        expect_lens("gelu_forward", [("x", x.len(), len)]);
        let x = InputElements::from(x);
        self.run_over_output_rows(
            len,
            Activation::Gelu.relative_cost(),
            self.as_rows_to_overwrite(y, 1),
            |range, mut y| {
                gelu(self.instruction_set, &mut y, &x.to_f32(self, range));
            },
        );
    }

    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View) {
        let len = dx.len();
        expect_lens("gelu_backward", [("dy", dy.len(), len), ("x", x.len(), len)]);
        let x = InputElements::from(x);
        let outputs = (self.as_rows_to_overwrite(dx, 1), self.as_rows_to_update(dy, 1));
        self.run_over_output_rows(
            len,
            Activation::Gelu.relative_cost(),
            outputs,
            |range, (mut dx, mut dy)| {
                gelu_gradient(self.instruction_set, &mut dx, &mut dy, &x.to_f32(self, range));
            },
        );
    }
}

/// Computes a gated linear unit for `m` rows of `f` elements: `y = activation(gate)·up`.
fn gated_forward(cpu: &Cpu, op: &str, activation: Activation, y: ViewMut, gate_up: View, [m, f]: [usize; 2]) {
    expect_lens(op, [("y", y.len(), m * f), ("gate_up", gate_up.len(), m * 2 * f)]);
    let gate_up = InputElements::from(gate_up);
    cpu.run_over_output_rows(
        m,
        activation.relative_cost() * f,
        cpu.as_rows_to_overwrite(y, f),
        |rows, mut y| {
            let gate_up = gate_up.rows_to_f32(cpu, &rows, 2 * f);
            activate_gates(cpu.instruction_set, activation, &mut y, &gate_up, f);
        },
    );
}

/// Computes the gradients of a gated linear unit with respect to gate and up, and writes them to
/// `dgate_up`. Recomputes the output `y` of the forward pass in place of `dy`.
fn gated_backward(
    cpu: &Cpu,
    op: &str,
    activation: Activation,
    dgate_up: ViewMut,
    dy: ViewMut,
    gate_up: View,
    [m, f]: [usize; 2],
) {
    let pairs = m * 2 * f;
    let lens =
        [("dgate_up", dgate_up.len(), pairs), ("dy", dy.len(), m * f), ("gate_up", gate_up.len(), pairs)];
    expect_lens(op, lens);
    let gate_up = InputElements::from(gate_up);
    let outputs = (cpu.as_rows_to_overwrite(dgate_up, 2 * f), cpu.as_rows_to_update(dy, f));
    cpu.run_over_output_rows(m, activation.relative_cost() * f, outputs, |rows, (mut dgate_up, mut dy)| {
        let gate_up = gate_up.rows_to_f32(cpu, &rows, 2 * f);
        differentiate_gates(cpu.instruction_set, activation, &mut dgate_up, &mut dy, &gate_up, f);
    });
}

multiversion! {
    /// Computes GELU of each element with the given instruction set: `y = gelu(x)`.
    fn gelu = compute_gelu(y: &mut [f32], x: &[f32])
}
multiversion! {
    /// Computes GELU's input gradient `dx`, and replaces the output gradient in `dy` by GELU's
    /// output, with the given instruction set.
    fn gelu_gradient = compute_gelu_gradient(dx: &mut [f32], dy: &mut [f32], x: &[f32])
}
multiversion! {
    /// Computes a gated linear unit for each row of `gate_up` with the given instruction set.
    fn activate_gates = activate_gate_rows(activation: Activation, y: &mut [f32], gate_up: &[f32], f: usize)
}
multiversion! {
    /// Computes the gradients of a gated linear unit's inputs gate and up with the given
    /// instruction set, and replaces the output gradient in `dy` by the unit's output.
    fn differentiate_gates = differentiate_gate_rows(
        activation: Activation, dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize
    )
}

/// Computes the logistic function σ(x) = 1 / (1 + e⁻ˣ) of each element of a SIMD vector.
#[inline(always)]
fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// An activation function that the CPU backend computes in SIMD lanes, together with its
/// derivative.
trait ActivationFunction {
    /// Computes the activation function and its derivative at `x` in each lane, and returns (value,
    /// derivative).
    fn differentiate<S: Simd>(s: S, x: S::V) -> (S::V, S::V);
}

/// The function silu(x) = x·σ(x), with the derivative `σ(x)·(1 + x·(1 − σ(x)))`.
struct Silu;

impl ActivationFunction for Silu {
    #[inline(always)]
    fn differentiate<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
        let (one, sigma) = (s.splat(1.0), sigmoid(s, x));
        (s.mul(x, sigma), s.mul(sigma, s.fma(x, s.sub(one, sigma), one)))
    }
}

/// The function gelu(x) = ½·x·(1 + tanh u), where u = √(2/π)·(x + 0.044715·x³). With s = σ(2u),
/// value and derivative are computed as `x·s` and `s + x·s·(1 − s)·2u'`, which loses no accuracy
/// where tanh is close to −1.
struct Gelu;

impl ActivationFunction for Gelu {
    #[inline(always)]
    fn differentiate<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
        let (one, factor, square) = (s.splat(1.0), s.splat(TWO_SQRT_2_OVER_PI), s.mul(x, x));
        let twice_u = s.mul(s.mul(x, factor), s.fma(square, s.splat(CUBIC_COEFFICIENT), one));
        let sigma = sigmoid(s, twice_u);
        let inner = s.mul(factor, s.fma(square, s.splat(3.0 * CUBIC_COEFFICIENT), one));
        let value = s.mul(x, sigma);
        (value, s.fma(s.mul(value, s.sub(one, sigma)), inner, sigma))
    }
}

/// Computes GELU of each element: `y = gelu(x)`.
#[inline(always)]
fn compute_gelu<S: Simd>(s: S, y: &mut [f32], x: &[f32]) {
    for i in (0..y.len()).step_by(LANES) {
        store_lanes(s, y, i, Gelu::differentiate(s, load_lanes(s, x, i)).0);
    }
}

/// Computes GELU's input gradient `dx = dy·gelu'(x)`, and replaces the output gradient in `dy` by
/// GELU's output gelu(x).
#[inline(always)]
fn compute_gelu_gradient<S: Simd>(s: S, dx: &mut [f32], dy: &mut [f32], x: &[f32]) {
    for i in (0..dx.len()).step_by(LANES) {
        let (value, slope) = Gelu::differentiate(s, load_lanes(s, x, i));
        store_lanes(s, dx, i, s.mul(load_lanes(s, dy, i), slope));
        store_lanes(s, dy, i, value);
    }
}

/// Computes a gated linear unit, `y = activation(gate)·up`, for each row of `gate_up`. A row has
/// `f` gates and then `f` ups.
#[inline(always)]
fn activate_gate_rows<S: Simd>(s: S, activation: Activation, y: &mut [f32], gate_up: &[f32], f: usize) {
    match activation {
        Activation::Silu => activate_rows::<S, Silu>(s, y, gate_up, f),
        Activation::Gelu => activate_rows::<S, Gelu>(s, y, gate_up, f),
    }
}

/// Computes the gradients of a gated linear unit's inputs gate and up, and replaces the output
/// gradient in `dy` by the unit's output.
#[inline(always)]
fn differentiate_gate_rows<S: Simd>(
    s: S,
    activation: Activation,
    dgate_up: &mut [f32],
    dy: &mut [f32],
    gate_up: &[f32],
    f: usize,
) {
    match activation {
        Activation::Silu => differentiate_rows::<S, Silu>(s, dgate_up, dy, gate_up, f),
        Activation::Gelu => differentiate_rows::<S, Gelu>(s, dgate_up, dy, gate_up, f),
    }
}

/// Computes a gated linear unit with the activation function `A`, `y = A(gate)·up`, for each row of
/// `gate_up`.
#[inline(always)]
fn activate_rows<S: Simd, A: ActivationFunction>(s: S, y: &mut [f32], gate_up: &[f32], f: usize) {
    for row in 0..y.len() / f.max(1) {
        let y = &mut y[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        for i in (0..f).step_by(LANES) {
            store_lanes(s, y, i, s.mul(A::differentiate(s, load_lanes(s, gate, i)).0, load_lanes(s, up, i)));
        }
    }
}

/// Computes the gradients of a gated linear unit with the activation function `A`, and replaces the
/// output gradient in `dy` by the unit's output.
#[inline(always)]
fn differentiate_rows<S: Simd, A: ActivationFunction>(
    s: S,
    dgate_up: &mut [f32],
    dy: &mut [f32],
    gate_up: &[f32],
    f: usize,
) {
    for row in 0..dy.len() / f.max(1) {
        let dy_to_y = &mut dy[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        let (dgate, dup) = dgate_up[row * 2 * f..][..2 * f].split_at_mut(f);
        for i in (0..f).step_by(LANES) {
            let (dy, up) = (load_lanes(s, dy_to_y, i), load_lanes(s, up, i));
            let (value, slope) = A::differentiate(s, load_lanes(s, gate, i));
            store_lanes(s, dgate, i, s.mul(s.mul(dy, up), slope));
            store_lanes(s, dup, i, s.mul(dy, value));
            store_lanes(s, dy_to_y, i, s.mul(value, up));
        }
    }
}
