//! [`Location`]: the place in a file or argument that a diagnostic points at.
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;

/// The place in a file or in a `--set` argument where a mistake was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Location {
    /// A whole file.
    File {
        /// The name of the file.
        file: String,
    },
    /// Part of a line of a file.
    Line {
        /// The name of the file.
        file: String,
        /// The line number, counted from 1.
        line: u32,
        /// The number of the first character of the part, counted from 1.
        column: u32,
        /// The number of characters of the part, at least 1.
        width: u32,
        /// The whole line.
        text: String,
    },
    /// Part of a `--set path=value` argument.
    Override {
        /// The number of the first character of the part, counted from 1.
        column: u32,
        /// The number of characters of the part, at least 1.
        width: u32,
        /// The whole argument.
        text: String,
    },
}

impl Location {
    /// Returns the file name; `--set` for an argument.
    pub fn file(&self) -> &str {
        match self {
            Location::File { file } | Location::Line { file, .. } => file,
            Location::Override { .. } => "--set",
        }
    }

    /// Returns the line number, counted from 1; 1 for an argument, and 0 for a whole file.
    pub fn line(&self) -> u32 {
        match self {
            Location::File { .. } => 0,
            Location::Line { line, .. } => *line,
            Location::Override { .. } => 1,
        }
    }

    /// Returns the column, counted from 1 in characters; 0 for a whole file.
    pub fn column(&self) -> u32 {
        match self {
            Location::File { .. } => 0,
            Location::Line { column, .. } | Location::Override { column, .. } => *column,
        }
    }

    /// Returns the JSON object that `--json` prints: `file`, `line` and `column`; only `file` for a
    /// whole file.
    pub(crate) fn to_json(&self) -> Value {
        match self {
            Location::File { file } => json!({ "file": file }),
            _ => json!({ "file": self.file(), "line": self.line(), "column": self.column() }),
        }
    }
}

/// Writes `job.yaml:4:13`, `job.yaml` for a whole file, or the whole `--set` argument.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File { file } => f.write_str(file),
            Location::Line { file, line, column, .. } => write!(f, "{file}:{line}:{column}"),
            Location::Override { text, .. } => write!(f, "--set {text}"),
        }
    }
}
