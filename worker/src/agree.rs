//! One outcome for all ranks: either every rank has every rank's value, or every rank knows that one failed.
use crate::{
    error::{Error, Result},
    zero::queue::Queue,
};
use contract::exit::WorkerExit;
use serde::{Serialize, de::DeserializeOwned};

/// Bytes of one window of [`broadcast`].
const WINDOW: usize = 4 << 20;
/// The most bytes of one [`broadcast`].
const BROADCAST_MAX: u64 = 256 << 20;

/// Exchanges `mine`. An error of this rank is returned as it is; one of another rank as `Aborted`, so that the rank that
/// has it reports it.
pub fn agree<T: Serialize + DeserializeOwned>(queue: &Queue, mine: Result<T>) -> Result<Vec<T>> {
    let all = exchange(queue, mine.as_ref().map_err(Clone::clone))?;
    mine?;
    settle(all)
}

/// Every rank's value, or the first rank's error as `Aborted`.
pub fn settle<T>(all: Vec<Result<T>>) -> Result<Vec<T>> {
    let others = all.into_iter().enumerate().map(|(rank, r)| {
        r.map_err(|e| Error { exit: WorkerExit::Aborted, message: format!("rank {rank}: {}", e.message) })
    });
    others.collect()
}

/// Every rank's value or error, by rank.
pub fn exchange<T: Serialize + DeserializeOwned>(queue: &Queue, mine: Result<&T>) -> Result<Vec<Result<T>>> {
    let mine = mine.map_err(|e| (e.exit, e.message));
    let bytes = rmp_serde::to_vec_named(&mine).map_err(|e| Error::failed(format!("report: {e}")))?;
    let all = queue.run(move |c| c.all_gather_bytes(&bytes))?;
    all.iter()
        .map(|b| {
            let r: std::result::Result<T, (WorkerExit, String)> = rmp_serde::from_slice(b)
                .map_err(|e| Error::failed(format!("unreadable report of a rank: {e}")))?;
            Ok(r.map_err(|(exit, message)| Error { exit, message }))
        })
        .collect()
}

/// Rank `root`'s bytes on every rank, sent in windows. `mine` is looked at on `root` alone.
pub fn broadcast(queue: &Queue, root: usize, mine: Result<Vec<u8>>) -> Result<Vec<u8>> {
    let is_root = queue.comm().rank() == root;
    let mine = if is_root { mine } else { Ok(Vec::new()) };
    let lengths = agree(queue, mine.as_ref().map(|b| b.len() as u64).map_err(Clone::clone))?;
    let mine = mine?;
    let length = lengths.get(root).copied().unwrap_or(0);
    if length > BROADCAST_MAX {
        return Err(Error::failed(format!("rank {root} sends {length} bytes, more than {BROADCAST_MAX}")));
    }
    let (length, mut whole) = (length as usize, Vec::new());
    while whole.len() < length {
        let part = mine.get(whole.len()..length.min(whole.len() + WINDOW)).unwrap_or(&[]).to_vec();
        let all = queue.run(move |c| c.all_gather_bytes(&part))?;
        match all.into_iter().nth(root) {
            Some(part) if !part.is_empty() => whole.extend(part),
            _ => return Err(Error::failed(format!("rank {root} stopped sending"))),
        }
    }
    Ok(whole)
}
