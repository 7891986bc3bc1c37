//! The tree of agents, in which some agents connect to the controller and pass on the byte streams
//! of all others.
//!
//! A *link* connects two neighbours of the tree. It carries frames ([`TreeFrame`]) of many streams.
//! Each agent is the end of one stream, and passes the frames of the streams below it on. A stream
//! survives the end of a link: both ends keep the bytes that the other end has not acknowledged,
//! and send them again on another way through the tree.
mod frame;
mod link_set;
mod local_stream;
mod resumable_stream;
mod router;

/// The number of heartbeats that each end of a tree connection sends within the longest permitted
/// silence.
pub(crate) const HEARTBEATS_PER_LEASE: u32 = 5;

pub(crate) use frame::{MAX_TREE_FRAME_BYTES, StreamId, TreeFrame, TreeParent, TreeSetup};
pub(crate) use link_set::{LinkId, LinkInput, LinkSet};
pub(crate) use local_stream::{LocalStream, LocalStreamEvent, StreamHalves};
pub(crate) use router::{RouterAction, StreamEnd, TreeRouter};
