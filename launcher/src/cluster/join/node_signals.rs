//! [`NodeSignals`]: the signals that launch catches on a node other than node 0.
use protocol::exit;
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that launch catches on a node other than node 0 (SIGINT, SIGTERM, SIGHUP and
/// SIGCHLD), as streams of the async runtime.
pub(super) struct NodeSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    pub(super) child: Signal,
}

impl NodeSignals {
    /// Installs handlers for the signals that end launch on a node, and for SIGCHLD.
    pub(super) fn install() -> io::Result<NodeSignals> {
        Ok(NodeSignals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            child: signal(SignalKind::child())?,
        })
    }

    /// Waits for a signal that ends launch on this node, and returns the exit code by which this
    /// process reports the signal. Cancel-safe.
    pub(super) async fn receive_end_signal(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => exit::INTERRUPTED,
            _ = self.terminate.recv() => exit::TERMINATED,
            _ = self.hangup.recv() => exit::TERMINATED,
        }
    }

    /// Waits for the end of a child process or for a signal that ends launch on this node, and
    /// returns the exit code for such a signal. Cancel-safe.
    pub(super) async fn receive_end_or_child_signal(&mut self) -> Option<u8> {
        tokio::select! {
            _ = self.interrupt.recv() => Some(exit::INTERRUPTED),
            _ = self.terminate.recv() => Some(exit::TERMINATED),
            _ = self.hangup.recv() => Some(exit::TERMINATED),
            _ = self.child.recv() => None,
        }
    }
}
