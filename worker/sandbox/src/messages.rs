//! Encodes and decodes the messages between a sandbox process and its caller. A message is a header
//! with the length of the body, and the body. Numbers are little-endian. The sandbox process trusts
//! the caller. The caller checks each header before it reads the body.
use crate::{
    error::SandboxError,
    limits::{RequestLimits, SandboxSettings},
};
use std::time::Duration;

/// Size in bytes of the header of a request to a sandbox process.
pub(crate) const REQUEST_HEADER_BYTES: usize = 32;
/// Size in bytes of the header of a reply of a sandbox process.
pub(crate) const REPLY_HEADER_BYTES: usize = 16;
/// Size in bytes of the first message that a sandbox process receives: its settings (number of
/// threads and memory limit).
pub(crate) const SETTINGS_BYTES: usize = 16;
/// Limit on the length of a panic message in a reply of a sandbox process, in bytes.
pub(crate) const MAX_PANIC_BYTES: usize = 4096;
/// Maximum number of messages about the progress of one request that a sandbox process may send
/// before the reply. The caller rejects a reply after more reports as invalid.
const MAX_PROGRESS_REPORTS: u32 = 64;

/// The kinds of messages that a sandbox process sends to its caller: result, panic, too long
/// result, exceeded CPU time, or progress. The header of the reply has the number of the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyKind {
    /// The result of the request.
    Result = 0,
    /// The message of a panic.
    Panicked = 1,
    /// The result is longer than the limit. The body is its length.
    TooLong = 2,
    /// A part of the work needs more CPU time than its limit, and the process then ends. The body
    /// is the limit in seconds.
    OutOfCpuTime = 3,
    /// A progress report: the next step of the request begins. The body is the number of this step.
    Progress = 4,
}

impl ReplyKind {
    /// Returns the kind of message for the number `number` in the header of a reply, or `None` for
    /// an unknown number.
    fn from_number(number: u64) -> Option<Self> {
        let kinds = [
            ReplyKind::Result,
            ReplyKind::Panicked,
            ReplyKind::TooLong,
            ReplyKind::OutOfCpuTime,
            ReplyKind::Progress,
        ];
        kinds.into_iter().find(|kind| *kind as u64 == number)
    }
}

/// Returns the 64-bit number that is stored in little-endian order in the eight bytes of `bytes`
/// from index `at` on.
fn read_u64(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// Encodes numbers as little-endian bytes, one number after another.
fn encode_u64s<const N: usize, const BYTES: usize>(numbers: [u64; N]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

/// Encodes the settings (threads and memory) with which a sandbox process starts.
pub(crate) fn encode_settings(settings: &SandboxSettings) -> [u8; SETTINGS_BYTES] {
    encode_u64s([settings.threads.into(), settings.memory_bytes])
}

/// Decodes the settings (threads and memory) with which a sandbox process starts.
pub(crate) fn decode_settings(bytes: &[u8; SETTINGS_BYTES]) -> SandboxSettings {
    SandboxSettings { threads: read_u64(bytes, 0) as u32, memory_bytes: read_u64(bytes, 8) }
}

/// Encodes the header of a request to a sandbox process: the length of the body and the limits.
pub(crate) fn encode_request_header(length: usize, limits: &RequestLimits) -> [u8; REQUEST_HEADER_BYTES] {
    encode_u64s([length as u64, limits.cpu_seconds(), limits.memory_bytes, limits.reply_bytes])
}

/// Decodes the header of a request to a sandbox process: the length of the body, and the limits of
/// CPU time, memory and reply size.
pub(crate) fn decode_request_header(bytes: &[u8; REQUEST_HEADER_BYTES]) -> (usize, RequestLimits) {
    let limits = RequestLimits {
        cpu: Duration::from_secs(read_u64(bytes, 8)),
        memory_bytes: read_u64(bytes, 16),
        reply_bytes: read_u64(bytes, 24),
    };
    (read_u64(bytes, 0) as usize, limits)
}

/// Encodes the header of a reply of a sandbox process: its kind and the length of its body.
pub(crate) fn encode_reply_header(kind: ReplyKind, length: usize) -> [u8; REPLY_HEADER_BYTES] {
    encode_u64s([kind as u64, length as u64])
}

/// Incremental decoder of the messages from a sandbox process, to which their bytes are passed in
/// pieces of any size.
#[derive(Debug, Default)]
pub struct ReplyDecoder {
    header: Vec<u8>,
    /// Kind and length of the body that is being read.
    body: Option<(ReplyKind, usize)>,
    bytes: Vec<u8>,
    /// The number of the step that the sandbox process reported most recently for the current
    /// request, and the number of its reports.
    progress: (u64, u32),
}

impl ReplyDecoder {
    /// Returns the number of the step (such as tokenizing) that the sandbox process last reported
    /// for the current request, or 0 without a report.
    pub(crate) fn current_step(&self) -> u64 {
        self.progress.0
    }

    /// Returns the buffer to which received bytes must be appended, and how many bytes the current
    /// header or body still lacks.
    pub(crate) fn next_read_buffer(&mut self) -> (&mut Vec<u8>, usize) {
        match self.body {
            None => {
                let missing = REPLY_HEADER_BYTES - self.header.len();
                (&mut self.header, missing)
            }
            Some((_, length)) => {
                let missing = length - self.bytes.len();
                (&mut self.bytes, missing)
            }
        }
    }

    /// Returns the next reply of the sandbox process if all bytes of the reply have arrived;
    /// otherwise `None`. Fails if the reply is an error, is malformed, or is longer than
    /// `reply_bytes`. No memory is allocated for a rejected reply.
    pub(crate) fn take_reply(&mut self, reply_bytes: u64) -> Result<Option<Vec<u8>>, SandboxError> {
        if self.body.is_none() && self.header.len() == REPLY_HEADER_BYTES {
            self.body = Some(decode_reply_header(&self.header, reply_bytes)?);
        }
        let Some((kind, _)) = self.body.filter(|(_, length)| *length == self.bytes.len()) else {
            return Ok(None);
        };
        (self.body, self.header) = (None, Vec::new());
        let bytes = std::mem::take(&mut self.bytes);
        if kind == ReplyKind::Progress {
            self.progress = (read_u64(&bytes, 0), self.progress.1 + 1);
            let is_valid = self.progress.1 <= MAX_PROGRESS_REPORTS;
            return if is_valid { Ok(None) } else { Err(SandboxError::InvalidReply) };
        }
        self.progress = (0, 0);
        match kind {
            ReplyKind::Panicked => {
                Err(SandboxError::Panicked { message: String::from_utf8_lossy(&bytes).into_owned() })
            }
            ReplyKind::TooLong => {
                Err(SandboxError::ReplyTooLong { bytes: read_u64(&bytes, 0), limit_bytes: reply_bytes })
            }
            ReplyKind::OutOfCpuTime => Err(SandboxError::OutOfCpuTime { limit_s: read_u64(&bytes, 0) }),
            ReplyKind::Result | ReplyKind::Progress => Ok(Some(bytes)),
        }
    }
}

/// Decodes the header of a reply of a sandbox process: its kind and the length of its body. Fails
/// if the body is longer than its kind allows.
fn decode_reply_header(header: &[u8], reply_bytes: u64) -> Result<(ReplyKind, usize), SandboxError> {
    let (kind, length) = (ReplyKind::from_number(read_u64(header, 0)), read_u64(header, 8));
    let kind = kind.ok_or(SandboxError::InvalidReply)?;
    let is_valid = match kind {
        ReplyKind::Result => length <= reply_bytes,
        ReplyKind::Panicked => length <= MAX_PANIC_BYTES as u64,
        ReplyKind::TooLong | ReplyKind::OutOfCpuTime | ReplyKind::Progress => length == 8,
    };
    if is_valid { Ok((kind, length as usize)) } else { Err(SandboxError::InvalidReply) }
}

/// Decodes bytes as replies of a sandbox process, for fuzz targets and tests with untrusted input.
/// Returns the number of results. Fails at the first reply that is an error.
pub fn decode_replies(mut bytes: &[u8], reply_bytes: u64) -> Result<usize, SandboxError> {
    let (mut decoder, mut results) = (ReplyDecoder::default(), 0);
    while !bytes.is_empty() {
        let (buffer, missing) = decoder.next_read_buffer();
        let (taken, rest) = bytes.split_at(missing.min(bytes.len()));
        buffer.extend_from_slice(taken);
        bytes = rest;
        while decoder.take_reply(reply_bytes)?.is_some() {
            results += 1;
        }
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_settings_round_trip() {
        let settings = SandboxSettings { threads: 7, memory_bytes: 1 << 40 };
        assert_eq!(decode_settings(&encode_settings(&settings)), settings);
        let limits = RequestLimits { cpu: Duration::from_millis(1500), memory_bytes: 3, reply_bytes: 4 };
        let rounded = RequestLimits { cpu: Duration::from_secs(2), ..limits };
        assert_eq!(decode_request_header(&encode_request_header(9, &limits)), (9, rounded));
    }

    #[test]
    fn replies_are_checked_before_their_body_is_read() {
        let reply = |kind: u64, length: u64, body: &[u8]| {
            [&kind.to_le_bytes()[..], &length.to_le_bytes(), body].concat()
        };
        let two = [reply(0, 3, b"abc"), reply(0, 0, b"")].concat();
        assert_eq!(decode_replies(&two, 3).unwrap(), 2);
        for (bytes, limit_name) in [
            (reply(0, 4, b""), None),
            (reply(0, u64::MAX, b""), None),
            (reply(5, 0, b""), None),
            (reply(u64::MAX, 1, b"x"), None),
            (reply(1, MAX_PANIC_BYTES as u64 + 1, b""), None),
            (reply(2, 7, b"1234567"), None),
            (reply(2, 8, &900u64.to_le_bytes()), Some("result_limit_bytes")),
            (reply(3, 0, b""), None),
            (reply(3, 8, &7u64.to_le_bytes()), Some("cpu_limit_s")),
            (reply(4, 9, b"123456789"), None),
            (reply(4, 8, b"12345678").repeat(MAX_PROGRESS_REPORTS as usize + 1), None),
        ] {
            let error = decode_replies(&bytes, 3).expect_err("rejected");
            assert_eq!(error.exceeded_limit().map(|(name, _)| name), limit_name, "{error}");
        }
        let panicked = decode_replies(&reply(1, 4, b"a\xffbc"), 3).expect_err("an error");
        assert!(matches!(panicked, SandboxError::Panicked { message } if message == "a\u{fffd}bc"));
        assert_eq!(decode_replies(&reply(0, 3, b"ab"), 3).unwrap(), 0, "the reply is incomplete");
        let step = reply(4, 8, &2u64.to_le_bytes());
        let with_steps = [&step[..], &step, &reply(0, 1, b"a"), &step].concat();
        assert_eq!(decode_replies(&with_steps, 3).unwrap(), 1, "a step is no result");
    }

    #[test]
    fn the_last_step_of_a_request_is_kept_until_its_result() {
        let mut decoder = ReplyDecoder::default();
        let mut feed = |kind: u64, body: &[u8]| {
            for part in [&encode_u64s::<2, 16>([kind, body.len() as u64])[..], body] {
                decoder.next_read_buffer().0.extend_from_slice(part);
                _ = decoder.take_reply(8).unwrap();
            }
            decoder.current_step()
        };
        assert_eq!(feed(4, &3u64.to_le_bytes()), 3);
        assert_eq!(feed(4, &4u64.to_le_bytes()), 4);
        assert_eq!(feed(0, b"x"), 0);
    }
}
