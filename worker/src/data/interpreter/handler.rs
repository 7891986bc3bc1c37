//! The sandbox process: interprets tokenizers, chat templates and Parquet files.
use super::{
    limits::{MAX_ROWS_TEXT_BYTES, decoding_cpu_limit, document_cpu_limit, documents_cpu_limit},
    message::{
        CompileTemplateReply, DecodeTokensReply, Document, DocumentOptions, DocumentResult,
        LoadTokenizerReply, OpenParquetReply, Request, RowsReply, TokenList,
    },
    parquet_rows::{ParquetRows, RowRecord},
    template::CompiledTemplate,
    tokenizer_library::LibraryTokenizer,
};
use crate::data::{
    byte_tokenizer,
    chat_record::ChatRecord,
    error::{
        ChatProblem, InterpretationStep, ParquetProblem, RecordProblem, TemplateFailure, TokenizerProblem,
    },
    json_lines::parse_chat_record,
    loss_masked_text::LossMaskedText,
    tokenizer_files::TOKENIZER_FILE,
};
use jobspec::LossTargets;
use protocol::message_pack;
use rayon::prelude::*;
use sandbox::{
    ReportStepFn, RequestHandler, STACK_BYTES, SandboxSettings, limit_cpu_time, limit_process_cpu_time,
    take_panic_message,
};
use serde::Serialize;
use std::{
    borrow::Cow,
    fs::File,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Creates the object that handles the requests to a sandbox process, and starts the threads that
/// interpret documents.
pub(crate) fn create_request_handler(settings: &SandboxSettings) -> Box<dyn RequestHandler> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(settings.threads as usize);
    // Without the pool, rayon starts a pool with other stacks at its first use.
    _ = threads.stack_size(STACK_BYTES).build_global();
    let interpreter = DocumentInterpreter::default();
    Box::new(InterpreterRequestHandler { interpreter, rows: None, long_row: None })
}

/// Handles requests in the sandbox process, with the loaded tokenizer and chat template and the
/// open Parquet file.
struct InterpreterRequestHandler {
    interpreter: DocumentInterpreter,
    rows: Option<ParquetRows>,
    /// The next row of the Parquet file, if it was read and needs a separate request.
    long_row: Option<RowRecord>,
}

/// The tokenizer and the chat template loaded in the sandbox process, by which all threads convert
/// chats and texts to tokens.
#[derive(Default)]
pub(super) struct DocumentInterpreter {
    /// The loaded tokenizer. Without one, tokens are bytes.
    tokenizer: Option<LibraryTokenizer>,
    template: Option<CompiledTemplate>,
}

impl RequestHandler for InterpreterRequestHandler {
    fn handle_request(
        &mut self,
        request: &[u8],
        file: Option<File>,
        report_step: &mut ReportStepFn,
    ) -> Vec<u8> {
        // The caller reports an empty reply as an invalid one.
        let Ok(request) = message_pack::from_slice::<Request>(request) else { return Vec::new() };
        let mut begin = |step: InterpretationStep| report_step(step as u64);
        match request {
            Request::LoadTokenizer { files } => {
                begin(InterpretationStep::LoadTokenizer);
                encode_reply(&self.interpreter.load_tokenizer(&files))
            }
            Request::CompileTemplate { source, special_tokens } => {
                begin(InterpretationStep::CompileTemplate);
                encode_reply(&self.interpreter.compile_template(source, &special_tokens))
            }
            Request::Documents { documents, options } => {
                encode_reply(&self.interpreter.interpret_documents(&documents, &options, &mut begin))
            }
            Request::OpenParquet { field, is_chat } => {
                begin(InterpretationStep::ReadRows);
                encode_reply(&self.open_parquet(file, field, is_chat))
            }
            Request::ReadRows { rows, long_row_bytes, options } => {
                encode_reply(&self.interpret_rows(rows, long_row_bytes, &options, &mut begin))
            }
            Request::DecodeTokens { tokens } => {
                begin(InterpretationStep::DecodeTokens);
                encode_reply(&self.interpreter.decode_tokens(&tokens.0))
            }
        }
    }
}

/// Encodes a reply of the sandbox process as bytes. An empty reply means that the value cannot be
/// encoded.
fn encode_reply(reply: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(reply).unwrap_or_default()
}

/// Runs `work`, which gives a library an input of `bytes` bytes, with a CPU time limit for that
/// size, and catches panics of the library. If the library panics, returns the message of the
/// panic, converted by `convert`.
fn run_with_cpu_limit<T>(bytes: usize, convert: impl FnOnce(String) -> T, work: impl FnOnce() -> T) -> T {
    let result = catch_unwind(AssertUnwindSafe(|| limit_cpu_time(document_cpu_limit(bytes), work)));
    result.unwrap_or_else(|_| convert(describe_last_panic()))
}

/// Returns the message for the most recent panic of a library.
fn describe_last_panic() -> String {
    format!("the library failed: {}", take_panic_message())
}

/// A document before tokenizing: its text, its text with a loss mask, or a final result such as an
/// error.
enum PreparedDocument<'a> {
    Text(Cow<'a, str>),
    Masked(LossMaskedText),
    Done(DocumentResult),
}

impl PreparedDocument<'_> {
    /// Returns the size in bytes of the text that is tokenized.
    fn text_bytes(&self) -> usize {
        match self {
            PreparedDocument::Text(text) => text.len(),
            PreparedDocument::Masked(masked) => masked.text.len(),
            PreparedDocument::Done(_) => 0,
        }
    }
}

impl InterpreterRequestHandler {
    /// Opens the Parquet file that a request passed to the sandbox process as a file descriptor.
    fn open_parquet(&mut self, file: Option<File>, field: &str, is_chat: bool) -> OpenParquetReply {
        let Some(file) = file else { return Err(ParquetProblem::Undecodable("no file".to_owned())) };
        self.long_row = None;
        let open = || limit_cpu_time(decoding_cpu_limit(), || ParquetRows::open(file, field, is_chat));
        let opened = catch_unwind(open);
        self.rows = Some(opened.unwrap_or(Err(ParquetProblem::DecoderPanicked))?);
        Ok(())
    }

    /// Reads up to `limit` of the next rows of the open Parquet file, and renders and tokenizes
    /// them on all threads. If the request has limits for a long row of `long_row_bytes` bytes,
    /// interprets only this row.
    fn interpret_rows(
        &mut self,
        limit: u64,
        long_row_bytes: usize,
        options: &DocumentOptions,
        begin: &mut dyn FnMut(InterpretationStep),
    ) -> RowsReply {
        begin(InterpretationStep::ReadRows);
        let batch = match (&mut self.rows, self.long_row.take_if(|row| row.bytes() <= long_row_bytes)) {
            (_, Some(row)) => RowBatch { records: vec![Ok(row)], ..RowBatch::default() },
            (Some(rows), None) if self.long_row.is_none() => {
                limit_cpu_time(decoding_cpu_limit(), || read_rows(rows, limit, options.tokenize))
            }
            (rows, None) => RowBatch { at_end: rows.is_none(), ..RowBatch::default() },
        };
        self.long_row = self.long_row.take().or(batch.long_row);
        let long_row_bytes = self.long_row.as_ref().map(RowRecord::bytes);
        RowsReply {
            rows: self.interpret_records(batch.records, options, begin),
            at_end: batch.at_end,
            long_row_bytes,
        }
    }

    /// Renders and tokenizes rows of a Parquet file on all threads.
    fn interpret_records(
        &self,
        records: Vec<Result<RowRecord, RecordProblem>>,
        options: &DocumentOptions,
        begin: &mut dyn FnMut(InterpretationStep),
    ) -> Vec<DocumentResult> {
        if records.iter().any(|record| matches!(record, Ok(RowRecord::Chat(..)))) {
            begin(InterpretationStep::RenderChats);
        }
        let interpreter = &self.interpreter;
        let prepare = |record| match record {
            Err(problem) => PreparedDocument::Done(DocumentResult::Invalid(problem)),
            Ok(RowRecord::Text(text)) if text.is_empty() || !options.filter.accepts_piece(&text) => {
                PreparedDocument::Done(DocumentResult::Skipped)
            }
            Ok(RowRecord::Text(text)) => PreparedDocument::Text(text.into()),
            Ok(RowRecord::Chat(chat, bytes)) => run_with_cpu_limit(bytes, reject_template_panic, || {
                interpreter.render_chat(Ok(chat), options)
            }),
        };
        let bytes = records.iter().flatten().map(|row| row.bytes() as u64).sum();
        let limit = documents_cpu_limit(records.len(), bytes);
        let prepared =
            limit_process_cpu_time(limit, || records.into_par_iter().map(prepare).collect::<Vec<_>>());
        interpreter.tokenize_documents(prepared, options, begin)
    }
}

impl DocumentInterpreter {
    /// Loads a tokenizer into the sandbox process in place of the previous one.
    pub(super) fn load_tokenizer(&mut self, files: &[(&str, &str)]) -> LoadTokenizerReply {
        let loaded = catch_unwind(|| LibraryTokenizer::load(files));
        let (tokenizer, reply) = loaded.unwrap_or_else(|_| {
            let problem = TokenizerProblem::InvalidTokenizerJson(describe_last_panic());
            (None, Err((TOKENIZER_FILE.to_owned(), problem)))
        });
        self.tokenizer = tokenizer;
        reply
    }

    /// Compiles a chat template in the sandbox process, in place of the previous one.
    pub(super) fn compile_template(
        &mut self,
        source: &str,
        special_tokens: &[(&str, &str)],
    ) -> CompileTemplateReply {
        let compiled = catch_unwind(|| CompiledTemplate::new(source, special_tokens));
        let panicked = |_| Err(describe_template_panic(describe_last_panic()));
        let compiled = compiled.unwrap_or_else(panicked);
        self.template = Some(compiled?);
        Ok(())
    }

    /// Converts tokens to text with the loaded tokenizer.
    fn decode_tokens(&self, tokens: &[u32]) -> DecodeTokensReply {
        let Some(tokenizer) = &self.tokenizer else {
            return DecodeTokensReply::Text(byte_tokenizer::decode(tokens));
        };
        run_with_cpu_limit(size_of_val(tokens), DecodeTokensReply::Failed, || {
            match tokenizer.decode(tokens) {
                Ok(text) => DecodeTokensReply::Text(text),
                Err(error) => DecodeTokensReply::Failed(error.to_string()),
            }
        })
    }

    /// Renders and tokenizes the documents of a request on all threads, with the loaded tokenizer
    /// and chat template.
    pub(super) fn interpret_documents<'a>(
        &self,
        documents: &[Document<'a>],
        options: &DocumentOptions,
        begin: &mut dyn FnMut(InterpretationStep),
    ) -> Vec<DocumentResult> {
        if documents.iter().any(|document| matches!(document, Document::ChatLine(_))) {
            begin(InterpretationStep::RenderChats);
        }
        let prepare = |document: &Document<'a>| match *document {
            Document::Text(text) => PreparedDocument::Text(text.into()),
            Document::ChatLine(line) => {
                let render = || self.render_chat(parse_chat_record(line, options.field), options);
                run_with_cpu_limit(line.len(), reject_template_panic, render)
            }
        };
        let prepared: Vec<PreparedDocument> = documents.par_iter().map(prepare).collect();
        self.tokenize_documents(prepared, options, begin)
    }

    /// Renders a chat with the loaded chat template as text, which is then tokenized.
    fn render_chat(
        &self,
        chat: Result<ChatRecord, RecordProblem>,
        options: &DocumentOptions,
    ) -> PreparedDocument<'static> {
        let rendered = chat.and_then(|chat| match &self.template {
            Some(template) => Ok(template.render_chat(&chat, options.loss_on)?),
            None => Err(RecordProblem::UnexpectedChat),
        });
        match rendered {
            Err(problem) => PreparedDocument::Done(DocumentResult::Invalid(problem)),
            Ok(masked) if masked.text.is_empty() || !options.filter.accepts_piece(&masked.text) => {
                PreparedDocument::Done(DocumentResult::Skipped)
            }
            Ok(masked) if options.loss_on == LossTargets::Assistant => PreparedDocument::Masked(masked),
            Ok(masked) => PreparedDocument::Text(masked.text.into()),
        }
    }

    /// Tokenizes the prepared documents on all threads of the sandbox process; documents are only
    /// checked if `options` do not request tokens.
    fn tokenize_documents(
        &self,
        documents: Vec<PreparedDocument>,
        options: &DocumentOptions,
        begin: &mut dyn FnMut(InterpretationStep),
    ) -> Vec<DocumentResult> {
        if options.tokenize {
            begin(InterpretationStep::Tokenize);
        }
        let tokenize = |document: PreparedDocument| match document {
            PreparedDocument::Done(result) => result,
            _ if !options.tokenize => DocumentResult::Valid,
            PreparedDocument::Text(text) => self.tokenize_text(&text),
            PreparedDocument::Masked(masked) => self.tokenize_with_loss_mask(&masked),
        };
        let bytes = documents.iter().map(|document| document.text_bytes() as u64).sum();
        let limit = documents_cpu_limit(documents.len(), bytes);
        limit_process_cpu_time(limit, || documents.into_par_iter().map(tokenize).collect())
    }

    /// Converts a text to tokens with the loaded tokenizer.
    fn tokenize_text(&self, text: &str) -> DocumentResult {
        let Some(tokenizer) = &self.tokenizer else {
            return DocumentResult::Tokens(TokenList(byte_tokenizer::encode(text).collect()));
        };
        run_with_cpu_limit(text.len(), DocumentResult::TokenizerFailed, || {
            tokens_to_document_result(tokenizer.encode(text))
        })
    }

    /// Converts a text to tokens, and sets the bit `NO_LOSS_BIT` of the tokens that do not count
    /// for the loss.
    fn tokenize_with_loss_mask(&self, masked: &LossMaskedText) -> DocumentResult {
        let mut mask = masked.create_mask();
        let Some(tokenizer) = &self.tokenizer else {
            let bytes = byte_tokenizer::encode(&masked.text).enumerate();
            return DocumentResult::Tokens(TokenList(
                bytes.map(|(i, token)| mask(token, i, i + 1)).collect(),
            ));
        };
        run_with_cpu_limit(masked.text.len(), DocumentResult::TokenizerFailed, || {
            tokens_to_document_result(tokenizer.encode_masked(masked, mask))
        })
    }
}

/// Rows of a Parquet file that are interpreted together.
#[derive(Default)]
struct RowBatch {
    records: Vec<Result<RowRecord, RecordProblem>>,
    /// Whether the file has no further rows, or cannot be read any further.
    at_end: bool,
    /// The row after `records`, if it is so long that it needs a separate request.
    long_row: Option<RowRecord>,
}

/// Reads as many of the next rows of the open Parquet file as the sandbox process returns in one
/// reply. Stops when the rows have enough text or their number reaches `limit`, and after a row
/// that cannot be used. If rows are tokenized, also stops at a row that needs a separate request.
fn read_rows(rows: &mut ParquetRows, limit: u64, tokenize: bool) -> RowBatch {
    let (mut batch, mut bytes) = (RowBatch::default(), 0);
    while bytes < MAX_ROWS_TEXT_BYTES && (batch.records.len() as u64) < limit {
        let row = catch_unwind(AssertUnwindSafe(|| rows.next()));
        let row = row.unwrap_or_else(|_| Some(Err(RecordProblem::RowUnreadable(describe_last_panic()))));
        match row {
            None => batch.at_end = true,
            Some(Ok(row)) if tokenize && row.bytes() > MAX_ROWS_TEXT_BYTES => batch.long_row = Some(row),
            Some(Ok(row)) => {
                bytes += size_of::<RowRecord>() + row.bytes();
                batch.records.push(Ok(row));
                continue;
            }
            Some(Err(problem)) => {
                batch.records.push(Err(problem));
                batch.at_end = true;
            }
        }
        break;
    }
    batch
}

/// Converts the tokenizer library's result for a document (tokens or an error) to the result that
/// the sandbox process sends.
fn tokens_to_document_result(tokens: tokenizers::Result<Vec<u32>>) -> DocumentResult {
    match tokens {
        Ok(tokens) => DocumentResult::Tokens(TokenList(tokens)),
        Err(error) => DocumentResult::TokenizerFailed(error.to_string()),
    }
}

/// Creates the error for a panic of the template library in which a chat template was being
/// compiled or rendered; `message` is the panic's message.
fn describe_template_panic(message: String) -> TemplateFailure {
    TemplateFailure { is_endless: false, detail: message, line: None }
}

/// Returns the result for a chat that could not be rendered because the template library panicked:
/// an error with the panic's message.
fn reject_template_panic(message: String) -> PreparedDocument<'static> {
    let problem = ChatProblem::Template(describe_template_panic(message));
    PreparedDocument::Done(DocumentResult::Invalid(problem.into()))
}
