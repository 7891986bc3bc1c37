//! [`Decoder`]: reads values from the YAML tree and collects all mistakes.
use super::{
    keys::{self, KeyDefault},
    read::{self, ReadResult},
    source::{SourceMap, join},
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, excerpt, parse_default},
};
use diagnostic::{Code, Diagnostic, codes::job as codes};

/// Most errors that are collected.
const MAX_ERRORS: usize = 200;

/// Collects errors and warnings while a job is decoded.
pub(crate) struct Decoder {
    pub(crate) sources: SourceMap,
    pub(crate) errors: Vec<Diagnostic>,
    pub(crate) warnings: Vec<Diagnostic>,
    /// The deprecated keys that the job uses, each with its present path.
    pub(crate) deprecated: Vec<(String, String)>,
}

/// The entries of one section of the job.
#[derive(Clone, Copy)]
pub(crate) struct Section<'n> {
    path: &'static str,
    entries: &'n [YamlEntry],
    given: bool,
}

impl Section<'_> {
    /// Whether the job contains the section at all.
    pub(crate) fn is_given(&self) -> bool {
        self.given
    }
}

impl Decoder {
    pub(crate) fn new(sources: SourceMap) -> Self {
        Decoder { sources, errors: Vec::new(), warnings: Vec::new(), deprecated: Vec::new() }
    }

    /// The keys at the top of the job.
    pub(crate) fn top<'n>(&mut self, root: &'n YamlNode) -> Section<'n> {
        self.section_from("", Some(root))
    }

    /// The keys of a section within `parent`.
    pub(crate) fn section<'n>(&mut self, parent: &Section<'n>, path: &'static str) -> Section<'n> {
        let node = self.value_node(parent, path);
        self.section_from(path, node)
    }

    /// Whether a section of `parent` is absent or `null`.
    pub(crate) fn is_absent(&self, parent: &Section<'_>, path: &'static str) -> bool {
        self.value_node(parent, path).is_none_or(|n| matches!(n.value, YamlValue::Null))
    }

    fn section_from<'n>(&mut self, path: &'static str, node: Option<&'n YamlNode>) -> Section<'n> {
        let entries: &[YamlEntry] = match node {
            None => &[],
            Some(YamlNode { value: YamlValue::Map(entries), .. }) => entries,
            Some(other) => {
                self.report(path, read::wrong_type("a mapping of keys", other));
                &[]
            }
        };
        self.check_names(path, entries);
        Section { path, entries, given: node.is_some() }
    }

    /// Reports unknown keys, and keys that are given by their name and an alias.
    fn check_names(&mut self, section: &'static str, entries: &[YamlEntry]) {
        let mut known_names: Vec<&'static str> = Vec::new();
        for entry in entries {
            let known = keys::names_in(section)
                .find(|(name, key)| *name == entry.key || key.aliases.contains(&entry.key.as_str()));
            let Some((name, key)) = known else {
                self.report_unknown_key(section, entry);
                continue;
            };
            if known_names.contains(&name) {
                let message = format!("is given twice: `{}` is another name of `{name}`", entry.key);
                let error = ValueError::new(codes::JOB_KEY_DUPLICATE, entry.key_span, message);
                self.report(key.path, error.with_help("keep one of them"));
            }
            known_names.push(name);
        }
    }

    fn report_unknown_key(&mut self, section: &'static str, entry: &YamlEntry) {
        if self.errors.len() >= MAX_ERRORS {
            return;
        }
        let names =
            keys::names_in(section).flat_map(|(n, k)| std::iter::once(n).chain(k.aliases.iter().copied()));
        let help = if let Some(name) = read::nearest_name(&entry.key, names) {
            format!("did you mean `{name}`?")
        } else if let Some(path) = key_with_last_name(&entry.key) {
            format!("`{path}` is a key")
        } else {
            let names: Vec<&str> = keys::names_in(section).map(|(n, _)| n).collect();
            format!("the keys here are {}", names.join(", "))
        };
        let parent = if section.is_empty() { "a job".to_owned() } else { format!("`{section}`") };
        let message = format!("`{}` is not a key of {parent}", excerpt(&entry.key));
        let error = Diagnostic::error(codes::JOB_KEY_UNKNOWN, message)
            .with_subject(join(section, &entry.key))
            .with_location(self.sources.span_location(entry.key_span))
            .with_help(help);
        self.push(error);
    }

    fn value_node<'n>(&self, section: &Section<'n>, path: &'static str) -> Option<&'n YamlNode> {
        debug_assert!(keys::find(path).is_some(), "{path} is not in the table of keys");
        let key = keys::find(path)?;
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        debug_assert_eq!(parent, section.path);
        let is_key = |e: &&YamlEntry| e.key == name || key.aliases.contains(&e.key.as_str());
        section.entries.iter().find(is_key).map(|e| &e.value)
    }

    /// The value of a key; its default when it is absent or wrong. A wrong value is reported.
    pub(crate) fn get<T>(
        &mut self,
        section: &Section<'_>,
        path: &'static str,
        reader: impl Fn(&YamlNode) -> ReadResult<T>,
    ) -> T {
        if let Some(value) = self.get_optional(section, path, &reader) {
            return value;
        }
        let default = match keys::find(path).map(|k| k.default) {
            Some(KeyDefault::Yaml(text)) => parse_default(text),
            _ => None,
        };
        let value = default.and_then(|node| reader(&node).ok());
        value.unwrap_or_else(|| unreachable!("the default of {path} in the table of keys is readable"))
    }

    /// The value of a key; `None` when it is absent or wrong. A wrong value is reported.
    pub(crate) fn get_optional<T>(
        &mut self,
        section: &Section<'_>,
        path: &'static str,
        reader: impl Fn(&YamlNode) -> ReadResult<T>,
    ) -> Option<T> {
        let node = self.value_node(section, path)?;
        reader(node).map_err(|error| self.report(path, error)).ok()
    }

    /// Reports a wrong value of `path`. The message begins with the path; an empty path stands for
    /// the whole job.
    pub(crate) fn report(&mut self, path: &str, error: ValueError) {
        let (subject, prefix) = match path {
            "" => (None, "the job ".to_owned()),
            _ => (Some(path), format!("`{path}` ")),
        };
        for diagnostic in error.into_diagnostics(&self.sources, subject, &prefix) {
            self.push(diagnostic);
        }
    }

    /// Reports a value of `path` that is well-formed but not possible. An empty `path` stands for
    /// the whole job. `help` may be empty.
    pub(crate) fn reject(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let error = self.sources.locate(with_subject_and_help(Diagnostic::error(code, message), path, help));
        self.push(error);
    }

    /// Adds a warning about `path`. `help` may be empty.
    pub(crate) fn warn(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let warning =
            self.sources.locate(with_subject_and_help(Diagnostic::warning(code, message), path, help));
        self.warnings.push(warning);
    }

    /// Adds an error, unless there are too many already.
    pub(crate) fn push(&mut self, error: Diagnostic) {
        if self.errors.len() >= MAX_ERRORS {
            return;
        }
        let deprecated = self.deprecated.iter().find(|(_, new)| error.subject() == Some(new.as_str()));
        self.errors.push(match deprecated {
            Some((old, new)) => error.with_help(format!("`{old}` is the deprecated name of `{new}`")),
            None => error,
        });
    }

    /// Whether all of these keys are without errors. Their values are then those of the job, not
    /// defaults in place of wrong values.
    pub(crate) fn is_valid(&self, paths: &[&str]) -> bool {
        !self.errors.iter().any(|error| paths.contains(&error.subject().unwrap_or_default()))
    }
}

fn with_subject_and_help(diagnostic: Diagnostic, path: &str, help: &str) -> Diagnostic {
    let diagnostic = if path.is_empty() { diagnostic } else { diagnostic.with_subject(path) };
    if help.is_empty() { diagnostic } else { diagnostic.with_help(help) }
}

/// Finds the key whose path ends with `name` or that has this alias; `None` unless there is exactly
/// one.
fn key_with_last_name(name: &str) -> Option<&'static str> {
    let has_name = |k: &&keys::Key| k.path.rsplit('.').next() == Some(name) || k.aliases.contains(&name);
    let mut found = keys::KEYS.iter().filter(has_name).map(|k| k.path);
    let first = found.next()?;
    found.next().is_none().then_some(first)
}
