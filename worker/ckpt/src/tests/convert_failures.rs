//! Tests of conversions that are rejected, find a damaged source or are killed, and of the output
//! that such conversions leave.
use super::convert::{
    copy_golden_weights, expect_convert_error, golden_path, make_convert_options, open_source,
};
use super::{list_entry_names, make_memory_dir, read_tree};
use crate::Dtype;
use crate::convert::{ConvertOptions, ConvertTarget, convert_checkpoint};
use crate::error::{CkptError, ConvertError, OutputProblem};
use crate::open::{OpenedCheckpoint, open_checkpoint};
use std::fs;
use std::path::Path;

#[test]
fn a_conversion_detects_damage_of_its_source() {
    for task in [
        make_convert_options(ConvertTarget::DeepSpeed, 3, 2),
        make_convert_options(ConvertTarget::Universal, 2, 1),
        make_convert_options(ConvertTarget::Native, 2, 3),
    ] {
        let dir = make_memory_dir();
        let from = dir.path().join("from");
        crate::tests::copy_tree(&golden_path("z2_padded"), &from);
        for (path, bytes) in read_tree(&from) {
            if !path.to_string_lossy().ends_with("optim_states.pt") {
                continue;
            }
            for at in [bytes.len() / 3, bytes.len() / 2] {
                let mut flipped = bytes.clone();
                flipped[at] ^= 0x10;
                fs::write(&path, flipped).expect("written");
                let result = open_checkpoint(&from).and_then(|found| match found {
                    OpenedCheckpoint::External(source) => {
                        convert_checkpoint(&*source, &dir.path().join("out"), &task, |_, _| {})
                    }
                    OpenedCheckpoint::Native(_) => Err(CkptError::internal("native")),
                });
                assert!(matches!(result, Err(CkptError::Damaged { .. })), "byte {at}: {result:?}");
                assert!(!dir.path().join("out").exists());
            }
            fs::write(&path, bytes).expect("written");
        }
    }
}

#[test]
fn files_finished_before_a_kill_are_verified_and_reused() {
    let dir = make_memory_dir();
    let source = open_source(&golden_path("z2_padded"));
    let (expected, out) = (dir.path().join("expected"), dir.path().join("out"));
    let task = make_convert_options(ConvertTarget::DeepSpeed, 3, 3);
    convert_checkpoint(&*source, &expected, &task, |_, _| {}).expect("converted");
    let first = convert_checkpoint(&*source, &out, &task, |_, _| {}).expect("converted");
    assert_eq!(first.reused, 0);
    let hidden = dir.path().join(".out.converting");
    let convert_after_kill = |damage: bool| {
        fs::remove_dir_all(&out).expect("removed");
        let child = crate::tests::run_child_test(
            "tests::convert_failures::child_process_that_is_killed_before_publishing",
            &format!("{}", dir.path().display()),
        );
        assert!(!child.status.success() && hidden.join(".done").exists(), "{child:?}");
        if damage {
            let tag = hidden.join("global_step3");
            let file = tag.join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
            let mut bytes = fs::read(&file).expect("there");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&file, bytes).expect("written");
        }
        let report = convert_checkpoint(&*source, &out, &task, |_, _| {}).expect("converted after the kill");
        assert!(!hidden.exists());
        for ((_, a), (path, b)) in read_tree(&expected).into_iter().zip(read_tree(&out)) {
            assert!(a == b, "{}", path.display());
        }
        report.reused
    };
    assert_eq!(convert_after_kill(false), 6, "two files of each of three ranks");
    assert_eq!(convert_after_kill(true), 5, "the damaged file is written again");
    // a conversion with other options reuses no file
    let child = crate::tests::run_child_test(
        "tests::convert_failures::child_process_that_is_killed_before_publishing",
        &format!("{}", dir.path().display()),
    );
    assert!(!child.status.success() && !out.exists());
    let other =
        convert_checkpoint(&*source, &out, &make_convert_options(ConvertTarget::DeepSpeed, 2, 3), |_, _| {})
            .expect("converted");
    assert_eq!(other.reused, 0);
}

/// The child process of `files_finished_before_a_kill_are_verified_and_reused`. Kills itself before
/// the conversion publishes its directory. Does nothing outside of a child process.
#[test]
fn child_process_that_is_killed_before_publishing() {
    let Some(dir) = crate::tests::read_child_argument() else { return };
    let source = open_source(&golden_path("z2_padded"));
    let out = Path::new(&dir).join("out");
    let _ = fs::remove_dir_all(&out);
    let record = Path::new(&dir).join(".out.converting/.done");
    convert_checkpoint(&*source, &out, &make_convert_options(ConvertTarget::DeepSpeed, 3, 3), |_, _| {
        let recorded = fs::read_to_string(&record).unwrap_or_default();
        // two files of each of three ranks, and `latest`
        if recorded.lines().filter(|l| !l.is_empty()).count() >= 7 {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
        }
    })
    .expect("converted");
}

#[test]
fn an_output_directory_with_other_files_is_not_replaced() {
    let dir = make_memory_dir();
    let source = open_source(&golden_path("z1_tied"));
    let out = dir.path().join("out");
    let task = make_convert_options(ConvertTarget::Universal, 2, 1);
    let force = ConvertOptions { force: true, ..task.clone() };
    convert_checkpoint(&*source, &out, &task, |_, _| {}).expect("converted");
    assert!(matches!(
        convert_checkpoint(&*source, &out, &task, |_, _| {}),
        Err(CkptError::OutputRejected { .. })
    ));
    convert_checkpoint(&*source, &out, &force, |_, _| {}).expect("replaced");
    fs::write(out.join("mine"), "mine").expect("written");
    let error = convert_checkpoint(&*source, &out, &force, |_, _| {}).expect_err("rejected");
    let CkptError::OutputRejected { problem: OutputProblem::OtherFile { file, .. }, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(file, "mine");
    assert_eq!(list_entry_names(dir.path()), ["out"], "no temporary files remain");
}

#[test]
fn a_damaged_source_gives_an_error_and_no_output() {
    let dir = make_memory_dir();
    let from = dir.path().join("from");
    crate::tests::copy_tree(&golden_path("z2_padded"), &from);
    let file = from.join("global_step3/zero_pp_rank_2_mp_rank_00_optim_states.pt");
    let mut bytes = fs::read(&file).expect("there");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&file, bytes).expect("written");
    let why = convert_checkpoint(
        &*open_source(&from),
        &dir.path().join("out"),
        &make_convert_options(ConvertTarget::DeepSpeed, 3, 2),
        |_, _| {},
    );
    assert!(matches!(why, Err(CkptError::Damaged { .. })), "{why:?}");
    assert_eq!(list_entry_names(dir.path()), ["from"]);
}

#[test]
fn weights_only_are_rejected_by_deepspeed_targets() {
    let dir = make_memory_dir();
    let weights = copy_golden_weights(dir.path(), "hf_ddp/checkpoint-3");
    for to in [ConvertTarget::DeepSpeed, ConvertTarget::Universal] {
        let out = dir.path().join("out");
        let error =
            convert_checkpoint(&*open_source(&weights), &out, &make_convert_options(to, 2, 1), |_, _| {})
                .expect_err("rejected");
        assert_eq!(expect_convert_error(&error), &ConvertError::WeightsOnly);
        assert!(!out.exists());
    }
}

/// Checks for every target that a conversion fails if it can't read the optimizer states, instead
/// of silently leaving out these states.
#[test]
fn an_unreadable_optimizer_is_an_error() {
    let dir = make_memory_dir();
    let from = dir.path().join("from");
    crate::tests::copy_tree(&golden_path("hf_ddp").join("checkpoint-3"), &from);
    let path = from.join("model.safetensors");
    let mut text = fs::read(&path).expect("there");
    let at = text.windows(9).position(|w| w == b"q_proj.we").expect("a name");
    text[at] = b'x';
    fs::write(&path, text).expect("written");
    for to in [ConvertTarget::Native, ConvertTarget::DeepSpeed, ConvertTarget::Universal] {
        let out = dir.path().join("out");
        let error =
            convert_checkpoint(&*open_source(&from), &out, &make_convert_options(to, 2, 1), |_, _| {})
                .expect_err("rejected");
        assert!(matches!(expect_convert_error(&error), ConvertError::StatesUnreadable { .. }), "{error}");
        assert!(!out.exists());
    }
}

#[test]
fn invalid_options_are_rejected() {
    let dir = make_memory_dir();
    let source = open_source(&golden_path("z1_tied"));
    for wrong in [
        make_convert_options(ConvertTarget::DeepSpeed, 0, 1),
        make_convert_options(ConvertTarget::DeepSpeed, 4, 1),
        make_convert_options(ConvertTarget::DeepSpeed, 2, 0),
        ConvertOptions { memory: 1 << 20, ..make_convert_options(ConvertTarget::DeepSpeed, 2, 1) },
        ConvertOptions { sub_group_size: 0, ..make_convert_options(ConvertTarget::DeepSpeed, 3, 1) },
        ConvertOptions { dtype: Some(Dtype::I64), ..make_convert_options(ConvertTarget::DeepSpeed, 3, 1) },
    ] {
        let result = convert_checkpoint(&*source, &dir.path().join("out"), &wrong, |_, _| {});
        assert!(matches!(result, Err(CkptError::InvalidOption { .. })), "{wrong:?}");
    }
}
