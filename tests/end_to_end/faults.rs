//! Kills ranks with SIGKILL at every write, fsync and rename of a save. The next start, which is
//! itself killed at the next of these places, must resume from a complete checkpoint with bit-equal
//! losses.
use crate::support::{FinishedRun, JobDirectory, environment::clean_command, list_files_below};
use std::fs;

/// A job whose ranks are killed while they save.
struct KilledJob {
    job_dir: JobDirectory,
    set: Vec<String>,
    /// The losses of the run without a kill.
    losses: Vec<(u64, u64, u64)>,
}

impl KilledJob {
    /// Runs the job on `world` workers with these settings without a kill. It trains 4 steps and
    /// saves after steps 2 and 4. The directory `template` keeps the checkpoint of step 2.
    fn prepare(world: u32, set: &[&str]) -> KilledJob {
        let job_dir = JobDirectory::new();
        let set: Vec<String> = [&format!("cluster.workers_per_host={world}") as &str]
            .into_iter()
            .chain(["train.steps=4", "train.batch.global=4", "checkpoint.every=2", "checkpoint.keep=1"])
            .chain(set.iter().copied())
            .map(str::to_owned)
            .collect();
        let mut job = KilledJob { job_dir, set, losses: Vec::new() };
        job.losses = job.job_dir.run(&job.settings()).expect_success().collect_losses();
        job.job_dir.delete_checkpoints();
        let two_steps: Vec<&str> = job.settings().into_iter().chain(["train.steps=2"]).collect();
        let short = job.job_dir.run(&two_steps).expect_success();
        assert_eq!(short.collect_losses(), job.losses[..2]);
        let checkpoints = job.job_dir.checkpoint_dir();
        fs::remove_dir_all(checkpoints.join("weights")).unwrap();
        fs::rename(checkpoints, job.job_dir.path("template")).unwrap();
        job
    }

    fn settings(&self) -> Vec<&str> {
        self.set.iter().map(String::as_str).collect()
    }

    /// Replaces the checkpoints by the one of step 2.
    fn restore_step_2(&self) {
        self.job_dir.delete_checkpoints();
        let [from, to] = [self.job_dir.path("template"), self.job_dir.checkpoint_dir()];
        assert!(clean_command("cp").arg("-a").args([from, to]).status().unwrap().success());
    }

    /// Runs the job, in which `rank` is killed at its fault point `n`. Checks that the losses
    /// continue bit-equally after the step at which it resumes, which is at least `saved`. Returns
    /// the run and this step.
    fn run_with_kill(&self, rank: u32, n: u64, saved: u64) -> (FinishedRun, u64) {
        let run = self.job_dir.run_with_env(&self.settings(), "LAUNCH_FAULT", &format!("{rank}:{n}"));
        let resumed = self.check_losses(&run, saved, &format!("rank {rank}, point {n}"));
        if run.code != 0 {
            assert_eq!(run.code, 1, "rank {rank}, point {n}: {}", run.stderr);
            assert_eq!(run.expect_failure()["reason"]["name"], "SIGKILL", "{}", run.failure_message());
        }
        (run, resumed)
    }

    /// Checks that a run has resumed from a checkpoint at least as new as that of step `saved`,
    /// with bit-equal losses. Returns the step at which it has resumed, or `saved` if it was killed
    /// before.
    fn check_losses(&self, run: &FinishedRun, saved: u64, place: &str) -> u64 {
        let losses = run.collect_losses();
        let resumed = match run.events_named("resume").first() {
            Some(event) => event["step"].as_u64().unwrap(),
            None if run.code != 0 && losses.is_empty() => saved,
            None => 0,
        };
        assert!(resumed >= saved, "{place}: checkpoint {saved} was announced, resumed at {resumed}");
        let expected = &self.losses[resumed as usize..];
        assert!(expected.starts_with(&losses), "{place}: resumed at {resumed}: {losses:?} of {expected:?}");
        resumed
    }

    /// Runs the job to its end after a kill. Checks its losses, and that no partial checkpoint
    /// remains.
    fn complete(&self, saved: u64, place: &str) {
        let run = self.job_dir.run(&self.settings()).expect_success();
        let resumed = self.check_losses(&run, saved, place);
        self.check_end(&run, resumed, place);
    }

    /// Checks that a run has reached the last step, and that it has left only complete checkpoints.
    fn check_end(&self, run: &FinishedRun, resumed: u64, place: &str) {
        assert_eq!(run.collect_losses(), self.losses[resumed as usize..], "{place}: resumed at {resumed}");
        // A kill between the commit of a checkpoint and the removal of its predecessor leaves both.
        let is_complete = |file: &String| {
            let is_older = resumed == 4 && file.starts_with("step-00000002/");
            file == "latest" || file.starts_with("step-00000004/") || file.starts_with("weights/") || is_older
        };
        let left = list_files_below(&self.job_dir.checkpoint_dir());
        assert!(left.iter().all(is_complete), "{place} left {left:?}");
        assert!(left.iter().any(|file| file.starts_with("weights/")), "{place} left {left:?}");
    }

    fn has_checkpoint(&self, name: &str) -> bool {
        self.job_dir.checkpoint_dir().join(name).exists()
    }

    /// Kills `rank` at each fault point (write, fsync or rename) of the save after step 4 and of
    /// the full weights. The checkpoint of step 2 exists.
    fn kill_in_next_saves(&self, rank: u32) {
        self.restore_step_2();
        for n in 1.. {
            let place = format!("rank {rank}, point {n}");
            let (run, resumed) = self.run_with_kill(rank, n, 2);
            assert_eq!(resumed, 2, "{place}");
            if run.code == 0 {
                assert!(n > 8, "rank {rank} passes only {n} fault points");
                return self.check_end(&run, resumed, &place);
            }
            // Otherwise the next run, which is killed at the next point, resumes what this one has
            // left.
            if self.has_checkpoint("step-00000004") {
                let is_announced = run.events_named("checkpoint").iter().any(|event| event["step"] == 4);
                self.complete(if is_announced { 4 } else { 2 }, &place);
                self.restore_step_2();
            }
        }
    }

    /// Kills `rank` at each fault point of the save after step 2, which is the first one.
    fn kill_in_first_save(&self, rank: u32) {
        self.job_dir.delete_checkpoints();
        for n in 1.. {
            let place = format!("rank {rank}, point {n}");
            let (run, resumed) = self.run_with_kill(rank, n, 0);
            assert_eq!((run.code, resumed), (1, 0), "{place}");
            let is_announced = !run.events_named("checkpoint").is_empty();
            if self.has_checkpoint("step-00000002") {
                self.complete(if is_announced { 2 } else { 0 }, &place);
                self.job_dir.delete_checkpoints();
            }
            if is_announced {
                assert!(n > 8, "rank {rank} passes only {n} fault points");
                return;
            }
        }
    }
}

#[test]
fn saves_of_one_worker_survive_a_kill() {
    let job = KilledJob::prepare(1, &[]);
    job.kill_in_first_save(0);
    job.kill_in_next_saves(0);
}

#[test]
fn background_saves_of_two_workers_survive_a_kill() {
    let job = KilledJob::prepare(2, &["checkpoint.async=true"]);
    job.kill_in_next_saves(0);
    job.kill_in_next_saves(1);
}

#[test]
fn saves_with_parity_of_two_workers_survive_a_kill() {
    let job = KilledJob::prepare(2, &["checkpoint.async=true", "checkpoint.parity=true"]);
    job.kill_in_first_save(1);
    job.kill_in_next_saves(1);
}

#[test]
fn saves_of_three_workers_survive_a_kill() {
    // rank 1 writes what rank 2 writes
    let job = KilledJob::prepare(3, &["train.zero.stage=2"]);
    job.kill_in_next_saves(0);
    job.kill_in_next_saves(2);
}

#[test]
fn saves_of_four_workers_survive_a_kill() {
    // ranks 1 and 2 write what rank 3 writes
    let job = KilledJob::prepare(4, &["train.zero.stage=1"]);
    job.kill_in_next_saves(0);
    job.kill_in_next_saves(3);
}
