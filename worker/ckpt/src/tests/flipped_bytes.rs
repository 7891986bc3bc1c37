//! Tests single flipped bytes in external checkpoints. A read must give equal data, an error or a
//! notice, and [`crate::verify_checkpoints`] must name the file of every error.
use super::external::{golden_path, open_external};
use super::{copy_tree, make_memory_dir, read_tree, tiny};
use crate::catalog::{ExternalCheckpoint, TensorSource};
use crate::error::CkptError;
use crate::{F32ReadRequest, TensorInfo};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The masks with which bytes are XORed: one with a single bit, and one with several bits.
const MASKS: [u8; 2] = [0x01, 0xe6];

/// The facts and tensors that a read of a checkpoint returns, for comparison with another read.
#[derive(PartialEq)]
struct CheckpointContents {
    facts: String,
    /// Tensors with the bits of their values. Integer tensors have no values here.
    tensors: Vec<(TensorInfo, Vec<u32>)>,
    /// Number of notices, warnings and missing parts.
    remarks: usize,
}

/// Reads all floating-point tensors of a checkpoint, and the facts that it records.
fn read_contents(found: &ExternalCheckpoint) -> Result<CheckpointContents, CkptError> {
    let facts = found.facts();
    let infos = found.tensors();
    let count = |t: &TensorInfo| if t.dtype.is_float() { t.element_count() as usize } else { 0 };
    let mut values: Vec<Vec<f32>> = infos.iter().map(|t| vec![0.0; count(t)]).collect();
    let mut requests: Vec<F32ReadRequest<'_>> = infos
        .iter()
        .zip(&mut values)
        .filter(|(t, _)| t.dtype.is_float())
        .map(|(t, out)| F32ReadRequest { name: &t.name, role: t.role, start_element: 0, out })
        .collect();
    found.read_verified(&mut requests)?;
    let bits = values.into_iter().map(|v| v.into_iter().map(f32::to_bits).collect());
    let tensors = infos.into_iter().zip(bits).collect();
    Ok(CheckpointContents {
        facts: format!(
            "{:?} {:?} {:?} {:?}",
            facts.state.groups, facts.state.steps, facts.state.ties, facts.state.scheduler
        ),
        tensors,
        remarks: facts.notices.len() + facts.warnings.len() + facts.missing.len(),
    })
}

/// The position of a byte in a checkpoint, and the mask of the bits to flip.
struct ByteFlip {
    /// Index of the file in the result of [`read_tree`].
    file: usize,
    /// Offset of the byte in the file.
    at: usize,
    mask: u8,
}

/// Counts reads after a flipped byte by their result: an error, other data with a notice, or
/// unchanged data.
#[derive(Default)]
struct FlipCounts {
    rejected: AtomicUsize,
    remarked: AtomicUsize,
    harmless: AtomicUsize,
}

/// Returns whether the format of the file has no checksum.
fn has_no_checksum(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "safetensors" || e == "json")
}

/// Returns whether the file has RNG streams. Few of its bytes are flipped, since RNG streams aren't
/// compared.
fn is_rng_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("rng_state") || name.starts_with("random_states")
}

/// Lists the flips to test: in files with a checksum, one flip of each byte for each mask. In RNG
/// state files, lists only flips of every 97th byte.
fn list_flips(root: &Path) -> Vec<ByteFlip> {
    let mut flips = Vec::new();
    for (file, (path, bytes)) in
        read_tree(root).into_iter().enumerate().filter(|(_, (p, _))| !has_no_checksum(p))
    {
        let step = if is_rng_file(&path) { 97 } else { 1 };
        for at in (0..bytes.len()).step_by(step) {
            flips.extend(MASKS.map(|mask| ByteFlip { file, at, mask }));
        }
    }
    flips
}

/// Selects at most `count` flips of the checkpoint at `root` pseudo-randomly. The environment
/// variable `CKPT_FLIP_SEED` sets the seed.
fn select_random_flips(root: &Path, count: usize) -> Vec<ByteFlip> {
    let mut seed: u64 = std::env::var("CKPT_FLIP_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let mut flips = list_flips(root);
    let chosen = count.min(flips.len());
    for i in 0..chosen {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let left = flips.len() - i;
        flips.swap(i, i + (seed >> 33) as usize % left);
    }
    flips.truncate(chosen);
    flips
}

/// Flips each byte in `flips` in turn, checks that reads notice the flip, and reverts the flip.
/// Uses one thread per core, each with a copy of the checkpoint. Panics if a flip gives wrong data
/// without an error or a notice.
fn check_each_flip(checkpoint: &Path, flips: &[ByteFlip]) {
    let sound = read_contents(&open_external(checkpoint).expect("whole")).expect("sound");
    let (count, next) = (FlipCounts::default(), AtomicUsize::new(0));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                let dir = make_memory_dir();
                let root = dir.path().join("copy");
                copy_tree(checkpoint, &root);
                let files = read_tree(&root);
                while let Some(flip) = flips.get(next.fetch_add(1, Relaxed)) {
                    let (path, bytes) = &files[flip.file];
                    let file = fs::OpenOptions::new().write(true).open(path).expect("there");
                    file.write_all_at(&[bytes[flip.at] ^ flip.mask], flip.at as u64).expect("written");
                    check_flip(&root, &sound, path, &count, flip);
                    file.write_all_at(&bytes[flip.at..=flip.at], flip.at as u64).expect("written");
                }
                assert!(
                    crate::verify_checkpoints(&root).expect("a report").is_sound(),
                    "every flip was reverted"
                );
            });
        }
    });
    let [rejected, remarked, harmless] =
        [count.rejected, count.remarked, count.harmless].map(AtomicUsize::into_inner);
    let text = format!("{rejected} rejected, {remarked} remarked, {harmless} harmless");
    println!("{}: {text}", checkpoint.display());
    assert!(rejected > flips.len() / 10 && harmless > 0, "{text}");
}

/// Opens and reads the checkpoint at `root` after a flip in the file `path`, and counts the effect
/// in `count`. Panics if a read gives data other than `sound` without an error or a notice, or if a
/// verification does not name the file.
fn check_flip(root: &Path, sound: &CheckpointContents, path: &Path, count: &FlipCounts, flip: &ByteFlip) {
    let flip_text = || format!("byte {} of {} by {:#x}", flip.at, path.display(), flip.mask);
    match open_external(root).and_then(|found| read_contents(&found)) {
        Ok(now) if (&now.facts, &now.tensors) == (&sound.facts, &sound.tensors) => {
            count.harmless.fetch_add(1, Relaxed);
        }
        Ok(now) => {
            assert!(now.remarks > sound.remarks, "{}: wrong data without a remark", flip_text());
            count.remarked.fetch_add(1, Relaxed);
        }
        Err(e) => {
            assert!(e.is_checkpoint_at_fault(), "{}: {e}", flip_text());
            // a verification takes as long as opening, so only every fifth error is verified
            if count.rejected.fetch_add(1, Relaxed).is_multiple_of(5) {
                let report = crate::verify_checkpoints(root).expect("a report");
                assert!(!report.is_sound(), "{}: rejected, but verify reports no problem", flip_text());
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let named = report.all_problems().any(|(_, p)| p.to_string().contains(&*name));
                // problems of `.metadata` are reported by tensor
                let other = name.starts_with("latest") || name == ".metadata";
                assert!(named || other, "{}: {report:?}", flip_text());
            }
        }
    }
}

/// Copies the tiny checkpoint `name`, and checks the flips that `flips` returns for the copy.
fn check_flips_of_tiny_checkpoint(name: &str, flips: impl Fn(&Path) -> Vec<ByteFlip>) {
    let (_dir, root) = tiny::copy_tiny_checkpoint(name);
    check_each_flip(&root, &flips(&root));
}

#[test]
fn flipped_bytes_of_deepspeed_checkpoints_are_detected() {
    for name in ["z0_tied", "z1", "z2", "z3", "accelerate_z2"] {
        check_flips_of_tiny_checkpoint(name, |root| select_random_flips(root, 2000));
    }
}

#[test]
fn flipped_bytes_of_trainer_and_fsdp_checkpoints_are_detected() {
    for name in ["trainer", "fsdp_full"] {
        check_flips_of_tiny_checkpoint(name, |root| select_random_flips(root, 2000));
    }
}

/// Checks that 400 randomly selected flips of bytes per checkpoint are detected. These checkpoints
/// have many files, and each flip takes long because all files are opened.
#[test]
fn flipped_bytes_of_universal_and_distributed_checkpoints_are_detected() {
    for name in ["universal", "dcp"] {
        check_flips_of_tiny_checkpoint(name, |root| select_random_flips(root, 400));
    }
}

/// Checks that a flip of every byte by every mask is detected, which opens about a million
/// checkpoints. The environment variable `CKPT_FLIP_KINDS` selects tiny checkpoints by name,
/// separated by commas.
#[test]
#[ignore = "takes many minutes"]
fn every_flipped_byte_of_every_tiny_checkpoint_is_detected() {
    let chosen = std::env::var("CKPT_FLIP_KINDS").ok();
    let chosen: Option<Vec<&str>> = chosen.as_deref().map(|kinds| kinds.split(',').collect());
    for kind in chosen.iter().flatten() {
        assert!(tiny::TINY_CHECKPOINTS.iter().any(|(name, _)| name == kind), "there is no checkpoint {kind}");
    }
    for (name, _) in
        tiny::TINY_CHECKPOINTS.iter().filter(|(n, _)| chosen.as_ref().is_none_or(|c| c.contains(n)))
    {
        check_flips_of_tiny_checkpoint(name, list_flips);
    }
}

/// Checks that 200 randomly selected flips of bytes per checkpoint are detected. Half of the flips
/// are in the first or last 600 bytes of a file, which describe the structure of the file.
#[test]
fn flipped_bytes_of_larger_checkpoints_are_detected() {
    for name in ["fsdp2_sharded", "z0"] {
        let dir = make_memory_dir();
        let root = dir.path().join(name);
        copy_tree(&golden_path(name), &root);
        fs::remove_file(root.join("reference.json")).expect("there");
        let mut flips = select_random_flips(&root, 200);
        let sizes: Vec<usize> = read_tree(&root).iter().map(|(_, bytes)| bytes.len()).collect();
        for flip in flips.iter_mut().step_by(2) {
            let size = sizes[flip.file];
            flip.at =
                if flip.at % 4 < 2 { flip.at % size.min(600) } else { size - 1 - flip.at % size.min(600) };
        }
        check_each_flip(&root, &flips);
    }
}
