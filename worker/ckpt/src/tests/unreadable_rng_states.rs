//! Tests that `verify` reports random generator states (RNG) that cannot be read, although the
//! checksums of their files are correct.
use super::external::copy_golden_checkpoint;
use super::{format_problems, pack_zip};
use std::fs;

#[test]
fn verify_reports_unreadable_rng_states() {
    let names = ["rng_state_0.pth", "rng_state_1.pth", "random_states_0.pkl"];
    // Zip containers with correct checksums whose pickles are: a dict without states, a global that
    // is not allowed, and a dict with the state of an unknown generator.
    let other_generator = b"\x80\x02}X\x03\x00\x00\x00xlaK\x07s.";
    let pickles: [&[u8]; 3] = [b"\x80\x02}.", b"\x80\x02cposix\nsystem\n.", other_generator];
    let (dir, _) = copy_golden_checkpoint("z2_frozen");
    for (name, pickle) in names.into_iter().zip(pickles) {
        let members: [(&str, &[u8]); 2] = [("rng/data.pkl", pickle), ("rng/version", b"3")];
        fs::write(dir.path().join(name), pack_zip(&members)).expect("written");
    }
    let report = crate::verify_checkpoints(dir.path()).expect("a report");
    insta::assert_snapshot!("external_verify_rng_states", format_problems(&report, dir.path()));
}
