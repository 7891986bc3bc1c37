//! The CPU backend ([`Cpu`]) with its threads and scratch memory.
use super::instruction_set::{InstructionSet, InstructionSetUnavailable};
use super::scratch::ScratchPool;
use super::thread_pool::ThreadPool;
use crate::ops::{EpilogueOps, Ops};
use std::ops::Range;

/// The CPU backend, which computes ops on host memory with several threads.
pub struct Cpu {
    pub(super) instruction_set: InstructionSet,
    pub(super) pool: ThreadPool,
    pub(super) scratch: ScratchPool,
}

impl Ops for Cpu {}

impl EpilogueOps for Cpu {}

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

    /// Creates a backend with `threads` threads that uses the instruction set named
    /// `max_instruction_set`, such as `avx2`, even if the machine supports a better one. This does
    /// not change the bits of any result.
    ///
    /// # Errors
    ///
    /// Fails if the name is unknown or this machine does not support the instruction set.
    pub fn with_max_instruction_set(
        threads: usize,
        max_instruction_set: &str,
    ) -> Result<Self, InstructionSetUnavailable> {
        let instruction_set = InstructionSet::find(max_instruction_set)?;
        Ok(Cpu { instruction_set, ..Cpu::new(threads) })
    }

    /// Creates one backend with `threads` threads for each instruction set that this machine
    /// supports, best first, so that tests can compare them. [`Cpu::new`] uses the first
    /// instruction set.
    pub fn new_for_all_instruction_sets(threads: usize) -> Vec<Self> {
        let backend = |instruction_set| Cpu { instruction_set, ..Cpu::new(threads) };
        InstructionSet::list_available().into_iter().map(backend).collect()
    }

    /// Describes the instruction set and the number of threads for the log: `avx512, 2 threads`.
    pub fn describe(&self) -> String {
        let threads = self.pool.thread_count();
        let plural = if threads == 1 { "" } else { "s" };
        format!("{}, {threads} thread{plural}", self.instruction_set.name())
    }

    /// Explains, as a sentence for a warning, why the backend does not use some vector instructions
    /// that this machine has. Returns `None` if all instructions are used that this backend knows.
    pub fn describe_rejected_instructions(&self) -> Option<&'static str> {
        InstructionSet::describe_rejected()
    }

    /// Returns the number of threads that compute an op.
    pub fn thread_count(&self) -> usize {
        self.pool.thread_count()
    }

    /// Returns how many bytes of scratch memory (temporary memory of ops) the CPU backend has
    /// allocated, whether in use or free.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.total_bytes()
    }

    /// Runs `work` on ranges of the row numbers `0..rows` in parallel, and returns when all rows
    /// are done. Processing a row is assumed to cost as much as copying `width` elements. Ranges
    /// are so long that each costs about as much as copying 16 Ki elements.
    pub(super) fn run_over_rows(&self, rows: usize, width: usize, work: impl Fn(Range<usize>) + Sync) {
        let per_task = ((16 << 10) / width.max(1)).max(1);
        self.pool.run(rows.div_ceil(per_task), &|task| {
            work(task * per_task..((task + 1) * per_task).min(rows));
        });
    }
}
