//! The controller: the process that a user starts, one for each run. It plans the attempts of the
//! run and decides what runs where.
//!
//! `core` makes the decisions without I/O. `driver` executes them: it starts agents through a
//! transport, exchanges messages with them over control connections, and reports events to the
//! journal and to the user. `preparation` holds what an attempt needs before its workers start.
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
pub(crate) use rendezvous::BoundRendezvous;
pub(crate) use store::StoreServer;
pub(crate) use store::untrusted::serve_untrusted_clients;

use crate::{
    discover::{Inventory, cluster_hosts::ClusterHost},
    plan::Plan,
    transport::Transport,
};
use contract::{event::EventSchema, hosts::HostSlots, job::JobSpec};

pub use crate::secrets::SecretVariables;
pub use crate::transport::detached::StartNotifier;
pub use hostfile::FilteredHostfile;
pub use job_file::JobFile;
pub use requeue::RequeueableJob;

/// A host of a job, with the name under which the transport reaches the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTarget {
    /// The host's name in the job, by which the transport finds the host.
    pub name: String,
    /// The number of workers that the list of hosts declares for the host; `None` if the list
    /// declares no number.
    pub slots: Option<u32>,
    /// The numbers of the slots that the job's filter selects on this host; `None` if no filter
    /// selects slots of the host.
    pub selected_slots: Option<Vec<u32>>,
    /// Whether the host is the controller's machine.
    pub local: bool,
}

impl HostTarget {
    /// Creates the target for a resolved host of the job. The host counts as another machine
    /// (`local` is `false`).
    pub(crate) fn from_cluster_host(host: &ClusterHost) -> HostTarget {
        let selected_slots =
            if let HostSlots::Selected(list) = &host.slots { Some(list.clone()) } else { None };
        HostTarget {
            name: host.host.name_with_port(),
            slots: host.slots.count(),
            selected_slots,
            local: false,
        }
    }
}

/// A job that is ready to run, with its hosts and the transport that reaches them.
pub(crate) struct RunRequest {
    pub(crate) job: JobSpec,
    /// The plan for the declared hosts. Each attempt is planned again with the inventories of its
    /// hosts.
    pub(crate) plan: Plan,
    /// The hosts of the job, in the order in which their workers get ranks.
    pub(crate) hosts: Vec<HostTarget>,
    /// The transport that starts the agents on the hosts.
    pub(crate) transport: Box<dyn Transport>,
    /// The inventory of the controller's machine. The variables of its `inherited_env` apply to all
    /// hosts of the job, except those that select visible GPUs, which each host sets itself.
    pub(crate) local_inventory: Inventory,
    /// Prepares the checkpoint from which programs resume.
    pub(crate) prepare_resume: ResumePreparer,
}

/// Adapts the checkpoint from which programs resume to the plan of an attempt, and adds the path of
/// the checkpoint to the environment of the workers.
pub(crate) type ResumePreparer = fn(&JobSpec, &mut Plan) -> diagnostic::Result<()>;

/// The options of a run: the form of its output, secrets, and the files to watch.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Whether events are printed on stdout as JSON lines.
    pub json: bool,
    /// The version of the schema of the JSON lines that `json` requests.
    pub schema: EventSchema,
    /// The command line of `launch`. It is stored with the run and shown as the command that
    /// resumes the run.
    pub command: Vec<String>,
    /// Secrets for the environment of the workers.
    pub secrets: SecretVariables,
    /// The Slurm batch job that may be requeued after the run; `None` outside of a batch job.
    pub requeue: Option<RequeueableJob>,
    /// Notifies the `launch` process that started this detached controller, once all workers are
    /// running. `None` for a run in the foreground.
    pub starter: Option<StartNotifier>,
    /// The job file to watch for changes while the job runs; `None` to watch no job file.
    pub job_file: Option<JobFile>,
    /// The hostfile to watch for changes while the job runs; `None` if the job has no hostfile.
    pub hostfile: Option<FilteredHostfile>,
}

/// Runs a job to its end and returns the exit code of `launch`. Blocks.
pub(crate) fn run_job(request: RunRequest, options: RunOptions) -> u8 {
    driver::run_job(request, options)
}

#[cfg(test)]
mod tests {
    mod fault_positions;
    mod roster;
    mod sim;
    mod simulated_runs;
}
