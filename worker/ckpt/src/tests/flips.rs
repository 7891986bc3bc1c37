//! Every byte of checkpoints of other programs flipped in turn: what is read is the same, bit for bit, or it is said to be
//! wrong; and what can't be read, or is another, verify names.
use super::foreign::{golden, open};
use super::{copy_tree, fast_dir, files, tiny};
use crate::error::CkptError;
use crate::foreign::Foreign;
use crate::source::Source;
use crate::{Dtype, Request, TensorInfo};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// One bit, and several.
const MASKS: [u8; 2] = [0x01, 0xe6];

/// All that a reader gets from a folder.
#[derive(PartialEq)]
struct Seen {
    facts: String,
    /// With their bits; those of integers have none here.
    tensors: Vec<(TensorInfo, Vec<u32>)>,
    /// How much it has to say.
    said: usize,
}

fn seen(found: &Foreign) -> Result<Seen, CkptError> {
    let facts = found.facts();
    let infos = found.tensors();
    let float = |d: Dtype| matches!(d, Dtype::F32 | Dtype::BF16 | Dtype::F16);
    let count = |t: &TensorInfo| if float(t.dtype) { t.elements() as usize } else { 0 };
    let mut values: Vec<Vec<f32>> = infos.iter().map(|t| vec![0.0; count(t)]).collect();
    let mut requests: Vec<Request<'_>> = infos
        .iter()
        .zip(&mut values)
        .filter(|(t, _)| float(t.dtype))
        .map(|(t, out)| Request { name: &t.name, role: t.role, start_element: 0, out })
        .collect();
    found.read_many(&mut requests)?;
    let bits = values.into_iter().map(|v| v.into_iter().map(f32::to_bits).collect());
    let tensors = infos.into_iter().zip(bits).collect();
    Ok(Seen {
        facts: format!("{:?} {:?} {:?} {:?}", facts.groups, facts.steps, facts.ties, facts.scheduler),
        tensors,
        said: facts.notices.len() + facts.warnings.len() + facts.missing.len(),
    })
}

/// What became of flips.
#[derive(Default)]
struct Count {
    refused: usize,
    said: usize,
    same: usize,
}

/// Flips bytes of every file in turn: after the byte at a place of a file, the one so many further on as `every` says, 0 for no
/// more. Both masks, or one and the other in turn.
fn flips(root: &Path, both: bool, every: impl Fn(&Path, usize, usize) -> usize) {
    let sound = seen(&open(root).expect("whole")).expect("sound");
    let mut count = Count::default();
    for (path, bytes) in files(root) {
        let file = fs::OpenOptions::new().write(true).open(&path).expect("there");
        let mut at = 0;
        while at < bytes.len() {
            let step = every(&path, at, bytes.len());
            if step == 0 {
                break;
            }
            for &mask in if both { &MASKS[..] } else { &MASKS[at / step % 2..][..1] } {
                file.write_all_at(&[bytes[at] ^ mask], at as u64).expect("written");
                let place = || format!("byte {at} of {} by {mask:#x}", path.display());
                flipped(root, &sound, &path, &mut count, place);
            }
            file.write_all_at(&bytes[at..=at], at as u64).expect("written");
            at += step;
        }
    }
    println!("{}: {} refused, {} said, {} the same", root.display(), count.refused, count.said, count.same);
    assert!(count.refused > 50 && count.same > 0);
    assert!(crate::verify(root).expect("a report").is_sound(), "all is back in its place");
}

fn flipped(root: &Path, sound: &Seen, path: &Path, count: &mut Count, place: impl Fn() -> String) {
    match open(root).and_then(|found| seen(&found)) {
        Ok(now) if (&now.facts, &now.tensors) == (&sound.facts, &sound.tensors) => count.same += 1,
        Ok(now) => {
            assert!(now.said > sound.said, "{} is wrong and nothing says so", place());
            count.said += 1;
        }
        Err(e) => {
            assert!(e.is_checkpoint_at_fault(), "{}: {e}", place());
            count.refused += 1;
            // opened again for the report, which costs as much: one of a few
            if count.refused.is_multiple_of(5) {
                let report = crate::verify(root).expect("a report");
                assert!(!report.is_sound(), "{} isn't read, and verify finds nothing", place());
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let named = report.problems().any(|(_, p)| p.to_string().contains(&*name));
                // what `.metadata` says wrong is told by the tensor
                let other = name.starts_with("latest") || name == ".metadata";
                assert!(named || other, "{}: {report:?}", place());
            }
        }
    }
}

/// Safetensors and JSON have no checksums.
fn has_none(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "safetensors" || e == "json")
}

/// Random states: nothing of them is among what is compared, so a few of their bytes do.
fn is_random(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("rng_state") || name.starts_with("random_states")
}

/// One of the tiny folders, by steps of `every` bytes.
fn tiny(name: &str, both: bool, every: usize) {
    let (_dir, root) = tiny::copy(name);
    flips(&root, both, |path, _, _| match path {
        p if has_none(p) => 0,
        p if is_random(p) => 97 * every,
        _ => every,
    });
}

#[test]
fn every_byte_of_stage_2() {
    tiny("z2", false, 1);
}

#[test]
fn bytes_of_stage_1() {
    tiny("z1", false, 5);
}

#[test]
fn bytes_of_stage_3() {
    tiny("z3", false, 7);
}

#[test]
fn bytes_of_fsdp_s_full_state() {
    tiny("fsdp_full", false, 7);
}

#[test]
fn bytes_of_accelerate_s() {
    tiny("accelerate_z2", false, 11);
}

#[test]
fn bytes_of_hf_trainer_s() {
    tiny("trainer", false, 7);
}

#[test]
fn bytes_of_universal_checkpoints() {
    tiny("universal", false, 211);
}

#[test]
fn bytes_of_distributed_checkpoints() {
    tiny("dcp", false, 401);
}

/// Every byte of every kind, both masks: hundreds of thousands of readings.
#[test]
#[ignore = "takes many minutes"]
fn every_byte_of_every_kind() {
    std::thread::scope(|scope| {
        for (name, _) in tiny::TINY {
            scope.spawn(move || tiny(name, true, 1));
        }
    });
}

/// Larger folders, the ends of files, which hold the structure, more often.
fn samples(name: &str, every: usize) {
    let dir = fast_dir();
    let root: PathBuf = dir.path().join(name);
    copy_tree(&golden(name), &root);
    let _ = fs::remove_file(root.join("reference.json"));
    let step =
        |_: &Path, at: usize, len: usize| if at < 600 || len - at < 600 { every.min(13) } else { every };
    flips(&root, false, step);
}

#[test]
fn samples_of_fsdp_s_shards() {
    samples("fsdp2_sharded", 20_011);
}

#[test]
fn samples_of_stage_0() {
    samples("z0", 9_001);
}
