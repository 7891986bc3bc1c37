//! Checks that a standard JSON Schema validator reports the errors of `launch plan`, where a schema
//! can express them.
//!
//! `job_schema/broken_jobs.json` contains the jobs, in JSON, which is also YAML, and their errors.
use crate::support::{
    self,
    environment::{create_test_directory, isolated_command, launch_command},
};
use serde_json::Value;
use std::{fs, path::Path};

/// A mistake in a job: the path of the wrong value, and the kind of mistake.
type Mistake = (String, String);

/// A job, and the mistakes that `launch plan` reports.
struct BrokenJob {
    job: Value,
    errors: Vec<Mistake>,
}

fn load_broken_jobs() -> Vec<BrokenJob> {
    let jobs: Vec<Value> =
        serde_json::from_str(include_str!("job_schema/broken_jobs.json")).expect("broken jobs");
    let to_broken_job = |case: &Value| BrokenJob {
        job: case["job"].clone(),
        errors: serde_json::from_value(case["errors"].clone()).expect("paths and kinds"),
    };
    let jobs: Vec<BrokenJob> = jobs.iter().map(to_broken_job).collect();
    assert!(jobs.len() >= 30, "only {} jobs", jobs.len());
    jobs
}

/// Returns the kind of mistake for which `launch plan` reports the diagnostic code `code`.
fn classify_code(code: &str) -> &'static str {
    match code {
        "job-key-unknown" => "unknown key",
        "job-key-required" | "job-nothing-to-run" => "missing",
        "job-key-has-no-effect" | "job-keys-conflict" => "conflict",
        _ => "wrong value",
    }
}

#[test]
fn launch_reports_the_mistakes_of_broken_jobs() {
    let directory = create_test_directory();
    for BrokenJob { job, errors } in load_broken_jobs() {
        fs::write(directory.path().join("job.yaml"), job.to_string()).expect("a job");
        let output = launch_command(directory.path(), &["plan", "job.yaml", "--json"])
            .output()
            .expect("launch starts");
        let (_, error) = support::parse_rejection(&output);
        let details = support::expand_details(&error).into_iter();
        let mut found: Vec<Mistake> = details
            .map(|error| {
                let subject = error["subject"].as_str().unwrap_or_default();
                (subject.to_owned(), classify_code(error["code"].as_str().expect("a code")).to_owned())
            })
            .collect();
        let mut expected = errors;
        found.sort();
        expected.sort();
        let is_same = found.len() == expected.len()
            && found.iter().zip(&expected).all(|(found, expected)| is_same_mistake(expected, found));
        assert!(is_same, "{job}:\nexpected {expected:?}\nfound    {found:?}");
    }
}

/// Returns whether a validator's mistake is the expected one: a mistake of the same kind in the
/// value or within it. A validator reports a missing or contradictory key also at its section.
fn is_same_mistake(expected: &Mistake, found: &Mistake) -> bool {
    let is_within = |inner: &str, outer: &str| {
        outer.is_empty()
            || inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let reported_at_section = ["missing", "conflict"].contains(&expected.1.as_str());
    expected.1 == found.1
        && (is_within(&found.0, &expected.0) || reported_at_section && is_within(&expected.0, &found.0))
}

#[test]
fn a_schema_validator_reports_the_same_mistakes_as_launch() {
    let Some(python) =
        support::find_schema_python_or_skip("a_schema_validator_reports_the_same_mistakes_as_launch")
    else {
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = create_test_directory();
    let jobs = load_broken_jobs();
    let file = directory.path().join("jobs.json");
    let only_jobs = Value::from(jobs.iter().map(|broken| broken.job.clone()).collect::<Vec<_>>());
    fs::write(&file, only_jobs.to_string()).expect("jobs");
    let output = isolated_command(python, directory.path())
        .arg(root.join("scripts/oracle/validate_jobs.py"))
        .arg(root.join("docs/job.schema.json"))
        .arg(&file)
        .output()
        .expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Vec<Vec<Mistake>> = serde_json::from_slice(&output.stdout).expect("mistakes");
    assert_eq!(found.len(), jobs.len());
    for (BrokenJob { job, errors }, found) in jobs.iter().zip(found) {
        let every_error = errors.iter().all(|error| found.iter().any(|found| is_same_mistake(error, found)));
        let nothing_else = found.iter().all(|found| errors.iter().any(|error| is_same_mistake(error, found)));
        assert!(every_error && nothing_else, "{job}:\nexpected {errors:?}\nfound    {found:?}");
    }
}
