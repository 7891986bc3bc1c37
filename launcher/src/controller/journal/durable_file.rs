//! [`DurableFile`]: a file for appending that keeps unwritten bytes in memory and repeats failed
//! writes, for example while the disk is full.
use crate::{background_thread::RetryPauses, private_files::open_private_file_for_appending};
use std::{
    fs::{self, File, Metadata},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
};

/// The file operations that a [`DurableFile`] needs, as a trait so that tests can simulate failing
/// disks.
pub(super) trait AppendableFile: Send {
    /// Appends as many of `bytes` as the file accepts, and returns their number.
    fn append(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Waits until the content of the file is on the disk (fsync).
    fn sync(&mut self) -> io::Result<()>;

    /// Opens the file again after an error, and truncates it to `length` bytes. Returns the new
    /// length, which is shorter if the file has lost bytes.
    fn reopen(&mut self, length: u64) -> io::Result<u64>;

    /// Returns whether the path of this file now belongs to another file, for example because
    /// another controller has taken over the journal of the run. Returns `false` if no file has the
    /// path.
    fn is_replaced(&self) -> bool {
        false
    }
}

/// A file of the run directory that is open for appending.
struct OpenFile {
    path: PathBuf,
    file: File,
    /// The device and the inode of the file.
    identity: (u64, u64),
}

impl OpenFile {
    /// Opens the file at `path` for appending, and records its device and inode, by which a later
    /// replacement of the file is noticed. Creates the file if it does not exist.
    fn open(path: &Path) -> io::Result<OpenFile> {
        let file = open_private_file_for_appending(path)?;
        let identity = read_file_identity(&file.metadata()?);
        Ok(OpenFile { path: path.to_owned(), file, identity })
    }
}

/// Returns the device and the inode of a file, from which [`OpenFile`] notices that another file
/// has replaced this file.
fn read_file_identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl AppendableFile for OpenFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn reopen(&mut self, length: u64) -> io::Result<u64> {
        // The descriptor may be stale after a restart of the file server. A file that has replaced
        // this one belongs to another controller.
        let reopened = OpenFile::open(&self.path)?;
        if reopened.identity == self.identity {
            self.file = reopened.file;
        }
        let length = length.min(self.file.metadata()?.len());
        self.file.set_len(length)?;
        Ok(length)
    }

    fn is_replaced(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|other| read_file_identity(&other) != self.identity)
    }
}

/// A callback that gets the first error of a write or sync, after which the operation is repeated
/// until it succeeds.
pub(super) type ErrorReporter<'a> = &'a mut dyn FnMut(&io::Error);

/// A file that loses no appended bytes: writes are repeated until they succeed. Bytes that are not
/// on the disk yet are also kept in memory, because a failed fsync may have lost them.
pub(super) struct DurableFile {
    file: Box<dyn AppendableFile>,
    /// The length of the synced part of the file, in bytes.
    synced: u64,
    /// The bytes after the synced part.
    unsynced: Vec<u8>,
}

impl DurableFile {
    /// Opens a file for appending. Creates the file if it does not exist.
    pub(super) fn open(path: &Path) -> io::Result<DurableFile> {
        let file = OpenFile::open(path)?;
        let synced = file.file.metadata()?.len();
        Ok(DurableFile::new(Box::new(file), synced))
    }

    /// Creates a [`DurableFile`] from an open file that has `length` bytes, all of which count as
    /// stored on the disk.
    pub(super) fn new(file: Box<dyn AppendableFile>, length: u64) -> DurableFile {
        DurableFile { file, synced: length, unsynced: Vec::new() }
    }

    /// Returns whether the path of this file now belongs to another file, because another program
    /// has replaced it. Blocks for the file system.
    pub(super) fn is_replaced(&self) -> bool {
        self.file.is_replaced()
    }

    /// Appends `bytes` to the file, and repeats a failed write until it succeeds. Blocks until the
    /// file system accepts them.
    pub(super) fn append(&mut self, bytes: &[u8], report: ErrorReporter<'_>) {
        let written = self.unsynced.len();
        self.unsynced.extend_from_slice(bytes);
        self.write_pending(written, false, report);
    }

    /// Blocks until all appended bytes are on the disk.
    pub(super) fn sync(&mut self, report: ErrorReporter<'_>) {
        if !self.unsynced.is_empty() {
            let written = self.unsynced.len();
            self.write_pending(written, true, report);
            self.synced += self.unsynced.len() as u64;
            self.unsynced.clear();
        }
    }

    /// Writes the pending bytes in memory to the file and, if `sync` is set, syncs the file to the
    /// disk. The first `written` of these bytes were written before, but not synced. Repeats both
    /// until they succeed. After an error, the file contains at least its synced part, so
    /// everything after this part is written again.
    fn write_pending(&mut self, mut written: usize, sync: bool, report: ErrorReporter<'_>) {
        let mut pauses = RetryPauses::default();
        loop {
            match self.try_write_unsynced(&mut written, sync) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if pauses.is_before_first_retry() {
                        report(&error);
                    }
                    thread::sleep(pauses.next_pause());
                    if let Ok(length) = self.file.reopen(self.synced) {
                        (self.synced, written) = (length, 0);
                    }
                }
            }
        }
    }

    /// Makes one attempt to write the pending bytes in memory to the file and, if `sync` is set, to
    /// sync the file. The first `written` of these bytes were written before. Advances `written` by
    /// the bytes that were written.
    fn try_write_unsynced(&mut self, written: &mut usize, sync: bool) -> io::Result<()> {
        while *written < self.unsynced.len() {
            match self.file.append(&self.unsynced[*written..])? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                n => *written += n,
            }
        }
        if sync { self.file.sync() } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// A disk in memory that loses unsynced bytes when a sync fails.
    #[derive(Clone, Default)]
    struct FlakyDisk(Arc<Mutex<FlakyState>>);

    #[derive(Default)]
    struct FlakyState {
        content: Vec<u8>,
        synced: usize,
        appends: u32,
        syncs: u32,
    }

    impl AppendableFile for FlakyDisk {
        fn append(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut state = self.0.lock().expect("not poisoned");
            state.appends += 1;
            if state.appends.is_multiple_of(17) {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            let n = bytes.len().min(4);
            state.content.extend(&bytes[..n]);
            Ok(n)
        }

        fn sync(&mut self) -> io::Result<()> {
            let mut state = self.0.lock().expect("not poisoned");
            state.syncs += 1;
            if state.syncs.is_multiple_of(2) {
                let synced = state.synced;
                state.content.truncate(synced);
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            state.synced = state.content.len();
            Ok(())
        }

        fn reopen(&mut self, length: u64) -> io::Result<u64> {
            let mut state = self.0.lock().expect("not poisoned");
            assert!(length as usize <= state.content.len(), "the synced part is never lost");
            state.content.truncate(length as usize);
            Ok(length)
        }
    }

    #[test]
    fn a_file_is_complete_after_failed_writes_and_syncs() {
        let disk = FlakyDisk::default();
        let mut file = DurableFile::new(Box::new(disk.clone()), 0);
        let (mut expected, mut errors) = (String::new(), 0);
        for n in 0..40 {
            let line = format!("line {n}\n");
            file.append(line.as_bytes(), &mut |_| errors += 1);
            expected.push_str(&line);
            if n % 4 == 3 {
                file.sync(&mut |_| errors += 1);
                let state = disk.0.lock().expect("not poisoned");
                assert_eq!(String::from_utf8_lossy(&state.content[..state.synced]), expected);
            }
        }
        assert!(errors > 2, "{errors}");
    }

    #[test]
    fn an_existing_file_is_continued() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a");
        std::fs::write(&path, "one\n").expect("written");
        let mut file = DurableFile::open(&path).expect("open");
        let mut panic_on_error = |error: &io::Error| panic!("{error}");
        file.append(b"two\n", &mut panic_on_error);
        file.file.reopen(4).expect("reopened");
        file.append(b"three\n", &mut panic_on_error);
        file.sync(&mut panic_on_error);
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "one\nthree\n");
    }

    #[test]
    fn a_file_that_has_replaced_the_open_one_stays_unchanged() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a");
        let mut file = DurableFile::open(&path).expect("open");
        file.append(b"one\n", &mut |error| panic!("{error}"));
        std::fs::write(dir.path().join("b"), "taken over\n").expect("written");
        assert!(!file.is_replaced());
        std::fs::rename(dir.path().join("b"), &path).expect("replaced");
        assert!(file.is_replaced());
        file.file.reopen(0).expect("reopened");
        file.append(b"two\n", &mut |error| panic!("{error}"));
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "taken over\n");
    }
}
