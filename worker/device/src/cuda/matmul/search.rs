//! The fastest of the library's algorithms for a product: timed on the card once, kept on disk for other processes.
//!
//! Two algorithms add in different orders. Processes of one host that share the folder have one choice, whoever made it; others
//! may have others.
use super::super::binding::Heuristic;
use super::super::card::Facts;
use super::super::error::Result;
use super::super::kept;
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

/// Algorithms that are tried for a product.
pub(super) const CANDIDATES: usize = 12;
/// Runs of each that are timed together, after one that isn't.
pub(super) const RUNS: usize = 4;

/// What the file of a choice begins with.
const MAGIC: &kept::Magic = b"launch product 1";

pub(super) struct Search {
    folder: Option<PathBuf>,
    /// Card and library.
    of: String,
}

impl Search {
    pub(super) fn new(folder: Option<PathBuf>, card: &Facts, library: usize) -> Self {
        Search { folder, of: format!("{} {} {library}", card.name, card.arch()) }
    }

    /// The kept choice among the candidates, or the one that takes the least time; the first where none can be timed.
    pub(super) fn fastest(
        &self,
        product: &str,
        candidates: &[Heuristic],
        time: impl Fn(&Heuristic) -> Result<Option<f64>>,
    ) -> Result<Heuristic> {
        let path = self.folder.as_ref().map(|folder| folder.join(self.name(product)));
        if let Some(choice) = path.as_deref().and_then(|path| choice(path, candidates)) {
            return Ok(choice);
        }
        // One process at a time: the others find what it kept, and nobody times beside another.
        let _alone = self.folder.as_deref().and_then(alone);
        if let Some(choice) = path.as_deref().and_then(|path| choice(path, candidates)) {
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
            // A folder that can't be written costs the next process this search, no more.
            let _ = kept::write(&path, MAGIC, best.algorithm.bytes());
        }
        Ok(best)
    }

    fn name(&self, product: &str) -> String {
        let hash = blake3::hash(format!("{}\n{product}", self.of).as_bytes()).to_hex();
        format!("product-{}.algorithm", &hash[..32])
    }
}

/// Waits until no other process searches; nothing where that can't be known.
fn alone(folder: &Path) -> Option<File> {
    fs::create_dir_all(folder).ok()?;
    let file = File::options().create(true).append(true).open(folder.join("products.lock")).ok()?;
    file.lock().ok()?;
    Some(file)
}

/// The candidate that a file names; none where the file isn't whole or names another.
fn choice(path: &Path, candidates: &[Heuristic]) -> Option<Heuristic> {
    let algorithm = kept::read(path, MAGIC)?;
    candidates.iter().find(|one| one.algorithm.bytes() == algorithm).copied()
}
