//! The providers of hosts (SSH, Slurm, PBS, LSF, nodes that join, and this machine), behind the
//! trait [`Cluster`].
//!
//! The list of hosts of a job, the transport to the hosts, requeuing, submission and the checks of
//! the hosts come from one provider. No other module of the launcher depends on a scheduler.
mod batch_hosts;
mod batch_identity;
mod batch_scheduler_types;
mod host_list;
mod host_target;
mod join;
mod local;
mod pbs_and_lsf;
mod pending_agent;
mod provider;
mod slurm;
mod ssh;
mod transport;
mod unauthenticated_connections;

pub(crate) use batch_scheduler_types::{BatchJob, BatchJobEnd, BatchJobEndReason, Submission, SubmitRequest};
pub(crate) use host_list::{ClusterHost, parse_hostfile_entries, read_hostfile, resolve_hostfile_text};
pub(crate) use host_target::HostTarget;
pub(crate) use join::{NodeEnvironment, is_own_address, join_run};
pub(crate) use provider::{Cluster, ClusterCheckSettings, ClusterError};
pub(crate) use slurm::parse_untrusted_variables as parse_allocation_variables;
pub(crate) use transport::{
    AgentHandle, AgentOutput, AgentProcess, AgentStartStep, ArrivalLimits, ConnectionStage,
    RemoteAgentConnection, Transport,
};

use crate::private_files::read_without_blocking;
use diagnostic::{Diagnostic, codes::run};
use jobspec::{JobSpec, hosts::MAX_HOSTFILE_BYTES};
use protocol::control::BatchJobRecord;
use std::{path::Path, time::Duration};

/// All providers of hosts, such as Slurm or SSH, in the order in which launch asks them whether
/// they provide the hosts of a job. The last one accepts every job.
static PROVIDERS: &[&dyn Cluster] = &[
    &join::JoinCluster,
    &pbs_and_lsf::PBS,
    &pbs_and_lsf::LSF,
    &ssh::SshCluster,
    &slurm::SlurmCluster,
    &local::LocalCluster,
];

/// Finds the source from which the hosts of a job come (its provider), such as Slurm or SSH.
pub(crate) fn find_host_provider(job: &JobSpec) -> Result<&'static dyn Cluster, ClusterError> {
    select_first_matching_provider(PROVIDERS, job)
}

/// Returns how many file descriptors the controller of a job needs for its connections with the
/// agents of `hosts` other hosts.
pub(crate) fn count_connection_descriptors(job: &JobSpec, hosts: usize) -> u64 {
    // An error in the hosts of the job has been reported when they were listed.
    find_host_provider(job).map_or(0, |provider| provider.count_connection_descriptors(job, hosts))
}

/// Determines from environment variables whether another launcher, such as mpirun, has started this
/// process as one node of several. Returns `None` if not. Fails if the variables contradict each
/// other.
pub(crate) fn detect_node_environment() -> diagnostic::Result<Option<NodeEnvironment>> {
    let get = |name: &str| std::env::var(name).ok();
    let read_file = |path: &str| {
        let bytes = read_without_blocking(Path::new(path), MAX_HOSTFILE_BYTES as u64).ok()?;
        String::from_utf8(bytes).ok()
    };
    let (host, scheduler) = (protocol::host_name::read_host_name(), slurm::read_slurm_variables(&get));
    join::find_node_environment(&join::ProcessEnvironment {
        get: &get,
        read_file: &read_file,
        host: &host,
        scheduler,
    })
}

/// Returns the first of `providers` (each a source of hosts, such as Slurm or SSH) that provides
/// the hosts of the job.
fn select_first_matching_provider<'a>(
    providers: &[&'a dyn Cluster],
    job: &JobSpec,
) -> Result<&'a dyn Cluster, ClusterError> {
    for provider in providers {
        if provider.detect(job)? {
            return Ok(*provider);
        }
    }
    Err(Diagnostic::error(run::INTERNAL, "no provider accepts the job").into())
}

/// Returns the batch job of a scheduler, such as Slurm, in which launch runs, so that `--requeue`
/// can queue it again. Fails if launch does not run in a batch job.
pub(crate) fn find_batch_job(job: &JobSpec) -> diagnostic::Result<Option<BatchJob>> {
    let found: Vec<_> = PROVIDERS
        .iter()
        .filter_map(|provider| provider.find_requeueable_batch_job(job).transpose())
        .collect();
    let first = found.iter().position(Result::is_ok).unwrap_or(0);
    found.into_iter().nth(first).transpose()
}

/// Returns the identity of the batch job in which launch runs, from the variable `LAUNCH_BATCH_JOB`
/// or else from a scheduler such as Slurm. `command_line` is the command line of this process,
/// which is a part of the identity. Returns `None` if no scheduler started this process. Fails if
/// `LAUNCH_BATCH_JOB` is malformed.
pub(crate) fn identify_batch_job(command_line: &[String]) -> diagnostic::Result<Option<BatchJobRecord>> {
    let named = batch_identity::read_batch_job_variable(&|name| std::env::var(name).ok())?;
    let batch_job = named.or_else(|| PROVIDERS.iter().find_map(|provider| provider.identify_batch_job()));
    Ok(batch_job.map(|batch_job| batch_identity::identify_command(batch_job, command_line)))
}

/// Submits a job to a scheduler; the subcommand of launch, such as `sbatch`, determines which
/// scheduler this is.
pub(crate) fn submit_job(command: &str, request: SubmitRequest<'_>) -> Result<Submission, ClusterError> {
    match PROVIDERS.iter().find(|provider| provider.submit_command() == Some(command)) {
        Some(provider) => provider.submit(request),
        None => Err(Diagnostic::error(run::INTERNAL, format!("`launch {command}` has no provider")).into()),
    }
}

/// Returns this host's name in a run, which is its name in the scheduler (such as Slurm) or,
/// without one, the machine's host name.
pub(crate) fn read_host_name() -> String {
    let names = PROVIDERS.iter().find_map(|provider| provider.host_name());
    names.unwrap_or_else(protocol::host_name::read_host_name)
}

/// Asks the scheduler of the batch job in which launch runs why the scheduler is ending this batch
/// job. See [`Cluster::find_batch_job_end`].
pub(crate) fn find_batch_job_end() -> diagnostic::Result<Option<BatchJobEnd>> {
    PROVIDERS.iter().find_map(|provider| provider.find_batch_job_end().transpose()).transpose()
}

/// Returns whether launch runs under a batch system, as in a Slurm step, that announces the end of
/// the job by sending SIGTERM to this process.
pub(crate) fn sigterm_announces_job_end() -> bool {
    PROVIDERS.iter().any(|provider| provider.sigterm_announces_end())
}

/// Returns how long the agent delays its report of a worker that died of SIGKILL or SIGTERM,
/// because a scheduler may be ending the job. See [`Cluster::kill_report_delay`].
pub(crate) fn find_kill_report_delay() -> Duration {
    PROVIDERS.iter().map(|provider| provider.kill_report_delay()).max().unwrap_or_default()
}

/// Returns the names of environment variables, such as Slurm's task variables, that workers must
/// not inherit because they describe only this process. See [`Cluster::hidden_variables`].
pub(crate) fn list_hidden_variables(job: &JobSpec) -> Vec<String> {
    PROVIDERS.iter().flat_map(|provider| provider.hidden_variables(job)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample_job;

    /// A provider of the hosts `pod-0` to `pod-2` for jobs whose name begins with `pod`.
    struct FakeCluster;

    impl Cluster for FakeCluster {
        fn detect(&self, job: &JobSpec) -> Result<bool, ClusterError> {
            match job.name.as_str() {
                "pod-quota" => Err(vec![Diagnostic::error(run::INTERNAL, "no quota")].into()),
                name => Ok(name.starts_with("pod")),
            }
        }

        fn hosts(
            &self,
            job: &JobSpec,
            local_host: &str,
            _warnings: &mut Vec<Diagnostic>,
        ) -> Result<Vec<HostTarget>, ClusterError> {
            let host = |n| HostTarget {
                name: format!("{}-{n}.{local_host}", job.name),
                slots: Some(8),
                selected_slots: None,
                local: false,
            };
            Ok((0..3).map(host).collect())
        }

        fn transport(&self, _job: &JobSpec) -> Result<Box<dyn Transport>, ClusterError> {
            Err(Diagnostic::error(run::INTERNAL, "no pods").into())
        }
    }

    #[test]
    fn a_provider_in_the_table_gets_its_jobs_and_no_others() {
        let providers: &[&dyn Cluster] = &[&FakeCluster, &local::LocalCluster];
        let mut job = sample_job();
        let names = |job: &JobSpec| -> Vec<String> {
            let cluster =
                select_first_matching_provider(providers, job).unwrap_or_else(|error| panic!("{error:?}"));
            let hosts = cluster.hosts(job, "here", &mut Vec::new()).expect("hosts");
            hosts.into_iter().map(|host| host.name).collect()
        };
        assert_eq!(names(&job), ["here"]);
        job.name = "pod".to_owned();
        assert_eq!(names(&job), ["pod-0.here", "pod-1.here", "pod-2.here"]);
        let pods =
            select_first_matching_provider(providers, &job).unwrap_or_else(|error| panic!("{error:?}"));
        assert_eq!(pods.check_settings().stages.len(), 1, "the defaults of the trait are enough");
        assert!(
            pods.find_requeueable_batch_job(&job).expect("no queue").is_none()
                && pods.submit_command().is_none()
        );
        job.name = "pod-quota".to_owned();
        assert!(matches!(select_first_matching_provider(providers, &job), Err(ClusterError::Job(_))));
    }

    #[test]
    fn every_provider_with_a_queue_has_a_subcommand() {
        let commands: Vec<_> = PROVIDERS.iter().filter_map(|provider| provider.submit_command()).collect();
        assert_eq!(commands, ["sbatch"]);
    }
}
