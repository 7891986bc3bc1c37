//! Reads and writes the files in which compiled kernels and the fastest algorithms of matmuls are
//! stored for later runs and other processes.
//!
//! A file is used only if it is complete and its hash is right.
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// Maximum size in bytes of the content of a file in the cache of compiled kernels and matmul
/// algorithms on disk. Larger files are ignored.
pub(super) const MAX_CONTENT_BYTES: usize = 64 << 20;

/// The first bytes of a file in the cache of compiled kernels and matmul algorithms, which identify
/// the kind of its content. The content's hash follows.
pub(super) type Magic = [u8; 16];
/// Size in bytes of the header of a cache file, which consists of the kind of the content
/// ([`Magic`]) and the hash of the content.
const HEADER_BYTES: usize = size_of::<Magic>() + blake3::OUT_LEN;

/// Reads the content of a cache file (a compiled kernel or a chosen algorithm), after checking its
/// hash. Returns `None` if the file is missing or damaged, or does not begin with `magic`.
pub(super) fn read_cache_file(path: &Path, magic: &Magic) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take((HEADER_BYTES + MAX_CONTENT_BYTES) as u64).read_to_end(&mut bytes).ok()?;
    let (header, content) = bytes.split_at_checked(HEADER_BYTES)?;
    let (begin, hash) = header.split_at(magic.len());
    (begin == magic && hash == blake3::hash(content).as_bytes()).then(|| content.to_vec())
}

/// Writes a file of the kernel cache atomically: other processes see the complete file or no file.
/// Creates missing directories.
pub(super) fn write_cache_file(path: &Path, magic: &Magic, content: &[u8]) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    // The time makes the name unique where hosts or containers with equal process ids share the
    // directory.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
    let temporary = path.with_extension(format!("{}-{now:x}.new", std::process::id()));
    let written = (|| {
        let mut file = File::create(&temporary)?;
        file.write_all(magic)?;
        file.write_all(blake3::hash(content).as_bytes())?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: &Magic = b"launch a test 01";

    #[test]
    fn a_file_is_read_back_complete_or_not_at_all() {
        let root = tempfile::tempdir().expect("temporary directory");
        let path = root.path().join("deep").join("an image");
        assert_eq!(read_cache_file(&path, MAGIC), None);
        write_cache_file(&path, MAGIC, b"an image").expect("written");
        assert_eq!(read_cache_file(&path, MAGIC).as_deref(), Some(&b"an image"[..]));
        assert_eq!(read_cache_file(&path, b"launch a test 02"), None, "another kind");
        let whole = fs::read(&path).expect("file");
        for (cut, name) in
            [(&whole[..whole.len() - 1], "truncated"), (&whole[..9], "no header"), (&[][..], "empty")]
        {
            fs::write(&path, cut).expect("written");
            assert_eq!(read_cache_file(&path, MAGIC), None, "{name}");
        }
        let mut changed = whole.clone();
        *changed.last_mut().expect("a byte") ^= 1;
        fs::write(&path, changed).expect("written");
        assert_eq!(read_cache_file(&path, MAGIC), None, "changed");
        let directory = path.parent().expect("directory");
        assert_eq!(fs::read_dir(directory).expect("entries").count(), 1, "no temporary file is left");
    }
}
