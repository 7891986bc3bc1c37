//! The Hugging Face folder that `train.model.from` names: its first weights, and the files that go along with them.
use super::{Tell, adapters::load_adapters, foreign::load_weights, listed};
use crate::{
    error::{Error, Result},
    stages::{Cursor, Running, ScheduleBound},
};
use ckpt::{Foreign, Found, Source, TextFile, peft::is_adapter};
use comm::Comm;
use contract::exit::WorkerExit;
use serde_json::Value;
use std::path::Path;

/// A run at step 0: with the folder's weights, or new ones; adapters are new or those of their own folder. Collective.
pub fn begin(mut bound: ScheduleBound, origin: Option<&mut Origin>, tell: &mut Tell) -> Result<Running> {
    match origin {
        Some(origin) => {
            bound.initialise(is_adapter);
            origin.load(&mut bound, tell)?;
        }
        None => bound.initialise(|_| true),
    }
    load_adapters(&mut bound)?;
    Ok(bound.resumed(Cursor::default()))
}

/// The open folder; no weight is read before [`Origin::load`].
pub struct Origin {
    source: Box<Foreign>,
}

impl Origin {
    /// Opens the folder, if there is one, and finds out whether all ranks see the same configuration in it. Collective.
    pub fn open(folder: Option<&Path>, comm: &dyn Comm) -> Result<Option<Origin>> {
        let Some(folder) = folder else { return Ok(None) };
        let opened = open(folder);
        let said = match &opened {
            // Keys in order: the same configuration is the same text.
            Ok(source) => format!("+{}", Value::Object(source.hf_config().cloned().unwrap_or_default())),
            Err(e) => format!("-{}", e.message),
        };
        let all = comm.all_gather_bytes(said.as_bytes())?;
        let source = opened?;
        if let Some((rank, why)) = all.iter().enumerate().find(|(_, b)| b.first() == Some(&b'-')) {
            let message = format!("rank {rank}: {}", String::from_utf8_lossy(&why[1..]));
            return Err(Error { exit: WorkerExit::Aborted, message });
        }
        if let Some(rank) = all.iter().position(|b| *b != all[0]) {
            return Err(Error::job(format!(
                "train.model.from: rank {rank} finds another config.json in {} than rank 0; give every host the same folder",
                folder.display()
            )));
        }
        Ok(Some(Origin { source }))
    }

    /// Loads the weights: each rank reads its own part. Collective.
    pub fn load(&mut self, bound: &mut ScheduleBound, tell: &mut Tell) -> Result<()> {
        self.source.list_experts(&listed(bound));
        load_weights(bound, &self.source, tell)
            .map_err(|e| Error { message: format!("train.model.from: {}", e.message), ..e })
    }

    /// Adds the folder's files to those that checkpoints keep for a gathered folder. With its own tokenizer they are as
    /// they were; another tokenizer has files of its own, and of the folder only the settings of generation remain.
    pub fn carry_along(&self, texts: &mut Vec<TextFile>) {
        const TOKENIZER: &str = "tokenizer.json";
        const GENERATION: &str = "generation_config.json";
        let own = self.source.texts();
        let its = own.iter().find(|t| t.name == TOKENIZER);
        if its.is_some_and(|its| texts.iter().any(|t| t.name == TOKENIZER && t.text == its.text)) {
            *texts = own.to_vec();
        } else {
            texts.extend(own.iter().filter(|t| t.name == GENERATION).cloned());
        }
    }
}

fn open(folder: &Path) -> Result<Box<Foreign>> {
    let wrong = |why: String| Error::job(format!("train.model.from: {why}"));
    match ckpt::find(folder).map_err(|e| wrong(e.to_string()))? {
        Found::Foreign(source) if source.path() == folder => Ok(source),
        Found::Foreign(source) => Err(wrong(format!(
            "{} holds checkpoints and no weights of its own; name the one that is meant, such as {}",
            folder.display(),
            source.path().display()
        ))),
        Found::Native(_) => Err(wrong(format!(
            "{} is a checkpoint of launch: go on from it with resume.from, or make a folder of it with `launch ckpt gather`",
            folder.display()
        ))),
    }
}
