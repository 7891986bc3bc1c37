//! Answers the probes of `launch check`, on separate threads of the agent.
mod gpu;
mod inventory;
mod nvml;

use contract::{
    preflight::Preflight,
    probe::{MAX_PEERS, PeerListener, Probe, ProbeAnswer},
};
use diagnostic::{Diagnostic, codes::host};
use std::{
    fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The prefix of the names of nonce files.
const NONCE_PREFIX: &str = ".launch-check-";
/// The most addresses of one peer that are tried.
const MAX_PEER_ADDRESSES: usize = 8;
/// The longest greeting that is read, in bytes.
const MAX_GREETING_BYTES: u64 = 256;
/// The limit of sending the greeting to one peer.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest limit of a connection that a probe may request.
const MAX_CONNECT_TIMEOUT_MS: u64 = 60_000;

/// Answers probes, and removes what they left on the host when it is dropped.
#[derive(Clone)]
pub(super) struct Prober {
    preflight: &'static dyn Preflight,
    state: Arc<Mutex<ProbeState>>,
}

/// What probes have set up on this host.
#[derive(Debug, Default)]
struct ProbeState {
    /// The directories of [`Probe::Inspect`] in which nonce files may be.
    dirs: Vec<PathBuf>,
    /// The nonce files of this host.
    nonce_files: Vec<PathBuf>,
}

impl Prober {
    pub(super) fn new(preflight: &'static dyn Preflight) -> Self {
        Prober { preflight, state: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, ProbeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers on a new thread.
    pub(super) fn answer(
        &self,
        probe: Probe,
        send: impl FnOnce(ProbeAnswer) + Send + 'static,
    ) -> io::Result<()> {
        let prober = self.clone();
        thread::Builder::new().name("probe".into()).spawn(move || send(prober.run(probe))).map(drop)
    }

    fn run(&self, probe: Probe) -> ProbeAnswer {
        match probe {
            Probe::Inspect { nonce, dirs, cuda } => {
                let mut report = inventory::inspect_host(&dirs);
                report.gpus.libraries =
                    cuda.map_or_else(Vec::new, |directories| self.preflight.gpu_libraries(&directories));
                let existing: Vec<PathBuf> = report.dirs.iter().map(|d| d.path.clone()).collect();
                self.write_nonces(&nonce, &existing);
                if let Some((port, greeting)) = listen(&nonce) {
                    (report.port, report.greeting) = (Some(port), greeting);
                }
                ProbeAnswer::Inspect(Box::new(report))
            }
            Probe::Connect { peers, nonces, timeout_ms } => {
                let timeout = Duration::from_millis(timeout_ms.min(MAX_CONNECT_TIMEOUT_MS));
                let peers = connect_to_peers(&peers, timeout);
                ProbeAnswer::Connect { peers, nonces: self.visible_nonces(&nonces) }
            }
        }
    }

    /// Writes a nonce file into each directory that is writable.
    fn write_nonces(&self, nonce: &str, dirs: &[PathBuf]) {
        let mut state = self.lock();
        for dir in dirs {
            let file = dir.join(format!("{NONCE_PREFIX}{}", sanitize(nonce)));
            let created = fs::OpenOptions::new().write(true).create_new(true).open(&file);
            if created.and_then(|mut f| f.write_all(nonce.as_bytes())).is_ok() {
                state.nonce_files.push(file);
            }
        }
        state.dirs = dirs.to_vec();
    }

    /// For each directory, those of the nonces whose files are visible there.
    fn visible_nonces(&self, nonces: &[String]) -> Vec<Vec<String>> {
        let dirs = self.lock().dirs.clone();
        // Listing the directory makes NFS clients refresh their cache.
        let list = |dir: &PathBuf| {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let visible = |dir: &PathBuf| {
            let names = list(dir);
            let is_visible = |nonce: &&String| names.contains(&format!("{NONCE_PREFIX}{}", sanitize(nonce)));
            nonces.iter().filter(is_visible).cloned().collect()
        };
        dirs.iter().map(visible).collect()
    }
}

impl Drop for ProbeState {
    fn drop(&mut self) {
        self.nonce_files.iter().for_each(|file| _ = fs::remove_file(file));
    }
}

/// Opens a TCP port that sends a greeting to every process that connects. Returns both.
fn listen(nonce: &str) -> Option<(u16, String)> {
    let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))];
    let listener = TcpListener::bind(&any[..]).ok()?;
    let port = listener.local_addr().ok()?.port();
    let greeting = sanitize(nonce);
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

/// A nonce reduced to characters that are safe in a file name.
fn sanitize(nonce: &str) -> String {
    nonce.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(64).collect()
}

/// Connects to all peers at once. Returns the time of each connection in milliseconds, or why it
/// failed.
fn connect_to_peers(peers: &[PeerListener], timeout: Duration) -> Vec<(String, diagnostic::Result<f64>)> {
    let connect = |peer: &PeerListener| {
        let start = Instant::now();
        connect_to_peer(peer, timeout).map(|()| start.elapsed().as_secs_f64() * 1e3)
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

/// Tries the addresses of a peer until one answers with the peer's greeting.
fn connect_to_peer(peer: &PeerListener, timeout: Duration) -> diagnostic::Result<()> {
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
    use contract::{job::JobSpec, preflight::PreflightReport, probe::LibraryReport};

    struct FakePreflight;

    impl Preflight for FakePreflight {
        fn check_gpus(&self, _: &JobSpec) -> diagnostic::Result<()> {
            Ok(())
        }

        fn gpu_libraries(&self, directories: &[PathBuf]) -> Vec<LibraryReport> {
            let missing = Diagnostic::error(host::CUDA_LIBRARY_MISSING, format!("not in {directories:?}"));
            vec![LibraryReport { name: "one".into(), required: true, result: Err(missing) }]
        }

        fn check_job(&self, _: &JobSpec, _: u32, _: u32) -> PreflightReport {
            PreflightReport::default()
        }
    }

    fn inspect(
        prober: &Prober,
        nonce: &str,
        dirs: Vec<PathBuf>,
        cuda: Option<Vec<PathBuf>>,
    ) -> Box<contract::probe::HostInspection> {
        match prober.run(Probe::Inspect { nonce: nonce.into(), dirs, cuda }) {
            ProbeAnswer::Inspect(report) => report,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn libraries_are_reported_only_on_request() {
        let prober = Prober::new(&FakePreflight);
        assert!(inspect(&prober, "n", vec![], None).gpus.libraries.is_empty());
        let libraries = inspect(&prober, "n", vec![], Some(vec!["/own".into()])).gpus.libraries;
        let error = libraries[0].result.as_ref().expect_err("missing");
        assert_eq!((error.code(), error.message()), (host::CUDA_LIBRARY_MISSING, "not in [\"/own\"]"));
    }

    #[test]
    fn a_host_inspects_itself_and_connects_to_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let prober = Prober::new(&FakePreflight);
        let dirs = vec![dir.path().join("not/yet"), dir.path().to_owned()];
        let report = inspect(&prober, "n-1/..", dirs, None);
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
        let probe = Probe::Connect {
            peers: vec![peer(port, &report.greeting), peer(port, "other"), peer(closed, "none")],
            nonces: vec!["n-1/..".into(), "n-2".into()],
            timeout_ms: 2000,
        };
        let ProbeAnswer::Connect { peers, nonces } = prober.run(probe) else { panic!("another answer") };
        let codes: Vec<_> = peers.iter().map(|(_, r)| r.as_ref().err().map(Diagnostic::code)).collect();
        assert_eq!(codes, [None, Some(host::PEER_MISMATCH), Some(host::PEER_UNREACHABLE)]);
        assert_eq!(nonces, [["n-1/.."], ["n-1/.."]]);
        drop(prober);
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 0, "nonce files are removed");
    }
}
