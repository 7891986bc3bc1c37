//! A run directory, and a source that lists its run.
use dashboard::{RunInfo, RunSource};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// A source that lists one run, whose directory is `directory`.
pub(crate) struct RunDirectory {
    pub(crate) directory: PathBuf,
}

impl RunDirectory {
    /// Creates the run directory of a run with `world` workers on hosts of eight workers.
    pub(crate) fn create(directory: &Path, world: u32) -> RunDirectory {
        fs::create_dir(directory.join("logs")).expect("created");
        fs::write(directory.join("logs/rank-0.log"), "hello\n<script>alert(1)</script>\n").expect("written");
        fs::write(directory.join("job.json"), r#"{"version":1,"job":{"train":{}}}"#).expect("written");
        let run = RunDirectory { directory: directory.into() };
        let hosts: Vec<String> = (0..world.div_ceil(8)).map(|host| format!(r#""node-{host}""#)).collect();
        let workers = vec!["8"; hosts.len()].join(",");
        run.append_to_journal(&format!(
            r#"{{"schema":2,"event":"start","run":"r1","run_dir":"/r","world":{world},"time":1.0}}"#
        ));
        run.append_to_journal(&format!(
            r#"{{"schema":2,"event":"placement","attempt":0,"world":{world},"hosts":[{}],"workers":[{workers}],"time":1.5}}"#,
            hosts.join(",")
        ));
        run.append_to_journal(
            r#"{"schema":2,"event":"ready","step":0,"total_steps":100,"parameters":5,"tokens_per_step":8,"time":2.0}"#,
        );
        run
    }

    /// Appends a line to the journal.
    pub(crate) fn append_to_journal(&self, line: &str) {
        let file = OpenOptions::new().append(true).create(true).open(self.directory.join("events.jsonl"));
        writeln!(file.expect("a journal"), "{line}").expect("written");
    }

    /// Appends the `step` event of a step.
    pub(crate) fn append_step(&self, step: u64) {
        let (loss, time) = (5.0 / (step + 1) as f64, 2.0 + step as f64);
        self.append_to_journal(&format!(
            r#"{{"schema":2,"event":"step","step":{step},"loss":{loss},"grad_norm":1.0,"lr":0.1,"tokens":8,"tokens_per_s":4.0,"peak_rss":9,"exposed_comm_s":0.1,"time":{time}}}"#
        ));
    }

    fn build_run_info(&self) -> RunInfo {
        RunInfo {
            run: "r1".into(),
            name: "job".into(),
            state: "running",
            is_active: true,
            is_named: false,
            world: 16,
            began_ms: 1000,
            host: "node-0".into(),
            step: None,
            run_dir: self.directory.clone(),
        }
    }
}

impl RunSource for RunDirectory {
    fn list_runs(&self) -> Vec<RunInfo> {
        vec![self.build_run_info()]
    }

    fn reload_run(&self, _: &RunInfo) -> Option<RunInfo> {
        Some(self.build_run_info())
    }

    fn open_file(&self, path: &Path) -> io::Result<File> {
        File::open(path)
    }
}
