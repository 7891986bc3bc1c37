//! A layer of GPT-2 (`GPT2Block` of transformers): its tensors, attention and MLP, each after a
//! LayerNorm.
use super::{Gpt2, Gpt2Config};
use crate::model::{
    ActivationBuffers, LayerInput,
    dropout::DropoutModule,
    error::Result,
    linear::MatmulShape,
    lora::{Adapters, FusedLinears, Lora, LoraScratch},
    split_buffers,
};
use crate::params::{ParamInit, ParamSpec, ParamUnit};
use device::{
    Ops, View, ViewMut,
    ops::{AttentionShape, LayerNormParams, WriteMode},
};
use std::ops::Range;

/// The ranges of the weight and bias of a norm or projection in the flat vector of the layer's
/// unit. The bias follows the weight.
#[derive(Clone)]
struct WeightBiasSpans {
    w: Range<usize>,
    b: Range<usize>,
}

/// The layout of a layer's tensors in the flat vector of its unit.
pub(super) struct LayerSpans {
    ln_1: WeightBiasSpans,
    c_attn: WeightBiasSpans,
    attn_proj: WeightBiasSpans,
    ln_2: WeightBiasSpans,
    c_fc: WeightBiasSpans,
    mlp_proj: WeightBiasSpans,
}

impl LayerSpans {
    /// The tensors whose gradients ops add to, so that they must be cleared first: norms and
    /// biases.
    pub(super) fn accumulated_spans(&self) -> impl Iterator<Item = Range<usize>> {
        let norms = [&self.ln_1, &self.ln_2];
        let modules = [&self.ln_1, &self.c_attn, &self.attn_proj, &self.ln_2, &self.c_fc, &self.mlp_proj];
        let weights = norms.into_iter().map(|p| p.w.clone());
        weights.chain(modules.into_iter().map(|p| p.b.clone())).collect::<Vec<_>>().into_iter()
    }

    /// The matrices whose gradients are needed, because `unit` marks a part of them as trained.
    pub(super) fn grad_mask(&self, unit: &ParamUnit) -> GradMask {
        let trained = |p: &WeightBiasSpans| unit.has_trained_in(p.w.clone());
        GradMask {
            c_attn: trained(&self.c_attn),
            attn_proj: trained(&self.attn_proj),
            c_fc: trained(&self.c_fc),
            mlp_proj: trained(&self.mlp_proj),
        }
    }
}

/// For each matrix of a layer whether its gradient is computed.
#[derive(Clone, Copy)]
pub(super) struct GradMask {
    c_attn: bool,
    attn_proj: bool,
    c_fc: bool,
    mlp_proj: bool,
}

impl GradMask {
    /// Every gradient is computed.
    pub(super) const ALL: Self = GradMask { c_attn: true, attn_proj: true, c_fc: true, mlp_proj: true };
}

/// The dropout modules of a layer.
pub(super) struct LayerDropout {
    attention: DropoutModule,
    attention_out: DropoutModule,
    mlp_out: DropoutModule,
}

impl LayerDropout {
    /// The modules of a layer, with their names in transformers.
    pub(super) fn new(config: &Gpt2Config, layer: usize, seed: u64) -> Self {
        let module =
            |rate, name| DropoutModule::new(rate, seed, &format!("{}h.{layer}.{name}", super::PREFIX));
        LayerDropout {
            attention: module(config.dropout_rates.attention, "attn.attn_dropout"),
            attention_out: module(config.dropout_rates.residual, "attn.resid_dropout"),
            mlp_out: module(config.dropout_rates.residual, "mlp.dropout"),
        }
    }
}

/// The unit of a layer, and its layout.
pub(super) fn layer_unit(config: &Gpt2Config, layer: usize) -> (ParamUnit, LayerSpans) {
    let (d, f) = (config.hidden_size, config.intermediate_size);
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
    let mut pair = |name: &str, shape: &[usize], init| WeightBiasSpans {
        w: add(&format!("{name}.weight"), shape, init),
        b: add(&format!("{name}.bias"), &shape[shape.len() - 1..], ParamInit::Zeros),
    };
    let matrix = ParamInit::Normal(config.init_std);
    // Branches of the residual stream start smaller with more layers, like in
    // `GPT2PreTrainedModel`.
    let projection = ParamInit::Normal(config.init_std / (2.0 * config.layers as f32).sqrt());
    let spans = LayerSpans {
        ln_1: pair("ln_1", &[d], ParamInit::Ones),
        c_attn: pair("attn.c_attn", &[d, 3 * d], matrix),
        attn_proj: pair("attn.c_proj", &[d, d], projection),
        ln_2: pair("ln_2", &[d], ParamInit::Ones),
        c_fc: pair("mlp.c_fc", &[d, f], matrix),
        mlp_proj: pair("mlp.c_proj", &[f, d], projection),
    };
    (ParamUnit::new(format!("layer {layer}"), params), spans)
}

/// The indices of the projections in [`Adapters`].
const C_ATTN: usize = 0;
const ATTN_PROJ: usize = 1;
const C_FC: usize = 2;
const MLP_PROJ: usize = 3;

/// Makes the adapters of every layer.
///
/// # Errors
/// [`crate::model::ModelError::LoraTargetUnknown`].
pub(super) fn layer_adapters(config: &Gpt2Config, lora: &Lora) -> Result<Vec<Adapters>> {
    let (d, f) = (config.hidden_size, config.intermediate_size);
    let modules = [[("attn.c_attn", 3 * d)], [("attn.c_proj", d)], [("mlp.c_fc", f)], [("mlp.c_proj", d)]];
    let fused_linears = |layer: usize| -> Vec<FusedLinears> {
        let prefix = format!("{}h.{layer}.", super::PREFIX);
        let fused = |(modules, inputs)| FusedLinears { prefix: prefix.clone(), inputs, modules };
        modules.iter().map(|m| &m[..]).zip([d, d, d, f]).map(fused).collect()
    };
    let layers: Vec<Vec<FusedLinears>> = (0..config.layers).map(fused_linears).collect();
    let names: Vec<String> = layers.iter().flatten().flat_map(FusedLinears::names).collect();
    lora.check_targets(names.iter().map(String::as_str), false)?;
    let adapters =
        |(l, fused): (usize, &Vec<FusedLinears>)| Adapters::new(lora, fused, layer_unit(config, l).0.len());
    Ok(layers.iter().enumerate().map(adapters).collect())
}

/// The gradients of a weight and its bias, which follows the weight in `g`.
fn split_weight_bias<'a>(g: &'a mut ViewMut, at: &WeightBiasSpans) -> (ViewMut<'a>, ViewMut<'a>) {
    g.slice_mut(at.w.start..at.b.end).split_at(at.w.len())
}

impl Gpt2 {
    /// Computes `y = x·w + b`.
    fn project(&self, ops: &dyn Ops, p: View, at: &WeightBiasSpans, y: ViewMut, x: View, shape: MatmulShape) {
        let (w, b) = (p.slice(at.w.clone()), p.slice(at.b.clone()));
        self.linear.conv1d_forward(ops, y, x, w, b, shape);
    }

    /// Computes `dx = dy · wᵀ`.
    fn project_backward(
        &self,
        ops: &dyn Ops,
        p: View,
        at: &WeightBiasSpans,
        dx: ViewMut,
        dy: View,
        shape: MatmulShape,
    ) {
        self.linear.conv1d_backward_input(ops, dx, dy, p.slice(at.w.clone()), shape);
    }

    /// Computes the gradient of the weight, if `is_needed`.
    fn weight_backward(
        &self,
        ops: &dyn Ops,
        at: &WeightBiasSpans,
        g: &mut ViewMut,
        (x, dy): (View, View),
        shape: MatmulShape,
        is_needed: bool,
    ) {
        if is_needed {
            self.linear.conv1d_backward_weight(ops, g.slice_mut(at.w.clone()), dy, x, shape);
        }
    }

    /// Adds the sum of the rows of `dy` to the gradient of the bias.
    fn bias_backward(
        &self,
        ops: &dyn Ops,
        at: &WeightBiasSpans,
        g: &mut ViewMut,
        dy: View,
        (m, _, out): MatmulShape,
    ) {
        ops.bias_backward(g.slice_mut(at.b.clone()), dy, m, out);
    }

    /// Adds the output of the adapter of a projection for input `x` to `y`.
    fn adapters_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        projection: usize,
        x: View,
        y: ViewMut,
        lora_scratch: &mut LoraScratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.forward(ops, projection, (input.params, input.batch), x, y, lora_scratch);
        }
    }

    /// Computes the gradients of the adapter of a projection, and adds the gradient of its input to
    /// `dx`.
    fn adapters_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        projection: usize,
        g: &mut ViewMut,
        xy: (View, View),
        dx: ViewMut,
        lora_scratch: &mut LoraScratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            let params_and_batch = (input.params, input.batch);
            adapters.backward_weight(ops, projection, params_and_batch, g, xy, lora_scratch);
            adapters.backward_input(ops, projection, params_and_batch, dx, lora_scratch);
        }
    }

    /// The parameters of a LayerNorm.
    fn norm<'a>(&self, p: View<'a>, at: &WeightBiasSpans) -> LayerNormParams<'a> {
        LayerNormParams { w: p.slice(at.w.clone()), b: p.slice(at.b.clone()), eps: self.config.norm_eps }
    }

    /// The shape, scale and dropout of the attention of a layer.
    fn attention_shape(&self, input: &LayerInput) -> AttentionShape {
        let head_dim = self.config.hidden_size / self.config.heads;
        let scale = if self.config.scales_scores { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
        let layer_divisor = if self.config.scales_by_layer_index { (input.layer + 1) as f64 } else { 1.0 };
        AttentionShape {
            scale: (scale / layer_divisor) as f32,
            dropout: self.layer_dropout[input.layer].attention.attention_dropout(input.batch),
            ..AttentionShape::new(
                input.batch.sequences,
                input.batch.seq_len,
                self.config.heads,
                self.config.heads,
                head_dim,
            )
        }
    }

    /// Computes attention. Its projected output is saved in the buffer of the residual stream, to
    /// which [`Gpt2::mlp_forward`] adds the layer's input.
    pub(super) fn attention_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m, d) = (input.params, &self.spans, input.batch.rows(), self.config.hidden_size);
        let [stats, qkv, o, lse, mid, ..] = split_buffers::<7>(saved);
        let [rows, _, _, _, _, _, _, lora_scratch @ ..] = split_buffers::<12>(scratch);
        let mut lora_scratch = LoraScratch::new(lora_scratch);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), input.x, self.norm(p, &s.ln_1), m);
        self.project(ops, p, &s.c_attn, qkv.view_mut(), rows.view(), (m, d, 3 * d));
        self.adapters_forward(ops, input, C_ATTN, rows.view(), qkv.view_mut(), &mut lora_scratch);
        let (starts, shape) = (&input.batch.starts, self.attention_shape(input));
        ops.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), starts, shape);
        self.project(ops, p, &s.attn_proj, mid.view_mut(), o.view(), (m, d, d));
        self.adapters_forward(ops, input, ATTN_PROJ, o.view(), mid.view_mut(), &mut lora_scratch);
        self.layer_dropout[input.layer].attention_out.apply(ops, input.batch, d, mid.view_mut());
    }

    /// Computes the gradients of attention. `dx` is the gradient of the residual stream after
    /// attention on entry, and of the layer's input on return.
    pub(super) fn attention_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m, d) = (input.params, &self.spans, input.batch.rows(), self.config.hidden_size);
        let grad_mask = self.grad_masks[input.layer];
        let [stats, qkv, o, lse, ..] = split_buffers::<7>(saved);
        let [rows, drows, _, _, d_o, dqkv, _, lora_scratch @ ..] = split_buffers::<12>(scratch);
        let mut lora_scratch = LoraScratch::new(lora_scratch);
        let dout =
            self.layer_dropout[input.layer].attention_out.backward(ops, input.batch, d, dx.as_view(), rows);
        self.bias_backward(ops, &s.attn_proj, g, dout, (m, d, d));
        let dout = self.linear.round_gradient(ops, dout, drows);
        self.weight_backward(ops, &s.attn_proj, g, (o.view(), dout), (m, d, d), grad_mask.attn_proj);
        self.project_backward(ops, p, &s.attn_proj, d_o.view_mut(), dout, (m, d, d));
        self.adapters_backward(ops, input, ATTN_PROJ, g, (o.view(), dout), d_o.view_mut(), &mut lora_scratch);
        let (starts, shape) = (&input.batch.starts, self.attention_shape(input));
        ops.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), starts, shape);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), input.x, self.norm(p, &s.ln_1), m);
        let shape = (m, d, 3 * d);
        let xy = (rows.view(), dqkv.view());
        self.bias_backward(ops, &s.c_attn, g, dqkv.view(), shape);
        self.weight_backward(ops, &s.c_attn, g, xy, shape, grad_mask.c_attn);
        self.project_backward(ops, p, &s.c_attn, drows.view_mut(), dqkv.view(), shape);
        self.adapters_backward(ops, input, C_ATTN, g, xy, drows.view_mut(), &mut lora_scratch);
        let (dw, db) = split_weight_bias(g, &s.ln_1);
        let w = p.slice(s.ln_1.w.clone());
        ops.layernorm_backward(dx, dw, db, drows.view(), input.x, w, stats.view(), m, WriteMode::Accumulate);
    }

    /// Adds the layer's input to the projected output of attention, and computes the MLP: writes
    /// the layer's output to `y`, if it is requested.
    pub(super) fn mlp_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m) = (input.params, &self.spans, input.batch.rows());
        let (d, f) = (self.config.hidden_size, self.config.intermediate_size);
        let [_, _, _, _, mid, stats, fc] = split_buffers::<7>(saved);
        let [rows, _, act, _, _, _, _, lora_scratch @ ..] = split_buffers::<12>(scratch);
        let mut lora_scratch = LoraScratch::new(lora_scratch);
        let norm = self.norm(p, &s.ln_2);
        ops.add_layernorm_forward(rows.view_mut(), stats.view_mut(), mid.view_mut(), input.x, norm, m);
        self.project(ops, p, &s.c_fc, fc.view_mut(), rows.view(), (m, d, f));
        self.adapters_forward(ops, input, C_FC, rows.view(), fc.view_mut(), &mut lora_scratch);
        let Some(mut y) = y else { return };
        ops.gelu_forward(act.view_mut(), fc.view());
        self.project(ops, p, &s.mlp_proj, y.reborrow(), act.view(), (m, f, d));
        self.adapters_forward(ops, input, MLP_PROJ, act.view(), y.reborrow(), &mut lora_scratch);
        self.layer_dropout[input.layer].mlp_out.apply(ops, input.batch, d, y.reborrow());
        ops.add(y, mid.view());
    }

    /// Computes the gradients of the MLP. `dx` is the gradient of the layer's output on entry, and
    /// of the residual stream after attention on return.
    pub(super) fn mlp_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m) = (input.params, &self.spans, input.batch.rows());
        let (d, f) = (self.config.hidden_size, self.config.intermediate_size);
        let [_, _, _, _, mid, stats, fc] = split_buffers::<7>(saved);
        let [rows, drows, act, dfc, _, _, _, lora_scratch @ ..] = split_buffers::<12>(scratch);
        let (grad_mask, mut lora_scratch) = (self.grad_masks[input.layer], LoraScratch::new(lora_scratch));
        let dout = self.layer_dropout[input.layer].mlp_out.backward(ops, input.batch, d, dx.as_view(), rows);
        self.bias_backward(ops, &s.mlp_proj, g, dout, (m, f, d));
        let dout = self.linear.round_gradient(ops, dout, drows);
        self.project_backward(ops, p, &s.mlp_proj, dfc.view_mut(), dout, (m, f, d));
        if self.adapters.get(input.layer).is_some() {
            ops.gelu_forward(act.view_mut(), fc.view());
            self.adapters_backward(
                ops,
                input,
                MLP_PROJ,
                g,
                (act.view(), dout),
                dfc.view_mut(),
                &mut lora_scratch,
            );
        }
        // Writes the output of GELU to `dfc` and the gradient of its input to `act`.
        ops.gelu_backward(act.view_mut(), dfc.view_mut(), fc.view());
        self.weight_backward(ops, &s.mlp_proj, g, (dfc.view(), dout), (m, f, d), grad_mask.mlp_proj);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), mid.view(), self.norm(p, &s.ln_2), m);
        let xy = (rows.view(), act.view());
        self.bias_backward(ops, &s.c_fc, g, act.view(), (m, d, f));
        self.weight_backward(ops, &s.c_fc, g, xy, (m, d, f), grad_mask.c_fc);
        self.project_backward(ops, p, &s.c_fc, drows.view_mut(), act.view(), (m, d, f));
        self.adapters_backward(ops, input, C_FC, g, xy, drows.view_mut(), &mut lora_scratch);
        let (dw, db) = split_weight_bias(g, &s.ln_2);
        let w = p.slice(s.ln_2.w.clone());
        ops.layernorm_backward(
            dx,
            dw,
            db,
            drows.view(),
            mid.view(),
            w,
            stats.view(),
            m,
            WriteMode::Accumulate,
        );
    }
}
