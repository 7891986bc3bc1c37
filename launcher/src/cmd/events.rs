//! `launch events`: what happened in a run.
use super::ps::meant;
use crate::{
    cli::EventsArgs,
    error::{Failure, Kind},
    report::{clean, clock, plain, sentence},
    runs::{Run, Wanted},
    tail::{Lines, PAUSE},
};
use contract::event::Event;
use serde_json::Value;

/// Shows the events; the exit code.
pub(crate) fn run(args: &EventsArgs, json: bool) -> u8 {
    let shown = meant(args.run.as_deref(), Wanted::Any).and_then(|run| show(&run, args.follow, json));
    match shown {
        Ok(()) => contract::exit::DONE,
        Err(failure) => super::fail(&failure),
    }
}

fn show(run: &Run, follow: bool, json: bool) -> Result<(), Failure> {
    let file = run.entry.run_dir.join("events.jsonl");
    let failed =
        |e: std::io::Error| Failure::new(Kind::Failed, format!("{} can't be read", file.display())).cause(&e);
    let mut lines = Lines::open(file.clone(), 0).map_err(failed)?;
    loop {
        // Looked at before reading: what was written before the end is read.
        let goes_on = follow && run.entry.by.is_alive();
        let mut text = String::new();
        let more = lines.read(&mut |line| {
            let line = String::from_utf8_lossy(line);
            text.push_str(&if json { format!("{line}\n") } else { told(&line, run.entry.began_ms) });
        });
        let more = more.map_err(failed)?;
        match plain::stream(&text) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            other => {
                other.map_err(|e| Failure::new(Kind::Failed, "the output can't be written").cause(&e))?
            }
        }
        match (more, goes_on) {
            (true, _) => {}
            (false, true) => std::thread::sleep(PAUSE),
            (false, false) => return Ok(()),
        }
    }
}

/// A line of the journal for a person: when since the start, and what.
fn told(line: &str, began_ms: u64) -> String {
    let at = serde_json::from_str::<Value>(line).ok().and_then(|v| v.get("time")?.as_f64());
    let since = at.map_or_else(String::new, |at| clock((at - began_ms as f64 / 1000.0).max(0.0)));
    let what = match serde_json::from_str::<Event>(line) {
        Ok(event) => sentence(&event),
        // Half a line after a crash, or an event of a later version.
        Err(_) => line.to_owned(),
    };
    format!("{since:>8}  {}\n", clean(&what))
}
