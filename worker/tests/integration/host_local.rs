//! Tests of host-local checkpoint directories: a run resumes on other hosts with the same bits, and
//! an error names a host whose shards are missing.
use crate::common::*;
use jobspec::*;
use std::path::{Path, PathBuf};
use worker::{
    checkpoint::{
        resume::{CheckpointLocations, resume_from_checkpoint},
        save::{CheckpointSaver, RunMetadata},
        storage_topology::{StorageTopology, detect_topology},
    },
    zero::collective_queue::CollectiveQueue,
};

/// Creates a job that trains `train` and keeps one checkpoint.
fn create_job_with_one_checkpoint(train: &TrainSpec, dir: &Path) -> JobSpec {
    let text = format!("name: test\nrun: {{command: [none], workdir: {dir:?}}}\n");
    let loaded = jobspec::load_job(jobspec::JobSource::Text { name: "test".into(), text }, &[]);
    let mut job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
    job.run.command = None;
    job.checkpoint.keep = 1;
    job.checkpoint.r#async = false;
    job.resume = ResumeSpec { from: ResumeFrom::Auto, rng: RngPolicy::Reconcile };
    job.train = Some(train.clone());
    job
}

/// Returns the checkpoint directory of this rank on host `hosts[rank]`, and the detected groups of
/// ranks that share the directory. Collective: every rank of the group must call it.
fn detect_host_directory(queue: &CollectiveQueue, hosts: &[usize], dir: &Path) -> (PathBuf, StorageTopology) {
    let rank = queue.comm().rank();
    let root = dir.join(format!("host-{}", hosts[rank]));
    let leader = hosts.iter().position(|h| *h == hosts[rank]) == Some(rank);
    let name = format!("n{}", hosts[rank]);
    let layout = detect_topology(queue, leader, &name, "token", &root, false).unwrap();
    (root, layout)
}

/// Resumes from the newest checkpoint if there is one, trains for `count` steps and saves. Returns
/// the bits of the losses and gradient norms, or the error of resuming.
fn resume_train_and_save(
    spec: &TrainSpec,
    hosts: &[usize],
    dir: &Path,
    count: u64,
) -> worker::error::Result<Vec<(u64, u64)>> {
    let job = create_job_with_one_checkpoint(spec, dir);
    let mut by_rank = run_on_ranks(hosts.len(), |c| {
        let mut ready = build_trainer(spec, c, 1);
        let (root, layout) = detect_host_directory(ready.trainer.engine.queue(), hosts, dir);
        let dirs = CheckpointLocations { root: &root, workdir: &root, layout: &layout, memory: None };
        let mut running =
            match resume_from_checkpoint(&mut ready, &job, &dirs, None, SYNTHETIC_DATA_DIGEST, &mut |_| {
                Ok(())
            })? {
                Some(resumed) => ready.start_at_position(resumed.cursor),
                None => ready.start_with_random_params(),
            };
        let (trainer, train, digest) = (&running.trainer, running.train_spec(), SYNTHETIC_DATA_DIGEST.into());
        let metadata = RunMetadata::new(trainer, train, &job, digest, (Vec::new(), 0));
        let losses = train_steps(&mut running, count);
        let mut saver = CheckpointSaver::new(root, job.checkpoint.clone(), metadata, None, layout);
        saver.begin_save(&mut running).unwrap();
        saver.finish_and_commit_save(&running).unwrap().unwrap();
        Ok(losses)
    });
    by_rank.swap_remove(0)
}

#[test]
fn runs_resume_on_other_hosts_and_a_missing_host_is_named() {
    let spec = create_train_spec(create_odd_sized_model(), 3, 8, 1, 12);
    let [several_hosts, one_host] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for hosts in [&[0, 0, 1, 1][..], &[1, 1, 0], &[0, 1, 1, 1], &[2, 0, 1]] {
        let expected = resume_train_and_save(&spec, &[0, 0], one_host.path(), 2).unwrap();
        let losses = resume_train_and_save(&spec, hosts, several_hosts.path(), 2).unwrap();
        assert_eq!(losses, expected, "{hosts:?}");
    }
    for host in 0..3 {
        let root = several_hosts.path().join(format!("host-{host}"));
        assert_eq!(ckpt::list_checkpoints(&root).unwrap().len(), 1, "checkpoint.keep is 1");
    }
    let error = resume_train_and_save(&spec, &[0, 2], several_hosts.path(), 1).unwrap_err();
    assert_eq!(error.code().name(), "resume-shard-unreachable");
    let message = error.diagnostic().message().to_owned();
    assert_notices_match_snapshot("host_local_missing_host", &[message], several_hosts.path());
}
