//! [`key_error`]: creates errors about keys of the job that are found while workers are planned.
use diagnostic::{Code, Diagnostic};

/// Creates an error of planning a job, whose subject is the job key `key`.
pub(super) fn key_error(code: Code, key: &str, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(key)
}
