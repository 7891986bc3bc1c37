//! The trait [`Cluster`]: a provider of hosts for jobs, such as this machine, SSH or a scheduler.
use super::{
    batch_scheduler_types::{BatchJob, BatchJobEnd, Submission, SubmitRequest},
    host_target::HostTarget,
    transport::{ConnectionStage, DESCRIPTORS_PER_CONNECTION, Transport},
};
use diagnostic::Diagnostic;
use jobspec::{ControllerLossAction, JobSpec};
use protocol::control::BatchJobRecord;
use std::time::Duration;

/// A provider of hosts, such as Slurm, which finds the hosts of a job and starts agents on them. A
/// provider has no state: it reads the job and the environment of the process.
pub(crate) trait Cluster: Sync {
    /// Returns whether the hosts of the job come from this provider, such as Slurm. Fails if the
    /// job requires this provider, but the provider has no hosts.
    fn detect(&self, job: &JobSpec) -> Result<bool, ClusterError>;

    /// Returns the hosts of a job that come from this provider, such as Slurm, in the order of
    /// their ranks. `local_host` is the host name of this machine. Appends to `warnings` what the
    /// provider could not find out about the hosts.
    fn hosts(
        &self,
        job: &JobSpec,
        local_host: &str,
        warnings: &mut Vec<Diagnostic>,
    ) -> Result<Vec<HostTarget>, ClusterError>;

    /// Creates the transport, such as SSH or `srun`, by which launch starts agents on the hosts of
    /// the job.
    fn transport(&self, job: &JobSpec) -> Result<Box<dyn Transport>, ClusterError>;

    /// Returns the number of file descriptors that the controller of a job needs for its
    /// connections with the agents of `hosts` other hosts.
    fn count_connection_descriptors(&self, _job: &JobSpec, hosts: usize) -> u64 {
        DESCRIPTORS_PER_CONNECTION * hosts as u64
    }

    /// Returns the settings with which `launch check` checks this provider's hosts, such as the
    /// names under which it prints the stages of a connection.
    fn check_settings(&self) -> ClusterCheckSettings {
        ClusterCheckSettings { stages: &[(ConnectionStage::Agent, "agent")], declares_slots: false }
    }

    /// Returns the batch job in which launch runs, with the function by which `--requeue` queues it
    /// again. Returns `None` if the provider has no queue. Fails if launch does not run in a batch
    /// job.
    fn find_requeueable_batch_job(&self, _job: &JobSpec) -> diagnostic::Result<Option<BatchJob>> {
        Ok(None)
    }

    /// Returns the id of the batch job in which launch runs, according to this provider's
    /// scheduler, even if the job's hosts come from elsewhere. The id identifies the batch job, but
    /// no command of it. Returns `None` if launch does not run in a batch job.
    fn identify_batch_job(&self) -> Option<BatchJobRecord> {
        None
    }

    /// Returns the name of launch's subcommand that submits jobs to the scheduler of this provider,
    /// such as `sbatch`. Returns `None` if the provider has no queue.
    fn submit_command(&self) -> Option<&'static str> {
        None
    }

    /// Submits a job as a batch job to the queue of this provider's scheduler. Called only if
    /// [`Cluster::submit_command`] returns a name.
    fn submit(&self, _request: SubmitRequest<'_>) -> Result<Submission, ClusterError> {
        let message = "the provider of the hosts has no queue";
        Err(Diagnostic::error(diagnostic::codes::run::INTERNAL, message).into())
    }

    /// Returns what agents do by default when the controller of a run on hosts of this provider is
    /// lost, such as to continue without it.
    fn default_controller_loss_action(&self) -> ControllerLossAction {
        ControllerLossAction::Stop
    }

    /// Returns the name that the provider, such as Slurm, gives the host on which this process
    /// runs. Returns `None` if the provider did not start this process.
    fn host_name(&self) -> Option<String> {
        None
    }

    /// Returns whether launch runs in a part of a batch job, such as a Slurm step, where a SIGTERM
    /// to launch announces the end of the job.
    fn sigterm_announces_end(&self) -> bool {
        false
    }

    /// Returns why the scheduler ends the batch job in which launch runs, or `None` if launch does
    /// not run in a batch job of this provider. Called after SIGTERM has announced the end of the
    /// job. Blocks. Fails if the batch system does not answer.
    fn find_batch_job_end(&self) -> diagnostic::Result<Option<BatchJobEnd>> {
        Ok(None)
    }

    /// Returns how long an agent must wait before it reports that a worker died of SIGKILL or
    /// SIGTERM, because the scheduler may be ending the whole job.
    ///
    /// Some schedulers end a job by signalling workers and agent in any order. If the agent is
    /// signalled within the delay, the controller reports the end of the job instead of the end of
    /// a worker.
    fn kill_report_delay(&self) -> Duration {
        Duration::ZERO
    }

    /// Returns the names of those environment variables of this process that the workers of a job
    /// must not inherit, because they describe only this process.
    fn hidden_variables(&self, _job: &JobSpec) -> Vec<String> {
        Vec::new()
    }
}

/// The names that `launch check` prints for the stages of a connection to a provider's hosts, and
/// whether the hosts' slots (places for workers) are compared with their GPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClusterCheckSettings {
    /// The stages of the connection to a host, from the first to the last, each with the name of
    /// its check.
    pub(crate) stages: &'static [(ConnectionStage, &'static str)],
    /// Whether the user declares the slots of the hosts, so that they are compared with the GPUs.
    pub(crate) declares_slots: bool,
}

/// The error that the hosts of a job cannot be determined or reached, or that a request to their
/// scheduler has failed.
#[derive(Debug)]
pub(crate) enum ClusterError {
    /// The mistakes in the job or in its hostfile.
    Job(Vec<Diagnostic>),
    /// The provider has no hosts, or cannot be used.
    Provider(Diagnostic),
}

impl ClusterError {
    /// Converts the error to one diagnostic, and calls `combine` to merge the mistakes if the error
    /// contains several mistakes in a job file.
    pub(crate) fn into_diagnostic(self, combine: impl FnOnce(Vec<Diagnostic>) -> Diagnostic) -> Diagnostic {
        match self {
            ClusterError::Job(mistakes) => combine(mistakes),
            ClusterError::Provider(error) => error,
        }
    }
}

impl From<Vec<Diagnostic>> for ClusterError {
    fn from(mistakes: Vec<Diagnostic>) -> ClusterError {
        ClusterError::Job(mistakes)
    }
}

impl From<Diagnostic> for ClusterError {
    fn from(error: Diagnostic) -> ClusterError {
        ClusterError::Provider(error)
    }
}
