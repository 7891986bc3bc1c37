//! [`DashboardRuns`]: the runs of this user, as the dashboard shows them.
use super::ps::format_state;
use crate::{
    private_files::open_own_file,
    runs::{self, Run, RunState},
};
use dashboard::{Dashboard, RunInfo, RunSource};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The runs that `launch serve` shows: all runs of the user, and the runs whose directories are
/// given on the command line.
#[derive(Debug)]
struct DashboardRuns {
    /// The directory whose `runs` directory is searched for runs.
    base: PathBuf,
    named: Vec<Run>,
}

impl RunSource for DashboardRuns {
    fn list_runs(&self) -> Vec<RunInfo> {
        let mut listed = runs::list_runs(&self.base);
        let is_listed = |run: &Run, listed: &[Run]| listed.iter().any(|r| r.record.run == run.record.run);
        for run in &self.named {
            if !is_listed(run, &listed) {
                listed.push(runs::load_run(run.record.clone()));
            }
        }
        listed.sort_by_key(|run| std::cmp::Reverse(run.record.began_ms));
        let is_named = |run: &Run| self.named.iter().any(|named| named.record.run == run.record.run);
        listed.iter().map(|run| RunInfo { is_named: is_named(run), ..to_run_info(run) }).collect()
    }

    fn reload_run(&self, run: &RunInfo) -> Option<RunInfo> {
        let loaded = runs::load_run_in_directory(&run.run_dir)?;
        (loaded.record.run == run.run).then(|| RunInfo { is_named: run.is_named, ..to_run_info(&loaded) })
    }

    fn open_file(&self, path: &Path) -> io::Result<File> {
        open_own_file(path)
    }
}

/// Creates the data source of the page of `launch serve`, with the runs of this user and the runs
/// `named` on the command line.
pub(super) fn create_dashboard(named: Vec<Run>) -> Arc<Dashboard> {
    let base = std::path::absolute(".").unwrap_or_default();
    Arc::new(Dashboard::new(Box::new(DashboardRuns { base, named })))
}

/// Converts a run to the description that the dashboard shows: name, state, host, step and
/// directory.
fn to_run_info(run: &Run) -> RunInfo {
    let record = &run.record;
    RunInfo {
        run: record.run.clone(),
        name: record.name.clone(),
        state: format_state(run.state),
        is_active: matches!(run.state, RunState::Running | RunState::Unattended | RunState::Elsewhere),
        is_named: false,
        world: record.world,
        began_ms: record.began_ms,
        host: record.controller.host.clone(),
        step: run.step,
        run_dir: record.run_dir.clone(),
    }
}
