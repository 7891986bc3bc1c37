//! Checkpoints of hosts that share no directory: the two phases, reading from elsewhere, what a part says of the rest.
use super::*;
use crate::host_local::{Host, Prepared, listed, manifest, prepared, roll_forward, text_of};
use crate::{Checkpoint, CkptError, GatherOptions, gather, verify};

/// Two hosts with two ranks each: their directories, hosts and facts of step 10.
fn two() -> (TempDir, [PathBuf; 2], Vec<Host>, Facts) {
    let dir = fast_dir();
    let roots = ["a", "b"].map(|n| dir.path().join(n));
    let hosts = roots.iter().map(|r| Host::here(r, "some\nhost").expect("a host")).collect();
    (dir, roots, hosts, facts(10, 4, &[("w", &[30, 50]), ("v", &[7])]))
}

/// Phase one on both.
fn prepare(roots: &[PathBuf; 2], hosts: &[Host], facts: &Facts) -> Vec<Prepared> {
    let stagings: Vec<Staging> =
        roots.iter().map(|r| Staging::begin(r, facts.step, 1000).expect("begun")).collect();
    let reports = write_shards(stagings[0].path(), facts).expect("written");
    for rank in 2..4 {
        let name = format!("shard-{rank:05}-of-00004.safetensors");
        let [from, to] = [0, 1].map(|h| stagings[h].path().join(&name));
        std::fs::copy(&from, to).expect("copied");
        std::fs::remove_file(from).expect("removed");
    }
    let text = manifest(facts.clone(), reports, hosts.to_vec(), &[0, 0, 1, 1]).expect("a manifest");
    let prepare = |(s, h): (Staging, &Host)| Prepared::new(s, &h.id, text.clone()).expect("prepared");
    stagings.into_iter().zip(hosts).map(prepare).collect()
}

/// Reads all on one host, with what it lacks from another.
fn assert_holds_with(here: &Checkpoint, there: &Checkpoint, facts: &Facts) {
    for t in here.tensors() {
        let mut out = vec![f32::NAN; t.elements() as usize];
        let mut requests = [crate::Request { name: &t.name, role: t.role, start_element: 0, out: &mut out }];
        let read = here.read_many_with(&mut requests, &mut |lacking, sink| {
            lacking.iter().try_for_each(|run| there.read_blocks(run, sink))
        });
        read.expect("readable");
        assert_eq!(out, values(t.role, &t.name, facts, t.elements()), "{}/{}", t.role, t.name);
    }
}

#[test]
fn a_host_keeps_its_id() {
    let (_dir, roots, hosts, _) = two();
    assert_ne!(hosts[0].id, hosts[1].id);
    assert_eq!(Host::here(&roots[0], "renamed").expect("a host").id, hosts[0].id);
    assert_eq!(hosts[0].name, "somehost");
    std::fs::write(roots[0].join(".host"), "torn").expect("written");
    assert_ne!(Host::here(&roots[0], "a").expect("a new id").id, hosts[0].id);
}

#[test]
fn a_host_that_was_cut_short_completes_what_another_completed() {
    let (_dir, roots, hosts, facts) = two();
    let mut both = prepare(&roots, &hosts, &facts).into_iter();
    let done = both.next().expect("a").complete().expect("completed");
    drop(both); // b ends here
    assert_eq!(listed(&roots[1]).expect("listed"), []);
    let left = prepared(&roots[1]).expect("listed");
    assert_eq!(left.len(), 1);
    assert_eq!(listed(&roots[0]).expect("listed"), [left[0].0.clone()]);
    roll_forward(&roots[1], &left[0].1, left[0].0.step).expect("completed");
    let paths = roots.clone().map(|r| crate::latest(&r).expect("readable").expect("a latest"));
    assert_eq!(done.path, paths[0]);
    let [a, b] = paths.clone().map(|p| Checkpoint::open(&p).expect("a part"));
    assert_holds_with(&a, &b, &facts);
    assert_holds_with(&b, &a, &facts);
    let (_, text) = text_of(&paths[0]).expect("whole");
    let nothing = Checkpoint::from_manifest(Path::new("/nowhere"), text, false).expect("a manifest");
    assert_eq!(nothing.here(), [false; 4]);
}

#[test]
fn what_only_some_prepared_is_absent_and_the_next_save_removes_it() {
    let (_dir, roots, hosts, facts) = two();
    for discard in [true, false] {
        let both = prepare(&roots, &hosts, &facts);
        match discard {
            true => both.into_iter().for_each(Prepared::discard),
            false => drop(both),
        }
        for root in &roots {
            assert_eq!(listed(root).expect("listed"), []);
            assert_eq!(prepared(root).expect("listed").len(), usize::from(!discard));
            drop(Staging::begin(root, 11, 10).expect("begun"));
            assert_eq!(prepared(root).expect("listed"), []);
        }
    }
}

#[test]
fn a_part_says_where_the_rest_is_and_copies_make_it_whole() {
    let (dir, roots, hosts, facts) = two();
    for p in prepare(&roots, &hosts, &facts) {
        p.complete().expect("completed");
    }
    let [a, b] = [0, 1].map(|i| roots[i].join("step-00000010"));
    let report = verify(&a).expect("verified");
    assert!(report.is_sound());
    let elsewhere: Vec<&str> = report.checkpoints[0].elsewhere.iter().map(|s| s.file.as_str()).collect();
    assert_eq!(elsewhere, ["shard-00002-of-00004.safetensors", "shard-00003-of-00004.safetensors"]);
    assert!(report.checkpoints[0].elsewhere.iter().all(|s| s.host == hosts[1].to_string()));
    let part = Checkpoint::open(&a).expect("a part");
    let out = dir.path().join("out");
    let refused = gather(&part, &out, &GatherOptions::default(), |_, _| {}).expect_err("not all here");
    assert!(matches!(refused, CkptError::Elsewhere { .. }) && refused.is_checkpoint_at_fault(), "{refused}");
    let mut one = [0f32; 7];
    assert!(matches!(part.read_f32("v", Role::Weight, 0..7, &mut one), Err(CkptError::Elsewhere { .. })));
    // a host's own shard is no one else's to bring
    let own = a.join("shard-00000-of-00004.safetensors");
    let aside = dir.path().join("aside");
    std::fs::rename(&own, &aside).expect("moved");
    assert!(!verify(&a).expect("verified").is_sound());
    assert!(matches!(Checkpoint::open(&a), Err(CkptError::Missing { .. })));
    std::fs::rename(&aside, &own).expect("moved");
    for name in elsewhere {
        std::fs::copy(b.join(name), a.join(name)).expect("copied");
    }
    assert!(verify(&a).expect("verified").checkpoints[0].elsewhere.is_empty());
    assert_holds(&Checkpoint::open(&a).expect("whole"), &facts);
}

#[test]
fn a_block_that_changed_on_its_way_is_refused() {
    let (_dir, roots, hosts, facts) = two();
    for p in prepare(&roots, &hosts, &facts) {
        p.complete().expect("completed");
    }
    let [a, b] = [0, 1].map(|i| Checkpoint::open(&roots[i].join("step-00000010")).expect("a part"));
    let mut out = [0f32; 7];
    let mut requests = [crate::Request { name: "v", role: Role::Weight, start_element: 0, out: &mut out }];
    let read = a.read_many_with(&mut requests, &mut |lacking, sink| {
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
fn manifests_with_impossible_hosts_are_refused() {
    let (_dir, _, hosts, facts) = two();
    let dir = fast_dir();
    let staging = Staging::begin(dir.path(), 10, 1000).expect("begun");
    let reports = write_shards(staging.path(), &facts).expect("written");
    let twice = vec![hosts[0].clone(), hosts[0].clone()];
    let odd = vec![hosts[0].clone(), Host { id: "../..".into(), name: "b".into() }];
    for (hosts, host_of) in [
        (Vec::new(), [0, 0, 0, 0]),
        (hosts.clone(), [0, 0, 1, 2]),
        (twice, [0, 0, 1, 1]),
        (odd, [0, 0, 1, 1]),
    ] {
        let refused = manifest(facts.clone(), reports.clone(), hosts, &host_of);
        assert!(matches!(refused, Err(CkptError::Invalid { .. })), "{refused:?}");
    }
    assert!(manifest(facts, reports, hosts, &[0, 0, 1]).is_err(), "a shard on no host");
}
