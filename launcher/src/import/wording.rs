//! How values are written in a job.yaml.
use contract::job::{Item, ItemValue, quoted};

/// Texts as a list on one line.
pub(super) fn list(texts: &[String]) -> String {
    let words: Vec<String> = texts.iter().map(|t| quoted(t)).collect();
    format!("[{}]", words.join(", "))
}

/// What may be a whole number, as one; anything else as text, for the job's own reader to refuse.
pub(super) fn count(text: &str) -> String {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits { text.to_owned() } else { quoted(text) }
}

/// A number of a foreign file; anything else as text.
pub(super) fn number(item: &Item) -> String {
    match item.value {
        ItemValue::Int(_) | ItemValue::Float(_) => item.text.clone(),
        _ => quoted(&item.text),
    }
}

/// A scalar as Python's `str()` of it: `True`, `1.0`, `auto`.
pub(super) fn python(item: &Item) -> String {
    match item.value {
        ItemValue::Bool(true) => "True".to_owned(),
        ItemValue::Bool(false) => "False".to_owned(),
        ItemValue::Null => "None".to_owned(),
        _ => item.text.clone(),
    }
}

/// A value for a message, on one line.
pub(super) fn shown(item: &Item) -> String {
    let text = match &item.value {
        ItemValue::List(items) => {
            let parts: Vec<String> = items.iter().take(8).map(shown).collect();
            format!("[{}]", parts.join(", "))
        }
        ItemValue::Map(entries) => {
            let parts: Vec<&str> = entries.iter().take(8).map(|(key, _)| key.as_str()).collect();
            format!("{{{}}}", parts.join(", "))
        }
        ItemValue::Null => "null".to_owned(),
        _ => item.text.clone(),
    };
    let short: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() { format!("{short}…") } else { short }
}
