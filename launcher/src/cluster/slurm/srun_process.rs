//! [`SrunProcess`]: a running `srun` command whose tasks are the agents on the nodes, with its
//! output and exit status.
use super::{
    slurm_commands::build_start_error,
    srun::{self, REMOVED_ENV_VARIABLES},
};
use crate::{connection::handshake::Invitation, core_dumps::restore_core_dumps_in_child};
use protocol::control::ExitStatus;
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
    sync::{mpsc, watch},
};

/// How many of the last output lines of srun and its agents are kept for error messages.
const TAIL_LINES: usize = 5;
/// The length, in bytes, above which a line of srun's output is split into several lines.
const MAX_LINE_BYTES: u64 = 4 << 10;
/// The number of bytes of srun's output that may wait until the controller reads them. Once the
/// buffer is full, no more output of srun is read.
const MAX_WAITING_OUTPUT_BYTES: usize = 16 << 10;

/// The largest number of launch's warnings that may wait in a queue until they are added to srun's
/// output, which the user sees. Further ones are dropped.
const WARNING_CAPACITY: usize = 16;

/// A running `srun` process whose tasks are agents, with its last lines of output and its exit
/// status. The value is shared by the connections to all of these agents.
#[derive(Debug)]
pub(super) struct SrunProcess {
    pid: u32,
    /// The exit status of srun; `None` until srun was reaped.
    exit_status: watch::Sender<Option<ExitStatus>>,
    /// The last lines of output, at most [`TAIL_LINES`].
    tail: Mutex<VecDeque<String>>,
    /// The nodes whose task has failed, according to srun.
    failed_nodes: Mutex<HashSet<String>>,
    /// Warnings that are added to the output.
    warnings: mpsc::Sender<String>,
}

impl SrunProcess {
    /// Starts `srun` with the arguments `arguments`, so that its tasks are agents; srun does not
    /// get the environment variables `hidden`. Passes `invitation`, with which agents find the
    /// controller, to the agents that srun starts. Returns the step and a stream with the output of
    /// srun and of the agents. The controller must reap srun and then call
    /// [`Self::set_exit_status`].
    pub(super) fn start(
        arguments: &[String],
        invitation: &Invitation,
        hidden: &[String],
    ) -> diagnostic::Result<(Arc<SrunProcess>, DuplexStream)> {
        Self::spawn_srun(arguments, invitation, hidden).map_err(|error| build_start_error("srun", &error))
    }

    /// Starts srun in a separate process group, and a task that forwards srun's output to the
    /// controller. Writes the invitation, with which the agents find the controller, to srun's
    /// standard input, and starts the task that forwards srun's output.
    fn spawn_srun(
        arguments: &[String],
        invitation: &Invitation,
        hidden: &[String],
    ) -> io::Result<(Arc<SrunProcess>, DuplexStream)> {
        let (output, output_writer) = io::pipe()?;
        let mut command = Command::new("srun");
        command.args(arguments);
        REMOVED_ENV_VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
        hidden.iter().for_each(|name| _ = command.env_remove(name));
        command.stdin(Stdio::piped()).stdout(output_writer.try_clone()?).stderr(output_writer);
        // In a separate group, srun does not receive a terminal's Ctrl-C, on which it kills its
        // tasks.
        command.process_group(0);
        // Slurm gives the limits of srun to the agents.
        restore_core_dumps_in_child(&mut command);
        let mut child = command.spawn()?;
        drop(command); // closes this process's copies of the pipe's writing end
        let (warnings, received_warnings) = mpsc::channel(WARNING_CAPACITY);
        let step = Arc::new(SrunProcess {
            pid: child.id(),
            exit_status: watch::Sender::new(None),
            tail: Mutex::default(),
            failed_nodes: Mutex::default(),
            warnings,
        });
        if let Some(mut stdin) = child.stdin.take() {
            // A few hundred bytes fit into the empty pipe. If srun has ended already, its output
            // explains why.
            _ = stdin.write_all(invitation.to_line().as_bytes());
        }
        let output = pipe::Receiver::from_owned_fd(OwnedFd::from(output))?;
        let (near, far) = tokio::io::duplex(MAX_WAITING_OUTPUT_BYTES);
        tokio::spawn(forward_srun_output(output, near, step.clone(), received_warnings));
        // Dropping `child` neither waits for it nor kills it; the controller reaps it.
        Ok((step, far))
    }

    /// Returns the pid of the srun process, even after it has ended.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the pid of the srun process, or `None` once srun was reaped.
    pub(super) fn running_pid(&self) -> Option<u32> {
        self.exit_status().is_none().then_some(self.pid)
    }

    /// Returns the exit status of srun, or `None` until srun was reaped.
    pub(super) fn exit_status(&self) -> Option<ExitStatus> {
        *self.exit_status.borrow()
    }

    /// Records the exit status of srun, once the controller has reaped the process.
    pub(super) fn set_exit_status(&self, status: ExitStatus) {
        self.exit_status.send_replace(Some(status));
    }

    /// Returns a channel through which tasks can wait for the exit status of srun, which is sent
    /// once srun was reaped.
    pub(super) fn exit_receiver(&self) -> watch::Receiver<Option<ExitStatus>> {
        self.exit_status.subscribe()
    }

    /// Joins the last lines of srun's output with ` | ` to a text for an error message.
    pub(super) fn join_output_tail(&self) -> String {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.iter().map(String::as_str).collect::<Vec<_>>().join(" | ")
    }

    /// Adds the warning `text` of launch to the output of srun, which the controller shows to the
    /// user. Never blocks.
    pub(super) fn add_warning_to_output(&self, text: String) {
        // If many warnings wait, the reader does not read.
        _ = self.warnings.try_send(text);
    }

    /// Returns whether srun has reported that the agent on the node `node` ended with an error.
    pub(super) fn has_task_failed_on(&self, node: &str) -> bool {
        self.failed_nodes.lock().unwrap_or_else(PoisonError::into_inner).contains(node)
    }

    /// Adds a line of srun's output to the stored last lines, which error messages contain, and
    /// removes the oldest line if there are too many. Also records the nodes on which the line
    /// reports a failed task.
    fn record_line(&self, line: &str) {
        let mut failed = self.failed_nodes.lock().unwrap_or_else(PoisonError::into_inner);
        failed.extend(srun::parse_failed_nodes(line));
        drop(failed);
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(line.to_owned());
    }
}

/// Forwards the output of srun, mixed with launch's own warnings, to the controller until srun's
/// output ends. Records each line in `step` and writes it to `forwarded`, except for irrelevant
/// warnings. Writes each of `warnings` to `forwarded`, too.
async fn forward_srun_output(
    output: impl AsyncRead + Unpin,
    mut forwarded: DuplexStream,
    step: Arc<SrunProcess>,
    mut warnings: mpsc::Receiver<String>,
) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    loop {
        let free = MAX_LINE_BYTES.saturating_sub(line.len() as u64);
        let text = tokio::select! {
            // If a warning arrives first, the bytes that were read stay in `line`.
            read = async { (&mut output).take(free).read_until(b'\n', &mut line).await } => {
                if line.is_empty() || read.is_err() {
                    return;
                }
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                line.clear();
                if srun::is_irrelevant_warning(&text) {
                    continue;
                }
                step.record_line(&text);
                text
            }
            Some(text) = warnings.recv() => text,
        };
        // srun must not block or fail when the reader has gone.
        _ = forwarded.write_all(format!("{text}\n").as_bytes()).await;
    }
}
