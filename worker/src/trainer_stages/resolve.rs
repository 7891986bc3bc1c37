//! Completes the `train` section of a job with settings, such as the sizes of the model, from the
//! directories that the section names.
use crate::{model, param_groups::LORA_FROM_KEY};
use ckpt::peft::AdapterConfig;
use diagnostic::{Diagnostic, codes};
use jobspec::{LoraSpec, LoraTargets, ModelSpec};

/// Adds the sizes of the model to the `train.model` section, either from a pretrained model's
/// config.json or from vocabulary size and sequence length.
///
/// # Errors
///
/// Fails if the directory is unusable, or if its model is too small for the tokenizer or the
/// samples. The subject of the error is the key `train.model.from`.
pub(crate) fn resolve_model_section(
    spec: &ModelSpec,
    vocab: u32,
    seq_len: u32,
) -> diagnostic::Result<ModelSpec> {
    const MODEL_FROM_KEY: &str = "train.model.from";
    let mut resolved = spec.clone();
    if let Some(directory) = &spec.from {
        let config = model::read_model_config_summary(directory)
            .map_err(|e| e.into_diagnostic_of_file(directory).with_subject(MODEL_FROM_KEY))?;
        resolved.family = config.family.into();
        (resolved.vocab_size, resolved.max_position_embeddings) = (config.vocab_size, config.max_positions);
    }
    // A size is a key of the job or, with a model directory, of the directory's config.json.
    let too_small = |code, name: &str, why: String| match &spec.from {
        Some(directory) => {
            let message = format!("{name} in {} {why}", directory.join("config.json").display());
            Diagnostic::error(code, message).with_subject(MODEL_FROM_KEY)
        }
        None => {
            let key = format!("train.model.{name}");
            Diagnostic::error(code, format!("`{key}` {why}")).with_subject(key)
        }
    };
    if resolved.vocab_size == 0 {
        resolved.vocab_size = vocab;
    }
    if resolved.vocab_size < vocab {
        let why = format!("is {}, but the tokenizer has {vocab} tokens", resolved.vocab_size);
        let help = match spec.from {
            Some(_) => "use the tokenizer of the model directory".to_owned(),
            None => format!("remove `train.model.vocab_size`, or set it to at least {vocab}"),
        };
        let error = too_small(codes::training::VOCAB_SIZE_TOO_SMALL, "vocab_size", why);
        return Err(error
            .with_field("vocab_size", resolved.vocab_size)
            .with_field("tokens", vocab)
            .with_help(help));
    }
    if resolved.max_position_embeddings == 0 {
        resolved.max_position_embeddings = seq_len;
    }
    if resolved.max_position_embeddings < seq_len {
        let limit = resolved.max_position_embeddings;
        let why = format!("is {limit}, but `train.data.seq_len` is {seq_len}");
        let error = too_small(codes::training::SEQUENCE_TOO_LONG, "max_position_embeddings", why);
        return Err(error
            .with_field("max_position_embeddings", limit)
            .with_field("seq_len", seq_len)
            .with_help(format!("lower `train.data.seq_len` to at most {limit}")));
    }
    Ok(resolved)
}

/// Adds the rank, scale and targets of pretrained LoRA adapters to the `train.lora` section, read
/// from the directory in `train.lora.from`.
///
/// # Errors
///
/// Fails if the configuration cannot be read. The subject of the error is `train.lora.from`.
pub(crate) fn resolve_lora_section(spec: Option<&LoraSpec>) -> diagnostic::Result<Option<LoraSpec>> {
    let Some(spec) = spec else { return Ok(None) };
    let Some(directory) = &spec.from else { return Ok(Some(spec.clone())) };
    let AdapterConfig { rank, alpha, use_rslora: rslora, dropout, targets, .. } =
        AdapterConfig::read(directory)
            .map_err(|e| crate::error::to_unreadable_adapters_error(e, LORA_FROM_KEY))?;
    let targets = LoraTargets::Names(targets);
    let dropout = spec.dropout.or(Some(dropout));
    Ok(Some(LoraSpec { from: spec.from.clone(), rank, alpha, dropout, rslora, targets }))
}
