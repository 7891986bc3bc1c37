//! [`PretrainedModel`]: the Hugging Face directory that `train.model.from` names. It provides the
//! initial weights and files that checkpoints keep.
use super::{
    adapters::load_pretrained_adapters, external::load_external_weights, resume_point::EventSink,
    weight_match::list_weight_shapes,
};
use crate::{
    consensus::exchange_values_without_queue,
    error::{Error, Result},
    train::running_trainer::{Cursor, RunningTrainer},
    trainer_stages::UninitializedTrainer,
};
use ckpt::{ExternalCheckpoint, OpenedCheckpoint, TensorSource, TextFile, peft::is_lora_matrix};
use comm::Comm;
use diagnostic::{Category, Diagnostic, codes};
use serde_json::Value;
use std::path::Path;

/// The key of job.yaml that names the directory of the pretrained model.
const MODEL_FROM_KEY: &str = "train.model.from";

/// Starts a run at step 0 with the weights of the pretrained model, or with random initial weights.
/// Adapters get initial values, or the values from `train.lora.from`.
///
/// Collective: every rank must call it.
pub fn start_without_checkpoint(
    mut ready: UninitializedTrainer,
    pretrained: Option<&mut PretrainedModel>,
    events: &mut EventSink,
) -> Result<RunningTrainer> {
    match pretrained {
        Some(pretrained) => {
            ready.initialise_params(is_lora_matrix);
            pretrained.load_pretrained_weights(&mut ready, events)?;
        }
        None => ready.initialise_params(|_| true),
    }
    load_pretrained_adapters(&mut ready)?;
    Ok(ready.start_at_position(Cursor::default()))
}

/// The open Hugging Face directory of the model with whose weights training starts
/// (`train.model.from`). [`PretrainedModel::load_pretrained_weights`] reads its weights.
pub struct PretrainedModel {
    source: Box<ExternalCheckpoint>,
}

impl PretrainedModel {
    /// Opens the Hugging Face directory of the pretrained model that the job names, and checks that
    /// config.json has the same content on all ranks. Returns `None` if the job names no directory.
    ///
    /// Collective: every rank must call it.
    pub fn open(directory: Option<&Path>, comm: &dyn Comm) -> Result<Option<PretrainedModel>> {
        let Some(directory) = directory else { return Ok(None) };
        let opened = open_model_directory(directory).map_err(Error::from);
        // Keys are sorted, so equal configurations have equal texts.
        let config = opened
            .as_ref()
            .map_err(Clone::clone)
            .map(|source| Value::Object(source.hf_config().cloned().unwrap_or_default()).to_string());
        let configs = exchange_values_without_queue(comm, config)?;
        let source = opened?;
        if let Some(rank) = configs.iter().position(|config| *config != configs[0]) {
            let message =
                format!("rank {rank} finds another config.json in {} than rank 0", directory.display());
            return Err(Diagnostic::error(codes::training::MODEL_DIRECTORY_DIFFERS, message)
                .with_subject(MODEL_FROM_KEY)
                .with_field("path", directory.display().to_string())
                .with_field("rank", rank)
                .with_help("copy the same model directory to every host")
                .into());
        }
        Ok(Some(PretrainedModel { source }))
    }

    /// Loads the weights of the pretrained model into the trainers of all ranks. Each rank reads
    /// the tensor ranges that it owns. Collective: every rank must call it.
    pub fn load_pretrained_weights(
        &mut self,
        ready: &mut UninitializedTrainer,
        events: &mut EventSink,
    ) -> Result<()> {
        self.source.unfuse_experts(&list_weight_shapes(ready));
        load_external_weights(ready, &self.source, events)
    }

    /// Updates `texts`, the tokenizer and configuration files that checkpoints contain, with the
    /// corresponding files of the pretrained model's directory.
    ///
    /// If `texts` contains the directory's tokenizer.json, the directory's text files replace all
    /// of `texts`. Otherwise only the directory's generation_config.json, if any, is appended.
    pub fn update_text_files(&self, texts: &mut Vec<TextFile>) {
        const TOKENIZER_FILE: &str = "tokenizer.json";
        const GENERATION_CONFIG_FILE: &str = "generation_config.json";
        let files = self.source.exported_text_files();
        let tokenizer = files.iter().find(|t| t.name == TOKENIZER_FILE);
        if tokenizer.is_some_and(|own| texts.iter().any(|t| t.name == TOKENIZER_FILE && t.text == own.text)) {
            *texts = files.to_vec();
        } else {
            texts.extend(files.iter().filter(|t| t.name == GENERATION_CONFIG_FILE).cloned());
        }
    }
}

/// Opens `directory`, the Hugging Face directory of a pretrained model. Fails if `directory` itself
/// is not a Hugging Face directory.
fn open_model_directory(directory: &Path) -> diagnostic::Result<Box<ExternalCheckpoint>> {
    let invalid = |what: &str, help: String| {
        let message = format!("{} {what}", directory.display());
        Diagnostic::error(codes::training::MODEL_DIRECTORY_INVALID, message)
            .with_subject(MODEL_FROM_KEY)
            .with_field("path", directory.display().to_string())
            .with_help(help)
    };
    let found = ckpt::open_checkpoint(directory)
        .map_err(|e| Diagnostic::from(e).with_category(Category::Job).with_subject(MODEL_FROM_KEY))?;
    match found {
        OpenedCheckpoint::External(source) if source.path() == directory => Ok(source),
        OpenedCheckpoint::External(source) => {
            let help = format!("name one of them in `{MODEL_FROM_KEY}`, such as {}", source.path().display());
            Err(invalid("contains checkpoints but no weights itself", help))
        }
        OpenedCheckpoint::Native(_) => {
            let help =
                "resume from it with `resume.from`, or write a model directory with `launch ckpt gather`";
            Err(invalid("is a checkpoint of launch, not a model directory", help.into()))
        }
    }
}
