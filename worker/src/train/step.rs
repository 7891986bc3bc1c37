//! One optimizer step, from tokens to updated parameters: fetch a block, forward, release; then
//! fetch, backward, reduce, release; then update.
use super::{experts::MoeTrainer, loss_scale::LossScale, workspace::Workspace};
use crate::{
    error::{Error, Result},
    model::{Batch, HeadGrads, HeadParams, LayerInput, Model},
    optim::{Optimizer, StepParams},
    param_groups::first_trained_unit,
    params::{Unit, canonical_order},
    zero::{
        engine::{Engine, ParamsGuard},
        slot_sums::sum_by_slot,
    },
};
use contract::job::Recompute;
use device::{Buf, Dtype, Ops, storage::Event};
use diagnostic::codes;
use std::sync::Arc;

/// A source of samples: a pure function of the number of the sample in the run.
pub trait SampleSource {
    /// Fills the `b·t` elements of the vectors of `batch` with the samples starting at number
    /// `first`.
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<()>;
}

/// The model, its sharded state and the buffers with which a rank trains.
pub struct Trainer {
    /// The architecture of the model.
    pub model: Arc<dyn Model>,
    /// The sharded parameters and gradients.
    pub engine: Engine,
    /// The optimizer states of this rank's shards.
    pub optimizer: Optimizer,
    /// The compute backend.
    pub ops: Arc<dyn Ops>,
    /// The activation buffers.
    pub work: Workspace,
    /// The state of mixture-of-experts layers; `None` for a dense model.
    pub experts: Option<MoeTrainer>,
    /// The micro-batch that is being computed.
    pub batch: Batch,
    /// The number of samples per slot.
    pub micro: usize,
    /// Which activations are recomputed in the backward pass.
    pub recompute: Recompute,
    /// The largest gradient norm; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// The loss scale of fp16.
    pub loss_scale: LossScale,
    /// The next update waits for this event, because a save may still read the parameters.
    pub(crate) update_after: Event,
}

/// What ranks exchange once per step in addition to losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Flags of [`super::boundary`]; in an outcome the union over all ranks.
    pub flags: u64,
    /// The rank's largest resident set so far, bytes; in an outcome the maximum over all ranks.
    pub peak_rss: u64,
    /// Seconds since the previous report in which computation waited for collectives; in an outcome
    /// the maximum over all ranks.
    pub exposed_comm: f64,
}

/// The result of a step, with the same bits on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// The mean loss per target token, nats.
    pub loss: f64,
    /// The global L2 norm of the mean gradient before clipping.
    pub grad_norm: f64,
    /// The number of tokens with a loss.
    pub targets: u64,
    /// The combined reports of all ranks.
    pub report: StepReport,
    /// A gradient overflowed in fp16 and the step was skipped.
    pub skipped: bool,
}

/// The loss of one slot.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct SlotLoss {
    sum: f64,
    targets: u64,
}

impl Trainer {
    /// Makes the next update wait for `mark`, until which a save reads parameters and optimizer
    /// states.
    pub fn delay_update_until(&mut self, mark: Event) {
        self.update_after = mark;
    }

    fn layers(&self) -> usize {
        self.work.x.len() - 1
    }

    /// The index of the head's unit. Units of experts follow it.
    pub(super) fn head_unit(&self) -> usize {
        self.layers() + 1
    }

    /// The number of samples per step.
    pub fn global_batch(&self) -> u64 {
        (self.engine.slots.slots * self.micro) as u64
    }

    /// Computes and reduces the gradients of the global batch that begins with sample `first`.
    /// [`Trainer::update`] applies them.
    pub fn accumulate(
        &mut self,
        source: &dyn SampleSource,
        first: u64,
        word: StepReport,
    ) -> Result<StepOutcome> {
        let rounds = self.engine.slots.rounds();
        self.batch.first = Some(first);
        let order: Vec<usize> = (0..rounds).flat_map(|_| self.pass_order(true)).collect();
        self.engine.begin_pass(order);
        let mut mine = Vec::new();
        for round in 0..rounds {
            let slot = self.engine.slots.slot(self.engine.rank(), round);
            if let Some(s) = slot {
                self.fill(source, first + (s * self.micro) as u64)?;
            }
            self.forward(slot.is_some())?;
            self.backward(round, slot.is_some())?;
            if let Some(s) = slot {
                let SlotLoss { sum, targets } = self.slot_loss();
                // router losses are means per slot; weight them by the slot's targets
                let routers = self.experts.as_ref().map_or(0.0, |e| e.router_loss() * targets as f64);
                mine.push((s, SlotLoss { sum: sum + routers, targets }));
            }
        }
        self.gather_losses(&mine, self.engine.slots.slots, word)
    }

    /// The mean loss over `slots` slots of held-out samples starting at `first`, on every rank.
    pub fn evaluate(&mut self, source: &dyn SampleSource, first: u64, slots: usize) -> Result<StepOutcome> {
        let (rank, world) = (self.engine.rank(), self.engine.world());
        let rounds = slots.div_ceil(world);
        self.batch.first = None;
        let order: Vec<usize> = (0..rounds).flat_map(|_| self.pass_order(false)).collect();
        self.engine.begin_pass(order);
        let mut mine = Vec::new();
        for round in 0..rounds {
            let slot = Some(round * world + rank).filter(|&s| s < slots);
            if let Some(s) = slot {
                self.fill(source, first + (s * self.micro) as u64)?;
            }
            self.forward(slot.is_some())?;
            self.head(None, slot.is_some())?;
            if let Some(s) = slot {
                mine.push((s, self.slot_loss()));
            }
        }
        self.gather_losses(&mine, slots, StepReport::default())
    }

    /// Loads the micro-batch that begins with sample `first`.
    fn fill(&mut self, source: &dyn SampleSource, first: u64) -> Result<()> {
        source.fill(first, &mut self.batch)?;
        self.batch.first = self.batch.first.map(|_| first);
        if let Some(window) = self.model.window() {
            self.batch.slide(window);
        }
        Ok(())
    }

    /// The units in the order in which one round fetches them.
    pub(super) fn pass_order(&self, backward: bool) -> Vec<usize> {
        let (head, tied) = (self.head_unit(), self.model.tied());
        let layer = |l: usize| std::iter::once(l + 1).chain(self.expert_unit(l));
        let mut order = vec![0];
        order.extend((0..self.layers()).flat_map(layer));
        order.push(head);
        if tied {
            order.push(0);
        }
        if backward {
            let lowest = self.lowest_trained().max(1) - 1;
            order.extend((lowest..self.layers()).rev().flat_map(layer));
        }
        order
    }

    /// The lowest unit with trained parameters.
    fn lowest_trained(&self) -> usize {
        first_trained_unit(self.engine.shards.iter().map(|s| &s.unit))
    }

    fn is_trained_unit(&self, u: usize) -> bool {
        self.engine.shards[u].unit.any_trained()
    }

    /// Computes the input of the head from the tokens. Without `compute` this rank only takes part
    /// in collectives.
    pub(super) fn forward(&mut self, compute: bool) -> Result<()> {
        let held = self.engine.fetch(0)?;
        if compute {
            let (m, ops, b) = (&self.model, self.ops.as_ref(), &self.batch);
            let x = self.work.x[0].view_mut();
            self.engine.with_params(&held, |p| m.embedding_forward(ops, p, b, x));
        }
        self.engine.release(held);
        for l in 0..self.layers() {
            if let Some(unit) = self.expert_unit(l) {
                self.sparse_forward(l, unit, compute)?;
                continue;
            }
            let held = self.engine.fetch(l + 1)?;
            if compute {
                self.layer_forward(l, &held, true);
            }
            self.engine.release(held);
        }
        Ok(())
    }

    fn layer_forward(&mut self, l: usize, held: &ParamsGuard, output: bool) {
        let w = &mut self.work;
        let saved = w.saved_index(l);
        let (before, after) = w.x.split_at_mut(l + 1);
        let (m, ops, batch, x) = (&self.model, self.ops.as_ref(), &self.batch, before[l].view());
        let y = output.then(|| after[0].view_mut());
        self.engine.with_params(held, |params| {
            m.layer_forward(
                ops,
                &LayerInput { params, batch, x, layer: l },
                y,
                &mut w.saved[saved],
                &mut w.scratch,
            );
        });
    }

    /// Computes and reduces the gradients of every unit from the input of the head.
    fn backward(&mut self, round: usize, compute: bool) -> Result<()> {
        let head = self.head_unit();
        let tied = self.model.tied();
        let mut head_grad = compute.then(|| self.engine.take_gradient_buffer(head));
        let mut embedding_grad =
            (compute && tied && self.is_trained_unit(0)).then(|| self.engine.take_gradient_buffer(0));
        self.head(head_grad.as_mut().map(|h| (h, embedding_grad.as_mut())), compute)?;
        self.engine.reduce(head, round, head_grad)?;
        let lowest = self.lowest_trained();
        for l in (lowest.max(1) - 1..self.layers()).rev() {
            if let Some(unit) = self.expert_unit(l) {
                self.sparse_backward(l, unit, round, compute)?;
                continue;
            }
            let held = self.engine.fetch(l + 1)?;
            let mut grad = compute.then(|| self.engine.take_gradient_buffer(l + 1));
            if let Some(g) = &mut grad {
                if self.recompute == Recompute::Block {
                    self.layer_forward(l, &held, false);
                }
                self.layer_backward(l, &held, g);
            }
            self.engine.release(held);
            self.engine.reduce(l + 1, round, grad)?;
        }
        if lowest > 0 {
            return Ok(());
        }
        let embedding_grad = compute.then(|| self.embedding_backward(embedding_grad));
        Ok(self.engine.reduce(0, round, embedding_grad)?)
    }

    /// Adds the embedding's gradient to that of a tied head, or to zeros.
    fn embedding_backward(&mut self, from_head: Option<Buf>) -> Buf {
        let len = self.engine.shards[0].unit.len();
        let mut grad = from_head.unwrap_or_else(|| {
            let mut g = self.engine.take_gradient_buffer(0);
            self.ops.clear(g.view_mut().slice(0..len));
            g
        });
        let g = grad.view_mut().slice(0..len);
        self.model.embedding_backward(self.ops.as_ref(), g, &self.batch, self.work.dx.view_mut());
        grad
    }

    fn layer_backward(&mut self, l: usize, held: &ParamsGuard, grad: &mut Buf) {
        let w = &mut self.work;
        let saved = w.saved_index(l);
        let (m, ops, batch, x) = (&self.model, self.ops.as_ref(), &self.batch, w.x[l].view());
        let g = grad.view_mut().slice(0..self.engine.shards[l + 1].unit.len());
        self.engine.with_params(held, |params| {
            let input = LayerInput { params, batch, x, layer: l };
            m.layer_backward(ops, &input, g, w.dx.view_mut(), &mut w.saved[saved], &mut w.scratch);
        });
    }

    /// Computes the loss of every row and, with gradient buffers for head and embedding, the head's
    /// backward pass.
    fn head(&mut self, grads: Option<(&mut Buf, Option<&mut Buf>)>, compute: bool) -> Result<()> {
        let head_held = self.engine.fetch(self.head_unit())?;
        let tied = self.model.tied();
        let embedding_held = if tied { Some(self.engine.fetch(0)?) } else { None };
        if compute {
            self.compute_head(&head_held, embedding_held.as_ref(), grads);
        }
        self.engine.release(head_held);
        if let Some(h) = embedding_held {
            self.engine.release(h);
        }
        Ok(())
    }

    fn compute_head(
        &mut self,
        head: &ParamsGuard,
        embedding: Option<&ParamsGuard>,
        grads: Option<(&mut Buf, Option<&mut Buf>)>,
    ) {
        let scale = self.loss_scale.factor() / (self.global_batch() as f32 * self.batch.t as f32);
        let (head_len, embedding_len) =
            (self.engine.shards[self.head_unit()].unit.len(), self.engine.shards[0].unit.len());
        let (w, m, ops, batch, engine) =
            (&mut self.work, &self.model, self.ops.as_ref(), &self.batch, &self.engine);
        let grads = grads.map(|(head, embedding)| HeadGrads {
            dx: w.dx.view_mut(),
            head: head.view_mut().slice(0..head_len),
            embedding: embedding.map(|e| e.view_mut().slice(0..embedding_len)),
            scale,
        });
        let x = w.x.last().expect("a workspace has the head's input").view();
        engine.with_params(head, |head| match embedding {
            Some(held) => engine.with_params(held, |e| {
                let p = HeadParams { head, embedding: Some(e) };
                m.head(ops, p, batch, x, w.loss.view_mut(), grads, &mut w.scratch);
            }),
            None => {
                let p = HeadParams { head, embedding: None };
                m.head(ops, p, batch, x, w.loss.view_mut(), grads, &mut w.scratch);
            }
        });
    }

    fn slot_loss(&mut self) -> SlotLoss {
        let losses = self.ops.to_host(self.work.loss.view(), &mut self.work.losses);
        let sum = losses.host().iter().map(|&l| f64::from(l)).sum();
        SlotLoss { sum, targets: self.batch.targets() }
    }

    /// The mean loss over all slots, with the combined reports of all ranks.
    fn gather_losses(
        &self,
        mine: &[(usize, SlotLoss)],
        slots: usize,
        word: StepReport,
    ) -> Result<StepOutcome> {
        let mut words = vec![word.flags, word.peak_rss, word.exposed_comm.to_bits()];
        words.extend(mine.iter().flat_map(|(slot, l)| [*slot as u64, l.sum.to_bits(), l.targets]));
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let gathered = self.engine.queue().run(move |c| c.all_gather_bytes(&bytes))?;
        let mut losses = vec![SlotLoss::default(); slots];
        let mut report = StepReport::default();
        for bytes in &gathered {
            let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect();
            let [flags, peak_rss, exposed, records @ ..] = words.as_slice() else {
                return Err(invalid_report("a rank reported no losses"));
            };
            report = StepReport {
                flags: report.flags | flags,
                peak_rss: report.peak_rss.max(*peak_rss),
                exposed_comm: report.exposed_comm.max(f64::from_bits(*exposed)),
            };
            for [slot, sum, targets] in records.as_chunks::<3>().0 {
                let to = losses
                    .get_mut(*slot as usize)
                    .ok_or_else(|| invalid_report("a rank reported a slot that does not exist"))?;
                *to = SlotLoss { sum: f64::from_bits(*sum), targets: *targets };
            }
        }
        let sums: Vec<f64> = losses.iter().map(|l| l.sum).collect();
        let targets: u64 = losses.iter().map(|l| l.targets).sum();
        let loss = if targets == 0 { 0.0 } else { sum_by_slot(&sums) / targets as f64 };
        Ok(StepOutcome { loss, targets, report, ..StepOutcome::default() })
    }

    /// The factor that turns the summed gradient into the gradient of the mean loss over `targets`.
    fn mean_scale(&self, targets: u64) -> f64 {
        let positions = self.global_batch() * self.batch.t as u64;
        if targets == 0 { 0.0 } else { positions as f64 / targets as f64 }
    }

    /// Completes the gradients of [`Trainer::accumulate`], clips them and updates the parameters.
    /// Returns the outcome with the gradient norm. A loss or norm that is not finite is returned
    /// without an update.
    pub fn update(&mut self, outcome: StepOutcome, lr: f64, step: u64) -> Result<StepOutcome> {
        let units = self.engine.shards.len();
        self.optimizer.prefetch_states(self.ops.as_ref(), 0);
        let mut grads = Vec::with_capacity(units);
        for u in 0..units {
            grads.push(self.engine.finish_gradient(u)?);
        }
        let mean = self.mean_scale(outcome.targets) / f64::from(self.loss_scale.factor());
        let outcome = StepOutcome { grad_norm: self.gradient_norm(&grads)? * mean, ..outcome };
        let finite = outcome.loss.is_finite() && outcome.grad_norm.is_finite();
        let skipped = !finite && outcome.loss.is_finite() && self.loss_scale.is_dynamic();
        let outcome = StepOutcome { skipped, ..outcome };
        let clip = self.clip_norm.map_or(1.0, |limit| (limit / (outcome.grad_norm + 1e-6)).min(1.0));
        let facts = StepParams { lr, step: step + 1, grad_scale: (mean * clip) as f32 };
        std::mem::take(&mut self.update_after).stream_wait();
        for (u, owned) in grads.into_iter().enumerate() {
            if finite {
                self.update_unit(u, owned, facts)?;
            } else {
                self.engine.recycle(u, owned);
            }
        }
        self.engine.wait_param_gather()?;
        Ok(outcome)
    }

    fn update_unit(&mut self, u: usize, owned: Buf, facts: StepParams) -> Result<()> {
        if !self.is_trained_unit(u) {
            return Ok(());
        }
        let replicated = !self.engine.policy.shard_optimizer;
        let ops = self.ops.clone();
        self.optimizer.prefetch_states(ops.as_ref(), u);
        self.optimizer.prefetch_states(ops.as_ref(), u + 1);
        let mut grad = if replicated { self.engine.gather_gradient(u, owned)? } else { owned };
        let whole = match self.optimizer.has_muon_matrices(u) {
            true => Some(self.muon_directions(u, &mut grad, facts)?),
            false => None,
        };
        let directions = whole.as_ref().map(Buf::view);
        let base = self.engine.resident_range(u).start;
        let range = self.optimizer.states(u).range.clone();
        let (unit, optimizer) = (&self.engine.shards[u].unit, &mut self.optimizer);
        self.engine.with_resident(u, |params| {
            let p = params.view_mut().slice(range.start - base..range.end - base);
            optimizer.update(ops.as_ref(), u, unit, p, grad.view(), directions, facts);
        });
        self.optimizer.write_back_states(ops.as_ref(), u);
        self.engine.recycle(u, grad);
        match replicated {
            true => self.engine.refresh_compute_copy(u),
            false => self.engine.start_param_gather(u),
        }
        Ok(())
    }

    /// The momentum of Muon's matrices of the whole unit, from the gradient that this rank owns.
    fn muon_directions(&mut self, u: usize, grad: &mut Buf, facts: StepParams) -> Result<Buf> {
        let unit = &self.engine.shards[u].unit;
        let ops = self.ops.as_ref();
        self.optimizer.muon_momentum(ops, u, unit, grad.view_mut(), facts);
        let mine = ops.device_copy(grad.view());
        if !self.engine.policy.shard_optimizer || self.engine.world() == 1 {
            return Ok(mine);
        }
        let owner = unit.owners.contains(self.engine.rank());
        let whole = ops.zeroed(Dtype::F32, if owner { unit.trained_len() } else { 0 });
        Ok(self.engine.gather_trained(u, mine, whole)?)
    }

    /// The L2 norm of the summed gradient: sums over fixed blocks of tensors, added in a fixed
    /// order.
    fn gradient_norm(&self, owned: &[Buf]) -> Result<f64> {
        let mut parts = Vec::new();
        for (u, g) in owned.iter().enumerate() {
            let range = self.engine.owned_range(u);
            let (unit, mut at) = (&self.engine.shards[u].unit, 0);
            for seg in unit.trained_segments(range) {
                parts.push(g.view().slice(at..at + seg.flat.len()));
                at += seg.flat.len();
            }
        }
        let blocks = self.ops.norm_blocks_of(&parts);
        let bytes: Vec<u8> = blocks.iter().flat_map(|s| s.to_le_bytes()).collect();
        let gathered = self.engine.queue().run(move |c| c.all_gather_bytes(&bytes))?;
        Ok(sum_by_slot(&self.order_block_sums(&gathered)?).sqrt())
    }

    /// The block sums of all ranks, tensor by tensor, in an order that does not depend on the
    /// placement of experts.
    fn order_block_sums(&self, gathered: &[Vec<u8>]) -> Result<Vec<f64>> {
        let mut readers: Vec<_> = gathered.iter().map(|b| b.chunks_exact(8)).collect();
        let units: Vec<Unit> = self.engine.shards.iter().map(|s| s.unit.clone()).collect();
        let mut by_param: Vec<Vec<Vec<f64>>> =
            units.iter().map(|u| vec![Vec::new(); u.params.len()]).collect();
        for (s, sums) in self.engine.shards.iter().zip(&mut by_param) {
            for (rank, reader) in readers.iter_mut().enumerate() {
                for g in s.unit.trained_segments(s.partition.range(rank)) {
                    for _ in 0..g.flat.len().div_ceil(device::ops::NORM_BLOCK) {
                        let word = reader
                            .next()
                            .ok_or_else(|| invalid_report("a rank reported too few block sums"))?;
                        sums[g.param].push(f64::from_le_bytes(word.try_into().expect("8 bytes")));
                    }
                }
            }
        }
        let ordered = canonical_order(&units).into_iter();
        Ok(ordered.flat_map(|(u, i)| std::mem::take(&mut by_param[u][i])).collect())
    }
}

/// The error of a peer whose report does not have the expected form.
fn invalid_report(message: &str) -> Error {
    Error::new(codes::training::PEER_REPORT_INVALID, message)
}
