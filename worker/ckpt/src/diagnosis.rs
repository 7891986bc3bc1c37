//! What a folder without a checkpoint seems to be, what it lacks, and what helps.
use crate::disk::{Folder, exists};
use crate::formats::deepspeed;
use crate::formats::weights;
use crate::manifest::MANIFEST;
use crate::root::step_of;
use std::path::Path;

/// Folders that are looked into for a checkpoint.
const FOLDERS_MAX: usize = 256;
/// Folders that are named.
const NAMED_MAX: usize = 4;
/// What lies beside a checkpoint of some program, or is one.
const MARKS: [&str; 6] =
    [MANIFEST, "latest", "latest_universal", "trainer_state.json", ".metadata", "random_states_0.pkl"];

/// One line about a folder in which nothing was found.
pub(crate) fn seems(path: &Path) -> String {
    let names = match Folder::open(path).and_then(|f| f.names()) {
        Ok(names) if names.is_empty() => return "it is empty".into(),
        Ok(names) => names,
        Err(e) => return e.to_string(),
    };
    let has = |name: &str| names.iter().any(|n| n == name);
    let any = |fits: &dyn Fn(&str) -> bool| names.iter().any(|n| fits(n));
    let rng = any(&|n| n.starts_with("rng_state") || n.starts_with("random_states_"));
    match () {
        () if has("pytorch_model_fsdp_0") => {
            "pytorch_model_fsdp_0 lacks its .metadata: the save was cut short before its last file, or it wasn't copied (it is hidden)".into()
        }
        () if any(&|n| n.ends_with(".distcp")) => {
            "it holds .distcp files without .metadata: the save was cut short before its last file, or it wasn't copied (it is hidden)".into()
        }
        () if any(&|n| n.starts_with("pytorch_model_fsdp_rank")) => {
            "it holds FSDP's local shards, which only the same program on as many ranks can read; save with a sharded or full state dict".into()
        }
        () if has("adapter_model.safetensors") || has("adapter_model.bin") => {
            "it is an adapter of PEFT, which is no whole model; merge it into its base model first".into()
        }
        () if has("optimizer.pt") || has("optimizer.bin") || has("trainer_state.json") || rng => {
            "it is a folder of HF Trainer or Accelerate without weights: model.safetensors, pytorch_model.bin or the folder of FSDP or DeepSpeed is missing".into()
        }
        () if has("latest") => latest(path),
        () if any(&|n| n.ends_with(".ckpt")) => {
            "it holds .ckpt files, which other programs than those known write".into()
        }
        () if any(&|n| n.starts_with("consolidated.") && n.ends_with(".pth")) => {
            "it holds Meta's own weights (consolidated.*.pth); convert them to Hugging Face's form first".into()
        }
        () if step_of(&path.file_name().unwrap_or_default().to_string_lossy()).is_some() => {
            format!("it has no {MANIFEST}: a save or a removal of it was cut short")
        }
        () => within(path, &names),
    }
}

/// Why the folder that `latest` names isn't read.
fn latest(path: &Path) -> String {
    let named = Folder::open(path).and_then(|folder| deepspeed::latest(&folder, deepspeed::LATEST));
    let tag = match named {
        Ok(tag) => tag,
        Err(e) => return e.to_string(),
    };
    match path.join(&tag).symlink_metadata() {
        Err(_) => format!(
            "`latest` names a folder that isn't here ({tag}), and no other checkpoint is; bring that folder back"
        ),
        Ok(m) if m.is_symlink() => format!(
            "{tag}, which `latest` names, is a symbolic link, which is not followed; give the path of the folder that it leads to"
        ),
        Ok(_) => match Folder::open(&path.join(&tag)).and_then(|folder| folder.names()) {
            Ok(_) => {
                format!("{tag}, which `latest` names, holds no files of DeepSpeed's; use another checkpoint")
            }
            Err(e) => e.to_string(),
        },
    }
}

/// Names folders inside that may hold one, at most two levels down.
fn within(path: &Path, names: &[String]) -> String {
    let mut left = FOLDERS_MAX;
    let mut found = Vec::new();
    for name in names {
        let folder = path.join(name);
        match may_hold_one(&folder, &mut left) {
            true => found.push(name.clone()),
            false if left > 0 && folder.symlink_metadata().is_ok_and(|m| m.is_dir()) => {
                let inner = Folder::open(&folder).and_then(|f| f.names()).unwrap_or_default();
                let inner = inner.iter().find(|inner| may_hold_one(&folder.join(inner), &mut left));
                found.extend(inner.map(|inner| format!("{name}/{inner}")));
            }
            false => {}
        }
    }
    let more = found.len().saturating_sub(NAMED_MAX);
    found.truncate(NAMED_MAX);
    match found.as_slice() {
        [] => format!(
            "it has no {MANIFEST}, no folders step-…, no DeepSpeed state and no weights (model.safetensors, pytorch_model.bin, .metadata)"
        ),
        [one] => format!("it has no checkpoint of its own, but {one} may hold one: give its path"),
        several if more == 0 => {
            format!(
                "it has no checkpoint of its own, but {} may hold some: give the path of one",
                several.join(", ")
            )
        }
        several => format!(
            "it has no checkpoint of its own, but {} and {more} more may hold some: give the path of one",
            several.join(", ")
        ),
    }
}

fn may_hold_one(path: &Path, left: &mut usize) -> bool {
    if *left == 0 || !path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
        return false;
    }
    *left -= 1;
    MARKS.iter().chain(&weights::FILES).any(|name| exists(&path.join(name)))
}
