//! Tests of slow ranks and of `launch top`, with the real executable and a real run.
mod cpu_quota_group;
mod slowed_by_a_fifth;

use crate::support::{
    JobDirectory,
    live_run::{find_worker, read_events, wait_for_event},
    report_skip,
};
use cpu_quota_group::CpuQuotaGroup;
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

/// The time in which an expected condition must hold, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The settings of a training with three ranks, whose steps take long enough to be compared.
const SETTINGS: [&str; 7] = [
    "cluster.workers_per_host=3",
    "train.steps=2000",
    "train.model.hidden_size=192",
    "train.model.intermediate_size=384",
    "train.data.seq_len=96",
    "train.batch.global=12",
    "checkpoint.every=never",
];

/// A process that is killed at the end of the test.
struct KilledAtEnd(Child);

impl Drop for KilledAtEnd {
    fn drop(&mut self) {
        // SIGTERM lets the controller end its workers.
        // SAFETY: the process is a child that was not waited for.
        unsafe { libc::kill(self.0.id() as i32, libc::SIGTERM) };
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end && self.0.try_wait().is_ok_and(|status| status.is_none()) {
            std::thread::sleep(Duration::from_millis(50));
        }
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

#[test]
fn a_rank_slowed_by_a_cpu_quota_is_named_with_the_reason() {
    // On a busy machine the other ranks get only a part of a CPU, too.
    let Some(group) = CpuQuotaGroup::create() else {
        return report_skip("stragglers", "cgroups with CPU quotas cannot be created");
    };
    group.set_quota(5_000);
    let job = JobDirectory::new();
    let mut run = KilledAtEnd(job.start(&SETTINGS));
    let mut events = read_events(&mut run.0);
    wait_for_event(&mut events, |event| event["event"] == "step" && event["step"].as_u64() >= Some(4));
    group.add(find_worker(&job, 2));
    // The steps in the pipe are those before the quota.
    let slowed = wait_for_event(&mut events, |event| event["event"] == "step");
    let report = wait_for_event(&mut events, |event| event["event"] == "straggler");
    assert_eq!((&report["rank"], &report["state"]), (&2.into(), &"slow".into()), "{report}");
    assert_eq!(
        (&report["kind"], &report["reason"]["kind"]),
        (&"work".into(), &"cpu_quota".into()),
        "{report}"
    );
    assert!(report["host"].as_str().is_some_and(|host| !host.is_empty()), "{report}");
    // Steps of at least 100 ms are compared one by one.
    if report["step_s"].as_f64() >= Some(0.1) {
        let steps = report["step"].as_u64().unwrap() - slowed["step"].as_u64().unwrap();
        assert!(steps <= 20, "{steps} steps");
    }
    let directory = job.path("runs/tiny");
    let mut directories = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let run_dir = directories.find(|path| path.join("run.json").exists()).expect("a run directory");
    let end = Instant::now() + TIMEOUT;
    let status: Value = loop {
        let text = fs::read_to_string(run_dir.join("status.json")).unwrap_or_default();
        match serde_json::from_str::<Value>(&text) {
            Ok(status) if status["stragglers"][0]["rank"] == 2 => break status,
            _ => assert!(Instant::now() < end, "{text}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(status["step_times"]["ranks"].as_array().map(Vec::len), Some(3), "{status}");
    assert_eq!(status["hosts"][0]["usage"]["workers"].as_array().map(Vec::len), Some(3), "{status}");
}

/// Opens a pseudo-terminal with this size. Returns the controlling end and the terminal.
fn open_terminal(columns: u16, rows: u16) -> (fs::File, OwnedFd) {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut control, mut terminal) = (0, 0);
    // SAFETY: openpty writes two descriptors and reads the size.
    let result = unsafe {
        libc::openpty(&mut control, &mut terminal, std::ptr::null_mut(), std::ptr::null_mut(), &size)
    };
    assert_eq!(result, 0);
    // The terminal is closed with the controlling end, so no child may inherit that end.
    for fd in [control, terminal] {
        // SAFETY: sets a flag of a descriptor that openpty has opened.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) }, 0);
    }
    // SAFETY: openpty has opened both descriptors, which nothing else owns.
    unsafe { (fs::File::from_raw_fd(control), OwnedFd::from_raw_fd(terminal)) }
}

/// Reads from a terminal until its output contains all texts.
fn read_until(control: &mut fs::File, texts: &[&str], output: &mut String) {
    let end = Instant::now() + TIMEOUT;
    let mut buffer = [0; 4096];
    while !texts.iter().all(|text| output.contains(text)) {
        assert!(Instant::now() < end, "{output:?} has not all of {texts:?}");
        let mut poll = libc::pollfd { fd: control.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure, which is valid during the call.
        if unsafe { libc::poll(&mut poll, 1, 200) } > 0 {
            let count = control.read(&mut buffer).expect("output");
            output.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    }
}

#[test]
fn top_shows_a_run_and_restores_the_terminal_or_ends_with_it() {
    let job = JobDirectory::new();
    let mut run = KilledAtEnd(job.start(&["train.steps=100000", "checkpoint.every=never"]));
    let mut events = read_events(&mut run.0);
    wait_for_event(&mut events, |event| event["event"] == "step");
    // The pipe must not fill up.
    let reader = std::thread::spawn(move || events.for_each(drop));
    for (columns, rows, end) in [(80, 24, "key"), (200, 60, "signal"), (80, 24, "closed")] {
        let (mut control, terminal) = open_terminal(columns, rows);
        let mut top = KilledAtEnd(
            job.launch_command(&["top"])
                .env("TERM", "xterm")
                .stdin(terminal.try_clone().unwrap())
                .stdout(terminal.try_clone().unwrap())
                .stderr(terminal)
                .spawn()
                .unwrap(),
        );
        let mut output = String::new();
        // Only changed cells are drawn, so spaces between words are not in the output.
        read_until(&mut control, &["\u{1b}[?1049h", "tiny", "running", "events", "log"], &mut output);
        match end {
            "key" => control.write_all(b"q").unwrap(),
            // SAFETY: the process is a child that was not waited for.
            "signal" => unsafe { _ = libc::kill(top.0.id() as i32, libc::SIGTERM) },
            _ => {
                drop(control);
                let began = Instant::now();
                while top.0.try_wait().unwrap().is_none() {
                    assert!(began.elapsed() < TIMEOUT, "top has not ended");
                    std::thread::sleep(Duration::from_millis(20));
                }
                continue;
            }
        }
        read_until(&mut control, &["\u{1b}[?1049l"], &mut output);
        assert!(top.0.wait().unwrap().success());
    }
    drop(run);
    reader.join().unwrap();
}

#[test]
fn top_needs_a_terminal() {
    let job = JobDirectory::new();
    job.run(&["train.steps=1"]).expect_success();
    let output = job.launch_command(&["top"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("error[terminal-required]"));
}
