//! No space, too large: one clear error, and the checkpoint before it is intact.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::error::CkptError;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};

const SMALL: &[(&str, &[u64])] = &[("a", &[10])];
/// 3 × 12 MiB: more than one window, so that the writing thread meets the end.
const LARGE: &[(&str, &[u64])] = &[("a", &[3 << 20])];

#[test]
fn too_little_space_is_found_before_writing() {
    let dir = fast_dir();
    save(dir.path(), &facts(1, 1, SMALL)).expect("saved");
    let error = Staging::begin(dir.path(), 2, u64::MAX / 2).map(drop).expect_err("refused");
    assert!(matches!(error, CkptError::NoSpace { .. }));
    let text = error.to_string();
    assert!(text.contains("needed") && text.contains(&dir.path().display().to_string()), "{text}");
    assert_eq!(names(dir.path()), ["latest", "step-00000001"]);
}

/// Not a test by itself: saves with a limit on the size of files.
#[test]
fn child() {
    let Some(root) = child_argument() else { return };
    // SAFETY: ignoring a signal runs no code of ours
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }.expect("ignored");
    setrlimit(Resource::RLIMIT_FSIZE, 9 << 20, 9 << 20).expect("limited");
    let error = save(Path::new(&root), &facts(2, 1, LARGE)).expect_err("too large");
    assert!(matches!(error, CkptError::Io { action: "write", .. }), "{error:?}");
    assert!(error.to_string().contains("raise the limit"), "{error}");
}

#[test]
fn a_limit_met_while_writing_leaves_the_old_checkpoint() {
    let dir = fast_dir();
    let old = facts(1, 1, SMALL);
    let path = save(dir.path(), &old).expect("saved").path;
    let output = run_child("tests::full::child", &dir.path().display().to_string());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(names(dir.path()), ["latest", "step-00000001"], "nothing is left of it");
    assert_holds(&Checkpoint::open(&path).expect("complete"), &old);
}

/// A file system of 16 MiB, unmounted when dropped.
struct Mounted(TempDir);

impl Mounted {
    fn new() -> Option<Mounted> {
        let dir = tempfile::tempdir().expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"]).arg(dir.path());
        mount.output().is_ok_and(|o| o.status.success()).then(|| Mounted(dir))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}

#[test]
fn a_disk_that_fills_up_while_writing_leaves_the_old_checkpoint() {
    let Some(disk) = Mounted::new() else {
        println!("skipped: this user may not mount a small file system");
        return;
    };
    let root = disk.0.path().join("checkpoints");
    let old = facts(1, 1, SMALL);
    let path = save(&root, &old).expect("saved").path;
    let new = facts(2, 1, LARGE);
    // found out in advance …
    assert!(matches!(save(&root, &new), Err(CkptError::NoSpace { .. })));
    // … or, when somebody else takes the space meanwhile, on the way
    let staging = Staging::begin(&root, 2, 0).expect("begun");
    let error = write_shards(staging.path(), &new).expect_err("full");
    assert!(error.to_string().contains("free some space"), "{error}");
    drop(staging);
    assert_eq!(names(&root), ["latest", "step-00000001"]);
    assert_holds(&Checkpoint::open(&path).expect("complete"), &old);
    save(&root, &facts(3, 1, SMALL)).expect("small ones still fit");
}
