//! [`LinearLayers`]: the matmuls of the layers' matrices with biases and LoRA adapters, in the
//! precision of the job.
use super::{
    activation_buffers::BufferSpec,
    blocks::LayerInput,
    error::Result,
    linear_layout::{LayerLinears, LinearLayout},
    linear_precision::{LinearFormat, LinearPrecision, check_fp8_sizes},
    lora::{
        LayerAdapters, LoraConfig, LoraScratch, LoraScratchBuffers, create_layer_adapters,
        declare_lora_scratch,
    },
};
use crate::params::ParamUnit;
use device::{Ops, View, ViewMut};

/// The matmuls of the matrices of all layers. In the functions, `x` is the input of a matmul, `y`
/// the output, and `g` the gradient of the layer's unit.
pub(super) struct LinearLayers {
    pub(super) format: LinearFormat,
    /// The LoRA adapters of each layer; empty without LoRA.
    adapters: Vec<LayerAdapters>,
    /// For each layer, whether the gradient of each matrix is computed. Empty if all gradients are
    /// computed.
    needs_grad: Vec<Vec<bool>>,
}

impl LinearLayers {
    /// Creates layers without adapters, in which all gradients are computed. `is_transposed`
    /// selects the storage order of matrices ([`LinearFormat`]).
    pub(super) fn new(is_transposed: bool) -> Self {
        let format = LinearFormat { precision: LinearPrecision::default(), is_transposed };
        LinearLayers { format, adapters: Vec::new(), needs_grad: Vec::new() }
    }

    /// Adds adapters to the targeted matrices of the layers.
    ///
    /// # Errors
    ///
    /// Fails with [`crate::model::ModelError::LoraTargetUnknown`] if a target matches no matrix.
    pub(super) fn add_adapters(
        &mut self,
        lora: &LoraConfig,
        layers: &[LayerLinears],
        has_experts: bool,
    ) -> Result<()> {
        self.adapters = create_layer_adapters(lora, layers, has_experts)?;
        Ok(())
    }

    /// Switches the matmuls to FP8. `sizes` are config key and size of each dimension.
    ///
    /// # Errors
    ///
    /// Fails with [`crate::model::ModelError::Fp8SizeUnsupported`] for an unsupported size.
    pub(super) fn enable_fp8(&mut self, sizes: &[(&str, usize)]) -> Result<()> {
        check_fp8_sizes(sizes)?;
        self.format.precision = LinearPrecision::Fp8;
        Ok(())
    }

    /// Returns whether the layers have adapters.
    pub(super) fn has_adapters(&self) -> bool {
        !self.adapters.is_empty()
    }

    /// Returns the unit of a layer with the parameters of the layer's adapters appended.
    pub(super) fn append_adapter_params(&self, layer: usize, unit: ParamUnit) -> ParamUnit {
        match self.adapters.get(layer) {
            Some(adapters) => adapters.append_params(unit),
            None => unit,
        }
    }

    /// Declares the scratch buffers of the adapters for micro-batches of `rows` rows.
    pub(super) fn declare_scratch(&self, rows: usize) -> LoraScratchBuffers<BufferSpec> {
        declare_lora_scratch(&self.adapters, rows)
    }

    /// Restricts the backward pass to the gradients of matrices of which at least a part is
    /// trained. `layers` are the units of the layers, and `linears` their matmuls by
    /// [`LinearLayout::index`].
    pub(super) fn set_trained_params(&mut self, layers: &[ParamUnit], linears: [&LinearLayout; 4]) {
        let is_trained = |unit: &ParamUnit, linear: &LinearLayout| {
            linear.weight.end <= unit.len() && unit.has_trained_in(linear.weight.clone())
        };
        let needs_grad = |unit| linears.iter().map(|linear| is_trained(unit, linear)).collect();
        self.needs_grad = layers.iter().map(needs_grad).collect();
    }

    /// Computes the output `y` of a matmul, with bias and adapters.
    pub(super) fn forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        linear: &LinearLayout,
        x: View,
        mut y: ViewMut,
        lora: &mut LoraScratch,
    ) {
        let w = input.params.slice(linear.weight.clone());
        let bias = linear.bias.clone().map(|span| input.params.slice(span));
        let sizes = linear.sizes(input);
        self.format.forward(ops, y.reborrow(), x, w, bias, sizes);
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.forward(ops, linear.index, input, x, y, lora);
        }
    }

    /// Adds the sum of the rows of `dy` to the gradient of the bias, if there is a bias.
    pub(super) fn backward_bias(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        linear: &LinearLayout,
        g: &mut ViewMut,
        dy: View,
    ) {
        if let Some(bias) = &linear.bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dy, input.batch.rows(), linear.outputs());
        }
    }

    /// Writes the gradient of the matrix to `g`, if the gradient is needed.
    pub(super) fn backward_weight(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        linear: &LinearLayout,
        g: &mut ViewMut,
        (x, dy): (View, View),
    ) {
        if self.needs_grad.get(input.layer).is_some_and(|needs_grad| !needs_grad[linear.index]) {
            return;
        }
        let (dw, sizes) = (g.slice_mut(linear.weight.clone()), linear.sizes(input));
        self.format.backward_weight(ops, dw, dy, x, sizes);
    }

    /// Writes the gradients of the adapters' parameters to `g`.
    pub(super) fn backward_adapters(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        linear: &LinearLayout,
        g: &mut ViewMut,
        x_and_dy: (View, View),
        lora: &mut LoraScratch,
    ) {
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.backward_weight(ops, linear.index, input, g, x_and_dy, lora);
        }
    }

    /// Writes the gradient of `x` to `dx`. Must follow [`LinearLayers::backward_adapters`] of that
    /// matmul.
    pub(super) fn backward_input(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        linear: &LinearLayout,
        mut dx: ViewMut,
        dy: View,
        lora: &mut LoraScratch,
    ) {
        let (w, sizes) = (input.params.slice(linear.weight.clone()), linear.sizes(input));
        self.format.backward_input(ops, dx.reborrow(), dy, w, sizes);
        if let Some(adapters) = self.adapters.get(input.layer) {
            adapters.backward_input(ops, linear.index, input, dx, lora);
        }
    }

    /// Computes all gradients of a matmul except that of the bias. Writes those of matrix and
    /// adapters to `g`, and that of `x` to `dx`.
    pub(super) fn backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        linear: &LinearLayout,
        g: &mut ViewMut,
        dx: ViewMut,
        x_and_dy: (View, View),
        lora: &mut LoraScratch,
    ) {
        self.backward_weight(ops, input, linear, g, x_and_dy);
        self.backward_adapters(ops, input, linear, g, x_and_dy, lora);
        self.backward_input(ops, input, linear, dx, x_and_dy.1, lora);
    }
}
