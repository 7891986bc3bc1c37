//! [`Location`]: the place in a file or argument that a diagnostic points at.
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;

/// The place in a file or in a `--set` argument where a mistake was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Location {
    /// A whole file, if the mistake has no line.
    File {
        /// The name of the file.
        file: String,
    },
    /// Some characters of one line of a file.
    Line {
        /// The name of the file.
        file: String,
        /// The line number, counted from 1.
        line: u32,
        /// The number in the line of the first wrong character, counted from 1.
        column: u32,
        /// The number of wrong characters, at least 1.
        width: u32,
        /// The text of the whole line.
        text: String,
    },
    /// Some characters of a `--set path=value` argument.
    Override {
        /// The number in the argument of the first wrong character, counted from 1.
        column: u32,
        /// The number of wrong characters, at least 1.
        width: u32,
        /// The text of the whole argument, without `--set`.
        text: String,
    },
}

impl Location {
    /// Returns the name of the file; `--set` for a mistake in an argument.
    pub fn file(&self) -> &str {
        match self {
            Location::File { file } | Location::Line { file, .. } => file,
            Location::Override { .. } => "--set",
        }
    }

    /// Returns the line number, counted from 1. A mistake in a `--set` argument has line 1, and a
    /// mistake in a whole file has line 0.
    pub fn line(&self) -> u32 {
        match self {
            Location::File { .. } => 0,
            Location::Line { line, .. } => *line,
            Location::Override { .. } => 1,
        }
    }

    /// Returns the number of the first wrong character in its line, counted from 1; 0 for a mistake
    /// in a whole file.
    pub fn column(&self) -> u32 {
        match self {
            Location::File { .. } => 0,
            Location::Line { column, .. } | Location::Override { column, .. } => *column,
        }
    }

    /// Returns the JSON object of the location with `file`, `line` and `column`. A whole file has
    /// only `file`.
    pub(crate) fn to_json(&self) -> Value {
        match self {
            Location::File { file } => json!({ "file": file }),
            _ => json!({ "file": self.file(), "line": self.line(), "column": self.column() }),
        }
    }
}

/// Writes the location as `job.yaml:4:13`, as `job.yaml` for a whole file, or as `--set
/// path=value`.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File { file } => f.write_str(file),
            Location::Line { file, line, column, .. } => write!(f, "{file}:{line}:{column}"),
            Location::Override { text, .. } => write!(f, "--set {text}"),
        }
    }
}
