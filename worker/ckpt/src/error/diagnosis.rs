//! [`Diagnosis`]: the probable reason why a path contains no readable checkpoint, with advice.
use crate::format_constants::MANIFEST_FILE;
use diagnostic::Code;
use diagnostic::codes::checkpoint as codes;

/// The probable reason why a path contains no readable checkpoint.
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
    #[error(
        "the directory has no checkpoint, but these subdirectories may: {}{}",
        format_candidates(candidates, *more),
        limit.map_or_else(String::new, |limit| format!("; only the first {limit} were searched"))
    )]
    Subdirectories {
        /// Paths of the first subdirectories that may be checkpoints, relative to the directory.
        candidates: Vec<String>,
        /// Number of further subdirectories that may be checkpoints.
        more: usize,
        /// Number of subdirectories that were searched, or `None` if all of them were searched.
        limit: Option<usize>,
    },
    /// Neither the directory nor the subdirectories that were searched have a checkpoint. The
    /// directory has more subdirectories than are searched.
    #[error(
        "no checkpoint was found in the directory; only the first {searched} subdirectories were searched"
    )]
    SearchCut {
        /// Number of subdirectories that were searched.
        searched: usize,
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
    /// Returns the stable code of this diagnosis, which `launch explain` documents.
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
            | SearchCut { .. }
            | NotRecognized => codes::CHECKPOINT_NOT_RECOGNIZED,
            Unreadable(_) => codes::CHECKPOINT_IO_FAILED,
        }
    }

    /// Returns advice on how to get a readable checkpoint, or `None` if there is none for this
    /// diagnosis.
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
            Subdirectories { .. } | SearchCut { .. } => "give the path of one checkpoint".into(),
            NewestUnreadable { .. } => "give the path of an older checkpoint".into(),
            _ => return None,
        })
    }
}

/// Joins the names of directories or files in which a checkpoint was found with commas. Appends
/// "and N more" if `more` is not 0.
fn format_candidates(candidates: &[String], more: usize) -> String {
    match more {
        0 => candidates.join(", "),
        more => format!("{} and {more} more", candidates.join(", ")),
    }
}
