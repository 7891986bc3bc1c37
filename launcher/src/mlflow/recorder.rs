//! [`MlflowRecorder`]: the thread that records a run with MLflow while the run continues.
use super::{
    run_recorder::{RecordError, RecordedRun, RunRecorder, SendProgress},
    settings::MlflowSettings,
};
use diagnostic::quantity::format_duration;
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The interval at which the recorder searches the run's journal (its file of events) for new
/// events.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The pause after the first failed request to the MLflow server. Each further failure doubles the
/// pause.
const FIRST_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after a failed request to the MLflow server.
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(60);
/// The pause between two attempts to reach the MLflow server after the run has ended and a request
/// has failed.
const FINAL_RETRY_PAUSE: Duration = Duration::from_millis(500);
/// The number of failed requests in a row, after the end of a run, at which launch stops sending
/// the run's data to MLflow.
const MAX_FINAL_FAILURES: u32 = 4;
/// The largest number of messages about MLflow, such as an outage of the server, that are shown to
/// the user of one run. Further notices are dropped.
const MAX_NOTICES: u32 = 10;

/// The handle of the thread that records a run with MLflow. The thread ends when the handle is
/// dropped.
#[derive(Debug)]
pub(crate) struct MlflowRecorder {
    shared: Arc<SharedRecorderState>,
    uri: String,
}

/// The data that the controller shares with the thread that sends the run to MLflow: a state behind
/// a mutex, and a condition variable.
#[derive(Debug, Default)]
struct SharedRecorderState {
    state: Mutex<RecorderState>,
    /// Notifies waiting threads of every change of the state.
    changed: Condvar,
}

/// The state of the thread that sends a run to MLflow: whether the thread must end or has ended,
/// and the notices for the user.
#[derive(Debug, Default)]
struct RecorderState {
    /// Whether the journal is complete, so that the thread ends once everything was sent.
    is_ending: bool,
    /// Whether the thread is to end at once.
    is_stopped: bool,
    /// Whether the thread has ended, and whether everything was sent.
    ended: Option<bool>,
    /// Notices that were not shown to the user.
    notices: VecDeque<String>,
    /// The number of notices so far.
    notice_count: u32,
}

impl SharedRecorderState {
    /// Locks the mutex of the state that the thread which sends data to MLflow shares with the
    /// controller.
    fn lock_state(&self) -> MutexGuard<'_, RecorderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message about MLflow for the user, unless the run already had [`MAX_NOTICES`] of
    /// them.
    fn add_notice(&self, notice: Option<String>) {
        let mut state = self.lock_state();
        if let Some(notice) = notice
            && state.notice_count < MAX_NOTICES
        {
            state.notice_count += 1;
            state.notices.push_back(notice);
        }
    }

    /// Waits for `pause` before the next attempt to reach the MLflow server, or until the run ends,
    /// if that is earlier. At the end of the run, waits at most [`FINAL_RETRY_PAUSE`].
    fn wait_for_pause_or_end(&self, pause: Duration) {
        let state = self.lock_state();
        let pause = if state.is_ending { pause.min(FINAL_RETRY_PAUSE) } else { pause };
        let was_ending = state.is_ending;
        let is_waiting = |state: &mut RecorderState| !state.is_stopped && state.is_ending == was_ending;
        drop(self.changed.wait_timeout_while(state, pause, is_waiting));
    }
}

impl MlflowRecorder {
    /// Starts the thread that records `run` with MLflow.
    pub(crate) fn start(settings: MlflowSettings, run: RecordedRun) -> io::Result<MlflowRecorder> {
        let recorder = MlflowRecorder { shared: Arc::default(), uri: settings.uri.clone() };
        let shared = recorder.shared.clone();
        thread::Builder::new().name("mlflow".to_owned()).spawn(move || {
            let uri = settings.uri.clone();
            let is_complete = record_run(&shared, &uri, RunRecorder::new(settings, run));
            shared.lock_state().ended = Some(is_complete);
            shared.changed.notify_all();
        })?;
        Ok(recorder)
    }

    /// Returns the next notice about MLflow for the user, or `None` if there is none. Never blocks
    /// on the server.
    pub(crate) fn take_notice(&self) -> Option<String> {
        self.shared.lock_state().notices.pop_front()
    }

    /// Waits, after the end of the run and for at most `limit`, until all data of the run were sent
    /// to MLflow. Blocks for at most `limit`, and for a moment only if the server is known to be
    /// away. Returns a message if MLflow has not received everything.
    pub(crate) fn finish(&self, limit: Duration) -> Option<String> {
        let mut state = self.shared.lock_state();
        state.is_ending = true;
        self.shared.changed.notify_all();
        let waited = self.shared.changed.wait_timeout_while(state, limit, |state| state.ended.is_none());
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let message = || format!("MLflow at {} has not received the end of the run", self.uri);
        (state.ended != Some(true)).then(message)
    }
}

impl Drop for MlflowRecorder {
    fn drop(&mut self) {
        self.shared.lock_state().is_stopped = true;
        self.shared.changed.notify_all();
    }
}

/// Counts the requests that have failed since the MLflow server last answered, and decides how long
/// to wait and when to give up.
#[derive(Debug, Default)]
struct Outage {
    /// The time of the first failure; `None` if the newest request was successful.
    since: Option<Instant>,
    failures: u32,
    /// The number of failures at the end of the run.
    last_failures: u32,
    /// Whether the server was already away when the run ended.
    is_known_at_end: bool,
}

impl Outage {
    /// Counts a failed request to the MLflow server, and returns a message for the user if it is
    /// the first one.
    fn add_failure(&mut self, uri: &str, reason: &str, is_ending: bool) -> Option<String> {
        if is_ending {
            self.is_known_at_end |= self.last_failures == 0 && self.failures > 0;
            self.last_failures += 1;
        }
        self.failures += 1;
        let is_first = self.since.is_none();
        self.since.get_or_insert_with(Instant::now);
        is_first.then(|| {
            format!(
                "MLflow at {uri} is not available ({reason}); the job continues, and MLflow gets the data later"
            )
        })
    }

    /// Records that a request to the MLflow server was successful, which ends the outage. Returns a
    /// notice if there was a failure.
    fn end(&mut self, uri: &str) -> Option<String> {
        let since = std::mem::take(self).since?;
        let duration = format_duration(since.elapsed().as_secs_f64());
        Some(format!("MLflow at {uri} accepts data again after {duration}"))
    }

    /// Returns whether requests to the MLflow server have failed so often at the end of the run
    /// that the rest is not sent.
    fn should_give_up(&self) -> bool {
        self.last_failures >= if self.is_known_at_end { 1 } else { MAX_FINAL_FAILURES }
    }

    /// Returns the pause before the next request to the MLflow server.
    fn retry_pause(&self) -> Duration {
        FIRST_RETRY_PAUSE
            .saturating_mul(1 << self.failures.saturating_sub(1).min(16))
            .min(LONGEST_RETRY_PAUSE)
    }
}

/// Sends the events of a run to MLflow until everything was sent, or until the thread is to end.
/// Returns whether everything was sent.
fn record_run(shared: &SharedRecorderState, uri: &str, mut recorder: RunRecorder) -> bool {
    let mut outage = Outage::default();
    let mut is_up_to_date = false;
    loop {
        let (is_ending, is_stopped) = {
            let state = shared.lock_state();
            (state.is_ending, state.is_stopped)
        };
        // Without an end in the journal, the disk has not accepted it.
        if is_stopped || is_up_to_date {
            return false;
        }
        let result = recorder.send_next();
        is_up_to_date = is_ending && result == Ok(SendProgress::UpToDate);
        if result.is_ok() {
            shared.add_notice(outage.end(uri));
        }
        match result {
            Ok(SendProgress::Created(address)) => {
                shared.add_notice(Some(format!("MLflow records the run: {address}")));
            }
            Ok(SendProgress::LeftOut(reason)) => {
                shared.add_notice(Some(format!("MLflow has rejected a part of the run: {reason}")));
            }
            Ok(SendProgress::Sent) => {}
            Ok(SendProgress::Complete) => return true,
            Ok(SendProgress::UpToDate) if is_ending => {}
            Ok(SendProgress::UpToDate) => shared.wait_for_pause_or_end(POLL_INTERVAL),
            Err(RecordError::Final(reason)) => {
                shared.add_notice(Some(format!("MLflow at {uri} does not record the run: {reason}")));
                return false;
            }
            Err(RecordError::Unavailable(reason)) => {
                shared.add_notice(outage.add_failure(uri, &reason, is_ending));
                if outage.should_give_up() {
                    return false;
                }
                shared.wait_for_pause_or_end(outage.retry_pause());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_notice_reports_an_outage_and_one_its_end() {
        let mut outage = Outage::default();
        assert_eq!(outage.end("u"), None);
        assert!(outage.add_failure("u", "r", false).is_some_and(|notice| notice.contains("(r)")));
        let pauses: Vec<u64> = (0..8)
            .map(|_| {
                assert_eq!(outage.add_failure("u", "r", false), None);
                outage.retry_pause().as_secs()
            })
            .collect();
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60, 60]);
        assert!(outage.end("u").is_some() && outage.end("u").is_none());
    }

    #[test]
    fn the_end_of_a_run_waits_only_for_a_server_that_was_available() {
        let mut outage = Outage::default();
        for _ in 1..MAX_FINAL_FAILURES {
            _ = outage.add_failure("u", "r", true);
            assert!(!outage.should_give_up());
        }
        _ = outage.add_failure("u", "r", true);
        assert!(outage.should_give_up());
        let mut outage = Outage::default();
        _ = outage.add_failure("u", "r", false);
        assert!(!outage.should_give_up());
        _ = outage.add_failure("u", "r", true);
        assert!(outage.should_give_up());
    }
}
