//! Generates the tables of keys in docs/job.md from the declarations of the keys.
use crate::{
    key_table::{DEPRECATED_NAMES, KEYS},
    keys::key_info::{KeyDefault, KeyInfo, list_section_keys},
};
use std::fmt::Write as _;

/// The largest width of a table row in docs/job.md, in characters.
const MAX_ROW_CHARS: usize = 200;

/// Replaces the tables of keys in `page`, the text of docs/job.md, by tables that are generated
/// from the declarations. A table follows a line `<!-- keys: SECTION -->`, or `<!-- deprecated
/// names -->`.
pub fn update_key_tables(page: &str) -> String {
    let mut updated = String::new();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        _ = writeln!(updated, "{line}");
        let comment = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->"));
        let table = match comment {
            Some("deprecated names") => format_deprecated_names(),
            Some(comment) => match comment.strip_prefix("keys:") {
                Some(section) => format_key_table(section.trim()),
                None => continue,
            },
            None => continue,
        };
        updated.push_str(&table);
        while lines.next_if(|line| line.starts_with('|')).is_some() {}
    }
    updated
}

/// Formats the table in docs/job.md that describes the keys directly within the section `section`
/// of job.yaml.
fn format_key_table(section: &str) -> String {
    let mut table = String::from("| key | type | default | meaning |\n|---|---|---|---|\n");
    for key in list_section_keys(&KEYS, section).filter(|key| key.default != KeyDefault::Section) {
        let default = match key.default {
            KeyDefault::Yaml(yaml) => format!("`{yaml}`"),
            KeyDefault::Computed(words) => words.to_owned(),
            KeyDefault::Required | KeyDefault::Section => "required".to_owned(),
        };
        let row = |more: &str| {
            format!("| `{}` | {} | {default} | {}{more} |\n", key.path, key.accepts, format_key_meaning(key))
        };
        let with_names = row(&format_key_notes(key));
        // A key with long aliases has a paragraph that names them.
        let fits = with_names.trim_end().chars().count() <= MAX_ROW_CHARS;
        table.push_str(&if fits { with_names } else { row("") });
    }
    table
}

/// Converts the documentation of a key to a phrase for a table cell, which has no article and
/// begins with a lower-case letter.
fn format_key_meaning(key: &KeyInfo) -> String {
    let phrase = key.meaning.strip_prefix("The ").unwrap_or(&key.meaning);
    let (word, rest) = phrase.split_once(' ').unwrap_or((phrase, ""));
    // A word with another capital letter, such as `ZeRO`, is a name.
    let is_name = word.chars().skip(1).any(char::is_uppercase);
    if is_name { phrase.to_owned() } else { format!("{} {rest}", word.to_lowercase()).trim_end().to_owned() }
}

/// Formats the notes about a key in docs/job.md: whether the key is reloadable, and its aliases.
fn format_key_notes(key: &KeyInfo) -> String {
    let mut notes = String::new();
    if key.reloadable {
        notes.push_str("; reloadable");
    }
    for alias in key.aliases {
        _ = write!(notes, "; alias `{alias}`");
    }
    notes
}

/// Formats the table in docs/job.md that lists the deprecated names of keys and values.
fn format_deprecated_names() -> String {
    let mut table = String::from("| deprecated key | deprecated value | use instead |\n|---|---|---|\n");
    for name in DEPRECATED_NAMES.iter() {
        let join = |values: Vec<&str>| {
            values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ")
        };
        let (old, new): (Vec<&str>, Vec<&str>) = name.values.iter().copied().unzip();
        let new = if new.is_empty() { String::new() } else { format!(": {}", join(new)) };
        let old = if old.is_empty() { String::new() } else { format!("{} ", join(old)) };
        _ = writeln!(table, "| `{}` | {old}| `{}`{new} |", name.old_path(), name.new_path());
    }
    table
}
