//! Tests of the debug log. A single test calls [`start`], because a process can start its debug log
//! only once.
use super::*;
use std::{fs, sync::Mutex};

/// The lines that were printed on the terminal.
static PRINTED: Mutex<String> = Mutex::new(String::new());

#[test]
fn events_that_pass_the_filter_are_printed_and_written_with_their_spans() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("logs/agent-a.debug.log");
    open_log_file(&path).expect("no effect before the start");
    assert!(!path.exists());
    let filter = Filter::parse("agent=debug,warn").expect("valid");
    start(&filter, Some(|line| PRINTED.lock().expect("not poisoned").push_str(line)));
    tracing::info!(target: "agent", "before the file is open");
    let flush = FlushOnDrop;
    open_log_file(&path).expect("opened");
    {
        let _span = tracing::info_span!(target: "agent", "host", host = "node-1", attempt = 2).entered();
        tracing::debug!(target: "agent::process", rank = 3, "started worker");
    }
    tracing::info!(target: "controller", "not selected");
    tracing::warn!(target: "controller", "selected");
    drop(flush);
    let text = fs::read_to_string(&path).expect("written");
    let without_times = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split_once(' ').expect("a time").1.to_owned()).collect()
    };
    assert_eq!(without_times(&text), without_times(&PRINTED.lock().expect("not poisoned")));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[0].contains(" INFO agent: before the file is open"), "{text}");
    let expected = "DEBUG host{host=\"node-1\" attempt=2}: agent::process: started worker rank=3";
    assert!(lines[1].contains(expected), "{text}");
    assert!(lines[2].contains("WARN controller: selected"), "{text}");
    assert_eq!(active_filter_directives(), "agent=debug,warn");
}

/// A pipe represents a file on a disk that stalls: opening the pipe blocks until another process
/// opens it for reading.
#[test]
fn lines_do_not_wait_for_a_file_whose_disk_stalls() {
    use std::io::{Read, Write};
    use tracing_subscriber::fmt::MakeWriter;
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("agent.debug.log");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let sink = line_sink::LineSink::new();
    let opened = std::thread::scope(|scope| {
        let opened = scope.spawn(|| sink.open_file(&path));
        std::thread::sleep(std::time::Duration::from_millis(100));
        let began = std::time::Instant::now();
        sink.make_writer().write_all(b"written meanwhile\n").expect("collected");
        let elapsed = began.elapsed();
        assert!(!opened.is_finished() && elapsed.as_millis() < 1000, "the line took {elapsed:?}");
        let mut reader = fs::File::open(&path).expect("the pipe");
        opened.join().expect("no panic").expect("opened");
        let mut line = [0; 18];
        reader.read_exact(&mut line).expect("a line");
        line
    });
    assert_eq!(&opened, b"written meanwhile\n");
}
