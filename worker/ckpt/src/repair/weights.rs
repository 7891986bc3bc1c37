//! Weights as Hugging Face keeps them: a lost index from the shards' headers, lost files from the training state.
use super::{Bench, foreign, within};
use crate::checkpoint::Checkpoint;
use crate::disk::Folder;
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::formats::{deepspeed, safetensors};
use crate::gather::{GatherOptions, gather};
use crate::source::Source;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

/// Where a run of ours puts its gathered weights, beside its checkpoints.
const OURS: &str = "weights";
const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Longest index that is read, bytes.
const INDEX_MAX: u64 = 64 << 20;
/// Most shards.
const SHARDS_MAX: u64 = 100_000;
/// Weights in other forms: nothing is missing when one is there.
const OTHERS: [&str; 4] =
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.safetensors", "adapter_model.bin"];

/// The state of a folder's weights.
enum Found {
    Sound,
    /// Shards that are all there, with their tensors, without an index that fits.
    NoIndex(BTreeMap<String, String>, u64),
    /// Why they are of no use.
    Broken(String),
    None,
}

/// Rebuilds the index, or the weights themselves where DeepSpeed's state is in the folder.
pub(super) fn mend(bench: &mut Bench, folder: &str) -> Result<()> {
    let path = bench.dir.join(folder);
    let opened = Folder::open(&path)?;
    let why = match look(&opened)? {
        Found::Sound => return Ok(()),
        Found::NoIndex(map, bytes) => return add_index(bench, folder, &map, bytes),
        Found::Broken(why) => why,
        Found::None => {
            let expected = opened.has("trainer_state.json")? && opened.has("config.json")?;
            let mut other = false;
            for name in OTHERS {
                other |= opened.has(name)?;
            }
            if !expected || other {
                return Ok(());
            }
            "they are missing".into()
        }
    };
    match deepspeed::open(&path) {
        Ok(Some(_)) => gathered(bench, folder, &why),
        _ => {
            bench
                .lost
                .push(format!("weights of {}: {why}, and no DeepSpeed state has them too", path.display()));
            Ok(())
        }
    }
}

fn add_index(bench: &mut Bench, folder: &str, map: &BTreeMap<String, String>, bytes: u64) -> Result<()> {
    let index = json!({"metadata": {"total_size": bytes}, "weight_map": map});
    let text = format!("{index:#}\n");
    bench.write(&within(folder, INDEX), text.as_bytes())?;
    let said =
        format!("{}: made from the headers of the shards ({} tensors)", within(folder, INDEX), map.len());
    bench.rebuilt.push(said);
    Ok(())
}

/// The weights that a run of ours gathered at its end, where they are there no longer whole: again, from the newest
/// checkpoint. A directory without such a folder lacks nothing.
pub(super) fn mend_ours(bench: &mut Bench, newest: &str) -> Result<()> {
    if !Folder::open(&bench.dir)?.has_folder(OURS)? {
        return Ok(());
    }
    let opened = Folder::open(&bench.dir.join(OURS))?;
    match look(&opened)? {
        Found::Sound => Ok(()),
        Found::NoIndex(map, bytes) => add_index(bench, OURS, &map, bytes),
        Found::Broken(why) => from_ours(bench, newest, &why),
        Found::None => from_ours(bench, newest, "they are missing"),
    }
}

fn from_ours(bench: &mut Bench, newest: &str, why: &str) -> Result<()> {
    let checkpoint = Checkpoint::open(&bench.dir.join(newest))?;
    // as a run writes them
    put(bench, OURS, &checkpoint, Some(Dtype::BF16), &format!("from {newest}"), why)
}

/// Puts weights gathered from DeepSpeed's state into the folder.
fn gathered(bench: &mut Bench, folder: &str, why: &str) -> Result<()> {
    let Ok(state) = foreign::whole(&bench.dir.join(folder)) else { return Ok(()) };
    put(bench, folder, &state, state.extras()?.precision, "from DeepSpeed's state", why)
}

/// Puts the gathered weights of a checkpoint into the folder, in place of those that are there.
fn put(
    bench: &mut Bench,
    folder: &str,
    source: &dyn Source,
    dtype: Option<Dtype>,
    from: &str,
    why: &str,
) -> Result<()> {
    let path = bench.dir.join(folder);
    let aside = bench.aside();
    let options = GatherOptions { dtype, ..GatherOptions::default() };
    let made = gather(source, &aside.0, &options, |_, _| ())?;
    for name in
        Folder::open(&path)?.names()?.iter().filter(|n| *n == WHOLE || *n == INDEX || shard(n).is_some())
    {
        crate::disk::unlink(&path.join(name))?;
    }
    let mut names: Vec<&str> = made.files.iter().map(|f| f.name.as_str()).collect();
    if names.len() > 1 {
        names.push(INDEX);
    }
    for name in names {
        bench.take(&aside.0.join(name), &within(folder, name))?;
        bench.rebuilt.push(format!("{}: gathered {from} as {} ({why})", within(folder, name), made.dtype));
    }
    Ok(())
}

/// Number and count of `model-00001-of-00003.safetensors`.
fn shard(name: &str) -> Option<(u64, u64)> {
    let (number, count) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

fn look(folder: &Folder) -> Result<Found> {
    if folder.has(WHOLE)? {
        return Ok(match header(folder, WHOLE) {
            Ok(_) => Found::Sound,
            Err(e) => Found::Broken(e.to_string()),
        });
    }
    let shards: Vec<(String, (u64, u64))> =
        folder.names()?.into_iter().filter_map(|n| Some((n.clone(), shard(&n)?))).collect();
    let Some(&(_, (_, count))) = shards.first() else {
        return Ok(match folder.has(INDEX)? {
            true => Found::Broken("the index is there, its shards are missing".into()),
            false => Found::None,
        });
    };
    let there: Vec<u64> = shards.iter().filter(|(_, s)| s.1 == count).map(|(_, s)| s.0).collect();
    if count > SHARDS_MAX || there.len() != shards.len() || !there.iter().copied().eq(1..=count) {
        return Ok(Found::Broken(format!("{} of {count} shards are there", there.len())));
    }
    let (mut map, mut bytes) = (BTreeMap::new(), 0u64);
    for (name, _) in &shards {
        match header(folder, name) {
            Ok(header) => {
                for e in header.entries {
                    bytes = bytes.saturating_add(e.bytes.end - e.bytes.start);
                    if map.insert(e.name.clone(), name.clone()).is_some() {
                        return Ok(Found::Broken(format!("{} is in two shards", e.name)));
                    }
                }
            }
            Err(e) => return Ok(Found::Broken(e.to_string())),
        }
    }
    match indexed(folder).is_some_and(|said| said == map) {
        true => Ok(Found::Sound),
        false => Ok(Found::NoIndex(map, bytes)),
    }
}

fn header(folder: &Folder, name: &str) -> Result<safetensors::Header> {
    let (file, size) = folder.open_file(name, nix::fcntl::OFlag::empty())?;
    safetensors::read_header(size, |at, out| file.read_exact_at(out, at))
        .map_err(|why| CkptError::damaged(folder.path(), name, why))
}

/// What the index says, where there is one that can be read.
fn indexed(folder: &Folder) -> Option<BTreeMap<String, String>> {
    let text = folder.read(INDEX, INDEX_MAX).ok()?;
    let index: Value = serde_json::from_slice(&text).ok()?;
    serde_json::from_value(index.get("weight_map")?.clone()).ok()
}
