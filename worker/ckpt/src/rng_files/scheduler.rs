//! Adapts the step counter in Accelerate's `scheduler.bin`, which counts the steps of all
//! processes, to another number of processes.
//!
//! Accelerate steps a scheduler once per process, so its counter is optimizer steps × processes.
use super::encode::{PickleWriter, ZipWriter};
use crate::codec::disk::Directory;
use crate::codec::pickle::PickleView;
use crate::codec::torch_file::{TENSOR_GLOBALS, TorchFile};
use crate::error::{CkptError, DamageReason, RescaleError, Result};
use crate::format_constants::SCHEDULER_FILE;
use nix::fcntl::OFlag;
use std::os::unix::fs::FileExt;

/// Name of the file in which Accelerate stores the state of the optimizer.
const OPTIMIZER_FILE: &str = "optimizer.bin";
/// Limit on the size in bytes of a file with the state of a learning rate scheduler.
const SCHEDULER_BYTES_MAX: u64 = 16 << 20;
/// Python classes that pickles of torch's learning rate schedulers may name.
const ALLOWED_GLOBALS: &[&[&str]] = &[&["collections.Counter", "collections.OrderedDict"]];

/// The content of Accelerate's `scheduler.bin` after its adaptation to another number of processes.
pub(super) struct RescaledScheduler {
    /// Name of the file in the checkpoint directory.
    pub(super) name: &'static str,
    /// Content of the rescaled file.
    pub(super) bytes: Vec<u8>,
    /// One line for the user about the change.
    pub(super) summary: String,
}

/// Returns the content of Accelerate's `scheduler.bin` with a step counter for `world` processes
/// instead of `old`, since the counter adds up the steps of all processes. Returns `None` if the
/// file does not exist, the numbers of processes are equal, or the counter isn't optimizer steps ×
/// `old`. `done` is the number of optimizer updates. If `done` is `None`, `optimizer.bin` states
/// the number.
///
/// # Errors
/// Fails if the file is damaged, or its counter can't be rescaled.
pub(super) fn rescale_scheduler(
    directory: &Directory,
    old: u32,
    world: u32,
    done: Option<u64>,
) -> Result<Option<RescaledScheduler>> {
    if old == world || directory.file_size(SCHEDULER_FILE)?.is_none() {
        return Ok(None);
    }
    let done = match (done, directory.file_size(OPTIMIZER_FILE)?) {
        (Some(done), _) => Some(done),
        (None, Some(_)) => read_completed_steps(directory)?,
        (None, None) => return Ok(None),
    };
    let file = TorchFile::open(directory, SCHEDULER_FILE, ALLOWED_GLOBALS)?;
    let count = |key: &str| file.value().get(key).and_then(PickleView::as_count);
    let (Some(last), Some(done)) = (count("last_epoch"), done) else { return Ok(None) };
    if last == 0 || done.checked_mul(u64::from(old)) != Some(last) {
        return Ok(None);
    }
    let unsupported = |error: RescaleError| CkptError::unsupported(directory.path(), error);
    if file.value().get("_schedulers").is_some() {
        return Err(unsupported(RescaleError::SeveralSchedulers));
    }
    let overflow = || unsupported(RescaleError::Overflow { steps: done, world });
    let new = done.checked_mul(u64::from(world)).and_then(|n| i64::try_from(n).ok()).ok_or_else(overflow)?;
    let mut pickle = read_scheduler_pickle(directory, &file)?;
    for (key, before) in [("last_epoch", Some(last)), ("_step_count", count("_step_count"))] {
        // `_step_count` also counts the call at construction
        let Some(before) = before else { continue };
        let after = new + i64::try_from(before).map_err(|_| overflow())? - last as i64;
        pickle = replace_pickled_integer(&pickle, key, before, after)
            .ok_or_else(|| unsupported(RescaleError::UnknownPickle))?;
    }
    let mut zip = ZipWriter::new(&file.root);
    zip.add_member("data.pkl", &pickle, false);
    let summary = format!(
        "scheduler counter rescaled from {last} to {new} ({done} steps; Accelerate counts one per process)"
    );
    Ok(Some(RescaledScheduler { name: SCHEDULER_FILE, bytes: zip.finish(&[]), summary }))
}

/// Returns the number of optimizer steps that Accelerate's `optimizer.bin` records for its first
/// parameter. Returns `None` if the file has no step counter, or if the counter is not a whole
/// number.
fn read_completed_steps(directory: &Directory) -> Result<Option<u64>> {
    let file = TorchFile::open(directory, OPTIMIZER_FILE, &[TENSOR_GLOBALS])?;
    let first = file.value().get("state").and_then(PickleView::as_pairs).and_then(|mut p| p.next());
    let Some(step) = first.and_then(|(_, state)| state.get("step")) else { return Ok(None) };
    if let Some(n) = step.as_count() {
        return Ok(Some(n));
    }
    let damaged = |error| CkptError::damaged(directory.path(), OPTIMIZER_FILE, error);
    let Some(view) = file.parse_tensor(step).map_err(|e| damaged(DamageReason::from(e)))? else {
        return Ok(None);
    };
    let member = &file.members[view.member];
    if view.dtype != crate::tensor::Dtype::F32 || view.element_count() != 1 {
        return Ok(None);
    }
    let mut bytes = [0u8; 4];
    let (reader, _) = directory.open_file(OPTIMIZER_FILE, OFlag::empty())?;
    let at = member.data.start + 4 * view.offset;
    reader
        .read_exact_at(&mut bytes, at)
        .map_err(CkptError::io("read", &directory.path().join(OPTIMIZER_FILE)))?;
    let step = f32::from_le_bytes(bytes);
    Ok((step >= 0.0 && step.fract() == 0.0).then_some(step as u64))
}

/// Returns the bytes of the pickle that the file `scheduler.bin` contains.
///
/// # Errors
/// Fails if the file has no pickle, contains tensors, or is larger than [`SCHEDULER_BYTES_MAX`].
fn read_scheduler_pickle(directory: &Directory, file: &TorchFile) -> Result<Vec<u8>> {
    let damaged = |why: &str| CkptError::damaged(directory.path(), SCHEDULER_FILE, why);
    let pickle = file.members.iter().find(|m| m.name == format!("{}/data.pkl", file.root));
    let range = pickle.map(|m| m.data.clone()).ok_or_else(|| damaged("the file has no member data.pkl"))?;
    if file.members.iter().any(|m| m.name.starts_with(&format!("{}/data/", file.root))) {
        return Err(damaged("the file contains tensors, but a scheduler has none"));
    }
    let whole = directory.read_file(SCHEDULER_FILE, SCHEDULER_BYTES_MAX)?;
    let bytes = whole.get(range.start as usize..range.end as usize);
    bytes
        .map(<[u8]>::to_vec)
        .ok_or_else(|| CkptError::damaged(directory.path(), SCHEDULER_FILE, DamageReason::Truncated))
}

/// Returns a copy of a pickle in which the integer `before` under the dict key `key` is replaced by
/// `after`. Returns `None` if `key` does not occur exactly once, or has a different value than
/// `before`.
fn replace_pickled_integer(pickle: &[u8], key: &str, before: u64, after: i64) -> Option<Vec<u8>> {
    let mut text = PickleWriter { out: Vec::new(), storages: Vec::new() };
    text.write_text(key);
    let mut places = pickle.windows(text.out.len()).enumerate().filter(|(_, w)| *w == text.out);
    let (Some((at, _)), None) = (places.next(), places.next()) else { return None };
    let mut start = at + text.out.len();
    // skip the memo opcode that may follow the key
    start += match pickle.get(start)? {
        b'q' => 2,
        b'r' => 5,
        _ => 0,
    };
    let digits = |n: usize| pickle.get(start + 1..start + 1 + n);
    let (value, used) = match pickle.get(start)? {
        b'K' => (u64::from(*digits(1)?.first()?), 2),
        b'M' => (u64::from(u16::from_le_bytes(digits(2)?.try_into().ok()?)), 3),
        b'J' => (u64::from(u32::from_le_bytes(digits(4)?.try_into().ok()?)), 5),
        _ => return None,
    };
    if value != before {
        return None;
    }
    let mut number = PickleWriter { out: Vec::new(), storages: Vec::new() };
    number.write_int(after);
    Some([&pickle[..start], number.out.as_slice(), &pickle[start + used..]].concat())
}
