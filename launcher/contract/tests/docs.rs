//! Checks that docs/job.md documents exactly the keys of the table of keys, with their accepted
//! values and defaults.
use contract::job::{DEPRECATED, KEYS, KeyDefault};
use std::{collections::BTreeMap, fs, path::Path};

/// The largest width of a table row and of a line of prose in docs/job.md, in characters.
const MAX_ROW: usize = 200;
const MAX_LINE: usize = 100;

fn read_reference() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/job.md");
    fs::read_to_string(file).expect("docs/job.md")
}

/// Splits the document into its sections. Returns the text of each section by its second-level
/// heading.
fn split_sections(text: &str) -> BTreeMap<&str, &str> {
    text.split("\n## ")
        .skip(1)
        .map(|section| section.split_once('\n').expect("a heading and a body"))
        .map(|(heading, body)| (heading.trim_matches('`'), body))
        .collect()
}

/// Parses the table rows of a section. Returns, for each key: the accepted values, the default and
/// the meaning.
fn parse_rows(section: &str) -> BTreeMap<String, Vec<String>> {
    let rows = section.lines().filter(|l| l.starts_with("| `"));
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split(" | ").map(|c| c.trim().to_owned());
        let key = cells.next().expect("a first cell").trim_matches('`').to_owned();
        (key, cells.collect())
    })
    .collect()
}

#[test]
fn the_reference_documents_the_table_of_keys() {
    let text = read_reference();
    let sections = split_sections(&text);
    let mut rows_by_section: BTreeMap<&str, BTreeMap<String, Vec<String>>> =
        sections.iter().map(|(heading, body)| (*heading, parse_rows(body))).collect();
    for key in KEYS {
        let default = match key.default {
            KeyDefault::Section => {
                assert!(sections.contains_key(key.path), "docs/job.md has no section {}", key.path);
                continue;
            }
            KeyDefault::Yaml(yaml) => format!("`{yaml}`"),
            KeyDefault::Computed(words) => words.to_owned(),
        };
        let section = key.path.rsplit_once('.').map_or("name", |(section, _)| section);
        let rows = rows_by_section.get_mut(section).unwrap_or_else(|| panic!("no section {section}"));
        let row = rows.remove(key.path).unwrap_or_else(|| panic!("docs/job.md has no row for {}", key.path));
        assert_eq!(row.len(), 3, "{}: {row:?}", key.path);
        assert_eq!((row[0].as_str(), row[1].as_str()), (key.accepts, default.as_str()), "{}", key.path);
        for alias in key.aliases {
            assert!(sections[section].contains(&format!("`{alias}`")), "{}: no alias {alias}", key.path);
        }
    }
    let deprecated = rows_by_section.remove("Deprecated names").unwrap_or_default();
    assert_eq!(deprecated.len(), DEPRECATED.len(), "docs/job.md, deprecated names");
    for name in DEPRECATED {
        let row = &deprecated[&name.old_path()];
        assert!(row.join(" ").contains(&format!("`{}`", name.new_path())), "{}: {row:?}", name.old_path());
    }
    rows_by_section.retain(|_, rows| !rows.is_empty());
    assert!(rows_by_section.is_empty(), "docs/job.md documents unknown keys: {rows_by_section:?}");
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
        let source = contract::JobSource::Text { name: "example.yaml".to_owned(), text: job.clone() };
        let (.., warnings) = contract::load_job(source, &[]).expect("an example loads");
        assert!(warnings.is_empty(), "{job}: {warnings:?}");
        examples += 1;
    }
    assert!(examples >= 2);
}
