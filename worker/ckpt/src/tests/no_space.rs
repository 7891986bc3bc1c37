//! Full disks and file size limits give one error and leave the previous checkpoint intact.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::error::CkptError;
use diagnostic::codes::checkpoint as codes;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};

const SMALL: &[(&str, &[u64])] = &[("a", &[10])];
/// 3 × 12 MiB, more than one window, so that the writing thread hits the limit.
const LARGE: &[(&str, &[u64])] = &[("a", &[3 << 20])];

#[test]
fn insufficient_space_is_detected_before_writing() {
    let dir = memory_dir();
    save(dir.path(), &facts(1, 1, SMALL)).expect("saved");
    let error = Staging::begin(dir.path(), 2, u64::MAX / 2).map(drop).expect_err("rejected");
    let CkptError::InsufficientSpace { path, needed, free } = &error else { panic!("{error:?}") };
    assert!(path == dir.path() && needed > free, "{error}");
    assert_eq!(entry_names(dir.path()), ["latest", "step-00000001"]);
}

/// Child process of the test below: saves with a limit on the file size.
#[test]
fn child() {
    let Some(root) = child_argument() else { return };
    // SAFETY: SIG_IGN installs no handler
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }.expect("ignored");
    setrlimit(Resource::RLIMIT_FSIZE, 9 << 20, 9 << 20).expect("limited");
    let error = save(Path::new(&root), &facts(2, 1, LARGE)).expect_err("too large");
    assert!(matches!(error, CkptError::Io { action: "write", .. }), "{error:?}");
    assert_eq!(error.code(), codes::CHECKPOINT_LIMIT_EXCEEDED);
}

#[test]
fn a_file_size_limit_leaves_the_previous_checkpoint() {
    let dir = memory_dir();
    let old = facts(1, 1, SMALL);
    let path = save(dir.path(), &old).expect("saved").path;
    let output = run_child("tests::no_space::child", &dir.path().display().to_string());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(entry_names(dir.path()), ["latest", "step-00000001"], "no temporary files remain");
    assert_holds(&Checkpoint::open(&path).expect("complete"), &old);
}

/// A mounted file system of 16 MiB. Dropping unmounts it.
struct SmallFileSystem(TempDir);

impl SmallFileSystem {
    fn new() -> Option<SmallFileSystem> {
        let dir = tempfile::tempdir().expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"]).arg(dir.path());
        mount.output().is_ok_and(|o| o.status.success()).then(|| SmallFileSystem(dir))
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}

#[test]
fn a_disk_that_fills_up_leaves_the_previous_checkpoint() {
    let Some(disk) = SmallFileSystem::new() else {
        println!("skipped: this user cannot mount a file system");
        return;
    };
    let root = disk.0.path().join("checkpoints");
    let old = facts(1, 1, SMALL);
    let path = save(&root, &old).expect("saved").path;
    let new = facts(2, 1, LARGE);
    // detected in advance
    assert!(matches!(save(&root, &new), Err(CkptError::InsufficientSpace { .. })));
    // detected while writing, as if another process had taken the space
    let staging = Staging::begin(&root, 2, 0).expect("begun");
    let error = write_shards(staging.path(), &new).expect_err("full");
    assert_eq!(error.code(), codes::CHECKPOINT_DISK_FULL);
    drop(staging);
    assert_eq!(entry_names(&root), ["latest", "step-00000001"]);
    assert_holds(&Checkpoint::open(&path).expect("complete"), &old);
    save(&root, &facts(3, 1, SMALL)).expect("a small checkpoint fits");
}
