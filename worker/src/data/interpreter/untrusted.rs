//! Gives tokenizers, chat templates and Parquet files to a sandbox process, for fuzz targets and
//! tests with untrusted input.
//!
//! The process may reject the input, or end because the input exceeds a limit. Each function panics
//! if the process ends for another reason, such as a forbidden system call.
use super::{
    client::{InterpreterFailure, SandboxInterpreter, TemplateSource},
    limits::{MAX_RECORDS_PER_REPLY, load_request_limits, rows_request_limits},
    message::{Document, DocumentOptions, DocumentResult, OpenParquetReply, Request, RowsReply},
    tokenizer_library,
};
use crate::data::{split::SplitFilter, tokenizer_files::TOKENIZER_FILE};
use jobspec::LossTargets;
use nix::sys::memfd::{MFdFlags, memfd_create};
use sandbox::SandboxError;
use std::{
    fs::File,
    io::Write,
    sync::{Arc, LazyLock},
};

/// The number of threads of the sandbox process in fuzz targets and tests.
const THREADS: usize = 1;
/// The number of times that a fuzz target requests rows of one Parquet file before it stops, even
/// if rows are left.
const MAX_ROW_REQUESTS: usize = 4;
/// The chats that fuzz targets and tests render with each untrusted chat template.
const TEST_CHATS: [&str; 2] = [
    r#"{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}"#,
    r#"{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "é\n"}], "tools": [{"a": 1}]}"#,
];
/// The texts that fuzz targets and tests tokenize with each untrusted tokenizer.
const TEST_TEXTS: [&str; 3] =
    ["a b c", "", "Zoë's 12,345 naïve\t \u{1f680}\u{200d}\r\n</s> xxxxxxxxxxxxxxxx"];

/// The error which reports that an untrusted input was rejected or exceeded a limit of the sandbox
/// process.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct UnusableInput {
    reason: String,
}

/// Creates the error for an untrusted input that was rejected for the reason `reason`.
fn build_unusable_input_error(reason: &impl ToString) -> UnusableInput {
    UnusableInput { reason: reason.to_string() }
}

/// The client of the sandbox process to which all fuzz targets and tests pass untrusted input.
static INTERPRETER: LazyLock<Arc<SandboxInterpreter>> = LazyLock::new(|| SandboxInterpreter::new(THREADS));

/// Returns the options for reading test documents: the name of the field that contains the text or
/// chat, and which parts of a chat count for the loss.
fn create_options(field: &str, loss_on: LossTargets) -> DocumentOptions<'_> {
    DocumentOptions { field, loss_on, filter: SplitFilter::All, tokenize: true }
}

/// Converts a failure of the sandbox process to the error which reports that the untrusted input is
/// unusable. Panics unless a limit was exceeded or a library panicked.
fn to_unusable_input_error(failure: InterpreterFailure) -> UnusableInput {
    let error = failure.error;
    let is_expected = error.exceeded_limit().is_some() || matches!(error, SandboxError::Panicked { .. });
    assert!(is_expected, "the sandbox process failed without an exceeded limit: {error}");
    build_unusable_input_error(&error)
}

/// Converts the result for one test document to an error if the document is invalid or if its text
/// could not be tokenized.
fn require_usable_result(result: DocumentResult) -> Result<(), UnusableInput> {
    match result {
        DocumentResult::Invalid(problem) => Err(build_unusable_input_error(&problem)),
        DocumentResult::TokenizerFailed(message) => Err(build_unusable_input_error(&message)),
        DocumentResult::Tokens(_) | DocumentResult::Valid | DocumentResult::Skipped => Ok(()),
    }
}

/// Compiles an untrusted chat template in the sandbox process, and renders test chats with it.
pub(crate) fn interpret_chat_template(source: &str) -> Result<(), UnusableInput> {
    let special_tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let special_tokens = special_tokens.map(|(name, text)| (name.to_owned(), text.to_owned()));
    let template = TemplateSource { source: source.to_owned(), special_tokens: special_tokens.into() };
    let compiled = INTERPRETER.compile_template(template).map_err(to_unusable_input_error)?;
    compiled.map_err(|failure| build_unusable_input_error(&failure))?;
    for (chat, loss_on) in TEST_CHATS.into_iter().zip([LossTargets::Assistant, LossTargets::All]) {
        let options = create_options("messages", loss_on);
        let result = INTERPRETER.interpret_document(Document::ChatLine(chat), options);
        require_usable_result(result.map_err(to_unusable_input_error)?)?;
    }
    Ok(())
}

/// Loads an untrusted tokenizer.json in the sandbox process, tokenizes test texts, and converts
/// tokens to text.
pub(crate) fn interpret_tokenizer(json: &str) -> Result<(), UnusableInput> {
    let files: Arc<[(String, String)]> = Arc::new([(TOKENIZER_FILE.to_owned(), json.to_owned())]);
    let loaded = INTERPRETER.load_tokenizer(&files).map_err(to_unusable_input_error)?;
    let info = loaded.map_err(|(_, problem)| build_unusable_input_error(&problem))?;
    for text in TEST_TEXTS {
        let options = create_options("text", LossTargets::All);
        let result = INTERPRETER.interpret_document(Document::Text(text), options);
        require_usable_result(result.map_err(to_unusable_input_error)?)?;
    }
    let tokens = [0, info.eod, info.vocab_size.saturating_sub(1), u32::MAX];
    INTERPRETER.decode_tokens(&tokens).map_err(to_unusable_input_error)?;
    Ok(())
}

/// Parses an untrusted tokenizer_config.json.
pub(crate) fn parse_companion(text: &str) -> Result<(), UnusableInput> {
    let checked = tokenizer_library::check_companion(text);
    let template = checked.map_err(|problem| build_unusable_input_error(&problem))?;
    template.map_err(|problem| build_unusable_input_error(&problem))
}

/// Reads the rows of an untrusted Parquet file in the sandbox process, as texts and as chats.
pub(crate) fn interpret_parquet(bytes: &[u8]) -> Result<(), UnusableInput> {
    let as_texts = interpret_rows(bytes, "text", false);
    as_texts.or(interpret_rows(bytes, "messages", true))
}

/// Reads the rows of an untrusted Parquet file whose text or chat is in the column `field`.
fn interpret_rows(bytes: &[u8], field: &str, is_chat: bool) -> Result<(), UnusableInput> {
    let memory = memfd_create(c"launch-untrusted", MFdFlags::MFD_CLOEXEC)
        .map_err(|error| build_unusable_input_error(&error))?;
    let mut file = File::from(memory);
    file.write_all(bytes).map_err(|error| build_unusable_input_error(&error))?;
    let mut stream = INTERPRETER.open_stream();
    let open = Request::OpenParquet { field, is_chat };
    stream.send(&open, Some(&file), &load_request_limits(0)).map_err(to_unusable_input_error)?;
    let opened: OpenParquetReply = stream.receive().map_err(to_unusable_input_error)?;
    opened.map_err(|problem| build_unusable_input_error(&problem))?;
    let options = create_options(field, LossTargets::All);
    let mut long_row_bytes = 0;
    for _ in 0..MAX_ROW_REQUESTS {
        let request = Request::ReadRows { rows: MAX_RECORDS_PER_REPLY, long_row_bytes, options };
        let reply: RowsReply =
            stream.call(&request, &rows_request_limits(THREADS)).map_err(to_unusable_input_error)?;
        reply.rows.into_iter().try_for_each(require_usable_result)?;
        if reply.at_end {
            break;
        }
        long_row_bytes = reply.long_row_bytes.unwrap_or(0);
    }
    Ok(())
}
