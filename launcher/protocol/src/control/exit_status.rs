//! [`ExitStatus`]: how a process ended.
use serde::{Deserialize, Serialize};

/// How a process ended: its exit code, or the signal that killed the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// The process exited with this code.
    Code(u8),
    /// The process was killed by the signal with this number. The second field states whether the
    /// process dumped core.
    Signal(i32, bool),
}
