//! Computes attention with cuDNN: builds a graph of cuDNN's operations for each attention shape,
//! which cuDNN compiles for the GPU.
//!
//! The operations are the ones that NVIDIA's cuDNN frontend generates for attention. The library
//! recognizes a graph by its form, and rejects every other form as not supported.
mod attention_graph;
mod backend_selection;
mod descriptor;
pub(super) mod execution_plan;
mod library;
mod operation_graph;

use super::error::Result;
use super::library_search::LibrarySearchPaths;
use crate::ops::AttentionShape;
use attention_graph::AttentionMask;
pub use attention_graph::estimate_cudnn_workspace_bytes;
pub(super) use attention_graph::{AttentionOperands, AttentionPass};
pub use backend_selection::AttentionBackend;
pub(super) use backend_selection::CudnnAttention;
use library::Cudnn;
use std::path::PathBuf;

/// Returns cuDNN's version, such as `9.19.0`, and the path of the library. Does not use a GPU.
pub(super) fn query_library_version(paths: &LibrarySearchPaths) -> Result<(String, PathBuf)> {
    let cudnn = Cudnn::open_without_gpu(paths)?;
    Ok((cudnn.format_version(), cudnn.path))
}

/// Returns how many bytes of workspace cuDNN needs for the forward and the backward pass of
/// attention on a GPU that `properties` describes. A value is `None` if there is no plan.
///
/// The GPU need not exist: `properties` describes it, as JSON in cuDNN's form.
pub fn compute_cudnn_plan_workspaces(
    paths: &LibrarySearchPaths,
    properties: &str,
    shape: AttentionShape,
    window: Option<usize>,
) -> Result<[Option<usize>; 2]> {
    let cudnn = Cudnn::open_without_gpu(paths)?;
    let mask = window.map_or(AttentionMask::Causal, AttentionMask::Window);
    let workspace =
        |is_backward| AttentionPass { shape, mask, is_backward }.compute_plan_workspace(&cudnn, properties);
    Ok([workspace(false)?, workspace(true)?])
}
