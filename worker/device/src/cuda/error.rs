//! What goes wrong with a card or its libraries, in words.
use std::fmt;

/// Why a card can't be used, or why work on it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// A library isn't on this machine.
    NotFound {
        what: &'static str,
        name: String,
        /// Every place that was looked at, in order.
        searched: Vec<String>,
        /// Files that are there and couldn't be opened.
        failed: Vec<String>,
        advice: &'static str,
    },
    /// Something is there and too old.
    TooOld { what: String, needed: String },
    /// The driver sees no such card.
    NoCard { index: usize, count: usize },
    /// A kernel doesn't compile.
    Compile { file: &'static str, log: String },
    /// The card's memory doesn't hold what was asked for.
    OutOfMemory {
        asked: usize,
        free: usize,
        total: usize,
        /// What this process has already.
        used: u64,
        /// What it was for; empty where nobody said.
        purpose: &'static str,
    },
    /// A function of a library failed.
    Call { what: String, code: i32, said: String },
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaError::NotFound { what, name, searched, failed, advice } => {
                write!(f, "{what} ({name}) was not found; looked in: {}", searched.join(", "))?;
                if !failed.is_empty() {
                    write!(f, "; can't be opened: {}", failed.join("; "))?;
                }
                write!(f, "; {advice}")
            }
            CudaError::TooOld { what, needed } => write!(f, "{what}; needed: {needed}"),
            CudaError::NoCard { index, count: 0 } => {
                write!(
                    f,
                    "the driver sees no GPU (GPU {index} was asked for); is CUDA_VISIBLE_DEVICES empty?"
                )
            }
            CudaError::NoCard { index, count } => {
                write!(f, "there is no GPU {index}: the driver sees {count}, counted from 0")
            }
            CudaError::Compile { file, log } => write!(f, "the kernels of {file} don't compile:\n{log}"),
            CudaError::OutOfMemory { asked, free, total, used, purpose } => {
                let gib = |bytes: f64| bytes / f64::from(1 << 30);
                let purpose = if purpose.is_empty() { "this step" } else { purpose };
                write!(
                    f,
                    "GPU memory is full: {purpose} needs {:.2} GiB more, {:.2} of {:.2} GiB are free, this worker has {:.2} \
                     GiB; use a smaller batch.micro, a shorter data.seq_len, recompute: block, more GPUs or a higher \
                     zero.stage",
                    gib(*asked as f64),
                    gib(*free as f64),
                    gib(*total as f64),
                    gib(*used as f64)
                )
            }
            CudaError::Call { what, code, said } => write!(f, "{what} failed: {said} ({code})"),
        }
    }
}

impl std::error::Error for CudaError {}

/// Result of work on a card.
pub type Result<T> = std::result::Result<T, CudaError>;
