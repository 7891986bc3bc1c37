//! [`MainThread`]: determines from `/proc` whether the main thread of a hanging process is busy,
//! and what it waits for.
use super::system_call::{SystemCall, classify_wait};
use protocol::hang::ThreadState;
use std::{
    fs,
    time::{Duration, Instant},
};

/// The time for which a hanging worker's main thread is observed, at least, to find out from its
/// CPU time whether it is busy.
pub(super) const CPU_TIME_WINDOW: Duration = Duration::from_millis(500);
/// The share of a CPU core that the main thread of a hanging worker must use to count as busy
/// instead of waiting.
const MIN_BUSY_CPU_SHARE: f64 = 0.1;
/// The duration of a clock tick, the unit of CPU times in `/proc` on Linux.
const TICK: Duration = Duration::from_millis(10);
/// The largest number of threads of a hanging worker in which the agent searches for a thread that
/// is blocked uninterruptibly in the kernel.
const MAX_THREADS: usize = 256;
/// The largest number of frames of a kernel stack that are kept.
const MAX_KERNEL_FRAMES: usize = 16;

/// The main thread of a process that is observed for a short time, with the state and CPU time that
/// the thread had at the beginning.
pub(super) struct MainThread {
    pid: u32,
    observed: Option<(char, u64)>,
    begin: Instant,
}

impl MainThread {
    /// Starts to observe the main thread of a process, by reading its present state and CPU time.
    pub(super) fn observe(pid: u32) -> MainThread {
        MainThread { pid, observed: read_stat(pid, pid), begin: Instant::now() }
    }

    /// Returns whether a signal or a debugger had stopped the main thread when the observation
    /// began.
    pub(super) fn is_stopped(&self) -> bool {
        self.observed.is_some_and(|(state, _)| matches!(state, 'T' | 't'))
    }

    /// Ends the observation of the main thread, and returns its state, whether it was busy, and
    /// what it waits for. Returns `None` if the process has ended.
    pub(super) fn finish_observation(self) -> Option<ThreadState> {
        let (state_before, before) = self.observed?;
        let (state, ticks) =
            read_stat(self.pid, self.pid).filter(|(state, _)| !matches!(state, 'Z' | 'X'))?;
        let used = TICK * ticks.saturating_sub(before).try_into().unwrap_or(u32::MAX);
        let window = self.begin.elapsed().max(CPU_TIME_WINDOW);
        // A thread that waits for a CPU may get only a small share of it.
        let is_runnable = (state_before, state) == ('R', 'R');
        let busy = is_runnable || used.as_secs_f64() >= MIN_BUSY_CPU_SHARE * window.as_secs_f64();
        Some(describe_thread(self.pid, self.pid, state, busy))
    }

    /// Ends the observation and returns the state of the main thread or, if the main thread sleeps
    /// interruptibly, of a thread in uninterruptible sleep if one exists.
    pub(super) fn finish_observation_of_any_thread(self) -> Option<ThreadState> {
        let pid = self.pid;
        let main = self.finish_observation()?;
        if main.busy || main.state != 'S' {
            return Some(main);
        }
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let mut threads =
            threads.take(MAX_THREADS).filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_blocked = |thread: &u32| read_stat(pid, *thread).is_some_and(|(state, _)| state == 'D');
        Some(threads.find(is_blocked).map_or(main, |thread| describe_thread(pid, thread, 'D', false)))
    }
}

/// Returns the state of a thread, the kernel function and system call in which it waits, and its
/// kernel stack, as read from `/proc`.
fn describe_thread(pid: u32, thread: u32, state: char, busy: bool) -> ThreadState {
    let directory = format!("/proc/{pid}/task/{thread}");
    let wait_channel = fs::read_to_string(format!("{directory}/wchan")).unwrap_or_default();
    let call = fs::read_to_string(format!("{directory}/syscall")).ok();
    let call = call.and_then(|text| SystemCall::parse(&text));
    let wait = classify_wait(call.as_ref(), &wait_channel);
    let file = call.filter(|_| matches!(state, 'S' | 'D')).and_then(|call| call.find_file(pid));
    let kernel_stack = fs::read_to_string(format!("{directory}/stack")).unwrap_or_default();
    ThreadState { state, wait, wait_channel, busy, file, kernel_stack: parse_kernel_stack(&kernel_stack) }
}

/// Parses the functions of a kernel stack, innermost first, from lines such as
/// `[<0>] futex_wait_queue+0x63/0x90`.
fn parse_kernel_stack(text: &str) -> Vec<String> {
    let function = |line: &str| {
        let name = line.split_once("] ")?.1.split('+').next()?;
        Some(name.to_owned())
    };
    text.lines().filter_map(function).take(MAX_KERNEL_FRAMES).collect()
}

/// Reads the state and the CPU time, in clock ticks, of a thread from `/proc`.
fn read_stat(pid: u32, thread: u32) -> Option<(char, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?;
    // The name of the program may contain spaces and parentheses.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((fields.first()?.chars().next()?, ticks(11)? + ticks(12)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_functions_of_a_kernel_stack_are_parsed() {
        let text = "[<0>] futex_wait_queue+0x63/0x90\n[<0>] do_futex+0x1/0x2\n\n[<0>] 0xffffffffffffffff\n";
        assert_eq!(parse_kernel_stack(text), ["futex_wait_queue", "do_futex", "0xffffffffffffffff"]);
        assert!(parse_kernel_stack("").is_empty(), "only root can read the stack");
    }

    #[test]
    fn the_test_process_is_observed() {
        let thread = MainThread::observe(std::process::id());
        assert!(!thread.is_stopped());
        assert!(thread.finish_observation().is_some_and(|state| "RS".contains(state.state)));
        let thread = MainThread::observe(std::process::id());
        assert!(thread.finish_observation_of_any_thread().is_some_and(|state| "RSD".contains(state.state)));
    }
}
