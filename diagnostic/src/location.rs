//! [`Location`]: the place in a file or argument that a diagnostic points at.
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;

/// Where a mistake was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Location {
    /// A file as a whole.
    File { file: String },
    /// Part of a line of a file. `line` and `column` count from 1, in characters; `width` is at
    /// least 1. `text` is the whole line.
    Line { file: String, line: u32, column: u32, width: u32, text: String },
    /// Part of a `--set path=value` argument; `text` is the argument.
    Override { column: u32, width: u32, text: String },
}

impl Location {
    /// The file's name, or `--set`.
    pub fn file(&self) -> &str {
        match self {
            Location::File { file } | Location::Line { file, .. } => file,
            Location::Override { .. } => "--set",
        }
    }

    /// The line, from 1; 0 for a whole file.
    pub fn line(&self) -> u32 {
        match self {
            Location::File { .. } => 0,
            Location::Line { line, .. } => *line,
            Location::Override { .. } => 1,
        }
    }

    /// The column, from 1; 0 for a whole file.
    pub fn column(&self) -> u32 {
        match self {
            Location::File { .. } => 0,
            Location::Line { column, .. } | Location::Override { column, .. } => *column,
        }
    }

    /// `file`, `line` and `column`, as `--json` prints them.
    pub(crate) fn to_json(&self) -> Value {
        json!({ "file": self.file(), "line": self.line(), "column": self.column() })
    }
}

/// `job.yaml:4:13`, or the `--set` argument.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File { file } => f.write_str(file),
            Location::Line { file, line, column, .. } => write!(f, "{file}:{line}:{column}"),
            Location::Override { text, .. } => write!(f, "--set {text}"),
        }
    }
}
