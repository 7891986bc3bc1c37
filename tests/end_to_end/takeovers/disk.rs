//! [`RunDirectoryDisk`]: a disk for run directories that a test can stall and fill.
use crate::support::{environment::clean_command, report_skip};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

/// The size of the file system that stands for a disk, in bytes.
const DISK_BYTES: u64 = 64 << 20;

/// An ext4 file system in a file, mounted on a directory. Dropping the value unmounts it.
pub(super) struct RunDirectoryDisk {
    directory: PathBuf,
}

impl RunDirectoryDisk {
    /// Creates the file system in the file `image` and mounts it on `directory`. Returns `None` if
    /// this machine cannot do this; the test is then skipped.
    pub(super) fn mount(test: &str, image: &Path, directory: &Path) -> Option<RunDirectoryDisk> {
        File::create(image).and_then(|file| file.set_len(DISK_BYTES)).expect("a file for the disk");
        for command in [
            &["mkfs.ext4", "-q", "-m", "0", &image.display().to_string()][..],
            &["mount", "-o", "loop", &image.display().to_string(), &directory.display().to_string()],
        ] {
            if let Err(error) = run_command(command) {
                report_skip(test, &format!("cannot mount a disk: {error}"));
                return None;
            }
        }
        Some(RunDirectoryDisk { directory: directory.to_path_buf() })
    }

    /// Freezes the file system, so that every write to the disk blocks.
    pub(super) fn freeze(&self) {
        run_command(&["fsfreeze", "--freeze", &self.directory.display().to_string()]).expect("a frozen disk");
    }

    /// Ends the freeze, so that blocked writes continue.
    pub(super) fn thaw(&self) {
        run_command(&["fsfreeze", "--unfreeze", &self.directory.display().to_string()])
            .expect("a thawed disk");
    }

    /// Fills the disk to the last byte.
    pub(super) fn fill(&self) {
        let mut file = File::create(self.directory.join("big")).expect("a file on the disk");
        for size in [1 << 20, 4 << 10, 1] {
            while file.write_all(&vec![0; size]).and_then(|()| file.sync_all()).is_ok() {}
        }
    }

    /// Frees the space that [`RunDirectoryDisk::fill`] has filled.
    pub(super) fn free(&self) {
        fs::remove_file(self.directory.join("big")).expect("the file on the disk");
    }
}

impl Drop for RunDirectoryDisk {
    fn drop(&mut self) {
        let directory = self.directory.display().to_string();
        // An error means that the disk is not frozen.
        _ = run_command(&["fsfreeze", "--unfreeze", &directory]);
        // The processes of a failed test may still use the disk.
        _ = run_command(&["umount", "--lazy", &directory]);
    }
}

/// Runs a command. Fails with the reason as text if the command fails.
fn run_command(command: &[&str]) -> Result<(), String> {
    let mut process = clean_command(command[0]);
    let output = process.args(&command[1..]).output().map_err(|error| format!("{}: {error}", command[0]))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{}: {}", command[0], String::from_utf8_lossy(&output.stderr).trim())),
    }
}
