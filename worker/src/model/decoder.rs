//! [`DecoderModel`]: the decoder-only transformer of all families except GPT-2, with RMSNorm,
//! rotary embedding, grouped-query attention, and SwiGLU, GeGLU or experts.
//!
//! [`DecoderConfig`] has the options in which families differ.
mod attention;
mod decoder_config;
mod layer_adapters;
mod layer_layout;
mod mlp;
mod moe_block;
mod norms;
mod projection;

use super::dropout_module::DropoutModule;
use super::error::{ModelError, Result};
use super::linear_precision::{self, LinearPrecision};
use super::lora::{self, LayerAdapters, LoraConfig};
use super::moe::{MoeModel, select_router_loss_coefficients};
use super::rotary_embedding::RopeTables;
use super::{
    ActivationBuffers, F32BufferIndices, HeadGrads, HeadParams, LayerInput, MicroBatch, Model, TiedWeight,
    borrow_first_buffers,
};
use crate::params::{ParamInit, ParamSpec, ParamUnit};
use contract::job::ExpertsSpec;
pub(super) use decoder_config::{ATTENTION_DROPOUT, DecoderConfig, build_decoder_hf_config};
use device::{
    Ops, View, ViewMut,
    ops::{ClassifierGrads, WriteMode},
};
use layer_layout::{DecoderLayerSpans, build_layer_unit};
pub(super) use moe_block::ExpertTensorNames;
use serde_json::{Map, Value};

/// The stored name of the embedding matrix.
const EMBEDDING_NAME: &str = "model.embed_tokens.weight";
/// The stored name of the head's matrix, which is not stored if it is tied to the embedding.
const LM_HEAD_NAME: &str = "lm_head.weight";

/// A decoder-only transformer with its config.
pub(super) struct DecoderModel {
    config: DecoderConfig,
    /// The config.json from which `config` was read.
    hf_config: Map<String, Value>,
    /// The rotary embedding of layers with full attention.
    rope_tables: RopeTables,
    /// The rotary embedding of sliding-window layers; `None` if it equals `rope_tables`.
    sliding_rope_tables: Option<RopeTables>,
    /// The layout of a dense layer. A layer with experts has an equal layout up to the norm before
    /// its router.
    spans: DecoderLayerSpans,
    /// The number of matrix elements of all layers by which one token is multiplied, for counting
    /// floating-point operations.
    matrix_elements: usize,
    /// For each layer, the matrices whose gradients are computed.
    grad_masks: Vec<DecoderGradMask>,
    /// Whether the gradient of the head's matrix is computed.
    needs_head_grad: bool,
    /// The LoRA adapters of each layer; empty without LoRA.
    adapters: Vec<LayerAdapters>,
    /// The dropout of attention probabilities of each layer.
    dropout: Vec<DropoutModule>,
    /// The precision of the layers' matmuls.
    linear: LinearPrecision,
}

/// For each matrix of a layer, whether its gradient is computed, because a part of the matrix is
/// trained.
#[derive(Clone, Copy)]
pub(super) struct DecoderGradMask {
    pub(super) qkv: bool,
    pub(super) o: bool,
    pub(super) gate_up: bool,
    pub(super) down: bool,
    pub(super) router: bool,
}

/// Builds a decoder for sequences of at most `tokens` tokens. `hf_config` is the config.json from
/// which `config` was read.
pub(super) fn build_decoder(
    config: DecoderConfig,
    hf_config: &Map<String, Value>,
    tokens: usize,
) -> Box<dyn Model> {
    let rope_tables = RopeTables::new(&config.rope, tokens, config.head_dim);
    let sliding_rope_tables = config.sliding_rope.map(|rope| RopeTables::new(&rope, tokens, config.head_dim));
    let spans = build_layer_unit(&config, None).1;
    let active_expert_elements = |l: usize| match &config.moe {
        Some(moe) if config.is_moe_layer(l) => moe.shape.per_token * moe.shape.expert_len(),
        _ => 0,
    };
    let layer_matrix_elements = |l: usize| -> usize {
        let params = build_layer_unit(&config, Some(l)).0.params;
        let dense = params.iter().filter(|p| p.shape.len() == 2).map(ParamSpec::len).sum::<usize>();
        active_expert_elements(l) + dense
    };
    let matrix_elements = (0..config.layers).map(layer_matrix_elements).sum();
    let full_mask = DecoderGradMask { qkv: true, o: true, gate_up: true, down: true, router: true };
    let mut model = DecoderModel {
        grad_masks: vec![full_mask; config.layers],
        config,
        hf_config: hf_config.clone(),
        rope_tables,
        sliding_rope_tables,
        spans,
        matrix_elements,
        needs_head_grad: true,
        adapters: Vec::new(),
        dropout: Vec::new(),
        linear: LinearPrecision::default(),
    };
    model.set_dropout_seed(0);
    Box::new(model)
}

impl DecoderModel {
    /// Returns the width of the concatenated outputs of the attention heads.
    fn attention_width(&self) -> usize {
        self.config.heads * self.config.head_dim
    }

    /// Returns the head's matrix, `[vocab, hidden]`, and the weight of the final norm. The matrix
    /// is the embedding if head and embedding are tied.
    fn select_head_weights<'a>(&self, p: &HeadParams<'a>) -> (View<'a>, View<'a>) {
        let d = self.config.hidden_size;
        let norm = p.head.slice(0..d);
        let matrix = p.embedding.unwrap_or_else(|| p.head.slice(d..d + self.config.vocab_size * d));
        (matrix, norm)
    }
}

impl Model for DecoderModel {
    fn param_units(&self) -> Vec<ParamUnit> {
        let matrix = |name: &str| ParamSpec {
            name: name.into(),
            shape: vec![self.config.vocab_size, self.config.hidden_size],
            init: ParamInit::Normal(self.config.init_std),
        };
        let mut head = vec![ParamSpec {
            name: "model.norm.weight".into(),
            shape: vec![self.config.hidden_size],
            init: self.config.initial_norm_weights(),
        }];
        if !self.has_tied_embeddings() {
            head.push(matrix(LM_HEAD_NAME));
        }
        let layers = (0..self.config.layers)
            .map(|l| self.append_adapter_params(l, build_layer_unit(&self.config, Some(l)).0));
        std::iter::once(ParamUnit::new("embedding", vec![matrix(EMBEDDING_NAME)]))
            .chain(layers)
            .chain(std::iter::once(ParamUnit::new("head", head)))
            .collect()
    }

    fn add_lora_adapters(&mut self, lora: &LoraConfig) -> Result<()> {
        self.add_adapters(lora)
    }

    fn linear_shapes(&self) -> Vec<(usize, usize)> {
        let (d, f) = (self.config.hidden_size, self.config.dense_mlp_width());
        vec![(d, self.qkv_width()), (self.attention_width(), d), (d, 2 * f), (f, d)]
    }

    fn enable_fp8(&mut self) -> Result<()> {
        if self.config.moe.is_some() {
            return Err(ModelError::Fp8MoeUnsupported);
        }
        linear_precision::check_fp8_sizes(&[
            ("hidden_size", self.config.hidden_size),
            ("intermediate_size", self.config.intermediate_size),
            ("num_attention_heads * head_dim", self.attention_width()),
            ("(num_attention_heads + 2 * num_key_value_heads) * head_dim", self.qkv_width()),
        ])?;
        self.linear = LinearPrecision::Fp8;
        Ok(())
    }

    fn set_dropout_seed(&mut self, seed: u64) {
        let module = |l| {
            DropoutModule::new(
                self.config.attention_dropout,
                seed,
                &format!("model.layers.{l}.self_attn.dropout"),
            )
        };
        self.dropout = (0..self.config.layers).map(module).collect();
    }

    fn set_trained_params(&mut self, units: &[ParamUnit]) {
        let s = &self.spans;
        let grad_mask = |(l, u): (usize, &ParamUnit)| {
            let is_moe = self.config.is_moe_layer(l);
            DecoderGradMask {
                qkv: u.has_trained_in(s.qkv.clone()),
                o: u.has_trained_in(s.o.clone()),
                gate_up: !is_moe && u.has_trained_in(s.gate_up.clone()),
                down: !is_moe && u.has_trained_in(s.down.clone()),
                router: is_moe && u.has_trained_in(self.router_span()),
            }
        };
        let layers = 1..units.len() - 1;
        self.grad_masks = units[layers].iter().enumerate().map(grad_mask).collect();
        let matrix = if self.has_tied_embeddings() { units.first() } else { units.last() };
        self.needs_head_grad = matrix.is_some_and(|u| u.is_trained(u.params.len() - 1));
    }

    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn has_tied_embeddings(&self) -> bool {
        self.config.ties_embeddings
    }

    fn qkv_width(&self) -> usize {
        (self.config.heads + 2 * self.config.kv_heads) * self.config.head_dim
    }

    fn attention_dims(&self) -> [usize; 3] {
        [self.config.heads, self.config.kv_heads, self.config.head_dim]
    }

    fn sliding_window(&self) -> Option<usize> {
        self.config.sliding_window.filter(|_| self.config.sliding_layers.contains(&true))
    }

    fn tied_weights(&self) -> Vec<TiedWeight> {
        let tie = TiedWeight { alias: LM_HEAD_NAME.into(), target: EMBEDDING_NAME.into() };
        if self.has_tied_embeddings() { vec![tie] } else { Vec::new() }
    }

    fn hf_config(&self) -> &Map<String, Value> {
        &self.hf_config
    }

    fn compute_flops_per_token(&self, t: usize) -> f64 {
        let matrix_elements =
            self.matrix_elements as f64 + (self.config.vocab_size * self.config.hidden_size) as f64;
        let whole = t as f64;
        // Twice the mean number of keys that a token attends to.
        let keys = |is_sliding: &bool| match self.config.sliding_window {
            Some(w) if *is_sliding && w < t => 2.0 * w as f64 - (w * w) as f64 / whole,
            _ => whole,
        };
        let keys: f64 = self.config.sliding_layers.iter().map(keys).sum();
        6.0 * matrix_elements + 6.0 * keys * self.attention_width() as f64
    }

    /// Returns the lengths of these buffers, by index. `qkv` is the width of q, k and v together,
    /// and `o` is the width of the attention output:
    /// 0. 1/rms of the layer's input, `[rows]`
    /// 1. q and k after rotation, and v, `[rows, qkv]`
    /// 2. attention output, `[rows, o]`
    /// 3. log-sum-exp of attention scores, `[b, heads, t]`
    /// 4. residual stream after attention, `[rows, hidden]`
    /// 5. 1/rms of buffer 4, `[rows]`
    /// 6. gate and up, `[rows, 2·intermediate]`
    /// 7. q and k before their norms, `[rows, (heads + kv_heads)·head_dim]`
    /// 8. 1/rms of each head of buffer 7, `[rows, heads + kv_heads]`
    /// 9. projected attention output before its norm, `[rows, hidden]`
    /// 10. 1/rms of buffer 9, `[rows]`
    /// 11. MLP output before its norm, `[rows, hidden]`
    /// 12. 1/rms of buffer 11, `[rows]`
    ///
    /// Buffers of absent norms are empty.
    fn saved_buffer_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let m = b * t;
        let output_norm_rows = if self.config.has_output_norms { m } else { 0 };
        let heads = if self.config.has_qk_norm { self.config.heads + self.config.kv_heads } else { 0 };
        vec![
            m,
            m * self.qkv_width(),
            m * self.attention_width(),
            b * self.config.heads * t,
            m * self.config.hidden_size,
            m,
            m * 2 * self.config.dense_mlp_width(),
            m * heads * self.config.head_dim,
            m * heads,
            output_norm_rows * self.config.hidden_size,
            output_norm_rows,
            output_norm_rows * self.config.hidden_size,
            output_norm_rows,
        ]
    }

    /// Returns the lengths of these buffers, by index:
    /// 0. normalized rows, `[rows, hidden]`
    /// 1. gradient of buffer 0
    /// 2. output of the MLP's gate, `[rows, intermediate]`
    /// 3. gradients of gate and up, `[rows, 2·intermediate]`
    /// 4. gradient of the attention output
    /// 5. gradients of q, k and v
    /// 6. factors of a norm, `[hidden]` or `[head_dim]`
    /// 7. the router's logits, `[rows, experts]`
    /// 8. 1/rms of the head's input, `[rows]`
    ///
    /// The buffers of [`lora::LoraScratchBuffers`] follow.
    fn scratch_buffer_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let (m, d, f) = (b * t, self.config.hidden_size, self.config.dense_mlp_width());
        let factors = if self.config.norms_add_one { d.max(self.config.head_dim) } else { 0 };
        let logits = m * self.config.moe.as_ref().map_or(0, |moe| moe.shape.experts);
        let (o, qkv) = (m * self.attention_width(), m * self.qkv_width());
        let lengths = [m * d, m * d, m * f, m * 2 * f, o, qkv, factors, logits, m];
        lengths.into_iter().chain(lora::lora_scratch_lengths(&self.adapters, m)).collect()
    }

    fn f32_buffer_indices(&self) -> F32BufferIndices {
        F32BufferIndices { saved: &[0, 3, 5, 8, 10, 12], scratch: &[6, 7, 8, 9, 10, 11, 12, 13] }
    }

    fn as_moe_model(&self) -> Option<&dyn MoeModel> {
        self.config.moe.as_ref().map(|_| self as &dyn MoeModel)
    }

    fn move_to_device(&mut self, ops: &dyn Ops) {
        self.rope_tables.move_to_device(ops);
        if let Some(tables) = &mut self.sliding_rope_tables {
            tables.move_to_device(ops);
        }
    }

    fn set_router_losses(&mut self, spec: &ExpertsSpec) {
        if let Some(moe) = &mut self.config.moe {
            moe.losses = select_router_loss_coefficients(spec, moe.losses.aux);
        }
    }

    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &MicroBatch, mut x: ViewMut) {
        ops.embedding_forward(x.reborrow(), params, &batch.tokens, self.config.hidden_size);
        if let Some(scale) = self.config.embedding_scale {
            ops.scale(x, scale);
        }
    }

    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &MicroBatch, mut dx: ViewMut) {
        if let Some(scale) = self.config.embedding_scale {
            ops.scale(dx.reborrow(), scale);
        }
        if let Some(padding) = self.config.padding_token {
            let (d, mut end) = (self.config.hidden_size, 0);
            for run in batch.tokens.chunk_by(|a, b| (*a == padding) == (*b == padding)) {
                end += run.len();
                if run[0] == padding {
                    ops.clear(dx.slice_mut((end - run.len()) * d..end * d));
                }
            }
        }
        ops.embedding_backward(grads, dx.as_view(), &batch.tokens, self.config.hidden_size);
    }

    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
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
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let mut g = grads;
        for span in self.spans.list_accumulated_spans() {
            ops.clear(g.slice_mut(span));
        }
        self.mlp_backward(ops, input, &mut g, dx.reborrow(), saved, scratch);
        self.attention_backward(ops, input, &mut g, dx, saved, scratch);
    }

    fn compute_logits(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        x: View,
        mut out: ViewMut,
        scratch: &mut ActivationBuffers,
    ) {
        let (d, v) = (self.config.hidden_size, self.config.vocab_size);
        let (matrix, w_norm) = self.select_head_weights(&params);
        let [norm, _, _, _, _, _, norm_buffer, _, rstd, ..] = borrow_first_buffers::<14>(scratch);
        let (mut norm, w_norm) =
            (norm.view_mut().slice(0..d), self.compute_norm_factors(ops, w_norm, norm_buffer));
        ops.rmsnorm_forward(
            norm.reborrow(),
            rstd.view_mut().slice(0..1),
            x,
            w_norm,
            1,
            d,
            self.config.norm_eps,
        );
        ops.compute_logits(out.reborrow(), norm.as_view(), matrix, 1, d, v);
        if let Some(cap) = self.config.logit_softcap {
            ops.softcap(out, cap);
        }
    }

    fn compute_head_loss(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &MicroBatch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut ActivationBuffers,
    ) {
        let (m, d, v, eps) =
            (batch.rows(), self.config.hidden_size, self.config.vocab_size, self.config.norm_eps);
        let (matrix, w_norm) = self.select_head_weights(&params);
        let [norm, dnorm, _, _, _, _, norm_buffer, _, rstd, ..] = borrow_first_buffers::<14>(scratch);
        let (w_norm, cap) = (self.compute_norm_factors(ops, w_norm, norm_buffer), self.config.logit_softcap);
        ops.rmsnorm_forward(norm.view_mut(), rstd.view_mut(), x, w_norm, m, d, eps);
        let Some(g) = grads else {
            return ops.compute_softcapped_classifier_loss(
                loss,
                norm.view(),
                matrix,
                &batch.labels,
                m,
                d,
                v,
                cap,
                None,
            );
        };
        let (mut dw_norm, rest) = g.head.split_at(d);
        ops.clear(dw_norm.reborrow());
        let dw = g.embedding.unwrap_or(rest);
        // The op skips an empty gradient.
        let dw = if self.needs_head_grad { dw } else { dw.slice(0..0) };
        let out =
            ClassifierGrads { dx: dnorm.view_mut(), dw, dw_write: WriteMode::Overwrite, scale: g.scale };
        ops.compute_softcapped_classifier_loss(
            loss,
            norm.view(),
            matrix,
            &batch.labels,
            m,
            d,
            v,
            cap,
            Some(out),
        );
        ops.rmsnorm_backward(g.dx, dw_norm, dnorm.view(), x, w_norm, rstd.view(), m, d, WriteMode::Overwrite);
    }
}
