//! Compares the job.yaml of two nodes by hashes of each key's value, so that the values are not
//! sent to the other node.
use jobspec::{JobSpec, list_key_values};
use protocol::control::JobSettingHash;
use std::collections::BTreeMap;

/// The keys and sections of job.yaml whose values may differ between the nodes of a run.
const KEYS_THAT_MAY_DIFFER: [&str; 3] = ["cluster.hosts", "cluster.join", "run.workdir"];

/// The name that a node which runs `launch check` adds to its list of job keys, so that nodes that
/// run the job notice the difference.
const CHECK_COMMAND_SUBJECT: &str = "launch check";

/// Returns each key of a job with a hash of its value, so that two nodes can compare their jobs
/// without sending the values. Keys whose values may differ between nodes are left out.
pub(super) fn hash_job_settings(job: &JobSpec) -> Vec<JobSettingHash> {
    let is_local = |path: &str| {
        KEYS_THAT_MAY_DIFFER
            .iter()
            .any(|key| path.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    let values = list_key_values(job).into_iter().filter(|(path, _)| !is_local(path));
    let hash = |value: &str| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&blake3::hash(value.as_bytes()).as_bytes()[..8]);
        u64::from_le_bytes(bytes)
    };
    let keys = values.map(|(path, value)| JobSettingHash { hash: hash(&value), path });
    // A node of a run does not join a check, which would end it without an error, and vice versa.
    let check = job
        .cluster
        .join
        .checks_hosts
        .then(|| JobSettingHash { path: CHECK_COMMAND_SUBJECT.to_owned(), hash: 0 });
    keys.chain(check).collect()
}

/// Returns the keys of job.yaml whose values differ between two nodes, according to the hashes of
/// the values.
pub(super) fn find_differing_job_keys(first: &[JobSettingHash], second: &[JobSettingHash]) -> Vec<String> {
    let by_path = |keys: &[JobSettingHash]| -> BTreeMap<String, u64> {
        keys.iter().map(|key| (key.path.clone(), key.hash)).collect()
    };
    let (first, second) = (by_path(first), by_path(second));
    let paths = first.keys().chain(second.keys()).filter(|path| first.get(*path) != second.get(*path));
    let mut different: Vec<String> = paths.cloned().collect();
    different.sort_unstable();
    different.dedup();
    different
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_differ_in_the_keys_that_every_node_must_share() {
        let mut job = crate::testing::sample_job();
        job.cluster.hosts = jobspec::HostSelection::Join;
        let mut other = job.clone();
        other.run.workdir = "/elsewhere".into();
        other.cluster.join.timeout_ms = 7;
        assert!(find_differing_job_keys(&hash_job_settings(&job), &hash_job_settings(&other)).is_empty());
        other.cluster.join.checks_hosts = true;
        assert_eq!(
            find_differing_job_keys(&hash_job_settings(&job), &hash_job_settings(&other)),
            ["launch check"]
        );
        other.cluster.join.checks_hosts = false;
        other.run.restarts = 3;
        other.run.env = vec![("A".to_owned(), "b".to_owned())];
        assert_eq!(
            find_differing_job_keys(&hash_job_settings(&job), &hash_job_settings(&other)),
            ["run.env", "run.env.A", "run.restarts"]
        );
    }
}
