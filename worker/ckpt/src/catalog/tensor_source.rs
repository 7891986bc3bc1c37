//! [`TensorSource`]: the trait through which tensors and the training state are read from a
//! checkpoint of any format.
use super::model::{TensorInfo, TextFile};
use super::passthrough::PassthroughState;
use super::training_state::TrainingState;
use crate::error::{CkptError, Result, UnsupportedFeature};
use crate::tensor::{Dtype, TensorRole};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;

/// A request to read consecutive elements of a tensor of a checkpoint into a buffer, converted to
/// F32.
#[derive(Debug)]
pub struct F32ReadRequest<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Role of the tensor: weight, optimizer state or buffer.
    pub role: TensorRole,
    /// Row-major index in the tensor of the first element to read.
    pub start_element: u64,
    /// The buffer that receives the elements. Its length is the number of elements to read.
    pub out: &'a mut [f32],
}

/// Creates requests that read the listed ranges of tensor elements into `buffer`, one range after
/// another, and gives `buffer` the total length of these ranges. A span without a tensor is filled
/// with zeros.
pub(crate) fn build_f32_read_requests<'a>(
    spans: impl Iterator<Item = (Option<&'a TensorInfo>, Range<u64>)> + Clone,
    buffer: &'a mut Vec<f32>,
) -> Vec<F32ReadRequest<'a>> {
    let total: u64 = spans.clone().map(|(_, range)| range.end - range.start).sum();
    buffer.resize(total as usize, 0.0);
    let (mut rest, mut requests) = (buffer.as_mut_slice(), Vec::new());
    for (info, range) in spans {
        let (out, tail) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
        rest = tail;
        match info {
            Some(TensorInfo { name, role, .. }) => {
                requests.push(F32ReadRequest { name, role: *role, start_element: range.start, out });
            }
            None => out.fill(0.0),
        }
    }
    requests
}

/// A checkpoint of any format, from which tensors and the training state are read. Any range of
/// elements of its floating-point tensors can be read as F32.
pub trait TensorSource: Sync {
    /// Returns the path of the checkpoint.
    fn path(&self) -> &Path;

    /// Returns the descriptions (name, role, dtype and shape) of all tensors, weights first.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// Reads the elements that all requests ask for into the buffers of the requests, as F32, and
    /// verifies the stored bytes. After an error the contents of the buffers are undefined.
    fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()>;

    /// Reads the elements of all requests as F32 into their buffers, without necessarily verifying
    /// the checksums of the stored bytes. Each byte is then read only once. The caller must later
    /// call [`TensorSource::verify_reads`], and must discard the elements if that call fails.
    fn read_unverified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        self.read_verified(requests)
    }

    /// Verifies the checksums of all bytes that [`TensorSource::read_unverified`] has read, or of
    /// all stored bytes if `every_byte` is true. By default does nothing, since `read_unverified`
    /// verifies by default.
    fn verify_reads(&self, every_byte: bool) -> Result<()> {
        let _ = every_byte;
        Ok(())
    }

    /// Fills `out` with the stored, little-endian bytes of a tensor's elements, beginning with the
    /// element at index `start_element`, without converting the dtype. The length of `out`
    /// determines the number of elements. Supports any dtype.
    ///
    /// # Errors
    /// Fails with [`UnsupportedFeature::NotFloat`] if the format has only tensors that are read as
    /// F32.
    fn read_raw(&self, name: &str, role: TensorRole, start_element: u64, out: &mut [u8]) -> Result<()> {
        let _ = (start_element, out);
        let tensor = format!("{role}/{name}");
        Err(CkptError::unsupported(self.path(), UnsupportedFeature::NotFloat { tensor }))
    }

    /// Returns the index of the first element, at or after `start`, that the checkpoint does not
    /// store in a hole of a sparse file, so that readers can skip zeros. Elements in a hole are
    /// zero and need not be read. Returns the number of elements if all are in holes. By default
    /// returns `start`.
    fn skip_file_holes(&self, info: &TensorInfo, start: u64) -> Result<u64> {
        let _ = info;
        Ok(start)
    }

    /// Returns the format-specific training state that a conversion copies unchanged to the new
    /// checkpoint.
    fn read_passthrough(&self) -> Result<PassthroughState> {
        Ok(PassthroughState::default())
    }

    /// Returns the number of completed optimizer steps, or `None` if the checkpoint does not record
    /// this number.
    fn completed_steps(&self) -> Option<u64>;

    /// Returns the dtype in which the weights are exported unless the user selects one.
    fn default_export_dtype(&self) -> Dtype {
        Dtype::F32
    }

    /// Returns the state that is needed to resume the training, without the tensors: step,
    /// parameter groups, scheduler and so on.
    fn training_state(&self) -> TrainingState;

    /// Returns true if the checkpoint contains weights, but no optimizer states and no other state
    /// of a training run.
    fn has_only_weights(&self) -> bool {
        false
    }

    /// Returns the reason why this reader ignores optimizer states that are stored in the
    /// checkpoint. Returns `None` if no optimizer state is omitted.
    fn ignored_optimizer_reason(&self) -> Option<&str> {
        None
    }

    /// Returns the number of tokens on which the model was trained, or `None` if the checkpoint
    /// does not record it.
    fn trained_token_count(&self) -> Option<u64> {
        None
    }

    /// Returns the content of `config.json`, or `None` if the checkpoint has no such file.
    fn hf_config(&self) -> Option<&Map<String, Value>> {
        None
    }

    /// Returns the content of PEFT's `adapter_config.json`, or `None` if the model has no LoRA
    /// adapters.
    fn adapter_config(&self) -> Option<&Value> {
        None
    }

    /// Returns the files of the tokenizer and other text files that an export writes next to the
    /// weights.
    fn exported_text_files(&self) -> &[TextFile] {
        &[]
    }

    /// Fails if weights or buffers of the checkpoint are known to be missing, for example because
    /// other hosts store their shards.
    fn require_all_weights(&self) -> Result<()> {
        Ok(())
    }
}
