//! Writes the weights of a run's last checkpoint as a Hugging Face directory when the run is done.
use super::session::AgentSession;
use crate::{
    checkpoint::{host_local::HostLocalCheckpoint, save::CheckpointSaver, storage_topology::StorageTopology},
    consensus::all_gather_values,
    error::{Result, to_unreadable_checkpoint_error, to_unwritable_checkpoint_error},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{Checkpoint, GatherOptions};
use protocol::event::Event;
use std::{ops::ControlFlow, path::Path, sync::Arc};

/// Writes the weights of the run's last checkpoint, on rank 0, as a Hugging Face directory named
/// `weights` in the checkpoint directory `root`. A stop request to rank 0 ends the gather early,
/// and leaves `weights` unchanged. Returns whether the gather is complete. Collective: every rank
/// must call it.
pub(super) fn gather_last_checkpoint_weights(
    session: &AgentSession,
    queue: &Arc<CollectiveQueue>,
    saver: &CheckpointSaver,
    root: &Path,
    layout: &StorageTopology,
) -> Result<bool> {
    let Some(path) = saver.last_checkpoint() else { return Ok(true) };
    let is_leader = queue.comm().rank() == 0;
    let gathered = match layout.is_shared() {
        true if is_leader => gather_shared_checkpoint_weights(session, path, root),
        true => Ok(true),
        false => {
            let opened = HostLocalCheckpoint::open(queue, layout, path, None)?;
            if is_leader {
                let written = write_weights_directory(
                    session,
                    &opened,
                    opened.local_checkpoint_view().run_facts().step,
                    root,
                );
                opened.end_serving()?;
                written
            } else {
                opened.serve_blocks_to_rank_zero()?;
                Ok(true)
            }
        }
    };
    Ok(all_gather_values(queue, gathered)?.into_iter().all(|is_complete| is_complete))
}

/// Writes the weights of the checkpoint `path`, whose shards this rank can all read, as a Hugging
/// Face directory named `weights` in `root`.
fn gather_shared_checkpoint_weights(session: &AgentSession, path: &Path, root: &Path) -> Result<bool> {
    let checkpoint = Checkpoint::open(path).map_err(to_unreadable_checkpoint_error)?;
    write_weights_directory(session, &checkpoint, checkpoint.run_facts().step, root)
}

/// Writes the weights of the checkpoint `source` as a Hugging Face directory named `weights` in
/// `root`, and reports this to the controller of the run. Returns false after a stop request.
fn write_weights_directory(
    session: &AgentSession,
    source: &dyn ckpt::TensorSource,
    step: u64,
    root: &Path,
) -> Result<bool> {
    let out = root.join("weights");
    // Adapters are small and keep their precision, so that training can resume from them.
    let dtype = source.adapter_config().is_none().then_some(ckpt::Dtype::BF16);
    let options = GatherOptions { dtype, force: true, ..GatherOptions::default() };
    let gathered = ckpt::gather_weights_until(source, &out, &options, |_, _| {
        match session.requests.is_stop_requested() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    let Some(report) = gathered.map_err(to_unwritable_checkpoint_error)? else { return Ok(false) };
    session.send_event(Event::Gather { step, path: out, bytes: report.bytes })?;
    Ok(true)
}
