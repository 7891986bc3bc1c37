//! [`ChatRecord`]: a chat of a data file.
use minijinja::Value;

/// The field or column of a chat record with the tools that the assistant may call.
pub(crate) const TOOLS_FIELD: &str = "tools";

/// A chat of a data file: messages and tools.
#[derive(Clone, Debug)]
pub(crate) struct ChatRecord {
    /// A list of messages, each an object with `role` and `content`.
    pub(crate) messages: Value,
    /// Tools that the assistant may call, for templates that list them.
    pub(crate) tools: Option<Value>,
}
