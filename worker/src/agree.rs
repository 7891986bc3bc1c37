//! One outcome for all ranks: either every rank has every rank's value, or every rank knows that one failed.
use crate::{
    error::{Error, Result},
    zero::queue::Queue,
};
use contract::exit::WorkerExit;
use serde::{Serialize, de::DeserializeOwned};

/// Exchanges `mine`. An error of this rank is returned as it is; one of another rank as `Aborted`, so that the rank that
/// has it reports it.
pub fn agree<T: Serialize + DeserializeOwned>(queue: &Queue, mine: Result<T>) -> Result<Vec<T>> {
    let all = exchange(queue, mine.as_ref().map_err(Clone::clone))?;
    mine?;
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
