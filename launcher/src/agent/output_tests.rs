use super::*;
use std::os::fd::IntoRawFd;

struct Rig {
    stdout: File,
    stderr: File,
    pump: OutputPump,
    events: mpsc::Receiver<(Rank, u32, PumpEvent)>,
    lines: mpsc::Receiver<FromAgent>,
    log: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

fn rig(max_size: u64, show: bool) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("deep/er/rank-0.log");
    let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
    let ((out, stdout), (err, stderr)) = (pipe(), pipe());
    let (console, lines) = Outbox::new();
    let (sender, events) = mpsc::channel(8);
    let plan = PumpOptions { rank: 0, show, progress_pattern: None };
    let pump = OutputPump::start(plan, 1, RankLog::open(&log, max_size).unwrap(), out, err, console, sender)
        .unwrap();
    Rig { stdout: stdout.into(), stderr: stderr.into(), pump, events, lines, log, _dir: dir }
}

impl Rig {
    fn drained(&mut self) -> Vec<String> {
        self.pump.drain();
        match self.events.blocking_recv() {
            Some((0, 1, PumpEvent::Drained(tail))) => tail,
            other => panic!("{other:?}"),
        }
    }

    fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap()).into_owned()
    }

    fn console(&mut self) -> Vec<(bool, String)> {
        let mut lines = Vec::new();
        while let Ok(FromAgent::Line { stderr, text, .. }) = self.lines.try_recv() {
            lines.push((stderr, text));
        }
        lines
    }
}

#[test]
fn lines_reach_the_log_the_tail_and_the_console() {
    let mut rig = rig(1 << 20, true);
    rig.stdout.write_all(b"one\ntwo\n").unwrap();
    assert_eq!(rig.drained(), ["one", "two"]);
    rig.stderr.write_all(b"bad \xff byte\nno newline").unwrap();
    assert_eq!(rig.drained(), ["one", "two", "bad \u{fffd} byte", "no newline"]);
    let mut log = std::fs::read(&rig.log).unwrap();
    assert_eq!(log, b"one\ntwo\nbad \xff byte\nno newline");
    let console: Vec<_> = rig.console();
    let expected = [(false, "one"), (false, "two"), (true, "bad \u{fffd} byte"), (true, "no newline")];
    assert_eq!(console, expected.map(|(e, t)| (e, t.to_owned())));
    log.clear();
}

#[test]
fn draining_does_not_wait_for_a_descendant_that_keeps_the_pipe_open() {
    let mut rig = rig(1 << 20, false);
    let held = rig.stdout.try_clone().unwrap();
    rig.stdout.write_all(b"last line\n").unwrap();
    drop(std::mem::replace(&mut rig.stdout, held));
    assert_eq!(rig.drained(), ["last line"]);
    rig.stdout.write_all(b"and later\n").unwrap();
    assert_eq!(rig.drained(), ["last line", "and later"]);
}

#[test]
fn the_tail_keeps_the_last_lines_and_truncates_long_ones() {
    let mut rig = rig(1 << 20, false);
    for i in 0..100 {
        writeln!(rig.stdout, "line {i}").unwrap();
    }
    let long = "é".repeat(MAX_LINE_BYTES);
    rig.stdout.write_all(long.as_bytes()).unwrap();
    let tail = rig.drained();
    assert_eq!(tail.len(), TAIL_LINES);
    assert_eq!(tail[0], "line 81");
    assert_eq!(tail[TAIL_LINES - 1], format!("{} […]", "é".repeat(MAX_LINE_BYTES / 2)));
    assert!(rig.log().ends_with(&long));
}

#[test]
fn a_progress_bar_is_reduced_to_what_a_terminal_shows() {
    assert_eq!(display_line(b"  1%\r 50%\r100%\r"), "100%");
    assert_eq!(display_line(b"done\r"), "done");
    assert_eq!(display_line(b""), "");
}

#[test]
fn a_full_log_ends_with_one_notice() {
    let mut rig = rig(25, false);
    for _ in 0..10 {
        rig.stdout.write_all(b"ten bytes\n").unwrap();
        rig.drained();
    }
    let log = rig.log();
    let (kept, notice) = log.split_at(20);
    assert_eq!(kept, "ten bytes\nten bytes\n");
    insta::assert_snapshot!("notice_of_a_full_log", notice);
}

#[test]
fn a_log_that_cannot_be_written_is_reported_once_and_does_not_block_the_worker() {
    let (console, _lines) = Outbox::<FromAgent>::new();
    let (sender, mut events) = mpsc::channel(8);
    let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
    let ((out, stdout), (err, _stderr)) = (pipe(), pipe());
    let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
    let log = RankLog {
        file: full,
        path: "/dev/full".into(),
        size: 0,
        max_size: 1 << 20,
        times: LogTimes::open(Path::new("/dev/null/x")),
        closed: false,
    };
    let plan = PumpOptions { rank: 0, show: false, progress_pattern: None };
    let pump = OutputPump::start(plan, 1, log, out, err, console, sender).unwrap();
    let mut stdout = File::from(stdout);
    for _ in 0..1000 {
        stdout.write_all(&[b'\n'; 1000]).unwrap();
    }
    pump.drain();
    let Some((_, _, PumpEvent::LogFailed(warning))) = events.blocking_recv() else { panic!() };
    assert_eq!(warning.code(), WORKER_LOG_UNWRITABLE);
    assert_eq!(warning.causes(), [io::Error::from_raw_os_error(libc::ENOSPC).to_string()]);
    assert!(matches!(events.blocking_recv(), Some((_, _, PumpEvent::Drained(_)))));
}

#[test]
fn a_console_that_does_not_read_loses_lines_and_does_not_block_the_worker() {
    let mut rig = rig(1 << 30, true);
    let line = [b"x".repeat(99), b"\n".to_vec()].concat();
    for _ in 0..100_000 {
        rig.stdout.write_all(&line).unwrap();
    }
    rig.drained();
    assert_eq!(rig.log().len(), 10_000_000);
    let console = rig.console();
    assert!(console.len() < 5000, "{}", console.len());
    let notice = &console[console.len() - 1].1;
    insta::with_settings!({ filters => [(r"\d+ lines", "[COUNT] lines"), (r"in /\S+/", "in [DIR]/")] }, {
        insta::assert_snapshot!("notice_of_dropped_lines", notice);
    });
}

#[test]
fn dropping_the_handle_ends_the_thread() {
    let rig = rig(1 << 20, false);
    let Rig { stdout, pump, mut events, .. } = rig;
    drop(pump);
    // The thread owns the other end of `events`; it closes when the thread is gone.
    assert!(events.blocking_recv().is_none());
    // The pipe has no reader any more (Rust programs ignore SIGPIPE).
    let fd = stdout.into_raw_fd();
    // SAFETY: a valid descriptor of ours and one byte.
    assert_eq!(unsafe { libc::write(fd, b"x".as_ptr().cast(), 1) }, -1);
    // SAFETY: owned by this test since `into_raw_fd`.
    unsafe { libc::close(fd) };
}
