//! Starts an agent on a host over SSH, from a copy of this executable that is first sent to the
//! host if necessary.
//!
//! Every command is `exec /bin/sh -c '…'` without quotes, `!` or backslashes inside, which any
//! login shell (sh, bash, zsh, ksh, csh, fish) passes on unchanged. The command prints its answer
//! on a line with a random marker. Everything before that line is output of the login shell.
use super::{
    bootstrap_scripts::{
        FETCH_TIMEOUT_S, MAX_FETCH_ADDRESSES, build_agent_start_script, build_executable_copy_script,
        build_executable_fetch_script,
    },
    channel_line_reader::{ChannelLineReader, MAX_LINE_BYTES},
    connection_progress::ConnectionProgress,
    copy_failure::{classify_copy_failure, make_printable_excerpt},
    ssh_error::build_ssh_error,
    ssh_session::{SshChannel, SshExecError, SshSession},
    target::SshTarget,
    tree::{ExecutableSource, TreeHub},
};
use crate::{
    cluster::transport::{AgentStartStep, ConnectionStage},
    connection::{
        encode_frame,
        tree::{TreeFrame, TreeSetup},
    },
    leases::HELLO_TIMEOUT,
};
use diagnostic::{
    Code, Diagnostic,
    codes::{host, ssh},
};
use protocol::frame::{HEADER_BYTES, decode_body, decode_body_length};
use std::{
    fs::File,
    io::{self, Read, Write},
    net::SocketAddr,
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};

/// How long, in milliseconds, launch waits for the answer line of a script or executable that it
/// has started on a host over SSH.
const ANSWER_TIMEOUT_MS: u32 = 30_000;
/// The time without progress after which copying the executable of launch to a host over SSH fails.
const COPY_STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The rate, in bytes per second, from which the time limit for copying launch's executable to a
/// host is computed. The time limit of a copy grows with the size of the executable.
const MIN_COPY_BYTES_PER_SECOND: u64 = 128 << 10;
/// The rate, in bytes per second, from which the time limit for a host to verify its copy of
/// launch's executable is computed.
const MIN_CHECKED_BYTES_PER_SECOND: u64 = 1 << 20;
/// The time limit, in milliseconds, within which a new agent must connect to another agent that
/// passes its messages on to the controller.
const TREE_JOIN_TIMEOUT_MS: u32 = 30_000;
/// The largest number of bytes that the login shell of a host may print before launch's script on
/// the host answers. The start of the agent fails if the shell prints more.
const MAX_SHELL_OUTPUT_BYTES: usize = MAX_LINE_BYTES;
/// The number of bytes of the executable that are written to the SSH connection at once.
const CHUNK_BYTES: usize = 256 << 10;

/// The executable file of this process with its hash, which is copied to hosts that do not have it.
#[derive(Debug)]
pub(super) struct LaunchExecutable {
    file: File,
    /// The BLAKE3 hash of the executable, in hexadecimal.
    pub(super) hash: String,
    size: u64,
    /// The SHA-256 hash of the executable, in hexadecimal. Computed when it is first needed.
    sha256: Mutex<Option<String>>,
}

impl LaunchExecutable {
    /// Returns the executable file of this process, which is opened and hashed at the first call.
    /// Later calls return the result of the first call.
    pub(super) fn open_current() -> diagnostic::Result<&'static LaunchExecutable> {
        static CURRENT: OnceLock<diagnostic::Result<LaunchExecutable>> = OnceLock::new();
        let open = || Self::open_and_hash().map_err(|error| build_unreadable_error(&error));
        CURRENT.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// Opens the executable file of this process and computes its hash.
    fn open_and_hash() -> io::Result<LaunchExecutable> {
        let file = File::open("/proc/self/exe")?;
        let size = file.metadata()?.len();
        let hash = crate::executable::hash_executable()?;
        Ok(LaunchExecutable { file, hash, size, sha256: Mutex::new(None) })
    }

    /// Returns the SHA-256 hash of launch's executable, in hexadecimal, which is computed at the
    /// first call. The hash is for programs of hosts that know no BLAKE3.
    fn read_sha256(&self) -> io::Result<String> {
        let mut known = self.sha256.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hash) = &*known {
            return Ok(hash.clone());
        }
        let hash = crate::executable::compute_executable_sha256()?;
        Ok(known.insert(hash).clone())
    }
}

/// Builds the error that the executable file of this process cannot be read.
fn build_unreadable_error(error: &io::Error) -> Diagnostic {
    Diagnostic::error(host::EXECUTABLE_UNREADABLE, "cannot read the executable of this process")
        .with_cause(error)
}

/// An agent that was started on another host over SSH, with the channel that carries its stdin and
/// stdout.
pub(super) struct RemoteAgent {
    pub(super) channel: SshChannel,
    /// The bytes of the control stream that were read together with the marker.
    pub(super) leftover: Vec<u8>,
}

/// The host, the SSH session, launch's executable and the progress record of the connection, from
/// which an agent is started over SSH.
pub(super) struct AgentStartInputs<'a> {
    pub(super) target: &'a SshTarget,
    pub(super) session: &'a SshSession,
    pub(super) executable: &'a LaunchExecutable,
    pub(super) progress: &'a ConnectionProgress,
}

/// Starts an agent on a host over an SSH session, after copying the executable of launch to the
/// host if necessary. If the host lacks the executable, calls `begin_copy` and then copies the
/// executable. In a tree, the executable comes from a host that has it. Blocks.
pub(super) fn start_remote_agent(
    start: &AgentStartInputs<'_>,
    tree: Option<&TreeHub>,
    begin_copy: impl FnOnce(),
) -> diagnostic::Result<RemoteAgent> {
    let AgentStartInputs { target, session, executable, progress } = *start;
    progress.set_stage(ConnectionStage::Exec);
    let marker = generate_answer_marker().map_err(|error| {
        let message = format!("cannot read random numbers for the connection to host {}", target.name);
        build_ssh_error(target, ssh::SSH_SESSION_LIMIT, message).with_cause(&error)
    })?;
    let mut bootstrap =
        AgentBootstrap { target, session, executable, progress, marker, in_tree: tree.is_some() };
    let not_runnable = match bootstrap.run_executable_as_agent()? {
        AgentStartResult::Running(agent) => return Ok(agent),
        AgentStartResult::Missing => None,
        AgentStartResult::NotRunnable(error) => Some(error),
    };
    begin_copy();
    // Through the program `ssh`, no script can follow one that has failed. The first error is then
    // the reason.
    bootstrap.copy_or_fetch_executable(tree).map_err(|error| not_runnable.unwrap_or(error))?;
    progress.report_start_step(AgentStartStep::Started);
    match bootstrap.run_executable_as_agent()? {
        AgentStartResult::Running(agent) => Ok(agent),
        AgentStartResult::Missing => {
            let message = "the executable was copied and has been removed again";
            Err(bootstrap
                .build_error(host::EXECUTABLE_REMOVED, message)
                .with_help("check whether a program on the host cleans ~/.cache/launch"))
        }
        AgentStartResult::NotRunnable(error) => Err(error),
    }
}

/// Sends a new agent the addresses of possible parents in the tree of agents, and waits until the
/// new agent has connected to one of them. Fails if the agent cannot connect to it. Blocks.
pub(super) fn make_agent_join_tree(
    AgentStartInputs { target, session, progress, .. }: &AgentStartInputs<'_>,
    agent: RemoteAgent,
    setup: TreeSetup,
) -> diagnostic::Result<()> {
    let RemoteAgent { mut channel, leftover } = agent;
    session.set_timeout(TREE_JOIN_TIMEOUT_MS);
    let exchange = || -> io::Result<TreeFrame> {
        let frame = encode_frame(&TreeFrame::Setup(Box::new(setup))).map_err(io::Error::other)?;
        channel.write_all(&frame)?;
        channel.flush()?;
        let mut input = leftover.as_slice().chain(&mut channel);
        let mut header = [0; HEADER_BYTES];
        input.read_exact(&mut header)?;
        let length = decode_body_length(header).map_err(io::Error::other)?;
        let mut body = Vec::new();
        input.take(u64::from(length)).read_to_end(&mut body)?;
        decode_body(&body).map_err(io::Error::other)
    };
    match exchange() {
        Ok(TreeFrame::Joined) => {
            // Otherwise libssh2 would wait for the end of the agent before it closes the channel.
            progress.shut_down_current_socket();
            Ok(())
        }
        Ok(TreeFrame::NotJoined(error)) => Err(error),
        Ok(_) => Err(build_tree_join_error(target, &io::Error::from(io::ErrorKind::InvalidData))),
        Err(error) => Err(build_tree_join_error(target, &error)),
    }
}

/// Builds the error that a newly started agent could not connect to another agent in the tree of
/// agents.
fn build_tree_join_error(target: &SshTarget, error: &io::Error) -> Diagnostic {
    let message = format!("the agent on host {} did not connect to another host of the job", target.name);
    build_ssh_error(target, host::TREE_PARENT_UNREACHABLE, message).with_cause(error).with_remedy()
}

/// The time limit for an answer line from a script on a host, with the advice that the error
/// contains if the answer comes too late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AwaitedAnswer {
    limit_ms: u32,
    /// The advice in the error that the answer is late.
    help: &'static str,
}

impl AwaitedAnswer {
    /// Returns the time limit and the advice for the first answer line from a script in the login
    /// shell of a host.
    const fn of_shell() -> AwaitedAnswer {
        let help = "check whether the login shell of this user waits for something";
        AwaitedAnswer { limit_ms: ANSWER_TIMEOUT_MS, help }
    }

    /// Returns how long to wait for a host to report a complete and verified copy of launch's
    /// executable, and the advice to the user if the report is late. The host may have to fetch the
    /// copy from another host for `fetch_s` seconds before.
    fn of_copy(size: u64, fetch_s: u32) -> AwaitedAnswer {
        let check_ms = size.div_ceil(MIN_CHECKED_BYTES_PER_SECOND).saturating_mul(1000);
        let check_ms = u32::try_from(check_ms).unwrap_or(u32::MAX);
        let limit_ms = (ANSWER_TIMEOUT_MS + fetch_s * 1000).saturating_add(check_ms);
        AwaitedAnswer { limit_ms, help: "check the load of the host, and the disk of ~/.cache" }
    }
}

/// Returns the time limit for copying launch's executable, which has `size` bytes, to a host and
/// starting it there. The copy counts at [`MIN_COPY_BYTES_PER_SECOND`], in addition to the limit
/// for a start without a copy.
fn compute_copy_time_limit(size: u64) -> Duration {
    HELLO_TIMEOUT + Duration::from_secs(size.div_ceil(MIN_COPY_BYTES_PER_SECOND))
}

/// Generates a random text of 128 bits that marks the answers of launch's scripts in the output of
/// a host.
fn generate_answer_marker() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().fold("launch-".to_owned(), |text, b| text + &format!("{b:02x}")))
}

/// The result of an attempt to start the executable of launch on a host: a running agent, or that
/// the host lacks the executable or cannot run it.
enum AgentStartResult {
    /// The host had the executable, and the agent runs.
    Running(RemoteAgent),
    /// The host does not have this executable.
    Missing,
    /// The host had the executable and could not run it, for the reason in the error.
    NotRunnable(Diagnostic),
}

/// Performs the steps of starting one agent on a host over an SSH session, such as copying launch's
/// executable.
struct AgentBootstrap<'a> {
    target: &'a SshTarget,
    session: &'a SshSession,
    executable: &'a LaunchExecutable,
    progress: &'a ConnectionProgress,
    /// The random text that precedes each answer of the host.
    marker: String,
    /// Whether the agent becomes a part of a tree.
    in_tree: bool,
}

impl AgentBootstrap<'_> {
    /// Builds an error that the agent cannot be started on the host, with the name of the host.
    fn build_error(&self, code: Code, message: impl AsRef<str>) -> Diagnostic {
        let message = format!("cannot start the agent on host {}: {}", self.target.name, message.as_ref());
        build_ssh_error(self.target, code, message)
    }

    /// Runs the shell script `script` on the host, in a new channel of the SSH session. Returns the
    /// reader of its output.
    fn exec_script(&self, script: &str) -> diagnostic::Result<ChannelLineReader> {
        self.progress.check_not_aborted(&self.target.name)?;
        self.session.set_timeout(ANSWER_TIMEOUT_MS);
        let channel = self.session.exec_script(script).map_err(|error| match error {
            SshExecError::Rejected(reason) => self
                .build_error(ssh::SSH_COMMAND_REJECTED, format!("the host runs no commands: {reason}"))
                .with_help(
                    "let this user run commands over SSH (`ForceCommand`, a restricted key or \
                     `MaxSessions` may forbid it)",
                ),
            SshExecError::Connection(error) => error,
        })?;
        Ok(ChannelLineReader { channel, unread: Vec::new() })
    }

    /// Runs the cached copy of launch's executable on the host as an agent, if the host has it.
    /// Fails if the host has another architecture.
    fn run_executable_as_agent(&mut self) -> diagnostic::Result<AgentStartResult> {
        let LaunchExecutable { hash, size, .. } = self.executable;
        let script = build_agent_start_script(&self.marker, hash, *size, self.in_tree);
        let mut reader = self.exec_script(&script)?;
        let answer = match self.read_script_answer(&mut reader, AwaitedAnswer::of_shell()) {
            // An agent on another host with the same home directory may have removed the executable
            // after the script has found it. A damaged executable is replaced, too.
            Err(error) if error.code() == host::EXECUTABLE_NOT_RUNNABLE => {
                return Ok(AgentStartResult::NotRunnable(error));
            }
            answer => answer?,
        };
        let mut words = answer.split(' ');
        match (words.next(), words.next()) {
            (Some("agent"), _) => {
                self.progress.set_stage(ConnectionStage::Agent);
                Ok(AgentStartResult::Running(RemoteAgent {
                    channel: reader.channel,
                    leftover: reader.unread,
                }))
            }
            (Some("missing"), Some(machine)) => {
                reader.channel.close();
                self.check_architecture(machine)?;
                Ok(AgentStartResult::Missing)
            }
            _ => Err(self.build_error(
                ssh::SSH_ANSWER_INVALID,
                format!("unexpected answer to a command: `{}`", make_printable_excerpt(&answer)),
            )),
        }
    }

    /// Reads the output of a script on the host up to a line with the random marker text, and
    /// returns the rest of this line as the script's answer. Records the text before the marker as
    /// output of the login shell, in place of earlier output. Fails if that text is longer than
    /// [`MAX_SHELL_OUTPUT_BYTES`]. Also fails if the host prints nothing for the time limit of the
    /// `awaited` answer.
    fn read_script_answer(
        &self,
        reader: &mut ChannelLineReader,
        awaited: AwaitedAnswer,
    ) -> diagnostic::Result<String> {
        self.session.set_timeout(awaited.limit_ms);
        let mut shell_output = Vec::new();
        loop {
            match reader.read_line() {
                Ok(Some(line)) => match find_bytes(&line, self.marker.as_bytes()) {
                    Some(offset) => {
                        shell_output.extend(&line[..offset]);
                        self.progress.set_shell_output(&shell_output);
                        let answer = &line[offset + self.marker.len()..];
                        return Ok(String::from_utf8_lossy(answer).trim().to_owned());
                    }
                    None => shell_output.extend(line),
                },
                Ok(None) => return Err(self.build_shell_exit_error(reader, &shell_output)),
                Err(error) => return Err(self.build_answer_read_error(&error, &shell_output, awaited)),
            }
            if shell_output.len() > MAX_SHELL_OUTPUT_BYTES {
                let message = format!(
                    "the login shell printed more than {} KiB before a command ran{}",
                    MAX_SHELL_OUTPUT_BYTES >> 10,
                    format_output_tail(&shell_output)
                );
                return Err(self
                    .build_error(ssh::SSH_SHELL_OUTPUT_TOO_LONG, message)
                    .with_help("let its start-up files print nothing when there is no terminal"));
            }
        }
    }

    /// Builds the error that the answer of a script on the host could not be read, because the
    /// connection failed or the time limit passed.
    fn build_answer_read_error(
        &self,
        error: &io::Error,
        shell_output: &[u8],
        awaited: AwaitedAnswer,
    ) -> Diagnostic {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                let seconds = awaited.limit_ms / 1000;
                let tail = format_output_tail(shell_output);
                let message = format!("no answer to a command within {seconds} s{tail}");
                self.build_error(ssh::SSH_SHELL_TIMEOUT, message)
                    .with_field("seconds", seconds)
                    .with_help(awaited.help)
            }
            _ => self.build_error(ssh::SSH_CONNECTION_LOST, "the SSH connection was lost").with_cause(error),
        }
    }

    /// Builds the error that the output of a script on the host has ended without the script's
    /// answer.
    fn build_shell_exit_error(&self, reader: &mut ChannelLineReader, shell_output: &[u8]) -> Diagnostic {
        if let Some(failure) = reader.channel.explain_output_end(self.target) {
            return failure;
        }
        let (code, stderr) = reader.channel.wait_for_exit();
        let output = [shell_output, b"\n", stderr.as_bytes()].concat();
        let tail = format_output_tail(&output);
        match code {
            126 | 127 => self
                .build_error(
                    host::EXECUTABLE_NOT_RUNNABLE,
                    format!("the executable does not run (exit code {code}){tail}"),
                )
                .with_help(format!(
                    "remove ~/.cache/launch/bin/{} on the host; it is copied again",
                    self.executable.hash
                )),
            _ => self
                .build_error(
                    ssh::SSH_SHELL_EXITED,
                    format!("the login shell exited (exit code {code}) before a command ran{tail}"),
                )
                .with_help("try `ssh HOST true`; the login shell or its start-up files exit at once"),
        }
        .with_field("exit_code", code)
        .with_field("output", join_last_lines(&output))
    }

    /// Copies the executable of launch to the host, either from another host that has it or from
    /// this machine.
    fn copy_or_fetch_executable(&mut self, tree: Option<&TreeHub>) -> diagnostic::Result<()> {
        let step = AgentStartStep::Copying(compute_copy_time_limit(self.executable.size));
        let Some(tree) = tree else {
            self.progress.report_start_step(step);
            return self.copy_executable();
        };
        self.progress.report_start_step(AgentStartStep::Waiting);
        let source = tree.wait_for_executable_source(|| self.progress.is_aborted());
        self.progress.check_not_aborted(&self.target.name)?;
        let Some(source) = source else { return Ok(()) };
        self.progress.report_start_step(step);
        let mut result = match &source {
            ExecutableSource::Controller => self.copy_executable(),
            ExecutableSource::Agent(parent) => {
                self.fetch_executable(&parent.addresses, tree.executable_fetch_token())
            }
        };
        tree.release_executable_source(&source);
        if let (ExecutableSource::Agent(_), Err(error)) = (&source, &result) {
            // The host may lack a program, or its network may not reach the other host.
            tracing::info!(target: "tree", host = self.target.name, %error, "copying the executable over SSH");
            self.progress.report_start_step(step);
            result = self.copy_executable();
        }
        result
    }

    /// Makes the host fetch the executable of launch from another host, whose agent serves it at
    /// the addresses `addresses`. The host checks the copy and then moves it to its path in the
    /// cache directory.
    fn fetch_executable(&mut self, addresses: &[SocketAddr], token: &str) -> diagnostic::Result<()> {
        let sha256 = self.executable.read_sha256().map_err(|error| build_unreadable_error(&error))?;
        let LaunchExecutable { hash, size, .. } = self.executable;
        let script = build_executable_fetch_script(&self.marker, (hash, &sha256, *size), addresses, token);
        let mut reader = self.exec_script(&script)?;
        let awaited = AwaitedAnswer::of_copy(*size, MAX_FETCH_ADDRESSES as u32 * FETCH_TIMEOUT_S);
        let answer = self.read_script_answer(&mut reader, awaited)?;
        if answer != "done" {
            return Err(self.build_copy_error(&answer, &mut reader));
        }
        reader.channel.close();
        Ok(())
    }

    /// Copies the executable of launch from this machine to the host over SSH. The copy is checked
    /// on the host and then moved to its path in the cache directory.
    fn copy_executable(&mut self) -> diagnostic::Result<()> {
        let LaunchExecutable { hash, size, .. } = self.executable;
        let mut reader = self.exec_script(&build_executable_copy_script(&self.marker, hash, *size))?;
        let answer = self.read_script_answer(&mut reader, AwaitedAnswer::of_shell())?;
        if answer != "ready" {
            return Err(self.build_copy_error(&answer, &mut reader));
        }
        let answer = match self.send_executable(&mut reader.channel) {
            // If the host stopped reading, its answer is the reason. If the connection failed, the
            // next read fails, too.
            Ok(()) | Err(ExecutableSendError::Remote) => {
                self.read_script_answer(&mut reader, AwaitedAnswer::of_copy(*size, 0))?
            }
            Err(ExecutableSendError::Local(error)) => return Err(build_unreadable_error(&error)),
        };
        if answer != "done" {
            return Err(self.build_copy_error(&answer, &mut reader));
        }
        reader.channel.close();
        Ok(())
    }

    /// Sends launch's executable over the SSH channel to the script that stores the executable on
    /// the host, and then closes the script's stdin.
    fn send_executable(&self, channel: &mut SshChannel) -> Result<(), ExecutableSendError> {
        use std::os::unix::fs::FileExt;
        let file = &self.executable.file;
        // The file is read at explicit offsets, because copies to several hosts share the
        // descriptor.
        let mut offset = 0;
        let mut chunk = vec![0; CHUNK_BYTES];
        // What the start-up files of the login shell print on stderr is no answer of the script.
        let unread = channel.count_unread_bytes();
        loop {
            let n = file.read_at(&mut chunk, offset).map_err(ExecutableSendError::Local)?;
            if n == 0 {
                break;
            }
            let written =
                self.session.write_input_until_answer(channel, &chunk[..n], unread, COPY_STALL_TIMEOUT);
            written.map_err(|_| ExecutableSendError::Remote)?;
            offset += n as u64;
        }
        channel.end_input().map_err(|_| ExecutableSendError::Remote)
    }

    /// Builds the error that a script could not store launch's executable on the host, from the
    /// script's answer line `fail STEP CODE`.
    fn build_copy_error(&self, answer: &str, reader: &mut ChannelLineReader) -> Diagnostic {
        let (_, stderr) = reader.channel.wait_for_exit();
        let failure = classify_copy_failure(answer, &stderr);
        let diagnostic =
            self.build_error(failure.code, failure.message + &format_output_tail(stderr.as_bytes()));
        match failure.help {
            Some(help) => diagnostic.with_help(help),
            None => diagnostic,
        }
    }

    /// Fails if `machine`, the CPU architecture of the host, differs from the architecture for
    /// which this executable was built.
    fn check_architecture(&self, machine: &str) -> diagnostic::Result<()> {
        let local = std::env::consts::ARCH;
        if machine == local {
            return Ok(());
        }
        let message =
            format!("the architecture of the host is {machine}, and this executable is for {local}");
        Err(self
            .build_error(host::EXECUTABLE_ARCHITECTURE_MISMATCH, message)
            .with_field("architecture", machine)
            .with_field("expected", local)
            .with_help(format!("remove the host from the job, or start launch on a {machine} machine")))
    }
}

/// The reason why launch's executable was not sent to a host: a lost connection, or an unreadable
/// executable file on this machine.
enum ExecutableSendError {
    /// The host closed the stream, or the connection failed.
    Remote,
    /// The executable cannot be read on this machine.
    Local(io::Error),
}

/// Formats the last three nonempty lines of a remote command's output for the end of an error
/// message. The text is `; its output: "…"`, or empty if the output is empty.
fn format_output_tail(output: &[u8]) -> String {
    let tail = join_last_lines(output);
    if tail.is_empty() { tail } else { format!("; its output: \"{tail}\"") }
}

/// Joins the last three nonempty lines of a remote command's output with ` / `. Replaces control
/// characters.
fn join_last_lines(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    make_printable_excerpt(&lines[lines.len().saturating_sub(3)..].join(" / "))
}

/// Returns the offset in `text` at which the bytes `part` occur first, or `None` if they do not
/// occur.
fn find_bytes(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_time_to_check_a_large_executable() {
        assert_eq!(AwaitedAnswer::of_shell().limit_ms, ANSWER_TIMEOUT_MS);
        // A loaded host took more than 30 s for an executable of 204 MB.
        let mib = 1 << 20;
        assert_eq!(AwaitedAnswer::of_copy(204 * mib, 0).limit_ms, 30_000 + 204_000);
        assert_eq!(AwaitedAnswer::of_copy(mib + 1, 60).limit_ms, 30_000 + 60_000 + 2000);
        assert_eq!(AwaitedAnswer::of_copy(u64::MAX, 60).limit_ms, u32::MAX);
        let size = 204 * mib;
        let limit = Duration::from_millis(AwaitedAnswer::of_copy(size, 0).limit_ms.into());
        assert!(limit < compute_copy_time_limit(size), "the controller waits at least as long");
    }
}
