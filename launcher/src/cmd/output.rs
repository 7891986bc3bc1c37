//! Prints the results, warnings and errors of commands, and determines their exit codes.
use crate::report::command_output;
use diagnostic::{
    Code, Diagnostic,
    codes::{command, job},
    quantity::format_count,
};
use protocol::event::EventSchema;
use serde_json::{Value, json};
use std::{fmt::Display, io, path::Path};

/// The format in which a command prints its results.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OutputFormat {
    /// Whether the command prints JSON instead of text (`--json`).
    pub(crate) json: bool,
    /// The version of the JSON form in which events are printed (`--json-schema`).
    pub(crate) schema: EventSchema,
}

/// Returns the exit code of a finished command, after printing the error if the command has failed.
pub(crate) fn report_error_of_result(result: diagnostic::Result<u8>, format: OutputFormat) -> u8 {
    result.unwrap_or_else(|error| report_error(&error, format))
}

/// Prints an error as text to stderr and, with `--json` and schema 2, also as one JSON object to
/// stdout. Returns the exit code that belongs to the category of the error.
pub(crate) fn report_error(error: &Diagnostic, format: OutputFormat) -> u8 {
    command_output::write_message(&diagnostic::render(error, command_output::is_color_enabled()));
    if format.json && format.schema == EventSchema::V2 {
        // The exit code reports the error to a program that has closed stdout.
        _ = print_json(&build_error_event(error));
    }
    error.category().exit_code()
}

/// Returns the JSON object that `--json` prints for an error. The object has the members of the
/// diagnostic, `schema` (2) and `event` (`error`).
fn build_error_event(error: &Diagnostic) -> Value {
    let mut event = error.to_json();
    event["schema"] = json!(EventSchema::V2.version_number());
    event["event"] = json!("error");
    event
}

/// Prints warnings as text to stderr, in color if stderr is a terminal.
pub(crate) fn print_warnings(warnings: &[Diagnostic]) {
    command_output::write_message(&diagnostic::render_all(warnings, command_output::is_color_enabled()));
}

/// Writes text to stdout, without unprintable characters, and returns the exit code 0. Fails if the
/// write fails.
pub(crate) fn print_text(text: &str) -> diagnostic::Result<u8> {
    convert_write_result(command_output::write_text(text))
}

/// Writes a value as a line to stdout, without unprintable characters, and returns the exit code 0.
/// Fails if the write fails.
pub(crate) fn print_line(value: impl Display) -> diagnostic::Result<u8> {
    print_text(&format!("{value}\n"))
}

/// Writes a value as one line of JSON to stdout, with escapes for unprintable characters, and
/// returns the exit code 0. Fails if the write fails.
pub(crate) fn print_json(value: &Value) -> diagnostic::Result<u8> {
    convert_write_result(command_output::write_json(&format!("{value}\n")))
}

/// Writes the text of a file to stdout and returns the exit code 0. Only a terminal gets the text
/// without unprintable characters. Fails if the write fails.
pub(crate) fn print_file_text(text: &str) -> diagnostic::Result<u8> {
    convert_write_result(command_output::write_file_text(text))
}

/// Returns the exit code 0 after a successful write to stdout, and the error to report after a
/// failed write.
fn convert_write_result(result: io::Result<()>) -> diagnostic::Result<u8> {
    result.map_err(|error| output_error(&error))?;
    Ok(protocol::exit::DONE)
}

/// Returns the error that a command reports after a failed write to stdout.
pub(crate) fn output_error(error: &io::Error) -> Diagnostic {
    Diagnostic::error(command::OUTPUT_FAILED, "cannot write to standard output").with_cause(error)
}

/// Combines all mistakes in a job file into one error that lists each of them.
pub(crate) fn invalid_job_error(file: &str, mistakes: Vec<Diagnostic>) -> Diagnostic {
    combine_mistakes(job::JOB_INVALID, file, mistakes, "nothing was started")
}

/// Combines all mistakes in a file into one error with the code `code` that lists each mistake.
/// `consequence` is the end of the message.
pub(super) fn combine_mistakes(
    code: Code,
    file: &str,
    mistakes: Vec<Diagnostic>,
    consequence: &str,
) -> Diagnostic {
    let count = format_count(mistakes.len(), "mistake");
    let summary = Diagnostic::error(code, format!("{file} has {count}; {consequence}"))
        .with_subject(file)
        .with_field("mistakes", mistakes.len());
    mistakes.into_iter().fold(summary, Diagnostic::with_detail_diagnostic)
}

/// Returns the error that a command reports if an operation on the file or directory `path` failed.
/// `action` is the operation, such as `cannot read`.
pub(super) fn path_error(code: Code, action: &str, path: &Path, error: &io::Error) -> Diagnostic {
    let path = path.display().to_string();
    Diagnostic::error(code, format!("{action} {path}")).with_subject(path).with_cause(error)
}

/// Prints a warning to stderr that `--json-schema 1` is deprecated and will be removed.
pub(crate) fn print_schema_deprecation() {
    let message = "`--json-schema 1` is deprecated and will be removed in the next release";
    print_warnings(&[Diagnostic::warning(command::JSON_SCHEMA_DEPRECATED, message)
        .with_help("read events of schema 2; docs/events.md lists the renamed fields")]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use diagnostic::codes::run;

    #[test]
    fn an_error_is_one_json_object_with_its_code() {
        let error = Diagnostic::error(run::INTERNAL, "it failed").with_field("seconds", 2);
        let event = build_error_event(&error);
        assert_eq!((&event["schema"], &event["event"]), (&json!(2), &json!("error")));
        assert_eq!((&event["code"], &event["fields"]["seconds"]), (&json!("internal"), &json!(2)));
    }

    #[test]
    fn an_invalid_job_lists_its_mistakes() {
        let mistake = |text: &str| Diagnostic::error(job::JOB_VALUE_TYPE, text);
        let error = invalid_job_error("a.yaml", vec![mistake("one"), mistake("two")]);
        assert_eq!((error.code(), error.detail_diagnostics().len()), (job::JOB_INVALID, 2));
        assert_eq!(error.category().exit_code(), protocol::exit::USAGE);
    }
}
