//! [`select_run`]: finds the run that the arguments of a command such as `launch logs` name.
use super::registry::{Run, RunState};
use diagnostic::{Diagnostic, codes::command};

/// Which runs a command such as `launch logs` may select: any run, active runs, or runs that
/// continue without a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunFilter {
    /// Any run, for a command that reads the files of a run. Without a name, the active run is
    /// selected, or the newest run if no run is active.
    Any,
    /// An active run, for a command that signals the controller. Without a name, the active run is
    /// selected.
    Active,
    /// A run without a controller, for a command that continues the run. Without a name, the only
    /// such run is selected.
    Unattended,
}

/// Why a command such as `launch logs` cannot determine which run is meant, for example because
/// several runs are active.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum RunSelectionError<'r> {
    /// There is no run at all.
    #[error("there are no runs")]
    NoRuns,
    /// No run is active.
    #[error("no run is active")]
    NoneActive,
    /// No run is without a controller.
    #[error("no run is without a controller")]
    NoneUnattended,
    /// Several runs are without a controller.
    #[error("{} runs are without a controller; specify one", .0.len())]
    SeveralUnattended(Vec<&'r Run>),
    /// No run and no job has this name.
    #[error("no run and no job is named `{0}`")]
    NotFound(String),
    /// Several runs are active.
    #[error("{} runs are active; specify one", .0.len())]
    SeveralActive(Vec<&'r Run>),
    /// Several runs of the job with this name are active.
    #[error("{count} runs of `{name}` are active; specify one", count = .1.len(), name = .0)]
    SeveralOfJob(String, Vec<&'r Run>),
    /// The names of several runs begin with this text.
    #[error("the names of {count} runs begin with `{prefix}`; specify one", count = .1.len(), prefix = .0)]
    SeveralWithPrefix(String, Vec<&'r Run>),
    /// No run is active on this machine, and several runs were started on other machines.
    #[error("no run is active here, and {} runs were started on other machines; specify one", .0.len())]
    SeveralRemote(Vec<&'r Run>),
}

impl RunSelectionError<'_> {
    /// Returns the runs that all match the user's command line, among which the user must choose
    /// one, or an empty list for other errors.
    pub(crate) fn ambiguous_runs(&self) -> &[&Run] {
        match self {
            RunSelectionError::NoRuns
            | RunSelectionError::NoneActive
            | RunSelectionError::NoneUnattended
            | RunSelectionError::NotFound(_) => &[],
            RunSelectionError::SeveralActive(runs)
            | RunSelectionError::SeveralUnattended(runs)
            | RunSelectionError::SeveralOfJob(_, runs)
            | RunSelectionError::SeveralWithPrefix(_, runs)
            | RunSelectionError::SeveralRemote(runs) => runs,
        }
    }
}

impl From<RunSelectionError<'_>> for Diagnostic {
    fn from(error: RunSelectionError<'_>) -> Diagnostic {
        let code = match &error {
            RunSelectionError::NoRuns | RunSelectionError::NotFound(_) => command::RUN_NOT_FOUND,
            RunSelectionError::NoneActive | RunSelectionError::NoneUnattended => command::RUN_NOT_ACTIVE,
            _ => command::RUN_AMBIGUOUS,
        };
        let names: Vec<&str> = error.ambiguous_runs().iter().map(|run| run.record.run.as_str()).collect();
        let diagnostic = Diagnostic::error(code, error.to_string());
        if names.is_empty() { diagnostic } else { diagnostic.with_field("candidates", names) }
    }
}

/// Selects the run that the user has named on the command line or, without a name, the only active
/// run.
///
/// `name` is, in this order of precedence, the ID of a run, the name of a job, or the beginning of
/// the ID of a run. The name of a job selects the job's active run or, if none is active, the
/// newest run.
///
/// If no run is active, [`RunFilter::Any`] selects the newest run, and [`RunFilter::Active`] the
/// only run that was started on another machine.
pub(crate) fn select_run<'r>(
    runs: &'r [Run],
    name: Option<&str>,
    filter: RunFilter,
) -> Result<&'r Run, RunSelectionError<'r>> {
    let is_active = |run: &&Run| run.state == RunState::Running;
    if let (None, RunFilter::Unattended) = (name, filter) {
        return select_unattended_run(runs);
    }
    let Some(name) = name else {
        let active: Vec<&Run> = runs.iter().filter(is_active).collect();
        return match (active.as_slice(), runs.first(), filter) {
            ([one], ..) => Ok(one),
            ([], Some(newest), RunFilter::Any) => Ok(newest),
            ([], None, RunFilter::Any) => Err(RunSelectionError::NoRuns),
            ([], _, RunFilter::Active) => select_remote_run(runs),
            _ => Err(RunSelectionError::SeveralActive(active)),
        };
    };
    if let Some(run) = runs.iter().find(|run| run.record.run == name) {
        return Ok(run);
    }
    let of_job: Vec<&Run> = runs.iter().filter(|run| run.record.name == name).collect();
    let active: Vec<&Run> = of_job.iter().copied().filter(is_active).collect();
    match (active.as_slice(), of_job.as_slice()) {
        ([one], _) => return Ok(one),
        ([], [newest, ..]) => return Ok(newest),
        ([_, ..], _) => return Err(RunSelectionError::SeveralOfJob(name.to_owned(), active)),
        _ => {}
    }
    let with_prefix: Vec<&Run> = runs.iter().filter(|run| run.record.run.starts_with(name)).collect();
    match with_prefix.as_slice() {
        [one] => Ok(one),
        [] => Err(RunSelectionError::NotFound(name.to_owned())),
        _ => Err(RunSelectionError::SeveralWithPrefix(name.to_owned(), with_prefix)),
    }
}

/// Selects the only run whose controller was lost and whose workers continue.
fn select_unattended_run(runs: &[Run]) -> Result<&Run, RunSelectionError<'_>> {
    let unattended: Vec<&Run> = runs.iter().filter(|run| run.state == RunState::Unattended).collect();
    match unattended.as_slice() {
        [] => Err(RunSelectionError::NoneUnattended),
        [one] => Ok(one),
        _ => Err(RunSelectionError::SeveralUnattended(unattended)),
    }
}

/// Returns the only run whose controller was started on another machine, so that the command can
/// report an error with the name of that machine. [`select_run`] calls this function if no run is
/// active on this machine.
fn select_remote_run(runs: &[Run]) -> Result<&Run, RunSelectionError<'_>> {
    let remote: Vec<&Run> = runs.iter().filter(|run| run.state == RunState::Elsewhere).collect();
    match remote.as_slice() {
        [] => Err(RunSelectionError::NoneActive),
        [one] => Ok(one),
        _ => Err(RunSelectionError::SeveralRemote(remote)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::{
        process_identity::ProcessIdentity,
        registry::{RunLossReason, RunRecord},
    };
    use diagnostic::Code;

    #[test]
    fn a_name_selects_one_run_or_reports_the_candidates() {
        let this = ProcessIdentity::current().expect("this process");
        let run = |run: &str, name: &str, state| Run {
            record: RunRecord {
                version: 1,
                run: run.into(),
                name: name.into(),
                run_dir: "/".into(),
                world: 1,
                began_ms: 0,
                controller_timeout_ms: None,
                batch_job: None,
                controller: this.clone(),
            },
            state,
            step: None,
        };
        let (active, ended) = (RunState::Running, RunState::Ended(0, 1.0));
        let lost = RunState::Lost(RunLossReason::HostRebooted);
        let none: [Run; 0] = [];
        let past = [run("2026-3", "b", ended), run("2026-2", "a", lost), run("2025-1", "a", ended)];
        let one = [run("2026-3", "b", ended), run("2026-2", "a", active), run("2025-1", "a", ended)];
        let two = [run("2026-3", "a", active), run("2026-2", "a", active), run("2025-1", "c", ended)];
        let remote = [
            run("2026-4", "a", RunState::Elsewhere),
            run("2026-3", "b", ended),
            run("2026-2", "c", RunState::Elsewhere),
        ];
        type ExpectedSelection<'a> = Result<&'a str, (Code, usize)>;
        let left = [
            run("2026-3", "b", ended),
            run("2026-2", "a", RunState::Unattended),
            run("2026-1", "a", RunState::Unattended),
        ];
        let cases: [(&[Run], Option<&str>, RunFilter, ExpectedSelection<'_>); 18] = [
            (&none, None, RunFilter::Any, Err((command::RUN_NOT_FOUND, 0))),
            (&past, None, RunFilter::Any, Ok("2026-3")),
            (&past, None, RunFilter::Active, Err((command::RUN_NOT_ACTIVE, 0))),
            (&remote[..2], None, RunFilter::Active, Ok("2026-4")),
            (&remote, None, RunFilter::Active, Err((command::RUN_AMBIGUOUS, 2))),
            (&one, None, RunFilter::Any, Ok("2026-2")),
            (&two, None, RunFilter::Active, Err((command::RUN_AMBIGUOUS, 2))),
            (&past, Some("a"), RunFilter::Any, Ok("2026-2")),
            (&two, Some("a"), RunFilter::Any, Err((command::RUN_AMBIGUOUS, 2))),
            (&one, Some("a"), RunFilter::Active, Ok("2026-2")),
            (&past, Some("2025"), RunFilter::Any, Ok("2025-1")),
            (&past, Some("2026"), RunFilter::Any, Err((command::RUN_AMBIGUOUS, 2))),
            (&past, Some("2026-2"), RunFilter::Any, Ok("2026-2")),
            (&past, Some("x"), RunFilter::Any, Err((command::RUN_NOT_FOUND, 0))),
            (&past, None, RunFilter::Unattended, Err((command::RUN_NOT_ACTIVE, 0))),
            (&left[..2], None, RunFilter::Unattended, Ok("2026-2")),
            (&left, None, RunFilter::Unattended, Err((command::RUN_AMBIGUOUS, 2))),
            (&left, Some("2026-3"), RunFilter::Unattended, Ok("2026-3")),
        ];
        for (runs, name, filter, expected) in cases {
            let selected = select_run(runs, name, filter);
            let selected = selected.map(|run| run.record.run.as_str()).map_err(|error| {
                let candidates = error.ambiguous_runs().len();
                (Diagnostic::from(error).code(), candidates)
            });
            assert_eq!(selected, expected, "{name:?}");
        }
    }
}
