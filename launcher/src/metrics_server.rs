//! Defines [`MetricsServer`] and [`MetricsFile`], which serve the metrics of one run over HTTP, or
//! write them to a file, for as long as the controller runs.
use crate::{
    private_files::{identify_file, open_own_file},
    runs::replace_output_file,
};
use dashboard::{Dashboard, MetricsListener, RunInfo, RunSource, format_metrics_textfile, serve_metrics};
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
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};
use tokio::sync::oneshot;

/// The permissions of the socket for metrics: only its owner can connect.
const SOCKET_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);
/// The largest number of clients that wait until the server accepts their connections.
const MAX_WAITING_CLIENTS: i32 = 16;
/// The time between two updates of the file of metrics, as that of the scrapes of Prometheus.
pub(crate) const METRICS_FILE_INTERVAL: Duration = Duration::from_secs(15);
/// How long the end of a run waits until the file of metrics is removed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(2);
/// The permissions of the file of metrics. A node exporter, which runs as another user, reads it.
pub(crate) const METRICS_FILE_MODE: u32 = 0o644;

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

/// The file with the metrics of one run, for the textfile collector of a node exporter. A separate
/// thread updates the file until this handle is dropped, which removes the file.
#[derive(Debug)]
pub(crate) struct MetricsFile {
    /// Ends the thread when it is dropped.
    stop: Option<mpsc::SyncSender<()>>,
    /// Is closed when the thread has removed the file.
    removed: mpsc::Receiver<()>,
}

impl MetricsFile {
    /// Writes the metrics of the run `run` to the file `path`, and starts the thread that updates
    /// the file. An update that fails is left out. Fails if the file cannot be written now.
    pub(crate) fn start(path: PathBuf, run: RunInfo) -> io::Result<MetricsFile> {
        let dashboard = Dashboard::new(Box::new(SingleRun(run)));
        let write = move |path: &Path| {
            let text = format_metrics_textfile(&dashboard);
            replace_output_file(path, text.as_bytes(), METRICS_FILE_MODE)
        };
        write(&path)?;
        let (stop, stopped) = mpsc::sync_channel::<()>(1);
        let (removing, removed) = mpsc::sync_channel::<()>(1);
        let update = move || {
            while stopped.recv_timeout(METRICS_FILE_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                // The next update may succeed.
                _ = write(&path);
            }
            // The file would show a run that has ended as active.
            if fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                _ = fs::remove_file(&path);
            }
            drop(removing);
        };
        thread::Builder::new().name("metrics-file".into()).spawn(update)?;
        Ok(MetricsFile { stop: Some(stop), removed })
    }
}

impl Drop for MetricsFile {
    fn drop(&mut self) {
        self.stop = None;
        // The channel is closed without a message. A disk that stalls must not delay the end of the
        // run for longer.
        _ = self.removed.recv_timeout(REMOVAL_TIMEOUT);
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

    /// Returns a run with this run directory.
    fn describe_run(run_dir: &Path) -> RunInfo {
        RunInfo {
            run: "r".into(),
            name: "n".into(),
            state: "running",
            is_active: true,
            is_named: true,
            world: 1,
            began_ms: 0,
            host: "h".into(),
            step: None,
            run_dir: run_dir.to_owned(),
        }
    }

    #[test]
    fn the_file_of_metrics_exists_until_the_handle_is_dropped() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("launch.prom");
        let file = MetricsFile::start(path.clone(), describe_run(directory.path())).expect("written");
        let text = fs::read_to_string(&path).expect("there");
        assert!(text.contains("launch_run_active{run=\"r\",job_name=\"n\"} 1.0"), "{text}");
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, METRICS_FILE_MODE);
        drop(file);
        assert!(!path.exists());
        MetricsFile::start(directory.path().join("absent/a.prom"), describe_run(directory.path()))
            .expect_err("no directory");
    }

    #[test]
    fn the_socket_is_removed_unless_another_one_has_replaced_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.sock");
        let start = || {
            let address = MetricsAddress::Socket(path.clone());
            MetricsServer::start(address, describe_run(directory.path())).expect("started")
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
