//! Parses hosts as users write them: `user@node-[01-16]:22`, hostfiles of DeepSpeed and Open MPI,
//! and DeepSpeed's filters of hosts.
//!
//! The functions are pure. They convert text to hosts, or to an error with the position of the
//! mistake. The number of hosts that a text can stand for is limited, so untrusted text cannot
//! exhaust memory.
mod address;
mod error;
mod filter;
mod hostfile;
mod limits;
mod node_count;
mod range;
mod rendezvous_address;

pub use address::{HostAddress, parse_hosts};
pub use error::{
    FilterError, FilterProblem, HostSyntaxError, HostSyntaxProblem, HostfileError, HostfileProblem,
};
pub use filter::{HostSlots, SelectedHost, filter_hosts};
pub use hostfile::{HostfileEntry, MAX_HOSTFILE_BYTES, parse_hostfile};
pub use limits::{MAX_HOSTS, MAX_NAME_BYTES};
pub use node_count::{InvalidNodeCount, NodeCount};
pub use range::expand_ranges;
pub use rendezvous_address::{InvalidRendezvousAddress, RendezvousAddress};
