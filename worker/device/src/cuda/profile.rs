//! Measures the GPU time of each call with a CUDA event before and after it, and sums the times by
//! the call's name ([`GpuProfiler`]).
use super::error::Result;
use super::gpu::Gpu;
use super::streams::CudaEvent;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// The number of measured GPU calls with one name (a kernel, or matmuls of one shape) and their
/// total GPU time in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileEntry {
    /// Name of the kernel, or shape and types of the matmuls.
    pub name: String,
    /// Number of calls.
    pub calls: u32,
    /// Seconds of GPU time of all calls together, including the launch latency between two calls.
    pub seconds: f64,
}

/// The profiler of one GPU, with the GPU calls that were measured since profiling was started.
#[derive(Default)]
pub(super) struct GpuProfiler {
    is_on: AtomicBool,
    calls: Mutex<Vec<(String, [CudaEvent; 2])>>,
}

impl GpuProfiler {
    /// Starts measuring the GPU time of every call made with [`GpuProfiler::run_profiled`].
    pub(super) fn start(&self) {
        self.is_on.store(true, Relaxed);
    }

    /// Stops measuring, waits for the measured calls, and returns their GPU times, longest first.
    pub(super) fn stop(&self) -> Result<Vec<ProfileEntry>> {
        self.is_on.store(false, Relaxed);
        let calls = std::mem::take(&mut *self.calls.lock().unwrap_or_else(PoisonError::into_inner));
        let mut by_name: HashMap<String, ProfileEntry> = HashMap::new();
        for (name, [begin, end]) in calls {
            end.synchronize()?;
            let seconds = end.seconds_since(&begin)?.unwrap_or_default();
            let entry = by_name.entry(name.clone()).or_insert(ProfileEntry { name, calls: 0, seconds: 0.0 });
            entry.calls += 1;
            entry.seconds += seconds;
        }
        let mut entries: Vec<ProfileEntry> = by_name.into_values().collect();
        entries.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        Ok(entries)
    }

    /// Runs `call`, which enqueues GPU work, and, if profiling is on, measures the GPU time of this
    /// work under the name `name`.
    pub(super) fn run_profiled(
        &self,
        gpu: &Arc<Gpu>,
        name: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.is_on.load(Relaxed) {
            return call();
        }
        let begin = gpu.record_timed_event()?;
        call()?;
        let end = gpu.record_timed_event()?;
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push((name(), [begin, end]));
        Ok(())
    }
}
