//! Finds the token cache of some inputs, or builds it.
//!
//! The cache's name is its key: the contents of the files in order, the tokenizer, and which side of the split. One process builds it while others
//! that need it wait (a lock on a file beside it, let go by the system when a builder dies); where locks don't work each builds its own, the
//! last rename wins and all are equal. A cache that is damaged is built again and the user told.
use super::{
    cache::{self, OpenError, TokenCache, Writer},
    contents::{self, Digest},
    documents::{self, Choice, Kind, Part, Reading, Split},
    error::DataError,
    files::DataFile,
    tokenize::TextTokenizer,
};
use rayon::prelude::*;
use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Text that is tokenized together, bytes: what building needs in memory, about ten times.
const BATCH: usize = 4 << 20;
/// Longest wait for another process that builds the same cache; afterwards this one builds too.
const LOCK_WAIT: Duration = Duration::from_secs(15 * 60);
/// Time between two looks at the lock.
const LOCK_LOOK: Duration = Duration::from_millis(20);
/// Caches that stay in a directory, by last use.
const KEEP: usize = 16;

/// What a cache is made of.
pub(crate) struct Inputs<'a> {
    /// Without empty ones.
    pub(crate) files: &'a [DataFile],
    /// Of the files' contents.
    pub(crate) digests: &'a [Digest],
    pub(crate) reading: Reading<'a>,
    pub(crate) tokenizer: &'a TextTokenizer,
    pub(crate) choice: Choice,
}

impl Inputs<'_> {
    /// Are some of its tokens no targets?
    fn marked(&self) -> bool {
        self.reading.chat.is_some_and(|c| c.marks_targets())
    }

    /// Equal keys give equal token streams.
    pub(crate) fn key(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 token cache key v1");
        hasher.update(&cache::VERSION.to_le_bytes());
        hasher.update(&self.tokenizer.digest());
        if let Some(chat) = self.reading.chat {
            hasher.update(&[1]).update(chat.digest());
        }
        match self.choice {
            Choice::All => hasher.update(&[0]),
            Choice::Side(Split::Train, share) => hasher.update(&[1]).update(&share.to_bits().to_le_bytes()),
            Choice::Side(Split::HeldOut, share) => hasher.update(&[2]).update(&share.to_bits().to_le_bytes()),
        };
        for (file, digest) in self.files.iter().zip(self.digests) {
            match Kind::of(&file.path) {
                Kind::Text => hasher.update(&[0]),
                kind => {
                    let field = self.reading.field;
                    hasher.update(&[if kind == Kind::JsonLines { 1 } else { 2 }]);
                    hasher.update(&(field.len() as u64).to_le_bytes()).update(field.as_bytes())
                }
            };
            hasher.update(digest);
        }
        *hasher.finalize().as_bytes()
    }
}

/// The cache of these inputs in `dir`, built if need be. `notices` gets what the user should know.
pub(crate) fn open_or_build(
    inputs: &Inputs,
    dir: &Path,
    notices: &mut Vec<String>,
) -> Result<TokenCache, DataError> {
    let key = inputs.key();
    let stem = blake3::Hash::from_bytes(key).to_hex()[..32].to_string();
    let path = dir.join(format!("{stem}.tokens"));
    if let Some(cache) = look(&path, &key, Some(&mut *notices))? {
        // shows that it is in use; a read-only directory is no obstacle
        let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
        return Ok(cache);
    }
    prepare(dir)?;
    let lock = match lock(&dir.join(format!("{stem}.lock")), || look(&path, &key, None))? {
        Lock::Built(cache) => return Ok(*cache),
        Lock::Held(lock) => lock,
    };
    tidy(dir, &stem, lock.is_some());
    build_file(inputs, key, dir, &stem, &path).inspect_err(|e| {
        if let DataError::Changed { .. } = e {
            // should a remembered digest be the wrong one, the next start must not believe it again
            contents::forget(dir);
        }
    })?;
    drop(lock);
    match TokenCache::open(&path, &key) {
        Ok(cache) => Ok(cache),
        Err(OpenError::Io(source)) => Err(DataError::Cache { path, doing: "read", source }),
        Err(OpenError::Absent) => {
            Err(DataError::Cache { path, doing: "read", source: io::ErrorKind::NotFound.into() })
        }
        Err(OpenError::Damaged(why)) => {
            Err(DataError::Cache { path, doing: "read back", source: io::Error::other(why) })
        }
    }
}

/// The cache, if it is there and sound.
fn look(
    path: &Path,
    key: &[u8; 32],
    notices: Option<&mut Vec<String>>,
) -> Result<Option<TokenCache>, DataError> {
    match TokenCache::open(path, key) {
        Ok(cache) => Ok(Some(cache)),
        Err(OpenError::Absent) => Ok(None),
        Err(OpenError::Damaged(why)) => {
            if let Some(notices) = notices {
                notices.push(format!(
                    "the token cache {} can't be used ({why}); building it again",
                    path.display()
                ));
            }
            Ok(None)
        }
        Err(OpenError::Io(source)) => {
            Err(DataError::Cache { path: path.to_path_buf(), doing: "read", source })
        }
    }
}

/// Makes the directory, and keeps it out of version control.
fn prepare(dir: &Path) -> Result<(), DataError> {
    let error = |source| DataError::Cache { path: dir.to_path_buf(), doing: "create", source };
    fs::create_dir_all(dir).map_err(error)?;
    let ignore = dir.join(".gitignore");
    if !ignore.exists() {
        fs::write(ignore, "*\n").map_err(error)?;
    }
    Ok(())
}

enum Lock {
    /// Another process has built it.
    Built(Box<TokenCache>),
    /// This process is to build it; without a lock where they don't work or the wait was too long.
    Held(Option<File>),
}

fn lock(
    path: &Path,
    mut look: impl FnMut() -> Result<Option<TokenCache>, DataError>,
) -> Result<Lock, DataError> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|source| DataError::Cache { path: path.to_path_buf(), doing: "lock", source })?;
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match file.try_lock() {
            // its last holder may have built it
            Ok(()) => return Ok(look()?.map_or(Lock::Held(Some(file)), |c| Lock::Built(Box::new(c)))),
            Err(TryLockError::Error(_)) => return Ok(Lock::Held(None)),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Ok(Lock::Held(None)),
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_LOOK),
        }
    }
}

/// Removes what killed builders left and the caches longest unused. What can't be removed stays: it costs room only.
fn tidy(dir: &Path, own: &str, locked: bool) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    let mut caches = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let Some((stem, kind)) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.split_once('.'))
        else {
            continue;
        };
        if kind.ends_with("tmp") && if stem == own { locked } else { abandoned(dir, stem) } {
            let _ = fs::remove_file(&path);
        }
        if kind == "tokens" && stem != own {
            caches.push((entry.metadata().and_then(|m| m.modified()).ok(), path));
        }
    }
    caches.sort_by(|a, b| b.cmp(a));
    for (_, path) in caches.into_iter().skip(KEEP - 1) {
        let _ = fs::remove_file(path.with_extension("lock"));
        let _ = fs::remove_file(path);
    }
}

/// Whether nobody is building the cache of this stem.
fn abandoned(dir: &Path, stem: &str) -> bool {
    File::open(dir.join(format!("{stem}.lock"))).is_ok_and(|f| f.try_lock().is_ok())
}

/// Builds aside, then renames.
fn build_file(inputs: &Inputs, key: [u8; 32], dir: &Path, stem: &str, path: &Path) -> Result<(), DataError> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = Temporary(dir.join(format!("{stem}.{}-{number}.tmp", std::process::id())));
    let error = |source| DataError::Cache { path: path.to_path_buf(), doing: "write", source };
    let file = File::options().write(true).create(true).truncate(true).open(&temporary.0).map_err(error)?;
    let writer = Writer::new(file, inputs.tokenizer.vocab_size(), inputs.tokenizer.eod(), inputs.marked());
    let writer = writer.map_err(error)?;
    let writer = tokenize(inputs, writer, path)?;
    writer.finish(key).map_err(error)?;
    fs::rename(&temporary.0, path).map_err(error)?;
    File::open(dir).and_then(|d| d.sync_all()).map_err(error)
}

/// A file that goes when this value goes (after the rename there is none).
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn tokenize(inputs: &Inputs, mut writer: Writer, path: &Path) -> Result<Writer, DataError> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for (file, digest) in inputs.files.iter().zip(inputs.digests) {
        let read = documents::read_file(&file.path, inputs.reading, inputs.choice, &mut |part| {
            bytes += size_of::<Part>()
                + match &part {
                    Part::Text(text) => text.len(),
                    Part::Marked(marked) => marked.text.len(),
                    Part::End => 0,
                };
            batch.push(part);
            if bytes < BATCH {
                return Ok(());
            }
            bytes = 0;
            flush(inputs.tokenizer, &mut batch, &mut writer, path)
        })?;
        if read.as_bytes() != digest {
            return Err(DataError::Changed { path: file.path.clone() });
        }
    }
    flush(inputs.tokenizer, &mut batch, &mut writer, path)?;
    Ok(writer)
}

/// Tokenizes a batch on all threads and writes it in order.
fn flush(
    tokenizer: &TextTokenizer,
    batch: &mut Vec<Part>,
    writer: &mut Writer,
    path: &Path,
) -> Result<(), DataError> {
    let tokens: Result<Vec<Option<Vec<u32>>>, DataError> = batch
        .par_drain(..)
        .map(|part| {
            let mut tokens = Vec::new();
            match part {
                Part::End => return Ok(None),
                Part::Text(text) => tokenizer.encode(&text, &mut tokens)?,
                Part::Marked(marked) => tokenizer.encode_marked(&marked, &mut tokens)?,
            }
            Ok(Some(tokens))
        })
        .collect();
    for part in tokens? {
        let written = match part {
            Some(tokens) => writer.push(&tokens),
            None => writer.end_document(),
        };
        written.map_err(|source| DataError::Cache { path: path.to_path_buf(), doing: "write", source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{cache::TokenStream, contents, files};
    use std::sync::Barrier;

    fn at(dir: &Path, choice: Choice) -> Result<(TokenCache, Vec<String>), DataError> {
        let files = files::expand(&["*.txt".into()], dir)?;
        let cache = dir.join("cache");
        let digests = contents::digests(&files, &cache, SystemTime::UNIX_EPOCH)?;
        let tokenizer = TextTokenizer::Bytes;
        let inputs = Inputs {
            files: &files,
            digests: &digests,
            reading: Reading { field: "text", chat: None },
            tokenizer: &tokenizer,
            choice,
        };
        let mut notices = Vec::new();
        open_or_build(&inputs, &cache, &mut notices).map(|c| (c, notices))
    }

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.txt"), "hello").unwrap();
        fs::write(dir.path().join("b.txt"), "world!").unwrap();
        dir
    }

    fn listed(dir: &Path, kind: &str) -> Vec<PathBuf> {
        let all = fs::read_dir(dir.join("cache")).unwrap().map(|e| e.unwrap().path());
        all.filter(|p| p.extension().is_some_and(|e| e == kind)).collect()
    }

    #[test]
    fn built_once_then_found() {
        let dir = folder();
        let (cache, notices) = at(dir.path(), Choice::All).unwrap();
        assert!(notices.is_empty());
        assert_eq!((cache.documents(), cache.header.tokens), (2, 13));
        let path = listed(dir.path(), "tokens").remove(0);
        let before = fs::metadata(&path).unwrap();
        at(dir.path(), Choice::All).unwrap();
        use std::os::unix::fs::MetadataExt;
        assert_eq!(fs::metadata(&path).unwrap().ino(), before.ino());
        assert!(listed(dir.path(), "tmp").is_empty());
        assert_eq!(fs::read_to_string(dir.path().join("cache/.gitignore")).unwrap(), "*\n");
    }

    #[test]
    fn key_follows_content_not_names() {
        let dir = folder();
        at(dir.path(), Choice::All).unwrap();
        fs::rename(dir.path().join("b.txt"), dir.path().join("c.txt")).unwrap();
        at(dir.path(), Choice::All).unwrap();
        assert_eq!(listed(dir.path(), "tokens").len(), 1);
        at(dir.path(), Choice::Side(Split::Train, 0.5)).unwrap();
        at(dir.path(), Choice::Side(Split::HeldOut, 0.5)).unwrap();
        at(dir.path(), Choice::Side(Split::HeldOut, 0.25)).unwrap();
        assert_eq!(listed(dir.path(), "tokens").len(), 4);
        fs::write(dir.path().join("a.txt"), "hullo").unwrap();
        at(dir.path(), Choice::All).unwrap();
        assert_eq!(listed(dir.path(), "tokens").len(), 5);
    }

    #[test]
    fn damaged_is_rebuilt_with_a_notice() {
        let dir = folder();
        at(dir.path(), Choice::All).unwrap();
        let path = listed(dir.path(), "tokens").remove(0);
        let good = fs::read(&path).unwrap();
        for bad in [&good[..10], &[&good[..good.len() - 1], b"x"].concat(), b""] {
            fs::write(&path, bad).unwrap();
            let (cache, notices) = at(dir.path(), Choice::All).unwrap();
            assert_eq!(cache.header.tokens, 13);
            assert!(notices.len() == 1 && notices[0].contains("building it again"), "{notices:?}");
            assert_eq!(fs::read(&path).unwrap(), good);
        }
    }

    #[test]
    fn concurrent_builders_agree() {
        let dir = folder();
        let barrier = Barrier::new(8);
        thread::scope(|scope| {
            let run = || {
                barrier.wait();
                at(dir.path(), Choice::All).unwrap().0.header
            };
            let headers: Vec<_> = (0..8).map(|_| scope.spawn(run)).collect::<Vec<_>>();
            let headers: Vec<_> = headers.into_iter().map(|h| h.join().unwrap()).collect();
            assert!(headers.iter().all(|h| *h == headers[0]));
        });
        assert!(listed(dir.path(), "tmp").is_empty());
    }

    #[test]
    fn what_killed_builders_left_is_removed() {
        let dir = folder();
        at(dir.path(), Choice::All).unwrap();
        let path = listed(dir.path(), "tokens").remove(0);
        let stem = path.file_stem().unwrap().to_str().unwrap().to_string();
        let touch = |name: String| fs::write(dir.path().join("cache").join(name), "x").unwrap();
        fs::remove_file(&path).unwrap();
        touch(format!("{stem}.7-0.tmp"));
        touch("other.7-0.tmp".into());
        touch("other.lock".into());
        touch("live.7-0.tmp".into());
        touch("live.lock".into());
        let live = File::open(dir.path().join("cache/live.lock")).unwrap();
        live.lock().unwrap();
        at(dir.path(), Choice::All).unwrap();
        assert_eq!(listed(dir.path(), "tmp"), [dir.path().join("cache/live.7-0.tmp")]);
    }

    #[test]
    fn caches_longest_unused_go() {
        let dir = folder();
        for i in 0..KEEP + 4 {
            fs::write(dir.path().join("a.txt"), format!("text {i}")).unwrap();
            at(dir.path(), Choice::All).unwrap();
            let newest = listed(dir.path(), "tokens")
                .into_iter()
                .max_by_key(|p| fs::metadata(p).unwrap().modified().unwrap())
                .unwrap();
            // each a day apart, long ago
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 * (i as u64 + 1));
            File::open(newest).unwrap().set_modified(time).unwrap();
        }
        assert_eq!(listed(dir.path(), "tokens").len(), KEEP);
        assert_eq!(listed(dir.path(), "lock").len(), KEEP);
    }

    #[test]
    fn a_directory_that_cant_be_used_is_named() {
        let dir = folder();
        fs::write(dir.path().join("cache"), "a file").unwrap();
        let error = at(dir.path(), Choice::All).err().unwrap();
        assert!(matches!(error, DataError::Cache { .. }), "{error}");
        assert!(error.hint().unwrap().contains("train.data.cache"));
    }

    #[test]
    fn a_file_that_changes_meanwhile_is_named() {
        let dir = folder();
        let files = files::expand(&["*.txt".into()], dir.path()).unwrap();
        let digests = [[0; 32]; 2];
        let tokenizer = TextTokenizer::Bytes;
        let inputs = Inputs {
            files: &files,
            digests: &digests,
            reading: Reading { field: "text", chat: None },
            tokenizer: &tokenizer,
            choice: Choice::All,
        };
        let error = open_or_build(&inputs, &dir.path().join("cache"), &mut Vec::new()).err().unwrap();
        assert!(matches!(&error, DataError::Changed { path } if path.ends_with("a.txt")), "{error}");
        assert!(listed(dir.path(), "tmp").is_empty());
        assert!(listed(dir.path(), "tokens").is_empty());
    }

    #[test]
    fn a_wrong_remembered_digest_is_believed_once_at_most() {
        let dir = folder();
        let files = files::expand(&["*.txt".into()], dir.path()).unwrap();
        let cache = dir.path().join("cache");
        let later = SystemTime::now() + Duration::from_secs(60);
        contents::tests::remember_wrongly(&files[0], &cache);
        let tokenizer = TextTokenizer::Bytes;
        let open = || {
            let digests = contents::digests(&files, &cache, later).unwrap();
            let (files, digests) = (&files[..], &digests[..]);
            let inputs = Inputs {
                files,
                digests,
                reading: Reading { field: "text", chat: None },
                tokenizer: &tokenizer,
                choice: Choice::All,
            };
            open_or_build(&inputs, &cache, &mut Vec::new()).map(|c| c.header.tokens)
        };
        assert!(matches!(open(), Err(DataError::Changed { .. })));
        assert_eq!(open().unwrap(), 13);
    }
}
