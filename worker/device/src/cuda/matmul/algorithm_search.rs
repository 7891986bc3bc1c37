//! Finds the fastest of cuBLASLt's algorithms for a matmul, and stores the choice on disk for other
//! processes and later runs ([`AlgorithmSearch`]).
//!
//! Two algorithms may sum in different orders. Processes that share the directory use the same
//! stored choice, whichever process made it. Hosts with other directories may choose differently.
use super::super::bindings::{
    Status,
    cublas_lt_sys::{cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t},
};
use super::super::disk_cache;
use super::super::error::Result;
use super::super::properties::GpuProperties;
use std::{
    fs::{self, File},
    mem::MaybeUninit,
    path::{Path, PathBuf},
};

/// Maximum number of algorithms that are timed for a matmul.
pub(super) const MAX_CANDIDATES: usize = 12;
/// Number of timed runs of each algorithm, after one run that is not timed.
pub(super) const TIMED_RUNS: usize = 4;

/// The first bytes of a cache file that stores which algorithm was chosen for a matmul.
const ALGORITHM_MAGIC: &disk_cache::Magic = b"launch product 1";

/// One of cuBLASLt's algorithms that can compute a certain matmul, with the workspace that it
/// needs.
#[derive(Clone, Copy)]
pub(super) struct AlgorithmCandidate {
    pub(super) algorithm: cublasLtMatmulAlgo_t,
    /// Size in bytes of the workspace that the algorithm needs.
    pub(super) workspace: usize,
}

impl AlgorithmCandidate {
    /// Extracts the algorithm and its workspace size from a result of cuBLASLt's heuristic, or
    /// returns `None` if the result reports an error.
    ///
    /// # Safety
    ///
    /// The library must have written the result.
    pub(super) unsafe fn from_result(result: &MaybeUninit<cublasLtMatmulHeuristicResult_t>) -> Option<Self> {
        let result = result.as_ptr();
        // SAFETY: promised by the caller. The status is read as an integer, because a newer library
        // may return codes that the enum lacks.
        unsafe {
            let status = (&raw const (*result).state).cast::<Status>().read();
            (status == 0)
                .then(|| AlgorithmCandidate { algorithm: (*result).algo, workspace: (*result).workspaceSize })
        }
    }

    /// Returns cuBLASLt's representation of the algorithm as bytes, for storing it in a file.
    fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.algorithm.data)
    }
}

/// Finds the fastest of cuBLASLt's algorithms for matmuls on one GPU, and stores the choices on
/// disk.
pub(super) struct AlgorithmSearch {
    /// Directory of stored choices of algorithms. `None` if choices are not stored.
    directory: Option<PathBuf>,
    /// Name and architecture of the GPU, and version of the library. Choices are stored per
    /// platform.
    platform: String,
}

impl AlgorithmSearch {
    /// Creates an object that finds the fastest matmul algorithms for the GPU `gpu` and caches
    /// these choices as files in `directory`, if given.
    pub(super) fn new(directory: Option<PathBuf>, gpu: &GpuProperties, library_version: usize) -> Self {
        AlgorithmSearch {
            directory,
            platform: format!("{} {} {library_version}", gpu.name, gpu.architecture()),
        }
    }

    /// Returns the fastest of `candidates`, algorithms that can compute the matmul described by
    /// `matmul`. Returns the stored choice if it is among the candidates. Otherwise times the
    /// candidates with `time`, stores the fastest one, and returns it. Returns the first candidate
    /// if none can be timed.
    pub(super) fn find_fastest(
        &self,
        matmul: &str,
        candidates: &[AlgorithmCandidate],
        time: impl Fn(&AlgorithmCandidate) -> Result<Option<f64>>,
    ) -> Result<AlgorithmCandidate> {
        let path = self.directory.as_ref().map(|directory| directory.join(self.compute_file_name(matmul)));
        if let Some(choice) = path.as_deref().and_then(|path| read_stored_choice(path, candidates)) {
            return Ok(choice);
        }
        // One process searches at a time. The others then find its choice, and measurements do not
        // disturb each other.
        let _lock = self.directory.as_deref().and_then(lock_directory);
        if let Some(choice) = path.as_deref().and_then(|path| read_stored_choice(path, candidates)) {
            return Ok(choice);
        }
        let mut best: Option<(f64, AlgorithmCandidate)> = None;
        for candidate in candidates {
            let Some(seconds) = time(candidate)? else { continue };
            if best.is_none_or(|(least, _)| seconds < least) {
                best = Some((seconds, *candidate));
            }
        }
        let Some((_, best)) = best else { return Ok(candidates[0]) };
        if let Some(path) = path {
            // A failure is harmless: the next process searches again.
            let _ = disk_cache::write_cache_file(&path, ALGORITHM_MAGIC, best.as_bytes());
        }
        Ok(best)
    }

    /// Returns the name of the cache file that stores which algorithm was chosen for a matmul on
    /// this GPU with this version of cuBLASLt.
    fn compute_file_name(&self, matmul: &str) -> String {
        let hash = blake3::hash(format!("{}\n{matmul}", self.platform).as_bytes()).to_hex();
        format!("product-{}.algorithm", &hash[..32])
    }
}

/// Locks the cache directory of matmul algorithms against searches by other processes, until the
/// returned file is dropped. Returns `None` if the directory cannot be locked.
fn lock_directory(directory: &Path) -> Option<File> {
    fs::create_dir_all(directory).ok()?;
    let file = File::options().create(true).append(true).open(directory.join("products.lock")).ok()?;
    file.lock().ok()?;
    Some(file)
}

/// Reads the algorithm that is stored in the cache file at `path`, and returns the element of
/// `candidates` that equals it. Returns `None` if the file is invalid or names no candidate.
fn read_stored_choice(path: &Path, candidates: &[AlgorithmCandidate]) -> Option<AlgorithmCandidate> {
    let algorithm = disk_cache::read_cache_file(path, ALGORITHM_MAGIC)?;
    candidates.iter().find(|one| one.as_bytes() == algorithm).copied()
}
