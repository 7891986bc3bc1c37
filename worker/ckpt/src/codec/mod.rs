//! Reads and writes the file formats of checkpoints: pickles, zip containers, torch files and
//! safetensors files.
pub(crate) mod disk;
pub(crate) mod json;
pub(crate) mod narrow;
pub(crate) mod pickle;
mod placeholder_file;
pub(crate) mod safetensors;
pub(crate) mod sealed_json;
pub(crate) mod torch_file;
pub(crate) mod torch_legacy;
pub(crate) mod torch_writer;
pub(crate) mod zip;
