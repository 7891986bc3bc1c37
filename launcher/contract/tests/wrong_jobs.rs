//! Wrong jobs and what is said about them: `wrong/*.yaml` and the expected text beside each.
//!
//! `UPDATE_EXPECTED=1 cargo test -p contract --test wrong_jobs` rewrites the texts. A line `#! path=value` is a `--set`.
use contract::{Source, load, problem};
use std::{fs, path::Path};

/// What a person sees.
fn said(file: &Path) -> String {
    let text = fs::read_to_string(file).expect("case is readable");
    let overrides: Vec<String> =
        text.lines().filter_map(|l| l.strip_prefix("#! ")).map(str::to_owned).collect();
    let source = Source::Text { name: "job.yaml".to_owned(), text };
    match load(source, &overrides) {
        Ok(_) => "accepted\n".to_owned(),
        Err(problems) => problem::render(&problems, problem::Severity::Error, false),
    }
}

#[test]
fn each_wrong_job_is_explained() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wrong");
    let update = std::env::var_os("UPDATE_EXPECTED").is_some();
    let mut cases = 0;
    let mut differences = Vec::new();
    for entry in fs::read_dir(directory).expect("cases exist") {
        let file = entry.expect("case").path();
        if file.extension().is_none_or(|e| e != "yaml") {
            continue;
        }
        cases += 1;
        let said = said(&file);
        assert_ne!(said, "accepted\n", "{} is not refused", file.display());
        let expected = file.with_extension("txt");
        if update {
            fs::write(&expected, &said).expect("expected text is writable");
        } else if fs::read_to_string(&expected).unwrap_or_default() != said {
            differences.push(format!("{}:\n{said}", file.display()));
        }
    }
    assert!(cases >= 25, "only {cases} cases");
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
