//! Torch's distributed checkpoints (DCP), as FSDP's sharded states are kept: `.metadata` and `__RANK_N.distcp`.
pub(crate) mod metadata;
mod placing;

use self::metadata::{Chunk, Content, Item, Place};
use self::placing::{Kind, Names};
use crate::catalog::{Role, elements};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::external::Entry;
use crate::external::draft::{Draft, GLOBALS, role_of, some, whole_step};
use crate::external::store::{Part, StoredFile};
use crate::formats::torch_file::{TensorView, TorchFile};
use crate::formats::weights::number;
use crate::state::Group;
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;

/// Name of the file that says what is in the folder.
pub(crate) const METADATA: &str = ".metadata";
/// Most pieces of all tensors together, once cut into runs of neighbours.
const PARTS_MAX: usize = 8 << 20;

/// What was read of an item's place.
enum Read {
    Tensor(usize, TensorView),
    Value(Json),
    /// Why it wasn't read.
    Not(String),
}

/// Adds the tensors of the folder `inside` of the draft's (empty: the draft's own).
pub(crate) fn add(draft: &mut Draft, inside: &str) -> Result<()> {
    let within = |name: &str| if inside.is_empty() { name.to_owned() } else { format!("{inside}/{name}") };
    let name = within(METADATA);
    let input = draft.folder.read(&name, crate::pickle::BYTES_MAX)?;
    let items = metadata::parse(&input).map_err(|why| draft.damaged(&name, why))?;
    let names = Names::of(&items);
    let mut read = read_all(draft, &items, within)?;
    let mut found = Found::default();
    for item in &items {
        found.item(draft, &name, names.kind(item), item, &mut read)?;
    }
    let ranks: BTreeSet<u32> = places(&items).filter_map(|p| rank_of(&p.file)).collect();
    if let Some(&last) = ranks.last() {
        draft.facts.world = draft.facts.world.max(Some(last + 1));
    }
    if !found.unknown.is_empty() {
        let unknown: Vec<String> = found.unknown.iter().cloned().collect();
        draft.notice(format!("states of the optimizer that aren't read: {}", some(&unknown)));
    }
    for line in std::mem::take(&mut found.notices) {
        draft.notice(line);
    }
    let groups = found.groups();
    if !groups.is_empty() {
        draft.facts.groups = groups;
    }
    Ok(())
}

/// The rank of `__3_0.distcp`.
fn rank_of(file: &str) -> Option<u32> {
    file.strip_prefix("__")?.split('_').next()?.parse().ok()
}

fn places(items: &[Item]) -> impl Iterator<Item = &Place> {
    items.iter().flat_map(|item| match &item.content {
        Content::Bytes(place) => vec![place],
        Content::Tensor { chunks, .. } => chunks.iter().map(|c| &c.place).collect(),
    })
}

/// Opens each file once and reads what every item in it is; tensors' own bytes are not read.
fn read_all(
    draft: &mut Draft,
    items: &[Item],
    within: impl Fn(&str) -> String,
) -> Result<HashMap<Place, Read>> {
    let mut all: Vec<&Place> = places(items).collect();
    all.sort();
    let mut read = HashMap::new();
    let mut absent = Vec::new();
    for of_file in all.chunk_by(|a, b| a.file == b.file) {
        let name = within(&of_file[0].file);
        if draft.folder.size_of(&name)?.is_none() {
            absent.push(name);
            continue;
        }
        let (file, size) = draft.folder.open_file(&name, nix::fcntl::OFlag::empty())?;
        let mut stored = StoredFile::new(draft.folder.clone(), name.clone(), size);
        let index = draft.store.files.len();
        for place in of_file {
            let what = read_one(draft, &file, size, index, &name, place, &mut stored)?;
            read.insert((*place).clone(), what);
        }
        draft.store.files.push(stored);
    }
    match absent.is_empty() {
        true => Ok(read),
        false => Err(draft.missing(some(&absent))),
    }
}

fn read_one(
    draft: &Draft,
    file: &File,
    size: u64,
    index: usize,
    name: &str,
    place: &Place,
    stored: &mut StoredFile,
) -> Result<Read> {
    let Some(end) = place.offset.checked_add(place.length).filter(|&end| end <= size) else {
        let (offset, length) = (place.offset, place.length);
        let why = format!("it is cut short: {length} bytes at {offset} should be in it, it has {size}");
        return Err(draft.damaged(name, why));
    };
    let at = place.offset;
    let torch = match TorchFile::within(file, at..end, GLOBALS) {
        Ok(torch) => torch,
        // a value of a class that isn't known does no harm; what can't be read at all does
        Err(why) if why.contains("names ") && why.contains("refused") => return Ok(Read::Not(why)),
        Err(why) => return Err(draft.damaged(name, format!("its item at {at}: {why}"))),
    };
    let tensor = torch.tensor(torch.value());
    match tensor.map_err(|why| draft.damaged(name, format!("its item at {at}: {why}")))? {
        Some(mut view) => {
            view.member += stored.add(torch.members);
            Ok(Read::Tensor(index, view))
        }
        None => {
            let value = torch.value();
            let json = number(value).and_then(serde_json::Number::from_f64).map(Json::Number);
            let whole = value.int().map(Json::from);
            Ok(Read::Value(whole.or(json).unwrap_or_else(|| value.json())))
        }
    }
}

/// What the items say.
#[derive(Default)]
struct Found {
    /// Per group as it is called (a number, or the name of its one parameter): its hyper-parameters.
    hyper: BTreeMap<(Option<u64>, String), Map<String, Json>>,
    unknown: BTreeSet<String>,
    notices: Vec<String>,
    parts: usize,
}

impl Found {
    fn item(
        &mut self,
        draft: &mut Draft,
        metadata: &str,
        kind: Kind,
        item: &Item,
        read: &mut HashMap<Place, Read>,
    ) -> Result<()> {
        match &item.content {
            Content::Bytes(place) => {
                self.value(kind, item, read.remove(place));
                Ok(())
            }
            Content::Tensor { dtype, shape, chunks } => {
                let damaged =
                    |draft: &Draft, why: String| draft.damaged(metadata, format!("{}: {why}", item.key));
                let parts = self.parts(*dtype, shape, chunks, read).map_err(|why| damaged(draft, why))?;
                self.tensor(draft, metadata, kind, *dtype, shape, parts)
            }
        }
    }

    fn value(&mut self, kind: Kind, item: &Item, read: Option<Read>) {
        match (kind, read) {
            (Kind::Group(group, key), Some(Read::Value(value))) => {
                self.hyper.entry((group.parse().ok(), group)).or_default().insert(key, value);
            }
            (Kind::Group(..) | Kind::State(..), Some(Read::Not(why))) => {
                self.notices.push(format!("{} isn't read: {why}", item.key));
            }
            _ => {}
        }
    }

    fn tensor(
        &mut self,
        draft: &mut Draft,
        metadata: &str,
        kind: Kind,
        dtype: Dtype,
        shape: &[u64],
        parts: Vec<Part>,
    ) -> Result<()> {
        let scalar = |draft: &Draft| match parts.as_slice() {
            [part] if elements(shape) == Some(1) => draft.store.number(part, dtype).map(f64::from).map(Some),
            _ => Ok(None),
        };
        match kind {
            Kind::State(name, key) if key == "step" => {
                if let Some(step) = scalar(draft)? {
                    let step =
                        whole_step(step).map_err(|why| draft.damaged(metadata, format!("{name}: {why}")))?;
                    draft.facts.steps.insert(name, step);
                }
            }
            Kind::Group(group, key) => {
                let value = scalar(draft)?.and_then(serde_json::Number::from_f64).map(Json::Number);
                let hyper = self.hyper.entry((group.parse().ok(), group)).or_default();
                hyper.insert(key, value.unwrap_or(Json::Null));
            }
            Kind::State(name, key) => match role_of(&key) {
                Some(role) => draft.entries.push(Entry::of(&name, role, dtype, shape.to_vec(), parts)),
                None => {
                    self.unknown.insert(key);
                }
            },
            Kind::Weight(name) => {
                let trained = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
                let role = if trained { Role::Weight } else { Role::Buffer };
                draft.entries.push(Entry::of(&name, role, dtype, shape.to_vec(), parts));
            }
            Kind::Other => {}
        }
        Ok(())
    }

    /// The runs of neighbours that the chunks are.
    fn parts(
        &mut self,
        dtype: Dtype,
        shape: &[u64],
        chunks: &[Chunk],
        read: &mut HashMap<Place, Read>,
    ) -> std::result::Result<Vec<Part>, String> {
        let mut parts = Vec::new();
        for chunk in chunks {
            let (file, view) = match read.remove(&chunk.place) {
                Some(Read::Tensor(file, view)) => (file, view),
                Some(Read::Not(why)) => return Err(why),
                _ => {
                    return Err(format!(
                        "the item at {} of {} is no tensor",
                        chunk.place.offset, chunk.place.file
                    ));
                }
            };
            if view.shape != chunk.sizes || view.dtype != dtype {
                return Err(format!(
                    "its chunk at {:?} should be {dtype} {:?}, {} has {} {:?}",
                    chunk.offsets, chunk.sizes, chunk.place.file, view.dtype, view.shape
                ));
            }
            for (start, taken) in runs(shape, chunk).ok_or("it has an impossible shape")? {
                parts.push(Part::of(file, &view, taken, start));
                self.parts += 1;
                if self.parts > PARTS_MAX {
                    return Err(format!("it is cut into more than {PARTS_MAX} pieces"));
                }
            }
        }
        parts.sort_by_key(|p| p.start);
        Ok(parts)
    }

    /// The groups. Those that are called by the names of their parameters are put together when they are alike.
    fn groups(self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for ((number, called), mut hyper) in self.hyper {
            let names = match hyper.remove("params") {
                Some(Json::Array(names)) => {
                    names.iter().filter_map(|n| n.as_str().map(str::to_owned)).collect()
                }
                _ => Vec::new(),
            };
            match (number, groups.iter_mut().find(|g| g.hyper == hyper)) {
                (None, Some(alike)) => alike.names.push(called),
                (None, None) => groups.push(Group { hyper, names: vec![called] }),
                (Some(_), _) => groups.push(Group { hyper, names }),
            }
        }
        groups
    }
}

/// First element in the tensor and elements of the chunk, for each run of neighbours in a box of `shape`.
fn runs(shape: &[u64], chunk: &Chunk) -> Option<impl Iterator<Item = (u64, std::ops::Range<u64>)>> {
    let total = elements(&chunk.sizes)?;
    elements(shape)?;
    // dimensions from here on are whole, so a run goes through them
    let whole =
        (0..shape.len()).rev().take_while(|&d| chunk.sizes[d] == shape[d]).last().unwrap_or(shape.len());
    let cut = whole.saturating_sub(1);
    let run: u64 = chunk.sizes.get(cut..).unwrap_or(&[]).iter().product();
    let strides: Vec<u64> = (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect();
    let (sizes, offsets) = (chunk.sizes.clone(), chunk.offsets.clone());
    let count = if total == 0 { 0 } else { total / run };
    Some((0..count).map(move |i| {
        let mut start: u64 = offsets.iter().zip(&strides).map(|(o, s)| o * s).sum();
        let mut rest = i;
        for d in (0..cut).rev() {
            start += rest % sizes[d] * strides[d];
            rest /= sizes[d];
        }
        (start, i * run..(i + 1) * run)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every element of a box is where indexing finds it.
        #[test]
        fn runs_are_what_indexing_gives(dims in proptest::collection::vec((1u64..5, 0u64..4, 0u64..4), 0..4)) {
            let sizes: Vec<u64> = dims.iter().map(|d| d.0).collect();
            let offsets: Vec<u64> = dims.iter().map(|d| d.1).collect();
            let shape: Vec<u64> = dims.iter().map(|d| d.0 + d.1 + d.2).collect();
            let place = Place { file: String::new(), offset: 0, length: 0 };
            let chunk = Chunk { offsets: offsets.clone(), sizes: sizes.clone(), place };
            let mut found = vec![None; sizes.iter().product::<u64>() as usize];
            for (start, taken) in runs(&shape, &chunk).expect("possible") {
                for (n, i) in taken.enumerate() {
                    found[i as usize] = Some(start + n as u64);
                }
            }
            for (i, at) in found.into_iter().enumerate() {
                let (mut rest, mut expected, mut stride) = (i as u64, 0, 1);
                for d in (0..shape.len()).rev() {
                    expected += (offsets[d] + rest % sizes[d]) * stride;
                    rest /= sizes[d];
                    stride *= shape[d];
                }
                prop_assert_eq!(at, Some(expected));
            }
        }
    }
}
