//! The decoder that most families share: RMSNorm, rotary grouped-query attention, SwiGLU; tied or untied head. What
//! families differ in is in [`Numbers`]; each backward stands below its forward.
mod adapt;
mod attention;
mod experts;
mod layout;
mod mlp;

use super::config::Fields;
use super::dropout::Module;
use super::experts::{ExpertShape, Sparse, losses};
use super::linear::{self, Linear};
use super::lora::{self, Adapters, Lora};
use super::rotary::{Rope, Tables};
use super::{Activations, Batch, HeadGrads, HeadParams, LayerInput, Model, Statistics, Tie, each};
use crate::params::{Init, ParamSpec, Unit};
use contract::job::{ExpertsSpec, ModelSpec};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{ClassifierGrads, Write},
};
pub(super) use experts::{ExpertNames, ExpertNumbers};
use layout::{Spans, layer_unit};
use serde_json::{Map, Value, json};

const EMBEDDING: &str = "model.embed_tokens.weight";
const LM_HEAD: &str = "lm_head.weight";
/// Rate of dropout in config.json: of attention's probabilities.
pub(super) const DROPOUT: &str = "attention_dropout";

/// What a family says of a model.
pub(super) struct Numbers {
    pub(super) vocab: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) eps: f32,
    pub(super) rope: Rope,
    pub(super) tied: bool,
    /// Standard deviation of initial matrices.
    pub(super) std: f32,
    /// Biases of the q, k and v projections.
    pub(super) qkv_bias: bool,
    /// Bias of attention's output projection.
    pub(super) o_bias: bool,
    /// Biases of gate, up and down.
    pub(super) mlp_bias: bool,
    /// RMSNorm of each head of q and k, before the rotation.
    pub(super) qk_norm: bool,
    /// Norms multiply by 1 + their weight, not by their weight.
    pub(super) norms_from_one: bool,
    /// Attention's and the MLP's outputs have norms of their own.
    pub(super) output_norms: bool,
    /// The MLP's gate is GELU (tanh form), not SiLU.
    pub(super) gelu: bool,
    /// Factor of embedded tokens.
    pub(super) embedding_scale: Option<f32>,
    /// Factor of attention's scores.
    pub(super) attention_scale: f32,
    /// Attention's scores s become cap·tanh(s / cap).
    pub(super) attention_cap: Option<f32>,
    /// The same of the logits.
    pub(super) logit_cap: Option<f32>,
    /// Share of attention's probabilities that is dropped.
    pub(super) dropout: f64,
    /// Rotation of sliding layers, where it isn't that of the others.
    pub(super) sliding_rope: Option<Rope>,
    /// The token whose embedding learns nothing where it is an input.
    pub(super) padding: Option<u32>,
    /// Tokens that a token of a sliding layer attends to, itself included.
    pub(super) window: Option<usize>,
    /// Of each layer: does it attend to the window alone?
    pub(super) sliding: Vec<bool>,
    /// Of a model with experts.
    pub(super) experts: Option<ExpertNumbers>,
}

impl Numbers {
    /// The fields that all these families have, checked against each other.
    pub(super) fn read(f: &Fields) -> Result<Self, String> {
        f.only("hidden_act", &[json!("silu"), json!("swish")])?;
        Self::read_but_activation(f, f.rope()?)
    }

    /// As [`Numbers::read`], all but `hidden_act` and the rotation.
    pub(super) fn read_but_activation(f: &Fields, rope: Rope) -> Result<Self, String> {
        let dropout = f.dropout(DROPOUT, 0.0)?;
        f.only("pretraining_tp", &[json!(1)])?;
        f.only("is_encoder_decoder", &[json!(false)])?;
        f.only("add_cross_attention", &[json!(false)])?;
        f.only("chunk_size_feed_forward", &[json!(0)])?;
        f.only("partial_rotary_factor", &[json!(1)])?;
        let (hidden, heads) = (f.size("hidden_size")?, f.size("num_attention_heads")?);
        let kv_heads = f.opt_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            ));
        }
        let head_dim = match f.opt_size("head_dim")? {
            Some(n) => n,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(format!("num_attention_heads {heads} does not divide hidden_size {hidden}")),
        };
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {head_dim} is odd; rotary embedding needs pairs"));
        }
        f.size("max_position_embeddings")?;
        let layers = f.layers("num_hidden_layers")?;
        let vocab = f.size("vocab_size")? as usize;
        Ok(Numbers {
            vocab,
            hidden: hidden as usize,
            intermediate: f.size("intermediate_size")? as usize,
            layers,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            eps: f.positive("rms_norm_eps", 1e-6)? as f32,
            rope,
            tied: f.flag("tie_word_embeddings")?,
            std: f.positive("initializer_range", 0.02)? as f32,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            norms_from_one: false,
            output_norms: false,
            gelu: false,
            embedding_scale: None,
            attention_scale: (1.0 / f64::from(head_dim).sqrt()) as f32,
            attention_cap: None,
            dropout,
            logit_cap: None,
            sliding_rope: None,
            padding: padding(f, vocab),
            window: None,
            sliding: vec![false; layers],
            experts: None,
        })
    }

    /// The fields that families with experts share; every layer has `count` experts of this width, unless the family says
    /// otherwise afterwards.
    pub(super) fn read_experts(
        &mut self,
        f: &Fields,
        count: u32,
        intermediate: usize,
        names: ExpertNames,
    ) -> Result<(), String> {
        let per_token = f.size("num_experts_per_tok")?;
        if per_token > count {
            return Err(format!(
                "num_experts_per_tok {per_token} is more than the {count} experts of a layer"
            ));
        }
        if count > EXPERTS_MAX {
            return Err(format!("{count} experts of a layer are more than {EXPERTS_MAX}"));
        }
        // It asks for the routers' logits beside a text's; how training uses them is said by `train.experts`.
        f.flag("output_router_logits")?;
        let aux = f.opt_number("router_aux_loss_coef")?.unwrap_or(0.001);
        if aux < 0.0 {
            return Err(format!("config.json: `router_aux_loss_coef` is {aux}, below 0"));
        }
        let (experts, per_token, hidden) = (count as usize, per_token as usize, self.hidden);
        let shape = ExpertShape { experts, per_token, hidden, intermediate, normalise: false };
        let losses = losses(&ExpertsSpec::default(), aux);
        self.experts = Some(ExpertNumbers { shape, losses, sparse: vec![true; self.layers], names });
        Ok(())
    }

    /// What norms' weights begin with.
    fn norm_init(&self) -> Init {
        if self.norms_from_one { Init::Zeros } else { Init::Ones }
    }

    /// The fields by which Qwen says which layers slide.
    pub(super) fn read_sliding_layers(&mut self, f: &Fields) -> Result<(), String> {
        let on = f.flag("use_sliding_window")?;
        let window = f.opt_size("sliding_window")?.filter(|_| on);
        let first = f.get("max_window_layers").map_or(Some(28), Value::as_u64);
        let first = first.ok_or("config.json: `max_window_layers` is not a number of layers")?;
        self.window = window.map(|n| n as usize);
        self.sliding = (0..self.layers).map(|l| window.is_some() && l as u64 >= first).collect();
        self.read_layer_types(f)
    }

    /// `layer_types`, where it is there, says which layers slide.
    pub(super) fn read_layer_types(&mut self, f: &Fields) -> Result<(), String> {
        let window = self.window;
        let Some(types) = f.get("layer_types") else { return Ok(()) };
        let wrong =
            "config.json: `layer_types` is not `full_attention` or `sliding_attention` for each layer";
        let types = types.as_array().filter(|t| t.len() == self.layers).ok_or(wrong)?;
        for (sliding, kind) in self.sliding.iter_mut().zip(types) {
            *sliding = match kind.as_str() {
                Some("full_attention") => false,
                Some("sliding_attention") if window.is_some() => true,
                Some("sliding_attention") => {
                    return Err("config.json: `layer_types` has sliding layers without a window".into());
                }
                _ => return Err(wrong.into()),
            };
        }
        Ok(())
    }
}

/// More experts than this are no layer.
const EXPERTS_MAX: u32 = 1 << 16;

/// `pad_token_id` as torch's embedding takes it: a negative one counts from the end.
fn padding(f: &Fields, vocab: usize) -> Option<u32> {
    let id = f.get("pad_token_id")?.as_i64()?;
    let id = if id < 0 { id.checked_add(vocab as i64)? } else { id };
    u32::try_from(id).ok()
}

/// `config.json` of a model that job.yaml describes, all but what the family adds.
pub(super) fn describe(
    s: &ModelSpec,
    model_type: &str,
    architecture: &str,
    own: Value,
) -> Map<String, Value> {
    let shared = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden_size,
        "initializer_range": s.initializer_range,
        "intermediate_size": s.intermediate_size,
        "max_position_embeddings": s.max_position_embeddings,
        "num_attention_heads": s.num_attention_heads,
        "num_hidden_layers": s.num_hidden_layers,
        "num_key_value_heads": s.num_key_value_heads,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": null,
        "tie_word_embeddings": s.tie_word_embeddings,
        "use_cache": true,
        "vocab_size": s.vocab_size,
    });
    let entries = |v: Value| match v {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    let mut map = entries(shared);
    map.extend(entries(own));
    map
}

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
                qkv: u.trains(s.qkv.clone()),
                o: u.trains(s.o.clone()),
                gate_up: !sparse && u.trains(s.gate_up.clone()),
                down: !sparse && u.trains(s.down.clone()),
                router: sparse && u.trains(self.router()),
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
                    ops.clear(dx.part((end - run.len()) * d..end * d));
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
            ops.clear(g.part(span));
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
