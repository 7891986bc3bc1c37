//! The tree of agents, in which the controller is connected only with some of the agents, and these
//! carry the byte streams between the controller and the others.
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

/// The number of heartbeats that each side of a connection between neighbours in the tree sends
/// within the time after which a silent connection counts as broken.
pub(crate) const HEARTBEATS_PER_LEASE: u32 = 5;

pub(crate) use frame::{MAX_TREE_FRAME_BYTES, StreamId, TreeFrame, TreeParent, TreeSetup};
pub(crate) use link_set::{LinkId, LinkInput, LinkSet};
pub(crate) use local_stream::{LocalStream, LocalStreamEvent, StreamHalves};
pub(crate) use router::{RouterAction, StreamEnd, TreeRouter};
