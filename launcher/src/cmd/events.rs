//! `launch events`: prints the events of a run from the run's journal (its file of events).
use super::{
    context::CommandContext,
    output::{OutputFormat, output_error, path_error},
    ps::resolve_run,
};
use crate::{
    line_follower::{LineFollower, POLL_INTERVAL},
    report::{command_output, format_event},
    runs::{Run, RunFilter},
};
use clap::Args;
use diagnostic::{
    codes::command,
    quantity::format_clock,
    terminal_text::{escape_unprintable_in_json, filter_line},
};
use protocol::event::TimedEvent;
use serde::Deserialize;

/// Arguments of `launch events`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run, or the newest run if none is active]
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Also show new events, until the run ends
    #[arg(long, short)]
    follow: bool,
}

/// Runs `launch events`: prints the events of a run and returns the exit code.
pub(crate) fn run(args: EventsArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let run = resolve_run(args.run.as_deref(), RunFilter::Any)?;
    print_journal(&run, args.follow, context.format)?;
    Ok(protocol::exit::DONE)
}

/// Prints the events of a run from the run's journal (its file of events). With `follow`, also
/// prints new events until the controller has ended. Returns early if the reader of stdout closes
/// the pipe.
fn print_journal(run: &Run, follow: bool, format: OutputFormat) -> diagnostic::Result<()> {
    let file = run.record.run_dir.join("events.jsonl");
    let unreadable = |e: std::io::Error| path_error(command::RUN_FILE_UNREADABLE, "cannot read", &file, &e);
    let mut lines = LineFollower::open(file.clone(), 0).map_err(unreadable)?;
    loop {
        // Checked before reading, so that everything written before the controller's end is read.
        let may_grow = follow && run.record.controller.is_alive();
        let mut text = String::new();
        let more = lines.read_lines(&mut |line| {
            let line = String::from_utf8_lossy(line);
            text.push_str(&match format.json {
                true => convert_line_to_schema(&line, format),
                false => format_event_line(&line, run.record.began_ms),
            });
        });
        let more = more.map_err(unreadable)?;
        match command_output::write_filtered_text(&text) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            other => other.map_err(|error| output_error(&error))?,
        }
        match (more, may_grow) {
            (true, _) => {}
            (false, true) => std::thread::sleep(POLL_INTERVAL),
            (false, false) => return Ok(()),
        }
    }
}

/// Converts one event line of a run's journal to the event schema version that `format` selects,
/// and appends a newline. A line that this version cannot read, such as half a line after a crash,
/// stays unchanged.
fn convert_line_to_schema(line: &str, format: OutputFormat) -> String {
    /// The version of the event schema in one line of a run's journal; the other fields of the line
    /// are not parsed.
    #[derive(Deserialize)]
    struct StoredEvent {
        #[serde(default = "default_schema_number")]
        schema: u8,
    }
    let stored = serde_json::from_str::<StoredEvent>(line);
    let converted = match stored {
        Ok(StoredEvent { schema }) if schema != format.schema.version_number() => {
            TimedEvent::from_json(line).and_then(|event| event.to_json(format.schema)).ok()
        }
        _ => None,
    };
    format!("{}\n", escape_unprintable_in_json(converted.as_deref().unwrap_or(line)))
}

/// Returns 1, the version of the event schema of journal lines that state no version. Earlier
/// releases wrote such lines.
fn default_schema_number() -> u8 {
    1
}

/// Formats an event, given as a line of a run's journal, as text: the time since the start of the
/// run, and the event. A line that cannot be parsed is printed without a time.
///
/// `began_ms` is the start of the run in milliseconds since 1970.
fn format_event_line(line: &str, began_ms: u64) -> String {
    let (since, text) = match TimedEvent::from_json(line) {
        Ok(TimedEvent { event, time }) => {
            (format_clock((time - began_ms as f64 / 1000.0).max(0.0)), format_event(&event))
        }
        // The line is incomplete after a crash, or has an event of a later version.
        Err(_) => (String::new(), line.to_owned()),
    };
    format!("{since:>8}  {}\n", filter_line(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::event::EventSchema;

    #[test]
    fn journal_lines_are_converted_between_schemas() {
        let old = r#"{"event":"placed","epoch":0,"world":2,"hosts":["a"],"time":1.5}"#;
        let format = |schema| OutputFormat { json: true, schema };
        assert_eq!(convert_line_to_schema(old, format(EventSchema::V1)), format!("{old}\n"));
        let new = convert_line_to_schema(old, format(EventSchema::V2));
        let value: serde_json::Value = serde_json::from_str(&new).expect("JSON");
        assert_eq!((&value["event"], &value["schema"]), (&"placement".into(), &2.into()));
        let again = convert_line_to_schema(new.trim_end(), format(EventSchema::V1));
        assert_eq!(again, format!("{old}\n"));
        assert_eq!(convert_line_to_schema("{\"ev", format(EventSchema::V2)), "{\"ev\n", "half a line stays");
    }
}
