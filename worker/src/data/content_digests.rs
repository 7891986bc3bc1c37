//! Computes BLAKE3 digests of data files, and stores them in an index file so that the next start
//! of a job need not hash unchanged files.
//!
//! Token caches are keyed by content, but hashing a large corpus at every start is slow. A file
//! whose device, inode, size, modification time and change time are unchanged keeps its digest. A
//! file that changed within the last seconds is not added to the index, because another change
//! could leave equal times. The index is a text file with a checksum. Every file is hashed again if
//! the index is absent or damaged.
use super::{error::DataError, file_patterns::DataFile};
use rayon::prelude::*;
use std::{
    collections::HashMap,
    fmt::Write as _,
    fs::{self, File, Metadata},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The BLAKE3 digest of a data file's content.
pub(crate) type ContentDigest = [u8; 32];

/// A map from the identity of a data file (inode, size and times) to the BLAKE3 digest of the
/// file's content.
type DigestIndex = HashMap<FileIdentity, ContentDigest>;

/// The name of the file in the cache directory that stores the BLAKE3 digests of data files between
/// starts.
const INDEX_FILE_NAME: &str = "contents";
/// The largest size in bytes of the file that stores the digests of data files between starts. A
/// larger file is ignored.
const MAX_INDEX_BYTES: u64 = 256 << 20;
/// The largest number of data files whose digests are stored between starts.
const MAX_INDEX_ENTRIES: usize = 1 << 20;
/// Two changes of a file that are at least this long apart give the file different modification
/// times on every file system.
const FILE_TIME_RESOLUTION: Duration = Duration::from_secs(3);

/// Device, inode, size in bytes, modification time and change time (both in ns) of a file; if they
/// are equal, launch assumes unchanged content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FileIdentity([i128; 5]);

impl FileIdentity {
    /// Returns the identity of a file (inode, size and times of change) from the file's metadata.
    fn from_metadata(meta: &Metadata) -> Self {
        let ns = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
        FileIdentity([
            i128::from(meta.dev()),
            i128::from(meta.ino()),
            i128::from(meta.size()),
            ns(meta.mtime(), meta.mtime_nsec()),
            ns(meta.ctime(), meta.ctime_nsec()),
        ])
    }

    /// Returns true if the last change of the file was so long before `now` that a later change
    /// gets a different modification time.
    fn is_settled(&self, now: SystemTime) -> bool {
        let before = now.checked_sub(FILE_TIME_RESOLUTION).and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        before.is_some_and(|b| self.0[3].max(self.0[4]) < b.as_nanos() as i128)
    }
}

/// Returns the BLAKE3 digest of each data file's content, in the order of `files`. Hashes only
/// files that the index in `cache_dir` lacks, and adds their digests to the index. Files that
/// changed shortly before `now` are not added.
pub(crate) fn find_or_compute_digests(
    files: &[DataFile],
    cache_dir: &Path,
    now: SystemTime,
) -> Result<Vec<ContentDigest>, DataError> {
    let index = read_digest_index(cache_dir);
    let hashed: Result<Vec<(FileIdentity, ContentDigest)>, DataError> =
        files.par_iter().map(|file| find_or_compute_digest(&file.path, &index)).collect();
    let hashed = hashed?;
    let new = hashed.iter().filter(|(id, _)| !index.contains_key(id) && id.is_settled(now));
    let new: Vec<(FileIdentity, ContentDigest)> = new.copied().collect();
    if !new.is_empty() {
        // The error is ignored: without an index the next start only takes longer.
        let _ = write_digest_index(cache_dir, index, &new);
    }
    Ok(hashed.into_iter().map(|(_, digest)| digest).collect())
}

/// Deletes the stored digests of data files in `cache_dir`, so that the next start hashes every
/// file again.
pub(crate) fn delete_digest_index(cache_dir: &Path) {
    let _ = fs::remove_file(cache_dir.join(INDEX_FILE_NAME));
}

/// Returns the identity (inode, size, times) and the BLAKE3 digest of the data file at `path`; does
/// not read the file if `index` has the digest. Hashes the file if `index` lacks its identity.
/// Fails if the file changes while it is hashed.
fn find_or_compute_digest(
    path: &Path,
    index: &DigestIndex,
) -> Result<(FileIdentity, ContentDigest), DataError> {
    let error = |source| DataError::unreadable(path, source);
    let mut file = File::open(path).map_err(error)?;
    let before = FileIdentity::from_metadata(&file.metadata().map_err(error)?);
    if let Some(digest) = index.get(&before) {
        return Ok((before, *digest));
    }
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => hasher.update(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(error(e)),
        };
    }
    if FileIdentity::from_metadata(&file.metadata().map_err(error)?) != before {
        return Err(DataError::ChangedWhileRead { path: path.to_path_buf() });
    }
    Ok((before, *hasher.finalize().as_bytes()))
}

/// Reads the digests of data files that an earlier start of a job has stored in `cache_dir`, so
/// that unchanged files need not be hashed again. Returns an empty index if the file is absent or
/// damaged.
fn read_digest_index(cache_dir: &Path) -> DigestIndex {
    let Ok(file) = File::open(cache_dir.join(INDEX_FILE_NAME)) else { return HashMap::new() };
    let mut text = String::new();
    if file.take(MAX_INDEX_BYTES).read_to_string(&mut text).is_err() {
        return HashMap::new();
    }
    parse_digest_index(&text).unwrap_or_default()
}

/// Parses the text of the file that stores the digests of data files. Returns `None` if its
/// checksum or a line is wrong.
fn parse_digest_index(text: &str) -> Option<DigestIndex> {
    let (head, body) = text.split_once('\n')?;
    if blake3::Hash::from_hex(head.strip_prefix("launch contents v1 ")?).ok()?
        != blake3::hash(body.as_bytes())
    {
        return None;
    }
    body.lines()
        .map(|line| {
            let (digest, numbers) = line.split_once(' ')?;
            let numbers: Vec<i128> = numbers.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
            Some((FileIdentity(numbers.try_into().ok()?), *blake3::Hash::from_hex(digest).ok()?.as_bytes()))
        })
        .collect()
}

/// Writes the index file with the digests of data files: first the digests in `new`, then those in
/// `known` from the existing index. Leaves out the last files if there are more than
/// [`MAX_INDEX_ENTRIES`] in total.
fn write_digest_index(
    cache_dir: &Path,
    known: DigestIndex,
    new: &[(FileIdentity, ContentDigest)],
) -> io::Result<()> {
    let mut body = String::new();
    for (id, digest) in new.iter().copied().chain(known).take(MAX_INDEX_ENTRIES) {
        let [dev, ino, size, mtime, ctime] = id.0;
        let hex = blake3::Hash::from_bytes(digest).to_hex();
        writeln!(body, "{hex} {dev} {ino} {size} {mtime} {ctime}").map_err(io::Error::other)?;
    }
    let text = format!("launch contents v1 {}\n{body}", blake3::hash(body.as_bytes()).to_hex());
    // The checksum detects a partial file or one that two processes wrote at once. Therefore the
    // file is not synced, and the temporary name is always the same, so that no such files
    // accumulate.
    let temporary = cache_dir.join(format!("{INDEX_FILE_NAME}.tmp"));
    fs::create_dir_all(cache_dir)?;
    fs::write(&temporary, text)?;
    fs::rename(&temporary, cache_dir.join(INDEX_FILE_NAME))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Writes an index of digests in which the digest of `file` is wrong.
    pub(crate) fn write_index_with_wrong_digest(file: &DataFile, cache: &Path) {
        let id = FileIdentity::from_metadata(&fs::metadata(&file.path).unwrap());
        write_digest_index(cache, HashMap::new(), &[(id, [7; 32])]).unwrap();
    }

    /// Returns a time in the future. Seen from it, the test's files were last modified long enough
    /// ago for the index to record and trust their digests.
    fn get_time_after_changes() -> SystemTime {
        SystemTime::now() + Duration::from_secs(60)
    }

    /// Writes each of `contents` to a new file in `dir`, and returns the files.
    fn write_files(dir: &Path, contents: &[&str]) -> Vec<DataFile> {
        let file = |(i, c): (usize, &&str)| {
            let path = dir.join(format!("{i}.txt"));
            fs::write(&path, c).unwrap();
            DataFile { path, bytes: c.len() as u64 }
        };
        contents.iter().enumerate().map(file).collect()
    }

    #[test]
    fn digests_depend_on_the_content_and_enter_the_index() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        let files = write_files(dir.path(), &["a", "b"]);
        let want: Vec<ContentDigest> = [b"a", b"b"].map(|c| *blake3::hash(c).as_bytes()).to_vec();
        assert_eq!(find_or_compute_digests(&files, &cache, SystemTime::now()).unwrap(), want);
        assert!(read_digest_index(&cache).is_empty(), "files that just changed must not enter the index");
        assert_eq!(find_or_compute_digests(&files, &cache, get_time_after_changes()).unwrap(), want);
        assert_eq!(read_digest_index(&cache).len(), 2);
        assert_eq!(find_or_compute_digests(&files, &cache, get_time_after_changes()).unwrap(), want);
    }

    #[test]
    fn the_index_is_used_and_changed_files_are_hashed_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = write_files(dir.path(), &["a"]);
        write_index_with_wrong_digest(&files[0], dir.path());
        assert_eq!(find_or_compute_digests(&files, dir.path(), get_time_after_changes()).unwrap(), [[7; 32]]);
        fs::write(&files[0].path, "bb").unwrap();
        let want = *blake3::hash(b"bb").as_bytes();
        assert_eq!(find_or_compute_digests(&files, dir.path(), get_time_after_changes()).unwrap(), [want]);
        assert_eq!(read_digest_index(dir.path()).len(), 2);
    }

    #[test]
    fn a_damaged_index_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let files = write_files(dir.path(), &["a"]);
        find_or_compute_digests(&files, dir.path(), get_time_after_changes()).unwrap();
        let path = dir.path().join(INDEX_FILE_NAME);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 4;
            fs::write(&path, bad).unwrap();
            assert!(read_digest_index(dir.path()).is_empty(), "byte {at}");
        }
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(read_digest_index(dir.path()).is_empty());
        fs::write(&path, [0xff; 100]).unwrap();
        assert_eq!(
            find_or_compute_digests(&files, dir.path(), get_time_after_changes()).unwrap(),
            [*blake3::hash(b"a").as_bytes()]
        );
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let missing = [DataFile { path: dir.path().join("gone"), bytes: 1 }];
        let error = find_or_compute_digests(&missing, dir.path(), get_time_after_changes()).unwrap_err();
        let DataError::Unreadable { path, source } = &error else { panic!("{error}") };
        assert_eq!(*path, missing[0].path);
        assert_eq!(source.kind(), io::ErrorKind::NotFound);
    }
}
