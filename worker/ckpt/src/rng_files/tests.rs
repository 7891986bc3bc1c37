use super::folder::{self, Record};
use super::prepare::{self, Place};
use super::rule::{Asked, Mode, Policy, Scope, reconcile};
use super::streams::{
    CpuState, CudaState, CudaStates, Kind, NumpyNames, NumpyState, PythonState, RankStates, Twister, Writer,
};
use super::{parse, write};
use crate::disk::Folder;
use crate::error::CkptError;
use proptest::prelude::*;
use std::fs;
use std::path::Path;

/// States that this number decides; the same number, the same states.
fn states(n: u32) -> RankStates {
    let twister = |kind: u32| Twister { position: n % 625, ..Twister::by_array(&[kind, n]) };
    RankStates {
        python: PythonState {
            twister: twister(1),
            gauss_next: n.is_multiple_of(2).then_some(0.1 + f64::from(n)),
        },
        numpy: NumpyState { twister: twister(2), has_gauss: n % 3 == 1, cached_gaussian: -1.5 },
        numpy_names: if n.is_multiple_of(5) { NumpyNames::Core } else { NumpyNames::PrivateCore },
        cpu: CpuState::fresh(u64::from(n), &twister(3)),
        cuda: None,
        step: None,
    }
}

fn stored(dir: &Path, writer: Writer, ranks: &[RankStates]) {
    for (rank, states) in (0u32..).zip(ranks) {
        let name = folder::file_name(writer, rank, ranks.len() as u32);
        fs::write(dir.join(&name), write::encode(writer, "any", states)).expect("written");
    }
}

#[test]
fn what_is_written_is_read_back() {
    for n in 0..12 {
        let dir = tempfile::tempdir().expect("a directory");
        let mut states = states(n);
        let device = CudaState::fresh(u64::MAX - u64::from(n));
        states.cuda = [None, Some(CudaStates::One(device)), Some(CudaStates::All(vec![device; n as usize]))]
            [n as usize % 3]
            .clone();
        let writer = if n.is_multiple_of(2) { Writer::Trainer } else { Writer::Accelerate };
        states.step = (writer == Writer::Accelerate).then_some(i64::from(n) << 30);
        fs::write(dir.path().join("f"), write::encode(writer, "f", &states)).expect("written");
        let (of, read) = parse::read(&Folder::open(dir.path()).expect("open"), "f").expect("sound");
        assert_eq!((of, read), (writer, states));
    }
}

/// The reference implementation's own check: `init_by_array({0x123, 0x234, 0x345, 0x456})` begins with these numbers.
#[test]
fn twisters_are_seeded_as_the_reference_does() {
    let key = [0x123, 0x234, 0x345, 0x456];
    let mt = Twister::by_array(&key);
    let w = |i: usize| mt.words[i % 624];
    let next = |k: usize| {
        let y = (w(k) & 0x8000_0000) | (w(k + 1) & 0x7fff_ffff);
        let mut x = w(k + 397) ^ (y >> 1) ^ if y & 1 == 1 { 0x9908_b0df } else { 0 };
        x ^= x >> 11;
        x ^= (x << 7) & 0x9d2c_5680;
        x ^= (x << 15) & 0xefc6_0000;
        x ^ (x >> 18)
    };
    assert_eq!([next(0), next(1), next(2)], [1_067_595_299, 955_945_823, 477_289_528]);
}

#[test]
fn any_flip_is_an_error_or_changes_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let sound = states(7);
    let file = write::encode(Writer::Trainer, "f", &sound);
    let opened = Folder::open(dir.path()).expect("open");
    for at in (0..file.len()).step_by(7) {
        let mut flipped = file.clone();
        flipped[at] ^= 1 << (at % 8);
        fs::write(dir.path().join("f"), flipped).expect("written");
        if let Ok((_, read)) = parse::read(&opened, "f") {
            assert_eq!(read, sound, "a flip at {at} is taken for other states");
        }
    }
    for len in (0..file.len()).step_by(97) {
        fs::write(dir.path().join("f"), &file[..len]).expect("written");
        assert!(parse::read(&opened, "f").is_err(), "cut to {len}");
    }
}

#[test]
fn hostile_states_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let opened = Folder::open(dir.path()).expect("open");
    let refused = |states: &RankStates| {
        fs::write(dir.path().join("f"), write::encode(Writer::Trainer, "f", states)).expect("written");
        parse::read(&opened, "f").expect_err("refused").to_string()
    };
    let mut bad = states(1);
    bad.python.twister.position = 625;
    assert!(refused(&bad).contains("stands at word 625"));
    let mut bad = states(1);
    bad.cpu.0[8] = 0;
    assert!(refused(&bad).contains("left 0"));
    let mut bad = states(1);
    bad.cpu.0[30] = 1;
    assert!(refused(&bad).contains("more than 32 bits"));
    let mut bad = states(1);
    bad.cuda = Some(CudaStates::One(CudaState([0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])));
    assert!(refused(&bad).contains("offset 1 is no multiple of 4"));
}

#[test]
fn new_streams_depend_on_everything_but_the_number_of_ranks() {
    let old = [states(1), states(2)];
    let new = |asked: &Asked| reconcile(&old, asked).expect("reconciled").0;
    let base = Asked::new(3, Policy::Reconcile);
    let three = new(&base);
    let five = new(&Asked { world: 5, ..base.clone() });
    assert_eq!(three[..], five[..3]);
    for kind in [Kind::Python, Kind::Numpy, Kind::TorchCpu] {
        let mut seen: Vec<_> = five.iter().map(|s| s.digest(kind).expect("there").0).collect();
        let other = [
            Asked { generation: 2, ..base.clone() },
            Asked { step: 1, ..base.clone() },
            Asked { run_seed: Some(5), ..base.clone() },
        ];
        seen.extend(other.iter().flat_map(new).map(|s| s.digest(kind).expect("there").0));
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all, "{kind}: a stream repeats");
    }
    let strict = reconcile(&old, &Asked::new(3, Policy::Strict)).expect_err("refused");
    assert!(strict.contains("strict refuses"), "{strict}");
    assert_eq!(reconcile(&old, &Asked::new(2, Policy::Strict)).expect("fits").0, old);
}

#[test]
fn streams_follow_their_owners() {
    let old = [states(10), states(11), states(10), states(11)];
    let mut asked = Asked::new(2, Policy::Strict);
    asked.scopes.extend(Kind::ALL.map(|k| (k, Scope::PerOwner)));
    assert!(reconcile(&old, &asked).expect_err("unknown").contains("nobody said who they are"));
    asked.owners = Some((vec![0, 1, 0, 1], vec![1, 0]));
    let (new, decision) = reconcile(&old, &asked).expect("followed");
    let digests = |s: &RankStates| Kind::ALL.map(|k| s.digest(k));
    assert_eq!((digests(&new[0]), digests(&new[1])), (digests(&old[1]), digests(&old[0])));
    assert!(decision.streams.iter().all(|s| s.mode == Mode::Followed));
    asked.owners = Some((vec![0, 1, 0, 1], vec![1, 2]));
    assert!(reconcile(&old, &asked).expect_err("lost").contains("the owner of rank 1"));
}

#[test]
fn of_cuda_a_ranks_own_device_counts() {
    let (used, idle) = (CudaState::fresh(9), CudaState::fresh(0));
    let with = |cuda| RankStates { cuda: Some(cuda), ..states(4) };
    let old = [with(CudaStates::All(vec![used, idle])), with(CudaStates::All(vec![idle, used]))];
    let (new, decision) = reconcile(&old, &Asked::new(4, Policy::Reconcile)).expect("reconciled");
    assert!(decision.streams.iter().all(|s| s.mode == Mode::Replicated), "{decision:?}");
    assert!(new.iter().all(|s| s.cuda == Some(CudaStates::All(vec![used; 4]))));
    let (one, _) = reconcile(&old, &Asked::new(1, Policy::Reconcile)).expect("reconciled");
    assert_eq!(one[0].cuda, Some(CudaStates::One(used)));
    let lacking = [with(CudaStates::One(used)), states(4)];
    assert!(
        reconcile(&lacking, &Asked::new(3, Policy::Reconcile))
            .expect_err("refused")
            .contains("rank 1 has no torch_cuda")
    );
}

#[test]
fn folders_are_made_beside_and_never_over_what_isnt_ours() {
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("checkpoint-6");
    fs::create_dir_all(dir.join("inner")).expect("made");
    fs::write(dir.join("inner/weights"), "w").expect("written");
    fs::write(dir.join("trainer_state.json"), "{\"global_step\": 6}").expect("written");
    stored(&dir, Writer::Trainer, &[states(1), states(2)]);
    let asked = Asked::new(3, Policy::Reconcile);
    let made = prepare::program(&dir, &asked).expect("made");
    assert_eq!(made.path, root.path().join("launch-w3/checkpoint-6"));
    let again = prepare::program(&dir, &asked).expect("made again");
    assert_eq!((again.path.clone(), again.decision.clone()), (made.path.clone(), made.decision));
    assert_eq!(fs::read(made.path.join("inner/weights")).expect("there"), b"w");
    let record = Record::read(&made.path).expect("sound").expect("there");
    assert_eq!((record.decision.step, record.decision.generation), (6, 1));
    assert_eq!(folder::read(&made.path, Some(3)).expect("whole").expect("there").ranks.len(), 3);
    // a later step counts on
    let later = root.path().join("checkpoint-9");
    fs::create_dir(&later).expect("made");
    fs::write(later.join("trainer_state.json"), "{\"global_step\": 9}").expect("written");
    stored(&later, Writer::Trainer, &[states(1), states(2), states(3)]);
    let made = prepare::program(&later, &Asked::new(2, Policy::Reconcile)).expect("made");
    assert_eq!(made.decision.expect("decided").generation, 2);
    assert_eq!(prepare::program(&later, &asked).expect("fits").path, later);
    assert_eq!(prepare::newest(root.path()).expect("listed").0, Some(later));
    // somebody else's folder
    fs::create_dir_all(root.path().join("launch-w5/checkpoint-6")).expect("made");
    let refused = prepare::rng(&dir, &Asked::new(5, Policy::Reconcile), &Place::Sibling);
    assert!(matches!(refused, Err(CkptError::Refused { .. })), "{refused:?}");
    std::os::unix::fs::symlink("/etc/passwd", dir.join("link")).expect("linked");
    let refused = prepare::program(&dir, &asked).expect_err("links aren't followed").to_string();
    assert!(refused.contains("link"), "{refused}");
    let names = Folder::open(&root.path().join("launch-w3")).expect("open").names().expect("listed");
    assert_eq!(names, ["checkpoint-6"], "nothing half-made stays");
}

/// FSDP's optimizer in shards says how many steps were done, as a file of Accelerate's own does.
#[test]
fn a_scheduler_beside_fsdp_s_shards_is_set_right() {
    let golden =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/resume/accelerate_fsdp_sharded/state");
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("state");
    crate::tests::copy_tree(std::path::Path::new(golden), &dir);
    let made = prepare::program(&dir, &Asked::new(4, Policy::Reconcile)).expect("made");
    assert!(made.lines[0].contains("stands at 12 instead of 6 (3 steps)"), "{:?}", made.lines);
}

/// A scheduler that was stepped once for each of two processes, three times.
#[test]
fn a_scheduler_that_counts_processes_is_set_right() {
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("step_3");
    fs::create_dir(&dir).expect("made");
    stored(&dir, Writer::Accelerate, &[states(1), states(2)]);
    let save = |name: &str, fill: &dyn Fn(&mut write::Pickle)| {
        let mut pickle = write::Pickle { out: vec![0x80, 2], storages: Vec::new() };
        fill(&mut pickle);
        pickle.out.push(b'.');
        let mut zip = write::Zip::new("x");
        zip.add("data.pkl", &pickle.out, false);
        fs::write(dir.join(name), zip.end(&[])).expect("written");
    };
    let scheduler = |last: i64| {
        save("scheduler.bin", &|p| {
            p.out.extend(b"}(");
            for (key, value) in [("last_epoch", last), ("_step_count", last + 1)] {
                p.text(key);
                p.out.extend(b"q\x01");
                p.int(value);
            }
            p.out.push(b'u');
        });
    };
    save("optimizer.bin", &|p| {
        p.out.extend(b"}");
        p.text("state");
        p.out.extend(b"}K\0}");
        p.text("step");
        p.out.extend(b"K\x03sss");
    });
    scheduler(6);
    let made = prepare::program(&dir, &Asked::new(400, Policy::Reconcile)).expect("made");
    assert!(made.lines[0].contains("stands at 1200 instead of 6 (3 steps)"), "{:?}", made.lines);
    let folder = Folder::open(&made.path).expect("open");
    let file = crate::formats::torch_file::TorchFile::open(&folder, "scheduler.bin", &[]).expect("sound");
    let count = |key: &str| file.value().get(key).and_then(|v| v.count());
    assert_eq!((count("last_epoch"), count("_step_count")), (Some(1200), Some(1201)));
    // one that was stepped once a step stays as it is
    scheduler(3);
    let made = prepare::program(&dir, &Asked::new(4, Policy::Reconcile)).expect("made");
    assert!(!made.lines[0].contains("scheduler"), "{:?}", made.lines);
    let same = |name: &str| {
        fs::read(made.path.join(name)).expect("there") == fs::read(dir.join(name)).expect("there")
    };
    assert!(same("scheduler.bin"));
}

proptest! {
    #[test]
    fn no_mutation_panics(flips in proptest::collection::vec((0usize..20_000, any::<u8>()), 1..8)) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut file = write::encode(Writer::Accelerate, "f", &states(3));
        let len = file.len();
        for (at, value) in flips {
            file[at % len] = value;
        }
        fs::write(dir.path().join("f"), file).expect("written");
        let _ = parse::read(&Folder::open(dir.path()).expect("open"), "f");
    }
}
