//! Gathers the weights and buffers of a checkpoint, which are spread over several files, and writes
//! them to a directory in the format of Hugging Face.
//!
//! Tensors are streamed: several threads read ahead while one thread converts and writes. The
//! memory doesn't depend on the model size. It consists of six windows of 4 MiB, one converted
//! window, a buffer of 2 MiB per reader, and 24 MiB for writing.
mod adapters;
mod gather_weights;
mod output;
mod plan;
mod save_order;
mod stream;

pub use gather_weights::{GatherReport, gather_weights, gather_weights_until};
pub use plan::{GatherOptions, GatheredFile};
