//! Creates files and directories that only this user can read or write. Opens such files safely,
//! because another user of the machine may have put a file in their place.
use std::{
    fs::{DirBuilder, File, Metadata, OpenOptions},
    io::{self, Read},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

/// The permissions of a new private file: only its owner may read and write it.
pub(crate) const PRIVATE_FILE_MODE: u32 = 0o600;
/// The permissions of a new private directory: only its owner may list and change it.
const PRIVATE_DIRECTORY_MODE: u32 = 0o700;

/// Creates a directory in which only this user can list, read and write files. Does nothing if the
/// directory exists. New parent directories get the permissions that follow from the umask, because
/// users may share them.
pub(crate) fn create_private_dir(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(PRIVATE_DIRECTORY_MODE).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        other => other,
    }
}

/// Opens a file for appending, and creates a missing file with permissions for this user only.
pub(crate) fn open_private_file_for_appending(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(PRIVATE_FILE_MODE).open(path)
}

/// Opens a file for writing, removes any existing content, and creates a missing file with
/// permissions for this user only.
pub(crate) fn create_or_truncate_private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(PRIVATE_FILE_MODE).open(path)
}

/// Opens a file for reading if it is a regular file, and otherwise fails without blocking, for
/// example for a directory or a pipe.
pub(crate) fn open_regular_file(path: &Path) -> io::Result<File> {
    open_regular_with_flags(path, 0, |_| true)
}

/// Reads at most the first `limit` bytes of a file that may be a device such as `/dev/null`. A pipe
/// without a writer counts as empty. Fails without blocking for a pipe that has a writer but no
/// data.
pub(crate) fn read_without_blocking(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens for reading a regular file that belongs to this user and is not writable by all users.
/// Never blocks on a pipe.
pub(crate) fn open_own_file(path: &Path) -> io::Result<File> {
    open_regular_with_flags(path, 0, is_own_and_not_world_writable)
}

/// Opens for reading a regular file that belongs to this user and is not writable by all users,
/// without following a symbolic link. Fails if the path is a symbolic link, in contrast to
/// [`open_own_file`].
pub(crate) fn open_own_file_without_links(path: &Path) -> io::Result<File> {
    open_regular_with_flags(path, libc::O_NOFOLLOW, is_own_and_not_world_writable)
}

/// Returns whether a file belongs to this user and cannot be written by all users.
fn is_own_and_not_world_writable(metadata: &Metadata) -> bool {
    metadata.uid() == nix::unistd::geteuid().as_raw() && metadata.mode() & 0o002 == 0
}

/// Opens a file for reading with additional flags of open(2), such as `O_NOFOLLOW`, and fails if it
/// is not a regular file. Fails if `is_accepted` returns `false` for the metadata of the file.
fn open_regular_with_flags(path: &Path, flags: i32, is_accepted: fn(&Metadata) -> bool) -> io::Result<File> {
    // Without O_NONBLOCK, the open of a pipe waits for a writer.
    let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if !is_accepted(&metadata) {
        return Err(io::Error::other("expected a regular file of this user that not all users can write"));
    }
    Ok(file)
}

/// Returns the device and the inode of a file, which identify the file on this machine.
pub(crate) fn identify_file(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt, os::unix::fs::symlink};

    #[test]
    fn new_files_and_directories_are_private() {
        let dir = tempfile::tempdir().expect("a directory");
        let run = dir.path().join("runs/job/run");
        create_private_dir(&run).expect("created");
        create_private_dir(&run).expect("exists");
        open_private_file_for_appending(&run.join("a")).expect("a file");
        create_or_truncate_private_file(&run.join("b")).expect("a file");
        let mode = |path: &Path| fs::metadata(path).expect("there").mode() & 0o777;
        assert_eq!([mode(&run), mode(&run.join("a")), mode(&run.join("b"))], [0o700, 0o600, 0o600]);
        assert_ne!(mode(&dir.path().join("runs")) & 0o055, 0, "other users may have runs there");
        create_private_dir(&run.join("a")).expect_err("a file");
    }

    #[test]
    fn devices_and_pipes_are_read_without_blocking() {
        let dir = tempfile::tempdir().expect("a directory");
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let read = |path: &Path| read_without_blocking(path, 3);
        assert_eq!(read(&pipe).expect("empty"), b"");
        assert_eq!(read(Path::new("/dev/null")).expect("empty"), b"");
        assert_eq!(read(Path::new("/dev/zero")).expect("truncated"), [0; 3]);
        let writer = OpenOptions::new().read(true).write(true).open(&pipe).expect("a writer");
        assert_eq!(read(&pipe).expect_err("no data").kind(), io::ErrorKind::WouldBlock);
        drop(writer);
        read(dir.path()).expect_err("a directory");
    }

    #[test]
    fn pipes_directories_and_files_of_others_are_rejected() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        fs::write(path("own"), "x").expect("a file");
        fs::write(path("open"), "x").expect("a file");
        fs::set_permissions(path("open"), fs::Permissions::from_mode(0o666)).expect("changed");
        symlink(path("own"), path("link")).expect("a link");
        open_own_file(&path("own")).expect("own");
        open_own_file(&path("link")).expect("a link to it");
        open_own_file_without_links(&path("link")).expect_err("a link");
        for name in ["pipe", "open", "."] {
            open_own_file(&path(name)).expect_err(name);
        }
        open_regular_file(&path("open")).expect("regular");
        open_regular_file(&path("pipe")).expect_err("a pipe");
        // Only root can give a file to another user.
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(path("own"), Some(65_534), None).expect("given away");
            open_own_file(&path("own")).expect_err("of another user");
        }
    }
}
