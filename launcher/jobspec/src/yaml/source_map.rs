//! [`SourceMap`]: the texts that a job is read from, and the position of every key in these texts.
use super::tree::{SourceSpan, YamlNode, YamlValue};
use crate::secret_text::{hide_secret_values, hide_secrets_in_yaml_line};
use diagnostic::{Diagnostic, Location};
use std::{collections::BTreeMap, ops::Range};

/// A command-line argument that launch has converted to a part of a job's YAML text, and the byte
/// range of this part.
#[derive(Clone, Debug)]
pub struct JobArgument {
    /// The bytes of the job's text that were made from the argument.
    pub range: Range<usize>,
    /// The argument as messages show it, such as `--workers 4`.
    pub argument: String,
}

/// One text from which a job is read: the job file, YAML made from command-line arguments, or a
/// `--set` argument.
#[derive(Clone, Debug)]
enum JobText {
    File { name: String, text: String },
    CommandLine { name: String, text: String, arguments: Vec<JobArgument> },
    Override { text: String },
}

/// Two positions of a key in the text of a job: that of its name, and the one that messages show,
/// which is usually its value.
#[derive(Clone, Copy, Debug)]
struct KeySpans {
    name: SourceSpan,
    /// The span that messages point at: the value if it is on one line, otherwise the name of the
    /// key.
    shown: SourceSpan,
}

/// The texts from which a job was read, and where each key is in them, so that messages can show
/// the place of a mistake.
#[derive(Clone, Debug)]
pub struct SourceMap {
    texts: Vec<JobText>,
    keys: BTreeMap<String, KeySpans>,
}

/// The length in bytes of the longest line that a diagnostic shows. The search for secrets in
/// longer lines would take long if a job has many mistakes.
const MAX_SHOWN_LINE_BYTES: usize = 4096;

impl SourceMap {
    /// The index of the job file among the texts that a job is read from.
    pub(crate) const JOB_FILE_INDEX: u32 = 0;

    /// Creates the [`SourceMap`] of a job that was read from a file with the content `text`,
    /// without positions of keys. `name` is the name of the file.
    pub(crate) fn new(name: &str, text: &str) -> Self {
        let texts = vec![JobText::File { name: name.to_owned(), text: text.to_owned() }];
        SourceMap { texts, keys: BTreeMap::new() }
    }

    /// Creates the [`SourceMap`] of a job that was made from command-line arguments, without
    /// positions of keys. `name` is the name of the command line in messages.
    pub(crate) fn from_command_line(name: &str, text: &str, arguments: Vec<JobArgument>) -> Self {
        let text = JobText::CommandLine { name: name.to_owned(), text: text.to_owned(), arguments };
        SourceMap { texts: vec![text], keys: BTreeMap::new() }
    }

    /// Adds the text of a `--set` argument to the texts that the job is read from. Returns the
    /// index of the text.
    pub(crate) fn add_override_text(&mut self, text: &str) -> u32 {
        self.texts.push(JobText::Override { text: text.to_owned() });
        self.texts.len() as u32 - 1
    }

    /// Records the positions of all keys and list items of the YAML tree `root`. `canonical`
    /// converts the path of a key to its documented path.
    pub(crate) fn index_keys(&mut self, root: &YamlNode, canonical: impl Fn(&str) -> String) {
        let mut pending: Vec<(String, &YamlNode)> = vec![(String::new(), root)];
        while let Some((path, node)) = pending.pop() {
            match &node.value {
                YamlValue::Map(entries) => {
                    for e in entries {
                        let child = canonical(&join_key_path(&path, &e.key));
                        self.record_key_spans(&child, e.key_span, &e.value);
                        pending.push((child, &e.value));
                    }
                }
                YamlValue::List(items) => {
                    for (i, item) in items.iter().enumerate() {
                        let child = format!("{path}[{i}]");
                        self.record_key_spans(&child, item.span, item);
                        pending.push((child, item));
                    }
                }
                _ => {}
            }
        }
    }

    /// Records where the key or list item with the path `path` is in the text of the job, so that
    /// messages can point at it. `name` is the span of the key's name. For a list item, `name` is
    /// the span of the item.
    fn record_key_spans(&mut self, path: &str, name: SourceSpan, value: &YamlNode) {
        let text = self.find_span_text(value.span);
        let is_collection = matches!(value.value, YamlValue::Map(_) | YamlValue::List(_));
        let is_block = is_collection && !text.starts_with(['[', '{']);
        let shown = if is_block || text.is_empty() || text.contains('\n') { name } else { value.span };
        self.keys.insert(path.to_owned(), KeySpans { name, shown });
    }

    /// Returns whether the job file or a `--set` argument contains the key `path`.
    pub fn is_key_given(&self, path: &str) -> bool {
        self.keys.contains_key(path)
    }

    /// Returns the location, for diagnostics, at which the value of the key `path` is written. If
    /// the job does not contain the key, returns the location of the nearest section around it that
    /// the job contains, or else of the whole file.
    pub fn locate_key(&self, path: &str) -> Location {
        if let Some(spans) = self.keys.get(path) {
            return self.locate_span(spans.shown);
        }
        let mut rest = path;
        while let Some(cut) = rest.rfind(['.', '[']) {
            rest = &rest[..cut];
            if let Some(spans) = self.keys.get(rest) {
                return self.locate_span(spans.name);
            }
        }
        Location::File { file: self.job_file_name().to_owned() }
    }

    /// Sets the location of `diagnostic` to where the job file or a `--set` argument contains the
    /// key that the diagnostic is about. Returns a diagnostic that already has a location
    /// unchanged.
    pub fn add_location(&self, diagnostic: Diagnostic) -> Diagnostic {
        if diagnostic.location().is_some() {
            return diagnostic;
        }
        let location = self.locate_key(diagnostic.subject().unwrap_or_default());
        diagnostic.with_location(location)
    }

    /// Returns the name of the job file, as messages show it.
    pub fn job_file_name(&self) -> &str {
        match &self.texts[0] {
            JobText::File { name, .. } | JobText::CommandLine { name, .. } => name,
            JobText::Override { .. } => "--set",
        }
    }

    /// Converts a range of bytes in the job file or in a `--set` argument to the line and column
    /// that a diagnostic shows. If the span has several lines, the location covers the first line.
    /// In a text made from command-line arguments, the location is the argument. The text of the
    /// location does not contain values of secret variables.
    pub(crate) fn locate_span(&self, span: SourceSpan) -> Location {
        let Some(text) = self.texts.get(span.source as usize) else {
            return Location::File { file: self.job_file_name().to_owned() };
        };
        match text {
            JobText::File { name, text } => {
                let (line, column, width, bytes) = compute_line_position(text, span);
                let text = match bytes.len() > MAX_SHOWN_LINE_BYTES {
                    true => String::new(),
                    false => hide_secrets_in_yaml_line(&text[..bytes.start], text[bytes].trim_end()),
                };
                Location::Line { file: name.clone(), line, column, width, text }
            }
            JobText::CommandLine { name, arguments, .. } => {
                let start = span.start as usize;
                match arguments.iter().find(|argument| argument.range.contains(&start)) {
                    Some(JobArgument { argument, .. }) => {
                        Location::Argument { text: hide_secret_values(argument) }
                    }
                    None => Location::File { file: name.clone() },
                }
            }
            JobText::Override { text } => {
                let (_, column, width, bytes) = compute_line_position(text, span);
                let first = text.lines().next().unwrap_or_default();
                let line = text[bytes.clone()].trim_end();
                let text = match bytes.start > 0 && hide_secret_values(first) != first {
                    true => "*".repeat(line.chars().count()),
                    false => hide_secrets_in_yaml_line(&text[..bytes.start], line),
                };
                Location::Override { column, width, text }
            }
        }
    }

    /// Returns the text that `span` marks in the job file or in a `--set` argument; empty if `span`
    /// is not valid there.
    fn find_span_text(&self, span: SourceSpan) -> &str {
        let text = match self.texts.get(span.source as usize) {
            Some(
                JobText::File { text, .. } | JobText::CommandLine { text, .. } | JobText::Override { text },
            ) => text,
            None => return "",
        };
        text.get(span.start as usize..span.end as usize).unwrap_or("")
    }
}

/// Joins the path of a section and the name of a key: `parent.key`, or `key` if `parent` is empty.
pub(crate) fn join_key_path(parent: &str, key: &str) -> String {
    if parent.is_empty() { key.to_owned() } else { format!("{parent}.{key}") }
}

/// Returns the line and column (counted from 1) of a span in `text`, the width of the span in
/// characters, and the bytes of its line. The width is at least 1, and only covers the first line.
fn compute_line_position(text: &str, span: SourceSpan) -> (u32, u32, u32, Range<usize>) {
    let start = floor_char_boundary(text, span.start as usize);
    let end = floor_char_boundary(text, span.end as usize).max(start);
    let line_start = text[..start].rfind('\n').map_or(0, |i| i + 1);
    let line_end = text[start..].find('\n').map_or(text.len(), |i| start + i);
    let line = text[..start].bytes().filter(|&b| b == b'\n').count() as u32 + 1;
    let column = text[line_start..start].chars().count() as u32 + 1;
    let width = text[start..end.min(line_end)].trim_end().chars().count().max(1) as u32;
    (line, column, width, line_start..line_end)
}

/// Returns the last character boundary of `text` at or before the byte offset `at`.
fn floor_char_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
