//! Records GPU calls in batches, so that a repeated batch is issued by one launch of a CUDA graph
//! instead of many calls.
//!
//! With graphs on, kernels, matmuls, fills and copies within the GPU are recorded into a
//! [`CallBatch`] instead of being issued. A batch ends at [`MAX_BATCH_CALLS`] calls, or at anything
//! else that uses the stream: an event, a copy to or from the host, memory that is returned to the
//! driver. A batch that occurs for the first time is issued call by call. When it occurs again it
//! is captured into a graph, and from then on it is launched as that graph. Batches are compared in
//! full. A graph makes the same calls in the same order, so results are bit-equal.
//!
//! Only the main stream has batches. Calls to other streams are issued immediately.
mod arena;
mod autotune;
mod call_batch;
mod executable;

use super::bindings::{Address, driver_sys::CUresult};
use super::context::GpuContext;
use super::error::{CudaError, Result};
use arena::{PoolBlock, ScratchArena};
pub(super) use autotune::{GraphTuningDecision, GraphUseAutotuner};
pub(super) use call_batch::CallBatch;
use executable::ExecutableGraph;
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

/// Minimum number of recorded GPU calls for which a CUDA graph is created. Shorter batches are
/// issued call by call.
const MIN_BATCH_CALLS: usize = 4;
/// Maximum number of GPU calls that are recorded before they are issued as a batch (one by one or
/// as a CUDA graph). The limit keeps the GPU busy while the next calls are recorded. It also limits
/// the number of calls that cannot be in a graph because one call of the batch differs each time.
const MAX_BATCH_CALLS: usize = 64;
/// Maximum number of cached CUDA graphs. A new graph evicts the one whose last launch is the
/// longest ago.
const MAX_GRAPHS: usize = 512;
/// Maximum number of stored hashes of call batches, by which a repeated batch is recognized and
/// becomes a CUDA graph.
const MAX_SEEN_HASHES: usize = 4096;
/// Maximum number of recorded call sequences without a CUDA graph that are stored to be compared
/// with later sequences.
const MAX_UNMATCHED_BATCHES: usize = 256;
/// When this many CUDA graphs have been evicted after at most one launch, no more graphs are
/// created.
const MAX_WASTED_GRAPHS: usize = 64;

/// Counters of CUDA graphs: cached graphs, launches, GPU calls that launches replaced, and GPU
/// calls that were issued one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphStats {
    /// True if CUDA graphs are on now.
    pub enabled: bool,
    /// Number of graphs that are cached now.
    pub cached_graphs: usize,
    /// Number of graph launches so far.
    pub launches: u64,
    /// Number of calls that the graph launches replaced.
    pub calls: u64,
    /// Number of kernels in graphs whose arguments or grids were updated.
    pub updated_kernels: u64,
    /// Number of calls that were issued one by one.
    pub direct_calls: u64,
}

/// The GPU calls that are recorded for the main stream but not issued yet, and the CUDA graphs that
/// are launched in place of repeated calls.
pub(super) struct MainStreamGraphs {
    /// True if CUDA graphs are on for the main stream. The graph state has the same flag.
    on: Arc<AtomicBool>,
    /// Number of calls that were enqueued on any stream so far, in graphs or one by one.
    calls: AtomicU64,
    state: Mutex<GraphState>,
}

/// A cached CUDA graph, and the batch of recorded GPU calls that one launch of the graph replaces.
struct CachedGraph {
    batch: CallBatch,
    graph: ExecutableGraph,
    structure_hash: u64,
    /// The value of [`GraphStats::launches`] at this graph's most recent launch.
    last_launch: u64,
    launches: u64,
}

/// The state behind the mutex of [`MainStreamGraphs`]: recorded GPU calls, cached CUDA graphs, and
/// scratch memory, all of the main stream.
#[derive(Default)]
pub(super) struct GraphState {
    on: Arc<AtomicBool>,
    /// Recorded calls that are not issued yet.
    pub(super) batch: CallBatch,
    /// The cached graphs, by the hash of the batch of calls that each replaces.
    graphs: HashMap<u64, CachedGraph>,
    /// Hashes of batches that have occurred once.
    seen_hashes: HashSet<u64>,
    /// For each structure hash (a hash that ignores the arguments and grids of kernels): the latest
    /// batch of calls for which no graph was created.
    unmatched_batches: HashMap<u64, CallBatch>,
    /// For each structure hash: the key in `graphs` of the graph that was captured or updated last
    /// for a batch with this hash.
    graph_by_structure: HashMap<u64, u64>,
    /// Allocator of the main stream's scratch memory.
    arena: ScratchArena,
    /// Error that could not be returned where it occurred. The next flush returns it.
    deferred_error: Option<CudaError>,
    /// Error because of which graphs were turned off, until it is reported to the user.
    disable_reason: Option<CudaError>,
    wasted_graphs: usize,
    stats: GraphStats,
}

// SAFETY: handles are only passed to the driver, which accepts them from any thread.
unsafe impl Send for GraphState {}

impl Default for MainStreamGraphs {
    fn default() -> Self {
        let on = Arc::<AtomicBool>::default();
        let state = Mutex::new(GraphState { on: on.clone(), ..GraphState::default() });
        MainStreamGraphs { on, calls: AtomicU64::new(0), state }
    }
}

impl MainStreamGraphs {
    /// Returns true if CUDA graphs are on for the main stream.
    pub(super) fn is_enabled(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// Returns the number of GPU calls that were enqueued on any stream so far, whether in CUDA
    /// graphs or one by one.
    pub(super) fn enqueued_call_count(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// Counts one enqueued GPU call; the total number of calls is used to compute the mean duration
    /// of a call.
    pub(super) fn count_call(&self) {
        self.calls.fetch_add(1, Relaxed);
    }

    /// Locks the mutex of the recorded GPU calls and of the CUDA graphs of the main stream. A panic
    /// of another thread may leave the batch incomplete, but then the worker ends.
    pub(super) fn lock_graph_state(&self) -> MutexGuard<'_, GraphState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GraphState {
    /// Turns CUDA graphs on or off for the main stream, after issuing the calls that were recorded
    /// for a graph.
    pub(super) fn set_enabled(&mut self, gpu: &GpuContext, on: bool) -> Result<()> {
        let flushed = self.flush_batch(gpu);
        self.on.store(on, Relaxed);
        if !on {
            self.destroy_graphs(gpu);
            self.release_idle_blocks(gpu);
        }
        flushed
    }

    /// Drops all recorded GPU calls and destroys all CUDA graphs when the GPU is being closed.
    /// Recorded calls are not issued, because the memory to which they would write has been freed.
    pub(super) fn discard_calls_and_graphs(&mut self, gpu: &GpuContext) {
        self.batch.clear();
        self.destroy_graphs(gpu);
        self.release_idle_blocks(gpu);
    }

    /// Turns CUDA graphs off, drops all recorded GPU calls, and forgets what earlier work has left,
    /// so that other work can begin. Fails with an error of a flush that was not returned yet.
    pub(super) fn reset(&mut self, gpu: &GpuContext) -> Result<()> {
        self.on.store(false, Relaxed);
        self.discard_calls_and_graphs(gpu);
        (self.disable_reason, self.wasted_graphs) = (None, 0);
        self.deferred_error.take().map_or(Ok(()), Err)
    }

    /// Returns, only once, the error because of which CUDA graphs were turned off, or `None` if no
    /// error occurred.
    pub(super) fn take_disable_reason(&mut self) -> Option<CudaError> {
        self.disable_reason.take()
    }

    /// Returns counters of the use of CUDA graphs, such as the number of graph launches and of GPU
    /// calls that were issued one by one.
    pub(super) fn stats(&self) -> GraphStats {
        GraphStats { enabled: self.is_enabled(), cached_graphs: self.graphs.len(), ..self.stats }
    }

    /// Issues all recorded GPU calls to the main stream. Fails with the error of a call, or with an
    /// error that an earlier flush deferred.
    pub(super) fn flush_batch(&mut self, gpu: &GpuContext) -> Result<()> {
        let issued = match self.deferred_error.take() {
            Some(error) => Err(error),
            None if self.batch.len() == 0 => Ok(()),
            None => self.issue_batch(gpu),
        };
        self.batch.clear();
        if !self.is_enabled() {
            self.release_idle_blocks(gpu);
        }
        issued
    }

    /// Issues every recorded GPU call to the main stream on behalf of a caller that cannot return
    /// errors, and stores an error for later. The next flush returns the error.
    pub(super) fn flush_deferring_error(&mut self, gpu: &GpuContext) {
        if let Err(error) = self.flush_batch(gpu) {
            self.deferred_error = Some(error);
        }
    }

    /// Issues the recorded GPU calls if there are at least [`MAX_BATCH_CALLS`] of them, or if CUDA
    /// graphs are off.
    pub(super) fn flush_batch_if_full(&mut self, gpu: &GpuContext) -> Result<()> {
        if self.batch.len() >= MAX_BATCH_CALLS || !self.is_enabled() { self.flush_batch(gpu) } else { Ok(()) }
    }

    /// Issues the recorded GPU calls as one CUDA graph if a graph exists or can be built, otherwise
    /// one by one.
    fn issue_batch(&mut self, gpu: &GpuContext) -> Result<()> {
        if !self.is_enabled() || self.batch.len() < MIN_BATCH_CALLS {
            return self.issue_calls_one_by_one(gpu);
        }
        let hash = self.batch.compute_hash();
        let has_graph = match self.graphs.get(&hash) {
            Some(cached) => cached.batch == self.batch,
            None => self.find_or_build_graph(gpu, hash),
        };
        if has_graph && self.launch_graph(gpu, hash) { Ok(()) } else { self.issue_calls_one_by_one(gpu) }
    }

    /// Tries to provide a CUDA graph for the recorded GPU calls, by updating the graph of a similar
    /// batch or by capturing a new graph. Returns false if the calls must be issued one by one.
    ///
    /// If the batch has occurred before, a new graph is captured. Otherwise, if a graph exists for
    /// a similar batch (one with an equal structure hash), that graph is updated. Otherwise, a new
    /// graph is captured only if a similar batch has occurred in which few arguments differ.
    fn find_or_build_graph(&mut self, gpu: &GpuContext, hash: u64) -> bool {
        let structure_hash = self.batch.compute_structure_hash();
        if !self.remember_hash(hash) {
            if let Some(similar) = self.graph_by_structure.get(&structure_hash).copied() {
                return self.update_similar_graph(gpu, similar, hash);
            }
            let changed = self
                .unmatched_batches
                .get(&structure_hash)
                .and_then(|other| other.find_changed_kernels(&self.batch));
            if !changed.is_some_and(|changed| is_worth_updating(&changed, &self.batch)) {
                self.remember_unmatched_batch(structure_hash);
                return false;
            }
        }
        self.unmatched_batches.remove(&structure_hash);
        self.wasted_graphs < MAX_WASTED_GRAPHS && self.capture_graph(gpu, hash, structure_hash)
    }

    /// Stores the recorded GPU calls, which have no CUDA graph, for comparison with a later,
    /// similar call sequence.
    fn remember_unmatched_batch(&mut self, structure_hash: u64) {
        if self.unmatched_batches.len() >= MAX_UNMATCHED_BATCHES {
            self.unmatched_batches.clear(); // the next step fills it again
        }
        self.unmatched_batches.insert(structure_hash, self.batch.clone());
    }

    /// Changes the CUDA graph of an earlier, similar batch of calls so that the graph executes the
    /// calls that are recorded now. Returns false if too many calls differ or the driver cannot
    /// update the graph.
    fn update_similar_graph(&mut self, gpu: &GpuContext, similar: u64, hash: u64) -> bool {
        let Some(cached) = self.graphs.get(&similar) else { return false };
        let changed = cached.batch.find_changed_kernels(&self.batch);
        let Some(changed) = changed.filter(|changed| {
            is_worth_updating(changed, &self.batch) && cached.graph.has_nodes_of_calls(changed)
        }) else {
            return false;
        };
        if let Err(error) = cached.graph.update_kernels(gpu, &self.batch, &changed) {
            self.disable_graphs(gpu, error);
            return false;
        }
        let Some(mut cached) = self.graphs.remove(&similar) else { return false };
        self.graph_by_structure.insert(cached.structure_hash, hash);
        std::mem::swap(&mut cached.batch, &mut self.batch);
        self.stats.updated_kernels += changed.len() as u64;
        self.graphs.insert(hash, cached);
        true
    }

    /// Issues the recorded GPU calls one by one, without a CUDA graph.
    fn issue_calls_one_by_one(&mut self, gpu: &GpuContext) -> Result<()> {
        self.stats.direct_calls += self.batch.len() as u64;
        self.batch.issue_all(gpu)
    }

    /// Stores the hash of a batch of recorded calls, and returns whether a batch with this hash has
    /// occurred before.
    fn remember_hash(&mut self, hash: u64) -> bool {
        if self.seen_hashes.remove(&hash) {
            return true;
        }
        if self.seen_hashes.len() >= MAX_SEEN_HASHES {
            self.seen_hashes.clear(); // the next two steps fill it again
        }
        self.seen_hashes.insert(hash);
        false
    }

    /// Looks up the cached CUDA graph for the hash `hash` of the recorded calls, launches the
    /// graph, and returns true if the launch succeeded. If the driver cannot launch it, turns
    /// graphs off and returns false.
    fn launch_graph(&mut self, gpu: &GpuContext, hash: u64) -> bool {
        let Some(cached) = self.graphs.get_mut(&hash) else { return false };
        if let Err(error) = cached.graph.launch(gpu) {
            // The recorded calls may have been moved into the cache; otherwise both are equal.
            std::mem::swap(&mut cached.batch, &mut self.batch);
            self.disable_graphs(gpu, error);
            return false;
        }
        self.stats.launches += 1;
        self.stats.calls += cached.batch.len() as u64;
        (cached.last_launch, cached.launches) = (self.stats.launches, cached.launches + 1);
        true
    }

    /// Captures the recorded calls as a new CUDA graph and stores it in the cache. If that fails,
    /// turns graphs off and returns false.
    fn capture_graph(&mut self, gpu: &GpuContext, hash: u64, structure_hash: u64) -> bool {
        match ExecutableGraph::capture(gpu, &self.batch) {
            Ok(graph) => {
                if self.graphs.len() >= MAX_GRAPHS {
                    self.evict_least_recent_graph(gpu);
                }
                let (batch, last_launch) = (std::mem::take(&mut self.batch), self.stats.launches);
                let cached = CachedGraph { batch, graph, structure_hash, last_launch, launches: 0 };
                self.graphs.insert(hash, cached);
                self.graph_by_structure.insert(structure_hash, hash);
                true
            }
            Err(error) => {
                self.disable_graphs(gpu, error);
                false
            }
        }
    }

    /// Destroys the cached CUDA graph whose last launch is the longest ago.
    fn evict_least_recent_graph(&mut self, gpu: &GpuContext) {
        let oldest = self.graphs.iter().min_by_key(|(_, cached)| cached.last_launch).map(|(hash, _)| *hash);
        if let Some(evicted) = oldest.and_then(|hash| self.graphs.remove(&hash)) {
            self.wasted_graphs += usize::from(evicted.launches < 2);
            self.graph_by_structure.retain(|_, hash| Some(*hash) != oldest);
            evicted.graph.destroy(gpu);
        }
    }

    /// Allocates `bytes` bytes of scratch memory for the main stream, if necessary from a newly
    /// allocated block of GPU memory. Returns `None` if the GPU has no memory left for another
    /// block.
    pub(super) fn allocate_scratch(&mut self, gpu: &GpuContext, bytes: usize) -> Result<Option<Address>> {
        if let Some(at) = self.arena.allocate(bytes) {
            return Ok(Some(at));
        }
        let (replaced, block_bytes) = self.arena.plan_growth(bytes);
        if !replaced.is_empty() {
            self.flush_batch(gpu)?; // recorded calls use the replaced blocks
        }
        for block in replaced {
            gpu.free_in_stream_order(block.at, block.bytes, gpu.main_stream);
        }
        match gpu.allocate_from_pool(block_bytes, gpu.main_stream) {
            Ok(at) => self.arena.add_block(PoolBlock { at, bytes: block_bytes }),
            Err(e) if e.has_driver_status(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => return Ok(None),
            Err(error) => return Err(error),
        }
        Ok(self.arena.allocate(bytes))
    }

    /// Frees the scratch memory of the main stream that begins at the GPU address `at`, for later
    /// requests. With graphs off, also returns unused blocks to the driver's pool.
    pub(super) fn free_scratch_range(&mut self, gpu: &GpuContext, at: Address) {
        self.arena.free_range(at);
        if !self.is_enabled() {
            self.release_idle_blocks(gpu);
        }
    }

    /// Gives each block of scratch memory that is completely unused back to the driver's memory
    /// pool.
    pub(super) fn release_idle_blocks(&mut self, gpu: &GpuContext) {
        let idle = self.arena.take_idle_blocks();
        if !idle.is_empty() {
            self.flush_deferring_error(gpu);
        }
        for block in idle {
            gpu.free_in_stream_order(block.at, block.bytes, gpu.main_stream);
        }
    }

    /// Returns true if CUDA graphs are on.
    pub(super) fn is_enabled(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// Turns CUDA graphs off permanently because of `error`, an error that occurred when a graph
    /// was made or launched. The scratch memory stays, because recorded calls use it.
    fn disable_graphs(&mut self, gpu: &GpuContext, error: CudaError) {
        self.disable_reason = Some(error);
        self.on.store(false, Relaxed);
        self.destroy_graphs(gpu);
    }

    /// Destroys every cached CUDA graph and forgets every remembered batch of calls.
    fn destroy_graphs(&mut self, gpu: &GpuContext) {
        self.graphs.drain().for_each(|(_, cached)| cached.graph.destroy(gpu));
        self.seen_hashes.clear();
        self.unmatched_batches.clear();
        self.graph_by_structure.clear();
    }
}

/// Returns whether updating a CUDA graph for the recorded calls `batch` is likely to be cheaper
/// than issuing the calls one by one. `changed` are the indices of the kernels that differ.
fn is_worth_updating(changed: &[usize], batch: &CallBatch) -> bool {
    3 * changed.len() <= batch.len()
}
