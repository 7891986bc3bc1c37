//! BLAKE3 of each data file's content, remembered between starts.
//!
//! Keys are by content, but hashing a large corpus at every start is slow; so a file that has kept its identity (device, inode, size, times of
//! modification and of change to the nanosecond) keeps its digest. A file changed within the last seconds is not remembered: a second change could leave
//! the same times. The memory is a text file with a checksum; without it, or damaged, everything is hashed again.
use super::{error::DataError, files::DataFile};
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

pub(crate) type Digest = [u8; 32];

/// Name in the cache directory.
const MEMORY: &str = "contents";
/// Largest memory file that is read, bytes.
const MAX_MEMORY: u64 = 256 << 20;
/// Most files remembered.
const MAX_ENTRIES: usize = 1 << 20;
/// Changes closer together than this may leave equal times on some file systems.
const RACY: Duration = Duration::from_secs(3);

/// A file's identity at one moment: device, inode, size, mtime and ctime in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Identity([i128; 5]);

impl Identity {
    fn of(meta: &Metadata) -> Self {
        let ns = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
        Identity([
            i128::from(meta.dev()),
            i128::from(meta.ino()),
            i128::from(meta.size()),
            ns(meta.mtime(), meta.mtime_nsec()),
            ns(meta.ctime(), meta.ctime_nsec()),
        ])
    }

    /// Old enough at `now` that a later change would leave other times.
    fn is_settled(&self, now: SystemTime) -> bool {
        let before = now.checked_sub(RACY).and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        before.is_some_and(|b| self.0[3].max(self.0[4]) < b.as_nanos() as i128)
    }
}

/// The digests of the files' contents, in order; `now` tells which may be remembered.
pub(crate) fn digests(files: &[DataFile], cache: &Path, now: SystemTime) -> Result<Vec<Digest>, DataError> {
    let known = recall(cache);
    let found: Result<Vec<(Identity, Digest)>, DataError> =
        files.par_iter().map(|file| digest(&file.path, &known)).collect();
    let found = found?;
    let new = found.iter().filter(|(id, _)| !known.contains_key(id) && id.is_settled(now));
    let new: Vec<(Identity, Digest)> = new.copied().collect();
    if !new.is_empty() {
        // forgetting costs time only
        let _ = remember(cache, known, &new);
    }
    Ok(found.into_iter().map(|(_, digest)| digest).collect())
}

/// Makes the next start hash everything again.
pub(crate) fn forget(cache: &Path) {
    let _ = fs::remove_file(cache.join(MEMORY));
}

fn digest(path: &Path, known: &HashMap<Identity, Digest>) -> Result<(Identity, Digest), DataError> {
    let error = |source| DataError::Read { path: path.to_path_buf(), source };
    let mut file = File::open(path).map_err(error)?;
    let before = Identity::of(&file.metadata().map_err(error)?);
    if let Some(digest) = known.get(&before) {
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
    if Identity::of(&file.metadata().map_err(error)?) != before {
        return Err(DataError::Changed { path: path.to_path_buf() });
    }
    Ok((before, *hasher.finalize().as_bytes()))
}

/// What is remembered; nothing when the memory is absent or damaged.
fn recall(cache: &Path) -> HashMap<Identity, Digest> {
    let Ok(file) = File::open(cache.join(MEMORY)) else { return HashMap::new() };
    let mut text = String::new();
    if file.take(MAX_MEMORY).read_to_string(&mut text).is_err() {
        return HashMap::new();
    }
    parse(&text).unwrap_or_default()
}

fn parse(text: &str) -> Option<HashMap<Identity, Digest>> {
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
            Some((Identity(numbers.try_into().ok()?), *blake3::Hash::from_hex(digest).ok()?.as_bytes()))
        })
        .collect()
}

fn remember(cache: &Path, known: HashMap<Identity, Digest>, new: &[(Identity, Digest)]) -> io::Result<()> {
    let mut body = String::new();
    for (id, digest) in new.iter().copied().chain(known).take(MAX_ENTRIES) {
        let [dev, ino, size, mtime, ctime] = id.0;
        let hex = blake3::Hash::from_bytes(digest).to_hex();
        writeln!(body, "{hex} {dev} {ino} {size} {mtime} {ctime}").map_err(io::Error::other)?;
    }
    let text = format!("launch contents v1 {}\n{body}", blake3::hash(body.as_bytes()).to_hex());
    // Half-written, or mixed with another process's, it is noticed by its checksum: no sync, and one name, so that none are left over.
    let temporary = cache.join(format!("{MEMORY}.tmp"));
    fs::create_dir_all(cache)?;
    fs::write(&temporary, text)?;
    fs::rename(&temporary, cache.join(MEMORY))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Remembers a digest that the file doesn't have.
    pub(crate) fn remember_wrongly(file: &DataFile, cache: &Path) {
        let id = Identity::of(&fs::metadata(&file.path).unwrap());
        remember(cache, HashMap::new(), &[(id, [7; 32])]).unwrap();
    }

    fn later() -> SystemTime {
        SystemTime::now() + Duration::from_secs(60)
    }

    fn files(dir: &Path, contents: &[&str]) -> Vec<DataFile> {
        let file = |(i, c): (usize, &&str)| {
            let path = dir.join(format!("{i}.txt"));
            fs::write(&path, c).unwrap();
            DataFile { path, bytes: c.len() as u64 }
        };
        contents.iter().enumerate().map(file).collect()
    }

    #[test]
    fn digests_are_of_the_content_and_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        let files = files(dir.path(), &["a", "b"]);
        let want: Vec<Digest> = [b"a", b"b"].map(|c| *blake3::hash(c).as_bytes()).to_vec();
        assert_eq!(digests(&files, &cache, SystemTime::now()).unwrap(), want);
        assert!(recall(&cache).is_empty(), "fresh files must not be remembered");
        assert_eq!(digests(&files, &cache, later()).unwrap(), want);
        assert_eq!(recall(&cache).len(), 2);
        assert_eq!(digests(&files, &cache, later()).unwrap(), want);
    }

    #[test]
    fn memory_is_used_and_changed_files_are_hashed_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), &["a"]);
        remember_wrongly(&files[0], dir.path());
        assert_eq!(digests(&files, dir.path(), later()).unwrap(), [[7; 32]]);
        fs::write(&files[0].path, "bb").unwrap();
        let want = *blake3::hash(b"bb").as_bytes();
        assert_eq!(digests(&files, dir.path(), later()).unwrap(), [want]);
        assert_eq!(recall(dir.path()).len(), 2);
    }

    #[test]
    fn damaged_memory_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), &["a"]);
        digests(&files, dir.path(), later()).unwrap();
        let path = dir.path().join(MEMORY);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 4;
            fs::write(&path, bad).unwrap();
            assert!(recall(dir.path()).is_empty(), "byte {at}");
        }
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(recall(dir.path()).is_empty());
        fs::write(&path, [0xff; 100]).unwrap();
        assert_eq!(digests(&files, dir.path(), later()).unwrap(), [*blake3::hash(b"a").as_bytes()]);
    }

    #[test]
    fn a_vanished_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let gone = [DataFile { path: dir.path().join("gone"), bytes: 1 }];
        let error = digests(&gone, dir.path(), later()).unwrap_err();
        assert!(error.to_string().contains("gone: No such file"), "{error}");
    }
}
