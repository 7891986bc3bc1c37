//! Reports which algorithm of cuBLASLt computes a matmul ([`MatmulPlanReport`]).
use super::super::bindings::{
    CublasLtApi,
    cublas_lt_sys::{cublasLtMatmulAlgo_t, cublasLtMatmulAlgoConfigAttributes_t},
};

/// The algorithm and the workspace size with which cuBLASLt computes matmuls of certain sizes,
/// strides, types and alignments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatmulPlanReport {
    /// Sizes, strides, types and alignments of the matmul.
    pub matmul: String,
    /// The attributes of the algorithm with their values. `None` if cuBLASLt has no algorithm.
    pub algorithm: Option<Vec<(&'static str, u64)>>,
    /// Bytes of the algorithm's workspace.
    pub workspace_bytes: usize,
}

/// Queries cuBLASLt for the attributes of a matmul algorithm, such as tile and split-K, and returns
/// their names and values.
pub(super) fn query_algorithm_attributes(
    library: &CublasLtApi,
    algorithm: &cublasLtMatmulAlgo_t,
) -> Vec<(&'static str, u64)> {
    use cublasLtMatmulAlgoConfigAttributes_t::*;
    [
        ("id", CUBLASLT_ALGO_CONFIG_ID, 4),
        ("tile", CUBLASLT_ALGO_CONFIG_TILE_ID, 4),
        ("stages", CUBLASLT_ALGO_CONFIG_STAGES_ID, 4),
        ("split_k", CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4),
        ("reduction", CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4),
        ("swizzling", CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4),
        ("custom", CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4),
        ("inner_shape", CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2),
        ("cluster_shape", CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2),
    ]
    .into_iter()
    .filter_map(|(name, attribute, bytes)| {
        let (mut value, mut written) = (0u64, 0);
        // SAFETY: writes at most `bytes` bytes, which `value` has.
        let status = unsafe {
            (library.cublasLtMatmulAlgoConfigGetAttribute)(
                algorithm,
                attribute,
                (&raw mut value).cast(),
                bytes,
                &mut written,
            )
        };
        (status == 0).then_some((name, value))
    })
    .collect()
}
