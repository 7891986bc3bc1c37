//! The messages with which a node (a machine on which the user starts launch) joins the run of node
//! 0.
use diagnostic::Diagnostic;
use serde::{Deserialize, Serialize};

/// The request of a node (a machine on which the user started launch) to join a run: the first
/// message on its connection to node 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JoinRequest {
    /// The version of the control protocol ([`PROTOCOL_VERSION`](super::PROTOCOL_VERSION)).
    pub version: u32,
    /// The number of the node; `None` if node 0 is to choose one.
    pub node_rank: Option<u32>,
    /// The number of nodes of the job.
    pub nodes: u32,
    /// The host name of the node.
    pub host: String,
    /// The process id of launch on the node.
    pub pid: u32,
    /// The keys of the node's job, each with a hash of its value.
    pub job: Vec<JobSettingHash>,
}

/// The path of one job.yaml key with a hash of its value, by which node 0 detects that a joining
/// node has another job file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct JobSettingHash {
    /// The path of the key.
    pub path: String,
    /// A hash of the value in YAML.
    pub hash: u64,
}

/// The answer of node 0 to another node (a machine on which the user started launch) that wants to
/// join its run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum JoinAnswer {
    /// The node takes part in the run. The control messages of its agent follow.
    Accepted {
        /// The number of the node.
        node_rank: u32,
    },
    /// The node cannot join.
    Rejected(Diagnostic),
}
