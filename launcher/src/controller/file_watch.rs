//! Watches files that a user may edit while the job runs, and reports their changed content.
//!
//! [`ChangeWatcher`] wakes the watch. Changes that it does not report are found by polling.
use crate::{
    change_watcher::{ChangeWatcher, WatchTarget},
    private_files::open_regular_file,
};
use std::{
    fs,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};
use tokio::{sync::mpsc, time::sleep};

/// The interval at which a watched file, such as the job file, is checked for changes, in addition
/// to the operating system's notifications of changes.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// How long a changed file must stay unchanged before its content is read.
const SETTLE_TIME: Duration = Duration::from_millis(100);
/// The delay before a file is read again because its content may be partially written.
const REREAD_DELAY: Duration = Duration::from_millis(500);
/// The largest number of times that a changed file is read again because the file changed again
/// during the read.
const MAX_REPEATED_READS: u32 = 5;
/// How long [`watch_file`] waits until the file was read for the first time.
const FIRST_READ_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of new contents of a watched file that may wait in the channel until the receiver
/// takes them. If the channel is full, the watcher waits.
const CHANNEL_CAPACITY: usize = 4;

/// The text of a changed job file or hostfile, or the reason why this file could not be read after
/// the change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WatchedFileContent {
    Text(String),
    Unreadable(FileReadError),
}

/// The reason why a watched file could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FileReadError {
    #[error("the file does not exist")]
    Missing,
    #[error("the path is not a regular file")]
    NotAFile,
    #[error("the file is larger than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("the file is not UTF-8 text")]
    NotUtf8,
    #[error("{0}")]
    Io(String),
}

/// Watches a file and sends its content through the returned channel after each change, until the
/// caller drops the receiver. A separate thread reads the file, because its disk may stall. Blocks
/// until the file was read for the first time, so that no later change is missed, but at most for
/// [`FIRST_READ_TIMEOUT`].
///
/// A file of more than `limit` bytes is reported as unreadable. If the file is unreadable or
/// `is_complete` returns `false` for its text, the file may be partially written. It is then read
/// again once, after [`REREAD_DELAY`], and the result is sent without another check. Content that
/// equals the previous content is not sent. With `reports_first`, the content at the start is sent,
/// too, because the caller does not know it.
pub(crate) fn watch_file(
    path: PathBuf,
    limit: u64,
    reports_first: bool,
    is_complete: impl Fn(&str) -> bool + Send + 'static,
) -> mpsc::Receiver<WatchedFileContent> {
    let (sender, receiver) = mpsc::channel(CHANNEL_CAPACITY);
    let (was_read, first_read) = std::sync::mpsc::sync_channel(1);
    let watch = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            let mut watcher = ChangeWatcher::start(WatchTarget::File(path.clone()));
            let first = (read_fingerprint(&path), read_content(&path, limit));
            // An error means that the caller has stopped waiting.
            _ = was_read.send(());
            if reports_first && sender.send(first.1.clone()).await.is_err() {
                return;
            }
            send_content_after_changes(&mut watcher, &path, limit, is_complete, first, sender).await;
        });
    };
    // Without the thread, the run continues and finds no changes.
    if thread::Builder::new().name("file-watch".into()).spawn(watch).is_ok() {
        _ = first_read.recv_timeout(FIRST_READ_TIMEOUT);
    }
    receiver
}

/// Sends the new content of a file through a channel after each change, until the receiver of the
/// channel is dropped. `first` is the state of the file before the first change.
async fn send_content_after_changes(
    watcher: &mut ChangeWatcher,
    path: &Path,
    limit: u64,
    is_complete: impl Fn(&str) -> bool,
    first: (FileFingerprint, WatchedFileContent),
    sender: mpsc::Sender<WatchedFileContent>,
) {
    let (mut last_fingerprint, mut last_content) = first;
    while !sender.is_closed() {
        watcher.wait_for_change(POLL_INTERVAL).await;
        let fingerprint = wait_for_settled_fingerprint(path).await;
        if fingerprint == last_fingerprint {
            continue;
        }
        let mut content;
        (last_fingerprint, content) = read_settled_content(path, limit, fingerprint).await;
        if !matches!(&content, WatchedFileContent::Text(text) if is_complete(text)) {
            sleep(REREAD_DELAY).await;
            let fingerprint = wait_for_settled_fingerprint(path).await;
            (last_fingerprint, content) = read_settled_content(path, limit, fingerprint).await;
        }
        if content != last_content {
            last_content = content.clone();
            if sender.send(content).await.is_err() {
                return;
            }
        }
    }
}

/// The device, inode, modification time and size of a file, which are compared to notice a change;
/// `None` if the file does not exist.
type FileFingerprint = Option<(u64, u64, i64, i64, u64)>;

/// Returns the device, inode, modification time and size of a file, by which a change is noticed.
/// Returns `None` if the file does not exist or cannot be accessed.
fn read_fingerprint(path: &Path) -> FileFingerprint {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.size()))
}

/// Waits until a changed file has stayed unchanged for [`SETTLE_TIME`], but for no longer than 20
/// times [`SETTLE_TIME`]. Returns the fingerprint of the file.
async fn wait_for_settled_fingerprint(path: &Path) -> FileFingerprint {
    let mut before = read_fingerprint(path);
    for _ in 0..20 {
        sleep(SETTLE_TIME).await;
        let now = read_fingerprint(path);
        if now == before {
            break;
        }
        before = now;
    }
    before
}

/// Reads the content of a watched file after a change, once the file has stopped changing. Repeats
/// this, at most [`MAX_REPEATED_READS`] times, if the file changes meanwhile: a program that
/// replaces the content empties the file first. Returns the fingerprint and the content.
async fn read_settled_content(
    path: &Path,
    limit: u64,
    mut fingerprint: FileFingerprint,
) -> (FileFingerprint, WatchedFileContent) {
    let mut content = read_content(path, limit);
    for _ in 0..MAX_REPEATED_READS {
        if read_fingerprint(path) == fingerprint {
            break;
        }
        fingerprint = wait_for_settled_fingerprint(path).await;
        content = read_content(path, limit);
    }
    (fingerprint, content)
}

/// Reads a watched file as text. Returns [`WatchedFileContent::Unreadable`] with the reason if the
/// file cannot be read or is longer than `limit` bytes.
fn read_content(path: &Path, limit: u64) -> WatchedFileContent {
    match read_text(path, limit) {
        Ok(text) => WatchedFileContent::Text(text),
        Err(error) => WatchedFileContent::Unreadable(error),
    }
}

/// Reads a regular file as UTF-8 text. Fails if the file is longer than `limit` bytes.
fn read_text(path: &Path, limit: u64) -> Result<String, FileReadError> {
    let io_error = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => FileReadError::Missing,
        _ => FileReadError::Io(error.to_string()),
    };
    // The open and the read of a named pipe would wait for its writer.
    if !fs::metadata(path).map_err(io_error)?.is_file() {
        return Err(FileReadError::NotAFile);
    }
    let file = open_regular_file(path).map_err(io_error)?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io_error)?;
    if bytes.len() as u64 > limit {
        return Err(FileReadError::TooLarge { limit });
    }
    String::from_utf8(bytes).map_err(|_| FileReadError::NotUtf8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    /// Runs an asynchronous test to its end, in a runtime on this thread.
    fn run_in_runtime(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime").block_on(test);
    }

    /// Returns the next reported content. Panics if no change is reported within 30 s.
    async fn receive_change(changes: &mut mpsc::Receiver<WatchedFileContent>) -> WatchedFileContent {
        timeout(Duration::from_secs(30), changes.recv()).await.expect("in time").expect("the watch is active")
    }

    /// Builds the content that the watch reports for a readable file with this text.
    fn new_text(text: &str) -> WatchedFileContent {
        WatchedFileContent::Text(text.to_owned())
    }

    #[test]
    fn every_way_of_writing_is_reported_once() {
        run_in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            let file = dir.path().join("job.yaml");
            fs::write(&file, "one").expect("written");
            let mut changes = watch_file(file.clone(), 100, false, |text| text != "partial");
            sleep(Duration::from_millis(50)).await;
            fs::write(&file, "two").expect("written");
            assert_eq!(receive_change(&mut changes).await, new_text("two"));
            // Editors replace the file by a new one.
            let temporary = dir.path().join(".job.yaml.swp");
            fs::write(&temporary, "three").expect("written");
            fs::remove_file(&file).expect("removed");
            fs::rename(&temporary, &file).expect("renamed");
            assert_eq!(receive_change(&mut changes).await, new_text("three"));
            // The file is partially written, then complete.
            fs::write(&file, "partial").expect("written");
            sleep(SETTLE_TIME * 3).await;
            fs::write(&file, "whole").expect("written");
            assert_eq!(receive_change(&mut changes).await, new_text("whole"));
            // A rewrite with equal content is not reported. Incomplete content that stays is.
            fs::write(&file, "whole").expect("written");
            sleep(SETTLE_TIME * 3).await;
            fs::write(&file, "partial").expect("written");
            assert_eq!(receive_change(&mut changes).await, new_text("partial"));
            fs::write(&file, "x".repeat(101)).expect("written");
            assert_eq!(
                receive_change(&mut changes).await,
                WatchedFileContent::Unreadable(FileReadError::TooLarge { limit: 100 })
            );
            fs::remove_file(&file).expect("removed");
            assert_eq!(
                receive_change(&mut changes).await,
                WatchedFileContent::Unreadable(FileReadError::Missing)
            );
            fs::write(&file, b"\xff").expect("written");
            assert_eq!(
                receive_change(&mut changes).await,
                WatchedFileContent::Unreadable(FileReadError::NotUtf8)
            );
        });
    }

    #[test]
    fn a_replaced_link_is_reported() {
        run_in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            for (name, content) in [("a", "one"), ("b", "two")] {
                fs::create_dir(dir.path().join(name)).expect("directory");
                fs::write(dir.path().join(name).join("job.yaml"), content).expect("written");
            }
            let (data, file) = (dir.path().join("data"), dir.path().join("job.yaml"));
            std::os::unix::fs::symlink("a", &data).expect("link");
            std::os::unix::fs::symlink("data/job.yaml", &file).expect("link");
            let mut changes = watch_file(file, 100, false, |_| true);
            sleep(Duration::from_millis(50)).await;
            std::os::unix::fs::symlink("b", dir.path().join("new")).expect("link");
            fs::rename(dir.path().join("new"), &data).expect("renamed");
            assert_eq!(receive_change(&mut changes).await, new_text("two"));
        });
    }
}
