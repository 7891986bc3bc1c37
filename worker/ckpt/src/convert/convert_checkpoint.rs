//! Converts a checkpoint to another format, ZeRO stage or number of ranks.
use super::file_plan::{self, OutputPlan};
use super::notice::ConvertNotice;
use super::options::{ConvertOptions, ConvertTarget};
use super::output::ConvertOutput;
use super::source_state::SourceState;
use super::{companion_files, deepspeed, native, universal, write_files};
use crate::catalog::TensorSource;
use crate::codec::disk;
use crate::error::{CkptError, Result};
use std::path::{Path, PathBuf};

/// What is reported to the user after a checkpoint was converted: path, step, number of ranks,
/// files and bytes.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ConvertReport {
    /// The output directory.
    pub path: PathBuf,
    /// Optimizer step of the converted checkpoint.
    pub step: u64,
    /// Number of ranks of the converted checkpoint.
    pub world: u32,
    /// ZeRO stage of the converted checkpoint, or `None` for the universal format.
    pub stage: Option<u8>,
    /// Number of files of the converted checkpoint.
    pub files: u64,
    /// Total size in bytes of the tensors in the converted checkpoint.
    pub bytes: u64,
    /// Number of files that were reused, since an interrupted conversion had finished them.
    pub reused: u64,
    /// Notices for the user, such as a notice about state that the target format cannot store.
    pub notices: Vec<ConvertNotice>,
}

/// Converts the checkpoint `source` to another format, ZeRO stage or number of ranks, and writes
/// the result to the directory `out`. Calls `progress` with the number of written bytes and the
/// total number.
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
    let (mut state, mut plan) = plan_conversion(source, options)?;
    if options.target != ConvertTarget::Native {
        companion_files::add_companion_files(source, &mut state, &mut plan)?;
    }
    let bytes = file_plan::sum_bytes(&plan.files);
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

/// Writes the checkpoint `source` in DeepSpeed's ZeRO or universal format to the existing directory
/// `dir`, and makes the written files durable. The caller publishes or removes the directory. Adds
/// no companion files.
pub(crate) fn convert_into_directory(
    source: &dyn TensorSource,
    dir: &Path,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    if options.target == ConvertTarget::Native {
        return Err(CkptError::internal("convert_into does not write native checkpoints"));
    }
    let (state, plan) = plan_conversion(source, options)?;
    let bytes = file_plan::sum_bytes(&plan.files);
    let mut output = ConvertOutput::open_existing_directory(dir, bytes)?;
    write_files::write_planned_files(source, &state, &plan.files, &mut output, options.memory, |_, _| {})?;
    disk::sync_file_system(dir)?;
    Ok(make_report(dir.to_owned(), state, &plan, 0))
}

/// Reads the training state of the checkpoint `source`, and determines the path and content of
/// every file that the conversion will write. Links to other files of the source are not planned.
fn plan_conversion(source: &dyn TensorSource, options: &ConvertOptions) -> Result<(SourceState, OutputPlan)> {
    options.check_limits()?;
    source.require_all_weights()?;
    let mut state = SourceState::from_source(source, options)?;
    if options.target != ConvertTarget::Native {
        state.require_torch_optimizer_states()?;
    }
    let plan = match options.target {
        ConvertTarget::Native => native::plan_native(&mut state),
        ConvertTarget::DeepSpeed => deepspeed::plan_deepspeed(&mut state, options)?,
        ConvertTarget::Universal => universal::plan_universal(&mut state)?,
    };
    Ok((state, plan))
}

/// Creates the report of a completed conversion for the user.
fn make_report(path: PathBuf, state: SourceState, plan: &OutputPlan, reused: u64) -> ConvertReport {
    ConvertReport {
        path,
        step: state.step,
        world: plan.world,
        stage: plan.stage,
        files: plan.files.len() as u64,
        bytes: file_plan::sum_bytes(&plan.files),
        reused,
        notices: state.notices,
    }
}

/// Writes all planned files of a conversion, and makes the result visible by renaming the hidden
/// output directory. Returns the number of reused files and the final path of the directory.
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
    Ok((done.reused, output.publish(&done.files)?))
}
