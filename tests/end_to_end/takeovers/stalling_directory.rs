//! [`StallingDirectory`]: an empty directory whose file system (FUSE) answers no request while it
//! is stalled.
use crate::support::report_skip;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// The size of the buffer for a FUSE request in bytes, more than the kernel requires.
const REQUEST_BYTES: usize = 1 << 17;
/// The sizes of the headers of a FUSE request and of its answer, in bytes.
const REQUEST_HEADER_BYTES: usize = 40;
const ANSWER_HEADER_BYTES: u32 = 16;
/// The opcodes of the FUSE requests that the test file system answers (linux/fuse.h).
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// An empty directory with a mounted FUSE file system whose requests a test can stall. Dropping the
/// value unmounts it.
pub(super) struct StallingDirectory {
    path: PathBuf,
    is_stalled: Arc<AtomicBool>,
}

impl StallingDirectory {
    /// Mounts the file system on a directory. Returns `None` if this machine cannot do this; the
    /// test is then skipped.
    pub(super) fn mount(test: &str, path: &Path) -> Option<StallingDirectory> {
        let mounted = OpenOptions::new().read(true).write(true).open("/dev/fuse").and_then(|device| {
            let options = format!(
                "fd={},rootmode=40755,user_id=0,group_id=0,default_permissions,allow_other",
                device.as_raw_fd()
            );
            mount(Some("stalling"), path, Some("fuse"), MsFlags::empty(), Some(options.as_str()))?;
            Ok(device)
        });
        let device = match mounted {
            Ok(device) => device,
            Err(error) => {
                report_skip(test, &format!("cannot mount a FUSE file system: {error}"));
                return None;
            }
        };
        let is_stalled = Arc::new(AtomicBool::new(false));
        let stalls = is_stalled.clone();
        thread::spawn(move || answer_requests(device, &stalls));
        Some(StallingDirectory { path: path.to_path_buf(), is_stalled })
    }

    /// Lets every access block, or lets blocked accesses continue.
    pub(super) fn set_stalled(&self, is_stalled: bool) {
        self.is_stalled.store(is_stalled, Ordering::Relaxed);
    }
}

impl Drop for StallingDirectory {
    fn drop(&mut self) {
        self.set_stalled(false);
        // The processes of a failed test may still use the directory.
        _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

/// Answers the requests of the kernel until the file system is unmounted.
fn answer_requests(mut device: File, is_stalled: &AtomicBool) {
    let mut request = vec![0; REQUEST_BYTES];
    while let Ok(length) = device.read(&mut request) {
        assert!(length >= REQUEST_HEADER_BYTES, "a short request");
        let opcode = u32::from_le_bytes(request[4..8].try_into().unwrap());
        let unique = &request[8..16];
        while is_stalled.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
        }
        let (error, body) = match opcode {
            FORGET | BATCH_FORGET | INTERRUPT => continue,
            INIT => (0, build_init_answer()),
            GETATTR => (0, build_root_attributes()),
            OPENDIR => (0, vec![0; 16]),
            READDIR | RELEASEDIR => (0, Vec::new()),
            1 => (-libc::ENOENT, Vec::new()),
            _ => (-libc::ENOSYS, Vec::new()),
        };
        let mut answer = (ANSWER_HEADER_BYTES + body.len() as u32).to_le_bytes().to_vec();
        answer.extend(error.to_le_bytes());
        answer.extend(unique);
        answer.extend(body);
        // An error means that the process that asked has ended.
        _ = device.write_all(&answer);
    }
}

/// Builds the answer to INIT (`fuse_init_out`), which states protocol version 7.23 and the largest
/// size of a write.
fn build_init_answer() -> Vec<u8> {
    let mut words = [0u32; 16];
    (words[0], words[1], words[5]) = (7, 23, 4096);
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Builds the attributes of the root directory (`fuse_attr_out`), which the kernel must not cache.
fn build_root_attributes() -> Vec<u8> {
    let mut words = [0u32; 26];
    let (inode, mode, links) = (4, 19, 20);
    (words[inode], words[mode], words[links]) = (1, libc::S_IFDIR | 0o755, 2);
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
