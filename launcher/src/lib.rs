//! The launcher: the command line, planning, the controller and the agents.
//!
//! This crate handles jobs and processes, not tensors. The executable passes a [`Preflight`] to
//! [`main`], which checks the `train` section of a job.
pub mod agent;
mod cli;
mod cmd;
mod connection;
pub mod controller;
pub mod discover;
mod import;
mod line_follower;
pub mod plan;
mod report;
mod runs;
mod secrets;
#[cfg(test)]
mod testing;
mod transport;
pub mod untrusted;

use cli::{Cli, LaunchCommand, ParsedArgs};
use cmd::OutputFormat;
use contract::{event::EventSchema, preflight::Preflight};
use std::ffi::OsString;

/// Parses and runs the command line of `launch`. Returns the exit code for the process.
///
/// The first element of `args` is the name of the program. `preflight` checks the `train` section
/// of a job.
pub fn main(args: impl Iterator<Item = OsString>, preflight: &'static dyn Preflight) -> u8 {
    let args: Vec<OsString> = args.collect();
    let command_line = args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    let Cli { command, json, json_schema } = match cli::parse_command_line(args.into_iter()) {
        ParsedArgs::Command(cli) => *cli,
        ParsedArgs::Print(text) => {
            return cmd::report_result(cmd::print_output(&text), OutputFormat::default());
        }
        ParsedArgs::Invalid(error, format) => return cmd::report_error(&error, format),
    };
    let format = OutputFormat { json, schema: json_schema.unwrap_or_default() };
    if json && format.schema == EventSchema::V1 {
        cmd::print_schema_deprecation();
    }
    let result = match command {
        LaunchCommand::Run(args) => return cmd::run::run(&args, format, command_line, preflight),
        LaunchCommand::Agent(args) if args.own_hash => return agent::print_executable_hash(),
        LaunchCommand::Agent(args) => {
            return agent::main(agent::AgentOptions {
                marker: args.marker,
                join: args.join,
                remove_executable: args.remove_own_file,
                preflight,
            });
        }
        LaunchCommand::Ps(args) => cmd::ps::run(&args, json),
        LaunchCommand::Logs(args) => cmd::logs::run(&args),
        LaunchCommand::Events(args) => cmd::events::run(&args, format),
        LaunchCommand::Stop(args) => cmd::stop::run(&args),
        LaunchCommand::Plan(args) => cmd::plan::run(&args, json, preflight),
        LaunchCommand::Check(args) => cmd::check::run(&args, json),
        LaunchCommand::Ckpt(args) => cmd::ckpt::run(args, json),
        LaunchCommand::Import(args) => cmd::import::run(&args, json),
        LaunchCommand::Sbatch(args) => cmd::sbatch::run(&args, json),
        LaunchCommand::Explain(args) => cmd::explain::run(&args, json),
        LaunchCommand::GpuCheck(_) => Err(cli::misplaced_gpu_check_error()),
    };
    cmd::report_result(result, format)
}
