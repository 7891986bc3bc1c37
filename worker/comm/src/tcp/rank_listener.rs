//! [`RankListener`]: the listening socket with which a rank joins a group whose ranks run on
//! several hosts. The rank binds its listener, connects to all peers, and gets its communicator.
use super::link_delay_meter::LinkDelayMeter;
use super::{
    communicator::{TcpCallState, TcpComm, TcpLimits},
    connection_setup::ConnectionSetup,
    handshake::{ConnectionKind, RankIdentity, SECRET_BYTES},
    network_step::DataConnection,
    peer_monitor::{GroupHealth, PeerMonitor},
    topology::Topology,
};
use crate::{
    AbortReason, CommError, GroupError, Result,
    shm::{JobRankMap, ShmComm},
};
use device::Buf;
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

/// The largest number of incoming connections that the operating system queues until this rank
/// accepts them.
const LISTEN_BACKLOG: i32 = 1024;

/// Size in bytes of the secret key with which the ranks of a job authenticate each other.
pub const KEY_BYTES: usize = SECRET_BYTES;

/// One rank of a group: the host on which it runs, and the addresses at which peers connect to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// A number that identifies the host of the rank. Ranks of one host have equal numbers.
    pub host: usize,
    /// The addresses on which the rank listens, in the order in which peers try them.
    pub addresses: Vec<SocketAddr>,
}

/// Describes the group that a rank joins: the hosts and addresses of all ranks, the name of the
/// run, the number of the attempt, and the secret key. All ranks give the same description except
/// for `rank`.
#[derive(Clone)]
pub struct GroupSpec {
    /// The rank of this process.
    pub rank: usize,
    /// The members of the group, in the order of their ranks.
    pub members: Vec<GroupMember>,
    /// The name of the run. Ranks of different runs reject each other's connections.
    pub run: String,
    /// Number of the run's attempt. Ranks of different attempts reject each other's connections.
    pub attempt: u32,
    /// The secret key that only the ranks of this attempt know.
    pub key: [u8; KEY_BYTES],
}

/// The listening socket of one rank, to which peers connect when they join the group. The socket is
/// bound before its address is given to the peers, which connect to it during
/// [`RankListener::join`].
pub struct RankListener {
    listener: TcpListener,
}

/// Handle with which any thread of a rank can abort the group, even before the rank has joined the
/// group.
#[derive(Clone)]
pub struct AbortHandle(Arc<GroupHealth>);

impl AbortHandle {
    /// Creates a handle to abort the group of `world` ranks that rank `rank` will join with
    /// [`RankListener::join`]. Fails if the operating system has no file descriptors left.
    pub fn new(rank: usize, world: usize) -> Result<Self> {
        let health = GroupHealth::new(rank, world).map_err(CommError::wrap_io_error("create an eventfd"))?;
        Ok(AbortHandle(Arc::new(health)))
    }

    /// Aborts the group for which this handle was created, and passes the text `reason` to all of
    /// its ranks. Joining, and every waiting and later collective, then fails with
    /// [`CommError::Aborted`].
    pub fn abort(&self, reason: &str) {
        self.0.abort(&AbortReason::from_request(reason));
    }
}

impl RankListener {
    /// Binds the rank's listening socket to `address`, on a port that the operating system selects.
    pub fn bind(address: IpAddr) -> std::io::Result<Self> {
        Self::bind_to(SocketAddr::new(address, 0))
    }

    /// Binds the rank's listening socket to an address and a port. Port 0 stands for any port.
    pub fn bind_to(address: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        // The backlog of std is too short for a thousand peers that connect at once.
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(LISTEN_BACKLOG)?)?;
        Ok(RankListener { listener })
    }

    /// Returns the address and port at which peers can connect to the listener.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Joins the group that `group` describes, as rank `group.rank`, and returns the rank's
    /// communicator. Blocks until all peers have joined and authenticated themselves.
    ///
    /// `memory` is one memfd that the ranks of this host share (see [`ShmComm::join`]). It is
    /// required if the host has several ranks. Fails if a peer does not join within
    /// `limits.shm.join_timeout`.
    pub fn join(
        self,
        group: &GroupSpec,
        memory: Option<OwnedFd>,
        limits: TcpLimits,
        abort_handle: &AbortHandle,
    ) -> Result<TcpComm> {
        let hosts: Vec<usize> = group.members.iter().map(|m| m.host).collect();
        let rank = group.rank;
        let topology = Topology::new(rank, &hosts)?;
        let health = &abort_handle.0;
        self.connect_to_peers(group, memory, limits, topology, health).inspect_err(|error| {
            // Ranks that have joined already learn why this rank is missing.
            health.abort(&match error {
                CommError::Aborted(reason) => reason.clone(),
                error => {
                    let message = format!("rank {rank} cannot join the group: {error}");
                    AbortReason::RankFailed { rank, message }
                }
            });
        })
    }

    /// Connects this rank to the ranks of its host through shared memory and to all other ranks
    /// over TCP, and starts the monitor thread.
    fn connect_to_peers(
        self,
        group: &GroupSpec,
        memory: Option<OwnedFd>,
        limits: TcpLimits,
        topology: Topology,
        health: &Arc<GroupHealth>,
    ) -> Result<TcpComm> {
        let shm = join_shared_memory(&topology, memory, limits)?;
        if let Some(shm) = &shm {
            health.attach_shared_memory(shm.clone());
        }
        let id = RankIdentity {
            key: group.key,
            run: *blake3::hash(group.run.as_bytes()).as_bytes(),
            attempt: group.attempt,
            rank: group.rank as u32,
            world: topology.world_size() as u32,
        };
        let addresses: Vec<Vec<SocketAddr>> = group.members.iter().map(|m| m.addresses.clone()).collect();
        let setup = ConnectionSetup {
            id: &id,
            topology: &topology,
            addresses: &addresses,
            health,
            timeout: limits.shm.join_timeout,
            silence_timeout: limits.silence_timeout,
        };
        let streams = setup.connect_to_all_peers(&self.listener)?;
        drop(self.listener); // from here on other processes find the port closed
        let (data, control): (Vec<_>, Vec<_>) =
            streams.into_iter().partition(|(_, kind, _)| *kind == ConnectionKind::Data);
        let mut connections: Vec<Option<DataConnection>> = (0..topology.world_size()).map(|_| None).collect();
        for (rank, _, stream) in data {
            connections[rank as usize] = Some(DataConnection::new(stream));
        }
        let control = control.into_iter().map(|(rank, _, stream)| (rank as usize, stream)).collect();
        let (silence_timeout, join_timeout) = (limits.silence_timeout, limits.shm.join_timeout);
        let monitor = PeerMonitor::new(health.clone(), control, silence_timeout, join_timeout)
            .map_err(CommError::wrap_io_error("set up the control connections"))?;
        let thread = std::thread::Builder::new()
            .name("comm-monitor".into())
            .spawn(|| monitor.run())
            .map_err(CommError::wrap_io_error("start the thread that monitors the peers"))?;
        let call_state = Mutex::new(TcpCallState {
            calls: 0,
            connections,
            link_clock: LinkDelayMeter::default(),
            scratch: Buf::zeroed(0),
        });
        let health = health.clone();
        Ok(TcpComm { topology, health, shm, limits, call_state, monitor: Some(thread) })
    }
}

/// Joins the group of this host's ranks, which communicate through shared memory. Returns `None` if
/// the host has only this rank.
fn join_shared_memory(
    topology: &Topology,
    memory: Option<OwnedFd>,
    limits: TcpLimits,
) -> Result<Option<Arc<ShmComm>>> {
    let (world, local_ranks) = (topology.world_size(), topology.local_ranks().to_vec());
    if local_ranks.len() == 1 {
        return Ok(None);
    }
    let Some(memory) = memory else {
        return Err(GroupError::NoSharedMemory { rank: topology.rank, world, local_ranks }.into());
    };
    let job_ranks = JobRankMap { ranks: local_ranks, world };
    let shm = ShmComm::join_host_group(memory, topology.local_rank(), limits.shm, job_ranks)?;
    Ok(Some(Arc::new(shm)))
}
