//! `launch report`: writes one HTML file with the page (dashboard) that `launch serve` would show
//! about the selected runs.
use super::{
    context::CommandContext,
    dashboard_runs::create_dashboard,
    output::{path_error, print_json, print_line},
    ps::resolve_run,
};
use crate::{
    private_files::PRIVATE_FILE_MODE,
    runs::{RunFilter, replace_output_file},
};
use clap::Args;
use dashboard::{MAX_REPORT_RUNS, format_report};
use diagnostic::{Diagnostic, codes::command};
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `launch report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Names of runs or their first characters, names of jobs, or run directories; several runs are
    /// compared [default: the only active run, or the newest run if none is active]
    #[arg(value_name = "RUN")]
    runs: Vec<String>,
    /// HTML file to write [default: `report.html` in the run directory of the first run]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs `launch report`: writes the HTML file, and prints its path.
pub(crate) fn run(args: ReportArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let names: Vec<Option<&str>> = match args.runs.is_empty() {
        true => vec![None],
        false => args.runs.iter().map(|name| Some(name.as_str())).collect(),
    };
    if names.len() > MAX_REPORT_RUNS {
        let message = format!("a report shows at most {MAX_REPORT_RUNS} runs, but {} are named", names.len());
        return Err(Diagnostic::error(command::USAGE, message).with_subject("RUN"));
    }
    let runs: Vec<_> =
        names.into_iter().map(|name| resolve_run(name, RunFilter::Any)).collect::<Result<_, _>>()?;
    let file = args.output.unwrap_or_else(|| runs[0].record.run_dir.join("report.html"));
    let file = std::path::absolute(&file).unwrap_or(file);
    let ids: Vec<String> = runs.iter().map(|run| run.record.run.clone()).collect();
    let unreadable = |error: std::io::Error| {
        Diagnostic::error(command::RUN_FILE_UNREADABLE, format!("cannot report on run {}", ids.join(", ")))
            .with_subject(&ids[0])
            .with_cause(&error)
    };
    let html = format_report(&create_dashboard(runs), &ids).map_err(unreadable)?;
    replace_output_file(&file, html.as_bytes(), PRIVATE_FILE_MODE)
        .map_err(|error| path_error(command::OUTPUT_FILE_FAILED, "cannot write", &file, &error))?;
    match context.format.json {
        true => print_json(&json!({ "runs": ids, "file": file, "bytes": html.len() })),
        false => print_line(file.display()),
    }
}
