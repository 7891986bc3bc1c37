//! What can be wrong with data: one clear error each, with what to do.
use contract::exit::WorkerExit;
use std::{fmt, io, path::PathBuf};

/// Why there is no data set.
#[derive(Debug)]
pub enum DataError {
    /// `train.data.files` (or `train.eval.files`) is empty.
    NoPatterns,
    /// A pattern or file name matches no file.
    NoMatch { pattern: String, dir: PathBuf },
    /// A pattern that can't be read as one.
    BadPattern { pattern: String, why: String },
    /// A name without wildcards that is not a regular file.
    NotAFile { pattern: String, path: PathBuf, directory: bool },
    /// A file or directory of the data can't be read.
    Read { path: PathBuf, source: io::Error },
    /// Text that is not UTF-8; `line` counts from 1, `offset` from the file's start.
    NotUtf8 { path: PathBuf, line: u64, offset: u64 },
    /// A file that can't be read as what it seems to be.
    BadFile { path: PathBuf, why: String },
    /// A line of a JSON lines file, or a row of a Parquet file, that can't be used.
    BadLine { path: PathBuf, line: u64, why: String },
    /// None of a source's files holds anything.
    Empty { path: PathBuf, more: usize },
    /// A file's content changed between two looks at it.
    Changed { path: PathBuf },
    /// The tokenizer can't be used.
    Tokenizer { path: PathBuf, why: String },
    /// The tokenizer failed on a text.
    Encode { why: String },
    /// The cache directory can't be used.
    Cache { path: PathBuf, doing: &'static str, source: io::Error },
    /// A setting that makes no sense.
    Setting { key: &'static str, why: String },
    /// Held-out data was asked for and there is none to hold out.
    NothingHeldOut,
    /// What is wrong with one source of a mixture.
    OfSource { name: String, error: Box<DataError> },
    /// Less data than one sample needs.
    TooLittle { held_out: bool, documents: u64, tokens: u64, needed: u64 },
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use DataError::*;
        match self {
            NoPatterns => write!(f, "no data files are given"),
            NoMatch { pattern, dir } => write!(f, "`{pattern}` matches no file in {}", dir.display()),
            BadPattern { pattern, why } => write!(f, "`{pattern}` is not a valid pattern: {why}"),
            NotAFile { path, directory: true, .. } => {
                write!(f, "{} is a directory, not a file", path.display())
            }
            NotAFile { path, .. } => write!(f, "{} is not a regular file", path.display()),
            Read { path, source } => write!(f, "can't read {}: {source}", path.display()),
            NotUtf8 { path, line, offset } => {
                write!(f, "{}:{line}: not UTF-8 text at byte {offset} of the file", path.display())
            }
            BadFile { path, why } => write!(f, "{}: {why}", path.display()),
            BadLine { path, line, why } => write!(f, "{}:{line}: {why}", path.display()),
            Empty { path, more: 0 } => write!(f, "{} is empty", path.display()),
            Empty { path, more } => write!(f, "{} and {more} more files are empty", path.display()),
            Changed { path } => write!(f, "{} changed while it was read", path.display()),
            Tokenizer { path, why } => write!(f, "the tokenizer {} can't be used: {why}", path.display()),
            Encode { why } => write!(f, "the tokenizer failed: {why}"),
            Cache { path, doing, source } => {
                write!(f, "can't {doing} the token cache {}: {source}", path.display())
            }
            Setting { key, why } => write!(f, "{key}: {why}"),
            OfSource { name, error } => write!(f, "source `{name}`: {error}"),
            NothingHeldOut => write!(f, "evaluation has no data: no eval files are given and held_out is 0"),
            TooLittle { held_out, documents, tokens, needed } => write!(
                f,
                "the {} data has {tokens} tokens in {documents} documents; one sample needs {needed}",
                if *held_out { "held-out" } else { "training" }
            ),
        }
    }
}

impl std::error::Error for DataError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            DataError::Read { source, .. } | DataError::Cache { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl DataError {
    /// The same, of a named source.
    pub(crate) fn of_source(self, name: &str) -> DataError {
        match name {
            "" => self,
            _ => DataError::OfSource { name: name.into(), error: Box::new(self) },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        use DataError::*;
        Some(match self {
            OfSource { error, .. } => return error.hint(),
            NoPatterns => "name files or patterns, e.g. files: [\"docs/**/*.md\"]".into(),
            NoMatch { pattern, .. } if pattern.starts_with('~') => {
                "`~` is not expanded here; write the whole path".into()
            }
            NoMatch { .. } => {
                "patterns are relative to the workdir; `*` stays in one directory, `**` enters all, \
                 neither matches names that begin with a dot"
                    .into()
            }
            BadPattern { .. } => "known are `*`, `?`, `[a-z]`, `{a,b}` and `**` between slashes".into(),
            NotAFile { pattern, directory: true, .. } => {
                format!("for every file in it write `{}/**`", pattern.trim_end_matches('/'))
            }
            NotUtf8 { .. } => "convert it (iconv -t UTF-8) or leave it out".into(),
            BadLine { .. } => {
                "each record's `train.data.field` is its text or, with `format: chat`, its messages".into()
            }
            Empty { .. } => "a text, or a record in each line of a .jsonl file, is needed".into(),
            Changed { .. } => "start again when nothing writes to it".into(),
            Cache { .. } => "set train.data.cache to a directory that is writable and has room".into(),
            NothingHeldOut => "set train.data.held_out, e.g. 0.05, or name train.eval.files".into(),
            TooLittle { held_out: true, .. } => {
                "raise train.data.held_out, name train.eval.files, or shorten train.data.seq_len".into()
            }
            TooLittle { .. } => "shorten train.data.seq_len or add data".into(),
            Read { .. }
            | BadFile { .. }
            | NotAFile { .. }
            | Tokenizer { .. }
            | Encode { .. }
            | Setting { .. } => return None,
        })
    }

    /// How a worker ends because of it.
    pub fn exit(&self) -> WorkerExit {
        match self {
            DataError::Cache { .. } => WorkerExit::Cluster,
            DataError::OfSource { error, .. } => error.exit(),
            _ => WorkerExit::BadJob,
        }
    }

    /// The key of job.yaml it is about.
    pub fn key(&self) -> &'static str {
        match self {
            DataError::Tokenizer { .. } | DataError::Encode { .. } => "train.data.tokenizer",
            DataError::Cache { .. } => "train.data.cache",
            DataError::Setting { key, .. } => key,
            DataError::OfSource { error, .. } => match error.key() {
                "train.data.files" => "train.data.mixture",
                key => key,
            },
            DataError::NothingHeldOut => "train.data.held_out",
            DataError::TooLittle { held_out: true, .. } => "train.data.held_out",
            DataError::TooLittle { .. } => "train.data.seq_len",
            _ => "train.data.files",
        }
    }
}
