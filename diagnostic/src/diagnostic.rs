//! [`Diagnostic`]: an error, a warning or a note for the user, with functions that create it, read
//! it and convert it to JSON.
use crate::{
    code::{Category, Code},
    location::Location,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::{error::Error, fmt};

/// How serious a diagnostic is: an error, a warning or a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The request is rejected, or the operation failed.
    Error,
    /// The operation continues, but the result may not be what the user expects.
    Warning,
    /// Information about a decision of `launch` that the user may want to know.
    Note,
}

/// An error, a warning or a note: what is wrong, with which object, why, and what to do about it.
///
/// The data are boxed, so that `Result<T, Diagnostic>` stays small.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Diagnostic(Box<DiagnosticData>);

/// The fields of a [`Diagnostic`], such as its code and message, which are stored in a `Box` so
/// that a `Result` stays small. The serialized form has the names of these fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct DiagnosticData {
    code: Code,
    severity: Severity,
    category: Category,
    message: String,
    subject: Option<String>,
    location: Option<Location>,
    fields: Map<String, Value>,
    help: Vec<String>,
    causes: Vec<String>,
    details: Vec<Diagnostic>,
}

/// The result of an operation whose error is a [`Diagnostic`].
pub type Result<T> = std::result::Result<T, Diagnostic>;

impl Diagnostic {
    /// Creates an error with the code `code`, such as `ssh-host-key-unknown`, and the message
    /// `message`.
    ///
    /// `message` is one line in lower case without a full stop. The message states what failed, the
    /// object, the observed value and the expected value.
    pub fn error(code: Code, message: impl Into<String>) -> Self {
        Self::new(code, Severity::Error, message.into())
    }

    /// Creates a warning with the code `code`, such as `ssh-host-key-unknown`, and the message
    /// `message`. [`Diagnostic::error`] documents the form of `message`.
    pub fn warning(code: Code, message: impl Into<String>) -> Self {
        Self::new(code, Severity::Warning, message.into())
    }

    /// Creates a note about a decision, such as the choice of the checkpoint that a job resumes
    /// from. [`Diagnostic::error`] documents the form of `message`.
    pub fn note(code: Code, message: impl Into<String>) -> Self {
        Self::new(code, Severity::Note, message.into())
    }

    /// Creates a diagnostic with a severity, a code and a message, but without a subject, fields,
    /// help or causes.
    fn new(code: Code, severity: Severity, message: String) -> Self {
        Diagnostic(Box::new(DiagnosticData {
            code,
            severity,
            category: code.category(),
            message,
            subject: None,
            location: None,
            fields: Map::new(),
            help: Vec::new(),
            causes: Vec::new(),
            details: Vec::new(),
        }))
    }

    /// Sets the subject: the job key (`train.batch.global`), host or path that the diagnostic is
    /// about.
    pub fn with_subject(mut self, subject: impl Into<String>) -> Self {
        self.0.subject = Some(subject.into());
        self
    }

    /// Sets the location of the mistake that the diagnostic reports: a place in a file, or an
    /// argument of the command line.
    pub fn with_location(mut self, location: Location) -> Self {
        self.0.location = Some(location);
        self
    }

    /// Sets the field `name` to `value`, for programs that read the diagnostic as JSON. `name` is
    /// in snake_case, and ends with the unit if the value has one. An earlier value of the field is
    /// replaced.
    pub fn with_field(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.fields.insert(name.to_owned(), value.into());
        self
    }

    /// Adds advice for the user: the next command to run or the edit to make.
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.0.help.push(help.into());
        self
    }

    /// Adds advice for the user, taken from the remedy that the explanation of the diagnostic's
    /// code contains. The remedy loses its full stop, and begins in lower case.
    pub fn with_remedy(self) -> Self {
        let remedy = self.0.code.info().remedy.trim_end_matches('.');
        let mut chars = remedy.chars();
        let help = match (chars.next(), chars.next()) {
            // The first word is not an abbreviation such as NCCL.
            (Some(first), Some(second)) if second.is_lowercase() => {
                first.to_lowercase().chain(remedy.chars().skip(1)).collect()
            }
            _ => remedy.to_owned(),
        };
        self.with_help(help)
    }

    /// Appends the message of `error` and the messages of its chain of sources to the causes of
    /// this diagnostic, outermost first.
    pub fn with_cause(mut self, error: &dyn Error) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            self.0.causes.push(error.to_string());
            next = error.source();
        }
        self
    }

    /// Adds `detail`, one of several errors that this diagnostic sums up, such as one of three
    /// mistakes in a job file. For example, each mistake in a job file is a detail of the error
    /// that rejects the file.
    pub fn with_detail_diagnostic(mut self, detail: Diagnostic) -> Self {
        self.0.details.push(detail);
        self
    }

    /// Sets the category of the failure (usage, job, cluster, checkpoint or other), which decides
    /// the exit code of `launch`. The default is the category of the code.
    pub fn with_category(mut self, category: Category) -> Self {
        self.0.category = category;
        self
    }

    /// Replaces the message of the diagnostic, and keeps its code, fields and all other data.
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }

    /// Returns the code, which names the kind of error and is stable between releases.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// Returns whether the diagnostic is an error, a warning or a note.
    pub fn severity(&self) -> Severity {
        self.0.severity
    }

    /// Returns the category of the failure (usage, job, cluster, checkpoint or other), which
    /// decides the exit code of `launch`.
    pub fn category(&self) -> Category {
        self.0.category
    }

    /// Returns the message: what happened, on one line in lower case.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the job key, path, host or rank that the diagnostic is about; `None` if no subject
    /// was set.
    pub fn subject(&self) -> Option<&str> {
        self.0.subject.as_deref()
    }

    /// Returns the location of the mistake in a file or on the command line; `None` if unknown.
    pub fn location(&self) -> Option<&Location> {
        self.0.location.as_ref()
    }

    /// Returns the value of the field `name`; `None` if the diagnostic has no such field.
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.0.fields.get(name)
    }

    /// Returns the named JSON values of the diagnostic, such as a limit in bytes, which programs
    /// read instead of parsing the message.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0.fields
    }

    /// Returns the advice for the user, one item per suggestion.
    pub fn help(&self) -> &[String] {
        &self.0.help
    }

    /// Returns the messages of the errors that caused this diagnostic, outermost first.
    pub fn causes(&self) -> &[String] {
        &self.0.causes
    }

    /// Returns the separate errors that a summary such as "the job has 3 errors" stands for; empty
    /// for a diagnostic about one error.
    pub fn detail_diagnostics(&self) -> &[Diagnostic] {
        &self.0.details
    }

    /// Returns the JSON object that `--json` prints for the diagnostic. Empty parts, such as a
    /// diagnostic without help, have no key in the object.
    pub fn to_json(&self) -> Value {
        let inner = &*self.0;
        let mut object = Map::new();
        object.insert("code".into(), json!(inner.code.name()));
        object.insert("severity".into(), json!(inner.severity));
        object.insert("message".into(), json!(inner.message));
        if let Some(subject) = &inner.subject {
            object.insert("subject".into(), json!(subject));
        }
        if let Some(location) = &inner.location {
            object.insert("location".into(), location.to_json());
        }
        if !inner.fields.is_empty() {
            object.insert("fields".into(), Value::Object(inner.fields.clone()));
        }
        for (name, list) in [("help", &inner.help), ("causes", &inner.causes)] {
            if !list.is_empty() {
                object.insert(name.into(), json!(list));
            }
        }
        if !inner.details.is_empty() {
            let details = inner.details.iter().map(Diagnostic::to_json).collect();
            object.insert("details".into(), Value::Array(details));
        }
        Value::Object(object)
    }
}

/// Writes the diagnostic on one line: location, message and causes. A diagnostic with details shows
/// the details in place of the location and the message.
impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, detail) in self.0.details.iter().enumerate() {
            write!(f, "{}{detail}", if i > 0 { "; " } else { "" })?;
        }
        if self.0.details.is_empty() {
            if let Some(location) = &self.0.location {
                write!(f, "{location}: ")?;
            }
            f.write_str(&self.0.message)?;
        }
        for cause in &self.0.causes {
            write!(f, "; {cause}")?;
        }
        Ok(())
    }
}

impl Error for Diagnostic {}
