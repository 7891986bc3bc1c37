//! The causes in a [`super::DataError`]: the problems of a pattern, record, template, tokenizer
//! file or token cache.
use diagnostic::{Code, codes::data as codes};
use minijinja::ErrorKind;
use parquet::errors::ParquetError;
use serde_json::{Map, Value, error::Category, json};
use std::{fmt, io, path::PathBuf};

/// Formats names of fields or columns as a list of quoted words.
fn quote_names(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Returns the fields of a JSON object, or no fields for any other value.
fn take_fields(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// The reason why a pattern of data files is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternProblem {
    /// The pattern has no characters, or contains a NUL byte.
    #[error("the pattern is empty or contains a NUL byte")]
    EmptyOrNul,
    /// The braces of the pattern stand for too many patterns.
    #[error("the braces stand for more than {limit} patterns")]
    TooManyAlternatives {
        /// The largest number of patterns that one pattern may stand for.
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

/// The line or row of a record in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPosition {
    /// A line of a JSON lines file, from 1.
    Line(u64),
    /// A row of a Parquet file, from 1.
    Row(u64),
}

impl RecordPosition {
    /// Returns name and value of the diagnostic's field: `line` or `row`, and the number.
    pub(super) fn diagnostic_field(self) -> (&'static str, u64) {
        match self {
            RecordPosition::Line(number) => ("line", number),
            RecordPosition::Row(number) => ("row", number),
        }
    }
}

impl fmt::Display for RecordPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.diagnostic_field().1)
    }
}

/// The reason why a record of a JSON lines or Parquet file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordProblem {
    /// The line is not a JSON object whose field has the expected type.
    #[error("{reason} (column {column})")]
    InvalidJson {
        /// The kind of mistake: syntax error, premature end, or value of another type.
        category: Category,
        /// The parser's message without its position.
        reason: String,
        /// The column of the mistake, from 1, bytes.
        column: usize,
    },
    /// The line is longer than the limit.
    #[error("the line is longer than {} MiB", limit >> 20)]
    LineTooLong {
        /// Longest line that is read, bytes.
        limit: usize,
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
    /// The row cannot be decoded.
    #[error("cannot decode the row: {0}")]
    RowUnreadable(ParquetError),
    /// The record is a chat, but the source has no chat template.
    #[error("the record is a chat, but text is expected")]
    UnexpectedChat,
    /// The chat has the wrong form, or its template failed.
    #[error(transparent)]
    Chat(#[from] ChatProblem),
}

impl RecordProblem {
    /// Returns the diagnostic code of the problem.
    pub(super) fn code(&self) -> Code {
        match self {
            RecordProblem::InvalidJson { .. }
            | RecordProblem::LineTooLong { .. }
            | RecordProblem::UnexpectedChat => codes::DATA_RECORD_INVALID,
            RecordProblem::FieldMissing { .. } | RecordProblem::ColumnNull { .. } => {
                codes::DATA_FIELD_MISSING
            }
            RecordProblem::ColumnNotText { .. }
            | RecordProblem::NestedTooDeep { .. }
            | RecordProblem::ValueUnsupported { .. } => codes::DATA_FIELD_INVALID,
            RecordProblem::RowUnreadable(_) => codes::PARQUET_UNREADABLE,
            RecordProblem::Chat(problem) => problem.code(),
        }
    }

    /// Returns the edit or command that resolves the problem.
    pub(super) fn help(&self) -> &'static str {
        match self {
            RecordProblem::FieldMissing { .. } => "set train.data.field to one of the record's fields",
            RecordProblem::Chat(ChatProblem::TargetsAmbiguous { .. }) => {
                "enclose the assistant's text in {% generation %} and {% endgeneration %} in the chat template, \
                 or set train.data.loss_on: all"
            }
            RecordProblem::Chat(ChatProblem::NoAssistantText) => {
                "remove the record, or set train.data.loss_on: all"
            }
            RecordProblem::Chat(ChatProblem::Template(_) | ChatProblem::UnpairedGenerationTags) => {
                "correct the chat template, or the record"
            }
            RecordProblem::Chat(_) => {
                "each message must be an object with a role and a content, such as \
                 {\"role\": \"user\", \"content\": \"…\"}"
            }
            RecordProblem::LineTooLong { .. } => "split the record into shorter ones",
            RecordProblem::RowUnreadable(_) => "write the file again; it is damaged or cut off",
            _ => {
                "the field that train.data.field names must be a text or, with `format: chat`, a list of messages"
            }
        }
    }

    /// Returns the values of the problem by field name, for the diagnostic.
    pub(super) fn fields(&self) -> Map<String, Value> {
        take_fields(match self {
            RecordProblem::InvalidJson { column, .. } => json!({ "column": column }),
            RecordProblem::FieldMissing { field, present } => {
                json!({ "field": field, "present_fields": present })
            }
            RecordProblem::ColumnNull { column } | RecordProblem::ColumnNotText { column } => {
                json!({ "field": column })
            }
            RecordProblem::Chat(problem) => return problem.fields(),
            _ => json!({}),
        })
    }
}

/// The reason why a Parquet file as a whole cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ParquetProblem {
    /// The file is damaged, cut off, or has an unsupported codec.
    #[error("the file is damaged or not supported: {0}")]
    Undecodable(ParquetError),
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
    /// Returns the edit or command that resolves the problem.
    pub(super) fn help(&self) -> &'static str {
        match self {
            ParquetProblem::ColumnMissing { .. } => "set train.data.field to one of the file's columns",
            ParquetProblem::TooManyColumns { .. } => "write the column with the text to another file",
            _ => "write the file again; it is damaged or cut off",
        }
    }

    /// Returns the diagnostic code of the problem.
    pub(super) fn code(&self) -> Code {
        match self {
            ParquetProblem::Undecodable(_) | ParquetProblem::DecoderPanicked => codes::PARQUET_UNREADABLE,
            ParquetProblem::TooManyColumns { .. } => codes::PARQUET_TOO_MANY_COLUMNS,
            ParquetProblem::ColumnMissing { .. } => codes::DATA_FIELD_MISSING,
        }
    }

    /// Returns the values of the problem by field name, for the diagnostic.
    pub(super) fn fields(&self) -> Map<String, Value> {
        take_fields(match self {
            ParquetProblem::TooManyColumns { count, .. } => json!({ "columns": count }),
            ParquetProblem::ColumnMissing { column, present } => {
                json!({ "field": column, "present_fields": present })
            }
            _ => json!({}),
        })
    }
}

/// An error from rendering or compiling a chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateFailure {
    /// The kind of error in terms of the template engine.
    pub(crate) kind: ErrorKind,
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

/// The reason why a chat cannot be rendered to a text with a loss mask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    /// Returns the diagnostic code of the problem.
    fn code(&self) -> Code {
        match self {
            ChatProblem::MessagesNotAList
            | ChatProblem::NoMessages
            | ChatProblem::RoleMissing { .. }
            | ChatProblem::ReservedCharacter { .. } => codes::CHAT_MESSAGES_INVALID,
            ChatProblem::TargetsAmbiguous { .. } => codes::CHAT_TARGETS_AMBIGUOUS,
            ChatProblem::NoAssistantText => codes::CHAT_WITHOUT_ASSISTANT,
            ChatProblem::UnpairedGenerationTags | ChatProblem::Template(_) => codes::CHAT_TEMPLATE_FAILED,
        }
    }

    /// Returns the values of the problem by field name, for the diagnostic.
    fn fields(&self) -> Map<String, Value> {
        take_fields(match self {
            ChatProblem::RoleMissing { message }
            | ChatProblem::ReservedCharacter { message }
            | ChatProblem::TargetsAmbiguous { message } => json!({ "message_number": message }),
            ChatProblem::Template(TemplateFailure { line: Some(line), .. }) => {
                json!({ "template_line": line })
            }
            _ => json!({}),
        })
    }
}

/// The reason why a chat template cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateProblem {
    /// The file of `train.data.chat_template` does not exist.
    #[error("{} does not exist", .path.display())]
    FileMissing {
        /// Path of the template file.
        path: PathBuf,
    },
    /// The file of the template cannot be read.
    #[error("cannot read {}: {problem}", .path.display())]
    FileUnreadable {
        /// Path of the template file.
        path: PathBuf,
        /// The reason why the file cannot be read.
        problem: TextFileError,
    },
    /// The job names no template, and the tokenizer has none.
    #[error("the tokenizer has no chat template")]
    TokenizerHasNone,
    /// The tokenizer's configuration lists several templates without a default.
    #[error("{config_file} lists several chat templates, and none is named `default`")]
    NoDefault {
        /// The name of the tokenizer's configuration file.
        config_file: &'static str,
    },
    /// The template in the tokenizer's configuration is not a string.
    #[error("the chat_template of {config_file} is not a string")]
    NotAString {
        /// The name of the tokenizer's configuration file.
        config_file: &'static str,
    },
    /// The template is larger than the limit.
    #[error("the template is larger than {} MiB", limit >> 20)]
    TooLarge {
        /// The largest size of a template, bytes.
        limit: usize,
    },
    /// The template is not valid Jinja.
    #[error("{0}")]
    Syntax(TemplateFailure),
}

impl ChatTemplateProblem {
    /// Returns the diagnostic code of the problem.
    pub(super) fn code(&self) -> Code {
        match self {
            ChatTemplateProblem::FileMissing { .. } | ChatTemplateProblem::TokenizerHasNone => {
                codes::CHAT_TEMPLATE_MISSING
            }
            _ => codes::CHAT_TEMPLATE_INVALID,
        }
    }

    /// Returns the edit or command that resolves the problem, if one is known.
    pub(super) fn help(&self) -> Option<&'static str> {
        match self {
            ChatTemplateProblem::TokenizerHasNone => {
                Some("set train.data.chat_template to a Jinja file, or set `format: text`")
            }
            ChatTemplateProblem::NoDefault { .. } => Some("set train.data.chat_template to a Jinja file"),
            _ => None,
        }
    }
}

/// The reason why a small text file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TextFileError {
    /// The operating system reported an error.
    #[error("{0}")]
    Io(io::Error),
    /// The file is larger than the limit.
    #[error("the file is larger than {limit} bytes")]
    TooLarge {
        /// The largest size that is read, bytes.
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
#[derive(Debug, thiserror::Error)]
pub enum TokenizerProblem {
    /// tokenizer.json does not exist.
    #[error("the file does not exist")]
    FileMissing,
    /// tokenizer.json or a companion file cannot be read.
    #[error("cannot read the file: {0}")]
    FileUnreadable(TextFileError),
    /// The file is not a Hugging Face tokenizer.json.
    #[error("the file is not a valid tokenizer.json: {0}")]
    InvalidTokenizerJson(tokenizers::Error),
    /// A companion file is not JSON.
    #[error("the file is not valid JSON: {0}")]
    InvalidCompanionJson(serde_json::Error),
    /// A companion file names an end-of-sequence token that the tokenizer does not have.
    #[error("the file names the eos_token `{eos_token}`, which is not a token of {}", .tokenizer.display())]
    EosTokenUnknown {
        /// The token's text.
        eos_token: String,
        /// The path of tokenizer.json.
        tokenizer: PathBuf,
    },
    /// No special token of the tokenizer is known to end documents.
    #[error("no special token is known to end a document; expected one of {}", .known.join(", "))]
    NoEndOfDocument {
        /// The texts of the tokens that are known to end documents.
        known: &'static [&'static str],
        /// The name of the file that can name the end-of-document token.
        config_file: &'static str,
    },
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
    /// Returns the diagnostic code of the problem.
    pub(super) fn code(&self) -> Code {
        match self {
            TokenizerProblem::FileMissing => codes::TOKENIZER_MISSING,
            TokenizerProblem::FileUnreadable(_) => codes::TOKENIZER_UNREADABLE,
            TokenizerProblem::InvalidTokenizerJson(_) | TokenizerProblem::InvalidCompanionJson(_) => {
                codes::TOKENIZER_INVALID
            }
            TokenizerProblem::EosTokenUnknown { .. } | TokenizerProblem::NoEndOfDocument { .. } => {
                codes::TOKENIZER_EOS_UNKNOWN
            }
            TokenizerProblem::TokenIdTooLarge { .. } => codes::TOKENIZER_UNSUPPORTED,
        }
    }

    /// Returns the edit or command that resolves the problem, if one is known.
    pub(super) fn help(&self) -> Option<String> {
        match self {
            TokenizerProblem::FileMissing => {
                Some("train.data.tokenizer is a path relative to run.workdir".into())
            }
            TokenizerProblem::NoEndOfDocument { config_file, .. } => {
                Some(format!("name the token as \"eos_token\" in a {config_file} next to the file"))
            }
            _ => None,
        }
    }
}

/// The operation on the token cache that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheOperation {
    /// Create the directory.
    Create,
    /// Open or create the lock file.
    Lock,
    /// Open or read a cache file.
    Read,
    /// Write a cache file.
    Write,
}

impl fmt::Display for CacheOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CacheOperation::Create => "create",
            CacheOperation::Lock => "lock",
            CacheOperation::Read => "read",
            CacheOperation::Write => "write",
        })
    }
}

/// The reason why a file of the token cache is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheDamage {
    /// The file is shorter than a header.
    #[error("the file has only {bytes} bytes, less than a header")]
    TooSmall {
        /// The size of the file.
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
        /// The size of the file.
        bytes: u64,
        /// The size that the header implies.
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
