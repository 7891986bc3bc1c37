//! [`JobValues`]: the values of all keys of a job as YAML text, which is printed by `--dry-run` and
//! compared in rules about conflicting keys.
use super::key_info::{KeyInfo, Rule};
use crate::yaml::{format::YamlText, parse::parse_default_value};
use std::fmt::Write as _;

/// The values of a job's keys as YAML text, in the order of the table of keys. Keys without a value
/// are absent.
#[derive(Debug, Default)]
pub(crate) struct JobValues {
    /// The name that the job has if it does not contain the key `name`.
    pub(crate) default_name: String,
    values: Vec<(String, YamlText)>,
}

impl JobValues {
    /// Appends the key `path` with the YAML text `value`.
    pub(crate) fn add(&mut self, path: String, value: YamlText) {
        self.values.push((path, value));
    }

    /// Adds the YAML entries `more` to the value of the key `path`, whose value is a mapping such
    /// as `run.env`.
    pub(crate) fn add_entries(&mut self, path: &str, more: YamlText) {
        let YamlText::Block(more) = more else { return };
        match self.values.iter_mut().find(|(of, _)| of == path) {
            Some((_, YamlText::Block(entries))) => entries.extend(more),
            Some((_, line)) => *line = YamlText::Block(more),
            None => self.values.push((path.to_owned(), YamlText::Block(more))),
        }
    }

    /// Returns the value of the key `path` as one line of YAML text, or an empty text if the value
    /// takes several lines of YAML. Returns `None` if the key has no value.
    pub(crate) fn get(&self, path: &str) -> Option<&str> {
        self.values.iter().find(|(of, _)| of == path).map(|(_, value)| match value {
            YamlText::Line(value) => value.as_str(),
            YamlText::Block(_) => "",
        })
    }

    /// Returns the value of the key `path` as a number, or 0 if the value is absent or not a
    /// number.
    pub(crate) fn get_number(&self, path: &str) -> f64 {
        self.get(path).and_then(|value| value.parse().ok()).unwrap_or(0.0)
    }

    /// Returns the value of the key `path` as text without quotes. Returns `None` if the key has no
    /// value.
    pub(crate) fn get_text(&self, path: &str) -> Option<String> {
        self.get(path).and_then(parse_default_value).map(|node| node.raw)
    }

    /// Returns whether the values of this job meet all conditions of `rule`, a rule about
    /// conflicting keys.
    pub(crate) fn meets_rule_conditions(&self, rule: &Rule) -> bool {
        rule.when.iter().all(|condition| condition.holds(self.get(condition.key_path())))
    }

    /// Formats the message of `rule`, which this job violates and which rejects the key `path` or
    /// warns about it.
    pub(crate) fn format_rule_message(&self, rule: &Rule, path: &str) -> String {
        rule.format_message(path, rule.when.last().and_then(|condition| self.get(condition.key_path())))
    }

    /// Returns the values without those keys that have no effect in this job, such as `momentum`
    /// with the optimizer AdamW.
    pub(crate) fn without_unused_keys(mut self, table: &[KeyInfo]) -> JobValues {
        let is_unused = |path: &str| {
            let key = table.iter().find(|key| key.path == path);
            key.is_some_and(|key| {
                key.rules.iter().any(|rule| rule.ignores_value_of(path) && self.meets_rule_conditions(rule))
            })
        };
        let unused: Vec<bool> = self.values.iter().map(|(path, _)| is_unused(path)).collect();
        let mut unused = unused.into_iter();
        self.values.retain(|_| !unused.next().unwrap_or_default());
        self
    }

    /// Lists the values that fit on one line, as pairs of the key's path and the value in YAML.
    /// Entries of a block have paths below the key.
    pub(crate) fn list_paths_and_values(&self) -> Vec<(String, String)> {
        fn add_lines(path: &str, value: &YamlText, lines: &mut Vec<(String, String)>) {
            match value {
                YamlText::Line(value) => lines.push((path.to_owned(), value.clone())),
                YamlText::Block(entries) => {
                    entries
                        .iter()
                        .for_each(|(name, value)| add_lines(&format!("{path}.{name}"), value, lines));
                }
            }
        }
        let mut lines = Vec::new();
        self.values.iter().for_each(|(path, value)| add_lines(path, value, &mut lines));
        lines
    }

    /// Formats the keys and their values as the text of a job.yaml.
    pub(crate) fn to_yaml(&self) -> String {
        let (mut yaml, mut open) = (String::new(), Vec::<&str>::new());
        for (path, value) in &self.values {
            let mut parts: Vec<&str> = path.split('.').collect();
            let name = parts.pop().unwrap_or_default();
            let common = open.iter().zip(&parts).take_while(|(a, b)| a == b).count();
            for (depth, section) in parts.iter().enumerate().skip(common) {
                _ = writeln!(yaml, "{:indent$}{section}:", "", indent = 2 * depth);
            }
            write_value(&mut yaml, parts.len(), name, value);
            open = parts;
        }
        yaml
    }
}

/// Appends a key and its value to the text of a job.yaml, indented for a key within `depth` nested
/// sections.
fn write_value(yaml: &mut String, depth: usize, name: &str, value: &YamlText) {
    let indent = 2 * depth;
    // Writing to a String cannot fail.
    match value {
        YamlText::Line(value) => _ = writeln!(yaml, "{:indent$}{name}: {value}", ""),
        YamlText::Block(entries) => {
            _ = writeln!(yaml, "{:indent$}{name}:", "");
            entries.iter().for_each(|(name, value)| write_value(yaml, depth + 1, name, value));
        }
    }
}
