//! [`CloneableIoError`]: the kind and the message of an [`io::Error`], in a type that can be cloned
//! and compared.
use std::io;

/// The kind and the message of an [`io::Error`], in a type that can be cloned and compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CloneableIoError {
    /// The kind of the original I/O error.
    pub kind: io::ErrorKind,
    message: String,
}

impl From<io::Error> for CloneableIoError {
    fn from(error: io::Error) -> Self {
        CloneableIoError { kind: error.kind(), message: error.to_string() }
    }
}
