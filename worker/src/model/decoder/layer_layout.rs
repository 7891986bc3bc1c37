//! [`DecoderLayerSpans`]: where the tensors of a decoder layer are, in the flat vector of the
//! layer's parameter unit (the parameters that are gathered together).
//!
//! The matrices of q, k and v are adjacent and computed as one matmul, and so are the matrices of
//! gate and up. The biases of such matrices are adjacent, too. The bias of a norm follows its
//! weight.
use super::decoder_config::{DecoderConfig, NormKind, QkNormExtent};
use crate::{
    model::linear_layout::LinearLayout,
    params::{ParamInit, ParamSpec, ParamUnit},
};
use std::ops::Range;

/// The ranges of a layer's tensors in the flat vector of the layer's parameter unit (the parameters
/// that are gathered together). Ranges count elements. A tensor that the model family does not have
/// is `None`.
pub(super) struct DecoderLayerSpans {
    /// The range of the parameters of the norm before attention.
    pub(super) attention_in_norm: Option<Range<usize>>,
    /// The projections of q, k and v.
    pub(super) qkv: LinearLayout,
    /// The ranges of the weights of the norms of q and of k.
    pub(super) qk_norm: Option<[Range<usize>; 2]>,
    /// The output projection of attention.
    pub(super) o: LinearLayout,
    /// The range of the parameters of the norm of the attention output before the residual
    /// addition.
    pub(super) attention_out_norm: Option<Range<usize>>,
    /// The range of the parameters of the norm before the MLP.
    pub(super) mlp_in_norm: Option<Range<usize>>,
    /// The gate and up projections of the MLP.
    pub(super) gate_up: LinearLayout,
    /// The down projection of the MLP.
    pub(super) down: LinearLayout,
    /// The range of the parameters of the norm of the MLP output before the residual addition.
    pub(super) mlp_out_norm: Option<Range<usize>>,
}

impl DecoderLayerSpans {
    /// Returns, for each of the layer's four matmuls in the order qkv, o, gate_up, down, the
    /// position of its weight matrices in the layer's flat parameter vector.
    pub(super) fn list_linears(&self) -> [&LinearLayout; 4] {
        [&self.qkv, &self.o, &self.gate_up, &self.down]
    }

    /// Returns the positions of the weight matrices of the layer's four matmuls (qkv, o, gate_up
    /// and down), without those of the other tensors. Those of the MLP have no matrices in a layer
    /// with experts.
    pub(super) fn into_linears(self) -> [LinearLayout; 4] {
        [self.qkv, self.o, self.gate_up, self.down]
    }

    /// Returns where the parameters of the layer's norms and biases are, as ranges of the flat
    /// vector with all parameters of the layer. Ops add to the gradients of these tensors, so the
    /// gradients must be cleared before the backward pass.
    pub(super) fn list_norm_and_bias_spans(&self) -> impl Iterator<Item = Range<usize>> {
        let biases = self.list_linears().map(|linear| &linear.bias);
        let norms =
            [&self.attention_in_norm, &self.attention_out_norm, &self.mlp_in_norm, &self.mlp_out_norm];
        let spans = norms.into_iter().chain(biases).flatten().chain(self.qk_norm.iter().flatten());
        spans.cloned()
    }
}

/// Assigns the tensors of a decoder layer, one after another, to consecutive ranges of the flat
/// vector in which the layer's parameters are stored.
struct LayerLayoutBuilder<'a> {
    config: &'a DecoderConfig,
    /// The prefix of the tensors' names, without a trailing dot.
    prefix: String,
    params: Vec<ParamSpec>,
    /// The number of elements of all tensors so far.
    len: usize,
}

impl LayerLayoutBuilder<'_> {
    /// Appends a tensor to the layer's flat parameter vector, and returns the range of the vector
    /// that the tensor occupies.
    fn add_tensor(&mut self, name: &str, shape: Vec<usize>, init: ParamInit) -> Range<usize> {
        let spec = ParamSpec { name: format!("{}.{name}", self.prefix), shape, init };
        let from = self.len;
        self.len += spec.len();
        self.params.push(spec);
        from..self.len
    }

    /// Adds the weight of a norm, and returns its range in the flat vector with the layer's
    /// parameters.
    fn add_norm_weight(&mut self, name: &str, width: usize) -> Range<usize> {
        self.add_tensor(&format!("{name}.weight"), vec![width], self.config.initial_norm_weights())
    }

    /// Appends the parameters of a norm before or after attention or the MLP to the layer's flat
    /// parameter vector, and returns their range. Returns `None` and adds nothing if the layer has
    /// no such norm.
    fn add_residual_stream_norm(&mut self, name: Option<&str>) -> Option<Range<usize>> {
        let (name, width) = (name?, self.config.sizes.hidden);
        let mut span = self.add_norm_weight(name, width);
        if self.config.norm_kind == NormKind::Layer {
            span.end = self.add_tensor(&format!("{name}.bias"), vec![width], ParamInit::Zeros).end;
        }
        Some(span)
    }

    /// Appends the weight matrices of one matmul of the layer, and their biases if `has_biases` is
    /// set, to the layer's flat parameter vector. `inputs` is the width of the matmul's input.
    /// `modules` are name and output width of each matrix, and `index` is the index of the matmul
    /// in the layer.
    fn add_linear(
        &mut self,
        index: usize,
        modules: Vec<(&'static str, usize)>,
        inputs: usize,
        has_biases: bool,
        init_std: f32,
    ) -> LinearLayout {
        let from = self.len;
        for (name, outputs) in &modules {
            let mut shape = vec![*outputs, inputs];
            if self.config.has_transposed_matrices {
                shape.reverse();
            }
            self.add_tensor(&format!("{name}.weight"), shape, ParamInit::Normal(init_std));
        }
        let weight = from..self.len;
        for (name, outputs) in modules.iter().filter(|_| has_biases) {
            self.add_tensor(&format!("{name}.bias"), vec![*outputs], ParamInit::Zeros);
        }
        let bias = has_biases.then_some(weight.end..self.len);
        LinearLayout { weight, bias, inputs, modules, index }
    }
}

/// Lists the tensors of a decoder layer, except experts, as one parameter unit (gathered together),
/// and assigns each tensor a range in the unit's flat vector. If `layer_number` is `None`, builds
/// the unit of layer 0 as a dense layer.
pub(super) fn build_layer_unit(
    config: &DecoderConfig,
    layer_number: Option<usize>,
) -> (ParamUnit, DecoderLayerSpans) {
    let layer = layer_number.unwrap_or(0);
    let mut t = LayerLayoutBuilder { config, prefix: config.layer_prefix(layer), params: Vec::new(), len: 0 };
    let (sizes, names, norms, f) = (config.sizes, &config.names, config.norms, config.intermediate_size);
    let (d, q, kv) = (sizes.hidden, sizes.attention_width(), sizes.kv_heads * sizes.head_dim);
    let (std, output_std) = (config.init_std, config.output_init_std);
    let attention_in_norm = t.add_residual_stream_norm(norms.attention_in);
    let qkv_modules = match names.qkv {
        [fused] => vec![(*fused, q + 2 * kv)],
        separate => separate.iter().copied().zip([q, kv, kv]).collect(),
    };
    let qkv = t.add_linear(0, qkv_modules, d, config.has_qkv_bias, std);
    let qk_norm = config.qk_norm.map(|extent| {
        let widths = if extent == QkNormExtent::PerHead { [sizes.head_dim; 2] } else { [q, kv] };
        [t.add_norm_weight("self_attn.q_norm", widths[0]), t.add_norm_weight("self_attn.k_norm", widths[1])]
    });
    let o = t.add_linear(1, vec![(names.o, d)], q, config.has_o_bias, output_std);
    let attention_out_norm = t.add_residual_stream_norm(norms.attention_out);
    let mlp_in_norm = t.add_residual_stream_norm(norms.mlp_in);
    let (mut ups, mut downs) = (names.gate_up.iter().map(|name| (*name, f)).collect(), vec![(names.down, d)]);
    let moe = config.moe.as_ref().filter(|_| layer_number.is_some_and(|l| config.is_moe_layer(l)));
    if let Some(moe) = moe {
        // A layer with experts has a router here, and its experts in separate units.
        (ups, downs) = (Vec::new(), Vec::new());
        let router = format!("{}.gate.weight", moe.names.block);
        t.add_tensor(&router, vec![moe.shape.experts, d], ParamInit::Normal(std));
    }
    let gate_up = t.add_linear(2, ups, d, config.has_mlp_bias, std);
    let down = t.add_linear(3, downs, f, config.has_mlp_bias, output_std);
    let mlp_out_norm = t.add_residual_stream_norm(norms.mlp_out);
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
