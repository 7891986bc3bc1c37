//! Executes the requests (probes) of `launch check` to inspect this host or its connections, on
//! separate threads of the agent.
mod gpu;
mod inspection;
mod network;
pub(super) mod nvml;

use crate::discover::local_host::discover_local_host;
use diagnostic::{Diagnostic, codes::host};
use jobspec::PortSelection;
use network::NetworkProber;
use protocol::{
    preflight::Preflight,
    probe::{MAX_PEERS, PeerListener, ProbeAnswer, ProbeRequest},
};
use std::{
    fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The prefix of the names of the small files that `launch check` creates to find out which hosts
/// share a directory.
const NONCE_FILE_PREFIX: &str = ".launch-check-";
/// The largest number of addresses of another host's agent to which this agent tries to connect for
/// `launch check`. Further addresses are ignored.
const MAX_PEER_ADDRESSES: usize = 8;
/// The largest number of bytes that are read of a greeting, the text that an agent sends to test
/// connections between hosts.
const MAX_GREETING_BYTES: u64 = 256;
/// The time limit for sending the greeting, a short text for testing connections between hosts, on
/// one connection that another agent has opened.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest timeout, in milliseconds, of a connection with which `launch check` tests whether
/// another host is reachable. A longer timeout in a probe is reduced to this value.
const MAX_CONNECT_TIMEOUT_MS: u64 = 60_000;

/// Executes the requests (probes) by which `launch check` inspects this host and its connections to
/// other hosts. Dropping the last clone removes the files by which shared directories are found.
#[derive(Clone)]
pub(super) struct Prober {
    preflight: &'static dyn Preflight,
    state: Arc<Mutex<NonceFileState>>,
    network: Arc<NetworkProber>,
}

/// The files that this agent has written so that `launch check` can find shared directories, and
/// the directories in which it looks for files of other hosts. Dropping the state removes the
/// files.
#[derive(Debug, Default)]
struct NonceFileState {
    /// The directories of [`ProbeRequest::Inspect`] that exist, or their nearest existing parents.
    dirs: Vec<PathBuf>,
    /// The nonce files that this prober has written.
    nonce_files: Vec<PathBuf>,
}

impl Prober {
    pub(super) fn new(preflight: &'static dyn Preflight) -> Self {
        Prober { preflight, state: Arc::default(), network: Arc::default() }
    }

    /// Locks the record of the directories and test files of `launch check`, even if a thread has
    /// panicked while it held the lock.
    fn lock_state(&self) -> MutexGuard<'_, NonceFileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread that executes one request of `launch check` on this host, and passes the
    /// answer to the function `send`. Does not block. Fails if the thread cannot be started.
    pub(super) fn start_answering(
        &self,
        probe: ProbeRequest,
        send: impl FnOnce(ProbeAnswer) + Send + 'static,
    ) -> io::Result<()> {
        let prober = self.clone();
        thread::Builder::new().name("probe".into()).spawn(move || send(prober.answer_probe(probe))).map(drop)
    }

    /// Executes a request of `launch check`: inspects this host, connects to the agents of other
    /// hosts, or searches for their files. Blocks until the inspection or all connections have
    /// ended.
    ///
    /// An inspection also writes nonce files and opens a TCP port for peers.
    fn answer_probe(&self, probe: ProbeRequest) -> ProbeAnswer {
        match probe {
            ProbeRequest::Inspect { nonce, dirs, cuda, ports } => {
                let mut report = inspection::inspect_host(&dirs);
                report.gpus.libraries = cuda
                    .map_or_else(Vec::new, |directories| self.preflight.inspect_gpu_libraries(&directories));
                let existing: Vec<PathBuf> = report.dirs.iter().map(|d| d.path.clone()).collect();
                self.write_nonce_files(&nonce, &existing);
                if let Some((port, greeting)) = open_greeting_port(&nonce, ports) {
                    (report.port, report.greeting) = (Some(port), greeting);
                }
                ProbeAnswer::Inspect(Box::new(report))
            }
            ProbeRequest::Connect { peers, nonces, timeout_ms } => {
                let timeout = Duration::from_millis(timeout_ms.min(MAX_CONNECT_TIMEOUT_MS));
                let peers = connect_to_peers(&peers, timeout);
                ProbeAnswer::Connect { peers, nonces: self.find_visible_nonces(&nonces) }
            }
            ProbeRequest::Network(request) => ProbeAnswer::Network(Box::new(
                self.network.inspect_and_listen(&request, discover_local_host().ok()),
            )),
            ProbeRequest::Measure(request) => {
                ProbeAnswer::Measure(Box::new(self.network.measure_connection_to_agent(&request)))
            }
        }
    }

    /// Writes a file named after the random text `nonce` to each writable directory in `dirs`, so
    /// that hosts that share the directory see the file. Stores `dirs` for
    /// [`Prober::find_visible_nonces`].
    fn write_nonce_files(&self, nonce: &str, dirs: &[PathBuf]) {
        let mut state = self.lock_state();
        for dir in dirs {
            let file = dir.join(format!("{NONCE_FILE_PREFIX}{}", sanitize_nonce(nonce)));
            let created = fs::OpenOptions::new().write(true).create_new(true).open(&file);
            if created.and_then(|mut f| f.write_all(nonce.as_bytes())).is_ok() {
                state.nonce_files.push(file);
            }
        }
        state.dirs = dirs.to_vec();
    }

    /// Returns, for each inspected directory of this host, which of the random texts `nonces` occur
    /// there in names of files that other hosts have written. The agent of the other host has
    /// written such a file.
    fn find_visible_nonces(&self, nonces: &[String]) -> Vec<Vec<String>> {
        let dirs = self.lock_state().dirs.clone();
        // The directory is listed because a listing makes NFS clients refresh their cache.
        let list = |dir: &PathBuf| {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let visible = |dir: &PathBuf| {
            let names = list(dir);
            let is_visible =
                |nonce: &&String| names.contains(&format!("{NONCE_FILE_PREFIX}{}", sanitize_nonce(nonce)));
            nonces.iter().filter(is_visible).cloned().collect()
        };
        dirs.iter().map(visible).collect()
    }
}

impl Drop for NonceFileState {
    fn drop(&mut self) {
        self.nonce_files.iter().for_each(|file| _ = fs::remove_file(file));
    }
}

/// Opens a TCP port that sends a text with `nonce` to each process that connects, so that other
/// agents can test whether they reach this host. Returns the port and the text, or `None` if the
/// port or the thread is not available.
fn open_greeting_port(nonce: &str, ports: PortSelection) -> Option<(u16, String)> {
    let at_every_address = |port| {
        let v6 = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port));
        let is_without_v6 = |error: &io::Error| error.kind() != io::ErrorKind::AddrInUse;
        if v6.as_ref().is_err_and(is_without_v6) {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        } else {
            v6
        }
    };
    let listener = ports.bind_first_free_port(at_every_address).ok()?;
    let port = listener.local_addr().ok()?.port();
    let greeting = sanitize_nonce(nonce);
    let line = format!("{greeting}\n");
    let serve = move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            _ = stream.set_write_timeout(Some(GREETING_TIMEOUT));
            _ = stream.write_all(line.as_bytes());
        }
    };
    thread::Builder::new().name("greet".into()).spawn(serve).ok()?;
    Some((port, greeting))
}

/// Removes all characters that are not safe in a file name from `nonce`, a random text, and
/// truncates it to 64 characters.
fn sanitize_nonce(nonce: &str) -> String {
    nonce.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(64).collect()
}

/// Connects to the agents of several other hosts in parallel, to test whether this host reaches
/// them, and blocks until all connections have ended. `timeout` limits the connection to each
/// address. Ignores the peers after the first [`MAX_PEERS`].
///
/// Returns the name of each peer with the duration of connecting in milliseconds or the error.
fn connect_to_peers(peers: &[PeerListener], timeout: Duration) -> Vec<(String, diagnostic::Result<f64>)> {
    let connect = |peer: &PeerListener| {
        let start = Instant::now();
        connect_and_check_greeting(peer, timeout).map(|()| start.elapsed().as_secs_f64() * 1e3)
    };
    thread::scope(|scope| {
        let threads: Vec<_> =
            peers.iter().take(MAX_PEERS).map(|peer| (peer, scope.spawn(move || connect(peer)))).collect();
        let results = threads.into_iter().map(|(peer, thread)| {
            let panicked = |_| Err(Diagnostic::error(host::PROBE_FAILED, "the probe panicked"));
            (peer.name.clone(), thread.join().unwrap_or_else(panicked))
        });
        results.collect()
    })
}

/// Connects to the addresses of another agent, one after another, until one address answers with
/// the greeting of that agent. Fails with the error of the last address if all addresses fail.
fn connect_and_check_greeting(peer: &PeerListener, timeout: Duration) -> diagnostic::Result<()> {
    let mut last_error = Diagnostic::error(host::PEER_ADDRESS_MISSING, "the host has no address");
    for address in peer.addresses.iter().take(MAX_PEER_ADDRESSES) {
        last_error = match read_greeting(*address, timeout) {
            Ok(text) if text.trim_end() == peer.greeting => return Ok(()),
            Ok(_) => Diagnostic::error(host::PEER_MISMATCH, format!("another program answers at {address}")),
            Err(error) => {
                Diagnostic::error(host::PEER_UNREACHABLE, format!("cannot connect to {address}: {error}"))
            }
        }
        .with_field("address", address.to_string());
    }
    Err(last_error.with_subject(&peer.name))
}

/// Connects to the address of another agent, and reads its greeting (a text that tests the
/// connection) until the end of the stream. `timeout` limits the connection and each read.
fn read_greeting(address: SocketAddr, timeout: Duration) -> io::Result<String> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    let mut text = String::new();
    stream.take(MAX_GREETING_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jobspec::JobSpec;
    use protocol::{preflight::PreflightReport, probe::LibraryReport};

    /// A fake of the preflight checks that reports one missing library.
    struct FakePreflight;

    impl Preflight for FakePreflight {
        fn check_gpus(&self, _: &JobSpec) -> diagnostic::Result<u64> {
            Ok(80 << 30)
        }

        fn inspect_gpu_libraries(&self, directories: &[PathBuf]) -> Vec<LibraryReport> {
            let missing = Diagnostic::error(host::CUDA_LIBRARY_MISSING, format!("not in {directories:?}"));
            vec![LibraryReport { name: "one".into(), required: true, result: Err(missing) }]
        }

        fn check_job(&self, _: &JobSpec, _: u32, _: u32) -> PreflightReport {
            PreflightReport::default()
        }
    }

    /// Sends an inspection request to the prober and returns the inspection. Panics for another
    /// answer.
    fn run_inspect_probe(
        prober: &Prober,
        nonce: &str,
        dirs: Vec<PathBuf>,
        cuda: Option<Vec<PathBuf>>,
    ) -> Box<protocol::probe::HostInspection> {
        match prober.answer_probe(ProbeRequest::Inspect {
            nonce: nonce.into(),
            dirs,
            cuda,
            ports: PortSelection::Any,
        }) {
            ProbeAnswer::Inspect(report) => report,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn gpu_libraries_are_inspected_only_on_request() {
        let prober = Prober::new(&FakePreflight);
        assert!(run_inspect_probe(&prober, "n", vec![], None).gpus.libraries.is_empty());
        let libraries = run_inspect_probe(&prober, "n", vec![], Some(vec!["/own".into()])).gpus.libraries;
        let error = libraries[0].result.as_ref().expect_err("missing");
        assert_eq!((error.code(), error.message()), (host::CUDA_LIBRARY_MISSING, "not in [\"/own\"]"));
    }

    #[test]
    fn a_host_inspects_itself_and_connects_to_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let prober = Prober::new(&FakePreflight);
        let dirs = vec![dir.path().join("not/yet"), dir.path().to_owned()];
        let report = run_inspect_probe(&prober, "n-1/..", dirs, None);
        assert!(
            !report.hostname.is_empty() && report.cpus > 0 && report.memory > 0 && report.unix_time_ns > 0
        );
        assert_eq!(report.arch, std::env::consts::ARCH);
        assert_eq!(report.dirs[0].path, dir.path(), "the nearest parent that exists");
        let existing = &report.dirs[1];
        assert!(existing.writable.is_ok() && existing.free > 0 && !existing.filesystem.is_empty());
        assert!(report.limits.contains_key("nofile"));
        let port = report.port.expect("a port");
        let peer = |port: u16, greeting: &str| PeerListener {
            name: greeting.to_owned(),
            addresses: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port))],
            greeting: greeting.to_owned(),
        };
        let closed = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
        let probe = ProbeRequest::Connect {
            peers: vec![peer(port, &report.greeting), peer(port, "other"), peer(closed, "none")],
            nonces: vec!["n-1/..".into(), "n-2".into()],
            timeout_ms: 2000,
        };
        let ProbeAnswer::Connect { peers, nonces } = prober.answer_probe(probe) else {
            panic!("another answer")
        };
        let codes: Vec<_> = peers.iter().map(|(_, r)| r.as_ref().err().map(Diagnostic::code)).collect();
        assert_eq!(codes, [None, Some(host::PEER_MISMATCH), Some(host::PEER_UNREACHABLE)]);
        assert_eq!(nonces, [["n-1/.."], ["n-1/.."]]);
        drop(prober);
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 0, "nonce files are removed");
    }
}
