//! The run directory: what was asked for (`job.json`), what happened (`events.jsonl`), and how the loss went
//! (`metrics.jsonl`). Appended to line by line, so that a crash costs at most the last one.
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

/// The open files of a run directory.
#[derive(Debug)]
pub(super) struct Journal {
    events: File,
    metrics: File,
    /// The first write that failed; nothing is written after it.
    broken: bool,
}

impl Journal {
    /// Makes the run directory and its files.
    pub(super) fn create(plan: &Plan, command: &[String]) -> io::Result<Journal> {
        fs::create_dir_all(&plan.run_dir)?;
        if let Some(node) = plan.nodes.first() {
            let (version, job) = (VERSION, &node.job);
            let file = JobFile { version, run: &plan.run.0, world: plan.world, command, job };
            write_whole(&plan.run_dir, "job.json", &serde_json::to_vec_pretty(&file)?)?;
        }
        let open = |name: &str| OpenOptions::new().append(true).create(true).open(plan.run_dir.join(name));
        Ok(Journal { events: open("events.jsonl")?, metrics: open("metrics.jsonl")?, broken: false })
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
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        self.events.write_all(&line)?;
        if matches!(event, Event::Step { .. } | Event::Eval { .. }) {
            self.metrics.write_all(&line)?;
        }
        if matches!(event, Event::Failure { .. } | Event::Done { .. } | Event::Checkpoint { .. }) {
            self.events.sync_data()?;
            self.metrics.sync_data()?;
        }
        Ok(())
    }
}

/// A file that is there with all its bytes, or not there.
fn write_whole(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = directory.join(format!(".{name}.tmp"));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, directory.join(name))?;
    File::open(directory)?.sync_all()
}
