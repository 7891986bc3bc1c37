//! [`CheckReport`]: the results of all checks of one `launch check`.
use diagnostic::Code;
use protocol::probe::HostInspection;
use serde_json::{Map, Value};

/// The report of one `launch check`, which contains the check results for each host and the results
/// that concern all hosts together.
#[derive(Debug)]
pub(super) struct CheckReport {
    /// The name of the job.
    pub(super) name: String,
    pub(super) hosts: Vec<HostReport>,
    /// Checks that concern all hosts together.
    pub(super) checks: Vec<CheckResult>,
    /// The measurements of `--network` for programs; `None` without the option.
    pub(super) network: Option<Value>,
}

impl CheckReport {
    /// Returns whether a check failed, either of a single host or of all hosts together.
    pub(super) fn has_failed(&self) -> bool {
        let mut checks = self.hosts.iter().flat_map(|h| &h.checks).chain(&self.checks);
        checks.any(|c| c.level == CheckLevel::Fail)
    }
}

/// The results of `launch check` for one host.
#[derive(Debug)]
pub(super) struct HostReport {
    /// The name that the job gives the host.
    pub(super) name: String,
    /// The inspection that the agent of the host reported; `None` if no agent answered.
    pub(super) inspection: Option<HostInspection>,
    /// The time by which the host's clock is ahead of this machine's clock, and the uncertainty of
    /// this time, both in seconds. `None` if no agent answered.
    pub(super) clock_skew_s: Option<(f64, f64)>,
    pub(super) checks: Vec<CheckResult>,
}

/// The result of one check in the report of `launch check`, such as the check `dns` or `gpu memory`
/// of a host.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CheckResult {
    /// The name of the check, as docs/cli.md lists it.
    pub(super) name: &'static str,
    pub(super) level: CheckLevel,
    /// The observed value or the error as one line of text. Empty if the check was skipped.
    pub(super) found: String,
    /// The diagnostic code of a failure or warning; `None` if the check passed or was skipped.
    pub(super) code: Option<Code>,
    /// The advice for a failure or warning; `None` if the check passed or was skipped.
    pub(super) help: Option<String>,
    /// The values of this check for programs, by name: the member `fields` of the check in the JSON
    /// report. The names are those of the fields of the diagnostic.
    pub(super) fields: Map<String, Value>,
    /// Whether the text in `found` already names the host.
    pub(super) names_host: bool,
}

impl CheckResult {
    /// Creates the result of a passed check, with the text `found` as the observed value that the
    /// report shows.
    pub(super) fn ok(name: &'static str, found: impl Into<String>) -> CheckResult {
        let (found, fields) = (found.into(), Map::new());
        CheckResult { name, level: CheckLevel::Ok, found, code: None, help: None, fields, names_host: false }
    }

    /// Returns the result of a check that was not run because an earlier check failed.
    pub(super) fn skipped(name: &'static str) -> CheckResult {
        CheckResult { level: CheckLevel::Skipped, ..CheckResult::ok(name, "") }
    }

    /// Creates the result of a check with the level "warning": the check has found a problem, but
    /// the job can start.
    pub(super) fn warn(
        name: &'static str,
        code: Code,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> CheckResult {
        let (level, help) = (CheckLevel::Warn, Some(help.into()));
        CheckResult { level, code: Some(code), help, ..CheckResult::ok(name, found) }
    }

    /// Creates the result of a check with the level "failed": the check has found a problem because
    /// of which the job cannot start.
    pub(super) fn failed(
        name: &'static str,
        code: Code,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> CheckResult {
        CheckResult { level: CheckLevel::Fail, ..CheckResult::warn(name, code, found, help) }
    }

    /// Adds the field `name` with the value `value` to the check result in the JSON output of
    /// `launch check`. The JSON report contains the fields, the text report does not.
    pub(super) fn with_field(mut self, name: &str, value: impl Into<Value>) -> CheckResult {
        self.fields.insert(name.to_owned(), value.into());
        self
    }
}

/// The outcome of a check: passed, warning, failed or skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckLevel {
    /// The check found no problem.
    Ok,
    /// The check found a problem with which the job can start.
    Warn,
    /// The check found a problem with which the job cannot start.
    Fail,
    /// The check was not run because an earlier check failed.
    Skipped,
}
