//! Recognizes the files of a DeepSpeed checkpoint by their names.
use crate::codec::disk::Directory;
use crate::error::{CkptError, DeepSpeedError, Result, UnsupportedFeature};
use std::collections::BTreeMap;

/// Suffix of the name of a universal checkpoint's directory. The name of the tag precedes it.
pub(crate) const UNIVERSAL_SUFFIX: &str = "_universal";

/// Names of the model and optimizer files of a DeepSpeed checkpoint (tag).
#[derive(Debug, Default)]
pub(crate) struct TagFiles {
    /// Maps each rank to the name of its model file. Stages below 3 have only the model file of
    /// rank 0.
    pub(crate) model: BTreeMap<u32, String>,
    /// Maps each rank to the name of its optimizer file.
    pub(crate) optimizer: BTreeMap<u32, String>,
}

/// The kind of a file in a DeepSpeed checkpoint, according to the file's name.
#[derive(Debug, PartialEq, Eq)]
enum DeepSpeedFileKind {
    /// The model file of the rank with this number.
    Model(u32),
    /// The optimizer file of the rank with this number.
    Optimizer(u32),
    /// A file that a run with tensor, pipeline or expert parallelism wrote.
    Parallel,
    /// Any other file. Such files are ignored when the checkpoint is read.
    Other,
}

impl TagFiles {
    /// Lists the model and optimizer files in the directory of a DeepSpeed checkpoint.
    ///
    /// # Errors
    /// Fails if a file belongs to tensor, pipeline or expert parallelism, or two files belong to
    /// one rank.
    pub(crate) fn list(directory: &Directory) -> Result<TagFiles> {
        TagFiles::list_files(directory, false)
    }

    /// Lists the model and optimizer files of a universal checkpoint. Of two files of one rank,
    /// uses the one whose name sorts first.
    pub(crate) fn list_universal(directory: &Directory) -> Result<TagFiles> {
        TagFiles::list_files(directory, true)
    }

    /// Returns the number of model and optimizer files.
    pub(crate) fn count(&self) -> usize {
        self.model.len() + self.optimizer.len()
    }

    /// Lists the model and optimizer files in a directory. With `both`, allows two files of one
    /// rank and uses the one whose name sorts first.
    fn list_files(directory: &Directory, both: bool) -> Result<TagFiles> {
        let mut found = TagFiles::default();
        for name in directory.list_names()? {
            let (map, rank) = match parse_file_kind(&name) {
                DeepSpeedFileKind::Model(rank) => (&mut found.model, rank),
                DeepSpeedFileKind::Optimizer(rank) => (&mut found.optimizer, rank),
                DeepSpeedFileKind::Parallel => {
                    let feature = UnsupportedFeature::ModelParallelism { file: name };
                    return Err(CkptError::unsupported(directory.path(), feature));
                }
                DeepSpeedFileKind::Other => continue,
            };
            if both && map.contains_key(&rank) {
                continue;
            }
            if let Some(other) = map.insert(rank, name.clone()) {
                let reason = DeepSpeedError::DuplicateRank(other);
                return Err(CkptError::damaged(directory.path(), name, reason));
            }
        }
        Ok(found)
    }
}

/// Returns the number that follows `prefix` at the start of `text`, and the rest of the text after
/// the number. Returns `None` if `text` does not have this form.
fn parse_number_after<'a>(text: &'a str, prefix: &str) -> Option<(u32, &'a str)> {
    let rest = text.strip_prefix(prefix)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((rest[..end].parse().ok()?, &rest[end..]))
}

/// Returns the data-parallel rank and the model-parallel rank in a name such as
/// `zero_pp_rank_3_mp_rank_00_optim_states`, and the rest of the name. Returns `None` for other
/// names.
fn parse_zero_ranks(name: &str) -> Option<(u32, u32, &str)> {
    let plain = name.strip_prefix("bf16_").or_else(|| name.strip_prefix("fp16_")).unwrap_or(name);
    let (rank, rest) = parse_number_after(plain, "zero_pp_rank_")?;
    let (mp, rest) = parse_number_after(rest, "_mp_rank_")?;
    Some((rank, mp, rest))
}

/// Returns the kind of the DeepSpeed file with the name `name`.
fn parse_file_kind(name: &str) -> DeepSpeedFileKind {
    if let Some((rank, mp, rest)) = parse_zero_ranks(name) {
        return match (rest, mp) {
            ("_model_states.pt", 0) => DeepSpeedFileKind::Model(rank),
            ("_optim_states.pt", 0) => DeepSpeedFileKind::Optimizer(rank),
            ("_model_states.pt" | "_optim_states.pt", _) => DeepSpeedFileKind::Parallel,
            _ => DeepSpeedFileKind::Other,
        };
    }
    match parse_number_after(name, "mp_rank_") {
        Some((0, "_model_states.pt")) => DeepSpeedFileKind::Model(0),
        Some((_, "_model_states.pt")) => DeepSpeedFileKind::Parallel,
        _ if name.ends_with(".pt") && (name.starts_with("layer_") || name.contains("expert_")) => {
            DeepSpeedFileKind::Parallel
        }
        _ => DeepSpeedFileKind::Other,
    }
}

/// Returns the data-parallel rank in `root`, the name that DeepSpeed gave to the outermost
/// directory in the zip container of a torch file. The name that DeepSpeed gives it, such as
/// `zero_pp_rank_3_mp_rank_00_optim_states`, contains the rank that wrote the file. Returns `None`
/// if the name contains no rank.
pub(crate) fn parse_rank_in_zip_root(root: &str) -> Option<u32> {
    parse_zero_ranks(root).map(|(rank, _, _)| rank)
}

/// Returns the step that the name of a DeepSpeed checkpoint's directory (tag) contains, such as
/// `global_step10`. Returns `None` for other names.
pub(crate) fn parse_step_in_tag(tag: &str) -> Option<u64> {
    tag.strip_prefix("global_step")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_identify_model_and_optimizer_files() {
        for (name, expected) in [
            ("mp_rank_00_model_states.pt", DeepSpeedFileKind::Model(0)),
            ("zero_pp_rank_12_mp_rank_00_model_states.pt", DeepSpeedFileKind::Model(12)),
            ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", DeepSpeedFileKind::Optimizer(3)),
            ("fp16_zero_pp_rank_3_mp_rank_00_optim_states.pt", DeepSpeedFileKind::Optimizer(3)),
            ("zero_pp_rank_3_mp_rank_01_optim_states.pt", DeepSpeedFileKind::Parallel),
            ("mp_rank_01_model_states.pt", DeepSpeedFileKind::Parallel),
            ("layer_01-model_00-model_states.pt", DeepSpeedFileKind::Parallel),
            ("expert_0_mp_rank_00_optim_states.pt", DeepSpeedFileKind::Parallel),
            ("zero_pp_rank_99999999999_mp_rank_00_optim_states.pt", DeepSpeedFileKind::Other),
            ("zero_pp_rank__mp_rank_00_optim_states.pt", DeepSpeedFileKind::Other),
            ("zero_to_fp32.py", DeepSpeedFileKind::Other),
        ] {
            assert_eq!(parse_file_kind(name), expected, "{name}");
        }
        assert_eq!(parse_rank_in_zip_root("zero_pp_rank_1_mp_rank_00_optim_states"), Some(1));
        assert_eq!((parse_rank_in_zip_root("archive"), parse_step_in_tag("global_step12")), (None, Some(12)));
    }
}
