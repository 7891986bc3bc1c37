//! [`HostLocalCheckpoint`]: an open checkpoint whose shards are stored on several hosts. Blocks are
//! fetched from the hosts that store them, over the collectives, in rounds of bounded memory. Every
//! block is verified on arrival.
use super::fetch_schedule::{BlockTransfer, FetchSchedule};
use crate::{
    checkpoint::storage_topology::StorageTopology,
    consensus::{all_gather_results, all_gather_values, broadcast_bytes},
    error::{Error, Result, to_unreadable_checkpoint_error},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{
    BlockRange, BlockSink, Checkpoint, CkptError, Dtype, TensorInfo, TensorSource, TextFile, TrainingState,
    host_local,
};
use diagnostic::{Diagnostic, codes::training as codes};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// Size in bytes of a block of a checkpoint file, the smallest amount of data that a rank requests
/// from other ranks.
const BLOCK_BYTES: usize = 1 << 20;

/// An open checkpoint whose files are spread over several hosts; ranks request the data that their
/// host lacks from ranks of other hosts. Reading is collective.
pub(crate) struct HostLocalCheckpoint {
    queue: Arc<CollectiveQueue>,
    checkpoint: Checkpoint,
    /// For each file of the checkpoint, the ranks that can read the file.
    holders: Vec<Vec<usize>>,
    /// The first failure of a collective, which ends the job. An error of reading alone does not
    /// end the job.
    collective_error: Mutex<Option<Error>>,
}

impl HostLocalCheckpoint {
    /// Opens on all ranks a checkpoint whose files are stored on several hosts, and determines for
    /// each file the hosts that store the file. Collective: every rank must call it.
    ///
    /// `path` is the checkpoint's path on this host, even if this host has no part of the
    /// checkpoint. `hash` identifies the checkpoint if hosts have different ones.
    ///
    /// # Errors
    ///
    /// Fails on all ranks with exit [`protocol::exit::WorkerExit::Checkpoint`] if no host has the
    /// checkpoint, or if a shard is stored on a host that is not part of the job.
    pub(crate) fn open(
        queue: &Arc<CollectiveQueue>,
        layout: &StorageTopology,
        path: &Path,
        hash: Option<&str>,
    ) -> Result<Self> {
        let (rank, world) = (queue.comm().rank(), queue.comm().world_size());
        let found = if layout.is_directory_leader(rank) { host_local::read_manifest(path) } else { None };
        let hashes = all_gather_values(queue, Ok(found.as_ref().map(|(hash, _)| hash.clone())))?;
        let hash = hash.map(str::to_owned).or_else(|| hashes.iter().flatten().next().cloned());
        let has_manifest = |rank: usize| hash.is_some() && hashes.get(rank) == Some(&hash);
        let Some(source) = (0..world).find(|r| has_manifest(*r)) else {
            let message = format!("no host has a complete manifest of checkpoint {}", path.display());
            return Err(Diagnostic::error(codes::RESUME_MANIFEST_MISSING, message)
                .with_subject(path.display().to_string())
                .into());
        };
        let text = broadcast_bytes(queue, source, Ok(found.map(|(_, text)| text).unwrap_or_default()))?;
        let opened = Checkpoint::from_manifest(path, text, has_manifest(layout.find_directory_leader(rank)));
        let opened = opened.map_err(to_unreadable_checkpoint_error);
        let readable_files = opened.as_ref().map(|c| c.local_shard_flags().to_vec()).map_err(Clone::clone);
        let readable_files = all_gather_results(queue, readable_files.as_ref().map_err(Clone::clone))?;
        let readable_files: Vec<Vec<bool>> = readable_files.into_iter().collect::<Result<_>>()?;
        let checkpoint = opened?;
        let can_read =
            |rank: usize, file: usize| readable_files.get(rank).is_some_and(|f| f.get(file) == Some(&true));
        let holders: Vec<Vec<usize>> = (0..checkpoint.shard_sizes().count())
            .map(|file| (0..world).filter(|r| can_read(*r, file)).collect())
            .collect();
        if let Some(file) = holders.iter().position(Vec::is_empty) {
            return Err(build_unreachable_shard_error(&checkpoint, file, layout).into());
        }
        Ok(HostLocalCheckpoint {
            queue: queue.clone(),
            checkpoint,
            holders,
            collective_error: Mutex::default(),
        })
    }

    /// Creates one readable checkpoint from the shards that several hosts keep in their memory.
    /// `holders` lists, for each shard, the ranks that can read it.
    pub(crate) fn from_memory_copies(
        queue: &Arc<CollectiveQueue>,
        checkpoint: Checkpoint,
        holders: Vec<Vec<usize>>,
    ) -> Self {
        let collective_error = Mutex::default();
        HostLocalCheckpoint { queue: queue.clone(), checkpoint, holders, collective_error }
    }

    /// Returns the part of the checkpoint that this host can read without other hosts: the manifest
    /// (table of contents) and the local files.
    pub(crate) fn local_checkpoint_view(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

/// Message of one rank to all ranks before an exchange of checkpoint blocks: the blocks that the
/// rank needs, and whether rank 0 needs no more.
#[derive(Default, Serialize, Deserialize)]
struct FetchRequest {
    /// Whether rank 0 has read everything, so that the other ranks can stop sending blocks.
    end: bool,
    /// The blocks that this rank needs and that its host does not have.
    missing: Vec<BlockRange>,
}

impl HostLocalCheckpoint {
    /// Sends checkpoint blocks (1 MiB each) to rank 0 on request while only rank 0 reads the
    /// checkpoint; returns when rank 0 has called [`HostLocalCheckpoint::end_serving`]. Collective:
    /// every rank except rank 0 must call it.
    pub(crate) fn serve_blocks_to_rank_zero(&self) -> Result<()> {
        while !self.fetch_blocks(FetchRequest::default(), &mut |_, _, _| Ok(()))? {}
        self.fail_on_collective_error()
    }

    /// Notifies the other ranks that rank 0 needs no more checkpoint blocks, so that their calls of
    /// [`HostLocalCheckpoint::serve_blocks_to_rank_zero`] return. Rank 0 calls this function when
    /// it has read everything.
    pub(crate) fn end_serving(&self) -> Result<()> {
        self.fail_on_collective_error()?;
        self.fetch_blocks(FetchRequest { end: true, missing: Vec::new() }, &mut |_, _, _| Ok(())).map(drop)
    }

    /// Fails with the error of an earlier failed collective of this checkpoint, because ranks can
    /// exchange no blocks after such a failure.
    fn fail_on_collective_error(&self) -> Result<()> {
        let error = self.collective_error.lock().unwrap_or_else(PoisonError::into_inner);
        error.clone().map_or(Ok(()), Err)
    }

    /// Exchanges checkpoint blocks (1 MiB each) between all ranks, and passes the blocks that this
    /// rank requested to the callback `sink`. Returns whether rank 0 ended the serving of blocks.
    /// Collective: every rank must call it.
    ///
    /// An unreadable or invalid block does not interrupt the fetch of other blocks. The error is
    /// returned at the end.
    fn fetch_blocks(&self, request: FetchRequest, sink: &mut BlockSink<'_>) -> Result<bool> {
        let rank = self.queue.comm().rank();
        let requests = all_gather_values(&self.queue, Ok(request))?;
        if requests.first().is_some_and(|r| r.end) {
            return Ok(true);
        }
        let missing: Vec<Vec<BlockRange>> = requests.into_iter().map(|r| r.missing).collect();
        let is_needed = missing.iter().any(|m| !m.is_empty());
        let blocks = self.checkpoint.shard_block_counts();
        let mut schedule = FetchSchedule::new(missing, &self.holders, &blocks)?;
        let (mut read_error, mut sink_error) = (None, None);
        loop {
            let round = schedule.plan_next_round();
            if round.is_empty() {
                break;
            }
            let (send, send_counts) = self.read_outgoing_blocks(rank, &round, &mut read_error);
            let received = self.exchange_blocks(rank, &round, send, send_counts)?;
            let result =
                self.deliver_blocks(rank, &round, &received, &mut |file, block, bytes| match sink_error {
                    None => sink(file, block, bytes),
                    Some(_) => Ok(()),
                });
            sink_error = sink_error.or(result.err());
        }
        if is_needed {
            // The sender knows why a block is unreadable; a receiver only sees wrong bytes.
            let read_errors: Vec<Option<Diagnostic>> = all_gather_values(&self.queue, Ok(read_error))?;
            if let Some(error) = read_errors.into_iter().flatten().next() {
                return Err(error.into());
            }
        }
        sink_error.map_or(Ok(false), |e: CkptError| Err(to_unreadable_checkpoint_error(e)))
    }

    /// Reads from the checkpoint files of this host the blocks that this rank must send in one
    /// all-to-all exchange, ordered by receiver. Returns the data and the number of bytes for each
    /// receiver.
    ///
    /// Unreadable blocks are sent as zeros, and the first error is stored in `read_error`.
    fn read_outgoing_blocks(
        &self,
        rank: usize,
        round: &[BlockTransfer],
        read_error: &mut Option<Diagnostic>,
    ) -> (Vec<u8>, Vec<usize>) {
        let mine: Vec<&BlockTransfer> = round.iter().filter(|t| t.from == rank).collect();
        let mut counts = vec![0; self.queue.comm().world_size()];
        for t in &mine {
            counts[t.to] += count_block_bytes(&t.run);
        }
        let mut send = vec![0; counts.iter().sum()];
        let mut offset = 0;
        for t in mine {
            let out = &mut send[offset..offset + count_block_bytes(&t.run)];
            let first = t.run.blocks.start;
            let read = self.checkpoint.read_blocks(&t.run, &mut |_, block, bytes| {
                let start = (block - first) as usize * BLOCK_BYTES;
                out[start..start + bytes.len()].copy_from_slice(bytes);
                Ok(())
            });
            if let Err(e) = read {
                read_error.get_or_insert_with(|| build_unreadable_block_error(rank, e));
            }
            offset += count_block_bytes(&t.run);
        }
        (send, counts)
    }

    /// Exchanges checkpoint blocks in one all-to-all operation, as planned in `round`: sends the
    /// bytes `send`, and receives the blocks that this rank requested. Collective: every rank must
    /// call it.
    fn exchange_blocks(
        &self,
        rank: usize,
        round: &[BlockTransfer],
        send: Vec<u8>,
        send_counts: Vec<usize>,
    ) -> Result<ReceivedBlocks> {
        let mut counts = vec![0; self.queue.comm().world_size()];
        for t in round.iter().filter(|t| t.to == rank) {
            counts[t.from] += count_block_bytes(&t.run);
        }
        let mut bytes = vec![0; counts.iter().sum()];
        Ok(self.queue.run_and_wait(move |c| {
            c.all_to_all_bytes(&mut bytes, &counts, &send, &send_counts)?;
            Ok(ReceivedBlocks { bytes, counts })
        })?)
    }

    /// Passes the checkpoint blocks that this rank received in the exchange `round` to the callback
    /// `sink`, in the order in which they were requested.
    fn deliver_blocks(
        &self,
        rank: usize,
        round: &[BlockTransfer],
        received: &ReceivedBlocks,
        sink: &mut BlockSink<'_>,
    ) -> ckpt::Result<()> {
        let sizes: Vec<u64> = self.checkpoint.shard_sizes().map(|(_, bytes)| bytes).collect();
        let mut next: Vec<usize> =
            received.counts.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
        for t in round.iter().filter(|t| t.to == rank) {
            let offset = &mut next[t.from];
            for block in t.run.blocks.clone() {
                let bytes = &received.bytes[*offset..*offset + BLOCK_BYTES];
                *offset += BLOCK_BYTES;
                let remaining = sizes[t.run.file].saturating_sub(block * bytes.len() as u64);
                sink(t.run.file, block, &bytes[..(bytes.len() as u64).min(remaining) as usize])?;
            }
        }
        Ok(())
    }

    /// Converts an error of the block exchange between ranks to an error of reading the checkpoint,
    /// and stores it if a collective has failed. Records the first failure of a collective, because
    /// no further collective is possible.
    fn record_fetch_error(&self, e: Error) -> CkptError {
        let source = Box::new(e.diagnostic().clone());
        if e.to_worker_exit() != protocol::exit::WorkerExit::Checkpoint {
            *self.collective_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
        }
        CkptError::FetchFailed { path: self.checkpoint.path().to_owned(), source }
    }
}

/// The bytes of the checkpoint blocks (1 MiB each) that this rank received in one all-to-all
/// exchange, ordered by sender.
struct ReceivedBlocks {
    bytes: Vec<u8>,
    /// For each sender, the number of bytes received.
    counts: Vec<usize>,
}

/// Builds the error which reports that `rank` cannot read checkpoint blocks that other ranks have
/// requested from it.
fn build_unreadable_block_error(rank: usize, error: CkptError) -> Diagnostic {
    let message = format!("rank {rank} cannot read its blocks of the checkpoint");
    let diagnostic = Diagnostic::error(codes::RESUME_FETCH_FAILED, message);
    diagnostic.with_field("rank", rank).with_cause(&error)
}

/// Returns the number of bytes that are sent for `run`, a range of consecutive 1 MiB blocks of a
/// checkpoint file. The last block of a file is padded to a full block.
fn count_block_bytes(run: &BlockRange) -> usize {
    (run.blocks.end - run.blocks.start) as usize * BLOCK_BYTES
}

impl TensorSource for HostLocalCheckpoint {
    fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.checkpoint.tensors().collect()
    }

    /// Reads the requested ranges of the checkpoint's tensors, and verifies the hash of every
    /// block; blocks that this host lacks come from other hosts. Collective: every rank must call
    /// it or [`HostLocalCheckpoint::serve_blocks_to_rank_zero`].
    fn read_verified(&self, requests: &mut [ckpt::F32ReadRequest<'_>]) -> ckpt::Result<()> {
        let fetch = |missing: Vec<BlockRange>, sink: &mut BlockSink<'_>| {
            let request = FetchRequest { end: false, missing };
            self.fetch_blocks(request, sink).map(drop).map_err(|e| self.record_fetch_error(e))
        };
        let mut has_fetched = false;
        let read = self.checkpoint.read_verified_with_fetcher(requests, &mut |missing, sink| {
            has_fetched = true;
            fetch(missing, sink)
        });
        if !has_fetched {
            // The other ranks wait for this rank's part in the fetch, even if this rank failed. The
            // error of this rank is returned below.
            let _ = fetch(Vec::new(), &mut |_, _, _| Ok(()));
        }
        read
    }

    fn completed_steps(&self) -> Option<u64> {
        TensorSource::completed_steps(&self.checkpoint)
    }

    fn default_export_dtype(&self) -> Dtype {
        self.checkpoint.default_export_dtype()
    }

    fn training_state(&self) -> TrainingState {
        self.checkpoint.training_state()
    }

    fn trained_token_count(&self) -> Option<u64> {
        TensorSource::trained_token_count(&self.checkpoint)
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.checkpoint.hf_config()
    }

    fn adapter_config(&self) -> Option<&Value> {
        self.checkpoint.adapter_config()
    }

    fn exported_text_files(&self) -> &[TextFile] {
        self.checkpoint.exported_text_files()
    }
}

/// Builds the error which reports that a shard of the checkpoint is on no host of the job. `file`
/// is the number of the shard.
pub(crate) fn build_unreachable_shard_error(
    checkpoint: &Checkpoint,
    file: usize,
    layout: &StorageTopology,
) -> Diagnostic {
    let path = checkpoint.path().display();
    let name = checkpoint.shard_sizes().nth(file).map(|(name, _)| name).unwrap_or_default();
    let host = checkpoint.shard_host(file);
    let what = match host {
        Some(host) if layout.list_directory_hosts().iter().any(|h| h.id == host.id) => {
            format!("{name} is missing or damaged on host {host}")
        }
        Some(host) => format!("{name} is stored on host {host}, which is not part of this job"),
        None => format!("no host has {name}"),
    };
    let error = Diagnostic::error(codes::RESUME_SHARD_UNREACHABLE, format!("checkpoint {path}: {what}"))
        .with_subject(path.to_string())
        .with_field("file", name.to_string());
    match host {
        Some(host) => error.with_field("host", host.name.clone()),
        None => error,
    }
    .with_help(format!(
        "add the host, copy {name} into the checkpoint on any host, or use another checkpoint"
    ))
}
