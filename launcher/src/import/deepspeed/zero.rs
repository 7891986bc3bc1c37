//! Converts `zero_optimization`, the ZeRO settings of a DeepSpeed configuration, to keys of
//! job.yaml.
use super::unsupported_keys::UNSUPPORTED_ZERO_KEYS;
use crate::import::{job_draft::JobDraft, remaining_keys::RemainingKeys, value_text::format_for_note};
use jobspec::DocumentValue;

/// Converts DeepSpeed's ZeRO stage, and its settings for offloading and for gathering 16-bit
/// weights, to keys of job.yaml. Sets stage 0 if the configuration has no section
/// `zero_optimization`.
pub(super) fn convert_zero(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    let Some(mut part) = keys.take_section("zero_optimization") else {
        return draft.set_imported_key("zero_optimization", "train.zero.stage", "0");
    };
    let stage = part.take_integer("stage", 0).unwrap_or(0);
    draft.set_imported_key(&part.full_path_of_key("stage"), "train.zero.stage", stage.to_string());
    convert_weight_gathering(draft, &mut part);
    for name in ["stage3_max_live_parameters", "max_live_parameters"] {
        if let Some(count) = part.take_integer_in_range(name, 0, u64::MAX.into()) {
            draft.set_imported_key(
                &part.full_path_of_key(name),
                "train.zero.max_live_parameters",
                count.to_string(),
            );
        }
    }
    convert_offload(draft, &mut part);
    for (name, reason) in UNSUPPORTED_ZERO_KEYS {
        let Some(item) = part.take(name) else { continue };
        if !matches!(item.value, DocumentValue::Bool(false)) {
            draft.add_not_converted_note(
                &part.full_path_of_key(name),
                format!("{reason} (value: {})", format_for_note(item)),
                "",
            );
        }
    }
    let (rest, errors) = part.into_unconverted_keys();
    keys.errors.extend(errors);
    for (key, value) in rest {
        draft.add_not_converted_note(&key, format!("launch does not know this key (value: {value})"), "");
    }
}

/// Converts DeepSpeed's key for gathering 16-bit weights at each save to the job.yaml key
/// `checkpoint.gather_16bit_weights_on_model_save`. The key has three names.
fn convert_weight_gathering(draft: &mut JobDraft, part: &mut RemainingKeys<'_>) {
    for name in [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ] {
        if let Some(yes) = part.take_boolean(name) {
            let path = "checkpoint.gather_16bit_weights_on_model_save";
            draft.set_imported_key(&part.full_path_of_key(name), path, yes.to_string());
        }
    }
}

/// Sets the job.yaml key `train.zero.offload` if the DeepSpeed configuration offloads optimizer
/// states to files. Adds notes about all other offloading.
fn convert_offload(draft: &mut JobDraft, part: &mut RemainingKeys<'_>) {
    /// The job.yaml key for the place to which optimizer states are offloaded.
    const OFFLOAD_KEY: &str = "train.zero.offload";
    /// The advice that the user gets about the key `train.zero.offload` of job.yaml if an offload
    /// setting of DeepSpeed was not converted.
    const OFFLOAD_ADVICE: &str = "set `train.zero.offload: {optimizer: DIRECTORY}` for files, or `{optimizer: cpu}` \
                           with `cluster.devices: cuda` for host memory";
    for (name, optimizer) in [("offload_optimizer", true), ("offload_param", false)] {
        let Some(mut inner) = part.take_section(name) else { continue };
        let device = inner.take_text("device").unwrap_or_else(|| "none".to_owned());
        let (from, directory) = (inner.full_path_of_key("device"), inner.take_text("nvme_path"));
        match (device.as_str(), optimizer, &directory) {
            ("none", ..) => {}
            ("nvme", true, Some(path)) => {
                let yaml = format!("{{optimizer: {}}}", jobspec::quote_yaml(path));
                draft.set_imported_key(&inner.full_path_of_key("nvme_path"), OFFLOAD_KEY, yaml);
            }
            ("nvme", true, None) => {
                draft.add_not_converted_note(&from, "`nvme_path` is missing", OFFLOAD_ADVICE)
            }
            (_, true, _) => draft.add_not_converted_note(
                &from,
                build_offload_reason("optimizer states", &device),
                OFFLOAD_ADVICE,
            ),
            (_, false, _) => {
                draft.add_not_converted_note(&from, build_offload_reason("parameters", &device), "")
            }
        }
        let (rest, errors) = inner.into_unconverted_keys();
        part.errors.extend(errors);
        for (key, value) in rest.into_iter().filter(|_| device != "none") {
            draft.add_not_converted_note(&key, format!("launch has no such setting (value: {value})"), "");
        }
    }
    for (old, what) in [
        ("cpu_offload", "optimizer states"),
        ("cpu_offload_params", "parameters"),
        ("cpu_offload_param", "parameters"),
    ] {
        if part.take_boolean(old) == Some(true) {
            draft.add_not_converted_note(&part.full_path_of_key(old), build_offload_reason(what, "cpu"), "");
        }
    }
    if part.take_boolean("cpu_offload_use_pin_memory") == Some(true) {
        draft.add_not_converted_note(
            &part.full_path_of_key("cpu_offload_use_pin_memory"),
            "launch has no such setting",
            "",
        );
    }
}

/// Returns the explanation why a DeepSpeed setting that offloads optimizer states or parameters to
/// the device `device` is not converted to job.yaml.
fn build_offload_reason(what: &str, device: &str) -> String {
    format!("launch keeps {what} in the memory that it computes in (value: {})", device.escape_debug())
}
