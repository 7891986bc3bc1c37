//! [`JobDraft`]: a job.yaml that an import builds, with notes about keys that were not converted.
use diagnostic::{Diagnostic, Location, codes};
use jobspec::{
    self, JobSource, KEYS,
    hosts::{NodeCount, RendezvousAddress},
};
use std::fmt::{self, Write};

/// The largest number of times that an import loads the new job.yaml to check it, where each
/// failure removes the rejected keys. Each failed attempt removes at least one rejected key.
const MAX_LOAD_ATTEMPTS: usize = 64;

/// The result of converting another launcher's configuration or command line: a valid job.yaml, and
/// notes about keys that deserve attention or were not converted.
#[derive(Debug)]
pub(crate) struct ImportedJob {
    /// The text of the job.yaml.
    pub(crate) job: String,
    /// The notes that are shown to the user.
    pub(crate) notes: Vec<ImportNote>,
    /// The nodes on each of which the user starts the command line; `None` if the command line does
    /// not state them.
    pub(crate) nodes: Option<ImportedNodes>,
}

/// The nodes that a command line of another launcher, such as torchrun, describes: their number,
/// this node's number, and the address of node 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImportedNodes {
    /// The number of nodes.
    pub(crate) count: NodeCount,
    /// The number of this node; `None` if the command line does not state it.
    pub(crate) node_rank: Option<u32>,
    /// The address of node 0; `None` if the command line does not state it.
    pub(crate) rendezvous: Option<RendezvousAddress>,
}

/// A note for the user of `launch import` about a key of job.yaml, or about an imported key that
/// was not converted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImportNote {
    pub(crate) kind: NoteKind,
    /// The path of a key of the job. If an imported key was not converted, the path of the imported
    /// key.
    pub(crate) key: String,
    /// The reason for the note, and what the user can do.
    pub(crate) text: String,
}

/// The kind of an import note: about a key that was written to job.yaml, or about a key of the
/// other launcher's configuration that was not converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoteKind {
    /// A key of the job that was written.
    Note,
    /// An imported key that was not converted.
    NotConverted,
}

/// Writes the note on one line, as `note: KEY: TEXT` or `not converted: KEY: TEXT`.
impl fmt::Display for ImportNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            NoteKind::Note => "note",
            NoteKind::NotConverted => "not converted",
        };
        write!(f, "{kind}: {}: {}", self.key, self.text)
    }
}

/// A job.yaml that is being built from another launcher's configuration: its keys so far, and notes
/// for the user.
#[derive(Debug, Default)]
pub(super) struct JobDraft {
    keys: Vec<DraftKey>,
    notes: Vec<ImportNote>,
}

/// A key of a job.yaml that is being built, with its value in YAML.
#[derive(Debug)]
struct DraftKey {
    path: String,
    yaml: String,
    /// The imported key from which the value comes; `None` if the job requires the key.
    from: Option<String>,
}

impl JobDraft {
    /// Sets a key of the new job.yaml that an import always writes and never removes, to the YAML
    /// value `yaml`. In contrast to an imported key, [`Self::finish_job`] never removes this key.
    pub(super) fn set_required_key(&mut self, path: &str, yaml: &str) {
        self.set_key(path, yaml.to_owned(), None);
    }

    /// Sets the job.yaml key `path` to a YAML value that was converted from the key or option
    /// `from` of another launcher. If the job is rejected because of the value,
    /// [`Self::finish_job`] removes the key and adds a note.
    pub(super) fn set_imported_key(&mut self, from: &str, path: &str, yaml: impl Into<String>) {
        self.set_key(path, yaml.into(), Some(from.to_owned()));
    }

    /// Sets the environment variable `name` of the workers to a value that comes from the imported
    /// key `from`.
    pub(super) fn set_env(&mut self, from: &str, name: &str, value: &str) {
        let yaml = if value.is_empty() { "\"\"".to_owned() } else { jobspec::quote_yaml(value) };
        self.set_imported_key(from, &format!("run.env.{name}"), yaml);
    }

    /// Sets the job.yaml key `path` to a YAML value, and replaces an earlier value of the key.
    fn set_key(&mut self, path: &str, yaml: String, from: Option<String>) {
        self.keys.retain(|key| key.path != path);
        self.keys.push(DraftKey { path: path.to_owned(), yaml, from });
    }

    /// Adds a note for the user about the key `key` of the job.yaml that is being built. `todo`,
    /// which may be empty, states what the user can do.
    pub(super) fn add_key_note(&mut self, key: &str, text: impl AsRef<str>, todo: &str) {
        self.add_note(NoteKind::Note, key, text.as_ref(), todo);
    }

    /// Adds a note for the user that the key or option `from` of the other launcher has no
    /// counterpart in job.yaml. `todo`, which may be empty, states what the user can do.
    pub(super) fn add_not_converted_note(&mut self, from: &str, reason: impl AsRef<str>, todo: &str) {
        self.add_note(NoteKind::NotConverted, from, reason.as_ref(), todo);
    }

    /// Adds a note for the user about one key: the statement `text`, followed by the advice `todo`
    /// if it is not empty.
    fn add_note(&mut self, kind: NoteKind, key: &str, text: &str, todo: &str) {
        let end = if todo.is_empty() { String::new() } else { format!("; {todo}") };
        self.notes.push(ImportNote { kind, key: key.to_owned(), text: format!("{text}{end}") });
    }

    /// Loads the new job.yaml to check it, and returns its text and the notes for the user.
    /// Imported keys that are rejected or have no effect are removed, and each gets a note.
    /// `origin` describes the imported configuration in a comment of the job.
    ///
    /// Fails if the job is still not valid after the rejected keys were removed.
    pub(super) fn finish_job(mut self, origin: &str) -> Result<ImportedJob, Vec<Diagnostic>> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let text = self.to_yaml(origin);
            let source = JobSource::Text { name: "job.yaml".to_owned(), text: text.clone() };
            let errors = match jobspec::load_job(source, &[]) {
                Ok((.., warnings)) => {
                    // An imported key without effect is not worth a warning in the new job.
                    let unused = |w: &Diagnostic| w.code() == codes::job::JOB_KEY_HAS_NO_EFFECT;
                    let unused: Vec<Diagnostic> = warnings.into_iter().filter(unused).collect();
                    if attempts < MAX_LOAD_ATTEMPTS && self.remove_rejected_keys(&unused) {
                        continue;
                    }
                    return Ok(ImportedJob { job: text, notes: self.notes, nodes: None });
                }
                Err(errors) => errors,
            };
            if attempts == MAX_LOAD_ATTEMPTS || !self.remove_rejected_keys(&errors) {
                return Err(errors);
            }
        }
    }

    /// Removes the imported keys that the job loader has rejected with `errors`, and adds a note
    /// for each. Returns whether a key was removed.
    fn remove_rejected_keys(&mut self, errors: &[Diagnostic]) -> bool {
        let before = self.keys.len();
        for error in errors {
            // An error about an entry may name only its mapping, but its location is the entry's
            // line.
            let line =
                if let Some(Location::Line { text, .. }) = error.location() { text.trim() } else { "" };
            let subject = error.subject().unwrap_or_default();
            let names = |key: &DraftKey| {
                let below = |whole: &str, part: &str| {
                    part.strip_prefix(whole).is_some_and(|r| r.is_empty() || r.starts_with(['.', '[']))
                };
                let last = key.path.rsplit('.').next().unwrap_or_default();
                let in_line = line.split(':').next() == Some(last);
                key.from.is_some() && (below(&key.path, subject) || below(subject, &key.path) && in_line)
            };
            let Some(at) = self.keys.iter().position(names) else { continue };
            let key = self.keys.remove(at);
            let todo = error.help().join("; ");
            self.add_not_converted_note(&key.from.unwrap_or_default(), error.message(), &todo);
        }
        self.keys.len() < before
    }

    /// Returns the new job.yaml as YAML text, with the keys in the order in which the documentation
    /// lists them.
    fn to_yaml(&self, origin: &str) -> String {
        let mut keys: Vec<(usize, Vec<&str>, &str)> = self
            .keys
            .iter()
            .map(|key| (find_key_order(&key.path), key.path.split('.').collect(), key.yaml.as_str()))
            .collect();
        keys.sort_by_key(|(order, ..)| *order);
        let mut text = format!("# from {origin}\n");
        write_section(&mut text, &keys, 0);
        text
    }
}

/// Returns the index of a job.yaml key in the documented list of all keys, by which the keys of a
/// new job.yaml are sorted. For a path that is not in the table, such as `run.env.NAME`, returns
/// the index of its nearest parent in the table.
fn find_key_order(path: &str) -> usize {
    let mut path = path;
    loop {
        if let Some(at) = KEYS.iter().position(|key| key.path == path) {
            return at;
        }
        match path.rsplit_once('.') {
            Some((parent, _)) => path = parent,
            None => return KEYS.len(),
        }
    }
}

/// Appends the keys of a new job.yaml to a YAML text as nested mappings, with two more spaces of
/// indentation at each level. `keys` contains the order, the path and the YAML value of each key,
/// sorted by order.
fn write_section(text: &mut String, keys: &[(usize, Vec<&str>, &str)], depth: usize) {
    let mut rest = keys;
    while let Some((_, path, yaml)) = rest.first() {
        let Some(name) = path.get(depth) else { return };
        let same = rest.iter().take_while(|(_, p, _)| p.get(depth) == Some(name)).count();
        let indent = "  ".repeat(depth);
        // Writing to a String cannot fail.
        if path.len() == depth + 1 {
            _ = writeln!(text, "{indent}{name}: {yaml}");
        } else {
            _ = writeln!(text, "{indent}{name}:");
            write_section(text, &rest[..same], depth + 1);
        }
        rest = &rest[same..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_the_order_of_the_documentation() {
        let mut draft = JobDraft::default();
        draft.set_env("b", "B", "true");
        draft.set_env("a", "A", "");
        draft.set_required_key("run.command", "[true]");
        draft.set_imported_key("port", "cluster.master_port", "4000");
        let done = draft.finish_job("a test").expect("a job");
        assert_eq!(
            done.job,
            "# from a test\ncluster:\n  master_port: 4000\nrun:\n  command: [true]\n  env:\n    B: \"true\"\n    A: \"\"\n"
        );
        assert!(done.notes.is_empty());
    }

    #[test]
    fn rejected_keys_are_removed_and_noted() {
        let mut draft = JobDraft::default();
        draft.set_required_key("run.command", "[a]");
        draft.set_imported_key("--port", "cluster.master_port", "70000");
        draft.set_env("RANK", "RANK", "3");
        let done = draft.finish_job("a test").expect("a job");
        assert_eq!(done.job, "# from a test\nrun:\n  command: [a]\n");
        let notes: Vec<_> = done.notes.iter().map(|note| (note.kind, note.key.as_str())).collect();
        assert_eq!(notes, [(NoteKind::NotConverted, "--port"), (NoteKind::NotConverted, "RANK")]);
    }

    #[test]
    fn a_job_that_is_invalid_without_imported_keys_is_an_error() {
        let mut draft = JobDraft::default();
        draft.set_required_key("run.command", "[]");
        assert!(draft.finish_job("a test").is_err());
    }
}
