//! Files larger than 4 GiB, whose zip containers use 64-bit sizes and offsets, are read in bounded
//! memory.
#[path = "../examples/sparse_zero.rs"]
mod sparse_zero;

use ckpt::{ExternalCheckpoint, OpenedCheckpoint, ReadRequest, TensorRole, TensorSource};
use std::path::Path;
use std::process::Command;

/// One rank's weights: 4.2 GiB.
const ELEMENTS: u64 = (1 << 30) + (32 << 20);
/// Most resident memory of the process, kB.
const MEMORY_MAX: u64 = 128 << 10;
/// Environment variable of the child process, with the directory of the checkpoint.
const CHILD: &str = "CKPT_LARGE_CHILD";

fn open(dir: &Path) -> Box<ExternalCheckpoint> {
    match ckpt::find(dir).expect("whole") {
        OpenedCheckpoint::External(found) => found,
        OpenedCheckpoint::Native(_) => panic!("of DeepSpeed"),
    }
}

/// The elements of a range that aren't zero, with their indices.
fn marks(found: &ExternalCheckpoint, weight: usize, from: u64, count: u64) -> Vec<(u64, f32)> {
    let name = format!("layers.{weight}.weight");
    let mut out = vec![f32::NAN; count as usize];
    found
        .read_unchecked(&mut [ReadRequest {
            name: &name,
            role: TensorRole::Weight,
            start_element: from,
            out: &mut out,
        }])
        .expect("readable");
    (from..).zip(out).filter(|(_, v)| *v != 0.0).collect()
}

fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("a line").trim();
    line.trim_end_matches(" kB").parse().expect("a number")
}

/// Runs in a child process, since the peak memory counts everything that the process ever used.
#[test]
fn files_larger_than_4_gib_are_read_in_bounded_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let Ok(place) = std::env::var(CHILD) else {
        sparse_zero::make(dir.path(), ELEMENTS, 1, false).expect("made");
        let mut child = Command::new(std::env::current_exe().expect("path of this binary"));
        child.args(["files_larger_than_4_gib_are_read_in_bounded_memory", "--exact", "--nocapture"]);
        let ended = child.env(CHILD, dir.path()).output().expect("a child");
        assert!(ended.status.success(), "{ended:?}");
        return;
    };
    let place = Path::new(&place);
    let found = open(place);
    let shapes = sparse_zero::shapes(ELEMENTS);
    assert_eq!(found.tensors().len(), shapes.len());
    // the last weight is stored beyond 4 GiB, the previous one up to there
    let per = 64 << 20;
    for (weight, from) in [(15, per - 5_000_000), (16, 0), (16, (ELEMENTS - 1) % per - 5_000_000)] {
        let flat = weight as u64 * per + from;
        let expected: Vec<(u64, f32)> = (0..5_000_000)
            .map(|i| (from + i, sparse_zero::value(flat + i, 0)))
            .filter(|(_, v)| *v != 0.0)
            .collect();
        assert_eq!(marks(&found, weight, from, 5_000_000), expected, "weight {weight} from {from}");
    }
    let report = ckpt::verify(place).expect("a report");
    assert!(report.is_sound(), "{report:?}");
    assert!(report.checkpoints[0].bytes > 6 * ELEMENTS, "{report:?}");
    // damage at the end of the large member is detected
    let file = place.join("global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt");
    let open = std::fs::OpenOptions::new().write(true).open(&file).expect("there");
    std::os::unix::fs::FileExt::write_all_at(&open, &[1], 4 * ELEMENTS).expect("written");
    let report = ckpt::verify(place).expect("a report");
    let reasons: Vec<&ckpt::DamageReason> = report.problems().map(|(_, p)| &p.reason).collect();
    let [ckpt::DamageReason::CrcMismatch { member }] = reasons[..] else { panic!("{reasons:?}") };
    assert!(member.ends_with("data/0"), "{member}");
    assert!(peak() < MEMORY_MAX, "{} kB", peak());
}
