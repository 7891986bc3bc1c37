//! Tests that saved tensors are read back, for any division into pieces and any ranges.
use super::*;
use crate::catalog::F32ReadRequest;
use crate::codec::safetensors;
use crate::error::CkptError;
use crate::layout::native::Checkpoint;
use crate::save::commit_save;
use proptest::prelude::*;
use std::os::unix::fs::FileExt;

/// The end of a piece, which is a part of a tensor that one rank stores: the index of the element
/// after the piece, and the rank.
type PieceEnd = (u64, u32);

/// A random test case: tensors, their division into pieces, and the ranges to read.
#[derive(Clone, Debug)]
struct RoundtripCase {
    world: u32,
    /// Shape of each tensor, and the ends of its pieces.
    tensors: Vec<(Vec<u64>, Vec<PieceEnd>)>,
    reads: Vec<(prop::sample::Index, prop::sample::Index, u64, u64)>,
}

fn generate_case() -> impl Strategy<Value = RoundtripCase> {
    let shape = prop::collection::vec(0u64..9, 0..4);
    let ends = prop::collection::vec((0u64..600, 0u32..5), 1..6);
    let read = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0u64..600, 0u64..600);
    (1u32..6, prop::collection::vec((shape, ends), 1..6), prop::collection::vec(read, 0..12))
        .prop_map(|(world, tensors, reads)| RoundtripCase { world, tensors, reads })
}

/// The pieces of tensors that each rank stores. The fields are the index and the role of the
/// tensor, the index of the first element in the tensor, and the elements.
type PiecesByRank = Vec<Vec<(usize, TensorRole, u64, Vec<f32>)>>;

/// Divides the tensors of a case into pieces, and assigns each piece to a rank.
fn divide_tensors(case: &RoundtripCase, facts: &RunFacts) -> PiecesByRank {
    let mut pieces_by_rank: PiecesByRank = vec![Vec::new(); case.world as usize];
    for role in ADAMW {
        for (i, (_, ends)) in case.tensors.iter().enumerate() {
            let w = &facts.model.weights[i];
            let data = compute_values(role, &w.name, facts, count_elements(w));
            let mut at: Vec<u64> = ends.iter().map(|c| c.0 % (data.len() as u64 + 1)).collect();
            at.extend([0, data.len() as u64]);
            at.sort();
            for (n, part) in at.windows(2).enumerate() {
                let rank = ends[n % ends.len()].1 % case.world;
                // later pieces come first, since ranks may write pieces in any order
                pieces_by_rank[rank as usize]
                    .insert(0, (i, role, part[0], data[part[0] as usize..part[1] as usize].to_vec()));
            }
        }
    }
    pieces_by_rank
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_pieces_and_any_ranges_are_read_back(case in generate_case()) {
        let dir = make_memory_dir();
        let names: Vec<String> = (0..case.tensors.len()).map(|i| format!("layers.{i}@x/y")).collect();
        let weights: Vec<(&str, &[u64])> =
            case.tensors.iter().zip(&names).map(|((shape, _), n)| (n.as_str(), shape.as_slice())).collect();
        let facts = make_facts(3, case.world, &weights);
        let staging = StagingDir::create(dir.path(), 3, 0).expect("begun");
        let mut reports = Vec::new();
        for (rank, tensors) in divide_tensors(&case, &facts).iter().enumerate() {
            let pieces: Vec<TensorPiece<'_>> = tensors.iter()
                .map(|(i, role, start, data)| TensorPiece { name: &names[*i], role: *role, start_element: *start, data: data[..].into() }).collect();
            reports.insert(0, write_shard(staging.path(), rank as u32, case.world, &pieces).expect("written"));
        }
        let path = commit_save(staging, facts.clone(), reports).expect("complete").path;
        prop_assert!(crate::verify_checkpoints(&path).expect("there").is_sound());

        let checkpoint = Checkpoint::open(&path).expect("complete");
        let tensors: Vec<_> = checkpoint.tensors().collect();
        let mut ranges: Vec<(usize, u64, Vec<f32>)> = case.reads.iter().map(|(t, _, a, b)| {
            let t = t.index(tensors.len());
            let n = tensors[t].element_count() + 1;
            let (a, b) = (a % n, b % n);
            (t, a.min(b), vec![f32::NAN; a.abs_diff(b) as usize])
        }).collect();
        let mut requests: Vec<F32ReadRequest<'_>> = ranges.iter_mut().map(|(t, start, out)| F32ReadRequest {
            name: &tensors[*t].name, role: tensors[*t].role, start_element: *start, out,
        }).collect();
        checkpoint.read_verified(&mut requests).expect("readable");
        for (t, start, out) in ranges {
            let t = &tensors[t];
            let expected = compute_values(t.role, &t.name, &facts, t.element_count());
            prop_assert_eq!(&out[..], &expected[start as usize..start as usize + out.len()]);
        }
    }
}

/// Checks reads of ranges that cross blocks, windows and shards. The checkpoint is saved to a real
/// disk, with several windows per file and odd sizes.
#[test]
fn ranges_across_blocks_windows_and_shards_are_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let facts = make_facts(1, 2, &[("big", &[3, 2_000_003]), ("small", &[11])]);
    let path = save_checkpoint(dir.path(), &facts).expect("saved").path;
    let checkpoint = Checkpoint::open(&path).expect("complete");
    assert_contains_saved(&checkpoint, &facts);
    let expected = compute_values(TensorRole::ExpAvg, "big", &facts, 6_000_009);
    let mut parts: Vec<(u64, Vec<f32>)> =
        [(5_999_999, 10), (2_999_990, 40), (0, 1), (262_100, 600_000), (262_101, 3)]
            .map(|(s, n)| (s, vec![0.0; n]))
            .into();
    let mut requests: Vec<F32ReadRequest<'_>> = parts
        .iter_mut()
        .map(|(start, out)| F32ReadRequest {
            name: "big",
            role: TensorRole::ExpAvg,
            start_element: *start,
            out,
        })
        .collect();
    checkpoint.read_verified(&mut requests).expect("readable");
    for (start, out) in parts {
        assert_eq!(out, expected[start as usize..start as usize + out.len()], "from {start}");
    }
}

#[test]
fn shards_are_safetensors_files() {
    let dir = make_memory_dir();
    let facts = make_facts(1, 2, &[("a", &[5])]);
    let path = save_checkpoint(dir.path(), &facts).expect("saved").path;
    let file = std::fs::File::open(path.join("shard-00001-of-00002.safetensors")).expect("there");
    let size = file.metadata().expect("a file").len();
    let header = safetensors::read_header(size, |at, out| file.read_exact_at(out, at)).expect("sound");
    let names: Vec<&str> = header.entries.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["weight/a@2", "exp_avg/a@2", "exp_avg_sq/a@2"]);
    assert_eq!(header.metadata["rank"], "1");
    let mut bytes = vec![0u8; 12];
    file.read_exact_at(&mut bytes, header.entries[1].bytes.start).expect("there");
    assert_eq!(
        bytemuck::cast_slice::<f32, u8>(&compute_values(TensorRole::ExpAvg, "a", &facts, 5)[2..]),
        bytes
    );
}

#[test]
fn reads_of_missing_tensors_and_ranges_are_rejected() {
    let dir = make_memory_dir();
    let facts = make_facts(1, 1, &[("a", &[5])]);
    let checkpoint =
        Checkpoint::open(&save_checkpoint(dir.path(), &facts).expect("saved").path).expect("complete");
    let mut out = [0.0; 3];
    let error = |r: Result<()>| r.expect_err("rejected");
    let missing = error(checkpoint.read_f32("b", TensorRole::Weight, 0..3, &mut out));
    assert!(
        matches!(&missing, CkptError::NoSuchTensor { tensor, .. } if tensor == "weight/b"),
        "{missing:?}"
    );
    for range in [3..6, u64::MAX - 3..u64::MAX] {
        let end = range.end;
        let outside = error(checkpoint.read_f32("a", TensorRole::Weight, range, &mut out));
        let CkptError::RangeOutsideTensor { elements, requested, .. } = outside else {
            panic!("{outside:?}")
        };
        assert_eq!((elements, requested), (5, end));
    }
    assert!(checkpoint.read_f32("a", TensorRole::Weight, 0..2, &mut out).is_err());
    checkpoint.require_matching_model(&facts.model.weights).expect("the same");
    let mut other = facts.model.weights.clone();
    other[0].shape = vec![6];
    let shape = error(checkpoint.require_matching_model(&other));
    // the order of tensors doesn't matter
    let reversed: Vec<_> = facts.model.weights.iter().rev().cloned().collect();
    checkpoint.require_matching_model(&reversed).expect("the same");
    let surplus = error(checkpoint.require_matching_model(&[]));
    let text = [&shape, &surplus].map(|e| format_error(e, dir.path())).join("\n");
    insta::assert_snapshot!("roundtrip_other_model", text);
}

/// Checks that a shard report is equal after serialization and deserialization, since ranks send
/// their reports to rank 0.
#[test]
fn shard_reports_survive_serialization() {
    let dir = make_memory_dir();
    let staging = StagingDir::create(dir.path(), 1, 0).expect("begun");
    let data = [1.0, 2.0];
    let piece =
        TensorPiece { name: "a", role: TensorRole::Momentum, start_element: 4, data: data[..].into() };
    let report = write_shard(staging.path(), 0, 1, &[piece]).expect("written");
    let json = serde_json::to_string(&report).expect("serialises");
    assert_eq!(serde_json::from_str::<ShardReport>(&json).expect("reads"), report);
}
