//! Defines [`RunRequest`], everything that a controller needs to run a job: the job, its hosts and
//! the placement of its workers. [`RunOptions`] are the options of the run.
use super::{hostfile::FilteredHostfile, job_file::JobFile};
use crate::{
    cluster::{BatchJob, HostTarget, Transport},
    detached_controller::StartNotifier,
    mlflow::MlflowSettings,
    plan::Plan,
    secrets::SecretVariables,
    supervised_controller::ForwardedSignals,
};
use jobspec::{ControllerLossAction, JobSpec, hosts::HostAddress};
use protocol::{
    control::{BatchJobRecord, HostInventory, JobSecretKey},
    event::EventSchema,
};

/// Everything that a controller needs to run a job: the job, its hosts, the placement of workers,
/// and the way to start agents.
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
    pub(crate) local_inventory: HostInventory,
    /// Prepares the checkpoint from which programs resume.
    pub(crate) prepare_resume: ResumePreparer,
}

/// A function that prepares the checkpoint from which a user's program resumes, and inserts the
/// checkpoint's path into the environment and commands of the planned workers.
pub(crate) type ResumePreparer = fn(&JobSpec, &mut Plan) -> diagnostic::Result<()>;

/// The options of a controller that do not come from the job: output format, secrets, batch job,
/// and the files to watch.
#[derive(Clone, Debug)]
pub(crate) struct RunOptions {
    /// Whether events are printed on stdout as JSON lines.
    pub(crate) json: bool,
    /// The version of the schema of the JSON lines that `json` requests.
    pub(crate) schema: EventSchema,
    /// The command line of `launch`. It is stored with the run and shown as the command that
    /// resumes the run.
    pub(crate) command: Vec<String>,
    /// What agents do when the controller is lost.
    pub(crate) on_controller_loss: ControllerLossAction,
    /// Secrets for the environment of the workers.
    pub(crate) secrets: SecretVariables,
    /// How the run is recorded with MLflow; `None` if the job does not request this.
    pub(crate) mlflow: Option<MlflowSettings>,
    /// The batch job that may be requeued after the run; `None` outside of a batch job.
    pub(crate) requeue: Option<BatchJob>,
    /// The batch job that started the run; `None` if no scheduler did.
    pub(crate) batch_job: Option<BatchJobRecord>,
    /// Notifies the `launch` process that started this detached controller, once all workers are
    /// running. `None` for a run in the foreground.
    pub(crate) starter: Option<StartNotifier>,
    /// The signals that the process which supervises this controller passes on; `None` for a
    /// controller that reacts to the signals that it receives itself.
    pub(crate) signals: Option<ForwardedSignals>,
    /// The job file to watch for changes while the job runs; `None` to watch no job file.
    pub(crate) job_file: Option<JobFile>,
    /// The addresses of hosts that were added while the job ran under an earlier controller.
    pub(crate) addresses: Vec<HostAddress>,
    /// The hostfile to watch for changes while the job runs; `None` if the job has no hostfile.
    pub(crate) hostfile: Option<FilteredHostfile>,
}

/// The data with which a new controller takes over a run after the loss of the previous controller,
/// such as the key of the run.
#[derive(Clone, Debug)]
pub(crate) struct AttachOptions {
    /// The key of the run.
    pub(crate) key: JobSecretKey,
    /// The number of this controller in the order in which controllers took over the run. It is
    /// greater than that of earlier controllers.
    pub(crate) epoch: u64,
    /// The number and the hosts of the most recent attempt, as far as the journal records them.
    pub(crate) placement: Option<(u32, Vec<String>)>,
    /// Whether the run is taken over although hosts do not answer.
    pub(crate) is_forced: bool,
}
