//! Adapters that training begins with: the folder that `train.lora.from` names.
use super::fit::some;
use crate::{
    agree::agree,
    error::{Error, Result},
    params::Unit,
    stages::ScheduleBound,
    state::{Reading, read_own, spread},
    trained::LORA_FROM,
};
use ckpt::{
    Foreign, Source,
    peft::{is_adapter, open_adapters},
};
use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

/// Opens the folder and finds out whether its adapters are those that the model has: the same names, the same shapes.
pub fn check_adapters(folder: &Path, units: &[Unit]) -> std::result::Result<Foreign, String> {
    let source = open_adapters(folder).map_err(|e| e.to_string())?;
    let tensors = source.tensors();
    let mut there: HashMap<&str, &[u64]> =
        tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let (mut lacking, mut shapes) = (Vec::new(), Vec::new());
    for p in units.iter().flat_map(|u| &u.params).filter(|p| is_adapter(&p.name)) {
        match there.remove(p.name.as_str()) {
            None => lacking.push(p.name.clone()),
            Some(shape) if !shape.iter().copied().eq(p.shape.iter().map(|&n| n as u64)) => {
                shapes.push(format!("{} {shape:?} (the model: {:?})", p.name, p.shape));
            }
            Some(_) => {}
        }
    }
    let mut more: Vec<String> = there.into_keys().map(str::to_owned).collect();
    more.sort();
    let parts =
        [("they lack", lacking), ("of other shapes are", shapes), ("the model has no place for", more)];
    let said: Vec<String> = parts
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("{what} {}", some(names)))
        .collect();
    match said.is_empty() {
        true => Ok(source),
        false => Err(format!(
            "the adapters in {} are of another model than train.model.from: {}",
            folder.display(),
            said.join("; ")
        )),
    }
}

/// Loads them, where the job names a folder: each rank reads its own part. Collective.
pub(super) fn load_adapters(bound: &mut ScheduleBound) -> Result<()> {
    let Some(folder) = bound.train().lora.as_ref().and_then(|l| l.from.clone()) else { return Ok(()) };
    let units: Vec<Unit> = bound.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let opened = check_adapters(&folder, &units).map_err(|why| Error::job(format!("{LORA_FROM}: {why}")));
    agree(bound.trainer.engine.queue(), opened.as_ref().map(|_| ()).map_err(Clone::clone))?;
    let source = opened?;
    let (renamed, anew) = (HashMap::new(), HashSet::new());
    let reading =
        Reading { source: &source, renamed: &renamed, states: false, anew: &anew, meant: is_adapter };
    let read = read_own(bound, &reading).map_err(|e| Error::checkpoint(format!("{LORA_FROM}: {e}")));
    agree(bound.trainer.engine.queue(), read)?;
    spread(bound)
}
