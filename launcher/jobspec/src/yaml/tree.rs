//! [`YamlNode`]: a YAML value with its children, and with the span of text that it was read from.
use crate::secret_text::hide_secret_values;

/// The largest number of characters of a value that an error message quotes.
const MAX_EXCERPT_CHARS: usize = 60;

/// A range of bytes (`start..end`) in one of the texts from which a job is read: the job file or a
/// `--set` argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SourceSpan {
    pub(crate) source: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

/// A value in a parsed YAML text, with its position in the text.
#[derive(Clone, Debug)]
pub(crate) struct YamlNode {
    pub(crate) span: SourceSpan,
    pub(crate) value: YamlValue,
    /// The text of a scalar: verbatim if the scalar is plain, unescaped if it is quoted. The text
    /// is empty for lists and mappings.
    pub(crate) raw: String,
}

/// The value of a YAML node: a scalar, a list or a mapping.
#[derive(Clone, Debug)]
pub(crate) enum YamlValue {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text,
    List(Vec<YamlNode>),
    Map(Vec<YamlEntry>),
}

/// One key of a YAML mapping, with its position and its value.
#[derive(Clone, Debug)]
pub(crate) struct YamlEntry {
    pub(crate) key: String,
    pub(crate) key_span: SourceSpan,
    pub(crate) value: YamlNode,
}

/// Two nodes are equal if their values are equal. Spans, notation and the order of mappings do not
/// matter.
impl PartialEq for YamlNode {
    fn eq(&self, other: &Self) -> bool {
        match (&self.value, &other.value) {
            (YamlValue::Null, YamlValue::Null) => true,
            (YamlValue::Bool(a), YamlValue::Bool(b)) => a == b,
            (YamlValue::Int(a), YamlValue::Int(b)) => a == b,
            (YamlValue::Float(a), YamlValue::Float(b)) => a == b,
            (YamlValue::Text, YamlValue::Text) => self.raw == other.raw,
            (YamlValue::List(a), YamlValue::List(b)) => a == b,
            (YamlValue::Map(a), YamlValue::Map(b)) => {
                a.len() == b.len() && a.iter().all(|e| b.iter().any(|f| e.key == f.key && e.value == f.value))
            }
            _ => false,
        }
    }
}

impl YamlNode {
    /// Describes the value for an error message, such as ``the text `abc` ``, `3` or `a list`,
    /// without probable secrets.
    pub(crate) fn describe(&self) -> String {
        let raw = make_excerpt(&hide_secret_values(&self.raw));
        match &self.value {
            YamlValue::Null => "nothing".to_owned(),
            YamlValue::Bool(_) | YamlValue::Int(_) | YamlValue::Float(_) => raw,
            YamlValue::Text if self.raw.is_empty() => "an empty text".to_owned(),
            YamlValue::Text => format!("the text `{raw}`"),
            YamlValue::List(items) if items.is_empty() => "an empty list".to_owned(),
            YamlValue::List(_) => "a list".to_owned(),
            YamlValue::Map(_) => "a mapping".to_owned(),
        }
    }

    /// Returns three sizes of the tree below and including this node: its nodes, the bytes of its
    /// scalars and keys, and its depth in levels. The node itself counts.
    pub(super) fn measure_tree_size(&self) -> (usize, usize, usize) {
        let (mut nodes, mut bytes, mut depth) = (0, 0, 0);
        let mut todo = vec![(self, 1)];
        while let Some((node, level)) = todo.pop() {
            nodes += 1;
            bytes += node.raw.len();
            depth = depth.max(level);
            match &node.value {
                YamlValue::List(items) => todo.extend(items.iter().map(|n| (n, level + 1))),
                YamlValue::Map(entries) => {
                    bytes += entries.iter().map(|e| e.key.len()).sum::<usize>();
                    todo.extend(entries.iter().map(|e| (&e.value, level + 1)));
                }
                _ => {}
            }
        }
        (nodes, bytes, depth)
    }
}

/// Returns the first [`MAX_EXCERPT_CHARS`] characters of a text for an error message, with control
/// characters escaped. A longer text ends with `…`.
pub(crate) fn make_excerpt(text: &str) -> String {
    let mut out: String = text
        .chars()
        .take(MAX_EXCERPT_CHARS)
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    if text.chars().nth(MAX_EXCERPT_CHARS).is_some() {
        out.push('…');
    }
    out
}
