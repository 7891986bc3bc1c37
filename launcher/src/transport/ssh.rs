//! Agents on other hosts, over SSH: one connection for each, on a thread of its own, which gets connected, gets the executable
//! running there, and then carries the control stream. No port is opened and nothing goes through the shell but one path.
mod auth;
mod bootstrap;
mod config;
mod connect;
mod known_hosts;
mod progress;
mod pump;
mod target;

pub(crate) use progress::{Progress, Stage};

use super::{AgentProcess, Carrier, Refusal, Transport};
use bootstrap::Executable;
use contract::{control::ExitStatus, hosts::Host, job::SshSpec};
use std::{
    collections::HashMap,
    io,
    os::unix::net::UnixStream as StdStream,
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};
use target::{Resolver, Target};
use tokio::net::UnixStream;

/// Number of the stream that a remote process's stderr comes on (RFC 4254, 5.2).
const STDERR: i32 = 1;
/// Stack of a connection's thread, bytes: there may be thousands.
const STACK: usize = 512 << 10;
/// Hosts that are connected to through one jump host at once: its sshd turns callers away from the eleventh on.
const JUMP_PARALLEL: u32 = 8;

/// Other hosts.
pub(crate) struct Ssh {
    /// By name.
    hosts: HashMap<String, Host>,
    resolver: Arc<Resolver>,
    executable: &'static Executable,
    turns: Arc<Turns>,
    jump_turns: Arc<Turns>,
}

impl Ssh {
    /// Reads what is the same for all hosts; relative paths of the job are relative to `base`.
    pub(crate) fn new(spec: &SshSpec, hosts: &[Host], base: &Path) -> Result<Ssh, Refusal> {
        let executable = Executable::own().map_err(|message| Refusal { message, hint: None })?;
        Ok(Ssh {
            hosts: hosts.iter().map(|host| (host.name(), host.clone())).collect(),
            resolver: Arc::new(Resolver::new(spec, base)?),
            executable,
            turns: Arc::new(Turns::new(spec.parallel)),
            jump_turns: Arc::new(Turns::new(spec.parallel.min(JUMP_PARALLEL))),
        })
    }

    /// Starts an agent on the host of this name; its connection's progress can be watched.
    pub(crate) fn begin(&self, name: &str) -> io::Result<(AgentProcess, Arc<Progress>)> {
        let host =
            self.hosts.get(name).ok_or_else(|| io::Error::other(format!("no host is called {name}")))?;
        let (control, far) = StdStream::pair()?;
        let (talk, talk_far) = StdStream::pair()?;
        let progress = Arc::new(Progress::default());
        let task = Task {
            host: host.clone(),
            resolver: self.resolver.clone(),
            executable: self.executable,
            turns: self.turns.clone(),
            jump_turns: self.jump_turns.clone(),
            progress: progress.clone(),
            control: far,
            talk: talk_far,
        };
        thread::Builder::new().name("ssh".into()).stack_size(STACK).spawn(move || task.run())?;
        let (output, input) = stream(control)?.into_split();
        let process = AgentProcess {
            carrier: Carrier::Connection(Box::new(progress.clone())),
            input: Box::new(input),
            output: Box::new(output),
            talk: Box::new(stream(talk)?),
        };
        Ok((process, progress))
    }
}

fn stream(stream: StdStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

impl Transport for Ssh {
    fn start(&mut self, hosts: &[String]) -> Vec<io::Result<AgentProcess>> {
        hosts.iter().map(|name| self.begin(name).map(|(process, _)| process)).collect()
    }

    fn learn(&mut self, hosts: &[Host]) {
        self.hosts.extend(hosts.iter().map(|host| (host.name(), host.clone())));
    }
}

/// One connection's thread.
struct Task {
    host: Host,
    resolver: Arc<Resolver>,
    executable: &'static Executable,
    turns: Arc<Turns>,
    jump_turns: Arc<Turns>,
    progress: Arc<Progress>,
    control: StdStream,
    talk: StdStream,
}

impl Task {
    fn run(self) {
        let (refusal, status) = match self.carry() {
            Ok(status) => (None, status),
            Err(refusal) => (Some(refusal), None),
        };
        self.progress.end(refusal, status);
        // The streams end when `self` is dropped, and so after it is known why.
    }

    fn carry(&self) -> Result<Option<ExitStatus>, Refusal> {
        let target = self.resolver.target(&self.host)?;
        let (session, running) = self.get_running(&target)?;
        let end = pump::pump(&session, running.channel, &self.control, Some(&self.talk), running.leftover);
        match end.broken {
            Some(why) => Err(Refusal {
                message: format!("{}: the connection was lost: {why}", target.name),
                hint: Some("is the host up, and the network between?".to_owned()),
            }),
            None => Ok(end.status),
        }
    }

    /// Waits for a turn, and keeps it until the agent runs.
    fn get_running(&self, target: &Target) -> Result<(ssh2::Session, bootstrap::Running), Refusal> {
        let turns = if target.jumps.is_empty() { &self.turns } else { &self.jump_turns };
        let _turn = turns.take();
        self.progress.check(&target.name)?;
        let session = connect::connect(target, &self.progress)?;
        let running = bootstrap::start(target, &session, self.executable, &self.progress)?;
        Ok((session, running))
    }
}

/// So many at once.
#[derive(Debug)]
struct Turns {
    free: Mutex<u32>,
    given: Condvar,
}

impl Turns {
    fn new(free: u32) -> Turns {
        Turns { free: Mutex::new(free.max(1)), given: Condvar::new() }
    }

    fn take(&self) -> Turn<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self.given.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Turn(self)
    }
}

/// Given back when dropped.
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.given.notify_one();
    }
}
