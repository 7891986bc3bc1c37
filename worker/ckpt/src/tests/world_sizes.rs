//! Tests that DeepSpeed checkpoints whose files contradict each other in the number of ranks are
//! rejected.
use super::external::{copy_golden_checkpoint, expect_open_error, open_external, rewrite_members};
use diagnostic::codes::checkpoint as codes;
use std::path::Path;

/// Changes the number of ranks that a model file records under `key`, such as `dp_world_size`, to
/// `number`. Panics if the file has no such key.
fn set_world_size(file: &Path, key: &str, number: u8) {
    let mut changed = 0;
    rewrite_members(file, |name, bytes| {
        let Some(at) = bytes.windows(key.len()).position(|text| text == key.as_bytes()) else { return };
        assert!(name.ends_with("data.pkl"), "{name}");
        // the opcode that stores the key in the memo of the pickle (BINPUT or LONG_BINPUT) has one
        // or four bytes of argument; the number of one byte (BININT1) follows
        let memo = at + key.len();
        let value = memo + if bytes[memo] == b'q' { 2 } else { 5 };
        assert_eq!(bytes[value], b'K', "a number of one byte");
        bytes[value + 1] = number;
        changed += 1;
    });
    assert_eq!(changed, 1, "{key} in {}", file.display());
}

#[test]
fn model_files_with_different_numbers_of_ranks_are_an_error() {
    for (key, number) in [("dp_world_size", 3), ("mp_world_size", 2)] {
        let (dir, tag) = copy_golden_checkpoint("z3_frozen");
        set_world_size(&tag.join("zero_pp_rank_2_mp_rank_00_model_states.pt"), key, number);
        let error = open_external(dir.path()).expect_err("a contradiction");
        assert_eq!(error.code(), codes::DEEPSPEED_STATE_INVALID, "{error}");
        insta::assert_snapshot!(format!("world_sizes_{key}"), expect_open_error(dir.path()));
    }
}

#[test]
fn a_model_that_is_divided_among_ranks_is_not_supported() {
    let (dir, tag) = copy_golden_checkpoint("z0");
    set_world_size(&tag.join("mp_rank_00_model_states.pt"), "mp_world_size", 2);
    let error = open_external(dir.path()).expect_err("model parallelism");
    assert_eq!(error.code(), codes::CHECKPOINT_PARALLELISM_UNSUPPORTED, "{error}");
}
