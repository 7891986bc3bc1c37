//! Checks that docs/job.md and docs/job.schema.json agree with the declarations of the keys.
//!
//! `LAUNCH_UPDATE_DOCS=1 cargo test -p jobspec --test integration docs` rewrites both files.
use jobspec::{JobSource, KEYS, KeyDefault, build_schema, load_job, update_key_tables};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The largest width of a table row and of a line of prose in docs/job.md, in characters.
const MAX_ROW: usize = 200;
const MAX_LINE: usize = 100;

fn find_document(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

fn read_reference() -> String {
    fs::read_to_string(find_document("job.md")).expect("docs/job.md")
}

/// Splits `text`, a Markdown document, into its sections. Returns the heading and the text of each
/// section.
fn split_sections(text: &str) -> Vec<(&str, &str)> {
    let sections = text.split("\n## ").skip(1);
    sections.map(|section| section.split_once('\n').expect("a heading and a body")).collect()
}

/// Checks that the file `name` in docs/ has the content `expected`, or rewrites the file if
/// `LAUNCH_UPDATE_DOCS` is set.
fn assert_current(name: &str, expected: &str) {
    let file = find_document(name);
    if std::env::var_os("LAUNCH_UPDATE_DOCS").is_some() {
        fs::write(&file, expected).expect("the document is writable");
    }
    let current = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        current == expected,
        "docs/{name} is out of date: LAUNCH_UPDATE_DOCS=1 cargo test -p jobspec --test integration docs"
    );
}

#[test]
fn the_reference_is_current() {
    assert_current("job.md", &update_key_tables(&read_reference()));
}

#[test]
fn the_schema_is_current() {
    let schema = serde_json::to_string_pretty(&build_schema()).expect("JSON");
    assert_current("job.schema.json", &format!("{schema}\n"));
}

#[test]
fn the_reference_documents_every_key() {
    let text = read_reference();
    let sections = split_sections(&text);
    for key in KEYS.iter() {
        let (section, _) = key.split_path();
        let heading = match key.default {
            KeyDefault::Section => &key.path,
            _ if section.is_empty() => "name",
            _ => section,
        };
        let body = sections.iter().find(|(of, _)| of.trim_matches('`') == heading).map(|(_, body)| *body);
        let body = body.unwrap_or_else(|| panic!("docs/job.md has no section {heading}"));
        if key.default != KeyDefault::Section {
            assert!(body.contains(&format!("\n| `{}` |", key.path)), "{}: no row", key.path);
        }
        for alias in key.aliases {
            assert!(body.contains(&format!("`{alias}`")), "{}: no alias {alias}", key.path);
        }
    }
}

/// Checks that each third-level heading that names a key is in the section of this key.
#[test]
fn key_paragraphs_name_keys_of_their_section() {
    let text = read_reference();
    for (heading, body) in split_sections(&text) {
        for name in body.lines().filter_map(|l| l.strip_prefix("### `")).filter_map(|l| l.strip_suffix('`')) {
            let path = format!("{heading}.{name}");
            assert!(KEYS.iter().any(|key| key.path == path), "{path} is not a key");
        }
    }
}

#[test]
fn lines_and_rows_of_the_reference_fit() {
    for (i, line) in read_reference().lines().enumerate() {
        let max = if line.starts_with('|') { MAX_ROW } else { MAX_LINE };
        let width = line.chars().count();
        assert!(width <= max, "docs/job.md:{}: {width} characters", i + 1);
    }
}

#[test]
fn the_examples_of_the_reference_load_without_warnings() {
    let text = read_reference();
    let mut examples = 0;
    for block in text.split("```yaml\n").skip(1) {
        let job = block.split("```").next().expect("a block").to_owned();
        let source = JobSource::Text { name: "example.yaml".to_owned(), text: job.clone() };
        let (.., warnings) = load_job(source, &[]).expect("an example loads");
        assert!(warnings.is_empty(), "{job}: {warnings:?}");
        examples += 1;
    }
    assert!(examples >= 2);
}
