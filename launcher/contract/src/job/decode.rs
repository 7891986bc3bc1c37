//! The decoder: a tree → typed values, collecting every problem on the way instead of stopping at the first.
use super::{
    keys::{self, Default, Support},
    read::{self, Read},
    source::{SourceMap, join},
    tree::{Entry, Fault, Node, Value, parse_default, shown},
};
use crate::{preflight::Finding, problem::Problem};

/// Most problems that are collected; a file with more is not a job.
const MOST: usize = 200;

/// Collects problems and warnings while a job is decoded.
pub(crate) struct Decoder {
    pub(crate) map: SourceMap,
    pub(crate) problems: Vec<Problem>,
    pub(crate) warnings: Vec<Problem>,
}

/// The keys given in one section.
#[derive(Clone, Copy)]
pub(crate) struct Table<'n> {
    path: &'static str,
    entries: &'n [Entry],
    given: bool,
}

impl Table<'_> {
    /// Was the section written at all?
    pub(crate) fn given(&self) -> bool {
        self.given
    }
}

impl Decoder {
    pub(crate) fn new(map: SourceMap) -> Self {
        Decoder { map, problems: Vec::new(), warnings: Vec::new() }
    }

    /// The keys of the whole job.
    pub(crate) fn top<'n>(&mut self, root: &'n Node) -> Table<'n> {
        self.table("", Some(root))
    }

    /// The keys of a section of `parent`.
    pub(crate) fn section<'n>(&mut self, parent: &Table<'n>, path: &'static str) -> Table<'n> {
        let node = self.node(parent, path);
        self.table(path, node)
    }

    /// Is the section of `parent` absent, or there but `null`?
    pub(crate) fn absent(&self, parent: &Table<'_>, path: &'static str) -> bool {
        self.node(parent, path).is_none_or(|n| matches!(n.value, Value::Null))
    }

    fn table<'n>(&mut self, path: &'static str, node: Option<&'n Node>) -> Table<'n> {
        let entries: &[Entry] = match node {
            None => &[],
            Some(Node { value: Value::Map(entries), .. }) => entries,
            Some(other) => {
                self.fault(path, read::expected("a mapping of keys", other));
                &[]
            }
        };
        self.check_names(path, entries);
        Table { path, entries, given: node.is_some() }
    }

    /// Unknown keys, keys given under two names, keys that this version can't do.
    fn check_names(&mut self, section: &'static str, entries: &[Entry]) {
        let mut seen: Vec<&'static str> = Vec::new();
        for entry in entries {
            let known = keys::names_in(section)
                .find(|(name, key)| *name == entry.key || key.aliases.contains(&entry.key.as_str()));
            let Some((name, key)) = known else {
                self.unknown(section, entry);
                continue;
            };
            if seen.contains(&name) {
                let message = format!("is given twice: `{}` is another name of `{name}`", entry.key);
                self.fault(key.path, Fault::at(entry.key_span, message).hint("keep one of them"));
            }
            seen.push(name);
            if let (Support::Later, Default::Yaml(default)) = (key.support, key.default)
                && parse_default(default).is_some_and(|d| d != entry.value)
            {
                let hint = match default {
                    "null" | "[]" | "{}" => "leave it out".to_owned(),
                    _ => format!("leave it out; its only value is `{default}`"),
                };
                let fault = Fault::at(entry.key_span, "is not supported by this version");
                self.fault(key.path, fault.hint(hint));
            }
        }
    }

    fn unknown(&mut self, section: &'static str, entry: &Entry) {
        if self.problems.len() >= MOST {
            return;
        }
        let names =
            keys::names_in(section).flat_map(|(n, k)| std::iter::once(n).chain(k.aliases.iter().copied()));
        let hint = if let Some(near) = read::nearest(&entry.key, names) {
            format!("did you mean `{near}`?")
        } else if let Some(elsewhere) = elsewhere(&entry.key) {
            format!("`{elsewhere}` is a key")
        } else {
            let names: Vec<&str> = keys::names_in(section).map(|(n, _)| n).collect();
            format!("the keys here are {}", names.join(", "))
        };
        let place = if section.is_empty() { "a job".to_owned() } else { format!("`{section}`") };
        let message = format!("`{}` is not a key of {place}", shown(&entry.key));
        let place = self.map.place(entry.key_span);
        self.problems.push(Problem { path: join(section, &entry.key), place, message, hint: Some(hint) });
    }

    fn node<'n>(&self, table: &Table<'n>, path: &'static str) -> Option<&'n Node> {
        debug_assert!(keys::find(path).is_some(), "{path} is in the table of keys");
        let key = keys::find(path)?;
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        debug_assert_eq!(parent, table.path);
        let entry = table.entries.iter().find(|e| e.key == name || key.aliases.contains(&e.key.as_str()));
        entry.map(|e| &e.value)
    }

    /// The value of a key; its default when it is absent or wrong (which is then a problem).
    pub(crate) fn get<T>(
        &mut self,
        table: &Table<'_>,
        path: &'static str,
        reader: impl Fn(&Node) -> Read<T>,
    ) -> T {
        if let Some(value) = self.opt(table, path, &reader) {
            return value;
        }
        let default = match keys::find(path).map(|k| k.default) {
            Some(Default::Yaml(text)) => parse_default(text),
            _ => None,
        };
        let value = default.and_then(|node| reader(&node).ok());
        value.unwrap_or_else(|| unreachable!("the table's default of {path} can be read"))
    }

    /// The value of a key; `None` when it is absent or wrong (which is then a problem).
    pub(crate) fn opt<T>(
        &mut self,
        table: &Table<'_>,
        path: &'static str,
        reader: impl Fn(&Node) -> Read<T>,
    ) -> Option<T> {
        let node = self.node(table, path)?;
        reader(node).map_err(|fault| self.fault(path, fault)).ok()
    }

    /// A problem of the value of `path`, in the words "`path` …".
    pub(crate) fn fault(&mut self, path: &str, fault: Fault) {
        let place = match fault.span {
            Some(span) => self.map.place(span),
            None => self.map.locate(path),
        };
        let message = if path.is_empty() {
            format!("the job {}", fault.message)
        } else {
            format!("`{path}` {}", fault.message)
        };
        self.push(Problem { path: path.to_owned(), place, message, hint: fault.hint });
        for more in fault.rest {
            self.fault(path, more);
        }
    }

    /// A problem of meaning at `path`.
    pub(crate) fn refuse(&mut self, path: &str, message: impl Into<String>, hint: &str) {
        let problem = self.map.problem(&finding(path, message, hint));
        self.push(problem);
    }

    /// Something to know about `path`.
    pub(crate) fn warn(&mut self, path: &str, message: impl Into<String>, hint: &str) {
        self.warnings.push(self.map.problem(&finding(path, message, hint)));
    }

    fn push(&mut self, problem: Problem) {
        if self.problems.len() < MOST {
            self.problems.push(problem);
        }
    }

    /// Is there no problem with any of these keys? (Then their values are the ones that were meant.)
    pub(crate) fn clean(&self, paths: &[&str]) -> bool {
        !self.problems.iter().any(|p| paths.contains(&p.path.as_str()))
    }
}

fn finding(path: &str, message: impl Into<String>, hint: &str) -> Finding {
    Finding {
        path: path.to_owned(),
        message: message.into(),
        hint: (!hint.is_empty()).then(|| hint.to_owned()),
    }
}

/// The one key of another section with this last name.
fn elsewhere(name: &str) -> Option<&'static str> {
    let mut found = keys::KEYS
        .iter()
        .filter(|k| k.path.rsplit('.').next() == Some(name) || k.aliases.contains(&name))
        .map(|k| k.path);
    let first = found.next()?;
    found.next().is_none().then_some(first)
}
