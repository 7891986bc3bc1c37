//! [`build_ssh_error`]: creates the errors about SSH connections to hosts.
use super::target::SshTarget;
use diagnostic::{Code, Diagnostic};

/// Builds an error with the error code `code` and a message about the SSH connection to the host
/// `target`. `message` must name the host.
pub(super) fn build_ssh_error(target: &SshTarget, code: Code, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(&target.name)
}
