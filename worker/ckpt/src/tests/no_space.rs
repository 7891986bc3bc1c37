//! Tests that full disks and file size limits give one error and leave the previous checkpoint
//! intact.
use super::*;
use crate::error::CkptError;
use crate::layout::native::Checkpoint;
use crate::save::memory_store::{MemoryCopyId, MemoryStore};
use crate::{PieceElements, TensorPiece};
use diagnostic::codes::checkpoint as codes;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};

/// The limit of file sizes of a child process, in bytes.
const FILE_SIZE_LIMIT: u64 = 9 << 20;
const SMALL_WEIGHTS: &[(&str, &[u64])] = &[("a", &[10])];
/// A weight of 12 MiB, which is saved with two moments of equal size. Each tensor is larger than
/// one window, so that the writing thread hits the limit.
const LARGE_WEIGHTS: &[(&str, &[u64])] = &[("a", &[3 << 20])];

#[test]
fn insufficient_space_is_detected_before_writing() {
    let dir = make_memory_dir();
    save_checkpoint(dir.path(), &make_facts(1, 1, SMALL_WEIGHTS)).expect("saved");
    let error = StagingDir::create(dir.path(), 2, u64::MAX / 2).map(drop).expect_err("rejected");
    let CkptError::InsufficientSpace { path, needed, free } = &error else { panic!("{error:?}") };
    assert!(path == dir.path() && needed > free, "{error}");
    assert_eq!(list_entry_names(dir.path()), ["latest", "step-00000001"]);
}

/// The child process of `a_file_size_limit_leaves_the_previous_checkpoint`. Saves with a file size
/// limit of 9 MiB and asserts that the save fails. Does nothing outside of a child process.
#[test]
fn child_process_with_a_file_size_limit() {
    let Some(root) = read_child_argument() else { return };
    // SAFETY: SIG_IGN installs no handler that could run during other code
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }.expect("ignored");
    setrlimit(Resource::RLIMIT_FSIZE, FILE_SIZE_LIMIT, FILE_SIZE_LIMIT).expect("limited");
    let error = save_checkpoint(Path::new(&root), &make_facts(2, 1, LARGE_WEIGHTS)).expect_err("too large");
    let CkptError::Io { action: "write", path, .. } = &error else { panic!("{error:?}") };
    assert!(path.starts_with(&root) && path.extension().is_some(), "{error}");
    assert_limit_is_reported(&error);
    // The copies in memory begin at offsets far beyond the limit.
    let file = std::fs::File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).expect("a memory file"));
    let id = MemoryCopyId { step: 1, sequence: 1, attempt: 0, world: 1 };
    let data = PieceElements::F32(&[1.0, 2.0]);
    let piece = TensorPiece { name: "a", role: TensorRole::Weight, start_element: 0, data };
    let error = MemoryStore::new(file).write_copy(id, 0, None, &[piece], 1).expect_err("too large");
    assert_limit_is_reported(&error);
    assert!(error.help()[0].contains("`checkpoint.memory`"), "{:?}", error.help());
}

/// Checks that an error of the child process states the limit of file sizes, and the file.
fn assert_limit_is_reported(error: &CkptError) {
    let diagnostic = diagnostic::Diagnostic::from(error);
    assert_eq!(diagnostic.code(), codes::CHECKPOINT_LIMIT_EXCEEDED);
    assert_eq!(diagnostic.field("limit_bytes"), Some(&FILE_SIZE_LIMIT.into()));
    assert!(diagnostic.field("path").is_some() && diagnostic.help().len() == 1, "{diagnostic:?}");
}

#[test]
fn a_file_size_limit_leaves_the_previous_checkpoint() {
    let dir = make_memory_dir();
    let old = make_facts(1, 1, SMALL_WEIGHTS);
    let path = save_checkpoint(dir.path(), &old).expect("saved").path;
    let output = run_child_test(
        "tests::no_space::child_process_with_a_file_size_limit",
        &dir.path().display().to_string(),
    );
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(list_entry_names(dir.path()), ["latest", "step-00000001"], "no temporary files remain");
    assert_contains_saved(&Checkpoint::open(&path).expect("complete"), &old);
}

/// A mounted file system of 16 MiB in memory, which is unmounted when this value is dropped.
struct SmallFileSystem(TempDir);

impl SmallFileSystem {
    /// Mounts a tmpfs of 16 MiB at a temporary directory. Returns `None` if the mount fails, for
    /// example without the permission to mount.
    fn mount() -> Option<SmallFileSystem> {
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
    let Some(disk) = SmallFileSystem::mount() else {
        println!("skipped: this user cannot mount a file system");
        return;
    };
    let root = disk.0.path().join("checkpoints");
    let old = make_facts(1, 1, SMALL_WEIGHTS);
    let path = save_checkpoint(&root, &old).expect("saved").path;
    let new = make_facts(2, 1, LARGE_WEIGHTS);
    // the lack of space is detected before writing
    assert!(matches!(save_checkpoint(&root, &new), Err(CkptError::InsufficientSpace { .. })));
    // the lack of space is detected while writing, as if another process had used the space
    let staging = StagingDir::create(&root, 2, 0).expect("begun");
    let error = write_shards(staging.path(), &new).expect_err("full");
    assert_eq!(error.code(), codes::CHECKPOINT_DISK_FULL);
    drop(staging);
    assert_eq!(list_entry_names(&root), ["latest", "step-00000001"]);
    assert_contains_saved(&Checkpoint::open(&path).expect("complete"), &old);
    save_checkpoint(&root, &make_facts(3, 1, SMALL_WEIGHTS)).expect("a small checkpoint fits");
}
