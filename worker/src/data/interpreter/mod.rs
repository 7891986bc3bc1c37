//! Interprets tokenizers, chat templates and Parquet files with third-party libraries, in a sandbox
//! process because the files are untrusted.
//!
//! [`SandboxInterpreter`] starts the process and sends requests. [`create_request_handler`] answers
//! them in the process. Both sides share the types in `message`.
mod client;
mod handler;
mod limits;
mod message;
mod parquet_rows;
mod template;
mod text_division;
mod tokenizer_library;
pub(crate) mod untrusted;

pub use client::SANDBOX_ARGUMENT;
pub(crate) use client::{InterpreterFailure, RequestStream, SandboxInterpreter, TemplateSource};
pub(crate) use handler::create_request_handler;
pub(crate) use limits::{
    MAX_RECORDS_PER_REPLY, MAX_REQUEST_TEXT_BYTES, documents_request_limits, long_row_request_limits,
    rows_request_limits,
};
pub(crate) use message::{
    DecodeTokensReply, Document, DocumentOptions, DocumentResult, OpenParquetReply, Request, RowsReply,
    TokenizerFile, TokenizerInfo,
};
#[cfg(test)]
pub(crate) use {
    parquet_rows::{ParquetRows, RowRecord},
    template::CompiledTemplate,
};

#[cfg(test)]
mod parquet_limit_tests;
#[cfg(test)]
mod speed_tests;
#[cfg(test)]
mod tests;
