//! Formats values as YAML, in the form in which `--dry-run` prints the job.
use super::{scalar::resolve_scalar, tree::YamlValue};
use std::fmt::Write as _;

/// The YAML text of a key's value: one line, or a block of keys and values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum YamlText {
    /// YAML on one line.
    Line(String),
    /// A mapping that is printed as a block, with one line or block per entry.
    Block(Vec<(String, YamlText)>),
}

/// Formats a text as a YAML scalar. The text is put in double quotes if YAML could read it as
/// anything else without them.
pub fn quote_yaml(text: &str) -> String {
    let simple = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '-');
    let plain = text.starts_with(|c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/'))
        && text.chars().all(simple)
        && text != "..."
        && matches!(resolve_scalar(text), YamlValue::Text);
    if plain {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            // Characters that may be read as a line break, or that YAML does not allow.
            _ if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}') => {
                _ = write!(quoted, "\\u{:04x}", c as u32);
            }
            _ => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Formats a list as YAML on one line, such as `[a, b]`.
pub(crate) fn format_list(items: impl IntoIterator<Item = String>) -> String {
    format!("[{}]", items.into_iter().collect::<Vec<_>>().join(", "))
}

/// Formats a mapping as YAML on one line, such as `{a: 1, b: 2}`.
pub(crate) fn format_map(entries: impl IntoIterator<Item = (String, String)>) -> String {
    let entries: Vec<String> = entries.into_iter().map(|(key, value)| format!("{key}: {value}")).collect();
    format!("{{{}}}", entries.join(", "))
}

/// Formats a duration in milliseconds as in a job file, such as `90s`. A duration that is not a
/// whole number of seconds becomes `1500ms`.
pub(crate) fn format_duration(ms: u64) -> String {
    if ms.is_multiple_of(1000) { format!("{}s", ms / 1000) } else { format!("{ms}ms") }
}

/// Formats a number with as few digits as possible, so that parsing the text gives exactly the
/// number.
pub(crate) fn format_number(x: f64) -> String {
    format!("{x:?}")
}
