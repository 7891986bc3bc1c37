//! [`build_ssh_error`]: creates the errors of SSH connections.
use super::target::SshTarget;
use diagnostic::{Code, Diagnostic};

/// Builds an error about the connection to `target`. `message` must name the host.
pub(super) fn build_ssh_error(target: &SshTarget, code: Code, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(&target.name)
}
