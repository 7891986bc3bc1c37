//! [`Trainer`]: runs one optimizer step on a rank, from tokens to updated parameters. The forward
//! pass fetches, computes and releases each unit. The backward pass also reduces the gradient of
//! each unit. The update follows the backward passes.
pub use super::step_outcome::{RankStepReport, StepOutcome};
use super::{
    activations::{LayerActivations, MicroBatchActivations},
    loss_scale::LossScale,
    moe::MoeTrainer,
};
use crate::{
    error::{Error, Result},
    model::{HeadGrads, HeadInput, LayerInput, MicroBatch, Model, moe::PendingRouterLoss},
    optim::{Optimizer, StepInputs},
    param_groups::find_first_trained_unit,
    zero::{
        engine::{ParamsGuard, ZeroEngine},
        micro_batch_sums::sum_in_fixed_order,
        reduced_gradient::ReducedGradient,
    },
};
use device::{Buf, Dtype, Ops, storage::Event};
use diagnostic::codes;
use jobspec::RecomputeMode;
use std::sync::Arc;

/// A source of training or evaluation samples, which are identified by their number in the run.
/// This number alone determines the contents of a sample.
pub trait SampleSource {
    /// Writes the tokens and labels of consecutive samples, beginning with sample number `first`,
    /// and the start of each token's document to `batch`. Each vector has one element per token.
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<()>;
}

/// Computes the optimizer steps of one rank: owns the model, its sharded parameters, the optimizer
/// and the activation buffers.
pub struct Trainer {
    /// The architecture of the model.
    pub model: Arc<Model>,
    /// The sharded parameters and gradients.
    pub engine: ZeroEngine,
    /// The optimizer states of this rank's shards.
    pub optimizer: Optimizer,
    /// The compute backend.
    pub ops: Arc<dyn Ops>,
    /// The activation buffers.
    pub activations: MicroBatchActivations,
    /// The state of mixture-of-experts layers; `None` for a dense model.
    pub experts: Option<MoeTrainer>,
    /// The micro-batch that is being computed.
    pub batch: MicroBatch,
    /// The number of samples per micro-batch.
    pub micro_batch_size: usize,
    /// The selection of activations that are recomputed in the backward pass.
    pub recompute: RecomputeMode,
    /// The largest gradient norm, or `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// The loss scale of fp16.
    pub loss_scale: LossScale,
    /// Host memory for the sums of which the gradient norm consists.
    pub(crate) norm_staging: Buf,
    /// An event after which no save reads the parameters anymore. The next update waits for it.
    pub(crate) update_after: Event,
}

/// The handles by which the gathered parameters of the output layer are read and, if it shares its
/// matrix with the embedding, those of the embedding.
pub(super) type HeadGuards<'a> = (&'a ParamsGuard, Option<&'a ParamsGuard>);

/// The gradients and losses of one step on this rank, while the gradients are still being computed
/// and reduced. [`Trainer::update_parameters`] applies the gradients.
pub struct AccumulatedGradients {
    losses: Vec<PendingLoss>,
    report: RankStepReport,
}

/// The loss of one micro-batch before its value is known, because the losses of single tokens are
/// still being copied from the device to the host.
struct PendingLoss {
    micro_batch: usize,
    /// The number of target tokens.
    targets: u64,
    /// The mean router loss.
    router_loss: PendingRouterLoss,
}

/// The summed loss of one micro-batch in nats, and the number of its target tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct MicroBatchLoss {
    sum: f64,
    targets: u64,
}

impl Trainer {
    /// Makes the next parameter update wait until a background save has read the parameters and
    /// optimizer states, which the event `saved` signals.
    pub fn delay_update_until(&mut self, saved: Event) {
        self.update_after = saved;
    }

    /// Returns the number of layers of the model.
    fn count_layers(&self) -> usize {
        self.activations.layer_inputs.len() - 1
    }

    /// Returns the index of the parameter unit (tensors that are gathered together) of the output
    /// layer. Units of experts have higher indices.
    pub(super) fn find_head_unit(&self) -> usize {
        self.count_layers() + 1
    }

    /// Returns the number of samples that all ranks together process in one optimizer step.
    pub fn global_batch_size(&self) -> u64 {
        (self.engine.schedule.micro_batches * self.micro_batch_size) as u64
    }

    /// Computes this rank's part of the gradients of one step, starts to reduce them, and returns
    /// the step's loss over all ranks.
    ///
    /// Collective: every rank must call it.
    pub fn compute_global_batch_gradients(
        &mut self,
        source: &dyn SampleSource,
        first: u64,
        report: RankStepReport,
    ) -> Result<StepOutcome> {
        let accumulated = self.start_global_batch_gradients(source, first, report)?;
        self.finish_losses(&accumulated)
    }

    /// Starts forward and backward passes over this rank's micro-batches of one step, and the
    /// reduction of the gradients among ranks. Does not wait for a device.
    ///
    /// Collective: every rank must call it.
    pub fn start_global_batch_gradients(
        &mut self,
        source: &dyn SampleSource,
        first: u64,
        report: RankStepReport,
    ) -> Result<AccumulatedGradients> {
        let rounds = self.engine.schedule.count_rounds();
        self.batch.first_sample = Some(first);
        let order: Vec<usize> = (0..rounds).flat_map(|_| self.list_units_in_pass_order(true)).collect();
        self.engine.begin_pass(order);
        let mut losses = Vec::with_capacity(rounds);
        for round in 0..rounds {
            let micro_batch = self.engine.schedule.find_micro_batch(self.engine.rank(), round);
            if let Some(s) = micro_batch {
                self.load_micro_batch(source, first + (s * self.micro_batch_size) as u64)?;
            }
            self.run_forward(micro_batch.is_some())?;
            self.run_backward(round, micro_batch.is_some())?;
            if let Some(micro_batch) = micro_batch {
                let (copy, ops) = (losses.len(), self.ops.as_ref());
                let router_loss = match &mut self.experts {
                    Some(experts) => experts.start_router_loss_copy(ops, copy, rounds),
                    None => PendingRouterLoss::Known(0.0),
                };
                self.start_row_loss_copy(copy, rounds);
                losses.push(PendingLoss { micro_batch, targets: self.batch.count_targets(), router_loss });
            }
        }
        Ok(AccumulatedGradients { losses, report })
    }

    /// Waits for the losses of this rank's micro-batches, and exchanges losses, flags, memory use
    /// and times with all ranks. Returns the mean loss per target token and the combined reports.
    ///
    /// Collective: every rank must call it.
    fn finish_losses(&mut self, accumulated: &AccumulatedGradients) -> Result<StepOutcome> {
        let sums = self.sum_copied_losses(accumulated.losses.len())?;
        let mut mine = Vec::with_capacity(sums.len());
        for (pending, sum) in accumulated.losses.iter().zip(sums) {
            let router_loss = match &self.experts {
                Some(experts) => experts.router_stats().finish_loss(&pending.router_loss)?,
                None => 0.0,
            };
            // router losses are means per micro-batch; weight them by the micro-batch's targets
            let sum = sum + router_loss * pending.targets as f64;
            mine.push((pending.micro_batch, MicroBatchLoss { sum, targets: pending.targets }));
        }
        self.exchange_losses(&mine, self.engine.schedule.micro_batches, accumulated.report)
    }

    /// Reads the samples of one micro-batch from `source`, beginning with sample number `first`.
    pub(super) fn load_micro_batch(&mut self, source: &dyn SampleSource, first: u64) -> Result<()> {
        source.fill(first, &mut self.batch)?;
        self.batch.first_sample = self.batch.first_sample.map(|_| first);
        if let Some(window) = self.model.sliding_window() {
            self.batch.set_window_starts(window);
        }
        Ok(())
    }

    /// Lists the indices of the parameter units (tensors that are gathered together) in the order
    /// in which a forward pass and, if requested, the backward pass after it use them. `backward`
    /// requests the backward pass.
    pub(super) fn list_units_in_pass_order(&self, backward: bool) -> Vec<usize> {
        let (head, tied) = (self.find_head_unit(), self.model.has_tied_embeddings());
        let layer = |l: usize| std::iter::once(l + 1).chain(self.find_expert_unit(l));
        let mut order = vec![0];
        order.extend((0..self.count_layers()).flat_map(layer));
        order.push(head);
        if tied {
            order.push(0);
        }
        if backward {
            let lowest = self.find_lowest_trained_unit().max(1) - 1;
            order.extend((lowest..self.count_layers()).rev().flat_map(layer));
        }
        order
    }

    /// Returns the index of the first parameter unit (tensors that are gathered together) that has
    /// trained parameters, before which no backward pass is needed.
    fn find_lowest_trained_unit(&self) -> usize {
        find_first_trained_unit(self.engine.shards.iter().map(|s| &s.unit))
    }

    /// Returns whether the parameter unit `u` (tensors that are gathered together) has trained
    /// parameters.
    fn is_trained_unit(&self, u: usize) -> bool {
        self.engine.shards[u].unit.has_any_trained()
    }

    /// Runs the forward pass of the current micro-batch, from the tokens up to the input of the
    /// output layer. If `compute` is false, this rank only takes part in collectives.
    pub(super) fn run_forward(&mut self, compute: bool) -> Result<()> {
        let guard = self.engine.fetch_params(0)?;
        if compute {
            let (m, ops, b) = (&self.model, self.ops.as_ref(), &self.batch);
            let x = self.activations.layer_inputs[0].view_mut();
            self.engine.with_params(&guard, |p| m.embedding_forward(ops, p, b, x));
        }
        self.engine.release_params(guard);
        for l in 0..self.count_layers() {
            if let Some(unit) = self.find_expert_unit(l) {
                self.run_moe_layer_forward(l, unit, compute)?;
                continue;
            }
            let guard = self.engine.fetch_params(l + 1)?;
            if compute {
                self.run_layer_forward(l, &guard, true);
            }
            self.engine.release_params(guard);
        }
        Ok(())
    }

    /// Runs the forward pass of layer number `l`, which has a dense MLP (no experts). If `output`
    /// is false, only writes the saved activations.
    fn run_layer_forward(&mut self, l: usize, guard: &ParamsGuard, output: bool) {
        let (model, ops, batch) = (&self.model, self.ops.as_ref(), &self.batch);
        let LayerActivations { x, y, mut buffers, .. } = self.activations.select_layer_buffers(l);
        self.engine.with_params(guard, |params| {
            let input = LayerInput { ops, params, batch, x, layer: l };
            model.dense_layer_forward(&input, output.then_some(y), &mut buffers);
        });
    }

    /// Runs the output layer, the loss and the backward pass of all layers for the current
    /// micro-batch, and starts to reduce each gradient once it is complete.
    fn run_backward(&mut self, round: usize, compute: bool) -> Result<()> {
        let head = self.find_head_unit();
        let tied = self.model.has_tied_embeddings();
        let mut head_grad = compute.then(|| self.engine.take_gradient_buffer(head));
        let mut embedding_grad =
            (compute && tied && self.is_trained_unit(0)).then(|| self.engine.take_gradient_buffer(0));
        self.run_head(head_grad.as_mut().map(|h| (h, embedding_grad.as_mut())), compute)?;
        self.engine.reduce_gradient(head, round, head_grad)?;
        let lowest = self.find_lowest_trained_unit();
        for l in (lowest.max(1) - 1..self.count_layers()).rev() {
            if let Some(unit) = self.find_expert_unit(l) {
                self.run_moe_layer_backward(l, unit, round, compute)?;
                continue;
            }
            let guard = self.engine.fetch_params(l + 1)?;
            let mut grad = compute.then(|| self.engine.take_gradient_buffer(l + 1));
            if let Some(g) = &mut grad {
                if self.recompute == RecomputeMode::Block {
                    self.run_layer_forward(l, &guard, false);
                }
                self.run_layer_backward(l, &guard, g);
            }
            self.engine.release_params(guard);
            self.engine.reduce_gradient(l + 1, round, grad)?;
        }
        if lowest > 0 {
            return Ok(());
        }
        let embedding_grad = compute.then(|| self.run_embedding_backward(embedding_grad));
        Ok(self.engine.reduce_gradient(0, round, embedding_grad)?)
    }

    /// Computes the gradient of the embedding's parameters, including the output layer's gradient
    /// `from_head` if the two layers share a matrix. Returns the sum.
    fn run_embedding_backward(&mut self, from_head: Option<Buf>) -> Buf {
        let len = self.engine.shards[0].unit.len();
        let mut grad = from_head.unwrap_or_else(|| {
            let mut g = self.engine.take_gradient_buffer(0);
            self.ops.fill_with_zeros(g.view_mut().slice(0..len));
            g
        });
        let g = grad.view_mut().slice(0..len);
        let dx = self.activations.residual_grad.view_mut();
        self.model.embedding_backward(self.ops.as_ref(), g, &self.batch, dx);
        grad
    }

    /// Runs the backward pass of layer number `l`, which has a dense MLP (no experts). Writes the
    /// gradient of the layer's parameters to `grad`.
    fn run_layer_backward(&mut self, l: usize, guard: &ParamsGuard, grad: &mut Buf) {
        let (model, ops, batch) = (&self.model, self.ops.as_ref(), &self.batch);
        let g = grad.view_mut().slice(0..self.engine.shards[l + 1].unit.len());
        let LayerActivations { x, residual_grad, mut buffers, .. } = self.activations.select_layer_buffers(l);
        self.engine.with_params(guard, |params| {
            let input = LayerInput { ops, params, batch, x, layer: l };
            model.dense_layer_backward(&input, g, residual_grad, &mut buffers);
        });
    }

    /// Computes the loss of every row (token) of the current micro-batch from the output of the
    /// last layer. If `grads` contains gradient buffers for the output layer and the embedding,
    /// also runs the output layer's backward pass. If `compute` is false, this rank only takes part
    /// in collectives.
    pub(super) fn run_head(
        &mut self,
        grads: Option<(&mut Buf, Option<&mut Buf>)>,
        compute: bool,
    ) -> Result<()> {
        self.with_head_params(|trainer, head| {
            if compute {
                trainer.compute_head_loss(head, grads);
            }
        })
    }

    /// Calls the function `run` with the gathered parameters of the output layer, which are
    /// available only during the call. Collective: every rank must call it.
    pub(super) fn with_head_params(&mut self, run: impl FnOnce(&mut Trainer, HeadGuards)) -> Result<()> {
        let head = self.engine.fetch_params(self.find_head_unit())?;
        let tied = self.model.has_tied_embeddings();
        let embedding = if tied { Some(self.engine.fetch_params(0)?) } else { None };
        run(self, (&head, embedding.as_ref()));
        self.engine.release_params(head);
        embedding.into_iter().for_each(|guard| self.engine.release_params(guard));
        Ok(())
    }

    /// Computes the loss of every token of the current micro-batch and, if gradient buffers are
    /// given, also the backward pass of the output layer.
    fn compute_head_loss(&mut self, guards: HeadGuards, grads: Option<(&mut Buf, Option<&mut Buf>)>) {
        let scale = self.loss_scale.factor() / (self.global_batch_size() as f32 * self.batch.seq_len as f32);
        let unit_len = |u: usize| self.engine.shards[u].unit.len();
        let (head_len, embedding_len) = (unit_len(self.find_head_unit()), unit_len(0));
        let (w, model, ops) = (&mut self.activations, &self.model, self.ops.as_ref());
        w.losses_copied.make_stream_wait();
        let grads = grads.map(|(head, embedding)| HeadGrads {
            dx: w.residual_grad.view_mut(),
            head: head.view_mut().slice(0..head_len),
            embedding: embedding.map(|e| e.view_mut().slice(0..embedding_len)),
            scale,
        });
        let x = w.layer_inputs.last().expect("the last element is the input of the head").view();
        let (loss, labels) = (w.row_losses.view_mut(), &self.batch.labels);
        self.engine.with_params_of_units(guards, |params, embedding| {
            let input = HeadInput { ops, params, embedding, x };
            model.compute_head_loss(&input, labels, loss, grads, &mut w.scratch);
        });
    }

    /// Waits for the forward pass of the current micro-batch, and returns the sum of its losses and
    /// the number of its target tokens.
    pub(super) fn sum_micro_batch_loss(&mut self) -> Result<MicroBatchLoss> {
        self.start_row_loss_copy(0, 1);
        let sum = self.sum_copied_losses(1)?[0];
        Ok(MicroBatchLoss { sum, targets: self.batch.count_targets() })
    }

    /// Starts to copy the current micro-batch's loss of each row (token) from the device to the
    /// host. The copy has the number `index`, below `capacity`, within the step.
    fn start_row_loss_copy(&mut self, index: usize, capacity: usize) {
        let (w, ops) = (&mut self.activations, self.ops.as_ref());
        let rows = w.row_losses.len();
        if w.host_losses.len() < capacity * rows {
            w.host_losses = ops.alloc_staging(Dtype::F32, capacity * rows);
        }
        let to = w.host_losses.view_mut().slice(index * rows..(index + 1) * rows);
        w.losses_copied = ops.copy_async(to, w.row_losses.view(), &[]);
    }

    /// Waits until the row losses of the first `count` micro-batches are copied to the host, and
    /// returns the summed loss of each micro-batch.
    fn sum_copied_losses(&mut self, count: usize) -> Result<Vec<f64>> {
        let w = &self.activations;
        if !w.losses_copied.is_reached() {
            w.losses_copied.synchronize()?;
        }
        self.ops.check_status()?;
        let rows = w.row_losses.len();
        let copies = w.host_losses.view().host_slice().chunks_exact(rows).take(count);
        Ok(copies.map(|losses| losses.iter().map(|&l| f64::from(l)).sum()).collect())
    }

    /// Sends the losses of this rank's micro-batches and its step report (flags, memory, times) to
    /// all ranks, and returns the combined result of the step. Returns the mean loss per target
    /// token over all micro-batches, and the combined reports.
    ///
    /// Collective: every rank must call it.
    pub(super) fn exchange_losses(
        &self,
        mine: &[(usize, MicroBatchLoss)],
        micro_batches: usize,
        report: RankStepReport,
    ) -> Result<StepOutcome> {
        let to_words =
            |(micro_batch, l): &(usize, MicroBatchLoss)| [*micro_batch as u64, l.sum.to_bits(), l.targets];
        let records: Vec<u64> = mine.iter().flat_map(to_words).collect();
        let gathered = self.engine.queue().run_and_wait(move |c| {
            let links = if report.times.step_us > 0 { c.take_link_delays() } else { None };
            c.all_gather_u64(&[&report.encode(links)[..], &records].concat())
        })?;
        let mut losses = vec![MicroBatchLoss::default(); micro_batches];
        let (mut combined, mut rank_times) = (RankStepReport::default(), Vec::with_capacity(gathered.len()));
        for words in &gathered {
            let Some((report, records)) = words.split_first_chunk() else {
                return Err(build_invalid_report_error("a rank reported no losses"));
            };
            let records = records.as_chunks::<3>().0;
            let report = RankStepReport::decode(report, records.len());
            combined = if rank_times.is_empty() { report } else { combined.combine(&report) };
            rank_times.push(report.times);
            for [micro_batch, sum, targets] in records {
                let to = losses.get_mut(*micro_batch as usize).ok_or_else(|| {
                    build_invalid_report_error("a rank reported a micro-batch that does not exist")
                })?;
                *to = MicroBatchLoss { sum: f64::from_bits(*sum), targets: *targets };
            }
        }
        let sums: Vec<f64> = losses.iter().map(|l| l.sum).collect();
        let targets: u64 = losses.iter().map(|l| l.targets).sum();
        let loss = if targets == 0 { 0.0 } else { sum_in_fixed_order(&sums) / targets as f64 };
        Ok(StepOutcome { loss, targets, report: combined, rank_times, ..StepOutcome::default() })
    }

    /// Returns the factor that converts a gradient averaged over all token positions of the global
    /// batch to one averaged over its target tokens only.
    fn compute_mean_loss_factor(&self, targets: u64) -> f64 {
        let positions = self.global_batch_size() * self.batch.seq_len as u64;
        if targets == 0 { 0.0 } else { positions as f64 / targets as f64 }
    }

    /// Waits until the gradients of a step are computed and reduced, clips them, and updates the
    /// parameters. Returns the outcome with the gradient norm.
    ///
    /// Waits for a device only once, for the losses and the gradient norm together. If one of them
    /// is not finite, nothing is updated. Collective: every rank must call it.
    pub fn update_parameters(
        &mut self,
        accumulated: &AccumulatedGradients,
        lr: f64,
        step: u64,
    ) -> Result<StepOutcome> {
        let units = self.engine.shards.len();
        self.optimizer.prefetch_states(self.ops.as_ref(), 0);
        let mut grads = Vec::with_capacity(units);
        for u in 0..units {
            grads.push(self.engine.finish_gradient(u)?);
        }
        // the wait for the norm then includes the copies of the losses
        self.activations.losses_copied.make_stream_wait();
        self.experts.iter().for_each(|experts| experts.router_stats().make_stream_wait_for_copies());
        let blocks = self.sum_squares_of_gradients(&grads)?;
        let outcome = self.finish_losses(accumulated)?;
        let mean = self.compute_mean_loss_factor(outcome.targets) / f64::from(self.loss_scale.factor());
        let outcome = StepOutcome { grad_norm: self.compute_gradient_norm(&blocks)? * mean, ..outcome };
        let finite = outcome.loss.is_finite() && outcome.grad_norm.is_finite();
        let skipped = !finite && outcome.loss.is_finite() && self.loss_scale.skips_step_on_overflow();
        let outcome = StepOutcome { skipped, ..outcome };
        let clip = self.clip_norm.map_or(1.0, |limit| (limit / (outcome.grad_norm + 1e-6)).min(1.0));
        let step_params = StepInputs { lr, step: step + 1, grad_scale: (mean * clip) as f32 };
        std::mem::take(&mut self.update_after).make_stream_wait();
        for (u, gradient) in grads.into_iter().enumerate() {
            if finite {
                self.update_unit_parameters(u, gradient, step_params)?;
            } else {
                self.engine.recycle_gradient(u, gradient);
            }
        }
        self.engine.wait_for_updated_param_gathers()?;
        self.ops.check_status()?;
        Ok(outcome)
    }

    /// Updates this rank's shard of parameter unit `u` (tensors that are gathered together) with
    /// the gradient `gradient`, and starts to send the new values to other ranks.
    fn update_unit_parameters(
        &mut self,
        u: usize,
        gradient: ReducedGradient,
        step_params: StepInputs,
    ) -> Result<()> {
        if !self.is_trained_unit(u) {
            return Ok(());
        }
        let replicated = !self.engine.policy.shard_optimizer;
        let ops = self.ops.clone();
        self.optimizer.prefetch_states(ops.as_ref(), u);
        self.optimizer.prefetch_states(ops.as_ref(), u + 1);
        let mut gradient = if replicated { self.engine.gather_gradient(u, gradient)? } else { gradient };
        let grad = gradient.largest_part();
        let whole = self.gather_whole_tensor_gradient(u, grad, step_params)?;
        let whole_grad = whole.as_ref().map_or(grad.view(), Buf::view);
        let range = self.optimizer.states(u).range.clone();
        let (unit, optimizer) = (&self.engine.shards[u].unit, &mut self.optimizer);
        let can_round = optimizer.can_round_unit(u, unit);
        let is_rounded = self.engine.update_params(u, range, can_round, |params| {
            optimizer.update_unit(ops.as_ref(), u, unit, params, grad.view(), whole_grad, step_params);
        });
        self.optimizer.write_back_states(ops.as_ref(), u);
        self.engine.recycle_gradient(u, gradient);
        match replicated {
            true if is_rounded => {}
            true => self.engine.refresh_compute_copy(u),
            false => self.engine.start_updated_param_gather(u, is_rounded),
        }
        Ok(())
    }

    /// Gathers the gradient of parameter unit `u` (tensors that are gathered together) from all
    /// ranks, for optimizers such as Muon that need whole tensors. Returns the gathered results as
    /// one trained vector of the unit. Returns `None` if no rank has another part of this vector,
    /// or if no update needs the vector.
    ///
    /// Collective: every rank must call it.
    fn gather_whole_tensor_gradient(
        &mut self,
        u: usize,
        grad: &mut Buf,
        step_params: StepInputs,
    ) -> Result<Option<Buf>> {
        let (ops, unit) = (self.ops.as_ref(), &self.engine.shards[u].unit);
        if !self.optimizer.needs_whole_gradient(u, unit) {
            return Ok(None);
        }
        self.optimizer.prepare_whole_tensor_gradient(ops, u, unit, grad.view_mut(), step_params);
        if !self.engine.policy.shard_optimizer || self.engine.world() == 1 {
            return Ok(None);
        }
        let owner = unit.owners.contains(self.engine.rank());
        let whole = ops.zeroed(Dtype::F32, if owner { unit.trained_len() } else { 0 });
        Ok(Some(self.engine.gather_trained_vector(u, ops.clone_to_device(grad.view()), whole)?))
    }
}

/// Builds the error which reports that another rank has sent invalid losses, flags, memory or times
/// for a step.
pub(super) fn build_invalid_report_error(message: &str) -> Error {
    Error::new(codes::training::PEER_REPORT_INVALID, message)
}
