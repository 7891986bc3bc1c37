//! `zero_optimization`.
use super::{
    super::{Draft, keys::Keys, wording::shown},
    tables::ZERO_LEFT_OUT,
};
use contract::job::ItemValue;

/// The stage, where states lie, and what is gathered at the end.
pub(super) fn zero(draft: &mut Draft, keys: &mut Keys<'_>) {
    let Some(mut part) = keys.section("zero_optimization") else {
        return draft.wish("zero_optimization", "train.zero.stage", "0");
    };
    let stage = part.integer("stage", 0).unwrap_or(0);
    draft.wish(&part.path("stage"), "train.zero.stage", stage.to_string());
    gather(draft, &mut part);
    offload(draft, &mut part);
    for (name, why) in ZERO_LEFT_OUT {
        let Some(item) = part.take(name) else { continue };
        if !matches!(item.value, ItemValue::Bool(false)) {
            draft.not_carried(&part.path(name), format!("{why} (it is {})", shown(item)), "");
        }
    }
    let (rest, problems) = part.rest();
    keys.problems.extend(problems);
    for (key, value) in rest {
        draft.not_carried(&key, format!("launch doesn't know this key (it is {value})"), "");
    }
}

fn gather(draft: &mut Draft, part: &mut Keys<'_>) {
    for name in [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ] {
        if let Some(yes) = part.boolean(name) {
            let path = "checkpoint.gather_16bit_weights_on_model_save";
            draft.wish(&part.path(name), path, yes.to_string());
        }
    }
}

/// Where optimizer states and parameters lie. `cpu_offload` is how old configs say it.
fn offload(draft: &mut Draft, part: &mut Keys<'_>) {
    let mut devices: Vec<(String, String)> = Vec::new();
    for name in ["offload_optimizer", "offload_param"] {
        let Some(mut inner) = part.section(name) else { continue };
        let device = inner.text("device").unwrap_or_else(|| "none".to_owned());
        let from = inner.path("device");
        if device != "none" {
            devices.push((from, device.clone()));
        }
        let (rest, problems) = inner.rest();
        part.problems.extend(problems);
        for (key, value) in rest.into_iter().filter(|_| device != "none") {
            draft.not_carried(&key, format!("launch has no such setting (it is {value})"), "");
        }
    }
    for name in ["cpu_offload", "cpu_offload_params", "cpu_offload_param"] {
        if part.boolean(name) == Some(true) {
            devices.push((part.path(name), "cpu".to_owned()));
        }
    }
    if let Some((_, device)) = devices.first().cloned() {
        let (same, others): (Vec<_>, Vec<_>) = devices.into_iter().partition(|(_, d)| *d == device);
        let from: Vec<String> = same.into_iter().map(|(from, _)| from).collect();
        draft.wish(&from.join(", "), "train.zero.offload", contract::job::quoted(&device));
        for (from, other) in others {
            let why = format!("`train.zero.offload` is one place, not also `{}`", other.escape_debug());
            draft.not_carried(&from, why, "");
        }
    }
    if part.boolean("cpu_offload_use_pin_memory") == Some(true) {
        draft.not_carried(&part.path("cpu_offload_use_pin_memory"), "launch has no such setting", "");
    }
}
