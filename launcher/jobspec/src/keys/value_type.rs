//! [`ValueType`]: the values that a key of job.yaml accepts, and how they are read from YAML,
//! printed, and described.
use crate::yaml::{
    format::YamlText,
    tree::{YamlNode, YamlValue},
    value_error::ValueError,
};
use diagnostic::{Code, codes::job as codes};
use serde_json::{Value, json};

/// The result of reading the value of a key from YAML: the value, or the mistake in it.
pub(crate) type ReadResult<T> = Result<T, ValueError>;

/// A function that reads a value of type `T` from YAML.
type ReadFn<T> = Box<dyn Fn(&YamlNode) -> ReadResult<T>>;
/// A function that formats a value of type `T` as YAML; `None` if the key is omitted for this
/// value.
type PrintFn<T> = Box<dyn Fn(&T) -> Option<YamlText>>;

/// How the values of a job.yaml key are read from YAML, printed, and described in messages,
/// docs/job.md and the JSON Schema.
pub(crate) struct ValueType<T> {
    read: ReadFn<T>,
    print: PrintFn<T>,
    /// The values in the words of docs/job.md, such as `integer from 1 to 8`.
    pub(crate) accepts: String,
    /// The values in the words of error messages, such as `an integer from 1 to 8`.
    pub(crate) expected: String,
    /// The JSON Schema of the values.
    pub(crate) schema: Value,
}

impl<T: 'static> ValueType<T> {
    /// Creates the type of a key's values from the functions that read a value from YAML and print
    /// it. In messages, an article precedes `accepts`.
    pub(crate) fn new(
        accepts: impl Into<String>,
        schema: Value,
        read: impl Fn(&YamlNode) -> ReadResult<T> + 'static,
        print: impl Fn(&T) -> Option<YamlText> + 'static,
    ) -> Self {
        let accepts = accepts.into();
        let expected = add_article(&accepts);
        ValueType { read: Box::new(read), print: Box::new(print), accepts, expected, schema }
    }

    /// Creates the type of a key's values from two functions, which read a value from YAML and
    /// print it on a single line.
    pub(crate) fn new_single_line(
        accepts: impl Into<String>,
        schema: Value,
        read: impl Fn(&YamlNode) -> ReadResult<T> + 'static,
        print: impl Fn(&T) -> String + 'static,
    ) -> Self {
        Self::new(accepts, schema, read, move |value| Some(YamlText::Line(print(value))))
    }

    /// Reads a value of this type from YAML. Fails if the node is not such a value.
    pub(crate) fn read(&self, node: &YamlNode) -> ReadResult<T> {
        (self.read)(node)
    }

    /// Formats `value` as YAML. Returns `None` for a value that is written by leaving out the key.
    pub(crate) fn print(&self, value: &T) -> Option<YamlText> {
        (self.print)(value)
    }

    /// Formats a value of this type as YAML on one line. Returns an empty text for a value that has
    /// no such form.
    pub(crate) fn print_line(&self, value: &T) -> String {
        match (self.print)(value) {
            Some(YamlText::Line(line)) => line,
            _ => String::new(),
        }
    }

    /// Sets the phrase by which messages describe the accepted values, such as `a list of paths`.
    pub(crate) fn with_expected_phrase(mut self, expected: impl Into<String>) -> Self {
        self.expected = expected.into();
        self
    }

    /// Sets the phrase that describes the accepted values, for both docs/job.md and error messages.
    /// In the error about a part of a value, such as an item of a list, the phrase stays the same.
    pub(crate) fn described_as(self, accepts: &'static str) -> Self {
        let expected = add_article(accepts);
        let message = expected.clone();
        let ValueType { read, print, schema, .. } = self;
        let read: ReadFn<T> = Box::new(move |node| read(node).map_err(|error| error.with_expected(&message)));
        ValueType { read, print, accepts: accepts.to_owned(), expected, schema }
    }

    /// Sets the phrase that describes the accepted values in docs/job.md, and leaves the phrase for
    /// error messages unchanged.
    pub(crate) fn documented_as(mut self, accepts: &str) -> Self {
        accepts.clone_into(&mut self.accepts);
        self
    }

    /// Converts a value type that reads Rust values of type `T` into one that reads values of type
    /// `U`, by means of two functions. The function `from` converts a value after it was read, and
    /// `to` converts it back to print it. A value for which `to` returns `None` is not printed.
    pub(crate) fn convert<U: 'static>(
        self,
        from: impl Fn(T) -> U + 'static,
        to: impl Fn(&U) -> Option<T> + 'static,
    ) -> ValueType<U> {
        let ValueType { read, print, accepts, expected, schema } = self;
        ValueType {
            read: Box::new(move |node| read(node).map(&from)),
            print: Box::new(move |value| to(value).and_then(|value| print(&value))),
            accepts,
            expected,
            schema,
        }
    }

    /// Restricts the accepted values to those for which the function `fits` returns true.
    /// `expected` describes them in messages, and `schema` has the additional keywords of the JSON
    /// Schema.
    pub(crate) fn restricted_to(
        self,
        expected: impl Into<String>,
        schema: Value,
        fits: impl Fn(&T) -> bool + 'static,
    ) -> Self {
        let expected = expected.into();
        let message = expected.clone();
        let ValueType { read, print, accepts, schema: mut whole, .. } = self;
        if let (Value::Object(whole), Value::Object(schema)) = (&mut whole, schema) {
            whole.extend(schema);
        }
        let read: ReadFn<T> = Box::new(move |node| {
            let value = read(node)?;
            if fits(&value) { Ok(value) } else { Err(out_of_range_error(message.as_str(), node)) }
        });
        ValueType { read, print, accepts, expected, schema: whole }
    }
}

impl<T: Clone + 'static> ValueType<T> {
    /// Converts a type of values `T` to a type of values `Option<T>`, in which `None` means that
    /// the job lacks the key.
    pub(crate) fn optional(self) -> ValueType<Option<T>> {
        self.convert(Some, Clone::clone)
    }
}

impl<T: Clone + PartialEq + 'static> ValueType<T> {
    /// Converts the type to one that also accepts the keyword `keyword`, which stands for `None`.
    pub(crate) fn or_none(self, keyword: &'static str) -> ValueType<Option<T>> {
        self.optional().or_keywords(&[(keyword, None)])
    }

    /// Makes the type accept the keywords in `keywords`, too, and read each keyword as the Rust
    /// value that follows it there.
    pub(crate) fn or_keywords(self, keywords: &[(&'static str, T)]) -> Self {
        let (keywords, printed) = (keywords.to_vec(), keywords.to_vec());
        let names: Vec<&'static str> = keywords.iter().map(|(name, _)| *name).collect();
        let ValueType { read, print, accepts, expected, schema } = self;
        let (accepts, expected) = (join_choices(&names, &accepts), join_choices(&names, &expected));
        let schema = json!({"anyOf": [{"enum": names}, schema]});
        let read: ReadFn<T> = Box::new(move |node| {
            let keyword =
                keywords.iter().find(|(name, _)| matches!(node.value, YamlValue::Text) && node.raw == *name);
            match keyword {
                Some((_, value)) => Ok(value.clone()),
                None => read(node).map_err(|error| error.with_keywords(&names)),
            }
        });
        let print: PrintFn<T> = Box::new(move |value| {
            let keyword = printed.iter().find(|(_, of_keyword)| of_keyword == value);
            keyword.map_or_else(|| print(value), |(name, _)| Some(YamlText::Line((*name).to_owned())))
        });
        ValueType { read, print, accepts, expected, schema }
    }
}

impl<T: 'static> ValueType<Vec<T>> {
    /// Restricts the accepted values to lists that are not empty. An empty list in a decoded job is
    /// printed by leaving out the key.
    pub(crate) fn not_empty(self) -> Self {
        let expected = self.expected.clone();
        self.restricted_to(expected, json!({"minItems": 1}), |list| !list.is_empty()).hidden_if_empty()
    }

    /// Makes printed jobs (`--dry-run`) omit the key if its value is an empty list.
    pub(crate) fn hidden_if_empty(self) -> Self {
        let ValueType { read, print, accepts, expected, schema } = self;
        let print: PrintFn<Vec<T>> = Box::new(move |list| if list.is_empty() { None } else { print(list) });
        ValueType { read, print, accepts, expected, schema }
    }
}

/// Converts a [`ValueType`] of plain values into one that wraps each value in an enum variant, such
/// as a port into `MasterPort::Fixed`.
macro_rules! in_variant {
    ($values:expr, $variant:path) => {
        $values.convert($variant, |value| match value {
            $variant(inner) => Some(inner.clone()),
            _ => None,
        })
    };
}
pub(crate) use in_variant;

/// Joins keywords and the description of other accepted values to a phrase such as "`a`, `b` or
/// text".
fn join_choices(keywords: &[&str], last: &str) -> String {
    let quoted: Vec<String> = keywords.iter().map(|name| format!("`{name}`")).collect();
    format!("{} or {last}", quoted.join(", "))
}

/// Returns `noun` with "a" or "an" before it. A quoted keyword gets no article.
pub(super) fn add_article(noun: &str) -> String {
    match noun.chars().next() {
        Some('`') | None => noun.to_owned(),
        Some('a' | 'e' | 'i' | 'o' | 'u') => format!("an {noun}"),
        Some(_) => format!("a {noun}"),
    }
}

/// Creates the error that a value in job.yaml has the wrong type, such as a list instead of a
/// number. The message is "must be `expected`, found …".
pub(crate) fn wrong_type_error(expected: impl Into<String>, node: &YamlNode) -> ValueError {
    ValueError::unexpected(codes::JOB_VALUE_TYPE, expected, node)
}

/// Creates the error that a value in job.yaml has the right type, but is outside of the allowed
/// range. `expected` describes the range.
pub(crate) fn out_of_range_error(expected: impl Into<String>, node: &YamlNode) -> ValueError {
    ValueError::unexpected(codes::JOB_VALUE_OUT_OF_RANGE, expected, node)
}

/// Creates the error that a value in job.yaml is not text in the format that `expected` describes.
/// Text in another format and values that are not text get different codes.
pub(crate) fn wrong_format_error(expected: impl Into<String>, node: &YamlNode) -> ValueError {
    ValueError::unexpected(choose_text_error_code(node, codes::JOB_VALUE_FORMAT), expected, node)
}

/// Chooses the diagnostic code for a wrong value in job.yaml: `code` if the value is text,
/// otherwise `job-value-type` (wrong type).
pub(crate) fn choose_text_error_code(node: &YamlNode, code: Code) -> Code {
    if matches!(node.value, YamlValue::Text) { code } else { codes::JOB_VALUE_TYPE }
}
