//! [`ValueError`]: a mistake in a YAML text or in one of its values, to whose message the caller
//! adds the name of the job.yaml key.
use super::{
    source_map::SourceMap,
    tree::{SourceSpan, YamlNode, YamlValue},
};
use diagnostic::{Code, Diagnostic, codes};

/// A mistake in a value of a job, with the span of the text that contains the mistake.
#[derive(Clone, Debug)]
pub(crate) struct ValueError {
    pub(crate) code: Code,
    pub(crate) span: SourceSpan,
    /// The part of the value that is wrong, such as `item 2`; empty if the whole value is wrong.
    part: String,
    what: Box<ValueMistake>,
    help: Option<String>,
    /// Further mistakes in the same value, which are reported together with this one.
    others: Vec<ValueError>,
}

/// The kinds of mistakes in a value of a job. Each text is a predicate, which follows the name of
/// the key.
#[derive(Clone, Debug)]
enum ValueMistake {
    /// Any wrong value: "must be {expected}, found {found}".
    Unexpected { expected: String, found: String },
    /// A value that is empty or `null`: "has no value; it must be {expected}".
    Missing { expected: String },
    /// Any other mistake. The variant contains the whole text.
    Other(String),
}

impl ValueError {
    /// Creates an error with the text `message`, such as "names GPU 0 twice", about the YAML value
    /// at `span`.
    pub(crate) fn new(code: Code, span: SourceSpan, message: impl Into<String>) -> Self {
        Self::from_mistake(code, span, ValueMistake::Other(message.into()))
    }

    /// Creates the error that the YAML value `node` is not what `expected` describes. The text is
    /// "must be `expected`, found …". If the value is `null`, the error has the code
    /// `job-value-missing` and other advice.
    pub(crate) fn unexpected(code: Code, expected: impl Into<String>, node: &YamlNode) -> Self {
        let expected = expected.into();
        match node.value {
            YamlValue::Null => Self::from_mistake(
                codes::job::JOB_VALUE_MISSING,
                node.span,
                ValueMistake::Missing { expected },
            )
            .with_help("write a value, or remove the key to use its default"),
            _ => {
                let found = node.describe();
                Self::from_mistake(code, node.span, ValueMistake::Unexpected { expected, found })
            }
        }
    }

    /// Creates an error about the value at `span` from the kind of mistake.
    fn from_mistake(code: Code, span: SourceSpan, what: ValueMistake) -> Self {
        ValueError { code, span, part: String::new(), what: Box::new(what), help: None, others: Vec::new() }
    }

    /// Merges several errors into one error that reports all of them. Returns `None` if `errors` is
    /// empty.
    pub(crate) fn merge(mut errors: Vec<ValueError>) -> Option<Self> {
        let rest = errors.split_off(errors.len().min(1));
        errors.pop().map(|mut first| {
            first.others.extend(rest);
            first
        })
    }

    /// Adds the name of the part of the value that is wrong, such as `item 2`, to the start of the
    /// error text.
    pub(crate) fn with_part(mut self, part: &str) -> Self {
        self.part = if self.part.is_empty() { part.to_owned() } else { format!("{part} {}", self.part) };
        self.others = self.others.into_iter().map(|error| error.with_part(part)).collect();
        self
    }

    /// Adds keywords to the list of accepted values in the error text, as in "must be `auto` or a
    /// number". Does nothing if the error is about a part of the value.
    pub(crate) fn with_keywords(mut self, keywords: &[&str]) -> Self {
        if let (true, ValueMistake::Unexpected { expected, .. } | ValueMistake::Missing { expected }) =
            (self.part.is_empty(), &mut *self.what)
        {
            let quoted: Vec<String> = keywords.iter().map(|keyword| format!("`{keyword}`")).collect();
            *expected = format!("{} or {expected}", quoted.join(", "));
        }
        self
    }

    /// Replaces the phrase in the error text that describes the accepted values by `text`. Does
    /// nothing if the error is about a part of the value.
    pub(crate) fn with_expected(mut self, text: &str) -> Self {
        if let (true, ValueMistake::Unexpected { expected, .. } | ValueMistake::Missing { expected }) =
            (self.part.is_empty(), &mut *self.what)
        {
            text.clone_into(expected);
        }
        self
    }

    /// Sets the advice that the error gives the user, and replaces earlier advice.
    pub(crate) fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Formats the error text, such as "must be a number, found a list", without the name of the
    /// key.
    fn format_message(&self) -> String {
        let text = match &*self.what {
            ValueMistake::Unexpected { expected, found } => format!("must be {expected}, found {found}"),
            ValueMistake::Missing { expected } => format!("has no value; it must be {expected}"),
            ValueMistake::Other(message) => message.clone(),
        };
        if self.part.is_empty() { text } else { format!("{} {text}", self.part) }
    }

    /// Converts this error and the errors that were merged into it to diagnostics. Each message
    /// begins with `prefix`, which is empty or ends with a space. `subject` is the path of the key.
    /// An error is converted when the iterator reaches it, because a job may have many.
    pub(crate) fn into_diagnostics<'a>(
        mut self,
        sources: &'a SourceMap,
        subject: Option<&'a str>,
        prefix: &'a str,
    ) -> Box<dyn Iterator<Item = Diagnostic> + 'a> {
        let others = std::mem::take(&mut self.others);
        let others =
            others.into_iter().flat_map(move |error| error.into_diagnostics(sources, subject, prefix));
        Box::new(std::iter::once_with(move || self.into_diagnostic(sources, subject, prefix)).chain(others))
    }

    /// Converts this error without the errors that were merged into it.
    fn into_diagnostic(self, sources: &SourceMap, subject: Option<&str>, prefix: &str) -> Diagnostic {
        let mut diagnostic = Diagnostic::error(self.code, format!("{prefix}{}", self.format_message()))
            .with_location(sources.locate_span(self.span));
        if let Some(subject) = subject {
            diagnostic = diagnostic.with_subject(subject);
        }
        diagnostic = match *self.what {
            ValueMistake::Unexpected { expected, found } => {
                diagnostic.with_field("expected", expected).with_field("found", found)
            }
            ValueMistake::Missing { expected } => diagnostic.with_field("expected", expected),
            ValueMistake::Other(_) => diagnostic,
        };
        match self.help {
            Some(help) => diagnostic.with_help(help),
            None => diagnostic,
        }
    }

    /// Converts an error about the job file as a whole, such as a YAML syntax error, to a
    /// diagnostic without the name of a key.
    pub(crate) fn into_diagnostic_without_key(self, sources: &SourceMap) -> Diagnostic {
        let code = self.code;
        let mut list = self.into_diagnostics(sources, None, "");
        list.next().unwrap_or_else(|| Diagnostic::error(code, code.info().summary))
    }
}
