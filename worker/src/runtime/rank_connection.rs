//! Connects the ranks of a job, which may be threads of one process, processes of one host, or
//! processes of several hosts.
use super::{network, session::AgentSession};
use crate::error::Result;
use comm::{
    Comm,
    shm::{ShmComm, ShmLimits, abort_group},
    thread_comm,
};
use diagnostic::{Diagnostic, codes};
use jobspec::env;
use protocol::control::WorkerInit;
use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

/// The size in bytes of the slot in shared memory through which a rank passes data to the other
/// ranks of its host. Larger messages are sent in several parts.
///
/// The size is small because the memory of each rank includes the staging memory of every rank.
pub(crate) const STAGING_BYTES: usize = 1 << 20;

/// Connects this rank to the other ranks of the job. The connecting and later collectives are
/// aborted if the agent requests it. `memory` is the memory that the ranks of this host share.
/// Collective: every rank must call it.
pub(super) fn connect_to_other_ranks(
    session: &AgentSession,
    init: &WorkerInit,
    memory: Option<OwnedFd>,
) -> Result<Arc<dyn Comm>> {
    let limits = ShmLimits { staging_bytes: STAGING_BYTES, ..Default::default() };
    if init.local_world < init.world {
        return network::connect_ranks_of_hosts(session, init, memory, limits);
    }
    let comm: Arc<dyn Comm> = match init.world {
        1 => Arc::new(thread_comm::create_thread_group(1).remove(0)),
        world => {
            let fd = memory.ok_or_else(|| {
                let message =
                    format!("{} is not set, so the other ranks cannot be reached", env::LAUNCH_SHM_FD);
                Diagnostic::error(codes::training::SHARED_MEMORY_MISSING, message)
                    .with_subject(env::LAUNCH_SHM_FD)
            })?;
            if let Ok(joining) = fd.try_clone() {
                // An error means that the memory cannot be mapped, which joining reports.
                session.add_abort_handler(move |reason| _ = abort_group(joining.as_fd(), reason));
            }
            Arc::new(ShmComm::join(fd, init.rank as usize, world as usize, limits)?)
        }
    };
    let aborted = comm.clone();
    session.add_abort_handler(move |reason| aborted.abort(reason));
    Ok(comm)
}
