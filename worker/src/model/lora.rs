//! Low-rank adapters of frozen matrices (LoRA, Hu et al. 2021): `y = W·x + s·B·A·dropout(x)` with
//! `s = alpha / rank`, or `alpha / √rank` for rsLoRA (Kalajdzievski 2023).
//!
//! An adapter consists of two parameters with PEFT's names, without the prefix of its wrapper:
//! `….q_proj.lora_A.weight`, `[rank, in]`, and `….q_proj.lora_B.weight`, `[out, rank]`. A is
//! initialized like PEFT's, uniformly within 1/√in, and B with zeros, so that a new adapter does
//! not change the output. In a layer's unit the adapters follow the other tensors.
use super::{
    Batch,
    error::{ModelError, Result},
    hf_config::shorten,
};
use crate::{
    params::{ParamInit, ParamSpec, ParamUnit},
    rng::{Purpose, RandomStream},
};
use contract::job::{LoraSpec, LoraTargets};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{Dropout, WriteMode},
};
use std::ops::Range;

/// The configuration of the adapters of a model.
#[derive(Clone, Debug)]
pub struct Lora {
    /// The `train.lora` section, completed by the configuration in the adapter directory that it
    /// names.
    pub spec: LoraSpec,
    /// The run's seed, which selects the dropout masks.
    pub seed: u64,
}

impl Lora {
    /// Whether the module of this name gets an adapter.
    fn targets(&self, module: &str) -> bool {
        match &self.spec.targets {
            LoraTargets::AllLinear => true,
            LoraTargets::Names(names) => names.iter().any(|n| is_target(module, n)),
        }
    }

    /// Checks that every target matches one of the modules, given by name. `has_experts` is whether
    /// the model has experts, which are not among the modules.
    ///
    /// # Errors
    /// [`ModelError::LoraTargetUnknown`].
    pub(super) fn check_targets<'a>(
        &self,
        modules: impl Iterator<Item = &'a str> + Clone,
        has_experts: bool,
    ) -> Result<()> {
        let LoraTargets::Names(names) = &self.spec.targets else { return Ok(()) };
        let Some(unknown) = names.iter().find(|n| !modules.clone().any(|m| is_target(m, n))) else {
            return Ok(());
        };
        let mut supported: Vec<String> =
            modules.filter_map(|m| m.rsplit('.').next()).map(Into::into).collect();
        supported.sort_unstable();
        supported.dedup();
        Err(ModelError::LoraTargetUnknown { target: shorten(unknown), supported, has_experts })
    }
}

/// Whether target `name` selects the module, as in PEFT: the names are equal, or the module's name
/// ends with a dot and the target's name.
fn is_target(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Matrices that are computed as one matmul: they have a common input, and their outputs are
/// adjacent columns.
pub(super) struct FusedLinears<'a> {
    /// The prefix of their names, with the dot.
    pub(super) prefix: String,
    /// The width of the input.
    pub(super) inputs: usize,
    /// The name and the width of the output of each matrix.
    pub(super) modules: &'a [(&'a str, usize)],
}

impl FusedLinears<'_> {
    /// The full names of the matrices.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.modules.iter().map(|(name, _)| format!("{}{name}", self.prefix))
    }
}

/// The adapter of one matrix.
struct Adapter {
    /// The range of A in the flat vector of the layer's unit.
    a: Range<usize>,
    /// The range of B.
    b: Range<usize>,
    /// The columns of the matrix in the output of its group.
    columns: Range<usize>,
    /// The random numbers of the dropout masks.
    rng: RandomStream,
}

/// The adapters of matrices that are computed as one matmul.
struct AdapterGroup {
    /// The width of the input.
    inputs: usize,
    /// The width of the output of all matrices of the group.
    width: usize,
    adapters: Vec<Adapter>,
}

/// The adapters of one layer.
pub(super) struct Adapters {
    groups: Vec<AdapterGroup>,
    params: Vec<ParamSpec>,
    rank: usize,
    /// The factor s of the adapters' output.
    scale: f32,
    dropout_rate: f64,
}

/// The number of buffers that adapters add to the scratch buffers of a model.
pub(super) const SCRATCH_BUFFERS: usize = 5;

/// The scratch buffers that the adapters of all layers use. They are f32 in every precision.
pub(super) struct LoraScratch<'a> {
    /// The input of a group after dropout, or its gradient, `[rows, in]`.
    input: &'a mut Buf,
    /// `A·dropout(x)` of one adapter, `[rows, rank]`.
    low_rank: &'a mut Buf,
    /// The gradients of `A·dropout(x)` of each adapter of a group, `[adapters, rows, rank]`.
    d_low_rank: &'a mut Buf,
    /// `s·B` of one adapter in the rows of its columns, and zeros elsewhere, `[width, rank]`.
    padded_b: &'a mut Buf,
    /// The gradient of `padded_b`.
    d_padded_b: &'a mut Buf,
}

impl<'a> LoraScratch<'a> {
    /// The views of the buffers whose lengths are [`scratch_lengths`].
    pub(super) fn new(
        [input, low_rank, d_low_rank, padded_b, d_padded_b]: [&'a mut Buf; SCRATCH_BUFFERS],
    ) -> Self {
        LoraScratch { input, low_rank, d_low_rank, padded_b, d_padded_b }
    }
}

/// The lengths of the buffers of [`LoraScratch`] for the adapters of these layers and `rows` rows.
pub(super) fn scratch_lengths(layers: &[Adapters], rows: usize) -> [usize; SCRATCH_BUFFERS] {
    let mut lengths = [0; SCRATCH_BUFFERS];
    for adapters in layers {
        for g in adapters.groups.iter().filter(|g| !g.adapters.is_empty()) {
            let input = if adapters.dropout_rate > 0.0 { rows * g.inputs } else { 0 };
            let low = rows * adapters.rank;
            let padded_b = g.width * adapters.rank;
            let needed = [input, low, low * g.adapters.len(), padded_b, padded_b];
            lengths.iter_mut().zip(needed).for_each(|(a, b)| *a = b.max(*a));
        }
    }
    lengths
}

impl Adapters {
    /// Lays out the adapters of a layer from offset `at` of the flat vector of its unit.
    pub(super) fn new(lora: &Lora, fused: &[FusedLinears], mut at: usize) -> Self {
        let (spec, mut params) = (&lora.spec, Vec::new());
        let rank = spec.rank as usize;
        let mut groups = Vec::with_capacity(fused.len());
        for t in fused {
            let (mut adapters, mut width) = (Vec::new(), 0);
            for &(name, outputs) in t.modules {
                let columns = width..width + outputs;
                width = columns.end;
                let module = format!("{}{name}", t.prefix);
                if !lora.targets(&module) {
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
                adapters.push(Adapter { a, b, columns, rng });
            }
            groups.push(AdapterGroup { inputs: t.inputs, width, adapters });
        }
        let rank_factor = f64::from(spec.rank);
        let scale = (spec.alpha / if spec.rslora { rank_factor.sqrt() } else { rank_factor }) as f32;
        Adapters { groups, params, rank, scale, dropout_rate: spec.dropout.unwrap_or(0.0) }
    }

    /// The unit of a layer with the parameters of its adapters appended.
    pub(super) fn extend(&self, unit: ParamUnit) -> ParamUnit {
        ParamUnit::new(unit.name, unit.params.into_iter().chain(self.params.iter().cloned()).collect())
    }

    /// Adds the outputs of the adapters of a group for input `x`, `[rows, in]`, to `y`,
    /// `[rows, width]`. `p` is the parameters of the layer.
    pub(super) fn forward(
        &self,
        ops: &dyn Ops,
        group: usize,
        (p, batch): (View, &Batch),
        x: View,
        mut y: ViewMut,
        s: &mut LoraScratch,
    ) {
        let (g, m) = (&self.groups[group], batch.rows());
        for ad in &g.adapters {
            self.project_down(ops, g, ad, (p, batch), x, s);
            self.pad_b(ops, g, ad, p, s.padded_b);
            let (low, wide) =
                (s.low_rank.view().slice(0..m * self.rank), s.padded_b.view().slice(0..g.width * self.rank));
            ops.matmul_forward(y.reborrow(), low, wide, m, g.width, self.rank, WriteMode::Accumulate);
        }
    }

    /// Computes the gradients of A and B from the group's input and `dy`, the gradient of its
    /// output. Keeps the gradients of `A·dropout(x)` in `s` for [`Adapters::backward_input`].
    pub(super) fn backward_weight(
        &self,
        ops: &dyn Ops,
        group: usize,
        (p, batch): (View, &Batch),
        grads: &mut ViewMut,
        (x, dy): (View, View),
        s: &mut LoraScratch,
    ) {
        let (g, m, r) = (&self.groups[group], batch.rows(), self.rank);
        for (i, ad) in g.adapters.iter().enumerate() {
            let has_dropout = self.project_down(ops, g, ad, (p, batch), x, s);
            let low = s.low_rank.view().slice(0..m * r);
            let mut d_padded_b = s.d_padded_b.view_mut().slice(0..g.width * r);
            ops.matmul_backward_weight(d_padded_b.reborrow(), dy, low, m, g.width, r, WriteMode::Overwrite);
            let db = d_padded_b.as_view().slice(ad.columns.start * r..ad.columns.end * r);
            ops.copy(grads.slice_mut(ad.b.clone()), db);
            ops.scale(grads.slice_mut(ad.b.clone()), self.scale);
            self.pad_b(ops, g, ad, p, s.padded_b);
            let mut d_low_rank = s.d_low_rank.view_mut().slice(i * m * r..(i + 1) * m * r);
            let wide = s.padded_b.view().slice(0..g.width * r);
            ops.matmul_backward_input(d_low_rank.reborrow(), dy, wide, m, g.width, r, WriteMode::Overwrite);
            let x = if has_dropout { s.input.view().slice(0..m * g.inputs) } else { x };
            let da = grads.slice_mut(ad.a.clone());
            ops.matmul_backward_weight(da, d_low_rank.as_view(), x, m, r, g.inputs, WriteMode::Overwrite);
        }
    }

    /// Adds the gradient through the adapters of a group to `dx`, `[rows, in]`. Requires
    /// [`Adapters::backward_weight`] of that group immediately before.
    pub(super) fn backward_input(
        &self,
        ops: &dyn Ops,
        group: usize,
        (p, batch): (View, &Batch),
        mut dx: ViewMut,
        s: &mut LoraScratch,
    ) {
        let (g, m, r) = (&self.groups[group], batch.rows(), self.rank);
        for (i, ad) in g.adapters.iter().enumerate() {
            let (a, d_low) = (p.slice(ad.a.clone()), s.d_low_rank.view().slice(i * m * r..(i + 1) * m * r));
            if !self.has_dropout(batch) {
                ops.matmul_backward_input(dx.reborrow(), d_low, a, m, r, g.inputs, WriteMode::Accumulate);
                continue;
            }
            let mut t = s.input.view_mut().slice(0..m * g.inputs);
            ops.matmul_backward_input(t.reborrow(), d_low, a, m, r, g.inputs, WriteMode::Overwrite);
            ops.dropout(t.reborrow(), &self.dropout_mask(ad, g.inputs, batch));
            ops.add(dx.reborrow(), t.as_view());
        }
    }

    /// Writes `A·dropout(x)` to `s.low_rank`. Returns whether there was dropout; then `s.input` is
    /// the input after dropout.
    fn project_down(
        &self,
        ops: &dyn Ops,
        g: &AdapterGroup,
        ad: &Adapter,
        (p, batch): (View, &Batch),
        x: View,
        s: &mut LoraScratch,
    ) -> bool {
        let (m, has_dropout) = (batch.rows(), self.has_dropout(batch));
        let x = match has_dropout {
            false => x,
            true => {
                ops.cast(s.input.view_mut().slice(0..m * g.inputs), x.slice(0..m * g.inputs));
                ops.dropout(
                    s.input.view_mut().slice(0..m * g.inputs),
                    &self.dropout_mask(ad, g.inputs, batch),
                );
                s.input.view().slice(0..m * g.inputs)
            }
        };
        let low = s.low_rank.view_mut().slice(0..m * self.rank);
        ops.matmul_forward(low, x, p.slice(ad.a.clone()), m, self.rank, g.inputs, WriteMode::Overwrite);
        has_dropout
    }

    /// Writes `s·B` to the rows of `padded_b` that correspond to the adapter's columns, and zeros
    /// to the others.
    fn pad_b(&self, ops: &dyn Ops, g: &AdapterGroup, ad: &Adapter, p: View, padded_b: &mut Buf) {
        ops.clear(padded_b.view_mut().slice(0..g.width * self.rank));
        let mut b = padded_b.view_mut().slice(ad.columns.start * self.rank..ad.columns.end * self.rank);
        ops.cast(b.reborrow(), p.slice(ad.b.clone()));
        ops.scale(b, self.scale);
    }

    /// Whether elements of this micro-batch are dropped; never outside of training.
    fn has_dropout(&self, batch: &Batch) -> bool {
        batch.first_sample.is_some() && self.dropout_rate > 0.0
    }

    /// The dropout mask of an adapter's input, `[rows, inputs]`. It depends on the run's seed, the
    /// module, the sample's number in the run and the position in the sample, and not on rank or
    /// micro-batch.
    fn dropout_mask(&self, ad: &Adapter, inputs: usize, batch: &Batch) -> Dropout {
        Dropout {
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
    use device::Cpu;

    #[test]
    fn a_dropout_mask_depends_only_on_the_sample_and_the_positions() {
        let targets = LoraTargets::Names(vec!["b".into()]);
        let spec = LoraSpec { from: None, rank: 2, alpha: 2.0, dropout: Some(0.3), rslora: false, targets };
        let (inputs, t) = (37, 50);
        let fused = FusedLinears { prefix: "x.".into(), inputs, modules: &[("a", 5), ("b", 7), ("c", 3)] };
        let adapters = Adapters::new(&Lora { spec, seed: 3 }, &[fused], 100);
        let [only] = adapters.groups[0].adapters.as_slice() else { panic!("one target") };
        assert_eq!((only.columns.clone(), only.a.clone(), only.b.clone()), (5..12, 100..174, 174..188));
        let masked = |first, b| {
            let batch = Batch { sequences: b, seq_len: t, first_sample: Some(first), ..Batch::default() };
            let mut x = vec![1.0; b * t * inputs];
            Cpu::new(2).dropout((&mut x[..]).into(), &adapters.dropout_mask(only, inputs, &batch));
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
