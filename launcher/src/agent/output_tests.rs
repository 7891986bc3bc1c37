//! Tests of the output pump of a worker.
use super::*;
use crate::agent::{log_thread::LogThread, rank_log::RankLog};
use std::{io::Write, os::fd::IntoRawFd};

/// A running output pump, with the worker's ends of the pipes and the receivers of the pump's
/// events and forwarded lines.
struct PumpHarness {
    stdout: File,
    stderr: File,
    pump: OutputPump,
    events: mpsc::Receiver<(Rank, u32, PumpEvent)>,
    lines: mpsc::Receiver<FromAgent>,
    log: std::path::PathBuf,
    log_thread: LogThread,
    _dir: tempfile::TempDir,
}

/// Starts an output pump for rank 0 with pid 1, whose log has at most `max_size` bytes. With
/// `show`, the pump forwards lines to the controller.
fn start_pump_harness(max_size: u64, show: bool) -> PumpHarness {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("deep/er/rank-0.log");
    let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
    let ((out, stdout), (err, stderr)) = (pipe(), pipe());
    let (console, lines) = Outbox::channel();
    let (sender, events) = mpsc::channel(8);
    let plan =
        PumpOptions { rank: 0, show, progress_pattern: None, error_file: None, timeout_evidence: None };
    let log_thread = LogThread::with_capacity(1 << 30).unwrap();
    let file = RankLog::open(&log, max_size).unwrap();
    let file =
        RankLogWriter::new(file, log_thread.clone(), std::sync::Arc::new(|warning| panic!("{warning}")));
    let console = ControllerLineQueue::new(console);
    let pump = OutputPump::start(plan, 1, file, out, err, console, sender).unwrap();
    PumpHarness {
        stdout: stdout.into(),
        stderr: stderr.into(),
        pump,
        events,
        lines,
        log,
        log_thread,
        _dir: dir,
    }
}

impl PumpHarness {
    /// Requests that the pump copy the remaining output, waits until it has done so, and returns
    /// the last lines.
    fn drain_tail(&mut self) -> Vec<String> {
        self.pump.request_drain();
        match self.events.blocking_recv() {
            Some((0, 1, PumpEvent::Drained { tail, error: None, timeout: None })) => tail,
            other => panic!("{other:?}"),
        }
    }

    fn read_log(&self) -> String {
        assert!(self.log_thread.wait_for_queued_writes(std::time::Duration::from_secs(60)));
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap()).into_owned()
    }

    /// Removes and returns the lines that the pump has forwarded, each with whether the line is
    /// from stderr.
    fn take_console_lines(&mut self) -> Vec<(bool, String)> {
        let mut lines = Vec::new();
        while let Ok(FromAgent::Line { stderr, text, .. }) = self.lines.try_recv() {
            lines.push((stderr, text));
        }
        lines
    }
}

#[test]
fn lines_reach_the_log_the_tail_and_the_console() {
    let mut harness = start_pump_harness(1 << 20, true);
    harness.stdout.write_all(b"one\ntwo\n").unwrap();
    assert_eq!(harness.drain_tail(), ["one", "two"]);
    harness.stderr.write_all(b"bad \xff byte\nno newline").unwrap();
    assert_eq!(harness.drain_tail(), ["one", "two", "bad \u{fffd} byte", "no newline"]);
    assert!(harness.log_thread.wait_for_queued_writes(std::time::Duration::from_secs(60)));
    let mut log = std::fs::read(&harness.log).unwrap();
    assert_eq!(log, b"one\ntwo\nbad \xff byte\nno newline");
    let console: Vec<_> = harness.take_console_lines();
    let expected = [(false, "one"), (false, "two"), (true, "bad \u{fffd} byte"), (true, "no newline")];
    assert_eq!(console, expected.map(|(e, t)| (e, t.to_owned())));
    log.clear();
}

#[test]
fn draining_does_not_wait_for_a_descendant_that_keeps_the_pipe_open() {
    let mut harness = start_pump_harness(1 << 20, false);
    let held = harness.stdout.try_clone().unwrap();
    harness.stdout.write_all(b"last line\n").unwrap();
    drop(std::mem::replace(&mut harness.stdout, held));
    assert_eq!(harness.drain_tail(), ["last line"]);
    harness.stdout.write_all(b"and later\n").unwrap();
    assert_eq!(harness.drain_tail(), ["last line", "and later"]);
}

#[test]
fn the_tail_keeps_the_last_lines_and_truncates_long_ones() {
    let mut harness = start_pump_harness(1 << 20, false);
    for i in 0..100 {
        writeln!(harness.stdout, "line {i}").unwrap();
    }
    let long = "é".repeat(MAX_LINE_BYTES);
    harness.stdout.write_all(long.as_bytes()).unwrap();
    let tail = harness.drain_tail();
    assert_eq!(tail.len(), TAIL_LINES);
    assert_eq!(tail[0], "line 81");
    assert_eq!(tail[TAIL_LINES - 1], format!("{} […]", "é".repeat(MAX_LINE_BYTES / 2)));
    assert!(harness.read_log().ends_with(&long));
}

#[test]
fn a_progress_bar_is_reduced_to_what_a_terminal_shows() {
    assert_eq!(format_display_line(b"  1%\r 50%\r100%\r"), "100%");
    assert_eq!(format_display_line(b"done\r"), "done");
    assert_eq!(format_display_line(b""), "");
}

#[test]
fn a_full_log_ends_with_one_notice() {
    let mut harness = start_pump_harness(25, false);
    for _ in 0..10 {
        harness.stdout.write_all(b"ten bytes\n").unwrap();
        harness.drain_tail();
    }
    let log = harness.read_log();
    let (kept, notice) = log.split_at(20);
    assert_eq!(kept, "ten bytes\nten bytes\n");
    insta::assert_snapshot!("notice_of_a_full_log", notice);
}

#[test]
fn a_console_that_does_not_read_loses_lines_and_does_not_block_the_worker() {
    let mut harness = start_pump_harness(1 << 30, true);
    let line = [b"x".repeat(99), b"\n".to_vec()].concat();
    for _ in 0..100_000 {
        harness.stdout.write_all(&line).unwrap();
    }
    harness.drain_tail();
    assert_eq!(harness.read_log().len(), 10_000_000);
    let console = harness.take_console_lines();
    assert!(console.len() < 5000, "{}", console.len());
    let notice = &console[console.len() - 1].1;
    insta::with_settings!({ filters => [(r"\d+ lines", "[COUNT] lines"), (r"in /\S+/", "in [DIR]/")] }, {
        insta::assert_snapshot!("notice_of_dropped_lines", notice);
    });
}

#[test]
fn dropping_the_pump_ends_its_thread() {
    let harness = start_pump_harness(1 << 20, false);
    let PumpHarness { stdout, pump, mut events, log_thread, .. } = harness;
    drop((pump, log_thread));
    // The thread owns the sender of `events`, which closes when the thread has ended.
    assert!(events.blocking_recv().is_none());
    // The pipe has no reader any more, so a write fails (Rust programs ignore SIGPIPE).
    let fd = stdout.into_raw_fd();
    // SAFETY: a valid descriptor of ours and one byte.
    assert_eq!(unsafe { libc::write(fd, b"x".as_ptr().cast(), 1) }, -1);
    // SAFETY: owned by this test since `into_raw_fd`.
    unsafe { libc::close(fd) };
}
