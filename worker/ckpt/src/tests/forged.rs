//! Manifests and folders as an enemy would write them: a hash is easily made to fit.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::error::CkptError;
use crate::verify;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[4]), ("b", &[6])];

/// The text with a fitting hash.
fn seal(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes[11..75].fill(b'0');
    let hash = crate::hash::Hash::of(&bytes).hex();
    bytes[11..75].copy_from_slice(hash.as_bytes());
    bytes
}

/// `blake3` first, whatever order the map has.
fn text(manifest: &Value) -> String {
    let mut rest = manifest.as_object().expect("an object").clone();
    rest.remove("blake3");
    let rest = Value::Object(rest).to_string();
    format!("{{\"blake3\":\"{}\",{}", "0".repeat(64), &rest[1..])
}

fn saved() -> (TempDir, PathBuf, Value) {
    let dir = fast_dir();
    let path = save(dir.path(), &facts(1, 2, WEIGHTS)).expect("saved").path;
    let manifest =
        serde_json::from_slice(&fs::read(path.join("manifest.json")).expect("read")).expect("JSON");
    (dir, path, manifest)
}

#[test]
fn a_resealed_manifest_is_accepted() {
    let (_dir, path, manifest) = saved();
    fs::write(path.join("manifest.json"), seal(&text(&manifest))).expect("written");
    assert_holds(&Checkpoint::open(&path).expect("nothing was changed"), &facts(1, 2, WEIGHTS));
}

#[test]
fn contradictions_are_refused_with_the_reason() {
    let huge = json!(u64::MAX);
    let cases: Vec<(&str, Value, &str)> = vec![
        ("/version", json!(2), "version 2"),
        ("/format", json!("else"), "\"else\""),
        ("/block_bytes", json!(4096), "blocks of 4096"),
        ("/facts/world", json!(3), "2 shards of a world of 3"),
        ("/facts/world", json!(0), "world of 0"),
        ("/facts/world", json!(-1), "invalid value"),
        ("/facts/model/hf_config", json!([]), "not an object"),
        ("/facts/model/weights/0/shape", json!([5]), "weight/a has the shape [4], not [5]"),
        ("/facts/model/weights/0/shape", json!([1u64 << 62, 1u64 << 62]), "impossible shape"),
        ("/facts/model/weights/1/name", json!("a"), "listed twice"),
        ("/facts/model/weights/1/name", json!("c"), "weight/c is held by no shard"),
        ("/facts/model/frozen", json!(["zzz"]), "zzz is frozen"),
        ("/facts/model/ties", json!([{"alias": "x", "target": "y"}]), "x is tied to y"),
        ("/facts/tokenizer/0/name", json!("../../evil"), "no file name"),
        ("/facts/tokenizer/0/name", json!(".hidden"), "no file name"),
        ("/files/0/name", json!("/etc/passwd"), "wrong name"),
        ("/files/0/name", json!("../shard-00000-of-00002.safetensors"), "wrong name"),
        ("/files/0/bytes", huge.clone(), "hashes for"),
        ("/files/0/bytes", json!(100), "are not in shard 0"),
        ("/files/0/bytes", json!(1 << 19), "the manifest says 524288"),
        ("/files/0/blocks", json!([]), "0 hashes"),
        ("/files/0/blocks/0", json!("abc"), "BLAKE3"),
        ("/tensors/0/dtype", json!("F31"), "unknown variant"),
        ("/tensors/0/dtype", json!("F16"), "kept as F32"),
        ("/tensors/0/dtype", json!("BF16"), "it says version 1, and has what is of version 3"),
        ("/tensors/0/role", json!("soul"), "unknown variant"),
        ("/tensors/0/name", json!("a\u{1b}[2J"), "no name for a tensor"),
        ("/tensors/0/name", json!("z".repeat(5000)), "no name for a tensor"),
        ("/tensors/1/name", json!("a"), "weight/a is listed twice"),
        ("/tensors/0/shape", json!([1u64 << 40, 1u64 << 40]), "impossible shape"),
        ("/tensors/0/shape", json!([0, 1u64 << 40, 1u64 << 40]), "impossible shape"),
        ("/tensors/0/shape", json!([5]), "elements 4..5 are held by no shard"),
        ("/tensors/0/pieces", json!([]), "elements 0..4 are held by no shard"),
        ("/tensors/0/pieces/0/start", huge.clone(), "weight/a"),
        ("/tensors/0/pieces/0/count", huge.clone(), "weight/a"),
        ("/tensors/0/pieces/0/count", json!(1), "elements 1..2 are held by no shard"),
        ("/tensors/0/pieces/0/offset", huge.clone(), "are not in shard"),
        ("/tensors/0/pieces/0/offset", json!(0), "are not in shard"),
        ("/tensors/0/pieces/0/file", json!(7), "are not in shard 7"),
        ("/tensors/0/pieces/0/file", huge, "are not in shard"),
        ("/tensors/0/surprise", json!(1), "unknown field"),
    ];
    let (_dir, path, good) = saved();
    for (pointer, value, reason) in cases {
        let mut bad = good.clone();
        match bad.pointer_mut(pointer) {
            Some(place) => *place = value.clone(),
            None => drop(
                bad["tensors"][0]
                    .as_object_mut()
                    .expect("an object")
                    .insert("surprise".into(), value.clone()),
            ),
        }
        fs::write(path.join("manifest.json"), seal(&text(&bad))).expect("written");
        let error = Checkpoint::open(&path).expect_err(pointer).to_string();
        assert!(error.contains(reason), "{pointer} = {value}: {error:?} lacks {reason:?}");
        assert!(!error.contains('\u{1b}') && !error.contains('\n'), "{error:?}");
        assert!(!verify(&path).expect("there").is_sound(), "{pointer}");
    }
}

#[test]
fn two_tensors_cannot_share_bytes() {
    let (_dir, path, mut bad) = saved();
    bad["tensors"][1]["pieces"][0]["offset"] = bad["tensors"][0]["pieces"][0]["offset"].clone();
    fs::write(path.join("manifest.json"), seal(&text(&bad))).expect("written");
    let error = Checkpoint::open(&path).expect_err("refused").to_string();
    assert!(error.contains("belong to two tensors"), "{error}");
}

#[test]
fn manifests_that_are_none_are_refused() {
    let (_dir, path, good) = saved();
    let manifest = path.join("manifest.json");
    let mut nested = good.clone();
    nested["facts"]["cursor"] = json!("here");
    let deep = text(&nested).replace("\"here\"", &format!("{}{}", "[".repeat(200_000), "]".repeat(200_000)));
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "cut short"),
        (b"{}".to_vec(), "cut short"),
        (vec![0xff; 500], "BLAKE3"),
        (seal(&format!("{{\"blake3\":\"{}\"", "0".repeat(64))), "EOF"),
        (seal(&format!("{{\"blake3\":\"{}\",\"format\":\"x\"}}", "0".repeat(64))), "missing field"),
        (seal(&deep), "recursion limit"),
    ];
    for (bytes, reason) in cases {
        fs::write(&manifest, bytes).expect("written");
        let error = Checkpoint::open(&path).expect_err(reason).to_string();
        assert!(error.contains(reason), "{error} lacks {reason}");
    }
    // too large: refused by its size, not read
    let file = fs::File::create(&manifest).expect("made");
    file.set_len(1 << 40).or_else(|_| file.set_len(1 << 32)).expect("sparse");
    let error = Checkpoint::open(&path).expect_err("refused").to_string();
    assert!(error.contains("more than the 268435456 that are allowed"), "{error}");
    fs::remove_file(&manifest).expect("removed");
    fs::create_dir(&manifest).expect("made");
    assert!(Checkpoint::open(&path).expect_err("refused").to_string().contains("not a regular file"));
}

#[test]
fn links_and_pipes_are_not_followed() {
    let (dir, path, _) = saved();
    for name in ["shard-00001-of-00002.safetensors", "manifest.json"] {
        let file = path.join(name);
        let outside = dir.path().join("outside");
        fs::rename(&file, &outside).expect("moved");
        std::os::unix::fs::symlink(&outside, &file).expect("linked");
        let error = Checkpoint::open(&path).expect_err("refused");
        assert!(error.to_string().contains(name) && error.is_checkpoint_at_fault(), "{error}");
        assert!(!verify(&path).expect("there").is_sound());
        fs::remove_file(&file).expect("removed");
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).expect("made");
        let error = Checkpoint::open(&path).expect_err("refused, and not waited for").to_string();
        assert!(error.contains("not a regular file"), "{error}");
        fs::remove_file(&file).expect("removed");
        fs::rename(&outside, &file).expect("moved back");
    }
    Checkpoint::open(&path).expect("whole again");
}

#[test]
fn what_is_no_checkpoint_is_said_to_be_none() {
    let dir = fast_dir();
    let error = |path: &Path| {
        let error = crate::newest(path).expect_err("none");
        assert!(matches!(error, CkptError::NotACheckpoint { .. }), "{error:?}");
        assert!(error.is_checkpoint_at_fault());
        error.to_string()
    };
    assert!(error(&dir.path().join("nowhere")).contains("no such directory"));
    assert!(error(dir.path()).contains("it is empty"));
    fs::write(dir.path().join("model.safetensors"), "x").expect("written");
    assert!(error(dir.path()).contains("no folders step-"));
    // a file of weights that is none
    assert!(!verify(dir.path()).expect("a report").is_sound());
    fs::remove_file(dir.path().join("model.safetensors")).expect("removed");
    assert!(verify(dir.path()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Random changes with a fitting hash: refused or read, never a panic.
    #[test]
    fn no_manifest_panics(changes in prop::collection::vec((any::<prop::sample::Index>(), "[0-9a-f\\[\\]{},:\"-]"), 1..4)) {
        thread_local!(static SAVED: (TempDir, PathBuf, Value) = saved());
        SAVED.with(|(_, path, good)| {
            let mut bytes = text(good).into_bytes();
            for (at, with) in changes {
                let at = 75 + at.index(bytes.len() - 75);
                bytes[at] = with.as_bytes()[0];
            }
            fs::write(path.join("manifest.json"), seal(std::str::from_utf8(&bytes).expect("ASCII"))).expect("written");
            let _ = verify(path);
            if let Ok(checkpoint) = Checkpoint::open(path) {
                for t in checkpoint.tensors() {
                    let _ = checkpoint.read_f32(&t.name, t.role, 0..t.elements(), &mut vec![0.0; t.elements() as usize]);
                }
            }
        });
    }
}
