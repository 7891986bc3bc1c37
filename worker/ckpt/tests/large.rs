//! Files beyond 4 GiB, whose sizes and places zip keeps in 64 bits, and memory that doesn't grow with them.
#[path = "../examples/sparse_zero.rs"]
mod sparse_zero;

use ckpt::{Foreign, Found, Request, Role, Source};
use std::path::Path;
use std::process::Command;

/// One rank's weights: 4.2 GiB.
const ELEMENTS: u64 = (1 << 30) + (32 << 20);
/// Most resident memory of the process, kB.
const MEMORY_MAX: u64 = 128 << 10;
/// Set for the child.
const CHILD: &str = "CKPT_LARGE_CHILD";

fn open(dir: &Path) -> Box<Foreign> {
    match ckpt::find(dir).expect("whole") {
        Found::Foreign(found) => found,
        Found::Native(_) => panic!("of DeepSpeed"),
    }
}

/// All that isn't zero in a range of elements, with its place.
fn marks(found: &Foreign, weight: usize, from: u64, count: u64) -> Vec<(u64, f32)> {
    let name = format!("layers.{weight}.weight");
    let mut out = vec![f32::NAN; count as usize];
    found
        .read_unchecked(&mut [Request {
            name: &name,
            role: Role::Weight,
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

/// In a process of its own: the high-water mark counts all that it ever held.
#[test]
fn files_beyond_4_gib_are_read_within_the_same_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let Ok(place) = std::env::var(CHILD) else {
        sparse_zero::make(dir.path(), ELEMENTS, 1, false).expect("made");
        let mut child = Command::new(std::env::current_exe().expect("our own path"));
        child.args(["files_beyond_4_gib_are_read_within_the_same_memory", "--exact", "--nocapture"]);
        let ended = child.env(CHILD, dir.path()).output().expect("a child");
        assert!(ended.status.success(), "{ended:?}");
        return;
    };
    let place = Path::new(&place);
    let found = open(place);
    let shapes = sparse_zero::shapes(ELEMENTS);
    assert_eq!(found.tensors().len(), shapes.len());
    // the last weight lies beyond 4 GiB of its file, the one before it up to there
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
    // damage at the far end of the large member is found
    let file = place.join("global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt");
    let open = std::fs::OpenOptions::new().write(true).open(&file).expect("there");
    std::os::unix::fs::FileExt::write_all_at(&open, &[1], 4 * ELEMENTS).expect("written");
    let report = ckpt::verify(place).expect("a report");
    let problems: Vec<String> = report.problems().map(|(_, p)| p.to_string()).collect();
    assert!(problems.len() == 1 && problems[0].contains("data/0"), "{problems:?}");
    assert!(peak() < MEMORY_MAX, "{} kB", peak());
}
