//! Converts a checkpoint of any [`Source`] to another format, ZeRO stage or number of ranks.
//!
//! First the result is planned: every file with its values and, for each tensor, the elements of
//! source tensors that it stores ([`file_plan`]). Then the files are written in parallel, with
//! tensors streamed through windows of a fixed size ([`write_files`]). The output directory is
//! hidden until it is complete, and a killed conversion can be continued ([`output`]).
mod companions;
mod deepspeed;
mod error;
mod file_plan;
mod native;
mod notice;
pub(crate) mod output;
mod param_groups;
mod resume_check;
mod training_state;
mod universal;
mod write_files;
mod write_steps;

pub use self::error::ConvertError;
pub use self::notice::ConvertNotice;
pub use self::param_groups::{UngroupedWeights, find_ungrouped};

use self::file_plan::{FileContent, FilePlan};
use self::output::Output;
use self::training_state::SourceState;
use crate::dtype::Dtype;
use crate::error::{CkptError, OptionProblem, Result};
use crate::source::TensorSource;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The format that a conversion writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvertTarget {
    /// A native checkpoint of `launch`.
    Native,
    /// A ZeRO checkpoint in DeepSpeed's layout.
    DeepSpeed,
    /// DeepSpeed's universal format, which stages 1 to 3 load.
    Universal,
}

/// Options of [`convert`].
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// The format to write.
    pub target: ConvertTarget,
    /// ZeRO stage, 1 to 3; by default that of the source, or 2 if it has none.
    pub stage: Option<u8>,
    /// Number of ranks; by default that of the source, or 1 if unknown.
    pub world: Option<u32>,
    /// Elements of a ZeRO-3 sub-group per rank (`sub_group_size` in DeepSpeed's config).
    pub sub_group_size: u64,
    /// Dtype of the module's copies of trained weights; by default that of the source, or F32 if
    /// unknown.
    pub dtype: Option<Dtype>,
    /// Parameter group, counted from 0, by name of a weight that the source doesn't assign to a
    /// group (see [`find_ungrouped`]). When the map isn't empty, other such weights are in group 0.
    pub groups: BTreeMap<String, usize>,
    /// Memory for the conversion in addition to the plan, bytes.
    pub memory: u64,
    /// Replace an output directory that an earlier conversion made.
    pub force: bool,
}

/// Least memory with which a conversion works, bytes.
const MEMORY_MIN: u64 = 64 << 20;
/// Most ranks of a result.
const WORLD_MAX: u32 = 65_536;

impl ConvertOptions {
    /// Default options for a target.
    pub fn new(target: ConvertTarget) -> ConvertOptions {
        ConvertOptions {
            target,
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
        let problem = if let Some(stage) = self.stage.filter(|s| !(1..=3).contains(s)) {
            OptionProblem::Stage { stage }
        } else if let Some(world) = self.world.filter(|w| !(1..=WORLD_MAX).contains(w)) {
            OptionProblem::WorldSize { world, limit: WORLD_MAX }
        } else if self.sub_group_size == 0 {
            OptionProblem::EmptySubGroup
        } else if self.memory < MEMORY_MIN {
            OptionProblem::Memory { needed: MEMORY_MIN, limit: self.memory }
        } else if let Some(dtype) = self.dtype.filter(|d| !d.is_float()) {
            OptionProblem::Dtype { dtype }
        } else {
            return Ok(());
        };
        Err(CkptError::invalid_option(problem))
    }
}

/// The result of a conversion.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ConvertReport {
    /// The output directory.
    pub path: PathBuf,
    /// The optimizer step of the checkpoint.
    pub step: u64,
    /// Number of ranks.
    pub world: u32,
    /// ZeRO stage; `None` for the universal format.
    pub stage: Option<u8>,
    /// Number of files.
    pub files: u64,
    /// Total size of the planned files' tensors.
    pub bytes: u64,
    /// Number of files that an interrupted conversion had finished.
    pub reused: u64,
    /// Remarks for the user.
    pub notices: Vec<ConvertNotice>,
}

/// The planned files of a result.
struct OutputPlan {
    files: Vec<FilePlan>,
    stage: Option<u8>,
    world: u32,
}

/// Converts `source` and writes the result to the directory `out`. `progress` gets (bytes done,
/// total bytes).
///
/// `out` is either complete or absent. It may exist if it is empty or, with `force`, if a
/// conversion made it. Files that a killed conversion of an unchanged source with equal options had
/// finished are verified and reused.
///
/// # Errors
/// When options are invalid, the source is damaged or lacks what the target needs, `out` can't be
/// replaced, or I/O fails.
pub fn convert(
    source: &dyn TensorSource,
    out: &Path,
    options: &ConvertOptions,
    progress: impl FnMut(u64, u64),
) -> Result<ConvertReport> {
    options.check()?;
    source.require_weights()?;
    let mut state = SourceState::from_source(source, options)?;
    let mut plan = match options.target {
        ConvertTarget::Native => native::plan(&mut state, options)?,
        ConvertTarget::DeepSpeed => deepspeed::plan(&mut state, options)?,
        ConvertTarget::Universal => universal::plan(&mut state)?,
    };
    if options.target != ConvertTarget::Native {
        companions::add_companions(source, &mut state, &mut plan)?;
    }
    let bytes = plan.files.iter().map(FilePlan::bytes).sum();
    let mut output = Output::begin(source, out, options, bytes)?;
    let result = write_output(source, &mut state, &plan, &mut output, options, progress);
    match result {
        Ok((reused, path)) => Ok(make_report(path, state, &plan, reused)),
        Err(e) => {
            output.discard();
            Err(e)
        }
    }
}

/// Writes the files of an external training state into the existing directory `dir`, which the
/// caller publishes or removes. The files are durable on return.
pub(crate) fn convert_into(
    source: &dyn TensorSource,
    dir: &Path,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    options.check()?;
    source.require_weights()?;
    let mut state = SourceState::from_source(source, options)?;
    let plan = match options.target {
        ConvertTarget::Native => {
            return Err(CkptError::internal("convert_into does not write native checkpoints"));
        }
        ConvertTarget::DeepSpeed => deepspeed::plan(&mut state, options)?,
        ConvertTarget::Universal => universal::plan(&mut state)?,
    };
    let bytes = plan.files.iter().map(FilePlan::bytes).sum();
    let mut output = Output::in_directory(dir, bytes)?;
    write_files::write_files(source, &state, &plan.files, &mut output, options.memory, |_, _| {})?;
    crate::disk::sync_all_of(dir)?;
    Ok(make_report(dir.to_owned(), state, &plan, 0))
}

fn make_report(path: PathBuf, state: SourceState, plan: &OutputPlan, reused: u64) -> ConvertReport {
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

/// Writes all files and publishes the directory. Returns the number of reused files and the final
/// path.
fn write_output(
    source: &dyn TensorSource,
    state: &mut SourceState,
    plan: &OutputPlan,
    output: &mut Output,
    options: &ConvertOptions,
    progress: impl FnMut(u64, u64),
) -> Result<(u64, PathBuf)> {
    let done = write_files::write_files(source, state, &plan.files, output, options.memory, progress)?;
    if options.target == ConvertTarget::Native {
        native::finish(state, plan, &output.dir, &done)?;
    }
    Ok((done.reused, output.publish()?))
}
