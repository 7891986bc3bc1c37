//! Formats values of imported files as text for a job.yaml, for an environment variable or for a
//! note.
use jobspec::{DocumentItem, DocumentValue, quote_yaml};

/// Formats texts as a YAML list on one line, such as `[a, "b c"]`.
pub(super) fn format_yaml_list(texts: &[String]) -> String {
    let words: Vec<String> = texts.iter().map(|t| quote_yaml(t)).collect();
    format!("[{}]", words.join(", "))
}

/// Formats a text that consists of digits as a YAML number. Any other text is quoted, so that
/// loading the job rejects the value.
pub(super) fn format_yaml_whole_number(text: &str) -> String {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits { text.to_owned() } else { quote_yaml(text) }
}

/// Formats a number as YAML in its original notation. Any other value is quoted.
pub(super) fn format_yaml_number(item: &DocumentItem) -> String {
    match item.value {
        DocumentValue::Int(_) | DocumentValue::Float(_) => item.text.clone(),
        _ => quote_yaml(&item.text),
    }
}

/// Formats a scalar as Python's `str()` does, such as `True`, `1.0` or `auto`.
pub(super) fn format_python_str(item: &DocumentItem) -> String {
    match item.value {
        DocumentValue::Bool(true) => "True".to_owned(),
        DocumentValue::Bool(false) => "False".to_owned(),
        DocumentValue::Null => "None".to_owned(),
        _ => item.text.clone(),
    }
}

/// Formats the value of an imported key on one line, for a note to the user that the key was not
/// converted. At most 60 characters are shown.
pub(super) fn format_for_note(item: &DocumentItem) -> String {
    let text = match &item.value {
        DocumentValue::List(items) => {
            let parts: Vec<String> = items.iter().take(8).map(format_for_note).collect();
            format!("[{}]", parts.join(", "))
        }
        DocumentValue::Map(entries) => {
            let parts: Vec<&str> = entries.iter().take(8).map(|(key, _)| key.as_str()).collect();
            format!("{{{}}}", parts.join(", "))
        }
        DocumentValue::Null => "null".to_owned(),
        _ => item.text.clone(),
    };
    let short: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() { format!("{short}…") } else { short }
}
