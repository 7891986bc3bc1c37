//! [`set_control_options`]: sets the socket options of a control connection over TCP.
use nix::sys::socket::{setsockopt, sockopt};
use std::{io, os::fd::AsFd};

/// How long data sent on a control connection may stay unacknowledged before the kernel closes the
/// connection, in milliseconds. Without this limit, a connection to a host that is cut off ends
/// after many minutes.
const TCP_USER_TIMEOUT_MS: u32 = 30_000;
/// How long a control connection may be idle before the kernel checks whether the other host
/// answers, in seconds.
const KEEPALIVE_IDLE_S: u32 = 10;
/// The interval at which the kernel repeats an unanswered check of an idle control connection, in
/// seconds.
const KEEPALIVE_INTERVAL_S: u32 = 5;

/// Sets the socket options of a control connection over TCP, so that small messages are sent
/// immediately and an unreachable host is detected.
pub(crate) fn set_control_options(socket: &impl AsFd) -> io::Result<()> {
    setsockopt(socket, sockopt::TcpNoDelay, &true)?;
    setsockopt(socket, sockopt::TcpUserTimeout, &TCP_USER_TIMEOUT_MS)?;
    setsockopt(socket, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
    setsockopt(socket, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_S)?;
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    Ok(())
}
