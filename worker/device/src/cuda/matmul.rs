//! Matmuls on a GPU by cuBLASLt. The algorithm for each shape is chosen once, by the library's
//! heuristic or by timing.
//!
//! cuBLASLt is column-major. A row-major matmul is requested as its transpose, with the operands
//! exchanged.
mod algorithm_search;
mod descriptors;
mod plan_report;
pub(super) mod prepared;
mod request;

use super::bindings::{
    CublasLtApi,
    cublas_lt_sys::{cublasLtMatmulAlgo_t, cublasLtMatmulPreferenceAttributes_t, cublasStatus_t},
};
use super::error::{CudaError, Result};
use super::gpu::Gpu;
use super::library_search::LibrarySearchPaths;
use algorithm_search::{AlgorithmCandidate, AlgorithmSearch};
use descriptors::{AlgorithmPreference, MatmulDescriptor};
pub use plan_report::MatmulPlanReport;
use plan_report::query_attributes;
use prepared::{LtHandle, MatmulPlan, PreparedMatmul};
use request::Key;
pub(super) use request::{InputFormat, Matmul, MatrixRef};
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
/// The opened cuBLASLt library, and the plans of matmuls that were created so far.
pub(super) struct CublasLt {
    lt: Arc<LtHandle>,
    pub(super) path: PathBuf,
    pub(super) version: usize,
    /// The plans of matmuls (algorithm and descriptors), by the key of the matmul. The value is
    /// `None` where the library has no algorithm.
    plans: Mutex<HashMap<Key, Option<Arc<MatmulPlan>>>>,
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
        let lt = Arc::new(LtHandle { library: Arc::new(library), handle });
        Ok(CublasLt { lt, path, version, plans: Mutex::default(), search: OnceLock::new() })
    }

    /// Enables autotuning: from now on, the algorithms for each new matmul are timed, and the
    /// fastest is used. Choices are stored in `directory` for other processes.
    pub(super) fn enable_autotuning(&self, gpu: &Gpu, directory: Option<PathBuf>) {
        self.search.get_or_init(|| AlgorithmSearch::new(directory, &gpu.properties, self.version));
    }

    /// Enqueues a matmul on this thread's stream. `m`, `n` and `k` must be above 0. Fails if the
    /// library has no algorithm for the matmul.
    pub(super) fn enqueue(&self, gpu: &Arc<Gpu>, matmul: &Matmul) -> Result<()> {
        gpu.make_current()?; // the heuristic answers for the current GPU
        let plan = self.get_or_create_plan(gpu, matmul)?.ok_or_else(|| CudaError::Call {
            function: "cublasLtMatmulAlgoGetHeuristic".to_owned(),
            status: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as c_int,
            message: format!("no algorithm for {matmul:?}"),
        })?;
        // Freed in the stream's order, after this matmul.
        let workspace = gpu.allocate_scratch(plan.workspace.max(1))?;
        matmul.log();
        let prepared =
            PreparedMatmul { lt: self.lt.clone(), matmul: *matmul, plan, workspace: workspace.address() };
        let direct = prepared.clone();
        gpu.enqueue(|batch| batch.push_matmul(prepared), |stream| direct.issue(stream))
    }

    /// Returns true if the library has an algorithm for this matmul.
    pub(super) fn has_algorithm(&self, gpu: &Arc<Gpu>, matmul: &Matmul) -> Result<bool> {
        gpu.make_current()?;
        Ok(self.get_or_create_plan(gpu, matmul)?.is_some())
    }

    /// Returns the plan (algorithm and descriptors) for a matmul, which is created and stored at
    /// the first request. Returns `None` if the library has no algorithm.
    fn get_or_create_plan(&self, gpu: &Arc<Gpu>, matmul: &Matmul) -> Result<Option<Arc<MatmulPlan>>> {
        let key = matmul.plan_key();
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&key) {
            return Ok(plan.clone());
        }
        let plan = self.create_plan(gpu, matmul, &key)?.map(Arc::new);
        plans.insert(key, plan.clone());
        Ok(plan)
    }

    /// Reports the algorithm of each matmul that was requested so far, ordered by the text of the
    /// matmul.
    pub(super) fn describe_plans(&self) -> Vec<MatmulPlanReport> {
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let describe = |(key, plan): (&Key, &Option<Arc<MatmulPlan>>)| MatmulPlanReport {
            matmul: format!("{key:?}"),
            algorithm: plan.as_ref().map(|plan| query_attributes(&self.lt.library, &plan.algorithm)),
            workspace_bytes: plan.as_ref().map_or(0, |plan| plan.workspace),
        };
        let mut reports: Vec<_> = plans.iter().map(describe).collect();
        reports.sort_by(|a, b| a.matmul.cmp(&b.matmul));
        reports
    }

    /// Creates the plan (algorithm and descriptors) for a matmul. Times the algorithms if
    /// autotuning is enabled. Returns `None` if the library has no algorithm.
    fn create_plan(&self, gpu: &Arc<Gpu>, matmul: &Matmul, key: &Key) -> Result<Option<MatmulPlan>> {
        let lt = &self.lt.library;
        let mut plan = MatmulPlan {
            library: lt.clone(),
            descriptor: MatmulDescriptor::new(lt, key.transposed, matmul.call_pointers())?,
            layouts: [ptr::null_mut(); 3],
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
        };
        let ([m, n, k, a, b, c], [a_type, b_type, c_type]) = (key.sizes, matmul.cuda_types());
        let stored = |rows, columns, transposed| if transposed { (columns, rows) } else { (rows, columns) };
        let shapes = [
            (stored(n, k, key.transposed[1]), b, b_type),
            (stored(k, m, key.transposed[0]), a, a_type),
            ((n, m), c, c_type),
        ];
        for (layout, ((rows, columns), stride, dtype)) in plan.layouts.iter_mut().zip(shapes) {
            // SAFETY: writes one handle.
            unsafe {
                lt.cublasLtMatrixLayoutCreate(layout, dtype, rows as u64, columns as u64, stride as i64)
            }?;
        }
        let candidates = self.query_candidates(&plan, key)?;
        let Some(first) = candidates.first() else { return Ok(None) };
        let best = match self.search.get() {
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

    /// Returns the algorithms that cuBLASLt's heuristic suggests for a matmul, best guess first.
    fn query_candidates(&self, plan: &MatmulPlan, key: &Key) -> Result<Vec<AlgorithmCandidate>> {
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
        let requested = if self.search.get().is_some() { algorithm_search::MAX_CANDIDATES } else { 1 };
        let (mut candidates, mut count) = (vec![MaybeUninit::uninit(); requested], 0);
        let [first, second, result] = plan.layouts;
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
        if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as c_int {
            return Ok(Vec::new());
        }
        lt.check_status("cublasLtMatmulAlgoGetHeuristic", status)?;
        let candidates = candidates.iter().take(usize::try_from(count).unwrap_or(0));
        // SAFETY: the library has written the first `count` results.
        let candidates = candidates.filter_map(|result| unsafe { AlgorithmCandidate::from_result(result) });
        Ok(candidates.filter(|one| one.workspace <= MATMUL_WORKSPACE_BYTES).collect())
    }

    /// Runs a matmul several times with the algorithm `candidate`, and returns the seconds of all
    /// timed runs together. Returns `None` if the algorithm fails, or if there is no memory to try
    /// it.
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
        let call = |stream| self.lt.issue_matmul(stream, &trial, &plan.descriptor, plan.layouts, algorithm);
        let run = || gpu.with_stream(call).is_ok_and(|issued| issued.is_ok());
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
