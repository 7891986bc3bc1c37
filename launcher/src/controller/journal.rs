//! [`Journal`]: writes the files of a run directory: the job (`job.json`), all events
//! (`events.jsonl`), and the metrics (`metrics.jsonl`, and an event file for TensorBoard).
//!
//! Events are appended line by line on a separate thread, so that no disk can block the controller.
//! While the disk is full or stalls, events wait in memory. Their number is limited by the agents,
//! which keep every event until the journal has stored it.
mod durable_file;
mod journal_files;
mod takeover;

use super::{report_id::ReportId, tensorboard};
use crate::{
    background_thread::{BackgroundThread, RetryPauses, is_transient},
    clock::read_unix_time,
    plan::Plan,
    private_files::create_private_dir,
    runs::write_atomically,
};
use diagnostic::quantity::format_duration;
use jobspec::JobSpec;
use journal_files::JournalFiles;
use protocol::{event::Event, hang::HangFile};
use serde::Serialize;
use std::{
    fs::File,
    io,
    mem::replace,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};
pub(crate) use takeover::JournalSummary;
#[cfg(test)]
pub(crate) use takeover::is_restart_that_never_began;
use tokio::sync::{mpsc, oneshot};

/// The format version that `job.json` contains.
const JOB_FILE_VERSION: u32 = 1;
/// The shortest time between two syncs of the journal (the files of a run's events and metrics) to
/// the disk, while the journal grows.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// How often the controller updates the modification time of the journal (the run's file of events)
/// to show that the controller is alive. `launch ps` derives from this time how long a run is
/// without a controller.
const MTIME_UPDATE_INTERVAL: Duration = Duration::from_secs(30);
/// How long a write to the journal (the run's file of events) may take before the user gets a
/// notice that the disk stalls.
const STALL_REPORT_DELAY: Duration = Duration::from_secs(5);
/// How long the controller waits at the end of a run for writes to the journal (the run's file of
/// events) on a stalled disk.
const JOURNAL_CLOSE_TIMEOUT: Duration = Duration::from_secs(600);
/// The largest number of messages in the channel through which the journal's thread informs the
/// controller which reports of agents are on the disk.
const STORED_REPORT_CHANNEL_CAPACITY: usize = 16;

/// The content of `job.json`: the job of a run, without secrets, and the command that started it.
#[derive(Serialize)]
struct StoredJob<'a> {
    version: u32,
    run: &'a str,
    world: u32,
    /// The command line of `launch`.
    command: &'a [String],
    job: &'a JobSpec,
}

/// The journal of a run, which appends events and metrics to the files of the run directory, in a
/// separate thread.
#[derive(Debug)]
pub(super) struct Journal {
    run_dir: PathBuf,
    thread: BackgroundThread,
    files: Arc<Mutex<Option<JournalFiles>>>,
    /// The first error of the operation that is being repeated; `None` if no operation fails.
    error: Arc<Mutex<Option<String>>>,
    stored: mpsc::Sender<Vec<ReportId>>,
    /// Whether the journal has grown since the last request to sync it.
    is_dirty: bool,
    next_sync: Instant,
    next_mark: Instant,
    /// The time at which the reported stall began; `None` if no stall is reported.
    stalled_since: Option<Instant>,
    /// Whether the journal's file no longer has a name, because a user has deleted it.
    is_deleted: Arc<AtomicBool>,
    is_deletion_reported: bool,
}

/// The receiving end of a channel through which the controller learns which reports of agents are
/// on the disk, so that the agents can delete them. An item has the newest stored report of each
/// sequence of reports.
pub(super) type StoredReportReceiver = mpsc::Receiver<Vec<ReportId>>;

impl Journal {
    /// Creates the run directory and the journal in it: writes `job.json`, and opens the files of
    /// events and metrics for appending. Blocks.
    pub(super) fn create(
        plan: &Plan,
        job: &JobSpec,
        command: &[String],
    ) -> io::Result<(Journal, StoredReportReceiver)> {
        create_private_dir(&plan.run_dir)?;
        // The jobs in the plan may lack the list of hosts, which a later controller needs.
        let (version, stored) = (JOB_FILE_VERSION, &crate::secrets::redact_job_secrets(job));
        let file = StoredJob { version, run: &plan.run.0, world: plan.world, command, job: stored };
        write_atomically(&plan.run_dir, "job.json", &serde_json::to_vec_pretty(&file)?)?;
        let time = read_unix_time();
        let name = tensorboard::format_file_name(&plan.run.0, time);
        let mut files = JournalFiles::open(&plan.run_dir, &name)?;
        let (journal, stored) = Journal::start_without_files(&plan.run_dir)?;
        files.tensorboard.append(&tensorboard::encode_file_version(time), &mut |_| ());
        *journal.lock_open_files() = Some(files);
        Ok((journal, stored))
    }

    /// Starts a journal (the writer of the run's events and metrics) for a run whose controller was
    /// lost, and opens no files yet. The journal accepts no events before [`Journal::take_over`].
    pub(super) fn open_existing(run_dir: &Path) -> io::Result<(Journal, StoredReportReceiver)> {
        Journal::start_without_files(run_dir)
    }

    /// Takes over the journal of a lost controller: replaces its files by copies, to which this
    /// journal then appends. Sends a summary of the content to `done`. Opens a new file for
    /// TensorBoard. `restarts` is the number of restarts of which the agents know. Never blocks.
    /// Repeats the takeover while the disk is full or stalls.
    pub(super) fn take_over(&self, run: &str, restarts: u32, done: mpsc::Sender<JournalSummary>) {
        let time = read_unix_time();
        let name = tensorboard::format_file_name(run, time);
        let (run_dir, files, error) = (self.run_dir.clone(), self.files.clone(), self.error.clone());
        let set_error = move |text| *error.lock().unwrap_or_else(PoisonError::into_inner) = text;
        self.thread.enqueue_job(0, move || {
            let mut pauses = RetryPauses::default();
            let (mut taken, summary) = loop {
                match takeover::take_over_files(&run_dir, &name, restarts) {
                    Ok(taken) => break taken,
                    Err(e) => set_error(Some(e.to_string())),
                }
                thread::sleep(pauses.next_pause());
            };
            set_error(None);
            taken.tensorboard.append(&tensorboard::encode_file_version(time), &mut |_| ());
            *files.lock().unwrap_or_else(PoisonError::into_inner) = Some(taken);
            // An error means that the controller has ended.
            _ = done.blocking_send(summary);
        });
    }

    /// Creates a journal and starts the thread that writes it, but opens no files yet.
    fn start_without_files(run_dir: &Path) -> io::Result<(Journal, StoredReportReceiver)> {
        let (stored, receiver) = mpsc::channel(STORED_REPORT_CHANNEL_CAPACITY);
        let journal = Journal {
            run_dir: run_dir.to_owned(),
            // Events are never dropped, so they have no size in the queue.
            thread: BackgroundThread::start("journal", 0)?,
            files: Arc::default(),
            error: Arc::default(),
            stored,
            is_dirty: false,
            next_sync: Instant::now(),
            next_mark: Instant::now() + MTIME_UPDATE_INTERVAL,
            stalled_since: None,
            is_deleted: Arc::default(),
            is_deletion_reported: false,
        };
        Ok((journal, receiver))
    }

    /// Locks the mutex that holds the open files of the journal (the run's events and metrics),
    /// which contains `None` before they are opened.
    fn lock_open_files(&self) -> MutexGuard<'_, Option<JournalFiles>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an event that happened at `time`, in seconds since 1970, to the journal (the files
    /// of events and metrics) of the run. `report` identifies the event in the journal, so that a
    /// later controller neither loses nor repeats it. Never blocks.
    pub(super) fn append_event(&mut self, event: &Event, time: f64, report: Option<ReportId>) {
        let is_important = matches!(event, Event::Failure(_) | Event::Done { .. } | Event::Checkpoint { .. });
        let event = event.clone();
        self.run_with_files(move |files, on_error| files.append_event(&event, time, report, on_error));
        self.is_dirty = true;
        if is_important {
            self.request_sync();
        }
    }

    /// Appends named values, such as the resource usage of hosts, to the TensorBoard event file,
    /// with the seconds since the run began as the step. Leaves them out while the disk is full or
    /// stalls. Never blocks.
    pub(super) fn append_scalars(&mut self, values: Vec<(String, f64)>, time: f64, seconds: u64) {
        if self.thread.busy_time() < SYNC_INTERVAL {
            let record = tensorboard::encode_scalars_record(&values, time, seconds);
            self.run_with_files(move |files, on_error| files.tensorboard.append(&record, on_error));
            self.is_dirty = true;
        }
    }

    /// Records that a report of an agent needs no line in the journal and counts as stored, so that
    /// the agent can delete its copy.
    pub(super) fn mark_report_stored(&mut self, (stream, seq): ReportId) {
        self.run_with_files(move |files, _| _ = files.unsynced.insert(stream, seq));
        self.is_dirty = true;
    }

    /// Runs the function `work` with the open files of the journal (the run's events and metrics)
    /// on the journal's writer thread. Does nothing if the files are not open.
    fn run_with_files(
        &self,
        work: impl FnOnce(&mut JournalFiles, &mut dyn FnMut(&io::Error)) + Send + 'static,
    ) {
        let (files, error) = (self.files.clone(), self.error.clone());
        self.thread.enqueue_job(0, move || {
            let set_error = |text| *error.lock().unwrap_or_else(PoisonError::into_inner) = text;
            let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(files) = &mut *files {
                work(files, &mut |e| set_error(Some(e.to_string())));
                set_error(None);
            }
        });
    }

    /// Calls a function on the thread that writes the journal, so that a slow disk does not block
    /// the controller. Repeats the function while it fails with a transient error, such as a full
    /// disk. Never blocks.
    pub(super) fn run_in_background(&self, work: impl Fn() -> io::Result<()> + Send + 'static) {
        let error = self.error.clone();
        self.thread.enqueue_job(0, move || {
            let set_error = |text| *error.lock().unwrap_or_else(PoisonError::into_inner) = text;
            let mut pauses = RetryPauses::default();
            while let Err(e) = work() {
                if !is_transient(&e) {
                    break;
                }
                set_error(Some(e.to_string()));
                thread::sleep(pauses.next_pause());
            }
            set_error(None);
        });
    }

    /// Checks, in the background, whether another controller has taken over the run and replaced
    /// the files of the journal. The receiver gets no answer if the files are not open, and a late
    /// one if the disk stalls.
    pub(super) fn begin_replacement_check(&self) -> oneshot::Receiver<bool> {
        let (answer, receiver) = oneshot::channel();
        // An error means that the controller waits no longer.
        self.run_with_files(move |files, _| _ = answer.send(files.events.is_replaced()));
        receiver
    }

    /// Writes, in the background, a file in the run directory with the stacks and other evidence
    /// about the ranks of a hanging job.
    pub(super) fn write_hang_file(&self, attempt: u32, file: &HangFile) {
        let name = HangFile::file_name(attempt);
        let (run_dir, text) = (self.run_dir.clone(), serde_json::to_vec_pretty(file));
        self.run_in_background(move || match &text {
            Ok(text) => write_atomically(&run_dir, &name, text),
            Err(error) => Err(io::Error::other(error.to_string())),
        });
    }

    /// Requests that the journal's thread sync the files to the disk.
    fn request_sync(&mut self) {
        (self.is_dirty, self.next_sync) = (false, Instant::now() + SYNC_INTERVAL);
        let stored = self.stored.clone();
        self.run_with_files(move |files, on_error| {
            let reports = files.sync(on_error);
            if reports.is_empty() {
                return;
            }
            if let Err(mpsc::error::TrySendError::Full(reports)) = stored.try_send(reports) {
                // The next sync reports them.
                files.unsynced.extend(reports);
            }
        });
    }

    /// Sets the modification time of the journal file `events.jsonl` to the present, which shows
    /// that the run is active.
    fn update_modification_time(&self) {
        let (path, is_deleted) = (self.run_dir.join(journal_files::EVENTS_FILE), self.is_deleted.clone());
        self.run_in_background(move || match File::options().append(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                is_deleted.store(true, Ordering::Release);
                Ok(())
            }
            opened => opened?.set_modified(SystemTime::now()),
        });
    }

    /// Performs the periodic work of the journal (the run's files of events and metrics), such as a
    /// sync to disk, and detects a disk that stalls. Returns a notice for the user when a stall
    /// begins or ends, or when the journal was deleted. The caller calls this function about once a
    /// second.
    pub(super) fn perform_due_work(&mut self) -> Option<String> {
        let busy = self.thread.busy_time();
        if self.is_dirty && Instant::now() >= self.next_sync && busy < SYNC_INTERVAL {
            self.request_sync();
        }
        if Instant::now() >= self.next_mark && busy < SYNC_INTERVAL {
            self.next_mark = Instant::now() + MTIME_UPDATE_INTERVAL;
            self.update_modification_time();
        }
        if self.is_deleted.load(Ordering::Acquire) && !replace(&mut self.is_deletion_reported, true) {
            let directory = self.run_dir.display();
            return Some(format!(
                "the run directory {directory} was deleted; the job continues, but its events are lost, and \
                 `launch ps` does not list the run"
            ));
        }
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_stalled = error.is_some() || busy >= STALL_REPORT_DELAY;
        let directory = self.run_dir.display();
        match (self.stalled_since, is_stalled) {
            (None, true) => {
                self.stalled_since = Instant::now().checked_sub(busy);
                let reason =
                    error.unwrap_or_else(|| format!("no answer for {}", format_duration(busy.as_secs_f64())));
                Some(format!(
                    "the run directory {directory} accepts no writes ({reason}); the job continues, and the \
                     events are kept in memory"
                ))
            }
            (Some(since), false) => {
                self.stalled_since = None;
                let duration = format_duration(since.elapsed().as_secs_f64());
                Some(format!(
                    "the run directory {directory} accepts writes again after {duration}; the journal is complete"
                ))
            }
            _ => None,
        }
    }

    /// Writes the rest of the journal to the disk at the end of the run, and closes it. Blocks for
    /// as long as the disk is full or stalls, but at most for [`JOURNAL_CLOSE_TIMEOUT`]. `wait` is
    /// called if this takes longer than a moment. Returns whether the journal is complete.
    pub(super) fn close(mut self, wait: impl FnOnce(String)) -> bool {
        self.request_sync();
        if self.thread.flush(STALL_REPORT_DELAY) {
            return true;
        }
        wait(format!(
            "the run has ended; waiting for the run directory {}, which accepts no writes",
            self.run_dir.display()
        ));
        self.thread.flush(JOURNAL_CLOSE_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        durable_file::{AppendableFile, DurableFile},
        *,
    };
    use crate::testing;
    use jobspec::ids::RunId;
    use protocol::control::HostPlan;
    use std::{fs, path::Path};

    /// Builds a plan of one host without workers.
    fn build_plan(run_dir: &Path) -> Plan {
        let node = HostPlan {
            job: testing::sample_job(),
            run: "r1".into(),
            host: "here".into(),
            run_dir: run_dir.into(),
            attempt: 0,
            batch_job: None,
            continues_batch_job: false,
            world: 1,
            workers: Vec::new(),
            hang_detection: None,
            debug_filter: String::new(),
        };
        Plan {
            run: RunId("r1".into()),
            run_dir: run_dir.into(),
            world: 1,
            master_address: None,
            master_port: None,
            host_plans: vec![node],
            host_names: vec!["here".into()],
            warnings: Vec::new(),
        }
    }

    /// Builds the event of a training step whose numbers have inexact decimal forms.
    fn build_step_event(step: u64) -> Event {
        let (loss, grad_norm, lr) = (0.1 + 0.2, 1.0 / 3.0, 3e-4);
        Event::Step {
            step,
            loss,
            grad_norm,
            lr,
            tokens: 1,
            tokens_per_s: 2.0,
            peak_rss: 3,
            exposed_comm_s: 0.0,
        }
    }

    #[test]
    fn a_deleted_run_directory_is_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("run");
        let (mut journal, _stored) =
            Journal::create(&build_plan(&run_dir), &testing::sample_job(), &[]).unwrap();
        let mut tick = || {
            journal.next_mark = Instant::now();
            let before = journal.perform_due_work();
            assert!(journal.thread.flush(Duration::from_secs(60)));
            before.or(journal.perform_due_work())
        };
        assert_eq!(tick(), None);
        fs::remove_dir_all(&run_dir).unwrap();
        let notice = tick().expect("a notice");
        assert!(notice.contains("was deleted"), "{notice}");
        assert_eq!(tick(), None);
        assert!(!run_dir.exists(), "the file is not created again");
    }

    #[test]
    fn events_read_back_equal() {
        let dir = tempfile::tempdir().unwrap();
        let (run_dir, job) = (dir.path().join("a/b"), testing::sample_job());
        let (mut journal, mut stored) =
            Journal::create(&build_plan(&run_dir), &job, &["launch".into(), "job.yaml".into()]).unwrap();
        let done = Event::Done { exit_code: 0, step: Some(2), seconds: 1.5 };
        let events = [build_step_event(1), Event::new_notice(None, "line\nbreak"), build_step_event(2), done];
        journal.append_event(&events[0], 1.5, Some((5, 1)));
        journal.mark_report_stored((5, 2));
        events[1..].iter().for_each(|event| journal.append_event(event, 2.5, None));
        assert!(journal.close(|text| panic!("{text}")));
        assert_eq!(stored.blocking_recv(), Some(vec![(5, 2)]));
        let read = |name: &str| -> Vec<Event> {
            let text = fs::read_to_string(run_dir.join(name)).unwrap();
            text.lines().map(|line| Event::from_json(line).unwrap()).collect()
        };
        assert_eq!(read("events.jsonl"), events, "floats have equal bits");
        assert_eq!(read("metrics.jsonl"), [build_step_event(1), build_step_event(2)]);
        let text = fs::read_to_string(run_dir.join("events.jsonl")).unwrap();
        let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!((&first["report"], &first["time"]), (&serde_json::json!([5, 1]), &1.5.into()));
        let job: serde_json::Value =
            serde_json::from_slice(&fs::read(run_dir.join("job.json")).unwrap()).unwrap();
        assert_eq!((&job["run"], &job["command"][1]), (&"r1".into(), &"job.yaml".into()));
        assert_eq!(serde_json::from_value::<JobSpec>(job["job"].clone()).unwrap(), testing::sample_job());
        let names: Vec<_> = fs::read_dir(&run_dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 4, "there is no temporary file: {names:?}");
    }

    /// The state of a [`ClosedDisk`].
    #[derive(Default)]
    struct DiskState {
        is_open: Mutex<bool>,
        opened: std::sync::Condvar,
        content: Mutex<Vec<u8>>,
    }

    /// A disk that rejects or blocks every write until the test opens it.
    #[derive(Clone, Default)]
    struct ClosedDisk {
        state: Arc<DiskState>,
        is_full: bool,
    }

    impl ClosedDisk {
        fn open(&self) {
            *self.state.is_open.lock().unwrap() = true;
            self.state.opened.notify_all();
        }
    }

    impl AppendableFile for ClosedDisk {
        fn append(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let is_open = self.state.is_open.lock().unwrap();
            if !*is_open && self.is_full {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            drop(self.state.opened.wait_while(is_open, |is_open| !*is_open).unwrap());
            self.state.content.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn sync(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn reopen(&mut self, length: u64) -> io::Result<u64> {
            Ok(length)
        }
    }

    /// Opens a journal whose file of events is on this disk, and checks that a stall blocks no
    /// caller, is reported once, and loses no event.
    fn check_stall(disk: ClosedDisk) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, mut stored) =
            Journal::create(&build_plan(dir.path()), &testing::sample_job(), &[]).unwrap();
        let mut files = JournalFiles::open(dir.path(), "tensorboard").unwrap();
        files.events = DurableFile::new(Box::new(disk.clone()), 0);
        *journal.lock_open_files() = Some(files);
        let began = Instant::now();
        for step in 1..=20_000 {
            journal.append_event(&build_step_event(step), 1.0, Some((7, step)));
        }
        assert!(began.elapsed() < STALL_REPORT_DELAY, "appending does not block: {:?}", began.elapsed());
        let mut notices = Vec::new();
        while notices.is_empty() {
            notices.extend(journal.perform_due_work());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!((0..10).all(|_| journal.perform_due_work().is_none()), "one notice");
        assert!(stored.try_recv().is_err());
        disk.open();
        while notices.len() < 2 {
            notices.extend(journal.perform_due_work());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(journal.close(|_| ()));
        let reports: Vec<ReportId> = std::iter::from_fn(|| stored.try_recv().ok()).flatten().collect();
        assert_eq!(reports.last(), Some(&(7, 20_000)));
        let text = String::from_utf8(disk.state.content.lock().unwrap().clone()).unwrap();
        let steps = text.lines().map(|line| match Event::from_json(line).unwrap() {
            Event::Step { step, .. } => step,
            other => panic!("{other:?}"),
        });
        assert!(steps.eq(1..=20_000));
        let directory = dir.path().display().to_string();
        notices.iter().map(|notice| notice.replace(&directory, "[DIR]")).collect()
    }

    #[test]
    fn a_full_disk_delays_events_and_loses_none() {
        let notices = check_stall(ClosedDisk { is_full: true, ..ClosedDisk::default() });
        insta::with_settings!({ filters => [(r"\d+(\.\d+)? m?s", "[TIME]")] }, {
            insta::assert_snapshot!("notices_of_a_full_disk", notices.join("\n"));
        });
    }

    #[test]
    fn a_stalled_disk_blocks_no_caller_and_loses_no_event() {
        let notices = check_stall(ClosedDisk::default());
        insta::with_settings!({ filters => [(r"\d+(\.\d+)? m?s", "[TIME]")] }, {
            insta::assert_snapshot!("notices_of_a_stalled_disk", notices.join("\n"));
        });
    }

    #[test]
    fn a_run_directory_that_cannot_be_created_is_an_error() {
        assert!(
            Journal::create(&build_plan(Path::new("/proc/nowhere")), &testing::sample_job(), &[]).is_err()
        );
    }
}
