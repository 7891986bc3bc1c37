//! [`JobDecoder`]: reads values from the YAML tree of a job and collects all mistakes.
use super::{
    key_info::{KeyInfo, UnsetKeys, list_section_keys},
    nearest_name::find_nearest_name,
    value_type::{ValueType, wrong_type_error},
};
use crate::yaml::{
    source_map::{SourceMap, join_key_path},
    tree::{YamlEntry, YamlNode, YamlValue, make_excerpt},
    value_error::ValueError,
};
use diagnostic::{Code, Diagnostic, codes::job as codes};

/// The largest number of errors that are reported for one job file. Further errors are dropped.
const MAX_ERRORS: usize = 200;

/// Reads the values of a job's keys from its YAML tree, and collects the errors and warnings about
/// them.
pub(crate) struct JobDecoder {
    pub(crate) sources: SourceMap,
    pub(crate) errors: Vec<Diagnostic>,
    pub(crate) warnings: Vec<Diagnostic>,
    /// The deprecated names of keys that the job uses, as pairs of the deprecated and the present
    /// path.
    pub(crate) deprecated: Vec<(String, String)>,
    /// The keys that the job does not contain and whose defaults are computed after decoding.
    pub(crate) unset: UnsetKeys,
    /// The collected errors of a decoder that reads a mapping within a value, such as an item of a
    /// list; `None` in the decoder of a whole job.
    record_errors: Option<Vec<ValueError>>,
    table: &'static [KeyInfo],
}

/// A section of a job, such as `train.batch`, in its YAML form: the path of the section, and its
/// keys with their values. A section that the job does not contain has no entries.
#[derive(Clone, Copy)]
pub(crate) struct JobSection<'n> {
    path: &'static str,
    entries: &'n [YamlEntry],
    given: bool,
}

impl JobSection<'_> {
    /// Creates an empty section with the path `path`, for a job that does not contain this section.
    pub(crate) fn absent(path: &'static str) -> JobSection<'static> {
        JobSection { path, entries: &[], given: false }
    }

    /// Returns the YAML value of the key `name` of this section; `None` if the job does not contain
    /// the key.
    pub(crate) fn find_value(&self, name: &str) -> Option<&YamlNode> {
        self.entries.iter().find(|entry| entry.key == name).map(|entry| &entry.value)
    }

    /// Returns whether the job contains this section.
    pub(crate) fn is_given(&self) -> bool {
        self.given
    }
}

impl JobDecoder {
    /// Creates a decoder for a job that was read from the files and arguments in `sources`, with
    /// the key declarations in `table`.
    pub(crate) fn new(sources: SourceMap, table: &'static [KeyInfo]) -> Self {
        JobDecoder {
            sources,
            errors: Vec::new(),
            warnings: Vec::new(),
            deprecated: Vec::new(),
            unset: UnsetKeys::new(),
            record_errors: None,
            table,
        }
    }

    /// Decodes a YAML mapping that is a part of a key's value, such as one item of the list
    /// `train.optimizer.groups`, with the function `decode`. Returns the result, the keys without a
    /// value, and the errors, which have no location yet.
    pub(crate) fn decode_record<T>(
        entries: &[YamlEntry],
        decode: impl FnOnce(&mut JobDecoder, &JobSection<'_>) -> T,
    ) -> (T, UnsetKeys, Vec<ValueError>) {
        let mut decoder = JobDecoder::new(SourceMap::new("", ""), &[]);
        decoder.record_errors = Some(Vec::new());
        let value = decode(&mut decoder, &JobSection { path: "", entries, given: true });
        (value, decoder.unset, decoder.record_errors.unwrap_or_default())
    }

    /// Returns the keys at the top level of the job, outside of all sections, as a [`JobSection`].
    /// Reports unknown and duplicate keys there.
    pub(crate) fn open_root_section<'n>(&mut self, root: &'n YamlNode) -> JobSection<'n> {
        self.open_section_node("", Some(root))
    }

    /// Returns the section `path`, which is directly within the section `parent`, so that its keys
    /// can be read. Reports unknown and duplicate keys in the section.
    pub(crate) fn open_section<'n>(&mut self, parent: &JobSection<'n>, path: &'static str) -> JobSection<'n> {
        let node = find_inner_section(parent, path);
        self.open_section_node(path, node)
    }

    /// Returns whether the job lacks the section `path`, which would be directly within the section
    /// `parent`, or gives it the value `null`.
    pub(crate) fn is_null_or_absent(&self, parent: &JobSection<'_>, path: &'static str) -> bool {
        find_inner_section(parent, path).is_none_or(|n| matches!(n.value, YamlValue::Null))
    }

    /// Returns the section `path` as a [`JobSection`] from its YAML value `node`, and reports
    /// unknown keys, duplicate keys and a wrong type.
    fn open_section_node<'n>(&mut self, path: &'static str, node: Option<&'n YamlNode>) -> JobSection<'n> {
        let entries: &[YamlEntry] = match node {
            None => &[],
            Some(YamlNode { value: YamlValue::Map(entries), .. }) => entries,
            Some(other) => {
                self.report_value_error(path, wrong_type_error("a mapping of keys", other));
                &[]
            }
        };
        self.check_key_names(path, entries);
        JobSection { path, entries, given: node.is_some() }
    }

    /// Reports the unknown keys of a section, and the keys that the section contains under two
    /// names, such as an alias.
    fn check_key_names(&mut self, section: &'static str, entries: &[YamlEntry]) {
        let table = self.table;
        let mut known_names: Vec<&str> = Vec::new();
        for entry in entries {
            let Some(key) = list_section_keys(table, section).find(|key| key.has_name(&entry.key)) else {
                self.report_unknown_key(section, entry);
                continue;
            };
            let name = key.name();
            if known_names.contains(&name) {
                let message = format!("is given twice: `{}` is another name of `{name}`", entry.key);
                let error = ValueError::new(codes::JOB_KEY_DUPLICATE, entry.key_span, message);
                self.report_value_error(&key.path, error.with_help("keep one of them"));
            }
            known_names.push(name);
        }
    }

    /// Reports an unknown key in a section of the job, with advice: the key with the most similar
    /// name, or a list of the section's keys.
    fn report_unknown_key(&mut self, section: &'static str, entry: &YamlEntry) {
        if self.errors.len() >= MAX_ERRORS {
            return;
        }
        let keys = || list_section_keys(self.table, section);
        let names = keys().flat_map(|key| std::iter::once(key.name()).chain(key.aliases.iter().copied()));
        let help = if let Some(name) = find_nearest_name(&entry.key, names) {
            format!("did you mean `{name}`?")
        } else if let Some(path) = find_key_by_last_name(self.table, &entry.key) {
            format!("`{path}` is a key")
        } else {
            let names: Vec<&str> = keys().map(KeyInfo::name).collect();
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

    /// Reads the value of the key `name` of a section, where the job may also write an alias from
    /// `aliases` for the name. Returns `None` if the key is absent. If the value is wrong, reports
    /// the error and returns `None`.
    pub(crate) fn read_key<T: 'static>(
        &mut self,
        section: &JobSection<'_>,
        name: &str,
        aliases: &[&str],
        values: &ValueType<T>,
    ) -> Option<T> {
        let is_key = |entry: &&YamlEntry| entry.key == name || aliases.contains(&entry.key.as_str());
        let node = section.entries.iter().find(is_key).map(|entry| &entry.value)?;
        let report = |error| self.report_value_error(&join_key_path(section.path, name), error);
        values.read(node).map_err(report).ok()
    }

    /// Reports that the value of the key `path` is wrong. The message begins with the path. An
    /// empty `path` stands for the whole job.
    pub(crate) fn report_value_error(&mut self, path: &str, error: ValueError) {
        if let Some(errors) = &mut self.record_errors {
            errors.push(error.with_part(&format!("`{path}`")));
            return;
        }
        let (subject, prefix) = match path {
            "" => (None, "the job ".to_owned()),
            _ => (Some(path), format!("`{path}` ")),
        };
        let room = MAX_ERRORS.saturating_sub(self.errors.len());
        let diagnostics: Vec<Diagnostic> =
            error.into_diagnostics(&self.sources, subject, &prefix).take(room).collect();
        diagnostics.into_iter().for_each(|diagnostic| self.push_error(diagnostic));
    }

    /// Reports an error about the key `path` other than a malformed value, such as a conflict with
    /// another key. An empty `path` stands for the whole job. `help` may be empty.
    pub(crate) fn report_error(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let error =
            self.sources.add_location(with_subject_and_help(Diagnostic::error(code, message), path, help));
        self.push_error(error);
    }

    /// Adds a warning about the key `path` to the warnings about the job. `help` is the advice for
    /// the user, and may be empty.
    pub(crate) fn report_warning(&mut self, code: Code, path: &str, message: impl Into<String>, help: &str) {
        let warning =
            self.sources.add_location(with_subject_and_help(Diagnostic::warning(code, message), path, help));
        self.warnings.push(warning);
    }

    /// Adds an error to the errors about the job. Drops the error if there are already
    /// [`MAX_ERRORS`]. If the job uses the deprecated name of the key, adds advice that mentions
    /// this name.
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

    /// Returns whether decoding has reported no error about any of the keys whose paths are in
    /// `paths`. If a key has an error, its decoded value may be a default instead of the value in
    /// the job.
    pub(crate) fn are_keys_valid(&self, paths: &[&str]) -> bool {
        !self.errors.iter().any(|error| paths.contains(&error.subject().unwrap_or_default()))
    }
}

/// Adds to a diagnostic the path of the key that it is about (its subject) and the advice `help`
/// for the user. An empty text is skipped.
fn with_subject_and_help(diagnostic: Diagnostic, path: &str, help: &str) -> Diagnostic {
    let diagnostic = if path.is_empty() { diagnostic } else { diagnostic.with_subject(path) };
    if help.is_empty() { diagnostic } else { diagnostic.with_help(help) }
}

/// Returns the YAML value of the section `path`, which is directly within the section `parent`.
fn find_inner_section<'n>(parent: &JobSection<'n>, path: &str) -> Option<&'n YamlNode> {
    let name = path.rsplit('.').next()?;
    parent.entries.iter().find(|entry| entry.key == name).map(|entry| &entry.value)
}

/// Finds the key of job.yaml whose last name or alias is `name`, so that a message can suggest the
/// right section. Returns `None` if no key or several keys match.
fn find_key_by_last_name<'t>(table: &'t [KeyInfo], name: &str) -> Option<&'t str> {
    let mut found = table.iter().filter(|key| key.has_name(name));
    let first = found.next()?;
    found.next().is_none().then_some(&first.path)
}
