//! YAML text → a tree of nodes with their places.
//!
//! YAML 1.2 with the core schema (`yes` is text, `0o17` is an integer). One document, text keys, no duplicate keys, no tags,
//! no merge keys. Aliases are expanded within a budget, so a small text can't become a large tree.
use super::{scalar, source::Span};
use saphyr_parser::{Event, Parser, ScalarStyle, Span as YamlSpan};
use std::collections::HashMap;

/// Deepest nesting accepted.
const MAX_DEPTH: usize = 32;
/// Most nodes of a tree, aliases expanded.
const MAX_NODES: usize = 50_000;
/// Most bytes of scalars of a tree, aliases expanded.
const MAX_BYTES: usize = 4 << 20;

/// A value and where it was written.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) span: Span,
    pub(crate) value: Value,
    /// A scalar's text: as written when it is plain, unescaped when it is quoted. Empty for lists and mappings.
    pub(crate) raw: String,
}

/// What a node is.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text,
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// One key of a mapping.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_span: Span,
    pub(crate) value: Node,
}

/// What is wrong with a text or a value, before it is put into words for a key.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) span: Option<Span>,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    /// More of the same value.
    pub(crate) rest: Vec<Fault>,
}

impl Fault {
    /// A fault at a place.
    pub(crate) fn at(span: Span, message: impl Into<String>) -> Self {
        Fault { span: Some(span), message: message.into(), hint: None, rest: Vec::new() }
    }

    /// Several faults as one; `None` when there are none.
    pub(crate) fn all(mut faults: Vec<Fault>) -> Option<Self> {
        let rest = faults.split_off(faults.len().min(1));
        faults.pop().map(|first| Fault { rest, ..first })
    }

    /// The same fault of a part of the value: "`part` must be …".
    pub(crate) fn of(mut self, part: &str) -> Self {
        self.message = format!("{part} {}", self.message);
        self.rest = self.rest.into_iter().map(|f| f.of(part)).collect();
        self
    }

    /// With advice.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Same value, wherever and however written; a mapping's order doesn't matter.
impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        match (&self.value, &other.value) {
            (Value::Null, Value::Null) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::Float(a), Value::Float(b)) => a == b,
            (Value::Text, Value::Text) => self.raw == other.raw,
            (Value::List(a), Value::List(b)) => a == b,
            (Value::Map(a), Value::Map(b)) => {
                a.len() == b.len() && a.iter().all(|e| b.iter().any(|f| e.key == f.key && e.value == f.value))
            }
            _ => false,
        }
    }
}

impl Node {
    /// What it is, for messages: ``the text `abc` ``, `the integer 3`, `a list`.
    pub(crate) fn found(&self) -> String {
        let raw = shown(&self.raw);
        match &self.value {
            Value::Null => "nothing".to_owned(),
            Value::Bool(_) | Value::Int(_) | Value::Float(_) => raw,
            Value::Text if self.raw.is_empty() => "an empty text".to_owned(),
            Value::Text => format!("the text `{raw}`"),
            Value::List(items) if items.is_empty() => "an empty list".to_owned(),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
        }
    }

    /// Number of nodes, bytes of scalars and depth.
    fn measure(&self) -> (usize, usize, usize) {
        let (mut nodes, mut bytes, mut depth) = (0, 0, 0);
        let mut todo = vec![(self, 1)];
        while let Some((node, level)) = todo.pop() {
            nodes += 1;
            bytes += node.raw.len();
            depth = depth.max(level);
            match &node.value {
                Value::List(items) => todo.extend(items.iter().map(|n| (n, level + 1))),
                Value::Map(entries) => {
                    bytes += entries.iter().map(|e| e.key.len()).sum::<usize>();
                    todo.extend(entries.iter().map(|e| (&e.value, level + 1)));
                }
                _ => {}
            }
        }
        (nodes, bytes, depth)
    }
}

/// At most 60 characters of a text, control characters escaped.
pub(crate) fn shown(text: &str) -> String {
    let mut out: String = text
        .chars()
        .take(60)
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    if text.chars().nth(60).is_some() {
        out.push('…');
    }
    out
}

/// Reads the one document of a text; `None` when there is nothing in it.
///
/// `source` is the text's number in the `SourceMap`, `base` the offset of `text` in it.
pub(crate) fn parse(text: &str, source: u32, base: u32) -> Result<Option<Node>, Fault> {
    let mut builder = Builder::new(text, source, base);
    let mut parser = Parser::new_from_str(text);
    while let Some(next) = parser.next_event() {
        match next {
            Ok((event, span)) => builder.event(event, span)?,
            Err(error) => return Err(builder.syntax_error(text, &error)),
        }
    }
    Ok(builder.root)
}

/// Parses a value that is part of this program (a key's default).
pub(crate) fn parse_default(text: &str) -> Option<Node> {
    parse(text, u32::MAX, 0).ok().flatten()
}

/// A list or mapping whose end hasn't come yet.
struct Open {
    start: u32,
    flow: bool,
    anchor: usize,
    kind: OpenKind,
}

enum OpenKind {
    List(Vec<Node>),
    Map { entries: Vec<Entry>, seen: HashMap<String, Span>, key: Option<(String, Span)> },
}

struct Builder<'t> {
    text: &'t str,
    source: u32,
    base: u32,
    /// Byte offset of each character; empty for ASCII text.
    offsets: Vec<u32>,
    open: Vec<Open>,
    /// Finished anchored nodes. An anchor that is still open is absent.
    anchors: HashMap<usize, Node>,
    nodes: usize,
    bytes: usize,
    documents: usize,
    root: Option<Node>,
}

impl<'t> Builder<'t> {
    fn new(text: &'t str, source: u32, base: u32) -> Self {
        let offsets = if text.is_ascii() {
            Vec::new()
        } else {
            text.char_indices().map(|(byte, _)| byte as u32).collect()
        };
        Builder {
            text,
            source,
            base,
            offsets,
            open: Vec::new(),
            anchors: HashMap::new(),
            nodes: 0,
            bytes: 0,
            documents: 0,
            root: None,
        }
    }

    /// Byte offset in `text` of a character index.
    fn byte(&self, index: usize) -> u32 {
        if self.offsets.is_empty() {
            index.min(self.text.len()) as u32
        } else {
            self.offsets.get(index).copied().unwrap_or(self.text.len() as u32)
        }
    }

    fn span(&self, span: YamlSpan) -> Span {
        let (start, end) = (self.byte(span.start.index()), self.byte(span.end.index()));
        self.range(start, end.max(start))
    }

    /// The span of bytes of `text`.
    fn range(&self, start: u32, end: u32) -> Span {
        Span { source: self.source, start: self.base + start, end: self.base + end }
    }

    fn event(&mut self, event: Event<'_>, at: YamlSpan) -> Result<(), Fault> {
        let span = self.span(at);
        match event {
            Event::DocumentStart(_) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(Fault::at(span, "a second YAML document begins here").hint(
                        "a job is one document: remove the `---` and what follows, or the first document",
                    ));
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, tag) => {
                no_tag(tag.is_some(), span)?;
                let value = if style == ScalarStyle::Plain { scalar::resolve(&text) } else { Value::Text };
                self.budget(1, text.len(), span)?;
                self.finish(Node { span, value, raw: text.into_owned() }, anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                no_tag(tag.is_some(), span)?;
                self.begin(OpenKind::List(Vec::new()), anchor, span)
            }
            Event::MappingStart(anchor, tag) => {
                no_tag(tag.is_some(), span)?;
                self.begin(
                    OpenKind::Map { entries: Vec::new(), seen: HashMap::new(), key: None },
                    anchor,
                    span,
                )
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(span),
            Event::Alias(anchor) => self.alias(anchor, span),
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => Ok(()),
        }
    }

    fn begin(&mut self, kind: OpenKind, anchor: usize, span: Span) -> Result<(), Fault> {
        self.budget(1, 0, span)?;
        if let Some(OpenKind::Map { key: None, .. }) = self.open.last().map(|o| &o.kind) {
            return Err(Fault::at(span, "a list or mapping can't be a key").hint("keys are text"));
        }
        if self.open.len() + 1 > MAX_DEPTH {
            return Err(too_deep(span));
        }
        let start = span.start - self.base;
        let flow = matches!(self.text.as_bytes().get(start as usize), Some(b'[' | b'{'));
        self.open.push(Open { start, flow, anchor, kind });
        Ok(())
    }

    fn end(&mut self, span: Span) -> Result<(), Fault> {
        let Some(open) = self.open.pop() else { return Ok(()) };
        let (value, last) = match open.kind {
            OpenKind::List(items) => {
                let last = items.last().map(|n| n.span);
                (Value::List(items), last)
            }
            OpenKind::Map { entries, .. } => {
                let last = entries.last().map(|e| e.value.span);
                (Value::Map(entries), last)
            }
        };
        // A block's end event lies where the next token begins: its last child tells better.
        let end = match last {
            Some(last) if !open.flow && last.source == self.source => last.end - self.base,
            _ => span.end - self.base,
        };
        let span = self.range(open.start, end.max(open.start));
        self.finish(Node { span, value, raw: String::new() }, open.anchor)
    }

    /// A node is complete: it becomes a key, a value, an item or the root.
    fn finish(&mut self, node: Node, anchor: usize) -> Result<(), Fault> {
        if anchor != 0 {
            let (nodes, bytes, _) = node.measure();
            self.budget(nodes, bytes, node.span)?;
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut().map(|o| &mut o.kind) {
            None => self.root = Some(node),
            Some(OpenKind::List(items)) => items.push(node),
            Some(OpenKind::Map { entries, seen, key }) => match key.take() {
                Some((key, key_span)) => {
                    // What isn't written has no place of its own.
                    let span = if node.span.start == node.span.end { key_span } else { node.span };
                    entries.push(Entry { key, key_span, value: Node { span, ..node } });
                }
                None => *key = Some(new_key(node, seen)?),
            },
        }
        Ok(())
    }

    fn alias(&mut self, anchor: usize, span: Span) -> Result<(), Fault> {
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(Fault::at(span, "this alias refers to the value that it is part of")
                .hint("a value can't contain itself: write it out"));
        };
        let (nodes, bytes, depth) = node.measure();
        if self.open.len() + depth > MAX_DEPTH {
            return Err(too_deep(span));
        }
        let node = node.clone();
        self.budget(nodes, bytes, span)?;
        self.finish(node, 0)
    }

    fn budget(&mut self, nodes: usize, bytes: usize, span: Span) -> Result<(), Fault> {
        self.nodes += nodes;
        self.bytes += bytes;
        if self.nodes > MAX_NODES || self.bytes > MAX_BYTES {
            let message =
                format!("the job is too large from here on (more than {MAX_NODES} values or 4 MiB of text)");
            return Err(Fault::at(span, message).hint("aliases count as what they stand for"));
        }
        Ok(())
    }

    fn syntax_error(&self, text: &str, error: &saphyr_parser::ScanError) -> Fault {
        let at = self.byte(error.marker().index());
        let span = self.range(at, at);
        // The parser's words for a tab in the indentation differ by where it is met; the cause is always the same.
        let line_start = text[..at as usize].rfind('\n').map_or(0, |i| i + 1);
        let line = text[line_start..].lines().next().unwrap_or("");
        let indent = line.len() - line.trim_start_matches([' ', '\t']).len();
        if let Some(tab) = line[..indent].find('\t') {
            let at = (line_start + tab) as u32;
            return Fault::at(self.range(at, at + 1), "a tab can't be used for indentation")
                .hint("YAML is indented with spaces");
        }
        Fault::at(span, format!("this isn't valid YAML: {}", error.info()))
    }
}

fn no_tag(tagged: bool, span: Span) -> Result<(), Fault> {
    if tagged {
        return Err(Fault::at(span, "YAML tags (`!…`) have no meaning in a job")
            .hint("remove the tag; put text that looks like something else in quotes"));
    }
    Ok(())
}

fn too_deep(span: Span) -> Fault {
    Fault::at(span, format!("the job is nested more than {MAX_DEPTH} levels deep here"))
}

fn new_key(node: Node, seen: &mut HashMap<String, Span>) -> Result<(String, Span), Fault> {
    match node.value {
        Value::List(_) | Value::Map(_) => {
            Err(Fault::at(node.span, "a list or mapping can't be a key").hint("keys are text"))
        }
        Value::Null => Err(Fault::at(node.span, "a key is missing here").hint("write `name: value`")),
        _ if node.raw == "<<" => Err(Fault::at(node.span, "merge keys (`<<`) aren't part of YAML 1.2")
            .hint("write the keys out, or use an alias for a whole value")),
        _ if seen.contains_key(&node.raw) => {
            Err(Fault::at(node.span, format!("the key `{}` is given twice", shown(&node.raw)))
                .hint("keep one of them"))
        }
        _ => {
            seen.insert(node.raw.clone(), node.span);
            Ok((node.raw, node.span))
        }
    }
}
