//! Functions on directories: creates, locks, syncs and removes them, and opens the files in them
//! without following symbolic links.
use crate::error::{CkptError, DamageReason, Diagnosis, MissingPart, Result};
use crate::fault_points;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, FlockArg, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::syncfs;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Limit on the number of files of one checkpoint.
pub(crate) const FILES_MAX: usize = 1 << 20;

/// Opens the directory at `path`, following symbolic links. A FIFO or device at the path is an
/// error, and is not opened.
fn open_directory(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NONBLOCK;
    fs::OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)
}

/// Opens the regular file at `path` for reading. Symbolic links to files are followed.
///
/// # Errors
/// Fails if the path is a directory, a FIFO, a socket or a device. These are not opened.
pub(crate) fn open_regular_file(path: &Path) -> Result<File> {
    let open = || -> io::Result<File> {
        if !fs::metadata(path)?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // O_NONBLOCK, since a FIFO may have replaced the file meanwhile
        let file = fs::OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    };
    open().map_err(CkptError::io("open", path))
}

/// Removes the file or symbolic link at `path`, but not a directory. Does nothing if `path` is a
/// directory or does not exist.
pub(crate) fn remove_unless_directory(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(m) if !m.is_dir() => unlink(path),
        _ => Ok(()),
    }
}

/// Returns true if the path exists, even as a dangling symbolic link.
pub(crate) fn path_exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Creates a directory in an existing parent directory. The new entry is not durable yet.
///
/// # Errors
/// Fails if the path exists or the parent does not.
pub(crate) fn make_dir(path: &Path) -> Result<()> {
    fault_points::run_between_fault_points("mkdir", || fs::create_dir(path))
        .map_err(CkptError::io("create directory", path))
}

/// Creates a directory and its missing parent directories, and syncs the parents, so that the new
/// directories survive a crash of the host. Does nothing if the directory exists.
pub(crate) fn make_dirs(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(m) if m.is_dir() => return Ok(()),
        Ok(_) => return Err(CkptError::io("create directory", path)(io::ErrorKind::NotADirectory)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(CkptError::io("create directory", path)(e)),
    }
    let parent = parent_dir(path);
    make_dirs(&parent)?;
    match make_dir(path) {
        // another rank or job created the directory first
        Err(CkptError::Io { source, .. })
            if source.kind() == io::ErrorKind::AlreadyExists && path.is_dir() =>
        {
            Ok(())
        }
        Err(e) => Err(e),
        Ok(()) => sync_dir(&parent),
    }
}

/// Returns the parent directory of a path: `.` for a bare file name, and the path itself for `/`.
pub(crate) fn parent_dir(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        Some(_) => PathBuf::from("."),
        None => path.to_owned(),
    }
}

/// Syncs a directory, which makes created, renamed and removed entries durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    let dir = open_directory(path).map_err(CkptError::io("open directory", path))?;
    fault_points::run_between_fault_points("fsync directory", || dir.sync_all())
        .map_err(CkptError::io("fsync directory", path))
}

/// Syncs the whole file system of the directory `path`, which makes every file written there
/// durable.
pub(crate) fn sync_file_system(path: &Path) -> Result<()> {
    let dir = open_directory(path).map_err(CkptError::io("open directory", path))?;
    fault_points::run_between_fault_points("sync file system", || syncfs(&dir))
        .map_err(CkptError::io("sync the file system of", path))
}

/// Removes a file. Does nothing if the file does not exist.
pub(crate) fn unlink(path: &Path) -> Result<()> {
    match fault_points::run_between_fault_points("unlink", || fs::remove_file(path)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(CkptError::io("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Removes a directory with everything in it, without following symbolic links. Does nothing if the
/// directory does not exist.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    let entries = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(CkptError::io("list", path))?,
    };
    for entry in entries {
        let entry = entry.map_err(CkptError::io("list", path))?;
        let kind = entry.file_type().map_err(CkptError::io("stat", &entry.path()))?;
        match kind.is_dir() {
            true => remove_tree(&entry.path())?,
            false => unlink(&entry.path())?,
        }
    }
    match fault_points::run_between_fault_points("rmdir", || fs::remove_dir(path)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(CkptError::io("remove directory", path)(e)),
        _ => Ok(()),
    }
}

/// Path, size in bytes, and modification time (seconds and nanoseconds) of a file, which are
/// compared later to find out whether the file has changed.
pub(crate) type FileState = (PathBuf, u64, i64, i64);

/// Lists the path, size and modification time of each file in the directory tree `path`, sorted by
/// path, so that changes can be detected. Descends at most `depth` levels of subdirectories. Skips
/// files that are removed meanwhile.
///
/// # Errors
/// Fails if a directory cannot be listed, or there are more than [`FILES_MAX`] files and
/// directories.
pub(crate) fn list_file_states(path: &Path, depth: u32) -> Result<Vec<FileState>> {
    let (mut files, mut directories) = (Vec::new(), vec![(path.to_owned(), depth)]);
    while let Some((directory, depth)) = directories.pop() {
        for entry in fs::read_dir(&directory).map_err(CkptError::io("list", &directory))? {
            let path = entry.map_err(CkptError::io("list", &directory))?.path();
            let Ok(m) = path.symlink_metadata() else { continue };
            match m.is_dir() {
                true if depth > 0 => directories.push((path, depth - 1)),
                true => {}
                false => files.push((path, m.size(), m.mtime(), m.mtime_nsec())),
            }
            if files.len() + directories.len() > FILES_MAX {
                return Err(CkptError::TooManyFiles { path: directory, limit: FILES_MAX });
            }
        }
    }
    files.sort_unstable();
    Ok(files)
}

/// Queries the bytes that are free for this user on the file system of `path`.
fn query_free_bytes(path: &Path) -> Result<u64> {
    let v = nix::sys::statvfs::statvfs(path).map_err(CkptError::io("query the free space of", path))?;
    Ok((v.blocks_available() as u64).saturating_mul(v.fragment_size() as u64))
}

/// Fails with [`CkptError::InsufficientSpace`] if the file system of `path` has fewer than `needed`
/// bytes free for this user.
pub(crate) fn require_free_bytes(path: &Path, needed: u64) -> Result<()> {
    let free = query_free_bytes(path)?;
    match needed > free {
        true => Err(CkptError::InsufficientSpace { path: path.to_owned(), needed, free }),
        false => Ok(()),
    }
}

/// The exclusive lock of a directory, held until this value is dropped.
pub(crate) struct DirLock {
    /// The locked directory, or `None` if the file system does not support locks.
    _lock: Option<Flock<File>>,
}

/// Tries to lock the directory at `path` exclusively, without waiting.
///
/// # Errors
/// Fails with [`CkptError::DirectoryBusy`] if another process holds the lock. On file systems
/// without locks for directories, the call succeeds and nothing is locked.
pub(crate) fn try_lock_dir(path: &Path) -> Result<DirLock> {
    let dir = open_directory(path).map_err(CkptError::io("open directory", path))?;
    match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(DirLock { _lock: Some(lock) }),
        Err((_, Errno::EWOULDBLOCK)) => Err(CkptError::DirectoryBusy { path: path.to_owned() }),
        // some network file systems do not support locks on directories
        Err(_) => Ok(DirLock { _lock: None }),
    }
}

/// An open directory in which files are accessed by relative names. Symbolic links are rejected.
pub(crate) struct Directory {
    fd: File,
    path: PathBuf,
}

impl Directory {
    /// Opens the directory at `path`. Symbolic links in `path` are followed, unlike symbolic links
    /// inside of the directory.
    ///
    /// # Errors
    /// Fails if the path does not exist or is not a directory.
    pub(crate) fn open(path: &Path) -> Result<Directory> {
        match open_directory(path) {
            Ok(fd) => Ok(Directory { fd, path: path.to_owned() }),
            Err(e) if e.kind() == io::ErrorKind::NotADirectory && path_exists(path) => {
                Err(CkptError::not_a_checkpoint(path, Diagnosis::NotADirectory))
            }
            Err(e) => Err(CkptError::io("open", path)(e)),
        }
    }

    /// Returns the path by which this directory was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of a regular file in bytes, or `None` if no entry of this name exists.
    ///
    /// # Errors
    /// Fails if the entry is not a regular file, or the name points outside of the directory.
    pub(crate) fn file_size(&self, name: &str) -> Result<Option<u64>> {
        match self.stat_entry(name)? {
            None => Ok(None),
            Some(st) => {
                self.require_regular_file(name, st.st_mode)?;
                Ok(Some(st.st_size.max(0) as u64))
            }
        }
    }

    /// Returns true if the entry `name` is a directory, and false if it is a symbolic link to a
    /// directory or does not exist.
    pub(crate) fn has_directory(&self, name: &str) -> Result<bool> {
        let mode = self.stat_entry(name)?.map_or(0, |st| st.st_mode);
        Ok(SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFDIR)
    }

    /// Returns true if an entry `name` exists, even as a symbolic link.
    pub(crate) fn has_entry(&self, name: &str) -> Result<bool> {
        Ok(self.stat_entry(name)?.is_some())
    }

    /// Returns the metadata of the entry `name`, without following a symbolic link. Returns `None`
    /// if the entry or a directory of its path does not exist.
    fn stat_entry(&self, name: &str) -> Result<Option<FileStat>> {
        let found = match self.open_parent(name)? {
            Some((inner, last)) => {
                let fd = inner.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
                fstatat(fd, last, AtFlags::AT_SYMLINK_NOFOLLOW)
            }
            None => return Ok(None),
        };
        match found {
            Err(Errno::ENOENT) => Ok(None),
            other => other.map(Some).map_err(CkptError::io("stat", &self.path.join(name))),
        }
    }

    /// Opens the directory that directly contains the entry `name`, a path relative to this
    /// directory, without following symbolic links. Returns this subdirectory (an inner `None`
    /// stands for `self`) and the last component. Returns `None` if a subdirectory does not exist.
    ///
    /// # Errors
    /// Fails if a component is a symbolic link or not a directory, or the path points outside of
    /// `self`.
    fn open_parent<'n>(&self, name: &'n str) -> Result<Option<(Option<OwnedFd>, &'n str)>> {
        let outside = || CkptError::damaged(&self.path, name, DamageReason::OutsideDirectory);
        if name.starts_with('/') || name.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(outside());
        }
        let Some((parents, last)) = name.rsplit_once('/') else { return Ok(Some((None, name))) };
        let mut inner: Option<OwnedFd> = None;
        for part in parents.split('/') {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let at = inner.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
            inner = Some(match openat(at, part, flags, Mode::empty()) {
                Err(Errno::ENOENT) => return Ok(None),
                Err(Errno::ELOOP | Errno::ENOTDIR) => {
                    let reason = DamageReason::NotADirectory { component: part.to_owned() };
                    return Err(CkptError::damaged(&self.path, name, reason));
                }
                other => other.map_err(CkptError::io("open", &self.path.join(name)))?,
            });
        }
        Ok(Some((inner, last)))
    }

    /// Fails with [`DamageReason::NotRegularFile`] if `mode`, the file mode of the entry `name`, is
    /// not that of a regular file.
    fn require_regular_file(&self, name: &str, mode: u32) -> Result<()> {
        if SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFREG {
            return Ok(());
        }
        Err(CkptError::damaged(&self.path, name, DamageReason::NotRegularFile))
    }

    /// Opens the regular file `name` of this directory for reading, with `extra` as further flags
    /// of the system call `openat`. Returns the file and its size in bytes.
    ///
    /// # Errors
    /// Fails if the file is missing, is not a regular file (symbolic links are not followed), or
    /// cannot be opened.
    pub(crate) fn open_file(&self, name: &str, extra: OFlag) -> Result<(File, u64)> {
        // O_NONBLOCK, since opening a FIFO that has the name of a file must not block
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | extra;
        let path = self.path.join(name);
        let missing = || CkptError::missing(&self.path, MissingPart::File(name.to_owned()));
        let Some((inner, last)) = self.open_parent(name)? else { return Err(missing()) };
        let at = inner.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
        // a device is not opened, since that alone may have an effect
        match fstatat(at, last, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => return Err(missing()),
            found => self.require_regular_file(name, found.map_err(CkptError::io("stat", &path))?.st_mode)?,
        }
        let fd = match openat(at, last, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Err(missing()),
            Err(Errno::ELOOP) => {
                return Err(CkptError::damaged(&self.path, name, DamageReason::NotRegularFile));
            }
            other => other.map_err(CkptError::io("open", &path))?,
        };
        let st = fstat(&fd).map_err(CkptError::io("stat", &path))?;
        self.require_regular_file(name, st.st_mode)?;
        Ok((File::from(fd), st.st_size.max(0) as u64))
    }

    /// Reads the whole file `name` of the directory into memory.
    ///
    /// # Errors
    /// Fails if the file is missing, has more than `cap` bytes, or changes during the read.
    pub(crate) fn read_file(&self, name: &str, cap: u64) -> Result<Vec<u8>> {
        let (file, size) = self.open_file(name, OFlag::empty())?;
        if size > cap {
            let reason = DamageReason::TooLarge { found: size, limit: cap };
            return Err(CkptError::damaged(&self.path, name, reason));
        }
        let mut content = Vec::with_capacity(size as usize);
        // one byte more than the size detects a file that grows during the read
        let read = file.take(size + 1).read_to_end(&mut content);
        read.map_err(CkptError::io("read", &self.path.join(name)))?;
        if content.len() as u64 != size {
            return Err(CkptError::damaged(&self.path, name, DamageReason::Changed));
        }
        Ok(content)
    }

    /// Lists the names of the entries of the subdirectory `name`, in sorted order.
    ///
    /// # Errors
    /// Fails if the subdirectory does not exist, is not a directory, or cannot be read.
    pub(crate) fn list_subdirectory(&self, name: &str) -> Result<Vec<String>> {
        match self.has_directory(name)? {
            true => Directory::open(&self.path.join(name))?.list_names(),
            false => {
                let reason = DamageReason::NotADirectory { component: name.to_owned() };
                Err(CkptError::damaged(&self.path, name, reason))
            }
        }
    }

    /// Lists the names of the directory's entries, sorted.
    ///
    /// # Errors
    /// Fails if the directory cannot be read, or has more than [`FILES_MAX`] entries.
    pub(crate) fn list_names(&self) -> Result<Vec<String>> {
        let entries = fs::read_dir(&self.path).map_err(CkptError::io("list", &self.path))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(CkptError::io("list", &self.path))?;
            if names.len() == FILES_MAX {
                return Err(CkptError::TooManyFiles { path: self.path.clone(), limit: FILES_MAX });
            }
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Lists the names of the subdirectories from whose names `parse_number` extracts a number,
    /// such as a step, in ascending order of this number.
    pub(crate) fn list_numbered_directories(
        &self,
        parse_number: impl Fn(&str) -> Option<u64>,
    ) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for name in self.list_names()? {
            if let Some(number) = parse_number(&name)
                && self.has_directory(&name)?
            {
                found.push((number, name));
            }
        }
        found.sort_unstable();
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }
}

/// Returns true for a valid name of a visible file: no directories, no leading dot, no control
/// characters, at most 255 bytes.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && !name.chars().any(|c| c == '/' || c == '\\' || c.is_control())
}
