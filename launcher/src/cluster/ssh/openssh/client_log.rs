//! [`ClientLogParser`]: parses the debug log of OpenSSH's client (`ssh`) to find out whether the
//! login has succeeded and which errors occurred.
//!
//! The client writes its log in English only, and runs with `LogLevel=DEBUG1` in the C locale.
use std::collections::VecDeque;

/// The largest number of recent messages of OpenSSH's client that are kept for error messages of
/// launch.
const MAX_MESSAGES: usize = 24;
/// The length, in bytes, to which each line in the log of OpenSSH's client is truncated. The rest
/// of a longer line is ignored.
const MAX_LINE_BYTES: usize = 1 << 10;

/// The beginnings of informational lines in the log of OpenSSH's client that are no error messages.
const IRRELEVANT_LINE_PREFIXES: [&str; 7] = [
    "OpenSSH_",
    "Authenticated to ",
    "Transferred: ",
    "Bytes per second: ",
    "Warning: Permanently added ",
    "@@@@",
    "Pseudo-terminal will not be allocated",
];

/// A parser for the log of OpenSSH's client, which also stores the results: login state, host key,
/// exit of the remote command, and messages.
#[derive(Debug, Default)]
pub(super) struct ClientLogParser {
    /// The beginning of a line whose end has not arrived.
    unfinished: Vec<u8>,
    /// Whether the user is logged in, or an existing connection is shared.
    pub(super) is_logged_in: bool,
    /// Whether the host has reported the exit code of the remote command.
    pub(super) has_exit_code: bool,
    /// Whether the host has reported that a signal ended the remote command.
    pub(super) has_exit_signal: bool,
    /// The type and the fingerprint of the key that the host presents.
    pub(super) host_key: Option<(String, String)>,
    /// The last lines that report no debug messages.
    messages: VecDeque<String>,
}

impl ClientLogParser {
    /// Parses the next bytes of the debug log of OpenSSH's client, and stores what each complete
    /// line reports in this parser.
    pub(super) fn parse_chunk(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' => {
                    let line = std::mem::take(&mut self.unfinished);
                    self.parse_line(String::from_utf8_lossy(&line).trim());
                }
                byte if self.unfinished.len() < MAX_LINE_BYTES => self.unfinished.push(*byte),
                _ => {}
            }
        }
    }

    /// Parses one line of the debug log of OpenSSH's client, and stores the login, host key, exit
    /// status or message in this parser.
    fn parse_line(&mut self, line: &str) {
        if line.starts_with("Authenticated to ") {
            self.is_logged_in = true;
        }
        if let Some(debug) = line.strip_prefix("debug1: ") {
            self.is_logged_in |= debug.starts_with("mux_client_request_session: ")
                || debug.starts_with("Authentication succeeded")
                || debug.starts_with("Entering interactive session");
            self.has_exit_code |= debug.contains("rtype exit-status");
            self.has_exit_signal |= debug.contains("rtype exit-signal");
            if let Some(key) = debug.strip_prefix("Server host key: ")
                && let [key_type, fingerprint, ..] = key.split(' ').collect::<Vec<_>>()[..]
            {
                self.host_key = Some((key_type.to_owned(), fingerprint.to_owned()));
            }
            return;
        }
        let is_debug = line.starts_with("debug");
        if line.is_empty() || is_debug || IRRELEVANT_LINE_PREFIXES.iter().any(|p| line.starts_with(p)) {
            return;
        }
        if self.messages.len() == MAX_MESSAGES {
            self.messages.pop_front();
        }
        self.messages.push_back(line.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect());
    }

    /// Returns the last messages in the log of OpenSSH's client, except debug messages, oldest
    /// first.
    pub(super) fn messages(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_and_messages_are_read_from_the_log() {
        let mut log = ClientLogParser::default();
        log.parse_chunk(b"OpenSSH_9.2p1 Debian-2, OpenSSL 3.0.19\r\ndebug1: Connecting to h0\r\n");
        log.parse_chunk(b"debug1: Server host key: ssh-ed25519 SHA256:abc\r\ndebug1: Au");
        assert!(!log.is_logged_in);
        assert_eq!(log.host_key, Some(("ssh-ed25519".to_owned(), "SHA256:abc".to_owned())));
        log.parse_chunk(b"thentication succeeded (publickey).\r\nsome \x1b problem\r\n");
        assert!(log.is_logged_in && !log.has_exit_code);
        log.parse_chunk(b"debug1: client_input_channel_req: channel 0 rtype exit-status reply 0\r\n");
        log.parse_chunk(b"debug1: client_input_channel_req: channel 0 rtype exit-signal reply 0\r\n");
        assert!(log.has_exit_code && log.has_exit_signal);
        assert_eq!(log.messages().collect::<Vec<_>>(), ["some \u{fffd} problem"]);
    }

    #[test]
    fn a_log_of_any_length_needs_bounded_memory() {
        let mut log = ClientLogParser::default();
        for _ in 0..100 {
            log.parse_chunk(&[b'x'; 5000]);
            log.parse_chunk(b"\n");
        }
        assert_eq!(log.messages().count(), MAX_MESSAGES);
        assert!(log.messages().all(|line| line.len() == MAX_LINE_BYTES));
    }
}
