//! The controller: one per job, what the person started. Owns the plan and the truth about who runs.
//!
//! `core` decides, `driver` does: agents are started by a transport and spoken to over links, events go to the journal
//! and to the report. `prepare` makes each start's plan and has its rendezvous bound.
mod cause;
mod copies;
mod core;
mod driver;
mod hostfile;
mod introduce;
mod job_file;
mod journal;
mod policy;
mod port;
mod prepare;
mod requeue;
mod signals;
mod store;
mod tensorboard;
mod watch;

pub(crate) use cause::advice;
pub(crate) use core::Other;
pub(crate) use journal::write_whole;
pub(crate) use port::Rendezvous;
pub(crate) use store::Server;
pub(crate) use store::hostile::serve as hostile_store;

use crate::{
    discover::{Facts, hosts::ClusterHost},
    error::Failure,
    plan::Plan,
    transport::Transport,
};
use contract::{hosts::Slots, job::JobSpec};

pub use crate::secrets::Secrets;
pub use crate::transport::detached::Starter;
pub use hostfile::HostFile;
pub use job_file::JobFile;
pub use requeue::Requeue;

/// A host of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTarget {
    /// As the job names it, and as its transport finds it.
    pub name: String,
    /// Workers that it was promised to have room for.
    pub slots: Option<u32>,
    /// The numbers of those slots, where a filter picked them.
    pub picked: Option<Vec<u32>>,
    /// It is this machine.
    pub local: bool,
}

impl HostTarget {
    /// A host that the job names, reached from here.
    pub(crate) fn elsewhere(host: &ClusterHost) -> HostTarget {
        let picked = if let Slots::These(list) = &host.slots { Some(list.clone()) } else { None };
        HostTarget { name: host.host.name(), slots: host.slots.count(), picked, local: false }
    }
}

/// What to run where.
pub(crate) struct Request {
    pub(crate) job: JobSpec,
    /// Made with what was promised; each start's own plan is made with what its agents find.
    pub(crate) plan: Plan,
    /// In the order of ranks.
    pub(crate) hosts: Vec<HostTarget>,
    /// How agents get running on them.
    pub(crate) transport: Box<dyn Transport>,
    /// Of this machine; its user's choices are the job's.
    pub(crate) here: Facts,
    /// Makes what a program resumes from fit a start's plan, and tells its workers.
    pub(crate) fit: Fit,
}

/// See [`Request::fit`].
pub(crate) type Fit = fn(&JobSpec, &mut Plan) -> Result<(), Failure>;

/// How to run it.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Events as JSON lines on stdout.
    pub json: bool,
    /// What was typed: written down with the run, and shown as the way to go on.
    pub command: Vec<String>,
    /// For the workers' environment.
    pub secrets: Secrets,
    /// In a batch job that shall be queued again.
    pub requeue: Option<Requeue>,
    /// Told when all workers run; then nobody looks on.
    pub starter: Option<Starter>,
    /// Watched while the job runs.
    pub job_file: Option<JobFile>,
    /// Also watched.
    pub hostfile: Option<HostFile>,
}

/// Runs a job to its end, whatever happens on the way; the exit code of `launch`.
pub(crate) fn run(request: Request, options: Options) -> u8 {
    driver::run(request, options)
}

#[cfg(test)]
mod tests {
    mod positions;
    mod roster;
    mod sim;
    mod simulated;
}
