//! One function per parser of untrusted input, for fuzz targets and the tests of malformed input.
//!
//! Each function fails if the bytes are invalid. A function must not panic, loop forever, or
//! allocate more memory than the limits of its parser.
use crate::codec::torch_file::{PLAIN_GLOBALS, TENSOR_GLOBALS, TorchFile};
use crate::codec::{safetensors as header, zip as container};
use crate::error::CkptError;
use crate::layout::dcp;
use crate::layout::hf::optimizer_state as state_dict;
use crate::layout::native::Manifest;
use diagnostic::{Diagnostic, Result};
use std::io;
use std::path::Path;

/// Fills `out` with the bytes of a slice from offset `at` on, as a read of a file does.
///
/// # Errors
/// Fails with [`io::ErrorKind::UnexpectedEof`] if the slice is too short.
fn read_at(bytes: &[u8], at: u64, out: &mut [u8]) -> io::Result<()> {
    let start = usize::try_from(at).ok();
    match start.and_then(|s| bytes.get(s..)?.get(..out.len())) {
        Some(found) => {
            out.copy_from_slice(found);
            Ok(())
        }
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Makes the diagnostic of an input that a parser rejected.
fn report_rejected(reason: impl Into<crate::DamageReason>) -> Diagnostic {
    CkptError::damaged(Path::new("."), "input", reason).into()
}

/// Parses a pickle that is not in a container, and converts it to JSON.
pub fn parse_pickle(bytes: &[u8]) -> Result<()> {
    let tree = crate::codec::pickle::parse_pickle(bytes, &[TENSOR_GLOBALS, PLAIN_GLOBALS]);
    tree.map(|tree| drop(tree.root_value().to_json()))
        .map_err(|e| report_rejected(crate::error::TorchFileError::from(e)))
}

/// Parses the central directory of a zip file.
pub fn parse_zip(bytes: &[u8]) -> Result<()> {
    container::read_members(bytes.len() as u64, |at, out| read_at(bytes, at, out))
        .map(drop)
        .map_err(report_rejected)
}

/// Parses the zip or legacy structure of a torch file in memory, and its pickle.
fn open_torch_file(bytes: &[u8]) -> Result<TorchFile> {
    let read = |at: u64, out: &mut [u8]| read_at(bytes, at, out);
    TorchFile::parse(bytes.len() as u64, read, &[TENSOR_GLOBALS, PLAIN_GLOBALS]).map_err(report_rejected)
}

/// Parses a torch file of the zip or the legacy format, and every tensor at the top level of its
/// value.
pub fn parse_torch_file(bytes: &[u8]) -> Result<()> {
    let file = open_torch_file(bytes)?;
    if let Some(pairs) = file.value().as_pairs() {
        for (_, value) in pairs {
            file.parse_tensor(value).map_err(report_rejected)?;
        }
    }
    file.parse_tensor(file.value()).map(drop).map_err(report_rejected)
}

/// Parses the `state_dict` of an optimizer in a torch file.
pub fn parse_optimizer(bytes: &[u8]) -> Result<()> {
    let file = open_torch_file(bytes)?;
    let parsed = state_dict::OptimizerStateDict::read(&file, file.value());
    parsed.map(|optimizer| drop(optimizer.state_shapes())).map_err(report_rejected)
}

/// Parses the header of a safetensors file.
pub fn parse_safetensors(bytes: &[u8]) -> Result<()> {
    header::read_header(bytes.len() as u64, |at, out| read_at(bytes, at, out))
        .map(drop)
        .map_err(report_rejected)
}

/// Parses the `.metadata` of a torch distributed checkpoint.
pub fn parse_dcp_metadata(bytes: &[u8]) -> Result<()> {
    dcp::metadata::parse_metadata(bytes).map(drop).map_err(report_rejected)
}

/// Parses PEFT's `adapter_config.json`.
pub fn parse_adapter_config(bytes: &[u8]) -> Result<()> {
    crate::layout::peft::AdapterConfig::from_json(bytes)
        .map(|config| drop(config.to_json(None)))
        .map_err(report_rejected)
}

/// Parses the manifest of a native checkpoint after writing the matching hash into the text.
/// Without the matching hash, the parser would reject every modified input.
pub fn parse_manifest(bytes: &[u8]) -> Result<()> {
    let mut text = bytes.to_vec();
    Manifest::seal_text(&mut text);
    Manifest::parse(Path::new("."), text).map(drop).map_err(Into::into)
}
