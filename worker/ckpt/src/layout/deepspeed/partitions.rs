//! Finds where each parameter is stored in the flat arrays of DeepSpeed's optimizer files.
use super::states::FlatGroupShard;
use crate::catalog::{ExternalTensor, TensorPart};
use crate::codec::torch_file::TensorView;
use crate::error::LayoutError;
use crate::tensor::{Dtype, TensorRole, count_elements};
use std::ops::Range;

/// Names and shapes of the parameters of a parameter group, in the order in which DeepSpeed
/// concatenates them in a flat array.
pub(super) type ParamShapes = [(String, Vec<u64>)];

/// The part of a flat array (the concatenated parameters of a group) that one rank's optimizer file
/// stores.
pub(super) struct FlatGroupShardOfRank<'a> {
    /// Index of the rank's optimizer file in `StoredFiles`.
    pub(super) file: usize,
    pub(super) shard: &'a FlatGroupShard,
}

impl FlatGroupShardOfRank<'_> {
    /// Returns the number of elements, including padding, of the part of the flat array that this
    /// rank's optimizer file stores.
    fn len(&self) -> u64 {
        self.shard.fp32.element_count()
    }

    /// Returns the tensor in this rank's optimizer file that holds its part of the flat weights, or
    /// of the flat optimizer state `role`.
    fn state_view(&self, role: TensorRole) -> Option<&TensorView> {
        match role {
            TensorRole::Weight => Some(&self.shard.fp32),
            _ => self.shard.states.iter().find(|(r, _)| *r == role).map(|(_, v)| v),
        }
    }
}

/// Lists the kinds of tensors that the ranks' optimizer files store for a parameter group: the
/// weights and the optimizer states.
fn list_stored_roles(ranks: &[FlatGroupShardOfRank<'_>]) -> Vec<TensorRole> {
    let mut roles = vec![TensorRole::Weight];
    // a rank whose part is empty may lack optimizer states
    roles.extend(
        TensorRole::ALL
            .into_iter()
            .filter(|r| r.is_optimizer_state() && ranks.iter().any(|k| k.state_view(*r).is_some())),
    );
    roles
}

/// Returns the error that the shape of the parameter `name` has too many dimensions or too many
/// elements.
fn impossible_shape_error(name: &str, shape: &[u64]) -> LayoutError {
    LayoutError::ImpossibleShape { name: name.to_owned(), shape: shape.to_vec() }
}

/// Finds where a DeepSpeed checkpoint of ZeRO stage 1 or 2 stores the parameters of one parameter
/// group. DeepSpeed concatenates the parameters of a group and splits the result into one part per
/// rank. `is_unpadded` states that no padding follows the last parameter.
///
/// # Errors
/// Fails if the number of elements does not match, or a state is missing or has a wrong length.
pub(super) fn locate_flat_params(
    group: &ParamShapes,
    ranks: &[FlatGroupShardOfRank<'_>],
    is_unpadded: bool,
) -> Result<Vec<ExternalTensor>, LayoutError> {
    let alignment = ranks.first().map_or(&[][..], |r| &r.shard.alignment);
    if !alignment.is_empty() && alignment.len() != group.len() {
        return Err(LayoutError::PaddingCount { paddings: alignment.len(), parameters: group.len() });
    }
    let mut spans = Vec::with_capacity(group.len());
    let mut end = 0u64;
    for (i, (name, shape)) in group.iter().enumerate() {
        let too_large = || impossible_shape_error(name, shape);
        let next = end.checked_add(count_elements(shape).ok_or_else(too_large)?).ok_or_else(too_large)?;
        spans.push(end..next);
        end = next.checked_add(alignment.get(i).copied().unwrap_or(0)).ok_or_else(too_large)?;
    }
    let held = ranks.iter().fold(0u64, |held, rank| held.saturating_add(rank.len()));
    // without `zero_stage`, the last part may be padded to a multiple of twice the number of ranks
    let slack = if is_unpadded { 0 } else { 4 * ranks.len() as u64 };
    if held < end || held - end > slack {
        return Err(LayoutError::ElementCount { expected: end, found: held });
    }
    let mut entries = Vec::new();
    for role in list_stored_roles(ranks) {
        check_state_lengths(ranks, role)?;
        for ((name, shape), span) in group.iter().zip(&spans) {
            let parts = locate_flat_array_range(ranks, role, span.clone())?;
            entries.push(ExternalTensor::from_parts(name, role, Dtype::F32, shape, parts));
        }
    }
    Ok(entries)
}

/// Finds the optimizer files, and the places in them, that store the elements `span` of a flat
/// array that is divided among the ranks. Returns one part for each rank that has some of these
/// elements.
fn locate_flat_array_range(
    ranks: &[FlatGroupShardOfRank<'_>],
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

/// Fails if a rank's part of the optimizer state `role` is not F32, or its length does not fit the
/// rank's part of the weights. A state may be longer than the weights by the recorded padding.
fn check_state_lengths(ranks: &[FlatGroupShardOfRank<'_>], role: TensorRole) -> Result<(), LayoutError> {
    for (r, rank) in ranks.iter().enumerate() {
        let Some(view) = rank.state_view(role) else { continue };
        let (weights, states) = (rank.len(), view.element_count());
        let padded = rank.shard.padding.map(|p| weights.saturating_add(p));
        let fits = states == weights || padded.map_or(states > weights, |p| p == states);
        if view.dtype != Dtype::F32 || !fits {
            return Err(LayoutError::StateLength { rank: r, role, states, dtype: view.dtype, weights });
        }
    }
    Ok(())
}

/// Finds where a DeepSpeed checkpoint of ZeRO stage 3 stores the parameters of one parameter group.
/// Each parameter is split evenly among the ranks, with padding at the end, and each rank
/// concatenates its slices of all parameters.
///
/// # Errors
/// Fails if the flat tensor of a rank is missing, or its length does not match the parameters.
pub(super) fn locate_partitioned_params(
    group: &ParamShapes,
    ranks: &[FlatGroupShardOfRank<'_>],
) -> Result<Vec<ExternalTensor>, LayoutError> {
    let world = ranks.len() as u64;
    let mut entries = Vec::new();
    for role in list_stored_roles(ranks) {
        let mut offset = 0u64;
        for (name, shape) in group {
            let count = count_elements(shape).ok_or_else(|| impossible_shape_error(name, shape))?;
            let share = count.div_ceil(world);
            let mut parts = Vec::new();
            for (r, rank) in ranks.iter().enumerate() {
                let view = rank.state_view(role).ok_or(LayoutError::StateMissing { rank: r, role })?;
                let span = (r as u64 * share).min(count)..((r as u64 + 1) * share).min(count);
                let end = offset.saturating_add(share);
                if view.element_count() < end || view.dtype != Dtype::F32 {
                    return Err(LayoutError::PartitionTooShort {
                        role,
                        rank: r,
                        elements: view.element_count(),
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
            entries.push(ExternalTensor::from_parts(name, role, Dtype::F32, shape, parts));
            offset += share;
        }
        for (rank, shard) in ranks.iter().enumerate() {
            let found = shard.state_view(role).map_or(offset, TensorView::element_count);
            if found != offset {
                return Err(LayoutError::PartitionLength { role, rank, found, expected: offset });
            }
        }
    }
    Ok(entries)
}

/// Finds in which ranks' model files a frozen parameter is stored. `slices` has the file index and
/// the view of each slice. There is a single slice with all elements, or in stage 3 one slice per
/// rank with padding at the end.
pub(super) fn locate_frozen_param(
    name: &str,
    shape: &[u64],
    slices: &[(usize, &TensorView)],
) -> Result<ExternalTensor, LayoutError> {
    let count = count_elements(shape).ok_or_else(|| impossible_shape_error(name, shape))?;
    let share = count.div_ceil(slices.len().max(1) as u64);
    let mut parts = Vec::new();
    for (r, &(file, view)) in slices.iter().enumerate() {
        let start = (r as u64 * share).min(count);
        let len = share.min(count - start);
        if view.element_count() < len || view.element_count() > share || view.dtype != slices[0].1.dtype {
            return Err(LayoutError::SliceLength {
                name: name.to_owned(),
                rank: r,
                elements: view.element_count(),
                dtype: view.dtype,
                expected: share,
            });
        }
        if len > 0 {
            parts.push(TensorPart::new(file, view, 0..len, start));
        }
    }
    let dtype = slices.first().map_or(Dtype::F32, |(_, v)| v.dtype);
    Ok(ExternalTensor::from_parts(name, TensorRole::Weight, dtype, shape, parts))
}
