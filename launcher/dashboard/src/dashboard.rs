//! [`Dashboard`]: the list of the user's runs, and the state of those runs that the web page or the
//! metrics showed recently.
use crate::{
    run_source::{RunInfo, RunSource},
    tracked_run::TrackedRun,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The largest number of runs whose state the dashboard keeps in memory. The runs that were not
/// used for the longest time are dropped first.
const MAX_TRACKED_RUNS: usize = 64;
/// How long the dashboard reuses a list of runs before it lists the runs again.
const RUN_LIST_LIFETIME: Duration = Duration::from_secs(2);
/// The largest number of runs that the dashboard lists.
const MAX_LISTED_RUNS: usize = 500;

/// What the dashboard knows about one run, behind a mutex because several HTTP connections use it.
pub(crate) type SharedTrackedRun = Arc<Mutex<TrackedRun>>;

/// The data behind the pages of a dashboard: the source that lists runs and opens their files, and
/// the state of the runs that were shown recently.
pub struct Dashboard {
    source: Box<dyn RunSource>,
    /// The list of runs and the time at which it was made.
    listed: Mutex<Option<(Instant, Arc<Vec<RunInfo>>)>>,
    /// The tracked runs by ID, each with the time of its last use.
    tracked: Mutex<BTreeMap<String, (Instant, SharedTrackedRun)>>,
}

impl std::fmt::Debug for Dashboard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dashboard").finish_non_exhaustive()
    }
}

/// Locks a mutex, even if another thread panicked while it held the lock.
pub(crate) fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dashboard {
    /// Creates a dashboard of the runs that `source` lists.
    pub fn new(source: Box<dyn RunSource>) -> Dashboard {
        Dashboard { source, listed: Mutex::default(), tracked: Mutex::default() }
    }

    /// Returns the source from which the dashboard gets the list of runs and the files of their run
    /// directories.
    pub(crate) fn source(&self) -> &dyn RunSource {
        &*self.source
    }

    /// Lists the runs that the dashboard can show, from the newest to the oldest.
    pub(crate) fn list_runs(&self) -> Arc<Vec<RunInfo>> {
        let mut listed = lock_ignoring_poison(&self.listed);
        if let Some((at, runs)) = &*listed
            && at.elapsed() < RUN_LIST_LIFETIME
        {
            return runs.clone();
        }
        let mut runs = self.source.list_runs();
        runs.truncate(MAX_LISTED_RUNS);
        let runs = Arc::new(runs);
        *listed = Some((Instant::now(), runs.clone()));
        runs
    }

    /// Returns what the dashboard knows about the run with the ID `run`, and starts to read the
    /// run's files if the run is not in memory yet. Returns `None` if there is no such run.
    pub(crate) fn find_or_track_run(&self, run: &str) -> Option<SharedTrackedRun> {
        if let Some((used, shared)) = lock_ignoring_poison(&self.tracked).get_mut(run) {
            *used = Instant::now();
            return Some(shared.clone());
        }
        let info = self.list_runs().iter().find(|info| info.run == run)?.clone();
        let shared = Arc::new(Mutex::new(TrackedRun::new(self.source(), info)));
        let mut tracked = lock_ignoring_poison(&self.tracked);
        let entry = tracked.entry(run.to_owned()).or_insert_with(|| (Instant::now(), shared));
        let shared = entry.1.clone();
        while tracked.len() > MAX_TRACKED_RUNS {
            let oldest = tracked.iter().min_by_key(|(_, (used, _))| *used).map(|(run, _)| run.clone());
            tracked.remove(&oldest.unwrap_or_default());
        }
        Some(shared)
    }

    /// Reads new lines of a run's journal (file of events) until the end of the file or the time
    /// `limit`, and returns the run's state.
    pub(crate) fn load_run(&self, run: &str, limit: Duration) -> Option<SharedTrackedRun> {
        let (shared, end) = (self.find_or_track_run(run)?, Instant::now() + limit);
        while !lock_ignoring_poison(&shared).refresh(self.source()) && Instant::now() < end {}
        Some(shared)
    }
}
