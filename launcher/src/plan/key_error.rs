//! [`key_error`]: creates errors about keys of job.yaml that are found while workers are planned.
use diagnostic::{Code, Diagnostic};

/// Creates an error with the text `message` about the job.yaml key `key`, for problems that are
/// found when launch assigns workers to hosts.
pub(super) fn key_error(code: Code, key: &str, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(key)
}
