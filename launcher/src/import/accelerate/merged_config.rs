//! [`MergedConfig`]: Accelerate's configuration with the options of a command line, which replace
//! keys of the file.
use super::arguments::{ACCELERATE_OPTIONS, BOOLEAN_WORD_OPTIONS, PYTHON_BOOL_OPTIONS, find_section};
use crate::import::{command_line::CommandLineError, import_options::ImportErrors};
use diagnostic::Diagnostic;
use jobspec::{Document, DocumentItem, DocumentSyntax, DocumentValue};

/// A configuration of Accelerate into which the options of a command line are merged.
#[derive(Debug)]
pub(super) struct MergedConfig {
    document: Document,
}

impl MergedConfig {
    /// Creates a copy of a configuration of Accelerate, or an empty configuration, into which
    /// options of the command line can then be merged.
    pub(super) fn new(config: Option<&Document>) -> Result<MergedConfig, ImportErrors> {
        let document = match config {
            Some(document) => document.clone(),
            None => Document::parse("the command line", "{}", DocumentSyntax::Yaml)
                .map_err(|error| vec![error])?,
        };
        Ok(MergedConfig { document })
    }

    /// Returns Accelerate's configuration after the options of the command line were merged into
    /// it.
    pub(super) fn document(&self) -> &Document {
        &self.document
    }

    /// Returns the keys and values at the top level of Accelerate's configuration. An invalid
    /// configuration has none.
    fn entries(&mut self) -> Option<&mut Vec<(String, DocumentItem)>> {
        if let DocumentValue::Map(entries) = &mut self.document.root.value { Some(entries) } else { None }
    }

    /// Returns the value of the top-level key `key` of Accelerate's configuration; `None` if it is
    /// absent or `null`.
    pub(super) fn value_of_key(&self, key: &str) -> Option<&DocumentItem> {
        let DocumentValue::Map(entries) = &self.document.root.value else { return None };
        let (_, item) = entries.iter().find(|(name, _)| name == key)?;
        (!matches!(item.value, DocumentValue::Null)).then_some(item)
    }

    /// Returns the names of the keys in a section of Accelerate's configuration, or an empty list
    /// if the section is absent.
    pub(super) fn section_names(&self, section: &str) -> Vec<&str> {
        match self.value_of_key(section).map(|item| &item.value) {
            Some(DocumentValue::Map(entries)) => entries.iter().map(|(name, _)| name.as_str()).collect(),
            _ => Vec::new(),
        }
    }

    /// Removes the top-level key `key` from Accelerate's configuration.
    pub(super) fn remove_key(&mut self, key: &str) {
        if let Some(entries) = self.entries() {
            entries.retain(|(name, _)| name != key);
        }
    }

    /// Removes the keys `keys` from the section `section` of the merged Accelerate configuration.
    pub(super) fn remove_from_section(&mut self, section: &str, keys: &[&str]) {
        let Some(entries) = self.entries() else { return };
        if let Some((_, item)) = entries.iter_mut().find(|(name, _)| name == section)
            && let DocumentValue::Map(entries) = &mut item.value
        {
            entries.retain(|(name, _)| !keys.contains(&name.as_str()));
        }
    }

    /// Sets the top-level key `key` of Accelerate's configuration to `value`.
    pub(super) fn set_key(&mut self, key: &str, value: DocumentValue, text: String) {
        let item = DocumentItem::new_at_position_of(&self.document.root, value, text);
        self.remove_key(key);
        if let Some(entries) = self.entries() {
            entries.push((key.to_owned(), item));
        }
    }

    /// Stores the value of the command line option `name` under the corresponding key of
    /// Accelerate's configuration, in place of the file's value. Options outside of sections become
    /// keys of the outermost mapping.
    pub(super) fn set_option(&mut self, name: &'static str, value: &str) -> Result<(), Diagnostic> {
        let item = self.parse_option_value(name, value)?;
        let Some((section, prefix)) = find_section(name) else {
            self.set_key(name, item.value, item.text);
            return Ok(());
        };
        if !matches!(self.value_of_key(section).map(|item| &item.value), Some(DocumentValue::Map(_))) {
            self.set_key(section, DocumentValue::Map(Vec::new()), String::new());
        }
        let bare = name.strip_prefix(prefix).unwrap_or(name);
        self.remove_from_section(section, &[name, bare]);
        let Some(entries) = self.entries() else { return Ok(()) };
        if let Some((_, part)) = entries.iter_mut().find(|(key, _)| key == section)
            && let DocumentValue::Map(entries) = &mut part.value
        {
            entries.push((name.to_owned(), item));
        }
        Ok(())
    }

    /// Parses `value`, the text of the option `name` of `accelerate launch`, to the value that
    /// Accelerate's own parser would return.
    fn parse_option_value(&self, name: &'static str, value: &str) -> Result<DocumentItem, Diagnostic> {
        let item = |value, text: String| DocumentItem::new_at_position_of(&self.document.root, value, text);
        let text = |text: String| item(DocumentValue::Text, text);
        if ACCELERATE_OPTIONS.flags.contains(&name) {
            return Ok(item(DocumentValue::Bool(true), "true".to_owned()));
        }
        if PYTHON_BOOL_OPTIONS.contains(&name) {
            return Ok(item(DocumentValue::Bool(!value.is_empty()), (!value.is_empty()).to_string()));
        }
        if BOOLEAN_WORD_OPTIONS.contains(&name) {
            let words: Option<Vec<&str>> = value.split(',').map(parse_boolean_word).collect();
            return match words.as_deref() {
                Some([one]) if name != BOOLEAN_WORD_OPTIONS[0] => Ok(text((*one).to_owned())),
                Some(three @ [_, _, _]) if name == BOOLEAN_WORD_OPTIONS[0] => {
                    let items = three.iter().map(|word| text((*word).to_owned())).collect();
                    Ok(item(DocumentValue::List(items), String::new()))
                }
                _ => {
                    let (value, expected) = (value.escape_debug().to_string(), "true or false".to_owned());
                    let error = CommandLineError::InvalidValue { option: name, value, expected };
                    Err(error.into_diagnostic(ACCELERATE_OPTIONS.program))
                }
            };
        }
        if ACCELERATE_OPTIONS.integers.contains(&name)
            && let Ok(number) = value.trim().parse::<i64>()
        {
            return Ok(item(DocumentValue::Int(number.into()), number.to_string()));
        }
        if ACCELERATE_OPTIONS.numbers.contains(&name)
            && let Ok(number) = value.trim().parse::<f64>()
        {
            return Ok(item(DocumentValue::Float(number), format_python_float(number)));
        }
        Ok(text(value.to_owned()))
    }
}

/// Converts a word that Accelerate accepts as a boolean, such as `yes`, to `1` or `0`. Returns
/// `None` for other words.
fn parse_boolean_word(word: &str) -> Option<&'static str> {
    match word.to_ascii_lowercase().as_str() {
        "y" | "yes" | "t" | "true" | "on" | "1" => Some("1"),
        "n" | "no" | "f" | "false" | "off" | "0" => Some("0"),
        _ => None,
    }
}

/// Formats a number as Python's `str(float)` does, such as `1.0` or `1e-05`.
fn format_python_float(number: f64) -> String {
    let size = number.abs();
    if size == 0.0 || (1e-4..1e16).contains(&size) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_notation_of_python() {
        for (number, text) in [(1.0, "1.0"), (0.1, "0.1"), (1e-5, "1e-05"), (2.5e17, "2.5e+17"), (0.0, "0.0")]
        {
            assert_eq!(format_python_float(number), text);
        }
    }
}
