//! [`Journal`]: writes the files of a run directory: the job (`job.json`), all events
//! (`events.jsonl`), and the metrics (`metrics.jsonl`, and an event file for TensorBoard).
//!
//! Events are appended line by line, so that a crash loses at most the last line.
use super::tensorboard::TensorboardFile;
use crate::{clock::read_unix_time_ms, plan::Plan, runs::write_atomically};
use jobspec::JobSpec;
use protocol::event::{Event, EventSchema};
use serde::Serialize;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
};

/// The format version that `job.json` contains.
const JOB_FILE_VERSION: u32 = 1;

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

/// The files of a run directory to which the controller appends events and metrics.
#[derive(Debug)]
pub(super) struct Journal {
    events: File,
    metrics: File,
    tensorboard: Option<TensorboardFile>,
    /// Whether a write has failed. Nothing is written after a failure.
    has_failed: bool,
}

impl Journal {
    /// Creates the run directory, writes `job.json`, and opens the other files for appending.
    pub(super) fn create(plan: &Plan, command: &[String]) -> io::Result<Journal> {
        fs::create_dir_all(&plan.run_dir)?;
        if let Some(node) = plan.host_plans.first() {
            let (version, job) = (JOB_FILE_VERSION, &crate::secrets::redact_job(&node.job));
            let file = StoredJob { version, run: &plan.run.0, world: plan.world, command, job };
            write_atomically(&plan.run_dir, "job.json", &serde_json::to_vec_pretty(&file)?)?;
        }
        let open = |name: &str| OpenOptions::new().append(true).create(true).open(plan.run_dir.join(name));
        let (events, metrics) = (open("events.jsonl")?, open("metrics.jsonl")?);
        Ok(Journal { events, metrics, tensorboard: create_tensorboard_file(plan)?, has_failed: false })
    }

    /// Appends an event to the files of the run directory. After the first error, which is
    /// returned, later events are dropped without an error.
    pub(super) fn append_event(&mut self, event: &Event) -> io::Result<()> {
        if self.has_failed {
            return Ok(());
        }
        let result = self.write_event(event);
        self.has_failed = result.is_err();
        result
    }

    /// Writes an event to `events.jsonl` and, if the event holds metrics, to `metrics.jsonl` and
    /// the TensorBoard file. Syncs the JSON files after failures, checkpoints and the end of the
    /// run.
    fn write_event(&mut self, event: &Event) -> io::Result<()> {
        let time = read_unix_time();
        let line = |schema| event.to_json_at(schema, time).map(|line| line + "\n");
        self.events.write_all(line(EventSchema::V2)?.as_bytes())?;
        if matches!(
            event,
            Event::Step { .. } | Event::Eval { .. } | Event::Sample { .. } | Event::Overflow { .. }
        ) {
            // Metrics have no schema number.
            self.metrics.write_all(line(EventSchema::V1)?.as_bytes())?;
        }
        if let Some(file) = &mut self.tensorboard {
            file.append_event(event, time)?;
        }
        if matches!(event, Event::Failure(_) | Event::Done { .. } | Event::Checkpoint { .. }) {
            self.events.sync_data()?;
            self.metrics.sync_data()?;
        }
        Ok(())
    }
}

/// Returns the current time in seconds since 1970.
fn read_unix_time() -> f64 {
    read_unix_time_ms() as f64 / 1000.0
}

/// Creates the TensorBoard file of a run of the built-in training. Returns `None` for a job that
/// runs programs, because programs write their own metrics.
fn create_tensorboard_file(plan: &Plan) -> io::Result<Option<TensorboardFile>> {
    let trains = plan.host_plans.first().is_some_and(|node| node.job.train.is_some());
    trains.then(|| TensorboardFile::create(&plan.run_dir, &plan.run.0, read_unix_time())).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use jobspec::ids::RunId;
    use protocol::control::HostPlan;
    use std::path::Path;

    /// Builds a plan of one host without workers.
    fn build_plan(run_dir: &Path) -> Plan {
        let node = HostPlan {
            job: testing::sample_job(),
            run: "r1".into(),
            host: "here".into(),
            run_dir: run_dir.into(),
            attempt: 0,
            world: 1,
            workers: Vec::new(),
            grace_ms: 0,
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
    fn events_read_back_equal() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("a/b");
        let mut journal =
            Journal::create(&build_plan(&run_dir), &["launch".into(), "job.yaml".into()]).unwrap();
        let done = Event::Done { exit_code: 0, step: Some(2), seconds: 1.5 };
        let events = [build_step_event(1), Event::new_notice(None, "line\nbreak"), build_step_event(2), done];
        events.iter().for_each(|event| journal.append_event(event).unwrap());
        let read = |name: &str| -> Vec<Event> {
            let text = fs::read_to_string(run_dir.join(name)).unwrap();
            text.lines().map(|line| Event::from_json(line).unwrap()).collect()
        };
        assert_eq!(read("events.jsonl"), events, "floats have equal bits");
        assert_eq!(read("metrics.jsonl"), [build_step_event(1), build_step_event(2)]);
        let job: serde_json::Value =
            serde_json::from_slice(&fs::read(run_dir.join("job.json")).unwrap()).unwrap();
        assert_eq!((&job["run"], &job["command"][1]), (&"r1".into(), &"job.yaml".into()));
        assert_eq!(serde_json::from_value::<JobSpec>(job["job"].clone()).unwrap(), testing::sample_job());
        let names: Vec<_> = fs::read_dir(&run_dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 3, "there is no temporary file: {names:?}");
    }

    #[test]
    fn a_full_disk_is_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(&build_plan(dir.path()), &[]).unwrap();
        journal.events = OpenOptions::new().append(true).open("/dev/full").unwrap();
        assert!(journal.append_event(&build_step_event(1)).is_err());
        assert!(journal.append_event(&build_step_event(2)).is_ok());
        let nowhere = Journal::create(&build_plan(Path::new("/proc/nowhere")), &[]);
        assert!(nowhere.is_err());
    }
}
