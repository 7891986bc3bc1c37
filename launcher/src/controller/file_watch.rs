//! Watches files that a user may edit while the job runs, and reports their changed content.
//!
//! The directory is watched, and not the file, because editors replace a file by a new one. Changes
//! that the kernel does not report (by other clients of a network file system) are found by
//! polling.
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc,
    time::{sleep, timeout},
};

/// Between two polls.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// A file is read when it has not changed for this long.
const SETTLE_TIME: Duration = Duration::from_millis(100);
/// Content that is not valid is read again after this long, because it may have been partially
/// written.
const REREAD_DELAY: Duration = Duration::from_millis(500);
/// Capacity of the channel of changes.
const CHANGES: usize = 4;

/// The content of a watched file after a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileContent {
    Text(String),
    Unreadable(UnreadableFile),
}

/// Why a watched file was not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnreadableFile {
    #[error("the file does not exist")]
    Missing,
    #[error("it is not a regular file")]
    NotAFile,
    #[error("it is larger than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("it is not UTF-8 text")]
    NotUtf8,
    #[error("{0}")]
    Io(String),
}

/// Watches a file of at most `limit` bytes until the receiver is dropped, and sends its content
/// after each change. Text for which `is_complete` is false may be partially written; it is sent
/// only if it stays.
pub(crate) fn watch_file(
    path: PathBuf,
    limit: u64,
    is_complete: impl Fn(&str) -> bool + Send + 'static,
) -> mpsc::Receiver<FileContent> {
    let (sender, receiver) = mpsc::channel(CHANGES);
    // Read before this function returns, so that no later change is missed.
    let first = (fingerprint(&path), read(&path, limit));
    tokio::spawn(async move {
        let inotify = watch_directories(&path);
        let (mut last_fingerprint, mut last_content) = first;
        while !sender.is_closed() {
            wait(inotify.as_ref()).await;
            let fingerprint = settled_fingerprint(&path).await;
            if fingerprint == last_fingerprint {
                continue;
            }
            last_fingerprint = fingerprint;
            let mut content = read(&path, limit);
            if !matches!(&content, FileContent::Text(text) if is_complete(text)) {
                sleep(REREAD_DELAY).await;
                last_fingerprint = settled_fingerprint(&path).await;
                content = read(&path, limit);
            }
            if content != last_content {
                last_content = content.clone();
                if sender.send(content).await.is_err() {
                    return;
                }
            }
        }
    });
    receiver
}

/// Watches the directory of the file, and the directory of the file that it links to.
fn watch_directories(path: &Path) -> Option<AsyncFd<OwnedFd>> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).ok()?;
    let flags = AddWatchFlags::IN_CLOSE_WRITE
        | AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_MOVED_TO;
    let parent = |path: &Path| match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    inotify.add_watch(&parent(path), flags).ok()?;
    if let Ok(target) = fs::canonicalize(path) {
        _ = inotify.add_watch(&parent(&target), flags);
    }
    let fd = inotify.as_fd().try_clone_to_owned().ok()?;
    // SAFETY: an OwnedFd always returns the same descriptor, which is open until it is dropped.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.ok()
}

/// Waits for a change in the directories, or for the next poll.
async fn wait(inotify: Option<&AsyncFd<OwnedFd>>) {
    let Some(inotify) = inotify else { return sleep(POLL_INTERVAL).await };
    if let Ok(Ok(mut guard)) = timeout(POLL_INTERVAL, inotify.readable()).await {
        // The events are discarded, because the file itself is compared.
        let mut buffer = [0; 4096];
        while matches!(nix::unistd::read(inotify.get_ref(), &mut buffer), Ok(1..)) {}
        guard.clear_ready();
    }
}

/// Device, inode, modification time and size of a file; they differ after each change.
type Fingerprint = Option<(u64, u64, i64, i64, u64)>;

fn fingerprint(path: &Path) -> Fingerprint {
    let m = fs::metadata(path).ok()?;
    Some((m.dev(), m.ino(), m.mtime(), m.mtime_nsec(), m.size()))
}

/// The fingerprint of the file once it has stopped changing, or after 20 intervals if it does not
/// stop.
async fn settled_fingerprint(path: &Path) -> Fingerprint {
    let mut before = fingerprint(path);
    for _ in 0..20 {
        sleep(SETTLE_TIME).await;
        let now = fingerprint(path);
        if now == before {
            break;
        }
        before = now;
    }
    before
}

fn read(path: &Path, limit: u64) -> FileContent {
    match read_text(path, limit) {
        Ok(text) => FileContent::Text(text),
        Err(error) => FileContent::Unreadable(error),
    }
}

fn read_text(path: &Path, limit: u64) -> Result<String, UnreadableFile> {
    let io_error = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => UnreadableFile::Missing,
        _ => UnreadableFile::Io(error.to_string()),
    };
    let file = File::open(path).map_err(io_error)?;
    // Reading a named pipe would wait for its writer.
    if !file.metadata().map_err(io_error)?.is_file() {
        return Err(UnreadableFile::NotAFile);
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io_error)?;
    if bytes.len() as u64 > limit {
        return Err(UnreadableFile::TooLarge { limit });
    }
    String::from_utf8(bytes).map_err(|_| UnreadableFile::NotUtf8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_runtime(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime").block_on(test);
    }

    async fn next(changes: &mut mpsc::Receiver<FileContent>) -> FileContent {
        timeout(Duration::from_secs(30), changes.recv()).await.expect("in time").expect("the watch is active")
    }

    fn text(text: &str) -> FileContent {
        FileContent::Text(text.to_owned())
    }

    #[test]
    fn every_way_of_writing_is_reported_once() {
        in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            let file = dir.path().join("job.yaml");
            fs::write(&file, "one").expect("written");
            let mut changes = watch_file(file.clone(), 100, |text| text != "partial");
            sleep(Duration::from_millis(50)).await;
            fs::write(&file, "two").expect("written");
            assert_eq!(next(&mut changes).await, text("two"));
            // Editors replace the file by a new one.
            let temporary = dir.path().join(".job.yaml.swp");
            fs::write(&temporary, "three").expect("written");
            fs::remove_file(&file).expect("removed");
            fs::rename(&temporary, &file).expect("renamed");
            assert_eq!(next(&mut changes).await, text("three"));
            // Partially written, then complete.
            fs::write(&file, "partial").expect("written");
            sleep(SETTLE_TIME * 3).await;
            fs::write(&file, "whole").expect("written");
            assert_eq!(next(&mut changes).await, text("whole"));
            // Rewritten with equal content: no report. Then incomplete for good.
            fs::write(&file, "whole").expect("written");
            sleep(SETTLE_TIME * 3).await;
            fs::write(&file, "partial").expect("written");
            assert_eq!(next(&mut changes).await, text("partial"));
            fs::write(&file, "x".repeat(101)).expect("written");
            assert_eq!(
                next(&mut changes).await,
                FileContent::Unreadable(UnreadableFile::TooLarge { limit: 100 })
            );
            fs::remove_file(&file).expect("removed");
            assert_eq!(next(&mut changes).await, FileContent::Unreadable(UnreadableFile::Missing));
            fs::write(&file, b"\xff").expect("written");
            assert_eq!(next(&mut changes).await, FileContent::Unreadable(UnreadableFile::NotUtf8));
        });
    }

    #[test]
    fn a_replaced_link_is_reported() {
        in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            for (name, content) in [("a", "one"), ("b", "two")] {
                fs::create_dir(dir.path().join(name)).expect("directory");
                fs::write(dir.path().join(name).join("job.yaml"), content).expect("written");
            }
            let (data, file) = (dir.path().join("data"), dir.path().join("job.yaml"));
            std::os::unix::fs::symlink("a", &data).expect("link");
            std::os::unix::fs::symlink("data/job.yaml", &file).expect("link");
            let mut changes = watch_file(file, 100, |_| true);
            sleep(Duration::from_millis(50)).await;
            std::os::unix::fs::symlink("b", dir.path().join("new")).expect("link");
            fs::rename(dir.path().join("new"), &data).expect("renamed");
            assert_eq!(next(&mut changes).await, text("two"));
        });
    }
}
