//! The tensors of a layer in the order of its flat vector. q, k, v and gate, up are adjacent, and so are their biases:
//! each group is multiplied as one matrix.
use super::Numbers;
use crate::params::{Init, ParamSpec, Unit};
use std::ops::Range;

/// Where the tensors of a layer lie in its flat vector; those that the family hasn't are `None`.
pub(super) struct Spans {
    pub(super) input_norm: Range<usize>,
    pub(super) qkv: Range<usize>,
    pub(super) qkv_bias: Option<Range<usize>>,
    /// Of q, then of k.
    pub(super) qk_norm: Option<[Range<usize>; 2]>,
    pub(super) o: Range<usize>,
    pub(super) o_bias: Option<Range<usize>>,
    /// Of attention's output, before it is added to the residual stream.
    pub(super) attention_out_norm: Option<Range<usize>>,
    /// Before the MLP.
    pub(super) post_norm: Range<usize>,
    pub(super) gate_up: Range<usize>,
    pub(super) gate_up_bias: Option<Range<usize>>,
    pub(super) down: Range<usize>,
    pub(super) down_bias: Option<Range<usize>>,
    /// Of the MLP's output, before it is added to the residual stream.
    pub(super) mlp_out_norm: Option<Range<usize>>,
}

impl Spans {
    /// Those whose gradients are sums that ops add to.
    pub(super) fn summed(&self) -> impl Iterator<Item = Range<usize>> {
        let biases = [&self.qkv_bias, &self.o_bias, &self.gate_up_bias, &self.down_bias];
        let norms = self.qk_norm.iter().flatten().chain(&self.attention_out_norm).chain(&self.mlp_out_norm);
        let all =
            [&self.input_norm, &self.post_norm].into_iter().chain(biases.into_iter().flatten()).chain(norms);
        all.cloned()
    }
}

/// Collects tensors one after the other.
struct Tensors {
    prefix: String,
    std: f32,
    norm: Init,
    params: Vec<ParamSpec>,
    at: usize,
}

impl Tensors {
    fn add(&mut self, name: &str, shape: Vec<usize>, init: Init) -> Range<usize> {
        let spec = ParamSpec { name: format!("{}.{name}", self.prefix), shape, init };
        let from = self.at;
        self.at += spec.len();
        self.params.push(spec);
        from..self.at
    }

    fn norm(&mut self, name: &str, width: usize) -> Range<usize> {
        self.add(&format!("{name}.weight"), vec![width], self.norm)
    }

    /// Matrices with the same input, by name and rows.
    fn matrices(&mut self, named: &[(&str, usize)], inp: usize) -> Range<usize> {
        let init = Init::Normal(self.std);
        let from = self.at;
        for (name, out) in named {
            self.add(&format!("{name}.weight"), vec![*out, inp], init);
        }
        from..self.at
    }

    /// Their biases, where `there`.
    fn biases(&mut self, there: bool, named: &[(&str, usize)]) -> Option<Range<usize>> {
        let from = self.at;
        for (name, out) in named.iter().filter(|_| there) {
            self.add(&format!("{name}.bias"), vec![*out], Init::Zeros);
        }
        there.then_some(from..self.at)
    }
}

/// A layer's tensors, all but its experts, and where they lie. Without a number it is any layer without experts.
pub(super) fn layer_unit(n: &Numbers, number: Option<usize>) -> (Unit, Spans) {
    let layer = number.unwrap_or(0);
    let prefix = format!("model.layers.{layer}");
    let mut t = Tensors { prefix, std: n.std, norm: n.norm_init(), params: Vec::new(), at: 0 };
    let (d, f, hd) = (n.hidden, n.intermediate, n.head_dim);
    let (q, kv) = (n.heads * hd, n.kv_heads * hd);
    let input_norm = t.norm("input_layernorm", d);
    let named = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
    let qkv = t.matrices(&named, d);
    let qkv_bias = t.biases(n.qkv_bias, &named);
    let qk_norm = n.qk_norm.then(|| ["self_attn.q_norm", "self_attn.k_norm"].map(|name| t.norm(name, hd)));
    let named = [("self_attn.o_proj", d)];
    let o = t.matrices(&named, q);
    let o_bias = t.biases(n.o_bias, &named);
    let attention_out_norm = n.output_norms.then(|| t.norm("post_attention_layernorm", d));
    let before_mlp = if n.output_norms { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    let post_norm = t.norm(before_mlp, d);
    let experts = n.experts.as_ref().filter(|_| number.is_some_and(|l| n.is_sparse(l)));
    // Either a router, whose experts are units of their own, or gate, up and down.
    let (ups, downs) = ([("mlp.gate_proj", f), ("mlp.up_proj", f)], [("mlp.down_proj", d)]);
    let (ups, downs) = if experts.is_some() { (&ups[..0], &downs[..0]) } else { (&ups[..], &downs[..]) };
    if let Some(e) = experts {
        t.matrices(&[(&format!("{}.gate", e.names.block), e.shape.experts)], d);
    }
    let gate_up = t.matrices(ups, d);
    let gate_up_bias = t.biases(n.mlp_bias, ups);
    let down = t.matrices(downs, f);
    let down_bias = t.biases(n.mlp_bias, downs);
    let mlp_out_norm = n.output_norms.then(|| t.norm("post_feedforward_layernorm", d));
    let spans = Spans {
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
    (Unit::new(format!("layer {layer}"), t.params), spans)
}
