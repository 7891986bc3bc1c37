//! The layers of GPT-2 (`GPT2Block` of transformers): layout, adapters and dropout of a layer, and
//! forward and backward pass of attention and MLP, each after a LayerNorm.
use super::{Gpt2Config, Gpt2Model};
use crate::model::{
    ActivationBuffers, LayerInput, borrow_first_buffers,
    dropout_module::DropoutModule,
    error::Result,
    linear_precision::MatmulSizes,
    lora::{FusedLinears, LayerAdapters, LoraConfig, LoraScratchBuffers},
};
use crate::params::{ParamInit, ParamSpec, ParamUnit};
use device::{
    Ops, View, ViewMut,
    ops::{AttentionShape, LayerNormParams, WriteMode},
};
use std::ops::Range;

/// The ranges of weight and bias of a norm or projection in the flat vector of the layer's unit.
/// The bias follows the weight.
#[derive(Clone)]
struct WeightBiasSpans {
    w: Range<usize>,
    b: Range<usize>,
}

/// The layout of a layer's tensors in the flat vector of its unit.
pub(super) struct Gpt2LayerSpans {
    ln_1: WeightBiasSpans,
    c_attn: WeightBiasSpans,
    attn_proj: WeightBiasSpans,
    ln_2: WeightBiasSpans,
    c_fc: WeightBiasSpans,
    mlp_proj: WeightBiasSpans,
}

impl Gpt2LayerSpans {
    /// Returns the ranges of norms and biases. Ops add to the gradients of these tensors, so the
    /// gradients must be cleared before the backward pass.
    pub(super) fn list_accumulated_spans(&self) -> impl Iterator<Item = Range<usize>> {
        let norms = [&self.ln_1, &self.ln_2];
        let modules = [&self.ln_1, &self.c_attn, &self.attn_proj, &self.ln_2, &self.c_fc, &self.mlp_proj];
        let weights = norms.into_iter().map(|p| p.w.clone());
        weights.chain(modules.into_iter().map(|p| p.b.clone())).collect::<Vec<_>>().into_iter()
    }

    /// Selects the matrices whose gradients are computed, because `unit` marks at least a part of
    /// the matrix as trained.
    pub(super) fn select_gradients(&self, unit: &ParamUnit) -> Gpt2GradMask {
        let trained = |p: &WeightBiasSpans| unit.has_trained_in(p.w.clone());
        Gpt2GradMask {
            c_attn: trained(&self.c_attn),
            attn_proj: trained(&self.attn_proj),
            c_fc: trained(&self.c_fc),
            mlp_proj: trained(&self.mlp_proj),
        }
    }
}

/// For each matrix of a layer, whether its gradient is computed.
#[derive(Clone, Copy)]
pub(super) struct Gpt2GradMask {
    c_attn: bool,
    attn_proj: bool,
    c_fc: bool,
    mlp_proj: bool,
}

impl Gpt2GradMask {
    /// The mask with which all gradients are computed.
    pub(super) const ALL: Self = Gpt2GradMask { c_attn: true, attn_proj: true, c_fc: true, mlp_proj: true };
}

/// The dropout modules of a layer.
pub(super) struct Gpt2LayerDropout {
    attention: DropoutModule,
    attention_out: DropoutModule,
    mlp_out: DropoutModule,
}

impl Gpt2LayerDropout {
    /// Creates the dropout modules of a layer, with their names in transformers.
    pub(super) fn new(config: &Gpt2Config, layer: usize, seed: u64) -> Self {
        let module = |rate, name| {
            DropoutModule::new(rate, seed, &format!("{}h.{layer}.{name}", super::STORED_NAME_PREFIX))
        };
        Gpt2LayerDropout {
            attention: module(config.dropout_rates.attention, "attn.attn_dropout"),
            attention_out: module(config.dropout_rates.residual, "attn.resid_dropout"),
            mlp_out: module(config.dropout_rates.residual, "mlp.dropout"),
        }
    }
}

/// Builds the parameter unit of a layer, and the ranges of its tensors in the unit's flat vector.
pub(super) fn build_layer_unit_and_spans(config: &Gpt2Config, layer: usize) -> (ParamUnit, Gpt2LayerSpans) {
    let (d, f) = (config.hidden_size, config.intermediate_size);
    let mut params: Vec<ParamSpec> = Vec::new();
    let mut at = 0;
    let mut add = |name: &str, shape: &[usize], init| {
        let name = format!("{}h.{layer}.{name}", super::STORED_NAME_PREFIX);
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
    // The more layers, the smaller are the initial weights of the output projections, as in
    // `GPT2PreTrainedModel`.
    let projection = ParamInit::Normal(config.init_std / (2.0 * config.layers as f32).sqrt());
    let spans = Gpt2LayerSpans {
        ln_1: pair("ln_1", &[d], ParamInit::Ones),
        c_attn: pair("attn.c_attn", &[d, 3 * d], matrix),
        attn_proj: pair("attn.c_proj", &[d, d], projection),
        ln_2: pair("ln_2", &[d], ParamInit::Ones),
        c_fc: pair("mlp.c_fc", &[d, f], matrix),
        mlp_proj: pair("mlp.c_proj", &[f, d], projection),
    };
    (ParamUnit::new(format!("layer {layer}"), params), spans)
}

/// The index of the adapters of q, k and v in [`LayerAdapters`].
const C_ATTN_ADAPTERS: usize = 0;
/// The index of the adapters of the attention's output projection in [`LayerAdapters`].
const ATTN_PROJ_ADAPTERS: usize = 1;
/// The index of the adapters of the MLP's input projection in [`LayerAdapters`].
const C_FC_ADAPTERS: usize = 2;
/// The index of the adapters of the MLP's output projection in [`LayerAdapters`].
const MLP_PROJ_ADAPTERS: usize = 3;

/// Creates the LoRA adapters of every layer.
///
/// # Errors
///
/// Fails with [`crate::model::ModelError::LoraTargetUnknown`] if a target matches no matrix.
pub(super) fn create_layer_adapters(config: &Gpt2Config, lora: &LoraConfig) -> Result<Vec<LayerAdapters>> {
    let (d, f) = (config.hidden_size, config.intermediate_size);
    let modules = [[("attn.c_attn", 3 * d)], [("attn.c_proj", d)], [("mlp.c_fc", f)], [("mlp.c_proj", d)]];
    let fused_linears = |layer: usize| -> Vec<FusedLinears> {
        let prefix = format!("{}h.{layer}.", super::STORED_NAME_PREFIX);
        let fused = |(modules, inputs)| FusedLinears { prefix: prefix.clone(), inputs, modules };
        modules.iter().map(|m| &m[..]).zip([d, d, d, f]).map(fused).collect()
    };
    let layers: Vec<Vec<FusedLinears>> = (0..config.layers).map(fused_linears).collect();
    let names: Vec<String> = layers.iter().flatten().flat_map(FusedLinears::matrix_names).collect();
    lora.validate_targets(names.iter().map(String::as_str), false)?;
    let adapters = |(l, fused): (usize, &Vec<FusedLinears>)| {
        LayerAdapters::new(lora, fused, build_layer_unit_and_spans(config, l).0.len())
    };
    Ok(layers.iter().enumerate().map(adapters).collect())
}

/// Returns the gradients of a weight and its bias from `g`, the gradient of the layer's unit.
fn slice_weight_and_bias_gradients<'a>(
    g: &'a mut ViewMut,
    at: &WeightBiasSpans,
) -> (ViewMut<'a>, ViewMut<'a>) {
    g.slice_mut(at.w.start..at.b.end).split_at(at.w.len())
}

impl Gpt2Model {
    /// Computes a projection, `y = x·w + b`. `p` are the parameters of the layer.
    fn project_forward(
        &self,
        ops: &dyn Ops,
        p: View,
        at: &WeightBiasSpans,
        y: ViewMut,
        x: View,
        shape: MatmulSizes,
    ) {
        let (w, b) = (p.slice(at.w.clone()), p.slice(at.b.clone()));
        self.linear.conv1d_forward(ops, y, x, w, b, shape);
    }

    /// Computes the gradient of a projection's input, `dx = dy · wᵀ`.
    fn project_backward_input(
        &self,
        ops: &dyn Ops,
        p: View,
        at: &WeightBiasSpans,
        dx: ViewMut,
        dy: View,
        shape: MatmulSizes,
    ) {
        self.linear.conv1d_backward_input(ops, dx, dy, p.slice(at.w.clone()), shape);
    }

    /// Computes the gradient of a projection's weight from input `x` and gradient `dy`, if
    /// `is_needed` is set. Overwrites the gradient in `g`.
    fn project_backward_weight(
        &self,
        ops: &dyn Ops,
        at: &WeightBiasSpans,
        g: &mut ViewMut,
        (x, dy): (View, View),
        shape: MatmulSizes,
        is_needed: bool,
    ) {
        if is_needed {
            self.linear.conv1d_backward_weight(ops, g.slice_mut(at.w.clone()), dy, x, shape);
        }
    }

    /// Adds the sum of the rows of `dy` to the gradient of a projection's bias.
    fn project_backward_bias(
        &self,
        ops: &dyn Ops,
        at: &WeightBiasSpans,
        g: &mut ViewMut,
        dy: View,
        (m, _, out): MatmulSizes,
    ) {
        ops.bias_backward(g.slice_mut(at.b.clone()), dy, m, out);
    }

    /// Adds the output of a projection's adapter to `y`, the output of the projection. `x` is the
    /// projection's input.
    fn adapters_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        projection: usize,
        x: View,
        y: ViewMut,
        lora_scratch: &mut LoraScratchBuffers,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.forward(ops, projection, (input.params, input.batch), x, y, lora_scratch);
        }
    }

    /// Computes the gradients of the adapter of a projection. `xy` is the projection's input and
    /// the gradient of its output. Writes the gradients of parameters to `g`, and adds the gradient
    /// of the input to `dx`.
    fn adapters_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        projection: usize,
        g: &mut ViewMut,
        xy: (View, View),
        dx: ViewMut,
        lora_scratch: &mut LoraScratchBuffers,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            let params_and_batch = (input.params, input.batch);
            adapters.backward_weight(ops, projection, params_and_batch, g, xy, lora_scratch);
            adapters.backward_input(ops, projection, params_and_batch, dx, lora_scratch);
        }
    }

    /// Returns the parameters of a LayerNorm from `p`, the parameters of the layer.
    fn layer_norm_params<'a>(&self, p: View<'a>, at: &WeightBiasSpans) -> LayerNormParams<'a> {
        LayerNormParams { w: p.slice(at.w.clone()), b: p.slice(at.b.clone()), eps: self.config.norm_eps }
    }

    /// Returns shape, scale and dropout of the attention of a layer.
    fn create_attention_shape(&self, input: &LayerInput) -> AttentionShape {
        let head_dim = self.config.hidden_size / self.config.heads;
        let scale = if self.config.scales_scores { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
        let layer_divisor = if self.config.scales_by_layer_index { (input.layer + 1) as f64 } else { 1.0 };
        AttentionShape {
            scale: (scale / layer_divisor) as f32,
            dropout: self.layer_dropout[input.layer].attention.create_attention_dropout(input.batch),
            ..AttentionShape::new(
                input.batch.sequences,
                input.batch.seq_len,
                self.config.heads,
                self.config.heads,
                head_dim,
            )
        }
    }

    /// Computes attention of a layer. Saves the projected output in the buffer of the residual
    /// stream. [`Gpt2Model::mlp_forward`] adds the layer's input to this buffer.
    pub(super) fn attention_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m, d) = (input.params, &self.spans, input.batch.rows(), self.config.hidden_size);
        let [stats, qkv, o, lse, mid, ..] = borrow_first_buffers::<7>(saved);
        let [rows, _, _, _, _, _, _, lora_scratch @ ..] = borrow_first_buffers::<12>(scratch);
        let mut lora_scratch = LoraScratchBuffers::new(lora_scratch);
        ops.layernorm_forward(
            rows.view_mut(),
            stats.view_mut(),
            input.x,
            self.layer_norm_params(p, &s.ln_1),
            m,
        );
        self.project_forward(ops, p, &s.c_attn, qkv.view_mut(), rows.view(), (m, d, 3 * d));
        self.adapters_forward(ops, input, C_ATTN_ADAPTERS, rows.view(), qkv.view_mut(), &mut lora_scratch);
        let (starts, shape) = (&input.batch.starts, self.create_attention_shape(input));
        ops.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), starts, shape);
        self.project_forward(ops, p, &s.attn_proj, mid.view_mut(), o.view(), (m, d, d));
        self.adapters_forward(ops, input, ATTN_PROJ_ADAPTERS, o.view(), mid.view_mut(), &mut lora_scratch);
        self.layer_dropout[input.layer].attention_out.apply_dropout(ops, input.batch, d, mid.view_mut());
    }

    /// Computes the gradients of attention. Writes the parameter gradients to `g`, the gradient of
    /// the layer's unit. `dx` is the gradient of the residual stream after attention on entry, and
    /// of the layer's input on return.
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
        let [stats, qkv, o, lse, ..] = borrow_first_buffers::<7>(saved);
        let [rows, drows, _, _, d_o, dqkv, _, lora_scratch @ ..] = borrow_first_buffers::<12>(scratch);
        let mut lora_scratch = LoraScratchBuffers::new(lora_scratch);
        let dout = self.layer_dropout[input.layer].attention_out.dropout_backward(
            ops,
            input.batch,
            d,
            dx.as_view(),
            rows,
        );
        self.project_backward_bias(ops, &s.attn_proj, g, dout, (m, d, d));
        let dout = self.linear.round_gradient(ops, dout, drows);
        self.project_backward_weight(ops, &s.attn_proj, g, (o.view(), dout), (m, d, d), grad_mask.attn_proj);
        self.project_backward_input(ops, p, &s.attn_proj, d_o.view_mut(), dout, (m, d, d));
        self.adapters_backward(
            ops,
            input,
            ATTN_PROJ_ADAPTERS,
            g,
            (o.view(), dout),
            d_o.view_mut(),
            &mut lora_scratch,
        );
        let (starts, shape) = (&input.batch.starts, self.create_attention_shape(input));
        ops.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), starts, shape);
        ops.layernorm_forward(
            rows.view_mut(),
            stats.view_mut(),
            input.x,
            self.layer_norm_params(p, &s.ln_1),
            m,
        );
        let shape = (m, d, 3 * d);
        let xy = (rows.view(), dqkv.view());
        self.project_backward_bias(ops, &s.c_attn, g, dqkv.view(), shape);
        self.project_backward_weight(ops, &s.c_attn, g, xy, shape, grad_mask.c_attn);
        self.project_backward_input(ops, p, &s.c_attn, drows.view_mut(), dqkv.view(), shape);
        self.adapters_backward(ops, input, C_ATTN_ADAPTERS, g, xy, drows.view_mut(), &mut lora_scratch);
        let (dw, db) = slice_weight_and_bias_gradients(g, &s.ln_1);
        let w = p.slice(s.ln_1.w.clone());
        ops.layernorm_backward(dx, dw, db, drows.view(), input.x, w, stats.view(), m, WriteMode::Accumulate);
    }

    /// Adds the layer's input to the projected output of attention, and computes the MLP. Writes
    /// the layer's output to `y`. If `y` is `None`, computes only the saved values.
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
        let [_, _, _, _, mid, stats, fc] = borrow_first_buffers::<7>(saved);
        let [rows, _, act, _, _, _, _, lora_scratch @ ..] = borrow_first_buffers::<12>(scratch);
        let mut lora_scratch = LoraScratchBuffers::new(lora_scratch);
        let norm = self.layer_norm_params(p, &s.ln_2);
        ops.add_layernorm_forward(rows.view_mut(), stats.view_mut(), mid.view_mut(), input.x, norm, m);
        self.project_forward(ops, p, &s.c_fc, fc.view_mut(), rows.view(), (m, d, f));
        self.adapters_forward(ops, input, C_FC_ADAPTERS, rows.view(), fc.view_mut(), &mut lora_scratch);
        let Some(mut y) = y else { return };
        ops.gelu_forward(act.view_mut(), fc.view());
        self.project_forward(ops, p, &s.mlp_proj, y.reborrow(), act.view(), (m, f, d));
        self.adapters_forward(ops, input, MLP_PROJ_ADAPTERS, act.view(), y.reborrow(), &mut lora_scratch);
        self.layer_dropout[input.layer].mlp_out.apply_dropout(ops, input.batch, d, y.reborrow());
        ops.add(y, mid.view());
    }

    /// Computes the gradients of the MLP. Writes the parameter gradients to `g`, the gradient of
    /// the layer's unit. `dx` is the gradient of the layer's output on entry, and of the residual
    /// stream after attention on return.
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
        let [_, _, _, _, mid, stats, fc] = borrow_first_buffers::<7>(saved);
        let [rows, drows, act, dfc, _, _, _, lora_scratch @ ..] = borrow_first_buffers::<12>(scratch);
        let (grad_mask, mut lora_scratch) =
            (self.grad_masks[input.layer], LoraScratchBuffers::new(lora_scratch));
        let dout =
            self.layer_dropout[input.layer].mlp_out.dropout_backward(ops, input.batch, d, dx.as_view(), rows);
        self.project_backward_bias(ops, &s.mlp_proj, g, dout, (m, f, d));
        let dout = self.linear.round_gradient(ops, dout, drows);
        self.project_backward_input(ops, p, &s.mlp_proj, dfc.view_mut(), dout, (m, f, d));
        if self.adapters.get(input.layer).is_some() {
            ops.gelu_forward(act.view_mut(), fc.view());
            self.adapters_backward(
                ops,
                input,
                MLP_PROJ_ADAPTERS,
                g,
                (act.view(), dout),
                dfc.view_mut(),
                &mut lora_scratch,
            );
        }
        // Writes the output of GELU to `dfc` and the gradient of its input to `act`.
        ops.gelu_backward(act.view_mut(), dfc.view_mut(), fc.view());
        self.project_backward_weight(ops, &s.mlp_proj, g, (dfc.view(), dout), (m, f, d), grad_mask.mlp_proj);
        ops.layernorm_forward(
            rows.view_mut(),
            stats.view_mut(),
            mid.view(),
            self.layer_norm_params(p, &s.ln_2),
            m,
        );
        let xy = (rows.view(), act.view());
        self.project_backward_bias(ops, &s.c_fc, g, act.view(), (m, d, f));
        self.project_backward_weight(ops, &s.c_fc, g, xy, (m, d, f), grad_mask.c_fc);
        self.project_backward_input(ops, p, &s.c_fc, drows.view_mut(), act.view(), (m, d, f));
        self.adapters_backward(ops, input, C_FC_ADAPTERS, g, xy, drows.view_mut(), &mut lora_scratch);
        let (dw, db) = slice_weight_and_bias_gradients(g, &s.ln_2);
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
