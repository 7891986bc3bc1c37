//! [`DecoderLayerSpans`]: the layout of a decoder layer's tensors in the flat vector of its unit.
//!
//! The matrices of q, k and v are adjacent and computed as one matmul, and so are the matrices of
//! gate and up. The biases of such matrices are adjacent, too.
use super::decoder_config::{DecoderConfig, QkNorm};
use crate::{
    model::linear_layout::LinearLayout,
    params::{ParamInit, ParamSpec, ParamUnit},
};
use std::ops::Range;

/// The ranges of a layer's tensors in the flat vector of the layer's unit, in elements. A tensor
/// that the model family does not have is `None`.
pub(super) struct DecoderLayerSpans {
    /// The weight of the norm before attention.
    pub(super) attention_in_norm: Option<Range<usize>>,
    /// The projections of q, k and v.
    pub(super) qkv: LinearLayout,
    /// The weights of the norms of q and of k.
    pub(super) qk_norm: Option<[Range<usize>; 2]>,
    /// The output projection of attention.
    pub(super) o: LinearLayout,
    /// The weight of the norm of the attention output before the residual addition.
    pub(super) attention_out_norm: Option<Range<usize>>,
    /// The weight of the norm before the MLP.
    pub(super) mlp_in_norm: Option<Range<usize>>,
    /// The gate and up projections of the MLP.
    pub(super) gate_up: LinearLayout,
    /// The down projection of the MLP.
    pub(super) down: LinearLayout,
    /// The weight of the norm of the MLP output before the residual addition.
    pub(super) mlp_out_norm: Option<Range<usize>>,
}

impl DecoderLayerSpans {
    /// Returns the matmuls of a dense layer by [`LinearLayout::index`].
    pub(super) fn list_linears(&self) -> [&LinearLayout; 4] {
        [&self.qkv, &self.o, &self.gate_up, &self.down]
    }

    /// Returns the matmuls by [`LinearLayout::index`]. Those of the MLP have no matrices in a layer
    /// with experts.
    pub(super) fn into_linears(self) -> [LinearLayout; 4] {
        [self.qkv, self.o, self.gate_up, self.down]
    }

    /// Returns the ranges of norms and biases. Ops add to the gradients of these tensors, so the
    /// gradients must be cleared before the backward pass.
    pub(super) fn list_accumulated_spans(&self) -> impl Iterator<Item = Range<usize>> {
        let biases = self.list_linears().map(|linear| &linear.bias);
        let norms =
            [&self.attention_in_norm, &self.attention_out_norm, &self.mlp_in_norm, &self.mlp_out_norm];
        let spans = norms.into_iter().chain(biases).flatten().chain(self.qk_norm.iter().flatten());
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

    /// Adds the weight of a norm, and returns its range. Returns `None` and adds nothing if the
    /// layer has no such norm.
    fn add_optional_norm(&mut self, name: Option<&str>, width: usize) -> Option<Range<usize>> {
        name.map(|name| self.add_norm(name, width))
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

    /// Adds matrices with a common input of width `inputs`, and then their biases if `has_biases`
    /// is set. `index` is the index of the matmul in the layer.
    fn add_linear(
        &mut self,
        index: usize,
        modules: &[(&'static str, usize)],
        inputs: usize,
        has_biases: bool,
    ) -> LinearLayout {
        let weight = self.add_matrices(modules, inputs);
        let from = self.len;
        for (name, outputs) in modules.iter().filter(|_| has_biases) {
            self.add_tensor(&format!("{name}.bias"), vec![*outputs], ParamInit::Zeros);
        }
        let bias = has_biases.then_some(from..self.len);
        LinearLayout { weight, bias, inputs, modules: modules.into(), index }
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
    let (d, f, hd) = (config.sizes.hidden, config.intermediate_size, config.sizes.head_dim);
    let (q, kv) = (config.sizes.heads * hd, config.sizes.kv_heads * hd);
    let attention_in_norm = t.add_optional_norm(config.norms.attention_in, d);
    let qkv_modules = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
    let qkv = t.add_linear(0, &qkv_modules, d, config.has_qkv_bias);
    let qk_norm = config.qk_norm.map(|extent| {
        let [q_width, k_width] = if extent == QkNorm::PerHead { [hd, hd] } else { [q, kv] };
        [t.add_norm("self_attn.q_norm", q_width), t.add_norm("self_attn.k_norm", k_width)]
    });
    let o = t.add_linear(1, &[("self_attn.o_proj", d)], q, config.has_o_bias);
    let attention_out_norm = t.add_optional_norm(config.norms.attention_out, d);
    let mlp_in_norm = t.add_optional_norm(config.norms.mlp_in, d);
    let moe = config.moe.as_ref().filter(|_| layer_number.is_some_and(|l| config.is_moe_layer(l)));
    // A layer with experts has a router here, and its experts in separate units.
    let (ups, downs) = ([("mlp.gate_proj", f), ("mlp.up_proj", f)], [("mlp.down_proj", d)]);
    let (ups, downs) = if moe.is_some() { (&ups[..0], &downs[..0]) } else { (&ups[..], &downs[..]) };
    if let Some(moe) = moe {
        t.add_matrices(&[(&format!("{}.gate", moe.names.block), moe.shape.experts)], d);
    }
    let gate_up = t.add_linear(2, ups, d, config.has_mlp_bias);
    let down = t.add_linear(3, downs, f, config.has_mlp_bias);
    let mlp_out_norm = t.add_optional_norm(config.norms.mlp_out, d);
    let spans = DecoderLayerSpans {
        attention_in_norm,
        qkv,
        qk_norm,
        o,
        attention_out_norm,
        mlp_in_norm,
        gate_up,
        down,
        mlp_out_norm,
    };
    (ParamUnit::new(format!("layer {layer}"), t.params), spans)
}
