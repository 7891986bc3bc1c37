//! Error types for the random generator state files (RNG) and the learning rate scheduler files of
//! training programs.
use super::cloneable_io_error::CloneableIoError;
use super::torch_file::TorchFileError;
use crate::format_constants::{
    CPU_RNG_STATE_BYTES, CUDA_RNG_STATE_BYTES, MERSENNE_TWISTER_WORDS, SCHEDULER_FILE,
};
use crate::rng_stream_kind::RngStreamKind;
use diagnostic::{Code, codes::checkpoint as codes};

/// Why the content of a file with the states of random generators (RNG) is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RngStateError {
    /// The file is larger than any RNG state file, and is not read.
    #[error("the file has {bytes} bytes, more than the limit of {limit} bytes")]
    FileTooLarge {
        /// Size of the file in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The pickled value is not a dict.
    #[error("the file is not a dict of RNG states")]
    NotADict,
    /// The dict has a stream that this version can't reassign to other ranks.
    #[error("unknown RNG stream {key:?}")]
    UnknownStream {
        /// Key of the stream in the dict, shortened for the message.
        key: String,
    },
    /// The dict lacks a stream that every file of its format has.
    #[error("the file has no entry {key:?}")]
    MissingStream {
        /// Key of the stream in the dict.
        key: &'static str,
    },
    /// A state has a different structure than the values of the generator's `getstate`.
    #[error("the state of {generator} has an unknown layout")]
    UnknownLayout {
        /// Name of the generator, as messages show it.
        generator: &'static str,
    },
    /// Python changed the layout of `random.getstate()`.
    #[error("the state of Python's random has version {}, expected 3", .version.map_or("unknown".to_owned(), |v| v.to_string()))]
    PythonVersion {
        /// The version in the file; `None` when it isn't an integer.
        version: Option<i64>,
    },
    /// NumPy's global generator uses a different algorithm than MT19937.
    #[error("the state of NumPy's generator is not one of MT19937")]
    NumpyGenerator,
    /// The state of a Mersenne Twister claims that more than its 624 words are used.
    #[error("position {position} is outside of a Mersenne Twister of {MERSENNE_TWISTER_WORDS} words")]
    TwisterPosition {
        /// The number of used words that the file states.
        position: u64,
    },
    /// The state of torch's CPU generator has a wrong size.
    #[error("torch's CPU state has {bytes} bytes, expected {CPU_RNG_STATE_BYTES}")]
    CpuStateSize {
        /// Size of the state in bytes.
        bytes: usize,
    },
    /// The position fields of torch's CPU generator contradict each other.
    #[error("torch's CPU state is damaged (left {left}, next {next})")]
    CpuPosition {
        /// Number of words that the generator can still use before it computes new ones, as the
        /// file states.
        left: i32,
        /// Index of the next word to use.
        next: u64,
    },
    /// A word of torch's CPU generator doesn't fit in 32 bits.
    #[error("torch's CPU state is damaged (word {word} has more than 32 bits)")]
    CpuWordTooWide {
        /// Index of the first word that is too large, 0 to 623.
        word: usize,
    },
    /// The state of a CUDA generator has a wrong size.
    #[error("torch's CUDA state has {bytes} bytes, expected {CUDA_RNG_STATE_BYTES}")]
    CudaStateSize {
        /// Size of the state in bytes.
        bytes: usize,
    },
    /// The Philox offset of a CUDA generator is invalid.
    #[error("torch's CUDA state is damaged (offset {offset} is not a non-negative multiple of 4)")]
    CudaOffset {
        /// The Philox offset that the file states.
        offset: i64,
    },
    /// The list of CUDA states is longer than the number of GPUs that any host has.
    #[error("the file has states of more than {limit} GPUs")]
    TooManyGpus {
        /// The largest accepted number of GPUs.
        limit: usize,
    },
    /// The bytes of a tensor don't match the CRC-32 of the zip container.
    #[error("{member} doesn't match its CRC-32")]
    Crc {
        /// Name of the zip member.
        member: String,
    },
    /// The torch container is invalid.
    #[error("{0}")]
    Container(#[from] TorchFileError),
    /// The file can't be read.
    #[error("read error: {0}")]
    Read(#[from] CloneableIoError),
}

/// A contradiction between the files with the states of random generators (RNG) in a checkpoint
/// directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RngFilesError {
    /// One directory has files of both HF Trainer and Accelerate.
    #[error("RNG state files of HF Trainer and of Accelerate are mixed")]
    MixedPrograms,
    /// Two files belong to one rank. One of them is stale, from a run with another number of ranks.
    #[error("{other} is of rank {rank}, too; one of them is left from a run with another number of ranks")]
    DuplicateRank {
        /// The rank to which both files belong.
        rank: u32,
        /// Name of the file of this rank that was listed first.
        other: String,
    },
    /// The number of ranks exceeds the limit.
    #[error("{world} ranks, more than the limit of {limit}")]
    TooManyRanks {
        /// Number of ranks according to the checkpoint.
        world: u32,
        /// The largest accepted number of ranks.
        limit: u32,
    },
    /// `rng_state.pth`, which a run of one process writes, is next to files of several ranks.
    #[error("saved by a run of one process, but the other files by a run of several ranks")]
    MixedWorlds,
    /// The file name and the keys of the content belong to different programs.
    #[error("the file name and the content belong to different programs")]
    OtherProgram,
}

/// Maximum number of ranks that an error message names if their random generator states should be
/// equal and are not.
const CONFLICTING_RANKS_LISTED_MAX: usize = 8;

/// Why the random generator states in a checkpoint cannot be assigned to the ranks of a run with
/// another number of ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReconcileError {
    /// The checkpoint has no RNG states of any rank.
    #[error("there are no RNG states")]
    NoStates,
    /// The options request 0 ranks.
    #[error("cannot assign RNG states to 0 ranks")]
    NoRanks,
    /// Some ranks lack a stream that other ranks have.
    #[error("rank {rank} has no {kind} stream, but other ranks have one")]
    MissingStream {
        /// The stream that is missing.
        kind: RngStreamKind,
        /// The first rank without the stream.
        rank: usize,
    },
    /// A stream was declared as replicated, but its states differ between ranks.
    #[error(
        "the {kind} stream is declared as replicated, but differs from rank 0 on rank {}",
        format_ranks(ranks)
    )]
    NotReplicated {
        /// The stream that differs.
        kind: RngStreamKind,
        /// The ranks whose stream differs from the stream of rank 0.
        ranks: Vec<usize>,
    },
    /// The policy `strict` forbids a necessary reseed of a stream.
    #[error(
        "{from_world} ranks have a {kind} stream each, but {world} ranks resume; policy strict does not reseed"
    )]
    StrictWouldReseed {
        /// The stream that would be reseeded.
        kind: RngStreamKind,
        /// Number of ranks that saved.
        from_world: usize,
        /// Number of ranks that resume.
        world: u32,
    },
    /// The stream belongs to an owner, such as an expert, and the options do not list the owner of
    /// each rank.
    #[error("the {kind} stream moves with its owner, but no owners are given")]
    OwnersUnknown {
        /// The stream whose owners are unknown.
        kind: RngStreamKind,
    },
    /// No old rank had the same owner as one of the new ranks, so that there is no stream for this
    /// new rank.
    #[error("no old rank has the {kind} stream of the owner of rank {rank}")]
    OwnerWithoutStream {
        /// The stream that is missing.
        kind: RngStreamKind,
        /// The rank of the resumed run for whose owner there is no stream.
        rank: usize,
    },
}

impl ReconcileError {
    /// Returns the stable code of this error, which `launch explain` documents.
    pub fn code(&self) -> Code {
        match self {
            ReconcileError::NoStates | ReconcileError::MissingStream { .. } => codes::RNG_STREAM_MISSING,
            ReconcileError::NoRanks => codes::CHECKPOINT_OPTION_INVALID,
            ReconcileError::NotReplicated { .. } => codes::RNG_STREAM_NOT_REPLICATED,
            ReconcileError::StrictWouldReseed { .. } => codes::RNG_STRICT_WOULD_RESEED,
            ReconcileError::OwnersUnknown { .. } | ReconcileError::OwnerWithoutStream { .. } => {
                codes::RNG_OWNER_UNKNOWN
            }
        }
    }

    /// Returns advice for the user about this error, or `None` if no advice exists.
    pub(crate) fn help(&self) -> Option<&'static str> {
        match self {
            ReconcileError::StrictWouldReseed { .. } => {
                Some("resume with as many ranks as saved, or use `resume.rng: reconcile`")
            }
            ReconcileError::NotReplicated { .. } => Some("remove the stream from `--replicated`"),
            _ => None,
        }
    }
}

/// Formats a list of ranks, of which at most [`CONFLICTING_RANKS_LISTED_MAX`] are shown.
fn format_ranks(ranks: &[usize]) -> String {
    ranks.iter().take(CONFLICTING_RANKS_LISTED_MAX).map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Why the step counter in Accelerate's `scheduler.bin` cannot be adapted to a run with another
/// number of processes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RescaleError {
    /// The scheduler consists of several schedulers with a counter each, such as `SequentialLR`.
    #[error(
        "{SCHEDULER_FILE} counts steps per process and consists of several schedulers, which cannot be rescaled"
    )]
    SeveralSchedulers,
    /// The rescaled counter does not fit in a signed 64-bit integer.
    #[error(
        "{SCHEDULER_FILE} counts steps per process, and {steps} steps of {world} processes overflow the counter"
    )]
    Overflow {
        /// Number of optimizer steps that the run has completed.
        steps: u64,
        /// Number of processes that resume.
        world: u32,
    },
    /// The pickle does not store the counter where the pickles of torch's schedulers store it.
    #[error("{SCHEDULER_FILE} counts steps per process, but its pickle has an unknown layout")]
    UnknownPickle,
}
