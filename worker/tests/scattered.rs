//! Hosts that share no directory of checkpoints: saved by some, gone on from by others, with the same bits.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::*;
use std::path::{Path, PathBuf};
use worker::{
    resume::{CheckpointDirs, resume},
    save::{CheckpointSaver, RunMetadata},
    state::checkpoint_model_spec,
    storage_layout::{StorageLayout, detect_layout},
    zero::collective_queue::CollectiveQueue,
};

fn job(train: &TrainSpec, dir: &Path) -> JobSpec {
    let text = format!("name: test\nrun: {{command: [none], workdir: {dir:?}}}\n");
    let loaded = contract::load(contract::Source::Text { name: "test".into(), text }, &[]);
    let mut job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
    job.run.command = None;
    job.checkpoint.keep = 1;
    job.checkpoint.r#async = false;
    job.resume = ResumeSpec { from: ResumeFrom::Auto, rng: RngPolicy::Reconcile };
    job.train = Some(train.clone());
    job
}

/// Rank r's directory when it is on host `hosts[r]`, and who shares it.
fn look(queue: &CollectiveQueue, hosts: &[usize], dir: &Path) -> (PathBuf, StorageLayout) {
    let rank = queue.comm().rank();
    let root = dir.join(format!("host-{}", hosts[rank]));
    let leader = hosts.iter().position(|h| *h == hosts[rank]) == Some(rank);
    let name = format!("n{}", hosts[rank]);
    let layout = detect_layout(queue, leader, &name, "token", &root, false).unwrap();
    (root, layout)
}

/// Resumes from the newest checkpoint if there is one, takes `count` steps and saves. Returns the bits of
/// the losses, or the error of resuming.
fn stretch(
    spec: &TrainSpec,
    hosts: &[usize],
    dir: &Path,
    count: u64,
) -> Result<Vec<(u64, u64)>, worker::error::Error> {
    let job = job(spec, dir);
    let mut all = on_ranks(hosts.len(), |c| {
        let mut bound = build(spec, c, 1);
        let (root, layout) = look(bound.trainer.engine.queue(), hosts, dir);
        let place = CheckpointDirs { root: &root, workdir: &root, layout: &layout };
        let resumed = match resume(&mut bound, &job, &place, "made up", &mut |_| Ok(())) {
            Ok(resumed) => resumed,
            Err(e) => return Err(e),
        };
        let mut running = match resumed {
            Some(r) => bound.start_at(r.cursor),
            None => bound.start_fresh(),
        };
        let units: Vec<_> = running.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
        let identity = RunMetadata {
            model: checkpoint_model_spec(running.trainer.model.as_ref(), &units, running.train(), 0),
            tokenizer: Vec::new(),
            job: job.clone(),
            data_digest: "made up".into(),
            rng_generation: 0,
            rng_decision: serde_json::Value::Null,
        };
        let took = steps(&mut running, count);
        let mut saver = CheckpointSaver::new(root, job.checkpoint.clone(), identity, None, layout);
        saver.begin(&mut running).unwrap();
        saver.finish(&running).unwrap().unwrap();
        Ok(took)
    });
    all.swap_remove(0)
}

#[test]
fn any_hosts_go_on_with_the_same_bits_and_a_missing_one_is_named() {
    let spec = train_spec(odd_model(), 3, 8, 1, 12);
    let [apart, one] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for hosts in [&[0, 0, 1, 1][..], &[1, 1, 0], &[0, 1, 1, 1], &[2, 0, 1]] {
        let expected = stretch(&spec, &[0, 0], one.path(), 2).unwrap();
        assert_eq!(stretch(&spec, hosts, apart.path(), 2).unwrap(), expected, "{hosts:?}");
    }
    for host in 0..3 {
        let root = apart.path().join(format!("host-{host}"));
        assert_eq!(ckpt::list(&root).unwrap().len(), 1, "checkpoint.keep is 1");
    }
    let error = stretch(&spec, &[0, 2], apart.path(), 1).unwrap_err();
    assert_eq!(error.code().name(), "resume-no-usable-checkpoint");
    let causes = error.diagnostic().causes().join("\n");
    assert!(causes.contains("shard-00002-of-00003.safetensors") && causes.contains("n1"), "{causes}");
}
