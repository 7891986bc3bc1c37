//! Redirects an agent's stdout and stderr into the tree of agents, through which the lines reach
//! the controller after the agent's SSH session has ended.
use nix::{fcntl::OFlag, unistd::pipe2};
use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    thread,
};
use tokio::sync::mpsc;

/// The number of bytes of the agent's own stdout and stderr that are read at once, and the length
/// at which long lines are split.
const BUFFER_BYTES: usize = 4 << 10;
/// The stack size, in bytes, of the thread that reads the agent's own stdout and stderr from a
/// pipe.
const STACK_BYTES: usize = 128 << 10;

/// Redirects stdout and stderr of this process into a pipe, and starts a thread that reads lines
/// from the pipe and sends them to the channel `lines`. The thread ends when the streams are
/// redirected again. Lines that do not fit into the channel are dropped, because no process may
/// wait for a terminal.
pub(super) fn redirect_output(lines: mpsc::Sender<String>) -> io::Result<()> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    nix::unistd::dup2_stdout(&writer)?;
    nix::unistd::dup2_stderr(&writer)?;
    let run = move || {
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, File::from(reader));
        let mut line = Vec::new();
        loop {
            let (count, is_end) = match reader.fill_buf() {
                Ok([]) | Err(_) => break,
                Ok(bytes) => {
                    let end = bytes.iter().position(|byte| *byte == b'\n');
                    let count = end.map_or(bytes.len(), |end| end + 1);
                    line.extend_from_slice(&bytes[..count]);
                    (count, end.is_some())
                }
            };
            reader.consume(count);
            if is_end || line.len() >= BUFFER_BYTES {
                _ = lines.try_send(String::from_utf8_lossy(&line).into_owned());
                line.clear();
            }
        }
    };
    thread::Builder::new().name("stderr".into()).stack_size(STACK_BYTES).spawn(run).map(drop)
}
