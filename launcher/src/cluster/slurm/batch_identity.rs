//! [`identify_slurm_job`]: identifies the Slurm job in which launch runs, from environment
//! variables.
use super::allocation::{parse_number, read_job_id_and_restarts};
use protocol::control::BatchJobRecord;

/// The largest id of a Slurm job outside of a federation of Slurm clusters, because ids within a
/// federation are larger. In larger ids, the upper bits are the number of a cluster of the
/// federation.
const MAX_LOCAL_JOB_ID: u64 = (1 << 26) - 1;
/// The longest name of a Slurm cluster, in bytes, that becomes part of the identity of a batch job.
const MAX_CLUSTER_BYTES: usize = 128;

/// Returns an id, such as `slurm:CLUSTER:JOB`, of the Slurm job or job array task in which this
/// process runs, and how often it was requeued. `get` returns the value of an environment variable.
/// Returns `None` outside of Slurm.
///
/// A requeued job keeps its id. Clusters that share a file system may have jobs of equal ids, so
/// the name of the cluster is part of the identity. Ids of federated jobs are unique without it,
/// and such a job may be requeued on another cluster.
pub(super) fn identify_slurm_job(get: &dyn Fn(&str) -> Option<String>) -> Option<BatchJobRecord> {
    let number = |name: &str| get(name).and_then(|text| parse_number(&text));
    let (job, restarts) = read_job_id_and_restarts(get)?;
    let cluster = match job > MAX_LOCAL_JOB_ID {
        true => String::new(),
        false => get("SLURM_CLUSTER_NAME").filter(|name| name.len() <= MAX_CLUSTER_BYTES).unwrap_or_default(),
    };
    let id = match number("SLURM_ARRAY_JOB_ID").zip(number("SLURM_ARRAY_TASK_ID")) {
        Some((array, task)) => format!("slurm:{cluster}:{array}_{task}"),
        None => format!("slurm:{cluster}:{job}"),
    };
    Some(BatchJobRecord { id, label: format!("Slurm job {job}"), restarts: Some(restarts) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Identifies the job that `text` describes, with a variable in each word.
    fn identify(text: &str) -> Option<(String, Option<u32>)> {
        let variables: Vec<(&str, &str)> = text.split(' ').filter_map(|word| word.split_once('=')).collect();
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        identify_slurm_job(&get).map(|job| {
            assert!(job.has_valid_lengths() && job.label.starts_with("Slurm job "), "{job:?}");
            (job.id, job.restarts)
        })
    }

    #[test]
    fn a_requeued_job_keeps_its_identity_and_others_have_another_one() {
        for (variables, expected) in [
            ("HOME=/", None),
            ("SLURM_JOB_ID=x", None),
            ("SLURM_JOB_ID=7", Some(("slurm::7", 0))),
            ("SLURM_JOB_ID=7 SLURM_CLUSTER_NAME=a", Some(("slurm:a:7", 0))),
            ("SLURM_JOB_ID=7 SLURM_CLUSTER_NAME=a SLURM_RESTART_COUNT=2", Some(("slurm:a:7", 2))),
            ("SLURM_JOB_ID=7 SLURM_CLUSTER_NAME=b SLURM_RESTART_COUNT=2", Some(("slurm:b:7", 2))),
            // a task of an array, whose job id differs from that of the array
            (
                "SLURM_JOB_ID=9 SLURM_CLUSTER_NAME=a SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=3",
                Some(("slurm:a:7_3", 0)),
            ),
            // a federated job, which may be requeued on another cluster
            ("SLURM_JOB_ID=67108864 SLURM_CLUSTER_NAME=a", Some(("slurm::67108864", 0))),
            ("SLURM_JOB_ID=67108863 SLURM_CLUSTER_NAME=a", Some(("slurm:a:67108863", 0))),
            // a step with several tasks, each of which is a node that joins
            (
                "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_RESTART_COUNT=1",
                Some(("slurm::7", 1)),
            ),
            ("SLURM_JOB_ID=7 SLURM_RESTART_COUNT=99999999999", Some(("slurm::7", u32::MAX))),
        ] {
            let expected = expected.map(|(id, restarts)| (id.to_owned(), Some(restarts)));
            assert_eq!(identify(variables), expected, "{variables}");
        }
        let long = format!("SLURM_JOB_ID=7 SLURM_CLUSTER_NAME={}", "x".repeat(4096));
        assert_eq!(identify(&long), Some(("slurm::7".to_owned(), Some(0))));
    }
}
