//! Parses YAML text into a tree of nodes ([`YamlNode`]). Each node has the span of text that it was
//! read from.
//!
//! The language is YAML 1.2 with the core schema, in which `yes` is text and `0o17` is an integer.
//! A text is one document whose keys are text. Duplicate keys, tags and merge keys are errors. The
//! size of expanded aliases is limited, so that a small text cannot become a large tree.
use super::{
    scalar,
    tree::{SourceSpan, YamlEntry, YamlNode, YamlValue, make_excerpt},
    value_error::ValueError,
};
use diagnostic::codes::job as codes;
use saphyr_parser::{Event, Parser, ScalarStyle, Span as YamlSpan};
use std::collections::HashMap;

/// The deepest nesting of lists and mappings that is accepted, in levels.
const MAX_DEPTH: usize = 32;
/// The largest number of nodes in the tree of one YAML text, after aliases are expanded. A larger
/// tree is rejected.
const MAX_NODES: usize = 50_000;
/// The largest total size of the scalars in the tree of one YAML text, in bytes, after aliases are
/// expanded. A larger tree is rejected.
const MAX_SCALAR_BYTES: usize = 4 << 20;

/// Parses a text that contains at most one YAML document. Returns `None` if the text is empty.
///
/// `source` is the index of the whole text in the `SourceMap`. `base` is the byte offset of `text`
/// in the whole text.
pub(crate) fn parse_yaml(text: &str, source: u32, base: u32) -> Result<Option<YamlNode>, ValueError> {
    let mut builder = YamlTreeBuilder::new(text, source, base);
    let mut parser = Parser::new_from_str(text);
    while let Some(next) = parser.next_event() {
        match next {
            Ok((event, span)) => builder.add_event(event, span)?,
            Err(error) => return Err(builder.syntax_error(text, &error)),
        }
    }
    Ok(builder.root)
}

/// Parses the default of a job.yaml key, which its declaration contains as YAML text. Returns
/// `None` if the text is not valid.
pub(crate) fn parse_default_value(text: &str) -> Option<YamlNode> {
    parse_yaml(text, u32::MAX, 0).ok().flatten()
}

/// A list or mapping in a YAML text whose end the parser has not reached yet.
struct OpenNode {
    start: u32,
    flow: bool,
    anchor: usize,
    kind: OpenCollection,
}

/// The part of a YAML list or mapping that the parser has read so far, while the end of the list or
/// mapping is not reached.
enum OpenCollection {
    List(Vec<YamlNode>),
    Map { entries: Vec<YamlEntry>, seen: HashMap<String, SourceSpan>, key: Option<(String, SourceSpan)> },
}

/// Builds the tree of nodes of a YAML text from the events of the YAML parser.
struct YamlTreeBuilder<'t> {
    text: &'t str,
    source: u32,
    base: u32,
    /// The byte offset of each character of `text`; empty if `text` is ASCII, because offsets and
    /// indices are then equal.
    offsets: Vec<u32>,
    open: Vec<OpenNode>,
    /// The complete nodes that have an anchor, by the number of the anchor.
    anchors: HashMap<usize, YamlNode>,
    nodes: usize,
    bytes: usize,
    documents: usize,
    root: Option<YamlNode>,
}

impl<'t> YamlTreeBuilder<'t> {
    /// Creates a builder of the tree of nodes for the YAML text `text`.
    fn new(text: &'t str, source: u32, base: u32) -> Self {
        let offsets = if text.is_ascii() {
            Vec::new()
        } else {
            text.char_indices().map(|(byte, _)| byte as u32).collect()
        };
        YamlTreeBuilder {
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

    /// Converts a position in the YAML text, counted in characters, to the byte offset of this
    /// position.
    fn find_byte_offset(&self, index: usize) -> u32 {
        if self.offsets.is_empty() {
            index.min(self.text.len()) as u32
        } else {
            self.offsets.get(index).copied().unwrap_or(self.text.len() as u32)
        }
    }

    /// Converts a range of characters in the YAML text, as the YAML parser reports it, to a range
    /// of bytes.
    fn to_byte_span(&self, span: YamlSpan) -> SourceSpan {
        let (start, end) =
            (self.find_byte_offset(span.start.index()), self.find_byte_offset(span.end.index()));
        self.make_span(start, end.max(start))
    }

    /// Creates the [`SourceSpan`] of the bytes `start..end` of the YAML text.
    fn make_span(&self, start: u32, end: u32) -> SourceSpan {
        SourceSpan { source: self.source, start: self.base + start, end: self.base + end }
    }

    /// Adds a scalar, list, mapping or alias to the tree, according to one event of the YAML
    /// parser. Fails if the event is not supported or exceeds a limit.
    fn add_event(&mut self, event: Event<'_>, at: YamlSpan) -> Result<(), ValueError> {
        let span = self.to_byte_span(at);
        match event {
            Event::DocumentStart(_) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(ValueError::new(
                        codes::JOB_YAML_UNSUPPORTED,
                        span,
                        "a second YAML document begins here",
                    )
                    .with_help(
                        "a job is one document: remove the `---` and what follows, or the first document",
                    ));
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, tag) => {
                reject_tag(tag.is_some(), span)?;
                let value =
                    if style == ScalarStyle::Plain { scalar::resolve_scalar(&text) } else { YamlValue::Text };
                self.count_against_limits(1, text.len(), span)?;
                self.add_node(YamlNode { span, value, raw: text.into_owned() }, anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                reject_tag(tag.is_some(), span)?;
                self.begin_collection(OpenCollection::List(Vec::new()), anchor, span)
            }
            Event::MappingStart(anchor, tag) => {
                reject_tag(tag.is_some(), span)?;
                self.begin_collection(
                    OpenCollection::Map { entries: Vec::new(), seen: HashMap::new(), key: None },
                    anchor,
                    span,
                )
            }
            Event::SequenceEnd | Event::MappingEnd => self.end_collection(span),
            Event::Alias(anchor) => self.expand_alias(anchor, span),
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => Ok(()),
        }
    }

    /// Begins a list or mapping, to which the nodes that follow are added.
    fn begin_collection(
        &mut self,
        kind: OpenCollection,
        anchor: usize,
        span: SourceSpan,
    ) -> Result<(), ValueError> {
        self.count_against_limits(1, 0, span)?;
        if let Some(OpenCollection::Map { key: None, .. }) = self.open.last().map(|o| &o.kind) {
            return Err(collection_as_key_error(span));
        }
        if self.open.len() + 1 > MAX_DEPTH {
            return Err(too_deep_error(span));
        }
        let start = span.start - self.base;
        let flow = matches!(self.text.as_bytes().get(start as usize), Some(b'[' | b'{'));
        self.open.push(OpenNode { start, flow, anchor, kind });
        Ok(())
    }

    /// Ends the innermost list or mapping whose end was not reached yet, and adds it to the list or
    /// mapping that contains it.
    fn end_collection(&mut self, span: SourceSpan) -> Result<(), ValueError> {
        let Some(open) = self.open.pop() else { return Ok(()) };
        let (value, last) = match open.kind {
            OpenCollection::List(items) => {
                let last = items.last().map(|n| n.span);
                (YamlValue::List(items), last)
            }
            OpenCollection::Map { entries, .. } => {
                let last = entries.last().map(|e| e.value.span);
                (YamlValue::Map(entries), last)
            }
        };
        // The end event of a block collection is at the next token, so the end of its last child is
        // used.
        let end = match last {
            Some(last) if !open.flow && last.source == self.source => last.end - self.base,
            _ => span.end - self.base,
        };
        let span = self.make_span(open.start, end.max(open.start));
        self.add_node(YamlNode { span, value, raw: String::new() }, open.anchor)
    }

    /// Adds a complete node to the innermost open collection: as an item of a list, or as a key or
    /// value of a mapping. A node without a parent becomes the root.
    fn add_node(&mut self, node: YamlNode, anchor: usize) -> Result<(), ValueError> {
        if anchor != 0 {
            let (nodes, bytes, _) = node.measure_tree_size();
            self.count_against_limits(nodes, bytes, node.span)?;
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut().map(|o| &mut o.kind) {
            None => self.root = Some(node),
            Some(OpenCollection::List(items)) => items.push(node),
            Some(OpenCollection::Map { entries, seen, key }) => match key.take() {
                Some((key, key_span)) => {
                    // An empty value has no text, so the span of its key replaces its own.
                    let span = if node.span.start == node.span.end { key_span } else { node.span };
                    entries.push(YamlEntry { key, key_span, value: YamlNode { span, ..node } });
                }
                None => *key = Some(convert_key_node(node, seen)?),
            },
        }
        Ok(())
    }

    /// Adds a copy of the YAML value that an alias refers to, where `anchor` is the number that the
    /// parser has given to the value. Fails if the node contains the alias, or if the tree exceeds
    /// a limit.
    fn expand_alias(&mut self, anchor: usize, span: SourceSpan) -> Result<(), ValueError> {
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(ValueError::new(
                codes::JOB_ALIAS_RECURSIVE,
                span,
                "the alias refers to the value that contains it",
            )
            .with_help("a value cannot contain itself: write the value out"));
        };
        let (nodes, bytes, depth) = node.measure_tree_size();
        if self.open.len() + depth > MAX_DEPTH {
            return Err(too_deep_error(span));
        }
        let node = node.clone();
        self.count_against_limits(nodes, bytes, span)?;
        self.add_node(node, 0)
    }

    /// Adds `nodes` nodes and `bytes` bytes to the counted size of the tree, and fails if the size
    /// exceeds [`MAX_NODES`] or [`MAX_SCALAR_BYTES`]. The error points at `span`.
    fn count_against_limits(
        &mut self,
        nodes: usize,
        bytes: usize,
        span: SourceSpan,
    ) -> Result<(), ValueError> {
        self.nodes += nodes;
        self.bytes += bytes;
        if self.nodes > MAX_NODES || self.bytes > MAX_SCALAR_BYTES {
            let message =
                format!("the file expands to more than {MAX_NODES} values or 4 MiB of text at this value");
            return Err(ValueError::new(codes::JOB_ALIAS_BUDGET, span, message)
                .with_help("an alias counts as the value that it repeats"));
        }
        Ok(())
    }

    /// Creates the error that `text` is not valid YAML, from the error of the YAML parser.
    fn syntax_error(&self, text: &str, error: &saphyr_parser::ScanError) -> ValueError {
        let at = self.find_byte_offset(error.marker().index());
        let span = self.make_span(at, at);
        // The parser reports a tab in the indentation differently in different contexts.
        let line_start = text[..at as usize].rfind('\n').map_or(0, |i| i + 1);
        let line = text[line_start..].lines().next().unwrap_or("");
        let indent = line.len() - line.trim_start_matches([' ', '\t']).len();
        if let Some(tab) = line[..indent].find('\t') {
            let at = (line_start + tab) as u32;
            return ValueError::new(
                codes::JOB_YAML_SYNTAX,
                self.make_span(at, at + 1),
                "a tab is used for indentation",
            )
            .with_help("indent YAML with spaces");
        }
        ValueError::new(codes::JOB_YAML_SYNTAX, span, format!("invalid YAML: {}", error.info()))
    }
}

/// Fails if a YAML value has a tag such as `!name`.
fn reject_tag(tagged: bool, span: SourceSpan) -> Result<(), ValueError> {
    if tagged {
        return Err(ValueError::new(
            codes::JOB_YAML_UNSUPPORTED,
            span,
            "YAML tags (`!name`) are not supported",
        )
        .with_help("remove the tag; put text that looks like another type in quotes"));
    }
    Ok(())
}

/// Creates the error that the YAML value at `span` is nested too deeply.
fn too_deep_error(span: SourceSpan) -> ValueError {
    let message = format!("the file is nested more than {MAX_DEPTH} levels deep at this value");
    ValueError::new(codes::JOB_NESTING_TOO_DEEP, span, message)
}

/// Creates the error that the YAML key at `span` is a list or a mapping.
fn collection_as_key_error(span: SourceSpan) -> ValueError {
    ValueError::new(codes::JOB_YAML_UNSUPPORTED, span, "a list or mapping is used as a key")
        .with_help("keys must be text")
}

/// Returns the text and the position of a key in a YAML mapping, and fails if `seen` shows that the
/// mapping already has this key. Fails if the node is a list, a mapping, empty or a merge key, or
/// if `seen` already contains the key.
fn convert_key_node(
    node: YamlNode,
    seen: &mut HashMap<String, SourceSpan>,
) -> Result<(String, SourceSpan), ValueError> {
    let error = |code, message: &str| Err(ValueError::new(code, node.span, message));
    match node.value {
        YamlValue::List(_) | YamlValue::Map(_) => Err(collection_as_key_error(node.span)),
        YamlValue::Null => error(codes::JOB_YAML_SYNTAX, "a key is missing before the colon")
            .map_err(|error| error.with_help("write `name: value`")),
        _ if node.raw == "<<" => {
            error(codes::JOB_YAML_UNSUPPORTED, "merge keys (`<<`) are not part of YAML 1.2")
                .map_err(|error| error.with_help("write the keys out, or use an alias for a whole value"))
        }
        _ if seen.contains_key(&node.raw) => {
            let message = format!("the key `{}` is given twice", make_excerpt(&node.raw));
            error(codes::JOB_KEY_DUPLICATE, &message).map_err(|error| error.with_help("keep one of them"))
        }
        _ => {
            seen.insert(node.raw.clone(), node.span);
            Ok((node.raw, node.span))
        }
    }
}
