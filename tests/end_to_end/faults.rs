//! Kills ranks with SIGKILL at every write, fsync and rename of a save. The next start must resume
//! from a complete checkpoint with bit-equal losses.
use crate::support::{JobDirectory, list_files_below};
use std::fs;

/// Counts the fault points (writes, fsyncs and renames of a save) that each of `ranks` passes in a
/// run with these settings. Runs the job once for each of the ranks.
fn count_fault_points(job_dir: &JobDirectory, set: &[&str], ranks: &[u32]) -> Vec<u64> {
    let counts = job_dir.path("counts");
    let count_points_of = |rank: &u32| {
        _ = fs::remove_file(&counts);
        job_dir.delete_checkpoints();
        let counted = job_dir
            .launch_command(
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
        count.unwrap_or_else(|| panic!("rank {rank} in {lines:?}"))
    };
    ranks.iter().map(count_points_of).collect()
}

/// Kills each of `ranks` at each of its fault points. After each kill, checks that the next run
/// resumes with bit-equal losses from a checkpoint at least as new as the last reported one, and
/// that no partial checkpoint remains.
fn kill_at_every_fault_point(world: u32, set: &[&str], ranks: &[u32]) {
    let job_dir = JobDirectory::new();
    let workers = format!("cluster.workers_per_host={world}");
    let set: Vec<&str> =
        [&workers, "train.steps=4", "train.batch.global=4", "checkpoint.every=2", "checkpoint.keep=1"]
            .into_iter()
            .map(|s| s as &str)
            .chain(set.iter().copied())
            .collect();
    let whole = job_dir.run(&set).expect_success().collect_losses();
    for (&rank, passed) in ranks.iter().zip(count_fault_points(&job_dir, &set, ranks)) {
        assert!(passed > 8, "rank {rank} passed only {passed} fault points");
        for n in 1..=passed {
            job_dir.delete_checkpoints();
            let killed = job_dir.run_with_env(&set, "LAUNCH_FAULT", &format!("{rank}:{n}"));
            assert_eq!(killed.code, 1, "world {world}, rank {rank}, point {n}: {}", killed.stderr);
            assert_eq!(killed.expect_failure()["reason"]["name"], "SIGKILL", "{}", killed.failure_message());
            let next = job_dir.run(&set).expect_success();
            let done =
                next.events_named("resume").first().map_or(0, |r| r["step"].as_u64().unwrap() as usize);
            assert_eq!(
                next.collect_losses(),
                whole[done..],
                "world {world}, rank {rank}, point {n}: resumed at {done}"
            );
            // a checkpoint that was reported before the kill is not lost
            let saved =
                killed.events_named("checkpoint").last().map_or(0, |c| c["step"].as_u64().unwrap() as usize);
            assert!(done >= saved, "checkpoint {saved} was announced, resumed at {done}");
            let left = list_files_below(&job_dir.checkpoint_dir());
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
    // rank 1 writes what rank 2 writes
    kill_at_every_fault_point(3, &["train.zero.stage=2"], &[0, 2]);
}

#[test]
fn saves_of_four_workers_survive_a_kill() {
    // ranks 1 and 2 write what rank 3 writes
    kill_at_every_fault_point(4, &["train.zero.stage=1"], &[0, 3]);
}
