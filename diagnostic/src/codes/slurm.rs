//! The diagnostic codes (names with explanations) of errors about Slurm: allocations, job steps and
//! the agents in them.

codes! {
    // --- job steps and agents ------------------------------------------------------------------
    SLURM_COMMAND_MISSING: Cluster = "slurm-command-missing" {
        summary: "A command of Slurm is not installed on this machine.",
        cause: "`srun`, `sbatch` or `scontrol` is not in PATH.",
        remedy: "Run launch on a login or compute node of the cluster, with Slurm's client in PATH.",
    }
    SLURM_COMMAND_FAILED: Cluster = "slurm-command-failed" {
        summary: "A command of Slurm failed.",
        cause: "The message contains the reason that Slurm reported.",
        remedy: "Correct the error that the output of the command names.",
    }
    SLURM_NODE_NOT_ALLOCATED: Cluster = "slurm-node-not-allocated" {
        summary: "A host of the job is not a node of the Slurm allocation.",
        cause: "The list of hosts names a node that Slurm did not grant.",
        remedy: "Compare `cluster.hosts` with `scontrol show job JOBID`.",
    }
    SLURM_LISTEN_FAILED: Cluster = "slurm-listen-failed" {
        summary: "The controller could not open a TCP port for the agents of a Slurm job.",
        cause: "The limit of open files is reached, or no port is free.",
        remedy: "Check `ulimit -n` and `ss -ltn` on the first node.",
    }
    SLURM_STEP_FAILED: Cluster = "slurm-step-failed" {
        summary: "The Slurm step that runs the agents ended.",
        cause: "A node failed, the step was cancelled, or Slurm could not start it.",
        remedy: "Read the output of srun and of `sacct -j JOBID`.",
    }
    SLURM_AGENT_FAILED: Cluster = "slurm-agent-failed" {
        summary: "The agent on a node ended before it connected to the controller.",
        cause: "The node does not reach the controller over TCP, or the executable does not run there.",
        remedy: "Read the output of srun. `cluster.interface` selects the network on which agents connect.",
    }
    SLURM_EXECUTABLE_MISSING: Cluster = "slurm-executable-missing" {
        summary: "The nodes do not have launch's executable at the same path as this machine.",
        cause: "The executable is on a file system that the nodes do not share.",
        remedy: "Put the executable on the shared file system, or set `slurm.bcast: true` to copy it.",
    }
    SLURM_EXECUTABLE_NOT_ALLOWED: Cluster = "slurm-executable-not-allowed" {
        summary: "The nodes are not allowed to run launch's executable from its directory.",
        cause: "The file system is mounted with `noexec`, or the permissions do not allow it.",
        remedy: "Move the executable, or set `slurm.bcast: true` to copy it.",
    }
    SLURM_CONTROLLER_UNREACHABLE: Cluster = "slurm-controller-unreachable" {
        summary: "Slurm's controller (slurmctld) did not answer.",
        cause: "slurmctld is overloaded or down.",
        remedy: "Check slurmctld with `scontrol ping`, and run the command again when slurmctld answers.",
    }
    SLURM_ALLOCATION_ENDED: Cluster = "slurm-allocation-ended" {
        summary: "The Slurm allocation has ended.",
        cause: "Its time limit was reached, or the job was cancelled.",
        remedy: "Find the reason with `squeue` and `scontrol show job JOBID`, and request a new allocation.",
    }

    // --- allocations ---------------------------------------------------------------------------
    SLURM_ALLOCATION_MISSING: Cluster = "slurm-allocation-missing" {
        summary: "The job needs a Slurm allocation, and launch does not run inside one.",
        cause: "`SLURM_JOB_ID` or the node list of the job is not set.",
        remedy: "Start launch inside sbatch or salloc, submit the job with `launch sbatch`, or set `cluster.hosts: local`.",
    }
    SLURM_VARIABLE_INVALID: Cluster = "slurm-variable-invalid" {
        summary: "A variable of Slurm has a value that launch cannot read.",
        cause: "The variable was changed by hand, or Slurm writes it in an unknown form.",
        remedy: "Start launch in an unmodified environment; `cluster.hosts: local` ignores the variables.",
    }
    SLURM_STARTED_PER_TASK: Cluster = "slurm-started-per-task" {
        summary: "launch was started once for each task of an srun step.",
        cause: "The job was started with `srun launch`, and the nodes have no key with which they could join each other.",
        remedy: "Start launch once, without srun. launch starts a job step on all nodes of the allocation. To start launch with srun once on each node, give all nodes a key (`--key-file FILE`).",
    }
    SLURM_NODE_DUPLICATE: Cluster = "slurm-node-duplicate" {
        summary: "A node belongs to two groups of a heterogeneous job.",
        cause: "Slurm placed two groups on one node.",
        remedy: "Request groups of different nodes (`--exclusive`), or a single group.",
    }
    SLURM_ALLOCATION_TOO_LARGE: Cluster = "slurm-allocation-too-large" {
        summary: "The allocation has more nodes than launch supports.",
        cause: "At most 16384 nodes are supported.",
        remedy: "Request fewer nodes.",
    }
    SLURM_GPU_COUNTS_UNKNOWN: Cluster = "slurm-gpu-counts-unknown" {
        summary: "Slurm did not answer how many GPUs each node of the job has.",
        cause: "The job requested no number of GPUs per node (for example with `--exclusive`), and `scontrol show job` failed.",
        remedy: "Correct the error of `scontrol`, request `--gpus-per-node`, or set `cluster.workers_per_host`.",
    }
    SLURM_REQUEUE_UNAVAILABLE: Cluster = "slurm-requeue-unavailable" {
        summary: "`--requeue` was given outside of a Slurm batch job.",
        cause: "Only a batch job can be requeued.",
        remedy: "Leave the option out, or submit the job with `launch sbatch`.",
    }
}
