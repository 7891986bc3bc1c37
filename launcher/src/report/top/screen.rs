//! Runs the full-screen view of `launch top`: prepares and restores the terminal, reads keys and
//! new data.
use super::{
    top_state::{KeyAction, TopState},
    view::draw_screen,
};
use dashboard::RunSnapshot;
use nix::poll::{PollFd, PollFlags, poll};
use ratatui::crossterm::event::{self, Event};
use std::{
    io::{self, IsTerminal},
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// The time after which `launch top` reads the state of the run again.
const REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// How long `launch top` waits for a key at a time, after which it checks whether a signal has
/// requested its end.
const KEY_WAIT_INTERVAL: Duration = Duration::from_millis(100);

/// The number of seconds after a signal such as SIGTERM at which the kernel kills `launch top` by
/// an alarm if it has not ended before. The library that reads the keys does not return if the
/// terminal is closed while it reads.
const SIGNAL_EXIT_TIMEOUT_S: u32 = 2;

/// Whether a signal that ends `launch top` has arrived.
static HAS_END_SIGNAL_ARRIVED: AtomicBool = AtomicBool::new(false);

/// The source of the data that `launch top` shows: the state of a run and the logs of its ranks.
pub(crate) trait TopSource {
    /// Returns the present state of the run; `None` if the run no longer exists.
    fn take_snapshot(&self) -> Option<RunSnapshot>;

    /// Returns the last lines of the log of a rank. Returns no lines if the log is not on this
    /// machine.
    fn read_log_end(&self, rank: u32) -> Vec<String>;
}

/// Records that a signal has requested the end of `launch top`. Called by the kernel when a signal
/// arrives.
extern "C" fn record_signal(_: libc::c_int) {
    HAS_END_SIGNAL_ARRIVED.store(true, Ordering::Relaxed);
    // SAFETY: `alarm` may be called by a signal handler. SIGALRM ends the process.
    unsafe { libc::alarm(SIGNAL_EXIT_TIMEOUT_S) };
}

/// Returns whether this process can show the view of `launch top`: stdin and stdout are terminals.
pub(crate) fn can_show_full_screen() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// Shows the run on the whole terminal until the user quits `launch top` or a signal arrives.
/// Restores the terminal, also after a panic.
pub(crate) fn show_run(source: &dyn TopSource) -> io::Result<()> {
    if !can_show_full_screen() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "stdin or stdout is not a terminal"));
    }
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        let handler: extern "C" fn(libc::c_int) = record_signal;
        // SAFETY: the handler only stores to an atomic variable and sets an alarm.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    // Also installs a panic hook that restores the terminal.
    let mut terminal = ratatui::try_init()?;
    let shown = run_event_loop(source, &mut terminal);
    let restored = ratatui::try_restore();
    shown.and(restored)
}

/// Draws the run and processes keys until `launch top` must end.
fn run_event_loop(source: &dyn TopSource, terminal: &mut ratatui::DefaultTerminal) -> io::Result<()> {
    let mut state = TopState::default();
    let mut refreshed: Option<Instant> = None;
    while !HAS_END_SIGNAL_ARRIVED.load(Ordering::Relaxed) {
        if refreshed.is_none_or(|at| at.elapsed() >= REFRESH_INTERVAL) {
            match source.take_snapshot() {
                Some(run) => state.set_run(run),
                None => return Err(io::Error::new(io::ErrorKind::NotFound, "the run no longer exists")),
            }
            state.log = source.read_log_end(state.selected);
            refreshed = Some(Instant::now());
        }
        terminal.draw(|frame| draw_screen(frame, &state))?;
        let events = match read_terminal_events() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        let keys = events.into_iter().filter_map(|event| event.as_key_event());
        for key in keys {
            let selected = state.selected;
            if state.handle_key(key) == KeyAction::Quit {
                return Ok(());
            }
            if state.selected != selected {
                state.log = source.read_log_end(state.selected);
            }
        }
    }
    Ok(())
}

/// Waits for input from the terminal for [`KEY_WAIT_INTERVAL`] and returns all events that have
/// arrived. Fails if the terminal was closed.
fn read_terminal_events() -> io::Result<Vec<Event>> {
    let stdin = io::stdin();
    let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    if poll(&mut fds, KEY_WAIT_INTERVAL.as_millis() as u16)? == 0 {
        return Ok(Vec::new());
    }
    let closed = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
    if fds[0].revents().is_none_or(|events| events.intersects(closed)) {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the terminal was closed"));
    }
    let mut events = Vec::new();
    while event::poll(Duration::ZERO)? {
        events.push(event::read()?);
    }
    Ok(events)
}
