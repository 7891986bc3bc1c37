//! [`ChannelLineReader`]: splits the output of a remote command into lines.
use super::ssh_session::SshChannel;
use std::io::{self, Read};

/// The largest number of bytes that a line of a remote command's output may have. A longer line is
/// returned in pieces.
pub(super) const MAX_LINE_BYTES: usize = 256 << 10;

/// Splits the output of a remote command, which arrives on an SSH channel, into lines, and buffers
/// bytes that were not returned yet.
pub(super) struct ChannelLineReader {
    pub(super) channel: SshChannel,
    /// The bytes that were received and not returned yet.
    pub(super) unread: Vec<u8>,
}

impl ChannelLineReader {
    /// Returns the next line of the remote command's output including the line end, or the last
    /// line without one at the end of the output. A line of more than [`MAX_LINE_BYTES`] is
    /// returned by several calls, piece by piece. Returns `None` at the end of the stream. Blocks.
    pub(super) fn read_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.unread.iter().position(|b| *b == b'\n') {
                return Ok(Some(self.unread.drain(..=end).collect()));
            }
            // The output has no line ends.
            if self.unread.len() > MAX_LINE_BYTES {
                return Ok(Some(std::mem::take(&mut self.unread)));
            }
            let mut chunk = [0; 4096];
            match self.channel.read(&mut chunk)? {
                0 if self.unread.is_empty() => return Ok(None),
                0 => return Ok(Some(std::mem::take(&mut self.unread))),
                n => self.unread.extend(&chunk[..n]),
            }
        }
    }
}
