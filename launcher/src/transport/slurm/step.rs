//! A step: the srun process that holds agents, from its start to its exit status.
use super::srun::{self, NOT_FOR_AGENTS};
use crate::link::join::Invitation;
use contract::control::ExitStatus;
use std::{
    collections::{HashSet, VecDeque},
    io::{self, Write as _},
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, DuplexStream},
    net::unix::pipe,
    sync::watch,
};

/// Lines of srun that are kept to tell why it ended.
const LAST_WORDS: usize = 5;
/// Longest piece of a line, bytes.
const LINE_MAX: u64 = 4 << 10;
/// Bytes between srun and the controller's reader.
const TALK: usize = 16 << 10;

/// srun's process, shared by the connections to its agents.
#[derive(Debug)]
pub(super) struct Step {
    pid: u32,
    fate: watch::Sender<Option<ExitStatus>>,
    words: Mutex<VecDeque<String>>,
    /// Nodes whose task has ended, as srun says.
    over: Mutex<HashSet<String>>,
}

impl Step {
    /// Starts srun and hands the agents their invitation. The stream is what srun and the agents say.
    pub(super) fn start(
        arguments: &[String],
        invitation: &Invitation,
    ) -> io::Result<(Arc<Step>, DuplexStream)> {
        let (said, output) = io::pipe()?;
        let mut command = Command::new("srun");
        command.args(arguments);
        NOT_FOR_AGENTS.iter().for_each(|name| _ = command.env_remove(name));
        command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output);
        // A group of its own: a terminal's Ctrl-C would have it kill the agents.
        command.process_group(0);
        let mut child = command.spawn().map_err(|error| cannot_start(&error))?;
        drop(command); // and with it our copies of the pipe's end
        let step = Arc::new(Step {
            pid: child.id(),
            fate: watch::Sender::new(None),
            words: Mutex::default(),
            over: Mutex::default(),
        });
        if let Some(mut stdin) = child.stdin.take() {
            // A few hundred bytes: they fit into the empty pipe. If srun is gone already, its words say why.
            _ = stdin.write_all(invitation.to_line().as_bytes());
        }
        let said = pipe::Receiver::from_owned_fd(OwnedFd::from(said))?;
        let (near, far) = tokio::io::duplex(TALK);
        tokio::spawn(listen(said, near, step.clone()));
        // Dropping `child` neither waits for nor kills it; the controller reaps.
        Ok((step, far))
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Its pid while it hasn't been reaped.
    pub(super) fn living(&self) -> Option<u32> {
        self.status().is_none().then_some(self.pid)
    }

    pub(super) fn status(&self) -> Option<ExitStatus> {
        *self.fate.borrow()
    }

    /// It was reaped.
    pub(super) fn ended(&self, status: ExitStatus) {
        self.fate.send_replace(Some(status));
    }

    /// Becomes its exit status.
    pub(super) fn fate(&self) -> watch::Receiver<Option<ExitStatus>> {
        self.fate.subscribe()
    }

    /// What it said last, on one line.
    pub(super) fn last_words(&self) -> String {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        words.iter().map(String::as_str).collect::<Vec<_>>().join(" | ")
    }

    /// Has the task of this node ended with an error?
    pub(super) fn is_over(&self, node: &str) -> bool {
        self.over.lock().unwrap_or_else(PoisonError::into_inner).contains(node)
    }

    fn remember(&self, line: &str) {
        self.over.lock().unwrap_or_else(PoisonError::into_inner).extend(srun::ended_nodes(line));
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if words.len() == LAST_WORDS {
            words.pop_front();
        }
        words.push_back(line.to_owned());
    }
}

fn cannot_start(error: &io::Error) -> io::Error {
    let why = match error.kind() {
        io::ErrorKind::NotFound => "srun isn't in PATH: is Slurm's client installed on this node?".to_owned(),
        _ => format!("srun can't be started: {error}"),
    };
    io::Error::new(error.kind(), why)
}

/// Remembers what srun says, and passes it on without its noise.
async fn listen(said: impl AsyncRead + Unpin, mut talk: DuplexStream, step: Arc<Step>) {
    let mut said = BufReader::new(said);
    let mut line = Vec::new();
    while let Ok(1..) = (&mut said).take(LINE_MAX).read_until(b'\n', &mut line).await {
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if !srun::is_noise(&text) {
            step.remember(&text);
            // Whoever doesn't want to hear it any more shall not stop srun.
            _ = talk.write_all(format!("{text}\n").as_bytes()).await;
        }
        line.clear();
    }
}
