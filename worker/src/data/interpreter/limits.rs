//! Limits of memory, time and size for the requests to the sandbox process.
use sandbox::RequestLimits;
use std::time::Duration;

/// Memory in bytes that any request to the sandbox process may use; long documents get additional
/// memory. The largest tokenizers in use, with 262,144 tokens, need 448 MiB. Together with the
/// other processes of a job, the sandbox process needs less than 1 GiB. The small tokenizers of the
/// tests reach a lower limit sooner.
const BASE_MEMORY_BYTES: u64 = if cfg!(test) { 256 << 20 } else { 832 << 20 };
/// Total size in bytes of the documents being interpreted at one time for which
/// [`BASE_MEMORY_BYTES`] bytes of memory suffice. More text needs additional memory.
const SHORT_DOCUMENTS_BYTES: u64 = 2 << 20;
/// Memory in bytes that a request may use, beyond [`BASE_MEMORY_BYTES`], for each byte of text
/// beyond [`SHORT_DOCUMENTS_BYTES`]. 170 bytes were measured with tokenizers for which texts are
/// not divided.
const MEMORY_PER_TEXT_BYTE: u64 = 192;
/// CPU time that the sandbox process may use for a single document, in addition to the time for its
/// size. The tests wait for a shorter time.
const BASE_CPU_TIME: Duration = Duration::from_millis(if cfg!(test) { 1500 } else { 3000 });
/// Additional CPU time that the sandbox process may use for each MiB of text. Tokenizing was
/// measured to take 1 s.
const CPU_TIME_PER_MIB: Duration = Duration::from_secs(8);
/// CPU time that the sandbox process may use per MiB of tokenizer files to load them, in addition
/// to a fixed time. Loading was measured to take 0.05 s per MiB.
const LOAD_CPU_TIME_PER_MIB: Duration = Duration::from_millis(150);
/// CPU time that the sandbox process may use for a request with several documents, in addition to
/// the time for the size of their text.
const CPU_TIME_PER_REQUEST: Duration = Duration::from_secs(6);
/// Largest size in bytes of a reply of the sandbox process that contains no tokens. Replies may
/// contain a chat template.
const BASE_REPLY_BYTES: u64 = 4 << 20;
/// Size in bytes that a reply of the sandbox process may have for each byte of text in the request,
/// in addition to a fixed size. A token has 4 bytes, and few tokenizers produce more tokens than
/// the text has bytes.
const REPLY_BYTES_PER_TEXT_BYTE: u64 = 16;
/// Largest total size in bytes of the documents' text in one request to the sandbox process. Only a
/// single document may be longer.
pub(crate) const MAX_REQUEST_TEXT_BYTES: usize = 2 << 20;
/// Size in bytes of the text of Parquet rows from which on no further row is read for the same
/// reply. A row that is longer than this size is interpreted alone, with limits for its size.
pub(crate) const MAX_ROWS_TEXT_BYTES: usize = 1 << 20;
/// Size in bytes of the text of a long Parquet row, per byte of the file, up to which the row gets
/// additional memory and CPU time. A few bytes of a compressed file may contain megabytes of text.
const MAX_TEXT_PER_FILE_BYTE: u64 = 4;
/// Largest number of records that the sandbox process returns in one reply to a request for rows of
/// a Parquet file.
pub(crate) const MAX_RECORDS_PER_REPLY: u64 = 1 << 16;

/// Returns the CPU time that the sandbox process may use for one document of `bytes` bytes.
pub(super) fn document_cpu_limit(bytes: usize) -> Duration {
    BASE_CPU_TIME + scale_cpu_time_to_bytes(CPU_TIME_PER_MIB, bytes as u64)
}

/// Returns the CPU time for an input of `bytes` bytes, given the CPU time `per_mib` for each MiB.
fn scale_cpu_time_to_bytes(per_mib: Duration, bytes: u64) -> Duration {
    Duration::from_nanos((per_mib.as_nanos() as u64).saturating_mul(bytes) >> 20)
}

/// Returns the limits of memory, CPU time and reply size of a request to the sandbox process to
/// load `bytes` bytes of input, such as a tokenizer's files.
pub(super) fn load_request_limits(bytes: usize) -> RequestLimits {
    RequestLimits {
        cpu: BASE_CPU_TIME + scale_cpu_time_to_bytes(LOAD_CPU_TIME_PER_MIB, bytes as u64),
        memory_bytes: BASE_MEMORY_BYTES,
        reply_bytes: BASE_REPLY_BYTES + REPLY_BYTES_PER_TEXT_BYTE * bytes as u64,
    }
}

/// Returns the limits of memory, CPU time and reply size for one request to the sandbox process
/// with documents of `sizes` bytes, tokenized by `threads` threads.
pub(crate) fn documents_request_limits(sizes: impl Iterator<Item = usize>, threads: usize) -> RequestLimits {
    let mut sizes: Vec<u64> = sizes.map(|size| size as u64).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let bytes: u64 = sizes.iter().sum();
    let at_once: u64 = sizes.iter().take(threads).sum();
    RequestLimits {
        cpu: documents_cpu_limit(sizes.len(), bytes),
        memory_bytes: BASE_MEMORY_BYTES
            + MEMORY_PER_TEXT_BYTE * at_once.saturating_sub(SHORT_DOCUMENTS_BYTES),
        reply_bytes: BASE_REPLY_BYTES + REPLY_BYTES_PER_TEXT_BYTE * bytes,
    }
}

/// Returns the CPU time that the sandbox process may use to render or to tokenize `count` documents
/// with together `bytes` bytes.
pub(super) fn documents_cpu_limit(count: usize, bytes: u64) -> Duration {
    let base = if count == 1 { BASE_CPU_TIME } else { CPU_TIME_PER_REQUEST };
    base + scale_cpu_time_to_bytes(CPU_TIME_PER_MIB, bytes)
}

/// Returns the CPU time that the sandbox process may use to open a Parquet file, or to decode the
/// rows of one reply. Decoding a reply was measured to take milliseconds.
pub(super) fn decoding_cpu_limit() -> Duration {
    BASE_CPU_TIME
}

/// Returns the limits of memory, CPU time and reply size for a request for Parquet rows of which
/// each has at most [`MAX_ROWS_TEXT_BYTES`] bytes of text, and all but one have together less.
pub(crate) fn rows_request_limits(threads: usize) -> RequestLimits {
    let limits = documents_request_limits([MAX_ROWS_TEXT_BYTES; 2].into_iter(), threads);
    RequestLimits { cpu: limits.cpu + decoding_cpu_limit(), ..limits }
}

/// Returns the limits of memory, CPU time and reply size for the request for one long row of
/// `row_bytes` bytes of a Parquet file of `file_bytes` bytes.
pub(crate) fn long_row_request_limits(row_bytes: usize, file_bytes: u64) -> RequestLimits {
    let allowed = file_bytes.saturating_mul(MAX_TEXT_PER_FILE_BYTE).max(MAX_ROWS_TEXT_BYTES as u64);
    let limits = |bytes: usize| documents_request_limits([bytes].into_iter(), 1);
    let reply_bytes = limits(row_bytes).reply_bytes;
    RequestLimits { reply_bytes, ..limits(row_bytes.min(usize::try_from(allowed).unwrap_or(usize::MAX))) }
}

/// Returns the largest memory limit in bytes of any request to the sandbox process if no document
/// has more than `longest_document` bytes.
pub(super) fn max_request_memory_bytes(longest_document: usize) -> u64 {
    BASE_MEMORY_BYTES + MEMORY_PER_TEXT_BYTE * (longest_document + MAX_REQUEST_TEXT_BYTES) as u64
}
