//! [`Record`]: one line of a JSON lines file or one row of a Parquet file, which is one document.
use super::{
    chat_template::{ChatRecord, ChatTemplate},
    error::{DataError, RecordProblem},
};

/// The field of a chat record with the tools that the assistant may call.
pub(crate) const TOOLS_FIELD: &str = "tools";

/// The content of one record.
pub(crate) enum Record {
    /// A text.
    Text(String),
    /// A chat, which a template renders as text.
    Chat(ChatRecord),
}

/// How the records of a source become text.
#[derive(Clone, Copy)]
pub(crate) struct RecordFormat<'a> {
    /// The field or column of a record with its text or messages.
    pub(crate) field: &'a str,
    /// The template that renders chats; absent if records are text.
    pub(crate) chat_template: Option<&'a ChatTemplate>,
}

/// Receives records. The outer error ends the reading; the inner one states why the record cannot
/// be used, and the reader adds the file and the line to it.
pub(crate) type RecordSink<'a> = dyn FnMut(Record) -> Result<Result<(), RecordProblem>, DataError> + 'a;
