//! Crate `comm`: communicators, with which the ranks of a job run collectives through threads,
//! shared memory, TCP or NCCL.
//!
//! Every rank calls the same collectives in the same order. Sums have one fixed order, so results
//! are bit-equal for any assignment of ranks to hosts. No call blocks forever: when the group is
//! aborted, every waiting call returns [`CommError::Aborted`]. Every collective is also a barrier:
//! it returns only after every rank has entered it.
//!
//! There are three transports between host memories:
//!
//! - [`thread_comm`]: the ranks are threads of one process. It serves jobs of one rank, and tests.
//! - [`shm`]: the ranks are processes of one host and share a memory segment.
//! - [`tcp`]: the ranks are on several hosts. TCP connects the hosts, and the ranks of each host
//!   share memory.
//!
//! Two more communicators accept buffers in GPU memory: [`staged`] copies them through host memory,
//! and [`nccl`] transfers them with NCCL. [`ObservedComm`] reports the calls of any communicator.
mod abort_reason;
mod call;
mod call_error;
mod collective_kind;
mod communicator;
mod error;
mod join_error;
mod limits;
mod link_delays;
mod message_text;
pub mod nccl;
mod nccl_error;
mod observed_comm;
mod shared_window;
pub mod shm;
pub mod staged;
pub mod tcp;
pub mod thread_comm;
mod tree_sum;
pub mod untrusted;

pub use abort_reason::AbortReason;
pub use call_error::{ArgumentError, CallMismatch, CallSummary, TransferUnit};
pub use collective_kind::CollectiveKind;
pub use communicator::{Comm, PartialSink};
pub use error::{CommError, Result};
pub use join_error::{ConnectFailure, ConnectFailureReason, GroupError, RejectReason, SharedMemoryError};
pub use limits::{MAX_GATHER_BYTES, MAX_WORLD_SIZE};
pub use link_delays::LinkDelays;
pub use observed_comm::{CallObserver, ObservedComm};
pub use shared_window::{SharedView, SharedWindow};
