//! Crate `dashboard`: shows the state and the curves of runs on a web page and as metrics, from the
//! files of their run directories.
//!
//! [`bind`] opens a server of a page, its data and metrics for browsers and monitoring systems of
//! this machine. [`format_report`] writes the page with the data of runs as one HTML file. Both get
//! the runs from a [`RunSource`].
//!
//! Run directories are untrusted input, because programs write into them: every file is read
//! within limits, and the page shows every text from them as plain text.
mod access;
mod dashboard;
mod event_log;
mod growing_file_reader;
mod journal_line;
mod live_metrics;
mod log_files;
mod metrics;
mod metrics_server;
mod page;
mod rank_grid;
mod report;
mod request;
mod response;
mod routes;
mod run_progress;
mod run_source;
mod run_view;
mod series;
mod server;
mod snapshot;
mod status_json;
mod status_reader;
mod stream;
mod tracked_run;
pub mod untrusted;

pub use dashboard::Dashboard;
pub use metrics::format_metrics_textfile;
pub use metrics_server::{MetricsListener, serve_metrics};
pub use rank_grid::RankState;
pub use report::{MAX_REPORT_RUNS, format_report};
pub use run_source::{RunInfo, RunSource};
pub use server::{BoundServer, bind};
pub use snapshot::{RunSnapshot, SnapshotHost};
