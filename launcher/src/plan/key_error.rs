//! [`key_error`]: creates errors about keys of job.yaml that are found while workers are planned.
use diagnostic::{Code, Diagnostic};

/// Creates an error about the value of the job.yaml key `key`, which was found while workers were
/// planned.
pub(super) fn key_error(code: Code, key: &str, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(key)
}
