//! The kernel's log, from when it was opened on.
use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
};

/// Largest record, bytes.
const RECORD: usize = 8 << 10;
/// Most records read at once.
const MOST_RECORDS: usize = 10_000;

#[derive(Debug)]
pub(super) struct KernelLog(File);

impl KernelLog {
    /// From here on; `None` where it may not be read.
    pub(super) fn open() -> Option<KernelLog> {
        let mut log = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").ok()?;
        log.seek(SeekFrom::End(0)).ok()?;
        Some(KernelLog(log))
    }

    /// What it has got since.
    pub(super) fn read(&mut self, mut record: impl FnMut(&str)) {
        let mut bytes = [0; RECORD];
        for _ in 0..MOST_RECORDS {
            match self.0.read(&mut bytes) {
                Ok(n @ 1..) => record(&String::from_utf8_lossy(&bytes[..n])),
                // Records were overwritten before they were read; the next one is there.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                _ => return,
            }
        }
    }
}
