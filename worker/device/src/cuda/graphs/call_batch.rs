//! [`CallBatch`]: recorded calls of a stream, in order: kernels with their arguments, matmuls,
//! cuDNN plans, fills and copies.
use super::super::bindings::{Address, KernelNode};
use super::super::context::GpuContext;
use super::super::cudnn::PreparedPlan;
use super::super::error::Result;
use super::super::launch::{KernelArg, KernelFunction, LaunchConfig};
use super::super::matmul::PreparedMatmul;
use std::{
    ffi::{CStr, c_void},
    ops::Range,
    ptr,
};

/// One recorded call.
#[derive(Clone, PartialEq)]
enum Call {
    Kernel {
        name: &'static CStr,
        function: KernelFunction,
        config: LaunchConfig,
        /// A range of [`CallBatch::starts`].
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

/// Recorded calls in their order. Equal batches do the same work at the same addresses.
#[derive(Clone, Default, PartialEq)]
pub(in super::super) struct CallBatch {
    calls: Vec<Call>,
    /// The bytes of all kernel arguments. Each argument begins at a new word.
    words: Vec<u64>,
    /// The index of each argument's first word.
    starts: Vec<usize>,
}

impl CallBatch {
    /// Number of calls.
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(super) fn clear(&mut self) {
        self.calls.clear();
        self.words.clear();
        self.starts.clear();
    }

    /// Records a kernel with a copy of its arguments.
    ///
    /// # Safety
    /// When the batch is issued, `arguments` are those of the kernel's source, in order, and every
    /// address covers what the kernel accesses.
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
        self.calls.push(Call::Kernel { name, function, config, arguments });
    }

    pub(in super::super) fn push_matmul(&mut self, matmul: PreparedMatmul) {
        self.calls.push(Call::Matmul(matmul));
    }

    pub(in super::super) fn push_plan(&mut self, plan: PreparedPlan) {
        self.calls.push(Call::CudnnPlan(plan));
    }

    /// Records filling a range with zeros.
    pub(in super::super) fn push_fill(&mut self, at: Address, bytes: usize) {
        self.calls.push(Call::Fill { at, bytes });
    }

    pub(in super::super) fn push_copy(&mut self, to: Address, from: Address, bytes: usize) {
        self.calls.push(Call::Copy { to, from, bytes });
    }

    /// Issues every call to the main stream, one by one.
    pub(super) fn issue(&self, gpu: &GpuContext) -> Result<()> {
        self.issue_each(gpu, |_| ())
    }

    /// Issues every call to the main stream. After each call, `f` receives whether it was a kernel.
    pub(super) fn issue_each(&self, gpu: &GpuContext, mut f: impl FnMut(bool)) -> Result<()> {
        for call in &self.calls {
            match call {
                Call::Kernel { name, function, config, arguments } => {
                    let mut pointers = self.pointers(arguments);
                    // SAFETY: promised when the call was recorded.
                    unsafe { gpu.issue_launch(name, *function, *config, &mut pointers, gpu.stream)? };
                }
                Call::Matmul(matmul) => matmul.issue(gpu.stream)?,
                Call::CudnnPlan(plan) => plan.issue(gpu.stream)?,
                Call::Fill { at, bytes } => gpu.issue_fill(*at, *bytes, gpu.stream)?,
                Call::Copy { to, from, bytes } => gpu.issue_copy(*to, *from, *bytes, gpu.stream)?,
            }
            f(matches!(call, Call::Kernel { .. }));
        }
        Ok(())
    }

    /// Pointers to a kernel's arguments.
    fn pointers(&self, arguments: &Range<usize>) -> Vec<*mut c_void> {
        let start = |at: &usize| ptr::from_ref(&self.words[*at]).cast_mut().cast();
        self.starts[arguments.clone()].iter().map(start).collect()
    }

    /// The indices of kernels that have other arguments or another grid in `other`; `None` if the
    /// batches differ in anything else.
    pub(super) fn changed_kernels(&self, other: &CallBatch) -> Option<Vec<usize>> {
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
                    Call::Kernel { function, config, arguments, .. },
                    Call::Kernel { function: f, config: c, arguments: a, .. },
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

    /// The words of a kernel's arguments.
    fn argument_words(&self, arguments: &Range<usize>) -> &[u64] {
        let start = |i: usize| self.starts.get(i).copied().unwrap_or(self.words.len());
        &self.words[start(arguments.start)..start(arguments.end)]
    }

    /// Runs `f` with the parameters of a graph node for the call with this index; `None` if the
    /// call is not a kernel.
    pub(super) fn with_kernel_node<T>(&self, call: usize, f: impl FnOnce(&KernelNode) -> T) -> Option<T> {
        let Call::Kernel { function, config, arguments, .. } = &self.calls[call] else { return None };
        let mut pointers = self.pointers(arguments);
        let node = KernelNode {
            function: function.0,
            grid: config.grid,
            block: config.block,
            shared: config.shared as u32,
            arguments: pointers.as_mut_ptr(),
            extra: ptr::null_mut(),
            kernel: ptr::null_mut(),
            context: ptr::null_mut(),
        };
        Some(f(&node))
    }

    /// A hash of the whole batch.
    pub(super) fn hash(&self) -> u64 {
        let mut hash = self.structure_hash();
        for call in &self.calls {
            if let Call::Kernel { config, .. } = call {
                mix(&mut hash, config.grid.map(u64::from));
            }
        }
        mix(&mut hash, self.words.iter().copied());
        hash
    }

    /// A hash of everything except the kernels' arguments and grids.
    pub(super) fn structure_hash(&self) -> u64 {
        let mut hash = self.calls.len() as u64;
        for call in &self.calls {
            match call {
                Call::Kernel { function, arguments, .. } => {
                    mix(&mut hash, [function.0.addr() as u64, arguments.end as u64]);
                }
                Call::Matmul(matmul) => mix(&mut hash, matmul.hash_words()),
                Call::CudnnPlan(plan) => mix(&mut hash, plan.hash_words()),
                Call::Fill { at, bytes } => mix(&mut hash, [*at, *bytes as u64]),
                Call::Copy { to, from, bytes } => mix(&mut hash, [*to, *from, *bytes as u64]),
            }
        }
        hash
    }
}

fn mix(hash: &mut u64, words: impl IntoIterator<Item = u64>) {
    for word in words {
        *hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}
