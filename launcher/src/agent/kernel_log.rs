//! Reads the records that the kernel adds to its log (`/dev/kmsg`) after this process has opened
//! the log.
use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
};

/// The size, in bytes, of the buffer into which one record of the kernel log is read.
const MAX_RECORD_BYTES: usize = 8 << 10;
/// The largest number of records that one call of [`KernelLog::read_new_records`] reads.
const MAX_RECORDS: usize = 10_000;

/// The open file of the kernel log, from which new records are read.
#[derive(Debug)]
pub(super) struct KernelLog(File);

impl KernelLog {
    /// Opens the kernel log at its end, so that only records that are added later are read. Returns
    /// `None` if this process may not read the kernel log.
    pub(super) fn open() -> Option<KernelLog> {
        let mut log = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").ok()?;
        log.seek(SeekFrom::End(0)).ok()?;
        Some(KernelLog(log))
    }

    /// Reads the records that were added to the kernel log since the last call, and passes each
    /// record to the function `on_record`. Does not block.
    pub(super) fn read_new_records(&mut self, mut on_record: impl FnMut(&str)) {
        let mut bytes = [0; MAX_RECORD_BYTES];
        for _ in 0..MAX_RECORDS {
            match self.0.read(&mut bytes) {
                Ok(n @ 1..) => on_record(&String::from_utf8_lossy(&bytes[..n])),
                // Records were overwritten before they were read. The next read returns the oldest
                // record that is left.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                _ => return,
            }
        }
    }
}
