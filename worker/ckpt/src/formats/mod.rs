//! File formats: safetensors, torch files, and the checkpoint layouts of other programs.
pub(crate) mod dcp;
pub(crate) mod deepspeed;
pub(crate) mod fused_experts;
pub(crate) mod module_order;
pub(crate) mod optimizer_state;
pub(crate) mod param_matching;
mod placeholder;
pub mod safetensors;
pub(crate) mod torch_error;
pub(crate) mod torch_file;
pub(crate) mod torch_legacy;
pub(crate) mod torch_writer;
pub(crate) mod weights;
pub(crate) mod zip;

pub use placeholder::Placeholder;
