//! Names of DeepSpeed's files and folders.
use crate::disk::Folder;
use crate::error::{CkptError, Result};
use std::collections::BTreeMap;

/// Which files of a tag are there.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Model states by rank; of stages below 3 there is one, under rank 0.
    pub(super) model: BTreeMap<u32, String>,
    /// Optimizer states by rank.
    pub(super) optimizer: BTreeMap<u32, String>,
}

/// What a file's name says it is.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Model(u32),
    Optimizer(u32),
    /// Tensor or pipeline parallel, or experts on their own.
    Parallel,
    Other,
}

impl Names {
    /// Looks at the names in a tag's folder.
    pub(super) fn of(folder: &Folder) -> Result<Names> {
        Names::find(folder, false)
    }

    /// The same of a universal checkpoint, which may have both forms of rank 0's model file: then the whole one counts.
    pub(super) fn of_universal(folder: &Folder) -> Result<Names> {
        Names::find(folder, true)
    }

    /// Files of both kinds.
    pub(super) fn count(&self) -> usize {
        self.model.len() + self.optimizer.len()
    }

    fn find(folder: &Folder, both: bool) -> Result<Names> {
        let mut found = Names::default();
        for name in folder.names()? {
            let (map, rank) = match kind(&name) {
                Kind::Model(rank) => (&mut found.model, rank),
                Kind::Optimizer(rank) => (&mut found.optimizer, rank),
                Kind::Parallel => {
                    let what = format!("{name} is of tensor, pipeline or expert parallelism");
                    return Err(CkptError::Unsupported { path: folder.path().to_owned(), what });
                }
                Kind::Other => continue,
            };
            if both && map.contains_key(&rank) {
                continue;
            }
            if let Some(other) = map.insert(rank, name.clone()) {
                let why = format!("{other} is of the same rank");
                return Err(CkptError::damaged(folder.path(), name, why));
            }
        }
        Ok(found)
    }
}

/// The number before a part of a name, and the rest.
fn number<'a>(text: &'a str, before: &str) -> Option<(u32, &'a str)> {
    let rest = text.strip_prefix(before)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((rest[..end].parse().ok()?, &rest[end..]))
}

/// Rank and mp rank of `[bf16_|fp16_]zero_pp_rank_R_mp_rank_MM`, and the rest.
fn ranks(name: &str) -> Option<(u32, u32, &str)> {
    let plain = name.strip_prefix("bf16_").or_else(|| name.strip_prefix("fp16_")).unwrap_or(name);
    let (rank, rest) = number(plain, "zero_pp_rank_")?;
    let (mp, rest) = number(rest, "_mp_rank_")?;
    Some((rank, mp, rest))
}

fn kind(name: &str) -> Kind {
    if let Some((rank, mp, rest)) = ranks(name) {
        return match (rest, mp) {
            ("_model_states.pt", 0) => Kind::Model(rank),
            ("_optim_states.pt", 0) => Kind::Optimizer(rank),
            ("_model_states.pt" | "_optim_states.pt", _) => Kind::Parallel,
            _ => Kind::Other,
        };
    }
    match number(name, "mp_rank_") {
        Some((0, "_model_states.pt")) => Kind::Model(0),
        Some((_, "_model_states.pt")) => Kind::Parallel,
        _ if name.ends_with(".pt") && (name.starts_with("layer_") || name.contains("expert_")) => {
            Kind::Parallel
        }
        _ => Kind::Other,
    }
}

/// The rank for which a file was written, as the folder inside it says; `None` when it doesn't.
pub(super) fn rank_in_root(root: &str) -> Option<u32> {
    ranks(root).map(|(rank, _, _)| rank)
}

/// The step of `global_step10`.
pub(super) fn step_of(tag: &str) -> Option<u64> {
    tag.strip_prefix("global_step")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_files_are() {
        for (name, expected) in [
            ("mp_rank_00_model_states.pt", Kind::Model(0)),
            ("zero_pp_rank_12_mp_rank_00_model_states.pt", Kind::Model(12)),
            ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", Kind::Optimizer(3)),
            ("fp16_zero_pp_rank_3_mp_rank_00_optim_states.pt", Kind::Optimizer(3)),
            ("zero_pp_rank_3_mp_rank_01_optim_states.pt", Kind::Parallel),
            ("mp_rank_01_model_states.pt", Kind::Parallel),
            ("layer_01-model_00-model_states.pt", Kind::Parallel),
            ("expert_0_mp_rank_00_optim_states.pt", Kind::Parallel),
            ("zero_pp_rank_99999999999_mp_rank_00_optim_states.pt", Kind::Other),
            ("zero_pp_rank__mp_rank_00_optim_states.pt", Kind::Other),
            ("zero_to_fp32.py", Kind::Other),
        ] {
            assert_eq!(kind(name), expected, "{name}");
        }
        assert_eq!(rank_in_root("zero_pp_rank_1_mp_rank_00_optim_states"), Some(1));
        assert_eq!((rank_in_root("archive"), step_of("global_step12")), (None, Some(12)));
    }
}
