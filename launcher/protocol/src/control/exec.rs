//! Messages of `launch exec`, which runs a command next to a worker. The client, the controller and
//! the agent exchange them.
use super::exit_status::ExitStatus;
use diagnostic::Diagnostic;
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};

/// The number by which a controller identifies one command of `launch exec`, from 1.
pub type ExecId = u64;

/// The largest number of bytes of a command's output that an agent sends before the `launch exec`
/// process has written earlier output. The agent reads more output only then.
pub const EXEC_WINDOW_BYTES: u32 = 256 << 10;
/// The largest number of bytes of a command's output in one message of `launch exec`.
pub const EXEC_CHUNK_BYTES: u32 = 16 << 10;

/// A request of `launch exec` to an agent: start a command next to a worker, send more of its
/// output, or end it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ExecRequest {
    /// Runs a command next to the worker of a rank.
    Start {
        /// The version of the control protocol.
        version: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The program and its arguments.
        command: Vec<String>,
    },
    /// The client has written this number of bytes of output.
    Consumed {
        /// The number of bytes since the last such message.
        bytes: u32,
    },
    /// The client has ended. The agent ends the command.
    Cancel,
}

/// An answer of an agent to `launch exec`, which runs a command next to a worker: output of the
/// command, how the command ended, or why it could not be started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ExecReply {
    /// Output of the command, of at most [`EXEC_CHUNK_BYTES`].
    Output {
        /// Whether the output is from stderr.
        stderr: bool,
        /// The bytes of the output.
        bytes: Vec<u8>,
    },
    /// The command has ended. The last message about the command.
    Ended(ExitStatus),
    /// The command could not be started or observed. The last message about the command.
    Failed(Diagnostic),
}

impl ExecReply {
    /// Returns whether this is the agent's last message about a command of `launch exec`, because
    /// the command has ended or could not be started.
    pub fn is_last(&self) -> bool {
        !matches!(self, ExecReply::Output { .. })
    }
}
