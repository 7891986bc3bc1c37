//! Everything that reads bytes of strangers, each behind one function: what fuzz targets and hostile tests call.
//!
//! Each returns what is wrong with the bytes, or nothing. None may panic, loop, or take memory beyond its caps.
use crate::formats::torch_file::{PLAIN, TENSORS, TorchFile};
use crate::formats::{dcp, safetensors as header, zip as container};
use crate::manifest::Manifest;
use std::io;
use std::path::Path;

type Said = Result<(), String>;

fn at(bytes: &[u8], at: u64, out: &mut [u8]) -> io::Result<()> {
    let start = usize::try_from(at).ok();
    match start.and_then(|s| bytes.get(s..)?.get(..out.len())) {
        Some(found) => {
            out.copy_from_slice(found);
            Ok(())
        }
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A pickle alone.
pub fn pickle(bytes: &[u8]) -> Said {
    crate::pickle::load(bytes, &[TENSORS, PLAIN]).map(|tree| drop(tree.root().json()))
}

/// The directory of a zip container.
pub fn zip(bytes: &[u8]) -> Said {
    container::members(bytes.len() as u64, |from, out| at(bytes, from, out)).map(drop)
}

/// A torch file, zip or legacy, and every tensor in it.
pub fn torch_file(bytes: &[u8]) -> Said {
    let file = TorchFile::parse(bytes.len() as u64, |from, out| at(bytes, from, out), &[TENSORS, PLAIN])?;
    if let Some(pairs) = file.value().pairs() {
        for (_, value) in pairs {
            file.tensor(value)?;
        }
    }
    file.tensor(file.value()).map(drop)
}

/// The state of an optimizer in a torch file.
pub fn optimizer(bytes: &[u8]) -> Said {
    let file = TorchFile::parse(bytes.len() as u64, |from, out| at(bytes, from, out), &[TENSORS, PLAIN])?;
    crate::formats::optimizer::Optimizer::read(&file, file.value()).map(|found| drop(found.shapes()))
}

/// The header of a safetensors file.
pub fn safetensors(bytes: &[u8]) -> Said {
    header::read_header(bytes.len() as u64, |from, out| at(bytes, from, out)).map(drop)
}

/// `.metadata` of a distributed checkpoint.
pub fn dcp_metadata(bytes: &[u8]) -> Said {
    dcp::metadata::parse(bytes).map(drop)
}

/// PEFT's configuration of adapters.
pub fn adapter_config(bytes: &[u8]) -> Said {
    let map = crate::peft::object(bytes)?;
    crate::peft::AdapterConfig::parse(&map).map(|config| drop(config.json(None)))
}

/// The manifest of a native checkpoint, with the hash that fits it: else nothing but the hash would be looked at.
pub fn manifest(bytes: &[u8]) -> Said {
    let mut text = bytes.to_vec();
    Manifest::seal(&mut text);
    Manifest::parse(Path::new("."), text).map(drop).map_err(|e| e.to_string())
}
