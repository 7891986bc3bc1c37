//! Defines [`RemainingKeys`], those keys of an imported configuration file that have not been
//! converted to keys of job.yaml yet. The keys that remain at the end were not converted, so no key
//! is overlooked.
use super::value_text::format_for_note;
use diagnostic::{Diagnostic, codes::command};
use jobspec::{Document, DocumentItem, DocumentValue};

/// The keys and values of one mapping (section) of an imported configuration file that have not
/// been converted to keys of job.yaml yet.
#[derive(Debug)]
pub(super) struct RemainingKeys<'d> {
    document: &'d Document,
    /// The path of the mapping; empty for the outermost mapping of the file.
    path: String,
    remaining: Vec<(&'d str, &'d DocumentItem)>,
    /// The errors in the values of keys that were taken.
    pub(super) errors: Vec<Diagnostic>,
}

impl<'d> RemainingKeys<'d> {
    /// Returns the top-level keys of an imported configuration file, all of which are still to be
    /// converted. Fails if the document is not a mapping.
    pub(super) fn from_document(document: &'d Document) -> Result<Self, Vec<Diagnostic>> {
        let mut keys =
            RemainingKeys { document, path: String::new(), remaining: Vec::new(), errors: Vec::new() };
        match &document.root.value {
            DocumentValue::Map(entries) => {
                keys.remaining = entries.iter().map(|(k, v)| (k.as_str(), v)).collect()
            }
            _ => return Err(vec![keys.type_error("", &document.root, "a mapping of keys to values")]),
        }
        Ok(keys)
    }

    /// Returns the full path of the key `key` of this mapping, such as `optimizer.params.lr`.
    pub(super) fn full_path_of_key(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Creates the error that the value of a key in an imported configuration file has a wrong
    /// type, with the description `expected` of the right type. An empty `key` stands for the whole
    /// file.
    fn type_error(&self, key: &str, item: &DocumentItem, expected: &str) -> Diagnostic {
        let path =
            if key.is_empty() { "the file".to_owned() } else { format!("`{}`", self.full_path_of_key(key)) };
        let message = format!("{path} must be {expected}, found {}", item.describe());
        Diagnostic::error(command::IMPORT_VALUE_INVALID, message)
            .with_subject(self.full_path_of_key(key))
            .with_location(self.document.locate_item(item))
    }

    /// Adds the error that the value of the imported key `key` has a wrong type to the errors of
    /// this mapping.
    pub(super) fn report_wrong_type(&mut self, key: &str, item: &DocumentItem, expected: &str) {
        let error = self.type_error(key, item, expected);
        self.errors.push(error);
    }

    /// Returns the value of the key `key` of an imported configuration file, and marks the key as
    /// converted. Returns `None` if the key is absent or its value is `null`.
    pub(super) fn take(&mut self, key: &str) -> Option<&'d DocumentItem> {
        let at = self.remaining.iter().position(|(name, _)| *name == key)?;
        let (_, item) = self.remaining.remove(at);
        (!matches!(item.value, DocumentValue::Null)).then_some(item)
    }

    /// Returns the value of the key `key` of an imported configuration file, which must not be a
    /// list or a mapping, and marks the key as converted. Returns `None` if the key is absent. If
    /// the value is a list or a mapping, records an error and returns `None`.
    pub(super) fn take_scalar(&mut self, key: &str) -> Option<&'d DocumentItem> {
        let item = self.take(key)?;
        if matches!(item.value, DocumentValue::List(_) | DocumentValue::Map(_)) {
            self.report_wrong_type(key, item, "one value");
            return None;
        }
        Some(item)
    }

    /// Returns a scalar value of an imported configuration file as text in Python's notation, such
    /// as `True`, and marks its key as converted. A list or a mapping is recorded as an error.
    pub(super) fn take_text(&mut self, key: &str) -> Option<String> {
        self.take_scalar(key).map(super::value_text::format_python_str)
    }

    /// Returns the boolean value of the key `key` of an imported configuration file, and marks the
    /// key as converted. Accepts quoted booleans, and those of YAML 1.1 (`yes`, `no`, `on`, `off`).
    /// Any other value is recorded as an error.
    pub(super) fn take_boolean(&mut self, key: &str) -> Option<bool> {
        let item = self.take(key)?;
        let word = item.text.to_ascii_lowercase();
        match (&item.value, word.as_str()) {
            (DocumentValue::Bool(b), _) => Some(*b),
            (DocumentValue::Text, "yes" | "true" | "on" | "y") => Some(true),
            (DocumentValue::Text, "no" | "false" | "off" | "n") => Some(false),
            _ => {
                self.report_wrong_type(key, item, "true or false");
                None
            }
        }
    }

    /// Returns the value of a key of an imported configuration file, an integer from `min` to
    /// `u32::MAX`, and marks the key as converted. Any other value is recorded as an error.
    pub(super) fn take_integer(&mut self, key: &str, min: i128) -> Option<i128> {
        self.take_integer_in_range(key, min, u32::MAX.into())
    }

    /// Returns the value of a key of an imported configuration file, an integer from `min` to
    /// `max`, and marks the key as converted. Any other value is recorded as an error.
    pub(super) fn take_integer_in_range(&mut self, key: &str, min: i128, max: i128) -> Option<i128> {
        let item = self.take(key)?;
        let number = match item.value {
            DocumentValue::Int(n) => Some(n),
            DocumentValue::Float(x) if x.fract() == 0.0 && x.abs() < 1e15 => Some(x as i128),
            DocumentValue::Text => item.text.parse().ok(),
            _ => None,
        };
        let number = number.filter(|n| (min..=max).contains(n));
        if number.is_none() {
            self.report_wrong_type(key, item, &format!("an integer of {min} or more"));
        }
        number
    }

    /// Returns the value of a key of an imported configuration file as a finite number, and marks
    /// the key as converted. Any other value is recorded as an error.
    pub(super) fn take_number(&mut self, key: &str) -> Option<f64> {
        let item = self.take(key)?;
        let number = match item.value {
            DocumentValue::Int(n) => Some(n as f64),
            DocumentValue::Float(x) => Some(x),
            DocumentValue::Text => item.text.parse().ok(),
            _ => None,
        };
        let number = number.filter(|x| x.is_finite());
        if number.is_none() {
            self.report_wrong_type(key, item, "a number");
        }
        number
    }

    /// Returns whether the value of the imported key `key` is `auto`. HF Trainer replaces such
    /// values.
    pub(super) fn is_auto(&self, key: &str) -> bool {
        self.remaining.iter().any(|(name, item)| *name == key && item.text == "auto")
    }

    /// Returns whether the imported file has the key `key`, and the key was not converted yet. The
    /// key remains in the mapping. A key with the value `null` counts as absent.
    pub(super) fn is_given(&self, key: &str) -> bool {
        self.remaining.iter().any(|(name, item)| *name == key && !matches!(item.value, DocumentValue::Null))
    }

    /// Returns the integer value of the imported key `key` without marking the key as converted.
    /// Returns `None` if the key is absent or its value is not an integer.
    pub(super) fn peek_integer(&self, key: &str) -> Option<i128> {
        let (_, item) = self.remaining.iter().find(|(name, _)| *name == key)?;
        if let DocumentValue::Int(n) = item.value { Some(n) } else { None }
    }

    /// Removes the section `key` (a mapping) from the keys to be converted, and returns the keys in
    /// this section. Any other value is recorded as an error.
    pub(super) fn take_section(&mut self, key: &str) -> Option<RemainingKeys<'d>> {
        let item = self.take(key)?;
        let path = self.full_path_of_key(key);
        match &item.value {
            DocumentValue::Map(entries) => {
                let remaining = entries.iter().map(|(k, v)| (k.as_str(), v)).collect();
                Some(RemainingKeys { document: self.document, path, remaining, errors: Vec::new() })
            }
            _ => {
                self.report_wrong_type(key, item, "a mapping");
                None
            }
        }
    }

    /// Returns an empty section in place of the section `key`, which the imported configuration
    /// file does not contain. Returns `None` if errors were recorded, because a key with a wrong
    /// value also counts as absent.
    pub(super) fn create_empty_section(&self, key: &str) -> Option<RemainingKeys<'d>> {
        let path = self.full_path_of_key(key);
        // The key may be absent because its value had the wrong type, which was recorded.
        let is_valid = self.errors.is_empty();
        is_valid.then(|| RemainingKeys {
            document: self.document,
            path,
            remaining: Vec::new(),
            errors: Vec::new(),
        })
    }

    /// Returns the names of those keys of an imported configuration file or section that were not
    /// converted to job.yaml yet.
    pub(super) fn remaining_names(&self) -> Vec<&'d str> {
        self.remaining.iter().map(|(key, _)| *key).collect()
    }

    /// Returns the keys that the import did not convert, each with its full path and its value,
    /// formatted for a note to the user. Also returns the errors in the values of converted keys.
    pub(super) fn into_unconverted_keys(self) -> (Vec<(String, String)>, Vec<Diagnostic>) {
        let rest = self.remaining.iter().filter(|(_, item)| !matches!(item.value, DocumentValue::Null));
        (rest.map(|(key, item)| (self.full_path_of_key(key), format_for_note(item))).collect(), self.errors)
    }
}
