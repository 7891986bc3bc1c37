//! [`StalledFile`]: a file that a worker cannot open, as if its disk stalled.
use crate::support::report_skip;
use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read, Write},
    mem,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    thread,
};

/// The size of the buffer for the events of the kernel in bytes.
const BUFFER_BYTES: usize = 4096;

/// A file whose opening blocks in every worker until the value is dropped. All other processes can
/// open the file.
pub(super) struct StalledFile {
    /// The group of fanotify. Its last descriptor allows the blocked calls when it is closed.
    group: File,
}

impl StalledFile {
    /// Stalls a file. Returns `None` if this machine cannot do this; the test is then skipped.
    pub(super) fn stall(test: &str, path: &Path) -> Option<StalledFile> {
        match StalledFile::watch_opens(path) {
            Ok(file) => Some(file),
            Err(error) => {
                report_skip(test, &format!("cannot watch a file by fanotify: {error}"));
                None
            }
        }
    }

    /// Makes the kernel request a permission for each opening of the file.
    fn watch_opens(path: &Path) -> io::Result<StalledFile> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let flags = libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC;
        // SAFETY: the call has no memory effects.
        let group = unsafe { libc::fanotify_init(flags, libc::O_RDONLY as u32) };
        if group < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        let group = unsafe { File::from_raw_fd(group) };
        let mask = libc::FAN_OPEN_PERM;
        // SAFETY: the path ends with a zero byte and outlives the call.
        let marked = unsafe {
            libc::fanotify_mark(group.as_raw_fd(), libc::FAN_MARK_ADD, mask, libc::AT_FDCWD, path.as_ptr())
        };
        if marked != 0 {
            return Err(io::Error::last_os_error());
        }
        let answering = group.try_clone()?;
        thread::spawn(move || answer_requests(answering));
        Ok(StalledFile { group })
    }
}

impl Drop for StalledFile {
    fn drop(&mut self) {
        // Removes the mark, so that no later opening blocks.
        // SAFETY: the call has no memory effects.
        unsafe {
            libc::fanotify_mark(
                self.group.as_raw_fd(),
                libc::FAN_MARK_FLUSH,
                0,
                libc::AT_FDCWD,
                std::ptr::null(),
            )
        };
    }
}

/// Returns whether a process is a worker of the built-in training.
fn is_worker(pid: i32) -> bool {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).nth(1) == Some(b"worker")
}

/// Allows all processes but workers to open the file.
fn answer_requests(mut group: File) {
    let mut buffer = [0u8; BUFFER_BYTES];
    while let Ok(length) = group.read(&mut buffer) {
        let mut rest = &buffer[..length];
        while rest.len() >= mem::size_of::<libc::fanotify_event_metadata>() {
            // SAFETY: the kernel has written an event of this type, which may be unaligned.
            let event = unsafe { rest.as_ptr().cast::<libc::fanotify_event_metadata>().read_unaligned() };
            if event.fd >= 0 {
                // SAFETY: the kernel has opened the descriptor for this process.
                drop(unsafe { File::from_raw_fd(event.fd) });
                let mut answer = event.fd.to_ne_bytes().to_vec();
                answer.extend(libc::FAN_ALLOW.to_ne_bytes());
                if !is_worker(event.pid) && group.write_all(&answer).is_err() {
                    return;
                }
            }
            rest = rest.get((event.event_len as usize).max(1)..).unwrap_or_default();
        }
    }
}
