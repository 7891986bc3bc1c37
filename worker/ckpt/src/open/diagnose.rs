//! Finds the probable reason why a path has no readable checkpoint.
use crate::codec::disk::{Directory, path_exists};
use crate::error::{CkptError, Diagnosis};
use crate::format_constants::MANIFEST_FILE;
use crate::layout::deepspeed;
use crate::layout::hf::weights;
use crate::layout::native::parse_step_dir_name;
use std::path::Path;

/// Maximum number of subdirectories that are searched for a checkpoint. The message states that
/// further ones were not searched.
const SEARCHED_SUBDIRECTORIES_MAX: usize = 256;
/// Maximum number of subdirectories that an error message lists by name. The message counts the
/// others.
const LISTED_CANDIDATES_MAX: usize = 4;
/// Names of files whose presence shows that a directory is a checkpoint or contains checkpoints,
/// such as `manifest.json` or `latest`.
const MARKER_FILES: [&str; 6] =
    [MANIFEST_FILE, "latest", "latest_universal", "trainer_state.json", ".metadata", "random_states_0.pkl"];

/// Finds the probable reason why the directory at `path` cannot be read as a checkpoint, by the
/// names of the files in it.
pub(crate) fn diagnose_directory(path: &Path) -> Diagnosis {
    let names = match Directory::open(path).and_then(|f| f.list_names()) {
        Ok(names) if names.is_empty() => return Diagnosis::Empty,
        Ok(names) => names,
        Err(e) => return diagnose_unreadable(e),
    };
    let has = |name: &str| names.iter().any(|n| n == name);
    let any = |fits: &dyn Fn(&str) -> bool| names.iter().any(|n| fits(n));
    let rng = any(&|n| n.starts_with("rng_state") || n.starts_with("random_states_"));
    match () {
        () if has("pytorch_model_fsdp_0") => Diagnosis::FsdpMetadataMissing,
        () if any(&|n| n.ends_with(".distcp")) => Diagnosis::DcpMetadataMissing,
        () if any(&|n| n.starts_with("pytorch_model_fsdp_rank")) => Diagnosis::FsdpLocalShards,
        () if has("adapter_model.safetensors") || has("adapter_model.bin") => Diagnosis::PeftAdapter,
        () if has("optimizer.pt") || has("optimizer.bin") || has("trainer_state.json") || rng => {
            Diagnosis::WeightsMissing
        }
        () if has("latest") => diagnose_latest(path),
        () if any(&|n| n.ends_with(".ckpt")) => Diagnosis::CkptFiles,
        () if any(&|n| n.starts_with("consolidated.") && n.ends_with(".pth")) => Diagnosis::MetaWeights,
        () if parse_step_dir_name(&path.file_name().unwrap_or_default().to_string_lossy()).is_some() => {
            Diagnosis::ManifestMissing
        }
        () => search_subdirectories(path, &names),
    }
}

/// Returns the diagnosis for a directory whose entries could not be listed because of `error`.
fn diagnose_unreadable(error: CkptError) -> Diagnosis {
    match error {
        CkptError::NotACheckpoint { diagnosis, .. } => diagnosis,
        other => Diagnosis::Unreadable(other.to_string()),
    }
}

/// Finds the reason why the directory that the file `latest` names could not be opened as a
/// checkpoint.
fn diagnose_latest(path: &Path) -> Diagnosis {
    let named = Directory::open(path)
        .and_then(|directory| deepspeed::read_latest(&directory, deepspeed::LATEST_FILE));
    let tag = match named {
        Ok(tag) => tag,
        Err(e) => return diagnose_unreadable(e),
    };
    match path.join(&tag).symlink_metadata() {
        Err(_) => Diagnosis::LatestTargetMissing { tag },
        Ok(m) if m.is_symlink() => Diagnosis::LatestTargetIsSymlink { tag },
        Ok(_) => match Directory::open(&path.join(&tag)).and_then(|directory| directory.list_names()) {
            Ok(_) => Diagnosis::LatestTargetEmpty { tag },
            Err(e) => diagnose_unreadable(e),
        },
    }
}

/// Searches two levels of subdirectories of `path` for checkpoints, beginning with the
/// subdirectories `names`. Searches at most [`SEARCHED_SUBDIRECTORIES_MAX`] directories.
fn search_subdirectories(path: &Path, names: &[String]) -> Diagnosis {
    let mut search = SubdirectorySearch::default();
    let mut candidates = Vec::new();
    for name in names {
        let directory = path.join(name);
        if search.has_markers(&directory) {
            candidates.push(name.clone());
        } else if !search.is_cut && is_directory(&directory) {
            let inner = Directory::open(&directory).and_then(|f| f.list_names()).unwrap_or_default();
            let inner = inner.iter().find(|inner| search.has_markers(&directory.join(inner)));
            candidates.extend(inner.map(|inner| format!("{name}/{inner}")));
        }
    }
    let more = candidates.len().saturating_sub(LISTED_CANDIDATES_MAX);
    candidates.truncate(LISTED_CANDIDATES_MAX);
    let limit = search.is_cut.then_some(SEARCHED_SUBDIRECTORIES_MAX);
    match (candidates.is_empty(), limit) {
        (true, None) => Diagnosis::NotRecognized,
        (true, Some(searched)) => Diagnosis::SearchCut { searched },
        (false, limit) => Diagnosis::Subdirectories { candidates, more, limit },
    }
}

/// A search for checkpoints in subdirectories that inspects at most [`SEARCHED_SUBDIRECTORIES_MAX`]
/// directories.
#[derive(Default)]
struct SubdirectorySearch {
    /// The number of directories that were searched.
    searched: usize,
    /// Whether the search skipped a directory because of the limit.
    is_cut: bool,
}

impl SubdirectorySearch {
    /// Returns true if `path` is a directory that looks like a checkpoint, because it contains one
    /// of the [`MARKER_FILES`] or a weights file. Returns false without a search if the limit is
    /// reached.
    fn has_markers(&mut self, path: &Path) -> bool {
        if self.is_cut || !is_directory(path) {
            return false;
        }
        self.is_cut = self.searched == SEARCHED_SUBDIRECTORIES_MAX;
        self.searched += 1;
        !self.is_cut
            && MARKER_FILES.iter().chain(&weights::WEIGHTS_FILES).any(|name| path_exists(&path.join(name)))
    }
}

/// Returns true if `path` is a directory, and not a symbolic link to one.
fn is_directory(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_was_cut_is_reported() {
        let root = tempfile::tempdir().expect("a directory");
        let create =
            |n: usize| std::fs::create_dir(root.path().join(format!("d{n:03}"))).expect("a directory");
        (0..SEARCHED_SUBDIRECTORIES_MAX).for_each(create);
        assert_eq!(diagnose_directory(root.path()), Diagnosis::NotRecognized);
        create(SEARCHED_SUBDIRECTORIES_MAX);
        let cut = diagnose_directory(root.path());
        assert_eq!(cut, Diagnosis::SearchCut { searched: 256 });
        assert!(cut.to_string().contains("only the first 256"), "{cut}");
        std::fs::write(root.path().join("d000/latest"), "step").expect("a file");
        let found = diagnose_directory(root.path());
        let candidates = vec!["d000".to_owned()];
        assert_eq!(found, Diagnosis::Subdirectories { candidates, more: 0, limit: Some(256) });
        assert!(found.to_string().ends_with("d000; only the first 256 were searched"), "{found}");
    }
}
