//! Connects the ranks of a job, which may be threads of one process, processes of one host, or on
//! several hosts.
use super::{
    network,
    session::{AgentSession, take_inherited_descriptor},
};
use crate::error::Result;
use comm::{
    Comm, local,
    shm::{ShmComm, ShmLimits},
};
use diagnostic::{Diagnostic, codes};
use jobspec::env;
use protocol::control::WorkerInit;
use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
};

/// The size in bytes of a rank's staging slot in shared memory. Larger messages are sent in several
/// parts.
///
/// The size is small because the memory of each rank includes the staging memory of every rank.
pub(crate) const STAGING_BYTES: usize = 1 << 20;

/// Connects this rank to the other ranks of the job. From then on, collectives are aborted if the
/// agent requests it. Collective: every rank must call it.
pub(super) fn connect_to_other_ranks(
    session: &Arc<AgentSession>,
    read: UnixStream,
    init: &WorkerInit,
) -> Result<Arc<dyn Comm>> {
    let limits = ShmLimits { staging_bytes: STAGING_BYTES, ..Default::default() };
    if init.local_world < init.world {
        return network::connect_ranks_of_hosts(session, read, init, take_inherited_shared_memory()?, limits);
    }
    let comm: Arc<dyn Comm> = match init.world {
        1 => Arc::new(local::create_group(1).remove(0)),
        world => {
            let fd = take_inherited_shared_memory()?.ok_or_else(|| {
                let message =
                    format!("{} is not set, so the other ranks cannot be reached", env::LAUNCH_SHM_FD);
                Diagnostic::error(codes::training::SHARED_MEMORY_MISSING, message)
                    .with_subject(env::LAUNCH_SHM_FD)
            })?;
            Arc::new(ShmComm::join(fd, init.rank as usize, world as usize, limits)?)
        }
    };
    let aborted = comm.clone();
    session.start_threads(read, move |reason| aborted.abort(reason))?;
    Ok(comm)
}

/// Takes over the file descriptor of the shared memory that this process inherited, or returns
/// `None` if it inherited none.
fn take_inherited_shared_memory() -> Result<Option<OwnedFd>> {
    take_inherited_descriptor(env::LAUNCH_SHM_FD)
}
