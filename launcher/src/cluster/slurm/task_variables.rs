//! [`is_task_variable`]: recognizes the environment variables that describe one task of a Slurm
//! step.
//!
//! An agent is a task of a step, and its workers inherit its environment. Libraries that find these
//! variables would take all workers of a host for the same task: JAX and Lightning read the rank
//! from `SLURM_PROCID`, and MPI connects to the process manager of the step (`PMI_*`, `PMIX_*`).

/// The names of the environment variables that Slurm sets to different values for each task of a
/// step, or for each step, such as the rank.
const TASK_VARIABLES: &[&str] = &[
    "SLURM_DISTRIBUTION",
    "SLURM_GTIDS",
    "SLURM_LOCALID",
    "SLURM_MPI_TYPE",
    "SLURM_NODEID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_TASK_PID",
];
/// The prefixes of the names of environment variables that connect a Slurm task with a process
/// manager of MPI (PMI or PMIx).
const PROCESS_MANAGER_PREFIXES: &[&str] = &["PMI_", "PMI2_", "PMIX_", "SLURM_PMI"];

/// Returns whether Slurm sets the environment variable `name` to describe one task of a step, or to
/// connect the task with a process manager of MPI.
pub(super) fn is_task_variable(name: &str) -> bool {
    TASK_VARIABLES.contains(&name) || PROCESS_MANAGER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_job_are_not_those_of_a_task() {
        for name in ["SLURM_PROCID", "SLURM_NTASKS", "PMI_RANK", "PMIX_NAMESPACE"] {
            assert!(is_task_variable(name), "{name}");
        }
        for name in ["SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
            assert!(!is_task_variable(name), "{name}");
        }
    }
}
