//! Creates the LoRA adapters of the layers of a [`DecoderModel`], and calls these adapters in
//! forward and backward pass.
use super::{DecoderModel, ParamUnit, build_layer_unit};
use crate::model::{
    LayerInput,
    error::Result,
    lora::{FusedLinears, LayerAdapters, LoraConfig, LoraScratchBuffers},
};
use device::{Ops, View, ViewMut};

/// The index of the adapters of q, k and v in [`LayerAdapters`].
pub(super) const QKV_ADAPTERS: usize = 0;
/// The index of the adapters of the attention's output projection in [`LayerAdapters`].
pub(super) const O_ADAPTERS: usize = 1;
/// The index of the adapters of the gate and up projections in [`LayerAdapters`].
pub(super) const GATE_UP_ADAPTERS: usize = 2;
/// The index of the adapters of the down projection in [`LayerAdapters`].
pub(super) const DOWN_ADAPTERS: usize = 3;

impl DecoderModel {
    /// Adds LoRA adapters to the targeted matrices of the layers. Experts and routers have none.
    ///
    /// # Errors
    ///
    /// Fails with [`crate::model::ModelError::LoraTargetUnknown`] if a target matches no matrix.
    pub(super) fn add_adapters(&mut self, lora: &LoraConfig) -> Result<()> {
        let (d, f, hd) = (self.config.hidden_size, self.config.intermediate_size, self.config.head_dim);
        let (q, kv) = (self.config.heads * hd, self.config.kv_heads * hd);
        let qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
        let fused_modules: [(&[_], usize); 4] = [
            (&qkv, d),
            (&[("self_attn.o_proj", d)], q),
            (&[("mlp.gate_proj", f), ("mlp.up_proj", f)], d),
            (&[("mlp.down_proj", d)], f),
        ];
        let fused_linears = |layer: usize| -> Vec<FusedLinears> {
            let is_moe = self.config.is_moe_layer(layer);
            let modules =
                fused_modules.iter().take(if is_moe { GATE_UP_ADAPTERS } else { fused_modules.len() });
            let prefix = format!("model.layers.{layer}.");
            modules
                .map(|&(modules, inputs)| FusedLinears { prefix: prefix.clone(), inputs, modules })
                .collect()
        };
        let layers: Vec<Vec<FusedLinears>> = (0..self.config.layers).map(fused_linears).collect();
        let names: Vec<String> = layers.iter().flatten().flat_map(FusedLinears::matrix_names).collect();
        lora.validate_targets(names.iter().map(String::as_str), self.config.moe.is_some())?;
        let adapters = |(l, fused): (usize, &Vec<FusedLinears>)| {
            LayerAdapters::new(lora, fused, build_layer_unit(&self.config, Some(l)).0.len())
        };
        self.adapters = layers.iter().enumerate().map(adapters).collect();
        Ok(())
    }

    /// Returns the unit of a layer with the parameters of the layer's adapters appended.
    pub(super) fn append_adapter_params(&self, layer: usize, unit: ParamUnit) -> ParamUnit {
        match self.adapters.get(layer) {
            Some(adapters) => adapters.append_params(unit),
            None => unit,
        }
    }

    /// Returns whether the model has LoRA adapters in this layer.
    pub(super) fn has_adapters(&self, layer: usize) -> bool {
        self.adapters.get(layer).is_some()
    }

    /// Adds the outputs of the adapters of matmul `group`, an index in [`LayerAdapters`], to `y`,
    /// the output of the matmul. `x` is the input of the matmul.
    pub(super) fn adapters_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        group: usize,
        x: View,
        y: ViewMut,
        scratch: &mut LoraScratchBuffers,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.forward(ops, group, (input.params, input.batch), x, y, scratch);
        }
    }

    /// Computes the gradients of the parameters of the adapters of matmul `group`, an index in
    /// [`LayerAdapters`], and writes them to `g`, the gradient of the layer's unit. `input_and_dy`
    /// is the input of the matmul and the gradient of its output.
    pub(super) fn adapters_backward_weight(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        group: usize,
        g: &mut ViewMut,
        input_and_dy: (View, View),
        scratch: &mut LoraScratchBuffers,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.backward_weight(ops, group, (input.params, input.batch), g, input_and_dy, scratch);
        }
    }

    /// Adds the gradient that flows through the adapters of matmul `group` to `dx`, the gradient of
    /// the matmul's input. Must follow [`DecoderModel::adapters_backward_weight`] of that group.
    pub(super) fn adapters_backward_input(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        group: usize,
        dx: ViewMut,
        scratch: &mut LoraScratchBuffers,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.backward_input(ops, group, (input.params, input.batch), dx, scratch);
        }
    }
}
