//! [`Keys`]: a foreign mapping whose keys are taken one by one, so that none is forgotten.
use super::wording::shown;
use contract::{
    Problem,
    job::{Document, Item, ItemValue},
};

/// The keys of a mapping that weren't taken yet.
#[derive(Debug)]
pub(super) struct Keys<'d> {
    document: &'d Document,
    /// Of the mapping; empty at the top.
    path: String,
    left: Vec<(&'d str, &'d Item)>,
    pub(super) problems: Vec<Problem>,
}

impl<'d> Keys<'d> {
    /// The top of a document.
    pub(super) fn top(document: &'d Document) -> Result<Self, Vec<Problem>> {
        let mut keys = Keys { document, path: String::new(), left: Vec::new(), problems: Vec::new() };
        match &document.root.value {
            ItemValue::Map(entries) => keys.left = entries.iter().map(|(k, v)| (k.as_str(), v)).collect(),
            _ => return Err(vec![keys.wrong("", &document.root, "a mapping of keys to values")]),
        }
        Ok(keys)
    }

    /// The whole path of a key.
    pub(super) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn wrong(&self, key: &str, item: &Item, what: &str) -> Problem {
        let path = if key.is_empty() { "the file".to_owned() } else { format!("`{}`", self.path(key)) };
        Problem {
            path: self.path(key),
            place: self.document.place(item),
            message: format!("{path} must be {what}, found {}", item.found()),
            hint: None,
        }
    }

    /// A problem with a key's value.
    pub(super) fn refuse(&mut self, key: &str, item: &Item, what: &str) {
        let problem = self.wrong(key, item, what);
        self.problems.push(problem);
    }

    /// A key's value; `null` is as good as absent.
    pub(super) fn take(&mut self, key: &str) -> Option<&'d Item> {
        let at = self.left.iter().position(|(name, _)| *name == key)?;
        let (_, item) = self.left.remove(at);
        (!matches!(item.value, ItemValue::Null)).then_some(item)
    }

    /// A scalar.
    pub(super) fn scalar(&mut self, key: &str) -> Option<&'d Item> {
        let item = self.take(key)?;
        if matches!(item.value, ItemValue::List(_) | ItemValue::Map(_)) {
            self.refuse(key, item, "one value");
            return None;
        }
        Some(item)
    }

    /// A scalar as text, whatever it looks like.
    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        self.scalar(key).map(super::wording::python)
    }

    /// A boolean, also as YAML 1.1 has them (`yes`, `no`, `on`, `off`) and in quotes.
    pub(super) fn boolean(&mut self, key: &str) -> Option<bool> {
        let item = self.take(key)?;
        let word = item.text.to_ascii_lowercase();
        match (&item.value, word.as_str()) {
            (ItemValue::Bool(b), _) => Some(*b),
            (ItemValue::Text, "yes" | "true" | "on" | "y") => Some(true),
            (ItemValue::Text, "no" | "false" | "off" | "n") => Some(false),
            _ => {
                self.refuse(key, item, "true or false");
                None
            }
        }
    }

    /// An integer of at least `least`.
    pub(super) fn integer(&mut self, key: &str, least: i128) -> Option<i128> {
        self.integer_up_to(key, least, u32::MAX.into())
    }

    /// As [`Keys::integer`], up to `most`.
    pub(super) fn integer_up_to(&mut self, key: &str, least: i128, most: i128) -> Option<i128> {
        let item = self.take(key)?;
        let number = match item.value {
            ItemValue::Int(n) => Some(n),
            ItemValue::Float(x) if x.fract() == 0.0 && x.abs() < 1e15 => Some(x as i128),
            ItemValue::Text => item.text.parse().ok(),
            _ => None,
        };
        let number = number.filter(|n| (least..=most).contains(n));
        if number.is_none() {
            self.refuse(key, item, &format!("an integer of {least} or more"));
        }
        number
    }

    /// A finite number.
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
            self.refuse(key, item, "a number");
        }
        number
    }

    /// The word `auto`, which leaves the value to somebody else.
    pub(super) fn is_auto(&self, key: &str) -> bool {
        self.left.iter().any(|(name, item)| *name == key && item.text == "auto")
    }

    /// An integer that stays to be taken.
    pub(super) fn peek(&self, key: &str) -> Option<i128> {
        let (_, item) = self.left.iter().find(|(name, _)| *name == key)?;
        if let ItemValue::Int(n) = item.value { Some(n) } else { None }
    }

    /// A mapping.
    pub(super) fn section(&mut self, key: &str) -> Option<Keys<'d>> {
        let item = self.take(key)?;
        let path = self.path(key);
        match &item.value {
            ItemValue::Map(entries) => {
                let left = entries.iter().map(|(k, v)| (k.as_str(), v)).collect();
                Some(Keys { document: self.document, path, left, problems: Vec::new() })
            }
            _ => {
                self.refuse(key, item, "a mapping");
                None
            }
        }
    }

    /// A mapping that isn't given, as an empty one.
    pub(super) fn empty(&self, key: &str) -> Option<Keys<'d>> {
        let path = self.path(key);
        // one of the wrong type was refused already
        let sound = self.problems.is_empty();
        sound.then(|| Keys { document: self.document, path, left: Vec::new(), problems: Vec::new() })
    }

    /// The names of all keys that are left.
    pub(super) fn names(&self) -> Vec<&'d str> {
        self.left.iter().map(|(key, _)| *key).collect()
    }

    /// What nobody took: whole paths and values as they were written.
    pub(super) fn rest(self) -> (Vec<(String, String)>, Vec<Problem>) {
        let rest = self.left.iter().filter(|(_, item)| !matches!(item.value, ItemValue::Null));
        (rest.map(|(key, item)| (self.path(key), shown(item))).collect(), self.problems)
    }
}
