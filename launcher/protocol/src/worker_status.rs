//! [`WorkerStatus`]: what a worker of the built-in training does, in a form that its agent reads
//! from shared memory even if the worker is stuck.
use std::borrow::Cow;

/// The size in bytes of one worker's status in the shared memory that the host's agent reads. The
/// status of the worker with local rank r begins at byte r × `STATUS_BYTES` of the shared memory.
pub const STATUS_BYTES: usize = 128;
/// The version number of the binary format in which workers write their status to the shared
/// memory.
const ENCODING_VERSION: u32 = 1;
/// The byte range, in an encoded worker status, of the name of the collective that the worker has
/// entered last.
const COLLECTIVE_BYTE_RANGE: std::ops::Range<usize> = 32..64;
/// The bytes of an encoded worker status that contain the worker's task, that is, what its main
/// thread does, such as `training`.
const TASK_BYTE_RANGE: std::ops::Range<usize> = 64..120;
/// The byte offset, in an encoded worker status, of the checksum of all earlier bytes.
const CHECKSUM_OFFSET: usize = 120;
/// The value that encodes an unknown number of completed collectives.
const UNKNOWN_COUNT: u64 = u64::MAX;

/// What a worker of the built-in training does: its step, its task, and how many collectives it has
/// entered and completed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerStatus {
    /// The number of the attempt.
    pub attempt: u32,
    /// The number of optimizer steps that are done.
    pub step: u64,
    /// The number of collectives that the worker has entered in this attempt.
    pub entered: u64,
    /// The number of collectives that the worker has completed in this attempt; `None` if the
    /// device runs them after the call has returned.
    pub completed: Option<u64>,
    /// The name of the collective that the worker has entered last; empty before the first one.
    pub collective: Cow<'static, str>,
    /// What the thread that trains does, such as `training`.
    pub task: Cow<'static, str>,
}

impl WorkerStatus {
    /// Encodes the status as bytes for the shared memory. Truncates long texts.
    pub fn encode(&self) -> [u8; STATUS_BYTES] {
        let mut bytes = [0; STATUS_BYTES];
        bytes[0..4].copy_from_slice(&ENCODING_VERSION.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.attempt.to_le_bytes());
        let numbers = [self.step, self.entered, self.completed.unwrap_or(UNKNOWN_COUNT)];
        for (field, number) in bytes[8..32].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        for (range, text) in [(COLLECTIVE_BYTE_RANGE, &self.collective), (TASK_BYTE_RANGE, &self.task)] {
            let end = text.floor_char_boundary(range.len());
            bytes[range.start..range.start + end].copy_from_slice(&text.as_bytes()[..end]);
        }
        let sum = u64::from(crc32c::crc32c(&bytes[..CHECKSUM_OFFSET]));
        bytes[CHECKSUM_OFFSET..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the status that a worker has written to the shared memory. Returns `None` if the
    /// worker has written none, or is just writing it.
    pub fn decode(bytes: &[u8; STATUS_BYTES]) -> Option<WorkerStatus> {
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(number)
        };
        let text = |range: std::ops::Range<usize>| {
            let text = String::from_utf8_lossy(&bytes[range]);
            Cow::Owned(text.trim_end_matches('\0').to_owned())
        };
        let (version, attempt) = (number(0) as u32, (number(0) >> 32) as u32);
        let is_valid = version == ENCODING_VERSION
            && number(CHECKSUM_OFFSET) == u64::from(crc32c::crc32c(&bytes[..CHECKSUM_OFFSET]));
        is_valid.then(|| WorkerStatus {
            attempt,
            step: number(8),
            entered: number(16),
            completed: Some(number(24)).filter(|completed| *completed != UNKNOWN_COUNT),
            collective: text(COLLECTIVE_BYTE_RANGE),
            task: text(TASK_BYTE_RANGE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_survives_encoding() {
        let status = WorkerStatus {
            attempt: 3,
            step: 1 << 40,
            entered: 7,
            completed: Some(6),
            collective: "reduce_scatter_ordered".into(),
            task: "training".into(),
        };
        assert_eq!(WorkerStatus::decode(&status.encode()), Some(status.clone()));
        let unknown = WorkerStatus { completed: None, task: "ä".repeat(100).into(), ..status };
        let decoded = WorkerStatus::decode(&unknown.encode()).expect("valid");
        assert_eq!((decoded.completed, &*decoded.task), (None, "ä".repeat(28).as_str()));
    }

    #[test]
    fn unwritten_and_incomplete_bytes_are_no_status() {
        assert_eq!(WorkerStatus::decode(&[0; STATUS_BYTES]), None);
        let mut bytes = WorkerStatus { entered: 5, ..WorkerStatus::default() }.encode();
        for index in 0..STATUS_BYTES {
            bytes[index] ^= 1;
            assert_eq!(WorkerStatus::decode(&bytes), None, "byte {index}");
            bytes[index] ^= 1;
        }
    }
}
