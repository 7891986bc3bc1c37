//! [`DocumentTokenizer`]: tokenizes documents in the sandbox process, and writes their tokens to a
//! token cache.
//!
//! Documents are sent in batches. The process interprets one batch while this process reads the
//! next one and writes the tokens of the previous one. If the process fails, it is started again
//! and gets the documents of the batch one by one, so that the error names the record. Tokens of
//! the embedded tokenizer are the bytes of text, so text needs no process.
use super::{
    byte_tokenizer,
    document_reader::{DocumentPart, RecordReadOptions},
    error::{DataError, FailedRecord, InterpretationStep, RecordPosition, TokenCacheOperation},
    interpreter::{
        Document, DocumentOptions, DocumentResult, InterpreterFailure, MAX_RECORDS_PER_REPLY,
        MAX_REQUEST_TEXT_BYTES, OpenParquetReply, Request, RequestStream, RowsReply,
        documents_request_limits, long_row_request_limits, rows_request_limits,
    },
    split::SplitFilter,
    token_cache::TokenCacheWriter,
    tokenizer::{TextTokenizer, to_interpretation_error},
};
use jobspec::LossTargets;
use sandbox::SandboxError;
use std::{
    collections::VecDeque,
    fs::File,
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum number of unanswered requests to the sandbox process that tokenizes documents. The next
/// request waits while the process works on the previous one.
const MAX_PENDING_REQUESTS: usize = 2;
/// Longest time that may be spent on sending the documents of a failed batch to the sandbox process
/// one by one to find the faulty document.
const MAX_FAILURE_SEARCH_TIME: Duration = Duration::from_secs(5);

/// Sends documents to a sandbox process, which tokenizes them, and writes the returned tokens to a
/// token cache file.
pub(crate) struct DocumentTokenizer<'a> {
    tokenizer: &'a TextTokenizer,
    options: RecordReadOptions<'a>,
    filter: SplitFilter,
    stream: RequestStream<'a>,
    /// The batch that is not sent yet.
    batch: Batch,
    /// The batches whose results were not received yet.
    sent: VecDeque<Batch>,
    writer: TokenCacheWriter,
    /// Path of the token cache.
    cache_path: &'a Path,
}

/// The documents, or parts of long documents, that are sent to the sandbox process in one request,
/// with their total size in bytes.
#[derive(Default)]
struct Batch {
    parts: Vec<BatchPart>,
    bytes: usize,
}

/// A document, or a part of a long document, to be tokenized, with the file and the record number
/// from which it was read.
struct BatchPart {
    part: DocumentPart,
    path: Arc<Path>,
    position: Option<RecordPosition>,
}

impl BatchPart {
    /// Returns this part as a [`Document`] (text or chat) for a request to the sandbox process, or
    /// `None` if the part only marks a document's end.
    fn as_document(&self) -> Option<Document<'_>> {
        match &self.part {
            DocumentPart::Text(text) => Some(Document::Text(text)),
            DocumentPart::ChatLine(line) => Some(Document::ChatLine(line)),
            DocumentPart::End => None,
        }
    }
}

impl<'a> DocumentTokenizer<'a> {
    /// Creates a tokenizer of documents that writes the tokens to `writer`, the writer of a token
    /// cache file. Errors name the cache by `cache_path`.
    pub(crate) fn new(
        tokenizer: &'a TextTokenizer,
        options: RecordReadOptions<'a>,
        filter: SplitFilter,
        writer: TokenCacheWriter,
        cache_path: &'a Path,
    ) -> Self {
        let stream = tokenizer.interpreter().open_stream();
        let (batch, sent) = (Batch::default(), VecDeque::new());
        DocumentTokenizer { tokenizer, options, filter, stream, batch, sent, writer, cache_path }
    }

    /// Adds a document, or a part of one, to the current batch. If the batch would become too
    /// large, first sends it to the sandbox process for tokenizing. After an error, the documents
    /// whose tokens are not written are dropped.
    pub(crate) fn push(
        &mut self,
        part: DocumentPart,
        path: &Arc<Path>,
        position: Option<RecordPosition>,
    ) -> Result<(), DataError> {
        let text = match &part {
            DocumentPart::Text(text) | DocumentPart::ChatLine(text) => text.len(),
            DocumentPart::End => 0,
        };
        match &part {
            DocumentPart::Text(text) if self.tokenizer.is_byte_tokenizer() => {
                let tokens: Vec<u32> = byte_tokenizer::encode(text).collect();
                return self.write_tokens(&tokens);
            }
            DocumentPart::End if self.tokenizer.is_byte_tokenizer() => return self.end_document(),
            _ => {}
        }
        let bytes = size_of::<BatchPart>() + text;
        if self.batch.bytes + bytes > MAX_REQUEST_TEXT_BYTES {
            self.send_collected_batch().inspect_err(|_| self.drop_unwritten_documents())?;
        }
        self.batch.bytes += bytes;
        self.batch.parts.push(BatchPart { part, path: Arc::clone(path), position });
        Ok(())
    }

    /// Waits until all documents that were added are tokenized, and writes their tokens to the
    /// token cache. After an error, the documents whose tokens are not written are dropped.
    pub(crate) fn finish_pending_documents(&mut self) -> Result<(), DataError> {
        let mut flushed = self.send_collected_batch();
        while flushed.is_ok() && !self.sent.is_empty() {
            flushed = self.receive_batch();
        }
        flushed.inspect_err(|_| self.drop_unwritten_documents())
    }

    /// Discards all documents whose tokens have not been written to the token cache yet, including
    /// those that the sandbox process is tokenizing.
    fn drop_unwritten_documents(&mut self) {
        self.batch = Batch::default();
        self.sent.clear();
    }

    /// Returns the writer of the token cache, after the tokens of all documents were written.
    pub(crate) fn into_writer(self) -> TokenCacheWriter {
        self.writer
    }

    /// Sends the parts of documents collected so far to the sandbox process as one batch to be
    /// tokenized. Receives the results of an older batch if too many are pending.
    fn send_collected_batch(&mut self) -> Result<(), DataError> {
        let batch = std::mem::take(&mut self.batch);
        if batch.parts.is_empty() {
            return Ok(());
        }
        while self.sent.len() >= MAX_PENDING_REQUESTS {
            self.receive_batch()?;
        }
        self.send_batch_to_sandbox(batch)
    }

    /// Sends a batch of documents to the sandbox process, which tokenizes them.
    fn send_batch_to_sandbox(&mut self, batch: Batch) -> Result<(), DataError> {
        let documents: Vec<Document> = batch.parts.iter().filter_map(BatchPart::as_document).collect();
        let sizes = documents.iter().map(|document| document.as_str().len());
        let limits = documents_request_limits(sizes, self.tokenizer.interpreter().threads());
        let request = Request::Documents { documents, options: self.document_options() };
        let sent = self.stream.send(&request, None, &limits);
        drop(request);
        self.sent.push_back(batch);
        sent.or_else(|failure| self.retry_failed_batch(failure))
    }

    /// Receives from the sandbox process the tokens of the oldest batch of documents that was sent,
    /// and writes the tokens to the token cache.
    fn receive_batch(&mut self) -> Result<(), DataError> {
        let results = match self.stream.receive::<Vec<DocumentResult>>() {
            Ok(results) => results,
            Err(failure) => return self.retry_failed_batch(failure),
        };
        let Some(batch) = self.sent.pop_front() else { return Ok(()) };
        self.write_batch(&batch, results)
    }

    /// Repeats a failed request: tokenizes the documents of the oldest batch one by one, and sends
    /// all other pending batches to the sandbox process again.
    fn retry_failed_batch(&mut self, failure: InterpreterFailure) -> Result<(), DataError> {
        let sent = std::mem::take(&mut self.sent);
        let mut batches = sent.into_iter();
        let Some(batch) = batches.next() else { return Ok(()) };
        let results = self.interpret_one_by_one(&batch, failure)?;
        self.write_batch(&batch, results)?;
        batches.try_for_each(|batch| self.send_batch_to_sandbox(batch))
    }

    /// Tokenizes the documents of a failed batch one by one in the sandbox process, to find the
    /// document that causes the failure. Returns the results if no document fails alone.
    fn interpret_one_by_one(
        &mut self,
        batch: &Batch,
        failure: InterpreterFailure,
    ) -> Result<Vec<DocumentResult>, DataError> {
        let deadline = Instant::now() + MAX_FAILURE_SEARCH_TIME;
        let documents = batch.parts.iter().filter_map(|part| Some((part, part.as_document()?)));
        let (mut results, mut first) = (Vec::new(), None);
        for (part, document) in documents {
            first = first.or(Some(part));
            let is_of_machine = matches!(failure.error, SandboxError::NotStarted(_));
            if is_of_machine || Instant::now() > deadline {
                break;
            }
            match self.stream.interpret_document(document, self.document_options()) {
                Ok(result) => results.push(result),
                Err(failure) => return Err(self.to_record_error(failure, part, true)),
            }
        }
        match first {
            Some(part) if results.len() < count_documents(batch) => {
                Err(self.to_record_error(failure, part, false))
            }
            _ => Ok(results),
        }
    }

    /// Converts a failure of the sandbox process during its work on `part` to an error that names
    /// the file and the record of the part.
    fn to_record_error(&self, failure: InterpreterFailure, part: &BatchPart, is_exact: bool) -> DataError {
        let first_step = match part.part {
            DocumentPart::ChatLine(_) => InterpretationStep::RenderChats,
            DocumentPart::Text(_) | DocumentPart::End => InterpretationStep::Tokenize,
        };
        let records = part.position.map(|first| FailedRecord { first, is_exact });
        let rules = self.find_tokenizer_or_template_file(failure.step.unwrap_or(first_step));
        to_interpretation_error(failure, first_step, &part.path, records, rules)
    }

    /// Returns the file that an error names as involved in `step`: the chat template for rendering
    /// chats, the tokenizer for tokenizing. Returns `None` if the step uses no file.
    fn find_tokenizer_or_template_file(&self, step: InterpretationStep) -> Option<&Path> {
        match step {
            InterpretationStep::RenderChats => self.options.chat_template.map(|template| template.path()),
            InterpretationStep::Tokenize => self.tokenizer.path(),
            _ => None,
        }
    }

    /// Returns the options of requests to the sandbox process: the field with the text, the tokens
    /// that count for the loss, and the purpose (training or evaluation).
    fn document_options(&self) -> DocumentOptions<'a> {
        DocumentOptions {
            field: self.options.field,
            loss_on: self.options.chat_template.map_or(LossTargets::All, |template| template.loss_on()),
            filter: self.filter,
            tokenize: true,
        }
    }

    /// Writes the tokens that the sandbox process returned for the documents in `batch` to the
    /// token cache.
    fn write_batch(&mut self, batch: &Batch, results: Vec<DocumentResult>) -> Result<(), DataError> {
        if let Some(part) = batch.parts.first().filter(|_| results.len() != count_documents(batch)) {
            return Err(self.to_record_error(SandboxError::InvalidReply.into(), part, false));
        }
        let mut results = results.into_iter();
        for part in &batch.parts {
            let result = if part.as_document().is_some() { results.next() } else { None };
            let Some(result) = result else {
                self.end_document()?;
                continue;
            };
            let is_chat = matches!(part.part, DocumentPart::ChatLine(_));
            self.write_result(result, &part.path, part.position, is_chat)?;
        }
        Ok(())
    }

    /// Writes the tokens that the sandbox process returned for one document (or a part of one) to
    /// the token cache, or fails if the process returned an error. If `is_whole` is set, the
    /// document ends after these tokens.
    fn write_result(
        &mut self,
        result: DocumentResult,
        path: &Path,
        position: Option<RecordPosition>,
        is_whole: bool,
    ) -> Result<(), DataError> {
        match (result, position) {
            (DocumentResult::Tokens(tokens), _) => {
                self.write_tokens(&tokens.0)?;
                if is_whole { self.end_document() } else { Ok(()) }
            }
            (DocumentResult::Skipped | DocumentResult::Valid, _) => Ok(()),
            (DocumentResult::Invalid(problem), Some(position)) => {
                Err(DataError::invalid_record(path, position, problem))
            }
            (DocumentResult::Invalid(problem), None) => {
                let message = problem.to_string();
                Err(DataError::RecordNotTokenized { path: path.to_path_buf(), position, message })
            }
            (DocumentResult::TokenizerFailed(message), _) => {
                Err(DataError::RecordNotTokenized { path: path.to_path_buf(), position, message })
            }
        }
    }

    /// Appends tokens to the current document in the token cache file.
    fn write_tokens(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        let written = self.writer.push_tokens(tokens);
        written.map_err(|source| self.unwritable_cache_error(source))
    }

    /// Ends the current document in the token cache file with an end-of-document token.
    fn end_document(&mut self) -> Result<(), DataError> {
        let written = self.writer.end_document();
        written.map_err(|source| self.unwritable_cache_error(source))
    }

    /// Creates the error which reports that the token cache cannot be written, because of `source`.
    fn unwritable_cache_error(&self, source: io::Error) -> DataError {
        DataError::cache_unusable(self.cache_path, TokenCacheOperation::Write, source)
    }

    /// Sends a Parquet file to the sandbox process, and writes the tokens of its rows to the token
    /// cache. All documents that were added before must have been written.
    pub(crate) fn tokenize_parquet_file(&mut self, file: &File, path: &Path) -> Result<(), DataError> {
        let limits = rows_request_limits(self.tokenizer.interpreter().threads());
        let (field, is_chat) = (self.options.field, self.options.chat_template.is_some());
        let options = self.document_options();
        let build_request =
            |long_row_bytes| Request::ReadRows { rows: MAX_RECORDS_PER_REPLY, long_row_bytes, options };
        let mut first_row = 1;
        let file_bytes = file.metadata().map_err(|source| DataError::unreadable(path, source))?.len();
        let open = self.stream.send(&Request::OpenParquet { field, is_chat }, Some(file), &limits);
        let opened = open.and_then(|()| self.stream.receive::<OpenParquetReply>());
        opened
            .map_err(|failure| self.to_parquet_error(failure, path, first_row))?
            .map_err(|problem| DataError::InvalidParquet { path: path.to_path_buf(), problem })?;
        // One more reply than needed arrives, and is empty.
        let (mut pending, mut at_end, mut long_row_bytes) = (0, false, None);
        while pending > 0 || !at_end {
            // A long row is requested alone, with limits for its size.
            let (max_pending, bytes, limits) = match long_row_bytes {
                None => (MAX_PENDING_REQUESTS, 0, limits),
                Some(bytes) => (1, bytes, long_row_request_limits(bytes, file_bytes)),
            };
            while !at_end && pending < max_pending {
                let sent = self.stream.send(&build_request(bytes), None, &limits);
                sent.map_err(|failure| self.to_parquet_error(failure, path, first_row))?;
                pending += 1;
            }
            let reply = self.stream.receive::<RowsReply>();
            let reply = reply.map_err(|failure| self.to_parquet_error(failure, path, first_row))?;
            pending -= 1;
            at_end |= reply.at_end;
            long_row_bytes = reply.long_row_bytes;
            for result in reply.rows {
                self.write_result(result, path, Some(RecordPosition::Row(first_row)), true)?;
                first_row += 1;
            }
        }
        Ok(())
    }

    /// Converts the sandbox process's `failure` to an error that names the Parquet file and
    /// `first_row`, the first row of the failed request.
    fn to_parquet_error(&self, failure: InterpreterFailure, path: &Path, first_row: u64) -> DataError {
        let range = FailedRecord { first: RecordPosition::Row(first_row), is_exact: false };
        let rules = failure.step.and_then(|step| self.find_tokenizer_or_template_file(step));
        to_interpretation_error(failure, InterpretationStep::ReadRows, path, Some(range), rules)
    }
}

/// Returns how many results the sandbox process must return for `batch`, which is the number of its
/// texts and chats. Parts that only end a document are not counted.
fn count_documents(batch: &Batch) -> usize {
    batch.parts.iter().filter(|part| part.as_document().is_some()).count()
}
