//! The CPU backend.
//!
//! The instruction set and the number of threads are chosen at run time. They do not change any bit
//! of a result, with one exception: an instruction set without fused multiply-add rounds
//! differently. Results do not depend on the machine's C library either, because logarithms, powers
//! and tanh of single numbers come from the crate `libm`.
//!
//! Each group of ops has a module, and [`ops`] implements [`crate::Ops`] with them. Kernels are
//! written once over [`simd::Simd`] and compiled for each instruction set. 16-bit elements are
//! converted to `f32` on reading and rounded once on writing ([`elements`]).
mod attention;
mod attention_backward;
mod attention_dropout;
mod bias;
mod classifier;
mod disjoint_slices;
mod elements;
mod elementwise;
mod embedding;
mod expert_rows;
mod fp8_matmul;
mod gelu;
mod grouped_matmul;
mod layer_norm;
mod matmul;
mod micro_kernel;
mod ops;
mod optimizers;
mod packing;
mod peak_flops;
mod reductions;
mod rms_norm;
mod rms_norm_heads;
mod rope;
mod router;
mod scratch;
mod simd;
mod stochastic_rounding;
mod storage;
mod swiglu;
mod thread_pool;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::buffer::ViewMut;
pub use classifier::choose_classifier_chunk_rows;
use disjoint_slices::DisjointSlices;
use elements::OutputElements;
use scratch::ScratchPool;
use simd::InstructionSet;
use std::ops::Range;
use thread_pool::ThreadPool;

/// The CPU backend: computes ops on host memory with several threads.
pub struct Cpu {
    instruction_set: InstructionSet,
    pool: ThreadPool,
    scratch: ScratchPool,
}

impl Cpu {
    /// Creates a backend that computes on `threads` threads: the caller's thread and `threads − 1`
    /// helpers. Panics if `threads` is 0.
    ///
    /// Several threads may call ops at the same time. One of them uses the helpers, and the others
    /// compute on their own thread.
    pub fn new(threads: usize) -> Self {
        assert!(threads > 0, "a CPU backend needs at least one thread");
        Cpu {
            instruction_set: InstructionSet::detect(),
            pool: ThreadPool::new(threads),
            scratch: ScratchPool::default(),
        }
    }

    /// Creates one backend of `threads` threads for each instruction set that this machine
    /// supports, best first. Tests compare these; [`Cpu::new`] uses the first instruction set.
    pub fn new_for_all_instruction_sets(threads: usize) -> Vec<Self> {
        let backend = |instruction_set| Cpu { instruction_set, ..Cpu::new(threads) };
        InstructionSet::list_available().into_iter().map(backend).collect()
    }

    /// Describes the instruction set and the number of threads for the log: `avx512, 2 threads`.
    pub fn describe(&self) -> String {
        let threads = self.pool.threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("{}, {threads} thread{plural}", self.instruction_set.name())
    }

    /// Returns the number of threads that compute an op.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Returns the bytes of scratch memory that the backend has allocated, in use or free.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    /// Divides `0..rows` into ranges, runs `work` on them in parallel, and returns when all ranges
    /// are done. Processing a row is assumed to cost as much as copying `width` elements. A range
    /// has as many rows as cost about as much as copying 16 Ki elements.
    fn run_over_rows(&self, rows: usize, width: usize, work: impl Fn(Range<usize>) + Sync) {
        let per_task = ((16 << 10) / width.max(1)).max(1);
        self.pool.run(rows.div_ceil(per_task), &|task| {
            work(task * per_task..((task + 1) * per_task).min(rows));
        });
    }

    /// Wraps `v`, of any element type, as an output that this backend's tasks write.
    fn as_output<'a>(&'a self, v: ViewMut<'a>) -> OutputElements<'a> {
        OutputElements::new(self, v)
    }

    /// Divides `0..len` into ranges, runs `work` on them in parallel, and returns when all ranges
    /// are done.
    fn run_over_elements(&self, len: usize, work: impl Fn(Range<usize>) + Sync) {
        self.run_over_rows(len, 1, work);
    }
}

/// Panics if the argument `name` of the op `op` does not have the length that the shape requires.
#[track_caller]
fn expect_len(op: &str, name: &str, len: usize, expected: usize) {
    assert!(len == expected, "{op}: {name} has {len} elements, but the shape needs {expected}");
}
