//! `launch ckpt repair`: rebuilds damaged parts of a checkpoint from redundant data in other parts,
//! and reports parts that cannot be rebuilt as lost.
use super::output::{report_to_json, write_stderr_line};
use crate::cmd::output::{print_json, print_line};
use ckpt::RepairOptions;
use clap::Args;
use protocol::exit;
use std::path::PathBuf;

/// Arguments of `launch ckpt repair`.
#[derive(Debug, Args)]
pub(super) struct RepairArgs {
    /// Checkpoint of any kind, or directory of checkpoints
    #[arg(value_name = "CHECKPOINT")]
    pub(super) dir: PathBuf,
    /// Directory to create [default: NAME.repaired next to CHECKPOINT, where NAME is the name of
    /// CHECKPOINT]
    #[arg(long, value_name = "DIR", conflicts_with = "in_place")]
    pub(super) out: Option<PathBuf>,
    /// Replace CHECKPOINT with the result, and keep the original as NAME.before-repair
    #[arg(long)]
    pub(super) in_place: bool,
}

/// Runs `launch ckpt repair`: repairs a checkpoint or all checkpoints in a directory, and prints
/// the directory of the result. Returns exit code 4 if the result is not sound.
pub(super) fn run(args: RepairArgs, json: bool) -> diagnostic::Result<u8> {
    let report =
        ckpt::repair_checkpoints(&args.dir, &RepairOptions { out: args.out, in_place: args.in_place })?;
    if json {
        print_json(&report_to_json(&report))?;
    } else {
        report.rebuilt.iter().for_each(|line| write_stderr_line(format_args!("rebuilt: {line}")));
        report.lost.iter().for_each(|line| write_stderr_line(format_args!("lost: {line}")));
        match (report.sound, report.rebuilt.is_empty()) {
            (true, true) => write_stderr_line(format_args!("nothing to repair")),
            (true, false) => {}
            (false, true) => {
                write_stderr_line(format_args!("error: the checkpoint cannot be repaired; use another one"))
            }
            (false, false) => write_stderr_line(format_args!(
                "error: the repaired checkpoint is not complete; use another one"
            )),
        }
        if let Some(newest) = &report.newest {
            write_stderr_line(format_args!("the newest complete checkpoint is {newest}"));
        }
        if let Some(kept) = &report.kept {
            let kept = kept.display();
            write_stderr_line(format_args!(
                "the original is in {kept}; remove it when it is not needed any more"
            ));
        }
        if let Some(path) = &report.path {
            print_line(path.display())?;
        }
    }
    Ok(if report.sound { exit::DONE } else { exit::CHECKPOINT })
}

#[cfg(test)]
mod tests {
    use super::super::tests::save_sample_checkpoint;
    use super::*;

    fn run_repair(dir: PathBuf, in_place: bool) -> Option<u8> {
        run(RepairArgs { dir, out: None, in_place }, true).ok()
    }

    #[test]
    fn the_exit_code_reports_whether_the_result_is_complete() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("checkpoints");
        let path = save_sample_checkpoint(&root);
        assert_eq!(run_repair(root.clone(), false), Some(exit::DONE), "nothing to repair");
        std::fs::remove_file(root.join("latest")).expect("removed");
        assert_eq!(run_repair(root.clone(), false), Some(exit::DONE));
        assert!(!root.join("latest").exists() && dir.path().join("checkpoints.repaired/latest").exists());
        assert_eq!(run_repair(root.clone(), true), None, "an earlier result is not overwritten");
        std::fs::remove_dir_all(dir.path().join("checkpoints.repaired")).expect("removed");
        assert_eq!(run_repair(root.clone(), true), Some(exit::DONE));
        assert!(
            root.join("latest").exists() && !dir.path().join("checkpoints.before-repair/latest").exists()
        );
        std::fs::write(path.join("shard-00000-of-00001.safetensors"), "cut").expect("written");
        assert_eq!(run_repair(root, false), Some(exit::CHECKPOINT));
        assert_eq!(run_repair(dir.path().join("nowhere"), false), None);
    }
}
