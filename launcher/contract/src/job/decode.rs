//! [`JobDecoder`]: reads values from the YAML tree of a job and collects all mistakes.
use super::{
    keys::{self, KeyDefault},
    readers::{self, ReadResult},
    source_map::{SourceMap, join_key_path},
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, make_excerpt, parse_default},
};
use diagnostic::{Code, Diagnostic, codes::job as codes};

/// The most errors that are collected.
const MAX_ERRORS: usize = 200;

/// Reads the values of a job, and collects errors and warnings.
pub(crate) struct JobDecoder {
    pub(crate) sources: SourceMap,
    pub(crate) errors: Vec<Diagnostic>,
    pub(crate) warnings: Vec<Diagnostic>,
    /// The deprecated keys that the job uses, each with its present path.
    pub(crate) deprecated: Vec<(String, String)>,
}

/// The entries of one section of the job.
#[derive(Clone, Copy)]
pub(crate) struct JobSection<'n> {
    path: &'static str,
    entries: &'n [YamlEntry],
    given: bool,
}

impl JobSection<'_> {
    /// Returns whether the job contains the section.
    pub(crate) fn is_given(&self) -> bool {
        self.given
    }
}

impl JobDecoder {
    pub(crate) fn new(sources: SourceMap) -> Self {
        JobDecoder { sources, errors: Vec::new(), warnings: Vec::new(), deprecated: Vec::new() }
    }

    /// Opens the whole job as a section. Reports unknown and duplicate keys.
    pub(crate) fn root_section<'n>(&mut self, root: &'n YamlNode) -> JobSection<'n> {
        self.open_section_node("", Some(root))
    }

    /// Opens a section of `parent`. Reports unknown and duplicate keys in it.
    pub(crate) fn open_section<'n>(&mut self, parent: &JobSection<'n>, path: &'static str) -> JobSection<'n> {
        let node = self.find_value(parent, path);
        self.open_section_node(path, node)
    }

    /// Returns whether a section of `parent` is absent or `null`.
    pub(crate) fn is_absent(&self, parent: &JobSection<'_>, path: &'static str) -> bool {
        self.find_value(parent, path).is_none_or(|n| matches!(n.value, YamlValue::Null))
    }

    /// Opens a section with this value. Reports a value that is not a mapping, and unknown and
    /// duplicate keys.
    fn open_section_node<'n>(&mut self, path: &'static str, node: Option<&'n YamlNode>) -> JobSection<'n> {
        let entries: &[YamlEntry] = match node {
            None => &[],
            Some(YamlNode { value: YamlValue::Map(entries), .. }) => entries,
            Some(other) => {
                self.report_value_error(path, readers::wrong_type_error("a mapping of keys", other));
                &[]
            }
        };
        self.check_key_names(path, entries);
        JobSection { path, entries, given: node.is_some() }
    }

    /// Reports unknown keys, and keys that are given both by their name and by an alias.
    fn check_key_names(&mut self, section: &'static str, entries: &[YamlEntry]) {
        let mut known_names: Vec<&'static str> = Vec::new();
        for entry in entries {
            let known = keys::list_section_keys(section)
                .find(|(name, key)| *name == entry.key || key.aliases.contains(&entry.key.as_str()));
            let Some((name, key)) = known else {
                self.report_unknown_key(section, entry);
                continue;
            };
            if known_names.contains(&name) {
                let message = format!("is given twice: `{}` is another name of `{name}`", entry.key);
                let error = ValueError::new(codes::JOB_KEY_DUPLICATE, entry.key_span, message);
                self.report_value_error(key.path, error.with_help("keep one of them"));
            }
            known_names.push(name);
        }
    }

    /// Reports an unknown key, with a similar name or the names of all keys as advice.
    fn report_unknown_key(&mut self, section: &'static str, entry: &YamlEntry) {
        if self.errors.len() >= MAX_ERRORS {
            return;
        }
        let names = keys::list_section_keys(section)
            .flat_map(|(n, k)| std::iter::once(n).chain(k.aliases.iter().copied()));
        let help = if let Some(name) = readers::find_nearest_name(&entry.key, names) {
            format!("did you mean `{name}`?")
        } else if let Some(path) = find_key_by_last_name(&entry.key) {
            format!("`{path}` is a key")
        } else {
            let names: Vec<&str> = keys::list_section_keys(section).map(|(n, _)| n).collect();
            format!("the keys here are {}", names.join(", "))
        };
        let parent = if section.is_empty() { "a job".to_owned() } else { format!("`{section}`") };
        let message = format!("`{}` is not a key of {parent}", make_excerpt(&entry.key));
        let error = Diagnostic::error(codes::JOB_KEY_UNKNOWN, message)
            .with_subject(join_key_path(section, &entry.key))
            .with_location(self.sources.locate_span(entry.key_span))
            .with_help(help);
        self.push_error(error);
    }

    /// Finds the value of a key, by its name or an alias.
    fn find_value<'n>(&self, section: &JobSection<'n>, path: &'static str) -> Option<&'n YamlNode> {
        debug_assert!(keys::find_key(path).is_some(), "{path} is not in the table of keys");
        let key = keys::find_key(path)?;
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        debug_assert_eq!(parent, section.path);
        let is_key = |e: &&YamlEntry| e.key == name || key.aliases.contains(&e.key.as_str());
        section.entries.iter().find(is_key).map(|e| &e.value)
    }

    /// Reads the value of a key. An absent key has its default. A wrong value is reported, and the
    /// default is returned.
    pub(crate) fn decode_value<T>(
        &mut self,
        section: &JobSection<'_>,
        path: &'static str,
        reader: impl Fn(&YamlNode) -> ReadResult<T>,
    ) -> T {
        if let Some(value) = self.decode_optional(section, path, &reader) {
            return value;
        }
        let default = match keys::find_key(path).map(|k| k.default) {
            Some(KeyDefault::Yaml(text)) => parse_default(text),
            _ => None,
        };
        let value = default.and_then(|node| reader(&node).ok());
        value.unwrap_or_else(|| unreachable!("the default of {path} in the table of keys is readable"))
    }

    /// Reads the value of a key; `None` if the key is absent. A wrong value is reported, and `None`
    /// is returned.
    pub(crate) fn decode_optional<T>(
        &mut self,
        section: &JobSection<'_>,
        path: &'static str,
        reader: impl Fn(&YamlNode) -> ReadResult<T>,
    ) -> Option<T> {
        let node = self.find_value(section, path)?;
        reader(node).map_err(|error| self.report_value_error(path, error)).ok()
    }

    /// Reports a wrong value of `path`. The message begins with the path. An empty path stands for
    /// the whole job.
    pub(crate) fn report_value_error(&mut self, path: &str, error: ValueError) {
        let (subject, prefix) = match path {
            "" => (None, "the job ".to_owned()),
            _ => (Some(path), format!("`{path}` ")),
        };
        for diagnostic in error.into_diagnostics(&self.sources, subject, &prefix) {
            self.push_error(diagnostic);
        }
    }

    /// Reports a value of `path` that is well-formed but not possible. An empty `path` stands for
    /// the whole job. `help` may be empty.
    pub(crate) fn report_error(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let error =
            self.sources.add_location(with_subject_and_help(Diagnostic::error(code, message), path, help));
        self.push_error(error);
    }

    /// Adds a warning about `path`. `help` may be empty.
    pub(crate) fn report_warning(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let warning =
            self.sources.add_location(with_subject_and_help(Diagnostic::warning(code, message), path, help));
        self.warnings.push(warning);
    }

    /// Adds an error, unless there are [`MAX_ERRORS`] already. An error about a key that is given
    /// by its deprecated name gets advice with that name.
    pub(crate) fn push_error(&mut self, error: Diagnostic) {
        if self.errors.len() >= MAX_ERRORS {
            return;
        }
        let deprecated = self.deprecated.iter().find(|(_, new)| error.subject() == Some(new.as_str()));
        self.errors.push(match deprecated {
            Some((old, new)) => error.with_help(format!("`{old}` is the deprecated name of `{new}`")),
            None => error,
        });
    }

    /// Returns whether all of these keys are without errors. If a key has an error, its decoded
    /// value may be a default in place of the wrong value.
    pub(crate) fn are_valid(&self, paths: &[&str]) -> bool {
        !self.errors.iter().any(|error| paths.contains(&error.subject().unwrap_or_default()))
    }
}

/// Sets the subject and the help of a diagnostic, unless they are empty.
fn with_subject_and_help(diagnostic: Diagnostic, path: &str, help: &str) -> Diagnostic {
    let diagnostic = if path.is_empty() { diagnostic } else { diagnostic.with_subject(path) };
    if help.is_empty() { diagnostic } else { diagnostic.with_help(help) }
}

/// Finds the key whose path ends with `name` or that has this alias; `None` unless exactly one key
/// matches.
fn find_key_by_last_name(name: &str) -> Option<&'static str> {
    let has_name = |k: &&keys::KeyInfo| k.path.rsplit('.').next() == Some(name) || k.aliases.contains(&name);
    let mut found = keys::KEYS.iter().filter(has_name).map(|k| k.path);
    let first = found.next()?;
    found.next().is_none().then_some(first)
}
