//! The launcher: the command line, the planning of workers, the controller of a run, and the agents
//! (launch's process on each host).
//!
//! This crate handles jobs and processes, not tensors. The executable passes two parts of crate
//! `worker` to [`main`]: a [`Preflight`], which checks the `train` section of a job, and the
//! implementation of `launch gpu-check`.
pub mod agent;
mod background_thread;
mod change_watcher;
mod cli;
mod clock;
mod cluster;
mod cmd;
mod connection;
pub mod controller;
mod core_dumps;
mod detached_controller;
pub mod discover;
mod executable;
mod format;
mod import;
mod leases;
mod line_follower;
mod metrics_server;
mod mlflow;
mod open_file_limit;
pub mod plan;
mod private_files;
mod processes;
mod rendezvous;
mod report;
mod runs;
mod secret_arguments;
mod secrets;
mod supervised_controller;
#[cfg(test)]
mod testing;
pub mod untrusted;
mod usage_metrics;
mod warning_limit;
mod worker_end;

pub use cmd::{
    drop_in::is_other_launcher,
    gpu_check::args::{GpuCheckArgs, GpuCheckFunction},
};

use clap::CommandFactory;
use cli::{Cli, ParsedArgs};
use cmd::{
    context::CommandContext,
    output::{self, OutputFormat},
};
use debuglog::Filter;
use diagnostic::{Diagnostic, codes::command};
use jobspec::{env, hide_secret_arguments};
use nix::sys::signal::{SigHandler, Signal, signal};
use protocol::{event::EventSchema, preflight::Preflight};
use report::command_output;
use std::ffi::OsString;

/// Parses and runs the command line of `launch`. Returns the exit code for the process.
///
/// The first element of `args` is the name of the program. `preflight` checks the `train` section
/// of a job, and `run_gpu_check` implements `launch gpu-check`. No other thread may run.
pub fn main(
    args: impl Iterator<Item = OsString>,
    preflight: &'static dyn Preflight,
    run_gpu_check: GpuCheckFunction,
) -> u8 {
    let args: Vec<OsString> = args.collect();
    let words: Vec<_> = args.iter().map(|argument| argument.to_string_lossy()).collect();
    let command_line = hide_secret_arguments(&words);
    // SAFETY: this process has no other thread yet.
    unsafe { secret_arguments::overwrite_secret_arguments() };
    ignore_file_size_signal();
    let Cli { command, json, verbose, json_schema } = match cli::parse_command_line(args.into_iter()) {
        ParsedArgs::Command(cli) => *cli,
        ParsedArgs::Print(text) => {
            return output::report_error_of_result(output::print_text(&text), OutputFormat::default());
        }
        ParsedArgs::Invalid(error, format) => return output::report_error(&error, format),
    };
    let format = OutputFormat { json, schema: json_schema.unwrap_or_default() };
    if json && format.schema == EventSchema::V1 {
        output::print_schema_deprecation();
    }
    // An agent starts its log when the controller has sent the filter.
    let started = if command.is_agent() { Ok(()) } else { start_debug_log(verbose) };
    if let Err(error) = started {
        return output::report_error(&error, format);
    }
    let _flush = debuglog::FlushOnDrop;
    let context = CommandContext {
        format,
        build_definition: Cli::command,
        verbosity: verbose,
        command_line,
        preflight,
        run_gpu_check,
    };
    output::report_error_of_result(command.run(&context), format)
}

/// Ignores SIGXFSZ, so that a write beyond the limit of file sizes (`ulimit -f`) fails with an
/// error that names the file, instead of ending this process. Workers get the default action.
fn ignore_file_size_signal() {
    // SAFETY: ignoring a signal installs no handler. The call does not fail for this signal.
    _ = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
}

/// Starts the debug log of this process, filtered by the variable `LAUNCH_LOG` or by the number of
/// `-v` options. The log is printed only with `-v`. Fails if the filter is invalid.
fn start_debug_log(verbosity: u8) -> diagnostic::Result<()> {
    let directives = std::env::var(env::LAUNCH_LOG).ok();
    let filter = Filter::from_directives_or_verbosity(directives.as_deref(), verbosity).map_err(|error| {
        Diagnostic::error(command::USAGE, format!("`{}` is invalid: {error}", env::LAUNCH_LOG))
            .with_subject(env::LAUNCH_LOG)
            .with_help("write for example `LAUNCH_LOG=agent=debug,info`")
    })?;
    debuglog::start(&filter, (verbosity > 0).then_some(command_output::write_message));
    Ok(())
}
