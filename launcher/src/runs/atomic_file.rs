//! Writes files of a run directory such that a crash leaves either the old or the new content.
//! Reads files only if no other user can have written them.
use crate::private_files::{PRIVATE_FILE_MODE, open_own_file_without_links};
use jobspec::{OutputFile, resolve_output_file};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Replaces the content of the file `name` in `directory` by `bytes`, atomically and durably. After
/// a crash, the file has either all of `bytes` or its previous content. Only the user can read the
/// file.
pub(crate) fn write_atomically(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    write_with_mode(directory, name, bytes, PRIVATE_FILE_MODE)
}

/// Replaces a file by a new one with the content `bytes`, atomically but without fsync, so that a
/// crash of the machine may leave an empty file. Only the user can read the file.
pub(crate) fn replace_file_without_sync(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = create_temporary_file(directory, name, bytes, PRIVATE_FILE_MODE)?.1;
    fs::rename(&temporary, directory.join(name))
}

/// Writes `bytes` to `path`, which the user has named as the destination of a command's output.
///
/// A regular file is replaced, atomically and durably, by a file with the permissions `mode`, such
/// as [`PRIVATE_FILE_MODE`]. A device or a pipe, such as `/dev/stdout`, is written to, and not
/// replaced by a file. Links of this user or of root are followed to the file. Links of other users
/// are replaced.
pub(crate) fn replace_output_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let path = match resolve_output_file(path)? {
        OutputFile::Replaced(path) => path,
        OutputFile::WrittenInPlace(path) => {
            return OpenOptions::new().write(true).truncate(true).open(path)?.write_all(bytes);
        }
    };
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| io::Error::other("the path does not end with the name of a file"))?;
    write_with_mode(path.parent().unwrap_or(Path::new("/")), name, bytes, mode)
}

/// Replaces the content of the file `name` in `directory` by `bytes`, atomically and durably, and
/// gives the file the permissions `mode`.
fn write_with_mode(directory: &Path, name: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
    let (file, temporary) = create_temporary_file(directory, name, bytes, mode)?;
    file.sync_all()?;
    fs::rename(&temporary, directory.join(name))?;
    File::open(directory)?.sync_all()
}

/// Creates a temporary file with the content `bytes` in `directory`, which the caller then renames
/// to the file name `name`. Returns the file and its path.
fn create_temporary_file(
    directory: &Path,
    name: &str,
    bytes: &[u8],
    mode: u32,
) -> io::Result<(File, PathBuf)> {
    let temporary = directory.join(format!(".{name}.tmp"));
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
    file.write_all(bytes)?;
    Ok((file, temporary))
}

/// Reads a file that belongs to this user and is not writable by all users. Fails if the file is
/// not such a regular file, or if it is longer than `limit` bytes.
pub(crate) fn read_private_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_own_file_without_links(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other(format!("the file is longer than {limit} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a link keeps its place and its target is replaced by a new file, so that readers
    /// see either the previous or the new content.
    #[test]
    fn output_replaces_the_target_of_a_link_atomically() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("other")).expect("a directory");
        std::os::unix::fs::symlink("other/file", path("first")).expect("a link");
        std::os::unix::fs::symlink(path("first"), path("second")).expect("a link");
        for text in ["old", "new"] {
            // The target does not exist at first.
            let previous = File::open(path("other/file"));
            replace_output_file(&path("second"), text.as_bytes(), PRIVATE_FILE_MODE).expect("written");
            assert_eq!(fs::read_to_string(path("other/file")).expect("a file"), text);
            if let Ok(file) = previous {
                assert_eq!(io::read_to_string(file).expect("the previous file"), "old");
            }
        }
        let files = |name: &str| fs::read_dir(path(name)).expect("a directory").count();
        assert_eq!((files("."), files("other")), (3, 1), "no temporary file remains");
        // Only root can give a link to another user.
        if nix::unistd::geteuid().is_root() {
            // The link of another user may lead to a file that this user alone may write.
            std::os::unix::fs::lchown(path("second"), Some(65_534), None).expect("given away");
            replace_output_file(&path("second"), b"newer", PRIVATE_FILE_MODE).expect("written");
            assert_eq!(fs::read(path("other/file")).expect("a file"), b"new");
            assert_eq!(fs::read(path("second")).expect("a file"), b"newer");
        }
    }

    #[test]
    fn output_replaces_files_and_not_pipes_or_links() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        let write = |name: &str| replace_output_file(&path(name), b"new", PRIVATE_FILE_MODE);
        fs::write(path("file"), "previous content").expect("a file");
        fs::write(path("target"), "previous content").expect("a file");
        std::os::unix::fs::symlink(path("target"), path("link")).expect("a link");
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let pipe = path("pipe");
        let reader = std::thread::spawn(move || fs::read(pipe));
        ["file", "link", "pipe"].iter().for_each(|name| write(name).expect("written"));
        assert_eq!(reader.join().expect("a thread").expect("bytes"), b"new");
        assert_eq!(fs::read(path("file")).expect("a file"), b"new");
        assert_eq!(fs::read(path("target")).expect("a file"), b"new");
        assert!(fs::symlink_metadata(path("link")).expect("a link").is_symlink());
        assert!(write(".").is_err(), "a directory");
    }
}
