//! Matmuls by cuBLASLt. The algorithm for each shape is chosen once, by the library's heuristic or
//! by timing.
//!
//! cuBLASLt is column-major. A row-major matmul is requested as its transpose, with the operands
//! exchanged.
mod algorithm_search;
mod descriptors;
mod prepared;

use super::bindings::{
    Address, Algorithm, CublasLtApi, Handle, Heuristic, MAX_WORKSPACE, MIN_ALIGNMENT, NOT_SUPPORTED, R_BF16,
    R_E4M3, R_E5M2, R_F16, R_F32,
};
use super::context::GpuContext;
use super::error::{CudaError, Result};
use super::library_search::{CudaLibrary, LibraryPaths};
use crate::buffer::Dtype;
use crate::fp8::Fp8Format;
use algorithm_search::AlgorithmSearch;
use descriptors::{AlgorithmPreference, CallPointers, MatmulDescriptor, check};
use prepared::LtHandle;
pub(super) use prepared::PreparedMatmul;
use std::{
    collections::HashMap,
    ffi::c_int,
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// Maximum workspace of a matmul, bytes.
pub const MATMUL_WORKSPACE_BYTES: usize = 32 << 20;
/// Alignment in bytes above which no algorithm is faster.
const MAX_ALIGNMENT: u64 = 256;

/// One matrix of a matmul: its address and layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MatrixRef {
    pub(super) at: Address,
    /// Elements from row to row as stored.
    pub(super) stride: usize,
    /// True if rows and columns are exchanged in memory.
    pub(super) transposed: bool,
}

/// `c[m, n] (=|+=) a[m, k] · b[k, n] (+ bias[n])`, all row-major unless transposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Matmul {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: MatrixRef,
    pub(super) b: MatrixRef,
    pub(super) c: MatrixRef,
    pub(super) inputs: InputFormat,
    pub(super) output: Dtype,
    pub(super) add: bool,
    /// The address of a vector of the output's type.
    pub(super) bias: Option<Address>,
}

/// The element types of the two operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum InputFormat {
    /// Both operands have this type.
    Same(Dtype),
    /// For each operand its fp8 format and the GPU address of its scale. Both operands are
    /// contiguous along `k`: `a` is not transposed, `b` is.
    Fp8([(Fp8Format, Address); 2]),
}

impl Matmul {
    fn key(&self) -> Key {
        let [a, b] = self.inputs.types();
        Key {
            sizes: [self.m, self.n, self.k, self.a.stride, self.b.stride, self.c.stride],
            transposed: [self.a.transposed, self.b.transposed],
            types: [a, b, type_of(self.output)],
            add: self.add,
            alignments: [self.a.at, self.b.at, self.c.at].map(alignment),
            bias: self.bias.map(alignment),
        }
    }

    /// Shape and types for profiles: `matmul 8192 × 4096 × 1024 (bf16 · bf16 → f32)`.
    pub(super) fn describe(&self) -> String {
        let name = |which| match which {
            R_F16 => "f16",
            R_BF16 => "bf16",
            R_E4M3 => "e4m3",
            R_E5M2 => "e5m2",
            _ => "f32",
        };
        let ([a, b], c) = (self.inputs.types().map(name), name(type_of(self.output)));
        let accumulate = if self.add { ", accumulating" } else { "" };
        format!("matmul {} × {} × {} ({a} · {b} → {c}{accumulate})", self.m, self.n, self.k)
    }

    fn call_pointers(&self) -> CallPointers {
        CallPointers { scales: self.inputs.scales(), bias: self.bias }
    }
}

impl InputFormat {
    fn types(self) -> [c_int; 2] {
        match self {
            InputFormat::Same(dtype) => [type_of(dtype); 2],
            InputFormat::Fp8(operands) => operands.map(|(kind, _)| match kind {
                Fp8Format::E4M3 => R_E4M3,
                Fp8Format::E5M2 => R_E5M2,
            }),
        }
    }

    fn scales(self) -> Option<[Address; 2]> {
        match self {
            InputFormat::Same(_) => None,
            InputFormat::Fp8(operands) => Some(operands.map(|(_, scale)| scale)),
        }
    }
}

/// Everything that decides which algorithm is best for a matmul.
///
/// Its `Debug` text is hashed into the names of stored choices: renaming the type or a field
/// discards them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    /// m, n, k, and the strides of `a`, `b` and `c`.
    sizes: [usize; 6],
    transposed: [bool; 2],
    /// Types of `a`, `b` and `c`.
    types: [c_int; 3],
    add: bool,
    /// Alignments of `a`, `b` and `c`, bytes.
    alignments: [u32; 3],
    /// Alignment of the bias, bytes, if there is one.
    bias: Option<u32>,
}

/// What is reused for every matmul of one key: descriptors and the chosen algorithm.
struct MatmulPlan {
    library: Arc<CublasLtApi>,
    descriptor: MatmulDescriptor,
    /// Layouts of cuBLASLt's first and second operand and of the result.
    layouts: [Handle; 3],
    algorithm: Algorithm,
    /// Bytes of workspace that the algorithm needs.
    workspace: usize,
}

// SAFETY: descriptors are only read after they are complete.
unsafe impl Send for MatmulPlan {}
// SAFETY: as for Send.
unsafe impl Sync for MatmulPlan {}

impl Drop for MatmulPlan {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: created by this library, destroyed once.
            let _ = unsafe { (self.library.cublasLtMatrixLayoutDestroy)(layout) };
        }
    }
}

/// An open cuBLASLt and the plans made so far.
pub(super) struct CublasLt {
    lt: Arc<LtHandle>,
    pub(super) path: PathBuf,
    pub(super) version: usize,
    /// Plans by key; `None` where the library has no algorithm.
    plans: Mutex<HashMap<Key, Option<Arc<MatmulPlan>>>>,
    /// Set if algorithms are timed.
    search: OnceLock<AlgorithmSearch>,
}

fn type_of(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::F32 => R_F32,
        Dtype::F16 => R_F16,
        Dtype::Bf16 => R_BF16,
    }
}

/// The largest power of two that divides the address, at most [`MAX_ALIGNMENT`].
fn alignment(at: Address) -> u32 {
    (1u64 << at.trailing_zeros().min(63)).min(MAX_ALIGNMENT) as u32
}

/// The library's version (`13.1.0`) and path. It creates nothing on a GPU.
pub(super) fn library_version(paths: &LibraryPaths) -> Result<(String, PathBuf)> {
    let opened = paths.open(CudaLibrary::CublasLt)?;
    let path = opened.path.clone();
    let library = CublasLtApi::load(opened)?;
    // SAFETY: no preconditions.
    let version = unsafe { (library.cublasLtGetVersion)() };
    Ok((format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100), path))
}

impl CublasLt {
    /// Opens the library. The GPU's context must be current.
    pub(super) fn open(paths: &LibraryPaths) -> Result<CublasLt> {
        let opened = paths.open(CudaLibrary::CublasLt)?;
        let path = opened.path.clone();
        let library = Arc::new(CublasLtApi::load(opened)?);
        let mut handle = ptr::null_mut();
        // SAFETY: no preconditions.
        let version = unsafe { (library.cublasLtGetVersion)() };
        // SAFETY: writes one handle.
        check(&library, "cublasLtCreate", unsafe { (library.cublasLtCreate)(&mut handle) })?;
        let lt = Arc::new(LtHandle { library, handle });
        Ok(CublasLt { lt, path, version, plans: Mutex::default(), search: OnceLock::new() })
    }

    /// From now on, times the algorithms for each new matmul and uses the fastest. Choices are
    /// stored in `directory` for other processes.
    pub(super) fn enable_autotuning(&self, gpu: &GpuContext, directory: Option<PathBuf>) {
        self.search.get_or_init(|| AlgorithmSearch::new(directory, &gpu.properties, self.version));
    }

    /// Enqueues a matmul. `m`, `n` and `k` are above 0.
    pub(super) fn run(&self, gpu: &Arc<GpuContext>, matmul: &Matmul) -> Result<()> {
        gpu.make_current()?; // the heuristic answers for the current GPU
        let plan = self.plan(gpu, matmul)?.ok_or_else(|| CudaError::Call {
            function: "cublasLtMatmulAlgoGetHeuristic".to_owned(),
            status: NOT_SUPPORTED,
            message: format!("no algorithm for {matmul:?}"),
        })?;
        // Freed in the stream's order, after this matmul.
        let workspace = gpu.scratch(plan.workspace.max(1))?;
        let prepared =
            PreparedMatmul { lt: self.lt.clone(), matmul: *matmul, plan, workspace: workspace.at() };
        let direct = prepared.clone();
        gpu.enqueue(|batch| batch.push_matmul(prepared), |stream| direct.issue(stream))
    }

    /// True if the library has an algorithm for this matmul.
    pub(super) fn has_algorithm(&self, gpu: &Arc<GpuContext>, matmul: &Matmul) -> Result<bool> {
        gpu.make_current()?;
        Ok(self.plan(gpu, matmul)?.is_some())
    }

    /// The plan for a matmul, from the earlier ones or new.
    fn plan(&self, gpu: &Arc<GpuContext>, matmul: &Matmul) -> Result<Option<Arc<MatmulPlan>>> {
        let key = matmul.key();
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&key) {
            return Ok(plan.clone());
        }
        let plan = self.create_plan(gpu, matmul, &key)?.map(Arc::new);
        plans.insert(key, plan.clone());
        Ok(plan)
    }

    fn create_plan(&self, gpu: &Arc<GpuContext>, matmul: &Matmul, key: &Key) -> Result<Option<MatmulPlan>> {
        let lt = &self.lt.library;
        let mut plan = MatmulPlan {
            library: lt.clone(),
            descriptor: MatmulDescriptor::new(lt, key.transposed, matmul.call_pointers())?,
            layouts: [ptr::null_mut(); 3],
            algorithm: Algorithm::default(),
            workspace: 0,
        };
        let [m, n, k, a, b, c] = key.sizes;
        let stored = |rows, columns, transposed| if transposed { (columns, rows) } else { (rows, columns) };
        let shapes = [
            (stored(n, k, key.transposed[1]), b, key.types[1]),
            (stored(k, m, key.transposed[0]), a, key.types[0]),
            ((n, m), c, key.types[2]),
        ];
        for (layout, ((rows, columns), stride, dtype)) in plan.layouts.iter_mut().zip(shapes) {
            // SAFETY: writes one handle.
            let status = unsafe {
                (lt.cublasLtMatrixLayoutCreate)(layout, dtype, rows as u64, columns as u64, stride as i64)
            };
            check(lt, "cublasLtMatrixLayoutCreate", status)?;
        }
        let candidates = self.candidates(&plan, key)?;
        let Some(first) = candidates.first() else { return Ok(None) };
        let best = match self.search.get() {
            None => *first,
            Some(search) => {
                let time = |candidate: &Heuristic| self.time(gpu, matmul, &plan, candidate);
                search.fastest(&format!("{key:?}"), &candidates, time)?
            }
        };
        (plan.algorithm, plan.workspace) = (best.algorithm, best.workspace);
        Ok(Some(plan))
    }

    /// The algorithms that the library suggests, best guess first.
    fn candidates(&self, plan: &MatmulPlan, key: &Key) -> Result<Vec<Heuristic>> {
        let lt = &self.lt.library;
        let preference = AlgorithmPreference::new(lt)?;
        preference.set(MAX_WORKSPACE, &(MATMUL_WORKSPACE_BYTES as u64).to_ne_bytes())?;
        let [a, b, c] = key.alignments;
        for (attribute, bytes) in (MIN_ALIGNMENT..).zip([b, a, c, c]) {
            preference.set(attribute, &bytes.to_ne_bytes())?;
        }
        let requested = if self.search.get().is_some() { algorithm_search::MAX_CANDIDATES } else { 1 };
        let (mut candidates, mut count) = (vec![Heuristic::default(); requested], 0);
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
                candidates.as_mut_ptr(),
                &mut count,
            )
        };
        if status == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check(lt, "cublasLtMatmulAlgoGetHeuristic", status)?;
        candidates.truncate(usize::try_from(count).unwrap_or(0));
        candidates.retain(|one| one.state == 0 && one.workspace <= MATMUL_WORKSPACE_BYTES);
        Ok(candidates)
    }

    /// Seconds of some runs of a matmul with this algorithm; `None` if it fails, or if there is no
    /// memory to try it. A result that is added to keeps its content. Otherwise the content is
    /// unspecified afterwards.
    fn time(
        &self,
        gpu: &Arc<GpuContext>,
        matmul: &Matmul,
        plan: &MatmulPlan,
        candidate: &Heuristic,
    ) -> Result<Option<f64>> {
        let elements = (matmul.m - 1) * matmul.c.stride + matmul.n;
        let allocate = |bytes| gpu.allocate(bytes).ok();
        let copy = allocate(if matmul.add { elements * matmul.output.size() } else { 0 });
        let (Some(copy), Some(workspace)) = (copy, allocate(candidate.workspace.max(1))) else {
            return Ok(None);
        };
        let c = MatrixRef { at: if matmul.add { copy.at() } else { matmul.c.at }, ..matmul.c };
        let trial = Matmul { c, ..*matmul };
        let algorithm = (&candidate.algorithm, workspace.at(), candidate.workspace);
        let call = |stream| self.lt.call(stream, &trial, &plan.descriptor, plan.layouts, algorithm);
        let run = || gpu.with_stream(call).is_ok_and(|status| status == 0);
        if !run() {
            return Ok(None);
        }
        let begin = gpu.record_timed()?;
        if !(0..algorithm_search::RUNS).all(|_| run()) {
            return Ok(None);
        }
        let end = gpu.record_timed()?;
        end.synchronize()?;
        end.seconds_since(&begin)
    }
}
