//! [`ControlFile`]: the file `control.json` of a run directory, from which `launch attach` learns
//! how to reach the agents of the run. Only the user can read the file, because it contains the key
//! of the run.
use crate::{
    cluster::HostTarget,
    runs::{read_private_file, write_atomically},
};
use diagnostic::{Diagnostic, codes::run};
use jobspec::{JobSpec, hosts::HostAddress};
use protocol::control::JobSecretKey;
use serde::{Deserialize, Serialize};
use std::{io, path::Path};

/// The version of the format of `control.json`, the file from which a new controller learns how to
/// reach the agents of a run. The file contains this number.
const VERSION: u32 = 1;
/// The name of the file in the run directory from which a new controller, after the loss of the
/// first one, learns how to reach the agents.
const FILE_NAME: &str = "control.json";
/// The largest size of `control.json` and of `job.json` that a controller reads, in bytes. A larger
/// file is an error.
const MAX_BYTES: u64 = 64 << 20;

/// The content of `control.json`: the key, hosts and addresses with which a later controller
/// reaches the agents of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ControlFile {
    version: u32,
    /// The key of the run, in hexadecimal digits.
    key: String,
    /// The number of the newest controller, in the order in which controllers took over the run.
    pub(crate) epoch: u64,
    /// The hosts of the run, by index.
    pub(crate) hosts: Vec<HostTarget>,
    /// The addresses for SSH of hosts that were added while the job ran.
    pub(crate) addresses: Vec<HostAddress>,
    /// Whether the batch job of the run may be requeued after the run.
    pub(crate) requeue: bool,
}

/// The part of the stored job (`job.json` in the run directory) that a controller needs to take
/// over the run.
#[derive(Deserialize)]
struct StoredJob {
    job: JobSpec,
}

impl ControlFile {
    /// Creates the content of `control.json` for a run from its hosts, their addresses and the key
    /// of the run.
    pub(crate) fn new(
        key: &JobSecretKey,
        epoch: u64,
        hosts: Vec<HostTarget>,
        addresses: Vec<HostAddress>,
        requeue: bool,
    ) -> ControlFile {
        let key = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
        ControlFile { version: VERSION, key, epoch, hosts, addresses, requeue }
    }

    /// Returns the key with which the controller and the agents of the run authenticate each other,
    /// or `None` if the file contains no valid key.
    pub(crate) fn key(&self) -> Option<JobSecretKey> {
        let digits = self.key.as_bytes();
        let byte = |i: usize| u8::from_str_radix(self.key.get(2 * i..2 * i + 2)?, 16).ok();
        let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
        Some(JobSecretKey(bytes.filter(|_| digits.len() == 64)?.try_into().ok()?))
    }

    /// Writes `control.json`, with which a later controller reaches the agents, to the run
    /// directory.
    pub(crate) fn write(&self, run_dir: &Path) -> io::Result<()> {
        write_atomically(run_dir, FILE_NAME, &serde_json::to_vec(self)?)
    }

    /// Reads `control.json`, with which a later controller reaches the agents, from the run
    /// directory `run_dir`. Fails if there is no file, because the workers of the run end with
    /// their controller (`run.on_controller_loss: stop`).
    pub(crate) fn read(run_dir: &Path) -> diagnostic::Result<ControlFile> {
        let path = run_dir.join(FILE_NAME);
        let unusable = |error: &(dyn std::error::Error + 'static)| {
            let message = format!("cannot read {}", path.display());
            Diagnostic::error(run::CONTROL_FILE_INVALID, message)
                .with_subject(path.display().to_string())
                .with_cause(error)
        };
        let bytes = match read_private_file(&path, MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let message = "the run does not outlive its controller (`run.on_controller_loss: stop`)";
                return Err(Diagnostic::error(run::RUN_NOT_ATTACHABLE, message));
            }
            Err(error) => return Err(unusable(&error)),
        };
        let file: ControlFile = serde_json::from_slice(&bytes).map_err(|error| unusable(&error))?;
        if file.version != VERSION || file.key().is_none() {
            return Err(unusable(&io::Error::other("the file is of another version of launch")));
        }
        Ok(file)
    }
}

/// Reads the job of a run from the file `job.json` that the run's first controller has stored in
/// the run directory. The values of secret variables are missing.
pub(crate) fn read_stored_job(run_dir: &Path) -> diagnostic::Result<JobSpec> {
    let path = run_dir.join("job.json");
    let unusable = |error: &(dyn std::error::Error + 'static)| {
        Diagnostic::error(run::CONTROL_FILE_INVALID, format!("cannot read {}", path.display()))
            .with_subject(path.display().to_string())
            .with_cause(error)
    };
    let bytes = read_private_file(&path, MAX_BYTES).map_err(|error| unusable(&error))?;
    let stored: StoredJob = serde_json::from_slice(&bytes).map_err(|error| unusable(&error))?;
    Ok(stored.job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_file_is_private_and_reads_back_equal() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(ControlFile::read(dir.path()).expect_err("missing").code(), run::RUN_NOT_ATTACHABLE);
        let host = HostTarget { name: "h0".into(), slots: Some(2), selected_slots: None, local: true };
        let key = JobSecretKey(std::array::from_fn(|i| i as u8 * 7));
        let file = ControlFile::new(&key, 3, vec![host.clone()], Vec::new(), false);
        file.write(dir.path()).expect("written");
        let path = dir.path().join(FILE_NAME);
        let mode = std::fs::metadata(&path).expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let read = ControlFile::read(dir.path()).expect("valid");
        assert_eq!((read.key(), read.epoch, read.hosts), (Some(key), 3, vec![host]));
        // A file that others may write is not trusted.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).expect("changed");
        assert_eq!(ControlFile::read(dir.path()).expect_err("public").code(), run::CONTROL_FILE_INVALID);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("changed");
        std::fs::write(&path, "{\"version\": 1, \"key\": \"00\"}").expect("written");
        assert_eq!(ControlFile::read(dir.path()).expect_err("damaged").code(), run::CONTROL_FILE_INVALID);
    }
}
