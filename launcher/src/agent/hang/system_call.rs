//! [`SystemCall`]: the system call in which a thread of another process waits, and the file on
//! which the call operates.
use protocol::hang::WaitKind;
use std::{fs, fs::File, os::unix::fs::FileExt};

/// The longest path that is read from the memory of another process, in bytes.
const MAX_PATH_BYTES: usize = 400;
/// The size of a page of memory, in bytes. A path may end just before a page that does not exist.
const PAGE_BYTES: u64 = 4096;

/// The numbers of the system calls, such as `read`, that wait for data or a disk and have a file
/// descriptor as their first argument.
const DESCRIPTOR_SYSTEM_CALLS: [i64; 17] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fstat,
    libc::SYS_getdents64,
    libc::SYS_flock,
];
/// The numbers of the system calls that have a path as their second argument, such as `openat`.
const PATH_CALLS: [i64; 7] = [
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_faccessat,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_readlinkat,
];
/// The numbers of the system calls that have a path as their first argument, such as `open`, which
/// exist only on x86-64.
#[cfg(target_arch = "x86_64")]
const OLD_PATH_CALLS: [i64; 6] =
    [libc::SYS_open, libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_mkdir, libc::SYS_unlink];
#[cfg(not(target_arch = "x86_64"))]
const OLD_PATH_CALLS: [i64; 0] = [];
/// The numbers of the system calls with which a thread sleeps, such as `nanosleep`.
const SLEEP_CALLS: [i64; 2] = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep];
/// The numbers of the system calls with which a thread waits for events of several file
/// descriptors, such as `ppoll`.
const POLL_CALLS: [i64; 3] = [libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_pwait];
/// The numbers of older system calls that wait for events of several file descriptors, such as
/// `poll`, which exist only on x86-64.
#[cfg(target_arch = "x86_64")]
const OLD_POLL_CALLS: [i64; 3] = [libc::SYS_poll, libc::SYS_select, libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const OLD_POLL_CALLS: [i64; 0] = [];

/// The numbers of the system calls with which a thread waits for a child process.
const CHILD_CALLS: [i64; 2] = [libc::SYS_wait4, libc::SYS_waitid];

/// The system call in which a thread of a hanging worker waits, with the first two arguments of the
/// call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SystemCall {
    number: i64,
    /// The first two arguments.
    arguments: [u64; 2],
}

impl SystemCall {
    /// Parses the system call of a thread from the content of `/proc/PID/task/THREAD/syscall`.
    /// Returns `None` if the thread runs, or is in no system call.
    pub(super) fn parse(text: &str) -> Option<SystemCall> {
        let mut fields = text.split_whitespace();
        let number = fields.next()?.parse().ok().filter(|number| *number >= 0)?;
        let mut argument = || u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok();
        Some(SystemCall { number, arguments: [argument()?, argument()?] })
    }

    /// Returns whether this system call is one that waits for data of a file, pipe or socket, or
    /// for a disk.
    fn waits_for_io(&self) -> bool {
        let number = &self.number;
        DESCRIPTOR_SYSTEM_CALLS.contains(number)
            || PATH_CALLS.contains(number)
            || OLD_PATH_CALLS.contains(number)
    }

    /// Returns the path of the file on which this system call of the process with the pid `pid`
    /// operates. Returns `None` if the call uses no file, or if this process may not read the path.
    pub(super) fn find_file(&self, pid: u32) -> Option<String> {
        let [first, second] = self.arguments;
        if DESCRIPTOR_SYSTEM_CALLS.contains(&self.number) {
            let path = fs::read_link(format!("/proc/{pid}/fd/{}", first as i32)).ok()?;
            // Pipes and sockets have no path.
            return path.is_absolute().then(|| truncate_path(&path.to_string_lossy()));
        }
        match () {
            () if PATH_CALLS.contains(&self.number) => read_process_text(pid, second),
            () if OLD_PATH_CALLS.contains(&self.number) => read_process_text(pid, first),
            () => None,
        }
    }
}

/// Classifies what a thread waits for (lock, I/O, sleep, polling, child or other) by its system
/// call or, if that is unknown, by the kernel function in which it waits.
pub(super) fn classify_wait(call: Option<&SystemCall>, channel: &str) -> WaitKind {
    match call {
        Some(call) if call.number == libc::SYS_futex => WaitKind::Futex,
        Some(call) if call.waits_for_io() => WaitKind::Io,
        Some(call) if SLEEP_CALLS.contains(&call.number) => WaitKind::Sleep,
        Some(call) if POLL_CALLS.contains(&call.number) || OLD_POLL_CALLS.contains(&call.number) => {
            WaitKind::Poll
        }
        Some(call) if CHILD_CALLS.contains(&call.number) => WaitKind::Child,
        Some(_) => WaitKind::Other,
        None if channel.starts_with("futex") => WaitKind::Futex,
        None if channel.contains("pipe_read") || channel == "wait_for_partner" => WaitKind::Io,
        None if channel.starts_with("request_wait") || channel.starts_with("folio_wait") => WaitKind::Io,
        None if channel.contains("nanosleep") => WaitKind::Sleep,
        None if channel == "do_wait" => WaitKind::Child,
        None if channel.contains("poll") || channel.contains("select") => WaitKind::Poll,
        None => WaitKind::Other,
    }
}

/// Reads a zero-terminated text, such as a path argument of a system call, from the memory of
/// another process. Returns `None` if the text is empty, or if this process may not read it.
fn read_process_text(pid: u32, address: u64) -> Option<String> {
    let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut text = Vec::new();
    while text.len() < MAX_PATH_BYTES {
        let at = address.checked_add(text.len() as u64)?;
        let in_page = (PAGE_BYTES - at % PAGE_BYTES) as usize;
        let mut bytes = vec![0; in_page.min(MAX_PATH_BYTES - text.len())];
        memory.read_exact_at(&mut bytes, at).ok()?;
        let end = bytes.iter().position(|byte| *byte == 0);
        text.extend_from_slice(&bytes[..end.unwrap_or(bytes.len())]);
        if end.is_some() {
            break;
        }
    }
    Some(truncate_path(&String::from_utf8_lossy(&text))).filter(|text| !text.is_empty())
}

/// Truncates a path to [`MAX_PATH_BYTES`] (the size limit of paths in evidence about a hang).
fn truncate_path(path: &str) -> String {
    path[..path.floor_char_boundary(MAX_PATH_BYTES)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn system_calls_are_parsed_and_classified() {
        let read = SystemCall::parse(&format!("{} 0x3 0x7ffe 0x10 0x0 0x0 0x0 0x1 0x2", libc::SYS_read));
        assert_eq!(read.as_ref().map(|call| call.arguments), Some([3, 0x7ffe]));
        assert_eq!(classify_wait(read.as_ref(), ""), WaitKind::Io);
        for text in ["running", "-1 0x7ffe 0x7f01", "", "0", "0 3 4"] {
            assert_eq!(SystemCall::parse(text), None, "{text}");
        }
        assert_eq!(classify_wait(None, "futex_wait_queue"), WaitKind::Futex);
        let wait = SystemCall::parse(&format!("{} 0x1 0x0 0x0 0x0 0x0 0x0 0x1 0x2", libc::SYS_wait4));
        assert_eq!(classify_wait(wait.as_ref(), ""), WaitKind::Child);
    }

    #[test]
    fn the_file_of_a_call_is_found() {
        let (file, pid) = (File::open("/proc/self/exe").expect("open"), std::process::id());
        let path = fs::read_link("/proc/self/exe").expect("a path").display().to_string();
        let call = |number, arguments| SystemCall { number, arguments };
        let descriptor = file.as_raw_fd() as u64;
        assert_eq!(call(libc::SYS_read, [descriptor, 0]).find_file(pid), Some(truncate_path(&path)));
        let text = c"data/tokens.bin";
        let address = text.as_ptr() as u64;
        assert_eq!(call(libc::SYS_openat, [0, address]).find_file(pid).as_deref(), Some("data/tokens.bin"));
        assert_eq!(call(libc::SYS_openat, [0, 0]).find_file(pid), None, "the address is not mapped");
        assert_eq!(call(libc::SYS_futex, [address, 0]).find_file(pid), None);
    }
}
