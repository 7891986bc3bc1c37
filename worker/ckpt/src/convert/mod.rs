//! Writes a checkpoint anew in another format, for another stage or number of ranks, from any [`Source`].
//!
//! First the whole result is planned: every file with its values and, for each tensor, which elements of which tensor of
//! the source it holds ([`file`]). Then the files are written in parallel, tensors flowing through windows of fixed size
//! ([`run`]), into a hidden folder that survives a kill ([`output`]) and gets its name when all of it is there.
mod beside;
mod deepspeed;
mod earlier;
mod file;
mod groups;
mod native;
pub(crate) mod output;
mod run;
mod state;
mod steps;
mod universal;

pub use self::groups::{Ungrouped, ungrouped};

use self::file::{Content, FilePlan};
use self::output::Output;
use self::state::State;
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::source::Source;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A checkpoint of ours.
    Native,
    /// A ZeRO checkpoint in DeepSpeed's own layout.
    DeepSpeed,
    /// DeepSpeed's universal format, for stages 1 to 3 at once.
    Universal,
}

/// How to convert.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    pub to: Target,
    /// ZeRO stage, 1 to 3; that of the source when it has one, else 2.
    pub stage: Option<u8>,
    /// Ranks; those of the source when it says them, else 1.
    pub world: Option<u32>,
    /// Elements of a rank's part from which stage 3 begins another sub-group (`sub_group_size` of the config).
    pub sub_group_size: u64,
    /// Type of the module's copies of trained weights; that of the source when it has one, else F32.
    pub dtype: Option<Dtype>,
    /// Groups, counted from 0, of weights of which the checkpoint doesn't say it (those of [`ungrouped`]). When any is given,
    /// the others of those are in group 0.
    pub groups: BTreeMap<String, usize>,
    /// Bytes that may be used beside the plan.
    pub memory: u64,
    /// Replace a folder that was made by converting.
    pub force: bool,
}

/// Least memory that converting can work with, bytes.
const MEMORY_MIN: u64 = 64 << 20;
/// Most ranks that are written.
const WORLD_MAX: u32 = 65_536;

impl ConvertOptions {
    /// Defaults for a target.
    pub fn to(to: Target) -> ConvertOptions {
        ConvertOptions {
            to,
            stage: None,
            world: None,
            sub_group_size: 1_000_000_000,
            dtype: None,
            groups: BTreeMap::new(),
            memory: 512 << 20,
            force: false,
        }
    }

    fn check(&self) -> Result<()> {
        let wrong = |what: String| Err(CkptError::invalid(what));
        if self.stage.is_some_and(|s| !(1..=3).contains(&s)) {
            return wrong(format!("a ZeRO stage is 1, 2 or 3, not {}", self.stage.unwrap_or(0)));
        }
        if self.world.is_some_and(|w| w == 0 || w > WORLD_MAX) {
            return wrong(format!("a world has 1 to {WORLD_MAX} ranks"));
        }
        if self.sub_group_size == 0 {
            return wrong("a sub-group has at least one element".into());
        }
        if self.memory < MEMORY_MIN {
            return wrong(format!("converting needs at least {} of memory", crate::error::bytes(MEMORY_MIN)));
        }
        if self.dtype.is_some_and(|d| !d.is_float()) {
            return wrong("a model computes in F32, BF16 or F16".into());
        }
        Ok(())
    }
}

/// What was written.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ConvertReport {
    pub path: PathBuf,
    pub step: u64,
    pub world: u32,
    /// ZeRO stage; `None` for the universal format.
    pub stage: Option<u8>,
    pub files: u64,
    /// Of files that were planned.
    pub bytes: u64,
    /// Files that an interrupted conversion had finished.
    pub reused: u64,
    /// What the source has not, or what can't be said in the target's format.
    pub notices: Vec<String>,
}

/// The files of a result, and what is worth knowing about it.
struct Plan {
    files: Vec<FilePlan>,
    stage: Option<u8>,
    world: u32,
}

/// Writes `out` from `source`. `progress` gets (bytes done, bytes to do).
///
/// `out` is complete or absent. It may exist when it is empty or, with `force`, when it was made by converting. What an
/// earlier conversion of the same source with the same options had finished before it was killed is checked and kept.
pub fn convert(
    source: &dyn Source,
    out: &Path,
    options: &ConvertOptions,
    progress: impl FnMut(u64, u64),
) -> Result<ConvertReport> {
    options.check()?;
    source.require_weights()?;
    let mut state = State::of(source, options)?;
    let mut plan = match options.to {
        Target::Native => native::plan(&mut state, options)?,
        Target::DeepSpeed => deepspeed::plan(&mut state, options)?,
        Target::Universal => universal::plan(&mut state)?,
    };
    if options.to != Target::Native {
        beside::add(source, &mut state, &mut plan)?;
    }
    let bytes = plan.files.iter().map(FilePlan::bytes).sum();
    let mut output = Output::begin(source, out, options, bytes)?;
    let result = write(source, &mut state, &plan, &mut output, options, progress);
    match result {
        Ok((reused, path)) => Ok(report(path, state, &plan, reused)),
        Err(e) => {
            output.discard();
            Err(e)
        }
    }
}

/// Writes the files of another program's training state into the folder `dir`, which the caller makes, names and removes;
/// nothing else is in it afterwards but what was. All of it is durable.
pub(crate) fn convert_into(
    source: &dyn Source,
    dir: &Path,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    options.check()?;
    source.require_weights()?;
    let mut state = State::of(source, options)?;
    let plan = match options.to {
        Target::Native => return Err(CkptError::invalid("a checkpoint of ours has a folder of its own")),
        Target::DeepSpeed => deepspeed::plan(&mut state, options)?,
        Target::Universal => universal::plan(&mut state)?,
    };
    let bytes = plan.files.iter().map(FilePlan::bytes).sum();
    let mut output = Output::within(dir, bytes)?;
    run::run(source, &state, &plan.files, &mut output, options.memory, |_, _| {})?;
    crate::disk::sync_all_of(dir)?;
    Ok(report(dir.to_owned(), state, &plan, 0))
}

fn report(path: PathBuf, state: State, plan: &Plan, reused: u64) -> ConvertReport {
    ConvertReport {
        path,
        step: state.step,
        world: plan.world,
        stage: plan.stage,
        files: plan.files.len() as u64,
        bytes: plan.files.iter().map(FilePlan::bytes).sum(),
        reused,
        notices: state.notices,
    }
}

/// Files that were reused, and where the result is.
fn write(
    source: &dyn Source,
    state: &mut State,
    plan: &Plan,
    output: &mut Output,
    options: &ConvertOptions,
    progress: impl FnMut(u64, u64),
) -> Result<(u64, PathBuf)> {
    let done = run::run(source, state, &plan.files, output, options.memory, progress)?;
    if options.to == Target::Native {
        native::finish(state, plan, &output.dir, &done)?;
    }
    Ok((done.reused, output.publish()?))
}
