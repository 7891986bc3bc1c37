//! docs/job.md says what the table of keys says: each key, what it takes and its default; and nothing else.
use contract::job::{Default, KEYS, Support};
use std::{collections::BTreeMap, fs, path::Path};

fn text() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/job.md");
    fs::read_to_string(file).expect("docs/job.md")
}

/// `key → [takes, default, meaning]` of every table row.
fn rows(text: &str) -> BTreeMap<String, Vec<String>> {
    let rows = text.lines().filter(|l| l.starts_with("| `"));
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split(" | ").map(|c| c.trim().to_owned());
        let key = cells.next().expect("a first cell").trim_matches('`').to_owned();
        (key, cells.collect())
    })
    .collect()
}

#[test]
fn the_reference_and_the_decoder_know_the_same_keys() {
    let text = text();
    let mut rows = rows(&text);
    for key in KEYS {
        let default = match key.default {
            Default::Section => {
                assert!(text.contains(&format!("\n## {}\n", key.path)), "no section {}", key.path);
                continue;
            }
            Default::Yaml(yaml) => format!("`{yaml}`"),
            Default::Computed(words) => words.to_owned(),
            Default::Required => "required".to_owned(),
        };
        let row = rows.remove(key.path).unwrap_or_else(|| panic!("docs/job.md has no row for {}", key.path));
        assert_eq!(row.len(), 3, "{}: {row:?}", key.path);
        assert_eq!((row[0].as_str(), row[1].as_str()), (key.takes, default.as_str()), "{}", key.path);
        let later = key.support == Support::Later;
        assert!(!later || row[2].contains("*Not yet"), "{} isn't marked as not yet supported", key.path);
        for alias in key.aliases {
            assert!(
                row[2].contains(&format!("`{alias}`")),
                "{}: its other name {alias} is missing",
                key.path
            );
        }
    }
    assert!(rows.is_empty(), "docs/job.md has keys that aren't known: {:?}", rows.keys());
}

#[test]
fn the_examples_of_the_reference_load() {
    let text = text();
    let mut examples = 0;
    for block in text.split("```yaml\n").skip(1) {
        let job = block.split("```").next().expect("a block").to_owned();
        let source = contract::Source::Text { name: "example.yaml".to_owned(), text: job };
        contract::load(source, &[]).expect("an example loads");
        examples += 1;
    }
    assert!(examples >= 2);
}
