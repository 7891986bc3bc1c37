//! One function per parser of untrusted input, for fuzz targets and the tests of malformed input.
//!
//! Each rejects invalid bytes with an error. None may panic, loop forever, or allocate more memory
//! than its limits.
use crate::error::CkptError;
use crate::formats::torch_file::{PLAIN, TENSORS, TorchFile};
use crate::formats::{dcp, optimizer as state_dict, safetensors as header, zip as container};
use crate::manifest::Manifest;
use diagnostic::{Diagnostic, Result};
use std::io;
use std::path::Path;

/// Reads from a slice as from a file.
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

fn rejected_input(reason: impl Into<crate::DamageReason>) -> Diagnostic {
    CkptError::damaged(Path::new("."), "input", reason).into()
}

/// Parses a bare pickle.
pub fn pickle(bytes: &[u8]) -> Result<()> {
    let tree = crate::pickle::load(bytes, &[TENSORS, PLAIN]);
    tree.map(|tree| drop(tree.root().json()))
        .map_err(|e| rejected_input(crate::formats::torch_error::TorchFileError::from(e)))
}

/// Parses the directory of a zip container.
pub fn zip(bytes: &[u8]) -> Result<()> {
    container::members(bytes.len() as u64, |at, out| read_at(bytes, at, out))
        .map(drop)
        .map_err(rejected_input)
}

fn open_torch_file(bytes: &[u8]) -> Result<TorchFile> {
    let read = |at: u64, out: &mut [u8]| read_at(bytes, at, out);
    TorchFile::parse(bytes.len() as u64, read, &[TENSORS, PLAIN]).map_err(rejected_input)
}

/// Parses a torch file, zip or legacy, and every tensor in it.
pub fn torch_file(bytes: &[u8]) -> Result<()> {
    let file = open_torch_file(bytes)?;
    if let Some(pairs) = file.value().pairs() {
        for (_, value) in pairs {
            file.tensor(value).map_err(rejected_input)?;
        }
    }
    file.tensor(file.value()).map(drop).map_err(rejected_input)
}

/// Parses the `state_dict` of an optimizer in a torch file.
pub fn optimizer(bytes: &[u8]) -> Result<()> {
    let file = open_torch_file(bytes)?;
    let parsed = state_dict::OptimizerStateDict::read(&file, file.value());
    parsed.map(|optimizer| drop(optimizer.shapes())).map_err(rejected_input)
}

/// Parses the header of a safetensors file.
pub fn safetensors(bytes: &[u8]) -> Result<()> {
    header::read_header(bytes.len() as u64, |at, out| read_at(bytes, at, out))
        .map(drop)
        .map_err(rejected_input)
}

/// Parses the `.metadata` of a torch distributed checkpoint.
pub fn dcp_metadata(bytes: &[u8]) -> Result<()> {
    dcp::metadata::parse(bytes).map(drop).map_err(rejected_input)
}

/// Parses PEFT's `adapter_config.json`.
pub fn adapter_config(bytes: &[u8]) -> Result<()> {
    crate::peft::AdapterConfig::from_json(bytes).map(|config| drop(config.json(None))).map_err(rejected_input)
}

/// Parses the manifest of a native checkpoint after inserting the matching hash, since otherwise
/// only the hash would be tested.
pub fn manifest(bytes: &[u8]) -> Result<()> {
    let mut text = bytes.to_vec();
    Manifest::seal(&mut text);
    Manifest::parse(Path::new("."), text).map(drop).map_err(Into::into)
}
