//! [`JobDecoder`]: reads values from the YAML tree of a job and collects all mistakes.
use super::{
    keys::{self, KeyDefault},
    readers::{self, ReadResult},
    source_map::{SourceMap, join_key_path},
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, make_excerpt, parse_default},
};
use diagnostic::{Code, Diagnostic, codes::job as codes};

/// The largest number of errors that are collected. Further errors are dropped.
const MAX_ERRORS: usize = 200;

/// Reads the values of a job, and collects the errors and warnings that are found.
pub(crate) struct JobDecoder {
    pub(crate) sources: SourceMap,
    pub(crate) errors: Vec<Diagnostic>,
    pub(crate) warnings: Vec<Diagnostic>,
    /// The deprecated names of keys that the job uses, as pairs of the deprecated and the present
    /// path.
    pub(crate) deprecated: Vec<(String, String)>,
}

/// The entries of one section of the job. A section that the job does not contain has no entries.
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

    /// Opens the whole job as a section. Reports unknown and duplicate keys at the top level.
    pub(crate) fn root_section<'n>(&mut self, root: &'n YamlNode) -> JobSection<'n> {
        self.open_section_node("", Some(root))
    }

    /// Opens the section `path`, which is directly within `parent`. Reports unknown and duplicate
    /// keys in the section.
    pub(crate) fn open_section<'n>(&mut self, parent: &JobSection<'n>, path: &'static str) -> JobSection<'n> {
        let node = self.find_value(parent, path);
        self.open_section_node(path, node)
    }

    /// Returns whether the section `path` of `parent` is absent or `null`.
    pub(crate) fn is_absent(&self, parent: &JobSection<'_>, path: &'static str) -> bool {
        self.find_value(parent, path).is_none_or(|n| matches!(n.value, YamlValue::Null))
    }

    /// Opens the section `path`, whose value is `node`. Reports a value that is not a mapping, and
    /// unknown and duplicate keys.
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

    /// Reports keys of a section that are unknown, and keys that are given both by their name and
    /// by an alias.
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

    /// Reports an unknown key. The advice is a similar name, or else a list of the section's keys.
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

    /// Returns the value of the key `path` in its section, where the key may have its name or an
    /// alias. Returns `None` if the key is absent.
    fn find_value<'n>(&self, section: &JobSection<'n>, path: &'static str) -> Option<&'n YamlNode> {
        debug_assert!(keys::find_key(path).is_some(), "{path} is not in the table of keys");
        let key = keys::find_key(path)?;
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        debug_assert_eq!(parent, section.path);
        let is_key = |e: &&YamlEntry| e.key == name || key.aliases.contains(&e.key.as_str());
        section.entries.iter().find(is_key).map(|e| &e.value)
    }

    /// Reads the value of the key `path` by `reader`. Returns the default if the key is absent. If
    /// the value is wrong, reports the error and returns the default.
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

    /// Reads the value of the key `path` by `reader`. Returns `None` if the key is absent. If the
    /// value is wrong, reports the error and returns `None`.
    pub(crate) fn decode_optional<T>(
        &mut self,
        section: &JobSection<'_>,
        path: &'static str,
        reader: impl Fn(&YamlNode) -> ReadResult<T>,
    ) -> Option<T> {
        let node = self.find_value(section, path)?;
        reader(node).map_err(|error| self.report_value_error(path, error)).ok()
    }

    /// Reports that the value of the key `path` is wrong. The message begins with the path. An
    /// empty `path` stands for the whole job.
    pub(crate) fn report_value_error(&mut self, path: &str, error: ValueError) {
        let (subject, prefix) = match path {
            "" => (None, "the job ".to_owned()),
            _ => (Some(path), format!("`{path}` ")),
        };
        for diagnostic in error.into_diagnostics(&self.sources, subject, &prefix) {
            self.push_error(diagnostic);
        }
    }

    /// Reports an error about the key `path` whose value is well-formed. An empty `path` stands for
    /// the whole job. `help` may be empty.
    pub(crate) fn report_error(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let error =
            self.sources.add_location(with_subject_and_help(Diagnostic::error(code, message), path, help));
        self.push_error(error);
    }

    /// Adds a warning about the key `path`. `help` is the advice for the user, and may be empty.
    pub(crate) fn report_warning(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let warning =
            self.sources.add_location(with_subject_and_help(Diagnostic::warning(code, message), path, help));
        self.warnings.push(warning);
    }

    /// Adds an error. Drops the error if there are already [`MAX_ERRORS`]. If the job gives the key
    /// by its deprecated name, the error gets advice that mentions this name.
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

    /// Returns whether the keys `paths` have no errors. The decoded value of a key with an error
    /// may be a default in place of the wrong value.
    pub(crate) fn are_valid(&self, paths: &[&str]) -> bool {
        !self.errors.iter().any(|error| paths.contains(&error.subject().unwrap_or_default()))
    }
}

/// Sets the subject of a diagnostic to `path`, and adds `help`. An empty text is skipped.
fn with_subject_and_help(diagnostic: Diagnostic, path: &str, help: &str) -> Diagnostic {
    let diagnostic = if path.is_empty() { diagnostic } else { diagnostic.with_subject(path) };
    if help.is_empty() { diagnostic } else { diagnostic.with_help(help) }
}

/// Returns the path of the only key whose last name or alias is `name`. Returns `None` if no key or
/// several keys match.
fn find_key_by_last_name(name: &str) -> Option<&'static str> {
    let has_name = |k: &&keys::KeyInfo| k.path.rsplit('.').next() == Some(name) || k.aliases.contains(&name);
    let mut found = keys::KEYS.iter().filter(has_name).map(|k| k.path);
    let first = found.next()?;
    found.next().is_none().then_some(first)
}
