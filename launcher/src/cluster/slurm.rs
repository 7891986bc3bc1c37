//! [`SlurmCluster`]: the provider of hosts that runs jobs on the nodes of the Slurm allocation in
//! which launch runs.
mod allocation;
mod batch_identity;
mod batch_script;
mod slurm_commands;
mod slurm_transport;
mod srun;
mod srun_process;
mod step_connection;
mod step_listener;
mod step_variables;
mod task_variables;

pub(crate) use allocation::parse_untrusted_variables;
pub(super) use step_variables::read_slurm_variables;

use super::{
    batch_scheduler_types::{BatchJob, BatchJobEnd, Submission, SubmitRequest},
    host_target::HostTarget,
    provider::{Cluster, ClusterError},
    transport::Transport,
};
use allocation::{SlurmAllocation, SlurmNode, read_allocation};
use diagnostic::{Diagnostic, codes::slurm as codes};
use jobspec::{ControllerLossAction, DeviceSelection, HostSelection, JobSpec, WorkersPerHost, env};
use protocol::control::BatchJobRecord;
use slurm_transport::SlurmTransport;
use std::time::Duration;

/// How long an agent in a Slurm step waits before it reports that a worker died of SIGKILL or
/// SIGTERM, because Slurm may be ending the whole step. Slurm ends a step by signalling workers and
/// agent in any order.
const STEP_KILL_REPORT_DELAY: Duration = Duration::from_millis(300);

/// The provider of hosts that runs jobs on the nodes of the Slurm allocation in which launch runs.
pub(super) struct SlurmCluster;

impl Cluster for SlurmCluster {
    fn detect(&self, job: &JobSpec) -> Result<bool, ClusterError> {
        match job.cluster.hosts {
            HostSelection::Auto => Ok(read_current_allocation()?.is_some()),
            HostSelection::Slurm => require_allocation().map(|_| true),
            _ => Ok(false),
        }
    }

    fn hosts(
        &self,
        job: &JobSpec,
        _local_host: &str,
        warnings: &mut Vec<Diagnostic>,
    ) -> Result<Vec<HostTarget>, ClusterError> {
        let allocation = find_allocation_with_gpus(job, warnings)?;
        Ok(allocation.nodes().map(|node| build_host_target(job, node)).collect())
    }

    fn transport(&self, job: &JobSpec) -> Result<Box<dyn Transport>, ClusterError> {
        // The hosts were determined before, with the same warnings.
        let allocation = find_allocation_with_gpus(job, &mut Vec::new())?;
        Ok(Box::new(SlurmTransport::new(allocation, job)))
    }

    fn find_requeueable_batch_job(&self, job: &JobSpec) -> diagnostic::Result<Option<BatchJob>> {
        match read_current_job() {
            Some((id, restarts)) => Ok(Some(BatchJob {
                label: format!("Slurm job {id}"),
                id: id.to_string(),
                restarts,
                max_requeues: job.slurm.requeues,
                limit_key: "slurm.requeues",
                requeue: slurm_commands::requeue_job,
            })),
            None => Err(Diagnostic::error(
                codes::SLURM_REQUEUE_UNAVAILABLE,
                "`--requeue` requires a Slurm batch job, but launch runs outside of one",
            )
            .with_subject("--requeue")
            .with_help("leave the option out, or submit the job with `launch sbatch`")),
        }
    }

    fn identify_batch_job(&self) -> Option<BatchJobRecord> {
        batch_identity::identify_slurm_job(&|name| std::env::var(name).ok())
    }

    fn submit_command(&self) -> Option<&'static str> {
        Some("sbatch")
    }

    fn submit(&self, request: SubmitRequest<'_>) -> Result<Submission, ClusterError> {
        let (options, print) = (request.options, request.print);
        let script = batch_script::build_batch_script(request)?;
        if print {
            return Ok(Submission::Script(script.format_script()));
        }
        Ok(batch_script::submit_script(&script, options)?)
    }

    fn default_controller_loss_action(&self) -> ControllerLossAction {
        ControllerLossAction::Continue
    }

    fn host_name(&self) -> Option<String> {
        std::env::var(env::SLURMD_NODENAME).ok().filter(|name| !name.is_empty())
    }

    fn sigterm_announces_end(&self) -> bool {
        is_in_step()
    }

    fn find_batch_job_end(&self) -> diagnostic::Result<Option<BatchJobEnd>> {
        read_current_job().map(|(id, _)| slurm_commands::query_job_end(id)).transpose()
    }

    fn kill_report_delay(&self) -> Duration {
        if is_in_step() { STEP_KILL_REPORT_DELAY } else { Duration::ZERO }
    }

    fn hidden_variables(&self, job: &JobSpec) -> Vec<String> {
        if job.slurm.step_variables || !is_in_step() {
            return Vec::new();
        }
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        names.filter(|name| task_variables::is_task_variable(name)).collect()
    }
}

/// Returns whether a Slurm step (`srun`) has started this process.
fn is_in_step() -> bool {
    std::env::var_os(env::SLURM_STEP_ID).is_some()
}

/// Reads the Slurm allocation, if there is one, from the environment variables of this process.
/// Returns `None` outside of Slurm.
fn read_current_allocation() -> diagnostic::Result<Option<SlurmAllocation>> {
    read_allocation(&|name| std::env::var(name).ok())
}

/// Reads the id of the Slurm job in which this process runs, and the number of its requeues, from
/// the environment variables of this process. Returns `None` outside of Slurm.
fn read_current_job() -> Option<(u64, u32)> {
    allocation::read_job_id_and_restarts(&|name| std::env::var(name).ok())
}

/// Returns the Slurm allocation in which launch runs, or an error if launch runs outside of Slurm.
fn require_allocation() -> Result<SlurmAllocation, ClusterError> {
    read_current_allocation()?.ok_or_else(|| {
        let message = "the job requires a Slurm allocation, but SLURM_JOB_ID is not set";
        let error = Diagnostic::error(codes::SLURM_ALLOCATION_MISSING, message);
        error
            .with_subject("cluster.hosts")
            .with_help("start launch inside sbatch or salloc, or submit the job with `launch sbatch`")
            .into()
    })
}

/// Returns the Slurm allocation in which launch runs, with GPU counts from Slurm's controller if
/// the job needs them and environment variables lack them. If the variables do not state the number
/// of GPUs of each node, and the job may use GPUs or a step must request them, asks Slurm for the
/// numbers. Fails outside of Slurm, or if a step must request GPUs whose number Slurm does not
/// state. Otherwise, if Slurm does not answer, assumes the numbers of GPUs and appends a warning to
/// `warnings`.
fn find_allocation_with_gpus(
    job: &JobSpec,
    warnings: &mut Vec<Diagnostic>,
) -> Result<SlurmAllocation, ClusterError> {
    let mut allocation = require_allocation()?;
    let must_request = allocation.lacks_gpu_requests();
    if must_request || (may_use_gpus(job) && allocation.lacks_gpu_counts()) {
        match slurm_commands::query_job_gpus(allocation.job) {
            Ok(gpus) => allocation.set_gpu_counts(&gpus),
            Err(error) if must_request => return Err(error.into()),
            Err(error) => warnings.extend(allocation.assume_equal_gpu_counts(&error)),
        }
    }
    Ok(allocation)
}

/// Returns whether the job's workers may use the GPUs of a Slurm allocation, judging by
/// `cluster.devices` and whether the workers run a program.
fn may_use_gpus(job: &JobSpec) -> bool {
    match job.cluster.devices {
        DeviceSelection::Auto => job.run.command.is_some(),
        DeviceSelection::Cuda | DeviceSelection::Kind(_) | DeviceSelection::List(_) => true,
        DeviceSelection::Cpu => false,
    }
}

/// Describes a node of a Slurm allocation as a host of the job, with its name and its slots (places
/// for workers).
///
/// No node counts as the local host, not even the node on which launch runs, because the Slurm step
/// starts the agents of all nodes.
fn build_host_target(job: &JobSpec, node: &SlurmNode) -> HostTarget {
    let slots = match job.cluster.workers_per_host {
        WorkersPerHost::Auto => {
            let is_list = matches!(job.cluster.devices, DeviceSelection::List(_));
            node.default_worker_count(may_use_gpus(job) && !is_list)
        }
        WorkersPerHost::Exactly(_) => None,
    };
    HostTarget { name: node.name.clone(), slots, selected_slots: None, local: false }
}
