//! Stage 0: the optimizer lies whole in the model file, its states and fp32 masters numbered.
use super::Tag;
use super::collect::Collected;
use super::states::ModelStates;
use crate::catalog::Role;
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::external::Entry;
use crate::external::draft::{some, whole_step};
use crate::formats::optimizer::{Id, Optimizer, Step};
use crate::formats::torch_file::{TensorView, TorchFile};
use crate::state::Group;
use std::collections::{BTreeMap, HashMap};

/// What the model file keeps of an optimizer.
pub(super) struct Own {
    optimizer: Optimizer,
    /// fp32 masters per group.
    masters: Vec<Vec<TensorView>>,
}

impl Own {
    /// `Err` is one line that says what is wrong with the file.
    pub(super) fn read(
        file: &TorchFile,
        root: crate::pickle::View<'_>,
    ) -> std::result::Result<Option<Own>, String> {
        let inner = root.get("optimizer_state_dict").unwrap_or(root);
        if inner.get("param_groups").is_none() {
            return Ok(None);
        }
        let mut masters = Vec::new();
        for group in root.get("fp32_groups").and_then(|g| g.items()).into_iter().flat_map(|g| g.iter()) {
            let mut views = Vec::new();
            let list: Vec<_> = match group.items() {
                Some(items) => items.iter().collect(),
                None => vec![group],
            };
            for tensor in list {
                views.push(file.tensor(tensor)?.ok_or("its fp32_groups hold something that is no tensor")?);
            }
            masters.push(views);
        }
        Ok(Some(Own { optimizer: Optimizer::read(file, inner)?, masters }))
    }
}

/// Adds masters and states to the weights of the 16-bit module: groups and steps, where the numbers fit the names.
pub(super) fn add(
    tag: &Tag,
    file: usize,
    model: &ModelStates,
    found: &mut Collected,
) -> Result<(Vec<Group>, BTreeMap<String, u64>)> {
    let Some(own) = &model.own_optimizer else { return Ok(Default::default()) };
    let weights: Vec<(String, Vec<u64>)> = found
        .entries
        .iter()
        .filter(|e| e.info.role == Role::Weight)
        .map(|e| (e.info.name.clone(), e.info.shape.clone()))
        .collect();
    let borrowed: Vec<(&str, &[u64])> = weights.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
    let names = match own.optimizer.names(&borrowed, true) {
        Ok(names) => names,
        Err(why) => {
            found.notices.push(format!(
                "the optimizer's state in the model file isn't read ({why}), and weights are those of the module"
            ));
            return Ok(Default::default());
        }
    };
    let damaged = |why: String| CkptError::damaged(&tag.path, tag.store.files[file].name.as_str(), why);
    let mut steps = BTreeMap::new();
    for ((_, ids), names) in own.optimizer.groups.iter().zip(&names) {
        for (id, name) in ids.iter().zip(names) {
            if let Some(step) = states(tag, file, own, id, name, found)? {
                steps.insert(name.clone(), whole_step(step).map_err(|e| damaged(format!("{name}: {e}")))?);
            }
        }
    }
    masters(file, own, &names, found).map_err(damaged)?;
    if !own.optimizer.unknown.is_empty() {
        let unknown: Vec<String> = own.optimizer.unknown.iter().cloned().collect();
        found.notices.push(format!("states of the optimizer that aren't read: {}", some(&unknown)));
    }
    let groups = own.optimizer.groups.iter().zip(names);
    Ok((groups.map(|((hyper, _), names)| Group { hyper: hyper.clone(), names }).collect(), steps))
}

fn states(
    tag: &Tag,
    file: usize,
    own: &Own,
    id: &Id,
    name: &str,
    found: &mut Collected,
) -> Result<Option<f64>> {
    let Some(state) = own.optimizer.states.get(id) else { return Ok(None) };
    for (role, view) in &state.tensors {
        found.entries.push(Entry::whole(name, *role, file, view));
    }
    Ok(match &state.step {
        None => None,
        Some(Step::Number(n)) => Some(*n),
        Some(Step::Tensor(view)) => Some(f64::from(tag.store.scalar(file, view)?)),
    })
}

/// The masters take the place of the module's 16-bit values.
fn masters(
    file: usize,
    own: &Own,
    names: &[Vec<String>],
    found: &mut Collected,
) -> std::result::Result<(), String> {
    if own.masters.is_empty() {
        return Ok(());
    }
    let mut by_name: HashMap<&str, &TensorView> = HashMap::new();
    for (g, (views, names)) in own.masters.iter().zip(names).enumerate() {
        if views.len() != names.len() {
            return Err(format!("its group {g} has {} fp32 weights, {} states", views.len(), names.len()));
        }
        by_name.extend(names.iter().map(String::as_str).zip(views));
    }
    for entry in found.entries.iter_mut().filter(|e| e.info.role == Role::Weight) {
        let Some(view) = by_name.get(entry.info.name.as_str()) else { continue };
        if view.dtype != Dtype::F32 || view.shape != entry.info.shape {
            let (dtype, shape) = (view.dtype, &view.shape);
            return Err(format!(
                "the fp32 weight of {} is {dtype} {shape:?}, not {:?}",
                entry.info.name, entry.info.shape
            ));
        }
        *entry = Entry::whole(&entry.info.name, Role::Weight, file, view);
    }
    Ok(())
}
