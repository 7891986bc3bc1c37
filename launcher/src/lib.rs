//! The launcher: the command line, planning, the controller and the agents.
//!
//! This crate handles jobs and processes, not tensors. What a `train` section needs
//! is determined by a [`Preflight`], which the executable passes in.
pub mod agent;
mod cli;
mod cmd;
mod connection;
pub mod controller;
pub mod discover;
mod import;
pub mod plan;
mod report;
mod runs;
mod secrets;
mod tail;
#[cfg(test)]
mod testing;
mod transport;
pub mod untrusted;

use cli::{Cli, Command, ParsedArgs};
use cmd::OutputFormat;
use contract::{event::EventSchema, preflight::Preflight};
use std::ffi::OsString;

/// Runs the command that the arguments name (the first is the program's name) and returns the exit
/// code of the process.
pub fn main(args: impl Iterator<Item = OsString>, preflight: &'static dyn Preflight) -> u8 {
    let args: Vec<OsString> = args.collect();
    let command_line = args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    let Cli { command, json, json_schema } = match cli::parse(args.into_iter()) {
        ParsedArgs::Command(cli) => *cli,
        ParsedArgs::Print(text) => return cmd::exit_code(cmd::print(&text), OutputFormat::default()),
        ParsedArgs::Invalid(error, format) => return cmd::report_error(&error, format),
    };
    let format = OutputFormat { json, schema: json_schema.unwrap_or_default() };
    if json && format.schema == EventSchema::V1 {
        cmd::warn_deprecated_schema();
    }
    let result = match command {
        Command::Run(args) => return cmd::run::run(&args, format, command_line, preflight),
        Command::Agent(args) if args.own_hash => return agent::print_executable_hash(),
        Command::Agent(args) => {
            return agent::main(agent::AgentOptions {
                marker: args.marker,
                join: args.join,
                remove_executable: args.remove_own_file,
                preflight,
            });
        }
        Command::Ps(args) => cmd::ps::run(&args, json),
        Command::Logs(args) => cmd::logs::run(&args),
        Command::Events(args) => cmd::events::run(&args, format),
        Command::Stop(args) => cmd::stop::run(&args),
        Command::Plan(args) => cmd::plan::run(&args, json, preflight),
        Command::Check(args) => cmd::check::run(&args, json),
        Command::Ckpt(args) => cmd::ckpt::run(args, json),
        Command::Import(args) => cmd::import::run(&args, json),
        Command::Sbatch(args) => cmd::sbatch::run(&args, json),
        Command::Explain(args) => cmd::explain::run(&args, json),
        Command::GpuCheck(_) => Err(cli::misplaced_gpu_check()),
    };
    cmd::exit_code(result, format)
}
