//! Tests of batch jobs that their scheduler starts again: without `resume.from: auto`, a run
//! continues from the newest checkpoint of its batch job, and from no other one in the directory.
use crate::common::*;
use diagnostic::{Code, codes::training as codes};
use jobspec::*;
use protocol::{
    control::{BatchJobRecord, FromWorker},
    event::Event,
};
use std::path::{Path, PathBuf};
use worker::{
    checkpoint::{
        resume::{CheckpointLocations, resume_from_checkpoint},
        save::{CheckpointSaver, RunMetadata},
        storage_topology::{StorageTopology, detect_topology},
    },
    zero::collective_queue::CollectiveQueue,
};

/// The number of ranks of each run.
const RANKS: usize = 2;

/// Whether the ranks share the checkpoint directory, or have separate ones as on two hosts.
#[derive(Clone, Copy)]
enum Storage {
    Shared,
    HostLocal,
}

/// A directory with checkpoints of several batch jobs.
struct TestDirectory {
    dir: tempfile::TempDir,
    storage: Storage,
}

/// How a run has resumed: the name of the checkpoint's directory, or `None` at step 0. Also has the
/// codes of the notices.
type Resumed = (worker::error::Result<Option<String>>, Vec<Code>);

impl TestDirectory {
    fn new(storage: Storage) -> TestDirectory {
        TestDirectory { dir: tempfile::tempdir().unwrap(), storage }
    }

    /// Creates the job of all runs, which keeps all checkpoints.
    fn create_job(&self, from: ResumeFrom) -> JobSpec {
        let mut job = create_job_spec(&create_spec(), self.dir.path(), false);
        (job.checkpoint.keep, job.resume.from) = (0, from);
        job
    }

    /// Returns the checkpoint directory of this rank, and which ranks share it. Collective: every
    /// rank must call it.
    fn detect(&self, queue: &CollectiveQueue) -> (PathBuf, StorageTopology) {
        match self.storage {
            Storage::Shared => (self.dir.path().to_owned(), StorageTopology::for_shared_directory(RANKS)),
            Storage::HostLocal => {
                let host = format!("host-{}", queue.comm().rank());
                let root = self.dir.path().join(&host);
                let layout = detect_topology(queue, true, &host, "token", &root, false).unwrap();
                (root, layout)
            }
        }
    }

    /// Trains a new run for `steps` steps and saves a checkpoint. `batch_job` is the id of the
    /// run's batch job.
    fn train_and_save(&self, steps: u64, batch_job: Option<&str>) {
        let job = self.create_job(ResumeFrom::Never);
        run_on_ranks(RANKS, |c| {
            let mut running = build_trainer(&create_spec(), c, 1).start_with_random_params();
            train_steps(&mut running, steps);
            let (root, layout) = self.detect(running.trainer.engine.queue());
            let (trainer, train, digest) =
                (&running.trainer, running.train_spec(), SYNTHETIC_DATA_DIGEST.into());
            let mut metadata = RunMetadata::new(trainer, train, &job, digest, (Vec::new(), 0));
            metadata.batch_job = batch_job.map(str::to_owned);
            let mut saver = CheckpointSaver::new(root, job.checkpoint.clone(), metadata, None, layout);
            saver.begin_save(&mut running).unwrap();
            assert_eq!(saver.finish_and_commit_save(&running).unwrap().unwrap().step, steps);
        });
    }

    /// Resumes a run of the batch job with the id `batch_job`, which was started again.
    fn resume(&self, from: ResumeFrom, batch_job: Option<&str>) -> Resumed {
        let job = self.create_job(from);
        let batch_job = batch_job.map(|id| BatchJobRecord {
            id: id.into(),
            label: "Slurm job 7".into(),
            restarts: Some(1),
        });
        let mut by_rank = run_on_ranks(RANKS, |c| {
            let mut ready = build_trainer(&create_spec(), c, 1);
            let (root, layout) = self.detect(ready.trainer.engine.queue());
            let dirs = CheckpointLocations { root: &root, workdir: &root, layout: &layout, memory: None };
            let (batch_job, mut notices) = (batch_job.as_ref(), Vec::new());
            let mut record = |message: FromWorker| -> worker::error::Result<()> {
                if let FromWorker::Event(Event::Notice { diagnostics, .. }) = message {
                    notices.extend(diagnostics.iter().map(diagnostic::Diagnostic::code));
                }
                Ok(())
            };
            let digest = SYNTHETIC_DATA_DIGEST;
            let resumed = resume_from_checkpoint(&mut ready, &job, &dirs, batch_job, digest, &mut record);
            let name = |path: PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
            (resumed.map(|resumed| resumed.map(|resumed| name(resumed.path))), notices)
        });
        by_rank.swap_remove(0)
    }

    /// Changes the last byte of a file of a checkpoint.
    fn damage(&self, file: &str) {
        let file = self.dir.path().join(file);
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
    }
}

/// Creates the `train` section of all runs.
fn create_spec() -> TrainSpec {
    create_train_spec(create_odd_sized_model(), 3, 8, 1, 11)
}

/// Checks from where a run resumes, and the codes of its notices.
#[track_caller]
fn expect_resumed((resumed, notices): Resumed, expected: Option<&str>, codes: &[Code]) {
    let resumed = resumed.unwrap_or_else(|e| panic!("{e:?}"));
    assert_eq!((resumed.as_deref(), notices.as_slice()), (expected, codes));
}

#[test]
fn a_batch_job_continues_only_from_its_own_checkpoints() {
    for storage in [Storage::Shared, Storage::HostLocal] {
        let directory = TestDirectory::new(storage);
        directory.train_and_save(1, Some("mine"));
        directory.train_and_save(2, Some("mine"));
        directory.train_and_save(3, Some("another"));
        directory.train_and_save(4, None);
        let (never, auto) = (|| ResumeFrom::Never, || ResumeFrom::Auto);
        let path = || ResumeFrom::Path("step-00000004".into());
        let reported = [codes::RESUME_BATCH_JOB];
        expect_resumed(directory.resume(never(), Some("mine")), Some("step-00000002"), &reported);
        expect_resumed(directory.resume(path(), Some("mine")), Some("step-00000002"), &reported);
        expect_resumed(directory.resume(never(), Some("another")), Some("step-00000003"), &reported);
        // Without a checkpoint of the batch job, `resume.from` applies.
        expect_resumed(directory.resume(never(), Some("new")), None, &reported);
        expect_resumed(directory.resume(path(), Some("new")), Some("step-00000004"), &reported);
        expect_resumed(directory.resume(never(), None), None, &[]);
        expect_resumed(directory.resume(auto(), Some("mine")), Some("step-00000004"), &[]);
    }
}

#[test]
fn a_damaged_checkpoint_of_the_batch_job_is_skipped_and_never_ignored() {
    let directory = TestDirectory::new(Storage::Shared);
    directory.train_and_save(1, Some("mine"));
    directory.train_and_save(2, Some("mine"));
    directory.train_and_save(3, None);
    let resume = || directory.resume(ResumeFrom::Never, Some("mine"));
    directory.damage("step-00000002/shard-00001-of-00002.safetensors");
    let (resumed, notices) = resume();
    assert_eq!(resumed.unwrap().as_deref(), Some("step-00000001"));
    assert_eq!((notices.len(), notices.last()), (2, Some(&codes::RESUME_BATCH_JOB)), "{notices:?}");
    // A checkpoint without a readable manifest may be of any job.
    directory.damage("step-00000003/manifest.json");
    let (resumed, notices) = resume();
    assert_eq!((resumed.unwrap().as_deref(), notices.len()), (Some("step-00000001"), 3), "{notices:?}");
    directory.damage("step-00000001/shard-00000-of-00002.safetensors");
    let error = resume().0.expect_err("the training does not begin again");
    assert_eq!(error.code(), codes::RESUME_NO_USABLE_CHECKPOINT);
}

/// Checks that the manifest records the batch job under a stable name, which other versions of
/// launch read.
#[test]
fn the_manifest_records_the_batch_job() {
    let directory = TestDirectory::new(Storage::Shared);
    directory.train_and_save(1, Some("mine"));
    directory.train_and_save(2, None);
    let read = |name: &str| -> serde_json::Value {
        let manifest = std::fs::read(directory.dir.path().join(name).join("manifest.json")).unwrap();
        serde_json::from_slice(&manifest).unwrap()
    };
    assert_eq!(read("step-00000001")["facts"]["cursor"]["batch_job"], "mine");
    assert!(read("step-00000002")["facts"]["cursor"].get("batch_job").is_none());
    assert!(ckpt::Checkpoint::read_run_facts(Path::new("/nowhere")).is_err());
}
