//! Converts a checkpoint of any [`TensorSource`] to another format, ZeRO stage or number of ranks.
//!
//! First the result is planned: every file with its values and, for each tensor, the source
//! elements to store ([`file_plan`]). Then the files are written in parallel, with tensors streamed
//! through windows of a fixed size ([`write_files`]). The output directory is hidden until it is
//! complete. A conversion reuses files that a killed conversion finished ([`output`]).
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
    /// ZeRO stage of the result, 1 to 3. `None` means the stage of the source, or 2 for a source
    /// without a stage.
    pub stage: Option<u8>,
    /// Number of ranks of the result. `None` means the number of ranks of the source, or 1 if that
    /// number is unknown.
    pub world: Option<u32>,
    /// Number of elements per rank at which a ZeRO-3 sub-group is full (`sub_group_size` in
    /// DeepSpeed's config).
    pub sub_group_size: u64,
    /// Dtype of the copies of trained weights in DeepSpeed's model files. `None` means the dtype of
    /// these copies in the source, or F32 if that dtype is unknown.
    pub dtype: Option<Dtype>,
    /// Group index, from 0, by name of each weight that the source doesn't assign to a group (see
    /// [`find_ungrouped_weights`]). If the map isn't empty, ungrouped weights without an entry
    /// belong to group 0.
    pub groups: BTreeMap<String, usize>,
    /// Memory that the conversion may use in addition to the list of planned files, in bytes.
    pub memory: u64,
    /// Whether to replace an output directory that an earlier conversion wrote.
    pub force: bool,
}

/// Minimum of [`ConvertOptions::memory`], in bytes.
const MEMORY_MIN: u64 = 64 << 20;
/// Maximum number of ranks of a result.
const WORLD_MAX: u32 = 65_536;

impl ConvertOptions {
    /// Makes the default options for a target: stage, number of ranks and dtype of the source,
    /// sub-groups of 10⁹ elements, and 512 MiB of memory.
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

    /// Fails with [`CkptError::InvalidOption`] if an option is outside of its limits.
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
    /// ZeRO stage of the result, or `None` for the universal format.
    pub stage: Option<u8>,
    /// Number of files of the result.
    pub files: u64,
    /// Total size of the tensors in the files of the result, in bytes.
    pub bytes: u64,
    /// Number of files that were reused, since an interrupted conversion had finished them.
    pub reused: u64,
    /// Notices for the user, such as losses that the target format causes.
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
/// `out` is either complete or absent. An existing directory `out` is replaced if `out` is empty,
/// or if `force` is set and an earlier conversion wrote `out`. Files that a killed conversion of
/// the unchanged source with equal options had finished are verified and reused.
///
/// # Errors
/// Fails if an option is invalid, the source is damaged, the target needs information that the
/// source lacks, `out` can't be replaced, or I/O fails.
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

/// Writes all planned files, for a native target also the manifest, and publishes the output
/// directory. Returns the number of reused files and the final path of the directory.
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
