//! Checkpoints are told once, when they are whole, and not before.
use super::foreign::golden;
use super::*;
use crate::watch::{Landed, Sighting, Watch};
use std::fs;
use std::time::{Duration, Instant};

const SETTLE: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(60);

/// A watch with a clock of its own.
struct Clock {
    watch: Watch,
    now: Instant,
}

impl Clock {
    fn of(root: &Path) -> Clock {
        Clock { watch: Watch::new(root, SETTLE, LIMIT), now: Instant::now() }
    }

    fn after(&mut self, wait: Duration) -> Vec<Sighting> {
        self.now += wait;
        self.watch.look(self.now).expect("listed")
    }

    /// What is said at once and after having settled.
    fn settled(&mut self) -> Vec<Sighting> {
        let mut all = self.after(Duration::ZERO);
        all.extend(self.after(SETTLE));
        all
    }
}

fn complete(s: &[Sighting]) -> Vec<(String, Option<u64>)> {
    let of = |s: &Sighting| match &s.landed {
        Landed::Complete { step, missing } if missing.is_empty() => {
            (s.path.file_name().expect("a name").to_string_lossy().into_owned(), *step)
        }
        other => panic!("{} is {other:?}", s.path.display()),
    };
    s.iter().map(of).collect()
}

#[test]
fn ours_is_told_at_once_and_only_once() {
    let dir = fast_dir();
    let root = dir.path().join("later");
    let mut clock = Clock::of(&root);
    assert!(clock.settled().is_empty(), "there is no directory yet");
    let facts = facts(5, 2, &[("a", &[4])]);
    let staging = Staging::begin(&root, 5, 0).expect("begun");
    let reports = write_shards(staging.path(), &facts).expect("written");
    assert!(clock.after(LIMIT).is_empty(), "a save in progress is nothing");
    crate::commit(staging, facts, reports).expect("complete");
    assert_eq!(complete(&clock.after(Duration::ZERO)), [("step-00000005".to_owned(), Some(5))]);
    assert!(clock.settled().is_empty());
    // the directory goes and comes back under its name
    fs::rename(&root, dir.path().join("away")).expect("renamed");
    assert!(clock.settled().is_empty());
    fs::rename(dir.path().join("away"), &root).expect("renamed");
    assert_eq!(complete(&clock.settled()).len(), 1);
}

#[test]
fn files_that_come_one_after_the_other_are_waited_for() {
    for (name, inside, lands) in [
        ("z2_padded/global_step3", "global_step3", Some(3)),
        ("z3_frozen/global_step3", "global_step3", Some(3)),
        ("universal_z2/global_step3_universal", "global_step3_universal", Some(3)),
        ("hf_ddp/checkpoint-3", "checkpoint-3", Some(3)),
    ] {
        let dir = fast_dir();
        let (from, to) = (golden(name), dir.path().join(inside));
        let mut all: Vec<PathBuf> = files(&from).into_iter().map(|(p, _)| p).collect();
        // as HF Trainer does it
        all.sort_by_key(|p| p.ends_with("trainer_state.json"));
        let mut clock = Clock::of(dir.path());
        for (i, path) in all.iter().enumerate() {
            let target = to.join(path.strip_prefix(&from).expect("below"));
            fs::create_dir_all(target.parent().expect("a parent")).expect("made");
            let bytes = fs::read(path).expect("read");
            fs::write(&target, &bytes[..bytes.len() / 2]).expect("written");
            let said = clock.settled();
            assert!(said.is_empty(), "{name}, half of file {i} ({}): {said:?}", path.display());
            fs::write(&target, bytes).expect("written");
            // a universal checkpoint whose last parameters are still to come says nothing of them
            if i + 1 < all.len() && !name.starts_with("universal") {
                assert!(clock.after(Duration::ZERO).is_empty(), "{name}: nothing is told while files change");
            }
        }
        assert_eq!(complete(&clock.settled()), [(inside.to_owned(), lands)], "{name}");
        assert!(clock.after(LIMIT).is_empty(), "{name} is told once");
    }
}

#[test]
fn what_stays_incomplete_is_said_after_the_limit_and_told_when_it_is_whole() {
    let dir = fast_dir();
    let to = dir.path().join("global_step3");
    copy_tree(&golden("z2_padded/global_step3"), &to);
    let name = "zero_pp_rank_3_mp_rank_00_optim_states.pt";
    fs::remove_file(to.join(name)).expect("removed");
    let mut clock = Clock::of(dir.path());
    assert!(clock.settled().is_empty());
    let said = clock.after(LIMIT);
    assert!(
        matches!(&said[..], [Sighting { landed: Landed::Incomplete { why }, .. }] if why.contains("rank 3")),
        "{said:?}"
    );
    assert!(clock.after(LIMIT).is_empty(), "it is said once");
    fs::copy(golden("z2_padded/global_step3").join(name), to.join(name)).expect("copied");
    assert_eq!(complete(&clock.settled()).len(), 1);
    // removed, it is forgotten; another of that name is new
    fs::remove_dir_all(&to).expect("removed");
    assert!(clock.settled().is_empty());
    copy_tree(&golden("z2_padded/global_step3"), &to);
    assert_eq!(complete(&clock.settled()).len(), 1);
}

#[test]
fn folders_of_accelerate_and_parts_that_never_come() {
    let dir = fast_dir();
    let to = dir.path().join("checkpoints/checkpoint_0");
    copy_tree(&golden("fsdp2_sharded"), &to);
    let mut clock = Clock::of(dir.path());
    assert_eq!(complete(&clock.settled()).len(), 1);
    fs::remove_file(to.join("scheduler.bin")).expect("removed");
    assert!(clock.settled().is_empty());
    let said = clock.after(LIMIT);
    assert!(
        matches!(&said[..], [Sighting { landed: Landed::Complete { missing, .. }, .. }] if missing == &["scheduler"]),
        "{said:?}"
    );
}
