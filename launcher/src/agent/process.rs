//! Starting, signalling and reaping worker processes: the only place of the agent that does.
//!
//! Each worker leads a process group of its own, and dies with the thread that started it (`PR_SET_PDEATHSIG` is bound
//! to that thread), so workers are started from the agent's main thread only.
use super::core::Ending;
use crate::discover::topology::only_node;
use contract::{
    control::{ExitStatus, WorkerPlan},
    env,
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

/// A worker's process and our ends of what connects us to it.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub(crate) pid: u32,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// The control stream of a built-in worker.
    pub(crate) control: Option<UnixStream>,
}

/// Orphaned descendants of this process become its children instead of init's.
pub(crate) fn become_subreaper() -> io::Result<()> {
    Ok(prctl::set_child_subreaper(true)?)
}

/// Two processes go on from here: this one is told the other's number, the other one `None`. Only before a second thread is started.
pub(super) fn split() -> io::Result<Option<Pid>> {
    // SAFETY: with one thread no lock can be held by a thread that the new process lacks.
    match unsafe { nix::unistd::fork()? } {
        nix::unistd::ForkResult::Parent { child } => Ok(Some(child)),
        nix::unistd::ForkResult::Child => Ok(None),
    }
}

/// An empty memory file for the node's built-in workers; they size it.
pub(super) fn shared_memory() -> io::Result<OwnedFd> {
    Ok(memfd_create(c"launch", MFdFlags::MFD_CLOEXEC)?)
}

/// The CPUs this process may run on.
pub(super) fn own_cpus() -> Vec<u32> {
    nix::sched::sched_getaffinity(Pid::from_raw(0)).map_or_else(
        |_| Vec::new(),
        |set| {
            let is_set = |cpu: &u32| set.is_set(*cpu as usize).unwrap_or(false);
            (0..nix::sched::CpuSet::count() as u32).filter(is_set).collect()
        },
    )
}

/// Nothing that was open when the agent started is inherited by workers; what is opened later is close-on-exec anyway.
pub(super) fn close_on_exec_everything() {
    let open: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")
        .map(|d| d.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect())
        .unwrap_or_default();
    for fd in open.into_iter().filter(|fd| *fd > 2) {
        // SAFETY: F_SETFD on any number is harmless; a closed one gives EBADF.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// The agent's own limit of open files, as it was.
pub(super) type FileLimit = (u64, u64);

/// Lets the agent open as many files as it may (four for each worker); returns the limits that workers shall have.
pub(super) fn raise_file_limit() -> io::Result<FileLimit> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok((soft, hard))
}

/// Starts a worker; `shm` is what a built-in one inherits as shared memory. The error says what to do.
pub(super) fn spawn(
    plan: &WorkerPlan,
    shm: Option<BorrowedFd<'_>>,
    (soft, hard): FileLimit,
) -> Result<Spawned, String> {
    let affinity = affinity(plan)?;
    let (control, theirs) = match plan.command {
        Some(_) => (None, None),
        None => UnixStream::pair().map(|(a, b)| (Some(a), Some(b))).map_err(|e| cannot_start(plan, &e))?,
    };
    let mut command = command(plan);
    let mut inherited: Vec<RawFd> = Vec::new();
    if let (Some(theirs), Some(shm)) = (&theirs, shm) {
        command.env(env::LAUNCH_CONTROL_FD, theirs.as_raw_fd().to_string());
        command.env(env::LAUNCH_SHM_FD, shm.as_raw_fd().to_string());
        inherited.extend([theirs.as_raw_fd(), shm.as_raw_fd()]);
    }
    let memory = only_node(&plan.cpus).and_then(NodeMask::of);
    let agent = Pid::this();
    // SAFETY: the closure only makes system calls that are allowed between fork and exec; everything it uses was
    // allocated before.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            if Pid::parent() != agent {
                return Err(Errno::ESRCH.into()); // the agent died before the line above took effect
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
    let mut child = command.spawn().map_err(|e| cannot_start(plan, &e))?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err("it has no output pipes".into());
    };
    // Dropping `child` neither waits for the process nor kills it: `reap` is the only one that waits.
    Ok(Spawned { pid: child.id(), stdout: stdout.into(), stderr: stderr.into(), control })
}

fn command(plan: &WorkerPlan) -> Command {
    let mut command = match plan.command.as_deref() {
        Some([program, arguments @ ..]) => {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        }
        // The very file this process runs, even if another was put in its place meanwhile.
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

/// The CPU set of the plan, refused when this machine does not allow all of it.
fn affinity(plan: &WorkerPlan) -> Result<Option<nix::sched::CpuSet>, String> {
    if plan.cpus.is_empty() {
        return Ok(None);
    }
    let allowed = own_cpus();
    let mut set = nix::sched::CpuSet::new();
    for cpu in &plan.cpus {
        if !allowed.contains(cpu) || set.set(*cpu as usize).is_err() {
            return Err(format!(
                "it shall be bound to CPU {cpu}, but this node allows only CPUs {allowed:?} (taskset, container or cgroup limit)"
            ));
        }
    }
    Ok(Some(set))
}

/// NUMA nodes as the kernel takes them.
struct NodeMask([libc::c_ulong; 16]);

impl NodeMask {
    /// This node alone; `None`: the kernel has no such one.
    fn of(node: u32) -> Option<NodeMask> {
        let mut mask = NodeMask([0; 16]);
        *mask.0.get_mut(node as usize / 64)? |= 1 << (node % 64);
        Some(mask)
    }
}

/// Memory of the calling process comes from this node while it has some. Async-signal-safe. A container may forbid it:
/// then memory comes from where the first touch is, which is this node too for threads that are bound to it.
fn prefer_memory(nodes: &NodeMask) {
    let bits = 8 * size_of_val(&nodes.0);
    // SAFETY: the kernel reads `bits` bits at the address; the mask has that many.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, nodes.0.as_ptr(), bits) };
}

fn cannot_start(plan: &WorkerPlan, error: &io::Error) -> String {
    let program = plan.command.as_ref().and_then(|c| c.first()).map_or("launch worker", String::as_str);
    let why = match error.raw_os_error().map(Errno::from_raw) {
        _ if !plan.workdir.is_dir() => format!("its workdir {} is not a directory", plan.workdir.display()),
        Some(Errno::ENOENT) if program.contains('/') => {
            format!("no such file, seen from {} (or its #! interpreter is missing)", plan.workdir.display())
        }
        Some(Errno::ENOENT) => "no such program in PATH".into(),
        Some(Errno::EACCES) => "it is not an executable file (chmod +x?)".into(),
        Some(Errno::EAGAIN) => format!("{error}: the limit of processes is reached (ulimit -u, pids cgroup)"),
        Some(Errno::EMFILE | Errno::ENFILE) => format!("{error}: too many open files (ulimit -n)"),
        _ => error.to_string(),
    };
    format!("cannot start `{program}`: {why}")
}

/// Default handlers and an empty mask, whatever the agent and those before it ignored. Async-signal-safe.
fn reset_signals() {
    // The kernel's own structure, all zero: the default action. glibc's signal(2) leaves out the two signals that it
    // keeps for itself, and those arrive ignored too.
    let default = [0u64; 4];
    for signal in 1..=64 {
        // SAFETY: the kernel reads at most 32 bytes; SIGKILL and SIGSTOP give an error and stay as they are.
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

/// Signals the whole group of a worker that has not been reaped (its pid can't have been given away).
pub(super) fn signal_group(pid: u32, ending: Ending) {
    let group = Pid::from_raw(pid as i32);
    // No such process: it ended meanwhile.
    match ending {
        Ending::Kill => _ = killpg(group, Signal::SIGKILL),
        Ending::Term => {
            _ = killpg(group, Signal::SIGTERM);
            // A stopped process would not see it.
            _ = killpg(group, Signal::SIGCONT);
        }
    }
}

/// Asks a worker's first process to save by this signal; `false`: it has no handler for it, and would die or not
/// notice.
pub(super) fn notify(pid: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let Ok(signal) = Signal::try_from(signal) else { return false };
    handles(&status, signal as i32) && nix::sys::signal::kill(Pid::from_raw(pid as i32), signal).is_ok()
}

/// Does a process with this `/proc/PID/status` catch the signal?
fn handles(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0);
    (1..=64).contains(&signal) && mask >> (signal - 1) & 1 == 1
}

/// The Python stack of a process by py-spy, at most `most` bytes of it; `None`: py-spy isn't installed. Empty when it has
/// nothing to say in time, of a process that isn't Python say.
pub(super) fn py_spy(pid: i32, limit: std::time::Duration, most: usize) -> Option<String> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::{io::Read, os::fd::AsFd, time::Instant};
    let mut command = Command::new("py-spy");
    command.args(["dump", "--pid", &pid.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn().ok()?;
    let until = Instant::now() + limit;
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    let mut stdout = child.stdout.take()?;
    while text.len() < most {
        let left = PollTimeout::try_from(until.saturating_duration_since(Instant::now())).ok();
        let ready =
            poll(&mut [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)], left.unwrap_or(PollTimeout::ZERO));
        match ready.ok().filter(|n| *n > 0).and_then(|_| stdout.read(&mut buffer).ok()) {
            Some(n @ 1..) => text.extend_from_slice(&buffer[..n]),
            _ => break,
        }
    }
    // The agent's loop reaps it. One that hangs ends with the sweep that follows the workers' end.
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Reaps every child that has ended and calls `ended` once for each. The group of those that `leads` a group of ours is
/// killed first, while the zombie still keeps the group's number from being given away. `false`: no child is left.
pub(crate) fn reap(leads: impl Fn(u32) -> bool, mut ended: impl FnMut(u32, ExitStatus)) -> bool {
    loop {
        // SAFETY: waitid fills the zeroed siginfo; with WNOHANG it stays zero when nobody has ended.
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
        if leads(pid as u32) {
            signal_group(pid as u32, Ending::Kill);
        }
        let mut status = 0;
        // SAFETY: waits for a child that is known to have ended; `status` is a valid place.
        if unsafe { libc::waitpid(pid, &mut status, 0) } == pid {
            ended(pid as u32, exit_status(status));
        }
    }
}

/// waitpid's number as what it means.
pub(crate) fn exit_status(status: i32) -> ExitStatus {
    let status = std::process::ExitStatus::from_raw(status);
    match status.signal() {
        Some(signal) => ExitStatus::Signal(signal, status.core_dumped()),
        None => ExitStatus::Code(status.code().unwrap_or(0) as u8),
    }
}
