//! [`Document`]: a YAML or JSON file of another program as plain values, each with its location.
use super::{
    load::{MAX_JOB, check_characters, decode_utf8, file_error, read_file},
    source::{SourceMap, Span},
    yaml::{self, YamlNode, YamlValue, parse},
};
use diagnostic::{
    Location,
    codes::{command, job as codes},
};
use std::path::Path;

/// The notation of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syntax {
    /// YAML 1.2, with the restrictions of job.yaml.
    Yaml,
    /// JSON with the comments of Hjson: `//`, `#` and `/* */`.
    Json,
}

/// A parsed file of another program.
#[derive(Clone, Debug)]
pub struct Document {
    sources: SourceMap,
    /// The value of the whole document.
    pub root: Item,
}

/// A value of a document.
#[derive(Clone, Debug)]
pub struct Item {
    /// The value and its type.
    pub value: ItemValue,
    /// The text of a scalar, unescaped if it is quoted; empty for lists and mappings.
    pub text: String,
    span: Span,
}

/// The resolved value of an [`Item`].
#[derive(Clone, Debug)]
pub enum ItemValue {
    /// `null`, `~` or nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(i128),
    /// A number with a point or an exponent, or an infinity or NaN.
    Float(f64),
    /// Text, which is in [`Item::text`].
    Text,
    /// A list.
    List(Vec<Item>),
    /// A mapping in the order of the file, without duplicate keys.
    Map(Vec<(String, Item)>),
}

impl Item {
    /// Describes the value for a message: ``the text `abc` ``, `3`, `a list`.
    pub fn describe(&self) -> String {
        let raw = yaml::excerpt(&self.text);
        match &self.value {
            ItemValue::Null => "nothing".to_owned(),
            ItemValue::Bool(_) | ItemValue::Int(_) | ItemValue::Float(_) => raw,
            ItemValue::Text => format!("the text `{raw}`"),
            ItemValue::List(_) => "a list".to_owned(),
            ItemValue::Map(_) => "a mapping".to_owned(),
        }
    }
}

impl Document {
    /// Reads a file of at most 1 MiB.
    pub fn read(path: &Path, syntax: Syntax) -> diagnostic::Result<Self> {
        let name = path.display().to_string();
        let text = decode_utf8(&name, read_file(path, &name, "file")?)?;
        Document::parse(&name, &text, syntax)
    }

    /// Parses a text; `name` is the file name in messages.
    pub fn parse(name: &str, text: &str, syntax: Syntax) -> diagnostic::Result<Self> {
        let json;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let sources = SourceMap::new(name, text);
        if text.len() as u64 > MAX_JOB {
            return Err(file_error(codes::JOB_TOO_LARGE, name, "the file is larger than 1 MiB"));
        }
        check_characters(text).map_err(|error| error.into_diagnostic(&sources))?;
        let yaml = match syntax {
            Syntax::Yaml => text,
            Syntax::Json if !begins_with_brace(text) => {
                let message = "the file is not a JSON object: it does not begin with `{`";
                return Err(file_error(command::IMPORT_NOT_A_CONFIG, name, message));
            }
            Syntax::Json => {
                json = without_comments(text);
                &json
            }
        };
        match parse(yaml, SourceMap::JOB, 0).map_err(|error| error.into_diagnostic(&sources))? {
            Some(node) => Ok(Document { root: document_item(node), sources }),
            None => Err(file_error(codes::JOB_EMPTY, name, "the file is empty")),
        }
    }

    /// The location of a value of this document.
    pub fn location(&self, item: &Item) -> Location {
        self.sources.span_location(item.span)
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        self.sources.file()
    }
}

fn document_item(node: YamlNode) -> Item {
    let value = match node.value {
        YamlValue::Null => ItemValue::Null,
        YamlValue::Bool(b) => ItemValue::Bool(b),
        YamlValue::Int(n) => ItemValue::Int(n),
        YamlValue::Float(x) => ItemValue::Float(x),
        YamlValue::Text => ItemValue::Text,
        YamlValue::List(items) => ItemValue::List(items.into_iter().map(document_item).collect()),
        YamlValue::Map(entries) => {
            ItemValue::Map(entries.into_iter().map(|e| (e.key, document_item(e.value))).collect())
        }
    };
    Item { value, text: node.raw, span: node.span }
}

fn begins_with_brace(text: &str) -> bool {
    without_comments(text).trim_start().starts_with('{')
}

/// Replaces comments and tabs by spaces, because YAML does not accept tabs everywhere. The length
/// in bytes stays, so spans remain valid.
fn without_comments(text: &str) -> String {
    #[derive(PartialEq)]
    enum Container {
        Code,
        Text,
        Line,
        Block,
    }
    let (mut state, mut out) = (Container::Code, String::with_capacity(text.len()));
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let next = chars.peek().copied();
        match state {
            Container::Text => {
                out.push(c);
                match c {
                    '\\' => out.extend(chars.next()),
                    '"' => state = Container::Code,
                    _ => {}
                }
                continue;
            }
            Container::Line if c == '\n' => state = Container::Code,
            Container::Block if c == '*' && next == Some('/') => {
                state = Container::Code;
                chars.next();
                out.push_str("  ");
                continue;
            }
            Container::Code if c == '#' || c == '/' && next == Some('/') => state = Container::Line,
            Container::Code if c == '/' && next == Some('*') => state = Container::Block,
            Container::Code if c == '"' => state = Container::Text,
            _ => {}
        }
        match c {
            '\n' | '\r' => out.push(c),
            _ if state == Container::Code || state == Container::Text => {
                out.push(if c == '\t' { ' ' } else { c })
            }
            // One space per byte keeps the offsets of what follows.
            _ => out.extend(std::iter::repeat_n(' ', c.len_utf8())),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> diagnostic::Result<Document> {
        Document::parse("ds.json", text, Syntax::Json)
    }

    #[test]
    fn json_may_contain_tabs_and_comments() {
        let text = "// it's \"mine\"\n{\n\t\"a\": 1e5, # one\n\t\"b\": {\"c\": [true, null, \"x // y\\\" # z\"]} /* é */\n}\n";
        let document = json(text).expect("a document");
        let ItemValue::Map(entries) = &document.root.value else { panic!("a mapping") };
        assert_eq!(entries.iter().map(|(k, _)| k.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(matches!(entries[0].1.value, ItemValue::Float(x) if x == 1e5));
        let ItemValue::Map(inner) = &entries[1].1.value else { panic!("a mapping") };
        let ItemValue::List(list) = &inner[0].1.value else { panic!("a list") };
        assert_eq!(list[2].text, "x // y\" # z");
        assert_eq!((document.location(&list[0]).line(), document.location(&list[0]).column()), (4, 14));
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
            let error = json(text).expect_err(text);
            assert_eq!(error.code(), code, "{text}: {error:?}");
            assert!(error.location().is_some_and(|l| l.line() >= line), "{text}: {error:?}");
        }
        assert!(json(&format!("{{\"a\": \"{}\"}}", "x".repeat(1 << 20))).is_err());
        let deep = format!("{}{}", "{\"a\":".repeat(500), "}".repeat(500));
        assert!(json(&deep).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_rejected(text in "[\\{\\}\\[\\]:,a\"/*#\\\\\n\té ]{0,60}") {
            _ = json(&format!("{{{text}"));
            proptest::prop_assert_eq!(without_comments(&text).len(), text.len());
        }
    }
}
