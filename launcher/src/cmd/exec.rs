//! `launch exec`: runs a command on the host of a worker of a run, for example a debugger.
use super::{context::CommandContext, ps::resolve_run};
use crate::{
    connection::{FrameError, encode_frame, read_frame},
    report::command_output,
    runs::{self, RunFilter, RunState},
};
use clap::Args;
use diagnostic::{Diagnostic, codes::command};
use jobspec::ids::Rank;
use protocol::control::{ExecReply, ExecRequest, ExitStatus, PROTOCOL_VERSION};
use std::{ffi::OsString, io, os::unix::net::UnixStream as StdStream};
use tokio::{
    io::AsyncWriteExt,
    net::{UnixStream, unix::OwnedWriteHalf},
};

/// The number that is added to a signal's number to get the exit code of a command that was ended
/// by the signal, as in shells.
const SIGNAL_EXIT_CODE_OFFSET: u8 = 128;

/// Arguments of `launch exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run]
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Rank of the worker next to which the command runs
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    rank: Rank,
    /// Command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs `launch exec`: runs a command on the host of a rank, with the environment and the working
/// directory of the rank. Prints the output of the command, and returns its exit code.
pub(crate) fn run(args: ExecArgs, _context: &CommandContext) -> diagnostic::Result<u8> {
    let words: Option<Vec<String>> = args.command.into_iter().map(|word| word.into_string().ok()).collect();
    let words = words.ok_or_else(|| {
        Diagnostic::error(command::ARGUMENT_NOT_UTF8, "an argument of the command is not UTF-8 text")
    })?;
    let run = resolve_run(args.run.as_deref(), RunFilter::Active)?;
    let (name, controller) = (&run.record.run, &run.record.controller);
    match run.state {
        RunState::Elsewhere => {
            let message = format!("the controller of run {name} is on host {}", controller.host);
            return Err(Diagnostic::error(command::RUN_ON_OTHER_HOST, message)
                .with_subject(name)
                .with_field("host", controller.host.as_str())
                .with_help(format!("run `ssh {} launch exec {name} …`", controller.host)));
        }
        RunState::Unattended => {
            return Err(Diagnostic::error(command::RUN_UNATTENDED, format!("run {name} has no controller"))
                .with_subject(name)
                .with_help(format!("run `launch attach --detach {name}` first")));
        }
        _ => {}
    }
    let unavailable = |error: &io::Error| {
        Diagnostic::error(command::EXEC_UNAVAILABLE, format!("cannot reach the controller of run {name}"))
            .with_subject(name)
            .with_field("pid", controller.pid)
            .with_cause(error)
    };
    let stream = runs::connect_to_controller(&run.record).map_err(|error| unavailable(&error))?;
    let request = ExecRequest::Start { version: PROTOCOL_VERSION, rank: args.rank, command: words };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| unavailable(&error))?;
    match runtime.block_on(request_command_and_copy_output(stream, request)) {
        Ok(ExecReply::Ended(ExitStatus::Code(code))) => Ok(code),
        Ok(ExecReply::Ended(ExitStatus::Signal(signal, _))) => {
            Ok(SIGNAL_EXIT_CODE_OFFSET.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX)))
        }
        Ok(ExecReply::Failed(error)) => Err(error),
        // Output is not a last reply.
        Ok(ExecReply::Output { .. }) => Err(build_connection_closed_error(name)),
        Err(ExecError::Request(error)) => {
            let message = "the command was not sent to the controller";
            Err(Diagnostic::error(command::EXEC_UNAVAILABLE, message).with_cause(&error))
        }
        Err(ExecError::Connection) => Err(build_connection_closed_error(name)),
        // The reader of the output has ended, for example `head`.
        Err(ExecError::Output) => Ok(SIGNAL_EXIT_CODE_OFFSET + nix::libc::SIGPIPE as u8),
    }
}

/// Builds the error of `launch exec` that the controller of the run has closed the connection.
fn build_connection_closed_error(run: &str) -> Diagnostic {
    let message = format!("the controller of run {run} has ended, and the command with it");
    Diagnostic::error(command::EXEC_INTERRUPTED, message).with_subject(run).with_remedy()
}

/// The reason why `launch exec` did not receive the exit status of its command from the controller.
enum ExecError {
    /// The request is too large.
    Request(FrameError),
    /// The connection to the controller has ended.
    Connection,
    /// The output could not be written.
    Output,
}

/// Sends the request of `launch exec` to the controller, and writes the output of the command to
/// stdout and stderr. Returns the last reply.
async fn request_command_and_copy_output(
    stream: StdStream,
    request: ExecRequest,
) -> Result<ExecReply, ExecError> {
    stream.set_nonblocking(true).map_err(|_| ExecError::Connection)?;
    let (mut reader, mut writer) =
        UnixStream::from_std(stream).map_err(|_| ExecError::Connection)?.into_split();
    send_request(&mut writer, &request).await?;
    loop {
        match read_frame(&mut reader).await {
            Ok(Some(ExecReply::Output { stderr, bytes })) => {
                command_output::write_program_output(stderr, &bytes).map_err(|_| ExecError::Output)?;
                let bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                send_request(&mut writer, &ExecRequest::Consumed { bytes }).await?;
            }
            Ok(Some(last)) => return Ok(last),
            Ok(None) | Err(_) => return Err(ExecError::Connection),
        }
    }
}

/// Sends a `launch exec` request, which names a rank and a command, to the controller of the run.
async fn send_request(writer: &mut OwnedWriteHalf, request: &ExecRequest) -> Result<(), ExecError> {
    let frame = encode_frame(request).map_err(ExecError::Request)?;
    // The error of a connection that the controller has closed is in its last reply.
    _ = writer.write_all(&frame).await;
    Ok(())
}
