//! Tests of diagnostics and of the tables of codes.
use super::*;
use std::{collections::BTreeSet, fs, path::Path};

#[test]
fn rendered_text_shows_message_causes_and_help() {
    let cause = std::io::Error::other("disk is full");
    let diagnostic = Diagnostic::error(codes::run::INTERNAL, "cannot create the run directory")
        .with_cause(&cause)
        .with_help("free some space");
    assert_eq!(
        render(&diagnostic, false),
        "error[internal]: cannot create the run directory\n  caused by: disk is full\n  help: free some space\n"
    );
    assert_eq!(diagnostic.to_string(), "cannot create the run directory; disk is full");
}

#[test]
fn a_summary_lists_its_details_first() {
    let detail = |message: &str| {
        Diagnostic::error(codes::job::JOB_INVALID, message)
            .with_location(Location::File { file: "a.yaml".into() })
    };
    let summary = Diagnostic::error(codes::job::JOB_INVALID, "a.yaml has 2 mistakes")
        .with_detail_diagnostic(detail("one"))
        .with_detail_diagnostic(detail("two"));
    insta::assert_snapshot!(render(&summary, false));
    assert_eq!(summary.to_string(), "a.yaml: one; a.yaml: two");
    assert_eq!(summary.category().exit_code(), 2);
}

#[test]
fn an_argument_of_the_command_line_is_shown_without_a_position() {
    let location = Location::Argument { text: "--workers 64".into() };
    let diagnostic = Diagnostic::warning(codes::host::CPU_OVERSUBSCRIBED, "64 workers share 2 CPU cores")
        .with_location(location)
        .with_help("use fewer workers");
    insta::assert_snapshot!(render(&diagnostic, false));
    assert_eq!(diagnostic.to_string(), "--workers 64: 64 workers share 2 CPU cores");
    assert_eq!(diagnostic.to_json()["location"], serde_json::json!({"file": "--workers 64"}));
}

#[test]
fn the_json_form_has_code_fields_and_details() {
    let diagnostic = Diagnostic::warning(codes::run::INTERNAL, "late")
        .with_subject("rank 3")
        .with_field("seconds", 2)
        .with_detail_diagnostic(Diagnostic::error(codes::job::JOB_INVALID, "x"));
    let json = diagnostic.to_json();
    assert_eq!(json["code"], "internal");
    assert_eq!(json["severity"], "warning");
    assert_eq!(json["fields"]["seconds"], 2);
    assert_eq!(json["details"][0]["code"], "job-invalid");
    let again: Diagnostic =
        serde_json::from_str(&serde_json::to_string(&diagnostic).expect("writes")).expect("reads");
    assert_eq!(again, diagnostic);
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let diagnostic = Diagnostic::error(codes::run::INTERNAL, "a\x1b[2Jb");
    assert_eq!(render(&diagnostic, false), "error[internal]: a\u{fffd}[2Jb\n");
}

#[test]
fn codes_are_unique_and_explained() {
    let mut names = BTreeSet::new();
    for code in codes::all_codes() {
        let info = code.info();
        let kebab = info.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        assert!(kebab, "{} is not in kebab-case", info.name);
        assert!(names.insert(info.name), "{} is declared twice", info.name);
        for text in [info.summary, info.cause, info.remedy] {
            assert!(text.ends_with('.') && text.len() > 10, "{}: `{text}` is not a sentence", info.name);
        }
    }
}

/// Checks that docs/errors.md contains exactly the text that [`render_code_reference`] returns.
/// `LAUNCH_UPDATE_DOCS=1` rewrites the file first.
#[test]
fn the_error_reference_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/errors.md");
    if std::env::var_os("LAUNCH_UPDATE_DOCS").is_some() {
        fs::write(&path, render_code_reference()).expect("docs/errors.md is writable");
    }
    let text = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        text == render_code_reference(),
        "docs/errors.md is out of date: LAUNCH_UPDATE_DOCS=1 cargo test -p diagnostic"
    );
}
