//! The launcher: the command line, the plan, the controller, the agents.
//!
//! Knows jobs and processes, never tensors: what a `train:` section means is asked of a [`TrainJudge`].
pub mod agent;
mod cli;
mod cmd;
pub mod controller;
pub mod discover;
mod error;
mod link;
pub mod plan;
mod report;
mod secrets;
#[cfg(test)]
mod testing;
mod transport;

use cli::{Asked, Cli, Command};
use contract::judge::TrainJudge;
use error::{Failure, Kind};
use std::ffi::OsString;

/// Does what the command line (the program's name first) asks for; the exit code.
pub fn main(args: impl Iterator<Item = OsString>, judge: &dyn TrainJudge) -> u8 {
    let args: Vec<OsString> = args.collect();
    let typed = args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    let Cli { command, json } = match cli::parse(args.into_iter()) {
        Asked::Command(cli) => cli,
        Asked::Show(text) => return cmd::show(&text),
        Asked::Wrong(line) => return cmd::fail(&Failure::new(Kind::Usage, line)),
    };
    match command {
        Command::Run(args) => cmd::run::run(&args, json, typed, judge),
        Command::Plan(args) => cmd::plan::run(&args, json, judge),
        Command::Ckpt(args) => cmd::ckpt::run(args, json),
        Command::Agent => agent::main(),
    }
}
