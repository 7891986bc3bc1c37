//! Gathers the weights and buffers of a checkpoint from all shards, and writes them to a Hugging
//! Face directory.
use super::adapters;
use super::output::GatherOutput;
use super::plan::{GatherOptions, GatherPlan, GatheredFile, WEIGHT_FILE_STEM};
use super::stream::write_weights;
use crate::catalog::TensorSource;
use crate::codec::disk;
use crate::error::{CkptError, OptionProblem, Result};
use crate::layout::peft::ADAPTER_MODEL_STEM;
use crate::save::output_record::{GATHER_RECORD_KIND, RecordedContent, RecordedFile};
use crate::save::{ReplaceMethod, publish_directory};
use crate::tensor::Dtype;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The result of exporting the full weights of a checkpoint, for the user: output directory,
/// written files, and names of tensors with NaN or infinite values.
#[derive(Clone, Debug, serde::Serialize)]
pub struct GatherReport {
    /// The output directory.
    pub path: PathBuf,
    /// Dtype of the written tensors.
    pub dtype: Dtype,
    /// Number of written tensors.
    pub tensors: u64,
    /// Total size of the written tensors in bytes.
    pub bytes: u64,
    /// The written weight files, in the order of their numbers.
    pub files: Vec<GatheredFile>,
    /// Whether a config was written: `config.json`, or `adapter_config.json` for adapters. An
    /// external checkpoint may have none.
    pub config: bool,
    /// Names of integer buffers, which are not gathered.
    pub left_out: Vec<String>,
    /// Names of the tensors with NaN or infinite values, which are written unchanged.
    pub not_finite: Vec<String>,
}

/// Writes the full weights and buffers of a checkpoint, assembled from the shards of all ranks, to
/// the directory `out` in the format of Hugging Face. A checkpoint with low-rank adapters gives a
/// PEFT directory if `options` don't merge the adapters. Values are rounded to nearest, ties to
/// even. Calls `progress` with the number of written bytes and the total number.
///
/// `out` is either complete or absent. An existing directory `out` is replaced if `out` is empty,
/// or if `force` is set and an earlier gather wrote `out`.
///
/// # Errors
/// Fails if a finite value is outside of the range of the dtype, the checkpoint is damaged or
/// incomplete, `out` can't be replaced, or I/O fails.
pub fn gather_weights(
    checkpoint: &dyn TensorSource,
    out: &Path,
    options: &GatherOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<GatherReport> {
    let gathered = gather_weights_until(checkpoint, out, options, |done, total| {
        progress(done, total);
        ControlFlow::Continue(())
    });
    gathered?.ok_or_else(|| CkptError::internal("the gather ended early"))
}

/// Exports the full weights and buffers of a checkpoint to the Hugging Face directory `out`, and
/// stops early if `progress` returns [`ControlFlow::Break`]. Returns `None` after a break, and
/// leaves `out` unchanged.
pub fn gather_weights_until(
    checkpoint: &dyn TensorSource,
    out: &Path,
    options: &GatherOptions,
    progress: impl FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Option<GatherReport>> {
    checkpoint.require_all_weights()?;
    let view = adapters::open_adapter_view(checkpoint, options.merge_lora)?;
    let stem = if view.is_some() && !options.merge_lora { ADAPTER_MODEL_STEM } else { WEIGHT_FILE_STEM };
    let checkpoint = view.as_ref().map_or(checkpoint, |view| view as &dyn TensorSource);
    let plan = GatherPlan::new(checkpoint, options, stem)?;
    let out = GatherOutput::create(checkpoint.path(), out, options.force, plan.bytes)?;
    let Some((files, not_finite)) = write_weights(checkpoint, &plan, &out.dir, progress)? else {
        return Ok(None);
    };
    let texts = plan.make_text_files(checkpoint)?;
    write_text_files(&out.dir, &files, &texts)?;
    checkpoint.verify_reads(false)?;
    plan.check_written_files(&out.dir, &files)?;
    let mut record = GATHER_RECORD_KIND.make_record(list_files_for_record(&files, &texts));
    (record.step, record.tokens) = (checkpoint.completed_steps(), checkpoint.trained_token_count());
    record.dtype = Some(plan.dtype.torch_name().into());
    GATHER_RECORD_KIND.write_record(&out.dir, record)?;
    disk::sync_dir(&out.dir)?;
    publish_directory(&out.dir, &out.path, ReplaceMethod::AtomicExchange)?;
    let path = out.path.clone();
    Ok(Some(GatherReport {
        path,
        dtype: plan.dtype,
        tensors: plan.tensors.len() as u64,
        bytes: plan.bytes,
        files,
        config: checkpoint.hf_config().is_some() || stem != WEIGHT_FILE_STEM,
        left_out: plan.integer_buffers,
        not_finite: not_finite.into_iter().collect(),
    }))
}

/// Writes the text files that accompany gathered weights, such as `config.json` and the tokenizer's
/// files, to the directory `dir`. Fails if a weight file or another text has the same name.
fn write_text_files(dir: &Path, files: &[GatheredFile], texts: &[(String, String)]) -> Result<()> {
    let mut names: BTreeSet<&str> = files.iter().map(|f| f.name.as_str()).collect();
    for (name, text) in texts {
        if !names.insert(name) {
            return Err(CkptError::invalid_option(OptionProblem::FileNameTaken { name: name.clone() }));
        }
        disk::write_file(dir.join(name), text.as_bytes())?;
    }
    Ok(())
}

/// Lists the name, size and hash of each exported file, as the record of files in the output
/// directory will contain them.
fn list_files_for_record(files: &[GatheredFile], texts: &[(String, String)]) -> Vec<RecordedFile> {
    let weights = files.iter().map(|f| (&f.name, RecordedContent { bytes: f.bytes, blake3: f.blake3 }));
    let texts = texts.iter().map(|(name, text)| (name, RecordedContent::from_text(text.as_bytes())));
    let record = |(name, content): (&String, _)| RecordedFile { name: name.clone(), content: Some(content) };
    weights.chain(texts).map(record).collect()
}
