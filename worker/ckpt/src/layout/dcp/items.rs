//! Reads the tensors and values of a torch distributed checkpoint (DCP).
use super::item_kind::{DcpItemKind, ItemKeyParser};
use super::metadata::{ItemContent, ItemMetadata, StorageLocation, TensorChunk, parse_metadata};
use super::tensor_value::{UnusableValue, read_tensor_value};
use crate::catalog::{
    ALLOWED_GLOBALS, ExternalCheckpointBuilder, ExternalTensor, ParamGroupInfo, StoredFile, TensorPart,
    convert_step_to_integer,
};
use crate::codec::pickle::PickleView;
use crate::codec::torch_file::{TensorView, TorchFile};
use crate::error::{DcpError, MissingPart, Result, TorchFileError};
use crate::format_constants::HYPER_PARAMETER_VALUES_MAX;
use crate::layout::hf::weights::read_pickled_number;
use crate::tensor::{Dtype, TensorRole, count_elements};
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;

/// Name of the file that lists the contents of a torch distributed checkpoint (DCP).
pub(crate) const METADATA_FILE: &str = ".metadata";
/// Maximum number of chunks, summed over all tensors, into which a torch distributed checkpoint may
/// divide its tensors.
const STORED_PARTS_MAX: usize = 8 << 20;

/// The content of one entry in a data file of a torch distributed checkpoint: a tensor, or another
/// value as JSON.
enum DecodedItem {
    /// A tensor, with the index of its file in `StoredFiles` and its view.
    Tensor(usize, TensorView),
    /// A value other than a tensor, converted to JSON.
    Value(Json),
    /// A list or tuple that contains tensors.
    TensorList,
    /// A value of a class that is not allowed. The error names the class.
    Forbidden(TorchFileError),
}

/// Reads the tensors, steps and hyper-parameters of the torch distributed checkpoint (DCP) in the
/// subdirectory `inside` of the checkpoint directory. An empty `inside` stands for the directory
/// itself.
pub(crate) fn add_dcp_directory(builder: &mut ExternalCheckpointBuilder, inside: &str) -> Result<()> {
    let within = |name: &str| if inside.is_empty() { name.to_owned() } else { format!("{inside}/{name}") };
    let name = within(METADATA_FILE);
    let input = builder.directory.read_file(&name, crate::format_constants::PICKLE_BYTES_MAX)?;
    let items = parse_metadata(&input).map_err(|error| builder.damaged_file_error(&name, error))?;
    let names = ItemKeyParser::new(&items);
    let mut read = read_all_items(builder, &items, within)?;
    let mut found = ItemCollector::default();
    for item in &items {
        found.collect_item(builder, &name, names.parse_item_kind(item), item, &mut read)?;
    }
    let ranks: BTreeSet<u32> =
        list_storage_locations(&items).filter_map(|p| parse_rank_in_name(&p.file)).collect();
    if let Some(&last) = ranks.last() {
        builder.facts.state.world = builder.facts.state.world.max(Some(last + 1));
    }
    builder.add_unknown_states_notice(&found.unknown);
    builder.facts.notices.append(&mut found.notices);
    let groups = found.into_param_groups();
    if !groups.is_empty() {
        builder.facts.state.groups = groups;
    }
    Ok(())
}

/// Parses the rank in the name of a data file such as `__3_0.distcp`. Returns `None` for other
/// names.
fn parse_rank_in_name(file: &str) -> Option<u32> {
    file.strip_prefix("__")?.split('_').next()?.parse().ok()
}

/// Iterates over the places in the data files of a torch distributed checkpoint where the values
/// and the parts of tensors are stored.
fn list_storage_locations(items: &[ItemMetadata]) -> impl Iterator<Item = &StorageLocation> {
    items.iter().flat_map(|item| match &item.content {
        ItemContent::Bytes(location) => vec![location],
        ItemContent::Tensor { chunks, .. } => chunks.iter().map(|c| &c.location).collect(),
    })
}

/// Reads all values of a torch distributed checkpoint, and the positions of its tensors, from its
/// data files, each of which is opened once. Adds the files to the builder. `within(name)` must
/// return the path of a file in the builder's directory.
///
/// # Errors
/// Fails if a file is missing (the error names all missing files) or damaged.
fn read_all_items(
    builder: &mut ExternalCheckpointBuilder,
    items: &[ItemMetadata],
    within: impl Fn(&str) -> String,
) -> Result<HashMap<StorageLocation, DecodedItem>> {
    let mut sorted: Vec<&StorageLocation> = list_storage_locations(items).collect();
    sorted.sort_unstable();
    let (mut read, mut absent, mut values_left) = (HashMap::new(), Vec::new(), HYPER_PARAMETER_VALUES_MAX);
    for in_file in sorted.chunk_by(|a, b| a.file == b.file) {
        let name = within(&in_file[0].file);
        if builder.directory.file_size(&name)?.is_none() {
            absent.push(name);
            continue;
        }
        let (file, size) = builder.directory.open_file(&name, nix::fcntl::OFlag::empty())?;
        let stored = StoredFile::new(builder.directory.clone(), name, size);
        let index = builder.store.files.len();
        let mut reader = ItemReader { builder, file, index, stored, values_left };
        for location in in_file {
            read.insert((*location).clone(), reader.read_item(location)?);
        }
        let ItemReader { stored, values_left: left, .. } = reader;
        values_left = left;
        builder.store.files.push(stored);
    }
    match absent.is_empty() {
        true => Ok(read),
        false => Err(builder.missing_part_error(MissingPart::Files(absent))),
    }
}

/// Reads the entries of a torch distributed checkpoint that one data file stores.
struct ItemReader<'a> {
    builder: &'a ExternalCheckpointBuilder,
    file: File,
    /// Index that the file gets in `StoredFiles`.
    index: usize,
    /// The file, with the zip members of the tensors that were read.
    stored: StoredFile,
    /// Number of values that may still be converted to JSON, in all files together.
    values_left: usize,
}

impl ItemReader<'_> {
    /// Reads one entry of a torch distributed checkpoint at `location` in the data file: a value,
    /// or the description of a tensor without its data. Adds the zip members of a tensor to the
    /// stored file.
    fn read_item(&mut self, location: &StorageLocation) -> Result<DecodedItem> {
        let size = self.stored.size;
        let damaged = |error: DcpError| self.builder.damaged_file_error(&self.stored.name, error);
        let Some(end) = location.offset.checked_add(location.length).filter(|&end| end <= size) else {
            let (offset, length) = (location.offset, location.length);
            return Err(damaged(DcpError::ItemTruncated { offset, length, size }));
        };
        let torch = match TorchFile::open_range(&self.file, location.offset..end, ALLOWED_GLOBALS) {
            Ok(torch) => torch,
            // a value of an unknown class is ignored, but an unreadable item is damage
            Err(error) if error.is_forbidden_global() => return Ok(DecodedItem::Forbidden(error)),
            Err(error) => return Err(damaged(location.wrap_read_error(error))),
        };
        let value = torch.value();
        if let Some(mut view) =
            torch.parse_tensor(value).map_err(|error| damaged(location.wrap_read_error(error)))?
        {
            view.member += self.stored.add_spans(torch.members);
            return Ok(DecodedItem::Tensor(self.index, view));
        }
        let is_tensor = |item: PickleView<'_>| !matches!(torch.parse_tensor(item), Ok(None));
        if value.as_items().is_some_and(|items| items.iter().any(is_tensor)) {
            return Ok(DecodedItem::TensorList);
        }
        let number = read_pickled_number(value).and_then(serde_json::Number::from_f64).map(Json::Number);
        if let Some(number) = value.as_int().map(Json::from).or(number) {
            return Ok(DecodedItem::Value(number));
        }
        let json = value.to_json_limited(&mut self.values_left);
        match self.values_left {
            0 => Err(self
                .builder
                .damaged_file_error(&self.stored.name, DcpError::TooManyValues(HYPER_PARAMETER_VALUES_MAX))),
            _ => Ok(DecodedItem::Value(json)),
        }
    }
}

/// Collects the tensors, steps and hyper-parameters of a torch distributed checkpoint from its
/// entries.
#[derive(Default)]
struct ItemCollector {
    /// Hyper-parameters of each parameter group. The key is the number of the group, if its name is
    /// a number, and the name. Groups of a single parameter have the parameter's name.
    hyper: BTreeMap<(Option<u64>, String), Map<String, Json>>,
    /// Keys of unknown optimizer states, which are ignored.
    unknown: BTreeSet<String>,
    notices: Vec<String>,
    /// Number of runs of consecutive elements so far, limited to [`STORED_PARTS_MAX`].
    part_count: usize,
}

impl ItemCollector {
    /// Adds one entry of a torch distributed checkpoint, a tensor or another value, to the contents
    /// that are collected for the opened checkpoint. `metadata` is the name of the `.metadata`
    /// file, for errors.
    fn collect_item(
        &mut self,
        builder: &mut ExternalCheckpointBuilder,
        metadata: &str,
        kind: DcpItemKind,
        item: &ItemMetadata,
        read: &mut HashMap<StorageLocation, DecodedItem>,
    ) -> Result<()> {
        match &item.content {
            ItemContent::Bytes(location) => {
                self.collect_value(kind, item, read.remove(location));
                Ok(())
            }
            ItemContent::Tensor { dtype, shape, chunks } => {
                let parts = self.split_chunks_into_runs(&item.key, *dtype, shape, chunks, read);
                let parts = parts.map_err(|error| builder.damaged_file_error(metadata, error))?;
                self.collect_tensor(builder, metadata, (item, kind), (*dtype, shape), parts)
            }
        }
    }

    /// Records the value of an entry of a torch distributed checkpoint if it is a hyper-parameter
    /// of the optimizer, and ignores other values. Adds a notice for a hyper-parameter or optimizer
    /// state of a class that is not allowed, and for a hyper-parameter that contains tensors.
    fn collect_value(&mut self, kind: DcpItemKind, item: &ItemMetadata, read: Option<DecodedItem>) {
        match (kind, read) {
            (DcpItemKind::Group(group, key), Some(DecodedItem::Value(value))) => {
                self.hyper.entry((group.parse().ok(), group)).or_default().insert(key, value);
            }
            (DcpItemKind::Group(..) | DcpItemKind::State(..), Some(DecodedItem::Forbidden(error))) => {
                self.notices.push(format!("ignoring {}: {error}", item.key));
            }
            (DcpItemKind::Group(..), Some(DecodedItem::TensorList)) => {
                self.notices.push(format!("ignoring {}: a list of tensors", item.key));
            }
            _ => {}
        }
    }

    /// Adds a tensor of a torch distributed checkpoint to the list of tensors, unless it holds a
    /// step or a hyper-parameter of the optimizer. A hyper-parameter of several elements becomes a
    /// list of numbers. Adds a notice for a step or hyper-parameter that is no number or list.
    fn collect_tensor(
        &mut self,
        builder: &mut ExternalCheckpointBuilder,
        metadata: &str,
        (item, kind): (&ItemMetadata, DcpItemKind),
        (dtype, shape): (Dtype, &[u64]),
        parts: Vec<TensorPart>,
    ) -> Result<()> {
        match kind {
            DcpItemKind::State(name, key) if key == "step" => {
                let value = read_tensor_value(builder, dtype, shape, &parts)?;
                let step = value.and_then(|value| value.as_f64().ok_or(UnusableValue::StepNotANumber(value)));
                match step {
                    Ok(step) => {
                        let step = convert_step_to_integer(step).map_err(|error| {
                            builder.damaged_file_error(metadata, DcpError::Step { name: name.clone(), error })
                        })?;
                        builder.facts.state.steps.insert(name, step);
                    }
                    Err(reason) => self.notices.push(format!("ignoring {}: {reason}", item.key)),
                }
            }
            DcpItemKind::Group(group, key) => match read_tensor_value(builder, dtype, shape, &parts)? {
                Ok(value) => {
                    self.hyper.entry((group.parse().ok(), group)).or_default().insert(key, value);
                }
                Err(reason) => self.notices.push(format!("ignoring {}: {reason}", item.key)),
            },
            DcpItemKind::State(name, key) => match TensorRole::from_torch_key(&key) {
                Some(role) => {
                    builder.entries.push(ExternalTensor::from_parts(&name, role, dtype, shape, parts));
                }
                None => drop(self.unknown.insert(key)),
            },
            DcpItemKind::Weight(name) => {
                let trained = matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
                let role = if trained { TensorRole::Weight } else { TensorRole::Buffer };
                builder.entries.push(ExternalTensor::from_parts(&name, role, dtype, shape, parts));
            }
            DcpItemKind::Other => {}
        }
        Ok(())
    }

    /// Divides the rectangular chunks of a tensor into ranges of consecutive row-major elements,
    /// and sorts the ranges by their first element.
    ///
    /// # Errors
    /// Fails if a chunk is not a tensor or differs from its description, or if all tensors together
    /// have more than [`STORED_PARTS_MAX`] runs.
    fn split_chunks_into_runs(
        &mut self,
        key: &str,
        dtype: Dtype,
        shape: &[u64],
        chunks: &[TensorChunk],
        read: &mut HashMap<StorageLocation, DecodedItem>,
    ) -> std::result::Result<Vec<TensorPart>, DcpError> {
        let mut parts = Vec::new();
        for chunk in chunks {
            let (file, view) = match read.remove(&chunk.location) {
                Some(DecodedItem::Tensor(file, view)) => (file, view),
                Some(DecodedItem::Forbidden(error)) => return Err(chunk.location.wrap_read_error(error)),
                _ => {
                    let StorageLocation { file, offset, .. } = chunk.location.clone();
                    return Err(DcpError::NotATensor { key: key.to_owned(), file, offset });
                }
            };
            if view.shape != chunk.sizes || view.dtype != dtype {
                return Err(DcpError::ChunkMismatch {
                    key: key.to_owned(),
                    offsets: chunk.offsets.clone(),
                    expected_dtype: dtype,
                    expected_shape: chunk.sizes.clone(),
                    file: chunk.location.file.clone(),
                    dtype: view.dtype,
                    shape: view.shape,
                });
            }
            let impossible = || DcpError::ImpossibleShape(key.to_owned());
            let (count, runs) = compute_chunk_runs(shape, chunk).ok_or_else(impossible)?;
            self.part_count = self.part_count.saturating_add(usize::try_from(count).unwrap_or(usize::MAX));
            if self.part_count > STORED_PARTS_MAX {
                return Err(DcpError::TooManyRuns { key: key.to_owned(), limit: STORED_PARTS_MAX });
            }
            let whole = TensorPart::new(file, &view, 0..view.element_count(), 0);
            parts.reserve_exact(count as usize);
            parts.extend(runs.map(|(start, taken)| whole.slice_for_tensor(taken, start)));
        }
        parts.sort_by_key(|p| p.start);
        Ok(parts)
    }

    /// Builds the optimizer's parameter groups from the hyper-parameters that were collected from
    /// the entries of a torch distributed checkpoint. Groups of a single named parameter are merged
    /// if their hyper-parameters are equal.
    fn into_param_groups(self) -> Vec<ParamGroupInfo> {
        let mut groups: Vec<ParamGroupInfo> = Vec::new();
        // the first group with these hyper-parameters, as JSON text
        let mut places: HashMap<String, usize> = HashMap::new();
        for ((number, called), hyper) in self.hyper {
            let mut hyper = join_list_items(hyper);
            let names = match hyper.remove("params") {
                Some(Json::Array(names)) => {
                    names.iter().filter_map(|n| n.as_str().map(str::to_owned)).collect()
                }
                _ => Vec::new(),
            };
            let place = *places.entry(Json::Object(hyper.clone()).to_string()).or_insert(groups.len());
            match (number, groups.get_mut(place)) {
                (None, Some(alike)) => alike.names.push(called),
                (None, None) => groups.push(ParamGroupInfo { hyper, names: vec![called] }),
                (Some(_), _) => groups.push(ParamGroupInfo { hyper, names }),
            }
        }
        groups
    }
}

/// Joins the items of lists, which torch stores as separate entries `betas.0`, `betas.1` and so on
/// if the list contains a tensor. The joined list has the name that precedes the numbers. Returns
/// the hyper-parameters with the lists.
fn join_list_items(hyper: Map<String, Json>) -> Map<String, Json> {
    let mut lists: BTreeMap<String, BTreeMap<usize, Json>> = BTreeMap::new();
    let mut joined = Map::new();
    for (key, value) in hyper {
        match key.rsplit_once('.').and_then(|(name, number)| Some((name.to_owned(), number.parse().ok()?))) {
            Some((name, number)) => drop(lists.entry(name).or_default().insert(number, value)),
            None => drop(joined.insert(key, value)),
        }
    }
    for (name, items) in lists {
        joined.insert(name, items.into_values().collect());
    }
    joined
}

/// Divides a rectangular part (`chunk`) of a tensor with the shape `shape` into runs of consecutive
/// elements of the tensor. Returns the number of runs and the runs. Each run is the index of its
/// first element in the tensor, and its range of elements in the chunk. Returns `None` if the
/// number of elements overflows.
fn compute_chunk_runs(
    shape: &[u64],
    chunk: &TensorChunk,
) -> Option<(u64, impl Iterator<Item = (u64, Range<u64>)>)> {
    let total = count_elements(&chunk.sizes)?;
    count_elements(shape)?;
    // trailing dimensions that the chunk covers completely belong to one run
    let covered_from =
        (0..shape.len()).rev().take_while(|&d| chunk.sizes[d] == shape[d]).last().unwrap_or(shape.len());
    let split_dims = covered_from.saturating_sub(1);
    let run: u64 = chunk.sizes.get(split_dims..).unwrap_or(&[]).iter().product();
    let strides: Vec<u64> = (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect();
    let (sizes, offsets) = (chunk.sizes.clone(), chunk.offsets.clone());
    let count = if total == 0 { 0 } else { total / run };
    let runs = (0..count).map(move |i| {
        let mut start: u64 = offsets.iter().zip(&strides).map(|(o, s)| o * s).sum();
        let mut rest = i;
        for d in (0..split_dims).rev() {
            start += rest % sizes[d] * strides[d];
            rest /= sizes[d];
        }
        (start, i * run..(i + 1) * run)
    });
    Some((count, runs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Checks that dividing a rectangular part of a tensor into runs puts every element where
        /// multi-dimensional indexing does.
        #[test]
        fn runs_equal_multi_dimensional_indexing(dims in proptest::collection::vec((1u64..5, 0u64..4, 0u64..4), 0..4)) {
            let sizes: Vec<u64> = dims.iter().map(|d| d.0).collect();
            let offsets: Vec<u64> = dims.iter().map(|d| d.1).collect();
            let shape: Vec<u64> = dims.iter().map(|d| d.0 + d.1 + d.2).collect();
            let location = StorageLocation { file: String::new(), offset: 0, length: 0 };
            let chunk = TensorChunk { offsets: offsets.clone(), sizes: sizes.clone(), location };
            let mut found = vec![None; sizes.iter().product::<u64>() as usize];
            for (start, taken) in compute_chunk_runs(&shape, &chunk).expect("possible").1 {
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
