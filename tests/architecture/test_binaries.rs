//! Checks the rules about integration tests: few binaries, and an environment that does not depend
//! on the user.
use super::{
    repository::{collect_paths, extract_code, list_packages, read_field, read_text, repository_root},
    restrictions::find_violations,
};
use serde_json::Value;
use std::{collections::BTreeMap, fs};

/// The crates whose integration tests are not in a binary called `integration`, each with the names
/// of its test binaries.
const OTHER_BINARIES: [(&str, &[&str]); 2] =
    [("launch", &["end_to_end"]), ("repository-tests", &["architecture", "language"])];
/// The only module of the end-to-end tests that may create the commands that start programs.
const COMMANDS_MODULE: &str = "tests/end_to_end/support/environment.rs";

/// Checks that the integration tests of a crate are one binary, because every binary takes seconds
/// to link.
#[test]
fn the_integration_tests_of_a_crate_are_one_binary() {
    let mut binaries = BTreeMap::new();
    for package in list_packages() {
        let targets = package["targets"].as_array().expect("targets").iter();
        let is_test =
            |target: &&Value| target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"test".into()));
        let mut names: Vec<_> =
            targets.filter(is_test).map(|target| read_field(target, "name").to_owned()).collect();
        names.sort();
        binaries.insert(read_field(&package, "name").to_owned(), names);
    }
    for (name, expected) in OTHER_BINARIES {
        assert_eq!(binaries.remove(name).unwrap_or_default(), expected, "{name}");
    }
    let mut files: Vec<_> = fs::read_dir(repository_root().join("tests")).expect("tests/").collect();
    files.retain(|entry| entry.as_ref().is_ok_and(|e| e.path().extension().is_some_and(|e| e == "rs")));
    assert!(files.is_empty(), "cargo does not run these files: {files:?}");
    binaries.retain(|_, names| !names.is_empty() && *names != ["integration"]);
    assert!(
        binaries.is_empty(),
        "integration tests belong in tests/integration of their crate: {binaries:?}"
    );
}

/// Checks that end-to-end tests create commands with the functions of [`COMMANDS_MODULE`], which
/// keep the user's directories and environment variables out of the tests.
#[test]
fn end_to_end_tests_start_programs_in_isolated_environments() {
    let mut paths = Vec::new();
    collect_paths("tests/end_to_end/", &mut paths);
    paths.retain(|path| path.ends_with(".rs"));
    assert!(paths.iter().any(|path| path == COMMANDS_MODULE), "{paths:?}");
    let mut wrong = Vec::new();
    for path in &paths {
        let code = extract_code(&read_text(&repository_root().join(path)));
        let found = find_violations(&code, &["Command::new", "CARGO_BIN_EXE_launch"]);
        if path == COMMANDS_MODULE {
            assert_eq!(found.len(), 2, "{found:?}");
        } else {
            wrong.extend(found.iter().map(|(line, name)| format!("{path}:{line}: {name}")));
        }
    }
    assert!(wrong.is_empty(), "use {COMMANDS_MODULE} instead:\n{}", wrong.join("\n"));
}
