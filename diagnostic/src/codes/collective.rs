//! The diagnostic codes (names with explanations) of errors about collectives between ranks, such
//! as `peer-lost`.

codes! {
    COLLECTIVE_ABORTED: Failed = "collective-aborted" {
        summary: "A collective was aborted because a peer failed or the job is ending.",
        cause: "Another rank failed first; its failure is the root cause.",
        remedy: "Read the failure of the other rank.",
    }
    PEER_LOST: Failed = "peer-lost" {
        summary: "The connection to another rank ended without a farewell.",
        cause: "The process or the host of the peer ended, for instance because of SIGKILL, an out-of-memory kill or a reboot.",
        remedy: "Read the log of the rank in the field `peer`, and the kernel log of its host.",
    }
    PEER_SILENT: Failed = "peer-silent" {
        summary: "Nothing was received from another rank for too long, not even a heartbeat.",
        cause: "The peer's host or process is suspended, or the network between the two hosts is interrupted.",
        remedy: "Check that the two hosts reach each other over `cluster.interface`, and that no process was suspended.",
    }
    PEER_LEFT: Failed = "peer-left" {
        summary: "A rank left the group while another rank still needed it for a collective.",
        cause: "The rank ended cleanly, for instance after an error, before the other ranks were done.",
        remedy: "Read the log of the rank in the field `peer`.",
    }
    PEER_PANICKED: Failed = "peer-panicked" {
        summary: "A rank panicked while the group was in use.",
        cause: "A bug in launch, or memory that could not be allocated on that rank.",
        remedy: "Read the panic message in the log of the rank in the field `peer`, and report the message.",
    }
    PEER_FRAME_INVALID: Failed = "peer-frame-invalid" {
        summary: "A rank received a control frame that launch does not send.",
        cause: "Data was altered on the network between the hosts, or a bug in launch.",
        remedy: "Use another network (`cluster.interface`); report the error if it occurs again.",
    }
    PEER_CONNECTION_REJECTED: Failed = "peer-connection-rejected" {
        summary: "Another rank rejected the connection of this rank.",
        cause: "The ranks run different builds of launch, or belong to different attempts or runs.",
        remedy: "Make sure that all hosts run the same build, and that no process of an earlier attempt is left.",
    }
    COLLECTIVE_TIMEOUT: Failed = "collective-timeout" {
        summary: "Some ranks did not enter a collective in time.",
        cause: "The missing ranks hang, or are far slower than the others.",
        remedy: "Inspect the processes of the ranks in the field `missing_ranks` with a debugger, or set `run.hang_timeout` to log their stacks.",
    }
    COLLECTIVE_JOIN_TIMEOUT: Failed = "collective-join-timeout" {
        summary: "Some ranks did not join the group of the job in time.",
        cause: "The missing ranks did not start, or their hosts cannot be reached, for instance because of a firewall.",
        remedy: "Read the logs of the ranks in the field `missing_ranks`, and check the network with `launch check`.",
    }
    COLLECTIVE_MISMATCH: Failed = "collective-mismatch" {
        summary: "Two ranks called different collectives, or called one collective with sizes that do not match.",
        cause: "A bug in launch, or ranks that read different configurations or data.",
        remedy: "Report the message together with the job file.",
    }
    COLLECTIVE_ARGUMENTS_INVALID: Failed = "collective-arguments-invalid" {
        summary: "The arguments of a collective contradict each other.",
        cause: "A bug in launch.",
        remedy: "Report the message together with the job file.",
    }
    COLLECTIVE_GROUP_INVALID: Failed = "collective-group-invalid" {
        summary: "A rank cannot join its group because the description of the group is invalid.",
        cause: "The group has more ranks than launch supports, shared memory was not passed to the worker, or a rank was started twice.",
        remedy: "Use at most 1024 workers. Otherwise this is a bug in launch: report the message.",
    }
    COLLECTIVE_TRANSPORT_FAILED: Failed = "collective-transport-failed" {
        summary: "The operating system failed to set up or use a connection between ranks.",
        cause: "A limit of the operating system, such as the number of open files, or a failing network device.",
        remedy: "Fix the problem that the message of the operating system names.",
    }
    COMMUNICATION_THREAD_FAILED: Failed = "communication-thread-failed" {
        summary: "The thread that runs the collectives of a rank ended.",
        cause: "The thread panicked: a bug in launch, or memory that could not be allocated.",
        remedy: "Read the panic message in the worker's log, and report the message.",
    }
    SHARED_MEMORY_UNAVAILABLE: Failed = "shared-memory-unavailable" {
        summary: "The shared memory of the ranks of a host could not be resized or mapped.",
        cause: "The host has too little memory, or a limit on address space (`ulimit -v`) applies to the worker.",
        remedy: "Free memory on the host, or raise the limit.",
    }
    SHARED_MEMORY_MISMATCH: Failed = "shared-memory-mismatch" {
        summary: "The shared memory of the ranks of a host was initialized for another group.",
        cause: "The ranks belong to different jobs, or run different builds of launch.",
        remedy: "Make sure that all workers of the host run the same build. Otherwise report the message.",
    }
    NCCL_LIBRARY_MISSING: Cluster = "nccl-library-missing" {
        summary: "NCCL (libnccl.so.2) could not be opened.",
        cause: "NCCL is not installed, or not in a directory that is searched.",
        remedy: "Install NCCL, name its directory in `cluster.cuda_library_paths`, or set `cluster.comm_backend: host`.",
    }
    NCCL_LIBRARY_TOO_OLD: Cluster = "nccl-library-too-old" {
        summary: "NCCL is older than 2.18.",
        cause: "launch needs non-blocking communicators, which NCCL supports since version 2.18.",
        remedy: "Install a newer NCCL, name its directory in `cluster.cuda_library_paths`, or set `cluster.comm_backend: host`.",
    }
    NCCL_CALL_FAILED: Failed = "nccl-call-failed" {
        summary: "A function of NCCL failed.",
        cause: "NCCL cannot use the network or the GPUs, or a peer ended.",
        remedy: "Run with NCCL_DEBUG=INFO to see NCCL's log, or set `cluster.comm_backend: host`.",
    }
    NCCL_TIMEOUT: Failed = "nccl-timeout" {
        summary: "An operation of NCCL did not complete in time.",
        cause: "A rank is missing or hangs, or NCCL cannot reach a host.",
        remedy: "Run with NCCL_DEBUG=INFO to see NCCL's log, and check the network between the hosts.",
    }
    NCCL_SETUP_FAILED: Failed = "nccl-setup-failed" {
        summary: "The ranks could not create a common NCCL communicator.",
        cause: "Another rank could not use NCCL; the message names the rank and its error.",
        remedy: "Read the log of that rank, or set `cluster.comm_backend: host`.",
    }
}
