//! [`CloneableIoError`]: a copy of an I/O error, which unlike the original can be cloned and
//! compared.
use std::io;

/// A copy of an I/O error, which unlike the original can be cloned and compared: its kind and text.
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
