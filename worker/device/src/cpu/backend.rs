//! [`Cpu`]: the CPU backend, with its threads and scratch memory.
use super::instruction_set::InstructionSet;
use super::scratch::ScratchPool;
use super::thread_pool::ThreadPool;
use crate::ops::Ops;
use std::ops::Range;

/// The CPU backend: computes ops on host memory with several threads.
pub struct Cpu {
    pub(super) instruction_set: InstructionSet,
    /// True if matmuls of bf16 operands use AMX.
    pub(super) uses_amx: bool,
    pub(super) pool: ThreadPool,
    pub(super) scratch: ScratchPool,
}

impl Ops for Cpu {}

/// Returns true if this process can use AMX.
fn is_amx_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return super::amx_detection::is_available();
    #[cfg(not(target_arch = "x86_64"))]
    false
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
            uses_amx: is_amx_available(),
            pool: ThreadPool::new(threads),
            scratch: ScratchPool::default(),
        }
    }

    /// Creates a backend with `threads` threads that uses the instruction set `name`: `amx`,
    /// `avx512`, `avx2`, or `baseline` (on aarch64 `neon`). Returns `None` if this machine does not
    /// have the instruction set. The choice does not change any bit of a result.
    pub fn with_instruction_set(threads: usize, name: &str) -> Option<Self> {
        Self::new_for_all_instruction_sets(threads).into_iter().find(|cpu| cpu.instruction_set_name() == name)
    }

    /// Returns the names of the instruction sets that this machine supports, best first.
    pub fn list_instruction_sets() -> Vec<&'static str> {
        Self::new_for_all_instruction_sets(1).iter().map(Self::instruction_set_name).collect()
    }

    /// Creates one backend with `threads` threads for each instruction set that this machine
    /// supports, best first, so that tests can compare them. [`Cpu::new`] uses the first
    /// instruction set.
    pub fn new_for_all_instruction_sets(threads: usize) -> Vec<Self> {
        let backend = |instruction_set| Cpu { instruction_set, uses_amx: false, ..Cpu::new(threads) };
        let mut backends: Vec<Self> = InstructionSet::list_available().into_iter().map(backend).collect();
        if is_amx_available() {
            backends.insert(0, Cpu::new(threads));
        }
        backends
    }

    /// Creates a backend with `threads` threads that uses AMX without checking the machine, for
    /// tests in which an emulator executes the instructions.
    ///
    /// # Safety
    ///
    /// The caller must ensure that AMX's instructions can be executed in this process.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn assume_amx(threads: usize) -> Self {
        Cpu { uses_amx: true, ..Cpu::new(threads) }
    }

    /// Describes the instruction set and the number of threads for the log: `avx512, 2 threads`.
    pub fn describe(&self) -> String {
        let threads = self.pool.threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("{}, {threads} thread{plural}", self.instruction_set_name())
    }

    /// Returns the name of the instruction set that this backend uses.
    fn instruction_set_name(&self) -> &'static str {
        if self.uses_amx { "amx" } else { self.instruction_set.name() }
    }

    /// Returns the number of threads that compute an op.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Returns the bytes of scratch memory that the backend has allocated, in use or free.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    /// Runs `work` on ranges of `0..rows` in parallel, and returns when all rows are done.
    /// Processing a row is assumed to cost as much as copying `width` elements. Ranges are so long
    /// that each costs about as much as copying 16 Ki elements.
    pub(super) fn run_over_rows(&self, rows: usize, width: usize, work: impl Fn(Range<usize>) + Sync) {
        let per_task = ((16 << 10) / width.max(1)).max(1);
        self.pool.run(rows.div_ceil(per_task), &|task| {
            work(task * per_task..((task + 1) * per_task).min(rows));
        });
    }
}
