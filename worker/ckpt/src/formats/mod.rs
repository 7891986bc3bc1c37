//! File formats that tensors rest in.
pub(crate) mod deepspeed;
pub mod safetensors;
pub(crate) mod torch_file;
pub(crate) mod zip;
