//! Tests of copies of the training state in the memory of hosts: a run resumes from them with the
//! same bits, on any hosts and number of workers, and falls back to older copies and to the disk.
use crate::common::*;
use jobspec::{ExpertsSpec, JobSpec, MemoryCopySpec, ModelSpec, OffloadTarget, TrainSpec};
use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::{
    control::FromWorker,
    event::{Event, ResumeSource},
};
use std::{
    fs::File,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};
use worker::checkpoint::{
    memory_copies::{HostMemoryCopies, MemoryCopier},
    resume::{CheckpointLocations, MemoryResumeState, resume_from_checkpoint},
    storage_topology::StorageTopology,
};

/// The distance in bytes between two regions in the memory of a host; each rank has two regions.
const REGION_BYTES: u64 = 1 << 40;

/// Creates the memory of a host.
fn create_memory() -> File {
    File::from(memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap())
}

/// The hosts of an attempt, each as its number of ranks and its memory.
type Hosts<'a> = &'a [(usize, &'a File)];

/// Where the training of an attempt resumed, and the losses that it computed.
#[derive(Clone, Debug, PartialEq)]
struct AttemptResult {
    /// The source, step and reason of the resume; `None` if the run began at step 0.
    resumed: Option<(ResumeSource, u64, Option<String>)>,
    /// The bits of the loss and the gradient norm of each step.
    losses: Vec<(u64, u64)>,
}

/// Builds the job of the tests, which copies its state to `copies` other hosts.
fn create_copying_job(spec: &TrainSpec, root: &Path, copies: u32) -> JobSpec {
    let mut job = create_job_spec(spec, root, false);
    job.checkpoint.memory = Some(MemoryCopySpec { copies, every: 1, keep_workers: true });
    job
}

/// Runs an attempt: resumes, and trains for `steps` steps with a copy after each. Saves a
/// checkpoint on disk after the last step if `saves` is set.
fn run_attempt(
    job: &JobSpec,
    root: &Path,
    hosts: Hosts,
    attempt: u32,
    steps: u64,
    saves: bool,
) -> AttemptResult {
    let spec = job.train.as_ref().unwrap();
    let places: Vec<(usize, u32)> = hosts
        .iter()
        .enumerate()
        .flat_map(|(host, (ranks, _))| (0..*ranks as u32).map(move |local| (host, local)))
        .collect();
    let on_rank = |c: std::sync::Arc<dyn comm::Comm>| {
        let rank = c.rank();
        let mut ready = build_trainer(spec, c, 1);
        let (host, local_rank) = places[rank];
        let queue = ready.trainer.engine.queue().clone();
        let file = hosts[host].1.try_clone().unwrap();
        let memory_spec = job.checkpoint.memory.as_ref().unwrap();
        let memory = HostMemoryCopies::connect(&queue, file, memory_spec, (local_rank, attempt)).unwrap();
        let layout = StorageTopology::for_shared_directory(places.len());
        let dirs = CheckpointLocations { root, workdir: root, layout: &layout, memory: Some(&memory) };
        let mut event = None;
        let resumed = resume_from_checkpoint(&mut ready, job, &dirs, None, SYNTHETIC_DATA_DIGEST, &mut |e| {
            if let FromWorker::Event(Event::Resume { source, step, reason, .. }) = e {
                event = Some((source, step, reason));
            }
            Ok(())
        });
        let resumed = resumed.unwrap();
        let MemoryResumeState { next_sequence: next, step_events, .. } =
            resumed.as_ref().map_or_else(MemoryResumeState::default, |r| r.memory.clone());
        let mut running = match resumed {
            Some(resumed) => ready.start_at_position(resumed.cursor),
            None => ready.start_with_random_params(),
        };
        let copier = MemoryCopier::new(memory, next);
        let saver = create_checkpoint_saver(&running, job, root);
        let mut saver = saver.with_memory_copies(Some(copier), false, step_events);
        let mut losses = Vec::new();
        for _ in 0..steps {
            losses.extend(train_steps(&mut running, 1));
            assert!(saver.copy_to_memory_if_due(&mut running).unwrap().is_some());
        }
        if saves {
            saver.begin_save(&mut running).unwrap();
            saver.finish_and_commit_save(&running).unwrap();
        }
        AttemptResult { resumed: event, losses }
    };
    expect_equal_on_all_ranks(run_on_ranks(places.len(), on_rank))
}

/// Asserts that a run that loses hosts and changes its number of workers has the losses of an
/// undisturbed run.
#[track_caller]
fn assert_survives_lost_hosts(spec: &TrainSpec, what: &str) {
    let expected = train_new_run(spec, 1, 1, 8);
    let dir = tempfile::tempdir().unwrap();
    let job = create_copying_job(spec, dir.path(), 1);
    let memory: Vec<File> = (0..4).map(|_| create_memory()).collect();
    let [a, b, c, d] = &memory[..] else { unreachable!() };
    let attempts: [(Hosts, u64); 4] = [
        (&[(2, a), (2, b)], 3),
        // b is lost, and c is new
        (&[(2, a), (2, c)], 2),
        // a is lost without a replacement
        (&[(3, c)], 1),
        // d is new, and the number of workers changes again
        (&[(1, c), (1, d)], 2),
    ];
    let mut done = 0;
    for (attempt, (hosts, steps)) in attempts.into_iter().enumerate() {
        let result = run_attempt(&job, dir.path(), hosts, attempt as u32, steps, false);
        let source = (attempt > 0).then_some((ResumeSource::Memory, done as u64, None));
        assert_eq!(result.resumed, source, "{what}: attempt {attempt}");
        assert_eq!(result.losses, expected[done..done + steps as usize], "{what}: attempt {attempt}");
        done += steps as usize;
    }
}

#[test]
fn runs_resume_from_memory_with_the_same_bits_at_every_stage() {
    for stage in 0..=3 {
        let spec = create_train_spec(create_odd_sized_model(), stage, 8, 1, 12);
        assert_survives_lost_hosts(&spec, &format!("stage {stage}"));
    }
    let mut offloaded = create_train_spec(create_odd_sized_model(), 2, 8, 1, 12);
    let states = tempfile::tempdir().unwrap();
    for target in [OffloadTarget::Cpu, OffloadTarget::Files(states.path().into())] {
        offloaded.zero.offload = Some(target);
        assert_survives_lost_hosts(&offloaded, "offload");
    }
    let experts = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(6),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(19),
        num_hidden_layers: 2,
        ..create_odd_sized_model()
    };
    let mut moe = create_train_spec(experts, 3, 8, 1, 11);
    moe.experts = ExpertsSpec { expert_parallel_size: 1, ..ExpertsSpec::default() };
    assert_survives_lost_hosts(&moe, "experts");
}

#[test]
fn expert_parallel_ranks_resume_from_memory() {
    let experts = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(6),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(19),
        num_hidden_layers: 2,
        ..create_odd_sized_model()
    };
    let mut spec = create_train_spec(experts, 3, 8, 1, 11);
    spec.experts = ExpertsSpec { expert_parallel_size: 2, ..ExpertsSpec::default() };
    let expected = expect_equal_on_all_ranks(run_on_ranks(2, |c| {
        train_steps(&mut build_trainer(&spec, c, 1).start_with_random_params(), 4)
    }));
    let dir = tempfile::tempdir().unwrap();
    let job = create_copying_job(&spec, dir.path(), 1);
    let (a, b) = (create_memory(), create_memory());
    let first = run_attempt(&job, dir.path(), &[(2, &a), (2, &b)], 0, 2, false);
    let second = run_attempt(&job, dir.path(), &[(2, &b)], 1, 2, false);
    assert_eq!(second.resumed, Some((ResumeSource::Memory, 2, None)));
    assert_eq!([first.losses, second.losses].concat(), expected);
}

/// Flips a bit of the copy of `rank` with the number `sequence`, at `offset` from its first byte.
fn flip_bit_in_copy(memory: &File, rank: u64, sequence: u64, offset: u64) {
    let at = (rank * 2 + sequence % 2) * REGION_BYTES + offset;
    let mut byte = [0];
    memory.read_exact_at(&mut byte, at).unwrap();
    memory.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

#[test]
fn damaged_copies_are_replaced_by_older_ones_and_then_by_the_disk() {
    let spec = create_train_spec(create_odd_sized_model(), 3, 8, 1, 12);
    let expected = train_new_run(&spec, 1, 1, 9);
    let dir = tempfile::tempdir().unwrap();
    let job = create_copying_job(&spec, dir.path(), 0);
    let memory = create_memory();
    let hosts: Hosts = &[(2, &memory)];
    let run = |attempt, steps, saves| run_attempt(&job, dir.path(), hosts, attempt, steps, saves);
    // the copies of steps 1 to 4 have the numbers 0 to 3
    assert_eq!(run(0, 2, true).resumed, None);
    assert_eq!(run(1, 2, false).losses, expected[2..4]);
    // the content of the copy of step 4
    flip_bit_in_copy(&memory, 1, 3, 30_000);
    let resumed = run(2, 1, false);
    let Some((source, step, Some(reason))) = &resumed.resumed else { panic!("{resumed:?}") };
    assert_eq!((*source, *step), (ResumeSource::Memory, 3));
    assert!(reason.starts_with("step 4 in memory is not used: ") && reason.contains("BLAKE3"), "{reason}");
    assert_eq!(resumed.losses, expected[3..4]);
    // The copies of steps 3 and 4 have the numbers 2 and 3. The header of one copy of each state is
    // damaged, as if the copies were cut off.
    flip_bit_in_copy(&memory, 0, 2, 20);
    flip_bit_in_copy(&memory, 1, 3, 20);
    let resumed = run(3, 3, false);
    let reason = "step 4 in memory is not used: the copy of rank 1 is incomplete; \
                  step 3 in memory is not used: the copy of rank 0 is incomplete";
    assert_eq!(resumed.resumed, Some((ResumeSource::Checkpoint, 2, Some(reason.into()))));
    assert_eq!(resumed.losses, expected[2..5]);
    let resumed = run(4, 1, false);
    assert_eq!(resumed.resumed, Some((ResumeSource::Memory, 5, None)), "the copies are usable again");
    assert_eq!(resumed.losses, expected[5..6]);
}

#[test]
fn a_damaged_checkpoint_on_disk_is_replaced_by_an_older_state_in_memory() {
    let spec = create_train_spec(create_odd_sized_model(), 3, 8, 1, 12);
    let expected = train_new_run(&spec, 1, 1, 4);
    let dir = tempfile::tempdir().unwrap();
    let job = create_copying_job(&spec, dir.path(), 0);
    let memory = create_memory();
    let run = |attempt, steps, saves| run_attempt(&job, dir.path(), &[(2, &memory)], attempt, steps, saves);
    run(0, 3, true);
    // The copy of step 3 has the number 2. Only step 2 remains in memory.
    flip_bit_in_copy(&memory, 0, 2, 20);
    let checkpoint = dir.path().join("step-00000003");
    for file in std::fs::read_dir(&checkpoint).unwrap() {
        let path = file.unwrap().path();
        if path.to_string_lossy().contains("shard-") {
            std::fs::write(path, "damaged").unwrap();
        }
    }
    let resumed = run(1, 2, false);
    let Some((source, step, _)) = resumed.resumed else { panic!("{resumed:?}") };
    assert_eq!((source, step), (ResumeSource::Memory, 2));
    assert_eq!(resumed.losses, expected[2..4]);
}

#[test]
fn a_run_whose_memory_is_lost_resumes_from_the_disk() {
    let spec = create_train_spec(create_odd_sized_model(), 1, 8, 1, 12);
    let dir = tempfile::tempdir().unwrap();
    let job = create_copying_job(&spec, dir.path(), 1);
    let (a, b, c) = (create_memory(), create_memory(), create_memory());
    run_attempt(&job, dir.path(), &[(1, &a), (1, &b)], 0, 2, true);
    run_attempt(&job, dir.path(), &[(1, &a), (1, &b)], 1, 1, false);
    let resumed = run_attempt(&job, dir.path(), &[(1, &c)], 2, 0, false).resumed;
    let reason = "no host has copies in memory".to_owned();
    assert_eq!(resumed, Some((ResumeSource::Checkpoint, 2, Some(reason))));
    // with the memory of one of the two hosts, the run resumes from memory
    let resumed = run_attempt(&job, dir.path(), &[(1, &c), (1, &b)], 3, 0, false).resumed;
    assert_eq!(resumed, Some((ResumeSource::Memory, 3, None)));
}

#[test]
fn a_newer_checkpoint_on_disk_is_preferred_and_old_copies_are_freed() {
    let spec = create_train_spec(create_odd_sized_model(), 2, 8, 1, 12);
    let dir = tempfile::tempdir().unwrap();
    let job = create_copying_job(&spec, dir.path(), 0);
    let (memory, other) = (create_memory(), create_memory());
    run_attempt(&job, dir.path(), &[(4, &memory)], 0, 2, false);
    let before = memory.metadata().unwrap().blocks();
    // another host trains and saves steps 1 to 3
    run_attempt(&job, dir.path(), &[(1, &other)], 0, 3, true);
    let resumed = run_attempt(&job, dir.path(), &[(1, &memory)], 1, 2, false).resumed;
    assert_eq!(resumed, Some((ResumeSource::Checkpoint, 3, None)));
    let after = memory.metadata().unwrap().blocks();
    assert!(after * 10 < before * 12, "{before} blocks before, {after} after: the state has the same size");
}
