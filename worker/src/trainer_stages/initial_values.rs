//! Fills the parameters of a new model with random initial values.
use crate::{
    params::{ParamInit, ParamUnit, Segment},
    rng::{Purpose, fill_normal, fill_uniform},
    zero::engine::ZeroEngine,
};
use device::{Dtype, Ops, View};
use std::ops::Range;

/// Writes random initial values to this rank's part of parameter unit `u` (tensors that are
/// gathered together), for parameters whose names `selects` accepts.
///
/// A value depends only on the seed and the logical element, so the weights are the same for every
/// sharding. Afterwards, a 16-bit compute copy is valid only for the selected parameters.
pub(super) fn initialise_unit(
    engine: &ZeroEngine,
    ops: &dyn Ops,
    u: usize,
    seed: u64,
    selects: impl Fn(&str) -> bool,
) {
    let (unit, resident, computed) =
        (&engine.shards[u].unit, engine.resident_range(u), engine.range_of_compute_copy(u));
    let longest = resident.len().max(computed.len());
    let mut buffer = ops.alloc_staging(Dtype::F32, INIT_BUFFER_ELEMENTS.min(longest));
    let is_selected = |seg: &Segment| selects(&unit.params[seg.param].name);
    for seg in unit.list_segments(resident.clone()).iter().filter(|seg| is_selected(seg)) {
        for from in seg.flat.clone().step_by(INIT_BUFFER_ELEMENTS) {
            let range = from..seg.flat.end.min(from + INIT_BUFFER_ELEMENTS);
            let values = &mut buffer.host_slice_mut()[..range.len()];
            fill_initial_values(unit, range.clone(), seed, &selects, values);
            engine.write_resident_params(u, range.start - resident.start, View::from(&*values));
        }
    }
    if resident == computed {
        return engine.refresh_compute_copy(u);
    }
    // The compute copy has more elements than this rank's shard of the fp32 master weights.
    for offset in (0..computed.len()).step_by(INIT_BUFFER_ELEMENTS) {
        let values = &mut buffer.host_slice_mut()[..INIT_BUFFER_ELEMENTS.min(computed.len() - offset)];
        values.fill(0.0);
        let from = computed.start + offset;
        fill_initial_values(unit, from..from + values.len(), seed, &selects, values);
        engine.update_compute_copy(u, offset, View::from(&*values));
    }
}

/// The number of elements of the buffer in host memory through which initial values are copied to
/// the device.
const INIT_BUFFER_ELEMENTS: usize = 1 << 20;

/// Writes random initial values for a range of a parameter unit (concatenated tensors that are
/// gathered together) to `out`. Skips parameters that `selects` does not accept.
fn fill_initial_values(
    unit: &ParamUnit,
    range: Range<usize>,
    seed: u64,
    selects: impl Fn(&str) -> bool,
    out: &mut [f32],
) {
    for seg in unit.list_segments(range.clone()) {
        let spec = &unit.params[seg.param];
        if !selects(&spec.name) {
            continue;
        }
        let out = &mut out[seg.flat.start - range.start..seg.flat.end - range.start];
        let first = seg.elements.start as u64;
        match spec.init {
            ParamInit::Normal(std) => fill_normal(out, seed, Purpose::Init, &spec.name, first, std),
            ParamInit::Uniform(bound) => {
                fill_uniform(out, seed, Purpose::Init, &spec.name, first, -bound, bound);
            }
            ParamInit::Ones => out.fill(1.0),
            ParamInit::Zeros => out.fill(0.0),
        }
    }
}
