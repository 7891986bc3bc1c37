//! [`Location`]: the place in a file or on the command line that a diagnostic points at.
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;

/// The place of a user's mistake, such as a wrong value, in a file or on the command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Location {
    /// A whole file, if the mistake has no line.
    File {
        /// The name of the file.
        file: String,
    },
    /// A range of characters in one line of a file.
    Line {
        /// The name of the file.
        file: String,
        /// The line number, counted from 1.
        line: u32,
        /// The column of the first wrong character, counted from 1.
        column: u32,
        /// The number of wrong characters, at least 1.
        width: u32,
        /// The text of the whole line; empty if the line is too long to be shown.
        text: String,
    },
    /// A range of characters in a `--set path=value` argument.
    Override {
        /// The position of the first wrong character in the argument, counted from 1.
        column: u32,
        /// The number of wrong characters, at least 1.
        width: u32,
        /// The text of the whole argument, without `--set`.
        text: String,
    },
    /// A whole argument of the command line.
    Argument {
        /// The option with its value, such as `--workers 4`.
        text: String,
    },
}

impl Location {
    /// Returns the name of the file in which the user made the mistake that a diagnostic reports.
    /// Returns `--set` for a mistake in a `--set` argument, and the argument itself for a mistake
    /// in another argument.
    pub fn file(&self) -> &str {
        match self {
            Location::File { file } | Location::Line { file, .. } => file,
            Location::Override { .. } => "--set",
            Location::Argument { text } => text,
        }
    }

    /// Returns the number, counted from 1, of the line in which the user made the mistake that a
    /// diagnostic reports. A mistake in a `--set` argument has line 1, and a mistake in a whole
    /// file or argument has line 0.
    pub fn line(&self) -> u32 {
        match self {
            Location::File { .. } | Location::Argument { .. } => 0,
            Location::Line { line, .. } => *line,
            Location::Override { .. } => 1,
        }
    }

    /// Returns the column of the first wrong character in its line, counted from 1; 0 if the
    /// location is a whole file or argument.
    pub fn column(&self) -> u32 {
        match self {
            Location::File { .. } | Location::Argument { .. } => 0,
            Location::Line { column, .. } | Location::Override { column, .. } => *column,
        }
    }

    /// Returns the JSON object of the location with `file`, `line` and `column`. A whole file or
    /// argument has only `file`.
    pub(crate) fn to_json(&self) -> Value {
        match self {
            Location::File { .. } | Location::Argument { .. } => json!({ "file": self.file() }),
            _ => json!({ "file": self.file(), "line": self.line(), "column": self.column() }),
        }
    }
}

/// Writes the location as `job.yaml:4:13`, as `job.yaml` for a whole file, or as an argument of the
/// command line: `--set path=value`, `--workers 4`.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File { file } => f.write_str(file),
            Location::Line { file, line, column, .. } => write!(f, "{file}:{line}:{column}"),
            Location::Override { text, .. } => write!(f, "--set {text}"),
            Location::Argument { text } => f.write_str(text),
        }
    }
}
