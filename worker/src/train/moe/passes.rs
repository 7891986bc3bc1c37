//! The forward and backward passes of mixture-of-experts layers in a step.
//!
//! The sequence of collectives depends neither on the routing nor on whether this rank has a
//! micro-batch in the round. A rank whose experts receive no rows takes part with empty buffers.
//! The gradients of experts are computed per micro-batch and summed in the order of the
//! micro-batches (docs/numerics.md).
use super::MoeLayerParts;
use crate::{
    error::Result,
    model::{
        LayerInput, MoeModel,
        moe::{
            ExpertBackwardBuffers, ExpertGradInputs, ExpertInputs, RouterBackwardGrads,
            compute_expert_activation, compute_expert_param_gradients, experts_backward_input,
            experts_forward,
        },
    },
    train::{
        activations::LayerActivations,
        dispatch::{ExchangedRowKind, resize_row_buffer},
        step::Trainer,
    },
    zero::engine::ParamsGuard,
};
use device::Buf;
use jobspec::RecomputeMode;

impl Trainer {
    /// Returns the index of the parameter unit (tensors that are gathered together) with this
    /// rank's experts of layer number `l`, or `None` if the layer has no experts.
    pub(in crate::train) fn find_expert_unit(&self, l: usize) -> Option<usize> {
        self.experts.as_ref().and_then(|e| e.find_expert_unit(l))
    }

    /// Runs the forward pass of a mixture-of-experts layer, including the exchange of token rows
    /// with other ranks. If `compute` is false, this rank has no micro-batch, and its experts only
    /// compute rows of other ranks.
    pub(in crate::train) fn run_moe_layer_forward(
        &mut self,
        l: usize,
        unit: usize,
        compute: bool,
    ) -> Result<()> {
        let guard = self.engine.fetch_params(l + 1)?;
        if compute {
            self.run_attention_and_router_forward(l, &guard, false);
        }
        self.engine.release_params(guard);
        let guard = self.engine.fetch_params(unit)?;
        self.run_experts_forward(l, &guard, compute, true)?;
        self.engine.release_params(guard);
        Ok(())
    }

    /// Runs the forward pass of attention and router of a mixture-of-experts layer.
    ///
    /// Unless `is_recomputed` is set, also reads which experts the router has selected, for which
    /// the host waits for a GPU, and records how often each expert was selected. The recomputation
    /// in the backward pass selects the same experts.
    fn run_attention_and_router_forward(&mut self, l: usize, guard: &ParamsGuard, is_recomputed: bool) {
        let (Some(x), Some(moe)) = (&mut self.experts, MoeModel::from_model(&self.model)) else { return };
        let MoeLayerParts { layer, saved, routes, stats, .. } = x.borrow_for_layer(l);
        let (ops, batch) = (self.ops.as_ref(), &self.batch);
        let LayerActivations { x, mut buffers, .. } = self.activations.select_layer_buffers(l);
        self.engine.with_params(guard, |params| {
            let input = LayerInput { ops, params, batch, x, layer: l };
            let selected = (!is_recomputed).then_some(&mut routes.selected_experts[..]);
            moe.attention_and_router_forward(&input, &mut saved.routing, selected, &mut buffers);
        });
        if !is_recomputed {
            stats.record_layer(ops, layer.index, &saved.routing, &routes.selected_experts);
        }
    }

    /// Sends this rank's token rows to the ranks that have the chosen experts, and runs this rank's
    /// experts on the rows that it receives. If `compute` is false, this rank has no tokens to
    /// dispatch.
    ///
    /// If `output` is set, also sends the experts' outputs back, and combines those for this rank's
    /// tokens into the input of the next layer. Otherwise only saves activations along the routes
    /// of the earlier forward pass (recomputation).
    fn run_experts_forward(
        &mut self,
        l: usize,
        guard: &ParamsGuard,
        compute: bool,
        output: bool,
    ) -> Result<()> {
        let (Some(x), Some(moe)) = (&mut self.experts, MoeModel::from_model(&self.model)) else {
            return Ok(());
        };
        let shape = x.shape;
        let MoeLayerParts { layer, saved, routes, workspace, dispatcher, .. } = x.borrow_for_layer(l);
        let (w, ops) = (&mut self.activations, self.ops.as_ref());
        if output {
            match compute {
                true => {
                    routes.send_plan.plan_dispatch(&routes.selected_experts, shape.per_token, &layer.order)
                }
                false => routes.send_plan.reset_to_no_rows(shape.experts),
            }
            routes.recv_plan = dispatcher.exchange_row_counts(&layer, &routes.send_plan)?;
        }
        let (plan, normed) = ((&routes.send_plan, &routes.recv_plan), moe.normed_expert_inputs(&w.scratch));
        let tokens = &routes.send_plan.row_tokens;
        dispatcher.start_dispatch(&layer, plan, ExchangedRowKind::Rows, &mut saved.rows, |to| {
            ops.gather_rows(to, normed, tokens, shape.hidden);
        });
        dispatcher.wait_for_dispatched_rows(plan, ExchangedRowKind::Rows, &mut saved.rows)?;
        let n = routes.recv_plan.count_rows();
        let gate_up = resize_row_buffer(ops, &mut saved.gate_up, n * 2 * shape.intermediate);
        let out = output.then(|| {
            (
                resize_row_buffer(ops, &mut workspace.out, n * shape.hidden),
                resize_row_buffer(ops, &mut workspace.act, n * shape.intermediate),
            )
        });
        let (ranges, rows) =
            (routes.recv_plan.compute_expert_ranges(), saved.rows.view().slice(0..n * shape.hidden));
        self.engine.with_params(guard, |params| {
            experts_forward(ops, shape, &ExpertInputs { params, expert_ranges: &ranges, rows }, gate_up, out);
        });
        if !output {
            return Ok(());
        }
        dispatcher.start_combine(&layer, plan, ExchangedRowKind::Rows, &workspace.out);
        let rows = dispatcher.wait_for_combined_rows(plan, ExchangedRowKind::Rows, &workspace.out)?;
        if compute {
            let LayerActivations { y, buffers, .. } = w.select_layer_buffers(l);
            let places = &routes.send_plan.choice_rows;
            moe.combine_forward(ops, y, rows, places, &saved.routing, buffers.saved);
        }
        Ok(())
    }

    /// Runs the backward pass of a mixture-of-experts layer, and starts to reduce its gradients to
    /// the ranks that own the parameters.
    pub(in crate::train) fn run_moe_layer_backward(
        &mut self,
        l: usize,
        unit: usize,
        round: usize,
        compute: bool,
    ) -> Result<()> {
        let guard = self.engine.fetch_params(l + 1)?;
        let experts = self.engine.fetch_params(unit)?;
        if self.recompute == RecomputeMode::Block {
            if compute {
                self.run_attention_and_router_forward(l, &guard, true);
            }
            self.run_experts_forward(l, &experts, compute, false)?;
        }
        self.run_experts_backward(l, &experts)?;
        self.engine.release_params(experts);
        self.reduce_expert_gradients(l, unit, round, compute)?;
        self.wait_for_combined_gradients(l)?;
        let mut grad = compute.then(|| self.engine.take_gradient_buffer(l + 1));
        if let Some(g) = &mut grad {
            self.run_attention_and_router_backward(l, &guard, g)?;
        }
        self.engine.release_params(guard);
        Ok(self.engine.reduce_gradient(l + 1, round, grad)?)
    }

    /// Sends the gradient of a layer's output to the ranks that computed the experts of each token,
    /// and runs the backward pass of this rank's experts. Then starts to send back the gradients of
    /// the experts' inputs and of the router's factors, for which
    /// [`Trainer::wait_for_combined_gradients`] waits.
    fn run_experts_backward(&mut self, l: usize, guard: &ParamsGuard) -> Result<()> {
        let Some(x) = &mut self.experts else { return Ok(()) };
        let shape = x.shape;
        let MoeLayerParts { layer, saved, routes, workspace, dispatcher, .. } = x.borrow_for_layer(l);
        let (ops, d, f) = (self.ops.as_ref(), shape.hidden, shape.intermediate);
        let (plan, tokens) = ((&routes.send_plan, &routes.recv_plan), &routes.send_plan.row_tokens);
        let dx = self.activations.residual_grad.view();
        dispatcher.start_dispatch(&layer, plan, ExchangedRowKind::Rows, &mut workspace.out, |to| {
            ops.gather_rows(to, dx, tokens, d)
        });
        let (weights, choices) = (saved.routing.weights.view(), routes.send_plan.list_choices_of_rows());
        dispatcher.start_dispatch(&layer, plan, ExchangedRowKind::Weights, &mut workspace.weights, |to| {
            ops.gather_rows(to, weights, &choices, 1);
        });
        let n = routes.recv_plan.count_rows();
        let gate_up = saved.gate_up.view().slice(0..n * 2 * f);
        compute_expert_activation(ops, shape, gate_up, resize_row_buffer(ops, &mut workspace.act, n * f));
        dispatcher.wait_for_dispatched_rows(plan, ExchangedRowKind::Rows, &mut workspace.out)?;
        dispatcher.wait_for_dispatched_rows(plan, ExchangedRowKind::Weights, &mut workspace.weights)?;
        let (of, rows) = (routes.recv_plan.compute_expert_ranges(), saved.rows.view().slice(0..n * d));
        let back = ExpertBackwardBuffers {
            gate_up,
            dy: workspace.out.view().slice(0..n * d),
            weights: workspace.weights.view().slice(0..n),
            dweights: resize_row_buffer(ops, &mut workspace.dweights, n),
            drows: resize_row_buffer(ops, &mut workspace.drows, n * d),
            act: resize_row_buffer(ops, &mut workspace.act, n * f),
            dact: resize_row_buffer(ops, &mut workspace.dact, n * f),
            dgate_up: resize_row_buffer(ops, &mut workspace.dgate_up, n * 2 * f),
        };
        self.engine.with_params(guard, |params| {
            experts_backward_input(ops, shape, &ExpertInputs { params, expert_ranges: &of, rows }, back);
        });
        dispatcher.start_combine(&layer, plan, ExchangedRowKind::Rows, &workspace.drows);
        dispatcher.start_combine(&layer, plan, ExchangedRowKind::Weights, &workspace.dweights);
        Ok(())
    }

    /// Computes the gradients of the parameters of this rank's experts, and starts to reduce them
    /// to the ranks that own these parameters. Each micro-batch whose tokens this rank received has
    /// a separate gradient.
    fn reduce_expert_gradients(&mut self, l: usize, unit: usize, round: usize, compute: bool) -> Result<()> {
        let Some(x) = &mut self.experts else { return Ok(()) };
        let shape = x.shape;
        let MoeLayerParts { saved, routes, workspace, dispatcher, .. } = x.borrow_for_layer(l);
        let (ops, d, f) = (self.ops.as_ref(), shape.hidden, shape.intermediate);
        let shards = self.engine.shards.clone();
        let expert_unit = &shards[unit].unit;
        let (n, len) = (routes.recv_plan.count_rows(), expert_unit.len());
        let given = ExpertGradInputs {
            rows: saved.rows.view().slice(0..n * d),
            dy: workspace.out.view().slice(0..n * d),
            act: workspace.act.view().slice(0..n * f),
            dgate_up: workspace.dgate_up.view().slice(0..n * 2 * f),
        };
        let write = |sender: usize, grads: &mut Buf| {
            let ranges = routes.recv_plan.compute_expert_ranges_from(sender);
            compute_expert_param_gradients(
                ops,
                shape,
                &ranges,
                &given,
                grads.view_mut().slice(0..len),
                |m| expert_unit.has_trained_elements_in(m),
            );
        };
        if dispatcher.has_every_expert() {
            let trained = expert_unit.has_any_trained();
            let mut grad = (compute && trained).then(|| self.engine.take_gradient_buffer(unit));
            if let Some(g) = &mut grad {
                write(0, g);
            }
            return Ok(self.engine.reduce_gradient(unit, round, grad)?);
        }
        let mut partial_sums = self.engine.begin_partial_sums(unit);
        for (sender, rank) in dispatcher.group.clone().enumerate() {
            let Some(micro_batch) = self.engine.schedule.find_micro_batch(rank, round) else { continue };
            self.engine.push_micro_batch_gradient(unit, &mut partial_sums, micro_batch, |grads| {
                write(sender, grads)
            });
        }
        Ok(self.engine.reduce_partial_sums(unit, round, partial_sums)?)
    }

    /// Waits until other ranks have sent back the gradients of the expert inputs and of the router
    /// factors for this rank's tokens. Sorts the gradients of the factors by token, and for each
    /// token in the order of its selected experts.
    fn wait_for_combined_gradients(&mut self, l: usize) -> Result<()> {
        let Some(x) = &mut self.experts else { return Ok(()) };
        let MoeLayerParts { routes, workspace, dispatcher, .. } = x.borrow_for_layer(l);
        let plan = (&routes.send_plan, &routes.recv_plan);
        dispatcher.wait_for_combined_rows(plan, ExchangedRowKind::Rows, &workspace.drows)?;
        let (ops, places) = (self.ops.as_ref(), &routes.send_plan.choice_rows);
        let dweights =
            dispatcher.wait_for_combined_rows(plan, ExchangedRowKind::Weights, &workspace.dweights)?;
        ops.gather_rows(resize_row_buffer(ops, &mut workspace.choices, dweights.len()), dweights, places, 1);
        Ok(())
    }

    /// Runs the backward pass of router and attention in a mixture-of-experts layer, from the
    /// gradients that the experts' backward pass has computed. Writes the gradient of the layer's
    /// parameters to `grad`.
    fn run_attention_and_router_backward(
        &mut self,
        l: usize,
        guard: &ParamsGuard,
        grad: &mut Buf,
    ) -> Result<()> {
        let positions = self.global_batch_size() as f64 * self.batch.seq_len as f64;
        let scale = f64::from(self.loss_scale.factor()) * self.batch.count_targets() as f64 / positions;
        let (Some(x), Some(moe)) = (&mut self.experts, MoeModel::from_model(&self.model)) else {
            return Ok(());
        };
        let MoeLayerParts { saved, routes, workspace, dispatcher, stats, .. } = x.borrow_for_layer(l);
        let (balance, z) = stats.compute_loss_gradient(scale);
        let n = routes.send_plan.row_tokens.len();
        let back = RouterBackwardGrads {
            rows: dispatcher.wait_for_combined_rows(
                (&routes.send_plan, &routes.recv_plan),
                ExchangedRowKind::Rows,
                &workspace.drows,
            )?,
            selected_experts: &routes.selected_experts,
            choice_rows: &routes.send_plan.choice_rows,
            dweights: workspace.choices.view().slice(0..n),
            balance_grad: &balance,
            z_loss_coef: z,
        };
        let (ops, batch) = (self.ops.as_ref(), &self.batch);
        let g = grad.view_mut().slice(0..self.engine.shards[l + 1].unit.len());
        let LayerActivations { x, residual_grad: dx, mut buffers, .. } =
            self.activations.select_layer_buffers(l);
        self.engine.with_params(guard, |params| {
            let input = LayerInput { ops, params, batch, x, layer: l };
            moe.attention_and_router_backward(&input, g, dx, &back, &saved.routing, &mut buffers);
        });
        Ok(())
    }
}
