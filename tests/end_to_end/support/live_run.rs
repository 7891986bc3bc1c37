//! Reads the events of a run while the run continues, and finds the processes of its workers.
use super::{
    JobDirectory,
    process_list::{find_processes_with_variable, has_variable, read_command_line},
};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader},
    process::Child,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// The time in which an expected condition must hold, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Finds the process of a rank of the run in the directory of a test.
pub(crate) fn find_worker(job: &JobDirectory, rank: u32) -> u32 {
    let (rank, directory) = (format!("RANK={rank}"), job.path("").display().to_string());
    let is_of_test =
        |variable: &[u8]| String::from_utf8_lossy(variable).contains(directory.trim_end_matches('/'));
    let is_worker = |pid: &i32| has_variable(*pid, is_of_test) && read_command_line(*pid).contains(" worker");
    let found = find_processes_with_variable(&rank).into_iter().find(is_worker);
    found.expect("the process of the rank") as u32
}

/// Reads events until one fits.
pub(crate) fn wait_for_event(
    lines: &mut impl Iterator<Item = Value>,
    fits: impl Fn(&Value) -> bool,
) -> Value {
    let end = Instant::now() + TIMEOUT;
    loop {
        let event = lines.next().expect("the run continues");
        if fits(&event) {
            return event;
        }
        assert!(Instant::now() < end, "no such event");
    }
}

/// Returns an iterator over the events that a run prints with `--json`.
pub(crate) fn read_events(process: &mut Child) -> impl Iterator<Item = Value> + use<> {
    let stdout = BufReader::new(process.stdout.take().expect("a pipe"));
    stdout.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap())
}

/// The events of a run, which a separate thread reads at once, so that none waits in the pipe.
pub(crate) struct LiveEvents {
    received: mpsc::Receiver<Value>,
    newest_step: u64,
}

impl LiveEvents {
    /// Starts to read the events that a run prints with `--json`.
    pub(crate) fn read(process: &mut Child) -> LiveEvents {
        let (sender, received) = mpsc::channel();
        let mut events = read_events(process);
        // The test may end before the run.
        thread::spawn(move || events.try_for_each(|event| sender.send(event)));
        LiveEvents { received, newest_step: 0 }
    }

    /// Returns the number of the newest step that the run has reported. Skips the events before.
    pub(crate) fn newest_step(&mut self) -> u64 {
        let events = self.received.try_iter();
        self.newest_step = events.filter_map(|event| read_step(&event)).last().unwrap_or(self.newest_step);
        self.newest_step
    }

    /// Waits for an event that fits, at most until the run has reported the step `last`. Panics if
    /// the run ends.
    pub(crate) fn wait_until_step(&mut self, last: u64, fits: impl Fn(&Value) -> bool) -> Option<Value> {
        while self.newest_step < last {
            let event = self.received.recv_timeout(TIMEOUT).expect("the run continues");
            self.newest_step = read_step(&event).unwrap_or(self.newest_step);
            if fits(&event) {
                return Some(event);
            }
        }
        None
    }
}

/// Returns the step of an event `step`.
fn read_step(event: &Value) -> Option<u64> {
    event["step"].as_u64().filter(|_| event["event"] == "step")
}
