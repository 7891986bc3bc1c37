//! Layers with experts in a step: rows travel to the ranks that have their experts, are computed there, and travel back.
//!
//! Which collectives take place, and in which order, never depends on the routing, nor on whether this rank has a slot: a rank
//! whose experts get no row takes part with nothing. Rows of each slot stay apart in the experts' gradients, which are folded
//! in the order of the slots like all others (docs/numerics.md).
use super::{
    roads::{Cargo, Roads},
    step::Trainer,
    workspace::Workspace,
};
use crate::{
    error::Result,
    experts::{Placement, Receiving, Sending},
    model::{
        LayerInput, Model,
        experts::{
            ExpertBackward, ExpertGradients, ExpertRows, ExpertShape, Returned, Routing, Sparse, Tally,
            activate, expert_gradients, experts_backward, experts_forward,
        },
    },
    params::Unit,
    zero::{
        engine::{Engine, Held},
        pool,
    },
};
use contract::job::Recompute;
use device::{Buf, Dtype, Ops, ViewMut, needed_for};
use std::sync::Arc;

/// What a trainer of a model with experts has beside the rest.
pub struct Experts {
    shape: ExpertShape,
    /// By layer; `None`: it has no experts.
    layers: Vec<Option<Layer>>,
    /// What the routers of this rank's slot did.
    tally: Tally,
    /// Of each layer with experts; one for all when layers are recomputed.
    saved: Vec<Saved>,
    room: Room,
    roads: Roads,
}

/// A layer with experts.
#[derive(Clone)]
pub(super) struct Layer {
    /// How many layers with experts come before.
    index: usize,
    /// The unit of those that lie here.
    unit: usize,
    /// Experts in the order in which their rows travel.
    order: Vec<usize>,
    /// Experts of each rank of the group.
    pub(super) per_rank: Vec<usize>,
}

/// What a layer's forward leaves for its backward.
struct Saved {
    routing: Routing,
    sending: Sending,
    receiving: Receiving,
    /// Rows of the experts that lie here, sorted by expert.
    rows: Buf,
    gate_up: Buf,
}

/// Buffers that layers share; they grow to what the routing asks for.
struct Room {
    /// The experts' output; gradients of tokens.
    out: Buf,
    /// Gradients of rows.
    drows: Buf,
    act: Buf,
    dact: Buf,
    dgate_up: Buf,
    /// Weights, their gradients and `choices` are `f32` in every precision.
    weights: Buf,
    dweights: Buf,
    /// Gradient of the weights, by choice.
    choices: Buf,
}

impl Room {
    /// Nothing yet. `dtype`: of rows.
    fn of(ops: &dyn Ops, dtype: Dtype) -> Self {
        let rows = || ops.zeroed(dtype, 0);
        Room {
            out: rows(),
            drows: rows(),
            act: rows(),
            dact: rows(),
            dgate_up: rows(),
            weights: ops.zeroed(Dtype::F32, 0),
            dweights: ops.zeroed(Dtype::F32, 0),
            choices: ops.zeroed(Dtype::F32, 0),
        }
    }
}

/// The first `len` elements of a buffer of rows, whatever they hold.
pub(super) fn grow<'a>(ops: &dyn Ops, buf: &'a mut Buf, len: usize) -> ViewMut<'a> {
    needed_for("rows of experts", || pool::grow(ops, buf, len))
}

impl Experts {
    /// For micro-batches of `rows` tokens. `None`: the model has no experts.
    pub fn new(
        ops: &Arc<dyn Ops>,
        model: &dyn Model,
        placement: Option<&Placement>,
        engine: &Engine,
        rows: usize,
        recompute: Recompute,
    ) -> Option<Self> {
        let (sparse, placement) = (model.sparse()?, placement?);
        let (shape, rank, dtype) = (sparse.shape(), engine.rank(), engine.weights().dtype);
        let layers = of_layers(sparse, placement, engine, rank % placement.parallel);
        let count = layers.iter().flatten().count();
        let sets = if recompute == Recompute::None { count } else { count.min(1) };
        let saved = || Saved {
            routing: Routing::new(ops.as_ref(), shape, rows),
            sending: Sending::default(),
            receiving: Receiving::default(),
            rows: ops.zeroed(dtype, 0),
            gate_up: ops.zeroed(dtype, 0),
        };
        let group = placement.group(rank);
        let roads = Roads::new(ops.clone(), engine, group, rows * shape.per_token, shape.hidden);
        Some(Experts {
            shape,
            tally: Tally::new(sparse, layers.len(), rows),
            layers,
            saved: (0..sets).map(|_| saved()).collect(),
            room: Room::of(ops.as_ref(), dtype),
            roads,
        })
    }

    /// The unit of this rank's experts of layer `l`.
    pub fn unit(&self, l: usize) -> Option<usize> {
        self.layers[l].as_ref().map(|layer| layer.unit)
    }

    /// What the routers add to the mean loss of this rank's slot.
    pub fn loss(&self) -> f64 {
        self.tally.loss()
    }

    /// How often each expert of each layer with experts was chosen by the slot that this rank computed last.
    pub fn chosen(&self) -> Vec<Vec<u64>> {
        self.tally.chosen().map(<[u64]>::to_vec).collect()
    }

    /// Layer `l` and what it saves.
    fn layer(&mut self, l: usize) -> (Layer, &mut Saved, &mut Room, &mut Roads, &mut Tally) {
        let layer = self.layers[l].clone().expect("only a layer with experts is asked for them");
        let set = layer.index.min(self.saved.len() - 1);
        (layer, &mut self.saved[set], &mut self.room, &mut self.roads, &mut self.tally)
    }
}

/// The layers with their units, which lie behind the model's own: layer by layer, one for each rank of a group.
fn of_layers(sparse: &dyn Sparse, p: &Placement, engine: &Engine, number: usize) -> Vec<Option<Layer>> {
    let layers = engine.shards.iter().filter(|s| !s.unit.holds_experts()).count() - 2;
    let mut index = 0;
    let layer = |l: usize| {
        sparse.is_sparse(l).then(|| {
            let first = layers + 2 + index * p.parallel;
            index += 1;
            Layer {
                index: index - 1,
                unit: first + number,
                order: p.order(l),
                per_rank: (0..p.parallel).map(|r| p.of(l, r).len()).collect(),
            }
        })
    };
    (0..layers).map(layer).collect()
}

impl Trainer {
    /// The unit of this rank's experts of layer `l`.
    pub(super) fn expert_unit(&self, l: usize) -> Option<usize> {
        self.experts.as_ref().and_then(|e| e.unit(l))
    }

    /// A layer with experts, forward. Without `compute` only the experts that lie here work, for others.
    pub(super) fn sparse_forward(&mut self, l: usize, unit: usize, compute: bool) -> Result<()> {
        let held = self.engine.fetch(l + 1)?;
        if compute {
            self.route_forward(l, &held);
        }
        self.engine.release(held);
        let held = self.engine.fetch(unit)?;
        self.experts_forward(l, &held, compute, true)?;
        self.engine.release(held);
        Ok(())
    }

    /// Attention and router.
    fn route_forward(&mut self, l: usize, held: &Held) {
        let (Some(x), Some(sparse)) = (&mut self.experts, self.model.sparse()) else { return };
        let (layer, saved, _, _, tally) = x.layer(l);
        let (w, ops, batch) = (&mut self.work, self.ops.as_ref(), &self.batch);
        let set = w.saved_index(l);
        self.engine.with_params(held, |params| {
            let input = LayerInput { params, batch, x: w.x[l].view(), layer: l };
            sparse.route_forward(ops, &input, &mut saved.routing, &mut w.saved[set], &mut w.scratch);
        });
        tally.note(ops, layer.index, &saved.routing);
    }

    /// Rows to their experts, and with `output` what those make of them back into the next layer's input.
    fn experts_forward(&mut self, l: usize, held: &Held, compute: bool, output: bool) -> Result<()> {
        let (Some(x), Some(sparse)) = (&mut self.experts, self.model.sparse()) else { return Ok(()) };
        let shape = x.shape;
        let (layer, saved, room, roads, _) = x.layer(l);
        let (w, ops) = (&mut self.work, self.ops.as_ref());
        match compute {
            true => saved.sending.sort(&saved.routing.chosen, shape.per_token, &layer.order),
            false => saved.sending.clear(shape.experts),
        }
        saved.receiving = roads.announce(&layer, &saved.sending)?;
        let (ways, normed) = ((&saved.sending, &saved.receiving), sparse.normed(&w.scratch));
        let tokens = &saved.sending.tokens;
        roads.leave(&layer, ways, Cargo::Rows, &mut saved.rows, |to| {
            ops.gather_rows(to, normed, tokens, shape.hidden);
        });
        roads.arrive(ways, Cargo::Rows, &mut saved.rows)?;
        let n = saved.receiving.rows();
        let gate_up = grow(ops, &mut saved.gate_up, n * 2 * shape.intermediate);
        let out = output.then(|| {
            (grow(ops, &mut room.out, n * shape.hidden), grow(ops, &mut room.act, n * shape.intermediate))
        });
        let (of, rows) = (saved.receiving.experts(), saved.rows.view().slice(0..n * shape.hidden));
        self.engine.with_params(held, |params| {
            experts_forward(ops, shape, &ExpertRows { params, of: &of, rows }, gate_up, out);
        });
        if !output {
            return Ok(());
        }
        roads.turn_back(&layer, ways, Cargo::Rows, &room.out);
        let rows = roads.returned(ways, Cargo::Rows, &room.out)?;
        if compute {
            let set = w.saved_index(l);
            let Workspace { x, saved: kept, .. } = w;
            let places = &saved.sending.places;
            sparse.combine_forward(ops, x[l + 1].view_mut(), rows, places, &saved.routing, &mut kept[set]);
        }
        Ok(())
    }

    /// A layer with experts, backward, with the reductions of its gradients.
    pub(super) fn sparse_backward(
        &mut self,
        l: usize,
        unit: usize,
        round: usize,
        compute: bool,
    ) -> Result<()> {
        let held = self.engine.fetch(l + 1)?;
        let experts = self.engine.fetch(unit)?;
        if self.recompute == Recompute::Block {
            if compute {
                self.route_forward(l, &held);
            }
            self.experts_forward(l, &experts, compute, false)?;
        }
        self.experts_backward(l, &experts)?;
        self.engine.release(experts);
        self.reduce_experts(l, unit, round, compute)?;
        self.experts_return(l)?;
        let mut grad = compute.then(|| self.engine.gradient(l + 1));
        if let Some(g) = &mut grad {
            self.route_backward(l, &held, g)?;
        }
        self.engine.release(held);
        Ok(self.engine.reduce(l + 1, round, grad)?)
    }

    /// Gradients of tokens to their experts, and through them; those of rows and weights are then on their way back.
    fn experts_backward(&mut self, l: usize, held: &Held) -> Result<()> {
        let Some(x) = &mut self.experts else { return Ok(()) };
        let shape = x.shape;
        let (layer, saved, room, roads, _) = x.layer(l);
        let (ops, d, f) = (self.ops.as_ref(), shape.hidden, shape.intermediate);
        let (ways, tokens) = ((&saved.sending, &saved.receiving), &saved.sending.tokens);
        let dx = self.work.dx.view();
        roads.leave(&layer, ways, Cargo::Rows, &mut room.out, |to| ops.gather_rows(to, dx, tokens, d));
        let (weights, choices) = (saved.routing.weights.view(), saved.sending.choices());
        roads.leave(&layer, ways, Cargo::Weights, &mut room.weights, |to| {
            ops.gather_rows(to, weights, &choices, 1);
        });
        let n = saved.receiving.rows();
        let gate_up = saved.gate_up.view().slice(0..n * 2 * f);
        activate(ops, shape, gate_up, grow(ops, &mut room.act, n * f));
        roads.arrive(ways, Cargo::Rows, &mut room.out)?;
        roads.arrive(ways, Cargo::Weights, &mut room.weights)?;
        let (of, rows) = (saved.receiving.experts(), saved.rows.view().slice(0..n * d));
        let back = ExpertBackward {
            gate_up,
            dy: room.out.view().slice(0..n * d),
            weights: room.weights.view().slice(0..n),
            dweights: grow(ops, &mut room.dweights, n),
            drows: grow(ops, &mut room.drows, n * d),
            act: grow(ops, &mut room.act, n * f),
            dact: grow(ops, &mut room.dact, n * f),
            dgate_up: grow(ops, &mut room.dgate_up, n * 2 * f),
        };
        self.engine.with_params(held, |params| {
            experts_backward(ops, shape, &ExpertRows { params, of: &of, rows }, back);
        });
        roads.turn_back(&layer, ways, Cargo::Rows, &room.drows);
        roads.turn_back(&layer, ways, Cargo::Weights, &room.dweights);
        Ok(())
    }

    /// The experts' own gradients by slot, each by the rows of that slot alone.
    fn reduce_experts(&mut self, l: usize, unit: usize, round: usize, compute: bool) -> Result<()> {
        let Some(x) = &mut self.experts else { return Ok(()) };
        let shape = x.shape;
        let (_, saved, room, roads, _) = x.layer(l);
        let (ops, d, f) = (self.ops.as_ref(), shape.hidden, shape.intermediate);
        let shards = self.engine.shards.clone();
        let held = &shards[unit].unit;
        let (n, len) = (saved.receiving.rows(), held.len());
        let given = ExpertGradients {
            rows: saved.rows.view().slice(0..n * d),
            dy: room.out.view().slice(0..n * d),
            act: room.act.view().slice(0..n * f),
            dgate_up: room.dgate_up.view().slice(0..n * 2 * f),
        };
        let write = |sender: usize, grads: &mut Buf| {
            let of = saved.receiving.experts_from(sender);
            expert_gradients(ops, shape, &of, &given, grads.view_mut().slice(0..len), |m| held.trains(m));
        };
        if roads.local() {
            let trained = held.any_trained();
            let mut grad = (compute && trained).then(|| self.engine.gradient(unit));
            if let Some(g) = &mut grad {
                write(0, g);
            }
            return Ok(self.engine.reduce(unit, round, grad)?);
        }
        let mut runs = self.engine.runs(unit);
        for (sender, rank) in roads.group.clone().enumerate() {
            let Some(slot) = self.engine.slots.slot(rank, round) else { continue };
            self.engine.push_run(unit, &mut runs, slot, |grads| write(sender, grads));
        }
        Ok(self.engine.reduce_runs(unit, round, runs)?)
    }

    /// Waits for the gradients of rows and weights: rows stay on the road, weights are put in the order of the choices.
    fn experts_return(&mut self, l: usize) -> Result<()> {
        let Some(x) = &mut self.experts else { return Ok(()) };
        let (_, saved, room, roads, _) = x.layer(l);
        let ways = (&saved.sending, &saved.receiving);
        roads.returned(ways, Cargo::Rows, &room.drows)?;
        let (ops, places) = (self.ops.as_ref(), &saved.sending.places);
        let dweights = roads.returned(ways, Cargo::Weights, &room.dweights)?;
        ops.gather_rows(grow(ops, &mut room.choices, dweights.len()), dweights, places, 1);
        Ok(())
    }

    /// Router and attention backward, from what came back.
    fn route_backward(&mut self, l: usize, held: &Held, grad: &mut Buf) -> Result<()> {
        let positions = self.global_batch() as f64 * self.batch.t as f64;
        let scale = f64::from(self.loss_scale.factor()) * self.batch.targets() as f64 / positions;
        let (Some(x), Some(sparse)) = (&mut self.experts, self.model.sparse()) else { return Ok(()) };
        let (_, saved, room, roads, tally) = x.layer(l);
        let (balance, z) = tally.gradient(scale);
        let n = saved.sending.tokens.len();
        let back = Returned {
            rows: roads.returned((&saved.sending, &saved.receiving), Cargo::Rows, &room.drows)?,
            places: &saved.sending.places,
            dweights: room.choices.view().slice(0..n),
            balance: &balance,
            z,
        };
        let (w, ops, batch) = (&mut self.work, self.ops.as_ref(), &self.batch);
        let g = grad.view_mut().slice(0..self.engine.shards[l + 1].unit.len());
        let set = w.saved_index(l);
        let Workspace { x, saved: kept, scratch, dx, .. } = w;
        self.engine.with_params(held, |params| {
            let input = LayerInput { params, batch, x: x[l].view(), layer: l };
            let routing = &saved.routing;
            sparse.route_backward(ops, &input, g, dx.view_mut(), &back, routing, &mut kept[set], scratch);
        });
        Ok(())
    }
}

/// Bytes of everything here, for the estimate; `dtype` of rows, `parallel` ranks of a group. A router may send one rank all rows of its
/// group: what is planned is half again as many as an even spread, between what untrained ones do to the layers of a model.
pub fn bytes(
    model: &dyn Model,
    units: &[Unit],
    rows: usize,
    recompute: Recompute,
    dtype: Dtype,
    parallel: usize,
) -> usize {
    let Some(sparse) = model.sparse() else { return 0 };
    let layers = units.iter().filter(|u| !u.holds_experts()).count() - 2;
    let s = sparse.shape();
    let count = (0..layers).filter(|&l| sparse.is_sparse(l)).count();
    let sets = if recompute == Recompute::None { count } else { count.min(1) };
    let sent = rows * s.per_token;
    let came = if parallel > 1 { sent + sent / 2 } else { sent };
    let kept =
        4 * (Routing::elements(s, rows) + sent * 3) + came * (s.hidden + 2 * s.intermediate) * dtype.size();
    let room = came * ((2 * s.hidden + 4 * s.intermediate) * dtype.size() + 4 * 2) + 4 * 2 * sent;
    // On their way to other ranks rows and weights lie in two buffers more.
    let lanes = if parallel > 1 { (sent + came) * (s.hidden * dtype.size() + 4) } else { 0 };
    sets * kept + room + lanes
}
