//! Turns CUDA graphs on or off, measures whether training steps are faster with them, and returns
//! messages about CUDA graphs for the user.
use super::backend::Cuda;
use super::cudnn::CudnnAttention;
use super::error::CudaError;
use super::graphs::{GraphStats, GraphTuningDecision, GraphUseAutotuner};
use crate::storage::BackendNotice;
use diagnostic::{Diagnostic, codes::device::CUDA_GRAPHS_DISABLED};
use std::{
    sync::{MutexGuard, PoisonError},
    time::Duration,
};

impl Cuda {
    /// Turns CUDA graphs on or off for the GPU calls on the main stream. No other thread may use
    /// the stream meanwhile.
    pub fn set_graphs_enabled(&self, on: bool) {
        self.gpu.call_and_record_failure(|| self.gpu.set_graphs_enabled(on));
    }

    /// Starts to measure whether training steps are faster with or without CUDA graphs. The next
    /// steps run without graphs, the following steps with graphs.
    pub fn start_graph_autotuning(&self) {
        *self.lock_graph_tuner() = Some(GraphUseAutotuner::default());
    }

    /// Returns counters of the use of CUDA graphs, such as the number of graph launches and of GPU
    /// calls that were issued one by one.
    pub fn graph_stats(&self) -> GraphStats {
        self.gpu.graphs.lock_graph_state().stats()
    }

    /// Locks the state of the measurement that decides whether training steps run with CUDA graphs.
    /// It is `None` if nothing is measured.
    pub(super) fn lock_graph_tuner(&self) -> MutexGuard<'_, Option<GraphUseAutotuner>> {
        self.graph_autotuner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes the duration of a training step to the measurement of CUDA graphs, and returns the
    /// next message for the user, if any. Implements [`crate::Storage::record_step_duration`].
    pub(super) fn record_step_and_take_notice(&self, duration: Duration) -> Option<BackendNotice> {
        let mut tuner = self.lock_graph_tuner();
        if let Some(error) = self.gpu.graphs.lock_graph_state().take_disable_reason() {
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
        let calls = self.gpu.graphs.enqueued_call_count();
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
