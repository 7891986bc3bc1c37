//! [`DataError`]: the reasons why training data, a tokenizer or the token cache cannot be used.
mod interpretation;
mod keys;
mod problems;

pub use interpretation::{FailedRecord, InterpretationError, InterpretationStep};
pub(crate) use keys::FILES_KEY;
pub use problems::{
    ChatProblem, ChatTemplateProblem, FilePatternProblem, ParquetProblem, RecordPosition, RecordProblem,
    TemplateFailure, TokenCacheDamage, TokenCacheOperation, TokenizerProblem, TokenizerTextFileError,
};

use super::split::Split;
use diagnostic::{Diagnostic, codes::data as codes, quantity::format_count};
use keys::{CACHE_KEY, CHAT_TEMPLATE_KEY, HELD_OUT_KEY, SEQUENCE_LENGTH_KEY, TOKENIZER_KEY};
use sandbox::SandboxError;
use std::{
    borrow::Cow,
    io,
    path::{Path, PathBuf},
};

/// Why training data, a tokenizer or the token cache cannot be used.
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
        problem: FilePatternProblem,
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
    /// The tokenizer failed on a record.
    #[error("cannot tokenize {}{}: {message}", .path.display(), format_record_position(.position))]
    RecordNotTokenized {
        /// Path of the data file.
        path: PathBuf,
        /// The line or row of the record. Absent for a text file.
        position: Option<RecordPosition>,
        /// The message of the tokenizer library.
        message: String,
    },
    /// The tokenizer failed on token ids, or on a text that is no part of the data.
    #[error("the tokenizer failed: {message}")]
    TokenizerFailed {
        /// The message of the tokenizer library.
        message: String,
    },
    /// The sandbox process that interprets tokenizers, chat templates and Parquet files did not
    /// start.
    #[error("cannot start the sandbox process for tokenizers, chat templates and Parquet files")]
    SandboxUnavailable {
        /// The error of the sandbox.
        source: SandboxError,
    },
    /// A library failed or exceeded a limit while it interpreted a file.
    #[error("{0}")]
    Uninterpretable(Box<InterpretationError>),
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
        operation: TokenCacheOperation,
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
        damage: TokenCacheDamage,
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
        /// The part of the data that is too small: training data or held-out data.
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

/// Formats the line or row number of a record as the suffix of a file path in an error message,
/// such as `:12`.
fn format_record_position(position: &Option<RecordPosition>) -> String {
    position.map_or_else(String::new, |position| format!(":{position}"))
}

impl DataError {
    /// Creates the error which reports that the data file or directory at `path` cannot be read.
    pub(crate) fn unreadable(path: &Path, source: io::Error) -> DataError {
        DataError::Unreadable { path: path.to_path_buf(), source }
    }

    /// Creates the error which reports that the record at `position` of the file at `path` cannot
    /// be used, because of `problem`.
    pub(crate) fn invalid_record(path: &Path, position: RecordPosition, problem: RecordProblem) -> DataError {
        DataError::InvalidRecord { path: path.to_path_buf(), position, problem }
    }

    /// Creates the error which reports that the token cache at `path` cannot be read or written.
    pub(super) fn cache_unusable(
        path: &Path,
        operation: TokenCacheOperation,
        source: io::Error,
    ) -> DataError {
        DataError::CacheUnusable { path: path.to_path_buf(), operation, source }
    }

    /// Returns whether the cause of the error is that the sandbox process did not start, or failed
    /// to interpret a file.
    pub(crate) fn is_sandbox_failure(&self) -> bool {
        matches!(self, DataError::Uninterpretable(_) | DataError::SandboxUnavailable { .. })
    }

    /// Returns whether the error concerns the data files, in contrast to the tokenizer or the chat
    /// template.
    pub(crate) fn is_about_data_files(&self) -> bool {
        match self {
            DataError::Uninterpretable(failure) => failure.records.is_some(),
            other => other.to_diagnostic().subject() == Some(FILES_KEY),
        }
    }

    /// Adds to this error the name of the data source in which the error occurred. Returns the
    /// error unchanged if the source has no name.
    pub(crate) fn with_source_name(self, name: &str) -> DataError {
        match name {
            "" => self,
            _ => DataError::InSource { name: name.into(), error: Box::new(self) },
        }
    }

    /// Converts the error to a diagnostic with its code, fields, help and cause. The subject is the
    /// key of job.yaml that the error is about.
    pub(super) fn to_diagnostic(&self) -> Diagnostic {
        let mut diagnostic = self.add_fields(self.to_classified_diagnostic());
        if let Some(help) = self.find_help() {
            diagnostic = diagnostic.with_help(help);
        }
        match std::error::Error::source(self) {
            Some(cause) => diagnostic.with_cause(cause),
            None => diagnostic,
        }
    }

    /// Converts the error to a diagnostic that contains the error code and the key of job.yaml that
    /// the user must check. A problem of a record or of a file adds its fields and its help.
    fn to_classified_diagnostic(&self) -> Diagnostic {
        let (code, key) = match self {
            DataError::InvalidParquet { problem, .. } => {
                return problem.to_diagnostic(self.to_string()).with_subject(FILES_KEY);
            }
            DataError::InvalidRecord { problem, .. } => {
                return problem.to_diagnostic(self.to_string()).with_subject(FILES_KEY);
            }
            DataError::InvalidTokenizer { problem, .. } => {
                return problem.to_diagnostic(self.to_string()).with_subject(TOKENIZER_KEY);
            }
            DataError::InvalidChatTemplate { problem } => {
                return problem.to_diagnostic(self.to_string()).with_subject(CHAT_TEMPLATE_KEY);
            }
            DataError::Uninterpretable(failure) => return failure.to_diagnostic(self.to_string()),
            DataError::InSource { error, .. } => {
                let diagnostic = error.to_diagnostic().with_message(self.to_string());
                return match diagnostic.subject() {
                    Some(FILES_KEY) => diagnostic.with_subject("train.data.mixture"),
                    _ => diagnostic,
                };
            }
            DataError::NoFilesGiven => (codes::DATA_FILES_NOT_GIVEN, FILES_KEY),
            DataError::NoMatch { .. } => (codes::DATA_FILE_MISSING, FILES_KEY),
            DataError::InvalidPattern { .. } => (codes::DATA_PATTERN_INVALID, FILES_KEY),
            DataError::NotAFile { .. } => (codes::DATA_FILE_NOT_REGULAR, FILES_KEY),
            DataError::Unreadable { .. } => (codes::DATA_FILE_UNREADABLE, FILES_KEY),
            DataError::NotUtf8 { .. } => (codes::DATA_NOT_UTF8, FILES_KEY),
            DataError::CompressedFile { .. } => (codes::DATA_FILE_COMPRESSED, FILES_KEY),
            DataError::NotAChatFile { .. } => (codes::DATA_FORMAT_NOT_CHAT, FILES_KEY),
            DataError::Empty { .. } => (codes::DATA_EMPTY, FILES_KEY),
            DataError::ChangedWhileRead { .. } => (codes::DATA_FILE_CHANGED, FILES_KEY),
            DataError::SandboxUnavailable { .. } => (codes::SANDBOX_UNAVAILABLE, FILES_KEY),
            DataError::RecordNotTokenized { .. } | DataError::TokenizerFailed { .. } => {
                (codes::TOKENIZER_FAILED, TOKENIZER_KEY)
            }
            DataError::CacheUnusable { .. } => (codes::TOKEN_CACHE_UNUSABLE, CACHE_KEY),
            DataError::CacheCorrupt { .. } => (codes::TOKEN_CACHE_CORRUPT, CACHE_KEY),
            DataError::InvalidSequenceLength => (codes::DATA_SEQUENCE_LENGTH_INVALID, SEQUENCE_LENGTH_KEY),
            DataError::InvalidHeldOutShare { .. } => (codes::DATA_HELD_OUT_INVALID, HELD_OUT_KEY),
            DataError::NoEvalData => (codes::EVAL_DATA_MISSING, HELD_OUT_KEY),
            DataError::AmbiguousEvalFormat => (codes::EVAL_FORMAT_AMBIGUOUS, "train.eval.files"),
            DataError::TooShort { split: Split::Train, .. } => (codes::DATA_TOO_SHORT, SEQUENCE_LENGTH_KEY),
            DataError::TooShort { split: Split::HeldOut, .. } => (codes::DATA_TOO_SHORT, HELD_OUT_KEY),
        };
        Diagnostic::error(code, self.to_string()).with_subject(key)
    }

    /// Adds structured fields that describe the error, such as a path or a limit, to `diagnostic`.
    fn add_fields(&self, diagnostic: Diagnostic) -> Diagnostic {
        let diagnostic = match self.find_path() {
            Some(path) => diagnostic.with_field("path", path.display().to_string()),
            None => diagnostic,
        };
        match self {
            DataError::NoMatch { pattern, directory } => diagnostic
                .with_field("pattern", pattern.as_str())
                .with_field("directory", directory.display().to_string()),
            DataError::InvalidPattern { pattern, .. } => diagnostic.with_field("pattern", pattern.as_str()),
            DataError::NotUtf8 { line, offset, .. } => {
                diagnostic.with_field("line", *line).with_field("offset_bytes", *offset)
            }
            DataError::CompressedFile { extension, .. } => {
                diagnostic.with_field("extension", extension.as_str())
            }
            DataError::InvalidRecord { position, .. }
            | DataError::RecordNotTokenized { position: Some(position), .. } => {
                let (name, number) = position.to_diagnostic_field();
                diagnostic.with_field(name, number)
            }
            DataError::Empty { other_files, .. } => diagnostic.with_field("other_files", *other_files),
            DataError::InvalidHeldOutShare { share } => diagnostic.with_field("held_out", *share),
            DataError::TooShort { documents, tokens, required, .. } => diagnostic
                .with_field("documents", *documents)
                .with_field("tokens", *tokens)
                .with_field("required_tokens", *required),
            DataError::InSource { name, .. } => diagnostic.with_field("source", name.as_str()),
            _ => diagnostic,
        }
    }

    /// Returns the path of the file or directory that the error is about.
    fn find_path(&self) -> Option<&Path> {
        match self {
            DataError::NotAFile { path, .. }
            | DataError::Unreadable { path, .. }
            | DataError::NotUtf8 { path, .. }
            | DataError::CompressedFile { path, .. }
            | DataError::NotAChatFile { path }
            | DataError::InvalidParquet { path, .. }
            | DataError::InvalidRecord { path, .. }
            | DataError::Empty { path, .. }
            | DataError::ChangedWhileRead { path }
            | DataError::InvalidTokenizer { path, .. }
            | DataError::RecordNotTokenized { path, .. }
            | DataError::CacheUnusable { path, .. }
            | DataError::CacheCorrupt { path, .. } => Some(path),
            _ => None,
        }
    }

    /// Returns the advice that is shown to the user below this error, or `None` if the cause of the
    /// error has separate advice.
    fn find_help(&self) -> Option<Cow<'static, str>> {
        let help = match self {
            DataError::NoFilesGiven => "name files or patterns, such as files: [\"docs/**/*.md\"]",
            DataError::NoMatch { pattern, .. } if pattern.starts_with('~') => {
                "write the whole path; `~` is not expanded here"
            }
            DataError::NoMatch { .. } => {
                "patterns are relative to run.workdir; `*` stays in one directory, `**` enters subdirectories, \
                 and neither matches names that begin with a dot"
            }
            DataError::InvalidPattern { .. } => "use `*`, `?`, `[a-z]`, `{a,b}`, and `**` between slashes",
            DataError::NotAFile { pattern, is_directory: true, .. } => {
                let directory = pattern.trim_end_matches('/');
                let help = format!("write `{directory}/**` for every file below the directory");
                return Some(help.into());
            }
            DataError::NotUtf8 { .. } => "convert the file (iconv -t UTF-8) or exclude it",
            DataError::CompressedFile { remedy, .. } => remedy,
            DataError::NotAChatFile { .. } => "name files with records, or set train.data.format: text",
            DataError::Empty { .. } => "name a file with text, or a .jsonl file with a record per line",
            DataError::ChangedWhileRead { .. } => "run the job again when no process writes to the file",
            DataError::CacheUnusable { .. } | DataError::CacheCorrupt { .. } => {
                "set train.data.cache to a writable directory with free space"
            }
            DataError::NoEvalData => "set train.data.held_out, for example to 0.05, or name train.eval.files",
            DataError::AmbiguousEvalFormat => "use train.data.held_out instead of train.eval.files",
            DataError::TooShort { split: Split::Train, .. } => "lower train.data.seq_len or add data",
            DataError::TooShort { split: Split::HeldOut, .. } => {
                "raise train.data.held_out, name train.eval.files, or lower train.data.seq_len"
            }
            _ => return None,
        };
        Some(help.into())
    }
}

impl From<DataError> for Diagnostic {
    fn from(error: DataError) -> Self {
        error.to_diagnostic()
    }
}
