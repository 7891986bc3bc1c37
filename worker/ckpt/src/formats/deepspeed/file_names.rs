//! Recognizes DeepSpeed's files by their names.
use super::error::DeepSpeedError;
use crate::disk::Directory;
use crate::error::{CkptError, Result, UnsupportedFeature};
use std::collections::BTreeMap;

/// The files of a tag, by rank.
#[derive(Debug, Default)]
pub(super) struct TagFiles {
    /// Model files by rank. Stages below 3 have one, of rank 0.
    pub(super) model: BTreeMap<u32, String>,
    /// Optimizer files by rank.
    pub(super) optimizer: BTreeMap<u32, String>,
}

/// The kind of a file, by its name.
#[derive(Debug, PartialEq, Eq)]
enum FileKind {
    /// Model file of a rank.
    Model(u32),
    /// Optimizer file of a rank.
    Optimizer(u32),
    /// A file of tensor, pipeline or expert parallelism.
    Parallel,
    /// Any other file.
    Other,
}

impl TagFiles {
    /// Lists the files in the directory of a tag.
    pub(super) fn list(directory: &Directory) -> Result<TagFiles> {
        TagFiles::find_files(directory, false)
    }

    /// Lists the files of a universal checkpoint, which may have two model files of rank 0; the
    /// first one is used.
    pub(super) fn list_universal(directory: &Directory) -> Result<TagFiles> {
        TagFiles::find_files(directory, true)
    }

    /// Number of model and optimizer files.
    pub(super) fn count(&self) -> usize {
        self.model.len() + self.optimizer.len()
    }

    fn find_files(directory: &Directory, both: bool) -> Result<TagFiles> {
        let mut found = TagFiles::default();
        for name in directory.names()? {
            let (map, rank) = match file_kind(&name) {
                FileKind::Model(rank) => (&mut found.model, rank),
                FileKind::Optimizer(rank) => (&mut found.optimizer, rank),
                FileKind::Parallel => {
                    let feature = UnsupportedFeature::ModelParallelism { file: name };
                    return Err(CkptError::unsupported(directory.path(), feature));
                }
                FileKind::Other => continue,
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

/// Parses a prefix and the number after it; returns the number and the rest.
fn number<'a>(text: &'a str, prefix: &str) -> Option<(u32, &'a str)> {
    let rest = text.strip_prefix(prefix)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((rest[..end].parse().ok()?, &rest[end..]))
}

/// Parses `[bf16_|fp16_]zero_pp_rank_R_mp_rank_MM`; returns both ranks and the rest.
fn ranks(name: &str) -> Option<(u32, u32, &str)> {
    let plain = name.strip_prefix("bf16_").or_else(|| name.strip_prefix("fp16_")).unwrap_or(name);
    let (rank, rest) = number(plain, "zero_pp_rank_")?;
    let (mp, rest) = number(rest, "_mp_rank_")?;
    Some((rank, mp, rest))
}

fn file_kind(name: &str) -> FileKind {
    if let Some((rank, mp, rest)) = ranks(name) {
        return match (rest, mp) {
            ("_model_states.pt", 0) => FileKind::Model(rank),
            ("_optim_states.pt", 0) => FileKind::Optimizer(rank),
            ("_model_states.pt" | "_optim_states.pt", _) => FileKind::Parallel,
            _ => FileKind::Other,
        };
    }
    match number(name, "mp_rank_") {
        Some((0, "_model_states.pt")) => FileKind::Model(0),
        Some((_, "_model_states.pt")) => FileKind::Parallel,
        _ if name.ends_with(".pt") && (name.starts_with("layer_") || name.contains("expert_")) => {
            FileKind::Parallel
        }
        _ => FileKind::Other,
    }
}

/// The rank in the name of the directory inside of a torch file, which is the rank that wrote the
/// file; `None` when the name has no rank.
pub(super) fn rank_in_root(root: &str) -> Option<u32> {
    ranks(root).map(|(rank, _, _)| rank)
}

/// The step in a name such as `global_step10`.
pub(super) fn step_from_tag(tag: &str) -> Option<u64> {
    tag.strip_prefix("global_step")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_identify_model_and_optimizer_files() {
        for (name, expected) in [
            ("mp_rank_00_model_states.pt", FileKind::Model(0)),
            ("zero_pp_rank_12_mp_rank_00_model_states.pt", FileKind::Model(12)),
            ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", FileKind::Optimizer(3)),
            ("fp16_zero_pp_rank_3_mp_rank_00_optim_states.pt", FileKind::Optimizer(3)),
            ("zero_pp_rank_3_mp_rank_01_optim_states.pt", FileKind::Parallel),
            ("mp_rank_01_model_states.pt", FileKind::Parallel),
            ("layer_01-model_00-model_states.pt", FileKind::Parallel),
            ("expert_0_mp_rank_00_optim_states.pt", FileKind::Parallel),
            ("zero_pp_rank_99999999999_mp_rank_00_optim_states.pt", FileKind::Other),
            ("zero_pp_rank__mp_rank_00_optim_states.pt", FileKind::Other),
            ("zero_to_fp32.py", FileKind::Other),
        ] {
            assert_eq!(file_kind(name), expected, "{name}");
        }
        assert_eq!(rank_in_root("zero_pp_rank_1_mp_rank_00_optim_states"), Some(1));
        assert_eq!((rank_in_root("archive"), step_from_tag("global_step12")), (None, Some(12)));
    }
}
