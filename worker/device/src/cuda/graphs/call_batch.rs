//! A list of recorded GPU calls, which can be issued one by one or become a CUDA graph
//! ([`CallBatch`]).
use super::super::bindings::{Address, driver_sys::CUDA_KERNEL_NODE_PARAMS};
use super::super::context::GpuContext;
use super::super::cudnn::execution_plan::PreparedPlan;
use super::super::error::Result;
use super::super::launch::{KernelArg, KernelFunction, LaunchConfig};
use super::super::matmul::prepared::PreparedMatmul;
use std::{
    ffi::{CStr, c_void},
    ops::Range,
    ptr,
};

/// One recorded GPU call: a kernel launch, a matmul, a cuDNN plan, a fill or a copy.
#[derive(Clone, PartialEq)]
enum RecordedCall {
    Kernel {
        name: &'static CStr,
        function: KernelFunction,
        config: LaunchConfig,
        /// Range of indices in [`CallBatch::starts`], one per argument.
        arguments: Range<usize>,
    },
    Matmul(PreparedMatmul),
    CudnnPlan(PreparedPlan),
    Fill {
        at: Address,
        bytes: usize,
    },
    Copy {
        to: Address,
        from: Address,
        bytes: usize,
    },
}

/// A list of GPU calls that were recorded for the main stream but not issued yet, in their order.
/// Equal batches do the same work at the same addresses.
#[derive(Clone, Default, PartialEq)]
pub(in super::super) struct CallBatch {
    calls: Vec<RecordedCall>,
    /// The bytes of all kernel arguments. Each argument begins at a new word.
    words: Vec<u64>,
    /// The index of each argument's first word.
    starts: Vec<usize>,
}

impl CallBatch {
    /// Returns the number of recorded GPU calls.
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Removes all recorded GPU calls without issuing them.
    pub(super) fn clear(&mut self) {
        self.calls.clear();
        self.words.clear();
        self.starts.clear();
    }

    /// Records a kernel launch with a copy of its arguments.
    ///
    /// # Safety
    ///
    /// `arguments` must match the parameters of the kernel in number, type and order. Each address
    /// among them must point to all memory that the kernel accesses through it. That memory must
    /// stay allocated until the batch has been issued and the kernel is complete. Freeing it
    /// afterwards in the order of the same stream is allowed.
    pub(in super::super) unsafe fn push_kernel(
        &mut self,
        name: &'static CStr,
        function: KernelFunction,
        config: LaunchConfig,
        arguments: &[&dyn KernelArg],
    ) {
        let first = self.starts.len();
        for argument in arguments {
            let at = self.words.len();
            let bytes = size_of_val(*argument);
            self.starts.push(at);
            self.words.resize(at + bytes.div_ceil(8), 0);
            // SAFETY: `words` was resized for `bytes` bytes. Arguments have no padding, so all of
            // their bytes are initialized.
            unsafe {
                let from = ptr::from_ref::<dyn KernelArg>(*argument).cast::<u8>();
                from.copy_to_nonoverlapping(self.words[at..].as_mut_ptr().cast(), bytes);
            }
        }
        let arguments = first..self.starts.len();
        self.calls.push(RecordedCall::Kernel { name, function, config, arguments });
    }

    /// Records a matmul, whose algorithm and operand addresses are already chosen, in this list of
    /// GPU calls.
    pub(in super::super) fn push_matmul(&mut self, matmul: PreparedMatmul) {
        self.calls.push(RecordedCall::Matmul(matmul));
    }

    /// Records one execution of a cuDNN plan.
    pub(in super::super) fn push_cudnn_plan(&mut self, plan: PreparedPlan) {
        self.calls.push(RecordedCall::CudnnPlan(plan));
    }

    /// Records a fill of `bytes` bytes at the GPU address `at` with zeros.
    pub(in super::super) fn push_zero_fill(&mut self, at: Address, bytes: usize) {
        self.calls.push(RecordedCall::Fill { at, bytes });
    }

    /// Records a copy of `bytes` bytes within the GPU's memory.
    pub(in super::super) fn push_copy(&mut self, to: Address, from: Address, bytes: usize) {
        self.calls.push(RecordedCall::Copy { to, from, bytes });
    }

    /// Issues every recorded call to the main stream, one by one.
    pub(super) fn issue_all(&self, gpu: &GpuContext) -> Result<()> {
        self.calls.iter().try_for_each(|call| gpu.retry_after_trim(|| self.issue_call(gpu, call)))
    }

    /// Issues every recorded call to the main stream, and calls `f` after each one. The argument of
    /// `f` is true if the call was a kernel.
    pub(super) fn issue_all_with_callback(&self, gpu: &GpuContext, mut f: impl FnMut(bool)) -> Result<()> {
        for call in &self.calls {
            self.issue_call(gpu, call)?;
            f(matches!(call, RecordedCall::Kernel { .. }));
        }
        Ok(())
    }

    /// Issues one recorded call to the main stream.
    fn issue_call(&self, gpu: &GpuContext, call: &RecordedCall) -> Result<()> {
        match call {
            RecordedCall::Kernel { name, function, config, arguments } => {
                let mut pointers = self.build_argument_pointers(arguments);
                // SAFETY: promised when the call was recorded.
                unsafe { function.issue(gpu, name, *config, &mut pointers, gpu.main_stream) }
            }
            RecordedCall::Matmul(matmul) => matmul.issue(gpu.main_stream),
            RecordedCall::CudnnPlan(plan) => plan.issue(gpu.main_stream),
            RecordedCall::Fill { at, bytes } => gpu.issue_zero_fill(*at, *bytes, gpu.main_stream),
            RecordedCall::Copy { to, from, bytes } => gpu.issue_copy(*to, *from, *bytes, gpu.main_stream),
        }
    }

    /// Returns one pointer per argument of a recorded kernel launch, in the array form that
    /// `cuLaunchKernel` requires.
    fn build_argument_pointers(&self, arguments: &Range<usize>) -> Vec<*mut c_void> {
        let start = |at: &usize| ptr::from_ref(&self.words[*at]).cast_mut().cast();
        self.starts[arguments.clone()].iter().map(start).collect()
    }

    /// Returns the indices of the kernel launches whose arguments or launch configurations differ
    /// between this batch of calls and `other`. Returns `None` if the batches differ in anything
    /// else.
    pub(super) fn find_changed_kernels(&self, other: &CallBatch) -> Option<Vec<usize>> {
        if self.calls.len() != other.calls.len()
            || self.starts != other.starts
            || self.words.len() != other.words.len()
        {
            return None;
        }
        let mut changed = Vec::new();
        for (i, pair) in self.calls.iter().zip(&other.calls).enumerate() {
            match pair {
                (
                    RecordedCall::Kernel { function, config, arguments, .. },
                    RecordedCall::Kernel { function: f, config: c, arguments: a, .. },
                ) if function == f && arguments == a => {
                    if config != c || self.argument_words(a) != other.argument_words(a) {
                        changed.push(i);
                    }
                }
                (one, another) if one == another => {}
                _ => return None,
            }
        }
        Some(changed)
    }

    /// Returns the bytes of all arguments of a recorded kernel launch as 64-bit words, to compare
    /// or hash them.
    fn argument_words(&self, arguments: &Range<usize>) -> &[u64] {
        let start = |i: usize| self.starts.get(i).copied().unwrap_or(self.words.len());
        &self.words[start(arguments.start)..start(arguments.end)]
    }

    /// Calls `f` with the parameters (function, launch configuration, arguments) of a recorded
    /// kernel launch, in the form that CUDA graph nodes need. Returns `None` if the call is not a
    /// kernel.
    pub(super) fn with_kernel_node_params<T>(
        &self,
        call: usize,
        f: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS) -> T,
    ) -> Option<T> {
        let RecordedCall::Kernel { function, config, arguments, .. } = &self.calls[call] else { return None };
        let mut pointers = self.build_argument_pointers(arguments);
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (config.grid, config.block);
        let node = CUDA_KERNEL_NODE_PARAMS {
            func: function.0,
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: config.shared as u32,
            kernelParams: pointers.as_mut_ptr(),
            extra: ptr::null_mut(),
            // The driver reads both only if `func` is null.
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        };
        Some(f(&node))
    }

    /// Returns a hash of the kinds, the order and all arguments of the recorded GPU calls, so that
    /// a repeated call sequence has an equal hash.
    pub(super) fn compute_hash(&self) -> u64 {
        let mut hash = self.compute_structure_hash();
        for call in &self.calls {
            if let RecordedCall::Kernel { config, .. } = call {
                mix_into_hash(&mut hash, config.grid.map(u64::from));
            }
        }
        mix_into_hash(&mut hash, self.words.iter().copied());
        hash
    }

    /// Returns a hash of the recorded GPU calls without the arguments and grid sizes of kernels, so
    /// that similar call sequences have equal hashes.
    pub(super) fn compute_structure_hash(&self) -> u64 {
        let mut hash = self.calls.len() as u64;
        for call in &self.calls {
            match call {
                RecordedCall::Kernel { function, arguments, .. } => {
                    mix_into_hash(&mut hash, [function.0.addr() as u64, arguments.end as u64]);
                }
                RecordedCall::Matmul(matmul) => mix_into_hash(&mut hash, matmul.list_words_to_hash()),
                RecordedCall::CudnnPlan(plan) => mix_into_hash(&mut hash, plan.list_words_to_hash()),
                RecordedCall::Fill { at, bytes } => mix_into_hash(&mut hash, [*at, *bytes as u64]),
                RecordedCall::Copy { to, from, bytes } => {
                    mix_into_hash(&mut hash, [*to, *from, *bytes as u64])
                }
            }
        }
        hash
    }
}

/// Updates `hash`, the hash of recorded GPU calls, with the numbers `words`, one after another.
fn mix_into_hash(hash: &mut u64, words: impl IntoIterator<Item = u64>) {
    for word in words {
        *hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}
