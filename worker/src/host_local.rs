//! Checkpoints of hosts that share no directory, as all ranks take them together: the commit in two phases, which
//! checkpoints there are, and reading one of which each host has a part.
mod fetch;
mod rounds;

use crate::{
    agree::{agree, broadcast, exchange, settle},
    error::{Error, Result},
    save::storage,
    storage::Layout,
    zero::queue::Queue,
};
use ckpt::{
    Checkpoint, Committed, Facts, ShardReport, Staging,
    host_local::{self, Listed, Prepared},
};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// A checkpoint that may be gone on from.
pub(crate) struct Candidate {
    /// Where it is on this host, or would be.
    pub(crate) path: PathBuf,
    /// Which one of that step; `None`: whichever is there.
    pub(crate) hash: Option<String>,
}

impl Candidate {
    /// What is at this path.
    pub(crate) fn at(path: PathBuf) -> Self {
        Candidate { path, hash: None }
    }
}

/// Completes a save on all hosts or on none; then each host prunes. Path here, and bytes of all shards. Collective.
pub(crate) fn commit(
    queue: &Queue,
    layout: &Layout,
    root: &Path,
    staging: Option<Staging>,
    facts: Facts,
    reports: Vec<ShardReport>,
    keep: u32,
) -> Result<(PathBuf, u64)> {
    let rank = queue.comm().rank();
    let (hosts, host_of) = (layout.hosts().to_vec(), layout.host_of());
    let own = host_of.get(rank).and_then(|h| hosts.get(*h)).map(|h| h.id.clone()).unwrap_or_default();
    let text = match rank {
        0 => host_local::manifest(facts, reports, hosts, &host_of).map_err(storage),
        _ => Ok(Vec::new()),
    };
    let text = broadcast(queue, 0, text)?;
    let prepared = staging.map(|s| Prepared::new(s, &own, text)).transpose().map_err(storage);
    // When this exchange breaks off others may know that all have prepared: then the prepared folder stays.
    let votes = exchange(queue, prepared.as_ref().map(|_| &()).map_err(Clone::clone))?;
    let prepared = match (prepared, settle(votes)) {
        (Err(e), _) => return Err(e),
        (Ok(mine), Err(e)) => {
            mine.into_iter().for_each(Prepared::discard);
            return Err(e);
        }
        (Ok(mine), Ok(_)) => mine,
    };
    let done = prepared.map(Prepared::complete).transpose().map_err(storage);
    let done: Vec<Option<(PathBuf, u64)>> =
        agree(queue, done.map(|d| d.map(|Committed { path, bytes }| (path, bytes))))?;
    let pruned = match layout.keeper(rank) == rank && keep > 0 {
        true => ckpt::prune(root, keep).map(drop).map_err(storage),
        false => Ok(()),
    };
    agree(queue, pruned)?;
    let mine = done.into_iter().nth(layout.keeper(rank)).flatten();
    mine.ok_or_else(|| Error::failed("the rank that keeps this directory committed nothing"))
}

/// Completes what a kill between the phases of a commit has left prepared, where another host has completed it. Collective.
pub(crate) fn recover(queue: &Queue, layout: &Layout, root: &Path) -> Result<()> {
    let rank = queue.comm().rank();
    let look = || Ok::<_, ckpt::CkptError>((host_local::listed(root)?, host_local::prepared(root)?));
    let mine = if layout.keeper(rank) == rank { look().map_err(storage) } else { Ok(Default::default()) };
    let all = agree(queue, mine.as_ref().map(|(listed, _)| listed.clone()).map_err(Clone::clone))?;
    let completed: HashSet<Listed> = all.into_iter().flatten().collect();
    let (_, left) = mine?;
    let done = left
        .into_iter()
        .filter(|(listed, _)| completed.contains(listed))
        .try_for_each(|(listed, path)| host_local::roll_forward(root, &path, listed.step));
    agree(queue, done.map_err(storage)).map(drop)
}

/// The checkpoints that any host has in its `root`, newest first. Collective.
pub(crate) fn list(queue: &Queue, layout: &Layout, root: &Path) -> Result<Vec<Candidate>> {
    let rank = queue.comm().rank();
    let mine = if layout.keeper(rank) == rank { host_local::listed(root) } else { Ok(Vec::new()) };
    let all = agree(queue, mine.map_err(|e| Error::checkpoint(e.to_string())))?;
    let mut seen = HashSet::new();
    let mut all: Vec<Listed> = all.into_iter().flatten().filter(|l| seen.insert(l.clone())).collect();
    // stable: of one step, the lowest rank's comes first
    all.sort_by_key(|l| std::cmp::Reverse(l.step));
    let candidate = |l: Listed| Candidate { path: host_local::place_of(root, l.step), hash: Some(l.hash) };
    Ok(all.into_iter().map(candidate).collect())
}

/// An open checkpoint of which each host has a part. Reading from it is collective.
pub(crate) struct Scattered {
    queue: Arc<Queue>,
    checkpoint: Checkpoint,
    /// Of each file, the ranks that can read it.
    holders: Vec<Vec<usize>>,
    /// A collective that failed, which no checkpoint's error can say.
    broken: Mutex<Option<Error>>,
}

impl Scattered {
    /// Opens it on all ranks. `path`: where it is on this host, or would be; `hash` says which one when hosts differ.
    ///
    /// # Errors
    /// [`contract::exit::WorkerExit::Checkpoint`], on all ranks alike, when it can't be used: no host has it, or a shard
    /// lies on a host that is not here, which is named.
    pub(crate) fn open(queue: &Arc<Queue>, layout: &Layout, path: &Path, hash: Option<&str>) -> Result<Self> {
        let (rank, world) = (queue.comm().rank(), queue.comm().world());
        let found = if layout.keeper(rank) == rank { host_local::text_of(path) } else { None };
        let hashes = agree(queue, Ok(found.as_ref().map(|(hash, _)| hash.clone())))?;
        let wanted = hash.map(str::to_owned).or_else(|| hashes.iter().flatten().next().cloned());
        let has = |rank: usize| wanted.is_some() && hashes.get(rank) == Some(&wanted);
        let Some(source) = (0..world).find(|r| has(*r)) else {
            let path = path.display();
            return Err(Error::checkpoint(format!("no host has a manifest at {path} that is whole")));
        };
        let text = broadcast(queue, source, Ok(found.map(|(_, text)| text).unwrap_or_default()))?;
        let opened = Checkpoint::from_manifest(path, text, has(layout.keeper(rank)));
        let here = opened.as_ref().map(|c| c.here().to_vec()).map_err(|e| Error::checkpoint(e.to_string()));
        let here = exchange(queue, here.as_ref().map_err(Clone::clone))?;
        let here: Vec<Vec<bool>> = here.into_iter().collect::<Result<_>>()?;
        let checkpoint = opened.map_err(|e| Error::checkpoint(e.to_string()))?;
        let files = checkpoint.files().count();
        let holds = |rank: usize, file: usize| here.get(rank).is_some_and(|h| h.get(file) == Some(&true));
        let holders: Vec<Vec<usize>> =
            (0..files).map(|file| (0..world).filter(|r| holds(*r, file)).collect()).collect();
        match holders.iter().position(Vec::is_empty) {
            Some(file) => Err(absent(&checkpoint, file, layout)),
            None => Ok(Scattered { queue: queue.clone(), checkpoint, holders, broken: Mutex::new(None) }),
        }
    }

    /// Its manifest, and what of it is here.
    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

/// No host that is here has this shard.
fn absent(checkpoint: &Checkpoint, file: usize, layout: &Layout) -> Error {
    let path = checkpoint.path().display();
    let name = checkpoint.files().nth(file).map(|(name, _)| name).unwrap_or_default();
    let hint = "use another checkpoint, or bring the file into that folder on any host";
    Error::checkpoint(match checkpoint.host_of(file) {
        Some(host) if layout.hosts().iter().any(|h| h.id == host.id) => {
            format!("checkpoint {path}: {name} is missing or damaged on host {host}; {hint}")
        }
        Some(host) => format!(
            "checkpoint {path}: {name} lies on host {host}, which is not part of this job; add that host, {hint}"
        ),
        None => format!("checkpoint {path}: no host has {name}; {hint}"),
    })
}
