//! [`RepairLoss`]: a file or checkpoint that a repair could not rebuild, and the reasons.
use crate::error::{CkptError, DamageReason};
use std::fmt;

/// A file or checkpoint that a repair could not rebuild, and the reasons, for the report.
pub(super) struct RepairLoss {
    /// Path of the lost file or checkpoint. Empty if the reasons name the file.
    pub(super) subject: String,
    /// Why the subject is lost: lines for the user about missing or damaged parts.
    pub(super) reasons: Vec<String>,
    /// Text in parentheses after the reasons, such as why the subject could not be rebuilt. May be
    /// empty.
    pub(super) remark: String,
}

impl RepairLoss {
    /// Creates the entry of a repair's report that the file or checkpoint `subject` could not be
    /// rebuilt because of `reasons`.
    pub(super) fn new(subject: impl Into<String>, reasons: Vec<String>) -> RepairLoss {
        RepairLoss { subject: subject.into(), reasons, remark: String::new() }
    }

    /// Sets `remark`, an additional sentence for the user, in this report entry about a file that
    /// could not be rebuilt.
    pub(super) fn with_remark(mut self, remark: impl Into<String>) -> RepairLoss {
        self.remark = remark.into();
        self
    }
}

impl fmt::Display for RepairLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.subject.is_empty() {
            write!(f, "{}: ", self.subject)?;
        }
        f.write_str(&self.reasons.join("; "))?;
        match self.remark.is_empty() {
            true => Ok(()),
            false => write!(f, " ({})", self.remark),
        }
    }
}

/// Formats an error as the reason why a file or checkpoint could not be rebuilt. If the error is
/// about damage or a missing part of a checkpoint, leaves out the path of the checkpoint.
pub(super) fn format_reason(error: &CkptError) -> String {
    match error {
        CkptError::Damaged { damage, .. } => damage.to_string(),
        CkptError::Missing { part, .. } => DamageReason::PartMissing(part.clone()).to_string(),
        other => other.to_string(),
    }
}
