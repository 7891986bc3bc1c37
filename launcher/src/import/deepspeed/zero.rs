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
    for name in ["stage3_max_live_parameters", "max_live_parameters"] {
        if let Some(count) = part.integer_up_to(name, 0, u64::MAX.into()) {
            draft.wish(&part.path(name), "train.zero.max_live_parameters", count.to_string());
        }
    }
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

/// Where optimizer states and parameters lie: states in files of a directory, or in memory with everything else.
fn offload(draft: &mut Draft, part: &mut Keys<'_>) {
    const OFFLOAD: &str = "train.zero.offload";
    const INSTEAD: &str = "for states in files: `train.zero.offload: {optimizer: DIRECTORY}`; with `cluster.devices: cuda` in the \
                           host's memory: `{optimizer: cpu}`";
    for (name, optimizer) in [("offload_optimizer", true), ("offload_param", false)] {
        let Some(mut inner) = part.section(name) else { continue };
        let device = inner.text("device").unwrap_or_else(|| "none".to_owned());
        let (from, directory) = (inner.path("device"), inner.text("nvme_path"));
        match (device.as_str(), optimizer, &directory) {
            ("none", ..) => {}
            ("nvme", true, Some(path)) => {
                let place = format!("{{optimizer: {}}}", contract::job::quoted(path));
                draft.wish(&inner.path("nvme_path"), OFFLOAD, place);
            }
            ("nvme", true, None) => draft.not_carried(&from, "it names no nvme_path", INSTEAD),
            (_, true, _) => draft.not_carried(&from, in_memory("optimizer states", &device), INSTEAD),
            (_, false, _) => draft.not_carried(&from, in_memory("parameters", &device), ""),
        }
        let (rest, problems) = inner.rest();
        part.problems.extend(problems);
        for (key, value) in rest.into_iter().filter(|_| device != "none") {
            draft.not_carried(&key, format!("launch has no such setting (it is {value})"), "");
        }
    }
    for (old, what) in [
        ("cpu_offload", "optimizer states"),
        ("cpu_offload_params", "parameters"),
        ("cpu_offload_param", "parameters"),
    ] {
        if part.boolean(old) == Some(true) {
            draft.not_carried(&part.path(old), in_memory(what, "cpu"), "");
        }
    }
    if part.boolean("cpu_offload_use_pin_memory") == Some(true) {
        draft.not_carried(&part.path("cpu_offload_use_pin_memory"), "launch has no such setting", "");
    }
}

/// Why nothing moves to this device.
fn in_memory(what: &str, device: &str) -> String {
    format!("launch keeps {what} in the memory that it computes in (it is {})", device.escape_debug())
}
