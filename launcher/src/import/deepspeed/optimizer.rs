//! Converts `optimizer` and `scheduler`. A setting that is not given has DeepSpeed's default, so
//! the job states it.
use super::{
    super::{Draft, keys::RemainingKeys, wording::yaml_number},
    AUTO,
};
use contract::job::ItemValue;

/// DeepSpeed's default learning rate.
const RATE: f64 = 1e-3;

/// Converts the optimizer; returns its learning rate if the configuration has an optimizer.
pub(super) fn optimizer(draft: &mut Draft, keys: &mut RemainingKeys<'_>) -> Option<f64> {
    let Some(mut part) = keys.section("optimizer") else {
        draft.note(
            "train.optimizer",
            "the configuration has none; launch's defaults apply",
            "see docs/job.md",
        );
        return None;
    };
    let name = part.text("type").unwrap_or_default();
    let Some(mut params) = part.section("params").or_else(|| part.empty("params")) else {
        keys.errors.extend(part.into_rest().1);
        return None;
    };
    let rate = match name.to_ascii_lowercase().as_str() {
        "adam" | "adamw" => convert_adam(draft, &mut params, name.eq_ignore_ascii_case("adamw")),
        "sgd" => convert_sgd(draft, &mut params),
        _ => {
            let reason = format!("`{}` is not converted", name.escape_debug());
            draft.not_carried("optimizer.type", reason, "the job uses adamw; see `train.optimizer.name`");
            value(draft, &mut params, "lr", "train.optimizer.lr", RATE)
        }
    };
    for part in [params, part] {
        let (rest, errors) = part.into_rest();
        keys.errors.extend(errors);
        for (key, value) in rest {
            let reason = format!("the built-in training has no such setting (value: {value})");
            draft.not_carried(&key, reason, "");
        }
    }
    Some(rate)
}

fn convert_adam(draft: &mut Draft, params: &mut RemainingKeys<'_>, decoupled: bool) -> f64 {
    draft.set_imported("optimizer.type", "train.optimizer.name", "adamw");
    let rate = value(draft, params, "lr", "train.optimizer.lr", RATE);
    convert_betas(draft, params);
    value(draft, params, "eps", "train.optimizer.eps", 1e-8);
    let decay = value(draft, params, "weight_decay", "train.optimizer.weight_decay", 0.0);
    draft.set_imported("optimizer", "train.optimizer.no_decay", "[]");
    let adamw = params.boolean("adam_w_mode");
    let torch = params.boolean("torch_adam") == Some(true);
    // FusedAdam decouples the decay by default; `torch_adam` is torch.optim.Adam.
    if !decoupled && (adamw == Some(false) || torch) && decay > 0.0 {
        let reason = "DeepSpeed adds this decay to the gradient; the built-in training decouples it (AdamW)";
        draft.not_carried("optimizer.params.weight_decay", reason, "use `weight_decay: 0` for Adam");
        draft.set_imported("optimizer", "train.optimizer.weight_decay", "0.0");
    }
    if params.boolean("bias_correction") == Some(false) {
        draft.not_carried("optimizer.params.bias_correction", "the bias of moments is always corrected", "");
    }
    if params.boolean("amsgrad") == Some(true) {
        draft.not_carried("optimizer.params.amsgrad", "the built-in training has no AMSGrad", "");
    }
    rate
}

fn convert_betas(draft: &mut Draft, params: &mut RemainingKeys<'_>) {
    const FROM: &str = "optimizer.params.betas";
    let auto = params.is_auto("betas");
    let item = params.take("betas");
    let given = match item.map(|item| &item.value) {
        _ if auto => {
            draft.not_carried(FROM, AUTO, "");
            return;
        }
        Some(ItemValue::List(list)) => {
            let texts: Vec<String> = list.iter().map(yaml_number).collect();
            format!("[{}]", texts.join(", "))
        }
        Some(_) => {
            if let Some(item) = item {
                params.reject("betas", item, "two numbers");
            }
            return;
        }
        None => "[0.9, 0.999]".to_owned(),
    };
    draft.set_imported(FROM, "train.optimizer.betas", given);
}

fn convert_sgd(draft: &mut Draft, params: &mut RemainingKeys<'_>) -> f64 {
    draft.set_imported("optimizer.type", "train.optimizer.name", "sgd");
    let rate = value(draft, params, "lr", "train.optimizer.lr", RATE);
    value(draft, params, "momentum", "train.optimizer.momentum", 0.0);
    let decay = value(draft, params, "weight_decay", "train.optimizer.weight_decay", 0.0);
    draft.set_imported("optimizer", "train.optimizer.no_decay", "[]");
    if decay > 0.0 {
        let reason = "torch's SGD adds the decay to the gradient; the built-in training decouples it";
        draft.note("optimizer.params.weight_decay", reason, "");
    }
    if params.boolean("nesterov") == Some(true) {
        draft.not_carried("optimizer.params.nesterov", "the built-in training has no Nesterov momentum", "");
    }
    rate
}

/// Converts a number of the optimizer, with DeepSpeed's default; returns it.
fn value(draft: &mut Draft, params: &mut RemainingKeys<'_>, name: &str, path: &str, default: f64) -> f64 {
    let from = params.path(name);
    if params.is_auto(name) {
        params.take(name);
        draft.not_carried(&from, AUTO, &format!("set `{path}`"));
        return default;
    }
    let value = params.number(name).unwrap_or(default);
    draft.set_imported(&from, path, format!("{value:?}"));
    value
}

/// Converts the learning-rate schedule. `rate` is the learning rate of the optimizer.
pub(super) fn scheduler(draft: &mut Draft, keys: &mut RemainingKeys<'_>, rate: Option<f64>) {
    let Some(mut part) = keys.section("scheduler") else { return };
    let name = part.text("type").unwrap_or_default();
    let Some(mut params) = part.section("params").or_else(|| part.empty("params")) else {
        keys.errors.extend(part.into_rest().1);
        return;
    };
    let shape = match name.as_str() {
        "WarmupLR" => Some("constant"),
        "WarmupDecayLR" => Some("linear"),
        "WarmupCosineLR" => Some("cosine"),
        _ => None,
    };
    match shape {
        Some(shape) => warmup(draft, &mut params, shape, rate.unwrap_or(RATE)),
        None => {
            let reason = format!("the built-in training has no `{}`", name.escape_debug());
            draft.not_carried("scheduler.type", reason, "see `train.schedule` in docs/job.md");
        }
    }
    for part in [params, part] {
        let (rest, errors) = part.into_rest();
        keys.errors.extend(errors);
        for (key, value) in rest {
            let reason = format!("the built-in training has no such setting (value: {value})");
            draft.not_carried(&key, reason, "");
        }
    }
}

/// Converts a schedule with a warm-up, followed by `shape`.
fn warmup(draft: &mut Draft, params: &mut RemainingKeys<'_>, shape: &str, rate: f64) {
    draft.set_imported("scheduler.type", "train.schedule.name", shape);
    let auto = params.is_auto("warmup_num_steps");
    let steps = take_integer(draft, params, "warmup_num_steps").unwrap_or(1000);
    if !auto {
        draft.set_imported(
            &params.path("warmup_num_steps"),
            "train.schedule.warmup_steps",
            steps.to_string(),
        );
    }
    match take_integer(draft, params, "total_num_steps") {
        Some(total) => draft.set_imported(&params.path("total_num_steps"), "train.steps", total.to_string()),
        None => draft.note("train.steps", "the configuration has no number of steps", "set `train.steps`"),
    }
    match params.text("warmup_type").as_deref() {
        Some("linear") => {}
        // DeepSpeed's default is `log`.
        _ => draft.not_carried("scheduler.params.warmup_type", "the warm-up is linear, not logarithmic", ""),
    }
    if shape == "cosine" {
        let end = take_ratio(draft, params, "cos_min_ratio", 1e-4);
        draft.set_imported(
            &params.path("cos_min_ratio"),
            "train.schedule.min_lr",
            format!("{:?}", rounded(end * rate)),
        );
        if take_ratio(draft, params, "warmup_min_ratio", 0.0) > 0.0 {
            draft.not_carried("scheduler.params.warmup_min_ratio", "the warm-up begins at 0", "");
        }
        return;
    }
    // These two schedulers override the learning rate of the optimizer.
    let default = if params.is_auto("warmup_max_lr") { rate } else { RATE };
    let highest = take_ratio(draft, params, "warmup_max_lr", default);
    draft.set_imported(&params.path("warmup_max_lr"), "train.optimizer.lr", format!("{highest:?}"));
    if shape == "linear" {
        draft.set_imported("scheduler.type", "train.schedule.min_lr", "0.0");
    }
    if take_ratio(draft, params, "warmup_min_lr", 0.0) > 0.0 {
        draft.not_carried("scheduler.params.warmup_min_lr", "the warm-up begins at 0", "");
    }
}

/// Rounds to twelve digits, which removes the error of the multiplication.
fn rounded(x: f64) -> f64 {
    format!("{x:.11e}").parse().unwrap_or(x)
}

fn take_integer(draft: &mut Draft, params: &mut RemainingKeys<'_>, name: &str) -> Option<i128> {
    if params.is_auto(name) {
        params.take(name);
        draft.not_carried(&params.path(name), AUTO, "see `train.schedule` in docs/job.md");
        return None;
    }
    params.integer(name, 0)
}

fn take_ratio(draft: &mut Draft, params: &mut RemainingKeys<'_>, name: &str, default: f64) -> f64 {
    if params.is_auto(name) {
        params.take(name);
        draft.not_carried(&params.path(name), AUTO, "");
        return default;
    }
    params.number(name).unwrap_or(default)
}
