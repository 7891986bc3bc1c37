//! SIGKILL at every write, fsync and rename of a save. The next start resumes from a complete
//! checkpoint with bit-equal losses.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use std::fs;
use support::{JobDirectory, files_below};

/// The number of fault points that each rank of a run with these settings passes.
fn count_fault_points(place: &JobDirectory, set: &[&str], world: u32) -> Vec<u64> {
    let counts = place.path("counts");
    let mut passed = vec![0; world as usize];
    for rank in 0..world {
        _ = fs::remove_file(&counts);
        place.delete_checkpoints();
        let counted = place
            .command(
                &[&["job.yaml", "--json"], &set.iter().flat_map(|s| ["--set", s]).collect::<Vec<_>>()[..]]
                    .concat(),
            )
            .env("LAUNCH_FAULT", format!("{rank}:0"))
            .env("LAUNCH_FAULT_COUNT", &counts)
            .output()
            .unwrap();
        assert!(counted.status.success(), "{}", String::from_utf8_lossy(&counted.stderr));
        let lines = fs::read_to_string(&counts).unwrap();
        let count = lines.lines().find_map(|l| l.strip_prefix(&format!("{rank} "))?.parse::<u64>().ok());
        passed[rank as usize] = count.unwrap_or_else(|| panic!("rank {rank} in {lines:?}"));
    }
    passed
}

/// Kills each of `ranks` at each of its fault points, and resumes.
fn kill_at_every_fault_point(world: u32, set: &[&str], ranks: &[u32]) {
    let place = JobDirectory::new();
    let workers = format!("cluster.workers_per_host={world}");
    let set: Vec<&str> =
        [&workers, "train.steps=4", "train.batch.global=4", "checkpoint.every=2", "checkpoint.keep=1"]
            .into_iter()
            .map(|s| s as &str)
            .chain(set.iter().copied())
            .collect();
    let whole = place.run(&set).succeeded().losses();
    let passed = count_fault_points(&place, &set, world);
    for &rank in ranks {
        assert!(passed[rank as usize] > 8, "rank {rank} passed only {} fault points", passed[rank as usize]);
        for n in 1..=passed[rank as usize] {
            place.delete_checkpoints();
            let killed = place.run_with(&set, "LAUNCH_FAULT", &format!("{rank}:{n}"));
            assert_eq!(killed.code, 1, "world {world}, rank {rank}, point {n}: {}", killed.stderr);
            assert_eq!(killed.failure()["reason"]["name"], "SIGKILL", "{}", killed.failure_message());
            let next = place.run(&set).succeeded();
            let done = next.named("resume").first().map_or(0, |r| r["step"].as_u64().unwrap() as usize);
            assert_eq!(
                next.losses(),
                whole[done..],
                "world {world}, rank {rank}, point {n}: resumed at {done}"
            );
            // a checkpoint that was reported before the kill is not lost
            let saved = killed.named("checkpoint").last().map_or(0, |c| c["step"].as_u64().unwrap() as usize);
            assert!(done >= saved, "checkpoint {saved} was announced, resumed at {done}");
            let left = files_below(&place.checkpoints());
            // a kill between the commit of a checkpoint and the removal of its predecessor leaves
            // both
            let known = |f: &String| {
                let older = done == 4 && f.starts_with("step-00000002/");
                f == "latest" || f.starts_with("step-00000004/") || f.starts_with("weights/") || older
            };
            assert!(left.iter().all(known), "point {n} left {left:?}");
        }
    }
}

#[test]
fn saves_of_one_worker_survive_a_kill() {
    kill_at_every_fault_point(1, &[], &[0]);
}

#[test]
fn background_saves_of_two_workers_survive_a_kill() {
    kill_at_every_fault_point(2, &["checkpoint.async=true"], &[0, 1]);
}

#[test]
fn saves_with_parity_of_two_workers_survive_a_kill() {
    kill_at_every_fault_point(2, &["checkpoint.async=true", "checkpoint.parity=true"], &[1]);
}

#[test]
fn saves_of_three_workers_survive_a_kill() {
    kill_at_every_fault_point(3, &["train.zero.stage=2"], &[0, 1, 2]);
}

#[test]
fn saves_of_four_workers_survive_a_kill() {
    kill_at_every_fault_point(4, &["train.zero.stage=1"], &[0, 1, 2, 3]);
}
