//! Connects to hosts through OpenSSH's client, which is the program `ssh` of this machine.
//!
//! Each host has one process `ssh`, which carries the whole start of the agent and then the control
//! stream on stdin and stdout. On the host, a shell reads one script per line from stdin and runs
//! it. The last script replaces the shell by the agent. So one login suffices, even if the
//! executable must be copied.
//!
//! OpenSSH's client brings everything that the built-in client lacks: certificates, GSSAPI,
//! hardware keys, proxy commands and connections that other processes share (`ControlPath`).
mod client_failure;
mod client_log;
mod client_options;
mod openssh_requirement;
mod session;
mod stream_relay;
mod supervised_child;

pub(super) use client_options::ClientOptions;
pub(super) use openssh_requirement::{HostSshFiles, OpenSshRequirement, find_openssh_requirement};
pub(super) use session::{OpenSshChannel, OpenSshSession};
pub(super) use stream_relay::relay_streams;
pub(super) use supervised_child::{SupervisedChild, list_unreaped_children, record_child_exit};
