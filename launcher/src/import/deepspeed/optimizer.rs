//! `optimizer` and `scheduler`. What a config leaves out is DeepSpeed's default there, so it is written here.
use super::super::{Draft, keys::Keys, wording::number};
use contract::job::ItemValue;

/// The learning rate that DeepSpeed's optimizers and schedulers have when none is given.
const RATE: f64 = 1e-3;
const AUTO: &str = "`auto` is for HF Trainer to fill in";

/// The optimizer; its learning rate, where the config has one.
pub(super) fn optimizer(draft: &mut Draft, keys: &mut Keys<'_>) -> Option<f64> {
    let Some(mut part) = keys.section("optimizer") else {
        draft.note("train.optimizer", "the config has none: launch's own defaults hold", "see docs/job.md");
        return None;
    };
    let name = part.text("type").unwrap_or_default();
    let Some(mut params) = part.section("params").or_else(|| part.empty("params")) else {
        keys.problems.extend(part.rest().1);
        return None;
    };
    let rate = match name.to_ascii_lowercase().as_str() {
        "adam" | "adamw" => adam(draft, &mut params, name.eq_ignore_ascii_case("adamw")),
        "sgd" => sgd(draft, &mut params),
        _ => {
            let why = format!("the built-in training has no `{}`", name.escape_debug());
            draft.not_carried("optimizer.type", why, "it has adamw and sgd: adamw stays");
            value(draft, &mut params, "lr", "train.optimizer.lr", RATE)
        }
    };
    for part in [params, part] {
        let (rest, problems) = part.rest();
        keys.problems.extend(problems);
        for (key, value) in rest {
            let why = format!("the built-in training has no such setting (it is {value})");
            draft.not_carried(&key, why, "");
        }
    }
    Some(rate)
}

fn adam(draft: &mut Draft, params: &mut Keys<'_>, decoupled: bool) -> f64 {
    draft.wish("optimizer.type", "train.optimizer.name", "adamw");
    let rate = value(draft, params, "lr", "train.optimizer.lr", RATE);
    betas(draft, params);
    value(draft, params, "eps", "train.optimizer.eps", 1e-8);
    let decay = value(draft, params, "weight_decay", "train.optimizer.weight_decay", 0.0);
    draft.wish("optimizer", "train.optimizer.no_decay", "[]");
    let adamw = params.boolean("adam_w_mode");
    let torch = params.boolean("torch_adam") == Some(true);
    // FusedAdam's own default is decoupled decay, `torch_adam` is torch.optim.Adam
    if !decoupled && (adamw == Some(false) || torch) && decay > 0.0 {
        let why = "this decay is added to the gradient; the built-in training's is decoupled from it (AdamW)";
        draft.not_carried("optimizer.params.weight_decay", why, "use `weight_decay: 0` for Adam");
        draft.wish("optimizer", "train.optimizer.weight_decay", "0.0");
    }
    if params.boolean("bias_correction") == Some(false) {
        draft.not_carried("optimizer.params.bias_correction", "moments are always corrected", "");
    }
    if params.boolean("amsgrad") == Some(true) {
        draft.not_carried("optimizer.params.amsgrad", "the built-in training has no AMSGrad", "");
    }
    rate
}

fn betas(draft: &mut Draft, params: &mut Keys<'_>) {
    const FROM: &str = "optimizer.params.betas";
    let auto = params.is_auto("betas");
    let item = params.take("betas");
    let given = match item.map(|item| &item.value) {
        _ if auto => {
            draft.not_carried(FROM, AUTO, "");
            return;
        }
        Some(ItemValue::List(list)) => {
            let texts: Vec<String> = list.iter().map(number).collect();
            format!("[{}]", texts.join(", "))
        }
        Some(_) => {
            if let Some(item) = item {
                params.refuse("betas", item, "two numbers");
            }
            return;
        }
        None => "[0.9, 0.999]".to_owned(),
    };
    draft.wish(FROM, "train.optimizer.betas", given);
}

fn sgd(draft: &mut Draft, params: &mut Keys<'_>) -> f64 {
    draft.wish("optimizer.type", "train.optimizer.name", "sgd");
    let rate = value(draft, params, "lr", "train.optimizer.lr", RATE);
    value(draft, params, "momentum", "train.optimizer.momentum", 0.0);
    let decay = value(draft, params, "weight_decay", "train.optimizer.weight_decay", 0.0);
    draft.wish("optimizer", "train.optimizer.no_decay", "[]");
    if decay > 0.0 {
        let why = "torch's SGD adds the decay to the gradient, before the momentum; here it is decoupled";
        draft.note("optimizer.params.weight_decay", why, "");
    }
    if params.boolean("nesterov") == Some(true) {
        draft.not_carried("optimizer.params.nesterov", "the built-in training has no Nesterov momentum", "");
    }
    rate
}

/// A number of the optimizer, or DeepSpeed's default.
fn value(draft: &mut Draft, params: &mut Keys<'_>, name: &str, path: &str, default: f64) -> f64 {
    let from = params.path(name);
    if params.is_auto(name) {
        params.take(name);
        draft.not_carried(&from, AUTO, &format!("give `{path}`"));
        return default;
    }
    let value = params.number(name).unwrap_or(default);
    draft.wish(&from, path, format!("{value:?}"));
    value
}

/// The schedule of the learning rate. `rate` is the optimizer's.
pub(super) fn scheduler(draft: &mut Draft, keys: &mut Keys<'_>, rate: Option<f64>) {
    let Some(mut part) = keys.section("scheduler") else { return };
    let name = part.text("type").unwrap_or_default();
    let Some(mut params) = part.section("params").or_else(|| part.empty("params")) else {
        keys.problems.extend(part.rest().1);
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
            let why = format!("the built-in training has no `{}`", name.escape_debug());
            draft.not_carried("scheduler.type", why, "see `train.schedule` in docs/job.md");
        }
    }
    for part in [params, part] {
        let (rest, problems) = part.rest();
        keys.problems.extend(problems);
        for (key, value) in rest {
            let why = format!("the built-in training has no such setting (it is {value})");
            draft.not_carried(&key, why, "");
        }
    }
}

/// A warm-up and a shape.
fn warmup(draft: &mut Draft, params: &mut Keys<'_>, shape: &str, rate: f64) {
    draft.wish("scheduler.type", "train.schedule.name", shape);
    let auto = params.is_auto("warmup_num_steps");
    let steps = whole(draft, params, "warmup_num_steps").unwrap_or(1000);
    if !auto {
        draft.wish(&params.path("warmup_num_steps"), "train.schedule.warmup_steps", steps.to_string());
    }
    match whole(draft, params, "total_num_steps") {
        Some(total) => draft.wish(&params.path("total_num_steps"), "train.steps", total.to_string()),
        None => draft.note("train.steps", "the config doesn't say how long to train", "give `train.steps`"),
    }
    match params.text("warmup_type").as_deref() {
        Some("linear") => {}
        // `log` is DeepSpeed's default
        _ => {
            draft.not_carried("scheduler.params.warmup_type", "warm-ups are linear here, not logarithmic", "")
        }
    }
    if shape == "cosine" {
        let end = ratio(draft, params, "cos_min_ratio", 1e-4);
        draft.wish(
            &params.path("cos_min_ratio"),
            "train.schedule.min_lr",
            format!("{:?}", rounded(end * rate)),
        );
        if ratio(draft, params, "warmup_min_ratio", 0.0) > 0.0 {
            draft.not_carried("scheduler.params.warmup_min_ratio", "warm-ups begin at 0", "");
        }
        return;
    }
    // these two schedulers set the optimizer's rate
    let default = if params.is_auto("warmup_max_lr") { rate } else { RATE };
    let highest = ratio(draft, params, "warmup_max_lr", default);
    draft.wish(&params.path("warmup_max_lr"), "train.optimizer.lr", format!("{highest:?}"));
    if shape == "linear" {
        draft.wish("scheduler.type", "train.schedule.min_lr", "0.0");
    }
    if ratio(draft, params, "warmup_min_lr", 0.0) > 0.0 {
        draft.not_carried("scheduler.params.warmup_min_lr", "warm-ups begin at 0", "");
    }
}

/// To twelve digits: what a person would have written.
fn rounded(x: f64) -> f64 {
    format!("{x:.11e}").parse().unwrap_or(x)
}

fn whole(draft: &mut Draft, params: &mut Keys<'_>, name: &str) -> Option<i128> {
    if params.is_auto(name) {
        params.take(name);
        draft.not_carried(&params.path(name), AUTO, "see `train.schedule` in docs/job.md");
        return None;
    }
    params.integer(name, 0)
}

fn ratio(draft: &mut Draft, params: &mut Keys<'_>, name: &str, default: f64) -> f64 {
    if params.is_auto(name) {
        params.take(name);
        draft.not_carried(&params.path(name), AUTO, "");
        return default;
    }
    params.number(name).unwrap_or(default)
}
