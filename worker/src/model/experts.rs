//! Layers with experts: what a family says of them, and the experts' own arithmetic on rows that are sorted by expert.
//!
//! A layer comes in parts, because its experts may lie on other ranks than its tokens: attention and router, rows to the
//! experts, the experts, rows back, their weighted sum. Only the router and the sum belong to the family's layer.
use super::{Activations, LayerInput};
use crate::params::ParamSpec;
use contract::job::ExpertsSpec;
use device::{
    Buf, Dtype, Ops, View, ViewMut,
    ops::{Group, RouterShape},
};
use std::ops::Range;

/// Sizes of a layer's experts, the same in all layers that have some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that each token goes to.
    pub per_token: usize,
    /// Width of the rows.
    pub hidden: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// The weights of a token's experts are divided by their sum.
    pub normalise: bool,
}

impl ExpertShape {
    /// Elements of one expert: gate, up `[intermediate, hidden]`, down `[hidden, intermediate]`.
    pub fn expert_len(&self) -> usize {
        3 * self.intermediate * self.hidden
    }

    fn router(&self, m: usize) -> RouterShape {
        RouterShape { m, experts: self.experts, per_token: self.per_token, normalise: self.normalise }
    }

    /// The first matrix (gate and up as one) of each expert with its rows.
    fn ups(&self, rows: &[Range<usize>]) -> Vec<Group> {
        self.groups(rows, 0)
    }

    /// The second one (down).
    fn downs(&self, rows: &[Range<usize>]) -> Vec<Group> {
        self.groups(rows, 2 * self.intermediate * self.hidden)
    }

    fn groups(&self, rows: &[Range<usize>], offset: usize) -> Vec<Group> {
        let group = |(i, r): (usize, &Range<usize>)| Group {
            rows: r.clone(),
            matrix: i * self.expert_len() + offset,
        };
        rows.iter().enumerate().map(group).collect()
    }
}

/// Factors of the losses that only the router feels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLosses {
    /// Of the load-balancing loss.
    pub aux: f64,
    /// Of the mean squared log-sum-exp of the router's logits.
    pub z: f64,
}

/// What a layer's router decided about the tokens of one micro-batch.
pub struct Routing {
    /// `[rows, experts]`
    pub probs: Buf,
    /// `[rows, per_token]`
    pub weights: Buf,
    /// Log-sum-exp of the logits, `[rows]`.
    pub lse: Buf,
    /// `[rows, per_token]`, best first.
    pub chosen: Vec<u32>,
}

impl Routing {
    /// For micro-batches of `m` rows.
    pub fn new(ops: &dyn Ops, shape: ExpertShape, m: usize) -> Self {
        let floats = |len| ops.zeroed(Dtype::F32, len);
        Routing {
            probs: floats(m * shape.experts),
            weights: floats(m * shape.per_token),
            lse: floats(m),
            chosen: vec![0; m * shape.per_token],
        }
    }

    /// Elements of all of it.
    pub fn elements(shape: ExpertShape, m: usize) -> usize {
        m * (shape.experts + 2 * shape.per_token + 1)
    }

    pub(super) fn forward(&mut self, ops: &dyn Ops, logits: View, shape: ExpertShape) {
        let (probs, weights) = (self.probs.view_mut(), self.weights.view_mut());
        let router = shape.router(self.lse.len());
        ops.router_forward(probs, weights, self.lse.view_mut(), &mut self.chosen, logits, router);
    }

    pub(super) fn backward(&self, ops: &dyn Ops, dlogits: ViewMut, back: &Returned, shape: ExpertShape) {
        let given = device::ops::RouterGradient {
            probs: self.probs.view(),
            lse: self.lse.view(),
            chosen: &self.chosen,
            balance: back.balance,
            z: back.z,
        };
        ops.router_backward(dlogits, back.dweights, given, shape.router(self.lse.len()));
    }
}

/// What the experts gave back in the backward pass.
pub struct Returned<'a> {
    /// Gradient of the rows that travelled.
    pub rows: View<'a>,
    /// Of each token's choices, best first: its row.
    pub places: &'a [u32],
    /// Gradient of the chosen experts' weights, `[rows, per_token]`.
    pub dweights: View<'a>,
    /// `[experts]`: gradient of the load-balancing loss by every row's probabilities.
    pub balance: &'a [f32],
    /// Factor of Σ lse², whose gradient is added.
    pub z: f32,
}

/// A model of which some layers have experts.
pub trait Sparse: Send + Sync {
    /// Sizes.
    fn shape(&self) -> ExpertShape;
    /// Has this layer experts?
    fn is_sparse(&self, layer: usize) -> bool;
    /// Factors of the router's losses.
    fn losses(&self) -> RouterLosses;
    /// The tensors of one expert in the order gate, up, down.
    fn expert_params(&self, layer: usize, expert: usize) -> Vec<ParamSpec>;

    /// Attention and router. The rows that experts compute with are left in [`Sparse::normed`].
    fn route_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        routing: &mut Routing,
        saved: &mut Activations,
        scratch: &mut Activations,
    );
    /// `[rows, hidden]`, of the last [`Sparse::route_forward`].
    fn normed<'a>(&self, scratch: &'a Activations) -> View<'a>;
    /// `y` = the residual stream + the weighted sum of each token's rows in `rows`, which are at `places`.
    fn combine_forward(
        &self,
        ops: &dyn Ops,
        y: ViewMut,
        rows: View,
        places: &[u32],
        routing: &Routing,
        saved: &mut Activations,
    );
    /// `dx`: gradient of `y` in, of the layer's input out. Overwrites the layer unit's gradient.
    fn route_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        dx: ViewMut,
        back: &Returned,
        routing: &Routing,
        saved: &mut Activations,
        scratch: &mut Activations,
    );
}

/// Rows of some experts and what their forward leaves; each expert's rows follow those of the one before.
pub struct ExpertRows<'a> {
    /// The experts' parameters, flat.
    pub params: View<'a>,
    /// Of each expert.
    pub expert_ranges: &'a [Range<usize>],
    /// `[rows, hidden]`
    pub rows: View<'a>,
}

/// `gate_up[rows, 2·intermediate]` from the rows, and with `out` (`[rows, hidden]` and room for `[rows, intermediate]`) the
/// experts' output.
pub fn experts_forward(
    ops: &dyn Ops,
    shape: ExpertShape,
    e: &ExpertRows,
    mut gate_up: ViewMut,
    out: Option<(ViewMut, ViewMut)>,
) {
    let (d, f) = (shape.hidden, shape.intermediate);
    let n = e.rows.len() / d;
    ops.grouped_forward(gate_up.reborrow(), e.rows, e.params, &shape.ups(e.expert_ranges), 2 * f, d);
    let Some((out, mut act)) = out else { return };
    ops.swiglu_forward(act.reborrow(), gate_up.as_view(), n, f);
    ops.grouped_forward(out, act.as_view(), e.params, &shape.downs(e.expert_ranges), d, f);
}

/// Buffers of the experts' backward.
pub struct ExpertBackward<'a> {
    /// `[rows, 2·intermediate]`, of the forward.
    pub gate_up: View<'a>,
    /// Gradient of the tokens that the rows belong to, `[rows, hidden]`, not yet multiplied by the weights.
    pub dy: View<'a>,
    /// The rows' weights.
    pub weights: View<'a>,
    /// Gradient of the weights.
    pub dweights: ViewMut<'a>,
    /// Gradient of the rows, `[rows, hidden]`.
    pub drows: ViewMut<'a>,
    /// `[rows, intermediate]`: what [`activate`] made, becomes what down's gradient needs.
    pub act: ViewMut<'a>,
    /// `[rows, intermediate]`: room.
    pub dact: ViewMut<'a>,
    /// `[rows, 2·intermediate]`: becomes what the gradient of gate and up needs.
    pub dgate_up: ViewMut<'a>,
}

/// What down was multiplied with in the forward: `act[rows, intermediate]` from `gate_up`.
pub fn activate(ops: &dyn Ops, shape: ExpertShape, gate_up: View, act: ViewMut) {
    let f = shape.intermediate;
    ops.swiglu_forward(act, gate_up, gate_up.len() / (2 * f), f);
}

/// Gradients of rows and weights. Those of the parameters follow by [`expert_gradients`].
pub fn experts_backward(ops: &dyn Ops, shape: ExpertShape, e: &ExpertRows, b: ExpertBackward) {
    let (d, f) = (shape.hidden, shape.intermediate);
    let n = b.dweights.len();
    let (act, mut dact, mut dgate_up) = (b.act, b.dact, b.dgate_up);
    ops.grouped_backward_input(dact.reborrow(), b.dy, e.params, &shape.downs(e.expert_ranges), d, f);
    // The output itself is not kept: dy · (W a) is (dy W) · a.
    ops.row_dots(b.dweights, dact.as_view(), act.as_view(), f);
    ops.scale_rows(act, b.weights, f);
    ops.scale_rows(dact.reborrow(), b.weights, f);
    ops.swiglu_backward(dgate_up.reborrow(), dact, b.gate_up, n, f);
    ops.grouped_backward_input(b.drows, dgate_up.as_view(), e.params, &shape.ups(e.expert_ranges), 2 * f, d);
}

/// What [`experts_backward`] left for the parameters' gradients.
pub struct ExpertGradients<'a> {
    /// `[rows, hidden]`
    pub rows: View<'a>,
    /// `[rows, hidden]`
    pub dy: View<'a>,
    /// `[rows, intermediate]`
    pub act: View<'a>,
    /// `[rows, 2·intermediate]`
    pub dgate_up: View<'a>,
}

/// Overwrites `grads`, flat, by the rows of one slot: `of` of each expert. An expert without rows gets zeros. Of a matrix that
/// isn't `wanted`, by its range of the flat vector, nothing is written.
pub fn expert_gradients(
    ops: &dyn Ops,
    shape: ExpertShape,
    of: &[Range<usize>],
    g: &ExpertGradients,
    mut grads: ViewMut,
    wanted: impl Fn(Range<usize>) -> bool,
) {
    let (d, f) = (shape.hidden, shape.intermediate);
    let (mut ups, mut downs) = (shape.ups(of), shape.downs(of));
    ups.retain(|g| wanted(g.matrix..g.matrix + 2 * f * d));
    downs.retain(|g| wanted(g.matrix..g.matrix + f * d));
    ops.grouped_backward_weight(grads.reborrow(), g.dgate_up, g.rows, &ups, 2 * f, d);
    ops.grouped_backward_weight(grads, g.dy, g.act, &downs, d, f);
}

/// What the routers of one micro-batch did, layer by layer: the losses that only they feel.
///
/// Load balancing as transformers' `load_balancing_loss_func` computes it: over the rows of all layers together,
/// `experts · Σ_e (share of the choices that e got) · (its mean probability)`.
pub struct Tally {
    shape: ExpertShape,
    losses: RouterLosses,
    /// Of each layer with experts.
    layers: Vec<LayerTally>,
    rows: usize,
    /// What routers left, where it doesn't lie on the host.
    room: [Buf; 2],
}

#[derive(Clone)]
struct LayerTally {
    chosen: Vec<u64>,
    probs: Vec<f64>,
    squares: f64,
}

impl Tally {
    /// For a model with `layers` layers and micro-batches of `rows` rows.
    pub fn new(sparse: &dyn Sparse, layers: usize, rows: usize) -> Self {
        let shape = sparse.shape();
        let none =
            LayerTally { chosen: vec![0; shape.experts], probs: vec![0.0; shape.experts], squares: 0.0 };
        let count = (0..layers).filter(|&l| sparse.is_sparse(l)).count();
        Tally { shape, losses: sparse.losses(), layers: vec![none; count], rows, room: <[Buf; 2]>::default() }
    }

    /// Notes what the `index`-th layer with experts did; a later note replaces it.
    pub fn note(&mut self, ops: &dyn Ops, index: usize, routing: &Routing) {
        let [probs, lse] = &mut self.room;
        let (probs, lse) = (ops.to_host(routing.probs.view(), probs), ops.to_host(routing.lse.view(), lse));
        let t = &mut self.layers[index];
        t.chosen.fill(0);
        t.probs.fill(0.0);
        routing.chosen.iter().for_each(|&e| t.chosen[e as usize] += 1);
        for row in probs.host().chunks_exact(self.shape.experts) {
            t.probs.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
        }
        t.squares = lse.host().iter().map(|&l| f64::from(l) * f64::from(l)).sum();
    }

    /// How often each expert was chosen, layer by layer.
    pub fn chosen(&self) -> impl Iterator<Item = &[u64]> {
        self.layers.iter().map(|t| t.chosen.as_slice())
    }

    /// Rows of all layers together.
    fn total(&self) -> f64 {
        (self.rows * self.layers.len()) as f64
    }

    /// Share of the choices of every row that each expert got; they add up to the number of choices.
    fn shares(&self) -> impl Iterator<Item = f64> {
        let chosen = |e: usize| self.layers.iter().map(|t| t.chosen[e]).sum::<u64>() as f64;
        (0..self.shape.experts).map(move |e| chosen(e) / self.total())
    }

    /// What is added to the mean loss.
    pub fn loss(&self) -> f64 {
        let probs = |e: usize| self.layers.iter().map(|t| t.probs[e]).sum::<f64>() / self.total();
        let balance: f64 = self.shares().enumerate().map(|(e, share)| share * probs(e)).sum();
        let squares: f64 = self.layers.iter().map(|t| t.squares).sum();
        self.losses.aux * self.shape.experts as f64 * balance + self.losses.z * squares / self.total()
    }

    /// Gradient of `scale` × [`Tally::loss`] by the probabilities of any row, and the factor of Σ lse².
    pub fn gradient(&self, scale: f64) -> (Vec<f32>, f32) {
        let factor = scale * self.losses.aux * self.shape.experts as f64 / self.total();
        let balance = self.shares().map(|share| (factor * share) as f32).collect();
        (balance, (scale * self.losses.z / self.total()) as f32)
    }
}

/// Factors as the job gives them, or those of the model.
pub(super) fn losses(spec: &ExpertsSpec, model: f64) -> RouterLosses {
    RouterLosses { aux: spec.aux_loss.unwrap_or(model), z: spec.z_loss }
}
