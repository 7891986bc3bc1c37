//! [`BatchHosts`]: the hosts of a batch job of PBS or LSF, which these schedulers list in
//! environment variables and in files.
use jobspec::hosts::MAX_HOSTS;

/// The environment variable with which PBS names the file that lists the hosts of a batch job.
pub(super) const PBS_NODEFILE: &str = "PBS_NODEFILE";

/// The hosts of a batch job, each once, in the order of the scheduler.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BatchHosts {
    /// The name of the variable that lists the hosts, or that names the file with the list.
    pub(super) source: &'static str,
    /// The names of the hosts.
    pub(super) hosts: Vec<String>,
}

impl BatchHosts {
    /// Reads the hosts of a batch job of LSF from environment variables, which the function `get`
    /// looks up. Returns `None` outside of a batch job.
    pub(super) fn list_lsf_hosts(get: &dyn Fn(&str) -> Option<String>) -> Option<BatchHosts> {
        if let Some(text) = get("LSB_MCPU_HOSTS").filter(|text| !text.is_empty()) {
            // Host names and numbers of slots take turns.
            return Self::from_names("LSB_MCPU_HOSTS", text.split_whitespace().step_by(2));
        }
        Self::from_names("LSB_HOSTS", get("LSB_HOSTS")?.split_whitespace())
    }

    /// Parses host names from `text`, the content of the file that the environment variable
    /// `PBS_NODEFILE` names. Returns `None` if it lists no host.
    pub(super) fn parse_pbs_nodefile(text: &str) -> Option<BatchHosts> {
        Self::from_names(PBS_NODEFILE, text.split_whitespace())
    }

    /// Creates the host list of a PBS or LSF batch job from names among which each host occurs once
    /// for every process that it may run. Returns `None` if there are no names. Ignores the hosts
    /// after the first [`MAX_HOSTS`].
    fn from_names<'a>(source: &'static str, names: impl Iterator<Item = &'a str>) -> Option<BatchHosts> {
        let mut seen = std::collections::HashSet::new();
        let hosts: Vec<String> =
            names.filter(|name| seen.insert(*name)).take(MAX_HOSTS).map(str::to_owned).collect();
        (!hosts.is_empty()).then_some(BatchHosts { source, hosts })
    }
}
