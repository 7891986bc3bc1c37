//! Files that a person edits while a job runs: what they say whenever that has changed.
//!
//! The directory is watched, not the file: editors write a new file and put it in the old one's place. What the kernel
//! doesn't tell of (a network file system's other clients) is found by a look now and then.
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

/// Between two looks when the kernel says nothing.
const LOOK: Duration = Duration::from_secs(5);
/// A file is read when nothing has happened to it for this long.
const SETTLE: Duration = Duration::from_millis(100);
/// What can't be understood is looked at again after this long: it may have been half written.
const SECOND_LOOK: Duration = Duration::from_millis(500);
/// Changes waiting to be taken.
const WAITING: usize = 4;

/// What a watched file says now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Text(String),
    /// It can't be read; why.
    Unreadable(String),
}

/// Watches a file of at most `limit` bytes until the receiver is dropped. What it says at first is not reported.
/// `whole` tells a text that may be half written: such a one is reported only when it stays.
pub(crate) fn watch(
    path: PathBuf,
    limit: u64,
    whole: impl Fn(&str) -> bool + Send + 'static,
) -> mpsc::Receiver<Seen> {
    let (sender, receiver) = mpsc::channel(WAITING);
    // What it says at the start is taken before anything else can happen to it.
    let first = (mark(&path), read(&path, limit));
    tokio::spawn(async move {
        let notices = notices(&path);
        let (mut marked, mut known) = first;
        while !sender.is_closed() {
            wait(notices.as_ref()).await;
            let now = settled(&path).await;
            if now == marked {
                continue;
            }
            marked = now;
            let mut seen = read(&path, limit);
            if !matches!(&seen, Seen::Text(text) if whole(text)) {
                sleep(SECOND_LOOK).await;
                marked = settled(&path).await;
                seen = read(&path, limit);
            }
            if seen != known {
                known = seen.clone();
                if sender.send(seen).await.is_err() {
                    return;
                }
            }
        }
    });
    receiver
}

/// Notices of the directory that the file lies in, and of the one that it is a link into.
fn notices(path: &Path) -> Option<AsyncFd<OwnedFd>> {
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
    // SAFETY: an OwnedFd always gives the same descriptor, which is open until it is dropped.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.ok()
}

/// Until something happens, or it is time for a look.
async fn wait(notices: Option<&AsyncFd<OwnedFd>>) {
    let Some(notices) = notices else { return sleep(LOOK).await };
    if let Ok(Ok(mut guard)) = timeout(LOOK, notices.readable()).await {
        // What happened doesn't matter: the file is looked at.
        let mut buffer = [0; 4096];
        while matches!(nix::unistd::read(notices.get_ref(), &mut buffer), Ok(1..)) {}
        guard.clear_ready();
    }
}

/// Identity, size and times of a file; another one for each change that can be seen from outside.
type Mark = Option<(u64, u64, i64, i64, u64)>;

fn mark(path: &Path) -> Mark {
    let m = fs::metadata(path).ok()?;
    Some((m.dev(), m.ino(), m.mtime(), m.mtime_nsec(), m.size()))
}

/// The file's mark when it has been the same for a while; a file that is written to without an end is read at last too.
async fn settled(path: &Path) -> Mark {
    let mut before = mark(path);
    for _ in 0..20 {
        sleep(SETTLE).await;
        let now = mark(path);
        if now == before {
            break;
        }
        before = now;
    }
    before
}

fn read(path: &Path, limit: u64) -> Seen {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|f| {
        // A pipe put there would wait for its writer.
        let file = f.metadata()?.is_file();
        if !file {
            return Err(io::Error::other("it isn't a file"));
        }
        f.take(limit + 1).read_to_end(&mut bytes)
    });
    match (read, bytes.len() as u64 > limit) {
        (Err(error), _) if error.kind() == io::ErrorKind::NotFound => {
            Seen::Unreadable("it is gone".to_owned())
        }
        (Err(error), _) => Seen::Unreadable(error.to_string()),
        (_, true) => Seen::Unreadable(format!("it has more than {limit} bytes")),
        _ => String::from_utf8(bytes)
            .map_or_else(|_| Seen::Unreadable("it isn't UTF-8 text".to_owned()), Seen::Text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_runtime(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime").block_on(test);
    }

    async fn next(seen: &mut mpsc::Receiver<Seen>) -> Seen {
        timeout(Duration::from_secs(30), seen.recv()).await.expect("in time").expect("the watch goes on")
    }

    fn text(text: &str) -> Seen {
        Seen::Text(text.to_owned())
    }

    #[test]
    fn every_way_of_writing_is_seen_once() {
        in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            let file = dir.path().join("job.yaml");
            fs::write(&file, "one").expect("written");
            let mut seen = watch(file.clone(), 100, |text| text != "half");
            sleep(Duration::from_millis(50)).await;
            fs::write(&file, "two").expect("written");
            assert_eq!(next(&mut seen).await, text("two"));
            // As editors do it: a new file in the old one's place.
            let temporary = dir.path().join(".job.yaml.swp");
            fs::write(&temporary, "three").expect("written");
            fs::remove_file(&file).expect("removed");
            fs::rename(&temporary, &file).expect("renamed");
            assert_eq!(next(&mut seen).await, text("three"));
            // Half written, then whole.
            fs::write(&file, "half").expect("written");
            sleep(SETTLE * 3).await;
            fs::write(&file, "whole").expect("written");
            assert_eq!(next(&mut seen).await, text("whole"));
            // Touched and rewritten alike: nothing to say; then broken for good.
            fs::write(&file, "whole").expect("written");
            sleep(SETTLE * 3).await;
            fs::write(&file, "half").expect("written");
            assert_eq!(next(&mut seen).await, text("half"));
            fs::write(&file, "x".repeat(101)).expect("written");
            assert_eq!(next(&mut seen).await, Seen::Unreadable("it has more than 100 bytes".to_owned()));
            fs::remove_file(&file).expect("removed");
            assert_eq!(next(&mut seen).await, Seen::Unreadable("it is gone".to_owned()));
            fs::write(&file, b"\xff").expect("written");
            assert_eq!(next(&mut seen).await, Seen::Unreadable("it isn't UTF-8 text".to_owned()));
        });
    }

    #[test]
    fn a_link_that_is_set_anew_is_seen() {
        in_runtime(async {
            let dir = tempfile::tempdir().expect("directory");
            for (name, content) in [("a", "one"), ("b", "two")] {
                fs::create_dir(dir.path().join(name)).expect("directory");
                fs::write(dir.path().join(name).join("job.yaml"), content).expect("written");
            }
            let (data, file) = (dir.path().join("data"), dir.path().join("job.yaml"));
            std::os::unix::fs::symlink("a", &data).expect("link");
            std::os::unix::fs::symlink("data/job.yaml", &file).expect("link");
            let mut seen = watch(file, 100, |_| true);
            sleep(Duration::from_millis(50)).await;
            std::os::unix::fs::symlink("b", dir.path().join("new")).expect("link");
            fs::rename(dir.path().join("new"), &data).expect("renamed");
            assert_eq!(next(&mut seen).await, text("two"));
        });
    }
}
