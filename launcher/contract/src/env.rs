//! Every name of the environment that we read or set, in one place (N11).

/// Set for every worker: global rank.
pub const RANK: &str = "RANK";
/// Set for every worker: rank on its node.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Set for every worker: number of workers of the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Set for every worker: number of workers on its node.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Set for every worker: address of rank 0's node.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Set for every worker: a TCP port on that node.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Set for every worker: threads it may use.
pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
/// Set for programs: number of its node.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Set for programs: its number among those of its role; there is one role, so it is the rank.
pub const ROLE_RANK: &str = "ROLE_RANK";
/// Set for programs: the one role's name.
pub const ROLE_NAME: &str = "ROLE_NAME";
/// Set for programs: number of nodes.
pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
/// Set for programs: number of workers of the role.
pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
/// Set for programs: how often the job was started again.
pub const TORCHELASTIC_RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Set for programs: how often it may be.
pub const TORCHELASTIC_MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// Set for programs: the run's name.
pub const TORCHELASTIC_RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// Set for programs: `True` when launch hosts the store at `MASTER_ADDR`:`MASTER_PORT`, else `False`.
pub const TORCHELASTIC_USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Set for programs: where a worker writes why it failed, as JSON; the agent reads it.
pub const TORCHELASTIC_ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Set for built-in workers that share a GPU and have collectives by NCCL: it lets them (2.30 or newer).
pub const NCCL_MULTI_RANK_GPU_ENABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// Set for programs unless the user sets it: NCCL's errors end the process.
pub const TORCH_NCCL_ASYNC_ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
/// Set for programs unless the user sets it: Python's output isn't held back.
pub const PYTHONUNBUFFERED: &str = "PYTHONUNBUFFERED";
/// Set for programs: number of its node.
pub const NODE_RANK: &str = "NODE_RANK";
/// Set for programs, as DeepSpeed does: number of workers on its node.
pub const LOCAL_SIZE: &str = "LOCAL_SIZE";
/// Set for programs, as DeepSpeed does: number of its node.
pub const CROSS_RANK: &str = "CROSS_RANK";
/// Set for programs, as DeepSpeed does: number of nodes.
pub const CROSS_SIZE: &str = "CROSS_SIZE";
/// Set for programs whose job has `resume.from`: the folder to resume from, empty when there is none yet.
pub const LAUNCH_RESUME_FROM: &str = "LAUNCH_RESUME_FROM";
/// Names whose value a user's own environment decides for programs, when it has them.
pub const USERS_CHOICE: [&str; 3] = [OMP_NUM_THREADS, PYTHONUNBUFFERED, TORCH_NCCL_ASYNC_ERROR_HANDLING];
/// Which GPUs a process sees; set for programs where the job says which.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// How CUDA numbers GPUs; set beside [`CUDA_VISIBLE_DEVICES`] where launch chose the numbers, which are those of the PCI bus.
pub const CUDA_DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";
/// [`CUDA_VISIBLE_DEVICES`] for ROCm, where it decides before that.
pub const HIP_VISIBLE_DEVICES: &str = "HIP_VISIBLE_DEVICES";
/// The same for Level Zero (Intel).
pub const ZE_AFFINITY_MASK: &str = "ZE_AFFINITY_MASK";
/// What says which GPUs this process may use.
pub const VISIBLE_DEVICES: [&str; 3] = [CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ZE_AFFINITY_MASK];
/// Read: where the list of a user's runs lies (XDG base directories).
pub const XDG_STATE_HOME: &str = "XDG_STATE_HOME";
/// Read: the user's home directory.
pub const HOME: &str = "HOME";
/// Read: where programs are looked for, among them a Python whose packages bring CUDA's libraries.
pub const PATH: &str = "PATH";
/// Read: where caches lie (XDG base directories).
pub const XDG_CACHE_HOME: &str = "XDG_CACHE_HOME";
/// Read: folders of libraries, where CUDA's are looked for.
pub const LD_LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
/// Read: the active Python environment, whose packages bring CUDA's libraries.
pub const VIRTUAL_ENV: &str = "VIRTUAL_ENV";
/// Read: the active Conda environment, likewise.
pub const CONDA_PREFIX: &str = "CONDA_PREFIX";
/// Read: where a CUDA toolkit lies.
pub const CUDA_HOME: &str = "CUDA_HOME";
/// The same under its older name.
pub const CUDA_PATH: &str = "CUDA_PATH";

/// Does a variable of this name hold what nobody may read?
pub fn looks_secret(name: &str) -> bool {
    const MARKS: [&str; 7] =
        ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "PRIVATE_KEY", "CREDENTIAL"];
    let name = name.to_ascii_uppercase();
    let counted = name.ends_with("_TOKENS") || name.contains("TOKENIZER");
    !counted && (MARKS.iter().any(|mark| name.contains(mark)) || name.ends_with("_KEY"))
}

/// Built-in worker: number of the inherited descriptor of the socket to its agent.
pub const LAUNCH_CONTROL_FD: &str = "LAUNCH_CONTROL_FD";
/// Built-in worker: number of the inherited descriptor of the node's shared memory segment (a memfd).
pub const LAUNCH_SHM_FD: &str = "LAUNCH_SHM_FD";
/// Read by built-in workers: set by sshd, `client-address client-port server-address server-port`; the third is where the
/// controller reached this host.
pub const SSH_CONNECTION: &str = "SSH_CONNECTION";
/// Testing: `RANK:N` — the worker of that rank kills itself at its N-th fault point (docs/testing.md).
pub const LAUNCH_FAULT: &str = "LAUNCH_FAULT";
/// Testing: a file to which every worker appends the number of fault points it has passed.
pub const LAUNCH_FAULT_COUNT: &str = "LAUNCH_FAULT_COUNT";
/// Read by an agent in a Slurm step: the name of its node.
pub const SLURMD_NODENAME: &str = "SLURMD_NODENAME";
/// Read by an agent: it is part of a Slurm step.
pub const SLURM_STEP_ID: &str = "SLURM_STEP_ID";
/// Testing: this many agents on this machine, each taken for a host.
pub const LAUNCH_LOCAL_AGENTS: &str = "LAUNCH_LOCAL_AGENTS";
/// Testing: this many of NVIDIA's GPUs on this machine, whatever its drivers list.
pub const LAUNCH_GPUS: &str = "LAUNCH_GPUS";
/// Read: any value but an empty one turns colour off (https://no-color.org).
pub const NO_COLOR: &str = "NO_COLOR";
/// Read: the socket of the SSH agent.
pub const SSH_AUTH_SOCK: &str = "SSH_AUTH_SOCK";
