//! [`RankGrid`]: the hosts and ranks of a run, and what each rank does according to the events of
//! the run.
use crate::journal_line::truncate_text;
use serde::Serialize;
use std::{collections::BTreeMap, time::Duration};

/// The largest number of ranks of a run whose states the dashboard keeps. Further ranks are only
/// counted.
pub(crate) const MAX_RANKS: u32 = 16 << 10;
/// The largest number of hosts of a run that the dashboard keeps.
const MAX_HOSTS: usize = 4096;
/// The longest name of a host that the dashboard keeps, in bytes.
const MAX_HOST_BYTES: usize = 256;

/// What a rank does, such as running or failed, according to the events of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// The rank is being started.
    Starting,
    /// The rank trains, or its program runs.
    Running,
    /// The rank is the root cause of a failure.
    Failed,
    /// The rank was ended, because another rank failed or the run was stopped.
    Ended,
    /// The rank ended with success.
    Done,
}

impl RankState {
    /// Returns the letter that stands for the state of a rank in the JSON that the page of the
    /// dashboard receives.
    fn letter(self) -> char {
        match self {
            RankState::Starting => 's',
            RankState::Running => 'r',
            RankState::Failed => 'f',
            RankState::Ended => 'e',
            RankState::Done => 'd',
        }
    }
}

/// A host of a run, and the consecutive ranks on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostRow {
    pub(crate) host: String,
    pub(crate) first_rank: u32,
    pub(crate) workers: u32,
}

/// The hosts and ranks of the current attempt (start of all workers) of a run, with the state of
/// each rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RankGrid {
    world: u32,
    hosts: Vec<HostRow>,
    states: Vec<RankState>,
    /// The number of failures of each rank that has failed, over all attempts.
    failures: BTreeMap<u32, u32>,
    /// The number of messages of each rank that has reported one.
    notices: BTreeMap<u32, u32>,
}

/// The hosts of a run and the states of its ranks, in the JSON form that the page of the dashboard
/// receives.
#[derive(Debug, Serialize)]
pub(crate) struct GridJson<'a> {
    world: u32,
    hosts: &'a [HostRow],
    /// A letter for the state of each rank.
    pub(crate) states: String,
    failures: &'a BTreeMap<u32, u32>,
    notices: &'a BTreeMap<u32, u32>,
    /// The seconds since the last output of each rank with a log on this machine.
    output_age_s: BTreeMap<u32, u64>,
}

impl RankGrid {
    /// Sets the number of ranks to `world`, all on the host `host`, and marks all as starting, for
    /// a new start of all workers.
    pub(crate) fn begin_attempt_on_one_host(&mut self, world: u32, host: &str) {
        self.begin_attempt(world, &[host.to_owned()], &[world]);
    }

    /// Sets the number of ranks to `world` and the hosts to `hosts`, and marks all ranks as
    /// starting, for a new start of all workers. `workers` is the number of workers of each host.
    /// If it does not match `hosts`, all ranks are in one row, which names all hosts.
    pub(crate) fn begin_attempt(&mut self, world: u32, hosts: &[String], workers: &[u32]) {
        self.world = world;
        self.states = vec![RankState::Starting; world.min(MAX_RANKS) as usize];
        let sum: u64 = workers.iter().map(|n| u64::from(*n)).sum();
        let is_complete = hosts.len() == workers.len() && sum == u64::from(world);
        self.hosts.clear();
        if !is_complete {
            let host = truncate_text(hosts.join(", "), MAX_HOST_BYTES);
            self.hosts.push(HostRow { host, first_rank: 0, workers: world });
            return;
        }
        let mut first_rank = 0;
        for (host, workers) in hosts.iter().zip(workers).take(MAX_HOSTS) {
            let host = truncate_text(host.clone(), MAX_HOST_BYTES);
            self.hosts.push(HostRow { host, first_rank, workers: *workers });
            first_rank += workers;
        }
    }

    /// Gives every rank of the current attempt the state `state`, such as running.
    pub(crate) fn set_all_states(&mut self, state: RankState) {
        self.states.fill(state);
    }

    /// Records that an attempt (start of all workers) failed: the rank that is the root cause
    /// becomes failed, all other ranks ended. `rank` is the root cause, if a worker is.
    pub(crate) fn record_failure(&mut self, rank: Option<u32>) {
        self.set_all_states(RankState::Ended);
        let Some(rank) = rank.filter(|rank| *rank < MAX_RANKS) else { return };
        if let Some(state) = self.states.get_mut(rank as usize) {
            *state = RankState::Failed;
        }
        *self.failures.entry(rank).or_default() += 1;
    }

    /// Records that the run has ended: all ranks except failed ones become done if the run
    /// succeeded, and ended otherwise.
    pub(crate) fn record_run_end(&mut self, is_success: bool) {
        let end = if is_success { RankState::Done } else { RankState::Ended };
        self.states.iter_mut().filter(|state| **state != RankState::Failed).for_each(|state| *state = end);
    }

    /// Adds one to the number of messages to the user, such as warnings, that the rank `rank` has
    /// reported.
    pub(crate) fn count_notice(&mut self, rank: u32) {
        if rank < MAX_RANKS {
            *self.notices.entry(rank).or_default() += 1;
        }
    }

    /// Returns the hosts and the states of the ranks in the JSON form that the page of the
    /// dashboard receives. `output_ages` is the time since the last output of each rank with a log.
    pub(crate) fn to_json(&self, output_ages: &BTreeMap<u32, Duration>) -> GridJson<'_> {
        GridJson {
            world: self.world,
            hosts: &self.hosts,
            states: self.states.iter().map(|state| state.letter()).collect(),
            failures: &self.failures,
            notices: &self.notices,
            output_age_s: output_ages.iter().map(|(rank, age)| (*rank, age.as_secs())).collect(),
        }
    }

    /// Returns the hosts of the run with their ranks.
    pub(crate) fn hosts(&self) -> &[HostRow] {
        &self.hosts
    }

    /// Returns the state of each rank, in the order of the ranks.
    pub(crate) fn states(&self) -> &[RankState] {
        &self.states
    }

    /// Returns the number of workers of the current attempt.
    pub(crate) fn world(&self) -> u32 {
        self.world
    }

    /// Returns the number of hosts of the run that the dashboard shows.
    pub(crate) fn host_count(&self) -> usize {
        self.hosts.len()
    }

    /// Counts the ranks that are in the state `state`.
    pub(crate) fn count_in_state(&self, state: RankState) -> usize {
        self.states.iter().filter(|s| **s == state).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(grid: &RankGrid) -> Vec<(&str, u32, u32)> {
        grid.hosts.iter().map(|row| (row.host.as_str(), row.first_rank, row.workers)).collect()
    }

    #[test]
    fn ranks_are_placed_on_their_hosts() {
        let hosts = ["a".to_owned(), "b".to_owned()];
        let mut grid = RankGrid::default();
        grid.begin_attempt(5, &hosts, &[2, 3]);
        assert_eq!(names(&grid), [("a", 0, 2), ("b", 2, 3)]);
        // A journal of an earlier version has no numbers of workers.
        grid.begin_attempt(5, &hosts, &[]);
        assert_eq!(names(&grid), [("a, b", 0, 5)]);
        grid.begin_attempt(u32::MAX, &hosts, &[u32::MAX, u32::MAX]);
        assert_eq!((names(&grid), grid.states.len()), (vec![("a, b", 0, u32::MAX)], MAX_RANKS as usize));
    }

    #[test]
    fn the_rank_that_failed_is_marked_until_the_next_attempt() {
        let mut grid = RankGrid::default();
        grid.begin_attempt_on_one_host(3, "a");
        grid.set_all_states(RankState::Running);
        grid.record_failure(Some(1));
        grid.record_run_end(false);
        grid.record_failure(Some(u32::MAX));
        let states = grid.to_json(&BTreeMap::new()).states;
        assert_eq!(states, "eee", "a rank that does not exist");
        grid.begin_attempt_on_one_host(3, "a");
        grid.set_all_states(RankState::Running);
        grid.record_failure(Some(1));
        grid.record_run_end(false);
        assert_eq!(grid.to_json(&BTreeMap::new()).states, "efe");
        assert_eq!(grid.failures, [(1, 2)].into());
    }
}
