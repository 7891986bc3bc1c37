//! Removes old executables from the cache directory of a host, into which launch copies its
//! executable over SSH.
//!
//! The cache may be in a home directory that many hosts share, so that no host can find out which
//! executables run on the others. Therefore an agent sets the modification time of its executable
//! when it starts, and then every [`TOUCH_INTERVAL`]. An executable counts as used if its time is
//! at most [`UNUSED_AFTER`] older than that of the agent's executable. Both times come from the
//! clock of the file system, so clocks of hosts do not matter.
use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

/// The interval at which an agent updates the modification time of its executable, which marks the
/// executable as used.
const TOUCH_INTERVAL: Duration = Duration::from_secs(3600);
/// The age of the modification time, which agents update regularly, above which an executable in
/// the cache of a host counts as unused. Much longer than [`TOUCH_INTERVAL`], so that the
/// executable of a suspended agent stays.
const UNUSED_AFTER: Duration = Duration::from_secs(2 * 24 * 3600);
/// The time without use after which every cached executable of launch is removed from a host.
const REMOVED_AFTER: Duration = Duration::from_secs(30 * 24 * 3600);
/// The number of most recently used executables that stay in a host's cache until
/// [`REMOVED_AFTER`], while older ones are removed already after [`UNUSED_AFTER`]. The executable
/// of the agent is one of them.
const MIN_KEPT_EXECUTABLES: usize = 4;
/// The length of a file name in the cache of launch's executables, which is the BLAKE3 hash of the
/// executable in hexadecimal.
const EXECUTABLE_NAME_LENGTH: usize = 64;
/// The prefix of the names of files in the cache of launch's executables that are not completely
/// copied yet.
const COPY_PREFIX: &str = ".launch-";
/// The prefix of the temporary name that an agent gives a cached executable before deleting it, so
/// that no new agent is started from it.
const REMOVED_PREFIX: &str = ".removed-";
/// The stack size, in bytes, of the thread that cleans the cache of launch's executables.
const STACK_BYTES: usize = 128 << 10;

/// Starts a thread that removes old executables of launch from the cache of this host once, and
/// then regularly marks this agent's executable as used. Does nothing if the executable is not in a
/// cache.
pub(super) fn start_cache_cleanup_thread() {
    let Some(executable) = find_cached_executable() else { return };
    let run = move || {
        // The cache works without the removal, and a later agent tries again.
        _ = mark_as_used(&executable).and_then(|()| remove_old_executables(&executable));
        loop {
            thread::sleep(TOUCH_INTERVAL);
            _ = mark_as_used(&executable);
        }
    };
    _ = thread::Builder::new().name("executable-cache".into()).stack_size(STACK_BYTES).spawn(run);
}

/// Returns the path of the executable of this process if it is in a cache directory
/// (`…/launch/bin/HASH`).
fn find_cached_executable() -> Option<PathBuf> {
    let path = fs::read_link("/proc/self/exe").ok()?;
    let is_cached = path.parent()?.ends_with("launch/bin") && is_executable_name(path.file_name()?.to_str()?);
    is_cached.then_some(path)
}

/// Returns whether `name`, the name of a file in the cache of launch's executables, is that of a
/// complete executable (its hash).
fn is_executable_name(name: &str) -> bool {
    name.len() == EXECUTABLE_NAME_LENGTH && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Marks an executable in the cache as used, by setting the modification time of the file to the
/// current time.
fn mark_as_used(file: &Path) -> io::Result<()> {
    // A file that is being executed cannot be opened for writing.
    nix::sys::stat::utimensat(
        nix::fcntl::AT_FDCWD,
        file,
        &nix::sys::time::TimeSpec::UTIME_OMIT,
        &nix::sys::time::TimeSpec::UTIME_NOW,
        nix::sys::stat::UtimensatFlags::FollowSymlink,
    )?;
    Ok(())
}

/// Removes old, unused executables of launch from this host's cache, which is the directory that
/// contains this agent's `executable`. An executable is old if it is unused for longer than
/// [`REMOVED_AFTER`] or, while the cache has more than [`MIN_KEPT_EXECUTABLES`], for longer than
/// [`UNUSED_AFTER`]. Also removes unused incomplete copies. Several agents may do so at the same
/// time.
fn remove_old_executables(executable: &Path) -> io::Result<()> {
    let Some(directory) = executable.parent() else { return Ok(()) };
    let now = fs::metadata(executable)?.modified()?;
    let mut executables = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), entry.path());
        let Some(name) = name.to_str() else { continue };
        // A file that another agent has just removed has no metadata.
        let Ok(modified) = entry.metadata().and_then(|data| data.modified()) else { continue };
        if is_executable_name(name) {
            executables.push((modified, path));
        } else if (name.starts_with(COPY_PREFIX) || name.starts_with(REMOVED_PREFIX))
            && is_older_than(modified, now, UNUSED_AFTER)
        {
            _ = fs::remove_file(path);
        }
    }
    // The newest one is first.
    executables.sort_unstable_by(|a, b| b.cmp(a));
    for (index, (modified, path)) in executables.into_iter().enumerate() {
        let limit = if index < MIN_KEPT_EXECUTABLES { REMOVED_AFTER } else { UNUSED_AFTER };
        if path != executable && is_older_than(modified, now, limit) {
            remove_if_unused(&path, now);
        }
    }
    Ok(())
}

/// Returns whether `time` is earlier than `now` by more than `limit`.
fn is_older_than(time: SystemTime, now: SystemTime, limit: Duration) -> bool {
    now.duration_since(time).is_ok_and(|age| age > limit)
}

/// Reads the modification time of a file from the file system. On NFS, the times in a directory
/// listing may be a minute old, and opening a file asks the server for the newest ones.
fn read_modification_time(path: &Path) -> io::Result<SystemTime> {
    fs::File::open(path)?.metadata()?.modified()
}

/// Removes an old executable of launch from the cache of this host, unless an agent was started
/// from it in the meantime, possibly on another host.
fn remove_if_unused(path: &Path, now: SystemTime) {
    if read_modification_time(path).is_ok_and(|modified| is_older_than(modified, now, UNUSED_AFTER)) {
        rename_and_remove(path, now);
    }
}

/// Removes an old executable of launch from the cache of this host, unless an agent is being
/// started from it at this moment.
///
/// A start marks the executable as used before it runs. So the file first gets another name, which
/// no start uses, and is removed only if it is still not marked. A start that finds no file at this
/// moment copies the executable again.
fn rename_and_remove(path: &Path, now: SystemTime) {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return;
    };
    let removed = directory.join(format!("{REMOVED_PREFIX}{name}-{}", std::process::id()));
    // An error means that another agent removes the file.
    if fs::rename(path, &removed).is_err() {
        return;
    }
    match read_modification_time(&removed) {
        // If the file was copied again in the meantime, the link fails. The renamed file stays
        // until it is old enough.
        Ok(modified) if !is_older_than(modified, now, UNUSED_AFTER) => {
            if fs::hard_link(&removed, path).is_ok() {
                _ = fs::remove_file(&removed);
            }
        }
        _ => _ = fs::remove_file(&removed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs::{File, FileTimes},
        os::unix::fs::MetadataExt,
    };

    /// Returns the path in `directory` of the executable with the number `number`.
    fn name_executable(directory: &Path, number: u32) -> PathBuf {
        directory.join(format!("{number:064x}"))
    }

    /// Creates a file that was modified this number of days ago.
    fn create_file(path: &Path, age_days: u32) {
        let file = File::create(path).expect("a file");
        let time = SystemTime::now() - Duration::from_secs(24 * 3600) * age_days;
        file.set_times(FileTimes::new().set_modified(time)).expect("its time");
    }

    /// Returns the names of the files of a directory, sorted.
    fn list_names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("a directory");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn only_unused_executables_beyond_the_kept_ones_and_old_ones_are_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path();
        // Ages in days; the numbers of executables are their positions.
        for (number, age) in [0, 0, 1, 3, 4, 5, 20].into_iter().enumerate() {
            create_file(&name_executable(directory, number as u32), age);
        }
        create_file(&directory.join(".launch-copying"), 0);
        create_file(&directory.join(".launch-interrupted"), 3);
        create_file(&directory.join("notes.txt"), 900);
        let used = name_executable(directory, 6);
        mark_as_used(&used).expect("marked");
        remove_old_executables(&used).expect("removed");
        let expected = |numbers: &[u32]| -> Vec<String> {
            let others = [".launch-copying".to_owned(), "notes.txt".to_owned()];
            let mut names: Vec<String> =
                numbers.iter().map(|number| format!("{number:064x}")).chain(others).collect();
            names.sort_unstable();
            names
        };
        // 2 is used, although it is the fourth; 3, 4 and 5 are unused and beyond the kept ones.
        assert_eq!(list_names(directory), expected(&[0, 1, 2, 6]));
        create_file(&name_executable(directory, 1), 31);
        create_file(&name_executable(directory, 2), 29);
        remove_old_executables(&used).expect("removed");
        assert_eq!(list_names(directory), expected(&[0, 2, 6]));
    }

    #[test]
    fn an_executable_that_is_started_during_its_removal_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let (old, now) = (name_executable(directory.path(), 1), SystemTime::now());
        create_file(&old, 3);
        mark_as_used(&old).expect("marked");
        // The file never lacks its name if the start came before the removal.
        let read_change = || {
            let data = fs::metadata(&old).expect("a file");
            (data.ctime(), data.ctime_nsec())
        };
        let before = read_change();
        remove_if_unused(&old, now);
        assert_eq!(read_change(), before);
        rename_and_remove(&old, now);
        assert_eq!(list_names(directory.path()), [format!("{:064x}", 1)]);
        create_file(&old, 3);
        remove_if_unused(&old, now);
        assert!(list_names(directory.path()).is_empty());
    }

    #[test]
    fn several_agents_remove_executables_at_the_same_time() {
        let directory = tempfile::tempdir().expect("a directory");
        let used: Vec<PathBuf> = (0..4).map(|n| name_executable(directory.path(), n)).collect();
        used.iter().for_each(|path| create_file(path, 0));
        for number in 4..200 {
            create_file(&name_executable(directory.path(), number), 3);
        }
        thread::scope(|scope| {
            for path in &used {
                scope.spawn(|| remove_old_executables(path).expect("removed"));
            }
        });
        assert_eq!(list_names(directory.path()).len(), 4);
    }
}
