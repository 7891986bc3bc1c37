//! The run directory: what was asked for (`job.json`), what happened (`events.jsonl`), and how the loss went
//! (`metrics.jsonl`, and an event file for TensorBoard). Appended to line by line, so that a crash costs at most the last one.
use super::tensorboard::EventFile;
use crate::plan::Plan;
use contract::{event::Event, job::JobSpec};
use serde::Serialize;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::Path,
};

/// Version of `job.json`.
const VERSION: u32 = 1;

/// `job.json`.
#[derive(Serialize)]
struct JobFile<'a> {
    version: u32,
    run: &'a str,
    world: u32,
    /// What was typed.
    command: &'a [String],
    job: &'a JobSpec,
}

/// A line of the journal.
#[derive(Serialize)]
pub(super) struct Timed<'a> {
    #[serde(flatten)]
    pub(super) event: &'a Event,
    /// Seconds since 1970.
    pub(super) time: f64,
}

/// The open files of a run directory.
#[derive(Debug)]
pub(super) struct Journal {
    events: File,
    metrics: File,
    tensorboard: Option<EventFile>,
    /// The first write that failed; nothing is written after it.
    broken: bool,
}

impl Journal {
    /// Makes the run directory and its files.
    pub(super) fn create(plan: &Plan, command: &[String]) -> io::Result<Journal> {
        fs::create_dir_all(&plan.run_dir)?;
        if let Some(node) = plan.nodes.first() {
            let (version, job) = (VERSION, &crate::secrets::hide(&node.job));
            let file = JobFile { version, run: &plan.run.0, world: plan.world, command, job };
            write_whole(&plan.run_dir, "job.json", &serde_json::to_vec_pretty(&file)?)?;
        }
        let open = |name: &str| OpenOptions::new().append(true).create(true).open(plan.run_dir.join(name));
        let (events, metrics) = (open("events.jsonl")?, open("metrics.jsonl")?);
        Ok(Journal { events, metrics, tensorboard: tensorboard(plan)?, broken: false })
    }

    /// Appends an event; the error is returned once.
    pub(super) fn event(&mut self, event: &Event) -> io::Result<()> {
        if self.broken {
            return Ok(());
        }
        let result = self.append(event);
        self.broken = result.is_err();
        result
    }

    fn append(&mut self, event: &Event) -> io::Result<()> {
        let timed = Timed { event, time: now() };
        let mut line = serde_json::to_vec(&timed)?;
        line.push(b'\n');
        self.events.write_all(&line)?;
        if matches!(
            event,
            Event::Step { .. } | Event::Eval { .. } | Event::Sample { .. } | Event::Overflow { .. }
        ) {
            self.metrics.write_all(&line)?;
        }
        if let Some(file) = &mut self.tensorboard {
            file.event(&timed)?;
        }
        if matches!(event, Event::Failure { .. } | Event::Done { .. } | Event::Checkpoint { .. }) {
            self.events.sync_data()?;
            self.metrics.sync_data()?;
        }
        Ok(())
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    crate::agent::times::now_ms() as f64 / 1000.0
}

/// The event file of this run, when it trains: other programs have metrics of their own.
fn tensorboard(plan: &Plan) -> io::Result<Option<EventFile>> {
    let trains = plan.nodes.first().is_some_and(|node| node.job.train.is_some());
    trains.then(|| EventFile::create(&plan.run_dir, &plan.run.0, now())).transpose()
}

/// A file that is there with all its bytes, or not there.
pub(crate) fn write_whole(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = directory.join(format!(".{name}.tmp"));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, directory.join(name))?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use contract::{control::HostPlan, ids::RunId};

    fn plan(run_dir: &Path) -> Plan {
        let node = HostPlan {
            job: testing::job(),
            run: "r1".into(),
            host: "here".into(),
            run_dir: run_dir.into(),
            epoch: 0,
            world: 1,
            workers: Vec::new(),
            grace_ms: 0,
        };
        Plan {
            run: RunId("r1".into()),
            run_dir: run_dir.into(),
            world: 1,
            master: None,
            nodes: vec![node],
            hosts: vec!["here".into()],
            warnings: Vec::new(),
        }
    }

    fn step(step: u64) -> Event {
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
    fn what_happened_can_be_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("a/b");
        let mut journal = Journal::create(&plan(&run_dir), &["launch".into(), "job.yaml".into()]).unwrap();
        let done = Event::Done { exit_code: 0, step: Some(2), seconds: 1.5 };
        let events = [step(1), Event::Notice { rank: None, message: "line\nbreak".into() }, step(2), done];
        events.iter().for_each(|event| journal.event(event).unwrap());
        let read = |name: &str| -> Vec<Event> {
            let text = fs::read_to_string(run_dir.join(name)).unwrap();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        assert_eq!(read("events.jsonl"), events, "floats too come back with all their bits");
        assert_eq!(read("metrics.jsonl"), [step(1), step(2)]);
        let job: serde_json::Value =
            serde_json::from_slice(&fs::read(run_dir.join("job.json")).unwrap()).unwrap();
        assert_eq!((&job["run"], &job["command"][1]), (&"r1".into(), &"job.yaml".into()));
        assert_eq!(serde_json::from_value::<JobSpec>(job["job"].clone()).unwrap(), testing::job());
        let names: Vec<_> = fs::read_dir(&run_dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 3, "no temporary file is left: {names:?}");
    }

    #[test]
    fn a_full_disk_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(&plan(dir.path()), &[]).unwrap();
        journal.events = OpenOptions::new().append(true).open("/dev/full").unwrap();
        assert!(journal.event(&step(1)).is_err());
        assert!(journal.event(&step(2)).is_ok());
        let nowhere = Journal::create(&plan(Path::new("/proc/nowhere")), &[]);
        assert!(nowhere.is_err());
    }
}
