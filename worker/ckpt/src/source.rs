//! A common interface to the tensors and the state of checkpoints of all formats.
use crate::catalog::{TensorInfo, TensorRole, TextFile};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result, UnsupportedFeature};
use crate::passthrough::PassthroughState;
use crate::state::TrainingState;
use serde_json::{Map, Value};
use std::path::Path;

/// A request to read a range of a tensor.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Purpose of the tensor.
    pub role: TensorRole,
    /// Index of the first element to read.
    pub start_element: u64,
    /// The buffer to fill; its length is the number of elements to read.
    pub out: &'a mut [f32],
}

/// A checkpoint of any format, whose tensors are read as F32 in any ranges.
pub trait TensorSource: Sync {
    /// The checkpoint directory.
    fn path(&self) -> &Path;

    /// Every tensor, weights first.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// Reads all requests. After an error the contents of the outputs are undefined.
    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()>;

    /// Reads all requests without verifying the bytes first, so that each byte is read only once.
    /// The results must be discarded when [`TensorSource::verify_reads`] fails afterwards.
    fn read_unchecked(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        self.read_many(requests)
    }

    /// Verifies everything that [`TensorSource::read_unchecked`] has read; with `every_byte`, all
    /// stored bytes.
    fn verify_reads(&self, every_byte: bool) -> Result<()> {
        let _ = every_byte;
        Ok(())
    }

    /// Reads elements of a tensor of any dtype from `start_element` on, in the stored little-endian
    /// form.
    fn read_raw(&self, name: &str, role: TensorRole, start_element: u64, out: &mut [u8]) -> Result<()> {
        let _ = (start_element, out);
        let tensor = format!("{role}/{name}");
        Err(CkptError::unsupported(self.path(), UnsupportedFeature::NotFloat { tensor }))
    }

    /// State that a conversion copies unchanged.
    fn passthrough(&self) -> Result<PassthroughState> {
        Ok(PassthroughState::default())
    }

    /// Completed optimizer steps, if recorded.
    fn step(&self) -> Option<u64>;

    /// The default dtype for exporting the weights: BF16 when all weights are stored as BF16.
    fn weights_dtype(&self) -> Dtype {
        Dtype::F32
    }

    /// The training state apart from tensors.
    fn state(&self) -> TrainingState;

    /// True for a checkpoint with weights and no part of a training state.
    fn is_weights_alone(&self) -> bool {
        false
    }

    /// Why an existing optimizer state is not among the tensors.
    fn ignored_optimizer(&self) -> Option<&str> {
        None
    }

    /// Number of trained tokens, if recorded.
    fn tokens(&self) -> Option<u64> {
        None
    }

    /// Content of `config.json`; `None` when there is none.
    fn hf_config(&self) -> Option<&Map<String, Value>> {
        None
    }

    /// PEFT's `adapter_config.json`, for a model with LoRA adapters.
    fn adapter(&self) -> Option<&Value> {
        None
    }

    /// Tokenizer files and other texts that are exported with the weights.
    fn texts(&self) -> &[TextFile] {
        &[]
    }

    /// Rejects a checkpoint that is known to lack weights.
    fn require_weights(&self) -> Result<()> {
        Ok(())
    }
}
