//! The kernels of flash.cuh, which compute attention on tensor cores: their names, launch
//! parameters and source files ([`FlashKernel`]).
use super::attention_arguments::{AttentionArg, BlockOrder};
use super::backend::{Cuda, LaunchSize};
use super::compile::{FLASH_256_F16_SOURCE, FLASH_256_SOURCE, FLASH_F16_SOURCE, FLASH_SOURCE, KernelSource};
use super::launch::{KernelArg, LaunchConfig};
use crate::buffer::Dtype;
use crate::ops::AttentionShape;
use std::ffi::CStr;

/// Maximum size in bytes of the shared memory that a thread block of the kernels of flash.cuh
/// (attention on tensor cores) needs for data other than rows of queries, keys, values or
/// gradients. The bytes contain the statistics of two steps of 64 such rows, and `BlockState`.
const FLASH_EXTRA_SHARED_BYTES: usize = 2 * 3 * 64 * 4 + 128;

/// The four compiled variants of one attention kernel of flash.cuh (for tensor cores) for heads of
/// up to a certain number of elements, with their launch parameters. Index 1 of an array is for
/// attention with a softcap or dropout.
pub(super) struct FlashKernel {
    /// Largest number of elements of a head.
    max_head_dim: usize,
    /// Names of the kernels, first for bf16 and then for f16.
    names: [[&'static CStr; 2]; 2],
    /// Number of queries or keys of which a block computes the results.
    tile_rows: usize,
    /// Number of warps per block of each variant.
    warps: [u32; 2],
    /// Number of rows of queries, keys, values or gradients in a block's shared memory, for each
    /// variant. These are the rows of two steps of the block's loop and, unless they are in
    /// registers, the rows that the block owns.
    shared_rows: [usize; 2],
    /// True if each block computes results for some keys and iterates over queries, false for the
    /// reverse.
    is_by_keys: bool,
}

/// The kernels of the forward pass of attention on tensor cores, by ascending head dimension.
pub(super) const FLASH_FORWARD: [FlashKernel; 3] = [
    FlashKernel {
        max_head_dim: 64,
        names: [
            [c"flash_forward_64", c"flash_forward_64_any"],
            [c"flash_forward_64_f16", c"flash_forward_64_any_f16"],
        ],
        tile_rows: 128,
        warps: [4, 4],
        shared_rows: [256, 256],
        is_by_keys: false,
    },
    FlashKernel {
        max_head_dim: 128,
        names: [
            [c"flash_forward_128", c"flash_forward_128_any"],
            [c"flash_forward_128_f16", c"flash_forward_128_any_f16"],
        ],
        tile_rows: 128,
        warps: [4, 8],
        shared_rows: [256, 256],
        is_by_keys: false,
    },
    FlashKernel {
        max_head_dim: 256,
        names: [
            [c"flash_forward_256", c"flash_forward_256_any"],
            [c"flash_forward_256_f16", c"flash_forward_256_any_f16"],
        ],
        tile_rows: 128,
        warps: [8, 8],
        shared_rows: [192, 192],
        is_by_keys: false,
    },
];
/// The kernels that compute the gradients of queries for attention on tensor cores, by ascending
/// head dimension. Each of their blocks processes some queries.
pub(super) const FLASH_BACKWARD_Q: [FlashKernel; 3] = [
    FlashKernel {
        max_head_dim: 64,
        names: [
            [c"flash_backward_q_64", c"flash_backward_q_64_any"],
            [c"flash_backward_q_64_f16", c"flash_backward_q_64_any_f16"],
        ],
        tile_rows: 128,
        warps: [4, 4],
        shared_rows: [256, 256],
        is_by_keys: false,
    },
    FlashKernel {
        max_head_dim: 128,
        names: [
            [c"flash_backward_q_128", c"flash_backward_q_128_any"],
            [c"flash_backward_q_128_f16", c"flash_backward_q_128_any_f16"],
        ],
        tile_rows: 128,
        warps: [8, 8],
        shared_rows: [256, 256],
        is_by_keys: false,
    },
    FlashKernel {
        max_head_dim: 256,
        names: [
            [c"flash_backward_q_256", c"flash_backward_q_256_any"],
            [c"flash_backward_q_256_f16", c"flash_backward_q_256_any_f16"],
        ],
        tile_rows: 64,
        warps: [4, 4],
        shared_rows: [192, 192],
        is_by_keys: false,
    },
];
/// The kernels that compute the gradients of keys and values for attention on tensor cores, by
/// ascending head dimension. Each of their blocks processes some keys. For heads of more than 128
/// elements, one kernel computes the gradients of keys and another one those of values.
pub(super) const FLASH_BACKWARD_KV: [FlashKernel; 4] = [
    FlashKernel {
        max_head_dim: 64,
        names: [
            [c"flash_backward_kv_64", c"flash_backward_kv_64_any"],
            [c"flash_backward_kv_64_f16", c"flash_backward_kv_64_any_f16"],
        ],
        tile_rows: 128,
        warps: [4, 8],
        shared_rows: [384, 256],
        is_by_keys: true,
    },
    FlashKernel {
        max_head_dim: 128,
        names: [
            [c"flash_backward_kv_128", c"flash_backward_kv_128_any"],
            [c"flash_backward_kv_128_f16", c"flash_backward_kv_128_any_f16"],
        ],
        tile_rows: 128,
        warps: [8, 8],
        shared_rows: [256, 256],
        is_by_keys: true,
    },
    FlashKernel {
        max_head_dim: 256,
        names: [
            [c"flash_backward_k_256", c"flash_backward_k_256_any"],
            [c"flash_backward_k_256_f16", c"flash_backward_k_256_any_f16"],
        ],
        tile_rows: 64,
        warps: [4, 4],
        shared_rows: [192, 192],
        is_by_keys: true,
    },
    FlashKernel {
        max_head_dim: 256,
        names: [
            [c"flash_backward_v_256", c"flash_backward_v_256_any"],
            [c"flash_backward_v_256_f16", c"flash_backward_v_256_any_f16"],
        ],
        tile_rows: 128,
        warps: [8, 8],
        shared_rows: [192, 192],
        is_by_keys: true,
    },
];

/// Enqueues those of the attention kernels `kernels` on tensor cores that fit the shape `s`. The
/// kernels receive `arguments`, then the shape and the order of the blocks. `dtype` is the 16-bit
/// type of all tensors.
pub(super) fn launch_flash_kernels(
    kernels: &[FlashKernel],
    cuda: &Cuda,
    dtype: Dtype,
    s: AttentionShape,
    arguments: &[&dyn KernelArg],
) {
    let fitting = kernels.iter().map(|kernel| kernel.max_head_dim).filter(|max| s.head_dim <= *max).min();
    let selected = kernels.iter().filter(|kernel| Some(kernel.max_head_dim) == fitting);
    selected.for_each(|kernel| kernel.launch(cuda, dtype, s, arguments));
}

impl FlashKernel {
    /// Enqueues the variant of this kernel (attention on tensor cores) for the attention shape `s`
    /// and the element type `dtype`. The kernel receives `arguments`, then the shape and the order
    /// of the blocks.
    fn launch(&self, cuda: &Cuda, dtype: Dtype, s: AttentionShape, arguments: &[&dyn KernelArg]) {
        let variant = usize::from(s.softcap.is_some() || s.dropout.is_some());
        let width = (s.heads + 2 * s.kv_heads) * s.head_dim;
        assert!(s.t <= 1 << 30 && width <= 1 << 30, "attention: {s:?} exceeds the kernel's index range");
        let order = self.compute_block_order(s, cuda.properties().l2_cache_bytes);
        let blocks =
            u32::try_from(order.tiles * order.total_heads).ok().filter(|blocks| *blocks <= i32::MAX as u32);
        let grid = [blocks.unwrap_or_else(|| panic!("attention: {s:?} exceeds the grid")), 1, 1];
        let shared = self.compute_shared_bytes(variant);
        let config = LaunchConfig { grid, block: [32 * self.warps[variant], 1, 1], shared };
        let shape = AttentionArg::new(s);
        let arguments: Vec<&dyn KernelArg> =
            arguments.iter().copied().chain([&shape as &dyn KernelArg, &order]).collect();
        let name = self.names[usize::from(dtype == Dtype::F16)][variant];
        cuda.launch(self.find_source(dtype), name, LaunchSize::Config(config), &arguments);
    }

    /// Returns the source file of this kernel's variants for the element type `dtype`.
    fn find_source(&self, dtype: Dtype) -> KernelSource {
        match (self.max_head_dim > 128, dtype == Dtype::F16) {
            (false, false) => FLASH_SOURCE,
            (false, true) => FLASH_F16_SOURCE,
            (true, false) => FLASH_256_SOURCE,
            (true, true) => FLASH_256_F16_SOURCE,
        }
    }

    /// Returns the bytes of shared memory of each block, for variant 0 (plain attention) or 1 (with
    /// a softcap or dropout). Rows of more than 128 elements are stored without padding.
    fn compute_shared_bytes(&self, variant: usize) -> usize {
        let padding = if self.max_head_dim > 128 { 0 } else { 8 };
        let row_bytes = (self.max_head_dim + padding) * size_of::<u16>();
        self.shared_rows[variant] * row_bytes + FLASH_EXTRA_SHARED_BYTES
    }

    /// Chooses the order in which this kernel's thread blocks process heads and tiles, so that
    /// blocks that run together share data in the L2 cache.
    fn compute_block_order(&self, s: AttentionShape, l2_cache_bytes: usize) -> BlockOrder {
        BlockOrder::new(s, self.tile_rows, self.is_by_keys, l2_cache_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile::list_kernel_names;
    use super::*;

    #[test]
    fn heads_whose_rows_fit_into_the_cache_are_scheduled_together() {
        let s = AttentionShape::new(2, 1000, 16, 4, 128);
        let order = |kernel: &FlashKernel, cache| {
            let order = kernel.compute_block_order(s, cache);
            (order.tiles, order.heads, order.total_heads, order.heads_together)
        };
        // Keys and values of 4 query heads take 512 000 bytes; queries and gradients of one key
        // head take four times as many.
        assert_eq!(order(&FLASH_FORWARD[1], 1_024_000), (8, 16, 32, 4));
        assert_eq!(order(&FLASH_FORWARD[1], 3_000_000), (8, 16, 32, 8));
        assert_eq!(order(&FLASH_FORWARD[1], 0), (8, 16, 32, 4));
        assert_eq!(order(&FLASH_FORWARD[1], 1 << 30), (8, 16, 32, 32));
        assert_eq!(order(&FLASH_BACKWARD_KV[1], 5_000_000), (8, 4, 8, 1));
        assert_eq!(order(&FLASH_BACKWARD_KV[1], 9_000_000), (8, 4, 8, 2));
        assert_eq!(order(&FLASH_BACKWARD_KV[2], 9_000_000).0, 16, "tiles of 64 keys");
    }

    #[test]
    fn all_kernels_exist_and_fit_into_the_shared_memory_of_every_gpu() {
        let exists = |source: KernelSource, name: &CStr| {
            list_kernel_names().any(|(of, listed)| of == source && listed.as_c_str() == name)
        };
        let kernels = FLASH_FORWARD.iter().chain(&FLASH_BACKWARD_Q).chain(&FLASH_BACKWARD_KV);
        for kernel in kernels {
            for variant in [0, 1] {
                // compute capability 8.6 and 8.9: 99 KiB per block
                let bytes = kernel.compute_shared_bytes(variant);
                assert!(bytes <= 99 << 10, "{:?}: {bytes} bytes", kernel.names);
                assert!(exists(kernel.find_source(Dtype::Bf16), kernel.names[0][variant]));
                assert!(exists(kernel.find_source(Dtype::F16), kernel.names[1][variant]));
            }
        }
    }
}
