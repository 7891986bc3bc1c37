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
    _ = writeln!(text, "\n{}", table(&summary(&checked.hosts)).trim_end());
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
    let many = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let [hosts, fails, warns] = [many(hosts, "host"), many(fails, "failed check"), many(warns, "warning")];
    _ = writeln!(text, "\n{}: {hosts}, {fails}, {warns}", checked.name);
    text
}

/// Every check that was made: on how many hosts it went how, and what was found there.
fn summary(hosts: &[HostChecked]) -> Vec<Vec<String>> {
    let mut rows = vec![["check", "hosts", "found"].map(str::to_owned).to_vec()];
    let mut names: Vec<&str> = Vec::new();
    for check in hosts.iter().flat_map(|h| &h.checks) {
        if !names.contains(&check.what) {
            names.push(check.what);
        }
    }
    for what in names {
        let of = |host: &HostChecked| {
            let own = host.checks.iter().filter(|c| c.what == what);
            own.max_by_key(|c| {
                [Level::Ok, Level::Skipped, Level::Warn, Level::Fail].iter().position(|l| *l == c.level)
            })
            .cloned()
        };
        let all: Vec<Check> = hosts.iter().filter_map(of).collect();
        let counts = [
            (Level::Ok, "ok"),
            (Level::Warn, "warning"),
            (Level::Fail, "failed"),
            (Level::Skipped, "skipped"),
        ];
        let counts = counts.map(|(level, word)| (all.iter().filter(|c| c.level == level).count(), word));
        let counts: Vec<String> =
            counts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}")).collect();
        let mut found: Vec<&str> = all
            .iter()
            .filter(|c| c.level == Level::Ok && !c.found.is_empty())
            .map(|c| c.found.as_str())
            .collect();
        found.dedup();
        let found = match found[..] {
            [] => String::new(),
            [one] => one.to_owned(),
            [first, .., last] => format!("{first} … {last}"),
        };
        rows.push(vec![what.to_owned(), counts.join(", "), printable(&found)]);
    }
    rows
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_is_in_the_table() {
        let check = |what: &'static str, level, found: &str| Check {
            what,
            level,
            found: found.to_owned(),
            hint: (level == Level::Fail).then(|| "mend it".to_owned()),
        };
        let host = |name: &str, checks| HostChecked { name: name.to_owned(), look: None, skew: None, checks };
        let good = || vec![check("dns", Level::Ok, ""), check("driver", Level::Ok, "550")];
        let bad =
            vec![check("dns", Level::Fail, "n3: it can't be resolved"), check("driver", Level::Skipped, "")];
        let hosts = vec![host("n1", good()), host("n2", good()), host("n3", bad)];
        let checked = Checked { name: "job".to_owned(), hosts, checks: Vec::new() };
        let rows: Vec<String> = summary(&checked.hosts).iter().map(|row| row.join("|")).collect();
        assert_eq!(rows, ["check|hosts|found", "dns|2 ok, 1 failed|", "driver|2 ok, 1 skipped|550"]);
        let text = as_text(&checked);
        for part in [
            "driver  2 ok, 1 skipped  550\n",
            "failed:\n  dns: n3: it can't be resolved\n    help: mend it\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(as_json(&checked)["hosts"][2]["checks"][0]["hint"], "mend it");
    }
}
