//! Converts a checkpoint of any [`TensorSource`] to another format, ZeRO stage or number of ranks.
//!
//! First the result is planned: every file with its values and, for each tensor, the elements of
//! source tensors that it stores ([`file_plan`]). Then the files are written in parallel, with
//! tensors streamed through windows of a fixed size ([`write_files`]). The output directory is
//! hidden until it is complete. A conversion reuses the files that a killed one finished
//! ([`output`]).
mod companion_files;
mod deepspeed;
mod error;
mod file_plan;
mod native;
mod notice;
pub(crate) mod output;
mod param_groups;
mod resume_check;
mod source_state;
mod universal;
mod write_files;
mod write_steps;

pub use self::error::ConvertError;
pub use self::notice::ConvertNotice;
pub use self::param_groups::{UngroupedWeights, find_ungrouped_weights};

use self::file_plan::{FileContent, FilePlan};
use self::output::ConvertOutput;
use self::source_state::SourceState;
use crate::dtype::Dtype;
use crate::error::{CkptError, OptionProblem, Result};
use crate::tensor_source::TensorSource;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The format that a conversion writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvertTarget {
    /// A native checkpoint of `launch`.
    Native,
    /// A ZeRO checkpoint in DeepSpeed's layout.
    DeepSpeed,
    /// DeepSpeed's universal format, which ZeRO stages 1 to 3 load.
    Universal,
}

/// Options of [`convert_checkpoint`].
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// The format to write.
    pub target: ConvertTarget,
    /// ZeRO stage of the result, 1 to 3. By default the stage of the source, or 2 if it has none.
    pub stage: Option<u8>,
    /// Number of ranks of the result. By default that of the source, or 1 if it is unknown.
    pub world: Option<u32>,
    /// Elements of a ZeRO-3 sub-group per rank (`sub_group_size` in DeepSpeed's config).
    pub sub_group_size: u64,
    /// Dtype of the module's copies of trained weights. By default that of the source, or F32 if it
    /// is unknown.
    pub dtype: Option<Dtype>,
    /// Groups, counted from 0, of weights that the source doesn't assign to a group (see
    /// [`find_ungrouped_weights`]), by name. If the map isn't empty, ungrouped weights that it
    /// lacks are in group 0.
    pub groups: BTreeMap<String, usize>,
    /// Memory that the conversion may use in addition to the plan, in bytes.
    pub memory: u64,
    /// Replace an output directory that an earlier conversion wrote.
    pub force: bool,
}

/// Minimum of [`ConvertOptions::memory`], in bytes.
const MEMORY_MIN: u64 = 64 << 20;
/// Maximum number of ranks of a result.
const WORLD_MAX: u32 = 65_536;

impl ConvertOptions {
    /// Makes the default options for a target.
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

    /// Returns [`CkptError::InvalidOption`] if an option is outside of its limits.
    fn check_limits(&self) -> Result<()> {
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
    /// Optimizer step of the result.
    pub step: u64,
    /// Number of ranks of the result.
    pub world: u32,
    /// ZeRO stage of the result; `None` for the universal format.
    pub stage: Option<u8>,
    /// Number of files of the result.
    pub files: u64,
    /// Total size of the tensors in these files, in bytes.
    pub bytes: u64,
    /// Number of files that an interrupted conversion had finished and that were reused.
    pub reused: u64,
    /// Notices for the user.
    pub notices: Vec<ConvertNotice>,
}

/// The planned files of a result.
struct OutputPlan {
    files: Vec<FilePlan>,
    stage: Option<u8>,
    world: u32,
}

/// Converts `source` and writes the result to the directory `out`. Calls `progress` with the number
/// of written bytes and the total number.
///
/// `out` is either complete or absent. It may exist before the call if it is empty or, with
/// `force`, if an earlier conversion wrote it. Files that a killed conversion of this unchanged
/// source with equal options had finished are verified and reused.
///
/// # Errors
/// Fails if an option is invalid, the source is damaged or lacks what the target needs, `out` can't
/// be replaced, or I/O fails.
pub fn convert_checkpoint(
    source: &dyn TensorSource,
    out: &Path,
    options: &ConvertOptions,
    progress: impl FnMut(u64, u64),
) -> Result<ConvertReport> {
    options.check_limits()?;
    source.require_weights()?;
    let mut state = SourceState::from_source(source, options)?;
    let mut plan = match options.target {
        ConvertTarget::Native => native::plan_native(&mut state, options)?,
        ConvertTarget::DeepSpeed => deepspeed::plan_deepspeed(&mut state, options)?,
        ConvertTarget::Universal => universal::plan_universal(&mut state)?,
    };
    if options.target != ConvertTarget::Native {
        companion_files::add_companion_files(source, &mut state, &mut plan)?;
    }
    let bytes = plan.files.iter().map(FilePlan::bytes).sum();
    let mut output = ConvertOutput::create_or_reuse(source, out, options, bytes)?;
    let result = write_output(source, &mut state, &plan, &mut output, options, progress);
    match result {
        Ok((reused, path)) => Ok(make_report(path, state, &plan, reused)),
        Err(e) => {
            output.discard();
            Err(e)
        }
    }
}

/// Converts `source` to a DeepSpeed or universal checkpoint, and writes and syncs its files to the
/// existing directory `dir`. The caller publishes or removes the directory. Adds no companion
/// files.
pub(crate) fn convert_into_directory(
    source: &dyn TensorSource,
    dir: &Path,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    options.check_limits()?;
    source.require_weights()?;
    let mut state = SourceState::from_source(source, options)?;
    let plan = match options.target {
        ConvertTarget::Native => {
            return Err(CkptError::internal("convert_into does not write native checkpoints"));
        }
        ConvertTarget::DeepSpeed => deepspeed::plan_deepspeed(&mut state, options)?,
        ConvertTarget::Universal => universal::plan_universal(&mut state)?,
    };
    let bytes = plan.files.iter().map(FilePlan::bytes).sum();
    let mut output = ConvertOutput::open_existing_directory(dir, bytes)?;
    write_files::write_planned_files(source, &state, &plan.files, &mut output, options.memory, |_, _| {})?;
    crate::disk::sync_file_system(dir)?;
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

/// Writes all files, and the manifest of a native checkpoint, and publishes the output directory.
/// Returns the number of reused files and the final path.
fn write_output(
    source: &dyn TensorSource,
    state: &mut SourceState,
    plan: &OutputPlan,
    output: &mut ConvertOutput,
    options: &ConvertOptions,
    progress: impl FnMut(u64, u64),
) -> Result<(u64, PathBuf)> {
    let done =
        write_files::write_planned_files(source, state, &plan.files, output, options.memory, progress)?;
    if options.target == ConvertTarget::Native {
        native::write_native_manifest(state, plan, &output.dir, &done)?;
    }
    Ok((done.reused, output.publish()?))
}
