//! What workers' processes do, as `/proc` shows it: CPU time of a whole family, and whether its head is stopped.
use super::descendants::{Process, processes};
use std::collections::HashMap;

/// A look at one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Activity {
    /// CPU time of its processes that live and of those they waited for, clock ticks.
    pub(super) ticks: u64,
    /// Its first process is stopped by a signal.
    pub(super) stopped: bool,
}

/// Looks at these workers (by the pid of their first process), all at once.
pub(super) fn activity(leaders: &[u32]) -> Vec<Activity> {
    of(&processes(), leaders)
}

/// Pids of a worker's processes, its first one first.
pub(super) fn family(leader: u32) -> Vec<i32> {
    let all = processes();
    let children = children_of(&all);
    let mut family = Vec::new();
    walk(&children, &all, leader as i32, &mut |process| family.push(process.pid));
    family
}

fn of(all: &[Process], leaders: &[u32]) -> Vec<Activity> {
    let children = children_of(all);
    let one = |leader: &u32| {
        let mut activity = Activity::default();
        walk(&children, all, *leader as i32, &mut |process| {
            activity.ticks += process.ticks;
            activity.stopped |= process.pid == *leader as i32 && process.stopped;
        });
        activity
    };
    leaders.iter().map(one).collect()
}

/// Places in `all` of each parent's children.
fn children_of(all: &[Process]) -> HashMap<i32, Vec<usize>> {
    let mut children: HashMap<i32, Vec<usize>> = HashMap::new();
    for (at, process) in all.iter().enumerate() {
        children.entry(process.parent).or_default().push(at);
    }
    children
}

fn walk(children: &HashMap<i32, Vec<usize>>, all: &[Process], leader: i32, visit: &mut impl FnMut(&Process)) {
    if let Some(first) = all.iter().find(|p| p.pid == leader) {
        visit(first);
    }
    let mut parents = vec![leader];
    // The picture isn't of one moment: a loop in it must not catch us.
    let mut left = all.len();
    while let Some(parent) = parents.pop() {
        for &at in children.get(&parent).map_or(&[][..], Vec::as_slice) {
            let Some(rest) = left.checked_sub(1) else { return };
            left = rest;
            if let Some(process) = all.get(at) {
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
    fn a_family_counts_together() {
        let process = |pid, parent, ticks, stopped| Process { pid, parent, started: 0, ticks, stopped };
        let all = [
            process(10, 1, 5, true),
            process(11, 10, 7, false),
            process(12, 11, 1, true),
            process(20, 1, 3, false),
            process(30, 31, 9, false),
            process(31, 30, 9, false),
        ];
        let activity = |ticks, stopped| Activity { ticks, stopped };
        assert_eq!(of(&all, &[10, 20, 99]), [activity(13, true), activity(3, false), activity(0, false)]);
        assert!(of(&all, &[30])[0].ticks >= 18, "a loop ends");
    }

    #[test]
    fn this_process_uses_the_cpu() {
        assert_eq!(family(std::process::id()).first(), Some(&(std::process::id() as i32)));
        assert!(!activity(&[std::process::id()])[0].stopped);
    }
}
