//! The decoder that most families share: RMSNorm, rotary grouped-query attention, SwiGLU; tied or untied head. What
//! families differ in is in [`Numbers`]; each backward stands below its forward.
mod adapt;
mod attention;
mod experts;
mod layout;
mod mlp;
mod numbers;

use super::dropout::Module;
use super::experts::{Sparse, losses};
use super::linear::{self, Linear};
use super::lora::{self, Adapters, Lora};
use super::rotary::Tables;
use super::{Activations, Batch, HeadGrads, HeadParams, LayerInput, Model, Statistics, Tie, each};
use crate::params::{Init, ParamSpec, Unit};
use contract::job::ExpertsSpec;
use device::{
    Buf, Ops, View, ViewMut,
    ops::{ClassifierGrads, Write},
};
pub(super) use experts::ExpertNames;
use layout::{Spans, layer_unit};
pub(super) use numbers::{DROPOUT, Numbers, describe};
use serde_json::{Map, Value};

const EMBEDDING: &str = "model.embed_tokens.weight";
const LM_HEAD: &str = "lm_head.weight";

/// A decoder with its numbers.
pub(super) struct Decoder {
    n: Numbers,
    config: Map<String, Value>,
    tables: Tables,
    /// Of sliding layers, where they differ.
    sliding_tables: Option<Tables>,
    /// Of a layer without experts; one with experts is the same up to the norm before its router.
    spans: Spans,
    /// Elements of all layers' matrices that a token is multiplied with.
    matrices: usize,
    /// Of each layer, and of the head's matrix: is its gradient wanted?
    wanted: Vec<Wanted>,
    head_wanted: bool,
    /// Of each layer; empty without adapters.
    adapters: Vec<Adapters>,
    /// Of each layer's attention.
    dropout: Vec<Module>,
    linear: Linear,
}

/// Which matrices of a layer have a trained part; the gradients of the others are not computed.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) qkv: bool,
    pub(super) o: bool,
    pub(super) gate_up: bool,
    pub(super) down: bool,
    pub(super) router: bool,
}

/// `tokens`: the longest sequence.
pub(super) fn build(n: Numbers, config: &Map<String, Value>, tokens: usize) -> Box<dyn Model> {
    let tables = Tables::new(&n.rope, tokens, n.head_dim);
    let sliding_tables = n.sliding_rope.map(|rope| Tables::new(&rope, tokens, n.head_dim));
    let spans = layer_unit(&n, None).1;
    let active = |l: usize| match &n.experts {
        Some(e) if n.is_sparse(l) => e.shape.per_token * e.shape.expert_len(),
        _ => 0,
    };
    let of = |l: usize| -> usize {
        let params = layer_unit(&n, Some(l)).0.params;
        active(l) + params.iter().filter(|p| p.shape.len() == 2).map(ParamSpec::len).sum::<usize>()
    };
    let matrices = (0..n.layers).map(of).sum();
    let wanted = vec![Wanted { qkv: true, o: true, gate_up: true, down: true, router: true }; n.layers];
    let mut model = Decoder {
        n,
        config: config.clone(),
        tables,
        sliding_tables,
        spans,
        matrices,
        wanted,
        head_wanted: true,
        adapters: Vec::new(),
        dropout: Vec::new(),
        linear: Linear::default(),
    };
    model.seed(0);
    Box::new(model)
}

impl Decoder {
    fn qkv_width(&self) -> usize {
        (self.n.heads + 2 * self.n.kv_heads) * self.n.head_dim
    }

    fn o_width(&self) -> usize {
        self.n.heads * self.n.head_dim
    }

    /// A norm's factors: its weight, or 1 + its weight, which is written to `room`, always in `f32`.
    fn norm_factors<'a>(&self, ops: &dyn Ops, weight: View<'a>, room: &'a mut Buf) -> View<'a> {
        if !self.n.norms_from_one {
            return weight;
        }
        let n = weight.len();
        ops.cast(room.view_mut().slice(0..n), weight);
        ops.offset(room.view_mut().slice(0..n), 1.0);
        room.view().slice(0..n)
    }

    /// The head's matrix, wherever it lies, and the final norm's weight.
    fn head_weights<'a>(&self, p: &HeadParams<'a>) -> (View<'a>, View<'a>) {
        let d = self.n.hidden;
        let norm = p.head.slice(0..d);
        let matrix = p.embedding.unwrap_or_else(|| p.head.slice(d..d + self.n.vocab * d));
        (matrix, norm)
    }
}

impl Model for Decoder {
    fn units(&self) -> Vec<Unit> {
        let matrix = |name: &str| ParamSpec {
            name: name.into(),
            shape: vec![self.n.vocab, self.n.hidden],
            init: Init::Normal(self.n.std),
        };
        let mut head = vec![ParamSpec {
            name: "model.norm.weight".into(),
            shape: vec![self.n.hidden],
            init: self.n.norm_init(),
        }];
        if !self.tied() {
            head.push(matrix(LM_HEAD));
        }
        let layers = (0..self.n.layers).map(|l| self.adapted(l, layer_unit(&self.n, Some(l)).0));
        std::iter::once(Unit::new("embedding", vec![matrix(EMBEDDING)]))
            .chain(layers)
            .chain(std::iter::once(Unit::new("head", head)))
            .collect()
    }

    fn adapt(&mut self, lora: &Lora) -> Result<(), String> {
        self.add_adapters(lora)
    }

    fn linears(&self) -> Vec<(usize, usize)> {
        let (d, f) = (self.n.hidden, self.n.dense_width());
        vec![(d, self.qkv_width()), (self.o_width(), d), (d, 2 * f), (f, d)]
    }

    fn multiply_in_fp8(&mut self) -> Result<(), String> {
        if self.n.experts.is_some() {
            return Err(
                "`train.precision: fp8` is not there for models with experts in this version: use bf16"
                    .into(),
            );
        }
        linear::check_fp8(&[
            ("hidden_size", self.n.hidden),
            ("intermediate_size", self.n.intermediate),
            ("num_attention_heads · head_dim", self.o_width()),
            ("(num_attention_heads + 2 · num_key_value_heads) · head_dim", self.qkv_width()),
        ])?;
        self.linear = Linear::Fp8;
        Ok(())
    }

    fn seed(&mut self, seed: u64) {
        let module = |l| Module::new(self.n.dropout, seed, &format!("model.layers.{l}.self_attn.dropout"));
        self.dropout = (0..self.n.layers).map(module).collect();
    }

    fn train(&mut self, units: &[Unit]) {
        let s = &self.spans;
        let wanted = |(l, u): (usize, &Unit)| {
            let sparse = self.n.is_sparse(l);
            Wanted {
                qkv: u.has_trained_in(s.qkv.clone()),
                o: u.has_trained_in(s.o.clone()),
                gate_up: !sparse && u.has_trained_in(s.gate_up.clone()),
                down: !sparse && u.has_trained_in(s.down.clone()),
                router: sparse && u.has_trained_in(self.router()),
            }
        };
        let layers = 1..units.len() - 1;
        self.wanted = units[layers].iter().enumerate().map(wanted).collect();
        let matrix = if self.tied() { units.first() } else { units.last() };
        self.head_wanted = matrix.is_some_and(|u| u.is_trained(u.params.len() - 1));
    }

    fn hidden(&self) -> usize {
        self.n.hidden
    }

    fn vocab(&self) -> usize {
        self.n.vocab
    }

    fn tied(&self) -> bool {
        self.n.tied
    }

    fn attention_width(&self) -> usize {
        self.qkv_width()
    }

    fn heads(&self) -> [usize; 3] {
        [self.n.heads, self.n.kv_heads, self.n.head_dim]
    }

    fn window(&self) -> Option<usize> {
        self.n.window.filter(|_| self.n.sliding.contains(&true))
    }

    fn ties(&self) -> Vec<Tie> {
        let tie = Tie { alias: LM_HEAD.into(), target: EMBEDDING.into() };
        if self.tied() { vec![tie] } else { Vec::new() }
    }

    fn hf_config(&self) -> &Map<String, Value> {
        &self.config
    }

    fn flops_per_token(&self, t: usize) -> f64 {
        let matrices = self.matrices as f64 + (self.n.vocab * self.n.hidden) as f64;
        let whole = t as f64;
        // Twice the mean number of keys that a token sees.
        let keys = |sliding: &bool| match self.n.window {
            Some(w) if *sliding && w < t => 2.0 * w as f64 - (w * w) as f64 / whole,
            _ => whole,
        };
        let keys: f64 = self.n.sliding.iter().map(keys).sum();
        6.0 * matrices + 6.0 * keys * self.o_width() as f64
    }

    /// 1/rms of the input · rotated q, k, and v · attention output · log-sum-exp of attention · residual stream after
    /// attention · 1/rms of it · gate and up · q and k before their norm · 1/rms of each of their heads · outputs of
    /// attention and MLP before their norms, each with its 1/rms.
    fn saved_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let m = b * t;
        let normed = if self.n.output_norms { m } else { 0 };
        let heads = if self.n.qk_norm { self.n.heads + self.n.kv_heads } else { 0 };
        vec![
            m,
            m * self.qkv_width(),
            m * self.o_width(),
            b * self.n.heads * t,
            m * self.n.hidden,
            m,
            m * 2 * self.n.dense_width(),
            m * heads * self.n.head_dim,
            m * heads,
            normed * self.n.hidden,
            normed,
            normed * self.n.hidden,
            normed,
        ]
    }

    /// Normed rows · their gradient · SwiGLU's output · gradients of gate and up, attention output, q k v · a norm's factors ·
    /// the router's logits · 1/rms of the head's rows · what adapters need.
    fn scratch_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let (m, d, f) = (b * t, self.n.hidden, self.n.dense_width());
        let factors = if self.n.norms_from_one { d.max(self.n.head_dim) } else { 0 };
        let logits = m * self.n.experts.as_ref().map_or(0, |e| e.shape.experts);
        let (o, qkv) = (m * self.o_width(), m * self.qkv_width());
        let own = [m * d, m * d, m * f, m * 2 * f, o, qkv, factors, logits, m];
        own.into_iter().chain(lora::scratch_lengths(&self.adapters, m)).collect()
    }

    fn statistics(&self) -> Statistics {
        Statistics { saved: &[0, 3, 5, 8, 10, 12], scratch: &[6, 7, 8, 9, 10, 11, 12, 13] }
    }

    fn sparse(&self) -> Option<&dyn Sparse> {
        self.n.experts.as_ref().map(|_| self as &dyn Sparse)
    }

    fn place(&mut self, ops: &dyn Ops) {
        self.tables.place(ops);
        if let Some(tables) = &mut self.sliding_tables {
            tables.place(ops);
        }
    }

    fn train_experts(&mut self, spec: &ExpertsSpec) {
        if let Some(e) = &mut self.n.experts {
            e.losses = losses(spec, e.losses.aux);
        }
    }

    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &Batch, mut x: ViewMut) {
        ops.embedding_forward(x.reborrow(), params, &batch.tokens, self.n.hidden);
        if let Some(scale) = self.n.embedding_scale {
            ops.scale(x, scale);
        }
    }

    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &Batch, mut dx: ViewMut) {
        if let Some(scale) = self.n.embedding_scale {
            ops.scale(dx.reborrow(), scale);
        }
        if let Some(padding) = self.n.padding {
            let (d, mut end) = (self.n.hidden, 0);
            for run in batch.tokens.chunk_by(|a, b| (*a == padding) == (*b == padding)) {
                end += run.len();
                if run[0] == padding {
                    ops.clear(dx.slice_mut((end - run.len()) * d..end * d));
                }
            }
        }
        ops.embedding_backward(grads, dx.as_view(), &batch.tokens, self.n.hidden);
    }

    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        self.attention_forward(ops, input, saved, scratch);
        self.mlp_forward(ops, input, y, saved, scratch);
    }

    fn layer_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        mut dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let mut g = grads;
        for span in self.spans.summed() {
            ops.clear(g.slice_mut(span));
        }
        self.mlp_backward(ops, input, &mut g, dx.reborrow(), saved, scratch);
        self.attention_backward(ops, input, &mut g, dx, saved, scratch);
    }

    fn logits(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        x: View,
        mut out: ViewMut,
        scratch: &mut Activations,
    ) {
        let (d, v) = (self.n.hidden, self.n.vocab);
        let (matrix, w_norm) = self.head_weights(&params);
        let [norm, _, _, _, _, _, room, _, rstd, ..] = each::<14>(scratch);
        let (mut norm, w_norm) = (norm.view_mut().slice(0..d), self.norm_factors(ops, w_norm, room));
        ops.rmsnorm_forward(norm.reborrow(), rstd.view_mut().slice(0..1), x, w_norm, 1, d, self.n.eps);
        ops.logits(out.reborrow(), norm.as_view(), matrix, 1, d, v);
        if let Some(cap) = self.n.logit_cap {
            ops.softcap(out, cap);
        }
    }

    fn head(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &Batch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut Activations,
    ) {
        let (m, d, v, eps) = (batch.rows(), self.n.hidden, self.n.vocab, self.n.eps);
        let (matrix, w_norm) = self.head_weights(&params);
        let [norm, dnorm, _, _, _, _, room, _, rstd, ..] = each::<14>(scratch);
        let (w_norm, cap) = (self.norm_factors(ops, w_norm, room), self.n.logit_cap);
        ops.rmsnorm_forward(norm.view_mut(), rstd.view_mut(), x, w_norm, m, d, eps);
        let Some(g) = grads else {
            return ops.capped_classifier(loss, norm.view(), matrix, &batch.labels, m, d, v, cap, None);
        };
        let (mut dw_norm, rest) = g.head.split_at(d);
        ops.clear(dw_norm.reborrow());
        let dw = g.embedding.unwrap_or(rest);
        // empty: not wanted
        let dw = if self.head_wanted { dw } else { dw.slice(0..0) };
        let out = ClassifierGrads { dx: dnorm.view_mut(), dw, dw_write: Write::Set, scale: g.scale };
        ops.capped_classifier(loss, norm.view(), matrix, &batch.labels, m, d, v, cap, Some(out));
        ops.rmsnorm_backward(g.dx, dw_norm, dnorm.view(), x, w_norm, rstd.view(), m, d, Write::Set);
    }
}
