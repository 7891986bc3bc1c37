//! Converts a [`CkptError`] to a [`Diagnostic`], the form in which users see errors: with a code,
//! fields and help texts.
use super::ckpt_error::CkptError;
use super::damage::{Damage, DamageReason};
use super::manifest::ManifestError;
use super::missing_part::MissingPart;
use super::options::{OptionProblem, OutputProblem};
use super::torch_file::TorchFileError;
use super::unsupported_feature::UnsupportedFeature;
use crate::format_constants::MEMORY_STORE_NAME;
use diagnostic::codes::checkpoint as codes;
use diagnostic::quantity::format_bytes;
use diagnostic::{Code, Diagnostic};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use std::io;
use std::path::Path;

impl CkptError {
    /// Returns the stable code of this error, which `launch explain` documents.
    pub fn code(&self) -> Code {
        use CkptError::*;
        match self {
            NotFound { .. } => codes::CHECKPOINT_NOT_FOUND,
            NotACheckpoint { diagnosis, .. } => diagnosis.code(),
            Damaged { damage, .. } => damage.reason.code(),
            Missing { part, .. } => part.code(),
            ShardsOnOtherHosts { .. } => codes::CHECKPOINT_SHARDS_ON_OTHER_HOSTS,
            FetchFailed { .. } => codes::CHECKPOINT_FETCH_FAILED,
            ModelMismatch { .. } => codes::CHECKPOINT_MODEL_MISMATCH,
            NoSuchTensor { .. } => codes::CHECKPOINT_TENSOR_MISSING,
            RangeOutsideTensor { .. } => codes::CHECKPOINT_TENSOR_TOO_SHORT,
            Unsupported { feature, .. } => feature.code(),
            InsufficientSpace { .. } => codes::CHECKPOINT_SPACE_INSUFFICIENT,
            TooManyFiles { .. } => codes::CHECKPOINT_FILES_TOO_MANY,
            DirectoryBusy { .. } => codes::CHECKPOINT_DIRECTORY_BUSY,
            InvalidSave(_) => codes::CHECKPOINT_SAVE_INVALID,
            InvalidOption { .. } => codes::CHECKPOINT_OPTION_INVALID,
            Internal { .. } => diagnostic::codes::run::INTERNAL,
            OutputRejected { problem, .. } => problem.code(),
            ValueOverflow { .. } => codes::CHECKPOINT_VALUE_OVERFLOW,
            Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull => codes::CHECKPOINT_DISK_FULL,
                io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                    codes::CHECKPOINT_LIMIT_EXCEEDED
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    codes::CHECKPOINT_PERMISSION_DENIED
                }
                _ => codes::CHECKPOINT_IO_FAILED,
            },
        }
    }

    /// Returns texts that advise the user what to do about this error, such as the command that
    /// lists all damaged files of the checkpoint. The list is empty if no general advice exists for
    /// this error.
    pub fn help(&self) -> Vec<String> {
        use CkptError::*;
        let text = match self {
            NotACheckpoint { diagnosis, .. } => return diagnosis.help().into_iter().collect(),
            Damaged { path, .. } | Missing { path, .. } => {
                return vec![
                    format!("run `launch ckpt verify {}` to list every problem", path.display()),
                    "restore the files, run `launch ckpt repair`, or use another checkpoint".to_owned(),
                ];
            }
            ShardsOnOtherHosts { .. } => Some(
                "copy these files into the directory, or resume a job that has these hosts; it gathers \
                 the weights at its end",
            ),
            InsufficientSpace { .. } => Some("free space, or write to another disk"),
            TooManyFiles { .. } => Some("remove other files, or give the path of one checkpoint"),
            DirectoryBusy { .. } => Some("wait for the other process, end it, or use another directory"),
            OutputRejected { problem, .. } => problem.help(),
            InvalidOption { problem: OptionProblem::NoAdapters { .. } } => Some("omit `--merge-lora`"),
            InvalidOption { problem: OptionProblem::SourceWorldSize { .. } } => {
                Some("give the number of ranks of the result with `--world-size`")
            }
            ValueOverflow { .. } => Some("use a wider dtype: bf16 or fp32"),
            Unsupported { feature: UnsupportedFeature::FormatVersion { .. }, .. } => {
                Some("use the version of launch that wrote the checkpoint, or a newer one")
            }
            Unsupported { feature: UnsupportedFeature::RngReconcile(error), .. } => error.help(),
            Unsupported { feature: UnsupportedFeature::Convert(error), .. } => error.help(),
            Io { path, source, .. } if source.kind() == io::ErrorKind::FileTooLarge => {
                return vec![format_file_size_help(path)];
            }
            Io { source, .. } => io_error_help(source),
            _ => None,
        };
        text.map(str::to_owned).into_iter().collect()
    }
}

/// Returns advice for an error of the operating system that users often meet, such as a full disk.
/// Returns `None` for other errors.
fn io_error_help(error: &io::Error) -> Option<&'static str> {
    Some(match error.kind() {
        io::ErrorKind::StorageFull => {
            "free space, or lower `checkpoint.keep`; earlier checkpoints are intact"
        }
        io::ErrorKind::QuotaExceeded => {
            "raise the limit, or use another directory; earlier checkpoints are intact"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "give this user access, or use another directory"
        }
        io::ErrorKind::NotADirectory => "a file has the name of a directory in this path; rename the file",
        _ => return None,
    })
}

/// Formats the advice for a write to the file `path` that exceeded the limit of file sizes of this
/// process or of the file system.
fn format_file_size_help(path: &Path) -> String {
    let limit = read_file_size_limit().map(format_bytes);
    match limit {
        // each copy begins at an offset of whole TiB in the memory file
        Some(limit) if path == Path::new(MEMORY_STORE_NAME) => format!(
            "run `ulimit -f unlimited`, which `checkpoint.memory` needs (the limit of file sizes is {limit}), \
             or remove `checkpoint.memory`"
        ),
        Some(limit) => format!(
            "raise the limit of file sizes (`ulimit -f`), which is {limit}; earlier checkpoints are intact"
        ),
        None => "use a file system that allows larger files; earlier checkpoints are intact".to_owned(),
    }
}

/// Returns the limit of file sizes of this process (`ulimit -f`) in bytes, or `None` without a
/// limit.
fn read_file_size_limit() -> Option<u64> {
    let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE).ok()?;
    (limit != RLIM_INFINITY).then_some(limit)
}

impl MissingPart {
    /// Returns the stable code of the error that reports this missing part of a checkpoint.
    fn code(&self) -> Code {
        match self {
            MissingPart::LatestTarget { .. } => codes::CHECKPOINT_LATEST_DANGLING,
            MissingPart::Weights(_) => codes::CHECKPOINT_WEIGHT_MISSING,
            MissingPart::RngFile { .. } | MissingPart::AllRngFiles => codes::RNG_STATE_MISSING,
            _ => codes::CHECKPOINT_SHARD_MISSING,
        }
    }
}

impl DamageReason {
    /// Returns the stable code of the error that reports a file with this kind of damage.
    pub fn code(&self) -> Code {
        use DamageReason::*;
        match self {
            FileMissing => codes::CHECKPOINT_SHARD_MISSING,
            PartMissing(part) => part.code(),
            NotACheckpoint(diagnosis) => diagnosis.code(),
            SizeMismatch { .. } | Truncated => codes::CHECKPOINT_FILE_TRUNCATED,
            TooLarge { .. } => codes::CHECKPOINT_FILE_TOO_LARGE,
            TooManyTensors { .. } | TensorsExceedFiles { .. } => codes::CHECKPOINT_CONTENT_TOO_LARGE,
            NotRegularFile | NotADirectory { .. } | OutsideDirectory => codes::CHECKPOINT_FILE_NOT_REGULAR,
            HashMismatch | RecordMismatch { .. } | ReadBackMismatch { .. } => codes::CHECKPOINT_HASH_MISMATCH,
            CrcMismatch { .. } => codes::ZIP_CRC_MISMATCH,
            Manifest(ManifestError::HashMismatch) => codes::CHECKPOINT_HASH_MISMATCH,
            Manifest(_) => codes::CHECKPOINT_MANIFEST_INVALID,
            Safetensors(_) => codes::SAFETENSORS_HEADER_INVALID,
            TorchFile(TorchFileError::Pickle(error)) => error.code(),
            TorchFile(TorchFileError::Zip(_)) => codes::ZIP_INVALID,
            TorchFile(_) => codes::TORCH_FILE_INVALID,
            Dcp(_) => codes::DCP_METADATA_INVALID,
            DeepSpeed(error) => error.code(),
            Optimizer(_) => codes::OPTIMIZER_STATE_INVALID,
            Adapter(error) => error.code(),
            Name(_) | Coverage(_) => codes::CHECKPOINT_DAMAGED,
            Json(_) => codes::CHECKPOINT_JSON_INVALID,
            Read(_) => codes::CHECKPOINT_IO_FAILED,
            RngState(_) => codes::RNG_STATE_INVALID,
            RngFiles(_) => codes::RNG_FILES_INCONSISTENT,
            TensorMissing { .. } => codes::CHECKPOINT_TENSOR_MISSING,
            UnexpectedFile | Changed | HeaderMismatch { .. } | StepMismatch { .. } | Inconsistent(_) => {
                codes::CHECKPOINT_DAMAGED
            }
        }
    }
}

impl UnsupportedFeature {
    /// Returns the stable code of the error that reports this unsupported property of a checkpoint.
    fn code(&self) -> Code {
        use UnsupportedFeature::*;
        match self {
            FormatVersion { .. } => codes::CHECKPOINT_VERSION_UNSUPPORTED,
            Dtype { .. } | NotFloat { .. } => codes::CHECKPOINT_DTYPE_UNSUPPORTED,
            ModelParallelism { .. } => codes::CHECKPOINT_PARALLELISM_UNSUPPORTED,
            RngReconcile(error) => error.code(),
            SchedulerRescale(_) => codes::SCHEDULER_RESCALE_UNSUPPORTED,
            Convert(error) => error.code(),
            Adapter(error) => error.code(),
            NotAnAdapterTensor { .. } | Other(_) => codes::CHECKPOINT_UNSUPPORTED,
        }
    }
}

impl OutputProblem {
    /// Returns the stable code of the error that rejects an output path with this problem.
    fn code(&self) -> Code {
        match self {
            OutputProblem::InsideInput | OutputProblem::NoName => codes::CHECKPOINT_OUTPUT_INVALID,
            _ => codes::CHECKPOINT_OUTPUT_EXISTS,
        }
    }

    /// Returns advice for the user whose output path was rejected because of this problem.
    fn help(&self) -> Option<&'static str> {
        Some(match self {
            OutputProblem::NeedsForce { .. } => "add `--force` to replace the directory",
            OutputProblem::InsideInput => "write to a directory outside of the checkpoint",
            _ => "move or remove it, or give another output path",
        })
    }
}

impl From<&CkptError> for Diagnostic {
    fn from(error: &CkptError) -> Diagnostic {
        use CkptError::*;
        let diagnostic = Diagnostic::error(error.code(), error.to_string());
        // a detail of the error may determine the code, but only the error's variant determines
        // the category
        let diagnostic = match error {
            e if e.is_checkpoint_at_fault() => diagnostic.with_category(diagnostic::Category::Checkpoint),
            OutputRejected { .. } => diagnostic.with_category(diagnostic::Category::Usage),
            _ => diagnostic.with_category(diagnostic::Category::Failed),
        };
        let diagnostic = match error {
            NotFound { path }
            | NotACheckpoint { path, .. }
            | Damaged { path, .. }
            | Missing { path, .. }
            | ShardsOnOtherHosts { path, .. }
            | FetchFailed { path, .. }
            | ModelMismatch { path, .. }
            | NoSuchTensor { path, .. }
            | RangeOutsideTensor { path, .. }
            | Unsupported { path, .. }
            | InsufficientSpace { path, .. }
            | TooManyFiles { path, .. }
            | DirectoryBusy { path }
            | OutputRejected { path, .. }
            | Io { path, .. } => {
                let path = path.display().to_string();
                diagnostic.with_subject(path.clone()).with_field("path", path)
            }
            InvalidSave(_) | InvalidOption { .. } | Internal { .. } | ValueOverflow { .. } => diagnostic,
        };
        let diagnostic = match error {
            Damaged { damage, .. } => add_damage_fields(diagnostic, damage),
            Missing { part, .. } => diagnostic.with_field("missing", part.to_string()),
            ShardsOnOtherHosts { shards, .. } => {
                let shards: Vec<_> =
                    shards.iter().map(|s| serde_json::json!({"file": s.file, "host": s.host})).collect();
                diagnostic.with_field("shards", shards)
            }
            ModelMismatch { tensor, expected, found, .. } => diagnostic
                .with_field("tensor", tensor.as_str())
                .with_field("expected", expected.as_str())
                .with_field("found", found.as_str()),
            NoSuchTensor { tensor, .. } => diagnostic.with_field("tensor", tensor.as_str()),
            RangeOutsideTensor { tensor, elements, requested, .. } => diagnostic
                .with_field("tensor", tensor.as_str())
                .with_field("elements", *elements)
                .with_field("requested_elements", *requested),
            InsufficientSpace { needed, free, .. } => {
                diagnostic.with_field("needed_bytes", *needed).with_field("free_bytes", *free)
            }
            TooManyFiles { limit, .. } => diagnostic.with_field("limit", *limit),
            ValueOverflow { tensor, element, value, dtype } => diagnostic
                .with_field("tensor", tensor.as_str())
                .with_field("element", *element)
                .with_field("value", *value)
                .with_field("dtype", *dtype),
            Io { action, source, .. } => {
                let diagnostic = diagnostic.with_field("action", *action);
                let is_too_large = source.kind() == io::ErrorKind::FileTooLarge;
                let diagnostic = match read_file_size_limit().filter(|_| is_too_large) {
                    Some(limit) => diagnostic.with_field("limit_bytes", limit),
                    None => diagnostic,
                };
                match source.raw_os_error() {
                    Some(errno) => diagnostic.with_field("errno", errno),
                    None => diagnostic,
                }
            }
            _ => diagnostic,
        };
        error.help().into_iter().fold(diagnostic, Diagnostic::with_help)
    }
}

impl From<CkptError> for Diagnostic {
    fn from(error: CkptError) -> Diagnostic {
        (&error).into()
    }
}

/// Adds fields from `damage`, such as the file, the block and the affected tensors, to the error
/// message that users see.
fn add_damage_fields(diagnostic: Diagnostic, damage: &Damage) -> Diagnostic {
    let diagnostic = diagnostic.with_field("file", damage.file.as_str());
    let diagnostic = match damage.block {
        Some(block) => diagnostic.with_field("block", block),
        None => diagnostic,
    };
    let diagnostic = match damage.tensors.is_empty() {
        true => diagnostic,
        false => diagnostic.with_field("tensors", damage.tensors.clone()),
    };
    match damage.reason {
        DamageReason::SizeMismatch { expected, found } => {
            diagnostic.with_field("expected_bytes", expected).with_field("found_bytes", found)
        }
        DamageReason::TooLarge { found, limit } => {
            diagnostic.with_field("found_bytes", found).with_field("limit_bytes", limit)
        }
        _ => diagnostic,
    }
}
