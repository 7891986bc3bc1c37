//! [`Draft`]: a job.yaml in the making, with notes about what it doesn't say.
use contract::{
    Problem, Source,
    job::{self, KEYS},
    problem::Place,
};
use std::fmt::Write;

/// Most rounds in which keys that a job can't have are taken out again; each takes out one at least.
const MOST_ROUNDS: usize = 64;

/// A job.yaml that loads, and what to tell about it.
#[derive(Debug)]
pub(crate) struct Imported {
    pub(crate) job: String,
    /// One line each.
    pub(crate) notes: Vec<String>,
}

/// A job in the making.
#[derive(Debug, Default)]
pub(super) struct Draft {
    keys: Vec<Key>,
    notes: Vec<String>,
}

#[derive(Debug)]
struct Key {
    path: String,
    yaml: String,
    /// The foreign key it comes from; `None`: the job is nothing without it.
    from: Option<String>,
}

impl Draft {
    /// A key that the job must have.
    pub(super) fn own(&mut self, path: &str, yaml: &str) {
        self.put(path, yaml.to_owned(), None);
    }

    /// A key as the foreign key `from` asks for it. Where this version can't have it, a note says so and it is left out.
    pub(super) fn wish(&mut self, from: &str, path: &str, yaml: impl Into<String>) {
        self.put(path, yaml.into(), Some(from.to_owned()));
    }

    /// A variable of the workers' environment.
    pub(super) fn env(&mut self, from: &str, name: &str, value: &str) {
        let yaml = if value.is_empty() { "\"\"".to_owned() } else { job::quoted(value) };
        self.wish(from, &format!("run.env.{name}"), yaml);
    }

    fn put(&mut self, path: &str, yaml: String, from: Option<String>) {
        self.keys.retain(|key| key.path != path);
        self.keys.push(Key { path: path.to_owned(), yaml, from });
    }

    /// Something to know or do about a key that is there.
    pub(super) fn note(&mut self, key: &str, what: impl AsRef<str>, todo: &str) {
        self.tell("note", key, what.as_ref(), todo);
    }

    /// A foreign key that the job doesn't have; `todo` may be empty.
    pub(super) fn not_carried(&mut self, from: &str, why: impl AsRef<str>, todo: &str) {
        self.tell("not carried", from, why.as_ref(), todo);
    }

    fn tell(&mut self, kind: &str, key: &str, what: &str, todo: &str) {
        let end = if todo.is_empty() { String::new() } else { format!("; {todo}") };
        self.notes.push(format!("{kind}: {key}: {what}{end}"));
    }

    /// The job, less the keys that it can't have. An error is a job that is wrong without those too.
    pub(super) fn finish(mut self, origin: &str) -> Result<Imported, Vec<Problem>> {
        for _ in 0..MOST_ROUNDS {
            let text = self.text(origin);
            let source = Source::Text { name: "job.yaml".to_owned(), text: text.clone() };
            let problems = match contract::load(source, &[]) {
                Ok(_) => return Ok(Imported { job: text, notes: self.notes }),
                Err(problems) => problems,
            };
            if !self.take_out(&problems) {
                return Err(problems);
            }
        }
        Err(Vec::new())
    }

    /// Takes out the keys that problems name; `false` when there was none to take out.
    fn take_out(&mut self, problems: &[Problem]) -> bool {
        let before = self.keys.len();
        for problem in problems {
            // A problem with one entry of a mapping may name the mapping alone, but stands in the entry's line.
            let line = if let Place::Line { text, .. } = &problem.place { text.trim() } else { "" };
            let names = |key: &Key| {
                let below = |whole: &str, part: &str| {
                    part.strip_prefix(whole).is_some_and(|r| r.is_empty() || r.starts_with(['.', '[']))
                };
                let last = key.path.rsplit('.').next().unwrap_or_default();
                let in_line = line.split(':').next() == Some(last);
                key.from.is_some()
                    && (below(&key.path, &problem.path) || below(&problem.path, &key.path) && in_line)
            };
            let Some(at) = self.keys.iter().position(names) else { continue };
            let key = self.keys.remove(at);
            let todo = problem.hint.clone().unwrap_or_default();
            self.not_carried(&key.from.unwrap_or_default(), &problem.message, &todo);
        }
        self.keys.len() < before
    }

    fn text(&self, origin: &str) -> String {
        let mut keys: Vec<(usize, Vec<&str>, &str)> = self
            .keys
            .iter()
            .map(|key| (order(&key.path), key.path.split('.').collect(), key.yaml.as_str()))
            .collect();
        keys.sort_by_key(|(order, ..)| *order);
        let mut text = format!("# from {origin}\n");
        section(&mut text, &keys, 0);
        text
    }
}

/// Where a key stands in the table of keys; keys of a mapping stand where the mapping does.
fn order(path: &str) -> usize {
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

fn section(text: &mut String, keys: &[(usize, Vec<&str>, &str)], depth: usize) {
    let mut rest = keys;
    while let Some((_, path, yaml)) = rest.first() {
        let Some(name) = path.get(depth) else { return };
        let same = rest.iter().take_while(|(_, p, _)| p.get(depth) == Some(name)).count();
        let indent = "  ".repeat(depth);
        // Writing to a String can't fail.
        if path.len() == depth + 1 {
            _ = writeln!(text, "{indent}{name}: {yaml}");
        } else {
            _ = writeln!(text, "{indent}{name}:");
            section(text, &rest[..same], depth + 1);
        }
        rest = &rest[same..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stand_in_the_order_of_the_documentation() {
        let mut draft = Draft::default();
        draft.env("b", "B", "true");
        draft.env("a", "A", "");
        draft.own("run.command", "[true]");
        draft.wish("port", "cluster.master_port", "4000");
        let done = draft.finish("a test").expect("a job");
        assert_eq!(
            done.job,
            "# from a test\ncluster:\n  master_port: 4000\nrun:\n  command: [true]\n  env:\n    B: \"true\"\n    A: \"\"\n"
        );
        assert!(done.notes.is_empty());
    }

    #[test]
    fn what_a_job_can_not_have_is_told_and_left_out() {
        let mut draft = Draft::default();
        draft.own("run.command", "[a]");
        draft.wish("--port", "cluster.master_port", "70000");
        draft.env("RANK", "RANK", "3");
        let done = draft.finish("a test").expect("a job");
        assert_eq!(done.job, "# from a test\nrun:\n  command: [a]\n");
        assert!(done.notes[0].starts_with("not carried: --port: `cluster.master_port` must be"), "{done:?}");
        assert!(done.notes[1].starts_with("not carried: RANK: "), "{done:?}");
    }

    #[test]
    fn a_job_that_is_wrong_in_itself_is_an_error() {
        let mut draft = Draft::default();
        draft.own("run.command", "[]");
        assert!(draft.finish("a test").is_err());
    }
}
