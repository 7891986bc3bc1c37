//! The error [`InterpretationError`]: a library that runs in the sandbox process could not
//! interpret a file, or exceeded a limit.
use super::{
    keys::{CHAT_TEMPLATE_KEY, FILES_KEY, TOKENIZER_KEY},
    problems::RecordPosition,
};
use diagnostic::{Diagnostic, codes::data as codes};
use sandbox::SandboxError;
use std::{fmt, path::PathBuf};

/// The kind of work that the sandbox process was doing when an error occurred, such as loading a
/// tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterpretationStep {
    /// Load a tokenizer.
    LoadTokenizer = 1,
    /// Compile a chat template.
    CompileTemplate = 2,
    /// Decode a Parquet file.
    ReadRows = 3,
    /// Render chats as text.
    RenderChats = 4,
    /// Convert text to tokens.
    Tokenize = 5,
    /// Convert tokens to text.
    DecodeTokens = 6,
}

impl InterpretationStep {
    /// Returns the kind of work (such as tokenizing) that the sandbox process reports as the number
    /// `number`, or `None` for an unknown number.
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        const ALL_STEPS: [InterpretationStep; 6] = [
            InterpretationStep::LoadTokenizer,
            InterpretationStep::CompileTemplate,
            InterpretationStep::ReadRows,
            InterpretationStep::RenderChats,
            InterpretationStep::Tokenize,
            InterpretationStep::DecodeTokens,
        ];
        ALL_STEPS.into_iter().find(|step| *step as u64 == number)
    }

    /// Returns the kind of work in words for an error message, such as `load the tokenizer`.
    fn describe(self) -> &'static str {
        match self {
            InterpretationStep::LoadTokenizer => "load the tokenizer",
            InterpretationStep::CompileTemplate => "compile the chat template",
            InterpretationStep::ReadRows => "decode",
            InterpretationStep::RenderChats => "render the chat",
            InterpretationStep::Tokenize => "tokenize",
            InterpretationStep::DecodeTokens => "decode tokens with the tokenizer",
        }
    }

    /// Returns the key of job.yaml that names the file used in this kind of work, such as the key
    /// of the tokenizer.
    fn job_yaml_key(self) -> &'static str {
        match self {
            InterpretationStep::LoadTokenizer
            | InterpretationStep::Tokenize
            | InterpretationStep::DecodeTokens => TOKENIZER_KEY,
            InterpretationStep::CompileTemplate | InterpretationStep::RenderChats => CHAT_TEMPLATE_KEY,
            InterpretationStep::ReadRows => FILES_KEY,
        }
    }
}

/// The record of a data file during whose interpretation a library failed, or the first record of a
/// group if the exact record is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRecord {
    /// The record that was being interpreted, or the first of several such records.
    pub first: RecordPosition,
    /// Whether the failure belongs to exactly this record.
    pub is_exact: bool,
}

/// Error that a library in the sandbox process could not interpret a file, or exceeded a limit
/// (such as memory) during the interpretation.
#[derive(Debug)]
pub struct InterpretationError {
    /// What the library was doing when it failed.
    pub step: InterpretationStep,
    /// The file that was interpreted.
    pub path: PathBuf,
    /// The record, or the first of several records, that the library was interpreting. Absent for a
    /// file without records.
    pub records: Option<FailedRecord>,
    /// The tokenizer or chat template with which a record was interpreted.
    pub rules: Option<PathBuf>,
    /// The error of the sandbox process.
    pub error: SandboxError,
}

impl InterpretationError {
    /// Converts this failure of a sandbox process to interpret a file to a diagnostic with the text
    /// `message`.
    pub(super) fn to_diagnostic(&self, message: String) -> Diagnostic {
        let diagnostic = match self.error.exceeded_limit() {
            Some((name, value)) => Diagnostic::error(codes::DATA_LIMIT_EXCEEDED, message)
                .with_field(name, value)
                .with_help("check that the file comes from a source that you trust"),
            None => Diagnostic::error(codes::SANDBOX_FAILED, message),
        };
        let mut diagnostic = diagnostic
            .with_subject(self.step.job_yaml_key())
            .with_field("path", self.path.display().to_string());
        if let Some(range) = self.records {
            let (name, number) = range.first.to_diagnostic_field();
            diagnostic = diagnostic.with_field(name, number).with_field("is_exact", range.is_exact);
        }
        match &self.rules {
            Some(rules) => diagnostic.with_field("rules_path", rules.display().to_string()),
            None => diagnostic,
        }
    }
}

impl fmt::Display for InterpretationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} {}", self.step.describe(), self.path.display())?;
        if let Some(FailedRecord { first, is_exact }) = self.records {
            let (name, _) = first.to_diagnostic_field();
            match is_exact {
                true => write!(f, ":{first}")?,
                false => write!(f, " from {name} {first} on")?,
            }
        }
        if let Some(rules) = &self.rules {
            write!(f, " with {}", rules.display())?;
        }
        write!(f, ": {}", self.error)
    }
}

impl std::error::Error for InterpretationError {}
