//! Converts `zero_optimization`.
use super::{
    super::{Draft, keys::RemainingKeys, wording::display_value},
    tables::UNSUPPORTED_ZERO_KEYS,
};
use contract::job::ItemValue;

/// Converts the stage, the offloading and the gathering of 16-bit weights.
pub(super) fn zero(draft: &mut Draft, keys: &mut RemainingKeys<'_>) {
    let Some(mut part) = keys.section("zero_optimization") else {
        return draft.set_imported("zero_optimization", "train.zero.stage", "0");
    };
    let stage = part.integer("stage", 0).unwrap_or(0);
    draft.set_imported(&part.path("stage"), "train.zero.stage", stage.to_string());
    convert_gather(draft, &mut part);
    for name in ["stage3_max_live_parameters", "max_live_parameters"] {
        if let Some(count) = part.integer_in(name, 0, u64::MAX.into()) {
            draft.set_imported(&part.path(name), "train.zero.max_live_parameters", count.to_string());
        }
    }
    offload(draft, &mut part);
    for (name, reason) in UNSUPPORTED_ZERO_KEYS {
        let Some(item) = part.take(name) else { continue };
        if !matches!(item.value, ItemValue::Bool(false)) {
            draft.not_carried(&part.path(name), format!("{reason} (value: {})", display_value(item)), "");
        }
    }
    let (rest, errors) = part.into_rest();
    keys.errors.extend(errors);
    for (key, value) in rest {
        draft.not_carried(&key, format!("launch does not know this key (value: {value})"), "");
    }
}

fn convert_gather(draft: &mut Draft, part: &mut RemainingKeys<'_>) {
    for name in [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ] {
        if let Some(yes) = part.boolean(name) {
            let path = "checkpoint.gather_16bit_weights_on_model_save";
            draft.set_imported(&part.path(name), path, yes.to_string());
        }
    }
}

/// Converts the offloading of optimizer states and parameters.
fn offload(draft: &mut Draft, part: &mut RemainingKeys<'_>) {
    const OFFLOAD: &str = "train.zero.offload";
    const INSTEAD: &str = "set `train.zero.offload: {optimizer: DIRECTORY}` for files, or `{optimizer: cpu}` \
                           with `cluster.devices: cuda` for host memory";
    for (name, optimizer) in [("offload_optimizer", true), ("offload_param", false)] {
        let Some(mut inner) = part.section(name) else { continue };
        let device = inner.text("device").unwrap_or_else(|| "none".to_owned());
        let (from, directory) = (inner.path("device"), inner.text("nvme_path"));
        match (device.as_str(), optimizer, &directory) {
            ("none", ..) => {}
            ("nvme", true, Some(path)) => {
                let yaml = format!("{{optimizer: {}}}", contract::job::quote_yaml(path));
                draft.set_imported(&inner.path("nvme_path"), OFFLOAD, yaml);
            }
            ("nvme", true, None) => draft.not_carried(&from, "`nvme_path` is missing", INSTEAD),
            (_, true, _) => draft.not_carried(&from, in_memory("optimizer states", &device), INSTEAD),
            (_, false, _) => draft.not_carried(&from, in_memory("parameters", &device), ""),
        }
        let (rest, errors) = inner.into_rest();
        part.errors.extend(errors);
        for (key, value) in rest.into_iter().filter(|_| device != "none") {
            draft.not_carried(&key, format!("launch has no such setting (value: {value})"), "");
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

/// The reason why nothing is moved to this device.
fn in_memory(what: &str, device: &str) -> String {
    format!("launch keeps {what} in the memory that it computes in (value: {})", device.escape_debug())
}
