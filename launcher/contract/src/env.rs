//! The names of all environment variables that launch reads or sets.

/// Set for every worker: the global rank of the worker.
pub const RANK: &str = "RANK";
/// Set for every worker: the rank of the worker on its host.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Set for every worker: the number of workers of the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Set for every worker: the number of workers on the worker's host.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Set for every worker: the address of rank 0's host.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Set for every worker: the rendezvous port on rank 0's host.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Set for every worker: the number of threads that it may use.
pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
/// Set for programs, as torchrun does: the index of the host.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Set for programs, as torchrun does: the rank within the role, which is the global rank.
pub const ROLE_RANK: &str = "ROLE_RANK";
/// Set for programs, as torchrun does: the name of the only role.
pub const ROLE_NAME: &str = "ROLE_NAME";
/// Set for programs, as torchrun does: the number of hosts.
pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
/// Set for programs, as torchrun does: the number of workers of the role.
pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
/// Set for programs: the number of restarts so far.
pub const TORCHELASTIC_RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Set for programs: the most restarts that the job allows.
pub const TORCHELASTIC_MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// Set for programs: the name of the run.
pub const TORCHELASTIC_RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// Set for programs: `True` when launch serves the store at `MASTER_ADDR`:`MASTER_PORT`, else
/// `False`.
pub const TORCHELASTIC_USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Set for programs: the file in which a worker records its failure as JSON. The agent reads it.
pub const TORCHELASTIC_ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Set for built-in workers that share a GPU and use NCCL: allows several ranks on a GPU (NCCL 2.30
/// and later).
pub const NCCL_MULTI_RANK_GPU_ENABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// Set for programs unless the user sets it: an error of NCCL ends the process.
pub const TORCH_NCCL_ASYNC_ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
/// Set for programs unless the user sets it: Python does not buffer its output.
pub const PYTHONUNBUFFERED: &str = "PYTHONUNBUFFERED";
/// Set for programs: the index of the host.
pub const NODE_RANK: &str = "NODE_RANK";
/// Set for programs, as DeepSpeed does: the number of workers on the worker's host.
pub const LOCAL_SIZE: &str = "LOCAL_SIZE";
/// Set for programs, as DeepSpeed does: the index of the host.
pub const CROSS_RANK: &str = "CROSS_RANK";
/// Set for programs, as DeepSpeed does: the number of hosts.
pub const CROSS_SIZE: &str = "CROSS_SIZE";
/// Set for programs of jobs with `resume.from`: the directory to resume from; empty when there is
/// no checkpoint.
pub const LAUNCH_RESUME_FROM: &str = "LAUNCH_RESUME_FROM";
/// Variables that launch sets for programs only if the user's environment does not have them.
pub const USER_OVERRIDABLE: [&str; 3] = [OMP_NUM_THREADS, PYTHONUNBUFFERED, TORCH_NCCL_ASYNC_ERROR_HANDLING];
/// Set for programs of jobs that select GPUs: the GPUs that the process sees.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Set where launch selects GPUs by number: CUDA numbers GPUs in the order of the PCI bus.
pub const CUDA_DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";
/// The GPUs that a ROCm process sees. ROCm reads [`CUDA_VISIBLE_DEVICES`] only if this variable is
/// not set.
pub const HIP_VISIBLE_DEVICES: &str = "HIP_VISIBLE_DEVICES";
/// The GPUs that a process of Intel's Level Zero sees.
pub const ZE_AFFINITY_MASK: &str = "ZE_AFFINITY_MASK";
/// The variables that restrict which GPUs a process sees.
pub const VISIBLE_DEVICES: [&str; 3] = [CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ZE_AFFINITY_MASK];
/// Read: the directory of the list of a user's runs (XDG base directories).
pub const XDG_STATE_HOME: &str = "XDG_STATE_HOME";
/// Read: the user's home directory.
pub const HOME: &str = "HOME";
/// Read: the directories of programs. A Python there may have packages with the CUDA libraries.
pub const PATH: &str = "PATH";
/// Read: the directory of caches (XDG base directories).
pub const XDG_CACHE_HOME: &str = "XDG_CACHE_HOME";
/// Read: directories of libraries, in which the CUDA libraries are searched.
pub const LD_LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
/// Read: the active Python environment, whose packages may contain the CUDA libraries.
pub const VIRTUAL_ENV: &str = "VIRTUAL_ENV";
/// Read: the active Conda environment, whose packages may contain the CUDA libraries.
pub const CONDA_PREFIX: &str = "CONDA_PREFIX";
/// Read: the directory of a CUDA toolkit.
pub const CUDA_HOME: &str = "CUDA_HOME";
/// Read: the directory of a CUDA toolkit, under an older name.
pub const CUDA_PATH: &str = "CUDA_PATH";

/// Returns whether the name of a variable suggests that its value is a secret.
pub fn looks_secret(name: &str) -> bool {
    const SECRET_PARTS: [&str; 7] =
        ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "PRIVATE_KEY", "CREDENTIAL"];
    let name = name.to_ascii_uppercase();
    let counts_tokens = name.ends_with("_TOKENS") || name.contains("TOKENIZER");
    !counts_tokens && (SECRET_PARTS.iter().any(|part| name.contains(part)) || name.ends_with("_KEY"))
}

/// Set for built-in workers: the inherited descriptor of the socket to their agent.
pub const LAUNCH_CONTROL_FD: &str = "LAUNCH_CONTROL_FD";
/// Set for built-in workers: the inherited descriptor of the host's shared memory segment (a
/// memfd).
pub const LAUNCH_SHM_FD: &str = "LAUNCH_SHM_FD";
/// Read by built-in workers: `client-address client-port server-address server-port`, set by sshd.
/// The third value is the address at which the controller reached the host.
pub const SSH_CONNECTION: &str = "SSH_CONNECTION";
/// Testing: `RANK:N` makes the worker of that rank kill itself at its N-th fault point
/// (docs/testing.md).
pub const LAUNCH_FAULT: &str = "LAUNCH_FAULT";
/// Testing: a file to which every worker appends the number of fault points that it has passed.
pub const LAUNCH_FAULT_COUNT: &str = "LAUNCH_FAULT_COUNT";
/// Read by an agent in a Slurm step: the name of the agent's node.
pub const SLURMD_NODENAME: &str = "SLURMD_NODENAME";
/// Read by an agent: set if the agent is part of a Slurm step.
pub const SLURM_STEP_ID: &str = "SLURM_STEP_ID";
/// Testing: the number of agents that launch starts on this machine, each of which stands for a
/// host.
pub const LAUNCH_LOCAL_AGENTS: &str = "LAUNCH_LOCAL_AGENTS";
/// Testing: the number of NVIDIA GPUs on this machine, in place of those that the driver lists.
pub const LAUNCH_GPUS: &str = "LAUNCH_GPUS";
/// Read: any value but an empty one disables colour (<https://no-color.org>).
pub const NO_COLOR: &str = "NO_COLOR";
/// Read: the socket of the SSH agent.
pub const SSH_AUTH_SOCK: &str = "SSH_AUTH_SOCK";
