//! Passes untrusted bytes to every reader of untrusted input in the worker, for fuzz targets and
//! tests. Crate `ckpt` has the readers of checkpoints, and crate `comm` those of connections
//! between ranks.
//!
//! Each function fails if the input is invalid. A function must not panic, loop forever, or use
//! more memory than the limits of its reader allow. Libraries interpret chat templates, tokenizers
//! and Parquet files in a sandbox process, so that only the process exceeds limits.
use crate::{data, model};
use std::error::Error;

/// The result of passing an untrusted input to a reader: success, or the error with which the
/// reader rejected it.
pub type UntrustedReadResult = Result<(), Box<dyn Error + Send + Sync>>;

/// The sequence length, in tokens, for which a model is built from an untrusted config.json.
const SEQ_LEN: u32 = 64;
/// The size in bytes of the largest reply that is accepted from a sandbox process, which parses
/// untrusted files.
const MAX_REPLY_BYTES: u64 = 1 << 20;

/// Builds a model from the bytes of an untrusted config.json, and lists its parameters without
/// allocating memory for them.
pub fn parse_model_config(bytes: &[u8]) -> UntrustedReadResult {
    let model = model::build_model_from_text(bytes, SEQ_LEN)?;
    drop(model.param_units());
    Ok(())
}

/// Parses an untrusted line of a JSON lines file as a text and as a chat.
pub fn parse_record(bytes: &[u8]) -> UntrustedReadResult {
    let line = str::from_utf8(bytes)?;
    let is_text = data::parse_text_record(line, "text").map(drop);
    is_text.or(data::parse_chat_record(line, "messages").map(drop))?;
    Ok(())
}

/// Parses an untrusted file pattern of the training data, such as `data/{a,b}*.jsonl`, without
/// searching for files.
pub fn parse_file_pattern(bytes: &[u8]) -> UntrustedReadResult {
    Ok(data::parse_untrusted_pattern(str::from_utf8(bytes)?)?)
}

/// Parses an untrusted tokenizer_config.json.
pub fn parse_tokenizer_config(bytes: &[u8]) -> UntrustedReadResult {
    Ok(data::parse_companion(str::from_utf8(bytes)?)?)
}

/// Decodes untrusted bytes as the replies that launch receives from a sandbox process.
pub fn parse_sandbox_replies(bytes: &[u8]) -> UntrustedReadResult {
    sandbox::decode_replies(bytes, MAX_REPLY_BYTES)?;
    Ok(())
}

/// Compiles an untrusted chat template in a sandbox process, and renders chats with it.
pub fn interpret_chat_template(bytes: &[u8]) -> UntrustedReadResult {
    Ok(data::interpret_chat_template(str::from_utf8(bytes)?)?)
}

/// Loads an untrusted tokenizer.json in a sandbox process, and tokenizes texts with it.
pub fn interpret_tokenizer(bytes: &[u8]) -> UntrustedReadResult {
    Ok(data::interpret_tokenizer(str::from_utf8(bytes)?)?)
}

/// Reads the rows of an untrusted Parquet file in a sandbox process.
pub fn interpret_parquet(bytes: &[u8]) -> UntrustedReadResult {
    Ok(data::interpret_parquet(bytes)?)
}

#[cfg(test)]
#[path = "untrusted_tests.rs"]
mod tests;
