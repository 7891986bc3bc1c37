//! [`CudnnAttention`]: decides for each attention shape whether cuDNN or this program's kernels
//! compute it, by the job's setting and by timing.
use super::super::Cuda;
use super::super::context::GpuContext;
use super::super::error::{CudaError, Result};
use super::super::library_search::LibraryPaths;
use super::attention_graph::{AttentionOperands, UnsupportedAttention};
use super::execution_plan::{ExecutionPlan, PreparedPlan};
use super::{AttentionPass, Cudnn, Mask};
use crate::storage::BackendNotice;
use diagnostic::{Diagnostic, codes::device::CUDNN_PLAN_REJECTED};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

/// Timed runs, after one run that is not timed.
const RUNS: usize = 4;
/// Largest accepted difference between cuDNN's results and ours, relative to the largest value.
/// Both are rounded to bf16, as are intermediate results.
const TOLERANCE: f64 = 2e-2;

/// The implementation that computes attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionBackend {
    /// This program's kernels.
    #[default]
    BuiltIn,
    /// cuDNN, for the shapes for which it is available and faster.
    Auto,
    /// cuDNN for every shape. A shape that it cannot compute is an error.
    Cudnn,
}

/// The properties by which attention passes differ: sizes, bits of the scale, mask, direction.
type PassKey = ([usize; 5], u32, Mask, bool);

/// The open library and the decisions made so far.
pub(in super::super) struct CudnnAttention {
    backend: AttentionBackend,
    cudnn: Arc<Cudnn>,
    /// The plan for each pass; `None` for this program's kernels.
    plans: Mutex<HashMap<PassKey, Option<Arc<ExecutionPlan>>>>,
    /// Decisions that have not been reported yet.
    notices: Mutex<VecDeque<BackendNotice>>,
}

/// Why a plan of cuDNN is not used.
#[derive(Debug, thiserror::Error)]
enum PlanRejection {
    #[error("cuDNN has no plan")]
    NoPlan,
    #[error(transparent)]
    Failed(#[from] CudaError),
    #[error("its results differ from launch's own kernels by {0:.0e}, more than {TOLERANCE:.0e}")]
    Inaccurate(f64),
    #[error("it could not be timed")]
    NotTimed,
}

fn pass_key(pass: &AttentionPass) -> PassKey {
    let s = pass.shape;
    ([s.b, s.t, s.heads, s.kv_heads, s.head_dim], s.scale.to_bits(), pass.mask, pass.is_backward)
}

impl CudnnAttention {
    /// Opens cuDNN for the GPU whose context is current. `None` if the job does not use it.
    pub(in super::super) fn open(
        backend: AttentionBackend,
        paths: &LibraryPaths,
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

    /// The next decision that has not been reported yet.
    pub(in super::super) fn take_notice(&self) -> Option<BackendNotice> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Enqueues a pass on cuDNN. Returns false if cuDNN does not support the pass or was not
    /// selected for it. `built_in` runs the pass on the built-in kernels, to time them.
    pub(in super::super) fn run(
        &self,
        cuda: &Cuda,
        pass: std::result::Result<AttentionPass, UnsupportedAttention>,
        at: &AttentionOperands,
        built_in: &dyn Fn(),
    ) -> Result<bool> {
        let pass = match pass {
            Ok(pass) => pass,
            Err(unsupported) if self.backend == AttentionBackend::Cudnn => {
                return Err(self.unsupported(unsupported.to_string()));
            }
            Err(_) => return Ok(false),
        };
        let Some(plan) = self.plan(cuda, &pass, at, built_in)? else { return Ok(false) };
        let name = || format!("{} by cuDNN", pass.describe());
        cuda.profiled(name, || self.enqueue(&cuda.gpu, &plan, &pass, at));
        Ok(true)
    }

    /// The plan for a pass, from the earlier decisions or new; `None` for this program's kernels.
    fn plan(
        &self,
        cuda: &Cuda,
        pass: &AttentionPass,
        at: &AttentionOperands,
        built_in: &dyn Fn(),
    ) -> Result<Option<Arc<ExecutionPlan>>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&pass_key(pass)) {
            return Ok(plan.clone());
        }
        cuda.gpu.make_current()?;
        let candidates = self.cudnn.plans(pass);
        let plan = match (self.backend, candidates) {
            (AttentionBackend::Cudnn, candidates) => {
                let first = candidates?.next().transpose()?;
                Some(Arc::new(first.ok_or_else(|| self.unsupported(pass.describe_shape()))?))
            }
            (_, Ok(candidates)) => self.fastest(cuda, pass, at, candidates, built_in)?,
            (_, Err(error)) => {
                self.report_rejection(pass, &error.into());
                None
            }
        };
        plans.insert(pass_key(pass), plan.clone());
        Ok(plan)
    }

    /// The fastest plan whose results agree with ours; `None` if this program's kernels are faster.
    fn fastest(
        &self,
        cuda: &Cuda,
        pass: &AttentionPass,
        at: &AttentionOperands,
        candidates: impl Iterator<Item = Result<ExecutionPlan>>,
        built_in: &dyn Fn(),
    ) -> Result<Option<Arc<ExecutionPlan>>> {
        let gpu = &cuda.gpu;
        let run_built_in = || {
            built_in();
            true
        };
        let Some(built_in_seconds) = time(gpu, run_built_in)? else { return Ok(None) };
        let expected = pass.download_results(gpu, at)?;
        let mut best: Option<(f64, Arc<ExecutionPlan>)> = None;
        let mut rejection = PlanRejection::NoPlan;
        for plan in candidates {
            match plan
                .map_err(PlanRejection::from)
                .and_then(|plan| self.try_plan(gpu, plan, pass, at, &expected))
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
            cudnn_version: self.cudnn.version(),
            cudnn_seconds,
            built_in_seconds,
        });
        Ok((cudnn_seconds < built_in_seconds).then_some(plan))
    }

    /// Seconds that a plan takes, if it works and its results agree with `expected`.
    fn try_plan(
        &self,
        gpu: &Arc<GpuContext>,
        plan: ExecutionPlan,
        pass: &AttentionPass,
        at: &AttentionOperands,
        expected: &[Vec<f32>; 3],
    ) -> std::result::Result<(f64, Arc<ExecutionPlan>), PlanRejection> {
        let plan = Arc::new(plan);
        let run = || self.enqueue(gpu, &plan, pass, at);
        run()?;
        let difference = relative_difference(&pass.download_results(gpu, at)?, expected);
        if difference > TOLERANCE {
            return Err(PlanRejection::Inaccurate(difference));
        }
        let seconds = time(gpu, || run().is_ok())?;
        Ok((seconds.ok_or(PlanRejection::NotTimed)?, plan))
    }

    fn report_rejection(&self, pass: &AttentionPass, rejection: &PlanRejection) {
        let attention = pass.describe();
        let message = format!("{attention} does not use cuDNN");
        let warning = Diagnostic::warning(CUDNN_PLAN_REJECTED, message)
            .with_subject(attention)
            .with_field("cudnn_version", self.cudnn.version())
            .with_cause(rejection);
        self.push_notice(BackendNotice::Degraded(warning));
    }

    /// Enqueues the execution plan of an attention pass on this thread's stream, with scratch
    /// memory for its workspace and for tensors that only cuDNN needs.
    fn enqueue(
        &self,
        gpu: &Arc<GpuContext>,
        plan: &Arc<ExecutionPlan>,
        pass: &AttentionPass,
        at: &AttentionOperands,
    ) -> Result<()> {
        // Freed in the stream's order, after this pass.
        let workspace = gpu.scratch(plan.workspace.max(1))?;
        let mut tensors = pass.operand_tensors(at);
        let mut extra_memory = Vec::new();
        for extra in pass.extra_tensors() {
            let bytes = extra.elements * size_of::<f32>();
            let memory = gpu.scratch(bytes)?;
            if extra.is_zeroed {
                gpu.fill_zero(memory.at(), bytes)?;
            }
            tensors.push((extra.id, memory.at()));
            extra_memory.push(memory);
        }
        let prepared = PreparedPlan {
            cudnn: self.cudnn.clone(),
            plan: plan.clone(),
            tensors,
            workspace: workspace.at(),
        };
        let direct = prepared.clone();
        gpu.enqueue(|batch| batch.push_plan(prepared), |stream| direct.issue(stream))
    }

    fn push_notice(&self, notice: BackendNotice) {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).push_back(notice);
    }

    fn unsupported(&self, attention: String) -> CudaError {
        CudaError::AttentionUnsupported { version: self.cudnn.version(), attention }
    }
}

/// The largest difference of each result relative to its largest expected value; infinite if one is
/// finite where the other is not.
fn relative_difference(results: &[Vec<f32>; 3], expected: &[Vec<f32>; 3]) -> f64 {
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

/// Mean seconds of one run over [`RUNS`] timed runs; `None` if a run fails.
fn time(gpu: &Arc<GpuContext>, run: impl Fn() -> bool) -> Result<Option<f64>> {
    if !run() {
        return Ok(None);
    }
    let begin = gpu.record_timed()?;
    if !(0..RUNS).all(|_| run()) {
        return Ok(None);
    }
    let end = gpu.record_timed()?;
    end.synchronize()?;
    Ok(end.seconds_since(&begin)?.map(|seconds| seconds / RUNS as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_result_is_compared_relative_to_its_own_size() {
        let results = |o: f32, sum: f32| [vec![o, 0.5], vec![sum, 8.0], Vec::new()];
        let expected = results(1.0, 2.0);
        assert_eq!(relative_difference(&results(1.0, 2.0), &expected), 0.0);
        assert!((relative_difference(&results(1.25, 2.0), &expected) - 0.25).abs() < 1e-9);
        assert!((relative_difference(&results(1.0, 4.0), &expected) - 0.25).abs() < 1e-9);
        assert_eq!(relative_difference(&results(f32::NAN, 2.0), &expected), f64::INFINITY);
        let both_nan = relative_difference(&results(f32::NAN, 2.0), &results(f32::NAN, 2.0));
        assert_eq!(both_nan, 0.0, "NaN in both results is no difference");
    }
}
