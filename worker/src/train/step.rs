//! One optimizer step, from tokens to updated parameters. Readable on one screen: fetch block, forward, release; …
//! fetch, backward, reduce, release; update.
use super::{experts::Experts, loss_scale::LossScale, workspace::Workspace};
use crate::{
    error::{Error, Result},
    model::{Batch, HeadGrads, HeadParams, LayerInput, Model},
    optim::{Optimizer, StepFacts},
    params::{Unit, canonical_order},
    trained::lowest_trained,
    zero::{
        engine::{Engine, Held},
        fold::fold_f64,
    },
};
use contract::job::Recompute;
use device::{Buf, Dtype, Ops, storage::Event};
use std::sync::Arc;

/// Where samples come from: a pure function of the sample's number in the run.
pub trait Source {
    /// Fills `batch` (its `b·t` long vectors) with the samples from `first` on.
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<()>;
}

/// Everything a rank needs to take steps.
pub struct Trainer {
    /// The model.
    pub model: Arc<dyn Model>,
    /// Its parameters and gradients.
    pub engine: Engine,
    /// Its optimizer states.
    pub optimizer: Optimizer,
    /// The backend.
    pub ops: Arc<dyn Ops>,
    /// Activations.
    pub work: Workspace,
    /// Of a model with experts.
    pub experts: Option<Experts>,
    /// The micro-batch being computed.
    pub batch: Batch,
    /// Samples per slot.
    pub micro: usize,
    /// Recomputation.
    pub recompute: Recompute,
    /// Limit of the gradient's norm.
    pub clip_norm: Option<f64>,
    /// Factor of the loss.
    pub loss_scale: LossScale,
    /// What is read elsewhere until then.
    pub(crate) copied: Event,
}

/// What a rank tells all others once a step, beside its losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Word {
    /// Bits of [`super::boundary`]; the outcome holds all ranks' bits.
    pub flags: u64,
    /// Its largest resident set so far, bytes; the outcome holds the largest.
    pub peak_rss: u64,
    /// Seconds since the last word in which it only waited for collectives; the outcome holds the largest.
    pub exposed_comm: f64,
}

/// What a step gave, the same bits on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Mean loss per target.
    pub loss: f64,
    /// Global L2 norm of the mean gradient before clipping.
    pub grad_norm: f64,
    /// Positions with a loss.
    pub targets: u64,
    /// What the ranks had to say.
    pub word: Word,
    /// A gradient overflowed where the loss is scaled for that: nothing was changed.
    pub skipped: bool,
}

/// What one slot gave.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct SlotLoss {
    sum: f64,
    targets: u64,
}

impl Trainer {
    /// Parameters and optimizer states are read elsewhere until `mark`: the next update comes after it.
    pub fn change_behind(&mut self, mark: Event) {
        self.copied = mark;
    }

    fn layers(&self) -> usize {
        self.work.x.len() - 1
    }

    /// Units of experts lie behind it.
    pub(super) fn head_unit(&self) -> usize {
        self.layers() + 1
    }

    /// Samples per optimizer step.
    pub fn global_batch(&self) -> u64 {
        (self.engine.slots.slots * self.micro) as u64
    }

    /// Forward, backward and reduction of the global batch that begins with sample `first`. Parameters are unchanged;
    /// [`Trainer::update`] follows.
    pub fn accumulate(&mut self, source: &dyn Source, first: u64, word: Word) -> Result<Outcome> {
        let rounds = self.engine.slots.rounds();
        self.batch.first = Some(first);
        let order: Vec<usize> = (0..rounds).flat_map(|_| self.pass_order(true)).collect();
        self.engine.announce(order);
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
                // Each target has its share of what the slot's routers add to the mean.
                let routers = self.experts.as_ref().map_or(0.0, |e| e.loss() * targets as f64);
                mine.push((s, SlotLoss { sum: sum + routers, targets }));
            }
        }
        self.gather_losses(&mine, self.engine.slots.slots, word)
    }

    /// Mean loss over `slots` slots of held-out samples from `first` on, without gradients; every rank gets it.
    pub fn evaluate(&mut self, source: &dyn Source, first: u64, slots: usize) -> Result<Outcome> {
        let (rank, world) = (self.engine.rank(), self.engine.world());
        let rounds = slots.div_ceil(world);
        self.batch.first = None;
        let order: Vec<usize> = (0..rounds).flat_map(|_| self.pass_order(false)).collect();
        self.engine.announce(order);
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
        self.gather_losses(&mine, slots, Word::default())
    }

    /// The micro-batch that begins with sample `first`.
    fn fill(&mut self, source: &dyn Source, first: u64) -> Result<()> {
        source.fill(first, &mut self.batch)?;
        self.batch.first = self.batch.first.map(|_| first);
        if let Some(window) = self.model.window() {
            self.batch.slide(window);
        }
        Ok(())
    }

    /// Units in the order of their fetches in one round.
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

    /// The first of the model's own units that needs a gradient.
    fn lowest_trained(&self) -> usize {
        lowest_trained(self.engine.shards.iter().map(|s| &s.unit))
    }

    fn trains(&self, u: usize) -> bool {
        self.engine.shards[u].unit.any_trained()
    }

    /// Tokens to the head's input. Without `compute` only the collectives take place.
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

    fn layer_forward(&mut self, l: usize, held: &Held, output: bool) {
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

    /// The head's input to reduced gradients of every unit.
    fn backward(&mut self, round: usize, compute: bool) -> Result<()> {
        let head = self.head_unit();
        let tied = self.model.tied();
        let mut head_grad = compute.then(|| self.engine.gradient(head));
        let mut embedding_grad = (compute && tied && self.trains(0)).then(|| self.engine.gradient(0));
        self.head(head_grad.as_mut().map(|h| (h, embedding_grad.as_mut())), compute)?;
        self.engine.reduce(head, round, head_grad)?;
        let lowest = self.lowest_trained();
        for l in (lowest.max(1) - 1..self.layers()).rev() {
            if let Some(unit) = self.expert_unit(l) {
                self.sparse_backward(l, unit, round, compute)?;
                continue;
            }
            let held = self.engine.fetch(l + 1)?;
            let mut grad = compute.then(|| self.engine.gradient(l + 1));
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

    /// Adds to what the tied head wrote, or starts from zero.
    fn embedding_backward(&mut self, from_head: Option<Buf>) -> Buf {
        let len = self.engine.shards[0].unit.len();
        let mut grad = from_head.unwrap_or_else(|| {
            let mut g = self.engine.gradient(0);
            self.ops.clear(g.view_mut().slice(0..len));
            g
        });
        let g = grad.view_mut().slice(0..len);
        self.model.embedding_backward(self.ops.as_ref(), g, &self.batch, self.work.dx.view_mut());
        grad
    }

    fn layer_backward(&mut self, l: usize, held: &Held, grad: &mut Buf) {
        let w = &mut self.work;
        let saved = w.saved_index(l);
        let (m, ops, batch, x) = (&self.model, self.ops.as_ref(), &self.batch, w.x[l].view());
        let g = grad.view_mut().slice(0..self.engine.shards[l + 1].unit.len());
        self.engine.with_params(held, |params| {
            let input = LayerInput { params, batch, x, layer: l };
            m.layer_backward(ops, &input, g, w.dx.view_mut(), &mut w.saved[saved], &mut w.scratch);
        });
    }

    /// Loss of every row; with gradient buffers (head, embedding) also the head's backward.
    fn head(&mut self, grads: Option<(&mut Buf, Option<&mut Buf>)>, compute: bool) -> Result<()> {
        let head_held = self.engine.fetch(self.head_unit())?;
        let tied = self.model.tied();
        let embedding_held = if tied { Some(self.engine.fetch(0)?) } else { None };
        if compute {
            self.head_compute(&head_held, embedding_held.as_ref(), grads);
        }
        self.engine.release(head_held);
        if let Some(h) = embedding_held {
            self.engine.release(h);
        }
        Ok(())
    }

    fn head_compute(
        &mut self,
        head: &Held,
        embedding: Option<&Held>,
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
        let losses = self.ops.shown(self.work.loss.view(), &mut self.work.losses);
        let sum = losses.host().iter().map(|&l| f64::from(l)).sum();
        SlotLoss { sum, targets: self.batch.targets() }
    }

    /// The mean loss over all slots, and what the ranks had to say.
    fn gather_losses(&self, mine: &[(usize, SlotLoss)], slots: usize, word: Word) -> Result<Outcome> {
        let mut words = vec![word.flags, word.peak_rss, word.exposed_comm.to_bits()];
        words.extend(mine.iter().flat_map(|(slot, l)| [*slot as u64, l.sum.to_bits(), l.targets]));
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let gathered = self.engine.queue().run(move |c| c.all_gather_bytes(&bytes))?;
        let mut all = vec![SlotLoss::default(); slots];
        let mut said = Word::default();
        for bytes in &gathered {
            let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect();
            let [flags, peak_rss, exposed, records @ ..] = words.as_slice() else {
                return Err(Error::failed("a rank reported no losses"));
            };
            said = Word {
                flags: said.flags | flags,
                peak_rss: said.peak_rss.max(*peak_rss),
                exposed_comm: said.exposed_comm.max(f64::from_bits(*exposed)),
            };
            for [slot, sum, targets] in records.as_chunks::<3>().0 {
                let to = all
                    .get_mut(*slot as usize)
                    .ok_or_else(|| Error::failed("a rank reported an unknown slot"))?;
                *to = SlotLoss { sum: f64::from_bits(*sum), targets: *targets };
            }
        }
        let sums: Vec<f64> = all.iter().map(|l| l.sum).collect();
        let targets: u64 = all.iter().map(|l| l.targets).sum();
        let loss = if targets == 0 { 0.0 } else { fold_f64(&sums) / targets as f64 };
        Ok(Outcome { loss, targets, word: said, ..Outcome::default() })
    }

    /// Factor that turns the summed gradient into the gradient of the mean loss over `targets`.
    fn mean_scale(&self, targets: u64) -> f64 {
        let positions = self.global_batch() * self.batch.t as u64;
        if targets == 0 { 0.0 } else { positions as f64 / targets as f64 }
    }

    /// Finishes the gradients of [`Trainer::accumulate`], clips and updates. Returns the outcome with its norm.
    /// A loss or norm that is not finite changes nothing and is reported as it is.
    pub fn update(&mut self, outcome: Outcome, lr: f64, step: u64) -> Result<Outcome> {
        let units = self.engine.shards.len();
        self.optimizer.expect(self.ops.as_ref(), 0);
        let mut grads = Vec::with_capacity(units);
        for u in 0..units {
            grads.push(self.engine.finish(u)?);
        }
        let mean = self.mean_scale(outcome.targets) / f64::from(self.loss_scale.factor());
        let outcome = Outcome { grad_norm: self.norm(&grads)? * mean, ..outcome };
        let finite = outcome.loss.is_finite() && outcome.grad_norm.is_finite();
        let skipped = !finite && outcome.loss.is_finite() && self.loss_scale.is_dynamic();
        let outcome = Outcome { skipped, ..outcome };
        let clip = self.clip_norm.map_or(1.0, |limit| (limit / (outcome.grad_norm + 1e-6)).min(1.0));
        let facts = StepFacts { lr, step: step + 1, grad_scale: (mean * clip) as f32 };
        std::mem::take(&mut self.copied).follow();
        for (u, own) in grads.into_iter().enumerate() {
            if finite {
                self.update_unit(u, own, facts)?;
            } else {
                self.engine.recycle(u, own);
            }
        }
        self.engine.settle()?;
        Ok(outcome)
    }

    fn update_unit(&mut self, u: usize, own: Buf, facts: StepFacts) -> Result<()> {
        if !self.trains(u) {
            return Ok(());
        }
        let replicated = !self.engine.policy.shard_optimizer;
        let ops = self.ops.clone();
        self.optimizer.expect(ops.as_ref(), u);
        self.optimizer.expect(ops.as_ref(), u + 1);
        let mut grad = if replicated { self.engine.gather_gradient(u, own)? } else { own };
        let whole = match self.optimizer.moves_whole(u) {
            true => Some(self.directions(u, &mut grad, facts)?),
            false => None,
        };
        let directions = whole.as_ref().map(Buf::view);
        let base = self.engine.resident(u).start;
        let range = self.optimizer.states(u).range.clone();
        let (unit, optimizer) = (&self.engine.shards[u].unit, &mut self.optimizer);
        self.engine.with_resident(u, |params| {
            let p = params.view_mut().slice(range.start - base..range.end - base);
            optimizer.update(ops.as_ref(), u, unit, p, grad.view(), directions, facts);
        });
        self.optimizer.put_away(ops.as_ref(), u);
        self.engine.recycle(u, grad);
        match replicated {
            true => self.engine.refresh(u),
            false => self.engine.publish(u),
        }
        Ok(())
    }

    /// The directions of matrices that move whole, of the whole unit, from the gradient of what this rank updates.
    fn directions(&mut self, u: usize, grad: &mut Buf, facts: StepFacts) -> Result<Buf> {
        let unit = &self.engine.shards[u].unit;
        let ops = self.ops.as_ref();
        self.optimizer.direct(ops, u, unit, grad.view_mut(), facts);
        let mine = ops.copied(grad.view());
        if !self.engine.policy.shard_optimizer || self.engine.world() == 1 {
            return Ok(mine);
        }
        let owner = unit.owners.has(self.engine.rank());
        let whole = ops.zeroed(Dtype::F32, if owner { unit.trained_len() } else { 0 });
        Ok(self.engine.gather_whole(u, mine, whole)?)
    }

    /// L2 norm of the summed gradient: fixed blocks of logical tensors, then one fixed tree.
    fn norm(&self, own: &[Buf]) -> Result<f64> {
        let mut parts = Vec::new();
        for (u, g) in own.iter().enumerate() {
            let range = self.engine.own(u);
            let (unit, mut at) = (&self.engine.shards[u].unit, 0);
            for seg in unit.trained_segments(range) {
                parts.push(g.view().slice(at..at + seg.flat.len()));
                at += seg.flat.len();
            }
        }
        let blocks = self.ops.norm_blocks_of(&parts);
        let bytes: Vec<u8> = blocks.iter().flat_map(|s| s.to_le_bytes()).collect();
        let gathered = self.engine.queue().run(move |c| c.all_gather_bytes(&bytes))?;
        Ok(fold_f64(&self.in_logical_order(&gathered)?).sqrt())
    }

    /// Block sums of all ranks, tensor by tensor in an order that doesn't depend on where experts lie.
    fn in_logical_order(&self, gathered: &[Vec<u8>]) -> Result<Vec<f64>> {
        let mut readers: Vec<_> = gathered.iter().map(|b| b.chunks_exact(8)).collect();
        let units: Vec<Unit> = self.engine.shards.iter().map(|s| s.unit.clone()).collect();
        let mut of: Vec<Vec<Vec<f64>>> = units.iter().map(|u| vec![Vec::new(); u.params.len()]).collect();
        for (s, of) in self.engine.shards.iter().zip(&mut of) {
            for (rank, reader) in readers.iter_mut().enumerate() {
                for g in s.unit.trained_segments(s.part.range(rank)) {
                    for _ in 0..g.flat.len().div_ceil(device::ops::NORM_BLOCK) {
                        let word = reader
                            .next()
                            .ok_or_else(|| Error::failed("a rank reported too few block sums"))?;
                        of[g.param].push(f64::from_le_bytes(word.try_into().expect("8 bytes")));
                    }
                }
            }
        }
        let all =
            canonical_order(&units).into_iter().flat_map(|(u, i)| std::mem::take(&mut of[u][i])).collect();
        Ok(all)
    }
}
