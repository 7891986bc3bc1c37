//! Tests host-local checkpoints: the two-phase commit, reads of shards on other hosts, and reports
//! about incomplete directories.
use super::*;
use crate::layout::native::StorageHost;
use crate::save::host_local::{
    PreparedSave, complete_prepared_save, encode_host_local_manifest, list_checkpoint_ids,
    list_prepared_saves, read_manifest,
};
use crate::{Checkpoint, CkptError, GatherOptions, gather_weights, verify_checkpoints};

/// Makes two hosts with a checkpoint directory each, and the description (facts) of a save of step
/// 10 with two ranks per host. Returns the temporary directory, the checkpoint directories, the
/// hosts and the facts.
fn make_two_hosts() -> (TempDir, [PathBuf; 2], Vec<StorageHost>, RunFacts) {
    let dir = make_memory_dir();
    let roots = ["a", "b"].map(|n| dir.path().join(n));
    let hosts = roots.iter().map(|r| StorageHost::load_or_create(r, "some\nhost").expect("a host")).collect();
    (dir, roots, hosts, make_facts(10, 4, &[("w", &[30, 50]), ("v", &[7])]))
}

/// Writes the shards of two ranks to the staging directory of each host, and performs the first
/// phase of the commit on both hosts.
fn prepare_on_both_hosts(roots: &[PathBuf; 2], hosts: &[StorageHost], facts: &RunFacts) -> Vec<PreparedSave> {
    let stagings: Vec<StagingDir> =
        roots.iter().map(|r| StagingDir::create(r, facts.step, 1000).expect("begun")).collect();
    let reports = write_shards(stagings[0].path(), facts).expect("written");
    for rank in 2..4 {
        let name = format!("shard-{rank:05}-of-00004.safetensors");
        let [from, to] = [0, 1].map(|h| stagings[h].path().join(&name));
        std::fs::copy(&from, to).expect("copied");
        std::fs::remove_file(from).expect("removed");
    }
    let text = encode_host_local_manifest(facts.clone(), reports, hosts.to_vec(), &[0, 0, 1, 1])
        .expect("a manifest");
    let prepare =
        |(s, h): (StagingDir, &StorageHost)| PreparedSave::prepare(s, &h.id, text.clone()).expect("prepared");
    stagings.into_iter().zip(hosts).map(prepare).collect()
}

/// Asserts that `local` reads the right elements of every tensor if missing blocks are fetched from
/// `remote`.
fn assert_contains_with_remote(local: &Checkpoint, remote: &Checkpoint, facts: &RunFacts) {
    for t in local.tensors() {
        let mut out = vec![f32::NAN; t.element_count() as usize];
        let mut requests =
            [crate::F32ReadRequest { name: &t.name, role: t.role, start_element: 0, out: &mut out }];
        let read = local.read_verified_with_fetcher(&mut requests, &mut |lacking, sink| {
            lacking.iter().try_for_each(|run| remote.read_blocks(run, sink))
        });
        read.expect("readable");
        assert_eq!(out, compute_values(t.role, &t.name, facts, t.element_count()), "{}/{}", t.role, t.name);
    }
}

#[test]
fn a_host_keeps_its_id() {
    let (_dir, roots, hosts, _) = make_two_hosts();
    assert_ne!(hosts[0].id, hosts[1].id);
    assert_eq!(StorageHost::load_or_create(&roots[0], "renamed").expect("a host").id, hosts[0].id);
    assert_eq!(hosts[0].name, "somehost");
    std::fs::write(roots[0].join(".host"), "torn").expect("written");
    assert_ne!(StorageHost::load_or_create(&roots[0], "a").expect("a new id").id, hosts[0].id);
}

#[test]
fn an_interrupted_host_completes_what_another_host_completed() {
    let (_dir, roots, hosts, facts) = make_two_hosts();
    let mut both = prepare_on_both_hosts(&roots, &hosts, &facts).into_iter();
    let done = both.next().expect("a").complete().expect("completed");
    drop(both); // host b is interrupted
    assert_eq!(list_checkpoint_ids(&roots[1]).expect("listed"), []);
    let left = list_prepared_saves(&roots[1]).expect("listed");
    assert_eq!(left.len(), 1);
    assert_eq!(list_checkpoint_ids(&roots[0]).expect("listed"), [left[0].0.clone()]);
    complete_prepared_save(&roots[1], &left[0].1, left[0].0.step).expect("completed");
    let paths =
        roots.clone().map(|r| crate::find_latest_checkpoint(&r).expect("readable").expect("a latest"));
    assert_eq!(done.path, paths[0]);
    let [a, b] = paths.clone().map(|p| Checkpoint::open(&p).expect("a part"));
    assert_contains_with_remote(&a, &b, &facts);
    assert_contains_with_remote(&b, &a, &facts);
    let (_, text) = read_manifest(&paths[0]).expect("whole");
    let nothing = Checkpoint::from_manifest(Path::new("/nowhere"), text, false).expect("a manifest");
    assert_eq!(nothing.local_shard_flags(), [false; 4]);
}

#[test]
fn a_prepared_save_is_not_listed_and_the_next_save_removes_it() {
    let (_dir, roots, hosts, facts) = make_two_hosts();
    for discard in [true, false] {
        let both = prepare_on_both_hosts(&roots, &hosts, &facts);
        match discard {
            true => both.into_iter().for_each(PreparedSave::discard),
            false => drop(both),
        }
        for root in &roots {
            assert_eq!(list_checkpoint_ids(root).expect("listed"), []);
            assert_eq!(list_prepared_saves(root).expect("listed").len(), usize::from(!discard));
            drop(StagingDir::create(root, 11, 10).expect("begun"));
            assert_eq!(list_prepared_saves(root).expect("listed"), []);
        }
    }
}

#[test]
fn missing_shards_are_reported_with_their_host_and_can_be_copied() {
    let (dir, roots, hosts, facts) = make_two_hosts();
    for p in prepare_on_both_hosts(&roots, &hosts, &facts) {
        p.complete().expect("completed");
    }
    let [a, b] = [0, 1].map(|i| roots[i].join("step-00000010"));
    let report = verify_checkpoints(&a).expect("verified");
    assert!(report.is_sound());
    let remote: Vec<&str> = report.checkpoints[0].elsewhere.iter().map(|s| s.file.as_str()).collect();
    assert_eq!(remote, ["shard-00002-of-00004.safetensors", "shard-00003-of-00004.safetensors"]);
    assert!(report.checkpoints[0].elsewhere.iter().all(|s| s.host == hosts[1].to_string()));
    let part = Checkpoint::open(&a).expect("a part");
    let out = dir.path().join("out");
    let rejected = gather_weights(&part, &out, &GatherOptions::default(), |_, _| {}).expect_err("incomplete");
    assert!(
        matches!(rejected, CkptError::ShardsOnOtherHosts { .. }) && rejected.is_checkpoint_at_fault(),
        "{rejected}"
    );
    let mut one = [0f32; 7];
    assert!(matches!(
        part.read_f32("v", TensorRole::Weight, 0..7, &mut one),
        Err(CkptError::ShardsOnOtherHosts { .. })
    ));
    // a missing shard of this host is an error
    let shard = a.join("shard-00000-of-00004.safetensors");
    let aside = dir.path().join("aside");
    std::fs::rename(&shard, &aside).expect("moved");
    assert!(!verify_checkpoints(&a).expect("verified").is_sound());
    assert!(matches!(Checkpoint::open(&a), Err(CkptError::Missing { .. })));
    std::fs::rename(&aside, &shard).expect("moved");
    for name in remote {
        std::fs::copy(b.join(name), a.join(name)).expect("copied");
    }
    assert!(verify_checkpoints(&a).expect("verified").checkpoints[0].elsewhere.is_empty());
    assert_contains_saved(&Checkpoint::open(&a).expect("whole"), &facts);
}

#[test]
fn a_block_that_changed_in_transfer_is_rejected() {
    let (_dir, roots, hosts, facts) = make_two_hosts();
    for p in prepare_on_both_hosts(&roots, &hosts, &facts) {
        p.complete().expect("completed");
    }
    let [a, b] = [0, 1].map(|i| Checkpoint::open(&roots[i].join("step-00000010")).expect("a part"));
    let mut out = [0f32; 7];
    let mut requests =
        [crate::F32ReadRequest { name: "v", role: TensorRole::Weight, start_element: 0, out: &mut out }];
    let read = a.read_verified_with_fetcher(&mut requests, &mut |lacking, sink| {
        lacking.iter().try_for_each(|run| {
            b.read_blocks(run, &mut |file, block, bytes| {
                let mut wrong = bytes.to_vec();
                wrong[100] ^= 1;
                sink(file, block, &wrong)
            })
        })
    });
    assert!(matches!(read, Err(CkptError::Damaged { .. })), "{read:?}");
}

#[test]
fn manifests_with_invalid_hosts_are_rejected() {
    let (_dir, _, hosts, facts) = make_two_hosts();
    let dir = make_memory_dir();
    let staging = StagingDir::create(dir.path(), 10, 1000).expect("begun");
    let reports = write_shards(staging.path(), &facts).expect("written");
    let twice = vec![hosts[0].clone(), hosts[0].clone()];
    let odd = vec![hosts[0].clone(), StorageHost { id: "../..".into(), name: "b".into() }];
    for (hosts, host_of) in [
        (Vec::new(), [0, 0, 0, 0]),
        (hosts.clone(), [0, 0, 1, 2]),
        (twice, [0, 0, 1, 1]),
        (odd, [0, 0, 1, 1]),
    ] {
        let rejected = encode_host_local_manifest(facts.clone(), reports.clone(), hosts, &host_of);
        assert!(matches!(rejected, Err(CkptError::InvalidSave(_))), "{rejected:?}");
    }
    assert!(encode_host_local_manifest(facts, reports, hosts, &[0, 0, 1]).is_err(), "a shard on no host");
}
