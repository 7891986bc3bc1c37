//! Starts, signals and reaps worker processes. No other module of the agent starts processes.
//!
//! Each worker leads a separate process group. Because of `PR_SET_PDEATHSIG`, the kernel kills a
//! worker when the thread that started the worker ends. The agent therefore starts workers only
//! from a thread that ends with the agent (`driver/worker_spawner.rs`).
mod child_setup;
mod handled_signal;
mod login_shell;
mod terminal;

pub(super) use handled_signal::{signal_handling_processes, signal_if_handled};
pub(super) use terminal::BorrowedTerminal;

pub(super) use login_shell::{ShellError, ShellLimits, ShellOutput, run_login_shell};

use super::{core::ProcessGroupSignal, environment_changes::EnvironmentChanges};
use crate::{
    core_dumps::restore_core_dumps_in_child, discover::topology::find_common_numa_node,
    open_file_limit::OpenFileLimits,
};
use child_setup::{die_with_parent, reset_signals};
use diagnostic::{
    Diagnostic,
    codes::{host, run},
};
use jobspec::env;
use nix::{
    errno::Errno,
    sys::{
        memfd::{MFdFlags, memfd_create},
        resource::{Resource, setrlimit},
        signal::{Signal, killpg},
        socket::{ControlMessage, MsgFlags, sendmsg},
    },
    unistd::Pid,
};
use protocol::control::WorkerPlan;
use std::{
    io::{self, IoSlice},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Command, Stdio},
    sync::Arc,
};

/// The process of a worker that was just started, with the agent's ends of its output pipes and
/// control connection.
#[derive(Debug)]
pub(crate) struct SpawnedWorker {
    pub(crate) pid: u32,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// The agent's end of the control connection to a built-in worker; `None` for a program.
    pub(crate) control: Option<UnixStream>,
    /// The terminal that the worker uses instead of the pipes (`run.terminal`).
    pub(crate) terminal: Option<BorrowedTerminal>,
    /// The agent's end of the socket that passes the shared memory of later attempts to a built-in
    /// worker; `None` if the worker does not outlive its attempt.
    pub(crate) attempts: Option<UnixStream>,
}

/// Forks this process, and returns the pid of the child in the parent and `None` in the child.
///
/// The process must have only one thread.
pub(super) fn fork_process() -> io::Result<Option<Pid>> {
    // SAFETY: with one thread no lock can be held by a thread that the new process lacks.
    match unsafe { nix::unistd::fork()? } {
        nix::unistd::ForkResult::Parent { child } => Ok(Some(child)),
        nix::unistd::ForkResult::Child => Ok(None),
    }
}

/// Creates an empty memory file (memfd) through which the built-in workers of the host exchange
/// data with each other. The workers set the size of the file, and seal the file so that no process
/// can shrink it.
pub(super) fn create_shared_memory() -> io::Result<OwnedFd> {
    Ok(memfd_create(c"launch", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?)
}

/// The memory files (memfds) that built-in workers inherit from their agent, for their data
/// exchange, their status and copies of their training state.
#[derive(Clone, Copy, Default)]
pub(super) struct WorkerMemoryFiles<'a> {
    /// The memory that the workers of the host share during an attempt.
    pub(super) shm: Option<BorrowedFd<'a>>,
    /// The copies of the workers' states (`checkpoint.memory`), which outlive attempts.
    pub(super) copies: Option<BorrowedFd<'a>>,
    /// The memory to which each worker writes its status.
    pub(super) status: Option<BorrowedFd<'a>>,
}

/// Creates an empty memory file (memfd) to which the built-in workers write their status.
pub(super) fn create_status_memory() -> io::Result<OwnedFd> {
    Ok(memfd_create(c"launch-status", MFdFlags::MFD_CLOEXEC)?)
}

/// Creates an empty memory file (memfd) for copies of the workers' training states
/// (`checkpoint.memory`). The memory is in use until the agent ends.
pub(super) fn create_copy_memory() -> io::Result<OwnedFd> {
    Ok(memfd_create(c"launch-copies", MFdFlags::MFD_CLOEXEC)?)
}

/// Sends the file descriptor `fd` to another process over a Unix socket, without blocking. The
/// receiver gets it with one byte.
pub(super) fn pass_descriptor(socket: &UnixStream, fd: BorrowedFd<'_>) -> io::Result<()> {
    let fds = [fd.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&fds)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&[0])], &message, flags, None)?;
    Ok(())
}

/// Returns the numbers of the CPUs on which this process may run, in ascending order. Returns no
/// numbers if the CPU affinity cannot be read.
pub(super) fn read_allowed_cpus() -> Vec<u32> {
    nix::sched::sched_getaffinity(Pid::from_raw(0)).map_or_else(
        |_| Vec::new(),
        |set| {
            let is_set = |cpu: &u32| set.is_set(*cpu as usize).unwrap_or(false);
            (0..nix::sched::CpuSet::count() as u32).filter(is_set).collect()
        },
    )
}

/// Sets the close-on-exec flag of every open file descriptor above 2, so that workers do not
/// inherit them. Descriptors that the agent opens later have the flag from the start.
pub(super) fn set_cloexec_on_all() {
    let open: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")
        .map(|d| d.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect())
        .unwrap_or_default();
    for fd in open.into_iter().filter(|fd| *fd > 2) {
        // SAFETY: F_SETFD does no harm on any number; a closed descriptor gives EBADF.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// The changes by which the environment variables that workers inherit differ from those of the
/// agent, such as variables that `run.activate` has set.
#[derive(Clone, Default)]
pub(super) struct InheritedEnvironment {
    /// The changes by `run.activate`.
    pub(super) changes: Arc<EnvironmentChanges>,
    /// The variables that workers do not inherit.
    pub(super) hidden: Vec<String>,
}

/// Starts the process of a worker with the CPU affinity, preferred NUMA node and environment
/// variables that the controller has chosen for it.
///
/// A built-in worker inherits the descriptors of `memory`. `inherited` describes the environment
/// without the variables of the plan. `(soft, hard)` are the worker's limits of open files.
pub(super) fn spawn_worker_process(
    plan: &WorkerPlan,
    inherited_env: &InheritedEnvironment,
    memory: WorkerMemoryFiles<'_>,
    (soft, hard): OpenFileLimits,
    uses_terminal: bool,
) -> diagnostic::Result<SpawnedWorker> {
    let affinity = build_cpu_set(plan)?;
    let (control, worker_end) = match plan.command {
        Some(_) => (None, None),
        None => UnixStream::pair()
            .map(|(a, b)| (Some(a), Some(b)))
            .map_err(|e| build_worker_start_error(plan, &e))?,
    };
    // Only workers with copies of their states in memory outlive an attempt.
    let (attempts, attempts_end) = match memory.copies {
        Some(_) if control.is_some() => UnixStream::pair()
            .map(|(a, b)| (Some(a), Some(b)))
            .map_err(|e| build_worker_start_error(plan, &e))?,
        _ => (None, None),
    };
    let mut command = build_worker_command(plan, inherited_env);
    restore_core_dumps_in_child(&mut command);
    let terminal = uses_terminal.then(|| BorrowedTerminal::open(plan.rank)).transpose()?;
    if let Some(terminal) = &terminal {
        use_terminal(&mut command, terminal).map_err(|error| build_worker_start_error(plan, &error))?;
    }
    let mut inherited: Vec<RawFd> = Vec::new();
    if let Some(worker_end) = &worker_end {
        let mut pass = |name: &str, fd: RawFd| {
            command.env(name, fd.to_string());
            inherited.push(fd);
        };
        pass(env::LAUNCH_CONTROL_FD, worker_end.as_raw_fd());
        memory.shm.iter().for_each(|shm| pass(env::LAUNCH_SHM_FD, shm.as_raw_fd()));
        memory.copies.iter().for_each(|copies| pass(env::LAUNCH_MEMORY_FD, copies.as_raw_fd()));
        memory.status.iter().for_each(|status| pass(env::LAUNCH_STATUS_FD, status.as_raw_fd()));
        attempts_end.iter().for_each(|end| pass(env::LAUNCH_ATTEMPT_FD, end.as_raw_fd()));
    }
    let nodes = find_common_numa_node(&plan.cpus).and_then(NumaNodeMask::from_node);
    let agent = Pid::this();
    // SAFETY: the closure only makes system calls that are allowed between fork and exec;
    // everything it uses was allocated before.
    unsafe {
        command.pre_exec(move || {
            die_with_parent(agent)?;
            if let Some(set) = &affinity {
                nix::sched::sched_setaffinity(Pid::from_raw(0), set)?;
            }
            if let Some(nodes) = &nodes {
                prefer_numa_memory(nodes);
            }
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
            reset_signals();
            for fd in &inherited {
                if libc::fcntl(*fd, libc::F_SETFD, 0) == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    let mut child = command.spawn().map_err(|e| build_worker_start_error(plan, &e))?;
    let (stdout, stderr) = match (child.stdout.take(), child.stderr.take()) {
        (Some(stdout), Some(stderr)) => (stdout.into(), stderr.into()),
        // The output goes to the terminal, so the log is empty.
        _ => (open_pipe_without_writer(plan)?, open_pipe_without_writer(plan)?),
    };
    // Dropping `child` neither waits for the process nor kills it; `reap_children` waits.
    Ok(SpawnedWorker { pid: child.id(), stdout, stderr, control, terminal, attempts })
}

/// Makes the worker's command use the terminal (`run.terminal`) as its stdin, stdout and stderr, in
/// the foreground.
fn use_terminal(command: &mut Command, terminal: &BorrowedTerminal) -> io::Result<()> {
    let file = || terminal.file().try_clone();
    command.stdin(file()?).stdout(file()?).stderr(file()?);
    // SAFETY: the closure only makes system calls that are allowed between fork and exec. It runs
    // after stdin was replaced by the terminal, in the process group of the worker.
    unsafe { command.pre_exec(|| terminal::take_foreground(BorrowedFd::borrow_raw(libc::STDIN_FILENO))) };
    Ok(())
}

/// Opens a pipe from which reads return the end of the stream at once, for a worker that writes to
/// a terminal instead of an output pipe.
fn open_pipe_without_writer(plan: &WorkerPlan) -> diagnostic::Result<OwnedFd> {
    let pipe = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC);
    pipe.map(|(reader, _)| reader).map_err(|error| build_worker_start_error(plan, &error.into()))
}

/// Builds the command that starts a worker: the user's program or, for a worker of the built-in
/// training, `launch worker`.
///
/// The worker leads a new process group. Its stdin is `/dev/null`, and its stdout and stderr are
/// pipes. Its environment is that of `inherited`, with the variables of the plan. The program is
/// searched in the `PATH` of this environment.
fn build_worker_command(plan: &WorkerPlan, inherited: &InheritedEnvironment) -> Command {
    let mut command = match plan.command.as_deref() {
        Some(words @ [_, ..]) => {
            let mut words = plan.wrapper.iter().chain(words);
            let mut command = Command::new(words.next().map_or("", String::as_str));
            command.args(words);
            command
        }
        // This path is the executable that this process runs, even if the file was replaced
        // meanwhile.
        None | Some([]) => {
            let mut command = Command::new("/proc/self/exe");
            command.arg0("launch").arg("worker");
            command
        }
    };
    apply_inherited_environment(&mut command, inherited);
    command.envs(plan.env.iter().map(|(k, v)| (k, v))).current_dir(&plan.workdir);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command
}

/// Applies the changes of `run.activate` to the environment of `command`, and removes the variables
/// of the agent that workers must not inherit.
fn apply_inherited_environment(command: &mut Command, inherited: &InheritedEnvironment) {
    for (name, value) in inherited.changes.assignments() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    for internal in [
        env::LAUNCH_CONTROL_FD,
        env::LAUNCH_SHM_FD,
        env::LAUNCH_MEMORY_FD,
        env::LAUNCH_ATTEMPT_FD,
        env::LAUNCH_STATUS_FD,
    ] {
        command.env_remove(internal);
    }
    inherited.hidden.iter().for_each(|name| _ = command.env_remove(name));
}

/// Converts the list of CPUs on which a worker is to run to the bit set that the kernel's affinity
/// call takes. Returns `None` if the plan does not bind the worker to CPUs.
///
/// Fails if the agent may not run on one of the CPUs.
fn build_cpu_set(plan: &WorkerPlan) -> diagnostic::Result<Option<nix::sched::CpuSet>> {
    if plan.cpus.is_empty() {
        return Ok(None);
    }
    let allowed = read_allowed_cpus();
    let mut set = nix::sched::CpuSet::new();
    for cpu in &plan.cpus {
        if !allowed.contains(cpu) || set.set(*cpu as usize).is_err() {
            let message = format!(
                "cannot bind rank {} to CPU {cpu}; the agent may use only CPUs {allowed:?}",
                plan.rank
            );
            return Err(Diagnostic::error(host::WORKER_CPU_UNAVAILABLE, message)
                .with_field("cpu", *cpu)
                .with_field("allowed_cpus", allowed)
                .with_help("check the limits of the container, the control group or `taskset`"));
        }
    }
    Ok(Some(set))
}

/// A set of NUMA nodes as a bit mask in the kernel's format, for nodes 0 to 1023.
struct NumaNodeMask([libc::c_ulong; 16]);

impl NumaNodeMask {
    /// Returns the set that contains only the NUMA node with this number. Returns `None` if the
    /// number of the node is 1024 or more.
    fn from_node(node: u32) -> Option<NumaNodeMask> {
        let mut mask = NumaNodeMask([0; 16]);
        *mask.0.get_mut(node as usize / 64)? |= 1 << (node % 64);
        Some(mask)
    }
}

/// Makes the kernel allocate the memory of the calling process on the NUMA nodes `nodes` as long as
/// they have free memory. Async-signal-safe. Ignores errors.
///
/// If a container forbids the system call, memory comes from the node of the thread that touches
/// the memory first. If the threads are bound to the CPUs of one node, this is the preferred node.
fn prefer_numa_memory(nodes: &NumaNodeMask) {
    let bits = 8 * size_of_val(&nodes.0);
    // SAFETY: the kernel reads `bits` bits at the address; the mask has that many.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, nodes.0.as_ptr(), bits) };
}

/// Builds the error that a worker's process cannot be started, with an error code for the likely
/// reason, such as a missing program.
fn build_worker_start_error(plan: &WorkerPlan, error: &io::Error) -> Diagnostic {
    let words = plan.wrapper.iter().chain(plan.command.iter().flatten());
    let program = words.map(String::as_str).next().unwrap_or("launch worker");
    let missing = match plan.wrapper.is_empty() {
        true => host::WORKER_PROGRAM_MISSING,
        false => host::WORKER_WRAPPER_MISSING,
    };
    let workdir = plan.workdir.display();
    let (code, reason) = match error.raw_os_error().map(Errno::from_raw) {
        _ if !plan.workdir.is_dir() => {
            (host::WORKER_DIRECTORY_MISSING, format!("the working directory {workdir} is not a directory"))
        }
        Some(Errno::ENOENT) if program.contains('/') => {
            (missing, format!("no such file in {workdir}, or its `#!` interpreter is missing"))
        }
        Some(Errno::ENOENT) => (missing, "no such program in PATH".to_owned()),
        Some(Errno::EACCES) => (host::WORKER_PROGRAM_NOT_EXECUTABLE, "the file is not executable".to_owned()),
        Some(Errno::EAGAIN) => {
            (host::PROCESS_LIMIT_REACHED, format!("{error}; the limit of processes is reached"))
        }
        Some(Errno::EMFILE | Errno::ENFILE) => {
            (host::FILE_LIMIT_REACHED, format!("{error}; the limit of open files is reached"))
        }
        _ => (run::WORKER_START_FAILED, error.to_string()),
    };
    Diagnostic::error(code, format!("cannot start `{program}`: {reason}"))
        .with_subject(program)
        .with_field("workdir", workdir.to_string())
        .with_remedy()
}

/// Sends SIGTERM or SIGKILL to the process group of the worker with this pid. Ignores errors.
///
/// The worker must not have been reaped, because the pid of a reaped worker may belong to another
/// process.
pub(super) fn signal_worker_process_group(pid: u32, ending: ProcessGroupSignal) {
    let group = Pid::from_raw(pid as i32);
    // An error means that the process group has ended meanwhile.
    match ending {
        ProcessGroupSignal::Kill => _ = killpg(group, Signal::SIGKILL),
        ProcessGroupSignal::Terminate => {
            _ = killpg(group, Signal::SIGTERM);
            // A stopped process handles SIGTERM only after SIGCONT.
            _ = killpg(group, Signal::SIGCONT);
        }
    }
}

/// Runs the command that removes the container of a killed worker, and waits up to `limit` until
/// the command has ended. Then kills the command. Ignores errors, such as those of a container that
/// has ended.
pub(super) fn run_container_removal(words: &[String], limit: std::time::Duration) {
    let Some((program, arguments)) = words.split_first() else { return };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let Ok(mut child) = command.spawn() else { return };
    let until = std::time::Instant::now() + limit;
    while matches!(child.try_wait(), Ok(None)) {
        if std::time::Instant::now() > until {
            signal_worker_process_group(child.id(), ProcessGroupSignal::Kill);
            _ = child.wait();
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Runs `py-spy dump` and returns the Python stacks of the process `pid` as text, truncated to
/// about `max_bytes`.
///
/// Blocks for up to `limit`. Returns `None` if py-spy cannot be started. Returns an empty text if
/// py-spy prints nothing in time, for example because the process does not run Python.
pub(super) fn run_py_spy_dump(pid: i32, limit: std::time::Duration, max_bytes: usize) -> Option<String> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::{io::Read, os::fd::AsFd, time::Instant};
    let mut command = Command::new("py-spy");
    command.args(["dump", "--json", "--pid", &pid.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn().ok()?;
    let until = Instant::now() + limit;
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    let mut stdout = child.stdout.take()?;
    while text.len() < max_bytes {
        let left = PollTimeout::try_from(until.saturating_duration_since(Instant::now())).ok();
        let ready =
            poll(&mut [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)], left.unwrap_or(PollTimeout::ZERO));
        match ready.ok().filter(|n| *n > 0).and_then(|_| stdout.read(&mut buffer).ok()) {
            Some(n @ 1..) => text.extend_from_slice(&buffer[..n]),
            _ => break,
        }
    }
    // The agent's event loop reaps py-spy. If py-spy hangs, the sweep after the workers' end kills
    // it.
    Some(String::from_utf8_lossy(&text).into_owned())
}
