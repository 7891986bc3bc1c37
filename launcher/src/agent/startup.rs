//! [`main`]: prepares the process and the control connection of an agent, and runs its driver.
use super::{
    agent_relay::relay_to_agent, connect_back, driver::AgentDriver, executable_cache, probe::Prober, process,
    tree_node,
};
use crate::{
    connection::{handshake::Invitation, read_frame},
    core_dumps::disable_core_dumps,
    processes::become_subreaper,
};
use diagnostic::{Diagnostic, codes::host};
use nix::sys::signal::{SigHandler, Signal, signal};
use protocol::{control::ToAgent, preflight::Preflight};
use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, unix::pipe},
};

/// The options with which the internal command `launch agent` starts an agent (launch's process on
/// each host).
#[derive(Clone)]
pub struct AgentOptions {
    /// The text that the agent prints first, followed by ` agent` on the same line. The line
    /// separates the output of the login shell from the output of the agent. `None` if the agent
    /// was not started over SSH.
    pub marker: Option<String>,
    /// Whether standard input holds an invitation to connect to the controller over TCP. Otherwise
    /// standard input and output are the control connection.
    pub join: bool,
    /// Whether the agent becomes a part of a tree of agents. The first message on its standard
    /// input is then its place in the tree.
    pub tree: bool,
    /// Whether the agent removes its executable file after the start, because the file was copied
    /// for this agent only.
    pub remove_executable: bool,
    /// The preflight checks, with which the agent inspects the libraries for training on GPUs.
    pub preflight: &'static dyn Preflight,
}

/// Runs this process as an agent until the agent exits, and returns the exit code of the process.
/// With a marker, forks first, and this process becomes the watchdog of the agent.
pub fn main(options: AgentOptions) -> u8 {
    if options.remove_executable {
        connect_back::remove_own_executable();
    }
    // An agent with a marker was started by sshd, so no other process of launch watches the agent.
    if options.marker.is_some() {
        match super::watchdog::fork_agent_below_watchdog() {
            Ok(None) => {}
            Ok(Some(code)) => return code,
            Err(error) => {
                return report_start_failure(
                    &Diagnostic::error(
                        host::WATCHDOG_FAILED,
                        "cannot start the watchdog process of the agent",
                    )
                    .with_cause(&error),
                );
            }
        }
    }
    if options.marker.is_some() {
        executable_cache::start_cache_cleanup_thread();
    }
    run_agent(&options).unwrap_or_else(|error| report_start_failure(&error))
}

/// Connects this agent with its controller, in the way that `options` selects, and runs the agent's
/// event loop until the agent exits. Returns the exit code of the agent.
fn run_agent(options: &AgentOptions) -> diagnostic::Result<u8> {
    let cannot_start = |error: io::Error| {
        Diagnostic::error(host::AGENT_START_FAILED, "cannot start the agent").with_cause(&error)
    };
    let (input, output) = take_standard_streams(options.marker.as_deref()).map_err(cannot_start)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot_start)?;
    if options.join {
        drop(output);
        let invitation = Invitation::read(&mut File::from(input))?;
        return runtime.block_on(async {
            let stream = connect_back::connect_back(&invitation).await?;
            let (input, output) = stream.into_halves(TcpStream::into_split);
            run_agent_on_connection(input, output, options).await.map_err(cannot_start)
        });
    }
    if options.tree {
        set_nonblocking(&input).and_then(|()| set_nonblocking(&output)).map_err(cannot_start)?;
        let (halves, node) = tree_node::join_tree(input, output)?;
        let code = runtime.block_on(run_agent_on_connection(halves.input, halves.output, options));
        // The socket of the agent is closed before the node waits for the agents below.
        drop(runtime);
        node.finish();
        return code.map_err(cannot_start);
    }
    let run = async {
        set_nonblocking(&input)?;
        set_nonblocking(&output)?;
        let input = pipe::Receiver::from_owned_fd_unchecked(input)?;
        let output = pipe::Sender::from_owned_fd_unchecked(output)?;
        run_agent_on_connection(input, output, options).await
    };
    runtime.block_on(run).map_err(cannot_start)
}

/// Prints an error that prevents the start of the agent to stderr, because the control connection
/// does not exist yet. Returns the exit code 1.
fn report_start_failure(error: &Diagnostic) -> u8 {
    _ = writeln!(io::stderr(), "launch agent: {error} (`launch agent` is started by launch, not by hand)");
    1
}

/// Takes over the standard input and output of this process as the control connection of the agent
/// to the controller. If `marker` is given, first prints it, so that the controller finds the start
/// of the agent's output. Replaces stdin by `/dev/null` and stdout by stderr, so that no other code
/// writes to the connection.
///
/// Makes this process a subreaper. Ignores the signals that a terminal, a batch system or an
/// operator may send to every process of the job, because the controller handles these signals. The
/// driver catches SIGTERM if a batch system has started this process.
fn take_standard_streams(marker: Option<&str>) -> io::Result<(OwnedFd, OwnedFd)> {
    if let Some(marker) = marker {
        // The marker begins with a line end, because the login shell's output may end without one.
        io::stdout().write_all(format!("\n{marker} agent\n").as_bytes())?;
        io::stdout().flush()?;
    }
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    let null = OpenOptions::new().read(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    nix::unistd::dup2_stdout(io::stderr())?;
    process::set_cloexec_on_all();
    become_subreaper()?;
    disable_core_dumps()?;
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGPIPE] {
        // SAFETY: ignoring a signal installs no handler; workers get the defaults back.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    _ = nix::sys::prctl::set_name(c"launch-agent");
    Ok((input, output))
}

/// Runs the event loop of the agent, which is controlled through `input` and `output`, until the
/// agent exits. `input` and `output` are the control connection to the controller. Returns the exit
/// code. If the first message asks for the agent that is already alive on this host, relays the
/// connection to that agent instead.
async fn run_agent_on_connection(
    mut input: impl AsyncRead + Send + Unpin + 'static,
    output: impl AsyncWrite + Send + Unpin + 'static,
    AgentOptions { tree: in_tree, preflight, .. }: &AgentOptions,
) -> io::Result<u8> {
    let first = match read_frame(&mut input).await.map_err(io::Error::other)? {
        Some(ToAgent::Attach(request)) => {
            relay_to_agent(*request, *in_tree, input, output).await;
            return Ok(0);
        }
        first => first,
    };
    let mut driver = AgentDriver::new(Prober::new(*preflight))?;
    driver.set_controller_connection(input, output);
    driver.queue_first_message(first).await;
    Ok(driver.run_event_loop().await)
}

/// Makes reads and writes of a file descriptor, such as the agent's stdin, nonblocking.
fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
