//! Functions that each pass bytes to one parser of untrusted files, for fuzz targets and tests of
//! malformed input.
//!
//! Each function fails if the bytes are invalid. A function must not panic, loop forever, or
//! allocate more memory than the limits of its parser.
use crate::catalog::ALLOWED_GLOBALS;
use crate::codec::sealed_json::JsonSeal;
use crate::codec::torch_file::{TorchFile, copy_bytes_at};
use crate::codec::{safetensors as header, zip as container};
use crate::error::CkptError;
use crate::layout::dcp;
use crate::layout::hf::{companion_files, optimizer_state as state_dict, weights};
use crate::layout::native::Manifest;
use crate::save::output_record::GATHER_RECORD_KIND;
use diagnostic::{Diagnostic, Result};
use std::path::Path;

/// Creates the diagnostic (an error in the form that users see) for an input that a parser
/// rejected.
fn make_rejection_diagnostic(reason: impl Into<crate::DamageReason>) -> Diagnostic {
    CkptError::damaged(Path::new("."), "input", reason).into()
}

/// Parses a pickle without a container such as a torch file, and converts the pickled value to
/// JSON.
pub fn parse_pickle(bytes: &[u8]) -> Result<()> {
    let tree = crate::codec::pickle::parse_pickle(bytes, ALLOWED_GLOBALS);
    tree.map(|tree| drop(tree.root_value().to_json()))
        .map_err(|e| make_rejection_diagnostic(crate::error::TorchFileError::from(e)))
}

/// Parses the central directory of a zip file.
pub fn parse_zip(bytes: &[u8]) -> Result<()> {
    container::read_members(bytes.len() as u64, |at, out| copy_bytes_at(bytes, at, out))
        .map(drop)
        .map_err(make_rejection_diagnostic)
}

/// Parses a torch file (zip or legacy format) from the bytes `bytes`, including the file's pickle,
/// and returns the parsed file.
fn open_torch_file(bytes: &[u8]) -> Result<TorchFile> {
    let read = |at: u64, out: &mut [u8]| copy_bytes_at(bytes, at, out);
    TorchFile::parse(bytes.len() as u64, read, ALLOWED_GLOBALS).map_err(make_rejection_diagnostic)
}

/// Parses a torch file of the zip or the legacy format, then each value of its top-level dictionary
/// and the top-level object as tensors.
pub fn parse_torch_file(bytes: &[u8]) -> Result<()> {
    let file = open_torch_file(bytes)?;
    if let Some(pairs) = file.value().as_pairs() {
        for (_, value) in pairs {
            file.parse_tensor(value).map_err(make_rejection_diagnostic)?;
        }
    }
    file.parse_tensor(file.value()).map(drop).map_err(make_rejection_diagnostic)
}

/// Parses the `state_dict` of an optimizer in a torch file.
pub fn parse_optimizer(bytes: &[u8]) -> Result<()> {
    let file = open_torch_file(bytes)?;
    let parsed = state_dict::OptimizerStateDict::read(&file, file.value());
    parsed.map(|optimizer| drop(optimizer.state_shapes())).map_err(make_rejection_diagnostic)
}

/// Parses the header of a safetensors file.
pub fn parse_safetensors(bytes: &[u8]) -> Result<()> {
    header::read_header(bytes.len() as u64, |at, out| copy_bytes_at(bytes, at, out))
        .map(drop)
        .map_err(make_rejection_diagnostic)
}

/// Parses the `.metadata` of a torch distributed checkpoint.
pub fn parse_dcp_metadata(bytes: &[u8]) -> Result<()> {
    dcp::metadata::parse_metadata(bytes).map(drop).map_err(make_rejection_diagnostic)
}

/// Parses PEFT's `adapter_config.json`.
pub fn parse_adapter_config(bytes: &[u8]) -> Result<()> {
    crate::layout::peft::AdapterConfig::from_json(bytes)
        .map(|config| drop(config.to_json(None)))
        .map_err(make_rejection_diagnostic)
}

/// Parses the index of a model's weights files, such as `model.safetensors.index.json`.
pub fn parse_weight_index(bytes: &[u8]) -> Result<()> {
    weights::parse_weight_map(bytes).map(drop).map_err(|reason| make_rejection_diagnostic(*reason))
}

/// Parses the `trainer_state.json` of HF Trainer.
pub fn parse_trainer_state(bytes: &[u8]) -> Result<()> {
    companion_files::parse_global_step(bytes).map(drop).map_err(|reason| make_rejection_diagnostic(*reason))
}

/// Parses the manifest of a checkpoint after replacing the hash in its text by the correct one, so
/// that fuzzed text reaches the parser.
pub fn parse_manifest(bytes: &[u8]) -> Result<()> {
    let mut text = bytes.to_vec();
    JsonSeal::COMPACT.seal(&mut text);
    Manifest::parse(Path::new("."), text).map(drop).map_err(Into::into)
}

/// Parses a list of gathered weights files after replacing the hash in its text by the correct one,
/// so that fuzzed text reaches the parser.
pub fn parse_output_record(bytes: &[u8]) -> Result<()> {
    let mut text = bytes.to_vec();
    JsonSeal::INDENTED.seal(&mut text);
    GATHER_RECORD_KIND.parse_record(&mut text).map(drop).map_err(|reason| make_rejection_diagnostic(*reason))
}
