//! Measures how much CPU time the processes of each worker have used and whether the worker's first
//! process is stopped, from `/proc`, so that the agent can detect hanging workers.
use crate::processes::{ProcessStat, list_processes};
use std::collections::HashMap;

/// The CPU time that one worker's processes have used, and whether the worker is stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkerActivity {
    /// The CPU time of all running processes of the tree in clock ticks, including the CPU time of
    /// ended children that these processes waited for.
    pub(super) ticks: u64,
    /// Whether a signal has stopped the first process of the worker.
    pub(super) stopped: bool,
}

/// Reads from `/proc`, for each of several workers, the CPU time that its processes have used so
/// far and whether its first process is stopped.
///
/// `leaders` are the pids of the workers' first processes. The results have the order of `leaders`.
pub(super) fn measure_activity(leaders: &[u32]) -> Vec<WorkerActivity> {
    sum_cpu_times(&list_processes(), leaders)
}

/// Returns the pids of all processes of a worker: its first process `leader`, which comes first,
/// and the descendants of that process.
pub(super) fn list_process_tree(leader: u32) -> Vec<i32> {
    list_process_trees(&[leader]).pop().unwrap_or_default()
}

/// Returns the pids of each worker's processes, which are its first process, whose pid is in
/// `leaders`, and all descendants of the first process. The results have the order of `leaders`.
pub(super) fn list_process_trees(leaders: &[u32]) -> Vec<Vec<i32>> {
    let processes = list_processes();
    let children = index_children(&processes);
    let list = |leader: &u32| {
        let mut pids = Vec::new();
        visit_process_tree(&children, &processes, *leader as i32, &mut |process| pids.push(process.pid));
        pids
    };
    leaders.iter().map(list).collect()
}

/// Returns the total CPU time of each worker's processes, and whether the first process of the
/// worker is stopped. The results have the order of `leaders`. `processes` is a list of all
/// processes of the host.
fn sum_cpu_times(processes: &[ProcessStat], leaders: &[u32]) -> Vec<WorkerActivity> {
    let children = index_children(processes);
    let measure = |leader: &u32| {
        let mut activity = WorkerActivity::default();
        visit_process_tree(&children, processes, *leader as i32, &mut |process| {
            activity.ticks += process.ticks;
            activity.stopped |= process.pid == *leader as i32 && process.stopped;
        });
        activity
    };
    leaders.iter().map(measure).collect()
}

/// Maps the pid of each parent process to the positions of its children in `processes`, a list of
/// processes of the host.
fn index_children(processes: &[ProcessStat]) -> HashMap<i32, Vec<usize>> {
    let mut children: HashMap<i32, Vec<usize>> = HashMap::new();
    for (index, process) in processes.iter().enumerate() {
        children.entry(process.parent).or_default().push(index);
    }
    children
}

/// Calls the function `visit` for the process with the pid `leader` and for each of its
/// descendants. `children` maps the pid of a parent to the indices of its children in `processes`.
fn visit_process_tree(
    children: &HashMap<i32, Vec<usize>>,
    processes: &[ProcessStat],
    leader: i32,
    visit: &mut impl FnMut(&ProcessStat),
) {
    if let Some(first) = processes.iter().find(|p| p.pid == leader) {
        visit(first);
    }
    let mut parents = vec![leader];
    // /proc is not read atomically, so the list may contain a cycle. The search ends after as many
    // visits as there are processes.
    let mut remaining = processes.len();
    while let Some(parent) = parents.pop() {
        for &index in children.get(&parent).map_or(&[][..], Vec::as_slice) {
            let Some(rest) = remaining.checked_sub(1) else { return };
            remaining = rest;
            if let Some(process) = processes.get(index) {
                visit(process);
                parents.push(process.pid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ticks_of_a_process_tree_are_summed() {
        let process =
            |pid, parent, ticks, stopped| ProcessStat { pid, parent, start_time: 0, ticks, stopped };
        let processes = [
            process(10, 1, 5, true),
            process(11, 10, 7, false),
            process(12, 11, 1, true),
            process(20, 1, 3, false),
            process(30, 31, 9, false),
            process(31, 30, 9, false),
        ];
        let activity = |ticks, stopped| WorkerActivity { ticks, stopped };
        assert_eq!(
            sum_cpu_times(&processes, &[10, 20, 99]),
            [activity(13, true), activity(3, false), activity(0, false)]
        );
        assert!(sum_cpu_times(&processes, &[30])[0].ticks >= 18, "a cycle ends");
    }

    #[test]
    fn the_test_process_is_measured_as_running() {
        assert_eq!(list_process_tree(std::process::id()).first(), Some(&(std::process::id() as i32)));
        assert!(!measure_activity(&[std::process::id()])[0].stopped);
    }
}
