//! What is saved is read, however it was cut and whatever range is asked for.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::commit::commit;
use crate::formats::safetensors;
use crate::source::Request;
use proptest::prelude::*;
use std::os::unix::fs::FileExt;

/// Element, and the rank that holds what lies before it.
type Cut = (u64, u32);

/// Tensors and ranges to read of them.
#[derive(Clone, Debug)]
struct Case {
    world: u32,
    /// Shape, cuts.
    tensors: Vec<(Vec<u64>, Vec<Cut>)>,
    reads: Vec<(prop::sample::Index, prop::sample::Index, u64, u64)>,
}

fn case() -> impl Strategy<Value = Case> {
    let shape = prop::collection::vec(0u64..9, 0..4);
    let cuts = prop::collection::vec((0u64..600, 0u32..5), 1..6);
    let read = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0u64..600, 0u64..600);
    (1u32..6, prop::collection::vec((shape, cuts), 1..6), prop::collection::vec(read, 0..12))
        .prop_map(|(world, tensors, reads)| Case { world, tensors, reads })
}

/// `(tensor, role, start, data)` per rank.
type Held = Vec<Vec<(usize, Role, u64, Vec<f32>)>>;

fn cut(case: &Case, facts: &Facts) -> Held {
    let mut held: Held = vec![Vec::new(); case.world as usize];
    for role in ADAMW {
        for (i, (_, cuts)) in case.tensors.iter().enumerate() {
            let w = &facts.model.weights[i];
            let all = values(role, &w.name, facts, elements(w));
            let mut at: Vec<u64> = cuts.iter().map(|c| c.0 % (all.len() as u64 + 1)).collect();
            at.extend([0, all.len() as u64]);
            at.sort();
            for (n, part) in at.windows(2).enumerate() {
                let rank = cuts[n % cuts.len()].1 % case.world;
                // out of order on purpose: later parts first
                held[rank as usize]
                    .insert(0, (i, role, part[0], all[part[0] as usize..part[1] as usize].to_vec()));
            }
        }
    }
    held
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_cut_any_range(case in case()) {
        let dir = fast_dir();
        let names: Vec<String> = (0..case.tensors.len()).map(|i| format!("layers.{i}@x/y")).collect();
        let weights: Vec<(&str, &[u64])> =
            case.tensors.iter().zip(&names).map(|((shape, _), n)| (n.as_str(), shape.as_slice())).collect();
        let facts = facts(3, case.world, &weights);
        let staging = Staging::begin(dir.path(), 3, 0).expect("begun");
        let mut reports = Vec::new();
        for (rank, held) in cut(&case, &facts).iter().enumerate() {
            let pieces: Vec<Piece<'_>> = held.iter()
                .map(|(i, role, start, data)| Piece { name: &names[*i], role: *role, start_element: *start, data: data[..].into() }).collect();
            reports.insert(0, write_shard(staging.path(), rank as u32, case.world, &pieces).expect("written"));
        }
        let path = commit(staging, facts.clone(), reports).expect("complete").path;
        prop_assert!(crate::verify(&path).expect("there").is_sound());

        let checkpoint = Checkpoint::open(&path).expect("complete");
        let tensors: Vec<_> = checkpoint.tensors().collect();
        let mut wanted: Vec<(usize, u64, Vec<f32>)> = case.reads.iter().map(|(t, _, a, b)| {
            let t = t.index(tensors.len());
            let n = tensors[t].elements() + 1;
            let (a, b) = (a % n, b % n);
            (t, a.min(b), vec![f32::NAN; a.abs_diff(b) as usize])
        }).collect();
        let mut requests: Vec<Request<'_>> = wanted.iter_mut().map(|(t, start, out)| Request {
            name: &tensors[*t].name, role: tensors[*t].role, start_element: *start, out,
        }).collect();
        checkpoint.read_many(&mut requests).expect("readable");
        for (t, start, out) in wanted {
            let t = &tensors[t];
            let all = values(t.role, &t.name, &facts, t.elements());
            prop_assert_eq!(&out[..], &all[start as usize..start as usize + out.len()]);
        }
    }
}

/// Several windows per file on a real disk, odd sizes, ranges across blocks, windows and shards.
#[test]
fn large_tensors_over_many_windows() {
    let dir = tempfile::tempdir().expect("a directory");
    let facts = facts(1, 2, &[("big", &[3, 2_000_003]), ("small", &[11])]);
    let path = save(dir.path(), &facts).expect("saved").path;
    let checkpoint = Checkpoint::open(&path).expect("complete");
    assert_holds(&checkpoint, &facts);
    let all = values(Role::ExpAvg, "big", &facts, 6_000_009);
    let mut parts: Vec<(u64, Vec<f32>)> =
        [(5_999_999, 10), (2_999_990, 40), (0, 1), (262_100, 600_000), (262_101, 3)]
            .map(|(s, n)| (s, vec![0.0; n]))
            .into();
    let mut requests: Vec<Request<'_>> = parts
        .iter_mut()
        .map(|(start, out)| Request { name: "big", role: Role::ExpAvg, start_element: *start, out })
        .collect();
    checkpoint.read_many(&mut requests).expect("readable");
    for (start, out) in parts {
        assert_eq!(out, all[start as usize..start as usize + out.len()], "from {start}");
    }
}

#[test]
fn shards_are_safetensors_files() {
    let dir = fast_dir();
    let facts = facts(1, 2, &[("a", &[5])]);
    let path = save(dir.path(), &facts).expect("saved").path;
    let file = std::fs::File::open(path.join("shard-00001-of-00002.safetensors")).expect("there");
    let size = file.metadata().expect("a file").len();
    let header = safetensors::read_header(size, |at, out| file.read_exact_at(out, at)).expect("sound");
    let names: Vec<&str> = header.entries.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["weight/a@2", "exp_avg/a@2", "exp_avg_sq/a@2"]);
    assert_eq!(header.metadata["rank"], "1");
    let mut bytes = vec![0u8; 12];
    file.read_exact_at(&mut bytes, header.entries[1].bytes.start).expect("there");
    assert_eq!(bytemuck::cast_slice::<f32, u8>(&values(Role::ExpAvg, "a", &facts, 5)[2..]), bytes);
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let dir = fast_dir();
    let facts = facts(1, 1, &[("a", &[5])]);
    let checkpoint = Checkpoint::open(&save(dir.path(), &facts).expect("saved").path).expect("complete");
    let mut out = [0.0; 3];
    let error = |r: Result<()>| r.expect_err("refused").to_string();
    let e = error(checkpoint.read_f32("b", Role::Weight, 0..3, &mut out));
    assert!(e.contains("weight/b") && e.contains("no such tensor"), "{e}");
    let e = error(checkpoint.read_f32("a", Role::Weight, 3..6, &mut out));
    assert!(e.contains("at least 6 elements") && e.contains("5 elements"), "{e}");
    let e = error(checkpoint.read_f32("a", Role::Weight, u64::MAX - 3..u64::MAX, &mut out));
    assert!(e.contains("5 elements"), "{e}");
    assert!(checkpoint.read_f32("a", Role::Weight, 0..2, &mut out).is_err());
    checkpoint.require_model(&facts.model.weights).expect("the same");
    let mut other = facts.model.weights.clone();
    other[0].shape = vec![6];
    let e = error(checkpoint.require_model(&other));
    assert!(e.contains("another model: tensor a: expected a [6], found a [5]"), "{e}");
    // other programs list the same tensors in another order
    let reversed: Vec<_> = facts.model.weights.iter().rev().cloned().collect();
    checkpoint.require_model(&reversed).expect("the same");
    let e = error(checkpoint.require_model(&[]));
    assert!(e.contains("expected no such tensor, found a [5]"), "{e}");
}

/// Reports travel between ranks in a binary format that is not human-readable.
#[test]
fn reports_are_plain_data() {
    let dir = fast_dir();
    let staging = Staging::begin(dir.path(), 1, 0).expect("begun");
    let data = [1.0, 2.0];
    let piece = Piece { name: "a", role: Role::Momentum, start_element: 4, data: data[..].into() };
    let report = write_shard(staging.path(), 0, 1, &[piece]).expect("written");
    let json = serde_json::to_string(&report).expect("serialises");
    assert_eq!(serde_json::from_str::<ShardReport>(&json).expect("reads"), report);
}
