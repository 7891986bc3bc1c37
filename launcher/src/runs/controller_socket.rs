//! The Unix socket at which a controller listens for `launch exec`.
//!
//! The socket is in the abstract namespace, so nothing is left of it when the controller ends. Its
//! name follows from the run and from the process of the controller. Both sides check the
//! credentials of the other one: the client that the process is the controller, and the controller
//! that the process belongs to this user or to root. So only processes that could also signal the
//! controller get through.
use super::{process_identity::ProcessIdentity, registry::RunRecord};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use std::{
    io,
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
};

/// The number of socket names among which the controller of a run can choose, so that another user
/// cannot easily occupy all of them.
const SOCKET_NAME_COUNT: u32 = 16;

/// Returns the abstract Unix socket addresses that the controller of the run `run` tries in turn,
/// each a hash of the run ID and the controller's process.
fn list_socket_addresses(
    run: &str,
    controller: &ProcessIdentity,
) -> impl Iterator<Item = io::Result<SocketAddr>> {
    let mut hasher = blake3::Hasher::new();
    for part in ["launch controller socket", run] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    hasher.update(&controller.pid.to_le_bytes()).update(&controller.start_ticks.to_le_bytes());
    (0..SOCKET_NAME_COUNT).map(move |number| {
        let hash = hasher.clone().update(&number.to_le_bytes()).finalize();
        SocketAddr::from_abstract_name(format!("launch-{}", &hash.to_hex()[..40]))
    })
}

/// Makes this process, the controller of a run, listen for `launch exec` at its Unix socket. Fails
/// on a system without abstract sockets.
pub(crate) fn bind_controller_socket(run: &str) -> io::Result<UnixListener> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for address in list_socket_addresses(run, &ProcessIdentity::current()?) {
        match UnixListener::bind_addr(&address?) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            result => return result,
        }
    }
    Err(last)
}

/// Connects to the Unix socket of a run's controller, for `launch exec`. Fails if the controller
/// does not listen.
pub(crate) fn connect_to_controller(record: &RunRecord) -> io::Result<UnixStream> {
    let mut last = io::Error::from(io::ErrorKind::ConnectionRefused);
    for address in list_socket_addresses(&record.run, &record.controller) {
        match UnixStream::connect_addr(&address?) {
            Ok(stream) => {
                let peer = getsockopt(&stream, PeerCredentials)?;
                // For a connected client, these are the credentials of the process that listens.
                if peer.pid() == record.controller.pid as i32 && is_own_user_or_root(peer.uid()) {
                    return Ok(stream);
                }
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns whether the process at the other end of a Unix socket runs as the user of this process
/// or as root.
pub(crate) fn is_peer_own_or_root(socket: &impl AsFd) -> bool {
    getsockopt(socket, PeerCredentials).is_ok_and(|peer| is_own_user_or_root(peer.uid()))
}

/// Returns whether the user id `uid` is that of the user of this process or of root.
fn is_own_user_or_root(uid: u32) -> bool {
    uid == 0 || uid == nix::unistd::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds the record of a run that this process controls.
    fn build_record(run: &str) -> RunRecord {
        RunRecord {
            version: 1,
            run: run.to_owned(),
            name: "n".into(),
            run_dir: "/".into(),
            world: 1,
            began_ms: 5,
            controller_timeout_ms: None,
            batch_job: None,
            controller: ProcessIdentity::current().expect("this process"),
        }
    }

    #[test]
    fn only_the_socket_of_the_controller_is_used() {
        let record = build_record(&format!("socket-{}", std::process::id()));
        connect_to_controller(&record).expect_err("no socket");
        let first = bind_controller_socket(&record.run).expect("bound");
        let client = connect_to_controller(&record).expect("connected");
        let (server, _) = first.accept().expect("a client");
        assert!(is_peer_own_or_root(&server) && is_peer_own_or_root(&client));
        // Another process has taken the first name.
        let second = bind_controller_socket(&record.run).expect("bound to another name");
        drop(first);
        connect_to_controller(&record).expect("the second name");
        drop(second);
        let mut other = record.clone();
        other.controller = other.controller.with_other_start();
        connect_to_controller(&other).expect_err("another controller");
    }
}
