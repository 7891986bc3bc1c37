//! Tests that changes of gathered and converted files are found by the hashes in their records, and
//! that impossible states are reported.
use super::convert::{make_convert_options, open_source};
use super::external::golden_path;
use super::*;
use crate::convert::{ConvertTarget, convert_checkpoint};
use crate::save::output_record::{CONVERT_RECORD_KIND, GATHER_RECORD_KIND};
use crate::{GatherOptions, RepairOptions, gather_weights, repair_checkpoints, verify_checkpoints};
use std::fs;
use std::os::unix::fs::FileExt;

/// Gathers a golden checkpoint with a config in a new directory. Returns the directory, and the
/// path of the weights.
fn gather_golden() -> (TempDir, PathBuf) {
    let dir = make_memory_dir();
    let out = dir.path().join("weights");
    let source = open_source(&golden_path("hf_ddp").join("checkpoint-3"));
    gather_weights(&*source, &out, &GatherOptions::default(), |_, _| ()).expect("gathered");
    (dir, out)
}

/// Converts the golden checkpoint `z2_padded` to `target` in a new directory. Returns the
/// directory, and the path of the result.
fn convert_golden(target: ConvertTarget) -> (TempDir, PathBuf) {
    let dir = make_memory_dir();
    let out = dir.path().join("converted");
    let source = open_source(&golden_path("z2_padded"));
    convert_checkpoint(&*source, &out, &make_convert_options(target, 2, 2), |_, _| ()).expect("converted");
    (dir, out)
}

/// Asserts that a verification of `path` finds exactly one problem, in the file `name`. Returns the
/// text of the problem.
fn expect_problem(path: &Path, name: &str) -> String {
    let report = verify_checkpoints(path).expect("a checkpoint");
    let problems: Vec<&Damage> = report.all_problems().map(|(_, problem)| problem).collect();
    assert_eq!(problems.iter().map(|p| p.file.as_str()).collect::<Vec<_>>(), [name], "{problems:?}");
    problems[0].reason.to_string()
}

/// Flips a bit in the middle of a file.
fn flip_bit(path: &Path) {
    let file = fs::File::options().read(true).write(true).open(path).expect("open");
    let (at, mut byte) = (file.metadata().expect("size").len() / 2, [0]);
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 1], at).expect("written");
}

#[test]
fn every_changed_file_of_a_gather_is_reported() {
    let (_dir, out) = gather_golden();
    let report = verify_checkpoints(&out).expect("a checkpoint");
    assert!(report.is_sound() && report.checkpoints[0].unchecked.is_empty(), "{report:?}");
    let names = list_entry_names(&out);
    assert!(names.contains(&"model.safetensors".to_owned()) && names.len() >= 2, "{names:?}");
    for name in &names {
        let (path, before) = (out.join(name), fs::read(out.join(name)).expect("read"));
        if name.ends_with(".safetensors") || name == GATHER_RECORD_KIND.file {
            flip_bit(&path);
        } else {
            fs::write(&path, "{}").expect("written");
        }
        let reason = expect_problem(&out, name);
        assert!(reason.contains("BLAKE3") || reason.contains("bytes"), "{name}: {reason}");
        fs::remove_file(&path).expect("removed");
        if name != GATHER_RECORD_KIND.file && name != "model.safetensors" {
            assert_eq!(expect_problem(&out, name), "the file is missing");
        }
        fs::write(&path, before).expect("restored");
    }
    assert!(verify_checkpoints(&out).expect("a checkpoint").is_sound());
}

#[test]
fn a_single_weight_file_is_verified_without_its_directory() {
    let (_dir, out) = gather_golden();
    let file = out.join("model.safetensors");
    let report = verify_checkpoints(&file).expect("weights");
    assert!(report.is_sound() && report.checkpoints[0].unchecked.is_empty(), "{report:?}");
    fs::write(out.join("config.json"), "{}").expect("written");
    assert!(verify_checkpoints(&file).expect("weights").is_sound());
    flip_bit(&file);
    assert!(expect_problem(&file, "model.safetensors").contains("in gathered.json"));
    // without a record, the change cannot be found
    fs::remove_file(out.join(GATHER_RECORD_KIND.file)).expect("removed");
    let report = verify_checkpoints(&file).expect("weights");
    assert!(report.is_sound());
    assert_eq!(report.checkpoints[0].unchecked, ["model.safetensors"]);
}

#[test]
fn converted_files_match_their_record_until_they_change() {
    for target in [ConvertTarget::DeepSpeed, ConvertTarget::Universal] {
        let (_dir, out) = convert_golden(target);
        let record =
            CONVERT_RECORD_KIND.read_record(&crate::codec::disk::Directory::open(&out).expect("open"));
        let files = record.expect("sound").expect("exists").files;
        let hashed: Vec<&str> =
            files.iter().filter(|f| f.content.is_some()).map(|f| f.name.as_str()).collect();
        assert!(hashed.len() + 2 >= files.len() && hashed.iter().any(|n| n.ends_with(".pt")), "{files:?}");
        let sound = verify_checkpoints(&out).expect("a checkpoint");
        assert!(sound.is_sound() && sound.warnings.is_empty(), "{sound:?}");
        // a byte outside of every zip member has no CRC-32
        let name = hashed.iter().find(|n| n.ends_with(".pt")).expect("a file");
        let path = out.join(name);
        let before = fs::read(&path).expect("read");
        let mut changed = before.clone();
        changed[10] ^= 1; // the time of the first member
        fs::write(&path, &changed).expect("written");
        assert!(expect_problem(&out, name).contains("in converted.json"));
        fs::write(&path, before).expect("restored");
        // a program may replace the pointer, and remove an old state
        let pointer = if target == ConvertTarget::Universal { "latest_universal" } else { "latest" };
        let tag = fs::read_to_string(out.join(pointer)).expect("read");
        fs::rename(out.join(&tag), out.join("global_step9_other")).expect("renamed");
        fs::write(out.join(pointer), "global_step9_other").expect("written");
        let report = verify_checkpoints(&out).expect("a checkpoint");
        assert!(report.is_sound(), "{report:?}");
        assert!(report.warnings.iter().any(|w| w.contains("which does not exist")), "{:?}", report.warnings);
    }
}

#[test]
fn special_files_in_place_of_recorded_files_are_damage() {
    let (dir, out) = gather_golden();
    let path = out.join("config.json");
    let before = fs::read(&path).expect("read");
    let make_fifo = || nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let outside = dir.path().join("outside");
    fs::write(&outside, &before).expect("written");
    let make_link = || std::os::unix::fs::symlink(&outside, &path).expect("a link");
    let make_loop = || std::os::unix::fs::symlink("config.json", &path).expect("a link");
    let make_directory = || fs::create_dir(&path).expect("a directory");
    for make in [&make_fifo as &dyn Fn(), &make_link, &make_loop] {
        fs::remove_file(&path).expect("removed");
        make();
        let report = verify_checkpoints(&out).expect("a checkpoint");
        assert!(report.all_problems().any(|(_, p)| p.file == "config.json"), "{report:?}");
    }
    fs::remove_file(&path).expect("removed");
    make_directory();
    let report = verify_checkpoints(&out).expect("a checkpoint");
    assert!(report.all_problems().any(|(_, p)| p.file == "config.json"), "{report:?}");
}

#[test]
fn names_in_a_record_cannot_lead_out_of_the_directory() {
    let (dir, out) = gather_golden();
    let outside = dir.path().join("outside");
    fs::write(&outside, "secret").expect("written");
    for name in ["../outside", "/etc/passwd", "a/../../outside", "", "."] {
        fs::remove_file(out.join(GATHER_RECORD_KIND.file)).expect("removed");
        let content = Some(crate::save::output_record::RecordedContent::from_text(b"secret"));
        let file = crate::save::output_record::RecordedFile { name: name.into(), content };
        GATHER_RECORD_KIND.write_record(&out, GATHER_RECORD_KIND.make_record(vec![file])).expect("written");
        let report = verify_checkpoints(&out).expect("a checkpoint");
        assert!(!report.is_sound() || !report.warnings.is_empty(), "{name:?}: {report:?}");
    }
}

#[test]
fn a_repair_updates_the_record_of_rebuilt_files_only() {
    let (dir, out) = convert_golden(ConvertTarget::DeepSpeed);
    fs::write(out.join("latest"), "global_step7").expect("written");
    let repaired = dir.path().join("repaired");
    let options = RepairOptions { out: Some(repaired.clone()), ..RepairOptions::default() };
    let report = repair_checkpoints(&out, &options).expect("no error of the disk");
    assert!(report.sound, "{report:?}");
    assert!(verify_checkpoints(&repaired).expect("a checkpoint").is_sound());
}

#[test]
fn a_parameter_with_more_updates_than_the_run_is_reported() {
    let dir = make_memory_dir();
    let path = dir.path().join("checkpoint-1");
    copy_tree(&golden_path("hf_ddp").join("checkpoint-3"), &path);
    let state = path.join("trainer_state.json");
    let text = fs::read_to_string(&state).expect("read");
    assert!(text.contains("\"global_step\": 3"), "{text}");
    fs::write(&state, text.replace("\"global_step\": 3", "\"global_step\": 1")).expect("written");
    let report = verify_checkpoints(&path).expect("a checkpoint");
    assert!(report.is_sound() && !report.warnings.is_empty(), "{report:?}");
}
