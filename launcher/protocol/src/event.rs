//! Events of a run, as data for the terminal, `--json` and the journal.
//!
//! Events travel from a worker through its agent to the controller, which prints and stores them.
//! docs/events.md documents every event and field. A test compares docs/events.md with this module.
mod diagnostic_list;
mod json;
mod run_event;
mod schema;
mod straggler_report;

pub use json::TimedEvent;
pub use run_event::{Event, FailureReport, ResumeSource, WorkerPhase};
pub use schema::EventSchema;
pub use straggler_report::{StepTimesReport, StragglerReason, StragglerReport, StragglerState, TimeRange};
