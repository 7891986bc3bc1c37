//! File formats that tensors rest in.
pub mod safetensors;
