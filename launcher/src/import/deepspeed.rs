//! DeepSpeed's config as a job: of a program that reads it itself, or of the built-in training.
mod optimizer;
mod tables;
mod zero;

use super::{Beside, Draft, Imported, Refused, command, hostfile, keys::Keys, slots, wording};
use contract::job::{Document, ItemValue};
use std::path::Path;
use tables::LEFT_OUT;

/// A config as a job; `hosts` is the text of the hostfile.
pub(crate) fn deepspeed(
    document: &Document,
    hosts: Option<&str>,
    beside: &Beside<'_>,
) -> Result<Imported, Refused> {
    let keys = Keys::top(document)?;
    let mut draft = Draft::default();
    let mut workers = None;
    if let (Some(file), Some(text)) = (beside.hostfile, hosts) {
        hostfile(&mut draft, "--hostfile", file);
        match slots(text) {
            Ok(slots) => workers = slots,
            Err(why) => {
                draft.note("--hostfile", format!("it isn't one that launch reads: {why}"), "correct it")
            }
        }
    }
    let origin = format!("{}, DeepSpeed's config", document.file());
    let problems = match beside.program {
        [] => training(&mut draft, keys, workers),
        words => {
            program(&mut draft, keys, words, document.file());
            Vec::new()
        }
    };
    match problems.is_empty() {
        true => draft.finish(&origin),
        false => Err(problems),
    }
}

/// A program that gives the config to DeepSpeed itself.
fn program(draft: &mut Draft, keys: Keys<'_>, words: &[String], file: &str) {
    let words = command(words);
    draft.own("run.command", &wording::list(&words));
    draft.own("run.local_rank_argument", "true");
    let todo = "remove `run.local_rank_argument` where the script doesn't take it";
    draft.note("run.local_rank_argument", "scripts get `--local_rank=N`, as from `deepspeed`", todo);
    let name = Path::new(file).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let keys = keys.names().join(", ");
    draft.note(file, format!("the program reads it itself: {keys} stay there"), "");
    if !words.iter().any(|word| word.contains(&name)) {
        draft.note(file, "no argument of the program names it", "add it as the script expects it");
    }
}

/// The built-in training with the config's settings; problems with it.
fn training(draft: &mut Draft, mut keys: Keys<'_>, workers: Option<u64>) -> Vec<contract::Problem> {
    draft.own("train.data.files", "[\"data/*.txt\"]");
    let todo = "name them in `train.data.files`; `train.model.from` is a Hugging Face folder to train";
    draft.note("train.data.files", "the config names no data and no model", todo);
    batch(draft, &mut keys, workers);
    precision(draft, &mut keys);
    zero::zero(draft, &mut keys);
    let rate = optimizer::optimizer(draft, &mut keys);
    optimizer::scheduler(draft, &mut keys, rate);
    clipping(draft, &mut keys);
    let asked = |keys: &mut Keys<'_>, name: &str| {
        let item = keys.take(name)?;
        let off = match &item.value {
            ItemValue::Bool(false) => true,
            ItemValue::Map(entries) => entries
                .iter()
                .any(|(key, value)| key == "enabled" && matches!(value.value, ItemValue::Bool(false))),
            _ => false,
        };
        (!off).then(|| wording::shown(item))
    };
    for (name, why) in LEFT_OUT {
        if let Some(value) = asked(&mut keys, name) {
            draft.not_carried(name, format!("{why} (it is {value})"), "");
        }
    }
    let (rest, problems) = keys.rest();
    for (key, value) in rest {
        draft.not_carried(&key, format!("launch doesn't know this key (it is {value})"), "");
    }
    problems
}

/// `train_batch_size = micro × accumulation × workers`, of which two or three are given.
fn batch(draft: &mut Draft, keys: &mut Keys<'_>, workers: Option<u64>) {
    const NAMES: [&str; 3] =
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
    let [global, micro, steps] = NAMES.map(|name| {
        if keys.is_auto(name) {
            keys.take(name);
            draft.not_carried(
                name,
                "`auto` is for HF Trainer to fill in",
                "give `train.batch` what you want",
            );
            return None;
        }
        keys.integer(name, 1)
    });
    let each = micro.unwrap_or(1) * steps.unwrap_or(1);
    if let Some(micro) = micro {
        draft.wish(NAMES[1], "train.batch.micro", micro.to_string());
    }
    match (global, workers) {
        (Some(global), workers) => {
            draft.wish(NAMES[0], "train.batch.global", global.to_string());
            if let (Some(n), true, true) = (workers, micro.is_some(), steps.is_some())
                && each * i128::from(n) != global
            {
                let sum = format!("{each} × {n} workers isn't {global}: DeepSpeed would refuse this");
                draft.note(NAMES[0], sum, "here a step has `batch.global` samples on any number of workers");
            }
            if micro.is_none() {
                let micro = micro_of(global, steps, workers);
                draft.wish(NAMES[0], "train.batch.micro", micro.to_string());
            }
        }
        (None, Some(n)) if micro.is_some() => {
            draft.wish(NAMES[1], "train.batch.global", (each * i128::from(n)).to_string());
        }
        (None, _) if micro.is_some() => {
            draft.wish(NAMES[1], "train.batch.global", each.to_string());
            let why = format!("{each} samples of a step are those of one worker");
            draft.note(
                "train.batch.global",
                why,
                "multiply it by the number of workers, or give `--hostfile`",
            );
        }
        (None, _) => {}
    }
}

/// Samples of a forward pass where they aren't given.
fn micro_of(global: i128, steps: Option<i128>, workers: Option<u64>) -> i128 {
    let each = global / steps.unwrap_or(1).max(1) / workers.map_or(1, i128::from).max(1);
    // the largest that divides the step's samples
    (1..=each.max(1)).rev().find(|micro| global % micro == 0).unwrap_or(1)
}

fn precision(draft: &mut Draft, keys: &mut Keys<'_>) {
    for (name, word) in [("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")] {
        let Some(mut part) = keys.section(name) else { continue };
        let enabled = match part.is_auto("enabled") {
            true => {
                part.take("enabled");
                draft.not_carried(&part.path("enabled"), "`auto` is for HF Trainer to fill in", "");
                false
            }
            false => part.boolean("enabled").unwrap_or(false),
        };
        if enabled {
            draft.wish(&part.path("enabled"), "train.precision", word);
        }
        if enabled && name == "fp16" {
            loss_scale(draft, &mut part);
        }
        let (rest, problems) = part.rest();
        keys.problems.extend(problems);
        for (key, value) in rest.into_iter().filter(|_| enabled) {
            draft.not_carried(&key, format!("the built-in training has no such setting (it is {value})"), "");
        }
    }
}

/// A loss scale that DeepSpeed keeps constant isn't carried.
fn loss_scale(draft: &mut Draft, part: &mut Keys<'_>) {
    if part.peek("loss_scale") == Some(0) {
        part.take("loss_scale");
    }
    for (name, least) in [("initial_scale_power", 0), ("loss_scale_window", 1)] {
        if let Some(n) = part.integer(name, least) {
            draft.wish(&part.path(name), &format!("train.loss_scale.{name}"), n.to_string());
        }
    }
    if let Some(n) = part.number("min_loss_scale").filter(|n| *n > 0.0) {
        draft.wish(&part.path("min_loss_scale"), "train.loss_scale.min_loss_scale", format!("{n:?}"));
    }
}

/// DeepSpeed doesn't clip unless it is told to.
fn clipping(draft: &mut Draft, keys: &mut Keys<'_>) {
    const NAME: &str = "gradient_clipping";
    if keys.is_auto(NAME) {
        keys.take(NAME);
        return draft.not_carried(NAME, "`auto` is for HF Trainer to fill in", "give `train.clip_norm`");
    }
    match keys.number(NAME) {
        Some(norm) if norm > 0.0 => draft.wish(NAME, "train.clip_norm", format!("{norm:?}")),
        _ => draft.wish(NAME, "train.clip_norm", "off"),
    }
}
