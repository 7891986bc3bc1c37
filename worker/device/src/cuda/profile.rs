//! Profiling: GPU time between two timed events around each call, summed by the call's name.
use super::error::Result;
use super::streams::CudaEvent;
use super::{Cuda, unwrap_or_panic};
use std::{
    collections::HashMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// GPU time of all profiled calls with one name: calls of a kernel, or matmuls of one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileEntry {
    /// Name of the kernel, or shape and types of the matmuls.
    pub name: String,
    /// Number of calls.
    pub calls: u32,
    /// Seconds of GPU time of all calls together, including the launch latency between two calls.
    pub seconds: f64,
}

/// Calls that were profiled since profiling was started.
#[derive(Default)]
pub(super) struct Profile {
    is_on: AtomicBool,
    calls: Mutex<Vec<(String, [CudaEvent; 2])>>,
}

impl Cuda {
    /// Starts to measure the GPU time of every call.
    pub fn start_profiling(&self) {
        self.profile.is_on.store(true, Relaxed);
    }

    /// Stops measuring, waits for the measured calls, and returns their times, longest first.
    pub fn stop_profiling(&self) -> Result<Vec<ProfileEntry>> {
        self.profile.is_on.store(false, Relaxed);
        let calls = std::mem::take(&mut *self.profile.calls.lock().unwrap_or_else(PoisonError::into_inner));
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

    /// Runs `call`, and measures its GPU time under the name `name` if profiling is on. Panics with
    /// a [`crate::storage::DeviceError`] if the call fails.
    #[track_caller]
    pub(super) fn run_profiled(&self, name: impl FnOnce() -> String, call: impl FnOnce() -> Result<()>) {
        if !self.profile.is_on.load(Relaxed) {
            return unwrap_or_panic(call());
        }
        let begin = unwrap_or_panic(self.gpu.record_timed_event());
        unwrap_or_panic(call());
        let end = unwrap_or_panic(self.gpu.record_timed_event());
        self.profile.calls.lock().unwrap_or_else(PoisonError::into_inner).push((name(), [begin, end]));
    }
}
