//! Does another program's checkpoint fit the job's model: which of its tensors fills which of ours.
use crate::{
    error::{Error, Result},
    model::{Model, Tie},
    params::Unit,
    stages::ScheduleBound,
    state::state_roles,
};
use ckpt::{Foreign, Request, Role, Source, TensorInfo};
use contract::job::OptimizerSpec;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Names listed in one message.
const SHOWN: usize = 4;
/// Elements compared at a time.
const COMPARED: usize = 1 << 18;

/// What the checkpoint has for this job.
#[derive(Debug, PartialEq)]
pub(super) struct Fit {
    /// Our name of a weight → the checkpoint's, where they differ (a tied matrix stored under its other name).
    pub(super) renamed: HashMap<String, String>,
    /// The optimizer's states are there; otherwise only weights are.
    pub(super) moments: bool,
    /// Trained parameters that are frozen there: their states begin anew.
    pub(super) anew: HashSet<String>,
    /// Buffers that the job's model has no place for.
    pub(super) unused: Vec<String>,
    /// Second names that are stored as well, with the name each must be equal to.
    aliases: Vec<(String, String)>,
}

/// Our side of the comparison.
pub(super) struct Wanted<'a> {
    /// `model_type` of its `config.json`.
    pub(super) family: &'a str,
    pub(super) units: &'a [Unit],
    pub(super) ties: &'a [Tie],
    pub(super) model: &'a dyn Model,
    /// Whose states are looked for; `None`: weights alone.
    pub(super) optimizer: Option<&'a OptimizerSpec>,
    /// Only parameters of these names are looked for.
    pub(super) meant: fn(&str) -> bool,
}

/// `a, b and 3 more`.
pub(super) fn some<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Every name under which a checkpoint may store a weight that this job trains.
pub(super) fn trained_names(bound: &ScheduleBound) -> HashSet<String> {
    let (ties, model) = (bound.trainer.model.ties(), &bound.trainer.model);
    let mut names = HashSet::new();
    for param in bound.trainer.engine.shards.iter().flat_map(|s| s.unit.trained_params()) {
        let alias = ties.iter().find(|t| t.target == param.name).map(|t| t.alias.clone());
        let bare = model.prefix().and_then(|prefix| param.name.strip_prefix(prefix)).map(str::to_owned);
        names.extend([Some(param.name.clone()), alias, bare].into_iter().flatten());
    }
    names
}

/// Fits the checkpoint to the model by names; one error with the first few of everything that doesn't.
pub(super) fn fit(source: &Foreign, wanted: &Wanted<'_>) -> Result<Fit> {
    source.require_weights().map_err(|e| Error::checkpoint(e.to_string()))?;
    let tensors = source.tensors();
    let stored: HashMap<(Role, &str), &TensorInfo> =
        tensors.iter().map(|t| ((t.role, t.name.as_str()), t)).collect();
    let mut fit = Fit {
        renamed: HashMap::new(),
        moments: false,
        anew: HashSet::new(),
        unused: Vec::new(),
        aliases: Vec::new(),
    };
    let mut wrong = Wrong::default();
    let mut used = BTreeSet::new();
    for param in wanted.units.iter().flat_map(|u| &u.params).filter(|p| (wanted.meant)(&p.name)) {
        let there = name_there(source, &stored, wanted, &param.name);
        let Some(tensor) = there.and_then(|name| stored.get(&(Role::Weight, name))) else {
            wrong.missing.push(param.name.clone());
            continue;
        };
        if !tensor.shape.iter().copied().eq(param.shape.iter().map(|&n| n as u64)) {
            wrong.shapes.push(format!("{} {:?} (the job: {:?})", param.name, tensor.shape, param.shape));
        }
        used.insert(tensor.name.as_str());
        if tensor.name != param.name {
            fit.renamed.insert(param.name.clone(), tensor.name.clone());
        }
    }
    for tensor in tensors.iter().filter(|t| t.role == Role::Weight && !used.contains(t.name.as_str())) {
        match wanted.ties.iter().find(|t| t.alias == tensor.name) {
            Some(tie) => fit.aliases.push((tensor.name.clone(), tie.target.clone())),
            None if wanted.model.is_constant(&tensor.name) => fit.unused.push(tensor.name.clone()),
            None => wrong.extra.push(tensor.name.clone()),
        }
    }
    wrong.refuse(source, wanted.family)?;
    fit.unused.extend(tensors.iter().filter(|t| t.role == Role::Buffer).map(|t| t.name.clone()));
    (fit.moments, fit.anew) = moments(source, wanted, &fit.renamed, &stored)?;
    Ok(fit)
}

/// Under which name the checkpoint stores our weight `name`.
fn name_there<'a>(
    source: &'a Foreign,
    stored: &HashMap<(Role, &'a str), &'a TensorInfo>,
    wanted: &Wanted<'a>,
    name: &'a str,
) -> Option<&'a str> {
    let holds = |name: &&'a str| stored.contains_key(&(Role::Weight, *name));
    let theirs = source.facts().ties.iter().find(|t| t.alias == name).map(|t| t.target.as_str());
    // tied in the job: it may be stored under the second name alone
    let ours = wanted.ties.iter().find(|t| t.target == name).map(|t| t.alias.as_str());
    // a model that was saved without its head: its names begin after the prefix
    let bare = wanted.model.prefix().and_then(|prefix| name.strip_prefix(prefix));
    [Some(name), bare, theirs, ours].into_iter().flatten().find(holds)
}

/// What a `config.json` says that the model is.
pub(super) fn model_type(config: &Map<String, Value>) -> Option<&str> {
    config.get("model_type").and_then(Value::as_str)
}

/// Everything about names and shapes that doesn't fit.
#[derive(Default)]
struct Wrong {
    missing: Vec<String>,
    shapes: Vec<String>,
    extra: Vec<String>,
}

impl Wrong {
    fn refuse(&self, source: &Foreign, family: &str) -> Result<()> {
        let parts = [
            ("it lacks", &self.missing),
            ("of other shapes are", &self.shapes),
            ("the job's model hasn't", &self.extra),
        ];
        let mut said: Vec<String> = parts
            .iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(what, names)| format!("{what} {}", some(names)))
            .collect();
        if said.is_empty() {
            return Ok(());
        }
        let theirs = source.hf_config().and_then(model_type);
        if let Some(theirs) = theirs.filter(|theirs| *theirs != family) {
            said.insert(0, format!("its config.json says {theirs}, the job's model is {family}"));
        }
        Err(Error::checkpoint(format!(
            "{} ({}) is of another model than the job's: {}; make train.model like its config.json",
            source.path().display(),
            source.facts().writer,
            said.join("; ")
        )))
    }
}

/// Are the optimizer's states there, and of which trained parameters aren't they, because they are frozen there? Any other
/// gap is an error, and so is a training state without any.
fn moments(
    source: &Foreign,
    wanted: &Wanted<'_>,
    renamed: &HashMap<String, String>,
    stored: &HashMap<(Role, &str), &TensorInfo>,
) -> Result<(bool, HashSet<String>)> {
    let none = HashSet::new();
    let Some(optimizer) = wanted.optimizer else { return Ok((false, none)) };
    let (facts, roles) = (source.facts(), state_roles(optimizer));
    let any = stored.keys().any(|(role, _)| role.is_optimizer_state());
    if roles.is_empty() || (!any && !facts.is_training_state()) {
        return Ok((any || (roles.is_empty() && facts.step.is_some()), none));
    }
    let (mut lost, mut frozen) = (Vec::new(), HashSet::new());
    for param in wanted.units.iter().flat_map(Unit::trained_params) {
        let there = renamed.get(&param.name).unwrap_or(&param.name);
        let shape: Vec<u64> = param.shape.iter().map(|&n| n as u64).collect();
        let has = |role: &Role| stored.get(&(*role, there.as_str())).is_some_and(|t| t.shape == shape);
        match roles.iter().find(|role| !has(role)) {
            Some(_) if facts.frozen.contains(there) => {
                frozen.insert(param.name.clone());
            }
            Some(role) => lost.push(format!("{role} of {}", param.name)),
            None => {}
        }
    }
    let refused = |why: String| Err(Error::checkpoint(format!("{}: {why}", source.path().display())));
    if !lost.is_empty() {
        return refused(format!(
            "it is the training state of step {} but lacks the optimizer's {} ({} in all){}; use another checkpoint, \
             or gather its weights (launch ckpt gather) and resume from those with a new optimizer",
            facts.step.map_or("unknown".into(), |s| s.to_string()),
            some(&lost),
            lost.len(),
            facts.unread().map(|why| format!(": {why}")).unwrap_or_default()
        ));
    }
    if let Some(other) = stored.keys().map(|(r, _)| *r).find(|r| r.is_optimizer_state() && !roles.contains(r))
    {
        return refused(format!(
            "it holds {other}, which {:?} has not: another optimizer wrote it; use that one, or gather its weights \
             (launch ckpt gather) and resume from those",
            optimizer.name
        ));
    }
    Ok((true, frozen))
}

/// A second name that is stored as a matrix of its own must hold the same values: the job ties them.
pub(super) fn check_aliases(source: &Foreign, fit: &Fit) -> Result<()> {
    let failed = |e: ckpt::CkptError| Error::checkpoint(e.to_string());
    for (alias, target) in &fit.aliases {
        let tensors = source.tensors();
        let total = |name: &str| {
            tensors.iter().find(|t| t.role == Role::Weight && t.name == name).map(TensorInfo::elements)
        };
        let target = fit.renamed.get(target).unwrap_or(target);
        let (Some(n), Some(m)) = (total(alias), total(target)) else { continue };
        let (mut a, mut b, mut at) = (vec![0f32; COMPARED], vec![0f32; COMPARED], 0u64);
        let mut same = n == m;
        while same && at < n {
            let len = (n - at).min(COMPARED as u64) as usize;
            let (first, second) = (&mut a[..len], &mut b[..len]);
            let role = Role::Weight;
            source
                .read_many(&mut [
                    Request { name: alias, role, start_element: at, out: first },
                    Request { name: target, role, start_element: at, out: second },
                ])
                .map_err(failed)?;
            same = first.iter().zip(second.iter()).all(|(x, y)| x.to_bits() == y.to_bits());
            at += len as u64;
        }
        if !same {
            return Err(Error::checkpoint(format!(
                "{}: {alias} and {target} hold different values, but the job ties them; set train.model.tie_word_embeddings: false",
                source.path().display()
            )));
        }
    }
    Ok(())
}
