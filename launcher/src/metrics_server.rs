//! Defines [`MetricsServer`], which serves the metrics of one run over HTTP for as long as the
//! controller runs.
use crate::private_files::{identify_file, open_own_file};
use dashboard::{Dashboard, MetricsListener, RunInfo, RunSource, serve_metrics};
use jobspec::MetricsAddress;
use nix::sys::{
    socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket},
    stat::{Mode, fchmod},
};
use std::{
    fs::{self, File},
    io,
    net::TcpListener,
    os::{
        fd::AsRawFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};
use tokio::sync::oneshot;

/// The permissions of the socket for metrics: only its owner can connect.
const SOCKET_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);
/// The largest number of clients that wait until the server accepts their connections.
const MAX_WAITING_CLIENTS: i32 = 16;

/// The HTTP server for the metrics of one run, which runs in a separate thread until this handle is
/// dropped. The thread reads the files of the run directory, so the controller does not wait for
/// it.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    /// Ends the thread when it is dropped.
    _stop: oneshot::Sender<()>,
    /// The path of the socket, with its device and inode.
    socket: Option<(PathBuf, (u64, u64))>,
}

impl MetricsServer {
    /// Starts listening for HTTP clients at `address`, and starts the thread that serves them the
    /// metrics of the run `run`.
    pub(crate) fn start(address: MetricsAddress, run: RunInfo) -> io::Result<MetricsServer> {
        let (listener, socket) = match address {
            MetricsAddress::Port(address) => (MetricsListener::Port(TcpListener::bind(address)?), None),
            MetricsAddress::Socket(path) => {
                let listener = bind_private_socket(&path)?;
                let id = identify_file(&fs::symlink_metadata(&path)?);
                (MetricsListener::Socket(listener), Some((path, id)))
            }
        };
        let dashboard = Arc::new(Dashboard::new(Box::new(SingleRun(run))));
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            // Without an event loop, clients cannot connect.
            _ = serve_metrics(dashboard, listener, stopped);
        };
        thread::Builder::new().name("metrics".into()).spawn(serve)?;
        Ok(MetricsServer { _stop: stop, socket })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        let Some((path, id)) = &self.socket else { return };
        // A later controller may have replaced the socket.
        if fs::symlink_metadata(path).is_ok_and(|metadata| identify_file(&metadata) == *id) {
            _ = fs::remove_file(path);
        }
    }
}

/// The source of the metrics server's data: the one run that this process controls.
struct SingleRun(RunInfo);

impl RunSource for SingleRun {
    fn list_runs(&self) -> Vec<RunInfo> {
        vec![self.0.clone()]
    }

    fn reload_run(&self, run: &RunInfo) -> Option<RunInfo> {
        (run.run == self.0.run).then(|| self.0.clone())
    }

    fn open_file(&self, path: &Path) -> io::Result<File> {
        open_own_file(path)
    }
}

/// Binds a Unix socket to which only this user can connect. Replaces a socket of this user on which
/// no process listens, which a killed controller has left.
fn bind_private_socket(path: &Path) -> io::Result<UnixListener> {
    remove_abandoned_socket(path);
    let descriptor = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // The file gets these permissions when it is created, so there is no moment without them.
    fchmod(&descriptor, SOCKET_MODE)?;
    bind(descriptor.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&descriptor, Backlog::new(MAX_WAITING_CLIENTS)?)?;
    if fs::symlink_metadata(path)?.mode() & 0o077 != 0 {
        _ = fs::remove_file(path);
        return Err(io::Error::other("the file system does not support the permissions of sockets"));
    }
    Ok(UnixListener::from(descriptor))
}

/// Removes the file `path` if it is a socket of this user on which no process listens.
fn remove_abandoned_socket(path: &Path) {
    let uid = nix::unistd::geteuid().as_raw();
    let is_own = fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket() && m.uid() == uid);
    let is_abandoned =
        || UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if is_own && is_abandoned() {
        // An error shows when the socket is bound.
        _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_private_and_replaces_only_abandoned_ones() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.sock");
        let listener = bind_private_socket(&path).expect("bound");
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        UnixStream::connect(&path).expect("connected");
        let error = bind_private_socket(&path).expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        bind_private_socket(&path).expect("the abandoned socket is replaced");
        let file = directory.path().join("file");
        fs::write(&file, "data").expect("written");
        bind_private_socket(&file).expect_err("a file");
        assert_eq!(fs::read(&file).expect("unchanged"), b"data");
    }

    #[test]
    fn the_socket_is_removed_unless_another_one_has_replaced_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.sock");
        let start = || {
            let run = RunInfo {
                run: "r".into(),
                name: "n".into(),
                state: "running",
                is_active: true,
                is_named: true,
                world: 1,
                began_ms: 0,
                host: "h".into(),
                step: None,
                run_dir: directory.path().to_owned(),
            };
            MetricsServer::start(MetricsAddress::Socket(path.clone()), run).expect("started")
        };
        drop(start());
        assert!(!path.exists());
        let first = start();
        fs::remove_file(&path).expect("removed");
        let second = start();
        drop(first);
        assert!(path.exists(), "the second server uses the socket");
        drop(second);
        assert!(!path.exists());
    }
}
