//! Every way in which a checkpoint can't be written or used, each as one clear line.
use serde::Serialize;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Result of everything in this crate.
pub type Result<T> = std::result::Result<T, CkptError>;

/// Bytes that are not what the manifest says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Name inside the folder.
    pub file: String,
    /// Index of the 1 MiB block in the file, when one block is meant.
    pub block: Option<u64>,
    /// `role/name` of every tensor with bytes in that block.
    pub tensors: Vec<String>,
    pub why: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some(block) = self.block {
            write!(f, ", block {block}")?;
        }
        match self.tensors.as_slice() {
            [] => {}
            [one] => write!(f, " (holds {one})")?,
            [one, two] => write!(f, " (holds {one} and {two})")?,
            [one, two, more @ ..] => write!(f, " (holds {one}, {two} and {} more)", more.len())?,
        }
        write!(f, ": {}", self.why)
    }
}

/// Why a checkpoint could not be written, read or gathered.
#[derive(Debug)]
#[non_exhaustive]
pub enum CkptError {
    /// There is no checkpoint of ours at this path.
    NotACheckpoint { path: PathBuf, why: String },
    /// The bytes are not those that were saved.
    Damaged { path: PathBuf, damage: Damage },
    /// A file or tensor that belongs to the checkpoint is not there.
    Missing { path: PathBuf, what: String },
    /// Some shards lie on other hosts: (shard, host).
    Elsewhere { path: PathBuf, shards: Vec<(String, String)> },
    /// Blocks on another host could not be had, or are not what they should be.
    Fetch { path: PathBuf, why: String },
    /// The checkpoint is sound but of something else than was asked for.
    Mismatch { path: PathBuf, what: String, expected: String, found: String },
    /// It is sound, but of a form or with contents that this can't be done with.
    Unsupported { path: PathBuf, what: String },
    /// Not enough free space; found out before anything was written.
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    /// Another process is writing into this directory.
    Busy { path: PathBuf },
    /// What the caller gave does not make a complete checkpoint.
    Invalid { what: String },
    /// The output folder may not be overwritten.
    Refused { path: PathBuf, why: String },
    /// A finite value has no finite value in the narrower dtype.
    Overflow { tensor: String, element: u64, value: f32, dtype: &'static str },
    /// The operating system refused.
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl CkptError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CkptError {
        let path = path.to_owned();
        move |source| CkptError::Io { action, path, source }
    }

    pub(crate) fn errno(action: &'static str, path: &Path) -> impl FnOnce(nix::Error) -> CkptError {
        let path = path.to_owned();
        move |e| CkptError::Io { action, path, source: e.into() }
    }

    pub(crate) fn invalid(what: impl Into<String>) -> CkptError {
        CkptError::Invalid { what: what.into() }
    }

    pub(crate) fn damaged(path: &Path, file: impl Into<String>, why: impl Into<String>) -> CkptError {
        let damage = Damage { file: file.into(), block: None, tensors: Vec::new(), why: why.into() };
        CkptError::Damaged { path: path.to_owned(), damage }
    }

    /// True when the checkpoint itself is at fault, so that another one may do (exit code 4); false when the caller, the
    /// disk or the output is.
    pub fn is_checkpoint_at_fault(&self) -> bool {
        use CkptError::*;
        match self {
            NotACheckpoint { .. }
            | Damaged { .. }
            | Missing { .. }
            | Elsewhere { .. }
            | Fetch { .. }
            | Mismatch { .. }
            | Unsupported { .. } => true,
            NoSpace { .. } | Busy { .. } | Invalid { .. } | Refused { .. } | Overflow { .. } | Io { .. } => {
                false
            }
        }
    }
}

impl fmt::Display for CkptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use CkptError::*;
        match self {
            NotACheckpoint { path, why } => write!(f, "no checkpoint at {}: {why}", path.display()),
            Damaged { path, damage } => {
                write!(f, "checkpoint {} is damaged: {damage}; use another checkpoint", path.display())
            }
            Missing { path, what } => write!(
                f,
                "checkpoint {} is not whole: {what} is missing; use another checkpoint or bring it back",
                path.display()
            ),
            Elsewhere { path, shards } => {
                let list: Vec<String> =
                    shards.iter().take(3).map(|(shard, host)| format!("{shard} on host {host}")).collect();
                let more = match shards.len().saturating_sub(3) {
                    0 => String::new(),
                    n => format!(" and {n} more"),
                };
                write!(
                    f,
                    "checkpoint {} is not all here: it lacks {}{more}; copy these files into the folder from there, or \
                     go on with a job that has those hosts (it gathers the weights at its end)",
                    path.display(),
                    list.join(", ")
                )
            }
            Fetch { path, why } => {
                write!(f, "checkpoint {} can't be read from the hosts that have it: {why}", path.display())
            }
            Mismatch { path, what, expected, found } => write!(
                f,
                "checkpoint {} does not fit: {what}: expected {expected}, found {found}",
                path.display()
            ),
            Unsupported { path, what } => {
                write!(f, "checkpoint {} can't be used here: {what}", path.display())
            }
            NoSpace { path, needed, free } => write!(
                f,
                "not enough space in {}: {} needed, {} free; free some, or write to another disk",
                path.display(),
                bytes(*needed),
                bytes(*free)
            ),
            Busy { path } => write!(
                f,
                "another process is writing checkpoints into {}; wait for it, end it, or use another directory",
                path.display()
            ),
            Invalid { what } => write!(f, "the checkpoint can't be saved: {what}"),
            Refused { path, why } => write!(f, "{} is not overwritten: {why}", path.display()),
            Overflow { tensor, element, value, dtype } => write!(
                f,
                "{tensor}, element {element}: {value:e} is beyond the range of {dtype}; use a wider dtype (bf16 or fp32)"
            ),
            Io { action, path, source } => {
                write!(f, "can't {action} {}: {source}{}", path.display(), advice(source))
            }
        }
    }
}

impl std::error::Error for CkptError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CkptError::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// What to do about the errors of the operating system that people meet.
fn advice(e: &io::Error) -> &'static str {
    match e.kind() {
        io::ErrorKind::StorageFull => {
            "; free some space or lower checkpoint.keep (earlier checkpoints are intact)"
        }
        io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "; raise the limit or use another directory (earlier checkpoints are intact)"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; give this user access or use another directory"
        }
        io::ErrorKind::NotADirectory => "; a file is in the way of a directory",
        _ => "",
    }
}

/// `1234567` as `1.23 MB`.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let (mut value, mut unit) = (n as f64 / 1e3, 0);
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}
