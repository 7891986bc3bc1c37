//! Where each parameter lies in the flat groups of the ranks.
use super::states::Shard;
use crate::catalog::{Role, TensorInfo, elements};
use crate::dtype::Dtype;
use crate::external::Entry;
use crate::external::store::Part;
use crate::formats::torch_file::TensorView;
use std::ops::Range;

/// A group's parameters: name and shape, in the order of the flat buffer.
pub(super) type Shapes = [(String, Vec<u64>)];

/// One rank's part of a group, and the file that it is in.
pub(super) struct Rank<'a> {
    pub(super) file: usize,
    pub(super) shard: &'a Shard,
}

impl Rank<'_> {
    fn len(&self) -> u64 {
        self.shard.fp32.elements()
    }

    fn view(&self, role: Role) -> Option<&TensorView> {
        match role {
            Role::Weight => Some(&self.shard.fp32),
            _ => self.shard.states.iter().find(|(r, _)| *r == role).map(|(_, v)| v),
        }
    }
}

/// What the ranks hold of a group beside weights.
fn roles(ranks: &[Rank<'_>]) -> Vec<Role> {
    let mut roles = vec![Role::Weight];
    // a rank whose part of the group is empty may have no state
    roles.extend(
        Role::ALL
            .into_iter()
            .filter(|r| r.is_optimizer_state() && ranks.iter().any(|k| k.view(*r).is_some())),
    );
    roles
}

/// The entry of one parameter; `parts(role)` gives its parts.
fn entry(name: &str, shape: &[u64], role: Role, dtype: Dtype, parts: Vec<Part>) -> Entry {
    Entry { info: TensorInfo { name: name.to_owned(), role, dtype, shape: shape.to_vec() }, parts }
}

/// Stages 1 and 2: the parameters one after the other, the whole cut into one piece per rank. `lean`: the pieces hold
/// no padding. `Err` says which group doesn't fit its shapes.
pub(super) fn flat(group: &Shapes, ranks: &[Rank<'_>], lean: bool) -> Result<Vec<Entry>, String> {
    let alignment = ranks.first().map_or(&[][..], |r| &r.shard.alignment);
    if !alignment.is_empty() && alignment.len() != group.len() {
        return Err(format!("{} paddings for {} parameters", alignment.len(), group.len()));
    }
    let mut spans = Vec::with_capacity(group.len());
    let mut end = 0u64;
    for (i, (name, shape)) in group.iter().enumerate() {
        let too_large = || format!("{name} has the impossible shape {shape:?}");
        let next = end.checked_add(elements(shape).ok_or_else(too_large)?).ok_or_else(too_large)?;
        spans.push(end..next);
        end = next.checked_add(alignment.get(i).copied().unwrap_or(0)).ok_or_else(too_large)?;
    }
    let held: u64 = ranks.iter().map(Rank::len).sum();
    // without `zero_stage` the last piece may be padded to twice the ranks
    let slack = if lean { 0 } else { 4 * ranks.len() as u64 };
    if held < end || held - end > slack {
        return Err(format!("its parameters have {end} elements, the ranks hold {held}"));
    }
    let mut entries = Vec::new();
    for role in roles(ranks) {
        check_states(ranks, role)?;
        for ((name, shape), span) in group.iter().zip(&spans) {
            entries.push(entry(name, shape, role, Dtype::F32, pieces(ranks, role, span.clone())?));
        }
    }
    Ok(entries)
}

/// Elements `span` of the concatenation of what the ranks hold.
fn pieces(ranks: &[Rank<'_>], role: Role, span: Range<u64>) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut begin = 0;
    for (r, rank) in ranks.iter().enumerate() {
        let (from, to) = (span.start.max(begin), span.end.min(begin + rank.len()));
        if from < to {
            let view = rank.view(role).ok_or_else(|| format!("rank {r} has no {role}"))?;
            parts.push(Part::of(rank.file, view, from - begin..to - begin, from - span.start));
        }
        begin += rank.len();
    }
    Ok(parts)
}

/// States are as long as the weights, or longer by the padding.
fn check_states(ranks: &[Rank<'_>], role: Role) -> Result<(), String> {
    for (r, rank) in ranks.iter().enumerate() {
        let Some(view) = rank.view(role) else { continue };
        let (weights, states) = (rank.len(), view.elements());
        let padded = rank.shard.padding.map(|p| weights.saturating_add(p));
        let fits = states == weights || padded.map_or(states > weights, |p| p == states);
        if view.dtype != Dtype::F32 || !fits {
            return Err(format!(
                "rank {r} has {states} elements of {role} ({}) for {weights} of weights",
                view.dtype
            ));
        }
    }
    Ok(())
}

/// Stage 3: each parameter cut evenly over the ranks, the last piece padded; one after the other in each rank's group.
pub(super) fn partitioned(group: &Shapes, ranks: &[Rank<'_>]) -> Result<Vec<Entry>, String> {
    let world = ranks.len() as u64;
    let mut entries = Vec::new();
    for role in roles(ranks) {
        let mut offset = 0u64;
        for (name, shape) in group {
            let count =
                elements(shape).ok_or_else(|| format!("{name} has the impossible shape {shape:?}"))?;
            let share = count.div_ceil(world);
            let mut parts = Vec::new();
            for (r, rank) in ranks.iter().enumerate() {
                let view = rank.view(role).ok_or_else(|| format!("rank {r} has no {role}"))?;
                let span = (r as u64 * share).min(count)..((r as u64 + 1) * share).min(count);
                let end = offset.saturating_add(share);
                if view.elements() < end || view.dtype != Dtype::F32 {
                    let held = view.elements();
                    return Err(format!(
                        "{role} of rank {r} has {held} elements ({}), {name} ends at {end}",
                        view.dtype
                    ));
                }
                if span.start < span.end {
                    let taken = offset..offset + (span.end - span.start);
                    parts.push(Part::of(rank.file, view, taken, span.start));
                }
            }
            entries.push(entry(name, shape, role, Dtype::F32, parts));
            offset += share;
        }
        let longer = |r: &Rank<'_>| r.view(role).is_some_and(|v| v.elements() != offset);
        if let Some(r) = ranks.iter().position(longer) {
            return Err(format!(
                "its parameters have {offset} elements of {role} per rank, rank {r} holds another number"
            ));
        }
    }
    Ok(entries)
}

/// A frozen parameter: whole in one file, or (stage 3) a slice per rank with the last ones padded.
pub(super) fn frozen(name: &str, shape: &[u64], slices: &[(usize, &TensorView)]) -> Result<Entry, String> {
    let count = elements(shape).ok_or_else(|| format!("{name} has the impossible shape {shape:?}"))?;
    let share = count.div_ceil(slices.len().max(1) as u64);
    let mut parts = Vec::new();
    for (r, &(file, view)) in slices.iter().enumerate() {
        let start = (r as u64 * share).min(count);
        let len = share.min(count - start);
        if view.elements() < len || view.elements() > share || view.dtype != slices[0].1.dtype {
            let held = view.elements();
            return Err(format!("{name}: rank {r} has {held} elements ({}), not {share}", view.dtype));
        }
        if len > 0 {
            parts.push(Part::of(file, view, 0..len, start));
        }
    }
    let dtype = slices.first().map_or(Dtype::F32, |(_, v)| v.dtype);
    Ok(entry(name, shape, Role::Weight, dtype, parts))
}
