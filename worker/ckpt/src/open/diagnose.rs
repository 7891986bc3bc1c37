//! Diagnoses why a path has no readable checkpoint.
use crate::codec::disk::{Directory, exists};
use crate::error::{CkptError, Diagnosis};
use crate::format_constants::MANIFEST_FILE;
use crate::layout::deepspeed;
use crate::layout::hf::weights;
use crate::layout::native::parse_step_dir_name;
use std::path::Path;

/// Maximum number of subdirectories that are searched for a checkpoint. Further ones are ignored.
const SEARCHED_SUBDIRECTORIES_MAX: usize = 256;
/// Maximum number of subdirectories that a message lists by name. The message counts the others.
const LISTED_CANDIDATES_MAX: usize = 4;
/// Names of files whose presence shows that a directory is a checkpoint or contains checkpoints.
const MARKER_FILES: [&str; 6] =
    [MANIFEST_FILE, "latest", "latest_universal", "trainer_state.json", ".metadata", "random_states_0.pkl"];

/// Diagnoses a directory that no reader recognized as a checkpoint, from the names of its entries.
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

/// Makes the diagnosis of a directory that could not be listed.
fn diagnose_unreadable(error: CkptError) -> Diagnosis {
    match error {
        CkptError::NotACheckpoint { diagnosis, .. } => diagnosis,
        other => Diagnosis::Unreadable(other.to_string()),
    }
}

/// Diagnoses why the directory that `latest` names could not be opened as a checkpoint.
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

/// Searches the subdirectories `names` of `path`, and the subdirectories one level below, for
/// checkpoints. Searches at most [`SEARCHED_SUBDIRECTORIES_MAX`] directories.
fn search_subdirectories(path: &Path, names: &[String]) -> Diagnosis {
    let mut left = SEARCHED_SUBDIRECTORIES_MAX;
    let mut candidates = Vec::new();
    for name in names {
        let directory = path.join(name);
        match probe_for_checkpoint(&directory, &mut left) {
            true => candidates.push(name.clone()),
            false if left > 0 && directory.symlink_metadata().is_ok_and(|m| m.is_dir()) => {
                let inner = Directory::open(&directory).and_then(|f| f.list_names()).unwrap_or_default();
                let inner =
                    inner.iter().find(|inner| probe_for_checkpoint(&directory.join(inner), &mut left));
                candidates.extend(inner.map(|inner| format!("{name}/{inner}")));
            }
            false => {}
        }
    }
    let more = candidates.len().saturating_sub(LISTED_CANDIDATES_MAX);
    candidates.truncate(LISTED_CANDIDATES_MAX);
    match candidates.is_empty() {
        true => Diagnosis::NotRecognized,
        false => Diagnosis::Subdirectories { candidates, more },
    }
}

/// Returns whether `path` is a directory with one of the [`MARKER_FILES`] or a weights file. `left`
/// is the number of directories that may still be searched, and is decremented if `path` is a
/// directory. If `left` is 0, returns false without a search.
fn probe_for_checkpoint(path: &Path, left: &mut usize) -> bool {
    if *left == 0 || !path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
        return false;
    }
    *left -= 1;
    MARKER_FILES.iter().chain(&weights::WEIGHTS_FILES).any(|name| exists(&path.join(name)))
}
