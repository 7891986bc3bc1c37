//! [`Diagnosis`]: the probable reason why a path has no readable checkpoint, with advice.
use crate::checkpoint_dir::parse_step_dir_name;
use crate::disk::{Directory, exists};
use crate::error::CkptError;
use crate::formats::deepspeed;
use crate::formats::weights;
use crate::manifest::MANIFEST_FILE;
use diagnostic::Code;
use diagnostic::codes::checkpoint as codes;
use std::path::Path;

/// Maximum number of subdirectories that are searched for a checkpoint. Further ones are ignored.
const SEARCHED_SUBDIRECTORIES_MAX: usize = 256;
/// Maximum number of subdirectories that a message lists by name. The message counts the others.
const LISTED_CANDIDATES_MAX: usize = 4;
/// Names of files whose presence shows that a directory is a checkpoint or contains checkpoints.
const MARKER_FILES: [&str; 6] =
    [MANIFEST_FILE, "latest", "latest_universal", "trainer_state.json", ".metadata", "random_states_0.pkl"];

/// The probable reason why a path has no readable checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Diagnosis {
    /// The directory has no entries.
    #[error("the directory is empty")]
    Empty,
    /// The path is a file, but a directory is expected.
    #[error("not a directory")]
    NotADirectory,
    /// The path is a file without the extension of a weights file.
    #[error("the file name does not end in .safetensors, .bin, .pt or .pth")]
    NotAWeightsFile,
    /// The directory has the name of a native checkpoint, but lacks a manifest.
    #[error("{MANIFEST_FILE} is missing: a save or a removal was interrupted")]
    ManifestMissing,
    /// FSDP's directory of sharded weights lacks `.metadata`.
    #[error(
        "pytorch_model_fsdp_0 has no .metadata: the save was interrupted, or the hidden file was not copied"
    )]
    FsdpMetadataMissing,
    /// A torch distributed checkpoint, with files `*.distcp`, lacks `.metadata`.
    #[error(
        "the directory has .distcp files without .metadata: the save was interrupted, or the hidden file was not copied"
    )]
    DcpMetadataMissing,
    /// The directory has FSDP's local shards. Only the program that wrote these shards can read
    /// them, on the same number of ranks.
    #[error(
        "the directory has FSDP local shards (LOCAL_STATE_DICT), which only the same program on as many ranks can read"
    )]
    FsdpLocalShards,
    /// A PEFT adapter without its base model.
    #[error("the directory is a PEFT adapter without its base model")]
    PeftAdapter,
    /// A checkpoint directory of HF Trainer or Accelerate without weights.
    #[error(
        "a checkpoint of HF Trainer or Accelerate without weights: no model.safetensors, pytorch_model.bin, FSDP or DeepSpeed directory"
    )]
    WeightsMissing,
    /// The directory that `latest` names does not exist.
    #[error("`latest` names {tag}, which does not exist")]
    LatestTargetMissing {
        /// The name in `latest`.
        tag: String,
    },
    /// `latest` names a symbolic link, which is not followed.
    #[error("`latest` names {tag}, a symbolic link, which is not followed")]
    LatestTargetIsSymlink {
        /// The name in `latest`.
        tag: String,
    },
    /// The directory that `latest` names has no DeepSpeed files.
    #[error("`latest` names {tag}, which has no DeepSpeed files")]
    LatestTargetEmpty {
        /// The name in `latest`.
        tag: String,
    },
    /// The directory has no DeepSpeed tag.
    #[error("the directory has no DeepSpeed tag")]
    NoTag,
    /// The directory has `.ckpt` files, as PyTorch Lightning and other programs write them.
    #[error("the directory has .ckpt files, a format that is not supported")]
    CkptFiles,
    /// The directory has Llama weights in the format in which Meta distributes them.
    #[error("the directory has weights in Meta's format (consolidated.*.pth), which is not supported")]
    MetaWeights,
    /// The directory is not a checkpoint, but some of its subdirectories may be checkpoints.
    #[error("the directory has no checkpoint, but these subdirectories may: {}", format_candidates(candidates, *more))]
    Subdirectories {
        /// Paths of the first subdirectories that may be checkpoints, relative to the directory.
        candidates: Vec<String>,
        /// Number of further subdirectories that may be checkpoints.
        more: usize,
    },
    /// The directory has many checkpoints, and the newest of them cannot be opened.
    #[error(
        "the newest {tried} of {total} checkpoints in the directory cannot be opened, and older ones were not tried; the newest: {error}"
    )]
    NewestUnreadable {
        /// Number of checkpoints that were tried.
        tried: usize,
        /// Number of checkpoints in the directory.
        total: usize,
        /// The message of the newest checkpoint's error.
        error: String,
    },
    /// The directory lacks the files by which HF Trainer's and Accelerate's checkpoints are
    /// recognized.
    #[error("the directory is of neither HF Trainer nor Accelerate: no trainer_state.json, no RNG states")]
    NoTrainerState,
    /// The name of the directory is not valid UTF-8.
    #[error("the directory name is not valid UTF-8")]
    NameNotUtf8,
    /// No entry of the directory belongs to a known format.
    #[error(
        "no {MANIFEST_FILE}, no step-* directories, no DeepSpeed state, no weights (model.safetensors, pytorch_model.bin, .metadata)"
    )]
    NotRecognized,
    /// The directory cannot be read. The field is the message of the I/O error.
    #[error("{0}")]
    Unreadable(String),
}

impl Diagnosis {
    /// Returns the stable code of this diagnosis.
    pub fn code(&self) -> Code {
        use Diagnosis::*;
        match self {
            Empty => codes::CHECKPOINT_DIRECTORY_EMPTY,
            NewestUnreadable { .. } => codes::CHECKPOINT_NEWEST_UNREADABLE,
            ManifestMissing => codes::CHECKPOINT_MANIFEST_MISSING,
            FsdpMetadataMissing | DcpMetadataMissing => codes::DCP_METADATA_MISSING,
            PeftAdapter => codes::CHECKPOINT_IS_ADAPTER,
            WeightsMissing => codes::CHECKPOINT_WEIGHT_MISSING,
            LatestTargetMissing { .. } | LatestTargetIsSymlink { .. } | LatestTargetEmpty { .. } => {
                codes::CHECKPOINT_LATEST_DANGLING
            }
            FsdpLocalShards | CkptFiles | MetaWeights => codes::CHECKPOINT_FORMAT_UNSUPPORTED,
            NotADirectory
            | NotAWeightsFile
            | NoTag
            | NoTrainerState
            | NameNotUtf8
            | Subdirectories { .. }
            | NotRecognized => codes::CHECKPOINT_NOT_RECOGNIZED,
            Unreadable(_) => codes::CHECKPOINT_IO_FAILED,
        }
    }

    /// Returns advice on how to get a readable checkpoint. Returns `None` for a diagnosis without
    /// advice.
    pub fn help(&self) -> Option<String> {
        use Diagnosis::*;
        Some(match self {
            ManifestMissing => "use another checkpoint".into(),
            FsdpMetadataMissing | DcpMetadataMissing => {
                "copy the hidden file .metadata too, or use another checkpoint".into()
            }
            FsdpLocalShards => "save with a sharded or full state dict".into(),
            PeftAdapter => "merge the adapter into its base model first".into(),
            WeightsMissing => "copy the missing files, or run `launch ckpt repair`".into(),
            LatestTargetMissing { tag } => format!("restore {tag}, or use another checkpoint"),
            LatestTargetIsSymlink { .. } => "give the path of the directory that the link points to".into(),
            LatestTargetEmpty { .. } => "use another checkpoint".into(),
            MetaWeights => "convert the weights to the Hugging Face format first".into(),
            Subdirectories { .. } => "give the path of one checkpoint".into(),
            NewestUnreadable { .. } => "give the path of an older checkpoint".into(),
            _ => return None,
        })
    }
}

/// Formats `candidates` as a list with commas. Appends "and N more" if `more` is not 0.
fn format_candidates(candidates: &[String], more: usize) -> String {
    match more {
        0 => candidates.join(", "),
        more => format!("{} and {more} more", candidates.join(", ")),
    }
}

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
