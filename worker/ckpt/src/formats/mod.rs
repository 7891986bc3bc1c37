//! File formats that tensors rest in.
pub(crate) mod dcp;
pub(crate) mod deepspeed;
pub(crate) mod legacy;
mod numbered;
pub(crate) mod optimizer;
pub(crate) mod order;
pub mod safetensors;
pub(crate) mod torch_file;
pub(crate) mod torch_write;
pub(crate) mod weights;
pub(crate) mod zip;
