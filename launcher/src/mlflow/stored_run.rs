//! Defines [`StoredMlflowRun`], the content of the file `mlflow.json`, which names the run on the
//! MLflow server that gets the data of a run of launch.
use super::journal_reader::JournalPosition;
use crate::runs::{read_private_file, replace_file_without_sync, write_atomically};
use serde::{Deserialize, Serialize};
use std::{io, path::Path};

/// The format version of `mlflow.json`, a file in the run directory that names the run on the
/// MLflow server.
const VERSION: u32 = 1;
/// The name of the file in the run directory that stores the address and the ID of the run on the
/// MLflow server.
const FILE_NAME: &str = "mlflow.json";
/// The largest size, in bytes, of `mlflow.json`, which stores the address and the ID of the run on
/// the MLflow server. A larger file is an error.
const MAX_BYTES: u64 = 64 << 10;

/// The content of `mlflow.json`: the run on the MLflow server, and how much of the run's data was
/// already sent to the server. The file has no credentials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StoredMlflowRun {
    version: u32,
    /// The address of the server.
    pub(super) uri: String,
    /// The ID of the experiment.
    pub(super) experiment_id: String,
    /// The ID of the run.
    pub(super) run_id: String,
    /// Whether the run has all parameters. They can be set only once.
    pub(super) has_params: bool,
    /// The place in the journal up to which the run has the metrics.
    pub(super) position: JournalPosition,
}

impl StoredMlflowRun {
    /// Creates the description of a run that is new on the MLflow server and has no parameters or
    /// metrics yet.
    pub(super) fn new(uri: &str, experiment_id: &str, run_id: &str) -> StoredMlflowRun {
        StoredMlflowRun {
            version: VERSION,
            uri: uri.to_owned(),
            experiment_id: experiment_id.to_owned(),
            run_id: run_id.to_owned(),
            has_params: false,
            position: JournalPosition::default(),
        }
    }

    /// Reads the file `mlflow.json` in the run directory `run_dir`, which names the MLflow run to
    /// which the data of the run are sent. Returns `None` if there is no file.
    pub(super) fn read(run_dir: &Path) -> io::Result<Option<StoredMlflowRun>> {
        let bytes = match read_private_file(&run_dir.join(FILE_NAME), MAX_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let stored: StoredMlflowRun = serde_json::from_slice(&bytes)?;
        if stored.version != VERSION {
            return Err(io::Error::other("the file is of another version of launch"));
        }
        Ok(Some(stored))
    }

    /// Writes `mlflow.json`, which names the MLflow run for this run's data, durably to the run
    /// directory `run_dir`. Needed when the run of MLflow changes.
    pub(super) fn write(&self, run_dir: &Path) -> io::Result<()> {
        write_atomically(run_dir, FILE_NAME, &serde_json::to_vec(self)?)
    }

    /// Stores in `mlflow.json` how much of the journal (the run's file of events) was already sent
    /// to MLflow. If a crash undoes this, metrics are sent again.
    pub(super) fn write_position(&self, run_dir: &Path) -> io::Result<()> {
        replace_file_without_sync(run_dir, FILE_NAME, &serde_json::to_vec(self)?)
    }

    /// Returns the address of the web page that shows this MLflow run on the MLflow server.
    pub(super) fn page_address(&self) -> String {
        format!("{}/#/experiments/{}/runs/{}", self.uri, self.experiment_id, self.run_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_reads_back_equal_and_a_damaged_file_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(StoredMlflowRun::read(dir.path()).expect("no file"), None);
        let mut stored = StoredMlflowRun::new("http://h", "7", "abc");
        stored.write(dir.path()).expect("written");
        stored.has_params = true;
        stored.write_position(dir.path()).expect("written");
        assert_eq!(StoredMlflowRun::read(dir.path()).expect("a file"), Some(stored.clone()));
        assert_eq!(stored.page_address(), "http://h/#/experiments/7/runs/abc");
        std::fs::write(dir.path().join(FILE_NAME), "{").expect("written");
        StoredMlflowRun::read(dir.path()).expect_err("damaged");
    }
}
