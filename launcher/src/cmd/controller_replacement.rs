//! `launch run --replace-controller`: runs the controller of a job in a child process, and starts
//! another one that takes over the run if the controller dies.
use super::{
    context::CommandContext,
    job_preparation::{JobLoadRequest, LoadedJob},
    run_args::{
        RunArgs, build_controller_args, create_run_id, draw_random_bits, encode_overrides,
        parse_inherited_pipe_option,
    },
};
use crate::{
    plan::resolve_run_dir,
    report::command_output,
    runs::{self, RunState},
    supervised_controller::{ControllerSupervisor, ForwardedSignals},
};
use diagnostic::{Diagnostic, codes::command};
use jobspec::ids::RunId;
use protocol::{control::ExitStatus, exit::FAILED};
use std::{
    ffi::OsString,
    io,
    os::fd::RawFd,
    path::Path,
    thread,
    time::{Duration, Instant, SystemTime},
};

/// The exit code of a process of launch that has panicked.
const PANIC_EXIT_CODE: u8 = 101;
/// The time from the end of a controller that could not take over the run to the next attempt.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// A controller that dies after less than this time counts as a failed replacement.
const MIN_LIFETIME: Duration = Duration::from_secs(30);
/// The number of successive failed replacements after which no further controller is started.
const MAX_FAILED_REPLACEMENTS: u32 = 5;

/// What to do after the end of a controller.
#[derive(Debug, PartialEq)]
enum NextStep {
    /// The command ends with this exit code.
    End(u8),
    /// Another controller takes over the run.
    Replace,
    /// The run cannot be taken over.
    GiveUp,
}

/// Runs the job with a controller in a child process until the run ends, and replaces a controller
/// that dies. Returns the exit code of the run.
pub(super) fn run_with_replaced_controllers(
    args: &RunArgs,
    request: &JobLoadRequest,
    context: &CommandContext,
) -> diagnostic::Result<u8> {
    let run = create_run_id(SystemTime::now(), draw_random_bits());
    let run_dir = resolve_run_dir(&LoadedJob::load(request)?.job, &run);
    let start_error = |error: io::Error| {
        Diagnostic::error(command::CONTROLLER_START_FAILED, "cannot start the controller").with_cause(&error)
    };
    let mut supervisor = ControllerSupervisor::start().map_err(start_error)?;
    let mut began = Instant::now();
    let first_args = |fd: RawFd| {
        let mut words = list_format_options(context);
        words.extend(build_controller_args(args, "--supervised", &run, fd, context.verbosity));
        words
    };
    let mut end = supervisor.run_controller(first_args, &encode_overrides(&args.set)).map_err(start_error)?;
    let (mut is_takeover, mut failed_replacements) = (false, 0);
    loop {
        let (pid, status) = end;
        let state = runs::load_run_in_directory(&run_dir).map(|run| run.state);
        failed_replacements =
            if is_takeover && began.elapsed() < MIN_LIFETIME { failed_replacements + 1 } else { 0 };
        let end_text = format!("launch: the controller (pid {pid}) {}", describe(status));
        match decide_next_step(status, is_takeover, failed_replacements, state) {
            NextStep::End(code) => return Ok(code),
            NextStep::GiveUp => {
                let attempts = match failed_replacements {
                    0 => String::new(),
                    count => format!(" after {count} failed attempts"),
                };
                command_output::write_message(&format!(
                    "{end_text}; run {run} cannot be taken over{attempts}\n"
                ));
                return Ok(FAILED);
            }
            NextStep::Replace => {}
        }
        if is_takeover {
            thread::sleep(RETRY_DELAY);
        }
        command_output::write_message(&format!("{end_text}; another one takes over run {run}\n"));
        (is_takeover, began) = (true, Instant::now());
        let takeover_args = |fd| build_takeover_args(&run, &run_dir, fd, context);
        end = supervisor.run_controller(takeover_args, &[]).map_err(start_error)?;
    }
}

/// Decides what follows after a controller has ended with `status`. `is_takeover` states whether it
/// had replaced another controller, and `failed_replacements` is the number of successive failed
/// replacements, up to this one. `state` is the state of the run, or `None` if the controller has
/// not recorded the run.
fn decide_next_step(
    status: ExitStatus,
    is_takeover: bool,
    failed_replacements: u32,
    state: Option<RunState>,
) -> NextStep {
    let can_retry = failed_replacements < MAX_FAILED_REPLACEMENTS;
    match (status, state) {
        (_, Some(RunState::Ended(code, _))) => NextStep::End(code),
        (_, Some(RunState::Unattended)) if !can_retry => NextStep::GiveUp,
        // A controller that could not take over the run may succeed later.
        (ExitStatus::Code(_), Some(RunState::Unattended)) if is_takeover => NextStep::Replace,
        (ExitStatus::Code(code), _) if code != PANIC_EXIT_CODE => NextStep::End(code),
        (_, Some(RunState::Unattended)) => NextStep::Replace,
        _ => NextStep::GiveUp,
    }
}

/// Returns the command-line arguments of a controller that takes over `run` after the end of
/// another one. `fd` is the descriptor of the pipe through which it gets signals.
fn build_takeover_args(run: &RunId, run_dir: &Path, fd: RawFd, context: &CommandContext) -> Vec<OsString> {
    let mut words = list_format_options(context);
    words.push("attach".into());
    words.extend((0..context.verbosity).map(|_| "--verbose".into()));
    words.extend(["--supervised".into(), format!("{run}:{fd}").into(), run_dir.into()]);
    words
}

/// Returns the command-line options by which a controller prints its output in the format of this
/// command.
fn list_format_options(context: &CommandContext) -> Vec<OsString> {
    let schema = context.format.schema.version_number();
    match context.format.json {
        true => vec!["--json".into(), format!("--json-schema={schema}").into()],
        false => Vec::new(),
    }
}

/// Describes how a controller has ended, as the end of a sentence.
fn describe(status: ExitStatus) -> String {
    match status {
        ExitStatus::Code(code) => format!("exited with code {code}"),
        ExitStatus::Signal(number, _) => {
            let name = nix::sys::signal::Signal::try_from(number).map(|signal| signal.as_str().to_owned());
            format!("was killed by {}", name.unwrap_or_else(|_| format!("signal {number}")))
        }
    }
}

/// Parses the internal option `--supervised RUN:FD`, with the run ID and a pipe inherited from
/// `launch run --replace-controller`. Returns the ID of the run, and the inherited pipe from which
/// the controller reads signals.
pub(super) fn parse_supervised_option(text: &str) -> diagnostic::Result<(RunId, ForwardedSignals)> {
    let options = ("--supervised", "--replace-controller");
    parse_inherited_pipe_option(options, text, ForwardedSignals::from_inherited_fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_that_dies_is_replaced_while_the_run_continues() {
        let killed = ExitStatus::Signal(9, false);
        let decide = |status, is_takeover, state| decide_next_step(status, is_takeover, 0, state);
        for is_takeover in [false, true] {
            assert_eq!(decide(killed, is_takeover, Some(RunState::Unattended)), NextStep::Replace);
            assert_eq!(decide(killed, is_takeover, Some(RunState::Ended(4, 1.0))), NextStep::End(4));
            assert_eq!(decide(killed, is_takeover, None), NextStep::GiveUp);
            assert_eq!(
                decide(ExitStatus::Code(0), is_takeover, Some(RunState::Ended(0, 1.0))),
                NextStep::End(0)
            );
            assert_eq!(decide(ExitStatus::Code(2), is_takeover, None), NextStep::End(2));
        }
        assert_eq!(
            decide(ExitStatus::Code(PANIC_EXIT_CODE), false, Some(RunState::Unattended)),
            NextStep::Replace
        );
        // the run may have got another controller
        assert_eq!(decide(ExitStatus::Code(3), false, Some(RunState::Unattended)), NextStep::End(3));
        assert_eq!(decide(ExitStatus::Code(3), true, Some(RunState::Unattended)), NextStep::Replace);
        assert_eq!(decide(ExitStatus::Code(3), true, Some(RunState::Elsewhere)), NextStep::End(3));
    }

    #[test]
    fn five_failed_replacements_end_the_attempts_but_not_a_run_that_has_ended() {
        let killed = ExitStatus::Signal(9, false);
        for status in [killed, ExitStatus::Code(3)] {
            let decide = |count| decide_next_step(status, true, count, Some(RunState::Unattended));
            assert_eq!([4, 5].map(decide), [NextStep::Replace, NextStep::GiveUp]);
        }
        assert_eq!(decide_next_step(killed, true, 5, Some(RunState::Ended(0, 1.0))), NextStep::End(0));
    }
}
