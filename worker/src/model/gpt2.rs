//! GPT-2: learned positions, LayerNorm, weights stored as `[in, out]` (Conv1D), GELU; each backward stands below its forward.
mod layer;

use super::config::Fields;
use super::dropout::Module;
use super::linear::{self, Linear};
use super::lora::{self, Adapters, Lora};
use super::{Activations, Batch, Family, HeadGrads, HeadParams, LayerInput, Model, Statistics, Tie, each};
use crate::params::{Init, ParamSpec, Unit};
use contract::job::ModelSpec;
use device::{
    Ops, View, ViewMut,
    ops::{ClassifierGrads, LayerNorm, Write},
};
use layer::{Drops, Spans, Wanted, layer_unit};
use serde_json::{Map, Value, json};

/// Rates of dropout in config.json: of attention's probabilities, of the embedding, of what is added to the residual stream.
const RATES: [&str; 3] = ["attn_pdrop", "embd_pdrop", "resid_pdrop"];
/// Before every stored name but the head's; files without a head leave it out.
const PREFIX: &str = "transformer.";
const EMBEDDING: &str = "transformer.wte.weight";
const LM_HEAD: &str = "lm_head.weight";

pub(super) const FAMILY: Family = Family {
    name: "gpt2",
    architecture: "GPT2LMHeadModel",
    build: |config, _| {
        let f = Fields::new(config);
        let n = Numbers::read(&f)?;
        f.finish()?;
        let (unit, spans) = layer_unit(&n, 0);
        let matrices = unit.params.iter().filter(|p| p.shape.len() == 2).map(ParamSpec::len).sum();
        let (wanted, adapters) = (vec![Wanted::ALL; n.layers], Vec::new());
        let config = config.clone();
        let mut model = Gpt2 {
            dropout: Module::new(n.rates.embedding, 0, ""),
            drops: Vec::new(),
            n,
            config,
            spans,
            matrices,
            wanted,
            head_wanted: true,
            adapters,
            linear: Linear::default(),
        };
        model.seed(0);
        Ok(Box::new(model))
    },
    describe,
    dropout: &RATES,
};

/// What config.json says.
struct Numbers {
    vocab: usize,
    positions: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    eps: f32,
    tied: bool,
    /// Standard deviation of initial matrices.
    std: f32,
    /// Scores are divided by √head_dim.
    scaled: bool,
    /// They are also divided by the layer's number, counted from 1.
    by_layer: bool,
    rates: Rates,
}

/// Rates of dropout.
struct Rates {
    attention: f64,
    embedding: f64,
    residual: f64,
}

/// Keys of heads for other tasks than text, and of settings that matter in 16 bit only.
const WITHOUT_EFFECT: [&str; 10] = [
    "n_special",
    "predict_special_tokens",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "n_ctx",
];

impl Numbers {
    fn read(f: &Fields) -> Result<Self, String> {
        f.only("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
        f.only("add_cross_attention", &[json!(false)])?;
        f.only("is_encoder_decoder", &[json!(false)])?;
        f.only("chunk_size_feed_forward", &[json!(0)])?;
        let [attention, embedding, residual] = RATES.map(|key| f.dropout(key, 0.1));
        for key in WITHOUT_EFFECT {
            f.get(key);
        }
        let (hidden, heads) = (f.size("n_embd")?, f.size("n_head")?);
        if !hidden.is_multiple_of(heads) {
            return Err(format!("n_head {heads} does not divide n_embd {hidden}"));
        }
        Ok(Numbers {
            vocab: f.size("vocab_size")? as usize,
            positions: f.size("n_positions")? as usize,
            hidden: hidden as usize,
            intermediate: f.opt_size("n_inner")?.map_or(4 * hidden as usize, |n| n as usize),
            layers: f.layers("n_layer")?,
            heads: heads as usize,
            eps: f.positive("layer_norm_epsilon", 1e-5)? as f32,
            tied: f.flag_or("tie_word_embeddings", true)?,
            std: f.positive("initializer_range", 0.02)? as f32,
            scaled: f.flag_or("scale_attn_weights", true)?,
            by_layer: f.flag("scale_attn_by_inverse_layer_idx")?,
            rates: Rates { attention: attention?, embedding: embedding?, residual: residual? },
        })
    }
}

/// `config.json` of a model that job.yaml describes.
fn describe(s: &ModelSpec) -> Map<String, Value> {
    let all = json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "initializer_range": s.initializer_range,
        "layer_norm_epsilon": 1e-5,
        "n_embd": s.hidden_size,
        "n_head": s.num_attention_heads,
        "n_inner": s.intermediate_size,
        "n_layer": s.num_hidden_layers,
        "n_positions": s.max_position_embeddings,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": s.tie_word_embeddings,
        "use_cache": true,
        "vocab_size": s.vocab_size,
    });
    match all {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// GPT-2 with its numbers.
struct Gpt2 {
    n: Numbers,
    config: Map<String, Value>,
    spans: Spans,
    /// Elements of a layer's matrices.
    matrices: usize,
    /// Of each layer, and of the head's matrix: is its gradient wanted?
    wanted: Vec<Wanted>,
    head_wanted: bool,
    /// Of each layer; empty without adapters.
    adapters: Vec<Adapters>,
    /// After the embedding.
    dropout: Module,
    /// Of each layer.
    drops: Vec<Drops>,
    linear: Linear,
}

impl Gpt2 {
    fn table(&self) -> usize {
        self.n.vocab * self.n.hidden
    }

    /// The final norm, and the head's matrix, wherever it lies.
    fn head_weights<'a>(&self, p: &HeadParams<'a>) -> (LayerNorm<'a>, View<'a>) {
        let d = self.n.hidden;
        let norm = LayerNorm { w: p.head.slice(0..d), b: p.head.slice(d..2 * d), eps: self.n.eps };
        let matrix = match p.embedding {
            Some(embedding) => embedding.slice(0..self.table()),
            None => p.head.slice(2 * d..2 * d + self.table()),
        };
        (norm, matrix)
    }

    /// Where the first `t` positions lie in the embedding unit.
    fn positions(&self, t: usize) -> std::ops::Range<usize> {
        self.table()..self.table() + t * self.n.hidden
    }
}

impl Model for Gpt2 {
    fn units(&self) -> Vec<Unit> {
        let (d, init) = (self.n.hidden, Init::Normal(self.n.std));
        let param =
            |name: &str, shape: &[usize], init| ParamSpec { name: name.into(), shape: shape.into(), init };
        let embedding = vec![
            param(EMBEDDING, &[self.n.vocab, d], init),
            param("transformer.wpe.weight", &[self.n.positions, d], init),
        ];
        let mut head = vec![
            param("transformer.ln_f.weight", &[d], Init::Ones),
            param("transformer.ln_f.bias", &[d], Init::Zeros),
        ];
        if !self.tied() {
            head.push(param(LM_HEAD, &[self.n.vocab, d], init));
        }
        let layer = |l: usize| {
            let unit = layer_unit(&self.n, l).0;
            match self.adapters.get(l) {
                Some(adapters) => adapters.extend(unit),
                None => unit,
            }
        };
        std::iter::once(Unit::new("embedding", embedding))
            .chain((0..self.n.layers).map(layer))
            .chain(std::iter::once(Unit::new("head", head)))
            .collect()
    }

    fn adapt(&mut self, lora: &Lora) -> Result<(), String> {
        self.adapters = layer::adapters(&self.n, lora)?;
        Ok(())
    }

    fn linears(&self) -> Vec<(usize, usize)> {
        let (d, f) = (self.n.hidden, self.n.intermediate);
        vec![(d, 3 * d), (d, d), (d, f), (f, d)]
    }

    fn multiply_in_fp8(&mut self) -> Result<(), String> {
        linear::check_fp8(&[("n_embd", self.n.hidden), ("n_inner", self.n.intermediate)])?;
        self.linear = Linear::Fp8;
        Ok(())
    }

    fn seed(&mut self, seed: u64) {
        self.dropout = Module::new(self.n.rates.embedding, seed, "transformer.drop");
        self.drops = (0..self.n.layers).map(|l| Drops::new(&self.n, l, seed)).collect();
    }

    fn train(&mut self, units: &[Unit]) {
        let layers = 1..units.len() - 1;
        self.wanted = units[layers].iter().map(|u| self.spans.wanted(u)).collect();
        self.head_wanted = match (units.first(), units.last()) {
            (Some(embedding), _) if self.tied() => embedding.has_trained_in(0..self.table()),
            (_, Some(head)) => head.has_trained_in(2 * self.n.hidden..head.len()),
            _ => true,
        };
    }

    fn hidden(&self) -> usize {
        self.n.hidden
    }

    fn vocab(&self) -> usize {
        self.n.vocab
    }

    fn attention_width(&self) -> usize {
        3 * self.n.hidden
    }

    fn tied(&self) -> bool {
        self.n.tied
    }

    fn heads(&self) -> [usize; 3] {
        [self.n.heads, self.n.heads, self.n.hidden / self.n.heads]
    }

    fn ties(&self) -> Vec<Tie> {
        let tie = Tie { alias: LM_HEAD.into(), target: EMBEDDING.into() };
        if self.tied() { vec![tie] } else { Vec::new() }
    }

    fn in_out(&self) -> bool {
        true
    }

    fn prefix(&self) -> Option<&'static str> {
        Some(PREFIX)
    }

    /// Older files hold the causal mask as `attn.bias` and what it puts in as `attn.masked_bias`.
    fn is_constant(&self, name: &str) -> bool {
        let of_layer = name.strip_prefix(PREFIX).unwrap_or(name).strip_prefix("h.");
        let rest = of_layer.and_then(|n| n.split_once('.')).map(|(_, rest)| rest);
        matches!(rest, Some("attn.bias" | "attn.masked_bias"))
    }

    fn hf_config(&self) -> &Map<String, Value> {
        &self.config
    }

    fn flops_per_token(&self, t: usize) -> f64 {
        let matrices = self.matrices as f64 * self.n.layers as f64 + self.table() as f64;
        6.0 * matrices + 6.0 * (t * self.n.layers * self.n.hidden) as f64
    }

    /// Mean and 1/deviation of the input · q k v · attention output · its log-sum-exp · residual stream after attention ·
    /// mean and 1/deviation of it · what GELU gets.
    fn saved_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let (m, d) = (b * t, self.n.hidden);
        vec![2 * m, m * 3 * d, m * d, b * self.n.heads * t, m * d, 2 * m, m * self.n.intermediate]
    }

    /// Normed rows · their gradient · GELU's output · gradient of its input · gradients of attention's output, q k v ·
    /// mean and 1/deviation of the head's input · what adapters need.
    fn scratch_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let (m, d, f) = (b * t, self.n.hidden, self.n.intermediate);
        let own = [m * d, m * d, m * f, m * f, m * d, m * 3 * d, 2 * m];
        own.into_iter().chain(lora::scratch_lengths(&self.adapters, m)).collect()
    }

    fn statistics(&self) -> Statistics {
        Statistics { saved: &[0, 3, 5], scratch: &[6, 7, 8, 9, 10, 11] }
    }

    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &Batch, mut x: ViewMut) {
        let (b, t, d) = (batch.b, batch.t, self.n.hidden);
        ops.embedding_forward(x.reborrow(), params.slice(0..self.table()), &batch.tokens, d);
        // The rows of all sequences, one after the other, get the same t·d numbers.
        ops.bias_forward(x.reborrow(), params.slice(self.positions(t)), b, t * d);
        self.dropout.apply(ops, batch, d, x);
    }

    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &Batch, mut dx: ViewMut) {
        let (b, t, d) = (batch.b, batch.t, self.n.hidden);
        self.dropout.apply(ops, batch, d, dx.reborrow());
        let (tokens, positions) = grads.split_at(self.table());
        ops.embedding_backward(tokens, dx.as_view(), &batch.tokens, d);
        ops.bias_backward(positions.slice(0..t * d), dx.as_view(), b, t * d);
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

    fn logits(&self, ops: &dyn Ops, params: HeadParams, x: View, out: ViewMut, scratch: &mut Activations) {
        let (d, v) = (self.n.hidden, self.n.vocab);
        let (norm, matrix) = self.head_weights(&params);
        let [row, _, _, _, _, _, stats] = each::<7>(scratch);
        let mut row = row.view_mut().slice(0..d);
        ops.layernorm_forward(row.reborrow(), stats.view_mut().slice(0..2), x, norm, 1);
        ops.logits(out, row.as_view(), matrix, 1, d, v);
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
        let (m, d, v) = (batch.rows(), self.n.hidden, self.n.vocab);
        let (norm, matrix) = self.head_weights(&params);
        let [rows, drows, _, _, _, _, stats] = each::<7>(scratch);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), x, norm, m);
        let Some(g) = grads else {
            return ops.classifier(loss, rows.view(), matrix, &batch.labels, m, d, v, None);
        };
        let (mut dnorm, rest) = g.head.split_at(2 * d);
        ops.clear(dnorm.reborrow());
        let dw = match g.embedding {
            Some(embedding) => {
                // Every buffer is overwritten, and the head knows nothing of positions.
                let (dw, positions) = embedding.split_at(self.table());
                ops.clear(positions);
                dw
            }
            None => rest,
        };
        // empty: not wanted
        let dw = if self.head_wanted { dw } else { dw.slice(0..0) };
        let out = ClassifierGrads { dx: drows.view_mut(), dw, dw_write: Write::Set, scale: g.scale };
        ops.classifier(loss, rows.view(), matrix, &batch.labels, m, d, v, Some(out));
        let (dw, db) = dnorm.split_at(d);
        ops.layernorm_backward(g.dx, dw, db, drows.view(), x, norm.w, stats.view(), m, Write::Set);
    }
}
