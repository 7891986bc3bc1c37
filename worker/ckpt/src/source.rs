//! What weights can be gathered from: a checkpoint of ours or of others.
use crate::catalog::{TensorInfo, TextFile};
use crate::checkpoint::Request;
use crate::error::Result;
use serde_json::{Map, Value};
use std::path::Path;

/// A checkpoint of any format: tensors by role and name, read as f32 in any ranges.
pub trait Source: Sync {
    /// Its folder.
    fn path(&self) -> &Path;

    /// Every tensor, weights first.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// Fills all requests. After an error the contents of the outputs mean nothing.
    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()>;

    /// Optimizer steps done, where it says so.
    fn step(&self) -> Option<u64>;

    /// Tokens trained on, where it says so.
    fn tokens(&self) -> Option<u64>;

    /// What goes into `config.json`; `None` when it isn't there.
    fn hf_config(&self) -> Option<&Map<String, Value>>;

    /// Tokenizer files and other texts that go beside the weights.
    fn texts(&self) -> &[TextFile];

    /// Refuses a checkpoint that is known to lack weights.
    fn require_weights(&self) -> Result<()> {
        Ok(())
    }
}
