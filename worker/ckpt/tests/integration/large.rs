//! Tests that files larger than 4 GiB, whose zip containers use 64-bit sizes and offsets, are read
//! in bounded memory.

use crate::own_process::run_test_alone;
use crate::sparse_zero;
use ckpt::{ExternalCheckpoint, F32ReadRequest, OpenedCheckpoint, TensorRole, TensorSource};
use std::path::Path;

/// Number of elements of the rank's weights, which take more than 4 GiB in FP32.
const ELEMENTS: u64 = (1 << 30) + (32 << 20);
/// The largest peak resident memory that the child process may have, in KiB.
const MEMORY_MAX_KB: u64 = 128 << 10;
/// The environment variable by which the test passes the directory of the checkpoint to its child
/// process. Only the child process has this variable.
const CHILD_VARIABLE: &str = "CKPT_LARGE_CHILD";

/// Opens the DeepSpeed checkpoint in `dir`. Panics if `dir` has a native checkpoint, or no
/// checkpoint.
fn open_external(dir: &Path) -> Box<ExternalCheckpoint> {
    match ckpt::open_checkpoint(dir).expect("whole") {
        OpenedCheckpoint::External(found) => found,
        OpenedCheckpoint::Native(_) => panic!("of DeepSpeed"),
    }
}

/// Reads `count` elements of the weight `layers.{weight}.weight` starting at index `from`. Returns
/// the elements that are not zero, with their indices.
fn read_nonzero_elements(
    found: &ExternalCheckpoint,
    weight: usize,
    from: u64,
    count: u64,
) -> Vec<(u64, f32)> {
    let name = format!("layers.{weight}.weight");
    let mut out = vec![f32::NAN; count as usize];
    found
        .read_unverified(&mut [F32ReadRequest {
            name: &name,
            role: TensorRole::Weight,
            start_element: from,
            out: &mut out,
        }])
        .expect("readable");
    (from..).zip(out).filter(|(_, v)| *v != 0.0).collect()
}

/// Returns the peak resident memory of this process, in KiB.
fn read_peak_memory_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("a line").trim();
    line.trim_end_matches(" kB").parse().expect("a number")
}

/// Reads elements before and beyond 4 GiB, verifies the checkpoint, and checks that damage beyond
/// 4 GiB is found. Runs in a child process, since the peak memory counts everything that a process
/// ever used.
#[test]
fn files_larger_than_4_gib_are_read_in_bounded_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let Ok(checkpoint_dir) = std::env::var(CHILD_VARIABLE) else {
        sparse_zero::write_checkpoint(dir.path(), ELEMENTS, 1, false).expect("made");
        let test = "large::files_larger_than_4_gib_are_read_in_bounded_memory";
        let ended = run_test_alone(test, CHILD_VARIABLE, dir.path());
        assert!(ended.status.success(), "{ended:?}");
        return;
    };
    let checkpoint_dir = Path::new(&checkpoint_dir);
    let found = open_external(checkpoint_dir);
    let shapes = sparse_zero::list_weight_shapes(ELEMENTS);
    assert_eq!(found.tensors().len(), shapes.len());
    // the last weight is stored beyond 4 GiB, and the weight before it ends at 4 GiB
    let per = 64 << 20;
    for (weight, from) in [(15, per - 5_000_000), (16, 0), (16, (ELEMENTS - 1) % per - 5_000_000)] {
        let flat = weight as u64 * per + from;
        let expected: Vec<(u64, f32)> = (0..5_000_000)
            .map(|i| (from + i, sparse_zero::compute_test_element(flat + i, 0)))
            .filter(|(_, v)| *v != 0.0)
            .collect();
        assert_eq!(
            read_nonzero_elements(&found, weight, from, 5_000_000),
            expected,
            "weight {weight} from {from}"
        );
    }
    let report = ckpt::verify_checkpoints(checkpoint_dir).expect("a report");
    assert!(report.is_sound(), "{report:?}");
    assert!(report.checkpoints[0].bytes > 6 * ELEMENTS, "{report:?}");
    // damage at the end of the large member is detected
    let file = checkpoint_dir.join("global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt");
    let open = std::fs::OpenOptions::new().write(true).open(&file).expect("there");
    std::os::unix::fs::FileExt::write_all_at(&open, &[1], 4 * ELEMENTS).expect("written");
    let report = ckpt::verify_checkpoints(checkpoint_dir).expect("a report");
    let reasons: Vec<&ckpt::DamageReason> = report.all_problems().map(|(_, p)| &p.reason).collect();
    let [ckpt::DamageReason::CrcMismatch { member }] = reasons[..] else { panic!("{reasons:?}") };
    assert!(member.ends_with("data/0"), "{member}");
    assert!(read_peak_memory_kb() < MEMORY_MAX_KB, "{} kB", read_peak_memory_kb());
}
