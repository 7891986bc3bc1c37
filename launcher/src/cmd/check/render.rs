//! Formats the report of `launch check` as text and JSON.
use super::{
    accelerators::describe_accelerators,
    check_report::{CheckLevel, CheckReport, CheckResult, HostReport},
};
use crate::format::format_table;
use diagnostic::{
    quantity::{format_bytes, format_count},
    terminal_text::filter_line,
};
use jobspec::AcceleratorKind;
use serde_json::{Value, json};
use std::fmt::Write;

/// Formats a report as text: a table of hosts, a table of checks, and every failure and warning
/// with its help.
pub(super) fn render_text(report: &CheckReport) -> String {
    let mut rows = vec![
        ["host", "reached", "version", "cpus", "memory", "devices", "clock", "disk", "ports"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(report.hosts.iter().map(format_host_row));
    let mut text = format_table(&rows);
    // Writing to a String does not fail.
    _ = writeln!(text, "\n{}", format_table(&format_check_rows(&report.hosts)).trim_end());
    let checks: Vec<(Option<&str>, &CheckResult)> = report
        .hosts
        .iter()
        .flat_map(|h| h.checks.iter().map(move |c| (Some(h.name.as_str()), c)))
        .chain(report.checks.iter().map(|c| (None, c)))
        .collect();
    for (title, level) in [("failed", CheckLevel::Fail), ("warnings", CheckLevel::Warn)] {
        let selected: Vec<_> = checks.iter().filter(|(_, c)| c.level == level).collect();
        if !selected.is_empty() {
            _ = writeln!(text, "\n{title}:");
        }
        for (host, check) in selected {
            let host = host.filter(|_| !check.names_host).map_or(String::new(), |h| format!("{h}: "));
            _ = writeln!(text, "  {}: {host}{}", check.name, filter_line(&check.found));
            if let Some(help) = &check.help {
                _ = writeln!(text, "    help: {}", filter_line(help));
            }
        }
    }
    for check in report.checks.iter().filter(|c| c.level == CheckLevel::Ok) {
        _ = writeln!(text, "\n{}: {}", check.name, filter_line(&check.found));
    }
    let count = |level| checks.iter().filter(|(_, c)| c.level == level).count();
    let hosts = format_count(report.hosts.len(), "host");
    let failed = format_count(count(CheckLevel::Fail), "failed check");
    let warnings = format_count(count(CheckLevel::Warn), "warning");
    _ = writeln!(text, "\n{}: {hosts}, {failed}, {warnings}", report.name);
    text
}

/// Returns the rows of a table with one row for each check of `launch check`, after a row with the
/// column names.
///
/// The columns are the name of a check, the number of hosts by level, and the values that were
/// observed on the first and the last host where the check passed.
fn format_check_rows(hosts: &[HostReport]) -> Vec<Vec<String>> {
    let mut rows = vec![["check", "hosts", "found"].map(str::to_owned).to_vec()];
    let mut names: Vec<&str> = Vec::new();
    for check in hosts.iter().flat_map(|h| &h.checks) {
        if !names.contains(&check.name) {
            names.push(check.name);
        }
    }
    for name in names {
        let checks: Vec<&CheckResult> =
            hosts.iter().filter_map(|host| find_worst_check(host, name)).collect();
        let counts = [
            (CheckLevel::Ok, "ok"),
            (CheckLevel::Warn, "warning"),
            (CheckLevel::Fail, "failed"),
            (CheckLevel::Skipped, "skipped"),
        ];
        let counts = counts.map(|(level, word)| (checks.iter().filter(|c| c.level == level).count(), word));
        let counts: Vec<String> =
            counts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}")).collect();
        let passed = checks.iter().filter(|c| c.level == CheckLevel::Ok && !c.found.is_empty());
        let mut found: Vec<&str> = passed.map(|c| c.found.as_str()).collect();
        found.dedup();
        let found = match found[..] {
            [] => String::new(),
            [one] => one.to_owned(),
            [first, .., last] => format!("{first} … {last}"),
        };
        rows.push(vec![name.to_owned(), counts.join(", "), filter_line(&found)]);
    }
    rows
}

/// Returns the most severe result of the check `name` on a host, where a failure is worse than a
/// warning, or `None` if the host lacks this check.
fn find_worst_check<'h>(host: &'h HostReport, name: &str) -> Option<&'h CheckResult> {
    let severity = |check: &&CheckResult| match check.level {
        CheckLevel::Ok => 0,
        CheckLevel::Skipped => 1,
        CheckLevel::Warn => 2,
        CheckLevel::Fail => 3,
    };
    host.checks.iter().filter(|c| c.name == name).max_by_key(severity)
}

/// Returns the cells of a host in the table of hosts. The row of an unreachable host has only two
/// cells: the name and the failed check.
fn format_host_row(host: &HostReport) -> Vec<String> {
    let failed = host.checks.iter().find(|c| c.level == CheckLevel::Fail && host.inspection.is_none());
    let mut row = vec![host.name.clone(), failed.map_or("yes".to_owned(), |c| format!("no: {}", c.name))];
    let Some(inspection) = &host.inspection else { return row };
    let state = |name: &str| match find_worst_check(host, name) {
        None => "-".to_owned(),
        Some(check) if check.level == CheckLevel::Ok => "ok".to_owned(),
        Some(_) => "see below".to_owned(),
    };
    let devices = match inspection.gpus.gpus.len() {
        0 if inspection.gpus.devices > 0 => format!("{} (no driver)", inspection.gpus.devices),
        0 => describe_accelerators(&inspection.accelerators),
        n if inspection.accelerators.iter().all(|a| a.kind == AcceleratorKind::Cuda) => n.to_string(),
        _ => describe_accelerators(&inspection.accelerators),
    };
    row.extend([
        format!("{} {}", inspection.version, inspection.arch),
        inspection.cpus.to_string(),
        format_bytes(inspection.memory),
        devices,
        host.clock_skew_s.map_or("-".to_owned(), |(skew, _)| format!("{skew:+.2} s")),
        inspection.dirs.last().map_or("-".to_owned(), |d| format_bytes(d.free)),
        state("ports"),
    ]);
    row
}

/// Returns the report of `launch check` as the JSON object that `--json` prints.
pub(super) fn render_json(report: &CheckReport) -> Value {
    let host = |h: &HostReport| {
        json!({
            "host": h.name,
            "clock_skew": h.clock_skew_s.map(|(skew, _)| skew),
            "node": h.inspection,
            "checks": h.checks.iter().map(check_to_json).collect::<Vec<_>>(),
        })
    };
    json!({
        "name": report.name,
        "ok": !report.has_failed(),
        "hosts": report.hosts.iter().map(host).collect::<Vec<_>>(),
        "checks": report.checks.iter().map(check_to_json).collect::<Vec<_>>(),
        "network": report.network,
    })
}

/// Returns a check result as a JSON object for the report of `launch check --json`.
fn check_to_json(check: &CheckResult) -> Value {
    let result = match check.level {
        CheckLevel::Ok => "ok",
        CheckLevel::Warn => "warning",
        CheckLevel::Fail => "failed",
        CheckLevel::Skipped => "skipped",
    };
    json!({
        "check": check.name, "result": result, "found": check.found, "hint": check.help, "code": check.code,
        "fields": check.fields,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use diagnostic::codes::ssh;

    #[test]
    fn every_check_is_in_the_table() {
        let report = |name: &str, checks| HostReport {
            name: name.to_owned(),
            inspection: None,
            clock_skew_s: None,
            checks,
        };
        let good = || vec![CheckResult::ok("dns", ""), CheckResult::ok("driver", "550")];
        let failed =
            CheckResult::failed("dns", ssh::SSH_NAME_UNRESOLVED, "cannot resolve the name", "correct it");
        let bad = vec![failed, CheckResult::skipped("driver")];
        let hosts = vec![report("n1", good()), report("n2", good()), report("n3", bad)];
        let report = CheckReport { name: "job".to_owned(), hosts, checks: Vec::new(), network: None };
        let rows: Vec<String> = format_check_rows(&report.hosts).iter().map(|row| row.join("|")).collect();
        assert_eq!(rows, ["check|hosts|found", "dns|2 ok, 1 failed|", "driver|2 ok, 1 skipped|550"]);
        insta::assert_snapshot!("report", render_text(&report));
        let check = &render_json(&report)["hosts"][2]["checks"][0];
        assert_eq!((&check["hint"], &check["code"]), (&"correct it".into(), &"ssh-name-unresolved".into()));
    }
}
