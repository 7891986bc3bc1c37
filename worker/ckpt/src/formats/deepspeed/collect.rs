//! Every tensor of a tag, found by the rule for names that sources contradict.
use super::Tag;
use super::layout::{self, Rank};
use super::states::ModelStates;
use crate::catalog::{Role, Tie};
use crate::error::{CkptError, Result};
use crate::external::Entry;
use crate::external::draft::some;
use crate::formats::torch_file::TensorView;
use std::collections::{HashMap, HashSet};

/// What a tag holds.
#[derive(Default)]
pub(super) struct Collected {
    pub(super) entries: Vec<Entry>,
    pub(super) frozen: Vec<String>,
    /// Named, but nowhere stored.
    pub(super) lost: Vec<String>,
    pub(super) ties: Vec<Tie>,
    pub(super) notices: Vec<String>,
}

/// Finds the tensors of a tag whose ranks are all there.
pub(super) fn weights(tag: &Tag, stage: u8) -> Result<Collected> {
    let mut found = Collected::default();
    let Some((file, model)) = tag.model.get(&0) else { return Ok(found) };
    found.groups(tag, model, stage)?;
    found.frozen(tag, model, stage)?;
    found.ties(model);
    found.module(*file, model, stage);
    found.in_module_order(model);
    found.say_unknown(tag);
    Ok(found)
}

impl Collected {
    fn weights(&self) -> HashSet<&str> {
        self.entries.iter().filter(|e| e.info.role == Role::Weight).map(|e| e.info.name.as_str()).collect()
    }

    /// Trained parameters: fp32 masters and states of the optimizer.
    fn groups(&mut self, tag: &Tag, model: &ModelStates, stage: u8) -> Result<()> {
        if stage == 0 {
            return Ok(());
        }
        let damaged = |file: &str, why: String| CkptError::damaged(&tag.path, file, why);
        for (file, states) in tag.optimizer.values() {
            if states.shards.len() != model.groups.len() {
                let why =
                    format!("it has {} groups, the model file {}", states.shards.len(), model.groups.len());
                return Err(tag.damaged(*file, why));
            }
        }
        let lean = tag.optimizer.values().all(|(_, s)| s.lean);
        for (g, group) in model.groups.iter().enumerate() {
            let ranks: Vec<Rank<'_>> = tag
                .optimizer
                .values()
                .filter_map(|(file, states)| Some(Rank { file: *file, shard: states.shards.get(g)? }))
                .collect();
            let entries = match stage {
                3 => layout::partitioned(group, &ranks),
                _ => layout::flat(group, &ranks, lean),
            };
            self.entries
                .extend(entries.map_err(|why| damaged("the optimizer files", format!("group {g}: {why}")))?);
        }
        Ok(())
    }

    pub(super) fn frozen(&mut self, tag: &Tag, model: &ModelStates, stage: u8) -> Result<()> {
        let trained: HashSet<String> = self.weights().into_iter().map(str::to_owned).collect();
        let (both, only): (Vec<_>, Vec<_>) =
            model.frozen_shapes.iter().partition(|(n, _)| trained.contains(n));
        if !both.is_empty() {
            let names: Vec<String> = both.iter().map(|(n, _)| n.clone()).collect();
            self.notices.push(format!(
                "{} frozen after the optimizer was made ({}): the fp32 values of the optimizer are taken",
                if names.len() == 1 { "a weight was" } else { "weights were" },
                some(&names)
            ));
        }
        let files: Vec<(usize, HashMap<&str, &TensorView>)> = tag
            .model
            .values()
            .filter(|_| stage > 0)
            .map(|(file, m)| (*file, m.frozen.iter().map(|(n, v)| (n.as_str(), v)).collect()))
            .collect();
        // below stage 3 the one model file has the whole of it
        let files = if stage == 3 { &files[..] } else { &files[..files.len().min(1)] };
        for (name, shape) in only {
            let mut slices = Vec::with_capacity(files.len());
            for (file, fragments) in files {
                let Some(view) = fragments.get(name.as_str()) else {
                    return Err(tag.damaged(*file, format!("the frozen weight {name} is missing in it")));
                };
                slices.push((*file, *view));
            }
            let entry = layout::frozen(name, shape, &slices)
                .map_err(|why| CkptError::damaged(&tag.path, "the frozen weights", why))?;
            self.entries.push(entry);
            self.frozen.push(name.clone());
        }
        Ok(())
    }

    /// An alias of a stored weight, unless it is stored itself.
    pub(super) fn ties(&mut self, model: &ModelStates) {
        let stored: HashSet<String> = self.weights().into_iter().map(str::to_owned).collect();
        for tie in &model.ties {
            if stored.contains(&tie.alias) {
                self.notices.push(format!(
                    "{} was tied to {} after the optimizer was made: the fp32 values of its own are taken",
                    tie.alias, tie.target
                ));
            } else if stored.contains(&tie.target) {
                self.ties.push(tie.clone());
            }
        }
    }

    /// Buffers, and what is in no list and so is left to the 16-bit module.
    pub(super) fn module(&mut self, file: usize, model: &ModelStates, stage: u8) {
        let mut known: HashSet<String> = self.weights().into_iter().map(str::to_owned).collect();
        known.extend(self.ties.iter().map(|t| t.alias.clone()));
        let buffers: HashSet<&str> = model.buffers.iter().map(String::as_str).collect();
        let mut fallback = Vec::new();
        let mut places: HashMap<_, &str> = HashMap::new();
        for (name, view) in &model.module {
            if buffers.contains(name.as_str()) {
                self.entries.push(Entry::whole(name, Role::Buffer, file, view));
            } else if known.contains(name) {
                continue;
            } else if stage == 3 && view.elements() == 0 {
                self.lost.push(name.clone());
            } else if let Some(target) = tied_to(model, name)
                && known.contains(target)
            {
                self.ties.push(Tie { alias: name.clone(), target: target.to_owned() });
            } else if stage == 0
                && view.elements() > 0
                && let Some(target) = places.get(&view.place())
            {
                // this stage lists no ties
                self.ties.push(Tie { alias: name.clone(), target: (*target).to_owned() });
            } else {
                places.insert(view.place(), name);
                self.entries.push(Entry::whole(name, Role::Weight, file, view));
                known.insert(name.clone());
                fallback.push(name.clone());
            }
        }
        if stage > 0 && !fallback.is_empty() {
            self.notices.push(format!(
                "{} in no group of the optimizer and not among the frozen ({}): values of the 16-bit module are taken",
                if fallback.len() == 1 { "a weight is" } else { "weights are" },
                some(&fallback)
            ));
            self.frozen.extend(fallback);
        }
        if !self.lost.is_empty() {
            self.notices.push(format!("weights of which nothing is stored: {}", some(&self.lost)));
        }
    }

    /// The module's order is the model's own.
    pub(super) fn in_module_order(&mut self, model: &ModelStates) {
        let order: HashMap<&str, usize> =
            model.module.iter().enumerate().map(|(i, (name, _))| (name.as_str(), i)).collect();
        self.entries.sort_by_key(|e| order.get(e.info.name.as_str()).copied().unwrap_or(usize::MAX));
    }

    fn say_unknown(&mut self, tag: &Tag) {
        let mut unknown: Vec<String> = tag
            .optimizer
            .values()
            .flat_map(|(_, s)| s.shards.iter().flat_map(|s| s.unknown.clone()))
            .collect();
        unknown.sort();
        unknown.dedup();
        if !unknown.is_empty() {
            self.notices.push(format!("states of the optimizer that aren't read: {}", unknown.join(", ")));
        }
    }
}

fn tied_to<'a>(model: &'a ModelStates, alias: &str) -> Option<&'a str> {
    model.ties.iter().find(|t| t.alias == alias).map(|t| t.target.as_str())
}
