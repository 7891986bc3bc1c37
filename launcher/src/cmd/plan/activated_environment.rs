//! Formats which environment variables the activation of environments (`run.activate`), such as
//! Conda's, changes on this machine, for `launch plan --verbose`.
use crate::{agent::environment_changes::EnvironmentChanges, secrets::redact_secret_value};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fmt::Write,
};

/// Formats the changes of environment variables as text, with one line for each variable: `+`
/// before an added one, `~` before a changed one, and `-` before a removed one. Secret values are
/// redacted.
pub(super) fn format_env_changes(changes: &EnvironmentChanges, host: &str) -> String {
    let mut text = format!("\nchanges of the environment by run.activate on {host}:\n");
    for (mark, variables) in [('+', &changes.added), ('~', &changes.changed)] {
        for (name, value) in variables {
            _ = writeln!(
                text,
                "  {mark} {}={}",
                replace_control_characters(&to_printable_text(name)),
                replace_control_characters(&redact_if_secret(name, value))
            );
        }
    }
    for name in &changes.removed {
        _ = writeln!(text, "  - {}", replace_control_characters(&to_printable_text(name)));
    }
    text
}

/// Returns the environment variables that the activation of environments (`run.activate`) adds,
/// changes or removes, as a JSON object. Secret values are redacted.
pub(super) fn env_changes_to_json(changes: &EnvironmentChanges) -> Value {
    let object = |variables: &BTreeMap<OsString, OsString>| -> Map<String, Value> {
        variables
            .iter()
            .map(|(name, value)| (to_printable_text(name), redact_if_secret(name, value).into()))
            .collect()
    };
    let removed: Vec<String> = changes.removed.iter().map(|name| to_printable_text(name)).collect();
    json!({"added": object(&changes.added), "changed": object(&changes.changed), "removed": removed})
}

/// Returns the name or value of an environment variable as printable text.
fn to_printable_text(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}

/// Replaces the control characters in `text`, so that the text fits into one line.
fn replace_control_characters(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

/// Returns the value of the environment variable `name`, or a placeholder if the name looks secret.
fn redact_if_secret(name: &OsStr, value: &OsStr) -> String {
    redact_secret_value(&to_printable_text(name), &to_printable_text(value)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_shown_without_secrets() {
        let map = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect()
        };
        let changes = EnvironmentChanges {
            added: map(&[("HF_TOKEN", "hf_123"), ("LINES", "a\nb")]),
            changed: map(&[("PATH", "/env/bin:/bin")]),
            removed: vec!["OLD".into()],
        };
        let expected = "\nchanges of the environment by run.activate on h1:\n  + HF_TOKEN=***\n  + LINES=a\u{fffd}b\n  \
                        ~ PATH=/env/bin:/bin\n  - OLD\n";
        assert_eq!(format_env_changes(&changes, "h1"), expected);
        let json = env_changes_to_json(&changes);
        assert_eq!(json["added"]["HF_TOKEN"], "***");
        assert_eq!((&json["changed"]["PATH"], &json["removed"]), (&json!("/env/bin:/bin"), &json!(["OLD"])));
    }
}
