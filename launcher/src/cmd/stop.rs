//! `launch stop`: ends a run from another terminal.
use super::ps::meant;
use crate::{
    cli::StopArgs,
    error::{Failure, Kind},
    report::plain,
    runs::{self, Handle, State, Wanted},
};
use nix::sys::signal::Signal;
use std::time::{Duration, Instant};

/// Between two looks at a run that is ending.
const LOOK: Duration = Duration::from_millis(500);

/// Stops the run; the exit code.
pub(crate) fn run(args: &StopArgs) -> u8 {
    match stop(args) {
        Ok(code) => code,
        Err(failure) => super::fail(&failure),
    }
}

fn stop(args: &StopArgs) -> Result<u8, Failure> {
    let run = meant(args.run.as_deref(), Wanted::Running)?;
    let (name, by) = (&run.entry.run, &run.entry.by);
    if !by.is_of_this_machine() && !matches!(run.state, State::Ended(..)) {
        let why = format!("the controller of run {name} is on {}: it can be stopped there", by.host);
        let now = if args.now { " --now" } else { "" };
        return Err(Failure::new(Kind::Cluster, why).hint(format!("ssh {} launch stop{now} {name}", by.host)));
    }
    let failed = |e: &std::io::Error| {
        Failure::new(Kind::Failed, format!("run {name} (pid {}) can't be told", by.pid)).cause(e)
    };
    let Some(handle) = by.hold().map_err(|e| failed(&e))? else {
        plain::say(&format!("run {name} is not running\n"));
        return Ok(contract::exit::DONE);
    };
    let (signal, what) = match args.now {
        true => (Signal::SIGQUIT, "is killed"),
        false => (Signal::SIGTERM, "is asked to save and stop"),
    };
    handle.signal(signal).map_err(|e| failed(&e))?;
    plain::say(&format!("run {name} {what}\n"));
    if args.no_wait {
        return Ok(contract::exit::DONE);
    }
    wait(&handle, Duration::from_secs(args.wait))?;
    let ended = match runs::look(run.entry.clone()).state {
        State::Ended(code, _) => format!("ended with exit code {code}"),
        _ => "ended".to_owned(),
    };
    plain::say(&format!("run {name} {ended}\n"));
    Ok(contract::exit::DONE)
}

fn wait(handle: &Handle, limit: Duration) -> Result<(), Failure> {
    let began = Instant::now();
    while !handle.ended_within(LOOK) {
        if began.elapsed() >= limit {
            let why = format!("it goes on after {} s; it still stops when it can", limit.as_secs());
            return Err(Failure::new(Kind::Failed, why).hint("`launch stop --now` kills it"));
        }
    }
    Ok(())
}
