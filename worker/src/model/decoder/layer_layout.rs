//! [`DecoderLayerSpans`]: the layout of a decoder layer's tensors in the flat vector of its unit.
//!
//! The matrices of q, k and v are adjacent and computed as one matmul, and so are the matrices of
//! gate and up. The biases of such matrices are adjacent, too.
use super::DecoderConfig;
use crate::params::{ParamInit, ParamSpec, ParamUnit};
use std::ops::Range;

/// The ranges of a layer's tensors in the flat vector of the layer's unit, in elements. A tensor
/// that the model family does not have is `None`.
pub(super) struct DecoderLayerSpans {
    pub(super) input_norm: Range<usize>,
    pub(super) qkv: Range<usize>,
    pub(super) qkv_bias: Option<Range<usize>>,
    /// The weights of the norms of q and of k.
    pub(super) qk_norm: Option<[Range<usize>; 2]>,
    pub(super) o: Range<usize>,
    pub(super) o_bias: Option<Range<usize>>,
    /// The weight of the norm of the attention output before the residual addition.
    pub(super) attention_out_norm: Option<Range<usize>>,
    /// The weight of the norm before the MLP.
    pub(super) post_norm: Range<usize>,
    pub(super) gate_up: Range<usize>,
    pub(super) gate_up_bias: Option<Range<usize>>,
    pub(super) down: Range<usize>,
    pub(super) down_bias: Option<Range<usize>>,
    /// The weight of the norm of the MLP output before the residual addition.
    pub(super) mlp_out_norm: Option<Range<usize>>,
}

impl DecoderLayerSpans {
    /// Returns the ranges of norms and biases. Ops add to the gradients of these tensors, so the
    /// gradients must be cleared before the backward pass.
    pub(super) fn list_accumulated_spans(&self) -> impl Iterator<Item = Range<usize>> {
        let biases = [&self.qkv_bias, &self.o_bias, &self.gate_up_bias, &self.down_bias];
        let norms = self.qk_norm.iter().flatten().chain(&self.attention_out_norm).chain(&self.mlp_out_norm);
        let spans =
            [&self.input_norm, &self.post_norm].into_iter().chain(biases.into_iter().flatten()).chain(norms);
        spans.cloned()
    }
}

/// A builder that lays out the tensors of a layer one after another.
struct LayerLayoutBuilder {
    /// The prefix of the tensors' names, without a trailing dot.
    prefix: String,
    init_std: f32,
    norm_init: ParamInit,
    params: Vec<ParamSpec>,
    /// The number of elements of all tensors so far.
    len: usize,
}

impl LayerLayoutBuilder {
    /// Adds a tensor, and returns its range in the flat vector.
    fn add_tensor(&mut self, name: &str, shape: Vec<usize>, init: ParamInit) -> Range<usize> {
        let spec = ParamSpec { name: format!("{}.{name}", self.prefix), shape, init };
        let from = self.len;
        self.len += spec.len();
        self.params.push(spec);
        from..self.len
    }

    /// Adds the weight of a norm, and returns its range.
    fn add_norm(&mut self, name: &str, width: usize) -> Range<usize> {
        self.add_tensor(&format!("{name}.weight"), vec![width], self.norm_init)
    }

    /// Adds matrices with a common input of width `inputs`, and returns their common range.
    /// `modules` are name and output width of each matrix.
    fn add_matrices(&mut self, modules: &[(&str, usize)], inputs: usize) -> Range<usize> {
        let init = ParamInit::Normal(self.init_std);
        let from = self.len;
        for (name, outputs) in modules {
            self.add_tensor(&format!("{name}.weight"), vec![*outputs, inputs], init);
        }
        from..self.len
    }

    /// Adds the biases of matrices, and returns their common range. Returns `None` and adds nothing
    /// if `has_biases` is false.
    fn add_biases(&mut self, has_biases: bool, modules: &[(&str, usize)]) -> Option<Range<usize>> {
        let from = self.len;
        for (name, outputs) in modules.iter().filter(|_| has_biases) {
            self.add_tensor(&format!("{name}.bias"), vec![*outputs], ParamInit::Zeros);
        }
        has_biases.then_some(from..self.len)
    }
}

/// Builds the unit of a layer and its layout. The unit contains all tensors of the layer except
/// experts. If `layer_number` is `None`, builds the unit of layer 0 as a dense layer.
pub(super) fn build_layer_unit(
    config: &DecoderConfig,
    layer_number: Option<usize>,
) -> (ParamUnit, DecoderLayerSpans) {
    let layer = layer_number.unwrap_or(0);
    let prefix = format!("model.layers.{layer}");
    let mut t = LayerLayoutBuilder {
        prefix,
        init_std: config.init_std,
        norm_init: config.initial_norm_weights(),
        params: Vec::new(),
        len: 0,
    };
    let (d, f, hd) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (q, kv) = (config.heads * hd, config.kv_heads * hd);
    let input_norm = t.add_norm("input_layernorm", d);
    let qkv_modules = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
    let qkv = t.add_matrices(&qkv_modules, d);
    let qkv_bias = t.add_biases(config.has_qkv_bias, &qkv_modules);
    let qk_norm =
        config.has_qk_norm.then(|| ["self_attn.q_norm", "self_attn.k_norm"].map(|name| t.add_norm(name, hd)));
    let o_modules = [("self_attn.o_proj", d)];
    let o = t.add_matrices(&o_modules, q);
    let o_bias = t.add_biases(config.has_o_bias, &o_modules);
    let attention_out_norm = config.has_output_norms.then(|| t.add_norm("post_attention_layernorm", d));
    let before_mlp =
        if config.has_output_norms { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    let post_norm = t.add_norm(before_mlp, d);
    let moe = config.moe.as_ref().filter(|_| layer_number.is_some_and(|l| config.is_moe_layer(l)));
    // A layer with experts has a router here, and its experts in separate units.
    let (ups, downs) = ([("mlp.gate_proj", f), ("mlp.up_proj", f)], [("mlp.down_proj", d)]);
    let (ups, downs) = if moe.is_some() { (&ups[..0], &downs[..0]) } else { (&ups[..], &downs[..]) };
    if let Some(moe) = moe {
        t.add_matrices(&[(&format!("{}.gate", moe.names.block), moe.shape.experts)], d);
    }
    let gate_up = t.add_matrices(ups, d);
    let gate_up_bias = t.add_biases(config.has_mlp_bias, ups);
    let down = t.add_matrices(downs, f);
    let down_bias = t.add_biases(config.has_mlp_bias, downs);
    let mlp_out_norm = config.has_output_norms.then(|| t.add_norm("post_feedforward_layernorm", d));
    let spans = DecoderLayerSpans {
        input_norm,
        qkv,
        qkv_bias,
        qk_norm,
        o,
        o_bias,
        attention_out_norm,
        post_norm,
        gate_up,
        gate_up_bias,
        down,
        down_bias,
        mlp_out_norm,
    };
    (ParamUnit::new(format!("layer {layer}"), t.params), spans)
}
