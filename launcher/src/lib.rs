//! The launcher: the command line, the plan, the controller, the agents.
//!
//! Knows jobs and processes, never tensors: what a `train:` section means is asked of a [`TrainJudge`].
pub mod agent;
mod cli;
mod cmd;
pub mod controller;
pub mod discover;
mod error;
pub mod untrusted;
mod import;
mod link;
pub mod plan;
mod report;
mod runs;
mod secrets;
mod tail;
#[cfg(test)]
mod testing;
mod transport;

use cli::{Asked, Cli, Command};
use contract::preflight::TrainJudge;
use error::{Failure, Kind};
use std::ffi::OsString;

/// Does what the command line (the program's name first) asks for; the exit code.
pub fn main(args: impl Iterator<Item = OsString>, judge: &'static dyn TrainJudge) -> u8 {
    let args: Vec<OsString> = args.collect();
    let typed = args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    let Cli { command, json } = match cli::parse(args.into_iter()) {
        Asked::Command(cli) => cli,
        Asked::Show(text) => return cmd::show(&text),
        Asked::Wrong(line) => return cmd::fail(&Failure::new(Kind::Usage, line)),
    };
    match command {
        Command::Run(args) => cmd::run::run(&args, json, typed, judge),
        Command::Ps(args) => cmd::ps::run(&args, json),
        Command::Logs(args) => cmd::logs::run(&args),
        Command::Events(args) => cmd::events::run(&args, json),
        Command::Stop(args) => cmd::stop::run(&args),
        Command::Plan(args) => cmd::plan::run(&args, json, judge),
        Command::Check(args) => cmd::check::run(&args, json),
        Command::Ckpt(args) => cmd::ckpt::run(args, json),
        Command::Import(args) => cmd::import::run(&args, json),
        Command::Sbatch(args) => cmd::sbatch::run(&args, json),
        Command::Agent(args) if args.own_hash => agent::print_own_hash(),
        Command::Agent(args) => agent::main(agent::Started {
            marker: args.marker,
            join: args.join,
            remove_own_file: args.remove_own_file,
            judge,
        }),
    }
}
