//! `launch ckpt repair`: what can be derived is rebuilt, what can't is said.
use super::{Failure, describe::clean, print, say};
use ckpt::RepairOptions;
use clap::Args;
use contract::exit;
use serde_json::Value;
use std::path::PathBuf;

/// Arguments of `launch ckpt repair`.
#[derive(Debug, Args)]
pub(super) struct RepairArgs {
    /// A checkpoint of any kind, or a directory of them
    pub(super) dir: PathBuf,
    /// The folder to make [default: NAME.repaired beside the folder NAME]
    #[arg(long, value_name = "DIR", conflicts_with = "in_place")]
    pub(super) out: Option<PathBuf>,
    /// Let the result take the folder's place; the original stays as NAME.before-repair
    #[arg(long)]
    pub(super) in_place: bool,
}

/// Repairs; the path of the folder to use is on stdout. Exit code 4 when it doesn't verify.
pub(super) fn run(args: RepairArgs, json: bool) -> Result<u8, Failure> {
    let report = ckpt::repair(&args.dir, &RepairOptions { out: args.out, in_place: args.in_place })?;
    if json {
        print(&format!("{}\n", serde_json::to_value(&report).unwrap_or(Value::Null)))?;
    } else {
        report.rebuilt.iter().for_each(|line| say(format_args!("rebuilt: {}", clean(line))));
        report.lost.iter().for_each(|line| say(format_args!("lost: {}", clean(line))));
        match (report.sound, report.rebuilt.is_empty()) {
            (true, true) => say(format_args!("nothing to repair")),
            (true, false) => {}
            (false, true) => say(format_args!("error: it can't be repaired; use another checkpoint")),
            (false, false) => say(format_args!("error: the result is not whole; use another checkpoint")),
        }
        if let Some(newest) = &report.newest {
            say(format_args!("the newest whole checkpoint is {}", clean(newest)));
        }
        if let Some(kept) = &report.kept {
            say(format_args!("the original is at {}; remove it when all is well", kept.display()));
        }
        if let Some(path) = &report.path {
            print(&format!("{}\n", path.display()))?;
        }
    }
    Ok(if report.sound { exit::DONE } else { exit::CHECKPOINT })
}

#[cfg(test)]
mod tests {
    use super::super::tests::saved;
    use super::*;

    fn repair(dir: PathBuf, in_place: bool) -> Option<u8> {
        run(RepairArgs { dir, out: None, in_place }, true).ok()
    }

    #[test]
    fn the_exit_code_says_whether_the_result_is_whole() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("checkpoints");
        let path = saved(&root);
        assert_eq!(repair(root.clone(), false), Some(exit::DONE), "nothing to repair");
        std::fs::remove_file(root.join("latest")).expect("removed");
        assert_eq!(repair(root.clone(), false), Some(exit::DONE));
        assert!(!root.join("latest").exists() && dir.path().join("checkpoints.repaired/latest").exists());
        assert_eq!(repair(root.clone(), true), None, "an earlier result is not overwritten");
        std::fs::remove_dir_all(dir.path().join("checkpoints.repaired")).expect("removed");
        assert_eq!(repair(root.clone(), true), Some(exit::DONE));
        assert!(
            root.join("latest").exists() && !dir.path().join("checkpoints.before-repair/latest").exists()
        );
        std::fs::write(path.join("shard-00000-of-00001.safetensors"), "cut").expect("written");
        assert_eq!(repair(root, false), Some(exit::CHECKPOINT));
        assert_eq!(repair(dir.path().join("nowhere"), false), None);
    }
}
