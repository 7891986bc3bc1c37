//! A layer of GPT-2: its tensors, attention and MLP, each after a LayerNorm.
use super::{Gpt2, Numbers};
use crate::model::{
    Activations, LayerInput,
    dropout::Module,
    each,
    linear::Shape,
    lora::{Adapters, Lora, Scratch, Together},
};
use crate::params::{Init, ParamSpec, Unit};
use device::{
    Ops, View, ViewMut,
    ops::{AttentionShape, LayerNorm, Write},
};
use std::ops::Range;

/// Weight and bias of a norm or a projection in the layer's flat vector.
#[derive(Clone)]
struct Pair {
    w: Range<usize>,
    b: Range<usize>,
}

/// Where the tensors of a layer lie in its flat vector.
pub(super) struct Spans {
    ln_1: Pair,
    c_attn: Pair,
    attn_proj: Pair,
    ln_2: Pair,
    c_fc: Pair,
    mlp_proj: Pair,
}

impl Spans {
    /// Those whose gradients are sums that ops add to.
    pub(super) fn summed(&self) -> impl Iterator<Item = Range<usize>> {
        let norms = [&self.ln_1, &self.ln_2];
        let all = [&self.ln_1, &self.c_attn, &self.attn_proj, &self.ln_2, &self.c_fc, &self.mlp_proj];
        let weights = norms.into_iter().map(|p| p.w.clone());
        weights.chain(all.into_iter().map(|p| p.b.clone())).collect::<Vec<_>>().into_iter()
    }

    /// What of this layer is trained.
    pub(super) fn wanted(&self, unit: &Unit) -> Wanted {
        let trained = |p: &Pair| unit.has_trained_in(p.w.clone());
        Wanted {
            c_attn: trained(&self.c_attn),
            attn_proj: trained(&self.attn_proj),
            c_fc: trained(&self.c_fc),
            mlp_proj: trained(&self.mlp_proj),
        }
    }
}

/// Which matrices of a layer have a trained part; the gradients of the others are not computed.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    c_attn: bool,
    attn_proj: bool,
    c_fc: bool,
    mlp_proj: bool,
}

impl Wanted {
    pub(super) const ALL: Self = Wanted { c_attn: true, attn_proj: true, c_fc: true, mlp_proj: true };
}

/// Where a layer drops.
pub(super) struct Drops {
    attention: Module,
    attention_out: Module,
    mlp_out: Module,
}

impl Drops {
    pub(super) fn new(n: &Numbers, layer: usize, seed: u64) -> Self {
        let module = |rate, name| Module::new(rate, seed, &format!("{}h.{layer}.{name}", super::PREFIX));
        Drops {
            attention: module(n.rates.attention, "attn.attn_dropout"),
            attention_out: module(n.rates.residual, "attn.resid_dropout"),
            mlp_out: module(n.rates.residual, "mlp.dropout"),
        }
    }
}

/// A layer's tensors, and where they lie.
pub(super) fn layer_unit(n: &Numbers, layer: usize) -> (Unit, Spans) {
    let (d, f) = (n.hidden, n.intermediate);
    let mut params: Vec<ParamSpec> = Vec::new();
    let mut at = 0;
    let mut add = |name: &str, shape: &[usize], init| {
        let name = format!("{}h.{layer}.{name}", super::PREFIX);
        let spec = ParamSpec { name, shape: shape.into(), init };
        let from = at;
        at += spec.len();
        params.push(spec);
        from..at
    };
    let mut pair = |name: &str, shape: &[usize], init| Pair {
        w: add(&format!("{name}.weight"), shape, init),
        b: add(&format!("{name}.bias"), &shape[shape.len() - 1..], Init::Zeros),
    };
    let matrix = Init::Normal(n.std);
    // What is added to the residual stream starts smaller, the more layers add to it.
    let projection = Init::Normal(n.std / (2.0 * n.layers as f32).sqrt());
    let spans = Spans {
        ln_1: pair("ln_1", &[d], Init::Ones),
        c_attn: pair("attn.c_attn", &[d, 3 * d], matrix),
        attn_proj: pair("attn.c_proj", &[d, d], projection),
        ln_2: pair("ln_2", &[d], Init::Ones),
        c_fc: pair("mlp.c_fc", &[d, f], matrix),
        mlp_proj: pair("mlp.c_proj", &[f, d], projection),
    };
    (Unit::new(format!("layer {layer}"), params), spans)
}

/// Projections, by their place in [`Adapters`].
const C_ATTN: usize = 0;
const ATTN_PROJ: usize = 1;
const C_FC: usize = 2;
const MLP_PROJ: usize = 3;

/// The adapters of every layer. Refuses a target that no projection is.
pub(super) fn adapters(n: &Numbers, lora: &Lora) -> Result<Vec<Adapters>, String> {
    let (d, f) = (n.hidden, n.intermediate);
    let named = [[("attn.c_attn", 3 * d)], [("attn.c_proj", d)], [("mlp.c_fc", f)], [("mlp.c_proj", d)]];
    let of_layer = |layer: usize| -> Vec<Together> {
        let prefix = format!("{}h.{layer}.", super::PREFIX);
        let together = |(named, inp)| Together { prefix: prefix.clone(), inp, named };
        named.iter().map(|n| &n[..]).zip([d, d, d, f]).map(together).collect()
    };
    let all: Vec<Vec<Together>> = (0..n.layers).map(of_layer).collect();
    let names: Vec<String> = all.iter().flatten().map(|t| format!("{}{}", t.prefix, t.named[0].0)).collect();
    lora.check(names.iter().map(String::as_str))?;
    let layer =
        |(l, together): (usize, &Vec<Together>)| Adapters::new(lora, together, layer_unit(n, l).0.len());
    Ok(all.iter().enumerate().map(layer).collect())
}

/// Two ranges of `g`, of which the first ends where the second begins.
fn adjacent<'a>(g: &'a mut ViewMut, at: &Pair) -> (ViewMut<'a>, ViewMut<'a>) {
    g.slice_mut(at.w.start..at.b.end).split_at(at.w.len())
}

impl Gpt2 {
    /// `y = x·w + b`
    fn project(&self, ops: &dyn Ops, p: View, at: &Pair, y: ViewMut, x: View, shape: Shape) {
        let (w, b) = (p.slice(at.w.clone()), p.slice(at.b.clone()));
        self.linear.conv1d_forward(ops, y, x, w, b, shape);
    }

    /// `dx = dy · wᵀ`
    fn project_backward(&self, ops: &dyn Ops, p: View, at: &Pair, dx: ViewMut, dy: View, shape: Shape) {
        self.linear.conv1d_backward_input(ops, dx, dy, p.slice(at.w.clone()), shape);
    }

    /// The gradient of the weight, where it is wanted.
    fn weight_backward(
        &self,
        ops: &dyn Ops,
        at: &Pair,
        g: &mut ViewMut,
        (x, dy): (View, View),
        shape: Shape,
        wanted: bool,
    ) {
        if wanted {
            self.linear.conv1d_backward_weight(ops, g.slice_mut(at.w.clone()), dy, x, shape);
        }
    }

    /// Adds to the gradient of the bias.
    fn bias_backward(&self, ops: &dyn Ops, at: &Pair, g: &mut ViewMut, dy: View, (m, _, out): Shape) {
        ops.bias_backward(g.slice_mut(at.b.clone()), dy, m, out);
    }

    /// Adds to `y` what adapters give for `x`.
    fn adapters_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        which: usize,
        x: View,
        y: ViewMut,
        low: &mut Scratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.forward(ops, which, (input.params, input.batch), x, y, low);
        }
    }

    /// Gradients of adapters; adds to `dx`, the gradient of their input.
    fn adapters_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        which: usize,
        g: &mut ViewMut,
        xy: (View, View),
        dx: ViewMut,
        low: &mut Scratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            let given = (input.params, input.batch);
            adapters.backward_weight(ops, which, given, g, xy, low);
            adapters.backward_input(ops, which, given, dx, low);
        }
    }

    fn norm<'a>(&self, p: View<'a>, at: &Pair) -> LayerNorm<'a> {
        LayerNorm { w: p.slice(at.w.clone()), b: p.slice(at.b.clone()), eps: self.n.eps }
    }

    fn shape(&self, input: &LayerInput) -> AttentionShape {
        let head_dim = self.n.hidden / self.n.heads;
        let scale = if self.n.scaled { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
        let by = if self.n.by_layer { (input.layer + 1) as f64 } else { 1.0 };
        AttentionShape {
            scale: (scale / by) as f32,
            dropout: self.drops[input.layer].attention.of_attention(input.batch),
            ..AttentionShape::new(input.batch.b, input.batch.t, self.n.heads, self.n.heads, head_dim)
        }
    }

    /// Leaves the projected output in the buffer of the residual stream; the input is added later.
    pub(super) fn attention_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, s, m, d) = (input.params, &self.spans, input.batch.rows(), self.n.hidden);
        let [stats, qkv, o, lse, mid, ..] = each::<7>(saved);
        let [rows, _, _, _, _, _, _, low @ ..] = each::<12>(scratch);
        let mut low = Scratch::new(low);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), input.x, self.norm(p, &s.ln_1), m);
        self.project(ops, p, &s.c_attn, qkv.view_mut(), rows.view(), (m, d, 3 * d));
        self.adapters_forward(ops, input, C_ATTN, rows.view(), qkv.view_mut(), &mut low);
        let (starts, shape) = (&input.batch.starts, self.shape(input));
        ops.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), starts, shape);
        self.project(ops, p, &s.attn_proj, mid.view_mut(), o.view(), (m, d, d));
        self.adapters_forward(ops, input, ATTN_PROJ, o.view(), mid.view_mut(), &mut low);
        self.drops[input.layer].attention_out.apply(ops, input.batch, d, mid.view_mut());
    }

    /// `dx` becomes the gradient of the layer's input.
    pub(super) fn attention_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, s, m, d) = (input.params, &self.spans, input.batch.rows(), self.n.hidden);
        let wanted = self.wanted[input.layer];
        let [stats, qkv, o, lse, ..] = each::<7>(saved);
        let [rows, drows, _, _, d_o, dqkv, _, low @ ..] = each::<12>(scratch);
        let mut low = Scratch::new(low);
        let dout = self.drops[input.layer].attention_out.backward(ops, input.batch, d, dx.as_view(), rows);
        self.bias_backward(ops, &s.attn_proj, g, dout, (m, d, d));
        let dout = self.linear.gradient(ops, dout, drows);
        self.weight_backward(ops, &s.attn_proj, g, (o.view(), dout), (m, d, d), wanted.attn_proj);
        self.project_backward(ops, p, &s.attn_proj, d_o.view_mut(), dout, (m, d, d));
        self.adapters_backward(ops, input, ATTN_PROJ, g, (o.view(), dout), d_o.view_mut(), &mut low);
        let (starts, shape) = (&input.batch.starts, self.shape(input));
        ops.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), starts, shape);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), input.x, self.norm(p, &s.ln_1), m);
        let shape = (m, d, 3 * d);
        let xy = (rows.view(), dqkv.view());
        self.bias_backward(ops, &s.c_attn, g, dqkv.view(), shape);
        self.weight_backward(ops, &s.c_attn, g, xy, shape, wanted.c_attn);
        self.project_backward(ops, p, &s.c_attn, drows.view_mut(), dqkv.view(), shape);
        self.adapters_backward(ops, input, C_ATTN, g, xy, drows.view_mut(), &mut low);
        let (dw, db) = adjacent(g, &s.ln_1);
        let w = p.slice(s.ln_1.w.clone());
        ops.layernorm_backward(dx, dw, db, drows.view(), input.x, w, stats.view(), m, Write::Add);
    }

    /// `mid` comes in as attention's projected output and leaves as the residual stream after attention.
    pub(super) fn mlp_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, s, m) = (input.params, &self.spans, input.batch.rows());
        let (d, f) = (self.n.hidden, self.n.intermediate);
        let [_, _, _, _, mid, stats, fc] = each::<7>(saved);
        let [rows, _, act, _, _, _, _, low @ ..] = each::<12>(scratch);
        let mut low = Scratch::new(low);
        let norm = self.norm(p, &s.ln_2);
        ops.add_layernorm_forward(rows.view_mut(), stats.view_mut(), mid.view_mut(), input.x, norm, m);
        self.project(ops, p, &s.c_fc, fc.view_mut(), rows.view(), (m, d, f));
        self.adapters_forward(ops, input, C_FC, rows.view(), fc.view_mut(), &mut low);
        let Some(mut y) = y else { return };
        ops.gelu_forward(act.view_mut(), fc.view());
        self.project(ops, p, &s.mlp_proj, y.reborrow(), act.view(), (m, f, d));
        self.adapters_forward(ops, input, MLP_PROJ, act.view(), y.reborrow(), &mut low);
        self.drops[input.layer].mlp_out.apply(ops, input.batch, d, y.reborrow());
        ops.add(y, mid.view());
    }

    /// `dx` becomes the gradient of the residual stream after attention.
    pub(super) fn mlp_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, s, m) = (input.params, &self.spans, input.batch.rows());
        let (d, f) = (self.n.hidden, self.n.intermediate);
        let [_, _, _, _, mid, stats, fc] = each::<7>(saved);
        let [rows, drows, act, dfc, _, _, _, low @ ..] = each::<12>(scratch);
        let (wanted, mut low) = (self.wanted[input.layer], Scratch::new(low));
        let dout = self.drops[input.layer].mlp_out.backward(ops, input.batch, d, dx.as_view(), rows);
        self.bias_backward(ops, &s.mlp_proj, g, dout, (m, f, d));
        let dout = self.linear.gradient(ops, dout, drows);
        self.project_backward(ops, p, &s.mlp_proj, dfc.view_mut(), dout, (m, f, d));
        if self.adapters.get(input.layer).is_some() {
            ops.gelu_forward(act.view_mut(), fc.view());
            self.adapters_backward(ops, input, MLP_PROJ, g, (act.view(), dout), dfc.view_mut(), &mut low);
        }
        // What the forward multiplied comes back where the gradient was.
        ops.gelu_backward(act.view_mut(), dfc.view_mut(), fc.view());
        self.weight_backward(ops, &s.mlp_proj, g, (dfc.view(), dout), (m, f, d), wanted.mlp_proj);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), mid.view(), self.norm(p, &s.ln_2), m);
        let xy = (rows.view(), act.view());
        self.bias_backward(ops, &s.c_fc, g, act.view(), (m, d, f));
        self.weight_backward(ops, &s.c_fc, g, xy, (m, d, f), wanted.c_fc);
        self.project_backward(ops, p, &s.c_fc, drows.view_mut(), act.view(), (m, d, f));
        self.adapters_backward(ops, input, C_FC, g, xy, drows.view_mut(), &mut low);
        let (dw, db) = adjacent(g, &s.ln_2);
        let w = p.slice(s.ln_2.w.clone());
        ops.layernorm_backward(dx, dw, db, drows.view(), mid.view(), w, stats.view(), m, Write::Add);
    }
}
