//! [`JobDraft`]: a job.yaml under construction, with notes about keys that were not converted.
use contract::{
    JobSource,
    job::{self, KEYS},
};
use diagnostic::{Diagnostic, Location, codes};
use std::fmt::{self, Write};

/// The largest number of attempts to load the job. Each failed attempt removes at least one key.
const MAX_ATTEMPTS: usize = 64;

/// The result of an import: a job.yaml that loads, and notes about its keys.
#[derive(Debug)]
pub(crate) struct ImportedJob {
    /// The text of job.yaml.
    pub(crate) job: String,
    /// The notes for the user.
    pub(crate) notes: Vec<ImportNote>,
}

/// A note for the user about a key of the job, or about an imported key that was not converted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImportNote {
    pub(crate) kind: NoteKind,
    /// The path of the key: of the job, or of the imported configuration if the key was not
    /// converted.
    pub(crate) key: String,
    /// The reason, and what to do.
    pub(crate) text: String,
}

/// The subject of a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoteKind {
    /// A key of the job.
    Note,
    /// An imported key that was not converted.
    NotCarried,
}

/// Writes one line: `note: KEY: TEXT` or `not carried: KEY: TEXT`.
impl fmt::Display for ImportNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            NoteKind::Note => "note",
            NoteKind::NotCarried => "not carried",
        };
        write!(f, "{kind}: {}: {}", self.key, self.text)
    }
}

/// A job under construction.
#[derive(Debug, Default)]
pub(super) struct JobDraft {
    keys: Vec<DraftKey>,
    notes: Vec<ImportNote>,
}

/// A key of the job under construction, with its value in YAML.
#[derive(Debug)]
struct DraftKey {
    path: String,
    yaml: String,
    /// The imported key; `None` if the job requires the key.
    from: Option<String>,
}

impl JobDraft {
    /// Sets a key that the job requires.
    pub(super) fn set_required(&mut self, path: &str, yaml: &str) {
        self.set_key(path, yaml.to_owned(), None);
    }

    /// Sets a key to the value of the imported key `from`. If the job rejects the value,
    /// [`Self::finish_job`] removes the key and adds a note with the reason.
    pub(super) fn set_imported(&mut self, from: &str, path: &str, yaml: impl Into<String>) {
        self.set_key(path, yaml.into(), Some(from.to_owned()));
    }

    /// Sets a variable of the workers' environment from the imported key `from`.
    pub(super) fn set_env(&mut self, from: &str, name: &str, value: &str) {
        let yaml = if value.is_empty() { "\"\"".to_owned() } else { job::quote_yaml(value) };
        self.set_imported(from, &format!("run.env.{name}"), yaml);
    }

    /// Sets a key, and replaces a previous value.
    fn set_key(&mut self, path: &str, yaml: String, from: Option<String>) {
        self.keys.retain(|key| key.path != path);
        self.keys.push(DraftKey { path: path.to_owned(), yaml, from });
    }

    /// Adds a note about a key of the job; `todo` may be empty.
    pub(super) fn add_key_note(&mut self, key: &str, text: impl AsRef<str>, todo: &str) {
        self.add_note(NoteKind::Note, key, text.as_ref(), todo);
    }

    /// Adds a note about an imported key that the job does not have; `todo` may be empty.
    pub(super) fn add_not_carried_note(&mut self, from: &str, reason: impl AsRef<str>, todo: &str) {
        self.add_note(NoteKind::NotCarried, from, reason.as_ref(), todo);
    }

    fn add_note(&mut self, kind: NoteKind, key: &str, text: &str, todo: &str) {
        let end = if todo.is_empty() { String::new() } else { format!("; {todo}") };
        self.notes.push(ImportNote { kind, key: key.to_owned(), text: format!("{text}{end}") });
    }

    /// Loads the job, removes imported keys that it rejects, and returns the text and the notes.
    /// Fails with the mistakes if the job is not valid without these keys either. `origin` names
    /// the configuration in a comment of the job.
    pub(super) fn finish_job(mut self, origin: &str) -> Result<ImportedJob, Vec<Diagnostic>> {
        for _ in 0..MAX_ATTEMPTS {
            let text = self.to_yaml(origin);
            let source = JobSource::Text { name: "job.yaml".to_owned(), text: text.clone() };
            let errors = match contract::load_job(source, &[]) {
                Ok((.., warnings)) => {
                    // An imported key without effect is not worth a warning in the new job.
                    let unused = |w: &Diagnostic| w.code() == codes::job::JOB_KEY_HAS_NO_EFFECT;
                    let unused: Vec<Diagnostic> = warnings.into_iter().filter(unused).collect();
                    if self.remove_rejected(&unused) {
                        continue;
                    }
                    return Ok(ImportedJob { job: text, notes: self.notes });
                }
                Err(errors) => errors,
            };
            if !self.remove_rejected(&errors) {
                return Err(errors);
            }
        }
        Err(Vec::new())
    }

    /// Removes imported keys that errors name, and adds a note for each. Returns whether a key was
    /// removed.
    fn remove_rejected(&mut self, errors: &[Diagnostic]) -> bool {
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
            self.add_not_carried_note(&key.from.unwrap_or_default(), error.message(), &todo);
        }
        self.keys.len() < before
    }

    /// Formats the job, with its keys in the order of the table of keys.
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

/// Returns the position of a key in the table of keys. An entry of a mapping has the position of
/// the mapping.
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

/// Appends the keys of a section and its subsections. `keys` has the position, the path and the
/// value of each key, in order.
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
        draft.set_required("run.command", "[true]");
        draft.set_imported("port", "cluster.master_port", "4000");
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
        draft.set_required("run.command", "[a]");
        draft.set_imported("--port", "cluster.master_port", "70000");
        draft.set_env("RANK", "RANK", "3");
        let done = draft.finish_job("a test").expect("a job");
        assert_eq!(done.job, "# from a test\nrun:\n  command: [a]\n");
        let notes: Vec<_> = done.notes.iter().map(|note| (note.kind, note.key.as_str())).collect();
        assert_eq!(notes, [(NoteKind::NotCarried, "--port"), (NoteKind::NotCarried, "RANK")]);
    }

    #[test]
    fn a_job_that_is_invalid_without_imported_keys_is_an_error() {
        let mut draft = JobDraft::default();
        draft.set_required("run.command", "[]");
        assert!(draft.finish_job("a test").is_err());
    }
}
