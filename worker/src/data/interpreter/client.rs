//! [`SandboxInterpreter`]: starts the sandbox process that interprets data, and sends it requests.
use super::{
    limits::{documents_request_limits, load_request_limits, max_request_memory_bytes},
    message::{
        CompileTemplateReply, DecodeTokensReply, Document, DocumentOptions, DocumentResult,
        LoadTokenizerReply, Request, TokenList, TokenizerFile,
    },
};
use crate::data::{error::InterpretationStep, json_lines::MAX_LINE_BYTES};
use protocol::message_pack;
use sandbox::{
    Confinement, RequestLimits, SandboxCommand, SandboxError, SandboxFailure, SandboxProcess, SandboxSettings,
};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs::File,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The command-line argument that makes the executable `launch` run as a sandbox process. It must
/// be the first argument.
pub const SANDBOX_ARGUMENT: &str = "sandbox";

/// Error of a request to the sandbox process, with the kind of work (such as tokenizing) that was
/// in progress.
#[derive(Debug)]
pub(crate) struct InterpreterFailure {
    /// The work during which the process failed. Absent if the process did not start to work.
    pub(crate) step: Option<InterpretationStep>,
    /// The error of the process.
    pub(crate) error: SandboxError,
}

impl From<SandboxFailure> for InterpreterFailure {
    fn from(failure: SandboxFailure) -> Self {
        InterpreterFailure { step: InterpretationStep::from_number(failure.step), error: failure.error }
    }
}

impl From<SandboxError> for InterpreterFailure {
    fn from(error: SandboxError) -> Self {
        InterpreterFailure { step: None, error }
    }
}

/// A chat template as text, with the names and texts of its special tokens.
#[derive(Clone, Debug)]
pub(crate) struct TemplateSource {
    pub(crate) source: String,
    pub(crate) special_tokens: Vec<(String, String)>,
}

/// Client of a sandbox process, which loads tokenizers and chat templates and tokenizes documents
/// on behalf of this process. The process starts at the first request, and again after a failure,
/// with the same tokenizer and template.
pub(crate) struct SandboxInterpreter {
    threads: usize,
    state: Mutex<InterpreterState>,
}

/// The running sandbox process, if any, and the tokenizer and chat template that must be loaded
/// again if it is restarted.
#[derive(Default)]
struct InterpreterState {
    process: Option<SandboxProcess>,
    /// The kernel facilities that confine the most recently started process; `None` if no process
    /// was started yet.
    confinement: Option<Confinement>,
    tokenizer: Option<Arc<[TokenizerFile]>>,
    template: Option<TemplateSource>,
}

impl SandboxInterpreter {
    /// Creates the client of a sandbox process that will have `threads` threads. The process is not
    /// started yet.
    pub(crate) fn new(threads: usize) -> Arc<Self> {
        Arc::new(SandboxInterpreter { threads: threads.max(1), state: Mutex::default() })
    }

    /// Loads a tokenizer from `files` in the sandbox process, in place of the previous tokenizer.
    pub(crate) fn load_tokenizer(
        &self,
        files: &Arc<[TokenizerFile]>,
    ) -> Result<LoadTokenizerReply, InterpreterFailure> {
        let mut stream = self.open_stream();
        let (request, limits) = build_load_request(files);
        let reply: LoadTokenizerReply = stream.call(&request, &limits)?;
        stream.state.tokenizer = reply.is_ok().then(|| Arc::clone(files));
        Ok(reply)
    }

    /// Compiles a chat template in the sandbox process, in place of the previous template.
    pub(crate) fn compile_template(
        &self,
        template: TemplateSource,
    ) -> Result<CompileTemplateReply, InterpreterFailure> {
        let mut stream = self.open_stream();
        let (request, limits) = build_compile_request(&template);
        let reply: CompileTemplateReply = stream.call(&request, &limits)?;
        stream.state.template = reply.is_ok().then_some(template);
        Ok(reply)
    }

    /// Sends one document to the sandbox process, which renders it if it is a chat, and tokenizes
    /// or only checks it, depending on `options`.
    pub(crate) fn interpret_document(
        &self,
        document: Document,
        options: DocumentOptions,
    ) -> Result<DocumentResult, InterpreterFailure> {
        self.open_stream().interpret_document(document, options)
    }

    /// Converts tokens to text in the sandbox process, with the loaded tokenizer.
    pub(crate) fn decode_tokens(&self, tokens: &[u32]) -> Result<DecodeTokensReply, InterpreterFailure> {
        let request = Request::DecodeTokens { tokens: TokenList(tokens.to_vec()) };
        self.open_stream().call(&request, &load_request_limits(size_of_val(tokens)))
    }

    /// Returns which kernel facilities (Landlock, seccomp) confine the sandbox process, or `None`
    /// if no process was started yet.
    pub(crate) fn confinement(&self) -> Option<Confinement> {
        self.lock().confinement
    }

    /// Ends the sandbox process, if one runs. The next request starts another one.
    pub(crate) fn end_process(&self) {
        self.lock().process = None;
    }

    /// Returns the number of threads of the sandbox process.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Gives the calling thread exclusive access to the sandbox process, so that it can send
    /// several requests before it receives the replies. Blocks while another thread has an open
    /// stream.
    pub(crate) fn open_stream(&self) -> RequestStream<'_> {
        RequestStream { threads: self.threads, state: self.lock() }
    }

    /// Locks the mutex of the running sandbox process and of the tokenizer and chat template loaded
    /// in it.
    fn lock(&self) -> MutexGuard<'_, InterpreterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the request to the sandbox process that loads a tokenizer from `files`, and the limits
/// of memory and time of the request.
fn build_load_request(files: &[TokenizerFile]) -> (Request<'_>, RequestLimits) {
    let limits = load_request_limits(files.iter().map(|(_, text)| text.len()).sum());
    (Request::LoadTokenizer { files: borrow_pairs(files) }, limits)
}

/// Returns the request to the sandbox process that compiles a chat template, and the limits of
/// memory and time of the request.
fn build_compile_request(template: &TemplateSource) -> (Request<'_>, RequestLimits) {
    let special_tokens = borrow_pairs(&template.special_tokens);
    let request = Request::CompileTemplate { source: &template.source, special_tokens };
    (request, load_request_limits(template.source.len()))
}

/// Converts pairs of owned strings to pairs of string slices.
fn borrow_pairs(pairs: &[(String, String)]) -> Vec<(&str, &str)> {
    pairs.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect()
}

/// Exclusive access of one thread to the sandbox process, for sending requests and receiving their
/// replies. Replies arrive in the order of the requests.
pub(crate) struct RequestStream<'a> {
    threads: usize,
    state: MutexGuard<'a, InterpreterState>,
}

impl RequestStream<'_> {
    /// Sends `request` to the sandbox process, with the open file `file` if one is given, and does
    /// not wait for the reply. Starts the process if none runs.
    pub(crate) fn send(
        &mut self,
        request: &Request,
        file: Option<&File>,
        limits: &RequestLimits,
    ) -> Result<(), InterpreterFailure> {
        let body = encode_request(request)?;
        if self.state.process.is_none() {
            let process = self.state.start_process(self.threads)?;
            self.state.confinement = Some(process.confinement());
            self.state.process = Some(process);
        }
        let Some(process) = &mut self.state.process else { return Ok(()) };
        process.send_request(&body, file, limits);
        Ok(())
    }

    /// Receives the reply of the sandbox process to the oldest unanswered request. After an error,
    /// the process and the replies to the other requests are lost.
    pub(crate) fn receive<R: DeserializeOwned>(&mut self) -> Result<R, InterpreterFailure> {
        let process = self.state.process.as_mut().ok_or(SandboxError::InvalidReply)?;
        let reply = process.receive_reply().map_err(InterpreterFailure::from);
        let reply = reply.and_then(|reply| {
            message_pack::from_slice(&reply).map_err(|_| SandboxError::InvalidReply.into())
        });
        reply.inspect_err(|_| self.state.process = None)
    }

    /// Sends a request to the sandbox process and receives the reply. No other request may be
    /// pending.
    pub(crate) fn call<R: DeserializeOwned>(
        &mut self,
        request: &Request,
        limits: &RequestLimits,
    ) -> Result<R, InterpreterFailure> {
        self.send(request, None, limits)?;
        self.receive()
    }

    /// Sends one document to the sandbox process, which renders it if it is a chat, and tokenizes
    /// or only checks it, depending on `options`. No other request may be pending.
    pub(crate) fn interpret_document(
        &mut self,
        document: Document,
        options: DocumentOptions,
    ) -> Result<DocumentResult, InterpreterFailure> {
        let limits = documents_request_limits([document.as_str().len()].into_iter(), self.threads);
        let request = Request::Documents { documents: vec![document], options };
        let mut results: Vec<DocumentResult> = self.call(&request, &limits)?;
        match (results.pop(), results.is_empty()) {
            (Some(result), true) => Ok(result),
            _ => Err(SandboxError::InvalidReply.into()),
        }
    }
}

impl Drop for RequestStream<'_> {
    fn drop(&mut self) {
        // The next stream must not receive the replies to the requests of this one.
        if self.state.process.as_ref().is_some_and(|process| process.pending_requests() > 0) {
            self.state.process = None;
        }
    }
}

impl InterpreterState {
    /// Starts a new sandbox process, and makes it load the current tokenizer and chat template, if
    /// any.
    fn start_process(&self, threads: usize) -> Result<SandboxProcess, InterpreterFailure> {
        let settings = SandboxSettings {
            threads: threads as u32,
            memory_bytes: max_request_memory_bytes(MAX_LINE_BYTES),
        };
        let mut process = SandboxProcess::start(&build_sandbox_command(), &settings)?;
        let tokenizer = self.tokenizer.as_ref().map(|files| build_load_request(files));
        let template = self.template.as_ref().map(build_compile_request);
        for (request, limits) in tokenizer.into_iter().chain(template) {
            process.send_request(&encode_request(&request)?, None, &limits);
            process.receive_reply()?;
        }
        Ok(process)
    }
}

/// Encodes a request as bytes for the sandbox process.
fn encode_request(request: &impl Serialize) -> Result<Vec<u8>, SandboxError> {
    rmp_serde::to_vec(request).map_err(|_| SandboxError::InvalidReply)
}

/// Returns the command that starts this executable as a sandbox process.
#[cfg(not(test))]
fn build_sandbox_command() -> SandboxCommand {
    SandboxCommand {
        program: "/proc/self/exe".into(),
        name: "launch".into(),
        arguments: vec![SANDBOX_ARGUMENT.into()],
        variables: Vec::new(),
    }
}

/// Returns the command that starts the executable of the unit tests as a sandbox process, in place
/// of the executable `launch`.
#[cfg(test)]
pub(super) fn build_sandbox_command() -> SandboxCommand {
    SandboxCommand {
        program: "/proc/self/exe".into(),
        name: "launch".into(),
        arguments: ["data::interpreter::tests::run_sandbox", "--exact", "--nocapture"].map(Into::into).into(),
        variables: vec![(super::tests::SANDBOX_VARIABLE.into(), "1".into())],
    }
}
