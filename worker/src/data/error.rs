//! [`DataError`]: the reasons why training data, a tokenizer or the token cache cannot be used.
mod problems;

pub use problems::{
    CacheDamage, CacheOperation, ChatProblem, ChatTemplateProblem, ParquetProblem, PatternProblem,
    RecordPosition, RecordProblem, TemplateFailure, TextFileError, TokenizerProblem,
};

use super::split::Split;
use crate::error::Error;
use diagnostic::{Code, Diagnostic, codes::data as codes};
use serde_json::{Map, Value, json};
use std::{io, path::PathBuf};

/// The job key of the data files, the subject of errors in records and files.
const FILES_KEY: &str = "train.data.files";

/// Formats a number with its noun, such as `1 token` or `2 tokens`.
fn format_count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The reason why training data, a tokenizer or the token cache cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The list of files and patterns is empty.
    #[error("no data files are given")]
    NoFilesGiven,
    /// A pattern or file name matches no file.
    #[error("`{pattern}` matches no file in {}", .directory.display())]
    NoMatch {
        /// The pattern or name in the job file.
        pattern: String,
        /// The directory that relative patterns start from.
        directory: PathBuf,
    },
    /// A pattern is malformed.
    #[error("`{pattern}` is not a valid pattern")]
    InvalidPattern {
        /// The pattern in the job file.
        pattern: String,
        /// The rule that the pattern breaks.
        #[source]
        problem: PatternProblem,
    },
    /// A name without wildcards belongs to a directory, device or pipe.
    #[error(
        "{} is {}", .path.display(),
        if *.is_directory { "a directory, not a file" } else { "not a regular file" }
    )]
    NotAFile {
        /// The name in the job file.
        pattern: String,
        /// The path that the name leads to.
        path: PathBuf,
        /// Whether the path is a directory. Otherwise it is a device, pipe or other special file.
        is_directory: bool,
    },
    /// A data file or directory cannot be read.
    #[error("cannot read {}", .path.display())]
    Unreadable {
        /// Path of the file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A text or JSON lines file is not UTF-8.
    #[error("{}:{line}: invalid UTF-8 at byte {offset} of the file", .path.display())]
    NotUtf8 {
        /// Path of the data file.
        path: PathBuf,
        /// The line of the first invalid byte, from 1.
        line: u64,
        /// The position of the first invalid byte in the file, from 0.
        offset: u64,
    },
    /// A data file has the extension of a compressed or binary format that cannot be read.
    #[error("`.{extension}` files are not supported: {}", .path.display())]
    CompressedFile {
        /// Path of the data file.
        path: PathBuf,
        /// The extension in lower case, without the dot.
        extension: String,
        /// How to convert the file to a supported format, for the help of the error.
        remedy: &'static str,
    },
    /// A plain text file was given for chats, which are records.
    #[error("{} is a plain text file, but chats are records of .jsonl or .parquet files", .path.display())]
    NotAChatFile {
        /// Path of the data file.
        path: PathBuf,
    },
    /// A Parquet file as a whole cannot be used.
    #[error("cannot use the Parquet file {}", .path.display())]
    InvalidParquet {
        /// Path of the data file.
        path: PathBuf,
        /// The problem of the file.
        #[source]
        problem: ParquetProblem,
    },
    /// A line of a JSON lines file or a row of a Parquet file cannot be used.
    #[error("{}:{position}: {problem}", .path.display())]
    InvalidRecord {
        /// Path of the data file.
        path: PathBuf,
        /// The line or row of the record.
        position: RecordPosition,
        /// The problem of the record.
        problem: RecordProblem,
    },
    /// All files of a source are empty or have no record.
    #[error(
        "{}{} empty", .path.display(),
        match .other_files { 0 => " is".into(), 1 => " and 1 more file are".into(), n => format!(" and {n} more files are") }
    )]
    Empty {
        /// The first of the files.
        path: PathBuf,
        /// Number of further files, all empty.
        other_files: usize,
    },
    /// The content of a file changed while the data were opened.
    #[error("{} changed while it was read", .path.display())]
    ChangedWhileRead {
        /// Path of the data file.
        path: PathBuf,
    },
    /// A file of the tokenizer cannot be used.
    #[error("cannot use the tokenizer {}", .path.display())]
    InvalidTokenizer {
        /// Path of tokenizer.json or of a companion file.
        path: PathBuf,
        /// The problem of the file.
        #[source]
        problem: TokenizerProblem,
    },
    /// The tokenizer failed on a text or on token ids.
    #[error("the tokenizer failed")]
    TokenizerFailed {
        /// The error of the `tokenizers` library.
        source: tokenizers::Error,
    },
    /// The chat template cannot be used.
    #[error("cannot use the chat template")]
    InvalidChatTemplate {
        /// The problem of the template.
        #[source]
        problem: ChatTemplateProblem,
    },
    /// The token cache cannot be read or written.
    #[error("cannot {operation} the token cache {}", .path.display())]
    CacheUnusable {
        /// Path of the cache file or of its directory.
        path: PathBuf,
        /// The operation that failed.
        operation: CacheOperation,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A token cache is damaged immediately after it was built.
    #[error("the token cache {} is damaged although it was just built", .path.display())]
    CacheCorrupt {
        /// Path of the cache file.
        path: PathBuf,
        /// The reason why the cache file cannot be used.
        #[source]
        damage: CacheDamage,
    },
    /// `train.data.seq_len` is 0.
    #[error("`train.data.seq_len` is 0; it must be at least 1")]
    InvalidSequenceLength,
    /// `train.data.held_out` is not a share.
    #[error("`train.data.held_out` is {share}; it must be a number from 0 to below 1")]
    InvalidHeldOutShare {
        /// The value in the job file.
        share: f64,
    },
    /// Evaluation was requested, but the job names no held-out data.
    #[error("evaluation has no data: no eval files are given and `train.data.held_out` is 0")]
    NoEvalData,
    /// The sources of the mixture have different formats, so the format of the eval files is
    /// unknown.
    #[error("the format of the eval files is ambiguous: the sources of the mixture have different formats")]
    AmbiguousEvalFormat,
    /// The data have fewer tokens than one sample needs.
    #[error(
        "the {} data have {} in {}, but one sample needs {required}",
        if *.split == Split::HeldOut { "held-out" } else { "training" },
        format_count(*.tokens, "token"),
        format_count(*.documents, "document")
    )]
    TooShort {
        /// The side of the data.
        split: Split,
        /// Number of documents.
        documents: u64,
        /// Number of tokens, end-of-document tokens included.
        tokens: u64,
        /// Number of tokens that one sample needs.
        required: u64,
    },
    /// An error of one source of a mixture.
    #[error("source `{name}`: {error}")]
    InSource {
        /// The name of the source.
        name: String,
        /// The error, without the name of the source.
        error: Box<DataError>,
    },
}

impl DataError {
    /// Adds the name of the source that the error is about. Returns the error unchanged if the
    /// source has no name.
    pub(crate) fn with_source_name(self, name: &str) -> DataError {
        match name {
            "" => self,
            _ => DataError::InSource { name: name.into(), error: Box::new(self) },
        }
    }

    /// Returns the diagnostic code of the error.
    pub fn code(&self) -> Code {
        match self {
            DataError::NoFilesGiven => codes::DATA_FILES_NOT_GIVEN,
            DataError::NoMatch { .. } => codes::DATA_FILE_MISSING,
            DataError::InvalidPattern { .. } => codes::DATA_PATTERN_INVALID,
            DataError::NotAFile { .. } => codes::DATA_FILE_NOT_REGULAR,
            DataError::Unreadable { .. } => codes::DATA_FILE_UNREADABLE,
            DataError::NotUtf8 { .. } => codes::DATA_NOT_UTF8,
            DataError::CompressedFile { .. } => codes::DATA_FILE_COMPRESSED,
            DataError::NotAChatFile { .. } => codes::DATA_FORMAT_NOT_CHAT,
            DataError::InvalidParquet { problem, .. } => problem.code(),
            DataError::InvalidRecord { problem, .. } => problem.code(),
            DataError::Empty { .. } => codes::DATA_EMPTY,
            DataError::ChangedWhileRead { .. } => codes::DATA_FILE_CHANGED,
            DataError::InvalidTokenizer { problem, .. } => problem.code(),
            DataError::TokenizerFailed { .. } => codes::TOKENIZER_FAILED,
            DataError::InvalidChatTemplate { problem } => problem.code(),
            DataError::CacheUnusable { .. } => codes::TOKEN_CACHE_UNUSABLE,
            DataError::CacheCorrupt { .. } => codes::TOKEN_CACHE_CORRUPT,
            DataError::InvalidSequenceLength => codes::DATA_SEQUENCE_LENGTH_INVALID,
            DataError::InvalidHeldOutShare { .. } => codes::DATA_HELD_OUT_INVALID,
            DataError::NoEvalData => codes::EVAL_DATA_MISSING,
            DataError::AmbiguousEvalFormat => codes::EVAL_FORMAT_AMBIGUOUS,
            DataError::TooShort { .. } => codes::DATA_TOO_SHORT,
            DataError::InSource { error, .. } => error.code(),
        }
    }

    /// Returns the key of job.yaml that the error is about, as a path such as `train.data.files`.
    pub fn job_key(&self) -> &'static str {
        match self {
            DataError::InvalidTokenizer { .. } | DataError::TokenizerFailed { .. } => "train.data.tokenizer",
            DataError::InvalidChatTemplate { .. } => "train.data.chat_template",
            DataError::CacheUnusable { .. } | DataError::CacheCorrupt { .. } => "train.data.cache",
            DataError::InvalidSequenceLength => "train.data.seq_len",
            DataError::InvalidHeldOutShare { .. } | DataError::NoEvalData => "train.data.held_out",
            DataError::AmbiguousEvalFormat => "train.eval.files",
            DataError::TooShort { split: Split::HeldOut, .. } => "train.data.held_out",
            DataError::TooShort { split: Split::Train, .. } => "train.data.seq_len",
            DataError::InSource { error, .. } => match error.job_key() {
                FILES_KEY => "train.data.mixture",
                key => key,
            },
            _ => FILES_KEY,
        }
    }

    /// Returns the edit or command that resolves the error, if one is known.
    fn help(&self) -> Option<String> {
        Some(match self {
            DataError::NoFilesGiven => "name files or patterns, such as files: [\"docs/**/*.md\"]".into(),
            DataError::NoMatch { pattern, .. } if pattern.starts_with('~') => {
                "write the whole path; `~` is not expanded here".into()
            }
            DataError::NoMatch { .. } => {
                "patterns are relative to run.workdir; `*` stays in one directory, `**` enters subdirectories, \
                 and neither matches names that begin with a dot"
                    .into()
            }
            DataError::InvalidPattern { .. } => {
                "use `*`, `?`, `[a-z]`, `{a,b}`, and `**` between slashes".into()
            }
            DataError::NotAFile { pattern, is_directory: true, .. } => {
                format!("write `{}/**` for every file below the directory", pattern.trim_end_matches('/'))
            }
            DataError::NotUtf8 { .. } => "convert the file (iconv -t UTF-8) or exclude it".into(),
            DataError::CompressedFile { remedy, .. } => (*remedy).into(),
            DataError::NotAChatFile { .. } => {
                "name files with records, or set train.data.format: text".into()
            }
            DataError::InvalidParquet { problem, .. } => problem.help().into(),
            DataError::InvalidRecord { problem, .. } => problem.help().into(),
            DataError::Empty { .. } => {
                "name a file with text, or a .jsonl file with a record per line".into()
            }
            DataError::ChangedWhileRead { .. } => "run the job again when no process writes to the file".into(),
            DataError::InvalidTokenizer { problem, .. } => return problem.help(),
            DataError::InvalidChatTemplate { problem } => problem.help()?.into(),
            DataError::CacheUnusable { .. } | DataError::CacheCorrupt { .. } => {
                "set train.data.cache to a writable directory with free space".into()
            }
            DataError::NoEvalData => {
                "set train.data.held_out, for example to 0.05, or name train.eval.files".into()
            }
            DataError::AmbiguousEvalFormat => "use train.data.held_out instead of train.eval.files".into(),
            DataError::TooShort { split: Split::HeldOut, .. } => {
                "raise train.data.held_out, name train.eval.files, or lower train.data.seq_len".into()
            }
            DataError::TooShort { .. } => "lower train.data.seq_len or add data".into(),
            DataError::InSource { error, .. } => return error.help(),
            _ => return None,
        })
    }

    /// Returns the values of the error by field name, for programs that read the diagnostic.
    fn fields(&self) -> Map<String, Value> {
        let fields = match self {
            DataError::NoMatch { pattern, directory } => {
                json!({ "pattern": pattern, "directory": directory.display().to_string() })
            }
            DataError::InvalidPattern { pattern, .. } => json!({ "pattern": pattern }),
            DataError::NotAFile { path, .. }
            | DataError::Unreadable { path, .. }
            | DataError::NotAChatFile { path }
            | DataError::ChangedWhileRead { path }
            | DataError::InvalidTokenizer { path, .. }
            | DataError::CacheUnusable { path, .. }
            | DataError::CacheCorrupt { path, .. } => json!({ "path": path.display().to_string() }),
            DataError::NotUtf8 { path, line, offset } => {
                json!({ "path": path.display().to_string(), "line": line, "offset_bytes": offset })
            }
            DataError::CompressedFile { path, extension, .. } => {
                json!({ "path": path.display().to_string(), "extension": extension })
            }
            DataError::Empty { path, other_files } => {
                json!({ "path": path.display().to_string(), "other_files": other_files })
            }
            DataError::InvalidParquet { path, problem } => {
                let mut fields = problem.fields();
                fields.insert("path".into(), path.display().to_string().into());
                return fields;
            }
            DataError::InvalidRecord { path, position, problem } => {
                let mut fields = problem.fields();
                fields.insert("path".into(), path.display().to_string().into());
                let (name, number) = position.diagnostic_field();
                fields.insert(name.into(), number.into());
                return fields;
            }
            DataError::InvalidHeldOutShare { share } => json!({ "held_out": share }),
            DataError::TooShort { documents, tokens, required, .. } => {
                json!({ "documents": documents, "tokens": tokens, "required_tokens": required })
            }
            DataError::InSource { name, error } => {
                let mut fields = error.fields();
                fields.insert("source".into(), name.as_str().into());
                return fields;
            }
            _ => json!({}),
        };
        match fields {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }

    /// Returns the innermost error, without the name of the source.
    fn innermost_error(&self) -> &DataError {
        match self {
            DataError::InSource { error, .. } => error.innermost_error(),
            error => error,
        }
    }
}

/// Converts the error to a diagnostic with its code, fields, help and cause. The subject is the key
/// of job.yaml that the error is about.
impl From<DataError> for Diagnostic {
    fn from(error: DataError) -> Self {
        let mut diagnostic = Diagnostic::error(error.code(), error.to_string()).with_subject(error.job_key());
        for (name, value) in error.fields() {
            diagnostic = diagnostic.with_field(&name, value);
        }
        if let Some(help) = error.help() {
            diagnostic = diagnostic.with_help(help);
        }
        match std::error::Error::source(error.innermost_error()) {
            Some(cause) => diagnostic.with_cause(cause),
            None => diagnostic,
        }
    }
}

impl From<DataError> for Error {
    fn from(error: DataError) -> Self {
        Diagnostic::from(error).into()
    }
}
