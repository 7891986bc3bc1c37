//! [`PartCommand`]: runs a part of `launch gpu-check` in a separate process, with a time limit.
use super::{
    message::{MESSAGE_PREFIX, PartMessage},
    part_filter::PartFilter,
};
use jobspec::env;
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
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

/// The largest number of output lines of a GPU-check process that are queued until the parent
/// process handles them. A process that prints faster waits.
const LINE_QUEUE_CAPACITY: usize = 64;
/// The longest accepted output line, in bytes, of a process that runs one part of the GPU check.
/// The rest of a longer line is dropped.
const MAX_LINE_BYTES: u64 = 4 << 20;
/// The number of first lines, and also of last lines, that are kept of the output of a part of the
/// GPU check.
const KEPT_OUTPUT_LINES: usize = 30;
/// The number of characters to which each kept output line of a part of the GPU check is shortened.
const KEPT_LINE_CHARS: usize = 400;
/// How long the parent process waits for the end of a killed process of the GPU check before it
/// gives up. A process that hangs in the driver may take longer, and is then left behind.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between two checks of whether the process that runs a part of the GPU check has
/// ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The command line of a process that runs one part of the GPU check.
pub(super) struct PartCommand {
    /// A program and its arguments that run the command, such as compute-sanitizer. May be empty.
    pub(super) wrapper: Vec<OsString>,
    pub(super) arguments: Vec<OsString>,
    /// Additional environment variables.
    pub(super) variables: Vec<(&'static str, OsString)>,
}

impl PartCommand {
    /// Creates the command line of a process that runs the part `part` of the GPU check on GPU
    /// number `device`.
    pub(super) fn new(part: &str, device: usize, filter: PartFilter) -> PartCommand {
        let PartFilter { quick, tiny, ops_only: _ } = filter;
        let device = device.to_string();
        let mut arguments: Vec<OsString> =
            ["gpu-check", "--run-part", part, "--device", &device].map(OsString::from).into();
        arguments.extend(quick.then(|| "--quick".into()));
        arguments.extend(tiny.then(|| "--tiny".into()));
        PartCommand { wrapper: Vec::new(), arguments, variables: Vec::new() }
    }
}

/// How a process that ran a part of the GPU check ended: it exited, it was killed at its time
/// limit, or its end could not be observed.
#[derive(Debug)]
pub(super) enum PartEnd {
    /// The process ended with this status.
    Exited(ExitStatus),
    /// The process ran into its time limit and was killed.
    TimedOut(Duration),
    /// The process could not be started, or its end could not be observed.
    Unobserved(io::Error),
}

/// The result of a process that ran a part of the GPU check: its output apart from messages to the
/// parent, how it ended, and how long it ran.
pub(super) struct PartOutcome {
    pub(super) end: PartEnd,
    pub(super) seconds: f64,
    /// The first and the last lines of stdout and stderr that are no messages.
    pub(super) output: Vec<String>,
}

/// A line of output of a GPU-check process: either a message to the parent process, or any other
/// text.
enum PartLine {
    Message(PartMessage),
    Other(String),
}

/// Runs a part of the GPU check in a new process, and passes each message of the process to the
/// callback `on_message` as soon as it arrives. Kills the process and its descendants after
/// `limit`.
pub(super) fn run_part_process(
    command: &PartCommand,
    limit: Duration,
    mut on_message: impl FnMut(PartMessage),
) -> PartOutcome {
    let began = Instant::now();
    let (mut first, mut last) = (Vec::new(), VecDeque::new());
    let end = match start_part_process(command) {
        Ok(mut child) => {
            let lines = spawn_line_readers(&mut child);
            let end = process_lines_until_end(&mut child, &lines, began + limit, limit, |line| match line {
                PartLine::Message(message) => on_message(message),
                PartLine::Other(text) if first.len() < KEPT_OUTPUT_LINES => first.push(text),
                PartLine::Other(text) => {
                    last.push_back(text);
                    if last.len() > KEPT_OUTPUT_LINES {
                        last.pop_front();
                    }
                }
            });
            end.unwrap_or_else(PartEnd::Unobserved)
        }
        Err(error) => PartEnd::Unobserved(error),
    };
    first.extend(last);
    PartOutcome { end, seconds: began.elapsed().as_secs_f64(), output: first }
}

/// Finds compute-sanitizer, which detects invalid accesses to GPU memory, on the PATH or in a CUDA
/// toolkit. Returns the start of a command line.
pub(super) fn find_sanitizer() -> Option<Vec<OsString>> {
    let variable = |name: &str| std::env::var_os(name).unwrap_or_default();
    let on_path = std::env::split_paths(&variable(env::PATH)).collect::<Vec<_>>();
    let toolkits = [variable(env::CUDA_HOME).into(), PathBuf::from("/usr/local/cuda")];
    let directories = on_path.into_iter().chain(toolkits.map(|toolkit| toolkit.join("bin")));
    let program = directories.map(|directory| directory.join("compute-sanitizer")).find(|p| p.is_file())?;
    // launch checks the result of every call. CUDA's libraries look up functions that an older
    // driver lacks, which is not an error.
    let options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1"];
    Some([program.into_os_string()].into_iter().chain(options.map(OsString::from)).collect())
}

/// Asks `nvidia-smi` for the clocks, temperature and power of the GPU at a PCI address. Returns its
/// output, or the reason why there is none.
pub(super) fn query_nvidia_smi(bus_id: &str) -> io::Result<String> {
    const FIELDS: &str = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active";
    let output = Command::new("nvidia-smi")
        .args(["-i", bus_id, "--format=csv,noheader", &format!("--query-gpu={FIELDS}")])
        .stdin(Stdio::null())
        .output()?;
    let text = diagnostic::terminal_text::filter_line(String::from_utf8_lossy(&output.stdout).trim());
    if output.status.success() { Ok(format!("{FIELDS}: {text}")) } else { Err(io::Error::other(text)) }
}

/// Starts the process that runs a part of the GPU check, as the leader of a new process group, so
/// that all its descendants can be killed. The kernel kills the process when this process ends.
fn start_part_process(part: &PartCommand) -> io::Result<Child> {
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

/// Starts threads that read the stdout and the stderr of a process line by line, and returns the
/// channel to which they send the lines. The channel is closed when both streams have ended.
fn spawn_line_readers(child: &mut Child) -> Receiver<PartLine> {
    let (sender, receiver) = sync_channel(LINE_QUEUE_CAPACITY);
    let spawn_reader = |stream: Option<Box<dyn Read + Send>>| {
        let sender: SyncSender<PartLine> = sender.clone();
        if let Some(stream) = stream {
            // The thread ends with its stream, which the end of the process closes.
            thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                while let Ok(Some(line)) = read_nonempty_line(&mut reader) {
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

/// Reads the next nonempty line from the output of a part of the GPU check, and decodes it if it is
/// a message to the parent process. Returns `None` at the end of the stream.
fn read_nonempty_line(reader: &mut impl BufRead) -> io::Result<Option<PartLine>> {
    let mut bytes = Vec::new();
    while bytes.trim_ascii().is_empty() {
        bytes.clear();
        if reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(None);
        }
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

/// Passes the output lines of the process `child` to `on_line` until the process ends, and kills
/// the process group at the time `deadline`.
fn process_lines_until_end(
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
    while child.try_wait()?.is_none() && killed.elapsed() < KILL_TIMEOUT {
        thread::sleep(END_POLL_INTERVAL);
    }
    lines.try_iter().take(LINE_QUEUE_CAPACITY).for_each(on_line);
    Ok(PartEnd::TimedOut(limit))
}

impl PartEnd {
    /// Describes how the process of a part of the GPU check ended, as the reason why the part
    /// failed.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes the lines of a text. Messages become `None`.
    fn decode(bytes: &[u8]) -> Vec<Option<String>> {
        let mut reader = BufReader::with_capacity(16, bytes);
        let lines = std::iter::from_fn(|| read_nonempty_line(&mut reader).expect("no error"));
        let text = |line| if let PartLine::Other(text) = line { Some(text) } else { None };
        lines.map(text).collect()
    }

    #[test]
    fn only_complete_messages_are_accepted() {
        let text =
            b"a warning\r\ngpu-check-message {\"message\":\"done\"}\ngpu-check-message {\"message\":\"do\n\
                     \xff\x1b[31m gpu-check-message {\"message\":\"done\"}\n\nlast";
        let lines = decode(text);
        assert_eq!(lines.len(), 5, "{lines:?}");
        assert_eq!((lines[0].as_deref(), &lines[1]), (Some("a warning"), &None));
        assert!(lines[2..].iter().all(Option::is_some), "{lines:?}");
        assert_eq!(lines[4].as_deref(), Some("last"));
    }

    #[test]
    fn long_lines_are_cut() {
        let mut text = vec![b'x'; MAX_LINE_BYTES as usize + 10];
        text.extend(b"\nnext\n");
        let lines = decode(&text);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].as_ref().map(|line| line.chars().count()), Some(KEPT_LINE_CHARS));
        assert_eq!(lines[1].as_deref(), Some("next"));
    }
}
