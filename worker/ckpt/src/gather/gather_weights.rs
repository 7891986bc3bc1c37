//! Gathers the weights and buffers of a checkpoint into a Hugging Face directory.
use super::adapters;
use super::output::{GATHER_RECORD_FILE, GATHER_RECORD_FORMAT, GatherOutput};
use super::plan::{GatherOptions, GatherPlan, GatheredFile, MODEL_STEM, encode_pretty_json};
use super::stream::write_weights;
use crate::catalog::TensorSource;
use crate::codec::disk;
use crate::error::{CkptError, OptionProblem, Result};
use crate::save::{ReplaceMethod, publish_directory};
use crate::tensor::Dtype;
use serde_json::json;
use std::path::{Path, PathBuf};

/// The result of a gather.
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

/// Gathers the weights and buffers of a checkpoint into the directory `out`: `config.json`, the
/// weights in one file or in shards with an index, and the tokenizer's files. A checkpoint with
/// low-rank adapters gives a PEFT directory if `options` don't merge the adapters. Values are
/// rounded to nearest, ties to even. Calls `progress` with the number of written bytes and the
/// total number.
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
    progress: impl FnMut(u64, u64),
) -> Result<GatherReport> {
    checkpoint.require_weights()?;
    let view = adapters::open_adapter_view(checkpoint, options.merge_lora)?;
    let (checkpoint, stem) = view.as_ref().map_or((checkpoint, MODEL_STEM), |v| (v.source.as_ref(), v.stem));
    let plan = GatherPlan::new(checkpoint, options, stem)?;
    let out = GatherOutput::create(checkpoint.path(), out, options.force, plan.bytes)?;
    let (files, not_finite) = write_weights(checkpoint, &plan, &out.dir, progress)?;
    let mut names: Vec<&str> = files.iter().map(|f| f.name.as_str()).collect();
    let texts = plan.make_text_files(checkpoint)?;
    for (name, text) in &texts {
        if names.contains(&name.as_str()) {
            return Err(CkptError::invalid_option(OptionProblem::FileNameTaken { name: name.clone() }));
        }
        names.push(name);
        disk::write_file(out.dir.join(name), text.as_bytes())?;
    }
    checkpoint.verify_reads(false)?;
    plan.check_written_files(&out.dir, &files)?;
    let gathered = json!({
        "format": GATHER_RECORD_FORMAT, "program": format!("launch {}", env!("CARGO_PKG_VERSION")), "files": names,
        "step": checkpoint.completed_steps(), "tokens": checkpoint.tokens(), "dtype": plan.dtype.torch_name(),
    });
    disk::write_file(out.dir.join(GATHER_RECORD_FILE), encode_pretty_json(&gathered)?.as_bytes())?;
    disk::sync_dir(&out.dir)?;
    publish_directory(&out.dir, &out.path, ReplaceMethod::AtomicExchange)?;
    let path = out.path.clone();
    Ok(GatherReport {
        path,
        dtype: plan.dtype,
        tensors: plan.tensors.len() as u64,
        bytes: plan.bytes,
        files,
        config: checkpoint.hf_config().is_some() || stem != MODEL_STEM,
        left_out: plan.integer_buffers,
        not_finite: not_finite.into_iter().collect(),
    })
}
