//! Detailed causes of errors about training data ([`super::DataError`]), such as an invalid record,
//! file pattern or tokenizer file.
use crate::data::tokenizer_files::{KNOWN_EOD_TOKENS, TOKENIZER_CONFIG_FILE};
use diagnostic::{Diagnostic, codes::data as codes};
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use std::{fmt, path::PathBuf};

/// Formats names of fields or columns as a list of quoted words.
fn quote_names(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// The reason why a pattern of data files is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilePatternProblem {
    /// The pattern has no characters, or contains a NUL byte.
    #[error("the pattern is empty or contains a NUL byte")]
    EmptyOrNul,
    /// The pattern is too long.
    #[error("the pattern is longer than {} KiB", limit >> 10)]
    TooLong {
        /// Longest pattern that is accepted, in bytes.
        limit: usize,
    },
    /// The braces of the pattern expand to too many patterns.
    #[error("the braces stand for more than {limit} patterns")]
    TooManyAlternatives {
        /// The largest number of patterns to which one pattern may expand.
        limit: usize,
    },
    /// A closing brace has no opening brace.
    #[error("`}}` without `{{`")]
    UnopenedBrace,
    /// An opening brace has no closing brace.
    #[error("`{{` without `}}`")]
    UnclosedBrace,
    /// `**` is combined with other characters in one name.
    #[error("`**` must stand alone between slashes")]
    RecursiveNotAlone,
    /// A wildcard within one name is malformed.
    #[error("{0}")]
    Wildcard(globset::ErrorKind),
}

/// The position of a record in its file, as a line or row number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPosition {
    /// A line of a JSON lines file, from 1.
    Line(u64),
    /// A row of a Parquet file, from 1.
    Row(u64),
}

impl RecordPosition {
    /// Returns the name (`line` or `row`) and the number of this position, as a field for the
    /// diagnostic of an error.
    pub(super) fn to_diagnostic_field(self) -> (&'static str, u64) {
        match self {
            RecordPosition::Line(number) => ("line", number),
            RecordPosition::Row(number) => ("row", number),
        }
    }
}

impl fmt::Display for RecordPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_diagnostic_field().1)
    }
}

/// Copy of serde_json's enum [`Category`] (kinds of JSON errors), from which serde derives how a
/// category is serialized for another process.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Category")]
enum JsonErrorCategory {
    Io,
    Syntax,
    Data,
    Eof,
}

/// Why a record of a JSON lines or Parquet file cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum RecordProblem {
    /// The line is not a JSON object whose field has the expected type.
    #[error("{reason} (column {column})")]
    InvalidJson {
        /// The kind of mistake: syntax error, premature end, or value of another type.
        #[serde(with = "JsonErrorCategory")]
        category: Category,
        /// The parser's message without its position.
        reason: String,
        /// The column of the mistake, from 1, in bytes.
        column: usize,
    },
    /// The line is longer than the limit.
    #[error("the line is longer than {} MiB", limit >> 20)]
    LineTooLong {
        /// Longest line that is read, in bytes.
        limit: usize,
    },
    /// The row of a Parquet file is longer than the limit.
    #[error("the row is longer than {} MiB", limit >> 20)]
    RowTooLong {
        /// Longest row that is read, in bytes.
        limit: usize,
    },
    /// The rows of a Parquet file have too much text for the size of the file.
    #[error("the rows up to here have more than {} MiB of text, too much for a file of this size", limit >> 20)]
    TooMuchText {
        /// Largest size in bytes of the text that is read from the file.
        limit: u64,
    },
    /// The JSON object lacks the field with the text or chat.
    #[error(
        "the object has no field `{field}`{}",
        if present.is_empty() { String::new() } else { format!("; it has {}", quote_names(present)) }
    )]
    FieldMissing {
        /// The value of `train.data.field`.
        field: String,
        /// Names of the first eight fields of the object, or of all fields if there are fewer.
        /// Omits very long names.
        present: Vec<String>,
    },
    /// The Parquet row has no value in the column with the text or chat.
    #[error("column `{column}` has no value")]
    ColumnNull {
        /// The name of the column.
        column: String,
    },
    /// The column with the text does not hold strings.
    #[error("column `{column}` is not a string")]
    ColumnNotText {
        /// The name of the column.
        column: String,
    },
    /// Values of a chat are nested too deep.
    #[error("values are nested deeper than {limit} levels")]
    NestedTooDeep {
        /// The largest number of levels of nested values that is read.
        limit: usize,
    },
    /// A value of a chat has no JSON form, such as a timestamp.
    #[error("a chat cannot contain the value {value}")]
    ValueUnsupported {
        /// The value as text.
        value: String,
    },
    /// The row cannot be decoded, with the message of the Parquet library.
    #[error("cannot decode the row: {0}")]
    RowUnreadable(String),
    /// The record is a chat, but the source has no chat template.
    #[error("the record is a chat, but text is expected")]
    UnexpectedChat,
    /// The chat has the wrong form, or its template failed.
    #[error(transparent)]
    Chat(#[from] ChatProblem),
}

impl RecordProblem {
    /// Converts the problem of a record to a diagnostic with the text `message`, and adds the
    /// problem's fields and help.
    pub(super) fn to_diagnostic(&self, message: String) -> Diagnostic {
        const CONTENT_HELP: &str = "the field that train.data.field names must be a text or, with `format: chat`, a list of messages";
        let error = |code| Diagnostic::error(code, message.clone());
        match self {
            RecordProblem::InvalidJson { column, .. } => {
                error(codes::DATA_RECORD_INVALID).with_field("column", *column).with_help(CONTENT_HELP)
            }
            RecordProblem::TooMuchText { limit } => error(codes::DATA_LIMIT_EXCEEDED)
                .with_field("text_limit_bytes", *limit)
                .with_help("check that the file comes from a source that you trust"),
            RecordProblem::LineTooLong { .. } | RecordProblem::RowTooLong { .. } => {
                error(codes::DATA_RECORD_INVALID).with_help("split the record into shorter ones")
            }
            RecordProblem::UnexpectedChat => error(codes::DATA_RECORD_INVALID).with_help(CONTENT_HELP),
            RecordProblem::FieldMissing { field, present } => error(codes::DATA_FIELD_MISSING)
                .with_field("field", field.as_str())
                .with_field("present_fields", present.clone())
                .with_help("set train.data.field to one of the record's fields"),
            RecordProblem::ColumnNull { column } => {
                error(codes::DATA_FIELD_MISSING).with_field("field", column.as_str()).with_help(CONTENT_HELP)
            }
            RecordProblem::ColumnNotText { column } => {
                error(codes::DATA_FIELD_INVALID).with_field("field", column.as_str()).with_help(CONTENT_HELP)
            }
            RecordProblem::NestedTooDeep { .. } | RecordProblem::ValueUnsupported { .. } => {
                error(codes::DATA_FIELD_INVALID).with_help(CONTENT_HELP)
            }
            RecordProblem::RowUnreadable(_) => error(codes::PARQUET_UNREADABLE).with_help(DAMAGED_FILE_HELP),
            RecordProblem::Chat(problem) => problem.to_diagnostic(message),
        }
    }
}

/// The help text for a Parquet file that cannot be decoded.
const DAMAGED_FILE_HELP: &str = "write the file again; it is damaged or cut off";

/// The reason why a Parquet file as a whole cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum ParquetProblem {
    /// The file is damaged, cut off, or has an unsupported codec. The text is the message of the
    /// Parquet library.
    #[error("the file is damaged or not supported: {0}")]
    Undecodable(String),
    /// The Parquet library panicked, which only damaged files cause.
    #[error("the file is damaged: the decoder panicked")]
    DecoderPanicked,
    /// The file has more columns than the limit.
    #[error("the file has {count} columns, more than {limit}")]
    TooManyColumns {
        /// Number of columns of the file.
        count: usize,
        /// The largest number of columns that is supported.
        limit: usize,
    },
    /// The file lacks the column with the text or chat.
    #[error("the file has no column `{column}`; it has {}", quote_names(present))]
    ColumnMissing {
        /// The value of `train.data.field`.
        column: String,
        /// Names of the first eight columns of the file, or of all columns if there are fewer.
        present: Vec<String>,
    },
}

impl ParquetProblem {
    /// Converts the problem of a Parquet file to a diagnostic with the text `message`, and adds the
    /// problem's fields and help.
    pub(super) fn to_diagnostic(&self, message: String) -> Diagnostic {
        match self {
            ParquetProblem::Undecodable(_) | ParquetProblem::DecoderPanicked => {
                Diagnostic::error(codes::PARQUET_UNREADABLE, message).with_help(DAMAGED_FILE_HELP)
            }
            ParquetProblem::TooManyColumns { count, .. } => {
                Diagnostic::error(codes::PARQUET_TOO_MANY_COLUMNS, message)
                    .with_field("columns", *count)
                    .with_help("write the column with the text to another file")
            }
            ParquetProblem::ColumnMissing { column, present } => {
                Diagnostic::error(codes::DATA_FIELD_MISSING, message)
                    .with_field("field", column.as_str())
                    .with_field("present_fields", present.clone())
                    .with_help("set train.data.field to one of the file's columns")
            }
        }
    }
}

/// The error of a chat template that could not be compiled or rendered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateFailure {
    /// Whether the template was stopped because it executed too many instructions.
    pub(crate) is_endless: bool,
    /// The engine's or the template's message.
    pub(crate) detail: String,
    /// The line of the chat template, from 1, if known.
    pub(crate) line: Option<usize>,
}

impl fmt::Display for TemplateFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)?;
        match self.line {
            Some(line) => write!(f, " (line {line} of the chat template)"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for TemplateFailure {}

/// Why the messages of a chat cannot be converted to text by the chat template, or to tokens with a
/// loss mask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum ChatProblem {
    /// The messages are not a list.
    #[error("the messages are not a list")]
    MessagesNotAList,
    /// The list of messages is empty.
    #[error("the list of messages is empty")]
    NoMessages,
    /// A message is not an object with a role.
    #[error("message {message} has no `role`")]
    RoleMissing {
        /// The number of the message, from 1.
        message: usize,
    },
    /// A message contains a character that is reserved for generation tags.
    #[error("message {message} contains a reserved character (U+F70A1 or U+F70A2)")]
    ReservedCharacter {
        /// The number of the message, from 1.
        message: usize,
    },
    /// The template renders a message differently if further messages follow.
    #[error(
        "the assistant's text in message {message} cannot be located: \
         the chat template writes earlier messages differently when later ones follow"
    )]
    TargetsAmbiguous {
        /// The number of the message, from 1.
        message: usize,
    },
    /// The rendered chat has no text of the assistant.
    #[error("the chat has no text of the assistant to train on")]
    NoAssistantText,
    /// A generation tag has no counterpart, or tags are nested.
    #[error("the generation tags of the chat template are not paired")]
    UnpairedGenerationTags,
    /// The template failed.
    #[error("the chat template failed: {0}")]
    Template(TemplateFailure),
}

impl ChatProblem {
    /// Converts the problem of a chat to a diagnostic with the text `message`, and adds the
    /// problem's fields and help.
    fn to_diagnostic(&self, message: String) -> Diagnostic {
        const MESSAGE_HELP: &str = "each message must be an object with a role and a content, such as \
                                    {\"role\": \"user\", \"content\": \"…\"}";
        const TEMPLATE_HELP: &str = "correct the chat template, or the record";
        let error = |code| Diagnostic::error(code, message);
        match self {
            ChatProblem::MessagesNotAList | ChatProblem::NoMessages => {
                error(codes::CHAT_MESSAGES_INVALID).with_help(MESSAGE_HELP)
            }
            ChatProblem::RoleMissing { message } | ChatProblem::ReservedCharacter { message } => {
                error(codes::CHAT_MESSAGES_INVALID)
                    .with_field("message_number", *message)
                    .with_help(MESSAGE_HELP)
            }
            ChatProblem::TargetsAmbiguous { message } => {
                error(codes::CHAT_TARGETS_AMBIGUOUS).with_field("message_number", *message).with_help(
                    "enclose the assistant's text in {% generation %} and {% endgeneration %} in the chat \
                     template, or set train.data.loss_on: all",
                )
            }
            ChatProblem::NoAssistantText => error(codes::CHAT_WITHOUT_ASSISTANT)
                .with_help("remove the record, or set train.data.loss_on: all"),
            ChatProblem::Template(TemplateFailure { line: Some(line), .. }) => {
                error(codes::CHAT_TEMPLATE_FAILED).with_field("template_line", *line).with_help(TEMPLATE_HELP)
            }
            ChatProblem::Template(_) | ChatProblem::UnpairedGenerationTags => {
                error(codes::CHAT_TEMPLATE_FAILED).with_help(TEMPLATE_HELP)
            }
        }
    }
}

/// Why a chat template cannot be loaded: its file cannot be read, there is none, or its syntax is
/// wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum ChatTemplateProblem {
    /// The file of `train.data.chat_template` does not exist.
    #[error("{} does not exist", .path.display())]
    FileMissing {
        /// Path of the template file.
        path: PathBuf,
    },
    /// The file of the template cannot be read.
    #[serde(skip)]
    #[error("cannot read {}: {problem}", .path.display())]
    FileUnreadable {
        /// Path of the template file.
        path: PathBuf,
        /// The reason why the file cannot be read.
        problem: TokenizerTextFileError,
    },
    /// The job names no template, and the tokenizer has none.
    #[error("the tokenizer has no chat template")]
    TokenizerHasNone,
    /// The tokenizer's configuration lists several templates without a default.
    #[error("{TOKENIZER_CONFIG_FILE} lists several chat templates, and none is named `default`")]
    NoDefault,
    /// The template in the tokenizer's configuration is not a string.
    #[error("the chat_template of {TOKENIZER_CONFIG_FILE} is not a string")]
    NotAString,
    /// The template is larger than the limit.
    #[error("the template is larger than {} MiB", limit >> 20)]
    TooLarge {
        /// The largest size of a template, in bytes.
        limit: usize,
    },
    /// The template is not valid Jinja.
    #[error("{0}")]
    Syntax(TemplateFailure),
}

impl ChatTemplateProblem {
    /// Converts the problem of a chat template to a diagnostic with the text `message`, and adds
    /// the problem's help.
    pub(super) fn to_diagnostic(&self, message: String) -> Diagnostic {
        match self {
            ChatTemplateProblem::FileMissing { .. } => {
                Diagnostic::error(codes::CHAT_TEMPLATE_MISSING, message)
            }
            ChatTemplateProblem::TokenizerHasNone => Diagnostic::error(codes::CHAT_TEMPLATE_MISSING, message)
                .with_help("set train.data.chat_template to a Jinja file, or set `format: text`"),
            ChatTemplateProblem::NoDefault => Diagnostic::error(codes::CHAT_TEMPLATE_INVALID, message)
                .with_help("set train.data.chat_template to a Jinja file"),
            _ => Diagnostic::error(codes::CHAT_TEMPLATE_INVALID, message),
        }
    }
}

/// Why a small text file, such as a chat template, cannot be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TokenizerTextFileError {
    /// The operating system reported an error, with its message.
    #[error("{0}")]
    Io(String),
    /// The file is not a regular file.
    #[error("the file is a directory, device or pipe")]
    NotRegular,
    /// The file is larger than the limit.
    #[error("the file is larger than {limit} bytes")]
    TooLarge {
        /// The largest size that is read, in bytes.
        limit: u64,
    },
    /// The file is not UTF-8.
    #[error("invalid UTF-8 at byte {offset}")]
    NotUtf8 {
        /// The position of the first invalid byte, from 0.
        offset: usize,
    },
}

/// The reason why a file of the tokenizer cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum TokenizerProblem {
    /// tokenizer.json does not exist.
    #[error("the file does not exist")]
    FileMissing,
    /// tokenizer.json or a companion file cannot be read.
    #[serde(skip)]
    #[error("cannot read the file: {0}")]
    FileUnreadable(TokenizerTextFileError),
    /// The file is not a Hugging Face tokenizer.json. The text is the message of the tokenizer
    /// library.
    #[error("the file is not a valid tokenizer.json: {0}")]
    InvalidTokenizerJson(String),
    /// A companion file is not JSON. The text is the message of the parser.
    #[error("the file is not valid JSON: {0}")]
    InvalidCompanionJson(String),
    /// A companion file names an end-of-sequence token that the tokenizer does not have.
    #[error("the file names the eos_token `{eos_token}`, which is not a token of tokenizer.json")]
    EosTokenUnknown {
        /// The token's text.
        eos_token: String,
    },
    /// No special token of the tokenizer is known to end documents.
    #[error("no special token is known to end a document; expected one of {}", KNOWN_EOD_TOKENS.join(", "))]
    NoEndOfDocument,
    /// The largest token id is beyond the largest vocabulary.
    #[error("token id {id} is too large; token ids must be below {limit}")]
    TokenIdTooLarge {
        /// The largest token id.
        id: u32,
        /// The largest vocabulary size.
        limit: u32,
    },
}

impl TokenizerProblem {
    /// Converts the problem of a tokenizer file to a diagnostic with the text `message`, and adds
    /// the problem's help.
    pub(super) fn to_diagnostic(&self, message: String) -> Diagnostic {
        let error = |code| Diagnostic::error(code, message);
        match self {
            TokenizerProblem::FileMissing => error(codes::TOKENIZER_MISSING)
                .with_help("train.data.tokenizer is a path relative to run.workdir"),
            TokenizerProblem::FileUnreadable(_) => error(codes::TOKENIZER_UNREADABLE),
            TokenizerProblem::InvalidTokenizerJson(_) | TokenizerProblem::InvalidCompanionJson(_) => {
                error(codes::TOKENIZER_INVALID)
            }
            TokenizerProblem::EosTokenUnknown { .. } => error(codes::TOKENIZER_EOS_UNKNOWN),
            TokenizerProblem::NoEndOfDocument => error(codes::TOKENIZER_EOS_UNKNOWN).with_help(format!(
                "name the token as \"eos_token\" in a {TOKENIZER_CONFIG_FILE} next to the file"
            )),
            TokenizerProblem::TokenIdTooLarge { .. } => error(codes::TOKENIZER_UNSUPPORTED),
        }
    }
}

/// The kind of access to a token cache file (create, lock, read or write) that an error message
/// names as failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenCacheOperation {
    /// Create the directory.
    Create,
    /// Open or create the lock file.
    Lock,
    /// Open or read a cache file.
    Read,
    /// Write a cache file.
    Write,
}

impl fmt::Display for TokenCacheOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenCacheOperation::Create => "create",
            TokenCacheOperation::Lock => "lock",
            TokenCacheOperation::Read => "read",
            TokenCacheOperation::Write => "write",
        })
    }
}

/// Why an existing token cache file cannot be used, for example a wrong size, so that launch builds
/// it again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenCacheDamage {
    /// The file is shorter than a header.
    #[error("the file has only {bytes} bytes, less than a header")]
    TooSmall {
        /// The size of the file, in bytes.
        bytes: u64,
    },
    /// The file does not begin with the magic number of token caches.
    #[error("the file is not a token cache")]
    NotATokenCache,
    /// The file has another version of the format.
    #[error("the file has format version {version}, not {expected}")]
    Version {
        /// The version in the file.
        version: u32,
        /// The version that this program reads.
        expected: u32,
    },
    /// The header does not match its digest, or describes more data than a file can hold.
    #[error("the header is damaged")]
    HeaderCorrupt,
    /// The header has a valid digest, but its values contradict each other.
    #[error("the values of the header contradict each other")]
    HeaderInconsistent,
    /// The file was built from other data, with another tokenizer or for another split.
    #[error("the file was built from other data")]
    OtherKey,
    /// The file does not have the length that its header implies.
    #[error("the file has {bytes} bytes, not {expected}")]
    Length {
        /// The size of the file, in bytes.
        bytes: u64,
        /// The size that the header implies, in bytes.
        expected: u64,
    },
    /// A token id is not below the vocabulary size.
    #[error("the file contains token ids beyond its vocabulary")]
    TokenOutOfVocabulary,
    /// The tokens or offsets do not match their digest.
    #[error("the content does not match its digest")]
    DigestMismatch,
    /// The document offsets do not rise from 0 to the number of tokens.
    #[error("the document offsets are wrong")]
    InvalidOffsets,
}
