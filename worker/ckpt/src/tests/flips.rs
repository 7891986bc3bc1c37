//! Every byte of checkpoints of other programs flipped in turn: what is read is the same, bit for bit, or it is said to be
//! wrong; and what can't be read, or is another, verify names.
use super::foreign::{golden, open};
use super::{copy_tree, fast_dir, files, tiny};
use crate::error::CkptError;
use crate::external::Foreign;
use crate::source::Source;
use crate::{Request, TensorInfo};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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
    let count = |t: &TensorInfo| if t.dtype.is_float() { t.elements() as usize } else { 0 };
    let mut values: Vec<Vec<f32>> = infos.iter().map(|t| vec![0.0; count(t)]).collect();
    let mut requests: Vec<Request<'_>> = infos
        .iter()
        .zip(&mut values)
        .filter(|(t, _)| t.dtype.is_float())
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

/// A byte of a folder and the bits of it that are flipped.
struct Flip {
    /// Index among the folder's files.
    file: usize,
    at: usize,
    mask: u8,
}

/// What became of flips.
#[derive(Default)]
struct Count {
    refused: AtomicUsize,
    said: AtomicUsize,
    same: AtomicUsize,
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

/// Every byte that something looks after, by both masks.
fn all(root: &Path) -> Vec<Flip> {
    let mut flips = Vec::new();
    for (file, (path, bytes)) in files(root).into_iter().enumerate().filter(|(_, (p, _))| !has_none(p)) {
        let step = if is_random(&path) { 97 } else { 1 };
        for at in (0..bytes.len()).step_by(step) {
            flips.extend(MASKS.map(|mask| Flip { file, at, mask }));
        }
    }
    flips
}

/// So many of them that a seed chooses; `CKPT_FLIP_SEED` chooses others.
fn some(root: &Path, count: usize) -> Vec<Flip> {
    let mut seed: u64 = std::env::var("CKPT_FLIP_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let mut flips = all(root);
    let chosen = count.min(flips.len());
    for i in 0..chosen {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let left = flips.len() - i;
        flips.swap(i, i + (seed >> 33) as usize % left);
    }
    flips.truncate(chosen);
    flips
}

/// Makes each flip and takes it back, in a copy of the folder for each core.
fn flip_each(folder: &Path, flips: &[Flip]) {
    let sound = seen(&open(folder).expect("whole")).expect("sound");
    let (count, next) = (Count::default(), AtomicUsize::new(0));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                let dir = fast_dir();
                let root = dir.path().join("copy");
                copy_tree(folder, &root);
                let files = files(&root);
                while let Some(flip) = flips.get(next.fetch_add(1, Relaxed)) {
                    let (path, bytes) = &files[flip.file];
                    let file = fs::OpenOptions::new().write(true).open(path).expect("there");
                    file.write_all_at(&[bytes[flip.at] ^ flip.mask], flip.at as u64).expect("written");
                    flipped(&root, &sound, path, &count, flip);
                    file.write_all_at(&bytes[flip.at..=flip.at], flip.at as u64).expect("written");
                }
                assert!(crate::verify(&root).expect("a report").is_sound(), "all is back in its place");
            });
        }
    });
    let [refused, said, same] = [count.refused, count.said, count.same].map(AtomicUsize::into_inner);
    println!("{}: {refused} refused, {said} said, {same} the same", folder.display());
    assert!(refused > flips.len() / 10 && same > 0, "{refused} refused, {said} said, {same} the same");
}

fn flipped(root: &Path, sound: &Seen, path: &Path, count: &Count, flip: &Flip) {
    let place = || format!("byte {} of {} by {:#x}", flip.at, path.display(), flip.mask);
    match open(root).and_then(|found| seen(&found)) {
        Ok(now) if (&now.facts, &now.tensors) == (&sound.facts, &sound.tensors) => {
            count.same.fetch_add(1, Relaxed);
        }
        Ok(now) => {
            assert!(now.said > sound.said, "{} is wrong and nothing says so", place());
            count.said.fetch_add(1, Relaxed);
        }
        Err(e) => {
            assert!(e.is_checkpoint_at_fault(), "{}: {e}", place());
            // opened again for the report, which costs as much: one of a few
            if count.refused.fetch_add(1, Relaxed).is_multiple_of(5) {
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

/// One of the tiny folders.
fn tiny(name: &str, flips: impl Fn(&Path) -> Vec<Flip>) {
    let (_dir, root) = tiny::copy(name);
    flip_each(&root, &flips(&root));
}

#[test]
fn bytes_of_deepspeed_s() {
    for name in ["z0_tied", "z1", "z2", "z3", "accelerate_z2"] {
        tiny(name, |root| some(root, 2000));
    }
}

#[test]
fn bytes_of_trainer_s_and_fsdp_s() {
    for name in ["trainer", "fsdp_full"] {
        tiny(name, |root| some(root, 2000));
    }
}

/// Of many files, each of which is opened for each flip.
#[test]
fn bytes_of_universal_and_distributed_checkpoints() {
    for name in ["universal", "dcp"] {
        tiny(name, |root| some(root, 400));
    }
}

/// Every byte of every kind by both masks: a million readings. `CKPT_FLIP_KINDS` chooses kinds, with commas between them.
#[test]
#[ignore = "takes many minutes"]
fn every_byte_of_every_kind() {
    let chosen = std::env::var("CKPT_FLIP_KINDS").ok();
    let chosen: Option<Vec<&str>> = chosen.as_deref().map(|kinds| kinds.split(',').collect());
    for kind in chosen.iter().flatten() {
        assert!(tiny::TINY.iter().any(|(name, _)| name == kind), "there is no kind {kind}");
    }
    for (name, _) in tiny::TINY.iter().filter(|(n, _)| chosen.as_ref().is_none_or(|c| c.contains(n))) {
        tiny(name, all);
    }
}

/// Larger folders, half of the flips at the ends of files, which hold the structure.
#[test]
fn bytes_of_larger_folders() {
    for name in ["fsdp2_sharded", "z0"] {
        let dir = fast_dir();
        let root = dir.path().join(name);
        copy_tree(&golden(name), &root);
        fs::remove_file(root.join("reference.json")).expect("there");
        let mut flips = some(&root, 200);
        let sizes: Vec<usize> = files(&root).iter().map(|(_, bytes)| bytes.len()).collect();
        for flip in flips.iter_mut().step_by(2) {
            let size = sizes[flip.file];
            flip.at =
                if flip.at % 4 < 2 { flip.at % size.min(600) } else { size - 1 - flip.at % size.min(600) };
        }
        flip_each(&root, &flips);
    }
}
