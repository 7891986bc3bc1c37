//! Exchanges values or errors between all ranks, so that either every rank gets the values of all
//! ranks, or every rank fails.
use crate::{
    error::{Error, Result},
    zero::collective_queue::CollectiveQueue,
};
use comm::Comm;
use diagnostic::{Diagnostic, codes};
use protocol::message_pack;
use serde::{Serialize, de::DeserializeOwned};

/// The largest number of bytes that a broadcast to all ranks ([`broadcast_bytes`]) sends in one
/// message. Longer data are sent in several messages.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// The largest number of bytes that can be broadcast to all ranks with [`broadcast_bytes`]. More
/// bytes are an error.
const MAX_BROADCAST_BYTES: u64 = 256 << 20;

/// Sends this rank's value `mine` to all ranks, and returns the values of all ranks in rank order.
/// Collective: every rank must call it.
///
/// # Errors
///
/// Returns this rank's own error unchanged. The error of another rank is marked as aborted, so that
/// only the rank where it happened reports it as a root cause.
pub fn all_gather_values<T: Serialize + DeserializeOwned>(
    queue: &CollectiveQueue,
    mine: Result<T>,
) -> Result<Vec<T>> {
    let results = all_gather_results(queue, mine.as_ref().map_err(Clone::clone))?;
    mine?;
    values_or_abort(results)
}

/// Returns this rank's value `mine` if all ranks have a value; fails on every rank if any rank has
/// an error. Errors are handled as in [`all_gather_values`]. Collective: every rank must call it.
pub fn require_on_all_ranks<T>(queue: &CollectiveQueue, mine: Result<T>) -> Result<T> {
    all_gather_values(queue, mine.as_ref().map(|_| ()).map_err(Clone::clone))?;
    mine
}

/// Sends this rank's value to all ranks and returns the values of all ranks in rank order, directly
/// through the communicator `comm`. Used before a [`CollectiveQueue`] exists.
///
/// Errors are handled as in [`all_gather_values`]. Collective: every rank must call it.
pub fn exchange_values_without_queue<T: Serialize + DeserializeOwned>(
    comm: &dyn Comm,
    mine: Result<T>,
) -> Result<Vec<T>> {
    let reports = comm.all_gather_bytes(&encode_rank_result(mine.as_ref().map_err(Clone::clone))?)?;
    mine?;
    values_or_abort(decode_rank_results(&reports)?)
}

/// Returns the values of all ranks if every result is a value; otherwise returns the error of the
/// lowest failed rank, marked as another rank's error.
pub fn values_or_abort<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    results.into_iter().enumerate().map(|(rank, value)| value.map_err(|e| e.into_peer_error(rank))).collect()
}

/// Sends this rank's value or error to all ranks, and returns the value or error of each rank in
/// rank order. Fails only if the exchange fails.
///
/// Collective: every rank must call it.
pub fn all_gather_results<T: Serialize + DeserializeOwned>(
    queue: &CollectiveQueue,
    mine: Result<&T>,
) -> Result<Vec<Result<T>>> {
    let bytes = encode_rank_result(mine)?;
    decode_rank_results(&queue.run_and_wait(move |comm| comm.all_gather_bytes(&bytes))?)
}

/// Sends this rank's error, if any, to all ranks, and returns on every rank the error of the lowest
/// failed rank, if any.
///
/// Collective: every rank must call it.
pub fn exchange_first_error(queue: &CollectiveQueue, mine: Option<Error>) -> Result<Option<Error>> {
    Ok(all_gather_values(queue, Ok(mine))?.into_iter().flatten().next())
}

/// Returns on every rank whether the flag `mine` is true on any rank. Collective: every rank must
/// call it.
pub fn is_any_true(queue: &CollectiveQueue, mine: bool) -> Result<bool> {
    let gathered = queue.run_and_wait(move |comm| comm.all_gather_u64(&[u64::from(mine)]))?;
    Ok(gathered.iter().flatten().any(|flag| *flag != 0))
}

/// Encodes this rank's value or error as bytes, to be sent to the other ranks.
fn encode_rank_result<T: Serialize>(mine: Result<&T>) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(&mine).map_err(|e| {
        let message = "cannot encode a report to the other ranks";
        Diagnostic::error(codes::run::INTERNAL, message).with_cause(&e).into()
    })
}

/// Decodes the values or errors that all ranks have sent to this rank. Fails if the bytes of a rank
/// are not valid.
fn decode_rank_results<T: DeserializeOwned>(reports: &[Vec<u8>]) -> Result<Vec<Result<T>>> {
    reports.iter().enumerate().map(|(rank, report)| decode_rank_result(rank, report)).collect()
}

/// Decodes the value or error that `rank` has sent to this rank. Fails if the bytes are not valid.
fn decode_rank_result<T: DeserializeOwned>(rank: usize, report: &[u8]) -> Result<Result<T>> {
    message_pack::from_slice(report).map_err(|e| {
        let message = format!("cannot decode the report of rank {rank}");
        let diagnostic = Diagnostic::error(codes::training::PEER_REPORT_INVALID, message);
        diagnostic.with_field("rank", rank).with_cause(&e).into()
    })
}

/// Sends the bytes `mine` of rank `root` to every rank, and returns these bytes on every rank.
/// `mine` is ignored on other ranks than `root`. Collective: every rank must call it.
///
/// # Errors
///
/// Fails on every rank if `mine` is an error on `root`, or if `root` sends more than 256 MiB.
pub fn broadcast_bytes(queue: &CollectiveQueue, root: usize, mine: Result<Vec<u8>>) -> Result<Vec<u8>> {
    let is_root = queue.comm().rank() == root;
    let mine = if is_root { mine } else { Ok(Vec::new()) };
    let lengths = all_gather_values(queue, mine.as_ref().map(|b| b.len() as u64).map_err(Clone::clone))?;
    let mine = mine?;
    let length = lengths.get(root).copied().unwrap_or(0);
    if length > MAX_BROADCAST_BYTES {
        let message = format!("rank {root} sends {length} bytes, more than {MAX_BROADCAST_BYTES}");
        return Err(build_invalid_broadcast_error(root, message));
    }
    let (length, mut received) = (length as usize, Vec::new());
    while received.len() < length {
        let end = length.min(received.len() + MAX_MESSAGE_BYTES);
        let window = mine.get(received.len()..end).unwrap_or(&[]).to_vec();
        let windows = queue.run_and_wait(move |comm| comm.all_gather_bytes(&window))?;
        match windows.into_iter().nth(root) {
            Some(window) if !window.is_empty() => received.extend(window),
            _ => {
                let message = format!("rank {root} sent {} bytes of {length}", received.len());
                return Err(build_invalid_broadcast_error(root, message));
            }
        }
    }
    Ok(received)
}

/// Creates the error which reports that rank `rank` has broadcast too many bytes, or fewer bytes
/// than it announced.
fn build_invalid_broadcast_error(rank: usize, message: String) -> Error {
    Diagnostic::error(codes::training::PEER_REPORT_INVALID, message).with_field("rank", rank).into()
}
