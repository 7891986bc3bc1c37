//! Converts the sections `optimizer` and `scheduler` of a DeepSpeed configuration to keys of
//! job.yaml.
//!
//! For each setting that the configuration does not contain, the job gets DeepSpeed's default.
use super::unsupported_keys::AUTO_VALUE_REASON;
use crate::import::{job_draft::JobDraft, remaining_keys::RemainingKeys, value_text::format_yaml_number};
use jobspec::DocumentValue;

/// The learning rate that DeepSpeed uses if its configuration contains none.
const DEFAULT_LEARNING_RATE: f64 = 1e-3;

/// Converts the section `optimizer` of a DeepSpeed configuration to keys of job.yaml. Returns the
/// optimizer's learning rate, or `None` if the configuration has no optimizer.
pub(super) fn convert_optimizer(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) -> Option<f64> {
    let Some(mut part) = keys.take_section("optimizer") else {
        draft.add_key_note(
            "train.optimizer",
            "the configuration has none; launch's defaults apply",
            "see docs/job.md",
        );
        return None;
    };
    let name = part.take_text("type").unwrap_or_default();
    let Some(mut params) = part.take_section("params").or_else(|| part.create_empty_section("params")) else {
        keys.errors.extend(part.into_unconverted_keys().1);
        return None;
    };
    let rate = match name.to_ascii_lowercase().as_str() {
        "adam" | "adamw" => convert_adam(draft, &mut params, name.eq_ignore_ascii_case("adamw")),
        "sgd" => convert_sgd(draft, &mut params),
        _ => {
            let reason = format!("`{}` is not converted", name.escape_debug());
            draft.add_not_converted_note(
                "optimizer.type",
                reason,
                "the job uses adamw; see `train.optimizer.name`",
            );
            convert_numeric_param(draft, &mut params, "lr", "train.optimizer.lr", DEFAULT_LEARNING_RATE)
        }
    };
    for part in [params, part] {
        let (rest, errors) = part.into_unconverted_keys();
        keys.errors.extend(errors);
        for (key, value) in rest {
            let reason = format!("the built-in training has no such setting (value: {value})");
            draft.add_not_converted_note(&key, reason, "");
        }
    }
    Some(rate)
}

/// Converts DeepSpeed's hyper-parameters of Adam or AdamW, such as the learning rate and the weight
/// decay, to keys of job.yaml. Returns the learning rate.
fn convert_adam(draft: &mut JobDraft, params: &mut RemainingKeys<'_>, decoupled: bool) -> f64 {
    draft.set_imported_key("optimizer.type", "train.optimizer.name", "adamw");
    let rate = convert_numeric_param(draft, params, "lr", "train.optimizer.lr", DEFAULT_LEARNING_RATE);
    convert_betas(draft, params);
    convert_numeric_param(draft, params, "eps", "train.optimizer.eps", 1e-8);
    let decay = convert_numeric_param(draft, params, "weight_decay", "train.optimizer.weight_decay", 0.0);
    draft.set_imported_key("optimizer", "train.optimizer.no_decay", "[]");
    let adamw = params.take_boolean("adam_w_mode");
    let torch = params.take_boolean("torch_adam") == Some(true);
    // FusedAdam decouples the decay by default; `torch_adam` is torch.optim.Adam.
    if !decoupled && (adamw == Some(false) || torch) && decay > 0.0 {
        let reason = "DeepSpeed adds this decay to the gradient; the built-in training decouples it (AdamW)";
        draft.add_not_converted_note(
            "optimizer.params.weight_decay",
            reason,
            "use `weight_decay: 0` for Adam",
        );
        draft.set_imported_key("optimizer", "train.optimizer.weight_decay", "0.0");
    }
    if params.take_boolean("bias_correction") == Some(false) {
        draft.add_not_converted_note(
            "optimizer.params.bias_correction",
            "the bias of moments is always corrected",
            "",
        );
    }
    if params.take_boolean("amsgrad") == Some(true) {
        draft.add_not_converted_note("optimizer.params.amsgrad", "the built-in training has no AMSGrad", "");
    }
    rate
}

/// Converts DeepSpeed's `betas`, the decay rates of the optimizer's moments, to the job.yaml key
/// `train.optimizer.betas`.
fn convert_betas(draft: &mut JobDraft, params: &mut RemainingKeys<'_>) {
    /// The key of a DeepSpeed configuration for the decay rates of the optimizer's moments.
    const BETAS_KEY: &str = "optimizer.params.betas";
    let auto = params.is_auto("betas");
    let item = params.take("betas");
    let given = match item.map(|item| &item.value) {
        _ if auto => {
            draft.add_not_converted_note(BETAS_KEY, AUTO_VALUE_REASON, "");
            return;
        }
        Some(DocumentValue::List(list)) => {
            let texts: Vec<String> = list.iter().map(format_yaml_number).collect();
            format!("[{}]", texts.join(", "))
        }
        Some(_) => {
            if let Some(item) = item {
                params.report_wrong_type("betas", item, "two numbers");
            }
            return;
        }
        None => "[0.9, 0.999]".to_owned(),
    };
    draft.set_imported_key(BETAS_KEY, "train.optimizer.betas", given);
}

/// Converts DeepSpeed's hyper-parameters of SGD to keys of job.yaml. Returns the learning rate.
fn convert_sgd(draft: &mut JobDraft, params: &mut RemainingKeys<'_>) -> f64 {
    draft.set_imported_key("optimizer.type", "train.optimizer.name", "sgd");
    let rate = convert_numeric_param(draft, params, "lr", "train.optimizer.lr", DEFAULT_LEARNING_RATE);
    convert_numeric_param(draft, params, "momentum", "train.optimizer.momentum", 0.0);
    let decay = convert_numeric_param(draft, params, "weight_decay", "train.optimizer.weight_decay", 0.0);
    draft.set_imported_key("optimizer", "train.optimizer.no_decay", "[]");
    if decay > 0.0 {
        let reason = "torch's SGD adds the decay to the gradient; the built-in training decouples it";
        draft.add_key_note("optimizer.params.weight_decay", reason, "");
    }
    if params.take_boolean("nesterov") == Some(true) {
        draft.add_not_converted_note(
            "optimizer.params.nesterov",
            "the built-in SGD has no Nesterov momentum",
            "",
        );
    }
    rate
}

/// Sets the job.yaml key `path` to the number that DeepSpeed's `optimizer.params` contains under
/// `name`, and returns the number. If the key is absent, sets `default`. If the value is `auto`,
/// adds a note and returns `default`.
fn convert_numeric_param(
    draft: &mut JobDraft,
    params: &mut RemainingKeys<'_>,
    name: &str,
    path: &str,
    default: f64,
) -> f64 {
    let from = params.full_path_of_key(name);
    if params.is_auto(name) {
        params.take(name);
        draft.add_not_converted_note(&from, AUTO_VALUE_REASON, &format!("set `{path}`"));
        return default;
    }
    let value = params.take_number(name).unwrap_or(default);
    draft.set_imported_key(&from, path, format!("{value:?}"));
    value
}

/// Converts the section `scheduler` of a DeepSpeed configuration, which describes the learning rate
/// schedule, to keys of job.yaml. `rate` is the learning rate of the optimizer; `None` if the
/// configuration has no optimizer.
pub(super) fn convert_scheduler(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>, rate: Option<f64>) {
    let Some(mut part) = keys.take_section("scheduler") else { return };
    let name = part.take_text("type").unwrap_or_default();
    let Some(mut params) = part.take_section("params").or_else(|| part.create_empty_section("params")) else {
        keys.errors.extend(part.into_unconverted_keys().1);
        return;
    };
    let shape = match name.as_str() {
        "WarmupLR" => Some("constant"),
        "WarmupDecayLR" => Some("linear"),
        "WarmupCosineLR" => Some("cosine"),
        _ => None,
    };
    match shape {
        Some(shape) => convert_warmup(draft, &mut params, shape, rate.unwrap_or(DEFAULT_LEARNING_RATE)),
        None => {
            let reason = format!("the built-in training has no `{}`", name.escape_debug());
            draft.add_not_converted_note("scheduler.type", reason, "see `train.schedule` in docs/job.md");
        }
    }
    for part in [params, part] {
        let (rest, errors) = part.into_unconverted_keys();
        keys.errors.extend(errors);
        for (key, value) in rest {
            let reason = format!("the built-in training has no such setting (value: {value})");
            draft.add_not_converted_note(&key, reason, "");
        }
    }
}

/// Converts a learning rate schedule of DeepSpeed that has a linear warm-up to keys of the section
/// `train.schedule` of job.yaml. After the warm-up, the learning rate has the shape `shape`. `rate`
/// is the learning rate of the optimizer.
fn convert_warmup(draft: &mut JobDraft, params: &mut RemainingKeys<'_>, shape: &str, rate: f64) {
    draft.set_imported_key("scheduler.type", "train.schedule.name", shape);
    let auto = params.is_auto("warmup_num_steps");
    let steps = take_integer_unless_auto(draft, params, "warmup_num_steps").unwrap_or(1000);
    if !auto {
        draft.set_imported_key(
            &params.full_path_of_key("warmup_num_steps"),
            "train.schedule.warmup_steps",
            steps.to_string(),
        );
    }
    match take_integer_unless_auto(draft, params, "total_num_steps") {
        Some(total) => draft.set_imported_key(
            &params.full_path_of_key("total_num_steps"),
            "train.steps",
            total.to_string(),
        ),
        None => {
            draft.add_key_note("train.steps", "the configuration has no number of steps", "set `train.steps`")
        }
    }
    match params.take_text("warmup_type").as_deref() {
        Some("linear") => {}
        // DeepSpeed's default is `log`.
        _ => draft.add_not_converted_note(
            "scheduler.params.warmup_type",
            "the warm-up is linear, not logarithmic",
            "",
        ),
    }
    if shape == "cosine" {
        let end = take_number_or_default(draft, params, "cos_min_ratio", 1e-4);
        draft.set_imported_key(
            &params.full_path_of_key("cos_min_ratio"),
            "train.schedule.min_lr",
            format!("{:?}", round_to_12_digits(end * rate)),
        );
        if take_number_or_default(draft, params, "warmup_min_ratio", 0.0) > 0.0 {
            draft.add_not_converted_note("scheduler.params.warmup_min_ratio", "the warm-up begins at 0", "");
        }
        return;
    }
    // These two schedulers override the learning rate of the optimizer.
    if rate != DEFAULT_LEARNING_RATE && !params.is_given("warmup_max_lr") {
        let reason = format!(
            "absent, so that DeepSpeed trains at {DEFAULT_LEARNING_RATE} instead of `optimizer.params.lr` ({rate})"
        );
        draft.add_key_note(
            &params.full_path_of_key("warmup_max_lr"),
            reason,
            "set `train.optimizer.lr` if that is not intended",
        );
    }
    let default = if params.is_auto("warmup_max_lr") { rate } else { DEFAULT_LEARNING_RATE };
    let highest = take_number_or_default(draft, params, "warmup_max_lr", default);
    draft.set_imported_key(
        &params.full_path_of_key("warmup_max_lr"),
        "train.optimizer.lr",
        format!("{highest:?}"),
    );
    if shape == "linear" {
        draft.set_imported_key("scheduler.type", "train.schedule.min_lr", "0.0");
    }
    if take_number_or_default(draft, params, "warmup_min_lr", 0.0) > 0.0 {
        draft.add_not_converted_note("scheduler.params.warmup_min_lr", "the warm-up begins at 0", "");
    }
}

/// Rounds `x` to twelve significant digits, so that a product such as 0.1 · 3 is written to
/// job.yaml without its rounding error.
fn round_to_12_digits(x: f64) -> f64 {
    format!("{x:.11e}").parse().unwrap_or(x)
}

/// Removes a key from a section of DeepSpeed's configuration and returns its integer value, or
/// `None` if the value is `auto`. Returns `None` if the key is absent. If the value is `auto`, adds
/// a note.
fn take_integer_unless_auto(
    draft: &mut JobDraft,
    params: &mut RemainingKeys<'_>,
    name: &str,
) -> Option<i128> {
    if params.is_auto(name) {
        params.take(name);
        draft.add_not_converted_note(
            &params.full_path_of_key(name),
            AUTO_VALUE_REASON,
            "see `train.schedule` in docs/job.md",
        );
        return None;
    }
    params.take_integer(name, 0)
}

/// Removes the key `name` from a section of DeepSpeed's configuration, and returns its number, or
/// `default` if there is none. If the value is `auto`, adds a note and returns `default`.
fn take_number_or_default(
    draft: &mut JobDraft,
    params: &mut RemainingKeys<'_>,
    name: &str,
    default: f64,
) -> f64 {
    if params.is_auto(name) {
        params.take(name);
        draft.add_not_converted_note(&params.full_path_of_key(name), AUTO_VALUE_REASON, "");
        return default;
    }
    params.take_number(name).unwrap_or(default)
}
