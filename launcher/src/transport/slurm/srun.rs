//! The command line of `srun`, and the executable it starts.
use crate::discover::slurm::expand;
use std::{io, path::PathBuf};

/// Nodes of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nodes {
    /// Their group of a heterogeneous job.
    pub(super) het: Option<u32>,
    /// What to ask for; `None`: a step gets the job's by itself.
    pub(super) gpus: Option<Gpus>,
    pub(super) names: Vec<String>,
}

/// GPUs of a step of a job that asked for them by task. Which way Slurm 22.05 grants all of a node's depends on whether
/// the job has as many on each node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gpus {
    /// The same on every node of the job.
    OnEach(u32),
    /// On this one node of a job where they differ.
    OnOne(u32),
}

/// What runs on the nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Executable {
    path: PathBuf,
    /// Where it is copied to on the nodes first.
    copy: Option<String>,
}

impl Executable {
    /// The file this process runs; with `bcast`, copied to `/tmp` of each node, where the agent removes it once it runs.
    pub(super) fn own(bcast: bool, job: u64) -> io::Result<Executable> {
        let path = std::fs::read_link("/proc/self/exe")?;
        if !path.exists() {
            let message = format!("{} was replaced or removed since launch began", path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        let copy = bcast.then(|| format!("/tmp/launch-{job}-{}", std::process::id()));
        Ok(Executable { path, copy })
    }
}

/// Options of srun that the environment of a job may hold: they were meant for the job's own steps, and would give the
/// agents one GPU, one CPU or another order than one on each node.
pub(super) const NOT_FOR_AGENTS: &[&str] = &[
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

/// Everything behind `srun`.
///
/// `--overlap`: agents aren't in the way of other steps of this job, nor those in theirs. Without `--exact` a step has all
/// CPUs of the job on each node, and `--mem=0` is all of its memory. `--no-kill` and `-K0`: that an agent or a node is
/// lost is for the controller to answer, with the others still there.
pub(super) fn arguments(nodes: &Nodes, executable: &Executable) -> Vec<String> {
    let count = nodes.names.len();
    let mut words: Vec<String> = Vec::new();
    words.extend(nodes.het.map(|group| format!("--het-group={group}")));
    words.extend([
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
    words.extend(nodes.gpus.map(|gpus| match gpus {
        Gpus::OnEach(count) => format!("--gpus-per-node={count}"),
        Gpus::OnOne(count) => format!("--gpus={count}"),
    }));
    words.extend(executable.copy.as_ref().map(|copy| format!("--bcast={copy}")));
    words.push(executable.path.display().to_string());
    words.extend(["agent".to_owned(), "--join".to_owned()]);
    words.extend(executable.copy.as_ref().map(|_| "--remove-own-file".to_owned()));
    words
}

/// A line of srun that says nothing about this job.
pub(super) fn is_noise(line: &str) -> bool {
    line.contains("cluster configuration lacks support for cpu binding")
}

/// The nodes that a line such as `srun: error: h[2-3]: tasks 1-2: Exited with exit code 2` is about.
pub(super) fn ended_nodes(line: &str) -> Vec<String> {
    let told = line.strip_prefix("srun: error: ").and_then(|rest| rest.split_once(": task"));
    told.and_then(|(nodes, _)| expand(nodes)).unwrap_or_default()
}

/// What to do about srun's last words, where they are known.
pub(super) fn advice(words: &str) -> Option<&'static str> {
    let says = |part: &str| words.contains(part);
    if says("execve()") && says("No such file") {
        return Some(
            "the nodes don't have launch's executable at the path it has here: put it on the shared file system, or set \
             `slurm.bcast: true` to have it copied",
        );
    }
    if says("execve()") && says("Permission denied") {
        return Some(
            "launch's executable lies where nodes may not execute files (noexec): move it, or set `slurm.bcast: true`",
        );
    }
    if says("Socket timed out") || says("Unable to contact slurm controller") {
        return Some("Slurm's controller doesn't answer: see `scontrol ping`");
    }
    (says("Job/step already completing") || says("Invalid job id"))
        .then_some("the allocation is over: see `squeue` and `scontrol show job`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_task_on_each_node() {
        let nodes = Nodes { het: None, gpus: None, names: vec!["a".into(), "b".into()] };
        let executable = Executable { path: "/x/launch".into(), copy: None };
        let words = arguments(&nodes, &executable);
        for word in
            ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=a,b", "--overlap", "--no-kill"]
        {
            assert!(words.iter().any(|w| w == word), "{word}: {words:?}");
        }
        assert_eq!(words[words.len() - 3..], ["/x/launch", "agent", "--join"]);
        assert!(!words.iter().any(|w| w.starts_with("--gpus") || w.starts_with("--het")), "{words:?}");
    }

    #[test]
    fn groups_gpus_and_copies() {
        let nodes = Nodes { het: Some(1), gpus: Some(Gpus::OnOne(3)), names: vec!["a".into()] };
        let executable = Executable { path: "/x/launch".into(), copy: Some("/tmp/l-7".into()) };
        let words = arguments(&nodes, &executable);
        for word in ["--het-group=1", "--gpus=3", "--bcast=/tmp/l-7", "--remove-own-file"] {
            assert!(words.iter().any(|w| w == word), "{word}: {words:?}");
        }
    }

    #[test]
    fn tasks_that_have_ended() {
        let nodes = ended_nodes("srun: error: h[2-3]: tasks 1-2: Exited with exit code 2");
        assert_eq!(nodes, ["h2", "h3"]);
        assert_eq!(ended_nodes("srun: error: h1: task 0: Killed"), ["h1"]);
        for other in ["srun: error: Unable to create step for job 4: Invalid", "h1: task 0: Killed", ""] {
            assert!(ended_nodes(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn last_words_that_are_known_have_advice() {
        let words = "slurmstepd-h1: error: execve(): /nowhere/launch: No such file or directory";
        assert!(advice(words).is_some_and(|a| a.contains("slurm.bcast")));
        assert_eq!(advice("srun: error: h1: task 0: Killed"), None);
    }
}
