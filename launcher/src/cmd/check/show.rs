//! What was found, as a table for a person and as one object.
use super::{Check, Checked, HostChecked, Level};
use crate::cmd::plan::{bytes, table};
use serde_json::{Value, json};
use std::fmt::Write;

/// The table, then what is wrong with the next thing to do.
pub(super) fn as_text(checked: &Checked) -> String {
    let mut rows = vec![
        ["host", "reached", "version", "cpus", "memory", "gpus", "clock", "disk", "ports"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(checked.hosts.iter().map(row));
    let mut text = table(&rows);
    let all: Vec<(Option<&str>, &Check)> = checked
        .hosts
        .iter()
        .flat_map(|h| h.checks.iter().map(move |c| (Some(h.name.as_str()), c)))
        .chain(checked.checks.iter().map(|c| (None, c)))
        .collect();
    for (title, level) in [("failed", Level::Fail), ("worth a look", Level::Warn)] {
        let of: Vec<_> = all.iter().filter(|(_, c)| c.level == level).collect();
        if !of.is_empty() {
            // Writing to a String can't fail.
            _ = writeln!(text, "\n{title}:");
        }
        for (host, check) in of {
            // A refusal names its host itself.
            let host = host
                .filter(|h| !check.found.starts_with(&format!("{h}:")))
                .map_or(String::new(), |h| format!("{h}: "));
            _ = writeln!(text, "  {}: {host}{}", check.what, printable(&check.found));
            if let Some(hint) = &check.hint {
                _ = writeln!(text, "    help: {}", printable(hint));
            }
        }
    }
    for check in checked.checks.iter().filter(|c| c.level == Level::Ok) {
        _ = writeln!(text, "\n{}: {}", check.what, printable(&check.found));
    }
    let (fails, warns) = (count(&all, Level::Fail), count(&all, Level::Warn));
    let hosts = checked.hosts.len();
    _ = writeln!(text, "\n{}: {hosts} hosts, {fails} failed checks, {warns} warnings", checked.name);
    text
}

fn count(all: &[(Option<&str>, &Check)], level: Level) -> usize {
    all.iter().filter(|(_, c)| c.level == level).count()
}

fn row(host: &HostChecked) -> Vec<String> {
    let failed = host.checks.iter().find(|c| c.level == Level::Fail && host.look.is_none());
    let mut row = vec![host.name.clone(), failed.map_or("yes".to_owned(), |c| format!("no: {}", c.what))];
    let Some(look) = &host.look else { return row };
    let state = |what: &str| {
        let of: Vec<_> = host.checks.iter().filter(|c| c.what == what).collect();
        match of.iter().all(|c| c.level == Level::Ok) {
            _ if of.is_empty() => "-".to_owned(),
            true => "ok".to_owned(),
            false => "see below".to_owned(),
        }
    };
    let gpus = match look.gpus.gpus.len() {
        0 if look.gpus.devices > 0 => format!("{} (no driver)", look.gpus.devices),
        0 => "none".to_owned(),
        n => n.to_string(),
    };
    row.extend([
        format!("{} {}", look.version, look.arch),
        look.cpus.to_string(),
        bytes(look.memory),
        gpus,
        host.skew.map_or("-".to_owned(), |(skew, _)| format!("{skew:+.2} s")),
        look.dirs.last().map_or("-".to_owned(), |d| bytes(d.free)),
        state("ports"),
    ]);
    row
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Everything.
pub(super) fn as_json(checked: &Checked) -> Value {
    let one = |c: &Check| {
        let level = match c.level {
            Level::Ok => "ok",
            Level::Warn => "warning",
            Level::Fail => "failed",
            Level::Skipped => "skipped",
        };
        json!({"check": c.what, "result": level, "found": c.found, "hint": c.hint})
    };
    let host = |h: &HostChecked| {
        json!({
            "host": h.name,
            "clock_skew": h.skew.map(|(skew, _)| skew),
            "node": h.look,
            "checks": h.checks.iter().map(one).collect::<Vec<_>>(),
        })
    };
    json!({
        "name": checked.name,
        "ok": !checked.failed(),
        "hosts": checked.hosts.iter().map(host).collect::<Vec<_>>(),
        "checks": checked.checks.iter().map(one).collect::<Vec<_>>(),
    })
}
