//! Updates of parameters by optimizers (AdamW, SGD, Lion, Nesterov momentum) on a GPU.
use super::backend::{Cuda, LaunchSize};
use super::bindings::Address;
use super::compile::ELEMENTWISE_SOURCE;
use super::launch::KernelArg;
use super::tensor_arg::{TensorArg, f32_gpu_address};
use crate::buffer::{View, ViewMut};
use crate::ops::{
    AdamWCoefficients, AdamWHyperparams, LionCoefficients, LionHyperparams, OptimizerOps, SgdHyperparams,
    expect_lens,
};

// SAFETY: struct AdamWScalars of elementwise.cu.
unsafe impl KernelArg for AdamWCoefficients {}
// SAFETY: struct LionScalars of elementwise.cu.
unsafe impl KernelArg for LionCoefficients {}

impl OptimizerOps for Cuda {
    fn adamw(
        &self,
        p: ViewMut,
        rounded: Option<ViewMut>,
        g: View,
        exp_avg: ViewMut,
        exp_avg_sq: ViewMut,
        hyper: &AdamWHyperparams,
    ) {
        let len = p.len();
        let rounded_len = rounded.as_ref().map_or(len, ViewMut::len);
        expect_lens("adamw", [("rounded", rounded_len, len)]);
        let (avg, avg_sq) = (("exp_avg", exp_avg.len(), len), ("exp_avg_sq", exp_avg_sq.len(), len));
        expect_lens("adamw", [("g", g.len(), len), avg, avg_sq]);
        let [avg, avg_sq] = [exp_avg, exp_avg_sq].map(|s| f32_gpu_address(s.as_view()));
        let rounded = rounded.as_ref().map_or(TensorArg::NONE, TensorArg::from);
        let (p, g, scalars) = (TensorArg::from(&p), TensorArg::from(g), hyper.compute_coefficients());
        let arguments: [&dyn KernelArg; 7] = [&p, &rounded, &g, &avg, &avg_sq, &len, &scalars];
        self.launch(ELEMENTWISE_SOURCE, c"adamw", LaunchSize::ElementsBy8(len), &arguments);
    }

    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, hyper: &SgdHyperparams) {
        let len = p.len();
        let buffer_len = if hyper.momentum == 0.0 { 0 } else { len };
        let momentum = ("momentum_buffer", momentum_buffer.len(), buffer_len);
        expect_lens("sgd", [("g", g.len(), len), momentum]);
        let buffer: Address =
            if hyper.momentum == 0.0 { 0 } else { f32_gpu_address(momentum_buffer.as_view()) };
        let [decay, momentum, lr] = [hyper.weight_decay, hyper.momentum, hyper.lr].map(|x| x as f32);
        let (p, g) = (TensorArg::from(&p), TensorArg::from(g));
        let arguments: [&dyn KernelArg; 8] =
            [&p, &g, &buffer, &len, &hyper.grad_scale, &decay, &momentum, &lr];
        self.launch(ELEMENTWISE_SOURCE, c"sgd", LaunchSize::Elements(len), &arguments);
    }

    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, hyper: &LionHyperparams) {
        let len = p.len();
        expect_lens("lion", [("g", g.len(), len), ("exp_avg", exp_avg.len(), len)]);
        let (p, g, avg) = (TensorArg::from(&p), TensorArg::from(g), f32_gpu_address(exp_avg.as_view()));
        let scalars = hyper.compute_coefficients();
        self.launch(ELEMENTWISE_SOURCE, c"lion", LaunchSize::Elements(len), &[&p, &g, &avg, &len, &scalars]);
    }

    fn nesterov_momentum(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
        let len = g.len();
        expect_lens("nesterov_momentum", [("g", len, buffer.len())]);
        let [buffer, g] = [buffer, g].map(|x| f32_gpu_address(x.as_view()));
        let (mu, one_minus_mu) = (mu as f32, (1.0 - mu) as f32);
        let arguments: [&dyn KernelArg; 6] = [&buffer, &g, &len, &mu, &one_minus_mu, &scale];
        self.launch(ELEMENTWISE_SOURCE, c"nesterov_momentum", LaunchSize::Elements(len), &arguments);
    }
}
