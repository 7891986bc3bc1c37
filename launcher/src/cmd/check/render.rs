//! Output of `launch check`: text and JSON.
use super::{Check, CheckLevel, CheckReport, HostReport};
use crate::cmd::plan::{bytes, table};
use serde_json::{Value, json};
use std::fmt::Write;

/// A table of hosts, a table of checks, then every failure and warning with what to do.
pub(super) fn as_text(report: &CheckReport) -> String {
    let mut rows = vec![
        ["host", "reached", "version", "cpus", "memory", "gpus", "clock", "disk", "ports"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(report.hosts.iter().map(host_row));
    let mut text = table(&rows);
    // Writing to a String does not fail.
    _ = writeln!(text, "\n{}", table(&summary_rows(&report.hosts)).trim_end());
    let checks: Vec<(Option<&str>, &Check)> = report
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
            _ = writeln!(text, "  {}: {host}{}", check.name, printable(&check.found));
            if let Some(help) = &check.help {
                _ = writeln!(text, "    help: {}", printable(help));
            }
        }
    }
    for check in report.checks.iter().filter(|c| c.level == CheckLevel::Ok) {
        _ = writeln!(text, "\n{}: {}", check.name, printable(&check.found));
    }
    let count = |level| checks.iter().filter(|(_, c)| c.level == level).count();
    let plural = |n: usize, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
    let hosts = plural(report.hosts.len(), "host");
    let failed = plural(count(CheckLevel::Fail), "failed check");
    let warnings = plural(count(CheckLevel::Warn), "warning");
    _ = writeln!(text, "\n{}: {hosts}, {failed}, {warnings}", report.name);
    text
}

/// A row for every check: how it ended on how many hosts, and what was found.
fn summary_rows(hosts: &[HostReport]) -> Vec<Vec<String>> {
    let mut rows = vec![["check", "hosts", "found"].map(str::to_owned).to_vec()];
    let mut names: Vec<&str> = Vec::new();
    for check in hosts.iter().flat_map(|h| &h.checks) {
        if !names.contains(&check.name) {
            names.push(check.name);
        }
    }
    for name in names {
        let checks: Vec<&Check> = hosts.iter().filter_map(|host| worst_check(host, name)).collect();
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
        rows.push(vec![name.to_owned(), counts.join(", "), printable(&found)]);
    }
    rows
}

/// The check of this name that ended worst on a host.
fn worst_check<'h>(host: &'h HostReport, name: &str) -> Option<&'h Check> {
    let severity = |check: &&Check| match check.level {
        CheckLevel::Ok => 0,
        CheckLevel::Skipped => 1,
        CheckLevel::Warn => 2,
        CheckLevel::Fail => 3,
    };
    host.checks.iter().filter(|c| c.name == name).max_by_key(severity)
}

fn host_row(host: &HostReport) -> Vec<String> {
    let failed = host.checks.iter().find(|c| c.level == CheckLevel::Fail && host.inspection.is_none());
    let mut row = vec![host.name.clone(), failed.map_or("yes".to_owned(), |c| format!("no: {}", c.name))];
    let Some(inspection) = &host.inspection else { return row };
    let state = |name: &str| match worst_check(host, name) {
        None => "-".to_owned(),
        Some(check) if check.level == CheckLevel::Ok => "ok".to_owned(),
        Some(_) => "see below".to_owned(),
    };
    let gpus = match inspection.gpus.gpus.len() {
        0 if inspection.gpus.devices > 0 => format!("{} (no driver)", inspection.gpus.devices),
        0 => "none".to_owned(),
        n => n.to_string(),
    };
    row.extend([
        format!("{} {}", inspection.version, inspection.arch),
        inspection.cpus.to_string(),
        bytes(inspection.memory),
        gpus,
        host.clock_skew_s.map_or("-".to_owned(), |(skew, _)| format!("{skew:+.2} s")),
        inspection.dirs.last().map_or("-".to_owned(), |d| bytes(d.free)),
        state("ports"),
    ]);
    row
}

/// A text without control characters, which could control the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The report as a JSON object.
pub(super) fn as_json(report: &CheckReport) -> Value {
    let host = |h: &HostReport| {
        json!({
            "host": h.name,
            "clock_skew": h.clock_skew_s.map(|(skew, _)| skew),
            "node": h.inspection,
            "checks": h.checks.iter().map(check_json).collect::<Vec<_>>(),
        })
    };
    json!({
        "name": report.name,
        "ok": !report.has_failed(),
        "hosts": report.hosts.iter().map(host).collect::<Vec<_>>(),
        "checks": report.checks.iter().map(check_json).collect::<Vec<_>>(),
    })
}

fn check_json(check: &Check) -> Value {
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
    use diagnostic::codes::host;

    #[test]
    fn every_check_is_in_the_table() {
        let report = |name: &str, checks| HostReport {
            name: name.to_owned(),
            inspection: None,
            clock_skew_s: None,
            checks,
        };
        let good = || vec![Check::ok("dns", ""), Check::ok("driver", "550")];
        let failed = Check::failed("dns", host::SSH_NAME_UNRESOLVED, "cannot resolve the name", "correct it");
        let bad = vec![failed, Check::skipped("driver")];
        let hosts = vec![report("n1", good()), report("n2", good()), report("n3", bad)];
        let report = CheckReport { name: "job".to_owned(), hosts, checks: Vec::new() };
        let rows: Vec<String> = summary_rows(&report.hosts).iter().map(|row| row.join("|")).collect();
        assert_eq!(rows, ["check|hosts|found", "dns|2 ok, 1 failed|", "driver|2 ok, 1 skipped|550"]);
        insta::assert_snapshot!("report", as_text(&report));
        let check = &as_json(&report)["hosts"][2]["checks"][0];
        assert_eq!((&check["hint"], &check["code"]), (&"correct it".into(), &"ssh-name-unresolved".into()));
    }
}
