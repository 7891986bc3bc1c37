//! Llama: RMSNorm, rotary grouped-query attention, SwiGLU; tied or untied head. Each backward stands below its forward.
use super::{Activations, Batch, HeadGrads, HeadParams, LayerInput, Model, Tie};
use crate::params::{Init, ParamSpec, Unit};
use contract::job::ModelSpec;
use device::{
    Buf, Ops, View, ViewMut,
    ops::{AttentionShape, ClassifierGrads, Write},
};
use serde_json::json;
use std::ops::Range;

const EMBEDDING: &str = "model.embed_tokens.weight";
const LM_HEAD: &str = "lm_head.weight";

/// Tensors of a layer unit, in the order of its flat vector. q, k, v and gate, up are adjacent: each group is one matrix.
#[derive(Clone, Copy)]
enum P {
    InputNorm,
    Q,
    V = 3,
    O,
    PostNorm,
    Gate,
    Up,
    Down,
}

struct Llama {
    spec: ModelSpec,
    d: usize,
    f: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    eps: f32,
    /// `[max_position_embeddings, head_dim/2]`
    cos: Buf,
    sin: Buf,
    layer: Unit,
}

/// Checks the numbers and computes the rotary tables.
pub(super) fn build(spec: &ModelSpec) -> Result<Box<dyn Model>, String> {
    let positive = [
        ("vocab_size", spec.vocab_size),
        ("hidden_size", spec.hidden_size),
        ("intermediate_size", spec.intermediate_size),
        ("num_hidden_layers", spec.num_hidden_layers),
        ("num_attention_heads", spec.num_attention_heads),
        ("num_key_value_heads", spec.num_key_value_heads),
        ("head_dim", spec.head_dim),
        ("max_position_embeddings", spec.max_position_embeddings),
    ];
    if let Some((name, _)) = positive.iter().find(|(_, n)| *n == 0) {
        return Err(format!("{name} must be at least 1"));
    }
    if !spec.num_attention_heads.is_multiple_of(spec.num_key_value_heads) {
        return Err(format!(
            "num_key_value_heads {} does not divide num_attention_heads {}",
            spec.num_key_value_heads, spec.num_attention_heads
        ));
    }
    if !spec.head_dim.is_multiple_of(2) {
        return Err(format!("head_dim {} is odd; rotary embedding needs pairs", spec.head_dim));
    }
    let (cos, sin) = rotary_tables(spec);
    Ok(Box::new(Llama {
        d: spec.hidden_size as usize,
        f: spec.intermediate_size as usize,
        heads: spec.num_attention_heads as usize,
        kv_heads: spec.num_key_value_heads as usize,
        head_dim: spec.head_dim as usize,
        vocab: spec.vocab_size as usize,
        eps: spec.rms_norm_eps as f32,
        cos,
        sin,
        layer: layer_unit(spec, 0),
        spec: spec.clone(),
    }))
}

/// cos and sin of position · theta^(-2i/head_dim), in f32 as transformers computes the angle.
fn rotary_tables(spec: &ModelSpec) -> (Buf, Buf) {
    let (t, half) = (spec.max_position_embeddings as usize, spec.head_dim as usize / 2);
    let (mut cos, mut sin) = (Buf::zeroed(t * half), Buf::zeroed(t * half));
    for i in 0..half {
        let exponent = (2 * i) as f32 / spec.head_dim as f32;
        let inverse_frequency = 1.0 / (spec.rope_theta as f32).powf(exponent);
        for pos in 0..t {
            let angle = f64::from(pos as f32 * inverse_frequency);
            cos.host_mut()[pos * half + i] = angle.cos() as f32;
            sin.host_mut()[pos * half + i] = angle.sin() as f32;
        }
    }
    (cos, sin)
}

fn layer_unit(spec: &ModelSpec, layer: u32) -> Unit {
    let (d, f, hd) = (spec.hidden_size as usize, spec.intermediate_size as usize, spec.head_dim as usize);
    let (q, kv) = (spec.num_attention_heads as usize * hd, spec.num_key_value_heads as usize * hd);
    let matrix = |name: &str, out: usize, inp: usize| ParamSpec {
        name: format!("model.layers.{layer}.{name}.weight"),
        shape: vec![out, inp],
        init: Init::Normal(spec.initializer_range as f32),
    };
    let norm = |name: &str| ParamSpec {
        name: format!("model.layers.{layer}.{name}.weight"),
        shape: vec![d],
        init: Init::Ones,
    };
    let params = vec![
        norm("input_layernorm"),
        matrix("self_attn.q_proj", q, d),
        matrix("self_attn.k_proj", kv, d),
        matrix("self_attn.v_proj", kv, d),
        matrix("self_attn.o_proj", d, q),
        norm("post_attention_layernorm"),
        matrix("mlp.gate_proj", f, d),
        matrix("mlp.up_proj", f, d),
        matrix("mlp.down_proj", d, f),
    ];
    Unit::new(format!("layer {layer}"), params)
}

impl Llama {
    fn span(&self, first: P, last: P) -> Range<usize> {
        self.layer.span(first as usize, last as usize)
    }

    fn w<'a>(&self, params: View<'a>, p: P) -> View<'a> {
        params.slice(self.span(p, p))
    }

    fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn attention(&self, batch: &Batch) -> AttentionShape {
        AttentionShape {
            b: batch.b,
            t: batch.t,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// The rotary tables of the first `t` positions.
    fn rotary(&self, t: usize) -> (View<'_>, View<'_>) {
        let n = t * self.head_dim / 2;
        (self.cos.view().slice(0..n), self.sin.view().slice(0..n))
    }

    /// The head's matrix, wherever it lies, and the final norm's weight.
    fn head_weights<'a>(&self, p: &HeadParams<'a>) -> (View<'a>, View<'a>) {
        let norm = p.head.slice(0..self.d);
        let matrix = p.embedding.unwrap_or_else(|| p.head.slice(self.d..self.d + self.vocab * self.d));
        (matrix, norm)
    }

    /// The second half of a layer, backwards: `dx` becomes the gradient of the residual stream after attention.
    fn mlp_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut [f32],
        dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, m, d, f) = (input.params, input.batch.rows(), self.d, self.f);
        let [_, _, _, _, mid, rstd2, gate_up] = each(saved);
        let [norm, dnorm, act, dgate_up, _, _] = each(scratch);
        ops.swiglu_forward(act.view_mut(), gate_up.view(), m, f);
        ops.matmul_backward_weight(
            (&mut g[self.span(P::Down, P::Down)]).into(),
            dx.as_view(),
            act.view(),
            m,
            d,
            f,
            Write::Set,
        );
        ops.matmul_backward_input(act.view_mut(), dx.as_view(), self.w(p, P::Down), m, d, f, Write::Set);
        ops.swiglu_backward(dgate_up.view_mut(), act.view(), gate_up.view(), m, f);
        let (gate_up_range, w_post) = (self.span(P::Gate, P::Up), self.w(p, P::PostNorm));
        ops.rmsnorm_forward(norm.view_mut(), rstd2.view_mut(), mid.view(), w_post, m, d, self.eps);
        ops.matmul_backward_weight(
            (&mut g[gate_up_range.clone()]).into(),
            dgate_up.view(),
            norm.view(),
            m,
            2 * f,
            d,
            Write::Set,
        );
        ops.matmul_backward_input(
            dnorm.view_mut(),
            dgate_up.view(),
            p.slice(gate_up_range),
            m,
            2 * f,
            d,
            Write::Set,
        );
        let dw_post = (&mut g[self.span(P::PostNorm, P::PostNorm)]).into();
        ops.rmsnorm_backward(dx, dw_post, dnorm.view(), mid.view(), w_post, rstd2.view(), m, d, Write::Add);
    }

    /// The first half, backwards: `dx` becomes the gradient of the layer's input.
    fn attention_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut [f32],
        dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, batch, x) = (input.params, input.batch, input.x);
        let (m, d, o_width) = (batch.rows(), self.d, self.heads * self.head_dim);
        let [rstd1, qkv, o, lse, ..] = each::<7>(saved);
        let [norm, dnorm, _, _, d_o, dqkv] = each(scratch);
        let (cos, sin) = self.rotary(batch.t);
        ops.matmul_backward_weight(
            (&mut g[self.span(P::O, P::O)]).into(),
            dx.as_view(),
            o.view(),
            m,
            d,
            o_width,
            Write::Set,
        );
        ops.matmul_backward_input(d_o.view_mut(), dx.as_view(), self.w(p, P::O), m, d, o_width, Write::Set);
        let shape = self.attention(batch);
        ops.attention_backward(
            dqkv.view_mut(),
            d_o.view(),
            o.view(),
            lse.view(),
            qkv.view(),
            &batch.starts,
            shape,
        );
        let rotated = self.heads + self.kv_heads;
        ops.rope_backward(
            dqkv.view_mut(),
            cos,
            sin,
            batch.b,
            batch.t,
            rotated,
            self.head_dim,
            self.qkv_width(),
        );
        let (qkv_range, w_in) = (self.span(P::Q, P::V), self.w(p, P::InputNorm));
        ops.rmsnorm_forward(norm.view_mut(), rstd1.view_mut(), x, w_in, m, d, self.eps);
        ops.matmul_backward_weight(
            (&mut g[qkv_range.clone()]).into(),
            dqkv.view(),
            norm.view(),
            m,
            self.qkv_width(),
            d,
            Write::Set,
        );
        ops.matmul_backward_input(
            dnorm.view_mut(),
            dqkv.view(),
            p.slice(qkv_range),
            m,
            self.qkv_width(),
            d,
            Write::Set,
        );
        let dw_in = (&mut g[self.span(P::InputNorm, P::InputNorm)]).into();
        ops.rmsnorm_backward(dx, dw_in, dnorm.view(), x, w_in, rstd1.view(), m, d, Write::Add);
    }
}

impl Model for Llama {
    fn units(&self) -> Vec<Unit> {
        let std = self.spec.initializer_range as f32;
        let matrix = |name: &str| ParamSpec {
            name: name.into(),
            shape: vec![self.vocab, self.d],
            init: Init::Normal(std),
        };
        let mut head =
            vec![ParamSpec { name: "model.norm.weight".into(), shape: vec![self.d], init: Init::Ones }];
        if !self.tied() {
            head.push(matrix(LM_HEAD));
        }
        let layers = (0..self.spec.num_hidden_layers).map(|l| layer_unit(&self.spec, l));
        std::iter::once(Unit::new("embedding", vec![matrix(EMBEDDING)]))
            .chain(layers)
            .chain(std::iter::once(Unit::new("head", head)))
            .collect()
    }

    fn hidden(&self) -> usize {
        self.d
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn tied(&self) -> bool {
        self.spec.tie_word_embeddings
    }

    fn ties(&self) -> Vec<Tie> {
        let tie = Tie { alias: LM_HEAD.into(), target: EMBEDDING.into() };
        if self.tied() { vec![tie] } else { Vec::new() }
    }

    fn hf_config(&self, eod: u32) -> serde_json::Value {
        let s = &self.spec;
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": eod,
            "eos_token_id": eod,
            "head_dim": s.head_dim,
            "hidden_act": "silu",
            "hidden_size": s.hidden_size,
            "initializer_range": s.initializer_range,
            "intermediate_size": s.intermediate_size,
            "max_position_embeddings": s.max_position_embeddings,
            "mlp_bias": false,
            "num_attention_heads": s.num_attention_heads,
            "num_hidden_layers": s.num_hidden_layers,
            "num_key_value_heads": s.num_key_value_heads,
            "rms_norm_eps": s.rms_norm_eps,
            "rope_theta": s.rope_theta,
            "rope_scaling": null,
            "tie_word_embeddings": s.tie_word_embeddings,
            "use_cache": true,
            "vocab_size": s.vocab_size,
        })
    }

    fn flops_per_token(&self, t: usize) -> f64 {
        let layers = self.spec.num_hidden_layers as f64;
        let matrices = (self.layer.len() - 2 * self.d) as f64 * layers + (self.vocab * self.d) as f64;
        6.0 * matrices + 6.0 * layers * (self.heads * self.head_dim * t) as f64
    }

    /// 1/rms of the input · rotated q, k, and v · attention output · log-sum-exp of attention · residual stream after
    /// attention · 1/rms of it · gate and up.
    fn saved_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let m = b * t;
        let o = self.heads * self.head_dim;
        vec![m, m * self.qkv_width(), m * o, b * self.heads * t, m * self.d, m, m * 2 * self.f]
    }

    /// Normed rows · their gradient · SwiGLU's output · gradients of gate and up, attention output, q k v.
    fn scratch_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let m = b * t;
        let o = self.heads * self.head_dim;
        vec![m * self.d, m * self.d, m * self.f, m * 2 * self.f, m * o, m * self.qkv_width()]
    }

    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &Batch, x: ViewMut) {
        ops.embedding_forward(x, params, &batch.tokens, self.d);
    }

    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &Batch, dx: View) {
        ops.embedding_backward(grads, dx, &batch.tokens, self.d);
    }

    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, batch, x) = (input.params, input.batch, input.x);
        let (m, d, f, o_width) = (batch.rows(), self.d, self.f, self.heads * self.head_dim);
        let [rstd1, qkv, o, lse, mid, rstd2, gate_up] = each(saved);
        let [norm, _, act, ..] = each::<6>(scratch);
        let (cos, sin) = self.rotary(batch.t);

        ops.rmsnorm_forward(norm.view_mut(), rstd1.view_mut(), x, self.w(p, P::InputNorm), m, d, self.eps);
        let w_qkv = p.slice(self.span(P::Q, P::V));
        ops.matmul_forward(qkv.view_mut(), norm.view(), w_qkv, m, self.qkv_width(), d, Write::Set);
        let rotated = self.heads + self.kv_heads;
        ops.rope_forward(
            qkv.view_mut(),
            cos,
            sin,
            batch.b,
            batch.t,
            rotated,
            self.head_dim,
            self.qkv_width(),
        );
        ops.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &batch.starts, self.attention(batch));
        ops.matmul_forward(mid.view_mut(), o.view(), self.w(p, P::O), m, d, o_width, Write::Set);
        let w_post = self.w(p, P::PostNorm);
        ops.add_rmsnorm_forward(norm.view_mut(), rstd2.view_mut(), mid.view_mut(), x, w_post, m, d, self.eps);
        let w_gate_up = p.slice(self.span(P::Gate, P::Up));
        ops.matmul_forward(gate_up.view_mut(), norm.view(), w_gate_up, m, 2 * f, d, Write::Set);
        if let Some(mut y) = y {
            ops.swiglu_forward(act.view_mut(), gate_up.view(), m, f);
            ops.matmul_forward(y.reborrow(), act.view(), self.w(p, P::Down), m, d, f, Write::Set);
            ops.add(y, mid.view());
        }
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
        let g = grads.host();
        g[self.span(P::InputNorm, P::InputNorm)].fill(0.0);
        g[self.span(P::PostNorm, P::PostNorm)].fill(0.0);
        self.mlp_backward(ops, input, g, dx.reborrow(), saved, scratch);
        self.attention_backward(ops, input, g, dx, saved, scratch);
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
        let (m, d, v) = (batch.rows(), self.d, self.vocab);
        let (matrix, w_norm) = self.head_weights(&params);
        let [norm, dnorm, rstd, ..] = each::<6>(scratch);
        let mut rstd = rstd.view_mut().slice(0..m);
        ops.rmsnorm_forward(norm.view_mut(), rstd.reborrow(), x, w_norm, m, d, self.eps);
        let Some(g) = grads else {
            return ops.classifier(loss, norm.view(), matrix, &batch.labels, m, d, v, None);
        };
        let (mut dw_norm, rest) = g.head.split_at(d);
        dw_norm.reborrow().host().fill(0.0);
        let dw = g.embedding.unwrap_or(rest);
        let out = ClassifierGrads { dx: dnorm.view_mut(), dw, dw_write: Write::Set, scale: g.scale };
        ops.classifier(loss, norm.view(), matrix, &batch.labels, m, d, v, Some(out));
        ops.rmsnorm_backward(g.dx, dw_norm, dnorm.view(), x, w_norm, rstd.as_view(), m, d, Write::Set);
    }
}

/// All buffers of `a` at once, each exclusively.
fn each<const N: usize>(a: &mut Activations) -> [&mut Buf; N] {
    let mut it = a.0.iter_mut();
    std::array::from_fn(|_| it.next().expect("made from the lengths of this model"))
}
