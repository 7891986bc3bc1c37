//! [`read_input_file`]: reads a file that the user names on the command line, which may be a pipe.
use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

/// The longest pause between two pieces of data from an input file that is a pipe. Reading fails
/// after a longer pause.
const MAX_PIPE_PAUSE: Duration = Duration::from_secs(5);
/// The time limit for reading an input file that is a pipe, as a multiple of the longest allowed
/// pause between two pieces of data.
const PIPE_TIME_LIMIT_FACTOR: u32 = 12;
/// The flags for opening an input file: `O_NONBLOCK`, because a pipe may have no writer, and
/// `O_NOCTTY`, because the file may be a terminal.
const OPEN_FLAGS: OFlag = OFlag::O_NONBLOCK.union(OFlag::O_NOCTTY);
/// The largest number of bytes that one read from a pipe returns.
const PIPE_READ_BYTES: usize = 64 << 10;

/// Reads the input file at `path`, or only its first `limit + 1` bytes if it is longer than
/// `limit`. A pipe, such as that of `<(command)` in a shell, must provide data within
/// [`MAX_PIPE_PAUSE`].
pub fn read_input_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_with_timeout(path, limit, MAX_PIPE_PAUSE)
}

/// Reads the input file at `path` up to `limit + 1` bytes; fails if the file is a pipe and sends no
/// data for the time `timeout`.
fn read_with_timeout(path: &Path, limit: u64, timeout: Duration) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(OPEN_FLAGS.bits()).open(path)?;
    if !file.metadata()?.is_file() {
        return read_pipe(&file, limit, timeout);
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a pipe or a terminal up to its end or `limit + 1` bytes, and fails if no data arrives for
/// the time `timeout`.
fn read_pipe(mut file: &File, limit: u64, timeout: Duration) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0; PIPE_READ_BYTES];
    let end = Instant::now() + timeout * PIPE_TIME_LIMIT_FACTOR;
    let mut deadline = Instant::now() + timeout;
    while bytes.len() as u64 <= limit {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the last wait is not a busy loop.
        let left = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        // A pipe that no process has opened for writing is neither readable nor at its end.
        let ready = match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], left) {
            Err(Errno::EINTR) => continue,
            ready => ready?,
        };
        if ready == 0 {
            let message =
                format!("the pipe has not ended, and provided no data for {} s", timeout.as_secs_f64());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => {
                bytes.extend_from_slice(&chunk[..n]);
                deadline = end.min(Instant::now() + timeout);
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(usize::try_from(limit).unwrap_or(usize::MAX).saturating_add(1));
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::{sys::stat::Mode, unistd::mkfifo};
    use std::{fs, io::Write, thread};

    const SHORT: Duration = Duration::from_millis(200);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn files_are_read_up_to_the_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        fs::write(&path, "12345").expect("a file");
        assert_eq!(read_input_file(&path, 5).expect("read"), b"12345");
        assert_eq!(read_input_file(&path, 3).expect("read"), b"1234");
        assert_eq!(read_input_file(Path::new("/dev/zero"), 9).expect("read").len(), 10);
        assert_eq!(read_input_file(Path::new("/dev/null"), 9).expect("read"), b"");
        read_input_file(dir.path(), 5).expect_err("a directory");
        read_input_file(&dir.path().join("absent"), 5).expect_err("absent");
    }

    #[test]
    fn a_pipe_is_read_to_its_end_and_never_waits_for_a_writer_forever() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pipe");
        mkfifo(&path, Mode::S_IRWXU).expect("a pipe");
        let error = read_with_timeout(&path, 10, SHORT).expect_err("no writer");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        // A writer that begins late, pauses and closes the pipe.
        let to = path.clone();
        let writer = thread::spawn(move || {
            thread::sleep(SHORT);
            let mut file = OpenOptions::new().write(true).open(to).expect("a reader");
            file.write_all(b"ab").expect("written");
            thread::sleep(SHORT);
            file.write_all(b"cd").expect("written");
        });
        assert_eq!(read_with_timeout(&path, 10, LONG).expect("read"), b"abcd");
        writer.join().expect("no panic");
        // A writer that keeps the pipe open.
        let to = path.clone();
        let writer = thread::spawn(move || {
            let mut file = OpenOptions::new().write(true).open(to).expect("a reader");
            file.write_all(&[b'x'; 100]).expect("written");
            file
        });
        assert_eq!(read_with_timeout(&path, 10, LONG).expect("read").len(), 11, "more than the limit");
        drop(writer.join().expect("no panic"));
    }
}
