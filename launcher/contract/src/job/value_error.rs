//! [`ValueError`]: a mistake in a value or in YAML text, before it is attributed to a key.
use super::{
    source::{SourceMap, Span},
    yaml::{YamlNode, YamlValue},
};
use diagnostic::{Code, Diagnostic, codes};

/// A mistake and the span of text that contains it.
#[derive(Clone, Debug)]
pub(crate) struct ValueError {
    pub(crate) code: Code,
    pub(crate) span: Span,
    /// The part of the value that is wrong, such as `item 2`; empty for the whole value.
    part: String,
    what: Box<Mistake>,
    help: Option<String>,
    /// Further mistakes in the same value.
    others: Vec<ValueError>,
}

/// What is wrong, worded to follow the name of the key.
#[derive(Clone, Debug)]
enum Mistake {
    /// "must be {expected}, found {found}"
    Unexpected { expected: String, found: String },
    /// "has no value; it must be {expected}"
    Missing { expected: String },
    /// Any other wording.
    Other(String),
}

impl ValueError {
    /// A mistake with its own wording, such as "names GPU 0 twice".
    pub(crate) fn new(code: Code, span: Span, message: impl Into<String>) -> Self {
        Self::with_mistake(code, span, Mistake::Other(message.into()))
    }

    /// "must be `expected`, found …" for a value that is not acceptable. A missing value gets its
    /// own code.
    pub(crate) fn unexpected(code: Code, expected: impl Into<String>, node: &YamlNode) -> Self {
        let expected = expected.into();
        match node.value {
            YamlValue::Null => {
                Self::with_mistake(codes::job::JOB_VALUE_MISSING, node.span, Mistake::Missing { expected })
                    .with_help("write a value, or remove the key to use its default")
            }
            _ => {
                let found = node.describe();
                Self::with_mistake(code, node.span, Mistake::Unexpected { expected, found })
            }
        }
    }

    fn with_mistake(code: Code, span: Span, what: Mistake) -> Self {
        ValueError { code, span, part: String::new(), what: Box::new(what), help: None, others: Vec::new() }
    }

    /// Merges several errors into one that reports them all; `None` when there are none.
    pub(crate) fn merge(mut errors: Vec<ValueError>) -> Option<Self> {
        let rest = errors.split_off(errors.len().min(1));
        errors.pop().map(|mut first| {
            first.others.extend(rest);
            first
        })
    }

    /// Attributes the error to a part of the value: "`part` must be …".
    pub(crate) fn in_part(mut self, part: &str) -> Self {
        self.part = if self.part.is_empty() { part.to_owned() } else { format!("{part} {}", self.part) };
        self.others = self.others.into_iter().map(|error| error.in_part(part)).collect();
        self
    }

    /// Adds an accepted keyword to what was expected of the whole value: "must be `auto` or …".
    pub(crate) fn or_keyword(mut self, keyword: &str) -> Self {
        if let (true, Mistake::Unexpected { expected, .. } | Mistake::Missing { expected }) =
            (self.part.is_empty(), &mut *self.what)
        {
            *expected = format!("`{keyword}` or {expected}");
        }
        self
    }

    /// Replaces the advice.
    pub(crate) fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// The message as it follows the name of the key.
    fn message(&self) -> String {
        let text = match &*self.what {
            Mistake::Unexpected { expected, found } => format!("must be {expected}, found {found}"),
            Mistake::Missing { expected } => format!("has no value; it must be {expected}"),
            Mistake::Other(message) => message.clone(),
        };
        if self.part.is_empty() { text } else { format!("{} {text}", self.part) }
    }

    /// The diagnostics of this error and of the others that were merged into it. Each message
    /// begins with `prefix`, which is empty or ends with a space; `subject` is the key.
    pub(crate) fn into_diagnostics(
        self,
        sources: &SourceMap,
        subject: Option<&str>,
        prefix: &str,
    ) -> Vec<Diagnostic> {
        let mut diagnostic = Diagnostic::error(self.code, format!("{prefix}{}", self.message()))
            .with_location(sources.span_location(self.span));
        if let Some(subject) = subject {
            diagnostic = diagnostic.with_subject(subject);
        }
        diagnostic = match *self.what {
            Mistake::Unexpected { expected, found } => {
                diagnostic.with_field("expected", expected).with_field("found", found)
            }
            Mistake::Missing { expected } => diagnostic.with_field("expected", expected),
            Mistake::Other(_) => diagnostic,
        };
        if let Some(help) = self.help {
            diagnostic = diagnostic.with_help(help);
        }
        let others = self.others.into_iter();
        std::iter::once(diagnostic)
            .chain(others.flat_map(|error| error.into_diagnostics(sources, subject, prefix)))
            .collect()
    }

    /// The diagnostic of an error that concerns a text as a whole and stands alone.
    pub(crate) fn into_diagnostic(self, sources: &SourceMap) -> Diagnostic {
        let code = self.code;
        let mut list = self.into_diagnostics(sources, None, "").into_iter();
        list.next().unwrap_or_else(|| Diagnostic::error(code, code.info().summary))
    }
}
