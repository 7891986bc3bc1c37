//! Values of imported files as text for a job.yaml or a note.
use contract::job::{Item, ItemValue, quote_yaml};

/// Texts as a YAML list on one line.
pub(super) fn yaml_list(texts: &[String]) -> String {
    let words: Vec<String> = texts.iter().map(|t| quote_yaml(t)).collect();
    format!("[{}]", words.join(", "))
}

/// A text of digits as a number, any other text quoted, so that loading the job rejects it.
pub(super) fn whole_number(text: &str) -> String {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits { text.to_owned() } else { quote_yaml(text) }
}

/// A number in its original notation; any other value quoted.
pub(super) fn yaml_number(item: &Item) -> String {
    match item.value {
        ItemValue::Int(_) | ItemValue::Float(_) => item.text.clone(),
        _ => quote_yaml(&item.text),
    }
}

/// A scalar in the notation of Python's `str()`: `True`, `1.0`, `auto`.
pub(super) fn python_str(item: &Item) -> String {
    match item.value {
        ItemValue::Bool(true) => "True".to_owned(),
        ItemValue::Bool(false) => "False".to_owned(),
        ItemValue::Null => "None".to_owned(),
        _ => item.text.clone(),
    }
}

/// A value on one line for a note, shortened.
pub(super) fn display_value(item: &Item) -> String {
    let text = match &item.value {
        ItemValue::List(items) => {
            let parts: Vec<String> = items.iter().take(8).map(display_value).collect();
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
