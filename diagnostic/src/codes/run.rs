//! The diagnostic codes (names with explanations) of errors about runs, agents and workers, such as
//! `worker-exited`.

codes! {
    // --- why an attempt failed ---------------------------------------------
    WORKER_EXITED: Failed = "worker-exited" {
        summary: "A worker ended with an exit code other than 0.",
        cause: "The program failed. Its last output lines and its log name the error.",
        remedy: "Read the log of the rank that the message names. The other ranks ended because this rank failed.",
    }
    WORKER_KILLED_BY_SIGNAL: Failed = "worker-killed-by-signal" {
        summary: "A signal killed a worker.",
        cause: "SIGKILL comes from a person, a batch system or the kernel. SIGSEGV, SIGBUS, SIGILL and SIGABRT come from the program itself.",
        remedy: "Read the log of the rank. After SIGKILL, search `dmesg` for `oom` and `killed`. After SIGSEGV, enable core dumps with `ulimit -c unlimited`.",
    }
    OUT_OF_MEMORY: Failed = "out-of-memory" {
        summary: "The kernel killed a worker because memory ran out.",
        cause: "The job needs more memory than the host or the control group of the job has.",
        remedy: "Use a smaller batch, more hosts or offloading, or raise the memory limit of the control group.",
    }
    GPU_ERROR: Failed = "gpu-error" {
        summary: "A worker failed, and the NVIDIA driver reported an error (Xid) of its GPU.",
        cause: "The number of the Xid shows whether the hardware, the driver or the program is at fault.",
        remedy: "Look the number up in NVIDIA's list of Xid errors. Exclude the host with `cluster.exclude` if its GPU must be reset or replaced.",
    }
    HANG_DETECTED: Failed = "hang-detected" {
        summary: "No worker made progress for `run.hang_timeout`.",
        cause: "Most often a rank waits in a collective that another rank never enters.",
        remedy: "Compare the stacks at the end of each rank's log, and look for a rank that is not in the collective in which the others wait. If steps take longer than `run.hang_timeout`, raise it.",
    }
    WORKER_SUSPENDED: Failed = "worker-suspended" {
        summary: "A worker's process was suspended by a signal for `run.hang_timeout`.",
        cause: "The process received SIGSTOP, or a debugger holds it.",
        remedy: "Find out who stopped the process, or raise `run.hang_timeout` while you debug.",
    }
    METRICS_UNAVAILABLE: Cluster = "metrics-unavailable" {
        summary: "The controller cannot serve metrics at the address in `observe.metrics`, or cannot write them to `observe.metrics_file`.",
        cause: "Another program, or another run of launch, uses the port or the socket, or the directory of the socket or file does not exist or is not writable.",
        remedy: "Choose another port or path, or remove the key.",
    }
    TORCH_COLLECTIVE_TIMEOUT: Failed = "torch-collective-timeout" {
        summary: "A collective of torch took longer than the timeout of its process group, and torch ended the worker.",
        cause: "Most often a rank waits in a collective that another rank never enters.",
        remedy: "The message names the collective, and the ranks that have not entered it. If a rank legitimately takes longer, raise `timeout` of `torch.distributed.init_process_group`.",
    }
    WORKER_SILENT: Failed = "worker-silent" {
        summary: "A worker of the built-in runtime sent no heartbeat for 30 seconds.",
        cause: "The process is stopped, blocked in the kernel, or gets no CPU time because the machine is swapping.",
        remedy: "Check the state of the process with `ps -o stat`, the memory of the host, and its file systems.",
    }
    WORKER_LOST: Failed = "worker-lost" {
        summary: "An agent reported the end of its workers, but the exit result of one worker is missing.",
        cause: "A bug of launch.",
        remedy: "Report the message, the version and the logs.",
    }
    WORKER_PANICKED: Failed = "worker-panicked" {
        summary: "A worker of the built-in runtime panicked.",
        cause: "A bug of launch.",
        remedy: "Report the message in the rank's log, the version and the job file.",
    }
    WORKER_STOPPED_UNEXPECTEDLY: Failed = "worker-stopped-unexpectedly" {
        summary: "A worker of the built-in runtime saved and stopped although no stop was requested.",
        cause: "A bug of launch.",
        remedy: "Report the message, the version and the logs.",
    }
    WORKER_HANDSHAKE_FAILED: Failed = "worker-handshake-failed" {
        summary: "A worker of the built-in runtime and its agent did not accept each other.",
        cause: "Two different builds of launch are mixed, or another process used the worker's connection.",
        remedy: "Install the same build on every host.",
    }
    WORKER_START_FAILED: Failed = "worker-start-failed" {
        summary: "A worker's process could not be started.",
        cause: "The command or its working directory does not exist on the host, or a limit of the operating system was reached.",
        remedy: "Check the command, `run.workdir` and the limits (`ulimit -a`) on the host that is named.",
    }
    PROCESS_UNKILLABLE: Failed = "process-unkillable" {
        summary: "Processes of the job did not end after SIGKILL.",
        cause: "The processes are blocked in the kernel, most often in a device driver or a network file system.",
        remedy: "Check the devices and network file systems of the host. If the processes do not end, restart the host.",
    }
    ROOT_CAUSE_UNKNOWN: Failed = "root-cause-unknown" {
        summary: "A worker ended because a peer failed, but no failure of a peer was observed.",
        cause: "The connection between two ranks broke while both were alive.",
        remedy: "Read the logs of all ranks and check the network between the hosts.",
    }
    AGENT_LOST: Failed = "agent-lost" {
        summary: "The agent on the controller's machine ended.",
        cause: "A person or the kernel killed the process, or it could not be started.",
        remedy: "Search `dmesg` for `oom` and `killed`, then start the job again.",
    }
    AGENT_SILENT: Failed = "agent-silent" {
        summary: "The agent on the controller's machine did not answer in time.",
        cause: "The process is stopped or blocked in the kernel, or the machine is swapping.",
        remedy: "Check the state of the process with `ps -o stat`, the memory of the machine, and its file systems.",
    }
    CONTROLLER_SILENT: Failed = "controller-silent" {
        summary: "A host received no message from the controller for `run.controller_lease`, and ended its workers.",
        cause: "The controller was suspended (Ctrl-Z, SIGSTOP), its machine froze, or the network failed.",
        remedy: "Start the job again. Raise `run.controller_lease`, or use `run.on_controller_loss: continue`, so that the job outlives its controller.",
    }
    BATCH_JOB_END: Failed = "batch-job-end" {
        summary: "The message reports why the batch system ended the job.",
        cause: "The field `reason` is `preemption`, `time-limit`, `cancelled` (by a user or an administrator), `signal` (a user sent SIGTERM to the processes of the job, which continues), or `unknown` (the batch system gives no reason, or does not answer).",
        remedy: "After `time-limit`, request more time, or submit the job with `launch sbatch`, which requeues the job at its time limit.",
    }
    RUN_NOT_ATTACHABLE: Cluster = "run-not-attachable" {
        summary: "A controller on this machine cannot take over the run.",
        cause: "The job does not outlive its controller, no agent of the run is alive, or no worker was started. If the machine on which the run was started also has workers of the run, only a controller on that machine can take over the run, and a restart of that machine ends these workers.",
        remedy: "If the message names another machine, run the command there. Otherwise start the job again, with `run.on_controller_loss: continue`, so that the job outlives its controller.",
    }
    RUN_HAS_CONTROLLER: Cluster = "run-has-controller" {
        summary: "A host obeys another controller of the run, which is alive.",
        cause: "The controller was not lost, or another `launch attach` has taken over the run.",
        remedy: "Use the other controller. `launch ps` shows its host and process id.",
    }
    RUN_HOSTS_UNREACHABLE: Cluster = "run-hosts-unreachable" {
        summary: "Too many hosts of a run do not answer, so another controller might control them.",
        cause: "The hosts are down, or this machine cannot reach them.",
        remedy: "Check the network. If the hosts are certainly down, use `launch attach --force`.",
    }
    CONTROL_FILE_INVALID: Cluster = "control-file-invalid" {
        summary: "The file `control.json` in the run directory, which contains the hosts and the key of the run, is not usable.",
        cause: "The file is damaged, was written by another version of launch, or is writable by other users.",
        remedy: "Attach as the user and with the build of launch that started the run.",
    }
    CONTROLLER_REPLACED: Cluster = "controller-replaced" {
        summary: "The hosts of a run no longer obey this controller. The run continues.",
        cause: "This controller was suspended or cut off from the hosts. In the meantime, `launch attach` has started another controller, or the workers have continued without a controller.",
        remedy: "Use the other controller. If the run has none, run `launch attach RUN`.",
    }
    AGENT_VERSION_MISMATCH: Cluster = "agent-version-mismatch" {
        summary: "An agent runs another build of launch than the controller.",
        cause: "The hosts have different versions installed.",
        remedy: "Install the same build on every host.",
    }
    HOST_LOST: Failed = "host-lost" {
        summary: "The connection to a host was lost.",
        cause: "The host crashed, froze, was shut down, or its network failed.",
        remedy: "Check that the host is up and reachable. With `run.restarts` and a spare host, the job continues without the lost host.",
    }
    TOO_FEW_HOSTS: Cluster = "too-few-hosts" {
        summary: "Fewer hosts are available than `run.min_hosts` requires.",
        cause: "Hosts were lost, failed repeatedly, or could not be reached.",
        remedy: "Repair or add hosts, or lower `run.min_hosts`.",
    }
    FAILURE_UNKNOWN: Failed = "failure-unknown" {
        summary: "The journal records the reason of the failure in a form that this version of launch does not know.",
        cause: "Another version of launch wrote the journal.",
        remedy: "Read the message of the event, or use the version that wrote the journal.",
    }
    // --- starting an attempt -----------------------------------------------
    RENDEZVOUS_PORT_UNAVAILABLE: Cluster = "rendezvous-port-unavailable" {
        summary: "The port of the rendezvous (`MASTER_PORT`) could not be bound.",
        cause: "Another process listens on the port, or the address does not belong to the host.",
        remedy: "List the listeners with `ss -ltnp`, or use `cluster.master_port: auto`.",
    }
    RENDEZVOUS_TIMEOUT: Cluster = "rendezvous-timeout" {
        summary: "The host of rank 0 did not bind the port of the rendezvous in time.",
        cause: "The agent of that host is blocked, or the host is overloaded.",
        remedy: "Check the host, then start the job again.",
    }
    RENDEZVOUS_TOO_MANY_RANKS: Cluster = "rendezvous-too-many-ranks" {
        summary: "The rendezvous store cannot serve as many connections as the job has ranks.",
        cause: "The limit of open files on the host of rank 0 is too low, or the job has more ranks than the store supports.",
        remedy: "Raise the hard limit of open files (`ulimit -Hn`), or let rank 0 serve the store with `cluster.store: rank0`.",
    }
    PLAN_INVALID: Cluster = "plan-invalid" {
        summary: "The job does not fit the hosts that were found. Each problem is reported with a separate code.",
        cause: "The job requires more CPUs, GPUs or slots than the hosts have.",
        remedy: "Correct the problems that are listed above the summary.",
    }
    PLAN_TOO_LARGE: Cluster = "plan-too-large" {
        summary: "The plan of a host is larger than a control message may be.",
        cause: "The environment or the command of the workers is very long.",
        remedy: "Shorten `run.env` or the command, or use fewer workers per host.",
    }
    RANDOM_UNAVAILABLE: Cluster = "random-unavailable" {
        summary: "The operating system did not provide random numbers for the key of the job.",
        cause: "The kernel rejected the system call `getrandom`, for example because of a seccomp filter.",
        remedy: "Permit the controller to call `getrandom`.",
    }
    // --- the controller and its files --------------------------------------
    RUN_DIRECTORY_UNWRITABLE: Cluster = "run-directory-unwritable" {
        summary: "The run directory or one of its files could not be written.",
        cause: "The disk is full, or the permissions of the directory do not allow writing.",
        remedy: "Free disk space, or change `run.logs.dir`.",
    }
    CONTROLLER_SETUP_FAILED: Cluster = "controller-setup-failed" {
        summary: "The controller could not prepare its process.",
        cause: "The operating system reached a limit of threads, processes or open files.",
        remedy: "Check the limits with `ulimit -a`.",
    }
    DESCRIPTORS_TOO_FEW: Cluster = "descriptors-too-few" {
        summary: "The controller may not open as many files as it needs for the hosts of the job.",
        cause: "The hard limit of open files (`ulimit -Hn`) is too low for the number of hosts.",
        remedy: "Raise the hard limit, or use fewer hosts.",
    }
    INTERNAL: Failed = "internal" {
        summary: "launch reached a state that should be impossible.",
        cause: "A bug of launch.",
        remedy: "Report the message, the version and the job file.",
    }
}
