//! [`ChangeWatcher`]: wakes a task when a file or a directory tree changes.
//!
//! On local file systems, the kernel reports changes (inotify). On network file systems, inotify
//! does not report the writes of other hosts, so the paths are polled.
use nix::sys::statfs::{FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, statfs};
use notify::{
    Config, Event, EventKind, PollWatcher, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, ModifyKind},
};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::Notify, time::timeout};

/// The interval at which a watched path on a network file system is checked, because the kernel
/// does not report writes of other hosts.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The numbers by which `statfs` identifies network file systems for which the crate nix has no
/// constants: Lustre, 9p, Ceph, CIFS, SMB 2, GPFS, BeeGFS, OCFS2, GFS2, AFS and Coda.
const NETWORK_FS_MAGICS: [i64; 11] = [
    0x0bd0_0bd0,
    0x0102_1997,
    0x00c3_6400,
    0xff53_4d42,
    0xfe53_4d42,
    0x4750_4653,
    0x1983_0326,
    0x7461_636f,
    0x0116_1970,
    0x5346_414f,
    0x7375_7245,
];

/// The path whose changes a [`ChangeWatcher`] reports.
#[derive(Clone, Debug)]
pub(crate) enum WatchTarget {
    /// A file. The file may be missing, be replaced by another file, or be a symbolic link.
    File(PathBuf),
    /// A directory and everything below it. Symbolic links are not followed.
    Tree(PathBuf),
}

/// A path that a [`ChangeWatcher`] observes for changes, either through inotify or by polling.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WatchedPath {
    path: PathBuf,
    /// Device and inode number, which change if the path is deleted and recreated.
    identity: (u64, u64),
    is_polled: bool,
}

/// Wakes a task after a change of a file or of anything in a directory tree. Changes that no
/// watcher reports, such as those in an overlay's lower directory, do not wake the task, so callers
/// also examine the target at intervals.
pub(crate) struct ChangeWatcher {
    target: WatchTarget,
    watched: Vec<WatchedPath>,
    watchers: Vec<Box<dyn Watcher + Send>>,
    changed: Arc<Notify>,
}

impl ChangeWatcher {
    /// Starts to watch `target`, a file or a directory tree, for changes. A target that does not
    /// exist is watched once it exists.
    pub(crate) fn start(target: WatchTarget) -> ChangeWatcher {
        let changed = Arc::new(Notify::new());
        let mut watcher = ChangeWatcher { target, watched: Vec::new(), watchers: Vec::new(), changed };
        watcher.watch_current_paths(is_on_network_fs);
        watcher
    }

    /// Waits until the watched file or directory tree may have changed, but at most `limit`. A
    /// change since the last call ends the wait immediately. Cancel-safe.
    pub(crate) async fn wait_for_change(&mut self, limit: Duration) {
        // A directory that replaced a watched one has no watch yet.
        if self.watch_current_paths(is_on_network_fs) {
            return;
        }
        // After the limit, the caller examines the target anyway.
        _ = timeout(limit, self.changed.notified()).await;
    }

    /// Determines the paths that now belong to the watched file or directory tree and, if they have
    /// changed, watches them instead of the earlier ones. Returns whether these paths differ from
    /// those that were watched before. `is_polled` decides whether a path is polled.
    fn watch_current_paths(&mut self, is_polled: fn(&Path) -> bool) -> bool {
        let watched = list_watched_paths(&self.target, is_polled);
        if watched == self.watched {
            return false;
        }
        self.watchers.clear();
        for path in &watched {
            let native = (!path.is_polled).then(|| self.start_native_watcher(&path.path)).flatten();
            // The number of inotify watches is limited, so a native watch may fail.
            self.watchers.extend(native.or_else(|| self.start_poll_watcher(&path.path)));
        }
        self.watched = watched;
        true
    }

    /// Returns whether inotify watches subdirectories, too, which is the case for a directory tree
    /// but not for the directory of a watched file.
    fn recursive_mode(&self) -> RecursiveMode {
        match self.target {
            WatchTarget::File(_) => RecursiveMode::NonRecursive,
            WatchTarget::Tree(_) => RecursiveMode::Recursive,
        }
    }

    /// Starts a watch of a directory through inotify, the change notification of Linux. Returns
    /// `None` if that is not possible.
    fn start_native_watcher(&self, path: &Path) -> Option<Box<dyn Watcher + Send>> {
        let changed = self.changed.clone();
        let handler = move |event: notify::Result<Event>| {
            if event.is_ok_and(|event| may_change_target(&event)) {
                changed.notify_one();
            }
        };
        let config = Config::default().with_follow_symlinks(false);
        let mut watcher = RecommendedWatcher::new(handler, config).ok()?;
        watcher.watch(path, self.recursive_mode()).ok()?;
        Some(Box::new(watcher))
    }

    /// Starts a thread that polls a file, or the modification times in a directory tree, every
    /// [`POLL_INTERVAL`].
    fn start_poll_watcher(&self, path: &Path) -> Option<Box<dyn Watcher + Send>> {
        let (changed, is_file) = (self.changed.clone(), matches!(self.target, WatchTarget::File(_)));
        let handler = move |event: notify::Result<Event>| {
            if event.is_ok() {
                changed.notify_one();
            }
        };
        // Modification times are compared in seconds, so the content of a file is compared too.
        let config = Config::default()
            .with_poll_interval(POLL_INTERVAL)
            .with_compare_contents(is_file)
            .with_follow_symlinks(is_file);
        let mut watcher = PollWatcher::new(handler, config).ok()?;
        watcher.watch(path, self.recursive_mode()).ok()?;
        Some(Box::new(watcher))
    }
}

/// Returns whether an inotify event in a watched directory reports a finished write, a creation, a
/// deletion, a new name or lost events. Opening and reading a file are no changes. A write counts
/// when the file is closed, so that a log file in the same directory causes no wake-ups.
fn may_change_target(event: &Event) -> bool {
    match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Create(_) | EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)) => true,
        _ => event.need_rescan(),
    }
}

/// Lists the existing files and directories that launch must observe in order to notice a change of
/// `target`, a file or a directory tree. For a file on a local file system, these are its directory
/// and the directory of a link's target, because editors replace a file by a new one.
fn list_watched_paths(target: &WatchTarget, is_polled: fn(&Path) -> bool) -> Vec<WatchedPath> {
    let paths = match target {
        WatchTarget::Tree(path) => vec![path.clone()],
        WatchTarget::File(path) if is_polled(&find_parent(path)) => vec![path.clone()],
        WatchTarget::File(path) => {
            let target = fs::canonicalize(path).ok().map(|target| find_parent(&target));
            [find_parent(path)].into_iter().chain(target).collect()
        }
    };
    let mut watched: Vec<WatchedPath> = Vec::new();
    for path in paths {
        let Ok(metadata) = fs::metadata(&path) else { continue };
        let identity = (metadata.dev(), metadata.ino());
        if watched.iter().all(|other| other.identity != identity) {
            watched.push(WatchedPath { is_polled: is_polled(&path), path, identity });
        }
    }
    watched
}

/// Returns the directory part of a path, or `.` if the path is a bare file name.
fn find_parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Returns whether a path is on a network file system, to which other hosts may write. Returns
/// `false` for a path that does not exist.
fn is_on_network_fs(path: &Path) -> bool {
    statfs(path).is_ok_and(|status| is_network_file_system(status.filesystem_type()))
}

/// Returns whether `kind`, a file system type that `statfs` reports, is that of a network file
/// system. FUSE counts as one.
fn is_network_file_system(kind: FsType) -> bool {
    [NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, FUSE_SUPER_MAGIC].contains(&kind)
        || NETWORK_FS_MAGICS.iter().any(|magic| *magic as u32 == kind.0 as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tokio::time::Instant;

    /// How long a test waits for the report of a change before the test fails.
    const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

    /// Runs an asynchronous test to its end, in a runtime on this thread.
    fn run_in_runtime(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime").block_on(test);
    }

    /// Panics if the watcher reports no change before [`CHANGE_TIMEOUT`].
    async fn expect_change(watcher: &mut ChangeWatcher, what: &str) {
        let began = Instant::now();
        watcher.wait_for_change(CHANGE_TIMEOUT).await;
        assert!(began.elapsed() < CHANGE_TIMEOUT, "no report: {what}");
    }

    /// Discards the reports of earlier changes: waits until 200 ms pass without a report.
    async fn drain_changes(watcher: &mut ChangeWatcher) {
        let quiet = Duration::from_millis(200);
        loop {
            let began = Instant::now();
            watcher.wait_for_change(quiet).await;
            if began.elapsed() >= quiet {
                return;
            }
        }
    }

    #[test]
    fn changes_of_a_local_file_wake_the_task() {
        run_in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            let file = dir.path().join("job.yaml");
            let mut watcher = ChangeWatcher::start(WatchTarget::File(file.clone()));
            fs::write(&file, "one").expect("written");
            expect_change(&mut watcher, "created").await;
            drain_changes(&mut watcher).await;
            fs::write(&file, "two").expect("written");
            expect_change(&mut watcher, "written").await;
            drain_changes(&mut watcher).await;
            fs::write(dir.path().join("new"), "three").expect("written");
            fs::rename(dir.path().join("new"), &file).expect("renamed");
            expect_change(&mut watcher, "replaced").await;
            drain_changes(&mut watcher).await;
            fs::remove_file(&file).expect("removed");
            expect_change(&mut watcher, "removed").await;
        });
    }

    #[test]
    fn a_recreated_directory_and_a_replaced_link_are_watched_again() {
        run_in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            for name in ["a", "b"] {
                fs::create_dir(dir.path().join(name)).expect("directory");
                fs::write(dir.path().join(name).join("job.yaml"), name).expect("written");
            }
            // Kubernetes mounts a config map in this way.
            symlink("a", dir.path().join("..data")).expect("link");
            symlink("..data/job.yaml", dir.path().join("job.yaml")).expect("link");
            let mut watcher = ChangeWatcher::start(WatchTarget::File(dir.path().join("job.yaml")));
            symlink("b", dir.path().join("..data_tmp")).expect("link");
            fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).expect("renamed");
            expect_change(&mut watcher, "replaced link").await;
            drain_changes(&mut watcher).await;
            fs::write(dir.path().join("b/job.yaml"), "changed").expect("written");
            expect_change(&mut watcher, "write to the new target").await;

            let tree = dir.path().join("checkpoints");
            let mut watcher = ChangeWatcher::start(WatchTarget::Tree(tree.clone()));
            for round in ["created", "recreated"] {
                fs::create_dir(&tree).expect("directory");
                expect_change(&mut watcher, round).await;
                drain_changes(&mut watcher).await;
                fs::create_dir(tree.join("step-1")).expect("directory");
                expect_change(&mut watcher, "new subdirectory").await;
                drain_changes(&mut watcher).await;
                fs::write(tree.join("step-1/shard"), "x").expect("written");
                expect_change(&mut watcher, "file in a new subdirectory").await;
                fs::remove_dir_all(&tree).expect("removed");
                expect_change(&mut watcher, "removed").await;
                drain_changes(&mut watcher).await;
            }
        });
    }

    #[test]
    fn polling_reports_changes_without_inotify() {
        run_in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            let file = dir.path().join("job.yaml");
            fs::write(&file, "one").expect("written");
            for target in [WatchTarget::File(file.clone()), WatchTarget::Tree(dir.path().to_owned())] {
                let mut watcher = ChangeWatcher {
                    target,
                    watched: Vec::new(),
                    watchers: Vec::new(),
                    changed: Arc::new(Notify::new()),
                };
                assert!(watcher.watch_current_paths(|_| true));
                assert!(watcher.watched.iter().all(|path| path.is_polled));
                // Within the second of the last scan, only another content or name is a change.
                fs::write(&file, format!("changed {:?}", watcher.target)).expect("written");
                fs::write(dir.path().join(format!("{:?}", Instant::now())), "").expect("written");
                let reported = timeout(CHANGE_TIMEOUT, watcher.changed.notified()).await;
                assert!(reported.is_ok(), "{:?}", watcher.target);
            }
        });
    }

    #[test]
    fn reading_and_writing_other_files_is_no_change() {
        run_in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            let mut log = fs::File::create(dir.path().join("out.log")).expect("created");
            let file = dir.path().join("job.yaml");
            fs::write(&file, "one").expect("written");
            let mut watcher = ChangeWatcher::start(WatchTarget::File(file.clone()));
            drain_changes(&mut watcher).await;
            for _ in 0..10 {
                std::io::Write::write_all(&mut log, b"line\n").expect("written");
                assert_eq!(fs::read_to_string(&file).expect("read"), "one");
            }
            assert!(timeout(Duration::from_millis(300), watcher.changed.notified()).await.is_err());
        });
    }

    #[test]
    fn network_file_systems_are_recognized() {
        use nix::sys::statfs::{EXT4_SUPER_MAGIC, TMPFS_MAGIC};
        for magic in [NFS_SUPER_MAGIC, FUSE_SUPER_MAGIC, FsType(0x0bd0_0bd0), FsType(0xff53_4d42)] {
            assert!(is_network_file_system(magic), "{magic:?}");
        }
        assert!(!is_network_file_system(EXT4_SUPER_MAGIC) && !is_network_file_system(TMPFS_MAGIC));
        assert!(!is_on_network_fs(Path::new("/proc")));
    }
}
