//! The training state of a source, put in the order that every target needs.
use super::groups::{self, Group, Groups};
use super::{ConvertOptions, Target};
use crate::catalog::{Role, TensorInfo, Tie, is_plain_file_name};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::passthrough::Extras;
use crate::pickle::Object;
use crate::source::Source;
use crate::state::LossScale;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;

/// What a format that doesn't say it is taken to be written by.
const DEEPSPEED: &str = "0.19.8";

/// Said where no training state is.
const ALONE: &str = "it holds weights alone: a run that goes on from it begins its optimizer, learning rate and data at step 0";

/// All of it.
pub(super) struct State {
    pub(super) path: PathBuf,
    pub(super) tensors: Vec<TensorInfo>,
    index: HashMap<(Role, String), usize>,
    /// Indices of weights per group, in the optimizer's order.
    pub(super) groups: Vec<Group>,
    /// Trained weights of which nothing says in which group they are; only a checkpoint of ours is written with them.
    pub(super) loose: Option<Group>,
    /// The caller says more of the groups than the source.
    pub(super) regrouped: bool,
    /// Weights that are not trained.
    pub(super) frozen: Vec<usize>,
    /// Weights that are frozen now, also if a group has them.
    pub(super) said_frozen: Vec<usize>,
    pub(super) buffers: Vec<usize>,
    /// States that the optimizer keeps of each weight.
    pub(super) roles: Vec<Role>,
    pub(super) step: u64,
    /// Samples consumed, where the source says it.
    pub(super) samples: Option<u64>,
    pub(super) tokens: u64,
    pub(super) config: Map<String, Value>,
    pub(super) texts: Vec<crate::catalog::TextFile>,
    pub(super) precision: Dtype,
    pub(super) stage: u8,
    pub(super) world: u32,
    pub(super) version: String,
    pub(super) ties: Vec<Tie>,
    /// Of fp16.
    pub(super) loss_scale: Option<LossScale>,
    /// Ranks that wrote the source.
    pub(super) wrote: Option<u32>,
    pub(super) extras: Extras,
    pub(super) notices: Vec<String>,
}

impl State {
    pub(super) fn of(source: &dyn Source, options: &ConvertOptions) -> Result<State> {
        let (said, mut extras) = (source.state(), source.extras()?);
        let given = groups::listed(&said, &mut extras);
        if extras.scheduler == Object::None {
            extras.scheduler = Object::from_json(&said.scheduler);
        }
        let tensors = source.tensors();
        let index: HashMap<(Role, String), usize> =
            tensors.iter().enumerate().map(|(i, t)| ((t.role, t.name.clone()), i)).collect();
        let step = source.step();
        let refused = |what: String| CkptError::Unsupported { path: source.path().to_owned(), what };
        let states = Role::ALL.into_iter().filter(|r| r.is_optimizer_state());
        let roles: Vec<Role> = states.filter(|&r| tensors.iter().any(|t| t.role == r)).collect();
        if let Some(why) = source.unread().filter(|_| roles.is_empty()) {
            return Err(refused(format!("{why}; --to safetensors writes its weights")));
        }
        let alone = source.is_weights_alone();
        let step = match alone && options.to == Target::Native {
            true => {
                extras.notices.push(ALONE.into());
                0
            }
            false => {
                let listed = extras.native.is_some() || !given.is_empty();
                training_step(step, !roles.is_empty(), listed, alone, options.to).map_err(refused)?
            }
        };
        let Groups { groups, loose } = groups::complete(given, &tensors, &said.steps, options)
            .and_then(|given| given.found(&index, &roles, step))
            .map_err(refused)?;
        if let Some(loose) = &loose {
            extras.notices.push(format!(
                "{}: their states go along by name, and the job says the hyper-parameters of each (--group says which is in which)",
                groups::unknown(loose.weights.len(), groups.len())
            ));
        }
        let all_trained = || groups.iter().chain(&loose);
        let step = match options.to {
            Target::Native if extras.native.is_none() => counted(step, all_trained(), &mut extras.notices),
            _ => step,
        };
        let all = tensors.as_slice();
        let of_role = |role: Role| (0..all.len()).filter(move |&i| all[i].role == role);
        let grouped: HashSet<usize> = all_trained().flat_map(|g| g.weights.iter().copied()).collect();
        // weights alone are neither trained nor frozen
        let frozen = of_role(Role::Weight).filter(|i| !alone && !grouped.contains(i)).collect();
        let late: HashSet<&str> = said.frozen.iter().chain(&extras.frozen_late).map(String::as_str).collect();
        let said_frozen = of_role(Role::Weight)
            .filter(|i| !grouped.contains(i) || late.contains(all[*i].name.as_str()))
            .collect();
        let buffers = of_role(Role::Buffer).collect();
        Ok(State {
            path: source.path().to_owned(),
            groups,
            loose,
            regrouped: !options.groups.is_empty(),
            frozen,
            said_frozen,
            buffers,
            roles,
            step,
            samples: said.samples,
            tokens: source.tokens().unwrap_or(0),
            config: source.hf_config().cloned().unwrap_or_default(),
            texts: source.texts().to_vec(),
            precision: options.dtype.or(extras.precision).unwrap_or(Dtype::F32),
            stage: options.stage.or(said.stage.filter(|s| (1..=3).contains(s))).unwrap_or(2),
            world: options.world.or(said.world).unwrap_or(1),
            version: extras.version.clone().unwrap_or_else(|| DEEPSPEED.into()),
            notices: std::mem::take(&mut extras.notices),
            loss_scale: said.loss_scale(),
            ties: said.ties,
            wrote: said.world,
            extras,
            index,
            tensors,
        })
    }

    /// Index of the optimizer's state of a weight.
    pub(super) fn state_of(&self, weight: usize, role: Role) -> Option<usize> {
        self.index.get(&(role, self.tensors[weight].name.clone())).copied()
    }

    pub(super) fn elements(&self, tensor: usize) -> u64 {
        self.tensors[tensor].elements()
    }

    pub(super) fn name(&self, tensor: usize) -> &str {
        &self.tensors[tensor].name
    }

    /// Name of the folder of a ZeRO checkpoint.
    pub(super) fn tag(&self) -> String {
        let own = self.extras.tag.as_ref().filter(|t| is_plain_file_name(t) && !t.ends_with("_universal"));
        own.cloned().unwrap_or_else(|| format!("global_step{}", self.step))
    }

    /// The step of weights that share one; `Err` names two that differ.
    pub(super) fn one_step(
        &self,
        group: &Group,
        members: Range<usize>,
    ) -> std::result::Result<f64, CkptError> {
        let steps = &group.steps[members.clone()];
        let first = steps.first().copied().unwrap_or(self.step as f64);
        match steps.iter().position(|&s| s != first) {
            None => Ok(first),
            Some(i) => {
                let (a, b) =
                    (self.name(group.weights[members.start]), self.name(group.weights[members.start + i]));
                let what = format!(
                    "{a} has had {first} updates and {b} {}: a ZeRO checkpoint keeps one number for a group, a universal one keeps them (--to universal)",
                    steps[i]
                );
                Err(CkptError::Unsupported { path: self.path.clone(), what })
            }
        }
    }
}

/// The step at which a run of ours goes on: it counts those that updated the weights.
fn counted<'a>(step: u64, groups: impl Iterator<Item = &'a Group>, notices: &mut Vec<String>) -> u64 {
    let most = groups
        .flat_map(|g| &g.steps)
        .copied()
        .fold(None, |most: Option<f64>, s| Some(most.map_or(s, |most| most.max(s))));
    let Some(updates) = most.map(|s| s as u64).filter(|&updates| updates != step) else { return step };
    notices.push(format!(
        "its optimizer has done {updates} updates in {step} steps: a run goes on at step {updates}"
    ));
    updates
}

/// The step of what can be a training state in the target's format. SGD without momentum keeps no states.
fn training_step(
    step: Option<u64>,
    has_states: bool,
    has_groups: bool,
    alone: bool,
    to: Target,
) -> std::result::Result<u64, String> {
    match (step, has_states) {
        (_, false) if alone => Err("it holds weights alone, which are no training state: --to native and --to safetensors write them, and resume.from begins a run with them as they are".into()),
        (None, false) => Err("it is a training state that doesn't say its step and lacks its optimizer's states; --to safetensors writes its weights".into()),
        (None, true) => Err("it doesn't say its step".into()),
        (Some(step), false) if !has_groups => Err(format!(
            "it is the training state of step {step} but lacks the optimizer's; --to safetensors writes its weights"
        )),
        (Some(_), false) if to != Target::Native => {
            Err("it has no optimizer state, which this target needs; use --to safetensors or --to native".into())
        }
        (Some(step), _) => Ok(step),
    }
}
