//! [`LinearLayers`]: the matmuls with the layers' weight matrices, including biases, LoRA adapters
//! and fp8.
use super::{
    activation_buffers::BufferSpec,
    block_arguments::LayerInput,
    error::Result,
    linear_layout::{AdaptableLayerMatmuls, LinearLayout},
    linear_precision::{LinearFormat, LinearPrecision, check_fp8_sizes},
    lora::{
        LayerAdapters, LoraConfig, LoraScratch, LoraScratchBuffers, create_layer_adapters,
        declare_lora_scratch,
    },
};
use crate::params::ParamUnit;
use device::{View, ViewMut};
use std::ops::Range;

/// Computes the matmuls with the weight matrices of all layers, in the selected precision and with
/// biases and LoRA adapters.
pub(super) struct LinearLayers {
    pub(super) format: LinearFormat,
    /// The LoRA adapters of each layer; empty without LoRA.
    adapters: Vec<LayerAdapters>,
    /// For each layer, whether the gradient of each matrix is computed. Empty if all gradients are
    /// computed.
    needs_grad: Vec<Vec<bool>>,
}

impl LinearLayers {
    /// Creates the settings of the matmuls with the layers' weight matrices: no LoRA adapters yet,
    /// and gradients computed for all matrices. `is_transposed` selects the storage order of
    /// matrices ([`LinearFormat`]).
    pub(super) fn new(is_transposed: bool) -> Self {
        let format = LinearFormat { precision: LinearPrecision::default(), is_transposed };
        LinearLayers { format, adapters: Vec::new(), needs_grad: Vec::new() }
    }

    /// Adds LoRA adapters to the weight matrices that the targets in the config `lora` select.
    ///
    /// # Errors
    ///
    /// Fails with [`crate::model::ModelError::LoraTargetUnknown`] if a target matches no matrix.
    pub(super) fn add_adapters(
        &mut self,
        lora: &LoraConfig,
        layers: &[AdaptableLayerMatmuls],
        has_experts: bool,
    ) -> Result<()> {
        self.adapters = create_layer_adapters(lora, layers, has_experts)?;
        Ok(())
    }

    /// Switches the matmuls with the layers' weight matrices to fp8 precision. `sizes` are the
    /// config key and the value of each dimension.
    ///
    /// # Errors
    ///
    /// Fails with [`crate::model::ModelError::Fp8SizeUnsupported`] for an unsupported size.
    pub(super) fn enable_fp8(&mut self, sizes: &[(&str, usize)]) -> Result<()> {
        check_fp8_sizes(sizes)?;
        self.format.precision = LinearPrecision::Fp8;
        Ok(())
    }

    /// Returns whether the layers have LoRA adapters.
    pub(super) fn has_adapters(&self) -> bool {
        !self.adapters.is_empty()
    }

    /// Returns `unit`, the parameters of layer number `layer`, extended by the parameters of the
    /// layer's LoRA adapters.
    pub(super) fn append_adapter_params(&self, layer: usize, unit: ParamUnit) -> ParamUnit {
        match self.adapters.get(layer) {
            Some(adapters) => adapters.append_params(unit),
            None => unit,
        }
    }

    /// Declares the buffers for temporary values that the LoRA adapters need, for micro-batches of
    /// `rows` rows.
    pub(super) fn declare_scratch(&self, rows: usize) -> LoraScratchBuffers<BufferSpec> {
        declare_lora_scratch(&self.adapters, rows)
    }

    /// Makes the backward pass skip the gradients of weight matrices in which every element is
    /// frozen. `layers` are the parameter units of the layers, and `linears` their matmuls by
    /// [`LinearLayout::index`].
    pub(super) fn set_trained_params(&mut self, layers: &[ParamUnit], linears: [&LinearLayout; 4]) {
        let is_trained = |unit: &ParamUnit, linear: &LinearLayout| {
            linear.weight.end <= unit.len() && unit.has_trained_elements_in(linear.weight.clone())
        };
        let needs_grad = |unit| linears.iter().map(|linear| is_trained(unit, linear)).collect();
        self.needs_grad = layers.iter().map(needs_grad).collect();
    }

    /// Returns one matmul of the layer that `input` describes, with the weight matrices at the
    /// positions in `layout`.
    pub(super) fn select_linear<'a>(&'a self, input: &'a LayerInput, layout: &'a LinearLayout) -> Linear<'a> {
        Linear { layers: self, input, layout }
    }
}

/// One of the four matmuls of a layer (qkv, o, gate_up or down), including its biases and LoRA
/// adapters. In the functions, `x` is the input of the matmul, `y` the output, and `g` the gradient
/// of the layer's unit.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    layers: &'a LinearLayers,
    input: &'a LayerInput<'a>,
    layout: &'a LinearLayout,
}

impl Linear<'_> {
    /// Returns the LoRA adapters of the layer, or `None` without LoRA.
    fn adapters(&self) -> Option<&LayerAdapters> {
        self.layers.adapters.get(self.input.layer)
    }

    /// Computes the output `y` of the matmul for the input `x`, with bias and LoRA adapters.
    pub(super) fn forward(&self, x: View, mut y: ViewMut, lora: &mut LoraScratch) {
        let (input, layout) = (self.input, self.layout);
        let w = input.params.slice(layout.weight.clone());
        let bias = layout.bias.clone().map(|span| input.params.slice(span));
        self.layers.format.forward(input.ops, y.reborrow(), x, w, bias, layout.to_matmul_sizes(input));
        if let Some(adapters) = self.adapters() {
            adapters.forward(layout.index, input, x, y, lora);
        }
    }

    /// Returns whether this is a Conv1D layer with bias whose matmul can compute GELU or its
    /// gradient in the epilogue, because nothing else changes the matmul's output.
    fn can_fuse_gelu(&self) -> bool {
        let format = self.layers.format;
        format.is_transposed
            && self.layout.bias.is_some()
            && self.adapters().is_none()
            && format.has_epilogues(self.input.ops)
    }

    /// Computes the output `pre` of the matmul for the input `x`, and `y`, the output of GELU, in
    /// one kernel. Returns false without computing anything if this is not possible.
    pub(super) fn forward_with_gelu(&self, x: View, pre: ViewMut, y: ViewMut) -> bool {
        let (input, layout) = (self.input, self.layout);
        let Some(bias) = layout.bias.clone().filter(|_| self.can_fuse_gelu()) else { return false };
        let (w, bias) = (input.params.slice(layout.weight.clone()), input.params.slice(bias));
        let (m, inp, out) = layout.to_matmul_sizes(input);
        input.ops.conv1d_gelu_forward(y, pre, x, w, bias, [m, inp, out]);
        true
    }

    /// Computes the gradient `dpre` of GELU's input `pre` from `dy`, the gradient of this matmul's
    /// output, where the output of GELU is the input of this matmul. Writes the output of GELU to
    /// `y`. Returns false without computing anything if this is not possible in one kernel.
    pub(super) fn backward_input_through_gelu(&self, dpre: ViewMut, y: ViewMut, dy: View, pre: View) -> bool {
        let (input, layout) = (self.input, self.layout);
        if !self.can_fuse_gelu() {
            return false;
        }
        let (m, inp, out) = layout.to_matmul_sizes(input);
        let w = input.params.slice(layout.weight.clone());
        input.ops.conv1d_gelu_backward_input(dpre, y, dy, w, pre, [m, inp, out]);
        true
    }

    /// Adds the sum of the rows of `dy`, the gradient of the output, to the gradient of the bias,
    /// if there is a bias and [`Linear::backward_weight`] does not compute its gradient.
    pub(super) fn backward_bias(&self, g: &mut ViewMut, dy: View) {
        if self.computes_bias_with_weight() {
            return;
        }
        if let Some(bias) = &self.layout.bias {
            let (rows, outputs) = (self.input.batch.row_count(), self.layout.output_width());
            self.input.ops.bias_backward(g.slice_mut(bias.clone()), dy, rows, outputs);
        }
    }

    /// Returns whether the gradient of the weight matrices is computed.
    fn needs_weight_gradient(&self) -> bool {
        self.layers.needs_grad.get(self.input.layer).is_none_or(|needs| needs[self.layout.index])
    }

    /// Returns whether the matmul for the gradient of the weight matrices also computes the
    /// gradient of the bias.
    fn computes_bias_with_weight(&self) -> bool {
        let is_possible = self.layout.bias.is_some() && self.needs_weight_gradient();
        is_possible && self.layers.format.has_epilogues(self.input.ops)
    }

    /// Writes the gradient of the matmul's weight matrices to `g`, the gradient of the layer's
    /// parameters, unless the matrices are frozen. On backends with matmul epilogues, also writes
    /// the gradient of the bias.
    pub(super) fn backward_weight(&self, g: &mut ViewMut, (x, dy): (View, View)) {
        let (input, layout, format) = (self.input, self.layout, self.layers.format);
        if !self.needs_weight_gradient() {
            return;
        }
        let sizes = layout.to_matmul_sizes(input);
        let bias = layout.bias.clone().filter(|_| self.computes_bias_with_weight());
        let Some(bias) = bias else {
            let dw = g.slice_mut(layout.weight.clone());
            return format.backward_weight(input.ops, dw, dy, x, sizes);
        };
        let (dw, dbias) = split_two_spans(g.reborrow(), layout.weight.clone(), bias);
        format.backward_weight_and_bias(input.ops, dw, dbias, (x, dy), sizes);
    }

    /// Writes the gradients of the matmul's LoRA adapters to `g`, the gradient of the layer's
    /// parameters.
    pub(super) fn backward_adapters(&self, g: &mut ViewMut, x_and_dy: (View, View), lora: &mut LoraScratch) {
        if let Some(adapters) = self.adapters() {
            adapters.backward_weight(self.layout.index, self.input, g, x_and_dy, lora);
        }
    }

    /// Computes the gradient of the matmul's input and writes it to `dx`. Must follow
    /// [`Linear::backward_adapters`].
    pub(super) fn backward_input(&self, mut dx: ViewMut, dy: View, lora: &mut LoraScratch) {
        let (input, layout) = (self.input, self.layout);
        let w = input.params.slice(layout.weight.clone());
        self.layers.format.backward_input(input.ops, dx.reborrow(), dy, w, layout.to_matmul_sizes(input));
        if let Some(adapters) = self.adapters() {
            adapters.backward_input(layout.index, input, dx, lora);
        }
    }

    /// Computes the gradients of the matmul's input, weight matrices and LoRA adapters, but not
    /// that of its bias. Writes the gradients of the matrix and the adapters to `g`, and that of
    /// the input to `dx`.
    pub(super) fn backward(
        &self,
        g: &mut ViewMut,
        dx: ViewMut,
        x_and_dy: (View, View),
        lora: &mut LoraScratch,
    ) {
        self.backward_weight(g, x_and_dy);
        self.backward_adapters(g, x_and_dy, lora);
        self.backward_input(dx, x_and_dy.1, lora);
    }
}

/// Returns the ranges `first` and `second` of `unit`, which must not overlap.
fn split_two_spans(
    unit: ViewMut<'_>,
    first: Range<usize>,
    second: Range<usize>,
) -> (ViewMut<'_>, ViewMut<'_>) {
    let cut = |range: Range<usize>, from: usize| range.start - from..range.end - from;
    if first.end <= second.start {
        let (head, tail) = unit.split_at(second.start);
        return (head.slice(first), tail.slice(cut(second.clone(), second.start)));
    }
    let (head, tail) = unit.split_at(first.start);
    (tail.slice(cut(first.clone(), first.start)), head.slice(second))
}
