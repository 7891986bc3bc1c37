//! Where each key of a job was written: the texts a job is read from and the span of every key in them.
use super::tree::{Node, Value};
use crate::{
    preflight::Finding,
    problem::{Place, Problem},
};
use std::collections::BTreeMap;

/// Bytes `start..end` of the text number `source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) source: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

/// One text that keys come from.
#[derive(Clone, Debug)]
enum Text {
    File { name: String, text: String },
    Override { text: String },
}

/// Where a key was written.
#[derive(Clone, Copy, Debug)]
struct Written {
    key: Span,
    /// What is shown for the key itself: its value when that is on one line, else the key.
    shown: Span,
}

/// Locates the keys of a loaded job, so that later findings can be shown where they were written.
#[derive(Clone, Debug)]
pub struct SourceMap {
    texts: Vec<Text>,
    keys: BTreeMap<String, Written>,
}

impl SourceMap {
    /// The number of the job's own text.
    pub(crate) const JOB: u32 = 0;

    /// A map of the job's text, without keys yet.
    pub(crate) fn new(name: &str, text: &str) -> Self {
        let texts = vec![Text::File { name: name.to_owned(), text: text.to_owned() }];
        SourceMap { texts, keys: BTreeMap::new() }
    }

    /// Adds the text of a `--set` argument; returns its number.
    pub(crate) fn add_override(&mut self, text: &str) -> u32 {
        self.texts.push(Text::Override { text: text.to_owned() });
        self.texts.len() as u32 - 1
    }

    /// Notes where every key of the tree was written. `canonical(path)` is the documented name of a key's path.
    pub(crate) fn index(&mut self, root: &Node, canonical: impl Fn(&str) -> String) {
        let mut todo: Vec<(String, &Node)> = vec![(String::new(), root)];
        while let Some((path, node)) = todo.pop() {
            match &node.value {
                Value::Map(entries) => {
                    for e in entries {
                        let child = canonical(&join(&path, &e.key));
                        self.note(&child, e.key_span, &e.value);
                        todo.push((child, &e.value));
                    }
                }
                Value::List(items) => {
                    for (i, item) in items.iter().enumerate() {
                        let child = format!("{path}[{i}]");
                        self.note(&child, item.span, item);
                        todo.push((child, item));
                    }
                }
                _ => {}
            }
        }
    }

    fn note(&mut self, path: &str, key: Span, value: &Node) {
        let text = self.slice(value.span);
        let block = matches!(value.value, Value::Map(_) | Value::List(_)) && !text.starts_with(['[', '{']);
        let shown = if block || text.is_empty() || text.contains('\n') { key } else { value.span };
        self.keys.insert(path.to_owned(), Written { key, shown });
    }

    /// Was this key written (in the file or by `--set`)?
    pub fn is_given(&self, path: &str) -> bool {
        self.keys.contains_key(path)
    }

    /// Where `path` was written: its value; else its nearest parent that was; else the file.
    pub fn locate(&self, path: &str) -> Place {
        if let Some(written) = self.keys.get(path) {
            return self.place(written.shown);
        }
        let mut rest = path;
        while let Some(cut) = rest.rfind(['.', '[']) {
            rest = &rest[..cut];
            if let Some(written) = self.keys.get(rest) {
                return self.place(written.key);
            }
        }
        Place::File { file: self.file().to_owned() }
    }

    /// A finding about the job's meaning, with its place.
    pub fn problem(&self, finding: &Finding) -> Problem {
        Problem {
            path: finding.path.clone(),
            place: self.locate(&finding.path),
            message: finding.message.clone(),
            hint: finding.hint.clone(),
        }
    }

    /// Name of the job's file.
    pub fn file(&self) -> &str {
        match &self.texts[0] {
            Text::File { name, .. } => name,
            Text::Override { .. } => "--set",
        }
    }

    /// The place of a span: its first line.
    pub(crate) fn place(&self, span: Span) -> Place {
        let Some(text) = self.texts.get(span.source as usize) else {
            return Place::File { file: self.file().to_owned() };
        };
        match text {
            Text::File { name, text } => {
                let (line, column, width, shown) = position(text, span);
                Place::Line { file: name.clone(), line, column, width, text: shown }
            }
            Text::Override { text } => {
                let (_, column, width, shown) = position(text, span);
                Place::Override { column, width, text: shown }
            }
        }
    }

    fn slice(&self, span: Span) -> &str {
        let text = match self.texts.get(span.source as usize) {
            Some(Text::File { text, .. } | Text::Override { text }) => text,
            None => return "",
        };
        text.get(span.start as usize..span.end as usize).unwrap_or("")
    }
}

/// `parent.key`, or `key` at the top.
pub(crate) fn join(parent: &str, key: &str) -> String {
    if parent.is_empty() { key.to_owned() } else { format!("{parent}.{key}") }
}

/// 1-based line and column of the span's start, its width on that line (≥ 1, characters), and the line.
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

/// The largest character boundary ≤ `at`.
fn floor_char(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
