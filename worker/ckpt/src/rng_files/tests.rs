//! Tests of reading, writing and assigning random generator states, and of preparing checkpoints.
use super::rank_files::{self, RngRecord};
use super::reconcile::{
    ReconcileOptions, ReconcilePolicy, RngStreamAssignment, RngStreamScope, reconcile_rng_states,
};
use super::resume_preparation::{self, PrepareDestination};
use super::streams::{
    MersenneTwister, NumpyModule, NumpyRngState, PythonRngState, RankRngStates, RngFormat, TorchCpuState,
    TorchCudaState, TorchCudaStates,
};
use super::{decode, encode};
use crate::codec::disk::Directory;
use crate::error::{CkptError, DamageReason, ReconcileError, RngStateError};
use crate::rng_stream_kind::RngStreamKind;
use proptest::prelude::*;
use std::fs;
use std::path::Path;

/// Creates random generator states of one rank, without CUDA states, which depend only on `n`.
fn make_states(n: u32) -> RankRngStates {
    let twister = |kind: u32| MersenneTwister { position: n % 625, ..MersenneTwister::from_key(&[kind, n]) };
    RankRngStates {
        python: PythonRngState {
            twister: twister(1),
            gauss_next: n.is_multiple_of(2).then_some(0.1 + f64::from(n)),
        },
        numpy: NumpyRngState { twister: twister(2), has_gauss: n % 3 == 1, cached_gaussian: -1.5 },
        numpy_module: if n.is_multiple_of(5) { NumpyModule::Core } else { NumpyModule::PrivateCore },
        cpu: TorchCpuState::from_seed(u64::from(n), &twister(3)),
        cuda: None,
        step: None,
    }
}

/// Writes one file with random generator states per rank to `dir`, in the format of the program
/// `writer`.
fn write_rank_files(dir: &Path, writer: RngFormat, ranks: &[RankRngStates]) {
    for (rank, states) in (0u32..).zip(ranks) {
        let name = rank_files::rank_file_name(writer, rank, ranks.len() as u32);
        fs::write(dir.join(&name), encode::encode_rank_rng_file(writer, "any", states)).expect("written");
    }
}

#[test]
fn encoded_states_decode_to_equal_states() {
    for n in 0..12 {
        let dir = tempfile::tempdir().expect("a directory");
        let mut states = make_states(n);
        let device = TorchCudaState::from_seed(u64::MAX - u64::from(n));
        states.cuda = [
            None,
            Some(TorchCudaStates::SingleDevice(device)),
            Some(TorchCudaStates::PerDevice(vec![device; n as usize])),
        ][n as usize % 3]
            .clone();
        let expected_format = if n.is_multiple_of(2) { RngFormat::Trainer } else { RngFormat::Accelerate };
        states.step = (expected_format == RngFormat::Accelerate).then_some(i64::from(n) << 30);
        fs::write(dir.path().join("f"), encode::encode_rank_rng_file(expected_format, "f", &states))
            .expect("written");
        let (format, read) =
            decode::read_rank_rng_file(&Directory::open(dir.path()).expect("open"), "f").expect("sound");
        assert_eq!((format, read), (expected_format, states));
    }
}

/// Checks that a seeded Mersenne Twister returns the first three numbers of the reference
/// implementation.
#[test]
fn twisters_are_seeded_like_the_reference_implementation() {
    let key = [0x123, 0x234, 0x345, 0x456];
    let mt = MersenneTwister::from_key(&key);
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
fn a_file_with_a_flipped_byte_is_rejected_or_decodes_to_equal_states() {
    let dir = tempfile::tempdir().expect("a directory");
    let sound = make_states(7);
    let file = encode::encode_rank_rng_file(RngFormat::Trainer, "f", &sound);
    let opened = Directory::open(dir.path()).expect("open");
    for at in (0..file.len()).step_by(7) {
        let mut flipped = file.clone();
        flipped[at] ^= 1 << (at % 8);
        fs::write(dir.path().join("f"), flipped).expect("written");
        if let Ok((_, read)) = decode::read_rank_rng_file(&opened, "f") {
            assert_eq!(read, sound, "a flip at {at} gives other states");
        }
    }
    for len in (0..file.len()).step_by(97) {
        fs::write(dir.path().join("f"), &file[..len]).expect("written");
        assert!(decode::read_rank_rng_file(&opened, "f").is_err(), "truncated to {len}");
    }
}

#[test]
fn invalid_rng_states_are_rejected() {
    let dir = tempfile::tempdir().expect("a directory");
    let opened = Directory::open(dir.path()).expect("open");
    let reason = |states: &RankRngStates| {
        let file = encode::encode_rank_rng_file(RngFormat::Trainer, "f", states);
        fs::write(dir.path().join("f"), file).expect("written");
        match decode::read_rank_rng_file(&opened, "f").expect_err("rejected") {
            CkptError::Damaged { damage, .. } => damage.reason,
            other => panic!("{other:?}"),
        }
    };
    let mut bad = make_states(1);
    bad.python.twister.position = 625;
    assert_eq!(reason(&bad), RngStateError::TwisterPosition { position: 625 }.into());
    let mut bad = make_states(1);
    bad.cpu.0[8] = 0;
    assert!(matches!(reason(&bad), DamageReason::RngState(RngStateError::CpuPosition { left: 0, .. })));
    let mut bad = make_states(1);
    bad.cpu.0[30] = 1;
    assert_eq!(reason(&bad), RngStateError::CpuWordTooWide { word: 0 }.into());
    let mut bad = make_states(1);
    bad.cuda =
        Some(TorchCudaStates::SingleDevice(TorchCudaState([0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])));
    assert_eq!(reason(&bad), RngStateError::CudaOffset { offset: 1 }.into());
}

#[test]
fn new_streams_depend_on_every_option_except_the_world_size() {
    let old = [make_states(1), make_states(2)];
    let new = |options: &ReconcileOptions| reconcile_rng_states(&old, options).expect("reconciled").0;
    let base = ReconcileOptions::new(3, ReconcilePolicy::Reconcile);
    let three = new(&base);
    let five = new(&ReconcileOptions { world: 5, ..base.clone() });
    assert_eq!(three[..], five[..3]);
    for kind in [RngStreamKind::Python, RngStreamKind::Numpy, RngStreamKind::TorchCpu] {
        let mut digests: Vec<_> =
            five.iter().map(|s| s.compute_rng_state_digest(kind).expect("there").0).collect();
        let variants = [
            ReconcileOptions { generation: 2, ..base.clone() },
            ReconcileOptions { step: 1, ..base.clone() },
            ReconcileOptions { run_seed: Some(5), ..base.clone() },
        ];
        digests.extend(
            variants.iter().flat_map(new).map(|s| s.compute_rng_state_digest(kind).expect("there").0),
        );
        let count = digests.len();
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), count, "{kind}: a stream repeats");
    }
    let strict = reconcile_rng_states(&old, &ReconcileOptions::new(3, ReconcilePolicy::Strict));
    let expected = ReconcileError::StrictWouldReseed { kind: RngStreamKind::Python, from_world: 2, world: 3 };
    assert_eq!(strict.expect_err("rejected"), expected);
    assert_eq!(
        reconcile_rng_states(&old, &ReconcileOptions::new(2, ReconcilePolicy::Strict)).expect("fits").0,
        old
    );
}

#[test]
fn streams_follow_their_owners() {
    let old = [make_states(10), make_states(11), make_states(10), make_states(11)];
    let mut options = ReconcileOptions::new(2, ReconcilePolicy::Strict);
    options.scopes.extend(RngStreamKind::ALL.map(|k| (k, RngStreamScope::PerOwner)));
    let error = reconcile_rng_states(&old, &options).expect_err("no owners");
    assert!(matches!(error, ReconcileError::OwnersUnknown { .. }), "{error}");
    options.owners = Some((vec![0, 1, 0, 1], vec![1, 0]));
    let (new, decision) = reconcile_rng_states(&old, &options).expect("followed");
    let digests = |s: &RankRngStates| RngStreamKind::ALL.map(|k| s.compute_rng_state_digest(k));
    assert_eq!((digests(&new[0]), digests(&new[1])), (digests(&old[1]), digests(&old[0])));
    assert!(decision.streams.iter().all(|s| s.mode == RngStreamAssignment::Followed));
    options.owners = Some((vec![0, 1, 0, 1], vec![1, 2]));
    let error = reconcile_rng_states(&old, &options).expect_err("an unknown owner");
    assert!(matches!(error, ReconcileError::OwnerWithoutStream { rank: 1, .. }), "{error}");
}

#[test]
fn only_the_cuda_state_of_a_ranks_device_is_compared() {
    let (used, idle) = (TorchCudaState::from_seed(9), TorchCudaState::from_seed(0));
    let with = |cuda| RankRngStates { cuda: Some(cuda), ..make_states(4) };
    let old = [
        with(TorchCudaStates::PerDevice(vec![used, idle])),
        with(TorchCudaStates::PerDevice(vec![idle, used])),
    ];
    let (new, decision) = reconcile_rng_states(&old, &ReconcileOptions::new(4, ReconcilePolicy::Reconcile))
        .expect("reconciled");
    assert!(decision.streams.iter().all(|s| s.mode == RngStreamAssignment::Replicated), "{decision:?}");
    assert!(new.iter().all(|s| s.cuda == Some(TorchCudaStates::PerDevice(vec![used; 4]))));
    let (one, _) = reconcile_rng_states(&old, &ReconcileOptions::new(1, ReconcilePolicy::Reconcile))
        .expect("reconciled");
    assert_eq!(one[0].cuda, Some(TorchCudaStates::SingleDevice(used)));
    let lacking = [with(TorchCudaStates::SingleDevice(used)), make_states(4)];
    let error = reconcile_rng_states(&lacking, &ReconcileOptions::new(3, ReconcilePolicy::Reconcile));
    let expected = ReconcileError::MissingStream { kind: RngStreamKind::TorchCuda, rank: 1 };
    assert_eq!(error.expect_err("rejected"), expected);
}

#[test]
fn prepared_directories_never_replace_other_directories() {
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("checkpoint-6");
    fs::create_dir_all(dir.join("inner")).expect("made");
    fs::write(dir.join("inner/weights"), "w").expect("written");
    fs::write(dir.join("trainer_state.json"), "{\"global_step\": 6}").expect("written");
    write_rank_files(&dir, RngFormat::Trainer, &[make_states(1), make_states(2)]);
    let options = ReconcileOptions::new(3, ReconcilePolicy::Reconcile);
    let made = resume_preparation::prepare_resume_directory(&dir, &options).expect("made");
    assert_eq!(made.path, root.path().join("launch-w3/checkpoint-6"));
    let again = resume_preparation::prepare_resume_directory(&dir, &options).expect("made again");
    assert_eq!((again.path.clone(), again.decision.clone()), (made.path.clone(), made.decision));
    assert_eq!(fs::read(made.path.join("inner/weights")).expect("there"), b"w");
    let record = RngRecord::read(&made.path).expect("sound").expect("there");
    assert_eq!((record.decision.step, record.decision.generation), (6, 1));
    assert_eq!(
        rank_files::read_all_rank_states(&made.path, Some(3)).expect("whole").expect("there").ranks.len(),
        3
    );
    // a later step increments the generation
    let later = root.path().join("checkpoint-9");
    fs::create_dir(&later).expect("made");
    fs::write(later.join("trainer_state.json"), "{\"global_step\": 9}").expect("written");
    write_rank_files(&later, RngFormat::Trainer, &[make_states(1), make_states(2), make_states(3)]);
    let made = resume_preparation::prepare_resume_directory(
        &later,
        &ReconcileOptions::new(2, ReconcilePolicy::Reconcile),
    )
    .expect("made");
    assert_eq!(made.decision.expect("decided").generation, 2);
    assert_eq!(resume_preparation::prepare_resume_directory(&later, &options).expect("fits").path, later);
    assert_eq!(resume_preparation::find_newest_complete(root.path()).expect("listed").0, Some(later));
    // a directory that launch didn't make is not replaced
    fs::create_dir_all(root.path().join("launch-w5/checkpoint-6")).expect("made");
    let rejected = resume_preparation::prepare_rng_states(
        &dir,
        &ReconcileOptions::new(5, ReconcilePolicy::Reconcile),
        &PrepareDestination::Sibling,
    );
    assert!(matches!(rejected, Err(CkptError::OutputRejected { .. })), "{rejected:?}");
    std::os::unix::fs::symlink("/etc/passwd", dir.join("link")).expect("linked");
    let error = resume_preparation::prepare_resume_directory(&dir, &options).expect_err("a symlink");
    let CkptError::Damaged { damage, .. } = &error else { panic!("{error:?}") };
    assert_eq!((damage.file.as_str(), &damage.reason), ("link", &DamageReason::NotRegularFile));
    let names = Directory::open(&root.path().join("launch-w3")).expect("open").list_names().expect("listed");
    assert_eq!(names, ["checkpoint-6"], "no temporary directories remain");
}

/// Checks that a scheduler is adapted to another number of ranks if only FSDP's sharded optimizer
/// state shows the number of completed steps.
#[test]
fn a_scheduler_next_to_fsdp_shards_is_rescaled() {
    let golden =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/resume/accelerate_fsdp_sharded/state");
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("state");
    crate::tests::copy_tree(std::path::Path::new(golden), &dir);
    let made = resume_preparation::prepare_resume_directory(
        &dir,
        &ReconcileOptions::new(4, ReconcilePolicy::Reconcile),
    )
    .expect("made");
    insta::assert_snapshot!("scheduler_next_to_fsdp", made.lines.join("\n"));
}

/// Checks that a scheduler with one count per step and process is adapted to more processes, and
/// that one with one count per step stays unchanged.
#[test]
fn a_scheduler_that_counts_processes_is_rescaled() {
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("step_3");
    fs::create_dir(&dir).expect("made");
    write_rank_files(&dir, RngFormat::Accelerate, &[make_states(1), make_states(2)]);
    let save = |name: &str, fill: &dyn Fn(&mut encode::PickleWriter)| {
        let mut pickle = encode::PickleWriter { out: vec![0x80, 2], storages: Vec::new() };
        fill(&mut pickle);
        pickle.out.push(b'.');
        let mut zip = encode::ZipWriter::new("x");
        zip.add_member("data.pkl", &pickle.out, false);
        fs::write(dir.join(name), zip.finish(&[])).expect("written");
    };
    let scheduler = |last: i64| {
        save("scheduler.bin", &|p| {
            p.out.extend(b"}(");
            for (key, value) in [("last_epoch", last), ("_step_count", last + 1)] {
                p.write_text(key);
                p.out.extend(b"q\x01");
                p.write_int(value);
            }
            p.out.push(b'u');
        });
    };
    save("optimizer.bin", &|p| {
        p.out.extend(b"}");
        p.write_text("state");
        p.out.extend(b"}K\0}");
        p.write_text("step");
        p.out.extend(b"K\x03sss");
    });
    scheduler(6);
    let made = resume_preparation::prepare_resume_directory(
        &dir,
        &ReconcileOptions::new(400, ReconcilePolicy::Reconcile),
    )
    .expect("made");
    insta::assert_snapshot!("scheduler_of_accelerate", made.lines.join("\n"));
    let directory = Directory::open(&made.path).expect("open");
    let file = crate::codec::torch_file::TorchFile::open(&directory, "scheduler.bin", &[]).expect("sound");
    let count = |key: &str| file.value().get(key).and_then(|v| v.as_count());
    assert_eq!((count("last_epoch"), count("_step_count")), (Some(1200), Some(1201)));
    // a scheduler with one count per step is unchanged
    scheduler(3);
    let made = resume_preparation::prepare_resume_directory(
        &dir,
        &ReconcileOptions::new(4, ReconcilePolicy::Reconcile),
    )
    .expect("made");
    insta::assert_snapshot!("scheduler_unchanged", made.lines.join("\n"));
    let is_unchanged = |name: &str| {
        fs::read(made.path.join(name)).expect("there") == fs::read(dir.join(name)).expect("there")
    };
    assert!(is_unchanged("scheduler.bin"));
}

proptest! {
    #[test]
    fn mutated_files_do_not_panic(flips in proptest::collection::vec((0usize..20_000, any::<u8>()), 1..8)) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut file = encode::encode_rank_rng_file(RngFormat::Accelerate, "f", &make_states(3));
        let len = file.len();
        for (at, value) in flips {
            file[at % len] = value;
        }
        fs::write(dir.path().join("f"), file).expect("written");
        let _ = decode::read_rank_rng_file(&Directory::open(dir.path()).expect("open"), "f");
    }
}
