//! `launch stop`: stops a run from another terminal.
use super::{context::CommandContext, ps::resolve_run};
use crate::{
    report::command_output,
    runs::{self, ProcessHandle, RunFilter, RunLossReason, RunState},
};
use clap::Args;
use diagnostic::{Diagnostic, codes::command};
use nix::sys::signal::Signal;
use std::time::{Duration, Instant};

/// The interval at which `launch stop` checks whether its time limit for the end of the controller
/// has passed.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Arguments of `launch stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run]
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Kill the run without saving
    #[arg(long)]
    now: bool,
    /// Return without waiting for the end of the run
    #[arg(long)]
    no_wait: bool,
    /// Time limit of the wait; if the run has not ended by then, the exit code is 1
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
}

/// Runs `launch stop`: sends SIGTERM or, with `--now`, SIGQUIT to the controller of a run. Without
/// `--no-wait`, blocks until the controller has ended.
pub(crate) fn run(args: StopArgs, _context: &CommandContext) -> diagnostic::Result<u8> {
    let run = resolve_run(args.run.as_deref(), RunFilter::Active)?;
    let (name, controller) = (&run.record.run, &run.record.controller);
    if run.state == RunState::Elsewhere {
        return Err(remote_run_error(name, &controller.host, args.now));
    }
    if run.state == RunState::Unattended {
        return Err(Diagnostic::error(command::RUN_UNATTENDED, format!("run {name} has no controller"))
            .with_subject(name)
            .with_help(format!("run `launch attach --detach {name}`, and then `launch stop {name}`")));
    }
    let cannot_signal = |e: &std::io::Error| {
        let message = format!("cannot signal the controller of run {name} (pid {})", controller.pid);
        Diagnostic::error(command::RUN_SIGNAL_FAILED, message)
            .with_subject(name)
            .with_field("pid", controller.pid)
            .with_cause(e)
    };
    let Some(handle) = runs::open_controller_handle(&run.record).map_err(|e| cannot_signal(&e))? else {
        let reason = match run.state {
            RunState::Lost(RunLossReason::HostRebooted) => ": this machine was restarted after the run began",
            _ => "",
        };
        command_output::write_message(&format!("run {name} is not active{reason}\n"));
        return Ok(protocol::exit::DONE);
    };
    let (signal, action) = match args.now {
        true => (Signal::SIGQUIT, "killing run"),
        false => (Signal::SIGTERM, "saving and stopping run"),
    };
    handle.send_signal(signal).map_err(|e| cannot_signal(&e))?;
    command_output::write_message(&format!("{action} {name}\n"));
    if args.no_wait {
        return Ok(protocol::exit::DONE);
    }
    wait_for_controller(name, &handle, Duration::from_secs(args.wait))?;
    let ended = match runs::load_run(run.record.clone()).state {
        RunState::Ended(code, _) => format!("ended with exit code {code}"),
        _ => "ended".to_owned(),
    };
    command_output::write_message(&format!("run {name} {ended}\n"));
    Ok(protocol::exit::DONE)
}

/// Creates the error that the run `name` cannot be stopped on this machine, because its controller
/// is on host `host`.
fn remote_run_error(name: &str, host: &str, now: bool) -> Diagnostic {
    let option = if now { " --now" } else { "" };
    Diagnostic::error(command::RUN_ON_OTHER_HOST, format!("the controller of run {name} is on host {host}"))
        .with_subject(name)
        .with_field("host", host)
        .with_help(format!("run `ssh {host} launch stop{option} {name}`"))
}

/// Blocks until the controller of run `name` has ended. Fails if the controller has not ended after
/// `limit`.
fn wait_for_controller(name: &str, handle: &ProcessHandle, limit: Duration) -> diagnostic::Result<()> {
    let began = Instant::now();
    while !handle.wait_for_exit(POLL_INTERVAL) {
        if began.elapsed() >= limit {
            let message = format!("run {name} is still active after {} s", limit.as_secs());
            return Err(Diagnostic::error(command::RUN_STOP_TIMEOUT, message)
                .with_subject(name)
                .with_field("waited_s", limit.as_secs())
                .with_help("the run stops as soon as it can; `launch stop --now` kills it"));
        }
    }
    Ok(())
}
