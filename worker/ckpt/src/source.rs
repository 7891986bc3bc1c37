//! What weights can be gathered from: a checkpoint of ours or of others.
use crate::catalog::{Role, TensorInfo, TextFile};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::passthrough::Extras;
use crate::state::TrainingState;
use serde_json::{Map, Value};
use std::path::Path;

/// A range of a tensor to read, for [`crate::Checkpoint::read_many`].
#[derive(Debug)]
pub struct Request<'a> {
    pub name: &'a str,
    pub role: Role,
    /// Index in the whole tensor of the first element wanted.
    pub start_element: u64,
    /// Filled; its length says how many elements are wanted.
    pub out: &'a mut [f32],
}

/// A checkpoint of any format: tensors by role and name, read as f32 in any ranges.
pub trait Source: Sync {
    /// Its folder.
    fn path(&self) -> &Path;

    /// Every tensor, weights first.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// Fills all requests. After an error the contents of the outputs mean nothing.
    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()>;

    /// As [`Source::read_many`], but what is wrong with the bytes may be found by [`Source::settle`] only: each byte is read
    /// once. For results that are thrown away when that fails.
    fn read_unchecked(&self, requests: &mut [Request<'_>]) -> Result<()> {
        self.read_many(requests)
    }

    /// Checks what [`Source::read_unchecked`] has given since it was opened; with `all`, everything that it could give.
    fn settle(&self, all: bool) -> Result<()> {
        let _ = all;
        Ok(())
    }

    /// Fills `out` with elements from `start_element` on of a tensor of any type, as they are stored (little-endian).
    fn read_raw(&self, name: &str, role: Role, start_element: u64, out: &mut [u8]) -> Result<()> {
        let _ = (start_element, out);
        let what = format!("{role}/{name} is no tensor of floating point numbers");
        Err(CkptError::Unsupported { path: self.path().to_owned(), what })
    }

    /// What a training state has beside tensors.
    fn extras(&self) -> Result<Extras> {
        Ok(Extras::default())
    }

    /// Optimizer steps done, where it says so.
    fn step(&self) -> Option<u64>;

    /// The type that its weights are gathered in unless another is asked for: BF16 when it has no more of them.
    fn weights_dtype(&self) -> Dtype {
        Dtype::F32
    }

    /// What it says of itself beside its tensors.
    fn state(&self) -> TrainingState;

    /// True when it holds weights and nothing of a training state, neither whole nor in part.
    fn is_weights_alone(&self) -> bool {
        false
    }

    /// Why states of an optimizer that are there aren't among the tensors.
    fn unread(&self) -> Option<&str> {
        None
    }

    /// Tokens trained on, where it says so.
    fn tokens(&self) -> Option<u64> {
        None
    }

    /// What goes into `config.json`; `None` when it isn't there.
    fn hf_config(&self) -> Option<&Map<String, Value>> {
        None
    }

    /// PEFT's `adapter_config.json` of a model with low-rank adapters.
    fn adapter(&self) -> Option<&Value> {
        None
    }

    /// Tokenizer files and other texts that go beside the weights.
    fn texts(&self) -> &[TextFile] {
        &[]
    }

    /// Refuses a checkpoint that is known to lack weights.
    fn require_weights(&self) -> Result<()> {
        Ok(())
    }
}
