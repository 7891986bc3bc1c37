//! What `launch check` wants to know of a node: looked up here, on threads beside the agent's own.
mod gpu;
mod look;
mod nvml;

use contract::{
    preflight::TrainJudge,
    probe::{MAX_PEERS, Peer, Probe, Probed},
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

/// Begins the names of nonce files.
const NONCE: &str = ".launch-check-";
/// Longest greeting, bytes.
const MAX_GREETING: u64 = 256;
/// For one who connected to take the greeting.
const GREET: Duration = Duration::from_secs(2);

/// What a check has put on this node; goes with the agent.
#[derive(Clone)]
pub(super) struct Prober {
    judge: &'static dyn TrainJudge,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Where nonce files may lie, as they were asked for.
    dirs: Vec<PathBuf>,
    /// Our own nonce files.
    files: Vec<PathBuf>,
    listening: Option<(u16, String)>,
}

impl Prober {
    pub(super) fn new(judge: &'static dyn TrainJudge) -> Self {
        Prober { judge, state: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers on a thread of its own.
    pub(super) fn answer(&self, probe: Probe, tell: impl FnOnce(Probed) + Send + 'static) -> io::Result<()> {
        let own = self.clone();
        thread::Builder::new().name("probe".into()).spawn(move || tell(own.find(probe))).map(drop)
    }

    fn find(&self, probe: Probe) -> Probed {
        match probe {
            Probe::Look { nonce, dirs, cuda } => {
                let mut found = look::look(&dirs);
                found.gpus.libraries = cuda.map_or_else(Vec::new, |folders| self.judge.libraries(&folders));
                let at: Vec<PathBuf> = found.dirs.iter().map(|d| d.at.clone()).collect();
                self.put(&nonce, &at);
                if let Some((port, greeting)) = self.listen(&nonce) {
                    (found.port, found.greeting) = (Some(port), greeting);
                }
                Probed::Look(Box::new(found))
            }
            Probe::Reach { peers, nonces, timeout_ms } => {
                let timeout = Duration::from_millis(timeout_ms.min(60_000));
                Probed::Reach { peers: reach(&peers, timeout), nonces: self.seen(&nonces) }
            }
        }
    }

    /// Puts a nonce file into each directory that takes one.
    fn put(&self, nonce: &str, dirs: &[PathBuf]) {
        let mut state = self.lock();
        for dir in dirs {
            let file = dir.join(format!("{NONCE}{}", safe(nonce)));
            let new = fs::OpenOptions::new().write(true).create_new(true).open(&file);
            if new.and_then(|mut f| f.write_all(nonce.as_bytes())).is_ok() {
                state.files.push(file);
            }
        }
        state.dirs = dirs.to_vec();
    }

    fn seen(&self, nonces: &[String]) -> Vec<Vec<String>> {
        let dirs = self.lock().dirs.clone();
        // A directory listing is what makes NFS look again.
        let names = |dir: &PathBuf| {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let of = |dir: &PathBuf| {
            let names = names(dir);
            nonces.iter().filter(|n| names.contains(&format!("{NONCE}{}", safe(n)))).cloned().collect()
        };
        dirs.iter().map(of).collect()
    }

    /// Opens a port that greets whoever connects.
    fn listen(&self, greeting: &str) -> Option<(u16, String)> {
        let any =
            [SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))];
        let listener = TcpListener::bind(&any[..]).ok()?;
        let port = listener.local_addr().ok()?.port();
        let text = format!("{}\n", safe(greeting));
        let greet = move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                _ = stream.set_write_timeout(Some(GREET));
                _ = stream.write_all(text.as_bytes());
            }
        };
        thread::Builder::new().name("greet".into()).spawn(greet).ok()?;
        let told = (port, safe(greeting));
        self.lock().listening = Some(told.clone());
        Some(told)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.files.iter().for_each(|file| _ = fs::remove_file(file));
    }
}

fn safe(nonce: &str) -> String {
    nonce.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(64).collect()
}

/// All at once; each within the timeout.
fn reach(peers: &[Peer], timeout: Duration) -> Vec<(String, Result<f64, String>)> {
    let one = |peer: &Peer| {
        let began = Instant::now();
        greeted(peer, timeout).map(|()| began.elapsed().as_secs_f64() * 1e3)
    };
    thread::scope(|scope| {
        let started: Vec<_> =
            peers.iter().take(MAX_PEERS).map(|peer| (peer, scope.spawn(move || one(peer)))).collect();
        let joined = started.into_iter().map(|(peer, thread)| {
            (peer.name.clone(), thread.join().unwrap_or_else(|_| Err("the probe failed".to_owned())))
        });
        joined.collect()
    })
}

fn greeted(peer: &Peer, timeout: Duration) -> Result<(), String> {
    let mut last = "it has no address".to_owned();
    for address in peer.addresses.iter().take(8) {
        match greeting(*address, timeout) {
            Ok(text) if text.trim_end() == peer.greeting => return Ok(()),
            Ok(_) => last = format!("{address} is answered by something else"),
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    Err(last)
}

fn greeting(address: SocketAddr, timeout: Duration) -> io::Result<String> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    let mut text = String::new();
    stream.take(MAX_GREETING).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::{job::JobSpec, preflight::Verdict, probe::LibraryLook};

    struct Judge;

    impl TrainJudge for Judge {
        fn gpus(&self, _: &JobSpec) -> Result<(), String> {
            Ok(())
        }

        fn libraries(&self, folders: &[PathBuf]) -> Vec<LibraryLook> {
            let found = Err(format!("not in {folders:?}"));
            vec![LibraryLook { name: "one".into(), needed: true, found }]
        }

        fn judge(&self, _: &JobSpec, _: u32, _: u32) -> Verdict {
            Verdict::default()
        }
    }

    #[test]
    fn libraries_are_looked_for_when_that_is_asked() {
        let libraries =
            |cuda| match Prober::new(&Judge).find(Probe::Look { nonce: "n".into(), dirs: vec![], cuda }) {
                Probed::Look(found) => found.gpus.libraries,
                other => panic!("{other:?}"),
            };
        assert!(libraries(None).is_empty());
        let found = libraries(Some(vec!["/own".into()]));
        assert_eq!(found[0].found, Err("not in [\"/own\"]".into()));
    }

    #[test]
    fn a_node_looks_at_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let prober = Prober::new(&Judge);
        let dirs = vec![dir.path().join("not/yet"), dir.path().to_owned()];
        let Probed::Look(found) = prober.find(Probe::Look { nonce: "n-1/..".into(), dirs, cuda: None })
        else {
            panic!("another answer")
        };
        assert!(!found.hostname.is_empty() && found.cpus > 0 && found.memory > 0 && found.unix_ns > 0);
        assert_eq!(found.arch, std::env::consts::ARCH);
        assert_eq!(found.dirs[0].at, dir.path(), "the nearest that exists");
        assert!(
            found.dirs[1].writable.is_ok() && found.dirs[1].free > 0 && !found.dirs[1].filesystem.is_empty()
        );
        assert!(found.limits.contains_key("nofile"));
        let port = found.port.expect("a port");
        let peer = |port: u16, greeting: &str| Peer {
            name: greeting.to_owned(),
            addresses: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port))],
            greeting: greeting.to_owned(),
        };
        let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
        let asked = Probe::Reach {
            peers: vec![peer(port, &found.greeting), peer(port, "other"), peer(free, "nobody")],
            nonces: vec!["n-1/..".into(), "n-2".into()],
            timeout_ms: 2000,
        };
        let Probed::Reach { peers, nonces } = prober.find(asked) else { panic!("another answer") };
        assert!(peers[0].1.is_ok() && peers[1].1.is_err() && peers[2].1.is_err(), "{peers:?}");
        assert_eq!(nonces, [["n-1/.."], ["n-1/.."]]);
        drop(prober);
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 0, "nothing stays");
    }
}
