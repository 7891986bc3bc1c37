//! Adapters of a decoder's layers: on q, k, v; on the output projection; on gate and up; on down.
use super::{Decoder, Unit, layer_unit};
use crate::model::{
    LayerInput,
    lora::{Adapters, Lora, Scratch, Together},
};
use device::{Ops, View, ViewMut};

/// Modules that are multiplied as one, by their place in [`Adapters`].
pub(super) const QKV: usize = 0;
pub(super) const O: usize = 1;
pub(super) const GATE_UP: usize = 2;
pub(super) const DOWN: usize = 3;

impl Decoder {
    /// Refuses a target that no matrix has. Experts have no adapters.
    pub(super) fn add_adapters(&mut self, lora: &Lora) -> Result<(), String> {
        let (d, f, hd) = (self.n.hidden, self.n.intermediate, self.n.head_dim);
        let (q, kv) = (self.n.heads * hd, self.n.kv_heads * hd);
        let qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
        let groups: [(&[_], usize); 4] = [
            (&qkv, d),
            (&[("self_attn.o_proj", d)], q),
            (&[("mlp.gate_proj", f), ("mlp.up_proj", f)], d),
            (&[("mlp.down_proj", d)], f),
        ];
        let of_layer = |layer: usize| -> Vec<Together> {
            let there = groups.iter().take(if self.n.is_sparse(layer) { GATE_UP } else { groups.len() });
            let prefix = format!("model.layers.{layer}.");
            there.map(|&(named, inp)| Together { prefix: prefix.clone(), inp, named }).collect()
        };
        let all: Vec<Vec<Together>> = (0..self.n.layers).map(of_layer).collect();
        let names: Vec<String> = all
            .iter()
            .flatten()
            .flat_map(|t| t.named.iter().map(move |(name, _)| format!("{}{name}", t.prefix)))
            .collect();
        lora.check(names.iter().map(String::as_str)).map_err(|e| match &self.n.experts {
            Some(_) => format!("{e}; the matrices of experts and routers have none in this version"),
            None => e,
        })?;
        let layer = |(l, together): (usize, &Vec<Together>)| {
            Adapters::new(lora, together, layer_unit(&self.n, Some(l)).0.len())
        };
        self.adapters = all.iter().enumerate().map(layer).collect();
        Ok(())
    }

    /// A layer's unit with its adapters behind.
    pub(super) fn adapted(&self, layer: usize, unit: Unit) -> Unit {
        match self.adapters.get(layer) {
            Some(adapters) => adapters.extend(unit),
            None => unit,
        }
    }

    /// Has this layer adapters?
    pub(super) fn adapts(&self, layer: usize) -> bool {
        self.adapters.get(layer).is_some()
    }

    /// Adds to `y` what adapters give for `x`.
    pub(super) fn adapters_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        group: usize,
        x: View,
        y: ViewMut,
        scratch: &mut Scratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.forward(ops, group, (input.params, input.batch), x, y, scratch);
        }
    }

    /// Gradients of adapters from the group's input and the gradient of its output.
    pub(super) fn adapters_backward_weight(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        group: usize,
        g: &mut ViewMut,
        xy: (View, View),
        scratch: &mut Scratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.backward_weight(ops, group, (input.params, input.batch), g, xy, scratch);
        }
    }

    /// Adds to `dx`, the gradient of the group's input.
    pub(super) fn adapters_backward_input(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        group: usize,
        dx: ViewMut,
        scratch: &mut Scratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.backward_input(ops, group, (input.params, input.batch), dx, scratch);
        }
    }
}
