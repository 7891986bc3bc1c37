//! [`LayerAdapters`]: low-rank adapters of frozen weight matrices (LoRA, Hu and others, 2021). With
//! an adapter, a matmul computes `y = W·x + s·B·A·dropout(x)` with `s = alpha / rank`, or `alpha /
//! √rank` for rsLoRA (Kalajdzievski 2023).
//!
//! An adapter consists of the two parameters `….q_proj.lora_A.weight`, `[rank, in]`, and
//! `….q_proj.lora_B.weight`, `[out, rank]`. These are the names of PEFT without the prefix of
//! PEFT's wrapper. The initial A is uniform within ±1/√in, as in PEFT. The initial B is zero, so
//! that a new adapter does not change the output. In a layer's unit, adapters follow all other
//! tensors.
use super::{
    activation_buffers::{BufferSpec, declare_buffer_set},
    block_arguments::LayerInput,
    error::{ModelError, Result},
    hf_config::shorten_text,
    linear_layout::AdaptableLayerMatmuls,
    micro_batch::MicroBatch,
};
use crate::{
    params::{ParamInit, ParamSpec, ParamUnit},
    rng::{Purpose, RandomStream},
};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{SampleDropout, WriteMode},
};
use jobspec::{LoraSpec, LoraTargets};
use std::ops::Range;

/// Which matrices of a model get LoRA adapters, and with which rank, factor and dropout.
#[derive(Clone, Debug)]
pub struct LoraConfig {
    /// The section `train.lora`. If the section names an adapter directory, values of the
    /// directory's configuration complete the section.
    pub spec: LoraSpec,
    /// The run's seed, which selects the dropout masks.
    pub seed: u64,
}

impl LoraConfig {
    /// Returns whether the matrix of the module `module`, such as `q_proj`, gets a LoRA adapter.
    fn selects_module(&self, module: &str) -> bool {
        match &self.spec.targets {
            LoraTargets::AllLinear => true,
            LoraTargets::Names(names) => names.iter().any(|n| target_selects_module(module, n)),
        }
    }

    /// Checks that every LoRA target matches at least one module. `modules` are the names of the
    /// matrices that can have adapters. `has_experts` only affects the help of the error.
    ///
    /// # Errors
    ///
    /// Fails with [`ModelError::LoraTargetUnknown`] if a target matches no module.
    fn validate_targets<'a>(
        &self,
        modules: impl Iterator<Item = &'a str> + Clone,
        has_experts: bool,
    ) -> Result<()> {
        let LoraTargets::Names(names) = &self.spec.targets else { return Ok(()) };
        let Some(unknown) = names.iter().find(|n| !modules.clone().any(|m| target_selects_module(m, n)))
        else {
            return Ok(());
        };
        let mut supported: Vec<String> =
            modules.filter_map(|m| m.rsplit('.').next()).map(Into::into).collect();
        supported.sort_unstable();
        supported.dedup();
        Err(ModelError::LoraTargetUnknown { target: shorten_text(unknown), supported, has_experts })
    }
}

/// Returns whether the LoRA target `name`, such as `q_proj`, selects the module `module`. This is
/// the case if the names are equal, or the module's name ends with a dot and the target's name, as
/// in PEFT.
fn target_selects_module(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The LoRA adapter of one matrix: where its parameters are stored, and the random numbers for its
/// dropout.
struct LoraAdapter {
    /// The range of A in the flat vector of the layer's unit.
    a: Range<usize>,
    /// The range of B in the flat vector of the layer's unit.
    b: Range<usize>,
    /// The columns of the group's common output that the matrix of this adapter computes.
    columns: Range<usize>,
    /// The random numbers of the dropout masks.
    rng: RandomStream,
}

/// The LoRA adapters of those weight matrices that are computed together in one matmul, such as q,
/// k and v.
struct LoraAdapterGroup {
    /// The width of the input.
    inputs: usize,
    /// The width of the common output of all matrices of the group.
    width: usize,
    adapters: Vec<LoraAdapter>,
}

/// The LoRA adapters of all weight matrices of one layer.
pub(super) struct LayerAdapters {
    groups: Vec<LoraAdapterGroup>,
    params: Vec<ParamSpec>,
    rank: usize,
    /// The factor `s` by which the adapters' output is multiplied: `alpha / rank` or `alpha /
    /// √rank`.
    scale: f32,
    dropout_rate: f64,
}

declare_buffer_set! {
    /// The buffers for temporary values (scratch) that the LoRA adapters of all layers share. All
    /// buffers are f32 in every precision.
    pub(super) struct LoraScratchBuffers {
        /// The input of a group after dropout, or the gradient of that input, `[rows, in]`.
        input,
        /// `A·dropout(x)` of one adapter, `[rows, rank]`.
        low_rank,
        /// The gradients of `A·dropout(x)` of each adapter of a group, `[adapters, rows, rank]`.
        d_low_rank,
        /// A matrix `[width, rank]` with one row for each column of the group's output. The rows
        /// for the columns of one adapter contain its `s·B`; all other rows are zero.
        padded_b,
        /// The gradient of `padded_b`.
        d_padded_b,
    }
}

/// Mutable references to the temporary buffers of LoRA adapters, with which the adapters of one
/// layer are computed.
pub(super) type LoraScratch<'a> = LoraScratchBuffers<&'a mut Buf>;

/// Creates the LoRA adapters of each layer, for those matrices that the job's LoRA targets select.
///
/// # Errors
///
/// Fails with [`ModelError::LoraTargetUnknown`] if a target matches no matrix.
pub(super) fn create_layer_adapters(
    lora: &LoraConfig,
    layers: &[AdaptableLayerMatmuls],
    has_experts: bool,
) -> Result<Vec<LayerAdapters>> {
    let names: Vec<String> = layers.iter().flat_map(AdaptableLayerMatmuls::matrix_names).collect();
    lora.validate_targets(names.iter().map(String::as_str), has_experts)?;
    Ok(layers.iter().map(|layer| LayerAdapters::new(lora, layer)).collect())
}

/// Declares the buffers for temporary values that the LoRA adapters in `layers` need, for
/// micro-batches of `rows` rows.
pub(super) fn declare_lora_scratch(layers: &[LayerAdapters], rows: usize) -> LoraScratchBuffers<BufferSpec> {
    let mut lengths = [0; 5];
    for adapters in layers {
        for g in adapters.groups.iter().filter(|g| !g.adapters.is_empty()) {
            let input = if adapters.dropout_rate > 0.0 { rows * g.inputs } else { 0 };
            let low = rows * adapters.rank;
            let padded_b = g.width * adapters.rank;
            let needed = [input, low, low * g.adapters.len(), padded_b, padded_b];
            lengths.iter_mut().zip(needed).for_each(|(a, b)| *a = b.max(*a));
        }
    }
    let [input, low_rank, d_low_rank, padded_b, d_padded_b] = lengths.map(BufferSpec::in_f32);
    LoraScratchBuffers { input, low_rank, d_low_rank, padded_b, d_padded_b }
}

impl LayerAdapters {
    /// Creates the LoRA adapters of one layer, and places their parameters after the layer's other
    /// tensors in the flat vector of its parameters.
    fn new(lora: &LoraConfig, layer: &AdaptableLayerMatmuls) -> Self {
        let (spec, mut params, mut at) = (&lora.spec, Vec::new(), layer.unit_len);
        let rank = spec.rank as usize;
        let mut groups = Vec::with_capacity(layer.linears.len());
        for t in &layer.linears {
            let (mut adapters, mut width) = (Vec::new(), 0);
            for &(name, outputs) in &t.modules {
                let columns = width..width + outputs;
                width = columns.end;
                let module = format!("{}{name}", layer.prefix);
                if !lora.selects_module(&module) {
                    continue;
                }
                let mut add = |part: &str, shape: [usize; 2], init| {
                    let spec =
                        ParamSpec { name: format!("{module}.{part}.weight"), shape: shape.into(), init };
                    at += spec.len();
                    let range = at - spec.len()..at;
                    params.push(spec);
                    range
                };
                let bound = 1.0 / (t.inputs as f32).sqrt();
                let a = add("lora_A", [rank, t.inputs], ParamInit::Uniform(bound));
                let b = add("lora_B", [outputs, rank], ParamInit::Zeros);
                let rng = RandomStream::new(lora.seed, Purpose::Dropout, &module);
                adapters.push(LoraAdapter { a, b, columns, rng });
            }
            groups.push(LoraAdapterGroup { inputs: t.inputs, width, adapters });
        }
        let rank_factor = f64::from(spec.rank);
        let scale = (spec.alpha / if spec.rslora { rank_factor.sqrt() } else { rank_factor }) as f32;
        LayerAdapters { groups, params, rank, scale, dropout_rate: spec.dropout.unwrap_or(0.0) }
    }

    /// Returns `unit`, the parameters of this layer, extended by the parameters of the layer's LoRA
    /// adapters.
    pub(super) fn append_params(&self, unit: ParamUnit) -> ParamUnit {
        ParamUnit::new(unit.name, unit.params.into_iter().chain(self.params.iter().cloned()).collect())
    }

    /// Adds the outputs of the LoRA adapters of one matmul to `y`, `[rows, width]`, the output of
    /// the matmul. `x`, `[rows, in]`, is its input, and `group` is the index of the group of
    /// matrices that it computes.
    pub(super) fn forward(
        &self,
        group: usize,
        input: &LayerInput,
        x: View,
        mut y: ViewMut,
        s: &mut LoraScratch,
    ) {
        let (ops, g, m) = (input.ops, &self.groups[group], input.batch.row_count());
        for ad in &g.adapters {
            self.compute_low_rank_activation(g, ad, input, x, s);
            self.write_scaled_padded_b(ops, g, ad, input.params, s.padded_b);
            let (low, wide) =
                (s.low_rank.view().slice(0..m * self.rank), s.padded_b.view().slice(0..g.width * self.rank));
            ops.matmul_forward(y.reborrow(), low, wide, m, g.width, self.rank, WriteMode::Accumulate);
        }
    }

    /// Computes the gradients of the LoRA matrices A and B of all adapters of one matmul, and
    /// writes them to `grads`, the gradient of the layer's parameters. `x` is the input of the
    /// group's matmul, and `dy` the gradient of its output. Keeps the gradients of `A·dropout(x)`
    /// in `s` for [`LayerAdapters::backward_input`].
    pub(super) fn backward_weight(
        &self,
        group: usize,
        input: &LayerInput,
        grads: &mut ViewMut,
        (x, dy): (View, View),
        s: &mut LoraScratch,
    ) {
        let (ops, g, m, r) = (input.ops, &self.groups[group], input.batch.row_count(), self.rank);
        for (i, ad) in g.adapters.iter().enumerate() {
            let has_dropout = self.compute_low_rank_activation(g, ad, input, x, s);
            let low = s.low_rank.view().slice(0..m * r);
            let mut d_padded_b = s.d_padded_b.view_mut().slice(0..g.width * r);
            ops.matmul_backward_weight(d_padded_b.reborrow(), dy, low, m, g.width, r, WriteMode::Overwrite);
            let db = d_padded_b.as_view().slice(ad.columns.start * r..ad.columns.end * r);
            ops.copy(grads.slice_mut(ad.b.clone()), db);
            ops.scale(grads.slice_mut(ad.b.clone()), self.scale);
            self.write_scaled_padded_b(ops, g, ad, input.params, s.padded_b);
            let mut d_low_rank = s.d_low_rank.view_mut().slice(i * m * r..(i + 1) * m * r);
            let wide = s.padded_b.view().slice(0..g.width * r);
            ops.matmul_backward_input(d_low_rank.reborrow(), dy, wide, m, g.width, r, WriteMode::Overwrite);
            let x = if has_dropout { s.input.view().slice(0..m * g.inputs) } else { x };
            let da = grads.slice_mut(ad.a.clone());
            ops.matmul_backward_weight(da, d_low_rank.as_view(), x, m, r, g.inputs, WriteMode::Overwrite);
        }
    }

    /// Adds to `dx`, the gradient `[rows, in]` of a matmul's input, the part that flows through the
    /// matmul's LoRA adapters. Must immediately follow [`LayerAdapters::backward_weight`] of that
    /// group.
    pub(super) fn backward_input(
        &self,
        group: usize,
        input: &LayerInput,
        mut dx: ViewMut,
        s: &mut LoraScratch,
    ) {
        let (ops, g, m, r) = (input.ops, &self.groups[group], input.batch.row_count(), self.rank);
        for (i, ad) in g.adapters.iter().enumerate() {
            let (a, d_low) =
                (input.params.slice(ad.a.clone()), s.d_low_rank.view().slice(i * m * r..(i + 1) * m * r));
            if !self.has_dropout(input.batch) {
                ops.matmul_backward_input(dx.reborrow(), d_low, a, m, r, g.inputs, WriteMode::Accumulate);
                continue;
            }
            let mut t = s.input.view_mut().slice(0..m * g.inputs);
            ops.matmul_backward_input(t.reborrow(), d_low, a, m, r, g.inputs, WriteMode::Overwrite);
            ops.dropout(t.reborrow(), &self.create_adapter_dropout(ad, g.inputs, input.batch));
            ops.add(dx.reborrow(), t.as_view());
        }
    }

    /// Computes the low-rank activation `A·dropout(x)` of one LoRA adapter, and writes it to the
    /// scratch buffer `s.low_rank`. Returns whether elements were dropped; in this case, writes the
    /// input after dropout to `s.input`.
    fn compute_low_rank_activation(
        &self,
        g: &LoraAdapterGroup,
        ad: &LoraAdapter,
        input: &LayerInput,
        x: View,
        s: &mut LoraScratch,
    ) -> bool {
        let (ops, m, has_dropout) = (input.ops, input.batch.row_count(), self.has_dropout(input.batch));
        let x = match has_dropout {
            false => x,
            true => {
                let mut dropped = s.input.view_mut().slice(0..m * g.inputs);
                ops.cast(dropped.reborrow(), x.slice(0..m * g.inputs));
                ops.dropout(dropped, &self.create_adapter_dropout(ad, g.inputs, input.batch));
                s.input.view().slice(0..m * g.inputs)
            }
        };
        let (low, a) = (s.low_rank.view_mut().slice(0..m * self.rank), input.params.slice(ad.a.clone()));
        ops.matmul_forward(low, x, a, m, self.rank, g.inputs, WriteMode::Overwrite);
        has_dropout
    }

    /// Writes the matrix B of one LoRA adapter, multiplied by the LoRA factor, to the adapter's
    /// rows of `padded_b`, and zeros all other rows.
    fn write_scaled_padded_b(
        &self,
        ops: &dyn Ops,
        g: &LoraAdapterGroup,
        ad: &LoraAdapter,
        p: View,
        padded_b: &mut Buf,
    ) {
        ops.fill_with_zeros(padded_b.view_mut().slice(0..g.width * self.rank));
        let mut b = padded_b.view_mut().slice(ad.columns.start * self.rank..ad.columns.end * self.rank);
        ops.cast(b.reborrow(), p.slice(ad.b.clone()));
        ops.scale(b, self.scale);
    }

    /// Returns whether dropout applies to the inputs of the LoRA adapters in the micro-batch
    /// `batch`. Only micro-batches of training have dropout.
    fn has_dropout(&self, batch: &MicroBatch) -> bool {
        batch.first_sample.is_some() && self.dropout_rate > 0.0
    }

    /// Returns the rate, random key and first sample for dropout of a LoRA adapter's input, `[rows,
    /// inputs]`, in the micro-batch `batch`. The mask depends on the run's seed, the module, the
    /// sample's number in the run and the position in the sample. The mask does not depend on rank
    /// or micro-batch.
    fn create_adapter_dropout(&self, ad: &LoraAdapter, inputs: usize, batch: &MicroBatch) -> SampleDropout {
        SampleDropout {
            key: ad.rng.key(),
            probability: self.dropout_rate,
            sample_len: batch.seq_len * inputs,
            first_sample: batch.first_sample.unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::linear_layout::LinearLayout;
    use device::{Cpu, ops::VectorOps};

    #[test]
    fn a_dropout_mask_depends_only_on_the_sample_and_the_positions() {
        let targets = LoraTargets::Names(vec!["b".into()]);
        let spec = LoraSpec { from: None, rank: 2, alpha: 2.0, dropout: Some(0.3), rslora: false, targets };
        let (inputs, t) = (37, 50);
        let linear = |index, modules| LinearLayout { weight: 0..0, bias: None, inputs, modules, index };
        let first = linear(0, vec![("a", 5), ("b", 7), ("c", 3)]);
        let linears = [first, linear(1, Vec::new()), linear(2, Vec::new()), linear(3, Vec::new())];
        let layer = AdaptableLayerMatmuls { prefix: "x.".into(), unit_len: 100, linears };
        let adapters = LayerAdapters::new(&LoraConfig { spec, seed: 3 }, &layer);
        let [only] = adapters.groups[0].adapters.as_slice() else { panic!("one target") };
        assert_eq!((only.columns.clone(), only.a.clone(), only.b.clone()), (5..12, 100..174, 174..188));
        let masked = |first, b| {
            let batch =
                MicroBatch { sequences: b, seq_len: t, first_sample: Some(first), ..MicroBatch::default() };
            let mut x = vec![1.0; b * t * inputs];
            Cpu::new(2).dropout((&mut x[..]).into(), &adapters.create_adapter_dropout(only, inputs, &batch));
            x
        };
        let masks = masked(10, 4);
        assert_eq!(masks, [masked(10, 1), masked(11, 1), masked(12, 2)].concat());
        let keep = (1.0 / 0.7) as f32;
        assert!(masks.iter().all(|x| *x == 0.0 || *x == keep));
        let dropped = masks.iter().filter(|x| **x == 0.0).count() as f64 / masks.len() as f64;
        assert!((dropped - 0.3).abs() < 0.02, "{dropped}");
        assert_ne!(masked(10, 1), masked(11, 1));
    }
}
