//! The link to the agent: who I am, what I am doing, and what I am asked for.
//!
//! One thread reads (stop, save, abort), one beats once a second; events are written by whoever has them.
use crate::error::{Error, Result};
use contract::{
    control::{FromWorker, Peers, ToWorker, VERSION, WorkerInit},
    env,
    event::{Event, Phase},
    exit::WorkerExit,
    frame,
    job::Reload,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    io::{Read, Write},
    net::SocketAddr,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Time between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);
/// Longest wait for the agent's first message.
const WELCOME_LIMIT: Duration = Duration::from_secs(60);

/// Longest wait for all ranks of the job to listen: they are started at about the same time.
const PEERS_LIMIT: Duration = Duration::from_secs(120);

/// What the agent has asked for, taken up at the next step boundary.
#[derive(Default)]
pub struct Asks {
    stop: AtomicBool,
    save: AtomicBool,
    reload: Mutex<Option<Reload>>,
}

impl Asks {
    /// Asked to save and stop?
    pub fn stop(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Asked to save since the last call?
    pub fn take_save(&self) -> bool {
        self.save.swap(false, Relaxed)
    }

    /// Are there values of a changed job file that nobody has taken?
    pub fn reload(&self) -> bool {
        self.reload.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The newest values of a changed job file, once.
    pub fn take_reload(&self) -> Option<Reload> {
        self.reload.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set_reload(&self, values: Reload) {
        *self.reload.lock().unwrap_or_else(PoisonError::into_inner) = Some(values);
    }
}

/// The worker's end of the link.
pub struct Session {
    write: Mutex<UnixStream>,
    /// What the agent asks for.
    pub asks: Asks,
    phase: Mutex<Phase>,
    step: AtomicU64,
    aborts: Mutex<Aborts>,
}

/// Is told why.
type Abort = Box<dyn Fn(&str) + Send>;

/// What an abort ends beside the collectives that it was told of first.
#[derive(Default)]
struct Aborts {
    all: Vec<Abort>,
    /// The abort that came.
    reason: Option<String>,
}

/// The descriptor that the environment variable names, if it is set.
pub fn inherited(name: &str) -> Result<Option<OwnedFd>> {
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    let fd: Option<RawFd> = value.to_str().and_then(|v| v.parse().ok()).filter(|fd| *fd > 2);
    let fd = fd.ok_or_else(|| Error::job(format!("{name}={value:?} is not an inherited descriptor")))?;
    // SAFETY: fcntl only asks whether the descriptor is open.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(Error::job(format!("{name}={fd}: {}", std::io::Error::last_os_error())));
    }
    // SAFETY: the agent gave this open descriptor to this process alone; each name is read once.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}

impl Session {
    /// Says hello and waits for the agent's welcome.
    pub fn join() -> Result<(Arc<Session>, UnixStream, WorkerInit)> {
        let fd = inherited(env::LAUNCH_CONTROL_FD)?.ok_or_else(|| {
            Error::job("`launch worker` is started by an agent; run `launch job.yaml` instead")
        })?;
        let mut read = UnixStream::from(fd);
        let write = read.try_clone().map_err(broken)?;
        let session = Session {
            write: Mutex::new(write),
            asks: Asks::default(),
            phase: Mutex::new(Phase::Starting),
            step: AtomicU64::new(0),
            aborts: Mutex::default(),
        };
        session.send(&FromWorker::Hello { version: VERSION, pid: std::process::id() })?;
        read.set_read_timeout(Some(WELCOME_LIMIT)).map_err(broken)?;
        let welcome = match receive(&mut read)? {
            Some(ToWorker::Welcome(w)) if w.version == VERSION => *w,
            Some(ToWorker::Welcome(w)) => {
                return Err(Error::cluster(format!(
                    "the agent speaks control version {}, this worker {VERSION}: two installations of launch are mixed",
                    w.version
                )));
            }
            other => {
                return Err(Error::failed(format!("the agent's first message was {other:?}, not a welcome")));
            }
        };
        read.set_read_timeout(None).map_err(broken)?;
        Ok((Arc::new(session), read, welcome))
    }

    /// Starts the reader and the heartbeat. An abort, or the agent's end, is given to `abort`, which ends every collective.
    pub fn watch(
        self: &Arc<Self>,
        mut read: UnixStream,
        abort: impl Fn(&str) + Send + 'static,
    ) -> std::io::Result<()> {
        let session = self.clone();
        std::thread::Builder::new().name("session".into()).spawn(move || {
            loop {
                match receive(&mut read) {
                    Ok(Some(ToWorker::Stop)) => session.asks.stop.store(true, Relaxed),
                    Ok(Some(ToWorker::Save)) => session.asks.save.store(true, Relaxed),
                    Ok(Some(ToWorker::Reload(values))) => session.asks.set_reload(values),
                    Ok(Some(ToWorker::Abort { reason })) => {
                        abort(&reason);
                        session.abort_others(&reason);
                    }
                    Ok(Some(ToWorker::Welcome(_) | ToWorker::Peers(_))) => {}
                    Ok(None) | Err(_) => {
                        abort("the agent is gone");
                        session.abort_others("the agent is gone");
                        std::process::exit(WorkerExit::Aborted.code().into());
                    }
                }
            }
        })?;
        let session = self.clone();
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            // Ends with the process; a failed send means the agent is gone, which the reader sees too.
            while session.progress().is_ok() {
                std::thread::sleep(BEAT);
            }
        })?;
        Ok(())
    }

    /// An abort is given to `abort`, too; at once when it has come already.
    pub fn also_abort(&self, abort: impl Fn(&str) + Send + 'static) {
        let mut aborts = self.aborts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &aborts.reason {
            abort(reason);
        }
        aborts.all.push(Box::new(abort));
    }

    fn abort_others(&self, reason: &str) {
        let mut aborts = self.aborts.lock().unwrap_or_else(PoisonError::into_inner);
        aborts.all.iter().for_each(|abort| abort(reason));
        aborts.reason.get_or_insert_with(|| reason.to_owned());
    }

    /// Says where this rank listens, and waits until the controller has told where all others do.
    pub fn meet(&self, read: &mut UnixStream, addresses: Vec<SocketAddr>, epoch: u32) -> Result<Peers> {
        self.progress()?;
        self.send(&FromWorker::Listening { addresses })?;
        let until = Instant::now() + PEERS_LIMIT;
        loop {
            // short enough for the heartbeat, which has no thread yet
            read.set_read_timeout(Some(BEAT)).map_err(broken)?;
            if !readable(read)? {
                if Instant::now() >= until {
                    return Err(Error::cluster(format!(
                        "not all ranks of the job have begun to listen within {} s",
                        PEERS_LIMIT.as_secs()
                    )));
                }
                self.progress()?;
                continue;
            }
            read.set_read_timeout(Some(WELCOME_LIMIT)).map_err(broken)?;
            match receive(read)? {
                Some(ToWorker::Peers(peers)) if peers.epoch == epoch => {
                    read.set_read_timeout(None).map_err(broken)?;
                    return Ok(peers);
                }
                Some(ToWorker::Peers(_) | ToWorker::Welcome(_)) => {}
                Some(ToWorker::Stop) => self.asks.stop.store(true, Relaxed),
                Some(ToWorker::Save) => self.asks.save.store(true, Relaxed),
                Some(ToWorker::Reload(values)) => self.asks.set_reload(values),
                Some(ToWorker::Abort { reason }) => {
                    return Err(Error { exit: WorkerExit::Aborted, message: reason });
                }
                None => {
                    return Err(Error { exit: WorkerExit::Aborted, message: "the agent is gone".into() });
                }
            }
        }
    }

    /// What this rank does from now on.
    pub fn phase(&self, phase: Phase) -> Result<()> {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
        self.progress()
    }

    /// Optimizer steps done.
    pub fn at_step(&self, step: u64) {
        self.step.store(step, Relaxed);
    }

    fn progress(&self) -> Result<()> {
        let phase = *self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        self.send(&FromWorker::Progress { phase, step: self.step.load(Relaxed) })
    }

    /// Reports an event.
    pub fn event(&self, event: Event) -> Result<()> {
        self.send(&FromWorker::Event(event))
    }

    /// Last words. The exit code says the same if they don't arrive.
    pub fn fatal(&self, e: &Error) {
        let _ = self.send(&FromWorker::Fatal { exit: e.exit, message: e.message.clone() });
    }

    fn send(&self, message: &FromWorker) -> Result<()> {
        let frame = frame::encode(message).map_err(unreadable)?;
        self.write.lock().unwrap_or_else(PoisonError::into_inner).write_all(&frame).map_err(broken)
    }
}

/// Is there something to read, or an end? Waits as long as the stream's time limit.
fn readable(read: &UnixStream) -> Result<bool> {
    let limit = read.read_timeout().map_err(broken)?.unwrap_or(WELCOME_LIMIT);
    let mut fds = [PollFd::new(read.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX)) {
        Ok(n) => Ok(n > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(e) => Err(broken(e.into())),
    }
}

/// One message; `None` when the agent closed the link.
fn receive(read: &mut UnixStream) -> Result<Option<ToWorker>> {
    let mut header = [0; frame::HEADER];
    match read.read_exact(&mut header) {
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other.map_err(broken)?,
    }
    let mut body = vec![0; frame::body_length(header).map_err(unreadable)? as usize];
    read.read_exact(&mut body).map_err(broken)?;
    frame::decode(&body).map(Some).map_err(unreadable)
}

fn unreadable(e: frame::LinkError) -> Error {
    Error::failed(format!("the link to the agent: {e}"))
}

fn broken(e: std::io::Error) -> Error {
    Error { exit: WorkerExit::Aborted, message: format!("the link to the agent broke: {e}") }
}
