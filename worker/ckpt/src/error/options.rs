//! [`OptionProblem`] and [`OutputProblem`]: why an option or the output path of a checkpoint
//! conversion or weight export is rejected.
use crate::tensor::Dtype;
use std::path::PathBuf;

/// Why an option for converting a checkpoint, or for exporting its full weights, is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionProblem {
    /// The requested ZeRO stage does not exist.
    #[error("ZeRO stage {stage} does not exist; stages are 1, 2 and 3")]
    Stage {
        /// The requested stage.
        stage: u8,
    },
    /// The requested number of ranks is 0 or too large.
    #[error("{world} ranks are not possible; a checkpoint has 1 to {limit} ranks")]
    WorldSize {
        /// The requested number of ranks.
        world: u32,
        /// The largest number of ranks that a converted checkpoint may have.
        limit: u32,
    },
    /// The source checkpoint states so large a number of ranks that the options must request this
    /// number explicitly.
    #[error(
        "the checkpoint states that {world} ranks wrote it, more than the {limit} that are used without a request"
    )]
    SourceWorldSize {
        /// The number of ranks that the source checkpoint states.
        world: u32,
        /// The largest number of ranks that a conversion uses if the options do not request a
        /// number.
        limit: u32,
    },
    /// The requested size of ZeRO-3 sub-groups is 0.
    #[error("a ZeRO-3 sub-group needs at least 1 element")]
    EmptySubGroup,
    /// The requested limit on host memory is too low for a conversion.
    #[error("a conversion needs at least {} of memory, but the limit is {}", format_mebibytes(*needed), format_mebibytes(*limit))]
    Memory {
        /// The least memory that a conversion needs, in bytes.
        needed: u64,
        /// The requested limit, in bytes.
        limit: u64,
    },
    /// The output dtype is not a floating-point type.
    #[error("weights cannot be written as {dtype}; use F32, BF16 or F16")]
    Dtype {
        /// The requested dtype.
        dtype: Dtype,
    },
    /// A merge is requested for a checkpoint without adapters.
    #[error("checkpoint {} has no low-rank adapters to merge", .path.display())]
    NoAdapters {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// A file of the tokenizer has the name of another output file.
    #[error("the tokenizer has a file {name}, but another output file has this name")]
    FileNameTaken {
        /// The file name that both files would have.
        name: String,
    },
}

/// Why the path to which a converted checkpoint, gathered weights or another result should be
/// written is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutputProblem {
    /// The output path exists already.
    #[error("the path exists")]
    Exists,
    /// The output path exists and is not a directory.
    #[error("the path exists and is not a directory")]
    NotADirectory,
    /// The directory is not empty, and no earlier run of the same operation wrote it. The operation
    /// therefore does not overwrite the directory.
    #[error("the directory is not empty and was not written by {operation}")]
    NotOurs {
        /// The operation, which overwrites only directories that it wrote.
        operation: &'static str,
    },
    /// The directory holds a file that the operation did not write.
    #[error("the directory holds {file}, which was not written by {operation}")]
    OtherFile {
        /// Name of the file.
        file: String,
        /// The operation that wrote the other files.
        operation: &'static str,
    },
    /// An earlier run of the same operation wrote the directory, and `--force` is not given.
    #[error("the directory was written by an earlier {operation}")]
    NeedsForce {
        /// The operation that wrote the directory.
        operation: &'static str,
    },
    /// The output path is inside the checkpoint directory that the operation reads.
    #[error("the path is inside of the checkpoint")]
    InsideInput,
    /// The output path has no file name, such as `/`.
    #[error("the path has no file name")]
    NoName,
}

/// Formats a size in bytes as MiB, such as `64 MiB` or `0.5 MiB`. Rounds down, so that a size below
/// a limit is shown as less than the limit.
fn format_mebibytes(bytes: u64) -> String {
    let tenths = (bytes as f64 * 10.0 / f64::from(1 << 20)).floor();
    format!("{} MiB", tenths / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shown_in_binary_units() {
        let show = |limit| OptionProblem::Memory { needed: 64 << 20, limit }.to_string();
        let expected =
            |limit| format!("a conversion needs at least 64 MiB of memory, but the limit is {limit}");
        assert_eq!(show(1 << 20), expected("1 MiB"));
        assert_eq!(show((64 << 20) - 1), expected("63.9 MiB"));
    }
}
