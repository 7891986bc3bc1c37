//! [`Failure`]: why a command ended without doing what was asked: kind → exit code, causes, hints.
use contract::{
    Problem, exit,
    problem::{Severity, render},
};
use std::fmt::Write;

/// What kind of failure; it decides the exit code (docs/cli.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The command line is wrong.
    Usage,
    /// job.yaml is wrong.
    Job,
    /// Host, device, storage or port can't be had.
    Cluster,
    /// The checkpoint can't be used.
    Checkpoint,
    /// What was asked for was begun and failed.
    Failed,
}

impl Kind {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Kind::Usage | Kind::Job => exit::USAGE,
            Kind::Cluster => exit::CLUSTER,
            Kind::Checkpoint => exit::CHECKPOINT,
            Kind::Failed => exit::FAILED,
        }
    }
}

/// A failure of a command, ready to be told.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    /// One line, no full stop.
    pub(crate) message: String,
    /// What led to it, outermost first.
    pub(crate) causes: Vec<String>,
    pub(crate) hints: Vec<String>,
    /// [`Kind::Job`]: what is wrong and where.
    pub(crate) problems: Vec<Problem>,
}

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        let message = message.into();
        Failure { kind, message, causes: Vec::new(), hints: Vec::new(), problems: Vec::new() }
    }

    /// A wrong job; `file` is the name of its file.
    pub(crate) fn job(file: &str, problems: Vec<Problem>) -> Self {
        let message = format!("{file} has {} problems; nothing was started", problems.len());
        Failure { problems, ..Failure::new(Kind::Job, message) }
    }

    /// With the error that caused it, and that one's causes.
    pub(crate) fn cause(mut self, error: &dyn std::error::Error) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            self.causes.push(error.to_string());
            next = error.source();
        }
        self
    }

    /// With advice.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// All of it for a person; ends with a line break.
    pub(crate) fn text(&self, color: bool) -> String {
        let mut text = render(&self.problems, Severity::Error, color);
        // One problem says it all itself.
        if self.problems.len() != 1 {
            let gap = if self.problems.is_empty() { "" } else { "\n" };
            let (bold_red, reset) = if color { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
            // Writing to a String can't fail.
            _ = writeln!(text, "{gap}{bold_red}error{reset}: {}", self.message);
        }
        for cause in &self.causes {
            _ = writeln!(text, "  caused by: {cause}");
        }
        for hint in &self.hints {
            _ = writeln!(text, "  help: {hint}");
        }
        text
    }

    /// All of it on one line, for events.
    pub(crate) fn line(&self) -> String {
        let mut parts: Vec<String> = self.problems.iter().map(Problem::to_string).collect();
        if parts.is_empty() {
            parts.push(self.message.clone());
        }
        parts.extend(self.causes.iter().cloned());
        parts.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::problem::Place;

    #[test]
    fn told_in_full_and_in_a_line() {
        let cause = std::io::Error::other("disk is full");
        let failure = Failure::new(Kind::Cluster, "the run directory can't be made")
            .cause(&cause)
            .hint("free some space");
        assert_eq!(
            failure.text(false),
            "error: the run directory can't be made\n  caused by: disk is full\n  help: free some space\n"
        );
        assert_eq!(failure.line(), "the run directory can't be made; disk is full");
        assert_eq!(failure.kind.exit_code(), 3);
    }

    #[test]
    fn a_wrong_job_names_each_problem() {
        let problem = |message: &str| Problem {
            path: String::new(),
            place: Place::File { file: "a.yaml".to_owned() },
            message: message.to_owned(),
            hint: None,
        };
        let failure = Failure::job("a.yaml", vec![problem("one"), problem("two")]);
        assert!(failure.text(false).ends_with("error: a.yaml has 2 problems; nothing was started\n"));
        assert_eq!(failure.line(), "a.yaml: one; a.yaml: two");
        assert_eq!(failure.kind.exit_code(), 2);
    }
}
