//! Runs a program in a terminal of a separate tmux server, and reads what the terminal shows.
use super::{
    environment::{clean_command, isolated_command},
    output_to_text, report_skip,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// The time in which the terminal must show an expected text, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A terminal that shows a shell command. Its tmux server ends at the end of the test.
pub(crate) struct TmuxTerminal {
    /// The directory of the test, in which the command runs ([`isolated_command`]).
    directory: PathBuf,
    /// The name of the server's socket.
    socket: String,
}

impl TmuxTerminal {
    /// Runs a shell command in a terminal with this size, with `directory` as its home. Returns
    /// `None` if tmux is not installed; the test is then skipped.
    pub(crate) fn start(
        test: &str,
        directory: &Path,
        (columns, rows): (usize, usize),
        command: &str,
    ) -> Option<TmuxTerminal> {
        if !clean_command("tmux").arg("-V").output().is_ok_and(|output| output.status.success()) {
            report_skip(test, "tmux is not installed");
            return None;
        }
        // Without its status line, tmux leaves the whole terminal to the command.
        fs::write(directory.join("tmux.conf"), "set -g status off\n").unwrap();
        let terminal =
            TmuxTerminal { directory: directory.to_path_buf(), socket: format!("tmux-{columns}x{rows}") };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        terminal.run_tmux(&["new-session", "-d", "-x", &columns, "-y", &rows, command]);
        assert_eq!(
            terminal.run_tmux(&["display-message", "-p", "#{pane_width} #{pane_height}"]).trim(),
            format!("{columns} {rows}")
        );
        Some(terminal)
    }

    /// Creates a command of tmux for the server of this terminal.
    fn tmux_command(&self, args: &[&str]) -> Command {
        let mut command = isolated_command("tmux", &self.directory);
        command.arg("-u").arg("-S").arg(self.directory.join(&self.socket));
        command.arg("-f").arg(self.directory.join("tmux.conf")).args(args);
        command
    }

    /// Runs a command of tmux, and returns what it prints.
    #[track_caller]
    fn run_tmux(&self, args: &[&str]) -> String {
        let output = self.tmux_command(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", output_to_text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the lines that the terminal shows.
    pub(crate) fn read_screen(&self) -> Vec<String> {
        self.run_tmux(&["capture-pane", "-p"]).lines().map(str::to_owned).collect()
    }

    /// Presses a key, which has the name that tmux gives it.
    pub(crate) fn press_key(&self, key: &str) {
        self.run_tmux(&["send-keys", key]);
    }

    /// Waits until the lines that the terminal shows fulfil a condition, and returns the lines.
    #[track_caller]
    pub(crate) fn wait_for_screen(&self, name: &str, fits: impl Fn(&[String]) -> bool) -> Vec<String> {
        let began = Instant::now();
        loop {
            let screen = self.read_screen();
            if fits(&screen) {
                return screen;
            }
            assert!(began.elapsed() < TIMEOUT, "timeout: {name}:\n{}", screen.join("\n"));
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for TmuxTerminal {
    fn drop(&mut self) {
        _ = self.tmux_command(&["kill-server"]).output();
    }
}
