//! Tests that a watch reports each checkpoint once, as soon as the checkpoint is complete.
use super::external::golden_path;
use super::*;
use crate::watch::{CheckpointWatch, DirectoryReport, DirectoryStatus};
use std::fs;
use std::time::{Duration, Instant};

const SETTLE_TIME: Duration = Duration::from_secs(2);
const INCOMPLETE_REPORT_TIME: Duration = Duration::from_secs(60);

/// A watch of a checkpoint directory with a simulated clock.
struct TestWatch {
    watch: CheckpointWatch,
    now: Instant,
}

impl TestWatch {
    fn new(root: &Path) -> TestWatch {
        TestWatch {
            watch: CheckpointWatch::new(root, SETTLE_TIME, INCOMPLETE_REPORT_TIME),
            now: Instant::now(),
        }
    }

    /// Advances the simulated clock by `wait`, polls, and returns the reports.
    fn poll_after(&mut self, wait: Duration) -> Vec<DirectoryReport> {
        self.now += wait;
        self.watch.poll(self.now).expect("listed")
    }

    /// Polls twice: immediately, and again after [`SETTLE_TIME`], the time for which a complete
    /// checkpoint must be unchanged. Returns the reports of both polls.
    fn poll_now_and_after_settle_time(&mut self) -> Vec<DirectoryReport> {
        let mut sightings = self.poll_after(Duration::ZERO);
        sightings.extend(self.poll_after(SETTLE_TIME));
        sightings
    }
}

/// Returns the names and steps of the directories in the reports `s`. Panics if a directory isn't
/// reported as a complete checkpoint without missing parts.
fn expect_complete(s: &[DirectoryReport]) -> Vec<(String, Option<u64>)> {
    let name_and_step = |s: &DirectoryReport| match &s.status {
        DirectoryStatus::Complete { step, missing } if missing.is_empty() => {
            (s.path.file_name().expect("a name").to_string_lossy().into_owned(), *step)
        }
        other => panic!("{} is {other:?}", s.path.display()),
    };
    s.iter().map(name_and_step).collect()
}

#[test]
fn a_native_checkpoint_is_reported_at_once_and_once() {
    let dir = make_memory_dir();
    let root = dir.path().join("later");
    let mut clock = TestWatch::new(&root);
    assert!(clock.poll_now_and_after_settle_time().is_empty(), "the directory does not exist yet");
    let facts = make_facts(5, 2, &[("a", &[4])]);
    let staging = StagingDir::create(&root, 5, 0).expect("begun");
    let reports = write_shards(staging.path(), &facts).expect("written");
    assert!(clock.poll_after(INCOMPLETE_REPORT_TIME).is_empty(), "a save in progress is not reported");
    crate::commit_save(staging, facts, reports).expect("complete");
    assert_eq!(expect_complete(&clock.poll_after(Duration::ZERO)), [("step-00000005".to_owned(), Some(5))]);
    assert!(clock.poll_now_and_after_settle_time().is_empty());
    // the directory is renamed, and renamed back
    fs::rename(&root, dir.path().join("away")).expect("renamed");
    assert!(clock.poll_now_and_after_settle_time().is_empty());
    fs::rename(dir.path().join("away"), &root).expect("renamed");
    assert_eq!(expect_complete(&clock.poll_now_and_after_settle_time()).len(), 1);
}

#[test]
fn an_external_checkpoint_is_reported_after_its_last_file() {
    for (name, inside, lands) in [
        ("z2_padded/global_step3", "global_step3", Some(3)),
        ("z3_frozen/global_step3", "global_step3", Some(3)),
        ("universal_z2/global_step3_universal", "global_step3_universal", Some(3)),
        ("hf_ddp/checkpoint-3", "checkpoint-3", Some(3)),
    ] {
        let dir = make_memory_dir();
        let (from, to) = (golden_path(name), dir.path().join(inside));
        let mut paths: Vec<PathBuf> = read_tree(&from).into_iter().map(|(p, _)| p).collect();
        // HF Trainer writes this file last
        paths.sort_by_key(|p| p.ends_with("trainer_state.json"));
        let mut clock = TestWatch::new(dir.path());
        for (i, path) in paths.iter().enumerate() {
            let target = to.join(path.strip_prefix(&from).expect("below"));
            fs::create_dir_all(target.parent().expect("a parent")).expect("made");
            let bytes = fs::read(path).expect("read");
            fs::write(&target, &bytes[..bytes.len() / 2]).expect("written");
            let sightings = clock.poll_now_and_after_settle_time();
            assert!(sightings.is_empty(), "{name}, half of file {i} ({}): {sightings:?}", path.display());
            fs::write(&target, bytes).expect("written");
            // a universal checkpoint has no list that shows which parameters are still missing
            if i + 1 < paths.len() && !name.starts_with("universal") {
                assert!(clock.poll_after(Duration::ZERO).is_empty(), "{name}: no report while files change");
            }
        }
        assert_eq!(
            expect_complete(&clock.poll_now_and_after_settle_time()),
            [(inside.to_owned(), lands)],
            "{name}"
        );
        assert!(clock.poll_after(INCOMPLETE_REPORT_TIME).is_empty(), "{name} is reported once");
    }
}

#[test]
fn an_incomplete_checkpoint_is_reported_after_the_limit_and_again_when_complete() {
    let dir = make_memory_dir();
    let to = dir.path().join("global_step3");
    copy_tree(&golden_path("z2_padded/global_step3"), &to);
    let name = "zero_pp_rank_3_mp_rank_00_optim_states.pt";
    fs::remove_file(to.join(name)).expect("removed");
    let mut clock = TestWatch::new(dir.path());
    assert!(clock.poll_now_and_after_settle_time().is_empty());
    let sightings = clock.poll_after(INCOMPLETE_REPORT_TIME);
    let [DirectoryReport { status: DirectoryStatus::Incomplete { why }, .. }] = &sightings[..] else {
        panic!("{sightings:?}")
    };
    insta::assert_snapshot!("watch_incomplete", replace_dir(&why.to_string(), dir.path()));
    assert!(clock.poll_after(INCOMPLETE_REPORT_TIME).is_empty(), "one report");
    fs::copy(golden_path("z2_padded/global_step3").join(name), to.join(name)).expect("copied");
    assert_eq!(expect_complete(&clock.poll_now_and_after_settle_time()).len(), 1);
    // after a checkpoint was removed, another checkpoint of its name is reported as a new one
    fs::remove_dir_all(&to).expect("removed");
    assert!(clock.poll_now_and_after_settle_time().is_empty());
    copy_tree(&golden_path("z2_padded/global_step3"), &to);
    assert_eq!(expect_complete(&clock.poll_now_and_after_settle_time()).len(), 1);
}

#[test]
fn an_accelerate_checkpoint_without_its_scheduler_is_reported_with_the_missing_file() {
    let dir = make_memory_dir();
    let to = dir.path().join("checkpoints/checkpoint_0");
    copy_tree(&golden_path("fsdp2_sharded"), &to);
    let mut clock = TestWatch::new(dir.path());
    assert_eq!(expect_complete(&clock.poll_now_and_after_settle_time()).len(), 1);
    fs::remove_file(to.join("scheduler.bin")).expect("removed");
    assert!(clock.poll_now_and_after_settle_time().is_empty());
    let sightings = clock.poll_after(INCOMPLETE_REPORT_TIME);
    assert!(
        matches!(&sightings[..], [DirectoryReport { status: DirectoryStatus::Complete { missing, .. }, .. }] if missing == &["scheduler"]),
        "{sightings:?}"
    );
}
