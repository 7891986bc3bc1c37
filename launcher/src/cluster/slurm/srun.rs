//! Builds the command line of `srun`, chooses the executable that srun starts on the nodes, and
//! parses srun's output.
use super::allocation::expand_node_list;
use diagnostic::{
    Code, Diagnostic,
    codes::{host, run, slurm},
};
use std::path::PathBuf;

/// The nodes of one Slurm step (`srun`) that starts agents, and the GPUs that the step requests on
/// these nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepNodesAndGpus {
    /// The index of the nodes' group in a heterogeneous job; `None` in other jobs.
    pub(super) het_group: Option<u32>,
    /// The GPUs to request; `None` if the step gets the GPUs of the job without a request.
    pub(super) gpus: Option<StepGpuRequest>,
    pub(super) names: Vec<String>,
}

/// The number of GPUs that a Slurm step requests through srun, either for each node of the step or
/// for its only node.
///
/// Slurm 22.05 grants all GPUs of a node to a step through one of two options. Which one works
/// depends on whether all nodes of the job have the same number of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepGpuRequest {
    /// The number of GPUs on each node, if all nodes of the job have the same number.
    PerNode(u32),
    /// The number of GPUs on the only node of the step, if the nodes of the job have different
    /// numbers.
    Total(u32),
}

/// The executable file of launch that srun starts on the nodes as the agent, and whether srun must
/// copy the file to the nodes first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepExecutable {
    path: PathBuf,
    /// The path to which srun copies the executable on each node before it starts the step; `None`
    /// if the nodes have the executable at `path`.
    copy: Option<String>,
}

impl StepExecutable {
    /// Determines the executable file that this process runs, which srun will start as the agent on
    /// the nodes. Fails if the file was replaced or removed.
    ///
    /// With `bcast`, srun copies the file to `/tmp` of each node, where the agent removes it after
    /// its start.
    pub(super) fn find_current(bcast: bool, job: u64) -> diagnostic::Result<StepExecutable> {
        let path = std::fs::read_link("/proc/self/exe").map_err(|error| {
            Diagnostic::error(host::EXECUTABLE_UNREADABLE, "cannot find the executable of this process")
                .with_cause(&error)
        })?;
        if !path.exists() {
            let message =
                format!("the executable {} was replaced or removed while launch was running", path.display());
            return Err(Diagnostic::error(host::EXECUTABLE_REPLACED, message)
                .with_subject(path.display().to_string()));
        }
        let copy = bcast.then(|| generate_copy_path(job)).transpose()?;
        Ok(StepExecutable { path, copy })
    }
}

/// Returns a random path to which srun copies the executable of launch on each node. No other user
/// can predict the path and create a file there.
fn generate_copy_path(job: u64) -> diagnostic::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        let message = "the system provides no random name for the copy of the executable";
        Diagnostic::error(run::RANDOM_UNAVAILABLE, message).with_cause(&error)
    })?;
    Ok(format!("/tmp/launch-{job}-{:032x}", u128::from_ne_bytes(bytes)))
}

/// The environment variables that srun must not get, because they could change the options of the
/// step in which srun starts the agents. The transport removes them from the environment of srun.
///
/// Slurm or a batch script sets these variables for the steps of the script. In the step of the
/// agents, the variables could request one GPU or one CPU, or another placement than one task on
/// each node.
pub(super) const REMOVED_ENV_VARIABLES: &[&str] = &[
    "SLURM_ACCTG_FREQ",
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_VERBOSE",
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_EXPORT_ENV",
    "SLURM_GPU_BIND",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_HINT",
    "SLURM_HOSTFILE",
    "SLURM_IMMEDIATE",
    "SLURM_KILL_BAD_EXIT",
    "SLURM_LABELIO",
    "SLURM_MEM_BIND",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_OPEN_MODE",
    "SLURM_PROLOG",
    "SLURM_EPILOG",
    "SLURM_STDERRMODE",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
    "SLURM_THREADS",
    "SLURM_THREADS_PER_CORE",
    "SLURM_TRES_PER_TASK",
    "SLURM_UNBUFFEREDIO",
    "SLURM_WAIT",
    "SLURM_WORKING_DIR",
    "SRUN_CPUS_PER_TASK",
];

/// Builds the arguments with which `srun` starts an agent on each of `nodes`. `step_options` are
/// those of the job.
///
/// - `--overlap`: agents share the resources of the job with its other steps.
/// - `--mem=0` grants all memory of the job on each node and, without `--exact`, a step gets all
///   CPUs.
/// - `--no-kill` and `--kill-on-bad-exit=0`: when an agent or a node is lost, the others continue,
///   and the controller decides what follows.
pub(super) fn build_srun_arguments(
    nodes: &StepNodesAndGpus,
    executable: &StepExecutable,
    step_options: &[String],
) -> Vec<String> {
    let count = nodes.names.len();
    let mut arguments: Vec<String> = Vec::new();
    arguments.extend(nodes.het_group.map(|group| format!("--het-group={group}")));
    arguments.extend([
        format!("--nodes={count}"),
        format!("--ntasks={count}"),
        "--ntasks-per-node=1".to_owned(),
        format!("--nodelist={}", nodes.names.join(",")),
        "--overlap".to_owned(),
        "--mem=0".to_owned(),
        "--cpu-bind=none".to_owned(),
        "--mpi=none".to_owned(),
        "--export=ALL".to_owned(),
        "--input=all".to_owned(),
        "--kill-on-bad-exit=0".to_owned(),
        "--wait=0".to_owned(),
        "--no-kill".to_owned(),
        "--quiet".to_owned(),
        "--job-name=launch".to_owned(),
    ]);
    arguments.extend(nodes.gpus.map(|gpus| match gpus {
        StepGpuRequest::PerNode(count) => format!("--gpus-per-node={count}"),
        StepGpuRequest::Total(count) => format!("--gpus={count}"),
    }));
    arguments.extend(executable.copy.as_ref().map(|copy| format!("--bcast={copy}")));
    arguments.extend(step_options.iter().cloned());
    arguments.push(executable.path.display().to_string());
    arguments.extend(["agent".to_owned(), "--join".to_owned()]);
    arguments.extend(executable.copy.as_ref().map(|_| "--remove-own-file".to_owned()));
    arguments
}

/// Returns whether a line of srun's output is a warning that does not matter for agents, so that it
/// is not shown to the user.
pub(super) fn is_irrelevant_warning(line: &str) -> bool {
    line.contains("cluster configuration lacks support for cpu binding")
}

/// Parses the names of the nodes on which a task has failed from an error line of srun, such as
/// `srun: error: h[2-3]: tasks 1-2: Exited with exit code 2`. Returns an empty list for other
/// lines.
pub(super) fn parse_failed_nodes(line: &str) -> Vec<String> {
    let nodes = line.strip_prefix("srun: error: ").and_then(|rest| rest.split_once(": task"));
    nodes.and_then(|(nodes, _)| expand_node_list(nodes)).unwrap_or_default()
}

/// Chooses the error code for a failed Slurm command by the text that the command has printed.
/// Returns `None` if the reason is not known.
pub(super) fn classify_failure_output(output: &str) -> Option<Code> {
    let has = |part: &str| output.contains(part);
    if has("execve()") && has("No such file") {
        return Some(slurm::SLURM_EXECUTABLE_MISSING);
    }
    if has("execve()") && has("Permission denied") {
        return Some(slurm::SLURM_EXECUTABLE_NOT_ALLOWED);
    }
    if has("Socket timed out") || has("Unable to contact slurm controller") {
        return Some(slurm::SLURM_CONTROLLER_UNREACHABLE);
    }
    (has("Job/step already completing") || has("Invalid job id")).then_some(slurm::SLURM_ALLOCATION_ENDED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_one_task_on_each_node() {
        let nodes = StepNodesAndGpus { het_group: None, gpus: None, names: vec!["a".into(), "b".into()] };
        let executable = StepExecutable { path: "/x/launch".into(), copy: None };
        let arguments = build_srun_arguments(&nodes, &executable, &["--container-image=a".to_owned()]);
        for argument in
            ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=a,b", "--overlap", "--no-kill"]
        {
            assert!(arguments.iter().any(|a| a == argument), "{argument}: {arguments:?}");
        }
        let end = &arguments[arguments.len() - 4..];
        assert_eq!(end, ["--container-image=a", "/x/launch", "agent", "--join"]);
        assert!(
            !arguments.iter().any(|a| a.starts_with("--gpus") || a.starts_with("--het")),
            "{arguments:?}"
        );
    }

    #[test]
    fn het_groups_gpus_and_copies_become_options_of_srun() {
        let nodes = StepNodesAndGpus {
            het_group: Some(1),
            gpus: Some(StepGpuRequest::Total(3)),
            names: vec!["a".into()],
        };
        let executable = StepExecutable { path: "/x/launch".into(), copy: Some("/tmp/l-7".into()) };
        let arguments = build_srun_arguments(&nodes, &executable, &[]);
        for argument in ["--het-group=1", "--gpus=3", "--bcast=/tmp/l-7", "--remove-own-file"] {
            assert!(arguments.iter().any(|a| a == argument), "{argument}: {arguments:?}");
        }
    }

    #[test]
    fn nodes_of_failed_tasks_are_parsed() {
        let nodes = parse_failed_nodes("srun: error: h[2-3]: tasks 1-2: Exited with exit code 2");
        assert_eq!(nodes, ["h2", "h3"]);
        assert_eq!(parse_failed_nodes("srun: error: h1: task 0: Killed"), ["h1"]);
        for other in ["srun: error: Unable to create step for job 4: Invalid", "h1: task 0: Killed", ""] {
            assert!(parse_failed_nodes(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn known_failures_are_classified_by_the_output() {
        for (output, code) in [
            (
                "slurmstepd-h1: error: execve(): /nowhere/launch: No such file or directory",
                Some(slurm::SLURM_EXECUTABLE_MISSING),
            ),
            (
                "slurmstepd-h1: error: execve(): /x/launch: Permission denied",
                Some(slurm::SLURM_EXECUTABLE_NOT_ALLOWED),
            ),
            (
                "srun: error: Unable to confirm allocation for job 7: Invalid job id specified",
                Some(slurm::SLURM_ALLOCATION_ENDED),
            ),
            ("srun: error: h1: task 0: Killed", None),
        ] {
            assert_eq!(classify_failure_output(output), code, "{output}");
        }
    }
}
