//! Converts a configuration of DeepSpeed to a job.yaml.
//!
//! If `launch import` is given a program, the job runs the program, which reads the configuration
//! itself. Otherwise the job uses the built-in training with the settings of the configuration.
mod arguments;
pub(super) mod drop_in;
mod optimizer;
mod resources;
mod unsupported_keys;
mod zero;

use super::{
    import_options::{ImportErrors, ImportOptions, build_python_command, count_hostfile_slots, set_hostfile},
    job_draft::{ImportedJob, JobDraft},
    remaining_keys::RemainingKeys,
    value_text,
};
use diagnostic::Diagnostic;
use jobspec::{Document, DocumentValue};
use std::path::Path;
use unsupported_keys::{AUTO_VALUE_REASON, UNSUPPORTED_KEYS};

/// Converts a configuration of DeepSpeed to a job.yaml, with notes about keys that were not
/// converted. `hosts` is the text of the hostfile.
pub(crate) fn convert_deepspeed_config(
    document: &Document,
    hosts: Option<&str>,
    context: &ImportOptions<'_>,
) -> Result<ImportedJob, ImportErrors> {
    let keys = RemainingKeys::from_document(document)?;
    let mut draft = JobDraft::default();
    let mut workers = None;
    if let (Some(file), Some(text)) = (context.hostfile, hosts) {
        set_hostfile(&mut draft, "--hostfile", file);
        match count_hostfile_slots(text) {
            Ok(slots) => workers = slots,
            Err(error) => {
                let reason = format!("line {} is not valid: {error}", error.line);
                draft.add_key_note("--hostfile", reason, "correct it")
            }
        }
    }
    let origin = format!("{}, configuration of DeepSpeed", document.file_name());
    let errors = match context.program {
        [] => set_training(&mut draft, keys, workers),
        words => {
            set_program(&mut draft, keys, words, document.file_name());
            Vec::new()
        }
    };
    match errors.is_empty() {
        true => draft.finish_job(&origin),
        false => Err(errors),
    }
}

/// Sets `run.command` in the new job.yaml to the user's program, which reads the DeepSpeed
/// configuration file itself. The configuration `file` is therefore not converted.
fn set_program(draft: &mut JobDraft, keys: RemainingKeys<'_>, words: &[String], file: &str) {
    let words = build_python_command(words);
    draft.set_required_key("run.command", &value_text::format_yaml_list(&words));
    draft.set_required_key("run.local_rank_argument", "true");
    let todo = "remove `run.local_rank_argument` if the script does not accept it";
    draft.add_key_note(
        "run.local_rank_argument",
        "the script gets `--local_rank=N`, like from `deepspeed`",
        todo,
    );
    let name = Path::new(file).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let keys = keys.remaining_names().join(", ");
    draft.add_key_note(file, format!("the program reads the file itself, with {keys}"), "");
    if !words.iter().any(|word| word.contains(&name)) {
        draft.add_key_note(
            file,
            "no argument of the program names the file",
            "add it in the form that the script expects",
        );
    }
}

/// Converts a DeepSpeed configuration to the keys of the section `train` of job.yaml, by which
/// launch trains a model without a user program. `workers` is the number of workers, if known.
/// Returns the errors in the configuration.
fn set_training(draft: &mut JobDraft, mut keys: RemainingKeys<'_>, workers: Option<u64>) -> Vec<Diagnostic> {
    draft.set_required_key("train.data.files", "[\"data/*.txt\"]");
    let todo = "name them in `train.data.files` and `train.model.from` (a Hugging Face directory)";
    draft.add_key_note("train.data.files", "the configuration names no data and no model", todo);
    convert_batch(draft, &mut keys, workers);
    convert_precision(draft, &mut keys);
    zero::convert_zero(draft, &mut keys);
    let rate = optimizer::convert_optimizer(draft, &mut keys);
    optimizer::convert_scheduler(draft, &mut keys, rate);
    convert_clipping(draft, &mut keys);
    let requested = |keys: &mut RemainingKeys<'_>, name: &str| {
        let item = keys.take(name)?;
        let off = match &item.value {
            DocumentValue::Bool(false) => true,
            DocumentValue::Map(entries) => entries
                .iter()
                .any(|(key, value)| key == "enabled" && matches!(value.value, DocumentValue::Bool(false))),
            _ => false,
        };
        (!off).then(|| value_text::format_for_note(item))
    };
    for (name, reason) in UNSUPPORTED_KEYS {
        if let Some(value) = requested(&mut keys, name) {
            draft.add_not_converted_note(name, format!("{reason} (value: {value})"), "");
        }
    }
    let (rest, errors) = keys.into_unconverted_keys();
    for (key, value) in rest {
        draft.add_not_converted_note(&key, format!("launch does not know this key (value: {value})"), "");
    }
    errors
}

/// Converts the batch sizes of a DeepSpeed configuration to the job.yaml keys `train.batch.global`
/// and `train.batch.micro`. DeepSpeed requires `train_batch_size = micro-batch × accumulation steps
/// × workers`. A configuration may contain only some of these sizes.
fn convert_batch(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>, workers: Option<u64>) {
    /// The three keys of a DeepSpeed configuration that determine batch sizes.
    const BATCH_SIZE_KEYS: [&str; 3] =
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
    let [global, micro, steps] = BATCH_SIZE_KEYS.map(|name| {
        if keys.is_auto(name) {
            keys.take(name);
            draft.add_not_converted_note(name, "HF Trainer replaces `auto`", "set `train.batch`");
            return None;
        }
        keys.take_integer(name, 1)
    });
    let each = micro.unwrap_or(1) * steps.unwrap_or(1);
    if let Some(micro) = micro {
        draft.set_imported_key(BATCH_SIZE_KEYS[1], "train.batch.micro", micro.to_string());
    }
    match (global, workers) {
        (Some(global), workers) => {
            draft.set_imported_key(BATCH_SIZE_KEYS[0], "train.batch.global", global.to_string());
            if let (Some(n), true, true) = (workers, micro.is_some(), steps.is_some())
                && each * i128::from(n) != global
            {
                let reason = format!("{each} × {n} workers is not {global}, which DeepSpeed rejects");
                let todo = "a step has `batch.global` samples for any number of workers";
                draft.add_key_note(BATCH_SIZE_KEYS[0], reason, todo);
            }
            if micro.is_none() {
                let micro = compute_default_micro_batch(global, steps, workers);
                draft.set_imported_key(BATCH_SIZE_KEYS[0], "train.batch.micro", micro.to_string());
            }
        }
        (None, Some(n)) if micro.is_some() => {
            draft.set_imported_key(
                BATCH_SIZE_KEYS[1],
                "train.batch.global",
                (each * i128::from(n)).to_string(),
            );
        }
        (None, _) if micro.is_some() => {
            draft.set_imported_key(BATCH_SIZE_KEYS[1], "train.batch.global", each.to_string());
            let reason = format!("{each} is the number of samples of one worker");
            draft.add_key_note(
                "train.batch.global",
                reason,
                "multiply it by the number of workers, or give `--hostfile`",
            );
        }
        (None, _) => {}
    }
}

/// Computes a micro-batch size per worker for a DeepSpeed configuration that sets the global batch
/// size but no micro-batch size. The result is the largest size that divides the global batch and
/// that DeepSpeed's formula allows.
fn compute_default_micro_batch(global: i128, steps: Option<i128>, workers: Option<u64>) -> i128 {
    let each = global / steps.unwrap_or(1).max(1) / workers.map_or(1, i128::from).max(1);
    (1..=each.max(1)).rev().find(|micro| global % micro == 0).unwrap_or(1)
}

/// Converts DeepSpeed's sections `fp16` and `bf16` to the job.yaml key `train.precision`, and the
/// loss scale of `fp16` to `train.loss_scale`.
fn convert_precision(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    for (name, word) in [("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")] {
        let Some(mut part) = keys.take_section(name) else { continue };
        let enabled = match part.is_auto("enabled") {
            true => {
                part.take("enabled");
                draft.add_not_converted_note(&part.full_path_of_key("enabled"), AUTO_VALUE_REASON, "");
                false
            }
            false => part.take_boolean("enabled").unwrap_or(false),
        };
        if enabled {
            draft.set_imported_key(&part.full_path_of_key("enabled"), "train.precision", word);
        }
        if enabled && name == "fp16" {
            convert_loss_scale(draft, &mut part);
        }
        let (rest, errors) = part.into_unconverted_keys();
        keys.errors.extend(errors);
        for (key, value) in rest.into_iter().filter(|_| enabled) {
            draft.add_not_converted_note(
                &key,
                format!("the built-in training has no such setting (value: {value})"),
                "",
            );
        }
    }
}

/// Converts DeepSpeed's settings of the dynamic loss scale to keys of the section
/// `train.loss_scale` of job.yaml. A constant loss scale is not supported, so `loss_scale` is only
/// taken if its value is 0.
fn convert_loss_scale(draft: &mut JobDraft, part: &mut RemainingKeys<'_>) {
    if part.peek_integer("loss_scale") == Some(0) {
        part.take("loss_scale");
    }
    for (name, least) in [("initial_scale_power", 0), ("loss_scale_window", 1)] {
        if let Some(n) = part.take_integer(name, least) {
            draft.set_imported_key(
                &part.full_path_of_key(name),
                &format!("train.loss_scale.{name}"),
                n.to_string(),
            );
        }
    }
    if let Some(n) = part.take_number("min_loss_scale").filter(|n| *n > 0.0) {
        draft.set_imported_key(
            &part.full_path_of_key("min_loss_scale"),
            "train.loss_scale.min_loss_scale",
            format!("{n:?}"),
        );
    }
}

/// Converts DeepSpeed's limit of the gradient norm to the job.yaml key `train.clip_norm`. If the
/// configuration does not contain the key, clipping is turned off, which is DeepSpeed's default.
fn convert_clipping(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    /// The key of a DeepSpeed configuration that limits the gradient norm.
    const CLIPPING_KEY: &str = "gradient_clipping";
    if keys.is_auto(CLIPPING_KEY) {
        keys.take(CLIPPING_KEY);
        return draft.add_not_converted_note(CLIPPING_KEY, AUTO_VALUE_REASON, "set `train.clip_norm`");
    }
    match keys.take_number(CLIPPING_KEY) {
        Some(norm) if norm > 0.0 => {
            draft.set_imported_key(CLIPPING_KEY, "train.clip_norm", format!("{norm:?}"))
        }
        _ => draft.set_imported_key(CLIPPING_KEY, "train.clip_norm", "off"),
    }
}
