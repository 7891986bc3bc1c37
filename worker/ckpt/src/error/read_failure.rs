//! [`ReadFailure`]: an I/O error that can be cloned and compared.
use std::io;

/// An I/O error that can be cloned and compared: the kind and the text of the original.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ReadFailure {
    /// The kind of the original I/O error.
    pub kind: io::ErrorKind,
    message: String,
}

impl From<io::Error> for ReadFailure {
    fn from(error: io::Error) -> Self {
        ReadFailure { kind: error.kind(), message: error.to_string() }
    }
}
