//! [`ChatRecord`]: a record of a data file that contains a chat.
use minijinja::Value;

/// The field or column of a chat record that lists the tools which the assistant may call.
pub(crate) const TOOLS_FIELD: &str = "tools";

/// A record of a data file that contains a chat: its messages and tools.
#[derive(Clone, Debug)]
pub(crate) struct ChatRecord {
    /// A list of messages, each an object with `role` and `content`.
    pub(crate) messages: Value,
    /// Tools that the assistant may call, for templates that list them.
    pub(crate) tools: Option<Value>,
}
