//! Computes matmuls on a GPU with NVIDIA's library cuBLASLt ([`CublasLt`]). The algorithm for each
//! shape is chosen once, by the library's heuristic or by timing.
//!
//! cuBLASLt is column-major. A row-major matmul is requested as its transpose, with the operands
//! exchanged.
mod algorithm_search;
mod descriptors;
mod epilogue;
mod plan_report;
pub(super) mod prepared;
mod request;

use super::bindings::Address;
use super::bindings::{
    CublasLtApi,
    cublas_lt_sys::{cublasLtMatmulAlgo_t, cublasLtMatmulPreferenceAttributes_t, cublasStatus_t},
};
use super::error::{CudaError, Result};
use super::gpu::Gpu;
use super::library_search::LibrarySearchPaths;
use super::memory::DeviceMemory;
use algorithm_search::{AlgorithmCandidate, AlgorithmSearch};
use descriptors::{AlgorithmPreference, MatmulDescriptor};
pub(super) use epilogue::Epilogue;
pub use plan_report::MatmulPlanReport;
use plan_report::query_algorithm_attributes;
use prepared::{CublasLtHandle, MatmulPlan, MatrixLayouts, PreparedMatmul};
use request::Key;
pub(super) use request::{Matmul, MatrixRef, OperandFormat, VaryingSize};
use std::{
    collections::HashMap,
    ffi::c_int,
    mem::MaybeUninit,
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// Maximum size in bytes of the GPU memory that cuBLASLt may use as the workspace of a matmul.
pub const MATMUL_WORKSPACE_BYTES: usize = 32 << 20;
/// Maximum number of plans (chosen algorithms of matmuls) that are stored. Beyond it, all plans are
/// dropped, and created again when they are needed.
const MAX_PLANS: usize = 4096;

/// The chosen algorithm for each matmul, by the properties of the matmul (sizes, types) and a flag
/// which is true if one size varies between calls. The value is `None` where the library has no
/// algorithm.
type MatmulPlans = HashMap<(Key, bool), Option<Arc<MatmulPlan>>>;

/// The opened cuBLASLt library, and the plans (algorithms and descriptors) of the matmuls that were
/// requested so far.
pub(super) struct CublasLt {
    lt: Arc<CublasLtHandle>,
    pub(super) path: PathBuf,
    pub(super) version: usize,
    /// The plans (algorithm and descriptors) that were created so far.
    plans: Mutex<MatmulPlans>,
    /// The workspace of each stream, by the address of the stream's handle. It grows on demand.
    workspaces: Mutex<HashMap<usize, DeviceMemory>>,
    /// The search for the fastest algorithms; set once autotuning is enabled.
    search: OnceLock<AlgorithmSearch>,
}

/// Returns cuBLASLt's version, such as `13.1.0`, and the path of the library. Does not use a GPU.
pub(super) fn query_library_version(paths: &LibrarySearchPaths) -> Result<(String, PathBuf)> {
    let (library, path) = CublasLtApi::open(paths)?;
    // SAFETY: no preconditions.
    let version = unsafe { (library.cublasLtGetVersion)() };
    Ok((format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100), path))
}

impl CublasLt {
    /// Opens cuBLASLt for the GPU whose context is current in this thread.
    pub(super) fn open(paths: &LibrarySearchPaths) -> Result<CublasLt> {
        let (library, path) = CublasLtApi::open(paths)?;
        let mut handle = ptr::null_mut();
        // SAFETY: no preconditions.
        let version = unsafe { (library.cublasLtGetVersion)() };
        // SAFETY: writes one handle.
        unsafe { library.cublasLtCreate(&mut handle) }?;
        let lt = Arc::new(CublasLtHandle { library: Arc::new(library), handle });
        let (plans, workspaces) = (Mutex::default(), Mutex::default());
        Ok(CublasLt { lt, path, version, plans, workspaces, search: OnceLock::new() })
    }

    /// Enables autotuning: whenever a new shape of a matmul occurs, cuBLASLt's algorithms for it
    /// are timed, and the fastest is used. Choices are stored in `directory` for other processes.
    pub(super) fn enable_autotuning(&self, gpu: &Gpu, directory: Option<PathBuf>) {
        self.search.get_or_init(|| AlgorithmSearch::new(directory, &gpu.properties, self.version));
    }

    /// Enqueues a matmul by cuBLASLt on this thread's stream. `m`, `n` and `k` must be above 0.
    /// Fails if the library has no algorithm for the matmul.
    pub(super) fn enqueue(&self, gpu: &Arc<Gpu>, matmul: &Matmul) -> Result<()> {
        gpu.make_current()?; // the heuristic answers for the current GPU
        let prepared = gpu.retry_if_out_of_memory(|| self.prepare(gpu, matmul))?;
        let prepared = prepared.ok_or_else(|| CudaError::Call {
            function: "cublasLtMatmulAlgoGetHeuristic".to_owned(),
            status: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as c_int,
            message: format!("no algorithm for {matmul:?}"),
        })?;
        let workspace = self.reserve_workspace(gpu, prepared.workspace_bytes)?;
        let prepared = PreparedMatmul { workspace, ..prepared };
        matmul.write_to_launch_log();
        let direct = prepared.clone();
        gpu.enqueue(|batch| batch.push_matmul(prepared), |stream| direct.issue(stream))
    }

    /// Returns true if cuBLASLt has an algorithm that can compute this matmul.
    pub(super) fn has_algorithm(&self, gpu: &Arc<Gpu>, matmul: &Matmul) -> Result<bool> {
        gpu.make_current()?;
        gpu.retry_if_out_of_memory(|| self.prepare(gpu, matmul)).map(|prepared| prepared.is_some())
    }

    /// Returns the GPU address of the workspace for matmuls on this thread's stream, after
    /// enlarging it to `bytes` bytes if necessary.
    fn reserve_workspace(&self, gpu: &Arc<Gpu>, bytes: usize) -> Result<Address> {
        if bytes == 0 {
            return Ok(0);
        }
        let stream = gpu.current_stream().addr();
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(workspace) = workspaces.get(&stream).filter(|workspace| workspace.len() >= bytes) {
            return Ok(workspace.address());
        }
        let workspace = gpu.allocate(bytes.next_power_of_two())?;
        let address = workspace.address();
        // A smaller workspace is freed in the stream's order, after the matmuls that use it.
        workspaces.insert(stream, workspace);
        Ok(address)
    }

    /// Chooses the algorithm for a matmul and returns the matmul with its arguments and
    /// descriptors; the caller must still add the workspace memory. Returns `None` if the library
    /// has no algorithm.
    ///
    /// The algorithm for a varying size is the one for its size bucket. Where the library rejects
    /// that algorithm for the actual size, the algorithm for exactly this matmul is used, and not
    /// stored.
    fn prepare(&self, gpu: &Arc<Gpu>, matmul: &Matmul) -> Result<Option<PreparedMatmul>> {
        let prepared = |plan: Arc<MatmulPlan>, layouts, workspace_bytes| {
            let (lt, matmul, workspace) = (self.lt.clone(), *matmul, 0);
            Some(PreparedMatmul { lt, matmul, plan, layouts, workspace, workspace_bytes })
        };
        let (key, exact_key) = (matmul.plan_key(), matmul.exact_key());
        let plan = self.get_or_create_plan(gpu, matmul, key)?;
        if key.sizes == exact_key.sizes {
            return Ok(plan.and_then(|plan| prepared(plan.clone(), plan.layouts.clone(), plan.workspace)));
        }
        if let Some(plan) = plan {
            let layouts = MatrixLayouts::new(&self.lt.library, matmul, matmul.sizes())?;
            if let Some(workspace) = self.query_algorithm_workspace(&plan, &layouts) {
                return Ok(prepared(plan, Arc::new(layouts), workspace));
            }
        }
        let plan = self.create_plan(gpu, matmul, &exact_key)?.map(Arc::new);
        Ok(plan.and_then(|plan| prepared(plan.clone(), plan.layouts.clone(), plan.workspace)))
    }

    /// Returns how many bytes of workspace the algorithm of `plan` needs for matrices with the
    /// sizes, strides and types in `layouts`. Returns `None` if the algorithm cannot compute the
    /// matmul.
    fn query_algorithm_workspace(&self, plan: &MatmulPlan, layouts: &MatrixLayouts) -> Option<usize> {
        let [first, second, result] = layouts.handles;
        let mut checked = MaybeUninit::zeroed();
        // SAFETY: descriptors and layouts live; writes one result.
        let status = unsafe {
            (self.lt.library.cublasLtMatmulAlgoCheck)(
                self.lt.handle,
                plan.descriptor.handle,
                first,
                second,
                result,
                result,
                &plan.algorithm,
                checked.as_mut_ptr(),
            )
        };
        // SAFETY: the result was zeroed, and written if the call succeeded.
        let workspace = unsafe { AlgorithmCandidate::from_result(&checked) }?.workspace;
        (status == 0 && workspace <= MATMUL_WORKSPACE_BYTES).then_some(workspace)
    }

    /// Returns the plan (algorithm and descriptors) for matmuls with the sizes and types in `key`;
    /// the first request creates and stores the plan. Returns `None` if the library has no
    /// algorithm.
    fn get_or_create_plan(
        &self,
        gpu: &Arc<Gpu>,
        matmul: &Matmul,
        key: Key,
    ) -> Result<Option<Arc<MatmulPlan>>> {
        let stored_key = (key, matmul.varying.is_some());
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&stored_key) {
            return Ok(plan.clone());
        }
        let plan = self.create_plan(gpu, matmul, &key)?.map(Arc::new);
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        plans.insert(stored_key, plan.clone());
        Ok(plan)
    }

    /// Returns the cuBLASLt algorithm of each matmul that was requested so far, sorted by the
    /// description of the matmul.
    pub(super) fn describe_plans(&self) -> Vec<MatmulPlanReport> {
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let reports = plans.iter().map(|((key, _), plan)| MatmulPlanReport {
            matmul: format!("{key:?}"),
            algorithm: plan
                .as_ref()
                .map(|plan| query_algorithm_attributes(&self.lt.library, &plan.algorithm)),
            workspace_bytes: plan.as_ref().map_or(0, |plan| plan.workspace),
        });
        let mut reports: Vec<_> = reports.collect();
        reports.sort_by(|a, b| a.matmul.cmp(&b.matmul));
        reports
    }

    /// Chooses cuBLASLt's algorithm for a matmul with the sizes in `key`, and returns it with
    /// cuBLASLt's descriptors of the matmul. Times the algorithms if autotuning is enabled and no
    /// size varies. Returns `None` if the library has no algorithm.
    fn create_plan(&self, gpu: &Arc<Gpu>, matmul: &Matmul, key: &Key) -> Result<Option<MatmulPlan>> {
        let lt = &self.lt.library;
        let [m, n, k, ..] = key.sizes;
        let mut plan = MatmulPlan {
            descriptor: MatmulDescriptor::new(lt, key.transposed, matmul.call_pointers())?,
            layouts: Arc::new(MatrixLayouts::new(lt, matmul, [m, n, k])?),
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
        };
        let search = self.search.get().filter(|_| matmul.varying.is_none());
        let requested = if search.is_some() { algorithm_search::MAX_CANDIDATES } else { 1 };
        let candidates = self.query_candidate_algorithms(&plan, key, requested)?;
        let Some(first) = candidates.first() else { return Ok(None) };
        let best = match search {
            None => *first,
            Some(search) => {
                let time =
                    |candidate: &AlgorithmCandidate| self.time_candidate(gpu, matmul, &plan, candidate);
                search.find_fastest(&format!("{key:?}"), &candidates, time)?
            }
        };
        (plan.algorithm, plan.workspace) = (best.algorithm, best.workspace);
        Ok(Some(plan))
    }

    /// Returns at most `requested` algorithms that cuBLASLt's heuristic suggests for a matmul, best
    /// guess first.
    fn query_candidate_algorithms(
        &self,
        plan: &MatmulPlan,
        key: &Key,
        requested: usize,
    ) -> Result<Vec<AlgorithmCandidate>> {
        use cublasLtMatmulPreferenceAttributes_t::*;
        let lt = &self.lt.library;
        let preference = AlgorithmPreference::new(lt)?;
        preference.set_attribute(
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &(MATMUL_WORKSPACE_BYTES as u64).to_ne_bytes(),
        )?;
        let [a, b, c] = key.alignments;
        for (attribute, bytes) in [
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            preference.set_attribute(attribute, &bytes.to_ne_bytes())?;
        }
        let (mut candidates, mut count) = (vec![MaybeUninit::uninit(); requested], 0);
        let [first, second, result] = plan.layouts.handles;
        // SAFETY: writes at most as many results as are requested.
        let status = unsafe {
            (lt.cublasLtMatmulAlgoGetHeuristic)(
                self.lt.handle,
                plan.descriptor.handle,
                first,
                second,
                result,
                result,
                preference.handle,
                requested as c_int,
                candidates.as_mut_ptr().cast(),
                &mut count,
            )
        };
        // Some versions report operands that they do not support as invalid.
        let unsupported =
            [cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED, cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE];
        if unsupported.iter().any(|one| status == *one as c_int) {
            return Ok(Vec::new());
        }
        lt.check_status("cublasLtMatmulAlgoGetHeuristic", status)?;
        let candidates = candidates.iter().take(usize::try_from(count).unwrap_or(0));
        // SAFETY: the library has written the first `count` results.
        let candidates = candidates.filter_map(|result| unsafe { AlgorithmCandidate::from_result(result) });
        Ok(candidates.filter(|one| one.workspace <= MATMUL_WORKSPACE_BYTES).collect())
    }

    /// Runs a matmul several times with the algorithm `candidate`, and returns the total GPU time
    /// of the timed runs in seconds. Returns `None` if the algorithm fails, or if there is no
    /// memory to try it.
    ///
    /// If `matmul.add` is true, the runs write to temporary memory, and `c` keeps its content.
    /// Otherwise they overwrite `c`, whose content is unspecified afterwards.
    fn time_candidate(
        &self,
        gpu: &Arc<Gpu>,
        matmul: &Matmul,
        plan: &MatmulPlan,
        candidate: &AlgorithmCandidate,
    ) -> Result<Option<f64>> {
        let elements = (matmul.m - 1) * matmul.c.stride + matmul.n;
        let allocate = |bytes| gpu.allocate(bytes).ok();
        let copy = allocate(if matmul.add { elements * matmul.output.size() } else { 0 });
        let (Some(copy), Some(workspace)) = (copy, allocate(candidate.workspace.max(1))) else {
            return Ok(None);
        };
        let c = MatrixRef { at: if matmul.add { copy.address() } else { matmul.c.at }, ..matmul.c };
        let trial = Matmul { c, ..*matmul };
        let algorithm = (&candidate.algorithm, workspace.address(), candidate.workspace);
        let call =
            |stream| self.lt.issue_matmul(stream, &trial, &plan.descriptor, plan.layouts.handles, algorithm);
        let run = || gpu.with_flushed_stream(call).is_ok_and(|issued| issued.is_ok());
        if !run() {
            return Ok(None);
        }
        let begin = gpu.record_timed_event()?;
        if !(0..algorithm_search::TIMED_RUNS).all(|_| run()) {
            return Ok(None);
        }
        let end = gpu.record_timed_event()?;
        end.synchronize()?;
        end.seconds_since(&begin)
    }
}
