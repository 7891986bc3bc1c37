//! Small files that spare the next process work: compiled kernels, chosen algorithms. Whole or not there.
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// Bytes of the largest content that is believed.
pub(super) const MOST: usize = 64 << 20;

/// What a file begins with: this, then the hash of the content.
pub(super) type Magic = [u8; 16];
const HEAD: usize = size_of::<Magic>() + blake3::OUT_LEN;

/// The content of a file; none where there is none or it isn't whole.
pub(super) fn read(path: &Path, magic: &Magic) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take((HEAD + MOST) as u64).read_to_end(&mut bytes).ok()?;
    let (head, content) = bytes.split_at_checked(HEAD)?;
    let (begin, hash) = head.split_at(magic.len());
    (begin == magic && hash == blake3::hash(content).as_bytes()).then(|| content.to_vec())
}

/// Writes a file so that other processes see all of it or nothing.
pub(super) fn write(path: &Path, magic: &Magic, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // of this process alone, also where hosts or containers share the folder and have the same process ids
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
    let new = path.with_extension(format!("{}-{now:x}.new", std::process::id()));
    let written = (|| {
        let mut file = File::create(&new)?;
        file.write_all(magic)?;
        file.write_all(blake3::hash(content).as_bytes())?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: &Magic = b"launch a test 01";

    #[test]
    fn a_file_comes_back_whole_or_not_at_all() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("deep").join("an image");
        assert_eq!(read(&path, MAGIC), None);
        write(&path, MAGIC, b"an image").expect("kept");
        assert_eq!(read(&path, MAGIC).as_deref(), Some(&b"an image"[..]));
        assert_eq!(read(&path, b"launch a test 02"), None, "of another kind");
        let whole = fs::read(&path).expect("file");
        for (cut, name) in
            [(&whole[..whole.len() - 1], "short"), (&whole[..9], "no head"), (&[][..], "empty")]
        {
            fs::write(&path, cut).expect("written");
            assert_eq!(read(&path, MAGIC), None, "{name}");
        }
        let mut changed = whole.clone();
        *changed.last_mut().expect("a byte") ^= 1;
        fs::write(&path, changed).expect("written");
        assert_eq!(read(&path, MAGIC), None, "changed");
        let folder = path.parent().expect("folder");
        assert_eq!(fs::read_dir(folder).expect("listed").count(), 1, "nothing else is left");
    }
}
