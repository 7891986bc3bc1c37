//! [`Document`]: a YAML or JSON file of another program, parsed into values with locations.
use super::{
    parse::parse_yaml,
    source_map::SourceMap,
    text_file::{MAX_JOB_BYTES, decode_utf8, file_error, read_limited_file, reject_control_characters},
    tree::{SourceSpan, YamlNode, YamlValue, make_excerpt},
};
use crate::secret_text::hide_secret_values;
use diagnostic::{
    Location,
    codes::{command, job as codes},
};
use std::path::Path;

/// The syntax in which a configuration file of another program is written: YAML or JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DocumentSyntax {
    /// YAML 1.2, with the restrictions that apply to job.yaml.
    Yaml,
    /// JSON with the comments of Hjson: `//`, `#` and `/* */`.
    Json,
}

/// A parsed YAML or JSON file of another program, such as a DeepSpeed configuration.
#[derive(Clone, Debug)]
pub struct Document {
    sources: SourceMap,
    /// The outermost value of the document.
    pub root: DocumentItem,
}

/// A value in a parsed configuration file of another program: its content, its text, and its
/// position in the file.
#[derive(Clone, Debug)]
pub struct DocumentItem {
    /// The value, with its type.
    pub value: DocumentValue,
    /// The text of a scalar, unescaped if it is quoted; empty for lists and mappings.
    pub text: String,
    span: SourceSpan,
}

/// A value in a parsed configuration file: a scalar, a list or a mapping.
#[derive(Clone, Debug)]
pub enum DocumentValue {
    /// `null`, `~` or an empty value.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(i128),
    /// A number with a decimal point or an exponent, or an infinity or NaN.
    Float(f64),
    /// Text, which is stored in [`DocumentItem::text`].
    Text,
    /// A list.
    List(Vec<DocumentItem>),
    /// The keys and values of a mapping, in the order of the file, without duplicate keys.
    Map(Vec<(String, DocumentItem)>),
}

impl DocumentItem {
    /// Creates a value that the file does not contain, such as one from the command line; errors
    /// about it point at the position of `neighbor`.
    pub fn new_at_position_of(neighbor: &DocumentItem, value: DocumentValue, text: String) -> DocumentItem {
        DocumentItem { value, text, span: neighbor.span }
    }

    /// Describes the value for an error message, such as ``the text `abc` ``, `3` or `a list`,
    /// without probable secrets.
    pub fn describe(&self) -> String {
        let raw = make_excerpt(&hide_secret_values(&self.text));
        match &self.value {
            DocumentValue::Null => "nothing".to_owned(),
            DocumentValue::Bool(_) | DocumentValue::Int(_) | DocumentValue::Float(_) => raw,
            DocumentValue::Text => format!("the text `{raw}`"),
            DocumentValue::List(_) => "a list".to_owned(),
            DocumentValue::Map(_) => "a mapping".to_owned(),
        }
    }
}

impl Document {
    /// Reads and parses the configuration file of another program at `path`. Fails if the file is
    /// larger than 1 MiB, empty or malformed.
    pub fn read(path: &Path, syntax: DocumentSyntax) -> diagnostic::Result<Self> {
        let name = path.display().to_string();
        let text = decode_utf8(&name, read_limited_file(path, &name, "file")?)?;
        Document::parse(&name, &text, syntax)
    }

    /// Parses `text`, the content of another program's configuration file, which messages call
    /// `name`, as YAML or JSON. Fails if the text is larger than 1 MiB, empty or malformed.
    pub fn parse(name: &str, text: &str, syntax: DocumentSyntax) -> diagnostic::Result<Self> {
        let json;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let sources = SourceMap::new(name, text);
        if text.len() as u64 > MAX_JOB_BYTES {
            return Err(file_error(codes::JOB_TOO_LARGE, name, "the file is larger than 1 MiB"));
        }
        reject_control_characters(text).map_err(|error| error.into_diagnostic_without_key(&sources))?;
        let yaml = match syntax {
            DocumentSyntax::Yaml => text,
            DocumentSyntax::Json if !begins_with_brace(text) => {
                let message = "the file is not a JSON object: it does not begin with `{`";
                return Err(file_error(command::IMPORT_NOT_A_CONFIG, name, message));
            }
            DocumentSyntax::Json => {
                json = blank_out_comments(text);
                &json
            }
        };
        match parse_yaml(yaml, SourceMap::JOB_FILE_INDEX, 0)
            .map_err(|error| error.into_diagnostic_without_key(&sources))?
        {
            Some(node) => Ok(Document { root: item_from_yaml(node), sources }),
            None => Err(file_error(codes::JOB_EMPTY, name, "the file is empty")),
        }
    }

    /// Returns the position of the value `item` in this file, for diagnostics.
    pub fn locate_item(&self, item: &DocumentItem) -> Location {
        self.sources.locate_span(item.span)
    }

    /// Returns the name of this file, as messages show it.
    pub fn file_name(&self) -> &str {
        self.sources.job_file_name()
    }
}

/// Converts a YAML node and its children to values of a configuration file of another program.
fn item_from_yaml(node: YamlNode) -> DocumentItem {
    let value = match node.value {
        YamlValue::Null => DocumentValue::Null,
        YamlValue::Bool(b) => DocumentValue::Bool(b),
        YamlValue::Int(n) => DocumentValue::Int(n),
        YamlValue::Float(x) => DocumentValue::Float(x),
        YamlValue::Text => DocumentValue::Text,
        YamlValue::List(items) => DocumentValue::List(items.into_iter().map(item_from_yaml).collect()),
        YamlValue::Map(entries) => {
            DocumentValue::Map(entries.into_iter().map(|e| (e.key, item_from_yaml(e.value))).collect())
        }
    };
    DocumentItem { value, text: node.raw, span: node.span }
}

/// Returns whether `text` begins with `{` after white space and comments, as a JSON object must.
fn begins_with_brace(text: &str) -> bool {
    blank_out_comments(text).trim_start().starts_with('{')
}

/// Replaces comments and tabs in a JSON file by spaces, so that a YAML parser accepts the result.
/// Quoted strings stay unchanged. The length in bytes does not change either, so spans of the
/// result are valid in `text`.
fn blank_out_comments(text: &str) -> String {
    /// The state of the scanner that removes comments from a JSON file: in code, in a quoted
    /// string, in a line comment or in a block comment.
    #[derive(PartialEq)]
    enum LexerState {
        Code,
        Text,
        Line,
        Block,
    }
    let (mut state, mut out) = (LexerState::Code, String::with_capacity(text.len()));
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let next = chars.peek().copied();
        match state {
            LexerState::Text => {
                out.push(c);
                match c {
                    '\\' => out.extend(chars.next()),
                    '"' => state = LexerState::Code,
                    _ => {}
                }
                continue;
            }
            LexerState::Line if c == '\n' => state = LexerState::Code,
            LexerState::Block if c == '*' && next == Some('/') => {
                state = LexerState::Code;
                chars.next();
                out.push_str("  ");
                continue;
            }
            LexerState::Code if c == '#' || c == '/' && next == Some('/') => state = LexerState::Line,
            LexerState::Code if c == '/' && next == Some('*') => state = LexerState::Block,
            LexerState::Code if c == '"' => state = LexerState::Text,
            _ => {}
        }
        match c {
            '\n' | '\r' => out.push(c),
            _ if state == LexerState::Code || state == LexerState::Text => {
                out.push(if c == '\t' { ' ' } else { c })
            }
            // One space per byte keeps the offsets of the text that follows.
            _ => out.extend(std::iter::repeat_n(' ', c.len_utf8())),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_json(text: &str) -> diagnostic::Result<Document> {
        Document::parse("ds.json", text, DocumentSyntax::Json)
    }

    #[test]
    fn json_may_contain_tabs_and_comments() {
        let text = "// it's \"mine\"\n{\n\t\"a\": 1e5, # one\n\t\"b\": {\"c\": [true, null, \"x // y\\\" # z\"]} /* é */\n}\n";
        let document = parse_json(text).expect("a document");
        let DocumentValue::Map(entries) = &document.root.value else { panic!("a mapping") };
        assert_eq!(entries.iter().map(|(k, _)| k.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(matches!(entries[0].1.value, DocumentValue::Float(x) if x == 1e5));
        let DocumentValue::Map(inner) = &entries[1].1.value else { panic!("a mapping") };
        let DocumentValue::List(list) = &inner[0].1.value else { panic!("a list") };
        assert_eq!(list[2].text, "x // y\" # z");
        assert_eq!((document.locate_item(&list[0]).line(), document.locate_item(&list[0]).column()), (4, 14));
    }

    #[test]
    fn a_malformed_document_is_rejected_with_its_location() {
        for (text, line, code) in [
            ("", 0, command::IMPORT_NOT_A_CONFIG),
            ("[1]", 0, command::IMPORT_NOT_A_CONFIG),
            ("{\"a\": 1,\n \"a\": 2}", 2, codes::JOB_KEY_DUPLICATE),
            ("{\"a\": 1", 1, codes::JOB_YAML_SYNTAX),
            ("{\"a\": \u{1}1}", 1, codes::JOB_CONTROL_CHARACTER),
            ("{\"a\": !!x 1}", 1, codes::JOB_YAML_UNSUPPORTED),
        ] {
            let error = parse_json(text).expect_err(text);
            assert_eq!(error.code(), code, "{text}: {error:?}");
            assert!(error.location().is_some_and(|l| l.line() >= line), "{text}: {error:?}");
        }
        assert!(parse_json(&format!("{{\"a\": \"{}\"}}", "x".repeat(1 << 20))).is_err());
        let deep = format!("{}{}", "{\"a\":".repeat(500), "}".repeat(500));
        assert!(parse_json(&deep).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_rejected(text in "[\\{\\}\\[\\]:,a\"/*#\\\\\n\té ]{0,60}") {
            _ = parse_json(&format!("{{{text}"));
            proptest::prop_assert_eq!(blank_out_comments(&text).len(), text.len());
        }
    }
}
