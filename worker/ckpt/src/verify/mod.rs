//! Verifies every byte of checkpoints, and reports all problems.
mod checkpoints;
mod digests;
mod external;
pub(crate) mod file_scan;
mod native;
mod non_finite_values;
mod report;

pub use checkpoints::{VerifyOptions, verify_checkpoints, verify_checkpoints_with};
pub(crate) use external::verify_opened_checkpoint;
pub(crate) use non_finite_values::find_non_finite_values;
pub use report::{CheckpointReport, VerifyReport};
