//! Low-rank adapters (LoRA, Hu et al. 2021) beside frozen matrices: `y = W·x + s·B·A·dropout(x)`, `s = alpha / rank`.
//!
//! An adapter is two parameters of its own, named as PEFT names them (without its wrapper's prefix): `….q_proj.lora_A.weight`
//! `[rank, in]` and `….q_proj.lora_B.weight` `[out, rank]`. A begins as PEFT's does, uniform within 1/√in; B with zeros, so
//! that an adapter first changes nothing. They lie behind the layer's other tensors in its unit.
use super::Batch;
use crate::{
    params::{Init, ParamSpec, Unit},
    rng::{Purpose, RandomStream},
};
use contract::job::{LoraSpec, LoraTargets};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{Dropout, Write},
};
use std::ops::Range;

/// What a model needs to know to have adapters.
#[derive(Clone, Debug)]
pub struct Lora {
    /// The job's, with the numbers of the folder that it names.
    pub spec: LoraSpec,
    /// The run's seed: it decides what dropout drops.
    pub seed: u64,
}

impl Lora {
    /// Does the module of this name get an adapter? As in PEFT: it has the name of a target, or ends in `.` and that.
    fn targets(&self, module: &str) -> bool {
        match &self.spec.targets {
            LoraTargets::AllLinear => true,
            LoraTargets::Names(names) => names.iter().any(|n| is_target(module, n)),
        }
    }

    /// Refuses a target that none of these modules is.
    pub(super) fn check<'a>(&self, modules: impl Iterator<Item = &'a str> + Clone) -> Result<(), String> {
        let LoraTargets::Names(names) = &self.spec.targets else { return Ok(()) };
        let Some(absent) = names.iter().find(|n| !modules.clone().any(|m| is_target(m, n))) else {
            return Ok(());
        };
        let mut known: Vec<&str> = modules.filter_map(|m| m.rsplit('.').next()).collect();
        known.sort_unstable();
        known.dedup();
        Err(format!(
            "no matrix of the layers that can have an adapter is named `{}`; there are {}",
            absent.chars().take(100).collect::<String>(),
            known.join(", ")
        ))
    }
}

fn is_target(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Matrices that are multiplied as one: they have the same input, and their outputs lie side by side.
pub(super) struct Together<'a> {
    /// What their names begin with.
    pub(super) prefix: String,
    pub(super) inp: usize,
    /// Name and width of the output of each.
    pub(super) named: &'a [(&'a str, usize)],
}

/// An adapter of a layer.
struct Adapter {
    /// A and B in the layer's flat vector.
    a: Range<usize>,
    b: Range<usize>,
    /// Columns of the group's output.
    out: Range<usize>,
    dropped: RandomStream,
}

/// The adapters of matrices that are multiplied as one.
struct Group {
    inp: usize,
    /// Width of their output together.
    width: usize,
    adapters: Vec<Adapter>,
}

/// The adapters of one layer.
pub(super) struct Adapters {
    groups: Vec<Group>,
    params: Vec<ParamSpec>,
    rank: usize,
    scale: f32,
    dropout: f64,
}

/// Number of buffers that adapters add to a model's scratch.
pub(super) const SCRATCH: usize = 5;

/// Memory that adapters of all layers share: `f32` in every precision.
pub(super) struct Scratch<'a> {
    /// An input with dropout; a gradient of one.
    input: &'a mut Buf,
    /// `A·x`, rank per row.
    low: &'a mut Buf,
    /// Gradients of it, of each adapter of a group.
    d_low: &'a mut Buf,
    /// B times the factor among zeros, as wide as the group's output.
    wide: &'a mut Buf,
    d_wide: &'a mut Buf,
}

impl<'a> Scratch<'a> {
    pub(super) fn new([input, low, d_low, wide, d_wide]: [&'a mut Buf; SCRATCH]) -> Self {
        Scratch { input, low, d_low, wide, d_wide }
    }
}

/// Lengths of the scratch that these layers need for `rows` rows.
pub(super) fn scratch_lengths(layers: &[Adapters], rows: usize) -> [usize; SCRATCH] {
    let mut lengths = [0; SCRATCH];
    for of in layers {
        for g in of.groups.iter().filter(|g| !g.adapters.is_empty()) {
            let input = if of.dropout > 0.0 { rows * g.inp } else { 0 };
            let low = rows * of.rank;
            let needed = [input, low, low * g.adapters.len(), g.width * of.rank, g.width * of.rank];
            lengths.iter_mut().zip(needed).for_each(|(a, b)| *a = b.max(*a));
        }
    }
    lengths
}

impl Adapters {
    /// Lays the adapters of a layer out behind `at` of its flat vector.
    pub(super) fn new(lora: &Lora, together: &[Together], mut at: usize) -> Self {
        let (spec, mut params) = (&lora.spec, Vec::new());
        let rank = spec.rank as usize;
        let mut groups = Vec::with_capacity(together.len());
        for t in together {
            let (mut adapters, mut width) = (Vec::new(), 0);
            for &(name, out) in t.named {
                let columns = width..width + out;
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
                let bound = 1.0 / (t.inp as f32).sqrt();
                let a = add("lora_A", [rank, t.inp], Init::Uniform(bound));
                let b = add("lora_B", [out, rank], Init::Zeros);
                let dropped = RandomStream::new(lora.seed, Purpose::Dropout, &module);
                adapters.push(Adapter { a, b, out: columns, dropped });
            }
            groups.push(Group { inp: t.inp, width, adapters });
        }
        let by = f64::from(spec.rank);
        let scale = (spec.alpha / if spec.rslora { by.sqrt() } else { by }) as f32;
        Adapters { groups, params, rank, scale, dropout: spec.dropout.unwrap_or(0.0) }
    }

    /// A layer's unit with its adapters behind.
    pub(super) fn extend(&self, unit: Unit) -> Unit {
        Unit::new(unit.name, unit.params.into_iter().chain(self.params.iter().cloned()).collect())
    }

    /// Adds to `y[rows, width]` what the adapters of a group give for `x[rows, in]`. `p`: the layer's parameters.
    pub(super) fn forward(
        &self,
        ops: &dyn Ops,
        group: usize,
        (p, batch): (View, &Batch),
        x: View,
        mut y: ViewMut,
        s: &mut Scratch,
    ) {
        let (g, m) = (&self.groups[group], batch.rows());
        for ad in &g.adapters {
            self.lower(ops, g, ad, (p, batch), x, s);
            self.widen(ops, g, ad, p, s.wide);
            let (low, wide) =
                (s.low.view().slice(0..m * self.rank), s.wide.view().slice(0..g.width * self.rank));
            ops.matmul_forward(y.reborrow(), low, wide, m, g.width, self.rank, Write::Add);
        }
    }

    /// Gradients of A and B from `dy`, that of the group's output; leaves those of `A·x` for [`Adapters::backward_input`].
    pub(super) fn backward_weight(
        &self,
        ops: &dyn Ops,
        group: usize,
        (p, batch): (View, &Batch),
        grads: &mut ViewMut,
        (x, dy): (View, View),
        s: &mut Scratch,
    ) {
        let (g, m, r) = (&self.groups[group], batch.rows(), self.rank);
        for (i, ad) in g.adapters.iter().enumerate() {
            let dropped = self.lower(ops, g, ad, (p, batch), x, s);
            let low = s.low.view().slice(0..m * r);
            let mut d_wide = s.d_wide.view_mut().slice(0..g.width * r);
            ops.matmul_backward_weight(d_wide.reborrow(), dy, low, m, g.width, r, Write::Set);
            let own = d_wide.as_view().slice(ad.out.start * r..ad.out.end * r);
            ops.copy(grads.slice_mut(ad.b.clone()), own);
            ops.scale(grads.slice_mut(ad.b.clone()), self.scale);
            self.widen(ops, g, ad, p, s.wide);
            let mut d_low = s.d_low.view_mut().slice(i * m * r..(i + 1) * m * r);
            let wide = s.wide.view().slice(0..g.width * r);
            ops.matmul_backward_input(d_low.reborrow(), dy, wide, m, g.width, r, Write::Set);
            let x = if dropped { s.input.view().slice(0..m * g.inp) } else { x };
            let da = grads.slice_mut(ad.a.clone());
            ops.matmul_backward_weight(da, d_low.as_view(), x, m, r, g.inp, Write::Set);
        }
    }

    /// Adds to `dx[rows, in]`, after [`Adapters::backward_weight`] of the same group.
    pub(super) fn backward_input(
        &self,
        ops: &dyn Ops,
        group: usize,
        (p, batch): (View, &Batch),
        mut dx: ViewMut,
        s: &mut Scratch,
    ) {
        let (g, m, r) = (&self.groups[group], batch.rows(), self.rank);
        for (i, ad) in g.adapters.iter().enumerate() {
            let (a, d_low) = (p.slice(ad.a.clone()), s.d_low.view().slice(i * m * r..(i + 1) * m * r));
            if self.share(batch) == 0.0 {
                ops.matmul_backward_input(dx.reborrow(), d_low, a, m, r, g.inp, Write::Add);
                continue;
            }
            let mut t = s.input.view_mut().slice(0..m * g.inp);
            ops.matmul_backward_input(t.reborrow(), d_low, a, m, r, g.inp, Write::Set);
            ops.dropout(t.reborrow(), &self.dropped(ad, g.inp, batch));
            ops.add(dx.reborrow(), t.as_view());
        }
    }

    /// `A·dropout(x)` into `s.low`. True: the input with dropout is in `s.input`; else nothing was dropped.
    fn lower(
        &self,
        ops: &dyn Ops,
        g: &Group,
        ad: &Adapter,
        (p, batch): (View, &Batch),
        x: View,
        s: &mut Scratch,
    ) -> bool {
        let (m, dropped) = (batch.rows(), self.share(batch) > 0.0);
        let x = match dropped {
            false => x,
            true => {
                ops.cast(s.input.view_mut().slice(0..m * g.inp), x.slice(0..m * g.inp));
                ops.dropout(s.input.view_mut().slice(0..m * g.inp), &self.dropped(ad, g.inp, batch));
                s.input.view().slice(0..m * g.inp)
            }
        };
        let low = s.low.view_mut().slice(0..m * self.rank);
        ops.matmul_forward(low, x, p.slice(ad.a.clone()), m, self.rank, g.inp, Write::Set);
        dropped
    }

    /// B times the factor, in the rows of `wide` that are its columns of the output; the others are zero.
    fn widen(&self, ops: &dyn Ops, g: &Group, ad: &Adapter, p: View, wide: &mut Buf) {
        ops.clear(wide.view_mut().slice(0..g.width * self.rank));
        let mut own = wide.view_mut().slice(ad.out.start * self.rank..ad.out.end * self.rank);
        ops.cast(own.reborrow(), p.slice(ad.b.clone()));
        ops.scale(own, self.scale);
    }

    /// Share that is dropped of this micro-batch: nothing outside of training.
    fn share(&self, batch: &Batch) -> f64 {
        if batch.first.is_some() { self.dropout } else { 0.0 }
    }

    /// What is dropped: each element is decided by the run's seed, the module, the sample's number in the run and its place in
    /// the sample, never by rank or micro-batch.
    fn dropped(&self, ad: &Adapter, inp: usize, batch: &Batch) -> Dropout {
        Dropout {
            key: ad.dropped.key(),
            share: self.dropout,
            sample: batch.t * inp,
            first: batch.first.unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Cpu;

    #[test]
    fn what_is_dropped_depends_on_the_sample_and_its_positions_alone() {
        let targets = LoraTargets::Names(vec!["b".into()]);
        let spec = LoraSpec { from: None, rank: 2, alpha: 2.0, dropout: Some(0.3), rslora: false, targets };
        let (inp, t) = (37, 50);
        let together = Together { prefix: "x.".into(), inp, named: &[("a", 5), ("b", 7), ("c", 3)] };
        let adapters = Adapters::new(&Lora { spec, seed: 3 }, &[together], 100);
        let [only] = adapters.groups[0].adapters.as_slice() else { panic!("one target") };
        assert_eq!((only.out.clone(), only.a.clone(), only.b.clone()), (5..12, 100..174, 174..188));
        let masked = |first, b| {
            let batch = Batch { b, t, first: Some(first), ..Batch::default() };
            let mut x = vec![1.0; b * t * inp];
            Cpu::new(2).dropout((&mut x[..]).into(), &adapters.dropped(only, inp, &batch));
            x
        };
        let all = masked(10, 4);
        assert_eq!(all, [masked(10, 1), masked(11, 1), masked(12, 2)].concat());
        let keep = (1.0 / 0.7) as f32;
        assert!(all.iter().all(|x| *x == 0.0 || *x == keep));
        let share = all.iter().filter(|x| **x == 0.0).count() as f64 / all.len() as f64;
        assert!((share - 0.3).abs() < 0.02, "{share}");
        assert_ne!(masked(10, 1), masked(11, 1));
    }
}
