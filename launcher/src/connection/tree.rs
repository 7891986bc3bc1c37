//! The tree of agents of a large job, in which some agents are connected to the controller and
//! forward the messages between the controller and the other agents.
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

/// The number of heartbeats that each end of a connection between two agents sends during the time
/// after which a silent connection counts as broken.
pub(crate) const HEARTBEATS_PER_LEASE: u32 = 5;

pub(crate) use frame::{MAX_TREE_FRAME_BYTES, StreamId, TreeFrame, TreeParent, TreeSetup};
pub(crate) use link_set::{LinkId, LinkInput, LinkSet};
pub(crate) use local_stream::{LocalStream, LocalStreamEvent, StreamHalves};
pub(crate) use router::{RouterAction, StreamEnd, TreeRouter};
