//! Locates each parameter in the flat tensors of the ranks.
use super::error::LayoutError;
use super::states::Shard;
use crate::catalog::{TensorInfo, TensorRole, elements};
use crate::dtype::Dtype;
use crate::external::ExternalTensor;
use crate::external::store::TensorPart;
use crate::formats::torch_file::TensorView;
use std::ops::Range;

/// Name and shape of the parameters of a group, in the order of the flat tensor.
pub(super) type Shapes = [(String, Vec<u64>)];

/// The part of a group that one rank stores, and its file.
pub(super) struct RankShard<'a> {
    pub(super) file: usize,
    pub(super) shard: &'a Shard,
}

impl RankShard<'_> {
    fn len(&self) -> u64 {
        self.shard.fp32.elements()
    }

    fn state_view(&self, role: TensorRole) -> Option<&TensorView> {
        match role {
            TensorRole::Weight => Some(&self.shard.fp32),
            _ => self.shard.states.iter().find(|(r, _)| *r == role).map(|(_, v)| v),
        }
    }
}

/// The tensors of a group: the weights and the states that any rank has.
fn roles(ranks: &[RankShard<'_>]) -> Vec<TensorRole> {
    let mut roles = vec![TensorRole::Weight];
    // a rank with an empty part may have no state
    roles.extend(
        TensorRole::ALL
            .into_iter()
            .filter(|r| r.is_optimizer_state() && ranks.iter().any(|k| k.state_view(*r).is_some())),
    );
    roles
}

fn impossible_shape(name: &str, shape: &[u64]) -> LayoutError {
    LayoutError::ImpossibleShape { name: name.to_owned(), shape: shape.to_vec() }
}

/// Returns the tensor of one parameter, composed of `parts`.
fn entry(
    name: &str,
    shape: &[u64],
    role: TensorRole,
    dtype: Dtype,
    parts: Vec<TensorPart>,
) -> ExternalTensor {
    ExternalTensor { info: TensorInfo { name: name.to_owned(), role, dtype, shape: shape.to_vec() }, parts }
}

/// Stages 1 and 2: the parameters are concatenated, and the result is split into one part per rank.
/// `lean`: the parts have no padding.
pub(super) fn flat(
    group: &Shapes,
    ranks: &[RankShard<'_>],
    lean: bool,
) -> Result<Vec<ExternalTensor>, LayoutError> {
    let alignment = ranks.first().map_or(&[][..], |r| &r.shard.alignment);
    if !alignment.is_empty() && alignment.len() != group.len() {
        return Err(LayoutError::PaddingCount { paddings: alignment.len(), parameters: group.len() });
    }
    let mut spans = Vec::with_capacity(group.len());
    let mut end = 0u64;
    for (i, (name, shape)) in group.iter().enumerate() {
        let too_large = || impossible_shape(name, shape);
        let next = end.checked_add(elements(shape).ok_or_else(too_large)?).ok_or_else(too_large)?;
        spans.push(end..next);
        end = next.checked_add(alignment.get(i).copied().unwrap_or(0)).ok_or_else(too_large)?;
    }
    let held: u64 = ranks.iter().map(RankShard::len).sum();
    // without `zero_stage`, the last part may be padded to a multiple of twice the number of ranks
    let slack = if lean { 0 } else { 4 * ranks.len() as u64 };
    if held < end || held - end > slack {
        return Err(LayoutError::ElementCount { expected: end, found: held });
    }
    let mut entries = Vec::new();
    for role in roles(ranks) {
        check_states(ranks, role)?;
        for ((name, shape), span) in group.iter().zip(&spans) {
            entries.push(entry(
                name,
                shape,
                role,
                Dtype::F32,
                concatenated_parts(ranks, role, span.clone())?,
            ));
        }
    }
    Ok(entries)
}

/// Locates the elements `span` of the concatenated shards of all ranks. Returns one part for each
/// rank that has some of them.
fn concatenated_parts(
    ranks: &[RankShard<'_>],
    role: TensorRole,
    span: Range<u64>,
) -> Result<Vec<TensorPart>, LayoutError> {
    let mut parts = Vec::new();
    let mut begin = 0;
    for (r, rank) in ranks.iter().enumerate() {
        let (from, to) = (span.start.max(begin), span.end.min(begin + rank.len()));
        if from < to {
            let view = rank.state_view(role).ok_or(LayoutError::StateMissing { rank: r, role })?;
            parts.push(TensorPart::new(rank.file, view, from - begin..to - begin, from - span.start));
        }
        begin += rank.len();
    }
    Ok(parts)
}

/// Checks that states are as long as the weights, or longer by the padding.
fn check_states(ranks: &[RankShard<'_>], role: TensorRole) -> Result<(), LayoutError> {
    for (r, rank) in ranks.iter().enumerate() {
        let Some(view) = rank.state_view(role) else { continue };
        let (weights, states) = (rank.len(), view.elements());
        let padded = rank.shard.padding.map(|p| weights.saturating_add(p));
        let fits = states == weights || padded.map_or(states > weights, |p| p == states);
        if view.dtype != Dtype::F32 || !fits {
            return Err(LayoutError::StateLength { rank: r, role, states, dtype: view.dtype, weights });
        }
    }
    Ok(())
}

/// Stage 3: each parameter is split evenly among the ranks, with padding at the end; each rank
/// concatenates its parts.
pub(super) fn partitioned(
    group: &Shapes,
    ranks: &[RankShard<'_>],
) -> Result<Vec<ExternalTensor>, LayoutError> {
    let world = ranks.len() as u64;
    let mut entries = Vec::new();
    for role in roles(ranks) {
        let mut offset = 0u64;
        for (name, shape) in group {
            let count = elements(shape).ok_or_else(|| impossible_shape(name, shape))?;
            let share = count.div_ceil(world);
            let mut parts = Vec::new();
            for (r, rank) in ranks.iter().enumerate() {
                let view = rank.state_view(role).ok_or(LayoutError::StateMissing { rank: r, role })?;
                let span = (r as u64 * share).min(count)..((r as u64 + 1) * share).min(count);
                let end = offset.saturating_add(share);
                if view.elements() < end || view.dtype != Dtype::F32 {
                    return Err(LayoutError::PartitionTooShort {
                        role,
                        rank: r,
                        elements: view.elements(),
                        dtype: view.dtype,
                        name: name.clone(),
                        end,
                    });
                }
                if span.start < span.end {
                    let taken = offset..offset + (span.end - span.start);
                    parts.push(TensorPart::new(rank.file, view, taken, span.start));
                }
            }
            entries.push(entry(name, shape, role, Dtype::F32, parts));
            offset += share;
        }
        for (rank, shard) in ranks.iter().enumerate() {
            let found = shard.state_view(role).map_or(offset, TensorView::elements);
            if found != offset {
                return Err(LayoutError::PartitionLength { role, rank, found, expected: offset });
            }
        }
    }
    Ok(entries)
}

/// A frozen parameter: whole in one file, or (stage 3) one slice per rank with padding at the end.
pub(super) fn frozen_layout(
    name: &str,
    shape: &[u64],
    slices: &[(usize, &TensorView)],
) -> Result<ExternalTensor, LayoutError> {
    let count = elements(shape).ok_or_else(|| impossible_shape(name, shape))?;
    let share = count.div_ceil(slices.len().max(1) as u64);
    let mut parts = Vec::new();
    for (r, &(file, view)) in slices.iter().enumerate() {
        let start = (r as u64 * share).min(count);
        let len = share.min(count - start);
        if view.elements() < len || view.elements() > share || view.dtype != slices[0].1.dtype {
            return Err(LayoutError::SliceLength {
                name: name.to_owned(),
                rank: r,
                elements: view.elements(),
                dtype: view.dtype,
                expected: share,
            });
        }
        if len > 0 {
            parts.push(TensorPart::new(file, view, 0..len, start));
        }
    }
    let dtype = slices.first().map_or(Dtype::F32, |(_, v)| v.dtype);
    Ok(entry(name, shape, TensorRole::Weight, dtype, parts))
}
