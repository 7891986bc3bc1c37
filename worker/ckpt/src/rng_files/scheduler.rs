//! Accelerate's `scheduler.bin`: Accelerate steps a scheduler once per process, so its count is of steps × processes.
use super::write::{Pickle, Zip};
use crate::disk::Folder;
use crate::error::{CkptError, Result};
use crate::formats::torch_file::{TENSORS, TorchFile};
use crate::pickle::View;
use nix::fcntl::OFlag;
use std::os::unix::fs::FileExt;

const NAME: &str = "scheduler.bin";
const OPTIMIZER: &str = "optimizer.bin";
/// Largest scheduler that is read, bytes.
const SCHEDULER_MAX: u64 = 16 << 20;
/// What schedulers of torch hold beside plain values.
const GLOBALS: &[&[&str]] = &[&["collections.Counter", "collections.OrderedDict"]];

/// The file for another number of processes.
pub(super) struct Rescaled {
    pub(super) name: &'static str,
    pub(super) bytes: Vec<u8>,
    /// What was changed.
    pub(super) line: String,
}

/// The file as `world` processes need it; `None` when there is none, or it wasn't stepped once per process. `done`: updates
/// of the optimizer, where its state isn't in a file of Accelerate's own.
pub(super) fn rescaled(folder: &Folder, old: u32, world: u32, done: Option<u64>) -> Result<Option<Rescaled>> {
    if old == world || folder.size_of(NAME)?.is_none() {
        return Ok(None);
    }
    let done = match (done, folder.size_of(OPTIMIZER)?) {
        (Some(done), _) => Some(done),
        (None, Some(_)) => steps_done(folder)?,
        (None, None) => return Ok(None),
    };
    let file = TorchFile::open(folder, NAME, GLOBALS)?;
    let count = |key: &str| file.value().get(key).and_then(View::count);
    let (Some(last), Some(done)) = (count("last_epoch"), done) else { return Ok(None) };
    if last == 0 || done.checked_mul(u64::from(old)) != Some(last) {
        return Ok(None);
    }
    let wrong = |why: &str| CkptError::Unsupported {
        path: folder.path().to_owned(),
        what: format!("{NAME} counts {done} steps once for each of {old} processes and {why}"),
    };
    if file.value().get("_schedulers").is_some() {
        return Err(wrong("is made of several schedulers, which can't be rescaled"));
    }
    let overflow = || wrong("its count can't be rescaled");
    let new = done.checked_mul(u64::from(world)).and_then(|n| i64::try_from(n).ok()).ok_or_else(overflow)?;
    let mut pickle = bytes_of(folder, &file)?;
    for (key, before) in [("last_epoch", Some(last)), ("_step_count", count("_step_count"))] {
        // `_step_count` counts the call at the beginning as well
        let Some(before) = before else { continue };
        let after = new + i64::try_from(before).map_err(|_| overflow())? - last as i64;
        pickle =
            replaced(&pickle, key, before, after).ok_or_else(|| wrong("is written in an unknown way"))?;
    }
    let mut zip = Zip::new(&file.root);
    zip.add("data.pkl", &pickle, false);
    let line = format!(
        "the scheduler, which Accelerate steps once per process, stands at {new} instead of {last} ({done} steps)"
    );
    Ok(Some(Rescaled { name: NAME, bytes: zip.end(&[]), line }))
}

/// Steps of the first parameter in `optimizer.bin`.
fn steps_done(folder: &Folder) -> Result<Option<u64>> {
    let file = TorchFile::open(folder, OPTIMIZER, &[TENSORS])?;
    let first = file.value().get("state").and_then(View::pairs).and_then(|mut p| p.next());
    let Some(step) = first.and_then(|(_, state)| state.get("step")) else { return Ok(None) };
    if let Some(n) = step.count() {
        return Ok(Some(n));
    }
    let damaged = |why: String| CkptError::damaged(folder.path(), OPTIMIZER, why);
    let Some(view) = file.tensor(step).map_err(damaged)? else { return Ok(None) };
    let member = &file.members[view.member];
    if view.dtype != crate::dtype::Dtype::F32 || view.elements() != 1 {
        return Ok(None);
    }
    let mut bytes = [0u8; 4];
    let (reader, _) = folder.open_file(OPTIMIZER, OFlag::empty())?;
    let at = member.data.start + 4 * view.offset;
    reader.read_exact_at(&mut bytes, at).map_err(CkptError::io("read", &folder.path().join(OPTIMIZER)))?;
    let step = f32::from_le_bytes(bytes);
    Ok((step >= 0.0 && step.fract() == 0.0).then_some(step as u64))
}

/// The pickle of a file without storages.
fn bytes_of(folder: &Folder, file: &TorchFile) -> Result<Vec<u8>> {
    let damaged = |why: &str| CkptError::damaged(folder.path(), NAME, why);
    let pickle = file.members.iter().find(|m| m.name == format!("{}/data.pkl", file.root));
    let range = pickle.map(|m| m.data.clone()).ok_or_else(|| damaged("it has no data.pkl"))?;
    if file.members.iter().any(|m| m.name.starts_with(&format!("{}/data/", file.root))) {
        return Err(damaged("it holds tensors, which schedulers don't"));
    }
    let whole = folder.read(NAME, SCHEDULER_MAX)?;
    let bytes = whole.get(range.start as usize..range.end as usize);
    bytes.map(<[u8]>::to_vec).ok_or_else(|| damaged("it is cut short"))
}

/// The pickle with another number under `key`, which stands there once, with `before` under it.
fn replaced(pickle: &[u8], key: &str, before: u64, after: i64) -> Option<Vec<u8>> {
    let mut text = Pickle { out: Vec::new(), storages: Vec::new() };
    text.text(key);
    let mut places = pickle.windows(text.out.len()).enumerate().filter(|(_, w)| *w == text.out);
    let (Some((at, _)), None) = (places.next(), places.next()) else { return None };
    let mut start = at + text.out.len();
    // the key may be memorised
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
    let mut number = Pickle { out: Vec::new(), storages: Vec::new() };
    number.int(after);
    Some([&pickle[..start], number.out.as_slice(), &pickle[start + used..]].concat())
}
