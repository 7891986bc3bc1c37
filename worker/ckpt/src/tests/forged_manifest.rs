//! Tests forged manifests with a matching hash, and directories that only look like checkpoints.
use super::*;
use crate::error::CkptError;
use crate::layout::native::Checkpoint;
use crate::verify_checkpoints;
use diagnostic::codes::checkpoint as codes;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[4]), ("b", &[6])];

/// Writes the matching hash into the text of a manifest, and returns the result.
fn seal_text(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes[11..75].fill(b'0');
    let hash = crate::hash::Hash::digest(&bytes).to_hex();
    bytes[11..75].copy_from_slice(hash.as_bytes());
    bytes
}

/// Encodes a manifest as JSON with `blake3` as its first key and zeros as its hash.
fn encode_manifest_text(manifest: &Value) -> String {
    let mut rest = manifest.as_object().expect("an object").clone();
    rest.remove("blake3");
    let rest = Value::Object(rest).to_string();
    format!("{{\"blake3\":\"{}\",{}", "0".repeat(64), &rest[1..])
}

/// Saves a checkpoint of two ranks to a temporary directory, and reads its manifest. Returns the
/// temporary directory, the path of the checkpoint, and the manifest as JSON.
fn save_and_read_manifest() -> (TempDir, PathBuf, Value) {
    let dir = make_memory_dir();
    let path = save_checkpoint(dir.path(), &make_facts(1, 2, WEIGHTS)).expect("saved").path;
    let manifest =
        serde_json::from_slice(&fs::read(path.join("manifest.json")).expect("read")).expect("JSON");
    (dir, path, manifest)
}

#[test]
fn an_unchanged_manifest_with_a_new_hash_is_accepted() {
    let (_dir, path, manifest) = save_and_read_manifest();
    fs::write(path.join("manifest.json"), seal_text(&encode_manifest_text(&manifest))).expect("written");
    assert_contains_saved(&Checkpoint::open(&path).expect("unchanged"), &make_facts(1, 2, WEIGHTS));
}

#[test]
fn contradictions_in_a_manifest_are_rejected() {
    let huge = json!(u64::MAX);
    let cases: Vec<(&str, Value)> = vec![
        ("/version", json!(2)),
        ("/format", json!("else")),
        ("/block_bytes", json!(4096)),
        ("/facts/world", json!(3)),
        ("/facts/world", json!(0)),
        ("/facts/world", json!(-1)),
        ("/facts/stage", json!(4)),
        ("/facts/groups", json!({"lr": 1})),
        ("/facts/groups", json!([null])),
        ("/facts/model/hf_config", json!([])),
        ("/facts/model/weights/0/shape", json!([5])),
        ("/facts/model/weights/0/shape", json!([1u64 << 62, 1u64 << 62])),
        ("/facts/model/weights/1/name", json!("a")),
        ("/facts/model/weights/1/name", json!("c")),
        ("/facts/model/frozen", json!(["zzz"])),
        ("/facts/model/ties", json!([{"alias": "x", "target": "y"}])),
        ("/facts/tokenizer/0/name", json!("../../evil")),
        ("/facts/tokenizer/0/name", json!(".hidden")),
        ("/files/0/name", json!("/etc/passwd")),
        ("/files/0/name", json!("../shard-00000-of-00002.safetensors")),
        ("/files/0/bytes", huge.clone()),
        ("/files/0/bytes", json!(100)),
        ("/files/0/bytes", json!(1 << 19)),
        ("/files/0/blocks", json!([])),
        ("/files/0/blocks/0", json!("abc")),
        ("/tensors/0/dtype", json!("F31")),
        ("/tensors/0/dtype", json!("F16")),
        ("/tensors/0/dtype", json!("BF16")),
        ("/tensors/0/role", json!("soul")),
        ("/tensors/0/name", json!("a\u{1b}[2J")),
        ("/tensors/0/name", json!("z".repeat(5000))),
        ("/tensors/1/name", json!("a")),
        ("/tensors/0/shape", json!([1u64 << 40, 1u64 << 40])),
        ("/tensors/0/shape", json!([0, 1u64 << 40, 1u64 << 40])),
        ("/tensors/0/shape", json!([5])),
        ("/tensors/0/pieces", json!([])),
        ("/tensors/0/pieces/0/start", huge.clone()),
        ("/tensors/0/pieces/0/count", huge.clone()),
        ("/tensors/0/pieces/0/count", json!(1)),
        ("/tensors/0/pieces/0/offset", huge.clone()),
        ("/tensors/0/pieces/0/offset", json!(0)),
        ("/tensors/0/pieces/0/file", json!(7)),
        ("/tensors/0/pieces/0/file", huge),
        ("/tensors/0/surprise", json!(1)),
    ];
    let (_dir, path, good) = save_and_read_manifest();
    let mut lines = Vec::new();
    for (pointer, value) in cases {
        let mut bad = good.clone();
        match bad.pointer_mut(pointer) {
            Some(member) => *member = value.clone(),
            None => drop(
                bad["tensors"][0]
                    .as_object_mut()
                    .expect("an object")
                    .insert("surprise".into(), value.clone()),
            ),
        }
        fs::write(path.join("manifest.json"), seal_text(&encode_manifest_text(&bad))).expect("written");
        let error = format_error(&Checkpoint::open(&path).expect_err(pointer), &path);
        assert!(!error.contains('\u{1b}') && !error.contains('\n'), "{error:?}");
        let value: String = value.to_string().chars().take(60).collect();
        lines.push(format!("{pointer} = {value}: {error}"));
        assert!(!verify_checkpoints(&path).expect("there").is_sound(), "{pointer}");
    }
    insta::assert_snapshot!("forged_manifest_contradictions", lines.join("\n"));
}

#[test]
fn two_tensors_cannot_share_bytes() {
    let (_dir, path, mut bad) = save_and_read_manifest();
    bad["tensors"][1]["pieces"][0]["offset"] = bad["tensors"][0]["pieces"][0]["offset"].clone();
    fs::write(path.join("manifest.json"), seal_text(&encode_manifest_text(&bad))).expect("written");
    let error = Checkpoint::open(&path).expect_err("rejected");
    insta::assert_snapshot!("forged_manifest_shared_bytes", format_error(&error, &path));
}

#[test]
fn files_that_are_not_manifests_are_rejected() {
    let (_dir, path, good) = save_and_read_manifest();
    let manifest = path.join("manifest.json");
    let mut nested = good.clone();
    nested["facts"]["cursor"] = json!("here");
    let deep = encode_manifest_text(&nested)
        .replace("\"here\"", &format!("{}{}", "[".repeat(200_000), "]".repeat(200_000)));
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", Vec::new()),
        ("no hash", b"{}".to_vec()),
        ("not text", vec![0xff; 500]),
        ("truncated JSON", seal_text(&format!("{{\"blake3\":\"{}\"", "0".repeat(64)))),
        ("missing fields", seal_text(&format!("{{\"blake3\":\"{}\",\"format\":\"x\"}}", "0".repeat(64)))),
        ("nested too deep", seal_text(&deep)),
    ];
    let mut lines = Vec::new();
    for (what, bytes) in cases {
        fs::write(&manifest, bytes).expect("written");
        let error = Checkpoint::open(&path).expect_err(what);
        lines.push(format!("{what}: {}", format_error(&error, &path)));
    }
    insta::assert_snapshot!("forged_manifest_not_a_manifest", lines.join("\n"));
    // a manifest that is too large is rejected by its size without being read
    let file = fs::File::create(&manifest).expect("made");
    file.set_len(1 << 40).or_else(|_| file.set_len(1 << 32)).expect("sparse");
    let error = Checkpoint::open(&path).expect_err("rejected");
    assert_eq!(error.code(), codes::CHECKPOINT_FILE_TOO_LARGE, "{error}");
    fs::remove_file(&manifest).expect("removed");
    fs::create_dir(&manifest).expect("made");
    let error = Checkpoint::open(&path).expect_err("rejected");
    assert_eq!(error.code(), codes::CHECKPOINT_FILE_NOT_REGULAR, "{error}");
}

#[test]
fn symlinks_and_pipes_are_rejected() {
    let (dir, path, _) = save_and_read_manifest();
    for name in ["shard-00001-of-00002.safetensors", "manifest.json"] {
        let file = path.join(name);
        let outside = dir.path().join("outside");
        fs::rename(&file, &outside).expect("moved");
        std::os::unix::fs::symlink(&outside, &file).expect("linked");
        let error = Checkpoint::open(&path).expect_err("rejected");
        let CkptError::Damaged { damage, .. } = &error else { panic!("{error:?}") };
        assert_eq!(damage.file, name);
        assert!(!verify_checkpoints(&path).expect("there").is_sound());
        fs::remove_file(&file).expect("removed");
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).expect("made");
        let error = Checkpoint::open(&path).expect_err("rejected without waiting for a writer");
        assert_eq!(error.code(), codes::CHECKPOINT_FILE_NOT_REGULAR, "{error}");
        fs::remove_file(&file).expect("removed");
        fs::rename(&outside, &file).expect("moved back");
    }
    Checkpoint::open(&path).expect("whole again");
}

#[test]
fn paths_without_a_checkpoint_are_diagnosed() {
    let dir = make_memory_dir();
    let error = |path: &Path| {
        let error = crate::open_newest_native(path).expect_err("none");
        assert!(error.is_checkpoint_at_fault());
        format_error(&error, dir.path())
    };
    let mut lines = vec![error(&dir.path().join("nowhere")), error(dir.path())];
    fs::write(dir.path().join("model.safetensors"), "x").expect("written");
    lines.push(error(dir.path()));
    insta::assert_snapshot!("forged_manifest_no_checkpoint", lines.join("\n"));
    // the file of weights is damaged
    assert!(!verify_checkpoints(dir.path()).expect("a report").is_sound());
    fs::remove_file(dir.path().join("model.safetensors")).expect("removed");
    assert!(verify_checkpoints(dir.path()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Checks that no random change of characters of a manifest, with a matching hash, causes a
    /// panic. Opening, verifying and reading the checkpoint may fail, but must not panic.
    #[test]
    fn random_changes_of_a_manifest_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), "[0-9a-f\\[\\]{},:\"-]"), 1..4)) {
        thread_local!(static SAVED: (TempDir, PathBuf, Value) = save_and_read_manifest());
        SAVED.with(|(_, path, good)| {
            let mut bytes = encode_manifest_text(good).into_bytes();
            for (at, with) in changes {
                let at = 75 + at.index(bytes.len() - 75);
                bytes[at] = with.as_bytes()[0];
            }
            fs::write(path.join("manifest.json"), seal_text(std::str::from_utf8(&bytes).expect("ASCII"))).expect("written");
            let _ = verify_checkpoints(path);
            if let Ok(checkpoint) = Checkpoint::open(path) {
                for t in checkpoint.tensors() {
                    let _ = checkpoint.read_f32(&t.name, t.role, 0..t.element_count(), &mut vec![0.0; t.element_count() as usize]);
                }
            }
        });
    }
}
