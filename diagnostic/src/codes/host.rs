//! Codes of errors about hosts, SSH, Slurm and control connections.

codes! {
    // --- SSH: configuration --------------------------------------------------------------------
    SSH_CONFIG_UNREADABLE: Cluster = "ssh-config-unreadable" {
        summary: "An SSH configuration file could not be read.",
        cause: "The file does not exist, is not readable by this user, or is larger than 1 MiB.",
        remedy: "Correct `cluster.ssh.config`, or set it to `none` to read no configuration.",
    }
    SSH_CONFIG_INVALID: Cluster = "ssh-config-invalid" {
        summary: "An SSH configuration file contains a mistake.",
        cause: "A quote is not closed, a keyword has no value, or `Include` is nested too deeply.",
        remedy: "Correct the line that is named, or set `cluster.ssh.config` to another file.",
    }
    SSH_CONFIG_UNSUPPORTED: Cluster = "ssh-config-unsupported" {
        summary: "The SSH configuration uses a keyword for which launch needs OpenSSH's client, and the client failed.",
        cause: "`Match` and the canonicalization of host names are evaluated by `ssh -G`. The client is missing, or it rejects the configuration.",
        remedy: "Install OpenSSH's client on this machine, or set `cluster.ssh.config` to another file.",
    }
    SSH_CONFIG_TOKEN_UNKNOWN: Cluster = "ssh-config-token-unknown" {
        summary: "A path in the SSH configuration contains an unsupported token or variable.",
        cause: "launch expands `%%`, `%d`, `%h`, `%n`, `%p`, `%r` and `%u` in paths, and no variables.",
        remedy: "Set `cluster.ssh.key`, or set `cluster.ssh.config` to another file.",
    }
    SSH_PROXY_UNSUPPORTED: Cluster = "ssh-proxy-unsupported" {
        summary: "The SSH configuration reaches a host through `ProxyCommand`, which launch does not support.",
        cause: "launch connects to a host directly or through jump hosts.",
        remedy: "If the command only passes through another host, use `ProxyJump` or `cluster.ssh.jump`.",
    }
    SSH_JUMP_INVALID: Cluster = "ssh-jump-invalid" {
        summary: "The list of jump hosts is not valid.",
        cause: "An entry is not of the form `USER@HOST:PORT`, or there are more than 4 jump hosts.",
        remedy: "Correct `cluster.ssh.jump`, or `ProxyJump` in the SSH configuration.",
    }

    // --- SSH: connecting -----------------------------------------------------------------------
    HOST_UNKNOWN: Cluster = "host-unknown" {
        summary: "An agent was requested on a host that the job does not have.",
        cause: "The list of hosts changed while the job was running, or Slurm removed the node from the allocation.",
        remedy: "Compare the hosts of the job with `launch check` and `scontrol show job`.",
    }
    SSH_NAME_UNRESOLVED: Cluster = "ssh-name-unresolved" {
        summary: "The name of a host has no address.",
        cause: "The name is misspelled, or DNS and `/etc/hosts` of this machine do not know it.",
        remedy: "Check the name with `getent hosts NAME`, or use an address in the list of hosts.",
    }
    SSH_CONNECT_REFUSED: Cluster = "ssh-connect-refused" {
        summary: "A host rejected the TCP connection to its SSH port.",
        cause: "The host is up, but no SSH server listens on the port.",
        remedy: "Check that sshd runs on the host and that the port is right (`cluster.ssh.port`).",
    }
    SSH_CONNECT_TIMEOUT: Cluster = "ssh-connect-timeout" {
        summary: "A host did not answer the TCP connection to its SSH port in time.",
        cause: "The host is down, or a firewall drops the packets.",
        remedy: "Check that the host is up and that the port is reachable. `cluster.ssh.connect_timeout` sets the limit.",
    }
    SSH_NO_ROUTE: Cluster = "ssh-no-route" {
        summary: "There is no route to a host.",
        cause: "The host is down, or it is in a network that this machine does not reach.",
        remedy: "Check the host and the routes of this machine, or use a jump host (`cluster.ssh.jump`).",
    }
    SSH_CONNECT_FAILED: Cluster = "ssh-connect-failed" {
        summary: "The TCP connection to a host's SSH port failed.",
        cause: "The message contains the reason that the operating system reported.",
        remedy: "Try `ssh HOST` from this machine.",
    }
    SSH_JUMP_FAILED: Cluster = "ssh-jump-failed" {
        summary: "A jump host could not connect to the next host.",
        cause: "The jump host does not reach the host, or its sshd does not allow TCP forwarding (`AllowTcpForwarding`).",
        remedy: "Try `ssh -J JUMP HOST`, and check sshd_config of the jump host.",
    }
    SSH_HANDSHAKE_FAILED: Cluster = "ssh-handshake-failed" {
        summary: "A host accepted the connection, but the SSH handshake failed.",
        cause: "The port does not belong to an SSH server, the server has too many connections that are not logged in (`MaxStartups`), or it offers no common algorithm.",
        remedy: "Try `ssh HOST`. For many hosts behind one server lower `cluster.ssh.fanout`, or raise `MaxStartups` in sshd_config.",
    }
    SSH_HANDSHAKE_TIMEOUT: Cluster = "ssh-handshake-timeout" {
        summary: "A host accepted the connection, but sent no SSH banner in time.",
        cause: "The port does not belong to an SSH server, or the host is overloaded.",
        remedy: "Check the port and the load of the host. `cluster.ssh.connect_timeout` sets the limit.",
    }
    SSH_SESSION_LIMIT: Cluster = "ssh-session-limit" {
        summary: "This machine has no resources left for another SSH connection.",
        cause: "The limit of open files, processes or threads is reached.",
        remedy: "Raise the limits (`ulimit -n`, `ulimit -u`), or lower `cluster.ssh.fanout`.",
    }
    SSH_CONNECTION_ABORTED: Cluster = "ssh-connection-aborted" {
        summary: "The controller closed the connection to a host before the agent was running.",
        cause: "The host took longer than the controller waits, or the job was stopped.",
        remedy: "Read the earlier message about the host.",
    }
    SSH_CONNECTION_LOST: Cluster = "ssh-connection-lost" {
        summary: "The SSH connection to a host was lost.",
        cause: "The host went down, or the network to it failed.",
        remedy: "Check that the host is up and reachable.",
    }

    // --- SSH: host keys ------------------------------------------------------------------------
    SSH_HOST_KEY_UNKNOWN: Cluster = "ssh-host-key-unknown" {
        summary: "The SSH key of a host is not in known_hosts.",
        cause: "This account has never connected to the host, or the host was reinstalled.",
        remedy: "Run `ssh HOST` once and compare the fingerprint, or set `cluster.ssh.known_hosts: accept_new`.",
    }
    SSH_HOST_KEY_CHANGED: Cluster = "ssh-host-key-changed" {
        summary: "A host presents another SSH key than the one in known_hosts.",
        cause: "The host was reinstalled, or another machine answers in its place.",
        remedy: "Find out which of the two causes applies. If the host was reinstalled, remove the old key with `ssh-keygen -R HOST`.",
    }
    SSH_HOST_KEY_TYPE_UNKNOWN: Cluster = "ssh-host-key-type-unknown" {
        summary: "known_hosts has keys of a host, but no key of the type that the host presents.",
        cause: "The host's keys were replaced, or known_hosts was written by a client that prefers another type.",
        remedy: "Compare the fingerprint, then add the key, or remove the old ones with `ssh-keygen -R HOST`.",
    }
    SSH_HOST_KEY_REVOKED: Cluster = "ssh-host-key-revoked" {
        summary: "The SSH key of a host is marked as revoked in known_hosts.",
        cause: "The key was exposed. Another machine may answer with it.",
        remedy: "Give the host a new key.",
    }
    SSH_KNOWN_HOSTS_UNREADABLE: Cluster = "ssh-known-hosts-unreadable" {
        summary: "A known_hosts file could not be read.",
        cause: "The file is not readable by this user, or larger than 64 MiB.",
        remedy: "Correct the permissions of the file, or name another one with `UserKnownHostsFile`.",
    }
    SSH_KNOWN_HOSTS_UNWRITABLE: Cluster = "ssh-known-hosts-unwritable" {
        summary: "The new key of a host could not be added to known_hosts.",
        cause: "`cluster.ssh.known_hosts: accept_new` stores new keys, and the file or its directory is not writable.",
        remedy: "Make the file writable, or add the key yourself and set `cluster.ssh.known_hosts: strict`.",
    }

    // --- SSH: login ----------------------------------------------------------------------------
    SSH_LOGIN_FAILED: Cluster = "ssh-login-failed" {
        summary: "A host rejected every SSH key of this user.",
        cause: "The user has no key on the host, or the wrong user or key is configured.",
        remedy: "Make `ssh USER@HOST` work without a password, for example with `ssh-copy-id`. `cluster.ssh.user` and `cluster.ssh.key` select the user and the key.",
    }
    SSH_KEY_LOCKED: Cluster = "ssh-key-locked" {
        summary: "The login failed, and a key was skipped because it has a passphrase.",
        cause: "launch does not ask for passphrases.",
        remedy: "Add the key to the SSH agent with `ssh-add FILE` before the start.",
    }
    SSH_PUBLICKEY_UNSUPPORTED: Cluster = "ssh-publickey-unsupported" {
        summary: "A host does not accept public keys.",
        cause: "The sshd of the host allows only other methods, such as passwords. launch logs in with keys only.",
        remedy: "Enable `PubkeyAuthentication` in sshd_config of the host.",
    }
    SSH_COMMAND_REJECTED: Cluster = "ssh-command-rejected" {
        summary: "A host accepted the login, but runs no commands.",
        cause: "`ForceCommand`, a restricted key or `MaxSessions` does not allow it.",
        remedy: "Let this user run commands over SSH: `ssh HOST true` must succeed.",
    }
    SSH_SHELL_TIMEOUT: Cluster = "ssh-shell-timeout" {
        summary: "The login shell of a host did not run a command within 30 s.",
        cause: "Its start-up files wait for input, or for a file system that does not answer.",
        remedy: "Try `ssh HOST true`, and look at the start-up files of the login shell.",
    }
    SSH_SHELL_OUTPUT_TOO_LONG: Cluster = "ssh-shell-output-too-long" {
        summary: "The login shell of a host printed more than 256 KiB before it ran a command.",
        cause: "Its start-up files print without end when there is no terminal.",
        remedy: "Let the start-up files print nothing in shells that are not interactive.",
    }
    SSH_SHELL_EXITED: Cluster = "ssh-shell-exited" {
        summary: "The login shell of a host ended before it ran a command.",
        cause: "The login shell is `nologin`, or its start-up files exit in shells that are not interactive.",
        remedy: "Try `ssh HOST true`, and look at the start-up files of the login shell.",
    }
    SSH_ANSWER_INVALID: Cluster = "ssh-answer-invalid" {
        summary: "A host answered a command of launch with unexpected output.",
        cause: "A wrapper around the shell changes the output, or another version of launch is installed in its place.",
        remedy: "Try `ssh HOST true`; it must print nothing.",
    }

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
        remedy: "Mount it with `exec`, or set `XDG_CACHE_HOME` on the host to another directory.",
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
        remedy: "Remove `~/.cache/launch/bin` on the host and run the command again; the executable is then copied again.",
    }
    EXECUTABLE_REMOVED: Cluster = "executable-removed" {
        summary: "The executable of launch was copied to a host, but it was removed before it could be started.",
        cause: "A program on the host cleans `~/.cache/launch`.",
        remedy: "Exclude the directory from the cleanup, or set `XDG_CACHE_HOME` on the host to another directory.",
    }

    // --- Slurm ---------------------------------------------------------------------------------
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
        remedy: "Read the output of srun, and see `sacct -j JOBID`.",
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
        remedy: "See `scontrol ping`, and run the command again when it answers.",
    }
    SLURM_ALLOCATION_ENDED: Cluster = "slurm-allocation-ended" {
        summary: "The Slurm allocation has ended.",
        cause: "Its time limit was reached, or the job was cancelled.",
        remedy: "See `squeue` and `scontrol show job JOBID`, and request a new allocation.",
    }

    // --- agents and control connections --------------------------------------------------------
    AGENT_START_FAILED: Cluster = "agent-start-failed" {
        summary: "The agent of a host could not be started.",
        cause: "The operating system reports the reason, such as a limit of processes or open files.",
        remedy: "Check the limits with `ulimit -a`.",
    }
    AGENT_CONTROLLER_UNREACHABLE: Cluster = "agent-controller-unreachable" {
        summary: "An agent could not connect to any address of its controller.",
        cause: "A firewall blocks the TCP connection between the nodes, or the controller ended.",
        remedy: "Open the ports between the nodes, or set `cluster.interface` to the network that they share.",
    }
    CONTROL_CONNECTION_LOST: Cluster = "control-connection-lost" {
        summary: "The control connection between the controller and an agent ended.",
        cause: "The agent or its host ended, or the network between them failed.",
        remedy: "Check that the host is up; its kernel log names an agent that was killed.",
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
    HANDSHAKE_FAILED: Cluster = "handshake-failed" {
        summary: "Two processes of a job did not prove to each other that they hold the key of the job.",
        cause: "Another program connected, the builds of launch differ, or an agent of an earlier start connected.",
        remedy: "Install the same build of launch on every node.",
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
        cause: "The host was cut off or frozen and has come back; its agent has not ended yet.",
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

    // --- answers to `launch check` -------------------------------------------------------------
    PEER_ADDRESS_MISSING: Cluster = "peer-address-missing" {
        summary: "A host has no network address that others can reach.",
        cause: "No interface except the loopback is up.",
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

    // --- what a host has -----------------------------------------------------------------------
    INVENTORY_UNREADABLE: Cluster = "inventory-unreadable" {
        summary: "The CPUs and the memory of this machine could not be determined.",
        cause: "launch reads them from /proc, which is not mounted or not readable.",
        remedy: "Mount /proc.",
    }
    MEMORY_INSUFFICIENT: Cluster = "memory-insufficient" {
        summary: "The estimated memory of the workers exceeds the memory of the machine.",
        cause: "The model, the batch or the optimizer states are too large for the number of hosts.",
        remedy: "Use a smaller `train.batch.micro`, `train.recompute: block` or a higher `train.zero.stage`.",
    }

    // --- planning ------------------------------------------------------------------------------
    HOSTS_TOO_FEW: Job = "hosts-too-few" {
        summary: "A key requires more hosts than the job has.",
        cause: "`cluster.use_hosts` or `run.min_hosts` is larger than the number of hosts.",
        remedy: "Name more hosts, or lower the number.",
    }
    WORKERS_OUT_OF_RANGE: Job = "workers-out-of-range" {
        summary: "The number of workers of the job or of a host is outside of the supported range.",
        cause: "A job has 1 to 1048576 workers, and a host at most 1024.",
        remedy: "Change `cluster.workers_per_host`, or the slots of the hosts.",
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
        summary: "A host filter selects slots by number, and the slots are not the GPUs of the job.",
        cause: "The job uses no GPUs on the host, or `cluster.devices` names GPUs as well.",
        remedy: "Remove one of the two selections; on CPUs, select the first slots, beginning with 0.",
    }
    GPU_INDEX_UNKNOWN: Job = "gpu-index-unknown" {
        summary: "The job names a GPU that the host does not have.",
        cause: "GPUs are numbered from 0 in the order of the PCI bus, among those that `CUDA_VISIBLE_DEVICES` shows.",
        remedy: "Name GPUs that exist on every host; `launch check` shows how many each host has.",
    }
    GPU_REQUIRED: Job = "gpu-required" {
        summary: "`cluster.devices: cuda` is set, and a host has no GPU.",
        cause: "The driver is not loaded, the GPU is hidden by `CUDA_VISIBLE_DEVICES`, or there is none.",
        remedy: "Run `nvidia-smi` on the host, exclude the host, or set `cluster.devices: cpu`.",
    }
    GPUS_TOO_FEW: Job = "gpus-too-few" {
        summary: "A host has fewer GPUs than its workers need.",
        cause: "Every worker needs a GPU, or a share of one (`cluster.workers_per_gpu`).",
        remedy: "Use fewer workers, or let several workers share a GPU.",
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

    // --- Slurm allocations ---------------------------------------------------------------------
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
        cause: "The job was started with `srun launch`.",
        remedy: "Start launch once, without srun. launch starts a job step on all nodes of the allocation.",
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
    SLURM_REQUEUE_UNAVAILABLE: Cluster = "slurm-requeue-unavailable" {
        summary: "`--requeue` was given outside of a Slurm batch job.",
        cause: "Only a batch job can be requeued.",
        remedy: "Leave the option out, or submit the job with `launch sbatch`.",
    }

    // --- launch check --------------------------------------------------------------------------
    LOGIN_SHELL_PRINTS: Cluster = "login-shell-prints" {
        summary: "The login shell of a host prints text. This is a warning.",
        cause: "A startup file such as .bashrc prints something in shells that are not interactive.",
        remedy: "Print only in interactive shells; launch ignores the text, but scp and rsync may fail.",
    }
    ARCHITECTURE_DIFFERS: Cluster = "architecture-differs" {
        summary: "The hosts of the job have different processor architectures.",
        cause: "The job names hosts of several kinds.",
        remedy: "Use hosts of one architecture.",
    }
    VERSION_DIFFERS: Cluster = "version-differs" {
        summary: "A host runs another executable of launch than the first host.",
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
        summary: "The clock of a host differs by more than a second from this machine's. This is a warning.",
        cause: "The clocks are not synchronized.",
        remedy: "Synchronize the clocks with NTP, so that times in logs can be compared.",
    }
    PEER_UNREACHABLE: Cluster = "peer-unreachable" {
        summary: "A host cannot open a TCP connection to another host of the job.",
        cause: "A firewall blocks the ports, or there is no route.",
        remedy: "Open the ports between the hosts, or correct the route.",
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
        summary: "A host has fewer GPUs than the hostfile declares slots. This is a warning.",
        cause: "The hostfile is wrong, or a GPU is missing. Ranks share GPUs, unless the job computes on CPUs.",
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
        cause: "NCCL is not installed; it is needed only for workers with a GPU each.",
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
