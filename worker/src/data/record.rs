//! [`Record`]: the content of one line of a JSON lines file or of one row of a Parquet file. Each
//! record is one document.
use super::{
    chat_template::{ChatRecord, ChatTemplate},
    error::{DataError, RecordProblem},
};

/// The field or column of a chat record with the tools that the assistant may call.
pub(crate) const TOOLS_FIELD: &str = "tools";

/// The content of one record of a data file.
pub(crate) enum Record {
    /// A complete text.
    Text(String),
    /// A chat that a template renders as text.
    Chat(ChatRecord),
}

/// The options with which the records of a data source are converted to text.
#[derive(Clone, Copy)]
pub(crate) struct RecordReadOptions<'a> {
    /// The field or column of a record with the text or messages.
    pub(crate) field: &'a str,
    /// The template that renders chats; absent if records are text.
    pub(crate) chat_template: Option<&'a ChatTemplate>,
}

/// A callback that receives records in order. The outer error ends the reading. The inner error
/// states why the record cannot be used. The reader adds the file and the line or row to the inner
/// error.
pub(crate) type RecordSink<'a> = dyn FnMut(Record) -> Result<Result<(), RecordProblem>, DataError> + 'a;
