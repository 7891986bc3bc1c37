//! [`SourceMap`]: the texts that a job is read from, and the span of every key in them.
use super::yaml::{YamlNode, YamlValue};
use diagnostic::{Diagnostic, Location};
use std::collections::BTreeMap;

/// The bytes `start..end` of the text with the number `source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) source: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

/// One text that keys come from.
#[derive(Clone, Debug)]
enum SourceText {
    File { name: String, text: String },
    Override { text: String },
}

/// The spans of a key.
#[derive(Clone, Copy, Debug)]
struct KeySpans {
    name: Span,
    /// What a message points at: the value when it is on one line, else the name.
    shown: Span,
}

/// Locates the keys of a loaded job, so that later diagnostics can point at them.
#[derive(Clone, Debug)]
pub struct SourceMap {
    texts: Vec<SourceText>,
    keys: BTreeMap<String, KeySpans>,
}

impl SourceMap {
    /// The number of the job's text.
    pub(crate) const JOB: u32 = 0;

    /// A map of the job's text, without keys yet.
    pub(crate) fn new(name: &str, text: &str) -> Self {
        let texts = vec![SourceText::File { name: name.to_owned(), text: text.to_owned() }];
        SourceMap { texts, keys: BTreeMap::new() }
    }

    /// Adds the text of a `--set` argument and returns its number.
    pub(crate) fn add_override(&mut self, text: &str) -> u32 {
        self.texts.push(SourceText::Override { text: text.to_owned() });
        self.texts.len() as u32 - 1
    }

    /// Records the spans of every key of the tree. `canonical` maps a path to its documented name.
    pub(crate) fn index(&mut self, root: &YamlNode, canonical: impl Fn(&str) -> String) {
        let mut pending: Vec<(String, &YamlNode)> = vec![(String::new(), root)];
        while let Some((path, node)) = pending.pop() {
            match &node.value {
                YamlValue::Map(entries) => {
                    for e in entries {
                        let child = canonical(&join(&path, &e.key));
                        self.add_key(&child, e.key_span, &e.value);
                        pending.push((child, &e.value));
                    }
                }
                YamlValue::List(items) => {
                    for (i, item) in items.iter().enumerate() {
                        let child = format!("{path}[{i}]");
                        self.add_key(&child, item.span, item);
                        pending.push((child, item));
                    }
                }
                _ => {}
            }
        }
    }

    fn add_key(&mut self, path: &str, name: Span, value: &YamlNode) {
        let text = self.text_at(value.span);
        let is_collection = matches!(value.value, YamlValue::Map(_) | YamlValue::List(_));
        let is_block = is_collection && !text.starts_with(['[', '{']);
        let shown = if is_block || text.is_empty() || text.contains('\n') { name } else { value.span };
        self.keys.insert(path.to_owned(), KeySpans { name, shown });
    }

    /// Whether the key is written in the file or in `--set`.
    pub fn is_given(&self, path: &str) -> bool {
        self.keys.contains_key(path)
    }

    /// The location of a key's value; else that of its nearest parent that is written; else the
    /// file.
    pub fn key_location(&self, path: &str) -> Location {
        if let Some(spans) = self.keys.get(path) {
            return self.span_location(spans.shown);
        }
        let mut rest = path;
        while let Some(cut) = rest.rfind(['.', '[']) {
            rest = &rest[..cut];
            if let Some(spans) = self.keys.get(rest) {
                return self.span_location(spans.name);
            }
        }
        Location::File { file: self.file().to_owned() }
    }

    /// Adds the location of the diagnostic's subject, which is a key, unless it has a location.
    pub fn locate(&self, diagnostic: Diagnostic) -> Diagnostic {
        if diagnostic.location().is_some() {
            return diagnostic;
        }
        let location = self.key_location(diagnostic.subject().unwrap_or_default());
        diagnostic.with_location(location)
    }

    /// The name of the job's file.
    pub fn file(&self) -> &str {
        match &self.texts[0] {
            SourceText::File { name, .. } => name,
            SourceText::Override { .. } => "--set",
        }
    }

    /// The location of a span: the part of it that is on its first line.
    pub(crate) fn span_location(&self, span: Span) -> Location {
        let Some(text) = self.texts.get(span.source as usize) else {
            return Location::File { file: self.file().to_owned() };
        };
        match text {
            SourceText::File { name, text } => {
                let (line, column, width, line_text) = position(text, span);
                Location::Line { file: name.clone(), line, column, width, text: line_text }
            }
            SourceText::Override { text } => {
                let (_, column, width, line_text) = position(text, span);
                Location::Override { column, width, text: line_text }
            }
        }
    }

    fn text_at(&self, span: Span) -> &str {
        let text = match self.texts.get(span.source as usize) {
            Some(SourceText::File { text, .. } | SourceText::Override { text }) => text,
            None => return "",
        };
        text.get(span.start as usize..span.end as usize).unwrap_or("")
    }
}

/// `parent.key`, or `key` at the top.
pub(crate) fn join(parent: &str, key: &str) -> String {
    if parent.is_empty() { key.to_owned() } else { format!("{parent}.{key}") }
}

/// The line and column of the span's start, counted from 1; its width on that line, at least 1, in
/// characters; and the text of the line.
fn position(text: &str, span: Span) -> (u32, u32, u32, String) {
    let start = floor_char(text, span.start as usize);
    let end = floor_char(text, span.end as usize).max(start);
    let line_start = text[..start].rfind('\n').map_or(0, |i| i + 1);
    let line_end = text[start..].find('\n').map_or(text.len(), |i| start + i);
    let line = text[..start].bytes().filter(|&b| b == b'\n').count() as u32 + 1;
    let column = text[line_start..start].chars().count() as u32 + 1;
    let width = text[start..end.min(line_end)].trim_end().chars().count().max(1) as u32;
    (line, column, width, text[line_start..line_end].trim_end().to_owned())
}

/// The largest character boundary that is at most `at`.
fn floor_char(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
