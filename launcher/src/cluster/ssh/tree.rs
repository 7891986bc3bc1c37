//! The tree of agents of a large job, in which only `cluster.ssh.fanout` agents are connected to
//! the controller and forward the messages of all other agents.
//!
//! The controller still logs in to each host, because the user's keys are on its machine only. The
//! SSH connection to a host ends as soon as the agent is connected with another one. A host that
//! lacks the executable gets it from a host that has it.
mod hub;
mod planner;
mod shared_planner;

pub(super) use hub::{TreeHub, TreeSettings};
pub(super) use planner::{ExecutableSource, TreePlace};
