//! [`AlgorithmSearch`]: finds the fastest of cuBLASLt's algorithms for a matmul, and stores the
//! choice on disk for other processes.
//!
//! Two algorithms may add in different orders. Processes of one host that share the directory use
//! the same choice, whoever made it. Other hosts may choose differently.
use super::super::bindings::Heuristic;
use super::super::disk_cache;
use super::super::error::Result;
use super::super::properties::GpuProperties;
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

/// Maximum number of algorithms that are timed for a matmul.
pub(super) const MAX_CANDIDATES: usize = 12;
/// Timed runs of each algorithm, after one run that is not timed.
pub(super) const RUNS: usize = 4;

/// The first bytes of a stored choice.
const MAGIC: &disk_cache::Magic = b"launch product 1";

/// The search for fastest algorithms on one GPU.
pub(super) struct AlgorithmSearch {
    /// The directory of stored choices, if there is one.
    directory: Option<PathBuf>,
    /// GPU and library version. Choices are stored per platform.
    platform: String,
}

impl AlgorithmSearch {
    pub(super) fn new(directory: Option<PathBuf>, gpu: &GpuProperties, library_version: usize) -> Self {
        AlgorithmSearch {
            directory,
            platform: format!("{} {} {library_version}", gpu.name, gpu.architecture()),
        }
    }

    /// The stored choice, if it is among the candidates, otherwise the candidate that takes the
    /// least time. The first candidate if none can be timed.
    pub(super) fn fastest(
        &self,
        matmul: &str,
        candidates: &[Heuristic],
        time: impl Fn(&Heuristic) -> Result<Option<f64>>,
    ) -> Result<Heuristic> {
        let path = self.directory.as_ref().map(|directory| directory.join(self.file_name(matmul)));
        if let Some(choice) = path.as_deref().and_then(|path| stored_choice(path, candidates)) {
            return Ok(choice);
        }
        // One process searches at a time. The others then find its choice, and measurements do not
        // disturb each other.
        let _lock = self.directory.as_deref().and_then(lock);
        if let Some(choice) = path.as_deref().and_then(|path| stored_choice(path, candidates)) {
            return Ok(choice);
        }
        let mut best: Option<(f64, Heuristic)> = None;
        for candidate in candidates {
            let Some(seconds) = time(candidate)? else { continue };
            if best.is_none_or(|(least, _)| seconds < least) {
                best = Some((seconds, *candidate));
            }
        }
        let Some((_, best)) = best else { return Ok(candidates[0]) };
        if let Some(path) = path {
            // A failure is harmless: the next process searches again.
            let _ = disk_cache::write(&path, MAGIC, best.algorithm.bytes());
        }
        Ok(best)
    }

    fn file_name(&self, matmul: &str) -> String {
        let hash = blake3::hash(format!("{}\n{matmul}", self.platform).as_bytes()).to_hex();
        format!("product-{}.algorithm", &hash[..32])
    }
}

/// Locks the directory against searches of other processes; `None` if it cannot be locked.
fn lock(directory: &Path) -> Option<File> {
    fs::create_dir_all(directory).ok()?;
    let file = File::options().create(true).append(true).open(directory.join("products.lock")).ok()?;
    file.lock().ok()?;
    Some(file)
}

/// The candidate that a stored choice names, if the file is valid.
fn stored_choice(path: &Path, candidates: &[Heuristic]) -> Option<Heuristic> {
    let algorithm = disk_cache::read(path, MAGIC)?;
    candidates.iter().find(|one| one.algorithm.bytes() == algorithm).copied()
}
