//! Defines [`open_controller_handle`], which opens a pidfd of a run's controller, and checks by its
//! open files that the process is this controller.
use super::{
    process_identity::ProcessHandle,
    registry::{JOURNAL_FILE, RunRecord},
};
use crate::private_files::{identify_file, open_own_file};
use std::{
    fs, io, thread,
    time::{Duration, Instant},
};

/// How long a new controller may take to open the run's journal (its file of events) after it has
/// written `run.json`.
const JOURNAL_OPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the open files of a process are checked to find out whether the process is the
/// controller of a run.
const OPEN_FILES_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The largest number of open files of a process that are checked to find out whether it is the
/// controller of a run.
const MAX_CHECKED_OPEN_FILES: usize = 1 << 17;

/// Opens a handle (pidfd) of the process that controls a run, through which the process can be
/// signalled and awaited. Returns `None` if the controller has ended.
///
/// # Errors
/// Fails if the process in the record does not have the run's journal open. Every user can write a
/// `run.json` that names any process, but only the controller has the journal open.
pub(crate) fn open_controller_handle(record: &RunRecord) -> io::Result<Option<ProcessHandle>> {
    let began = Instant::now();
    loop {
        let Some(handle) = record.controller.open_handle()? else { return Ok(None) };
        let proof = has_journal_open(record);
        match proof {
            Ok(true) => return Ok(Some(handle)),
            _ if began.elapsed() < JOURNAL_OPEN_TIMEOUT => thread::sleep(OPEN_FILES_POLL_INTERVAL),
            Ok(false) => return Err(io::Error::other("the process is not the controller of this run")),
            Err(error) => return Err(error),
        }
    }
}

/// Returns whether the controller process that `run.json` names has the run's journal (its file of
/// events) open.
fn has_journal_open(record: &RunRecord) -> io::Result<bool> {
    let journal = open_own_file(&record.run_dir.join(JOURNAL_FILE))?.metadata()?;
    let files = fs::read_dir(format!("/proc/{}/fd", record.controller.pid))?;
    // The link to an open file is followed without opening the file again.
    let is_journal = |entry: io::Result<fs::DirEntry>| {
        let metadata = entry.and_then(|entry| fs::metadata(entry.path()));
        metadata.is_ok_and(|metadata| identify_file(&metadata) == identify_file(&journal))
    };
    Ok(files.take(MAX_CHECKED_OPEN_FILES).any(is_journal))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::process_identity::ProcessIdentity;

    #[test]
    fn only_a_process_with_the_journal_open_is_the_controller() {
        let dir = tempfile::tempdir().expect("a directory");
        let this = ProcessIdentity::current().expect("this process");
        let mut record = RunRecord {
            version: 1,
            run: "r".into(),
            name: "n".into(),
            run_dir: dir.path().into(),
            world: 1,
            began_ms: 5,
            controller_timeout_ms: None,
            batch_job: None,
            controller: this.clone(),
        };
        open_controller_handle(&record).expect_err("there is no journal");
        fs::write(dir.path().join(JOURNAL_FILE), "").expect("a journal");
        let error = open_controller_handle(&record).expect_err("the journal is not open");
        assert_eq!(error.to_string(), "the process is not the controller of this run");
        let _open = fs::File::open(dir.path().join(JOURNAL_FILE)).expect("open");
        assert!(open_controller_handle(&record).expect("proved").is_some());
        record.controller = this.with_other_start();
        assert!(open_controller_handle(&record).expect("no error").is_none(), "the controller has ended");
    }
}
