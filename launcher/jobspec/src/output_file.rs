//! [`OutputFile`]: how a command writes a file that the user names as its output, such as
//! `/dev/stdout` or a link.
use nix::{
    errno::Errno,
    sys::statfs::{PROC_SUPER_MAGIC, statfs},
    unistd::geteuid,
};
use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// The largest number of symbolic links that are followed to an output file, as in the kernel.
const MAX_LINKS: usize = 40;

/// How a command writes an output file, and the path of this file after links were followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputFile {
    /// A regular or missing file, or a link of another user, which is replaced atomically by a new
    /// file.
    Replaced(PathBuf),
    /// A device or a pipe, which is opened for writing.
    WrittenInPlace(PathBuf),
}

/// Determines how to write the output file that a user names as `path`.
///
/// Follows symbolic links that belong to this user or to root, so that the link remains and its
/// target is replaced. A link of another user could lead to any file of this user, and is replaced.
pub fn resolve_output_file(path: &Path) -> io::Result<OutputFile> {
    let mut path = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        let Ok(found) = fs::symlink_metadata(&path) else { return Ok(OutputFile::Replaced(path)) };
        match found.is_symlink() {
            false if found.is_file() || found.is_dir() => return Ok(OutputFile::Replaced(path)),
            false => return Ok(OutputFile::WrittenInPlace(path)),
            // The text of a link to an open file, such as `/proc/self/fd/1`, may not be a path.
            true if is_in_proc(&path) => return Ok(OutputFile::WrittenInPlace(path)),
            true if ![0, geteuid().as_raw()].contains(&found.uid()) => {
                return Ok(OutputFile::Replaced(path));
            }
            true => path = path.parent().unwrap_or(Path::new("/")).join(fs::read_link(&path)?),
        }
    }
    Err(Errno::ELOOP.into())
}

/// Returns whether the file or link `path` is in a file system of the type `proc`.
fn is_in_proc(path: &Path) -> bool {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    statfs(directory.unwrap_or(Path::new("."))).is_ok_and(|found| found.filesystem_type() == PROC_SUPER_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{lchown, symlink};

    #[test]
    fn links_of_this_user_are_followed_and_others_are_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        let resolve = |name: &str| resolve_output_file(&path(name));
        fs::write(path("file"), "").expect("a file");
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        for (target, link) in
            [("file", "first"), ("first", "second"), ("absent", "third"), ("pipe", "fourth")]
        {
            symlink(target, path(link)).expect("a link");
        }
        symlink("loop", path("loop")).expect("a link");
        for (name, target) in [("file", "file"), ("first", "file"), ("second", "file"), ("third", "absent")] {
            assert_eq!(resolve(name).expect(name), OutputFile::Replaced(path(target)), "{name}");
        }
        assert_eq!(resolve(".").expect("a directory"), OutputFile::Replaced(path(".")));
        assert_eq!(resolve("fourth").expect("a pipe"), OutputFile::WrittenInPlace(path("pipe")));
        assert_eq!(resolve("loop").map_err(|error| error.raw_os_error()), Err(Some(Errno::ELOOP as i32)));
        for device in ["/dev/null", "/proc/self/fd/1"] {
            let resolved = resolve_output_file(Path::new(device)).expect(device);
            assert_eq!(resolved, OutputFile::WrittenInPlace(device.into()));
        }
        // Only root can give a link to another user.
        if geteuid().is_root() {
            lchown(path("first"), Some(65_534), None).expect("given away");
            assert_eq!(resolve("second").expect("a link"), OutputFile::Replaced(path("first")));
        }
    }
}
