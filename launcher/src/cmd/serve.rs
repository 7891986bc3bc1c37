//! `launch serve`: runs a web server with a page that shows the user's runs, and with the metrics
//! of these runs for Prometheus.
use super::{
    context::CommandContext, dashboard_runs::create_dashboard, output::output_error, ps::resolve_run,
};
use crate::{
    metrics_server::{METRICS_FILE_INTERVAL, METRICS_FILE_MODE},
    report::command_output,
    runs::{RunFilter, replace_output_file},
};
use clap::Args;
use dashboard::{Dashboard, bind, format_metrics_textfile};
use diagnostic::{Diagnostic, codes::command};
use serde_json::json;
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

/// Arguments of `launch serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Run that the page shows at first: name of a run or its first characters, name of a job, or
    /// run directory [default: an active run, or the newest run]
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Port of 127.0.0.1 [default: a free port]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Also write the metrics to this file every 15 s, for the textfile collector of a node
    /// exporter
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
}

/// Runs `launch serve`: prints the address of the page, and serves requests until a signal ends the
/// process.
pub(crate) fn run(args: ServeArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let named = args.run.as_deref().map(|name| resolve_run(Some(name), RunFilter::Any)).transpose()?;
    let fragment = named.as_ref().map(|run| format!("#run={}", run.record.run)).unwrap_or_default();
    let dashboard = create_dashboard(named.into_iter().collect());
    let server = bind(dashboard.clone(), args.port).map_err(|error| serve_error(args.port, &error))?;
    if let Some(file) = args.textfile {
        start_textfile_writer(dashboard, file)?;
    }
    let (page, metrics) = (server.page_url("/") + &fragment, server.page_url("/metrics"));
    let text = match context.format.json {
        true => format!("{}\n", json!({ "address": page, "metrics": metrics })),
        false => format!("{page}\n"),
    };
    // A program that waits for the address gets it at once, also through a pipe.
    command_output::write_filtered_text(&text).map_err(|error| output_error(&error))?;
    if !context.format.json {
        command_output::write_message("the page shows your runs until Ctrl-C ends this command\n");
    }
    server.run().map_err(|error| serve_error(args.port, &error))?;
    Ok(protocol::exit::DONE)
}

/// Creates the error that `launch serve` cannot listen on a port.
fn serve_error(port: u16, error: &io::Error) -> Diagnostic {
    let port_text = if port == 0 { "a free port".to_owned() } else { format!("port {port}") };
    Diagnostic::error(command::SERVE_FAILED, format!("cannot serve on {port_text} of 127.0.0.1"))
        .with_subject("--port")
        .with_field("port", port)
        .with_cause(error)
        .with_help("choose another port, or leave out `--port`")
}

/// Writes the file of Prometheus metrics, and starts a thread that updates the file every
/// [`METRICS_FILE_INTERVAL`]. Fails if the file cannot be written the first time.
fn start_textfile_writer(dashboard: Arc<Dashboard>, file: PathBuf) -> diagnostic::Result<()> {
    let file = std::path::absolute(&file).unwrap_or(file);
    write_textfile(&dashboard, &file).map_err(|error| textfile_error(&file, &error))?;
    thread::spawn(move || {
        let mut is_failing = false;
        loop {
            thread::sleep(METRICS_FILE_INTERVAL);
            let written = write_textfile(&dashboard, &file);
            if let (Err(error), false) = (&written, is_failing) {
                let text =
                    diagnostic::render(&textfile_error(&file, error), command_output::is_color_enabled());
                command_output::write_message(&text);
            }
            is_failing = written.is_err();
        }
    });
    Ok(())
}

/// Writes the metrics of all runs to the file of Prometheus metrics, which is replaced atomically.
fn write_textfile(dashboard: &Dashboard, file: &Path) -> io::Result<()> {
    replace_output_file(file, format_metrics_textfile(dashboard).as_bytes(), METRICS_FILE_MODE)
}

/// Creates the error that the file of Prometheus metrics cannot be written.
fn textfile_error(file: &Path, error: &io::Error) -> Diagnostic {
    super::output::path_error(command::OUTPUT_FILE_FAILED, "cannot write", file, error)
}
