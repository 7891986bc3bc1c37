//! CUDA graphs: the calls that a step repeats are issued to the main stream as one launch.
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

use super::bindings::Handle;
use super::context::GpuContext;
use super::cudnn::CudnnAttention;
use super::error::{CudaError, Result};
use super::{Cuda, unwrap_or_panic};
use crate::storage::BackendNotice;
pub(super) use arena::PoolBlock;
use arena::ScratchArena;
pub(super) use autotune::GraphAutotuner;
use autotune::GraphTuningDecision;
pub(super) use call_batch::CallBatch;
use diagnostic::{Diagnostic, codes::device::CUDA_GRAPHS_DISABLED};
use executable::ExecutableGraph;
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Minimum number of calls of a batch that becomes a graph. Shorter batches are issued call by
/// call.
const MIN_BATCH_CALLS: usize = 4;
/// Maximum number of calls of a batch. The limit keeps the GPU busy while the next calls are
/// recorded. It also limits the number of calls that cannot be in a graph because one call of the
/// batch differs each time.
const MAX_BATCH_CALLS: usize = 64;
/// Maximum number of cached graphs. The graph whose last launch is the longest ago is evicted
/// first.
const MAX_GRAPHS: usize = 512;
/// Maximum number of batches whose hashes are remembered after their first occurrence.
const MAX_SEEN_HASHES: usize = 4096;
/// Maximum number of batches that are remembered completely, to be compared with similar batches.
const MAX_UNMATCHED_BATCHES: usize = 256;
/// Maximum number of graphs that were evicted before their second launch. When it is reached, no
/// more graphs are created, because the batches do not repeat.
const MAX_WASTED_GRAPHS: usize = 64;

/// Counts of the ways in which calls were issued to the main stream while graphs were on.
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

/// Recorded calls of the main stream, and the graphs that replace them.
#[derive(Default)]
pub(super) struct Graphs {
    /// True if CUDA graphs are on for the main stream.
    on: AtomicBool,
    /// Number of calls that were enqueued on any stream so far, in graphs or one by one.
    calls: AtomicU64,
    state: Mutex<GraphState>,
}

/// A graph and the batch that it executes.
struct CachedGraph {
    batch: CallBatch,
    graph: ExecutableGraph,
    structure_hash: u64,
    /// The value of [`GraphStats::launches`] at this graph's last launch.
    last_launch: u64,
    launches: u64,
}

/// State of [`Graphs`] that is protected by its lock.
#[derive(Default)]
pub(super) struct GraphState {
    on: bool,
    /// Recorded calls that are not issued yet.
    pub(super) batch: CallBatch,
    /// Graphs by the hash of their batch.
    graphs: HashMap<u64, CachedGraph>,
    /// Hashes of batches that have occurred once.
    seen_hashes: HashSet<u64>,
    /// By structure hash: the latest batch with this structure for which no graph was created.
    unmatched_batches: HashMap<u64, CallBatch>,
    /// By structure hash: the key in `graphs` of the graph that was captured or updated last for a
    /// batch with this structure.
    graph_by_structure: HashMap<u64, u64>,
    /// Allocator of the main stream's scratch memory.
    pub(super) arena: ScratchArena,
    /// Error that could not be returned where it occurred. The next flush returns it.
    deferred_error: Option<CudaError>,
    /// Error because of which graphs were turned off, until it is reported to the user.
    disable_reason: Option<CudaError>,
    wasted_graphs: usize,
    stats: GraphStats,
}

// SAFETY: handles are only passed to the driver, which accepts them from any thread.
unsafe impl Send for GraphState {}

impl Graphs {
    /// Locks the graph state. A panic of another thread may leave the batch incomplete, but then
    /// the worker ends.
    pub(super) fn lock(&self) -> MutexGuard<'_, GraphState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GpuContext {
    /// Locks the graph state if this thread's calls are recorded. Returns `None` if they are issued
    /// immediately.
    pub(super) fn lock_if_recording(&self) -> Option<MutexGuard<'_, GraphState>> {
        (self.graphs.on.load(Relaxed) && self.stream() == self.main_stream).then(|| self.graphs.lock())
    }

    /// Issues every recorded call, and then runs `f` with this thread's stream. With graphs on, no
    /// other thread uses the main stream meanwhile.
    pub(super) fn with_stream<T>(&self, f: impl FnOnce(Handle) -> T) -> Result<T> {
        self.make_current()?;
        let mut recording = self.lock_if_recording();
        recording.as_mut().map_or(Ok(()), |state| state.flush_batch(self))?;
        Ok(f(self.stream()))
    }

    /// Enqueues a call on this thread's stream: records the call with `record`, or issues it
    /// immediately with `issue`.
    pub(super) fn enqueue(
        &self,
        record: impl FnOnce(&mut CallBatch),
        issue: impl FnOnce(Handle) -> Result<()>,
    ) -> Result<()> {
        self.make_current()?;
        self.graphs.calls.fetch_add(1, Relaxed);
        match self.lock_if_recording() {
            Some(mut state) => {
                record(&mut state.batch);
                state.flush_full_batch(self)
            }
            None => issue(self.stream()),
        }
    }

    /// Turns graphs on or off for the main stream, and issues the recorded calls. No other thread
    /// may use the stream meanwhile.
    fn set_graphs_enabled(&self, on: bool) -> Result<()> {
        self.make_current()?;
        let mut state = self.graphs.lock();
        let flushed = state.flush_batch(self);
        state.on = on;
        self.graphs.on.store(on, Relaxed);
        if !on {
            state.destroy_graphs(self);
            state.release_idle_blocks(self);
        }
        flushed
    }

    /// Returns the error because of which graphs were turned off, once. Returns `None` at later
    /// calls and if there was no error.
    fn take_disable_reason(&self) -> Option<CudaError> {
        self.graphs.lock().disable_reason.take()
    }

    /// Drops recorded calls and graphs when the GPU is closed. Recorded calls are not issued,
    /// because the memory to which they would write has been freed.
    pub(super) fn discard_graphs(&self) {
        let mut state = self.graphs.lock();
        state.batch.clear();
        state.destroy_graphs(self);
        state.release_idle_blocks(self);
    }
}

impl Cuda {
    /// Turns CUDA graphs on or off for the main stream. No other thread may use the stream
    /// meanwhile.
    pub fn set_graphs_enabled(&self, on: bool) {
        unwrap_or_panic(self.gpu.set_graphs_enabled(on));
    }

    /// Starts to measure whether CUDA graphs are faster. The next steps run without graphs, the
    /// following steps with graphs.
    pub fn start_graph_autotuning(&self) {
        *self.lock_graph_tuner() = Some(GraphAutotuner::default());
    }

    /// Returns counts of graph launches and of calls that were issued one by one, so far.
    pub fn graph_stats(&self) -> GraphStats {
        let state = self.gpu.graphs.lock();
        GraphStats { enabled: state.on, cached_graphs: state.graphs.len(), ..state.stats }
    }

    /// Locks the graph autotuner. It is `None` if nothing is measured.
    fn lock_graph_tuner(&self) -> MutexGuard<'_, Option<GraphAutotuner>> {
        self.graph_autotuner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Implements [`crate::Storage::record_step_duration`]. Returns the next notice of the graph
    /// autotuner or of cuDNN.
    pub(super) fn take_notice_after_step(&self, duration: Duration) -> Option<BackendNotice> {
        let mut tuner = self.lock_graph_tuner();
        if let Some(error) = self.gpu.take_disable_reason() {
            *tuner = None;
            let message = "CUDA graphs are off and training continues without them";
            let mut warning = Diagnostic::warning(CUDA_GRAPHS_DISABLED, message).with_cause(&error);
            if let CudaError::Call { function, .. } = error {
                warning = warning.with_field("function", function);
            }
            return Some(BackendNotice::Degraded(warning));
        }
        if let Some(notice) = self.cudnn.get().and_then(CudnnAttention::take_notice) {
            return Some(notice);
        }
        let calls = self.gpu.graphs.calls.load(Relaxed);
        match tuner.as_mut()?.record_step(duration, calls) {
            GraphTuningDecision::Continue => None,
            GraphTuningDecision::NotNeeded { seconds_per_call } => {
                *tuner = None;
                Some(BackendNotice::GraphsNotNeeded { seconds_per_call })
            }
            GraphTuningDecision::EnableGraphs => {
                self.set_graphs_enabled(true);
                None
            }
            GraphTuningDecision::Measured { step_seconds_without, step_seconds_with } => {
                *tuner = None;
                let enabled = step_seconds_with < step_seconds_without;
                self.set_graphs_enabled(enabled);
                Some(BackendNotice::GraphsMeasured { enabled, step_seconds_with, step_seconds_without })
            }
        }
    }
}

impl GraphState {
    /// Issues every recorded call to the main stream. Fails with the error of a call, or with an
    /// error that an earlier flush deferred.
    pub(super) fn flush_batch(&mut self, gpu: &GpuContext) -> Result<()> {
        let issued = match self.deferred_error.take() {
            Some(error) => Err(error),
            None if self.batch.len() == 0 => Ok(()),
            None => self.issue_batch(gpu),
        };
        self.batch.clear();
        if !self.on {
            self.release_idle_blocks(gpu);
        }
        issued
    }

    /// Issues every recorded call to the main stream, for callers that cannot return an error. The
    /// next flush returns the error.
    pub(super) fn flush_deferring_error(&mut self, gpu: &GpuContext) {
        if let Err(error) = self.flush_batch(gpu) {
            self.deferred_error = Some(error);
        }
    }

    /// Issues the recorded calls if the batch is full or graphs are off.
    fn flush_full_batch(&mut self, gpu: &GpuContext) -> Result<()> {
        if self.batch.len() >= MAX_BATCH_CALLS || !self.on { self.flush_batch(gpu) } else { Ok(()) }
    }

    /// Issues the recorded calls as a graph if one exists or can be built, otherwise call by call.
    fn issue_batch(&mut self, gpu: &GpuContext) -> Result<()> {
        if !self.on || self.batch.len() < MIN_BATCH_CALLS {
            return self.issue_directly(gpu);
        }
        let hash = self.batch.compute_hash();
        let has_graph = match self.graphs.get(&hash) {
            Some(cached) => cached.batch == self.batch,
            None => self.find_or_build_graph(gpu, hash),
        };
        if has_graph && self.launch_graph(gpu, hash) { Ok(()) } else { self.issue_directly(gpu) }
    }

    /// Provides a graph for the recorded batch, whose hash has no graph. Returns false if the batch
    /// must be issued call by call.
    ///
    /// If the batch has occurred before, a new graph is captured. Otherwise, if a graph exists for
    /// a similar batch (one with an equal structure hash), that graph is updated. Otherwise, a new
    /// graph is captured only if a similar batch has occurred in which few arguments differ.
    fn find_or_build_graph(&mut self, gpu: &GpuContext, hash: u64) -> bool {
        let structure_hash = self.batch.compute_structure_hash();
        if !self.mark_seen(hash) {
            if let Some(similar) = self.graph_by_structure.get(&structure_hash).copied() {
                return self.update_similar_graph(gpu, similar, hash);
            }
            let changed = self
                .unmatched_batches
                .get(&structure_hash)
                .and_then(|other| other.find_changed_kernels(&self.batch));
            if !changed.is_some_and(|changed| is_worth_updating(&changed, &self.batch)) {
                self.remember_unmatched(structure_hash);
                return false;
            }
        }
        self.unmatched_batches.remove(&structure_hash);
        self.wasted_graphs < MAX_WASTED_GRAPHS && self.capture_graph(gpu, hash, structure_hash)
    }

    /// Remembers the batch, because it may occur again with other arguments.
    fn remember_unmatched(&mut self, structure_hash: u64) {
        if self.unmatched_batches.len() >= MAX_UNMATCHED_BATCHES {
            self.unmatched_batches.clear(); // the next step fills it again
        }
        self.unmatched_batches.insert(structure_hash, self.batch.clone());
    }

    /// Updates the graph of a similar batch to this batch. Returns false if too many calls differ
    /// or the driver cannot update the graph.
    fn update_similar_graph(&mut self, gpu: &GpuContext, similar: u64, hash: u64) -> bool {
        let Some(cached) = self.graphs.get(&similar) else { return false };
        let changed = cached.batch.find_changed_kernels(&self.batch);
        let Some(changed) = changed
            .filter(|changed| is_worth_updating(changed, &self.batch) && cached.graph.has_nodes(changed))
        else {
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

    /// Issues the recorded calls one by one.
    fn issue_directly(&mut self, gpu: &GpuContext) -> Result<()> {
        self.stats.direct_calls += self.batch.len() as u64;
        self.batch.issue_all(gpu)
    }

    /// Remembers the hash of a batch. Returns true if a batch with this hash occurred before.
    fn mark_seen(&mut self, hash: u64) -> bool {
        if self.seen_hashes.remove(&hash) {
            return true;
        }
        if self.seen_hashes.len() >= MAX_SEEN_HASHES {
            self.seen_hashes.clear(); // the next two steps fill it again
        }
        self.seen_hashes.insert(hash);
        false
    }

    /// Launches the graph with this hash. If the driver cannot launch it, turns graphs off and
    /// returns false.
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

    /// Captures the recorded calls into a graph. If that fails, turns graphs off and returns false.
    fn capture_graph(&mut self, gpu: &GpuContext, hash: u64, structure_hash: u64) -> bool {
        match ExecutableGraph::capture(gpu, &self.batch) {
            Ok(graph) => {
                if self.graphs.len() >= MAX_GRAPHS {
                    self.evict_oldest_graph(gpu);
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

    /// Destroys the cached graph whose last launch is the longest ago.
    fn evict_oldest_graph(&mut self, gpu: &GpuContext) {
        let oldest = self.graphs.iter().min_by_key(|(_, cached)| cached.last_launch).map(|(hash, _)| *hash);
        if let Some(evicted) = oldest.and_then(|hash| self.graphs.remove(&hash)) {
            self.wasted_graphs += usize::from(evicted.launches < 2);
            self.graph_by_structure.retain(|_, hash| Some(*hash) != oldest);
            evicted.graph.destroy(gpu);
        }
    }

    /// Returns true if graphs are on.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Turns graphs off for good because of `error`. The scratch memory stays, because recorded
    /// calls use it.
    fn disable_graphs(&mut self, gpu: &GpuContext, error: CudaError) {
        self.disable_reason = Some(error);
        self.on = false;
        gpu.graphs.on.store(false, Relaxed);
        self.destroy_graphs(gpu);
    }

    /// Destroys every cached graph and forgets every remembered batch.
    fn destroy_graphs(&mut self, gpu: &GpuContext) {
        self.graphs.drain().for_each(|(_, cached)| cached.graph.destroy(gpu));
        self.seen_hashes.clear();
        self.unmatched_batches.clear();
        self.graph_by_structure.clear();
    }
}

/// Returns true if so few kernels (`changed`) of the batch changed that updating a graph is cheaper
/// than issuing the calls.
fn is_worth_updating(changed: &[usize], batch: &CallBatch) -> bool {
    3 * changed.len() <= batch.len()
}
