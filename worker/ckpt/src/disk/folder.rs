//! Folders: making, locking, syncing, removing, and opening files in them without following links.
use crate::error::{CkptError, Result};
use crate::fault;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, FlockArg, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::syncfs;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// True when something, even a dangling link, has this path.
pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Makes one directory; its parent exists.
pub(crate) fn make_dir(path: &Path) -> Result<()> {
    fault::around("mkdir", || fs::create_dir(path)).map_err(CkptError::io("make directory", path))
}

/// Makes a directory and its missing parents, durably. It may exist.
pub(crate) fn make_dirs(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(m) if m.is_dir() => return Ok(()),
        Ok(_) => return Err(CkptError::io("make directory", path)(io::ErrorKind::NotADirectory.into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(CkptError::io("make directory", path)(e)),
    }
    let parent = parent_of(path);
    make_dirs(&parent)?;
    match make_dir(path) {
        // another rank or job was faster
        Err(CkptError::Io { source, .. })
            if source.kind() == io::ErrorKind::AlreadyExists && path.is_dir() =>
        {
            Ok(())
        }
        Err(e) => Err(e),
        Ok(()) => sync_dir(&parent),
    }
}

/// The parent, `.` for a bare name.
pub(crate) fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        Some(_) => PathBuf::from("."),
        None => path.to_owned(),
    }
}

/// Makes the entries of a directory durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    let dir = File::open(path).map_err(CkptError::io("open directory", path))?;
    fault::around("fsync directory", || dir.sync_all()).map_err(CkptError::io("fsync directory", path))
}

/// Makes everything durable that was written to the file system of a directory.
pub(crate) fn sync_all_of(path: &Path) -> Result<()> {
    let dir = File::open(path).map_err(CkptError::io("open directory", path))?;
    fault::around("sync file system", || syncfs(&dir))
        .map_err(CkptError::errno("sync the file system of", path))
}

/// Removes a file; one that is already gone is fine.
pub(crate) fn unlink(path: &Path) -> Result<()> {
    match fault::around("unlink", || fs::remove_file(path)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(CkptError::io("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Removes a folder and everything in it, never following links; one that is already gone is fine.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    let entries = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(CkptError::io("list", path))?,
    };
    for entry in entries {
        let entry = entry.map_err(CkptError::io("list", path))?;
        let kind = entry.file_type().map_err(CkptError::io("look at", &entry.path()))?;
        match kind.is_dir() {
            true => remove_tree(&entry.path())?,
            false => unlink(&entry.path())?,
        }
    }
    match fault::around("rmdir", || fs::remove_dir(path)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(CkptError::io("remove directory", path)(e)),
        _ => Ok(()),
    }
}

/// Bytes that may still be written to the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> Result<u64> {
    let v = nix::sys::statvfs::statvfs(path).map_err(CkptError::errno("ask the free space of", path))?;
    Ok((v.blocks_available() as u64).saturating_mul(v.fragment_size() as u64))
}

/// A directory that only this process writes into, until dropped.
pub(crate) struct DirLock {
    _lock: Option<Flock<File>>,
}

/// Takes the directory for this process, or says that another one has it.
pub(crate) fn lock_dir(path: &Path) -> Result<DirLock> {
    let dir = File::open(path).map_err(CkptError::io("open directory", path))?;
    match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(DirLock { _lock: Some(lock) }),
        Err((_, Errno::EWOULDBLOCK)) => Err(CkptError::Busy { path: path.to_owned() }),
        // network file systems without locks on directories: go on without
        Err(_) => Ok(DirLock { _lock: None }),
    }
}

/// An open folder: its files are reached by plain name, links are refused.
pub(crate) struct Folder {
    fd: File,
    path: PathBuf,
}

impl Folder {
    /// Opens it; the path itself may go through links.
    pub(crate) fn open(path: &Path) -> Result<Folder> {
        let fd = File::open(path).map_err(CkptError::io("open", path))?;
        if !fd.metadata().map_err(CkptError::io("look at", path))?.is_dir() {
            return Err(CkptError::NotACheckpoint {
                path: path.to_owned(),
                why: "it is not a directory".into(),
            });
        }
        Ok(Folder { fd, path: path.to_owned() })
    }

    /// As given to [`Folder::open`].
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the regular file of this name; `None` when there is no such entry.
    pub(crate) fn size_of(&self, name: &str) -> Result<Option<u64>> {
        match self.stat(name)? {
            None => Ok(None),
            Some(st) => {
                self.require_regular(name, st.st_mode)?;
                Ok(Some(st.st_size.max(0) as u64))
            }
        }
    }

    /// True when this name is a folder in here (and no link to one).
    pub(crate) fn has_folder(&self, name: &str) -> Result<bool> {
        let mode = self.stat(name)?.map_or(0, |st| st.st_mode);
        Ok(SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFDIR)
    }

    /// True when something, even a link, has this name in here.
    pub(crate) fn has(&self, name: &str) -> Result<bool> {
        Ok(self.stat(name)?.is_some())
    }

    fn stat(&self, name: &str) -> Result<Option<FileStat>> {
        let found = match self.enter(name)? {
            Some((inner, last)) => {
                let fd = inner.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
                fstatat(fd, last, AtFlags::AT_SYMLINK_NOFOLLOW)
            }
            None => return Ok(None),
        };
        match found {
            Err(Errno::ENOENT) => Ok(None),
            other => other.map(Some).map_err(CkptError::errno("look at", &self.path.join(name))),
        }
    }

    /// The folder in here that a name's last part is in (`None` in the pair: this one), and that part. Links are not
    /// followed on the way, and no part leads out. `None` when a folder on the way isn't there.
    fn enter<'n>(&self, name: &'n str) -> Result<Option<(Option<OwnedFd>, &'n str)>> {
        let outside = || CkptError::damaged(&self.path, name, "its name leads out of the folder");
        if name.starts_with('/') || name.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(outside());
        }
        let Some((folders, last)) = name.rsplit_once('/') else { return Ok(Some((None, name))) };
        let mut inner: Option<OwnedFd> = None;
        for part in folders.split('/') {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let at = inner.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
            inner = Some(match openat(at, part, flags, Mode::empty()) {
                Err(Errno::ENOENT) => return Ok(None),
                Err(Errno::ELOOP | Errno::ENOTDIR) => {
                    let why = format!("{part} on the way to it is no folder (links are not followed)");
                    return Err(CkptError::damaged(&self.path, name, why));
                }
                other => other.map_err(CkptError::errno("open", &self.path.join(name)))?,
            });
        }
        Ok(Some((inner, last)))
    }

    fn require_regular(&self, name: &str, mode: u32) -> Result<()> {
        if SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFREG {
            return Ok(());
        }
        Err(CkptError::damaged(
            &self.path,
            name,
            "it is not a regular file (links and devices are not followed)",
        ))
    }

    /// Opens a regular file for reading, with extra flags; returns it with its size.
    pub(crate) fn open_file(&self, name: &str, extra: OFlag) -> Result<(File, u64)> {
        // O_NONBLOCK: a FIFO put in place of a file must not hang us
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | extra;
        let path = self.path.join(name);
        let missing = || CkptError::Missing { path: self.path.clone(), what: name.to_owned() };
        let Some((inner, last)) = self.enter(name)? else { return Err(missing()) };
        let at = inner.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
        let fd = match openat(at, last, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Err(missing()),
            Err(Errno::ELOOP) => {
                return Err(CkptError::damaged(
                    &self.path,
                    name,
                    "it is a symbolic link, which is not followed",
                ));
            }
            other => other.map_err(CkptError::errno("open", &path))?,
        };
        let st = fstat(&fd).map_err(CkptError::errno("look at", &path))?;
        self.require_regular(name, st.st_mode)?;
        Ok((File::from(fd), st.st_size.max(0) as u64))
    }

    /// A whole small file of at most `cap` bytes.
    pub(crate) fn read(&self, name: &str, cap: u64) -> Result<Vec<u8>> {
        let (file, size) = self.open_file(name, OFlag::empty())?;
        if size > cap {
            let why = format!("it has {size} bytes, more than the {cap} that are allowed");
            return Err(CkptError::damaged(&self.path, name, why));
        }
        let mut content = Vec::with_capacity(size as usize);
        // one byte more shows a file that is growing
        let read = file.take(size + 1).read_to_end(&mut content);
        read.map_err(CkptError::io("read", &self.path.join(name)))?;
        if content.len() as u64 != size {
            return Err(CkptError::damaged(&self.path, name, "its size changes while it is read"));
        }
        Ok(content)
    }

    /// Names in a folder in here, sorted.
    pub(crate) fn names_in(&self, name: &str) -> Result<Vec<String>> {
        match self.has_folder(name)? {
            true => Folder::open(&self.path.join(name))?.names(),
            false => Err(CkptError::damaged(&self.path, name, "it is no folder (links are not followed)")),
        }
    }

    /// Names of all entries, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let entries = fs::read_dir(&self.path).map_err(CkptError::io("list", &self.path))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(CkptError::io("list", &self.path))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }
}
