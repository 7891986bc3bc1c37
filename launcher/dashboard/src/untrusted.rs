//! Calls every parser of untrusted input in this crate, for fuzz targets and robustness tests.
use crate::{
    log_files::to_printable_line, request::Request, run_view::RunView, status_reader::parse_run_measurements,
};

/// The result of a parser: success, or its first error.
pub type ParseResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Calls the parser of a run's journal (file of events) with arbitrary bytes, for fuzzing. Never
/// fails, because damaged lines are counted.
pub fn parse_journal(bytes: &[u8]) -> ParseResult {
    let mut view = RunView::new(true, "host");
    bytes.split(|b| *b == b'\n').for_each(|line| view.add_journal_line(line));
    Ok(())
}

/// Calls the parser of a run's status file, which contains its newest measurements, with arbitrary
/// bytes, for fuzzing. Fails if the file would not be shown.
pub fn parse_run_status(bytes: &[u8]) -> ParseResult {
    parse_run_measurements(bytes).map(drop).ok_or_else(|| "the measurements are not valid".into())
}

/// Calls the parser of the head of an HTTP request with arbitrary bytes, for fuzzing. Fails if a
/// server would reject the head.
pub fn parse_http_request(bytes: &[u8]) -> ParseResult {
    Request::parse(bytes).map(drop).map_err(Into::into)
}

/// Passes arbitrary bytes, for fuzzing, to the function that converts the log lines of ranks to
/// printable text. Never fails, because unprintable characters are replaced.
pub fn format_log(bytes: &[u8]) -> ParseResult {
    bytes.split(|b| *b == b'\n').for_each(|line| drop(to_printable_line(line)));
    Ok(())
}

/// Run directories for the tests of this crate.
#[cfg(test)]
pub(crate) mod testing {
    use crate::{
        dashboard::Dashboard,
        run_source::{RunInfo, RunSource},
    };
    use std::{fs, fs::File, io, io::Write, path::Path};
    use tempfile::TempDir;

    /// The journal of a training on two hosts, which fails at step 3 and restarts.
    pub(crate) const JOURNAL: &str = r#"{"schema":2,"event":"start","run":"r","run_dir":"/r","world":4,"time":100.0}
{"schema":2,"event":"placement","attempt":0,"world":4,"hosts":["a","b"],"workers":[1,3],"time":100.1}
{"schema":2,"event":"ready","step":0,"total_steps":10,"parameters":5,"tokens_per_step":8,"time":101.0}
{"schema":2,"event":"step","step":1,"loss":5.0,"grad_norm":1.0,"lr":0.1,"tokens":8,"tokens_per_s":4.0,"peak_rss":9,"exposed_comm_s":0.1,"time":102.0}
{"schema":2,"event":"step","step":2,"loss":4.0,"grad_norm":1.0,"lr":0.1,"tokens":16,"tokens_per_s":4.0,"peak_rss":9,"exposed_comm_s":0.1,"time":102.5}
{"schema":2,"event":"checkpoint","step":2,"path":"/c","bytes":7,"seconds":0.5,"time":103.0}
{"schema":2,"event":"step","step":3,"loss":3.0,"grad_norm":1.0,"lr":0.1,"tokens":24,"tokens_per_s":4.0,"peak_rss":10,"exposed_comm_s":0.1,"time":104.0}
{"schema":2,"event":"restart","attempt":1,"restarts_left":0,"pause_s":1.0,"rank":2,"host":"b","pid":1,"message":"killed","log":null,"tail":["</script><script>alert(1)</script>"],"time":105.0}
"#;

    /// A source of runs for tests that opens every regular file, and lists no runs.
    pub(crate) struct AnyFileSource;

    impl RunSource for AnyFileSource {
        fn list_runs(&self) -> Vec<RunInfo> {
            Vec::new()
        }
        fn reload_run(&self, _: &RunInfo) -> Option<RunInfo> {
            None
        }
        fn open_file(&self, path: &Path) -> io::Result<File> {
            File::open(path)
        }
    }

    /// A source of runs for tests that lists the run `r1`.
    struct OneRunSource(RunInfo);

    impl RunSource for OneRunSource {
        fn list_runs(&self) -> Vec<RunInfo> {
            vec![self.0.clone()]
        }
        fn reload_run(&self, _: &RunInfo) -> Option<RunInfo> {
            Some(self.0.clone())
        }
        fn open_file(&self, path: &Path) -> io::Result<File> {
            File::open(path)
        }
    }

    /// Creates a run directory with [`JOURNAL`], a job and a log, and a dashboard that lists its
    /// run `r1` of the job `name`.
    pub(crate) fn build_dashboard(name: &str) -> (TempDir, Dashboard) {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |file: &str, text: &str| fs::write(directory.path().join(file), text).expect("written");
        write("events.jsonl", JOURNAL);
        write("job.json", r#"{"version":1,"run":"r1","world":4,"job":{"train":{"steps":10}}}"#);
        fs::create_dir(directory.path().join("logs")).expect("created");
        write("logs/rank-0.log", "first\n<img src=x onerror=alert(1)>\n");
        let info = RunInfo {
            run: "r1".into(),
            name: name.into(),
            state: "failed",
            is_active: false,
            is_named: false,
            world: 4,
            began_ms: 100_000,
            host: "a".into(),
            step: Some(3),
            run_dir: directory.path().into(),
        };
        (directory, Dashboard::new(Box::new(OneRunSource(info))))
    }

    /// Appends a line to the journal of a run directory.
    pub(crate) fn append_to_journal(directory: &TempDir, line: &str) {
        let file = fs::OpenOptions::new().append(true).open(directory.path().join("events.jsonl"));
        writeln!(file.expect("a journal"), "{line}").expect("written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_input_ends_the_process(bytes in prop::collection::vec(any::<u8>(), 0..2000), at in 0usize..2000) {
            parse_journal(&bytes).expect("never fails");
            drop(parse_http_request(&bytes));
            drop(parse_run_status(&bytes));
            format_log(&bytes).expect("never fails");
            let mut journal = testing::JOURNAL.as_bytes().to_vec();
            let at = at % journal.len();
            for (target, byte) in journal[at..].iter_mut().zip(&bytes).take(8) {
                *target = *byte;
            }
            parse_journal(&journal).expect("never fails");
        }
    }
}
