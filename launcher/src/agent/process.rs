//! Starts, signals and reaps worker processes; no other module of the agent does.
//!
//! Each worker leads a separate process group. `PR_SET_PDEATHSIG` kills it when the thread that
//! started it ends, so workers are started from the agent's main thread only.
use super::core::GroupSignal;
use crate::discover::topology::common_numa_node;
use contract::{
    control::{ExitStatus, WorkerPlan},
    env,
};
use diagnostic::{
    Diagnostic,
    codes::{host, run},
};
use nix::{
    errno::Errno,
    sys::{
        memfd::{MFdFlags, memfd_create},
        prctl,
        resource::{Resource, getrlimit, setrlimit},
        signal::{Signal, killpg},
    },
    unistd::Pid,
};
use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::{
            net::UnixStream,
            process::{CommandExt, ExitStatusExt},
        },
    },
    process::{Command, Stdio},
};

/// A worker's process, and the agent's ends of its streams.
#[derive(Debug)]
pub(crate) struct SpawnedWorker {
    pub(crate) pid: u32,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// The control connection of a built-in worker.
    pub(crate) control: Option<UnixStream>,
}

/// Makes orphaned descendants of this process its children, instead of init's.
pub(crate) fn become_subreaper() -> io::Result<()> {
    Ok(prctl::set_child_subreaper(true)?)
}

/// Forks. Returns the child's pid in the parent, and `None` in the child.
///
/// Must be called before a second thread is started.
pub(super) fn fork_process() -> io::Result<Option<Pid>> {
    // SAFETY: with one thread no lock can be held by a thread that the new process lacks.
    match unsafe { nix::unistd::fork()? } {
        nix::unistd::ForkResult::Parent { child } => Ok(Some(child)),
        nix::unistd::ForkResult::Child => Ok(None),
    }
}

/// Creates an empty memory file that the built-in workers of the host share. They set its size.
pub(super) fn create_shared_memory() -> io::Result<OwnedFd> {
    Ok(memfd_create(c"launch", MFdFlags::MFD_CLOEXEC)?)
}

/// The CPUs on which this process may run.
pub(super) fn allowed_cpus() -> Vec<u32> {
    nix::sched::sched_getaffinity(Pid::from_raw(0)).map_or_else(
        |_| Vec::new(),
        |set| {
            let is_set = |cpu: &u32| set.is_set(*cpu as usize).unwrap_or(false);
            (0..nix::sched::CpuSet::count() as u32).filter(is_set).collect()
        },
    )
}

/// Sets the close-on-exec flag of every open descriptor above 2, so that workers do not inherit
/// them. Descriptors that are opened later have it already.
pub(super) fn set_cloexec_on_all() {
    let open: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")
        .map(|d| d.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect())
        .unwrap_or_default();
    for fd in open.into_iter().filter(|fd| *fd > 2) {
        // SAFETY: F_SETFD does no harm on any number; a closed descriptor gives EBADF.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// The soft and the hard limit of open files with which the agent was started.
pub(super) type OpenFileLimit = (u64, u64);

/// Raises the agent's soft limit of open files to the hard limit: it needs four for each worker.
/// Returns the previous limits, which workers get.
pub(super) fn raise_file_limit() -> io::Result<OpenFileLimit> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok((soft, hard))
}

/// Starts a worker. A built-in worker inherits `shm` as its shared memory.
pub(super) fn spawn(
    plan: &WorkerPlan,
    shm: Option<BorrowedFd<'_>>,
    (soft, hard): OpenFileLimit,
) -> diagnostic::Result<SpawnedWorker> {
    let affinity = cpu_set(plan)?;
    let (control, theirs) = match plan.command {
        Some(_) => (None, None),
        None => UnixStream::pair().map(|(a, b)| (Some(a), Some(b))).map_err(|e| start_error(plan, &e))?,
    };
    let mut command = worker_command(plan);
    let mut inherited: Vec<RawFd> = Vec::new();
    if let (Some(theirs), Some(shm)) = (&theirs, shm) {
        command.env(env::LAUNCH_CONTROL_FD, theirs.as_raw_fd().to_string());
        command.env(env::LAUNCH_SHM_FD, shm.as_raw_fd().to_string());
        inherited.extend([theirs.as_raw_fd(), shm.as_raw_fd()]);
    }
    let memory = common_numa_node(&plan.cpus).and_then(NodeMask::single_node);
    let agent = Pid::this();
    // SAFETY: the closure only makes system calls that are allowed between fork and exec;
    // everything it uses was allocated before.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            if Pid::parent() != agent {
                return Err(Errno::ESRCH.into()); // the agent died before `set_pdeathsig` took effect
            }
            if let Some(set) = &affinity {
                nix::sched::sched_setaffinity(Pid::from_raw(0), set)?;
            }
            if let Some(nodes) = &memory {
                prefer_memory(nodes);
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
    let mut child = command.spawn().map_err(|e| start_error(plan, &e))?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Diagnostic::error(run::INTERNAL, "the worker has no output pipes"));
    };
    // Dropping `child` neither waits for the process nor kills it; `reap_children` waits.
    Ok(SpawnedWorker { pid: child.id(), stdout: stdout.into(), stderr: stderr.into(), control })
}

fn worker_command(plan: &WorkerPlan) -> Command {
    let mut command = match plan.command.as_deref() {
        Some([program, arguments @ ..]) => {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        }
        // The file that this process runs, even if it was replaced meanwhile.
        None | Some([]) => {
            let mut command = Command::new("/proc/self/exe");
            command.arg0("launch").arg("worker");
            command
        }
    };
    command.env_remove(env::LAUNCH_CONTROL_FD).env_remove(env::LAUNCH_SHM_FD);
    command.envs(plan.env.iter().map(|(k, v)| (k, v))).current_dir(&plan.workdir);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command
}

/// The CPU set of the plan; an error if the agent may not use all of its CPUs.
fn cpu_set(plan: &WorkerPlan) -> diagnostic::Result<Option<nix::sched::CpuSet>> {
    if plan.cpus.is_empty() {
        return Ok(None);
    }
    let allowed = allowed_cpus();
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

/// A set of NUMA nodes in the kernel's format.
struct NodeMask([libc::c_ulong; 16]);

impl NodeMask {
    /// The set of one node; `None` if the number is out of range.
    fn single_node(node: u32) -> Option<NodeMask> {
        let mut mask = NodeMask([0; 16]);
        *mask.0.get_mut(node as usize / 64)? |= 1 << (node % 64);
        Some(mask)
    }
}

/// Lets the calling process allocate memory from this node while it has some. Async-signal-safe.
///
/// Where a container forbids it, memory comes from the node of the thread that touches it first,
/// which is the same node for threads that are bound to it.
fn prefer_memory(nodes: &NodeMask) {
    let bits = 8 * size_of_val(&nodes.0);
    // SAFETY: the kernel reads `bits` bits at the address; the mask has that many.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, nodes.0.as_ptr(), bits) };
}

/// The error of a worker that could not be started.
fn start_error(plan: &WorkerPlan, error: &io::Error) -> Diagnostic {
    let program = plan.command.as_ref().and_then(|c| c.first()).map_or("launch worker", String::as_str);
    let workdir = plan.workdir.display();
    let (code, reason) = match error.raw_os_error().map(Errno::from_raw) {
        _ if !plan.workdir.is_dir() => {
            (host::WORKER_DIRECTORY_MISSING, format!("the working directory {workdir} is not a directory"))
        }
        Some(Errno::ENOENT) if program.contains('/') => (
            host::WORKER_PROGRAM_MISSING,
            format!("no such file in {workdir}, or its `#!` interpreter is missing"),
        ),
        Some(Errno::ENOENT) => (host::WORKER_PROGRAM_MISSING, "no such program in PATH".to_owned()),
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

/// Resets all signals to their default actions and unblocks them. Async-signal-safe.
fn reset_signals() {
    // The kernel's structure, all zero: the default action. glibc's `signal` does not reset the two
    // signals that it reserves for itself, and those are inherited as ignored, too.
    let default = [0u64; 4];
    for signal in 1..=64 {
        // SAFETY: the kernel reads at most 32 bytes; SIGKILL and SIGSTOP give an error and stay
        // unchanged.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null_mut::<u64>(), 8)
        };
    }
    // SAFETY: an initialised empty set, no old set wanted.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Signals the process group of a worker that has not been reaped, so that its pid is not reused.
pub(super) fn signal_group(pid: u32, ending: GroupSignal) {
    let group = Pid::from_raw(pid as i32);
    // An error means that the group has ended meanwhile.
    match ending {
        GroupSignal::Kill => _ = killpg(group, Signal::SIGKILL),
        GroupSignal::Terminate => {
            _ = killpg(group, Signal::SIGTERM);
            // A stopped process handles SIGTERM only after SIGCONT.
            _ = killpg(group, Signal::SIGCONT);
        }
    }
}

/// Sends a signal to a worker's first process if that has a handler for it. Returns `false` if it
/// has none: the default action would kill it or have no effect.
pub(super) fn signal_if_handled(pid: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let Ok(signal) = Signal::try_from(signal) else { return false };
    has_handler(&status, signal as i32) && nix::sys::signal::kill(Pid::from_raw(pid as i32), signal).is_ok()
}

/// Whether a process with this `/proc/PID/status` has a handler for the signal.
fn has_handler(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0);
    (1..=64).contains(&signal) && mask >> (signal - 1) & 1 == 1
}

/// Runs `py-spy dump` and returns up to `max_bytes` of the Python stack of a process.
///
/// Blocks for up to `limit`. Returns `None` if py-spy is not installed. The text is empty if py-spy
/// does not answer in time or the process is not Python.
pub(super) fn py_spy_dump(pid: i32, limit: std::time::Duration, max_bytes: usize) -> Option<String> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::{io::Read, os::fd::AsFd, time::Instant};
    let mut command = Command::new("py-spy");
    command.args(["dump", "--pid", &pid.to_string()]);
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
    // The agent's event loop reaps it. If it hangs, the sweep after the workers' end kills it.
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Reaps every child that has ended and calls `on_exit` for each. Returns whether children are
/// left.
///
/// If the child is a group leader according to `is_leader`, its group is killed first, while the
/// zombie keeps the group's number from being reused.
pub(crate) fn reap_children(
    is_leader: impl Fn(u32) -> bool,
    mut on_exit: impl FnMut(u32, ExitStatus),
) -> bool {
    loop {
        // SAFETY: waitid fills the zeroed siginfo; with WNOHANG it stays zero when no child has
        // ended.
        let (rc, pid) = unsafe {
            let mut info = std::mem::zeroed::<libc::siginfo_t>();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            let rc = libc::waitid(libc::P_ALL, 0, &mut info, flags);
            (rc, info.si_pid())
        };
        match rc {
            0 if pid == 0 => return true,
            0 => {}
            _ if Errno::last() == Errno::EINTR => continue,
            _ => return false, // ECHILD
        }
        if is_leader(pid as u32) {
            signal_group(pid as u32, GroupSignal::Kill);
        }
        let mut status = 0;
        // SAFETY: waits for a child that has ended; `status` is valid for writes.
        if unsafe { libc::waitpid(pid, &mut status, 0) } == pid {
            on_exit(pid as u32, exit_status(status));
        }
    }
}

/// Decodes the status of waitpid.
pub(crate) fn exit_status(status: i32) -> ExitStatus {
    let status = std::process::ExitStatus::from_raw(status);
    match status.signal() {
        Some(signal) => ExitStatus::Signal(signal, status.core_dumped()),
        None => ExitStatus::Code(status.code().unwrap_or(0) as u8),
    }
}
