//! The names of all environment variables that launch reads or sets.

/// Environment variable that launch sets for every worker: the global rank of the worker, from 0.
pub const RANK: &str = "RANK";
/// Environment variable that launch sets for every worker: the rank of the worker among those of
/// its host, or 0 if the worker sees only its own GPU.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Environment variable that launch sets for every worker: the number of workers of the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Environment variable that launch sets for every worker: the number of workers on the worker's
/// host.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Environment variable that launch sets for every worker: the IP address of rank 0's host.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Environment variable that launch sets for every worker: the rendezvous port on rank 0's host.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Environment variable that launch sets for every worker: the number of threads that the worker
/// may use.
pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
/// Environment variable that launch sets for programs, as torchrun does: the index of the worker's
/// host, from 0.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Environment variable that launch sets for programs, as torchrun does: the rank among the workers
/// of the same torchrun role, which is the global rank.
pub const ROLE_RANK: &str = "ROLE_RANK";
/// Environment variable that launch sets for programs, as torchrun does: the name of the worker's
/// role. launch has a single role.
pub const ROLE_NAME: &str = "ROLE_NAME";
/// Environment variable that launch sets for programs, as torchrun does: the number of hosts.
pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
/// Environment variable that launch sets for programs, as torchrun does: the number of workers with
/// the same torchrun role, which is the world size.
pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
/// Environment variable that launch sets for programs: the number of times that the workers were
/// restarted in this run.
pub const TORCHELASTIC_RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Environment variable that launch sets for programs: the largest number of restarts that the job
/// allows (`run.restarts`).
pub const TORCHELASTIC_MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// Environment variable that launch sets for programs: the name of the run.
pub const TORCHELASTIC_RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// Environment variable that launch sets for programs: `True` if launch serves torch's TCPStore at
/// `MASTER_ADDR`:`MASTER_PORT`, otherwise `False`.
pub const TORCHELASTIC_USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Environment variable that launch sets for programs: the file in which a worker records its
/// failure as JSON. The agent reads the file after the worker has ended.
pub const TORCHELASTIC_ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Environment variable that launch sets for built-in workers that share a GPU and use NCCL:
/// permits several ranks on one GPU. NCCL supports this from version 2.30 on.
pub const NCCL_MULTI_RANK_GPU_ENABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// Environment variable that `launch gpu-check` sets for ranks that share a GPU: the largest number
/// of thread blocks of an NCCL kernel.
pub const NCCL_MAX_CTAS: &str = "NCCL_MAX_CTAS";
/// Environment variable that `launch gpu-check` sets for ranks that share a GPU: `EAGER` makes the
/// CUDA driver load all kernels at once.
pub const CUDA_MODULE_LOADING: &str = "CUDA_MODULE_LOADING";
/// Environment variable that `launch gpu-check` sets after a failure: with `1`, each launch of a
/// kernel waits for its end.
pub const CUDA_LAUNCH_BLOCKING: &str = "CUDA_LAUNCH_BLOCKING";
/// Environment variable that launch sets for programs unless the user sets the variable: an NCCL
/// error ends the process.
pub const TORCH_NCCL_ASYNC_ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
/// Environment variable that launch sets for programs unless the user sets the variable: Python
/// does not buffer its output.
pub const PYTHONUNBUFFERED: &str = "PYTHONUNBUFFERED";
/// Environment variable that launch sets for programs: the index of the worker's host, from 0.
pub const NODE_RANK: &str = "NODE_RANK";
/// Environment variable that launch sets for programs, as DeepSpeed does: the number of workers on
/// the worker's host.
pub const LOCAL_SIZE: &str = "LOCAL_SIZE";
/// Environment variable that launch sets for programs, as DeepSpeed does: the index of the worker's
/// host, from 0.
pub const CROSS_RANK: &str = "CROSS_RANK";
/// Environment variable that launch sets for programs, as DeepSpeed does: the number of hosts.
pub const CROSS_SIZE: &str = "CROSS_SIZE";
/// Environment variable that launch sets for programs of jobs with `resume.from`: the directory of
/// the checkpoint to resume from. The value is empty if there is no checkpoint.
pub const LAUNCH_RESUME_FROM: &str = "LAUNCH_RESUME_FROM";
/// The environment variables that launch sets for programs only if the user has not set them.
pub const USER_OVERRIDABLE_VARIABLES: [&str; 6] = [
    OMP_NUM_THREADS,
    PYTHONUNBUFFERED,
    TORCH_NCCL_ASYNC_ERROR_HANDLING,
    ACCELERATE_USE_CPU,
    JAX_COORDINATOR_ADDRESS,
    JAX_LOCAL_DEVICE_IDS,
];
/// Environment variable that launch sets for programs of jobs that select GPUs: the list of the
/// GPUs that the process can use.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Environment variable that launch sets when it selects GPUs by number: makes CUDA number GPUs in
/// the order of the PCI bus.
pub const CUDA_DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";
/// Environment variable of AMD's HIP: the list of the GPUs that a process can use. ROCm reads
/// [`CUDA_VISIBLE_DEVICES`] only if this variable is not set.
pub const HIP_VISIBLE_DEVICES: &str = "HIP_VISIBLE_DEVICES";
/// Environment variable of AMD's ROCm runtime: the list of the GPUs that a process can use, by
/// number or UUID. [`HIP_VISIBLE_DEVICES`] counts the GPUs of this list.
pub const ROCR_VISIBLE_DEVICES: &str = "ROCR_VISIBLE_DEVICES";
/// Environment variable of Intel's Level Zero: the list of the GPUs, or of their tiles, that a
/// process can use.
pub const ZE_AFFINITY_MASK: &str = "ZE_AFFINITY_MASK";
/// Environment variable that launch reads: `COMPOSITE` makes Level Zero number GPUs instead of
/// tiles.
pub const ZE_FLAT_DEVICE_HIERARCHY: &str = "ZE_FLAT_DEVICE_HIERARCHY";
/// Environment variable that launch sets for programs of jobs with `cluster.devices: cpu` on hosts
/// with GPUs of Intel: the devices that a process can use through SYCL.
pub const ONEAPI_DEVICE_SELECTOR: &str = "ONEAPI_DEVICE_SELECTOR";
/// Environment variable of Huawei's Ascend runtime: the list of the NPUs that a process can use.
pub const ASCEND_RT_VISIBLE_DEVICES: &str = "ASCEND_RT_VISIBLE_DEVICES";
/// Environment variable of Intel's Gaudi runtime: the list of the Gaudi accelerators that a process
/// can use, by module id.
pub const HABANA_VISIBLE_MODULES: &str = "HABANA_VISIBLE_MODULES";
/// Environment variable of AWS's Neuron runtime: the list of the NeuronCores that a process can
/// use. The list may contain ranges.
pub const NEURON_RT_VISIBLE_CORES: &str = "NEURON_RT_VISIBLE_CORES";
/// Environment variable that launch reads: how many physical NeuronCores form a logical NeuronCore.
pub const NEURON_LOGICAL_NC_CONFIG: &str = "NEURON_LOGICAL_NC_CONFIG";
/// Environment variable that launch reads: how many physical NeuronCores form a logical NeuronCore,
/// under an older name of the variable.
pub const NEURON_RT_VIRTUAL_CORE_SIZE: &str = "NEURON_RT_VIRTUAL_CORE_SIZE";
/// The environment variables of all vendors that restrict which accelerators a process can use.
pub const DEVICE_VARIABLES: [&str; 7] = [
    CUDA_VISIBLE_DEVICES,
    HIP_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES,
    ZE_AFFINITY_MASK,
    ASCEND_RT_VISIBLE_DEVICES,
    HABANA_VISIBLE_MODULES,
    NEURON_RT_VISIBLE_CORES,
];
/// Environment variable that launch sets for workers on several hosts if the job selects a network
/// (`cluster.interface`): the network interface of NCCL's sockets.
pub const NCCL_SOCKET_IFNAME: &str = "NCCL_SOCKET_IFNAME";
/// Environment variable that launch sets for programs on several hosts: the network interface of
/// Gloo.
pub const GLOO_SOCKET_IFNAME: &str = "GLOO_SOCKET_IFNAME";
/// Environment variable that launch sets for programs on several hosts: the network interface of
/// TensorPipe.
pub const TP_SOCKET_IFNAME: &str = "TP_SOCKET_IFNAME";
/// The environment variables that select the network interfaces of NCCL, Gloo and TensorPipe.
/// launch does not replace values of the user or of the host.
pub const INTERFACE_VARIABLES: [&str; 3] = [NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME];
/// Environment variable that launch sets for programs on hosts without accelerators unless the user
/// sets the variable: makes Accelerate connect its workers on CPUs. Without the variable, each
/// worker trains alone.
pub const ACCELERATE_USE_CPU: &str = "ACCELERATE_USE_CPU";
/// Environment variable that launch reads: `true` makes Accelerate use DeepSpeed.
pub const ACCELERATE_USE_DEEPSPEED: &str = "ACCELERATE_USE_DEEPSPEED";
/// Environment variable that launch reads: the device on which DeepSpeed computes, such as `cpu`.
pub const DS_ACCELERATOR: &str = "DS_ACCELERATOR";
/// The environment variables by which launch recognizes that a program of Accelerate uses
/// DeepSpeed. Such programs do not get [`ACCELERATE_USE_CPU`], with which Accelerate would ignore
/// DeepSpeed.
pub const ACCELERATE_DEEPSPEED_VARIABLES: [&str; 2] = [ACCELERATE_USE_DEEPSPEED, DS_ACCELERATOR];
/// Environment variable that launch sets for programs unless the user sets the variable:
/// `address:port` at which process 0 of JAX listens for the others.
pub const JAX_COORDINATOR_ADDRESS: &str = "JAX_COORDINATOR_ADDRESS";
/// Environment variable that launch sets for programs: the number of workers, as the number of
/// processes of JAX.
pub const JAX_NUM_PROCESSES: &str = "JAX_NUM_PROCESSES";
/// Environment variable that launch sets for programs: the rank, as the number of the process of
/// JAX.
pub const JAX_PROCESS_ID: &str = "JAX_PROCESS_ID";
/// Environment variable that launch sets for programs with several workers on a host and a GPU for
/// each: the number of the GPU that a JAX process uses. Not set if each worker sees only its GPU,
/// or if the user sets the variable.
pub const JAX_LOCAL_DEVICE_IDS: &str = "JAX_LOCAL_DEVICE_IDS";
/// Environment variable that launch reads: the directory below which the list of the user's runs is
/// stored (XDG base directories).
pub const XDG_STATE_HOME: &str = "XDG_STATE_HOME";
/// Environment variable that launch reads: the user's home directory.
pub const HOME: &str = "HOME";
/// Environment variable that launch sets for programs in Charliecloud containers: the directory of
/// temporary files. Set for Charliecloud, which mounts it at `/tmp`.
pub const TMPDIR: &str = "TMPDIR";
/// Environment variable that launch reads: the name of the user. Set for Charliecloud, which needs
/// it.
pub const USER: &str = "USER";
/// Environment variable that launch sets for containers of enroot on hosts with GPUs of NVIDIA,
/// unless the user sets the variable: the GPUs that the container sees.
pub const NVIDIA_VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Environment variable that launch reads: the directories in which the shell finds programs. If
/// one of them contains a Python, launch also searches the packages of this Python for the CUDA
/// libraries.
pub const PATH: &str = "PATH";
/// Environment variable that launch reads: the directory below which caches are stored (XDG base
/// directories).
pub const XDG_CACHE_HOME: &str = "XDG_CACHE_HOME";
/// Environment variable that launch reads: directories in which the CUDA libraries are searched.
pub const LD_LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
/// Environment variable that launch reads: the active Python environment, whose packages may
/// contain the CUDA libraries.
pub const VIRTUAL_ENV: &str = "VIRTUAL_ENV";
/// Environment variable that launch reads: the active Conda environment, whose packages may contain
/// the CUDA libraries.
pub const CONDA_PREFIX: &str = "CONDA_PREFIX";
/// Environment variable that launch reads: the directory of a CUDA toolkit, in which the CUDA
/// libraries are searched.
pub const CUDA_HOME: &str = "CUDA_HOME";
/// Environment variable that launch reads: the directory of a CUDA toolkit, which is searched for
/// the CUDA libraries. This is an older name of [`CUDA_HOME`].
pub const CUDA_PATH: &str = "CUDA_PATH";
/// Environment variable that `launch torchrun` reads: the Python that runs scripts.
pub const PYTHON_EXEC: &str = "PYTHON_EXEC";
/// Environment variable of torchrun that launch reads if there is no job file: the default of the
/// option `--nproc-per-node` (workers per node).
pub const PET_NPROC_PER_NODE: &str = "PET_NPROC_PER_NODE";
/// Environment variable that `launch accelerate` reads: the directory of Hugging Face's files,
/// which also contains the default configuration of Accelerate.
pub const HF_HOME: &str = "HF_HOME";
/// Environment variable that `launch deepspeed` reads: the name of the file with variables for
/// workers on several hosts (`.deepspeed_env` without the variable).
pub const DS_ENV_FILE: &str = "DS_ENV_FILE";
/// Environment variable that `launch accelerate` and `launch deepspeed` read: the directories in
/// which Python searches modules. For some jobs, both commands add the current directory, as the
/// original programs do.
pub const PYTHONPATH: &str = "PYTHONPATH";

/// Returns whether the environment variable `name` restricts which accelerators a process sees.
/// `run.pass_env` never passes such variables, because the user or the plan sets them.
pub fn is_device_variable(name: &str) -> bool {
    DEVICE_VARIABLES.contains(&name)
}

/// Returns whether the environment variable `name` selects the network interface of a library.
pub fn is_interface_variable(name: &str) -> bool {
    INTERFACE_VARIABLES.contains(&name)
}

/// Returns whether the value of the environment variable `name` is probably a secret, such as a
/// token or a password. Only the name is examined.
pub fn is_probable_secret_name(name: &str) -> bool {
    const SECRET_PARTS: [&str; 7] =
        ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "PRIVATE_KEY", "CREDENTIAL"];
    let name = name.to_ascii_uppercase();
    let counts_tokens = name.ends_with("_TOKENS") || name.contains("TOKENIZER");
    !counts_tokens && (SECRET_PARTS.iter().any(|part| name.contains(part)) || name.ends_with("_KEY"))
}

/// Environment variable that the controller reads: the address of the MLflow server
/// (`observe.mlflow`).
pub const MLFLOW_TRACKING_URI: &str = "MLFLOW_TRACKING_URI";
/// Environment variable that the controller reads: the name of the experiment in MLflow.
pub const MLFLOW_EXPERIMENT_NAME: &str = "MLFLOW_EXPERIMENT_NAME";
/// Environment variable that the controller reads: the token that is sent to the MLflow server.
pub const MLFLOW_TRACKING_TOKEN: &str = "MLFLOW_TRACKING_TOKEN";
/// Environment variable that the controller reads: the name of the user at the MLflow server.
pub const MLFLOW_TRACKING_USERNAME: &str = "MLFLOW_TRACKING_USERNAME";
/// Environment variable that the controller reads: the password of the user at the MLflow server.
pub const MLFLOW_TRACKING_PASSWORD: &str = "MLFLOW_TRACKING_PASSWORD";
/// Environment variable that the controller reads: `true` if the certificate of the MLflow server
/// is not checked.
pub const MLFLOW_TRACKING_INSECURE_TLS: &str = "MLFLOW_TRACKING_INSECURE_TLS";
/// Environment variable that the controller reads: a file with the certificates that identify the
/// MLflow server.
pub const MLFLOW_TRACKING_SERVER_CERT_PATH: &str = "MLFLOW_TRACKING_SERVER_CERT_PATH";
/// Environment variables of MLflow's client that launch does not support: further ways to
/// authenticate.
pub const UNSUPPORTED_MLFLOW_VARIABLES: [&str; 3] =
    ["MLFLOW_TRACKING_CLIENT_CERT_PATH", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"];

/// Environment variable that launch sets for built-in workers: the number of the inherited file
/// descriptor of the socket that connects the worker to its agent (launch's process on the host).
pub const LAUNCH_CONTROL_FD: &str = "LAUNCH_CONTROL_FD";
/// Environment variable that launch sets for built-in workers: the number of the inherited file
/// descriptor of the host's shared memory segment (a memfd).
pub const LAUNCH_SHM_FD: &str = "LAUNCH_SHM_FD";
/// Environment variable that launch sets for built-in workers: the inherited file descriptor of the
/// memory (a memfd) for copies of the training state (`checkpoint.memory`).
pub const LAUNCH_MEMORY_FD: &str = "LAUNCH_MEMORY_FD";
/// Environment variable that launch sets for built-in workers: the file descriptor of a socket,
/// over which a worker that outlives a restart receives the new shared memory. Only workers whose
/// process may take part in several attempts have it.
pub const LAUNCH_ATTEMPT_FD: &str = "LAUNCH_ATTEMPT_FD";
/// Environment variable that launch sets for built-in workers: the file descriptor of the memory (a
/// memfd) to which each worker writes its activity and its collective counts.
pub const LAUNCH_STATUS_FD: &str = "LAUNCH_STATUS_FD";
/// Environment variable that launch sets for programs in a job with `run.hang_timeout`, unless the
/// user sets it: the number of collectives that torch's flight recorder keeps.
pub const TORCH_FR_BUFFER_SIZE: &str = "TORCH_FR_BUFFER_SIZE";
/// Environment variable that launch sets for programs in a job with `run.hang_timeout`, unless the
/// user sets it: whether torch's flight recorder writes the recorded collectives to a file after a
/// timeout.
pub const TORCH_FR_DUMP_ON_TIMEOUT: &str = "TORCH_FR_DUMP_ON_TIMEOUT";
/// Environment variable that launch sets for programs with `run.hang_timeout`: the path, without
/// the rank, of the file to which torch's flight recorder writes its collectives. A value that the
/// user sets has precedence.
pub const TORCH_FR_DUMP_TEMP_FILE: &str = "TORCH_FR_DUMP_TEMP_FILE";
/// Environment variable that launch sets to `WARN` for programs in a job with `run.hang_timeout`,
/// unless the user sets it: which messages NCCL prints.
pub const NCCL_DEBUG: &str = "NCCL_DEBUG";
/// Environment variable that NCCL reads: the path of a file that is read instead of `.nccl.conf` in
/// the home directory, with values of other variables of NCCL.
pub const NCCL_CONF_FILE: &str = "NCCL_CONF_FILE";
/// The environment variables that earlier versions of torch read instead of `TORCH_FR_BUFFER_SIZE`,
/// `TORCH_FR_DUMP_ON_TIMEOUT` and `TORCH_FR_DUMP_TEMP_FILE`.
pub const OLD_FLIGHT_RECORDER_VARIABLES: [&str; 3] =
    ["TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"];
/// Environment variable that launch sets for programs with `run.hang_timeout`: the directory of the
/// files by which a worker reports its collectives to its agent. docs/design/processes.md describes
/// the files.
pub const LAUNCH_HANG_DIR: &str = "LAUNCH_HANG_DIR";
/// Environment variable that launch sets for programs in a job with `run.hang_timeout`: the number
/// of the signal at which Python writes the stacks of its threads.
pub const LAUNCH_HANG_SIGNAL: &str = "LAUNCH_HANG_SIGNAL";
/// Environment variable that launch sets for programs with `run.hang_timeout`: the interval in
/// milliseconds at which launch's Python module in the worker publishes its collective counts.
pub const LAUNCH_HANG_INTERVAL_MS: &str = "LAUNCH_HANG_INTERVAL_MS";
/// Environment variable that launch sets for commands of `launch exec`: the process id of the
/// worker next to which the command runs.
pub const LAUNCH_WORKER_PID: &str = "LAUNCH_WORKER_PID";
/// Environment variable that agents and built-in workers read: `client-address client-port
/// server-address server-port`, which sshd sets. The server address is the address at which the
/// controller reached the host.
pub const SSH_CONNECTION: &str = "SSH_CONNECTION";
/// Environment variable for tests: makes the worker of a chosen rank kill itself, or loop
/// endlessly, at a chosen point of its execution. docs/testing.md lists the values.
pub const LAUNCH_FAULT: &str = "LAUNCH_FAULT";
/// Environment variable for tests: the file to which each built-in worker appends its rank and the
/// number of places it has passed at which `LAUNCH_FAULT` can kill it.
pub const LAUNCH_FAULT_COUNT: &str = "LAUNCH_FAULT_COUNT";
/// Environment variable that Slurm sets and an agent (launch's process on each node) reads: the
/// name of the agent's node.
pub const SLURMD_NODENAME: &str = "SLURMD_NODENAME";
/// Environment variable that Slurm sets and an agent (launch's process on each node) reads: the
/// number of the Slurm step that the agent is part of. The variable is not set outside of Slurm
/// steps.
pub const SLURM_STEP_ID: &str = "SLURM_STEP_ID";
/// Environment variable that launch reads: the number of nodes (machines on which the user starts
/// launch) that form one job, `N` or `MIN:MAX` (`--nodes`).
pub const LAUNCH_NODES: &str = "LAUNCH_NODES";
/// Environment variable that launch reads: the number of this node among the nodes on which the
/// user starts launch, from 0 (`--node-rank`).
pub const LAUNCH_NODE_RANK: &str = "LAUNCH_NODE_RANK";
/// Environment variable that launch reads: the address at which node 0 listens for the other nodes
/// that join its run (`--rendezvous`).
pub const LAUNCH_RENDEZVOUS: &str = "LAUNCH_RENDEZVOUS";
/// Environment variable that launch reads: the file with the secret key by which the nodes of a job
/// recognize each other (`--key-file`).
pub const LAUNCH_KEY_FILE: &str = "LAUNCH_KEY_FILE";
/// Environment variable that launch reads: `1` lets other nodes join a run without a secret key
/// (`--insecure`).
pub const LAUNCH_INSECURE: &str = "LAUNCH_INSECURE";
/// Environment variable that launch reads: the id of the batch job that started launch, such as the
/// UID of a JobSet.
pub const LAUNCH_BATCH_JOB: &str = "LAUNCH_BATCH_JOB";
/// Environment variable for tests: the number of agents (launch's processes that start workers) on
/// this machine, each of which stands for a host.
pub const LAUNCH_LOCAL_AGENTS: &str = "LAUNCH_LOCAL_AGENTS";
/// Environment variable for tests: the number of accelerators that launch assumes on this machine,
/// instead of asking the driver. `8` stands for NVIDIA GPUs, `npu:8` for another kind, and
/// `cuda:2,xpu:1` for several.
pub const LAUNCH_GPUS: &str = "LAUNCH_GPUS";
/// Environment variable that launch and built-in workers read: the filter of the debug log, such as
/// `agent=debug,info`.
pub const LAUNCH_LOG: &str = "LAUNCH_LOG";
/// Environment variable that built-in workers read: the best instruction set that they may use on a
/// CPU, `avx512`, `avx2` or `scalar`. It does not change the bits of any result.
pub const LAUNCH_MAX_CPU_ISA: &str = "LAUNCH_MAX_CPU_ISA";
/// Environment variable that launch reads: any value except an empty one disables color
/// (<https://no-color.org>).
pub const NO_COLOR: &str = "NO_COLOR";
/// Environment variable that launch reads: the path of the socket of the SSH agent.
pub const SSH_AUTH_SOCK: &str = "SSH_AUTH_SOCK";

/// Returns whether an environment variable selects the language or another part of the locale.
pub fn is_locale_variable(name: &str) -> bool {
    matches!(name, "LANG" | "LANGUAGE") || name.starts_with("LC_")
}
