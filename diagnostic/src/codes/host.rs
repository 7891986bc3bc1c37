//! The diagnostic codes (names with explanations) of errors about hosts: their hardware, the agents
//! and workers on them, and the results of `launch check`.

codes! {
    // --- the executable on a host --------------------------------------------------------------
    EXECUTABLE_UNREADABLE: Cluster = "executable-unreadable" {
        summary: "launch could not read its own executable.",
        cause: "`/proc` is not mounted, or the file system of the executable failed.",
        remedy: "Mount `/proc`, or move the executable to another file system.",
    }
    EXECUTABLE_REPLACED: Cluster = "executable-replaced" {
        summary: "The executable of launch was replaced or removed while launch was running.",
        cause: "An upgrade or a cleanup changed the file.",
        remedy: "Start the job again.",
    }
    EXECUTABLE_COPY_FAILED: Cluster = "executable-copy-failed" {
        summary: "The executable of launch could not be copied to a host.",
        cause: "The message contains the reason that the host reported.",
        remedy: "Try to copy a file to `~/.cache` on the host with `scp`.",
    }
    EXECUTABLE_DISK_FULL: Cluster = "executable-disk-full" {
        summary: "A disk of a host is full, so the executable of launch could not be copied to it.",
        cause: "The file system of the cache directory (`~/.cache`) has no free space.",
        remedy: "Free some space in the home directory, or set `XDG_CACHE_HOME` on the host to another directory.",
    }
    EXECUTABLE_QUOTA_EXCEEDED: Cluster = "executable-quota-exceeded" {
        summary: "The disk quota of the user is exceeded, so the executable of launch could not be copied to a host.",
        cause: "The home directory of the user has reached its quota.",
        remedy: "Free some space in the home directory, or set `XDG_CACHE_HOME` on the host to another directory.",
    }
    EXECUTABLE_CACHE_UNWRITABLE: Cluster = "executable-cache-unwritable" {
        summary: "The cache directory of a host is not writable.",
        cause: "The directory belongs to another user, or its file system is mounted read-only.",
        remedy: "Make `~/.cache` writable, or set `XDG_CACHE_HOME` on the host to another directory.",
    }
    EXECUTABLE_COPY_DAMAGED: Cluster = "executable-copy-damaged" {
        summary: "The copy of the executable on a host differs from the original.",
        cause: "The transfer was cut short, or the disk or the memory of the host is faulty.",
        remedy: "Start again. If the error persists, check the disk and the memory of the host.",
    }
    EXECUTABLE_NOT_ALLOWED: Cluster = "executable-not-allowed" {
        summary: "A host does not allow programs to run from its cache directory.",
        cause: "The file system is mounted with `noexec`, or a security policy forbids it.",
        remedy: "Mount the file system with `exec`, or set `XDG_CACHE_HOME` on the host to another directory.",
    }
    EXECUTABLE_ARCHITECTURE_MISMATCH: Cluster = "executable-architecture-mismatch" {
        summary: "A host has another CPU architecture than this machine.",
        cause: "All hosts of a job must have the architecture that launch was built for.",
        remedy: "Remove the host from the job, or start the job from a machine with the architecture of the hosts.",
    }
    EXECUTABLE_LIBC_TOO_OLD: Cluster = "executable-libc-too-old" {
        summary: "The C library of a host is older than launch requires.",
        cause: "launch was built on a newer system.",
        remedy: "Build launch on, or for, the oldest system of the cluster.",
    }
    EXECUTABLE_NOT_RUNNABLE: Cluster = "executable-not-runnable" {
        summary: "The executable of launch does not run on a host.",
        cause: "A library is missing, or the cached copy is damaged.",
        remedy: "Remove `~/.cache/launch/bin` on the host, and run the command again. launch then copies the executable again.",
    }
    EXECUTABLE_REMOVED: Cluster = "executable-removed" {
        summary: "The executable of launch was copied to a host, but it was removed before it could be started.",
        cause: "A program on the host cleans `~/.cache/launch`.",
        remedy: "Exclude the directory from the cleanup, or set `XDG_CACHE_HOME` on the host to another directory.",
    }

    // --- agents and control connections --------------------------------------------------------
    HOST_UNKNOWN: Cluster = "host-unknown" {
        summary: "An agent was requested on a host that the job does not have.",
        cause: "The list of hosts changed while the job was running, or Slurm removed the node from the allocation.",
        remedy: "Compare the hosts of the job with `launch check` and `scontrol show job`.",
    }
    AGENT_START_FAILED: Cluster = "agent-start-failed" {
        summary: "The agent of a host could not be started.",
        cause: "The message contains the reason that the operating system reported, such as a limit of processes or open files.",
        remedy: "Check the limits with `ulimit -a`.",
    }
    AGENT_CONTROLLER_UNREACHABLE: Cluster = "agent-controller-unreachable" {
        summary: "An agent could not connect to any address of its controller.",
        cause: "A firewall blocks the TCP connection between the nodes, or the controller ended.",
        remedy: "Open the ports between the nodes, or set `cluster.interface` to the network that they share.",
    }
    TREE_PARENT_UNREACHABLE: Cluster = "tree-parent-unreachable" {
        summary: "An agent could not connect to another agent that was to pass on its control connection.",
        cause: "A firewall blocks TCP connections between the hosts, or the hosts share no network.",
        remedy: "Open the ports between the hosts, set `cluster.interface` to the network that they share, or set `cluster.ssh.fanout` to the number of hosts, so that the controller is connected with each of them.",
    }
    TREE_CONNECTION_LOST: Cluster = "tree-connection-lost" {
        summary: "The control connection of an agent ended in the tree of agents.",
        cause: "The agent or its host ended, or the network between the hosts failed.",
        remedy: "Check that the host is up; its kernel log names an agent that was killed.",
    }
    CONTROL_CONNECTION_LOST: Cluster = "control-connection-lost" {
        summary: "The control connection between the controller and an agent ended.",
        cause: "The agent or its host ended, or the network between them failed.",
        remedy: "Check that the host is up. If the kernel killed the agent, the kernel log of the host reports this.",
    }
    CONTROL_MESSAGE_INVALID: Cluster = "control-message-invalid" {
        summary: "A control message could not be decoded.",
        cause: "The other side is another version of launch, or not launch at all.",
        remedy: "Install the same build of launch on every host.",
    }
    CONTROL_MESSAGE_TOO_LONG: Cluster = "control-message-too-long" {
        summary: "A control message is longer than 16 MiB.",
        cause: "The plan of a host is too large, or the other side is not launch.",
        remedy: "Reduce the environment and the commands of the workers.",
    }
    AGENT_UNREACHABLE: Cluster = "agent-unreachable" {
        summary: "The agent of a run is alive on a host, but does not answer on its local socket.",
        cause: "The agent is suspended, or belongs to another build of launch.",
        remedy: "Check the state of the process `launch-agent` on the host with `ps -o stat`, and attach with the build that started the run.",
    }
    HANDSHAKE_FAILED: Cluster = "handshake-failed" {
        summary: "Two processes of a job did not prove to each other that they hold the key of the job.",
        cause: "Another program connected, the builds of launch differ, or an agent of an earlier start connected.",
        remedy: "Install the same build of launch on every node.",
    }
    JOIN_NODES_INVALID: Usage = "join-nodes-invalid" {
        summary: "The number of nodes is missing or not valid, or the number of this node is not valid.",
        cause: "An option or an environment variable is missing or malformed, or the number of this node is not below the number of nodes.",
        remedy: "Start launch once on each node, with `--nodes N --node-rank K` and K from 0 to N - 1.",
    }
    BATCH_JOB_ID_INVALID: Usage = "batch-job-id-invalid" {
        summary: "The variable `LAUNCH_BATCH_JOB` does not contain the id of a batch job.",
        cause: "The value is longer than 128 characters, or contains spaces or characters that are not ASCII.",
        remedy: "Set the variable to an id that the scheduler keeps when it starts the job again, or unset it.",
    }
    BATCH_HOSTS_MISSING: Cluster = "batch-hosts-missing" {
        summary: "The job needs the hosts of a batch job of PBS or LSF, and launch does not run inside one.",
        cause: "With `cluster.hosts: pbs`, `PBS_NODEFILE` is not set or names an empty file. With `lsf`, `LSB_MCPU_HOSTS` and `LSB_HOSTS` are not set.",
        remedy: "Start launch inside a batch job (qsub, bsub), or name the hosts in `cluster.hosts`.",
    }
    JOIN_RENDEZVOUS_INVALID: Usage = "join-rendezvous-invalid" {
        summary: "The address at which the nodes of a job meet is missing or not valid.",
        cause: "Options or environment variables describe this process as one of several nodes, but no option, variable or key contains the address of node 0.",
        remedy: "Add the address of node 0 on every node: `--rendezvous HOST:PORT`.",
    }
    JOIN_KEY_MISSING: Usage = "join-key-missing" {
        summary: "The nodes of a job have no key with which they recognize each other.",
        cause: "This process is one of several nodes. No option, environment variable or key of the job names a key file, or allows nodes without a key.",
        remedy: "Give every node a file with the same key: `--key-file FILE`, or set `LAUNCH_KEY_FILE`.",
    }
    JOIN_KEY_INVALID: Usage = "join-key-invalid" {
        summary: "The file with the key of the nodes is not usable.",
        cause: "The file is missing, has fewer than 32 or more than 4096 bytes, or every user of the machine has access to it.",
        remedy: "Create the file with `openssl rand -hex 32 > FILE` and `chmod 600 FILE`, and copy it to every node.",
    }
    JOIN_OPTION_UNSUPPORTED: Usage = "join-option-unsupported" {
        summary: "An option or key cannot be used in a job whose nodes join.",
        cause: "`cluster.hosts` selects hosts that do not join. Or the option requires that launch starts processes on the other nodes, or that the job outlives node 0.",
        remedy: "Remove the option. If the job names hosts, but its nodes are to join, set `cluster.hosts: join`.",
    }
    JOIN_STARTED_PER_WORKER: Usage = "join-started-per-worker" {
        summary: "launch was started several times on a node, once for each worker.",
        cause: "mpirun, torchrun or another launcher started launch once for each process.",
        remedy: "Start launch once on each node, for example with `mpirun --map-by ppr:1:node`.",
    }
    JOIN_ADDRESS_IN_USE: Cluster = "join-address-in-use" {
        summary: "Node 0 cannot listen at the rendezvous address.",
        cause: "Another job or program uses the port, or the user is not allowed to use the port, such as a port below 1024.",
        remedy: "Choose another port in `--rendezvous`, on every node.",
    }
    JOIN_TIMEOUT: Cluster = "join-timeout" {
        summary: "The nodes of a job did not meet in time.",
        cause: "A node was not started, or it cannot reach node 0 at the rendezvous address.",
        remedy: "Start every node, and check the address and the firewall. To wait longer, increase `cluster.join.timeout`.",
    }
    JOIN_REJECTED: Cluster = "join-rejected" {
        summary: "Node 0 does not accept another node.",
        cause: "The key, the job, the number of nodes or the version of launch differs from that of node 0, another node has the same rank, or all nodes have already joined.",
        remedy: "Start every node with the same build of launch, job, key file and number of nodes. Give each node a different rank.",
    }
    JOIN_NODE_LOST: Cluster = "join-node-lost" {
        summary: "A node lost its connection to node 0, or its agent ended.",
        cause: "Node 0 was killed or its machine failed, the network failed, or the agent of this node ended.",
        remedy: "Read the output of node 0 for the reason. Start launch again on all nodes whose launch has ended, to resume the job.",
    }
    INVITATION_INVALID: Cluster = "invitation-invalid" {
        summary: "An agent was started without a valid invitation on its standard input.",
        cause: "`launch agent` is started by launch itself, not by hand.",
        remedy: "Start the job with `launch run`.",
    }
    WATCHDOG_FAILED: Cluster = "watchdog-failed" {
        summary: "The watchdog process of an agent could not be started.",
        cause: "The limit of processes of the user on the host is reached.",
        remedy: "Check `ulimit -u` on the host.",
    }

    // --- starting workers on a host ------------------------------------------------------------
    HOST_IN_USE: Cluster = "host-in-use" {
        summary: "An agent of an earlier attempt of the run is still alive on a host.",
        cause: "The host was suspended or cut off from the network and has returned. Its agent has not ended yet.",
        remedy: "Wait a few seconds and run the command again, or end the old agent (`launch-agent`) on the host.",
    }
    WORKER_PROGRAM_MISSING: Cluster = "worker-program-missing" {
        summary: "The program of the workers does not exist on a host.",
        cause: "The path is wrong, the program is not in PATH, or the interpreter in its first line is missing.",
        remedy: "Correct `run.command`, or install the program on every host.",
    }
    WORKER_PROGRAM_NOT_EXECUTABLE: Cluster = "worker-program-not-executable" {
        summary: "The program of the workers is not an executable file.",
        cause: "The file has no execute permission, or its file system is mounted with `noexec`.",
        remedy: "Run `chmod +x FILE`, or name the interpreter in `run.command`.",
    }
    WORKER_DIRECTORY_MISSING: Cluster = "worker-directory-missing" {
        summary: "The working directory of the workers does not exist on a host.",
        cause: "`run.workdir` is wrong, or names a file system that the host does not mount.",
        remedy: "Create the directory on every host, or correct `run.workdir`.",
    }
    WORKER_CPU_UNAVAILABLE: Cluster = "worker-cpu-unavailable" {
        summary: "The plan binds a worker to a CPU that the agent may not use.",
        cause: "A container, a control group or `taskset` limits the CPUs of the agent.",
        remedy: "Use `run.cpu_bind: none`, or lift the limit.",
    }
    WORKER_LOG_UNWRITABLE: Cluster = "worker-log-unwritable" {
        summary: "The log of a worker could not be opened or written.",
        cause: "The disk is full, or the directory of the logs is not writable on the host.",
        remedy: "Free some space, or change `run.logs.dir`.",
    }
    PROCESS_LIMIT_REACHED: Cluster = "process-limit-reached" {
        summary: "A worker could not be started because the limit of processes is reached.",
        cause: "The limit of the user (`ulimit -u`) or of the control group (`pids.max`) is too low.",
        remedy: "Raise the limit on the host.",
    }
    FILE_LIMIT_REACHED: Cluster = "file-limit-reached" {
        summary: "A worker could not be started because the limit of open files is reached.",
        cause: "The agent needs four open files for each worker.",
        remedy: "Raise the hard limit of open files on the host (`ulimit -Hn`).",
    }

    // --- the environment of workers ------------------------------------------------------------
    ACTIVATION_FAILED: Cluster = "activation-failed" {
        summary: "An environment of `run.activate` could not be activated on a host.",
        cause: "A command of the script, of the login profile, of `conda activate` or of `module load` failed. The message contains its exit code, and the causes are the last lines of its output.",
        remedy: "Run the activation in a login shell (`bash -l`) on the host.",
    }
    ACTIVATION_TIMEOUT: Cluster = "activation-timeout" {
        summary: "Activating the environments of `run.activate` took too long on a host.",
        cause: "The login profile or the script waits for input or for a slow file system.",
        remedy: "Run the activation in a login shell (`bash -l`) on the host, or raise `run.activate_timeout`.",
    }
    ACTIVATION_VENV_MISSING: Cluster = "activation-venv-missing" {
        summary: "A virtual environment of `run.activate` does not exist on a host.",
        cause: "The directory has no readable file `bin/activate`.",
        remedy: "Create the environment on every host (`python3 -m venv DIR`), or correct `run.activate`.",
    }
    ACTIVATION_SCRIPT_MISSING: Cluster = "activation-script-missing" {
        summary: "A script of `run.activate` does not exist on a host.",
        cause: "The path is wrong, or its file system is not mounted on the host.",
        remedy: "Copy the script to every host, or correct `run.activate`.",
    }
    ACTIVATION_CONDA_MISSING: Cluster = "activation-conda-missing" {
        summary: "A host has no `conda` command.",
        cause: "The login profile does not define the command, and Conda is not in one of its usual directories.",
        remedy: "Run `conda init` on the host, or set `CONDA_EXE` in the login profile.",
    }
    ACTIVATION_MODULES_MISSING: Cluster = "activation-modules-missing" {
        summary: "A host has no `module` command.",
        cause: "The login profile does not define the command, and environment modules are not installed in a usual directory.",
        remedy: "Define `module` in the login profile of the host, or activate a `script`.",
    }
    ACTIVATION_ENVIRONMENT_INVALID: Cluster = "activation-environment-invalid" {
        summary: "The environment that `run.activate` produced on a host is not usable.",
        cause: "The environment is larger than 2 MiB, or a script wrote to descriptor 9.",
        remedy: "Reduce the environment, or use another descriptor in the script.",
    }
    WORKER_WRAPPER_MISSING: Cluster = "worker-wrapper-missing" {
        summary: "The program of `run.wrap` does not exist on a host.",
        cause: "The path is wrong, or the program is not in PATH.",
        remedy: "Correct `run.wrap`, or install the program on every host.",
    }
    CONTAINER_RUNTIME_MISSING: Cluster = "container-runtime-missing" {
        summary: "The program that starts containers (`run.container.runtime`) does not exist on a host.",
        cause: "The runtime is not installed on the host, or it is not in PATH, for example because it is an environment module.",
        remedy: "Install the runtime on every host, activate its module with `run.activate`, or select another runtime.",
    }
    CONTAINER_MOUNT_UNUSABLE: Cluster = "container-mount-unusable" {
        summary: "A path cannot be mounted in the container of a worker.",
        cause: "The path does not exist on the host, contains a colon or a comma, or must be read-only, which Charliecloud does not support.",
        remedy: "Correct `run.container.mounts`, or move the working directory or the run directory to a path without colons and commas.",
    }
    TERMINAL_MISSING: Cluster = "terminal-missing" {
        summary: "A rank cannot get the terminal that `run.terminal` or `--pdb` requests.",
        cause: "launch does not run in a terminal, or it runs in the background (`--detach`).",
        remedy: "Run launch in a terminal, or remove `run.terminal`.",
    }
    TERMINAL_RANK_REMOTE: Cluster = "terminal-rank-remote" {
        summary: "The rank of `run.terminal` is on another host than the terminal.",
        cause: "Only workers on the machine on which launch runs can use its terminal.",
        remedy: "Start launch on the host of the rank, or use `launch exec` to inspect the rank.",
    }
    TERMINAL_RANK_UNKNOWN: Cluster = "terminal-rank-unknown" {
        summary: "The job does not have the rank of `run.terminal`.",
        cause: "The job has fewer workers.",
        remedy: "Correct `run.terminal`; ranks count from 0.",
    }
    WRAP_RANK_UNKNOWN: Cluster = "wrap-rank-unknown" {
        summary: "An item of `run.wrap` names a rank that the job does not have. This is a warning.",
        cause: "The job has fewer workers.",
        remedy: "Correct `ranks`; ranks count from 0.",
    }

    // --- answers to `launch check` -------------------------------------------------------------
    PEER_ADDRESS_MISSING: Cluster = "peer-address-missing" {
        summary: "A host has no network address that other hosts can reach.",
        cause: "No network interface is up except the loopback interface.",
        remedy: "Check `ip address` on the host.",
    }
    PEER_MISMATCH: Cluster = "peer-mismatch" {
        summary: "Another program answers at the address of a host.",
        cause: "Two hosts have the same address, or a proxy or NAT is between them.",
        remedy: "Check the addresses of the hosts (`ip address`).",
    }
    PROBE_FAILED: Cluster = "probe-failed" {
        summary: "An agent could not answer a probe of `launch check`.",
        cause: "A limit of threads is reached on the host, or the agent has a bug.",
        remedy: "Check `ulimit -u` on the host.",
    }

    // --- inventory -----------------------------------------------------------------------------
    INVENTORY_UNREADABLE: Cluster = "inventory-unreadable" {
        summary: "The CPUs and the memory of this machine could not be determined.",
        cause: "launch reads them from /proc, which is not mounted or not readable.",
        remedy: "Mount /proc.",
    }
    MEMORY_INSUFFICIENT: Cluster = "memory-insufficient" {
        summary: "The workers need more memory than the machine or its smallest GPU has. This is a warning if the need is estimated, and an error if the parameters alone do not fit.",
        cause: "The model, the batch or the optimizer states are too large for the number of hosts or GPUs.",
        remedy: "Use a smaller `train.batch.micro`, `train.recompute: block`, a higher `train.zero.stage` or `train.zero.offload`.",
    }

    MEMORY_COPIES_UNPLACED: Cluster = "memory-copies-unplaced" {
        summary: "The job has too few hosts for the copies that `checkpoint.memory.copies` requires, so fewer copies are kept. This is a warning.",
        cause: "Each copy must be kept by a host other than that of the worker, and the attempt has too few other hosts.",
        remedy: "Lower `checkpoint.memory.copies`, or use more hosts.",
    }

    // --- planning ------------------------------------------------------------------------------
    HOSTS_TOO_FEW: Job = "hosts-too-few" {
        summary: "A key requires more hosts than the job has.",
        cause: "`cluster.use_hosts` or `run.min_hosts` is larger than the number of hosts.",
        remedy: "Name more hosts, or lower the number.",
    }
    WORKERS_OUT_OF_RANGE: Job = "workers-out-of-range" {
        summary: "The number of workers of the job or of a host is outside of the supported range.",
        cause: "The built-in training has 1 to 1024 workers, a program 1 to 1048576, and a host at most \
                1024.",
        remedy: "Change `cluster.workers_per_host`, the slots of the hosts, or the number of hosts.",
    }
    WORKERS_EXCEED_SLOTS: Job = "workers-exceed-slots" {
        summary: "The job places more workers on a host than the host has slots.",
        cause: "`cluster.workers_per_host` is larger than the slots of the hostfile or of Slurm.",
        remedy: "Lower `cluster.workers_per_host`, or give the host more slots.",
    }
    SLOTS_EXCEED_GPUS: Job = "slots-exceed-gpus" {
        summary: "A host declares more slots than it has GPUs for workers.",
        cause: "The hostfile is wrong, a GPU is missing, or `cluster.devices` names fewer GPUs.",
        remedy: "Correct the slots, or set `cluster.devices: cpu`.",
    }
    SLOTS_NOT_GPUS: Job = "slots-not-gpus" {
        summary: "A host filter selects slots by number, but the slots do not correspond to the GPUs of the job.",
        cause: "The job uses no GPUs on the host, or `cluster.devices` also selects GPUs.",
        remedy: "Remove one of the two selections; on CPUs, select the first slots, beginning with 0.",
    }
    GPU_INDEX_UNKNOWN: Job = "gpu-index-unknown" {
        summary: "The job names a GPU that the host does not have.",
        cause: "The numbers count from 0 the GPUs or other accelerators of the host that launch may use. GPUs of NVIDIA are counted in the order of the PCI bus.",
        remedy: "Name GPUs that exist on every host. `launch check` shows the number of GPUs of each host.",
    }
    GPU_REQUIRED: Job = "gpu-required" {
        summary: "`cluster.devices` requires GPUs or other accelerators, and a host has none.",
        cause: "The host has none, a variable such as `CUDA_VISIBLE_DEVICES` or a control group hides it, or the driver is not loaded.",
        remedy: "Run the tool that the message names on the host, exclude the host, or set `cluster.devices: cpu`.",
    }
    GPUS_TOO_FEW: Job = "gpus-too-few" {
        summary: "A host has fewer GPUs than its workers need.",
        cause: "Every worker needs a GPU, or a share of one (`cluster.workers_per_gpu`).",
        remedy: "Use fewer workers, or let several workers share a GPU.",
    }
    ACCELERATORS_MIXED: Job = "accelerators-mixed" {
        summary: "A host has accelerators of several kinds, and the job does not choose one.",
        cause: "The number of workers or their devices depend on the accelerators, such as the GPUs of two vendors.",
        remedy: "Choose a kind with `cluster.devices`, for example `cuda` or `xpu`.",
    }
    ACCELERATORS_NOT_HIDDEN: Job = "accelerators-not-hidden" {
        summary: "`cluster.devices: cpu` is set, and a host has accelerators that launch cannot hide from programs.",
        cause: "The vendor documents no value of an environment variable that hides all devices.",
        remedy: "Set `cluster.devices: auto`, and select the CPU in the program.",
    }
    ACCELERATORS_UNNAMED: Job = "accelerators-unnamed" {
        summary: "Workers cannot be assigned to accelerators, because the names of the accelerators are unknown.",
        cause: "The driver does not provide the numbers of the devices, or the vendor's tool that lists UUIDs is missing or failed.",
        remedy: "Run the tool that the message names on the host. With `run.visible_devices: all`, no names are needed.",
    }
    ACCELERATORS_SHARED: Job = "accelerators-shared" {
        summary: "A host has fewer accelerators than workers. This is a warning.",
        cause: "`cluster.workers_per_host` is larger than the number of accelerators, so a program that takes the device with the number `LOCAL_RANK` fails.",
        remedy: "Use at most one worker for each accelerator, unless the program shares them.",
    }
    MIG_INSTANCES_SHARED: Job = "mig-instances-shared" {
        summary: "Several workers of a host would use the same MIG instance.",
        cause: "CUDA shows only one MIG instance to a process, and `run.visible_devices` is `all`.",
        remedy: "Set `run.visible_devices: one`, which gives each worker its own instance.",
    }
    CPU_BINDING_IMPOSSIBLE: Job = "cpu-binding-impossible" {
        summary: "The workers cannot be bound to CPUs as `run.cpu_bind` requires.",
        cause: "The host has fewer CPUs than workers.",
        remedy: "Use fewer workers, or `run.cpu_bind: auto`.",
    }
    THREADS_INVALID: Job = "threads-invalid" {
        summary: "`run.env.OMP_NUM_THREADS` is not a number of threads.",
        cause: "The built-in training accepts a single number from 1 to 4096.",
        remedy: "Write a number, or remove the variable to use each worker's share of the cores.",
    }
    ADDRESS_UNREACHABLE: Job = "address-unreachable" {
        summary: "The host of rank 0 has no address that other hosts can reach.",
        cause: "The host has only loopback or link-local addresses, or `cluster.interface` excludes all others.",
        remedy: "Give the host an address, or choose another interface.",
    }
    CPU_OVERSUBSCRIBED: Job = "cpu-oversubscribed" {
        summary: "A host has fewer CPU cores than workers. This is a warning.",
        cause: "The job places more workers on the host than the host has cores, so several workers share a core.",
        remedy: "Use at most one worker for each core.",
    }
    LOG_RANK_UNKNOWN: Job = "log-rank-unknown" {
        summary: "`run.logs.show` names a rank that the job does not have. This is a warning.",
        cause: "Ranks are numbered from 0 to the number of workers minus 1.",
        remedy: "Remove the rank from `run.logs.show`.",
    }
    ENV_VALUE_INVALID: Job = "env-value-invalid" {
        summary: "A variable of `run.env` that is given by reference has a value that cannot be used.",
        cause: "The value is not UTF-8 text, contains a NUL character, or is longer than 64 KiB.",
        remedy: "Correct the value in the file or in the environment.",
    }
    PASS_ENV_INVALID: Job = "pass-env-invalid" {
        summary: "A pattern of `run.pass_env` is not valid.",
        cause: "Brackets or braces are unbalanced.",
        remedy: "Write patterns such as `HF_*`.",
    }

    // --- launch check --------------------------------------------------------------------------
    LOGIN_SHELL_PRINTS: Cluster = "login-shell-prints" {
        summary: "The login shell of a host prints text. This is a warning.",
        cause: "A startup file such as .bashrc prints something in shells that are not interactive.",
        remedy: "Print only in interactive shells; launch ignores the text, but scp and rsync may fail.",
    }
    ACCELERATORS_DENIED: Cluster = "accelerators-denied" {
        summary: "Permissions or a control group deny all accelerators of a host to launch. This is a warning.",
        cause: "The user is not in the group of the device nodes, or the scheduler gave no devices to the job.",
        remedy: "Add the user to the group (such as `render` or `video`), or request devices from the scheduler.",
    }
    ARCHITECTURE_DIFFERS: Cluster = "architecture-differs" {
        summary: "The hosts of the job have different processor architectures.",
        cause: "The job names hosts of several kinds.",
        remedy: "Use hosts of one architecture.",
    }
    VERSION_DIFFERS: Cluster = "version-differs" {
        summary: "The executable of launch on a host differs from that on the first host.",
        cause: "The copy on the host was replaced.",
        remedy: "Remove ~/.cache/launch/bin on the host; launch copies itself again.",
    }
    WORKDIR_MISSING: Cluster = "workdir-missing" {
        summary: "`run.workdir` does not exist on a host.",
        cause: "The directory is on a disk that the hosts do not share.",
        remedy: "Create the directory on the host, or use a directory that all hosts have.",
    }
    DIRECTORY_UNWRITABLE: Cluster = "directory-unwritable" {
        summary: "A directory that the job writes to is not writable on a host.",
        cause: "The permissions do not allow writing, or the file system is read-only.",
        remedy: "Make the directory writable for the user on this host.",
    }
    DISK_NEARLY_FULL: Cluster = "disk-nearly-full" {
        summary: "Less than 1 GiB is free in a directory that the job writes to. This is a warning.",
        cause: "The disk is nearly full.",
        remedy: "Free disk space; checkpoints and logs need it.",
    }
    LIMIT_TOO_LOW: Cluster = "limit-too-low" {
        summary: "A limit of the operating system is low for a training job. This is a warning.",
        cause: "`nofile`, `nproc` or `memlock` is limited for the user.",
        remedy: "Raise the limit in /etc/security/limits.conf.",
    }
    SHARED_MEMORY_SMALL: Cluster = "shared-memory-small" {
        summary: "/dev/shm is missing or smaller than 1 GiB. This is a warning.",
        cause: "Containers get 64 MiB by default.",
        remedy: "Mount a larger tmpfs at /dev/shm (docker: --shm-size).",
    }
    CLOCK_SKEWED: Cluster = "clock-skewed" {
        summary: "The clock of a host differs by more than a second from the clock of this machine. This is a warning.",
        cause: "The clocks are not synchronized.",
        remedy: "Synchronize the clocks with NTP, so that times in logs can be compared.",
    }
    PEER_UNREACHABLE: Cluster = "peer-unreachable" {
        summary: "A host cannot open a TCP connection to another host of the job.",
        cause: "A firewall blocks the ports, or there is no route.",
        remedy: "Open the ports between the hosts, or correct the route.",
    }
    NETWORK_SLOW: Cluster = "network-slow" {
        summary: "A host, or the path between two hosts, transfers data much more slowly than the others.",
        cause: "A cable or port is damaged, an interface runs at a lower speed, or other programs use the network.",
        remedy: "Check the cable, the port and the switch; look for errors in `ip -s link` and `ethtool -S`.",
    }
    LARGE_PACKETS_LOST: Cluster = "large-packets-lost" {
        summary: "Large packets between two hosts are lost, although small packets arrive.",
        cause: "The MTU of a switch or host is smaller than that of the sender, or a firewall drops ICMP messages.",
        remedy: "Set the same MTU on all hosts and switches, and let ICMP pass.",
    }
    NETWORK_LATENCY_HIGH: Cluster = "network-latency-high" {
        summary: "Round trips to a host take much longer than those between other hosts. This is a warning.",
        cause: "The route to the host is long, or its network is busy.",
        remedy: "Check the route to the host, and whether other programs use its network.",
    }
    PACKETS_LOST: Cluster = "packets-lost" {
        summary: "More than 1 % of the TCP segments that a host sent were lost. This is a warning.",
        cause: "A cable or port is damaged, or a switch is overloaded.",
        remedy: "Look for errors in `ip -s link` and `ethtool -S`, and in the counters of the switch.",
    }
    NETWORK_LINK_UNSUITABLE: Cluster = "network-link-unsuitable" {
        summary: "The interface of a host has a lower MTU or speed than those of other hosts, or half duplex. This is a warning.",
        cause: "The interface is configured differently, or a cable limits its speed.",
        remedy: "Compare `ip link` and `ethtool` on the hosts.",
    }
    NETWORK_CHECK_INCOMPLETE: Cluster = "network-check-incomplete" {
        summary: "The time limit ended the measurements of `launch check --network`. This is a warning.",
        cause: "Many hosts are unreachable or slow.",
        remedy: "Correct the reported problems, or run the check on fewer hosts.",
    }
    RDMA_UNUSABLE: Cluster = "rdma-unusable" {
        summary: "An InfiniBand, RoCE or EFA device of a host is missing, down, slow or not accessible. This is a warning.",
        cause: "A cable or driver is missing, no subnet manager runs, or the user may not use the device.",
        remedy: "Compare the output of `ibv_devinfo` on the hosts.",
    }
    GPU_DRIVER_UNUSABLE: Cluster = "gpu-driver-unusable" {
        summary: "A host has GPU devices, and their driver cannot be used. This is a warning.",
        cause: "The driver is not loaded, or its library does not match the kernel module.",
        remedy: "Run `nvidia-smi` on the host, and reinstall the driver or restart the host.",
    }
    GPU_COUNT_DIFFERS: Cluster = "gpu-count-differs" {
        summary: "A host has another number of GPUs than the first host. This is a warning.",
        cause: "The hosts differ, or a GPU failed.",
        remedy: "Look for a missing GPU with `nvidia-smi`.",
    }
    GPUS_FEWER_THAN_SLOTS: Cluster = "gpus-fewer-than-slots" {
        summary: "A host has fewer GPUs than slots in the hostfile. This is a warning.",
        cause: "The hostfile is wrong, or a GPU is missing. In a job on GPUs, ranks would share GPUs.",
        remedy: "Correct the slots of the hostfile.",
    }
    LIBRARY_VERSION_DIFFERS: Cluster = "library-version-differs" {
        summary: "A host has another version of the driver or a GPU library than the first host. This is a warning.",
        cause: "The hosts were installed at different times.",
        remedy: "Install the same version on all hosts.",
    }
    CUDA_LIBRARY_MISSING: Cluster = "cuda-library-missing" {
        summary: "A CUDA library that the job needs cannot be opened on a host.",
        cause: "The library is not installed, or not in a directory that is searched.",
        remedy: "Install the library, or name its directory in `cluster.cuda_library_paths`.",
    }
    NCCL_MISSING: Cluster = "nccl-missing" {
        summary: "NCCL cannot be opened on a host. This is a warning.",
        cause: "NCCL is not installed. Only jobs in which each worker has its own GPU need NCCL.",
        remedy: "Install NCCL, or use collectives through host memory (`cluster.comm_backend`).",
    }
    GPU_MEMORY_ERRORS: Cluster = "gpu-memory-errors" {
        summary: "A GPU has memory errors that ECC could not correct, or rows that must be replaced. This is a warning.",
        cause: "The memory of the GPU is defective.",
        remedy: "Reset the GPU (`nvidia-smi --gpu-reset`); replace it if the errors return.",
    }
    GPU_THROTTLED: Cluster = "gpu-throttled" {
        summary: "The clocks of a GPU are throttled. This is a warning.",
        cause: "The GPU is too hot, or its power is limited.",
        remedy: "Check the cooling and the power supply of the host.",
    }
    GPU_MODE_UNSUITABLE: Cluster = "gpu-mode-unsuitable" {
        summary: "A GPU is in a mode that limits how ranks can use it. This is a warning.",
        cause: "The compute mode allows one process only, or the GPU is partitioned (MIG).",
        remedy: "Set `nvidia-smi --compute-mode=DEFAULT`, or disable MIG.",
    }
    GPU_PEER_ACCESS_MISSING: Cluster = "gpu-peer-access-missing" {
        summary: "Two GPUs of a host cannot access each other directly. This is a warning.",
        cause: "An IOMMU or PCIe ACS is enabled, or the GPUs are on different sockets.",
        remedy: "Disable PCIe ACS and the IOMMU; otherwise NCCL transfers through host memory.",
    }
    GPU_LINK_DOWN: Cluster = "gpu-link-down" {
        summary: "NVLink connections of a GPU are down. This is a warning.",
        cause: "A bridge or switch failed.",
        remedy: "Run `nvidia-smi nvlink --status`, and search `dmesg` for `Xid`.",
    }
    GPU_IN_USE: Cluster = "gpu-in-use" {
        summary: "Other processes use a GPU of the job. This is a warning.",
        cause: "Another job or user computes on the GPU.",
        remedy: "Wait until the GPU is free, or exclude it with `cluster.exclude`.",
    }
}
