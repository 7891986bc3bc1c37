//! The full-screen view of `launch top`: draws the state of a run, and reacts to keys.
mod host_lines;
mod screen;
mod top_state;
mod view;

pub(crate) use screen::{TopSource, show_run};
