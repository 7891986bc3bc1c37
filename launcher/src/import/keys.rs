//! [`RemainingKeys`]: a mapping of an imported file. Its keys are taken one by one, so that none is
//! overlooked.
use super::wording::display_value;
use contract::job::{Document, Item, ItemValue};
use diagnostic::{Diagnostic, codes::command};

/// The keys of a mapping that have not been taken yet.
#[derive(Debug)]
pub(super) struct RemainingKeys<'d> {
    document: &'d Document,
    /// The path of the mapping; empty at the top.
    path: String,
    remaining: Vec<(&'d str, &'d Item)>,
    /// Errors in the values that were taken.
    pub(super) errors: Vec<Diagnostic>,
}

impl<'d> RemainingKeys<'d> {
    /// The keys at the top of a document.
    pub(super) fn top(document: &'d Document) -> Result<Self, Vec<Diagnostic>> {
        let mut keys =
            RemainingKeys { document, path: String::new(), remaining: Vec::new(), errors: Vec::new() };
        match &document.root.value {
            ItemValue::Map(entries) => {
                keys.remaining = entries.iter().map(|(k, v)| (k.as_str(), v)).collect()
            }
            _ => return Err(vec![keys.type_error("", &document.root, "a mapping of keys to values")]),
        }
        Ok(keys)
    }

    /// The full path of a key.
    pub(super) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn type_error(&self, key: &str, item: &Item, expected: &str) -> Diagnostic {
        let path = if key.is_empty() { "the file".to_owned() } else { format!("`{}`", self.path(key)) };
        let message = format!("{path} must be {expected}, found {}", item.describe());
        Diagnostic::error(command::IMPORT_VALUE_INVALID, message)
            .with_subject(self.path(key))
            .with_location(self.document.location(item))
    }

    /// Records that the value of a key is not what is expected.
    pub(super) fn reject(&mut self, key: &str, item: &Item, expected: &str) {
        let error = self.type_error(key, item, expected);
        self.errors.push(error);
    }

    /// Takes the value of a key; `null` counts as absent.
    pub(super) fn take(&mut self, key: &str) -> Option<&'d Item> {
        let at = self.remaining.iter().position(|(name, _)| *name == key)?;
        let (_, item) = self.remaining.remove(at);
        (!matches!(item.value, ItemValue::Null)).then_some(item)
    }

    /// Takes the value of `key`; a list or a mapping is an error.
    pub(super) fn scalar(&mut self, key: &str) -> Option<&'d Item> {
        let item = self.take(key)?;
        if matches!(item.value, ItemValue::List(_) | ItemValue::Map(_)) {
            self.reject(key, item, "one value");
            return None;
        }
        Some(item)
    }

    /// Takes the scalar value of `key` as text, whatever its type.
    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        self.scalar(key).map(super::wording::python_str)
    }

    /// Takes the value of `key`; anything but a boolean is an error. Quoted booleans and those of
    /// YAML 1.1 (`yes`, `no`, `on`, `off`) are accepted.
    pub(super) fn boolean(&mut self, key: &str) -> Option<bool> {
        let item = self.take(key)?;
        let word = item.text.to_ascii_lowercase();
        match (&item.value, word.as_str()) {
            (ItemValue::Bool(b), _) => Some(*b),
            (ItemValue::Text, "yes" | "true" | "on" | "y") => Some(true),
            (ItemValue::Text, "no" | "false" | "off" | "n") => Some(false),
            _ => {
                self.reject(key, item, "true or false");
                None
            }
        }
    }

    /// Takes the value of `key`; anything but an integer from `min` to `u32::MAX` is an error.
    pub(super) fn integer(&mut self, key: &str, min: i128) -> Option<i128> {
        self.integer_in(key, min, u32::MAX.into())
    }

    /// Takes the value of `key`; anything but an integer from `min` to `max` is an error.
    pub(super) fn integer_in(&mut self, key: &str, min: i128, max: i128) -> Option<i128> {
        let item = self.take(key)?;
        let number = match item.value {
            ItemValue::Int(n) => Some(n),
            ItemValue::Float(x) if x.fract() == 0.0 && x.abs() < 1e15 => Some(x as i128),
            ItemValue::Text => item.text.parse().ok(),
            _ => None,
        };
        let number = number.filter(|n| (min..=max).contains(n));
        if number.is_none() {
            self.reject(key, item, &format!("an integer of {min} or more"));
        }
        number
    }

    /// Takes the value of `key`; anything but a finite number is an error.
    pub(super) fn number(&mut self, key: &str) -> Option<f64> {
        let item = self.take(key)?;
        let number = match item.value {
            ItemValue::Int(n) => Some(n as f64),
            ItemValue::Float(x) => Some(x),
            ItemValue::Text => item.text.parse().ok(),
            _ => None,
        };
        let number = number.filter(|x| x.is_finite());
        if number.is_none() {
            self.reject(key, item, "a number");
        }
        number
    }

    /// Whether the value of `key` is `auto`, so that HF Trainer chooses the value.
    pub(super) fn is_auto(&self, key: &str) -> bool {
        self.remaining.iter().any(|(name, item)| *name == key && item.text == "auto")
    }

    /// The value of `key` if it is an integer. The key is not taken.
    pub(super) fn peek(&self, key: &str) -> Option<i128> {
        let (_, item) = self.remaining.iter().find(|(name, _)| *name == key)?;
        if let ItemValue::Int(n) = item.value { Some(n) } else { None }
    }

    /// Takes the value of `key`; anything but a mapping is an error.
    pub(super) fn section(&mut self, key: &str) -> Option<RemainingKeys<'d>> {
        let item = self.take(key)?;
        let path = self.path(key);
        match &item.value {
            ItemValue::Map(entries) => {
                let remaining = entries.iter().map(|(k, v)| (k.as_str(), v)).collect();
                Some(RemainingKeys { document: self.document, path, remaining, errors: Vec::new() })
            }
            _ => {
                self.reject(key, item, "a mapping");
                None
            }
        }
    }

    /// An empty mapping for a key that is not given.
    pub(super) fn empty(&self, key: &str) -> Option<RemainingKeys<'d>> {
        let path = self.path(key);
        // A value of the wrong type is an error already.
        let is_valid = self.errors.is_empty();
        is_valid.then(|| RemainingKeys {
            document: self.document,
            path,
            remaining: Vec::new(),
            errors: Vec::new(),
        })
    }

    /// The names of the keys that have not been taken.
    pub(super) fn names(&self) -> Vec<&'d str> {
        self.remaining.iter().map(|(key, _)| *key).collect()
    }

    /// The full paths and the written values of the keys that were not taken, and the errors.
    pub(super) fn into_rest(self) -> (Vec<(String, String)>, Vec<Diagnostic>) {
        let rest = self.remaining.iter().filter(|(_, item)| !matches!(item.value, ItemValue::Null));
        (rest.map(|(key, item)| (self.path(key), display_value(item))).collect(), self.errors)
    }
}
