//! [`VerifyReport`]: the problems and warnings that were found when checkpoints were verified, and
//! what was verified.
use crate::error::{CkptError, Damage, DamageReason, MissingPart, RemoteShard};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The result of verifying all checkpoints at a path ([`crate::verify_checkpoints`]).
#[derive(Clone, Debug, Default, Serialize)]
pub struct VerifyReport {
    /// The path that was verified.
    pub path: PathBuf,
    /// The checkpoints, newest first.
    pub checkpoints: Vec<CheckpointReport>,
    /// Problems of the directory that contains the checkpoints, such as a damaged `latest`.
    pub problems: Vec<Damage>,
    /// Lines about likely mistakes that aren't damage, such as a stale `latest`, a missing RNG
    /// state or NaN values.
    pub warnings: Vec<String>,
    /// Lines about facts that aren't mistakes, such as shards that other hosts store.
    pub notes: Vec<String>,
}

/// The result of verifying one checkpoint: its problems, and what was verified.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckpointReport {
    /// Directory of the checkpoint.
    pub path: PathBuf,
    /// Step of the checkpoint, or `None` if the step cannot be read.
    pub step: Option<u64>,
    /// Number of verified bytes.
    pub bytes: u64,
    /// Number of verified blocks. For an external checkpoint, the number of verified members of
    /// files.
    pub blocks: u64,
    /// Damaged, missing and unexpected files.
    pub problems: Vec<Damage>,
    /// Shards that other hosts store and that were therefore not verified.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<RemoteShard>,
    /// Files of tensors or pickled values that have no checksums, so that at most their structure
    /// was verified.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unchecked: Vec<String>,
}

impl VerifyReport {
    /// Returns true if the verification found no problem in any checkpoint, nor in the directory
    /// that contains the checkpoints. Warnings do not count as problems.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty() && self.checkpoints.iter().all(|c| c.problems.is_empty())
    }

    /// Iterates over all problems, each with the path of its checkpoint or directory.
    pub fn all_problems(&self) -> impl Iterator<Item = (&Path, &Damage)> {
        let in_checkpoints =
            self.checkpoints.iter().flat_map(|c| c.problems.iter().map(move |p| (c.path.as_path(), p)));
        self.problems.iter().map(|p| (self.path.as_path(), p)).chain(in_checkpoints)
    }
}

/// Converts the error `e` of opening or reading the checkpoint file `file` to a description of the
/// file's damage for the verification report.
pub(super) fn convert_error_to_damage(file: &str, e: CkptError) -> Damage {
    match e {
        CkptError::Damaged { damage, .. } => *damage,
        CkptError::Missing { part: MissingPart::File(name), .. } if name == file => {
            Damage::for_file(file, DamageReason::FileMissing)
        }
        CkptError::Missing { part, .. } => Damage::for_file(file, DamageReason::PartMissing(part)),
        CkptError::NotACheckpoint { diagnosis, .. } => {
            Damage::for_file(file, DamageReason::NotACheckpoint(diagnosis))
        }
        other => Damage::for_file(file, other.to_string()),
    }
}
