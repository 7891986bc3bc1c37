//! Writes the weights of a run's last checkpoint as a Hugging Face directory when the run is done.
use super::session::AgentSession;
use crate::{
    checkpoint::{host_local::HostLocalCheckpoint, save::CheckpointSaver, storage_topology::StorageTopology},
    consensus::{all_gather_results, values_or_abort},
    error::{Result, to_unreadable_checkpoint_error, to_unwritable_checkpoint_error},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{Checkpoint, GatherOptions};
use protocol::event::Event;
use std::{path::Path, sync::Arc};

/// Writes the weights of the last checkpoint to `weights` below `root`, on rank 0. Collective:
/// every rank must call it.
pub(super) fn gather_last_checkpoint_weights(
    session: &AgentSession,
    queue: &Arc<CollectiveQueue>,
    saver: &CheckpointSaver,
    root: &Path,
    layout: &StorageTopology,
) -> Result<()> {
    let Some(path) = saver.last_checkpoint() else { return Ok(()) };
    let result = match layout.is_shared() {
        true if queue.comm().rank() == 0 => gather_shared_checkpoint(session, path, root),
        true => Ok(()),
        false => {
            let opened = HostLocalCheckpoint::open(queue, layout, path, None)?;
            if queue.comm().rank() != 0 {
                opened.serve_blocks()?;
                return all_gather_results(queue, Ok(&())).and_then(values_or_abort).map(drop);
            }
            let written = write_weights(session, &opened, opened.checkpoint().facts().step, root);
            opened.end_serving()?;
            written
        }
    };
    all_gather_results(queue, result.as_ref().map_err(Clone::clone).map(|()| &()))?;
    result
}

/// Writes the weights of the checkpoint at `path`, of which this rank can read every shard.
fn gather_shared_checkpoint(session: &AgentSession, path: &Path, root: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(path).map_err(to_unreadable_checkpoint_error)?;
    write_weights(session, &checkpoint, checkpoint.facts().step, root)
}

/// Writes the weights of `source` to `weights` below `root` and reports the event.
fn write_weights(
    session: &AgentSession,
    source: &dyn ckpt::TensorSource,
    step: u64,
    root: &Path,
) -> Result<()> {
    let out = root.join("weights");
    // Adapters are small and keep their precision, so that training can resume from them.
    let dtype = source.adapter_config().is_none().then_some(ckpt::Dtype::BF16);
    let options = GatherOptions { dtype, force: true, ..GatherOptions::default() };
    let report = ckpt::gather_weights(source, &out, &options, &mut |_, _| {})
        .map_err(to_unwritable_checkpoint_error)?;
    session.send_event(Event::Gather { step, path: out, bytes: report.bytes })
}
