//! [`BatchHostsCluster`]: the provider of the hosts that PBS or LSF has allocated to the batch job
//! in which launch runs. The hosts are reached over SSH, which both schedulers permit between the
//! hosts of a batch job.
use super::{
    batch_hosts::{BatchHosts, PBS_NODEFILE},
    host_list::{ClusterHost, read_hostfile, resolve_hostfile_text},
    host_target::HostTarget,
    provider::{Cluster, ClusterCheckSettings, ClusterError},
    ssh::{STAGE_CHECK_NAMES, create_ssh_transport},
    transport::Transport,
};
use diagnostic::{Diagnostic, codes::host};
use jobspec::{HostSelection, JobSpec};
use protocol::control::BatchJobRecord;
use std::path::Path;

/// The longest id of a batch job of PBS or LSF, in bytes.
const MAX_JOB_ID_BYTES: usize = 128;

/// A function that returns the value of an environment variable, or `None` if the variable is not
/// set.
type GetVariable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The provider of hosts for jobs with `cluster.hosts: pbs` or `cluster.hosts: lsf`.
pub(super) struct BatchHostsCluster {
    /// The value of `cluster.hosts` that selects this provider.
    selection: HostSelection,
    /// The name of the scheduler, for messages.
    scheduler: &'static str,
    /// The prefix of the ids of this scheduler's batch jobs.
    id_prefix: &'static str,
    /// Returns the hosts of the batch job; `None` outside of one.
    list_hosts: fn(GetVariable) -> diagnostic::Result<Option<BatchHosts>>,
    /// Returns the scheduler's id of the batch job; `None` outside of one.
    find_job_id: fn(GetVariable) -> Option<String>,
}

/// The provider of hosts for jobs with `cluster.hosts: pbs`.
pub(super) static PBS: BatchHostsCluster = BatchHostsCluster {
    selection: HostSelection::Pbs,
    scheduler: "PBS",
    id_prefix: "pbs",
    list_hosts: |get| {
        let Some(file) = get(PBS_NODEFILE).filter(|file| !file.is_empty()) else { return Ok(None) };
        Ok(BatchHosts::parse_pbs_nodefile(&read_hostfile(Path::new(&file))?))
    },
    find_job_id: |get| get("PBS_JOBID"),
};

/// The provider of hosts for jobs with `cluster.hosts: lsf`.
pub(super) static LSF: BatchHostsCluster = BatchHostsCluster {
    selection: HostSelection::Lsf,
    scheduler: "LSF",
    id_prefix: "lsf",
    list_hosts: |get| Ok(BatchHosts::list_lsf_hosts(get)),
    // The index is 0 if the batch job is not part of an array.
    find_job_id: |get| Some(format!("{}_{}", get("LSB_JOBID")?, get("LSB_JOBINDEX").unwrap_or_default())),
};

impl BatchHostsCluster {
    /// Returns those hosts of the PBS or LSF batch job that the filters `cluster.include` and
    /// `cluster.exclude` select. Fails outside of a batch job, and if a host name is malformed.
    fn find_hosts(&self, job: &JobSpec, get: GetVariable) -> Result<Vec<ClusterHost>, ClusterError> {
        let Some(BatchHosts { source, hosts }) = (self.list_hosts)(get)? else {
            let message = format!("the job requires the hosts of a batch job of {}", self.scheduler);
            return Err(Diagnostic::error(host::BATCH_HOSTS_MISSING, message)
                .with_subject("cluster.hosts")
                .with_remedy()
                .into());
        };
        // Mistakes in the list are reported like those in a hostfile, under the variable's name.
        Ok(resolve_hostfile_text(&job.cluster, Path::new(source), &hosts.join("\n"))?)
    }

    /// Returns the id of the PBS or LSF batch job in which launch runs, with a text such as `PBS
    /// job 7` that messages show. Returns `None` outside of one.
    fn identify(&self, get: GetVariable) -> Option<BatchJobRecord> {
        let is_id = |id: &String| id.len() <= MAX_JOB_ID_BYTES && id.bytes().all(|b| b.is_ascii_graphic());
        let job = (self.find_job_id)(get).filter(is_id)?;
        let label = format!("{} job {job}", self.scheduler);
        Some(BatchJobRecord { id: format!("{}:{job}", self.id_prefix), label, restarts: None })
    }
}

/// Reads an environment variable of this process.
fn read_variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Cluster for BatchHostsCluster {
    fn detect(&self, job: &JobSpec) -> Result<bool, ClusterError> {
        Ok(job.cluster.hosts == self.selection)
    }

    fn hosts(
        &self,
        job: &JobSpec,
        _local_host: &str,
        _warnings: &mut Vec<Diagnostic>,
    ) -> Result<Vec<HostTarget>, ClusterError> {
        // The scheduler lists a host once for each slot, which is often a core and not a worker. So
        // the number of workers follows from the devices of each host, as with `cluster.hosts:
        // […]`.
        Ok(self.find_hosts(job, &read_variable)?.iter().map(HostTarget::from_cluster_host).collect())
    }

    fn transport(&self, job: &JobSpec) -> Result<Box<dyn Transport>, ClusterError> {
        create_ssh_transport(job, self.find_hosts(job, &read_variable)?)
    }

    fn check_settings(&self) -> ClusterCheckSettings {
        ClusterCheckSettings { stages: STAGE_CHECK_NAMES, declares_slots: false }
    }

    fn identify_batch_job(&self) -> Option<BatchJobRecord> {
        self.identify(&read_variable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample_job;

    /// Looks up a variable in `variables`.
    fn lookup<'a>(variables: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
    }

    /// Returns the names of the hosts of a job, or the code of the error.
    fn find_names(provider: &BatchHostsCluster, job: &JobSpec, variables: &[(&str, &str)]) -> String {
        match provider.find_hosts(job, &lookup(variables)) {
            Ok(hosts) => hosts.iter().map(|host| host.host.name_with_port()).collect::<Vec<_>>().join(" "),
            Err(ClusterError::Provider(error)) => error.code().to_string(),
            Err(ClusterError::Job(errors)) => errors[0].code().to_string(),
        }
    }

    #[test]
    fn a_job_has_each_host_of_its_batch_job_once_and_the_filters_apply() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("nodes");
        std::fs::write(&file, "x3001\nx3001\nx3004\nx3002.example\nx3004\n").expect("a file");
        let path = file.to_str().expect("UTF-8");
        let mut job = sample_job();
        job.cluster.hosts = HostSelection::Pbs;
        let names = |job: &JobSpec| find_names(&PBS, job, &[(PBS_NODEFILE, path)]);
        assert_eq!(names(&job), "x3001 x3004 x3002.example");
        job.cluster.exclude = vec!["x3001".to_owned()];
        assert_eq!(names(&job), "x3004 x3002.example");
        job.cluster.exclude.clear();
        let lsf = |text: &str| find_names(&LSF, &job, &[("LSB_MCPU_HOSTS", text)]);
        assert_eq!(lsf("batch1 1 h4 42 h5 42"), "batch1 h4 h5");
    }

    #[test]
    fn missing_and_malformed_lists_are_errors() {
        let job = sample_job();
        assert_eq!(find_names(&PBS, &job, &[]), "batch-hosts-missing");
        assert_eq!(find_names(&PBS, &job, &[(PBS_NODEFILE, "/nonexistent")]), "hostfile-unreadable");
        assert_eq!(find_names(&LSF, &job, &[("LSB_HOSTS", "")]), "batch-hosts-missing");
        assert_eq!(find_names(&LSF, &job, &[("LSB_HOSTS", "a -oProxyCommand=x")]), "hostfile-invalid");
    }

    #[test]
    fn a_rerun_batch_job_keeps_its_identity() {
        let identify = |provider: &BatchHostsCluster, variables: &[(&str, &str)]| {
            provider.identify(&lookup(variables)).map(|job| {
                assert!(job.has_valid_lengths(), "{job:?}");
                (job.id, job.label)
            })
        };
        let pbs = |id: &str| identify(&PBS, &[("PBS_JOBID", id)]);
        assert_eq!(
            pbs("7[3].server"),
            Some(("pbs:7[3].server".to_owned(), "PBS job 7[3].server".to_owned()))
        );
        assert_eq!(pbs("7 8"), None);
        assert_eq!(identify(&PBS, &[]), None);
        let lsf = identify(&LSF, &[("LSB_JOBID", "12"), ("LSB_JOBINDEX", "0")]);
        assert_eq!(lsf.map(|(id, _)| id), Some("lsf:12_0".to_owned()));
    }
}
