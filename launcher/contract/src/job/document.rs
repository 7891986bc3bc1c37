//! [`Document`]: a YAML or JSON file of another program as plain values, each with its place.
use super::{
    load::{MAX_JOB, decode_utf8, printable, read},
    source::{SourceMap, Span},
    tree::{self, Node, parse},
};
use crate::problem::{Place, Problem};
use std::path::Path;

/// How a document is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syntax {
    /// YAML 1.2 as in job.yaml.
    Yaml,
    /// JSON, with comments as Hjson has them (`//`, `#`, `/* */`).
    Json,
}

/// A file of another program.
#[derive(Clone, Debug)]
pub struct Document {
    map: SourceMap,
    pub root: Item,
}

/// A value.
#[derive(Clone, Debug)]
pub struct Item {
    pub value: ItemValue,
    /// A scalar as it was written (unescaped where it was quoted); empty for lists and mappings.
    pub text: String,
    span: Span,
}

/// What a value is.
#[derive(Clone, Debug)]
pub enum ItemValue {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text,
    List(Vec<Item>),
    /// In the order of the file; no key twice.
    Map(Vec<(String, Item)>),
}

impl Item {
    /// What it is, for messages: ``the text `abc` ``, `the integer 3`, `a list`.
    pub fn found(&self) -> String {
        let raw = tree::shown(&self.text);
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
    pub fn read(path: &Path, syntax: Syntax) -> Result<Self, Box<Problem>> {
        let name = path.display().to_string();
        let text = decode_utf8(&name, read(path, &name, "file")?)?;
        Document::parse(&name, &text, syntax)
    }

    /// Reads a text; `name` is said in messages.
    pub fn parse(name: &str, text: &str, syntax: Syntax) -> Result<Self, Box<Problem>> {
        let plain;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let map = SourceMap::new(name, text);
        let fail = |place, message: String, hint: Option<String>| {
            Box::new(Problem { path: String::new(), place, message, hint })
        };
        let whole = || Place::File { file: name.to_owned() };
        if text.len() as u64 > MAX_JOB {
            return Err(fail(whole(), "the file is larger than 1 MiB".to_owned(), None));
        }
        let in_place = |fault: tree::Fault| {
            let place = fault.span.map_or_else(whole, |span| map.place(span));
            fail(place, fault.message, fault.hint)
        };
        printable(text).map_err(in_place)?;
        let yaml = match syntax {
            Syntax::Yaml => text,
            Syntax::Json if !begins_with_brace(text) => {
                return Err(fail(
                    whole(),
                    "this isn't a JSON object: it has no `{` at its start".into(),
                    None,
                ));
            }
            Syntax::Json => {
                plain = without_comments(text);
                &plain
            }
        };
        match parse(yaml, SourceMap::JOB, 0).map_err(in_place)? {
            Some(node) => Ok(Document { root: item(node), map }),
            None => Err(fail(whole(), "the file is empty".to_owned(), None)),
        }
    }

    /// Where a value was written.
    pub fn place(&self, item: &Item) -> Place {
        self.map.place(item.span)
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        self.map.file()
    }
}

fn item(node: Node) -> Item {
    let value = match node.value {
        tree::Value::Null => ItemValue::Null,
        tree::Value::Bool(b) => ItemValue::Bool(b),
        tree::Value::Int(n) => ItemValue::Int(n),
        tree::Value::Float(x) => ItemValue::Float(x),
        tree::Value::Text => ItemValue::Text,
        tree::Value::List(items) => ItemValue::List(items.into_iter().map(item).collect()),
        tree::Value::Map(entries) => {
            ItemValue::Map(entries.into_iter().map(|e| (e.key, item(e.value))).collect())
        }
    };
    Item { value, text: node.raw, span: node.span }
}

fn begins_with_brace(text: &str) -> bool {
    without_comments(text).trim_start().starts_with('{')
}

/// The same bytes with comments as blanks, and tabs too: YAML doesn't take those where JSON does.
fn without_comments(text: &str) -> String {
    #[derive(PartialEq)]
    enum In {
        Code,
        Text,
        Line,
        Block,
    }
    let (mut state, mut out) = (In::Code, String::with_capacity(text.len()));
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let next = chars.peek().copied();
        match state {
            In::Text => {
                out.push(c);
                match c {
                    '\\' => out.extend(chars.next()),
                    '"' => state = In::Code,
                    _ => {}
                }
                continue;
            }
            In::Line if c == '\n' => state = In::Code,
            In::Block if c == '*' && next == Some('/') => {
                state = In::Code;
                chars.next();
                out.push_str("  ");
                continue;
            }
            In::Code if c == '#' || c == '/' && next == Some('/') => state = In::Line,
            In::Code if c == '/' && next == Some('*') => state = In::Block,
            In::Code if c == '"' => state = In::Text,
            _ => {}
        }
        match c {
            '\n' | '\r' => out.push(c),
            _ if state == In::Code || state == In::Text => out.push(if c == '\t' { ' ' } else { c }),
            // as many bytes as before, so that places stay right
            _ => out.extend(std::iter::repeat_n(' ', c.len_utf8())),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Result<Document, Box<Problem>> {
        Document::parse("ds.json", text, Syntax::Json)
    }

    #[test]
    fn json_with_tabs_and_comments() {
        let text = "// it's \"mine\"\n{\n\t\"a\": 1e5, # one\n\t\"b\": {\"c\": [true, null, \"x // y\\\" # z\"]} /* é */\n}\n";
        let document = json(text).expect("a document");
        let ItemValue::Map(entries) = &document.root.value else { panic!("a mapping") };
        assert_eq!(entries.iter().map(|(k, _)| k.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(matches!(entries[0].1.value, ItemValue::Float(x) if x == 1e5));
        let ItemValue::Map(inner) = &entries[1].1.value else { panic!("a mapping") };
        let ItemValue::List(list) = &inner[0].1.value else { panic!("a list") };
        assert_eq!(list[2].text, "x // y\" # z");
        assert_eq!((document.place(&list[0]).line(), document.place(&list[0]).column()), (4, 14));
    }

    #[test]
    fn what_is_no_document_is_refused_in_place() {
        for (text, line, part) in [
            ("", 0, "no `{`"),
            ("[1]", 0, "no `{`"),
            ("{\"a\": 1,\n \"a\": 2}", 2, "`a`"),
            ("{\"a\": 1", 1, ""),
            ("{\"a\": \u{1}1}", 1, "U+0001"),
            ("{\"a\": !!x 1}", 1, "tag"),
        ] {
            let problem = json(text).expect_err(text);
            assert!(problem.message.contains(part) && problem.place.line() >= line, "{text}: {problem:?}");
        }
        assert!(json(&format!("{{\"a\": \"{}\"}}", "x".repeat(1 << 20))).is_err());
        let deep = format!("{}{}", "{\"a\":".repeat(500), "}".repeat(500));
        assert!(json(&deep).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_text_does_no_harm(text in "[\\{\\}\\[\\]:,a\"/*#\\\\\n\té ]{0,60}") {
            _ = json(&format!("{{{text}"));
            proptest::prop_assert_eq!(without_comments(&text).len(), text.len());
        }
    }
}
