//! Decides for each attention shape whether cuDNN or the built-in kernels compute it
//! ([`CudnnAttention`]). The decision follows the job's setting and timing.
use super::super::error::{CudaError, Result};
use super::super::gpu::Gpu;
use super::super::launch_log::log_non_kernel_call;
use super::super::library_search::LibrarySearchPaths;
use super::super::profile::GpuProfiler;
use super::attention_graph::{AttentionMask, AttentionOperands, AttentionPass, UnsupportedAttention};
use super::execution_plan::{ExecutionPlan, PreparedPlan};
use super::library::Cudnn;
use crate::storage::BackendNotice;
use diagnostic::{Diagnostic, codes::device::CUDNN_PLAN_REJECTED};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

/// Number of times that cuDNN and the built-in kernels each run an attention pass to compare their
/// speed, after one run that is not timed.
const TIMED_RUNS: usize = 4;
/// Largest accepted difference between the attention results of cuDNN and of the built-in kernels,
/// relative to the largest value. Results and intermediate results of both are rounded to bf16.
const TOLERANCE: f64 = 2e-2;

/// Which implementation computes attention on a GPU: cuDNN or the built-in kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionBackend {
    /// The built-in kernels.
    #[default]
    BuiltIn,
    /// cuDNN for the shapes for which it is available and faster. Otherwise the built-in kernels.
    Auto,
    /// cuDNN for every shape. A shape that it cannot compute is an error.
    Cudnn,
}

/// The key under which cuDNN's execution plan for an attention pass is stored. It consists of five
/// sizes, the bits of the scale, the mask, and whether the pass is backward.
type AttentionPassKey = ([usize; 5], u32, AttentionMask, bool);

/// The opened cuDNN library, and the execution plans for attention that were selected so far.
pub(in super::super) struct CudnnAttention {
    backend: AttentionBackend,
    cudnn: Arc<Cudnn>,
    /// The selected plan for each pass. The value is `None` for passes that the built-in kernels
    /// compute.
    plans: Mutex<HashMap<AttentionPassKey, Option<Arc<ExecutionPlan>>>>,
    /// Decisions and warnings that have not been reported to the user yet.
    notices: Mutex<VecDeque<BackendNotice>>,
}

/// Why the built-in kernels compute a certain attention shape instead of cuDNN: cuDNN has no plan,
/// or the plan failed or was inaccurate.
#[derive(Debug, thiserror::Error)]
enum PlanRejection {
    #[error("cuDNN has no plan")]
    NoPlan,
    #[error(transparent)]
    Failed(#[from] CudaError),
    #[error(
        "cuDNN's results differ from those of launch's own kernels by {0:.0e}, more than {TOLERANCE:.0e}"
    )]
    Inaccurate(f64),
    #[error("the plan could not be timed")]
    NotTimed,
}

/// Returns the key for storing cuDNN's execution plan for an attention pass: sizes, scale, mask and
/// direction of the pass.
fn compute_pass_key(pass: &AttentionPass) -> AttentionPassKey {
    let s = pass.shape;
    ([s.b, s.t, s.heads, s.kv_heads, s.head_dim], s.scale.to_bits(), pass.mask, pass.is_backward)
}

impl CudnnAttention {
    /// Opens cuDNN for the GPU whose context is current, or returns `None` if the job does not use
    /// cuDNN.
    pub(in super::super) fn open(
        backend: AttentionBackend,
        paths: &LibrarySearchPaths,
    ) -> Result<Option<CudnnAttention>> {
        match backend {
            AttentionBackend::BuiltIn => Ok(None),
            AttentionBackend::Auto | AttentionBackend::Cudnn => {
                let cudnn = Arc::new(Cudnn::open(paths)?);
                let (plans, notices) = (Mutex::default(), Mutex::default());
                Ok(Some(CudnnAttention { backend, cudnn, plans, notices }))
            }
        }
    }

    /// Removes and returns the oldest message for the user about attention by cuDNN, such as a
    /// rejected plan; `None` if no message is queued.
    pub(in super::super) fn take_notice(&self) -> Option<BackendNotice> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Enqueues an attention pass with cuDNN if cuDNN is selected for passes of this shape, and
    /// returns true in that case. Returns false if the built-in kernels must compute the pass.
    /// Selects a plan first if none was selected for the pass. The selection may call `built_in`,
    /// which runs the pass on the built-in kernels, to time them. Fails instead if the job requires
    /// cuDNN ([`AttentionBackend::Cudnn`]).
    pub(in super::super) fn try_enqueue(
        &self,
        (gpu, profile): (&Arc<Gpu>, &GpuProfiler),
        pass: std::result::Result<AttentionPass, UnsupportedAttention>,
        at: &AttentionOperands,
        built_in: &dyn Fn(),
    ) -> Result<bool> {
        let pass = match pass {
            Ok(pass) => pass,
            Err(unsupported) if self.backend == AttentionBackend::Cudnn => {
                return Err(self.unsupported_error(unsupported.to_string()));
            }
            Err(_) => return Ok(false),
        };
        let Some(plan) = self.select_plan(gpu, &pass, at, built_in)? else { return Ok(false) };
        let name = || format!("{} by cuDNN", pass.describe());
        profile.run_profiled(gpu, name, || self.enqueue_plan(gpu, &plan, &pass, at))?;
        Ok(true)
    }

    /// Returns the execution plan with which cuDNN computes an attention pass; the first call for a
    /// shape chooses the plan. Returns `None` if the built-in kernels compute the pass.
    fn select_plan(
        &self,
        gpu: &Arc<Gpu>,
        pass: &AttentionPass,
        at: &AttentionOperands,
        built_in: &dyn Fn(),
    ) -> Result<Option<Arc<ExecutionPlan>>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&compute_pass_key(pass)) {
            return Ok(plan.clone());
        }
        gpu.make_current()?;
        let candidates = pass.create_plans(&self.cudnn);
        let plan = match (self.backend, candidates) {
            (AttentionBackend::Cudnn, candidates) => {
                let first = candidates?.next().transpose()?;
                Some(Arc::new(first.ok_or_else(|| self.unsupported_error(pass.describe_shape()))?))
            }
            (_, Ok(candidates)) => self.find_fastest_plan(gpu, pass, at, candidates, built_in)?,
            (_, Err(error)) => {
                self.report_rejection(pass, &error.into());
                None
            }
        };
        plans.insert(compute_pass_key(pass), plan.clone());
        Ok(plan)
    }

    /// Times cuDNN's plans and the built-in kernels for an attention pass, and returns the fastest
    /// plan whose results agree with the built-in kernels, or `None` if those are faster or no plan
    /// can be used. The runs overwrite the outputs of the pass, which the caller must compute again
    /// afterwards.
    fn find_fastest_plan(
        &self,
        gpu: &Arc<Gpu>,
        pass: &AttentionPass,
        at: &AttentionOperands,
        candidates: impl Iterator<Item = Result<ExecutionPlan>>,
        built_in: &dyn Fn(),
    ) -> Result<Option<Arc<ExecutionPlan>>> {
        let run_built_in = || {
            built_in();
            true
        };
        let Some(built_in_seconds) = measure_seconds(gpu, run_built_in)? else { return Ok(None) };
        let expected = pass.download_results(gpu, at)?;
        let mut best: Option<(f64, Arc<ExecutionPlan>)> = None;
        let mut rejection = PlanRejection::NoPlan;
        for plan in candidates {
            match plan
                .map_err(PlanRejection::from)
                .and_then(|plan| self.check_and_time_plan(gpu, plan, pass, at, &expected))
            {
                Ok((seconds, plan)) if best.as_ref().is_none_or(|(least, _)| seconds < *least) => {
                    best = Some((seconds, plan))
                }
                Ok(_) => {}
                Err(error) => rejection = error,
            }
        }
        let Some((cudnn_seconds, plan)) = best else {
            self.report_rejection(pass, &rejection);
            return Ok(None);
        };
        self.push_notice(BackendNotice::AttentionMeasured {
            attention: pass.describe(),
            cudnn_version: self.cudnn.format_version(),
            cudnn_seconds,
            built_in_seconds,
        });
        Ok((cudnn_seconds < built_in_seconds).then_some(plan))
    }

    /// Runs an execution plan of cuDNN for attention, compares the results with those of the
    /// built-in kernels (`expected`), and returns the seconds that a run takes. Fails if the plan
    /// does not work or its results differ from `expected`.
    fn check_and_time_plan(
        &self,
        gpu: &Arc<Gpu>,
        plan: ExecutionPlan,
        pass: &AttentionPass,
        at: &AttentionOperands,
        expected: &[Vec<f32>; 3],
    ) -> std::result::Result<(f64, Arc<ExecutionPlan>), PlanRejection> {
        let plan = Arc::new(plan);
        let run = || self.enqueue_plan(gpu, &plan, pass, at);
        run()?;
        let difference = compute_relative_difference(&pass.download_results(gpu, at)?, expected);
        if difference > TOLERANCE {
            return Err(PlanRejection::Inaccurate(difference));
        }
        let seconds = measure_seconds(gpu, || run().is_ok())?;
        Ok((seconds.ok_or(PlanRejection::NotTimed)?, plan))
    }

    /// Queues a warning for the user that cuDNN does not compute a certain attention shape, because
    /// all its plans were rejected.
    fn report_rejection(&self, pass: &AttentionPass, rejection: &PlanRejection) {
        let attention = pass.describe();
        let message = format!("{attention} does not use cuDNN");
        let warning = Diagnostic::warning(CUDNN_PLAN_REJECTED, message)
            .with_subject(attention)
            .with_field("cudnn_version", self.cudnn.format_version())
            .with_cause(rejection);
        self.push_notice(BackendNotice::Degraded(warning));
    }

    /// Allocates the workspace of an attention pass's execution plan, and enqueues the plan on this
    /// thread's stream.
    fn enqueue_plan(
        &self,
        gpu: &Arc<Gpu>,
        plan: &Arc<ExecutionPlan>,
        pass: &AttentionPass,
        at: &AttentionOperands,
    ) -> Result<()> {
        let s = pass.shape;
        let sizes = [s.b, s.t, s.heads, s.kv_heads, s.head_dim].map(|size| size as u64);
        log_non_kernel_call(
            if pass.is_backward { "cuDNN attention backward" } else { "cuDNN attention forward" },
            &sizes,
        );
        // Freed in the stream's order, after this pass.
        let workspace = gpu.allocate_scratch(plan.workspace.max(1))?;
        let mut tensors = pass.list_operand_tensors(at);
        let mut extra_memory = Vec::new();
        for extra in pass.list_extra_tensors() {
            let bytes = extra.elements * size_of::<f32>();
            let memory = gpu.allocate_scratch(bytes)?;
            if extra.is_zeroed {
                gpu.enqueue_zero_fill(memory.address(), bytes)?;
            }
            tensors.push((extra.id, memory.address()));
            extra_memory.push(memory);
        }
        let prepared = PreparedPlan {
            cudnn: self.cudnn.clone(),
            plan: plan.clone(),
            tensors,
            workspace: workspace.address(),
        };
        let direct = prepared.clone();
        gpu.enqueue(|batch| batch.push_cudnn_plan(prepared), |stream| direct.issue(stream))
    }

    /// Queues a message for the user about attention by cuDNN, which
    /// [`CudnnAttention::take_notice`] returns later.
    fn push_notice(&self, notice: BackendNotice) {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).push_back(notice);
    }

    /// Creates the error which reports that cuDNN cannot compute the attention pass that the text
    /// `attention` describes.
    fn unsupported_error(&self, attention: String) -> CudaError {
        CudaError::AttentionUnsupported { version: self.cudnn.format_version(), attention }
    }
}

/// Returns the largest difference between elements of cuDNN's attention `results` and the
/// `expected` tensors, divided by the largest magnitude in the expected tensor. Returns infinity if
/// one value is finite where the other is not.
fn compute_relative_difference(results: &[Vec<f32>; 3], expected: &[Vec<f32>; 3]) -> f64 {
    let difference = |(result, expected): (&Vec<f32>, &Vec<f32>)| {
        let finite = expected.iter().map(|x| x.abs()).filter(|x| x.is_finite());
        let largest = f64::from(finite.fold(f32::MIN_POSITIVE, f32::max));
        let differences = result.iter().zip(expected).map(|(r, e)| match r.is_finite() == e.is_finite() {
            true if r.is_finite() => f64::from((r - e).abs()) / largest,
            true => 0.0,
            false => f64::INFINITY,
        });
        differences.fold(0.0, f64::max)
    };
    results.iter().zip(expected).map(difference).fold(0.0, f64::max)
}

/// Calls `run`, which enqueues an attention pass, [`TIMED_RUNS`] times and returns the mean GPU
/// time of a call in seconds. Returns `None` if a run fails.
fn measure_seconds(gpu: &Arc<Gpu>, run: impl Fn() -> bool) -> Result<Option<f64>> {
    if !run() {
        return Ok(None);
    }
    let begin = gpu.record_timed_event()?;
    if !(0..TIMED_RUNS).all(|_| run()) {
        return Ok(None);
    }
    let end = gpu.record_timed_event()?;
    end.synchronize()?;
    Ok(end.seconds_since(&begin)?.map(|seconds| seconds / TIMED_RUNS as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_result_is_compared_relative_to_its_own_size() {
        let results = |o: f32, sum: f32| [vec![o, 0.5], vec![sum, 8.0], Vec::new()];
        let expected = results(1.0, 2.0);
        assert_eq!(compute_relative_difference(&results(1.0, 2.0), &expected), 0.0);
        assert!((compute_relative_difference(&results(1.25, 2.0), &expected) - 0.25).abs() < 1e-9);
        assert!((compute_relative_difference(&results(1.0, 4.0), &expected) - 0.25).abs() < 1e-9);
        assert_eq!(compute_relative_difference(&results(f32::NAN, 2.0), &expected), f64::INFINITY);
        let both_nan = compute_relative_difference(&results(f32::NAN, 2.0), &results(f32::NAN, 2.0));
        assert_eq!(both_nan, 0.0, "NaN in both results is no difference");
    }
}
