//! Tests of `launch ckpt`: exit codes and rejected options.
use super::{
    CkptArgs, CkptCommand,
    gather::{DtypeOption, GatherArgs},
    inspect::InspectArgs,
    run_subcommand,
    verify::{VerifyArgs, format_verify_report, list_unchecked_files},
};
use ckpt::TensorRole;
use protocol::exit;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Returns the exit code of a command's result. Does not print the error of a failed command.
fn take_exit_code(result: diagnostic::Result<u8>) -> u8 {
    result.unwrap_or_else(|error| error.category().exit_code())
}

/// Saves a checkpoint of step 3 in the directory `root` and returns the path of the checkpoint.
/// The checkpoint has one weight of 4 elements and no optimizer state.
pub(super) fn save_sample_checkpoint(root: &Path) -> PathBuf {
    let staging = ckpt::StagingDir::create(root, 3, 16).expect("begun");
    let piece = ckpt::TensorPiece {
        name: "w",
        role: TensorRole::Weight,
        start_element: 0,
        data: (&[1.0, 2.0, 3.0, 1e6][..]).into(),
    };
    let report = ckpt::write_shard(staging.path(), 0, 1, &[piece]).expect("written");
    let model = json!({
        "family": "llama", "hf_config": {}, "weights": [{"name": "w", "shape": [2, 2]}],
        "ties": [{"alias": "head", "target": "w"}],
    });
    let facts = json!({
        "step": 3, "world": 1, "stage": 2, "run_seed": 1, "tokens": 77, "program": "launch test",
        "cursor": {"epoch": 1}, "rng": null, "groups": [{"lr": 0.1}], "model": model, "tokenizer": [], "job": null,
    });
    let facts = serde_json::from_value(facts).expect("facts");
    ckpt::commit_save(staging, facts, vec![report]).expect("complete").path
}

/// Returns the parsed command `launch ckpt verify PATH` without options.
fn verify_command(path: PathBuf) -> CkptCommand {
    CkptCommand::Verify(VerifyArgs { path, values: false, strict: false })
}

/// Returns the directory with the stored checkpoints of other programs that the tests read.
fn find_golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden")
}

/// Copies the files of the directory `from` to the new directory `to`.
fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir(to).expect("made");
    for entry in std::fs::read_dir(from).expect("a directory") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("copied");
    }
}

/// Returns the exit codes of `launch ckpt verify PATH` without and with `--strict`.
fn verify_without_and_with_strict(path: &Path) -> (u8, u8) {
    let code = |strict| {
        let command = CkptCommand::Verify(VerifyArgs { path: path.to_owned(), values: true, strict });
        take_exit_code(run_subcommand(command, true))
    };
    (code(false), code(true))
}

#[test]
fn warnings_fail_the_verification_only_with_strict() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("zero");
    std::fs::create_dir(&root).expect("made");
    let golden = find_golden_dir().join("z1_tied/global_step3");
    copy_files(&golden, &root.join("global_step3"));
    std::fs::write(root.join("latest"), "global_step3").expect("written");
    assert_eq!(verify_without_and_with_strict(&root), (exit::DONE, exit::DONE), "no warnings");
    std::fs::rename(root.join("global_step3"), root.join("global_step2")).expect("renamed");
    std::fs::write(root.join("latest"), "global_step2").expect("written");
    assert_eq!(verify_without_and_with_strict(&root), (exit::DONE, exit::CHECKPOINT), "another step");
}

/// Checks that `--strict` fails for a safetensors file, which has no checksums, but not for
/// gathered weights, whose hash is recorded in `gathered.json`.
#[test]
fn files_without_checksums_fail_the_verification_only_with_strict() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("checkpoint-3");
    copy_files(&find_golden_dir().join("hf_ddp/checkpoint-3"), &path);
    let list_unchecked = |path: &Path| {
        let report = ckpt::verify_checkpoints_with(path, ckpt::VerifyOptions { values: false });
        list_unchecked_files(&report.expect("verified"))
    };
    assert_eq!(verify_without_and_with_strict(&path), (exit::DONE, exit::CHECKPOINT));
    let lines = list_unchecked(&path);
    assert!(lines.len() == 1 && lines[0].contains("1 file without checksums"), "{lines:?}");
    assert!(lines[0].ends_with(": model.safetensors"), "{lines:?}");
    let gathered = dir.path().join("gathered");
    let gather = CkptCommand::Gather(GatherArgs {
        dir: path,
        out: gathered.clone(),
        dtype: None,
        max_shard_size: 1 << 30,
        force: false,
        merge_lora: false,
    });
    assert_eq!(take_exit_code(run_subcommand(gather, true)), exit::DONE);
    assert_eq!(verify_without_and_with_strict(&gathered), (exit::DONE, exit::DONE));
    std::fs::remove_file(gathered.join("gathered.json")).expect("removed");
    assert_eq!(verify_without_and_with_strict(&gathered), (exit::DONE, exit::CHECKPOINT));
    assert!(list_unchecked(&gathered)[0].ends_with(": model.safetensors"), "{:?}", list_unchecked(&gathered));
}

#[test]
fn external_checkpoints_are_inspected_verified_and_gathered() {
    let golden = find_golden_dir();
    let dir = tempfile::tempdir().expect("a directory");
    let run = |command| take_exit_code(run_subcommand(command, true));
    let ckpt = golden.join("z2_frozen");
    assert_eq!(run(CkptCommand::Inspect(InspectArgs { dir: ckpt.clone() })), exit::DONE);
    assert_eq!(run(verify_command(ckpt.clone())), exit::DONE);
    for kind in ["accelerate_z2", "fsdp_full", "universal", "dcp"] {
        let dir = golden.join("tiny").join(kind);
        assert_eq!(run(CkptCommand::Inspect(InspectArgs { dir: dir.clone() })), exit::DONE, "{kind}");
        assert_eq!(run(verify_command(dir)), exit::DONE, "{kind}");
    }
    let (out, dtype) = (dir.path().join("out"), Some(DtypeOption::Bf16));
    let gather = CkptCommand::Gather(GatherArgs {
        dir: ckpt,
        out: out.clone(),
        dtype,
        max_shard_size: 1 << 30,
        force: false,
        merge_lora: false,
    });
    assert_eq!(run(gather), exit::DONE);
    assert!(out.join("model.safetensors").exists());
    // A tag that lacks most of its files.
    std::fs::create_dir(dir.path().join("global_step1")).expect("made");
    let lone = dir.path().join("global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt");
    std::fs::write(lone, "nothing").expect("written");
    assert_eq!(run(CkptCommand::Inspect(InspectArgs { dir: dir.path().to_owned() })), exit::CHECKPOINT);
    assert_eq!(run(verify_command(dir.path().to_owned())), exit::CHECKPOINT);
}

/// Parses and runs `launch ckpt` with these arguments. Returns the exit code.
fn run_ckpt_command(words: &[&str]) -> u8 {
    use clap::Parser;
    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: CkptArgs,
    }
    match Cli::try_parse_from(std::iter::once(&"ckpt").chain(words)) {
        Ok(cli) => take_exit_code(run_subcommand(cli.args.command, false)),
        Err(_) => exit::USAGE,
    }
}

/// Checks that contradicting options and impossible limits are rejected before a file is read
/// or written.
#[test]
fn contradicting_or_impossible_options_are_rejected() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("checkpoints");
    save_sample_checkpoint(&root);
    let (root, out) = (root.display().to_string(), dir.path().join("out"));
    let shown = out.display().to_string();
    let convert =
        |options: &[&str]| run_ckpt_command(&[&["convert", root.as_str(), shown.as_str()], options].concat());
    for options in [
        &["--to", "safetensors", "--stage", "3"][..],
        &["--to", "safetensors", "--world-size", "2"],
        &["--to", "safetensors", "--memory", "100MB"],
        &["--to", "native", "--sub-group-size", "1000"],
        &["--to", "native", "--dtype", "fp32"],
        &["--to", "universal", "--stage", "2"],
        &["--to", "native", "--world-size", "0"],
        &["--to", "native", "--world", "65537"],
        &["--to", "native", "--memory", "1MB"],
        &["--to", "deepspeed", "--stage", "4"],
        &["--to", "deepspeed", "--sub-group-size", "0"],
        &["--to", "somewhere"],
    ] {
        assert_eq!(convert(options), exit::USAGE, "{options:?}");
        assert!(!out.exists(), "{options:?}");
    }
    assert_eq!(convert(&["--to", "native", "--world-size", "2"]), exit::DONE);
    let file = dir.path().join("file.pt");
    std::fs::write(&file, "not a torch file").expect("written");
    let file = file.display().to_string();
    assert_eq!(run_ckpt_command(&["watch", &file]), exit::USAGE);
    assert_eq!(run_ckpt_command(&["watch", &root, "--gather", &root]), exit::USAGE);
    assert_eq!(run_ckpt_command(&["watch", &root, "--settle", "0"]), exit::USAGE);
    assert_eq!(run_ckpt_command(&["verify", &file]), exit::CHECKPOINT);
    assert_eq!(run_ckpt_command(&["rng", &root, "--world-size", "0"]), exit::USAGE);
    assert_eq!(run_ckpt_command(&["repair", &root, "--in-place", "--out", "x"]), exit::USAGE);
    assert_eq!(run_ckpt_command(&["diff", &root, &file]), exit::CHECKPOINT);
}

#[test]
fn every_outcome_of_a_ckpt_command_has_its_exit_code() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("checkpoints");
    let path = save_sample_checkpoint(&root);
    let out = dir.path().join("out");
    let run = |command| take_exit_code(run_subcommand(command, true));
    let gather = |dtype, force| {
        CkptCommand::Gather(GatherArgs {
            dir: root.clone(),
            out: out.clone(),
            dtype,
            max_shard_size: 1 << 30,
            force,
            merge_lora: false,
        })
    };
    assert_eq!(run(CkptCommand::Inspect(InspectArgs { dir: root.clone() })), exit::DONE);
    assert_eq!(run(verify_command(root.clone())), exit::DONE);
    assert_eq!(run(gather(Some(DtypeOption::Fp16), false)), exit::FAILED, "1e6 exceeds fp16");
    assert_eq!(run(gather(Some(DtypeOption::Bf16), false)), exit::DONE);
    assert_eq!(run(gather(Some(DtypeOption::Bf16), false)), exit::USAGE, "not overwritten");
    assert_eq!(run(gather(None, true)), exit::DONE);
    std::fs::write(path.join("shard-00000-of-00001.safetensors"), "cut").expect("written");
    assert_eq!(run(verify_command(root.clone())), exit::CHECKPOINT);
    assert_eq!(run(CkptCommand::Inspect(InspectArgs { dir: path })), exit::CHECKPOINT);
    assert_eq!(run(gather(None, true)), exit::CHECKPOINT);
    assert_eq!(run(CkptCommand::Inspect(InspectArgs { dir: dir.path().join("nowhere") })), exit::CHECKPOINT);
    let report = ckpt::verify_checkpoints(&root).expect("a directory");
    assert!(!report.is_sound());
    assert_eq!(format_verify_report(&report).split_whitespace().next(), Some("DAMAGED"));
}
