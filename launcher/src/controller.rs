//! The controller: the process that a user starts, one per run. It plans the attempts and decides
//! what runs.
//!
//! `core` decides without I/O, and `driver` executes: a transport starts the agents, control
//! connections carry messages, events go to the journal and to the report. `preparation` plans an
//! attempt and binds its rendezvous.
mod core;
mod driver;
mod file_watch;
mod hostfile;
mod job_file;
mod journal;
mod peer_exchange;
mod policy;
mod preparation;
mod rendezvous;
mod requeue;
mod root_cause;
mod signals;
mod store;
mod streamed_logs;
mod tensorboard;

pub(crate) use core::PeerEnd;
pub(crate) use journal::write_atomically;
pub(crate) use rendezvous::Rendezvous;
pub(crate) use store::StoreServer;
pub(crate) use store::untrusted::serve as serve_untrusted_clients;

use crate::{
    discover::{Inventory, hosts::ClusterHost},
    plan::Plan,
    transport::Transport,
};
use contract::{event::EventSchema, hosts::HostSlots, job::JobSpec};

pub use crate::secrets::Secrets;
pub use crate::transport::detached::StartNotifier;
pub use hostfile::HostFile;
pub use job_file::JobFile;
pub use requeue::Requeue;

/// A host of a job, as its transport reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTarget {
    /// The name in the job, which the transport knows.
    pub name: String,
    /// The number of workers that the list of hosts declares for it.
    pub slots: Option<u32>,
    /// The numbers of those slots, where a filter picked them.
    pub selected_slots: Option<Vec<u32>>,
    /// Whether it is the controller's machine.
    pub local: bool,
}

impl HostTarget {
    /// A host of the job on another machine.
    pub(crate) fn remote(host: &ClusterHost) -> HostTarget {
        let selected_slots =
            if let HostSlots::Selected(list) = &host.slots { Some(list.clone()) } else { None };
        HostTarget { name: host.host.name(), slots: host.slots.count(), selected_slots, local: false }
    }
}

/// The job to run, and where.
pub(crate) struct RunRequest {
    pub(crate) job: JobSpec,
    /// The plan for the declared hosts. Each attempt is planned again with the inventories of its
    /// hosts.
    pub(crate) plan: Plan,
    /// In the order of ranks.
    pub(crate) hosts: Vec<HostTarget>,
    /// Starts agents on the hosts.
    pub(crate) transport: Box<dyn Transport>,
    /// The inventory of the controller's machine; its user's choices of devices hold for the job.
    pub(crate) local_inventory: Inventory,
    /// Prepares the checkpoint that programs resume from.
    pub(crate) prepare_resume: PrepareResume,
}

/// Adapts the checkpoint that programs resume from to the plan of an attempt, and adds its path to
/// the environment of the workers.
pub(crate) type PrepareResume = fn(&JobSpec, &mut Plan) -> diagnostic::Result<()>;

/// How to run a job.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Prints events as JSON lines on stdout.
    pub json: bool,
    /// The form of these lines.
    pub schema: EventSchema,
    /// The command line, stored with the run and shown as the command to resume with.
    pub command: Vec<String>,
    /// Secrets for the environment of the workers.
    pub secrets: Secrets,
    /// The batch job to requeue.
    pub requeue: Option<Requeue>,
    /// Notified when all workers are running. The run is then detached from the terminal.
    pub starter: Option<StartNotifier>,
    /// Watched for changes while the job runs.
    pub job_file: Option<JobFile>,
    /// Watched for changes while the job runs.
    pub hostfile: Option<HostFile>,
}

/// Runs a job to its end; returns the exit code of `launch`.
pub(crate) fn run(request: RunRequest, options: Options) -> u8 {
    driver::run(request, options)
}

#[cfg(test)]
mod tests {
    mod positions;
    mod roster;
    mod sim;
    mod simulated;
}
