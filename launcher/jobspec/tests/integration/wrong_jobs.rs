//! Compares the error messages for wrong job files with stored texts. The job is `wrong/NAME.yaml`,
//! and the expected text `wrong/NAME.txt`.
//!
//! `UPDATE_EXPECTED=1 cargo test -p jobspec --test integration wrong_jobs` rewrites the expected
//! texts. A line `#! path=value` in a job is a `--set` argument.
use diagnostic::{Diagnostic, render_all};
use jobspec::{JobSource, load_job};
use std::{fs, path::Path};

/// Loads the job `file`, and renders its errors as the terminal shows them, each preceded by its
/// code and subject. Returns `accepted` if the job has no errors.
fn render_errors(file: &Path) -> String {
    let text = fs::read_to_string(file).expect("case is readable");
    let overrides: Vec<String> =
        text.lines().filter_map(|l| l.strip_prefix("#! ")).map(str::to_owned).collect();
    let source = JobSource::Text { name: "job.yaml".to_owned(), text };
    match load_job(source, &overrides) {
        Ok(_) => "accepted\n".to_owned(),
        Err(errors) => {
            let one = |error: &Diagnostic| {
                let subject = error.subject().map_or_else(String::new, |subject| format!(" {subject}"));
                format!("[{}]{subject}\n{}", error.code(), render_all(std::slice::from_ref(error), false))
            };
            errors.iter().map(one).collect::<Vec<_>>().join("\n")
        }
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
        let explanation = render_errors(&file);
        assert_ne!(explanation, "accepted\n", "{} is not rejected", file.display());
        let expected = file.with_extension("txt");
        if update {
            fs::write(&expected, &explanation).expect("expected text is writable");
        } else if fs::read_to_string(&expected).unwrap_or_default() != explanation {
            differences.push(format!("{}:\n{explanation}", file.display()));
        }
    }
    assert!(cases >= 25, "only {cases} cases");
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
