//! [`BorrowedTerminal`]: the terminal in which the user has started launch, while a worker uses it
//! (`run.terminal`).
use diagnostic::{Diagnostic, codes::host};
use jobspec::ids::Rank;
use nix::{
    libc,
    sys::{
        signal::{SigSet, SigmaskHow, Signal, sigprocmask},
        termios::{SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr},
    },
    unistd::{Pid, getsid, tcgetpgrp, tcsetpgrp},
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsFd, BorrowedFd},
};

/// The controlling terminal of this process, which the worker of one rank (`run.terminal`) uses
/// until this value is dropped. Dropping the value gives the terminal back, with its previous
/// foreground process group and settings.
pub(crate) struct BorrowedTerminal {
    file: File,
    group: Pid,
    settings: Termios,
}

impl std::fmt::Debug for BorrowedTerminal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BorrowedTerminal").field("group", &self.group).finish_non_exhaustive()
    }
}

impl BorrowedTerminal {
    /// Opens the controlling terminal of this process, so that the worker of a rank can use it.
    /// Fails if this process has none, for example because another machine has started it.
    pub(super) fn open(rank: Rank) -> diagnostic::Result<BorrowedTerminal> {
        let open = || -> io::Result<BorrowedTerminal> {
            let file = OpenOptions::new().read(true).write(true).open("/dev/tty")?;
            let (group, settings) = (tcgetpgrp(&file)?, tcgetattr(&file)?);
            Ok(BorrowedTerminal { file, group, settings })
        };
        let terminal = open().map_err(|error| {
            let message = format!("the host of rank {rank} has no terminal for `run.terminal`");
            Diagnostic::error(host::TERMINAL_MISSING, message)
                .with_subject("run.terminal")
                .with_field("rank", rank)
                .with_cause(&error)
                .with_remedy()
        })?;
        // A worker that Ctrl-Z suspends could not be continued, because the shell does not know it.
        let mut settings = terminal.settings.clone();
        settings.control_chars[SpecialCharacterIndices::VSUSP as usize] = libc::_POSIX_VDISABLE;
        terminal.apply_settings(&settings);
        Ok(terminal)
    }

    /// Returns the opened device file of the terminal.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Sets the settings of the terminal (termios) to `settings`, for example to restore those from
    /// before the worker has used the terminal. Ignores errors, because the terminal may be gone.
    fn apply_settings(&self, settings: &Termios) {
        with_sigttou_blocked(|| _ = tcsetattr(&self.file, SetArg::TCSANOW, settings));
    }
}

impl Drop for BorrowedTerminal {
    fn drop(&mut self) {
        // An interactive shell takes the terminal back by itself when launch is killed.
        let foreground = tcgetpgrp(&self.file);
        if foreground.is_ok_and(|group| group != self.group && Ok(group) == getsid(None)) {
            return;
        }
        with_sigttou_blocked(|| _ = tcsetpgrp(&self.file, self.group));
        self.apply_settings(&self.settings);
    }
}

/// Makes the process group of the calling process the foreground process group of a terminal.
/// Async-signal-safe.
pub(super) fn take_foreground(terminal: BorrowedFd<'_>) -> io::Result<()> {
    let mut result = Ok(());
    with_sigttou_blocked(|| result = tcsetpgrp(terminal.as_fd(), nix::unistd::getpgrp()));
    Ok(result?)
}

/// Calls `change`, which changes the state of the terminal, with SIGTTOU blocked in this thread, so
/// that the signal does not stop this background process. Async-signal-safe.
fn with_sigttou_blocked(change: impl FnOnce()) {
    let (mut stop, mut before) = (SigSet::empty(), SigSet::empty());
    stop.add(Signal::SIGTTOU);
    _ = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&stop), Some(&mut before));
    change();
    _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
}
