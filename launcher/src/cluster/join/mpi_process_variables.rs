//! [`is_process_variable`]: recognizes the environment variables in which launchers such as mpirun
//! store a process's rank and other properties.
//!
//! launch is one process of a node, and its workers inherit its environment. Libraries that find
//! these variables would take all workers of a node for the same process: MPI, Accelerate and
//! DeepSpeed read their rank from them.

/// The prefixes of the names of environment variables that MPI libraries and their process managers
/// set.
const MPI_VARIABLE_PREFIXES: &[&str] = &[
    "HYDI_",
    "JSM_",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_",
    "OMPI_COMM_WORLD_",
    "OMPI_FIRST_RANKS",
    "OMPI_UNIVERSE_SIZE",
    "PALS_",
    "PMIX_",
    "PMI_",
    "PMI2_",
    "PRTE_",
];

/// Returns whether a launcher such as mpirun uses the environment variable `name` to describe one
/// process, for example its rank.
pub(super) fn is_process_variable(name: &str) -> bool {
    MPI_VARIABLE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_job_are_not_those_of_a_process() {
        for name in ["OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMIX_RANK", "PALS_NODEID", "MPI_LOCALRANKID"] {
            assert!(is_process_variable(name), "{name}");
        }
        for name in ["OMPI_MCA_btl", "PET_NNODES", "JOB_COMPLETION_INDEX", "MPI_HOME", "LSB_HOSTS"] {
            assert!(!is_process_variable(name), "{name}");
        }
    }
}
