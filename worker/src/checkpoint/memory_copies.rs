//! Copies of the training state in the memory of hosts (`checkpoint.memory`), from which a
//! restarted job resumes without reading from disk.
//!
//! Each rank copies its shard of a native checkpoint to the memory of its host, which the agent
//! holds open and which therefore survives the worker. Ranks on other hosts keep further copies,
//! which survive the loss of a host. Any number of ranks can resume from the copies, because they
//! are read as the shards of a native checkpoint.
mod host_map;
mod memory_copy_exchange;
mod recent_step_events;
mod state_selection;

pub use recent_step_events::RecentStepEvents;
pub(super) use state_selection::{CompleteState, StateSelection};

use crate::{
    checkpoint::{
        host_local::HostLocalCheckpoint,
        shard_write::{RangeLabel, copy_shard_to_memory_store},
        tensor_mapping::{OwnedRange, list_owned_ranges},
    },
    consensus::{all_gather_values, broadcast_bytes},
    error::{Result, to_unreadable_checkpoint_error, to_unwritable_checkpoint_error},
    train::running_trainer::RunningTrainer,
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{
    Hash, RunFacts,
    fault_points::pass_fault_point,
    memory_store::{
        MemoryCopyId, MemoryStore, StoredMemoryCopies, open_memory_checkpoint, parse_copy_description,
    },
};
use device::View;
use diagnostic::{Diagnostic, codes, quantity::format_bytes};
use host_map::RankHostMap;
use jobspec::MemoryCopySpec;
use memory_copy_exchange::exchange_memory_copies;
use protocol::message_pack;
use state_selection::{HostCopies, ReportedCopy, select_states};
use std::{
    collections::HashMap,
    fmt,
    fs::File,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// Access of one rank to the copies of the training state that all hosts of the job keep in their
/// memory.
pub struct HostMemoryCopies {
    store: MemoryStore,
    hosts: RankHostMap,
    spec: MemoryCopySpec,
    attempt: u32,
}

impl HostMemoryCopies {
    /// Opens `file`, the memory file in which this rank's host keeps copies of training states, and
    /// determines which ranks run on which host. `local_rank` is the number of the rank on its
    /// host. Collective: every rank must call it.
    pub fn connect(
        queue: &CollectiveQueue,
        file: File,
        spec: &MemoryCopySpec,
        (local_rank, attempt): (u32, u32),
    ) -> Result<Self> {
        let local_ranks = queue.run_and_wait(move |c| c.all_gather_u64(&[u64::from(local_rank)]))?;
        let hosts = RankHostMap::from_local_ranks(local_ranks.into_iter().flatten());
        Ok(HostMemoryCopies { store: MemoryStore::new(file), hosts, spec: spec.clone(), attempt })
    }

    /// Returns the number of the current attempt (an attempt is one start of all workers of the
    /// run).
    pub(super) fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Lists the training states that hosts keep in memory, divided into those with copies of every
    /// rank's shard and those that cannot be restored. Collective: every rank must call it.
    pub(super) fn list_states(&self, queue: &CollectiveQueue) -> Result<StateSelection> {
        let report = match self.hosts.is_leader(queue.comm().rank()) {
            true => self.list_local_copies().map(|copies| describe_host_copies(&copies)),
            false => Ok(HostCopies::default()),
        };
        let reports = all_gather_values(queue, report)?;
        let of_hosts: Vec<HostCopies> =
            self.hosts.list_host_leaders().filter_map(|leader| reports.get(leader).cloned()).collect();
        Ok(select_states(&of_hosts))
    }

    /// Lists the memory copies of ranks' training states that this host has, whichever host the
    /// ranks run on.
    fn list_local_copies(&self) -> Result<StoredMemoryCopies> {
        self.store.list_copies().map_err(to_unreadable_checkpoint_error)
    }

    /// Opens the copies of a training state, which hosts keep in memory, as one readable
    /// checkpoint. The inner error is damage of the copies; the outer error ends the job.
    /// Collective: every rank must call it.
    pub(super) fn open_state(
        &self,
        queue: &Arc<CollectiveQueue>,
        state: &CompleteState,
    ) -> Result<Result<HostLocalCheckpoint>> {
        let rank = queue.comm().rank();
        let mut local: HashMap<u32, _> = self
            .list_local_copies()?
            .complete
            .into_iter()
            .filter(|copy| copy.id == state.id && state.find_copy_hash(copy.rank) == Some(copy.hash))
            .map(|copy| (copy.rank, copy))
            .collect();
        let mut texts: HashMap<u32, Vec<u8>> = HashMap::new();
        for (host, leader) in self.hosts.list_host_leaders().enumerate() {
            let sent = state.list_ranks_described_by(host);
            if sent.is_empty() {
                continue;
            }
            let mine: Vec<(u32, &[u8])> = match rank == leader {
                true => sent.iter().filter_map(|r| Some((*r, &*local.get(r)?.description))).collect(),
                false => Vec::new(),
            };
            let encoded =
                rmp_serde::to_vec(&mine).map_err(|e| build_invalid_copy_list_error().with_cause(&e).into());
            let bytes = broadcast_bytes(queue, leader, encoded)?;
            let received: Vec<(u32, Vec<u8>)> = message_pack::from_slice(&bytes)
                .map_err(|e| build_invalid_copy_list_error().with_cause(&e))?;
            texts.extend(received);
        }
        let parse = |rank: u32| {
            let (text, hash) = (texts.get(&rank).map_or(&[][..], Vec::as_slice), state.find_copy_hash(rank));
            parse_copy_description(text, hash.unwrap_or(Hash([0; 32])))
        };
        let descriptions: ckpt::Result<Vec<_>> = (0..state.id.world).map(parse).collect();
        let shards = (0..state.id.world).map(|rank| local.remove(&rank).map(|copy| copy.shard)).collect();
        let opened = descriptions.and_then(|d| open_memory_checkpoint(&state.display_path(), d, shards));
        let holders = state.holders.iter().map(|hosts| self.hosts.list_ranks_on_hosts(hosts)).collect();
        Ok(opened
            .map(|checkpoint| HostLocalCheckpoint::from_memory_copies(queue, checkpoint, holders))
            .map_err(to_unreadable_checkpoint_error))
    }
}

impl CompleteState {
    /// Returns the text that replaces the checkpoint path in events and messages about a training
    /// state in memory, such as `memory/step-40`.
    pub(super) fn display_path(&self) -> PathBuf {
        PathBuf::from(format!("memory/step-{}", self.id.step))
    }
}

/// Converts the list of memory copies on this host to the message that this host sends to all other
/// hosts.
fn describe_host_copies(copies: &StoredMemoryCopies) -> HostCopies {
    let report = |copy: &ckpt::memory_store::StoredMemoryCopy| ReportedCopy {
        id: copy.id,
        rank: copy.rank,
        hash: copy.hash,
    };
    HostCopies { copies: copies.complete.iter().map(report).collect(), incomplete: copies.incomplete.clone() }
}

/// Builds the error which reports that a rank sent an invalid list of the training-state copies in
/// its host's memory.
fn build_invalid_copy_list_error() -> Diagnostic {
    let message = "the descriptions of the memory copies that ranks exchanged are not valid";
    Diagnostic::error(codes::training::PEER_REPORT_INVALID, message)
}

/// Sizes and durations of one copy of a rank's training state, to the memory of the rank's host and
/// to other hosts.
#[derive(Clone, Copy, Debug, Default)]
pub struct StateCopyCost {
    /// The size of this rank's copy in bytes.
    pub bytes: u64,
    /// The bytes that this rank sent to other hosts.
    pub sent_bytes: u64,
    /// The time of the copy to the memory of this host.
    pub copy_time: Duration,
    /// The time of the exchange with other hosts.
    pub exchange_time: Duration,
}

impl fmt::Display for StateCopyCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1000.0;
        let (bytes, copy) = (format_bytes(self.bytes), milliseconds(self.copy_time));
        write!(f, "copied the state of a rank to memory ({bytes}) in {copy:.1} ms")?;
        if self.sent_bytes > 0 {
            let (sent, time) = (format_bytes(self.sent_bytes), milliseconds(self.exchange_time));
            write!(f, ", and to other hosts ({sent}) in {time:.1} ms")?;
        }
        Ok(())
    }
}

/// Copier of this rank's training state to the memory of its host and of other hosts, at the steps
/// that the job configures.
pub struct MemoryCopier {
    memory: HostMemoryCopies,
    /// The number of the next copy, which selects its region.
    sequence: u64,
    /// The number of copies that this process has made.
    count: u64,
}

impl MemoryCopier {
    /// Creates the copier of this rank's training state; the first copy gets the number `sequence`,
    /// which is above the numbers of all existing copies.
    pub fn new(memory: HostMemoryCopies, sequence: u64) -> Self {
        MemoryCopier { memory, sequence, count: 0 }
    }

    /// Returns whether this process has already copied its training state to the memory of hosts.
    pub fn has_copied(&self) -> bool {
        self.count > 0
    }

    /// Returns whether the job requires a copy of the training state to the memory of hosts after
    /// step number `step`.
    pub fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.memory.spec.every)
    }

    /// Copies the training state of this rank to the memory of its host, and exchanges copies with
    /// the ranks of other hosts. Rank 0 passes the facts about the run. Collective: every rank must
    /// call it.
    ///
    /// Returns when the copies of all ranks are complete on all hosts, so that the step can be
    /// reported: a run that loses a worker or host resumes at this step. The copy overwrites the
    /// one before the last.
    ///
    /// # Errors
    ///
    /// Fails if a host has too little memory.
    pub fn copy_state(
        &mut self,
        running: &mut RunningTrainer,
        facts: Option<RunFacts>,
    ) -> Result<StateCopyCost> {
        let began = Instant::now();
        if self.count == 1 {
            self.free_unneeded_copies(running.trainer.engine.rank())?;
        }
        let bytes = self.copy_to_host(running, facts)?;
        let copied = Instant::now();
        let queue = running.trainer.engine.queue();
        let HostMemoryCopies { store, hosts, spec, .. } = &self.memory;
        let sent_bytes = exchange_memory_copies(queue, store, hosts, spec.copies as usize, self.sequence)?;
        queue.run_and_wait(|comm| comm.barrier())?;
        pass_fault_point("report_copied_step");
        self.sequence += 1;
        self.count += 1;
        Ok(StateCopyCost { bytes, sent_bytes, copy_time: copied - began, exchange_time: copied.elapsed() })
    }

    /// Copies the training state of this rank to the memory of its host. Returns the size of the
    /// copy in bytes.
    fn copy_to_host(&self, running: &mut RunningTrainer, facts: Option<RunFacts>) -> Result<u64> {
        let (engine, optimizer) = (&running.trainer.engine, &running.trainer.optimizer);
        let id = MemoryCopyId {
            step: running.position.step,
            sequence: self.sequence,
            attempt: self.memory.attempt,
            world: engine.world() as u32,
        };
        let guards: Vec<_> = (0..engine.shards.len()).map(|u| engine.lock_resident_params(u)).collect();
        let ranges: Vec<OwnedRange> = list_owned_ranges(engine, optimizer, &guards);
        let labels: Vec<RangeLabel> = ranges.iter().map(RangeLabel::new).collect();
        let values: Vec<View> = ranges.iter().map(|o| o.values).collect();
        let (ops, rank) = (running.trainer.ops.as_ref(), engine.rank() as u32);
        let written =
            copy_shard_to_memory_store(ops, &self.memory.store, (id, rank), facts, &labels, &values)?;
        (0..engine.shards.len()).for_each(|u| optimizer.evict_states(u));
        written.map_err(to_unwritable_checkpoint_error)
    }

    /// Frees the memory copies on this host that the host need not keep any more, for example
    /// because ranks now run on other hosts.
    ///
    /// May be called after all ranks have completed a copy in this attempt.
    fn free_unneeded_copies(&self, rank: usize) -> Result<()> {
        let HostMemoryCopies { store, hosts, spec, .. } = &self.memory;
        if !hosts.is_leader(rank) {
            return Ok(());
        }
        let kept = hosts.list_kept_ranks(hosts.host_of(rank), spec.copies as usize);
        let freed = store.free_copies_except(|rank| kept.contains(&(rank as usize)));
        freed.map_err(to_unwritable_checkpoint_error)
    }
}
