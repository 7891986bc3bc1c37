//! [`SshCluster`]: the provider of the hosts that `cluster.hosts` names, which launch reaches over
//! SSH.
mod agent_bootstrap;
mod auth;
mod bootstrap_scripts;
mod channel_line_reader;
mod channel_relay;
mod client_notice;
mod connect;
mod connection_progress;
mod connection_threads;
mod copy_failure;
mod happy_eyeballs;
mod known_hosts;
mod openssh;
mod ssh_config;
mod ssh_error;
mod ssh_session;
mod ssh_transport;
mod target;
mod tree;

use super::{
    host_list::{ClusterHost, resolve_hosts},
    host_target::HostTarget,
    provider::{Cluster, ClusterCheckSettings, ClusterError},
    transport::{ConnectionStage, Transport},
};
use diagnostic::Diagnostic;
use jobspec::{JobSpec, hosts::HostAddress};
use ssh_transport::{SshTransport, count_ssh_descriptors};

/// The provider of the hosts that `cluster.hosts` names, which launch reaches over SSH.
pub(super) struct SshCluster;

/// The stages of setting up an SSH connection, each with the name, such as `host key`, that `launch
/// check` prints for its check.
pub(super) const STAGE_CHECK_NAMES: &[(ConnectionStage, &str)] = &[
    (ConnectionStage::Config, "config"),
    (ConnectionStage::Name, "dns"),
    (ConnectionStage::Tcp, "tcp"),
    (ConnectionStage::HostKey, "host key"),
    (ConnectionStage::Authentication, "authentication"),
    (ConnectionStage::Exec, "exec"),
    (ConnectionStage::Agent, "agent"),
];

/// Returns those hosts in `cluster.hosts` that the filters `cluster.include` and `cluster.exclude`
/// select.
fn find_named_hosts(job: &JobSpec) -> Result<Vec<ClusterHost>, ClusterError> {
    Ok(resolve_hosts(&job.cluster, &job.run.workdir)?.unwrap_or_default())
}

/// Creates the transport that starts agents on the hosts of a job over SSH.
pub(super) fn create_ssh_transport(
    job: &JobSpec,
    hosts: Vec<ClusterHost>,
) -> Result<Box<dyn Transport>, ClusterError> {
    let hosts: Vec<HostAddress> = hosts.into_iter().map(|host| host.host).collect();
    Ok(Box::new(SshTransport::new(job, &hosts)?))
}

impl Cluster for SshCluster {
    fn detect(&self, job: &JobSpec) -> Result<bool, ClusterError> {
        Ok(resolve_hosts(&job.cluster, &job.run.workdir)?.is_some())
    }

    fn hosts(
        &self,
        job: &JobSpec,
        _local_host: &str,
        _warnings: &mut Vec<Diagnostic>,
    ) -> Result<Vec<HostTarget>, ClusterError> {
        Ok(find_named_hosts(job)?.iter().map(HostTarget::from_cluster_host).collect())
    }

    fn transport(&self, job: &JobSpec) -> Result<Box<dyn Transport>, ClusterError> {
        create_ssh_transport(job, find_named_hosts(job)?)
    }

    fn count_connection_descriptors(&self, job: &JobSpec, hosts: usize) -> u64 {
        let spec = &job.cluster.ssh;
        count_ssh_descriptors(spec, hosts > spec.fanout as usize, hosts)
    }

    fn check_settings(&self) -> ClusterCheckSettings {
        ClusterCheckSettings { stages: STAGE_CHECK_NAMES, declares_slots: true }
    }
}
