//! The router of a mixture-of-experts layer on a GPU.
use super::backend::{Cuda, LaunchSize};
use super::compile::EXPERT_ROWS_SOURCE;
use super::launch::{KernelArg, LaunchConfig};
use super::tensor_arg::{TensorArg, f32_gpu_address};
use crate::buffer::{View, ViewMut};
use crate::ops::{RouterBackwardInputs, RouterOps, RouterShape};

/// Maximum number of experts among which the router kernels can select. A warp of the router kernel
/// holds the scores of all experts in registers.
const MAX_EXPERTS: usize = 1024;

impl RouterOps for Cuda {
    /// Selects the experts of each token on the GPU. If `chosen_experts` is `Some`, copies the
    /// experts' indices to it on the host, and blocks until the copy is complete.
    fn router_forward(
        &self,
        probs: ViewMut,
        weights: ViewMut,
        lse: ViewMut,
        chosen_experts: Option<&mut [u32]>,
        logits: View,
        shape: RouterShape,
    ) {
        let matrices = [("logits", logits.len()), ("probs", probs.len())];
        let choices = shape.m * shape.experts_per_token;
        let chosen_len = chosen_experts.as_ref().map_or(choices, |chosen| chosen.len());
        let lists = [("weights", weights.len()), ("chosen_experts", chosen_len)];
        shape.check_arguments("router_forward", &matrices, &lists, lse.len());
        let [probs, weights, lse] = [probs, weights, lse].map(|v| f32_gpu_address(v.as_view()));
        let indices = self.alloc_scratch(choices * size_of::<u32>());
        let RouterShape { experts, experts_per_token: per_token, normalize_weights, .. } = shape;
        let (logits, normalize) = (TensorArg::from(logits), i64::from(normalize_weights));
        let arguments: [&dyn KernelArg; 8] =
            [&probs, &weights, &lse, &indices.address(), &logits, &experts, &per_token, &normalize];
        self.launch(
            EXPERT_ROWS_SOURCE,
            c"router_forward",
            compute_warp_per_row_launch_size(shape),
            &arguments,
        );
        if let Some(chosen) = chosen_experts {
            let chosen = bytemuck::cast_slice_mut(chosen);
            self.gpu.call_and_record_failure(|| self.gpu.download_blocking(chosen, indices.address()));
        }
    }

    fn router_backward(
        &self,
        dlogits: ViewMut,
        dweights: View,
        inputs: RouterBackwardInputs,
        shape: RouterShape,
    ) {
        inputs.check_arguments(dlogits.len(), dweights.len(), shape);
        let chosen = self.upload_input("chosen", inputs.chosen_experts);
        let balance = self.upload_input("balance", inputs.balance_grad);
        let [dweights, probs, lse] = [dweights, inputs.probs, inputs.lse].map(f32_gpu_address);
        let RouterShape { experts, experts_per_token: per_token, normalize_weights, .. } = shape;
        let (dlogits, normalize) = (TensorArg::from(&dlogits), i64::from(normalize_weights));
        let twice_z = 2.0 * inputs.z_loss_coef;
        let arguments: [&dyn KernelArg; 10] = [
            &dlogits, &dweights, &probs, &lse, &chosen, &balance, &experts, &per_token, &normalize, &twice_z,
        ];
        self.launch(
            EXPERT_ROWS_SOURCE,
            c"router_backward",
            compute_warp_per_row_launch_size(shape),
            &arguments,
        );
    }
}

/// Returns the launch configuration of a router kernel: one block of one warp (32 threads) per row
/// of router logits. Panics if the GPU does not support the number of experts.
fn compute_warp_per_row_launch_size(RouterShape { m, experts, .. }: RouterShape) -> LaunchSize {
    assert!(experts <= MAX_EXPERTS, "router: {experts} experts exceed the GPU's maximum of {MAX_EXPERTS}");
    LaunchSize::Config(LaunchConfig { grid: [m as u32, 1, 1], block: [32, 1, 1], shared: 0 })
}
