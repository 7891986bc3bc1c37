//! [`MainThread`]: what the main thread of a process does, from `/proc`.
use protocol::hang::{ThreadState, WaitKind};
use std::{
    fs,
    time::{Duration, Instant},
};

/// The shortest time over which the use of CPU time is measured.
pub(super) const CPU_TIME_WINDOW: Duration = Duration::from_millis(500);
/// The least share of a core that a busy thread uses.
const BUSY_SHARE: f64 = 0.1;
/// The duration of a clock tick of `/proc` on Linux.
const TICK: Duration = Duration::from_millis(10);

/// The main thread of a process, and the CPU time that it had used when the observation began.
pub(super) struct MainThread {
    pid: u32,
    observed: Option<(char, u64)>,
    begin: Instant,
}

impl MainThread {
    /// Begins to observe the main thread of a process.
    pub(super) fn observe(pid: u32) -> MainThread {
        MainThread { pid, observed: read_stat(pid), begin: Instant::now() }
    }

    /// Returns whether a signal or a debugger had stopped the thread when the observation began.
    pub(super) fn is_stopped(&self) -> bool {
        self.observed.is_some_and(|(state, _)| matches!(state, 'T' | 't'))
    }

    /// Ends the observation. Returns `None` if the process has ended.
    pub(super) fn describe(self) -> Option<ThreadState> {
        let (_, before) = self.observed?;
        let (state, ticks) = read_stat(self.pid).filter(|(state, _)| !matches!(state, 'Z' | 'X'))?;
        let used = TICK * ticks.saturating_sub(before).try_into().unwrap_or(u32::MAX);
        let window = self.begin.elapsed().max(CPU_TIME_WINDOW);
        let wait_channel = fs::read_to_string(format!("/proc/{}/wchan", self.pid)).unwrap_or_default();
        let call = fs::read_to_string(format!("/proc/{}/syscall", self.pid)).unwrap_or_default();
        let call = call.split_whitespace().next().and_then(|number| number.parse().ok());
        Some(ThreadState {
            state,
            wait: classify_wait(call, &wait_channel),
            wait_channel,
            busy: used.as_secs_f64() >= BUSY_SHARE * window.as_secs_f64(),
        })
    }
}

/// Reads the state and the CPU time of a process's main thread, in clock ticks.
fn read_stat(pid: u32) -> Option<(char, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).ok()?;
    // The name of the program may contain spaces and parentheses.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((fields.first()?.chars().next()?, ticks(11)? + ticks(12)?))
}

/// Finds out what a system call waits for, from its number or, if the number cannot be read, from
/// the function of the kernel.
fn classify_wait(call: Option<i64>, channel: &str) -> WaitKind {
    const IO: [i64; 7] = [
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_pread64,
        libc::SYS_readv,
        libc::SYS_recvfrom,
        libc::SYS_recvmsg,
        libc::SYS_openat,
    ];
    const SLEEP: [i64; 2] = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep];
    const POLL: [i64; 3] = [libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_pwait];
    #[cfg(target_arch = "x86_64")]
    const OLD_POLL: [i64; 3] = [libc::SYS_poll, libc::SYS_select, libc::SYS_epoll_wait];
    #[cfg(not(target_arch = "x86_64"))]
    const OLD_POLL: [i64; 0] = [];
    match call {
        Some(libc::SYS_futex) => WaitKind::Futex,
        Some(call) if IO.contains(&call) => WaitKind::Io,
        Some(call) if SLEEP.contains(&call) => WaitKind::Sleep,
        Some(call) if POLL.contains(&call) || OLD_POLL.contains(&call) => WaitKind::Poll,
        Some(_) => WaitKind::Other,
        None if channel.starts_with("futex") => WaitKind::Futex,
        None if channel.contains("pipe_read") || channel == "wait_for_partner" => WaitKind::Io,
        None if channel.contains("nanosleep") => WaitKind::Sleep,
        None if channel.contains("poll") || channel.contains("select") => WaitKind::Poll,
        None => WaitKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_process_is_observed() {
        let thread = MainThread::observe(std::process::id());
        assert!(!thread.is_stopped());
        assert!(thread.describe().is_some_and(|state| "RS".contains(state.state)));
        assert_eq!(classify_wait(None, "futex_wait_queue"), WaitKind::Futex);
        assert_eq!(classify_wait(Some(libc::SYS_read), ""), WaitKind::Io);
    }
}
