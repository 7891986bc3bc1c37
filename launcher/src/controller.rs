//! The controller: one per job, what the person started. Owns the plan and the truth about who runs.
//!
//! `core` decides, `driver` does: agents are started by a transport and spoken to over links, events go to the journal
//! and to the report.
mod cause;
mod core;
mod driver;
mod journal;
mod port;
mod store;

pub(crate) use cause::advice;

use crate::plan::Plan;
pub use crate::secrets::Secrets;

/// How to run a plan.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Events as JSON lines on stdout.
    pub json: bool,
    /// What was typed: written down with the run, and shown as the way to go on.
    pub command: Vec<String>,
    /// For the workers' environment.
    pub secrets: Secrets,
}

/// Runs a plan to its end, whatever happens on the way; the exit code of `launch`.
pub fn run(plan: Plan, options: Options) -> u8 {
    driver::run(plan, options)
}
