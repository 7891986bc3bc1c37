//! [`PartProcess`]: the process of a part of `launch gpu-check`, with a time limit.
use super::message::{MESSAGE_PREFIX, PartMessage};
use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, killpg},
    },
    unistd::Pid,
};
use std::{
    collections::VecDeque,
    ffi::OsString,
    io::{self, BufRead, BufReader, Read},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

/// The number of received lines that can wait for the parent. A process that prints faster waits.
const LINE_QUEUE: usize = 64;
/// The longest accepted line of output. The rest of a longer line is dropped.
const MAX_LINE_BYTES: u64 = 4 << 20;
/// The number of lines of other output, such as warnings of libraries, that are kept.
const KEPT_OUTPUT_LINES: usize = 40;
/// The number of characters that are kept of each of these lines.
const KEPT_LINE_CHARS: usize = 400;
/// How long a killed process may take to end. A process that hangs in the driver may take longer,
/// and is then left behind.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between two checks of whether a process has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The command line of the process of a part.
pub(super) struct PartCommand {
    /// A program and its arguments that run the command, such as compute-sanitizer. May be empty.
    pub(super) wrapper: Vec<OsString>,
    pub(super) arguments: Vec<OsString>,
    /// Additional environment variables.
    pub(super) variables: Vec<(&'static str, OsString)>,
}

/// How the process of a part ended.
#[derive(Debug)]
pub(super) enum PartEnd {
    /// The process ended with this status.
    Exited(ExitStatus),
    /// The process ran into its time limit and was killed.
    TimedOut(Duration),
    /// The process could not be started, or its end could not be observed.
    Unobserved(io::Error),
}

/// What a process of a part printed apart from messages, and how it ended.
pub(super) struct PartOutcome {
    pub(super) end: PartEnd,
    pub(super) seconds: f64,
    /// The last lines of stdout and stderr that are no messages.
    pub(super) output: Vec<String>,
}

/// A line of a process of a part: a message, or other output.
enum PartLine {
    Message(PartMessage),
    Other(String),
}

/// Runs the process of a part, and calls `on_message` for each of its messages as soon as it
/// arrives. Kills the process and its descendants after `limit`.
pub(super) fn run_part_process(
    command: &PartCommand,
    limit: Duration,
    mut on_message: impl FnMut(PartMessage),
) -> PartOutcome {
    let began = Instant::now();
    let mut output = VecDeque::new();
    let end = match start(command) {
        Ok(mut child) => {
            let lines = read_lines(&mut child);
            let end = follow(&mut child, &lines, began + limit, limit, |line| match line {
                PartLine::Message(message) => on_message(message),
                PartLine::Other(text) => {
                    output.push_back(text);
                    if output.len() > KEPT_OUTPUT_LINES {
                        output.pop_front();
                    }
                }
            });
            end.unwrap_or_else(PartEnd::Unobserved)
        }
        Err(error) => PartEnd::Unobserved(error),
    };
    PartOutcome { end, seconds: began.elapsed().as_secs_f64(), output: output.into() }
}

/// Starts the process of a part as the leader of a new process group. The kernel kills the process
/// when this process ends.
fn start(part: &PartCommand) -> io::Result<Child> {
    let mut command = match part.wrapper.split_first() {
        None => Command::new("/proc/self/exe"),
        Some((program, arguments)) => {
            let mut command = Command::new(program);
            command.args(arguments).arg(std::env::current_exe()?);
            command
        }
    };
    command
        .args(&part.arguments)
        .envs(part.variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    // SAFETY: the system call is async-signal-safe, and the closure allocates nothing.
    unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
    command.spawn()
}

/// Starts threads that read the lines of the process's stdout and stderr. The channel is closed
/// when both streams have ended.
fn read_lines(child: &mut Child) -> Receiver<PartLine> {
    let (sender, receiver) = sync_channel(LINE_QUEUE);
    let spawn_reader = |stream: Option<Box<dyn Read + Send>>| {
        let sender: SyncSender<PartLine> = sender.clone();
        if let Some(stream) = stream {
            // The thread ends with its stream, which the end of the process closes.
            thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                while let Ok(Some(line)) = read_line(&mut reader) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
    };
    spawn_reader(child.stdout.take().map(|stream| Box::new(stream) as _));
    spawn_reader(child.stderr.take().map(|stream| Box::new(stream) as _));
    receiver
}

/// Reads one line and decodes it if it is a message. Returns `None` at the end of the stream.
fn read_line(reader: &mut impl BufRead) -> io::Result<Option<PartLine>> {
    let mut bytes = Vec::new();
    reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.last() != Some(&b'\n') && bytes.len() as u64 == MAX_LINE_BYTES {
        reader.skip_until(b'\n')?;
    }
    let text = String::from_utf8_lossy(&bytes);
    let message = text.strip_prefix(MESSAGE_PREFIX).and_then(|text| serde_json::from_str(text).ok());
    Ok(Some(message.map_or_else(
        || {
            PartLine::Other(
                diagnostic::terminal_text::filter_line(text.trim_end())
                    .chars()
                    .take(KEPT_LINE_CHARS)
                    .collect(),
            )
        },
        PartLine::Message,
    )))
}

/// Handles the lines of a process until it ends or the time `deadline` is reached. Then kills its
/// process group.
fn follow(
    child: &mut Child,
    lines: &Receiver<PartLine>,
    deadline: Instant,
    limit: Duration,
    mut on_line: impl FnMut(PartLine),
) -> io::Result<PartEnd> {
    let mut status = None;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left.min(END_POLL_INTERVAL * 20)) {
            Ok(line) => on_line(line),
            Err(RecvTimeoutError::Disconnected) => break,
            // A descendant may hold the streams open after the process has ended.
            Err(RecvTimeoutError::Timeout) if status.is_some() => break,
            Err(RecvTimeoutError::Timeout) if left.is_zero() => break,
            Err(RecvTimeoutError::Timeout) => status = child.try_wait()?,
        }
    }
    while status.is_none() && Instant::now() < deadline {
        status = child.try_wait()?;
        thread::sleep(END_POLL_INTERVAL);
    }
    // An error means that the group has no process any more.
    let _ = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
    if let Some(status) = status {
        return Ok(PartEnd::Exited(status));
    }
    let killed = Instant::now();
    while child.try_wait()?.is_none() && killed.elapsed() < END_TIMEOUT {
        thread::sleep(END_POLL_INTERVAL);
    }
    lines.try_iter().take(LINE_QUEUE).for_each(on_line);
    Ok(PartEnd::TimedOut(limit))
}

impl PartEnd {
    /// Describes how a process ended that should not have ended in this way.
    pub(super) fn describe(&self) -> String {
        match self {
            PartEnd::Exited(status) => match (status.code(), status.signal()) {
                (_, Some(number)) => {
                    let name = Signal::try_from(number).map_or("an unknown signal", Signal::as_str);
                    format!("the process was killed by {name}")
                }
                (Some(code), _) => format!("the process ended with exit code {code} and without a result"),
                (None, None) => "the process ended without a result".to_owned(),
            },
            PartEnd::TimedOut(limit) => format!("hung: killed after {:.0} s", limit.as_secs_f64()),
            PartEnd::Unobserved(error) => format!("the process could not be run: {error}"),
        }
    }
}
