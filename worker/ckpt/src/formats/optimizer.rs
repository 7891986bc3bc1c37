//! An optimizer's `state_dict` in a torch file: `{state: {parameter: {key: tensor}}, param_groups: [{…, params}]}`.
//! Parameters are numbers (torch) or names (FSDP's full state).
use super::experts::{Fused, Member};
use super::numbered;
use super::torch_file::{TensorView, TorchFile};
use super::weights::number;
use crate::catalog::Role;
use crate::error::Result;
use crate::external::Entry;
use crate::external::draft::{Draft, GLOBALS, role_of, some, whole_step};
use crate::external::store::Part;
use crate::pickle::View;
use crate::state::Group;
use serde_json::{Map, Value as Json};
use std::collections::{BTreeSet, HashMap};

/// How a parameter is called.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Id {
    Number(u64),
    Name(String),
}

/// The state of one parameter.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) tensors: Vec<(Role, TensorView)>,
    pub(crate) step: Option<Step>,
}

/// A step is a number or a tensor of one.
pub(crate) enum Step {
    Number(f64),
    Tensor(TensorView),
}

/// A whole `state_dict`.
pub(crate) struct Optimizer {
    pub(crate) states: HashMap<Id, State>,
    /// Hyper-parameters and parameters of each group.
    pub(crate) groups: Vec<(Map<String, Json>, Vec<Id>)>,
    /// Keys of states that aren't read.
    pub(crate) unknown: BTreeSet<String>,
}

impl Optimizer {
    /// `Err` is one line that says what is wrong with the file.
    pub(crate) fn read(file: &TorchFile, root: View<'_>) -> std::result::Result<Optimizer, String> {
        let mut found = Optimizer { states: HashMap::new(), groups: Vec::new(), unknown: BTreeSet::new() };
        let states = root.get("state").and_then(View::pairs).ok_or("it has no dict of states")?;
        for (key, value) in states {
            let id = id_of(key).ok_or("it has a state of a parameter without number or name")?;
            let state = found.state(file, value)?;
            if found.states.insert(id.clone(), state).is_some() {
                return Err(format!("it has two states of {}", id.shown()));
            }
        }
        let groups =
            root.get("param_groups").and_then(View::items).ok_or("it has no list of param_groups")?;
        let mut seen = BTreeSet::new();
        for group in groups.iter() {
            let Json::Object(mut hyper) = group.json() else {
                return Err("one of its groups is no dict".into());
            };
            hyper.remove("params");
            let params =
                group.get("params").and_then(View::items).ok_or("one of its groups has no params")?;
            let ids: Option<Vec<Id>> = params.iter().map(id_of).collect();
            let ids = ids.ok_or("one of its groups has a parameter without number or name")?;
            if let Some(twice) = ids.iter().find(|id| !seen.insert(id.shown())) {
                return Err(format!("{} is in two of its groups", twice.shown()));
            }
            found.groups.push((hyper, ids));
        }
        match found.states.keys().find(|id| !seen.contains(&id.shown())) {
            Some(id) => Err(format!("{} has a state, but is in no group", id.shown())),
            None => Ok(found),
        }
    }

    fn state(&mut self, file: &TorchFile, value: View<'_>) -> std::result::Result<State, String> {
        let mut state = State::default();
        for (key, value) in value.pairs().ok_or("the state of a parameter is no dict")? {
            let key = key.str().ok_or("a state has a key that is no text")?;
            let tensor = file.tensor(value).map_err(|e| format!("{key}: {e}"))?;
            match (key, role_of(key), tensor) {
                ("step", _, Some(view)) => state.step = Some(Step::Tensor(view)),
                ("step", _, None) => state.step = number(value).map(Step::Number),
                (_, Some(role), Some(view)) => state.tensors.push((role, view)),
                (_, None, Some(_)) => {
                    self.unknown.insert(key.to_owned());
                }
                (_, _, None) => {}
            }
        }
        Ok(state)
    }

    /// Shapes of the states of each group.
    pub(crate) fn shapes(&self) -> Vec<numbered::Shapes> {
        let shape = |id: &Id| Some(self.states.get(id)?.tensors.first()?.1.shape.clone());
        self.groups.iter().map(|(_, ids)| ids.iter().map(shape).collect()).collect()
    }

    /// The names of the parameters of each group. `Err` says why they can't be known.
    pub(crate) fn names(
        &self,
        weights: &[numbered::Weight<'_>],
        in_order: bool,
    ) -> std::result::Result<Vec<Vec<String>>, String> {
        let own = |id: &Id| match id {
            Id::Name(name) => Some(name.clone()),
            Id::Number(_) => None,
        };
        let named: Option<Vec<Vec<String>>> =
            self.groups.iter().map(|(_, ids)| ids.iter().map(own).collect()).collect();
        match named {
            Some(names) => self.check_named(names, weights),
            None => numbered::names(&self.shapes(), weights, in_order),
        }
    }

    /// Names that the states have of their own must be those of weights of the same shape.
    fn check_named(
        &self,
        names: Vec<Vec<String>>,
        weights: &[numbered::Weight<'_>],
    ) -> std::result::Result<Vec<Vec<String>>, String> {
        let known: HashMap<&str, &[u64]> = weights.iter().copied().collect();
        for (group, shapes) in names.iter().zip(self.shapes()) {
            for (name, shape) in group.iter().zip(shapes) {
                let weight =
                    known.get(name.as_str()).ok_or_else(|| format!("it names {name}, which is no weight"))?;
                if shape.as_ref().is_some_and(|s| s != weight) {
                    return Err(format!(
                        "its state of {name} has the shape {shape:?}, the weight {weight:?}"
                    ));
                }
            }
        }
        Ok(names)
    }
}

impl Id {
    fn shown(&self) -> String {
        match self {
            Id::Number(n) => format!("parameter {n}"),
            Id::Name(name) => name.clone(),
        }
    }
}

fn id_of(value: View<'_>) -> Option<Id> {
    value.count().map(Id::Number).or_else(|| value.str().map(|s| Id::Name(s.to_owned())))
}

/// Names of the parameters of each group.
type Names = Vec<Vec<String>>;

/// Adds the states of a torch file to the weights that the draft has. What can't be told apart is left out, with a notice.
pub(crate) fn add(draft: &mut Draft, name: &str) -> Result<()> {
    let (file, torch) = draft.torch(name, GLOBALS)?;
    let optimizer = Optimizer::read(&torch, torch.value()).map_err(|why| draft.damaged(name, why))?;
    let weights: Vec<(String, Vec<u64>)> = draft.weights().map(|(n, s)| (n.to_owned(), s.to_vec())).collect();
    let borrowed: Vec<numbered::Weight<'_>> =
        weights.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
    match found(&optimizer, &borrowed) {
        Ok((names, fused)) => put(draft, name, file, &optimizer, names, &fused),
        Err(why) if draft.trained.is_some() => add_trained(draft, name, file, optimizer, &borrowed, why),
        Err(why) => {
            leave_out(draft, name, optimizer, &why);
            Ok(())
        }
    }
}

/// The names of its parameters: those of the weights, or those of a model that has the experts of a layer as one tensor.
fn found(
    optimizer: &Optimizer,
    weights: &[numbered::Weight<'_>],
) -> std::result::Result<(Names, Fused), String> {
    let why = match optimizer.names(weights, false) {
        Ok(names) => return Ok((names, Fused::default())),
        Err(why) => why,
    };
    let Some(fused) = Fused::of(weights) else { return Err(why) };
    let theirs: Vec<numbered::Weight<'_>> =
        fused.weights.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
    match optimizer.names(&theirs, false) {
        Ok(names) => Ok((names, fused)),
        Err(other) => Err(format!("{why}; with the experts of a layer as one weight, {other}")),
    }
}

/// Says why states aren't read.
fn leave_out(draft: &mut Draft, name: &str, optimizer: Optimizer, why: &str) {
    draft.notice(format!("the optimizer's state in {name} isn't read: {why}"));
    draft.facts.groups =
        optimizer.groups.into_iter().map(|(hyper, _)| Group { hyper, names: Vec::new() }).collect();
}

/// Adds states that aren't those of all weights, when they fit the weights that the reader trains: in number, groups,
/// order and shapes. Nothing in the file says more, so that it is taken so is told.
fn add_trained(
    draft: &mut Draft,
    name: &str,
    file: usize,
    optimizer: Optimizer,
    weights: &[numbered::Weight<'_>],
    why: String,
) -> Result<()> {
    let is_trained = |w: &&numbered::Weight<'_>| draft.trained.as_ref().is_some_and(|t| t.contains(w.0));
    let (trained, frozen): (Vec<_>, Vec<_>) = weights.iter().partition(is_trained);
    let trained: Vec<numbered::Weight<'_>> = trained.into_iter().copied().collect();
    match found(&optimizer, &trained) {
        Ok((names, fused)) => {
            draft.notice(format!(
                "{name} numbers the states of {} of {} weights and doesn't say which: they fit those that are trained here, \
                 and are taken for theirs",
                trained.len(),
                weights.len()
            ));
            draft.facts.frozen.extend(frozen.into_iter().map(|(n, _)| (*n).to_owned()));
            put(draft, name, file, &optimizer, names, &fused)
        }
        Err(other) if trained.len() < weights.len() => {
            leave_out(
                draft,
                name,
                optimizer,
                &format!("{why}; nor is it of the weights trained here: {other}"),
            );
            Ok(())
        }
        Err(_) => {
            leave_out(draft, name, optimizer, &why);
            Ok(())
        }
    }
}

/// Adds the states, whose names are known.
fn put(
    draft: &mut Draft,
    name: &str,
    file: usize,
    optimizer: &Optimizer,
    names: Names,
    fused: &Fused,
) -> Result<()> {
    for ((_, ids), names) in optimizer.groups.iter().zip(&names) {
        for (id, weight) in ids.iter().zip(names) {
            let Some(state) = optimizer.states.get(id) else { continue };
            for (role, view) in &state.tensors {
                let entries = entries(weight, *role, file, view, fused);
                draft.entries.extend(entries.map_err(|why| draft.damaged(name, why))?);
            }
            let step = match &state.step {
                None => continue,
                Some(Step::Number(n)) => *n,
                Some(Step::Tensor(view)) => f64::from(draft.store.scalar(file, view)?),
            };
            let step = whole_step(step).map_err(|why| draft.damaged(name, format!("{weight}: {why}")))?;
            draft.facts.steps.extend(fused.own_names(weight).map(|own| (own, step)));
        }
    }
    if !optimizer.unknown.is_empty() {
        let unknown: Vec<String> = optimizer.unknown.iter().cloned().collect();
        draft.notice(format!("states of the optimizer that aren't read: {}", some(&unknown)));
    }
    for ((hyper, _), names) in optimizer.groups.iter().zip(names) {
        let names = names.iter().flat_map(|weight| fused.own_names(weight)).collect();
        draft.facts.groups.push(Group { hyper: hyper.clone(), names });
    }
    Ok(())
}

/// The tensors that a state of a weight of the model is.
fn entries(
    weight: &str,
    role: Role,
    file: usize,
    view: &TensorView,
    fused: &Fused,
) -> std::result::Result<Vec<Entry>, String> {
    let Some(members) = fused.members(weight) else {
        return Ok(vec![Entry::whole(weight, role, file, view)]);
    };
    let count = members.last().map_or(0, |m| m.elements.end);
    if view.elements() != count {
        return Err(format!("{role} of {weight} has the shape {:?}, not {count} elements", view.shape));
    }
    let entry = |m: &Member| {
        let parts = match m.elements.is_empty() {
            true => Vec::new(),
            false => vec![Part::of(file, view, m.elements.clone(), 0)],
        };
        Entry::of(&m.name, role, view.dtype, m.shape.clone(), parts)
    };
    Ok(members.iter().map(entry).collect())
}
