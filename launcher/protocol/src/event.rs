//! Events of a run, such as a step or a failure, as data for the terminal, `--json` and the journal
//! (the run's file of events).
//!
//! Events travel from a worker through its agent to the controller, which prints and stores them.
//! docs/events.md documents every event and field. A test compares docs/events.md with this module.
mod diagnostic_list;
mod event_json;
mod event_schema;
mod run_event;
mod straggler_report;

pub use event_json::TimedEvent;
pub use event_schema::EventSchema;
pub use run_event::{Event, FailureReport, ResumeSource, WorkerPhase};
pub use straggler_report::{
    StepTimesReport, StragglerReason, StragglerReport, StragglerState, TimeStatistics,
};
