//! Opens the token cache of a data source, and builds the cache first if necessary.
//!
//! The name of a cache file is its key: a digest of the files' contents in order, the tokenizer and
//! the split. One process builds the file while the others wait for a lock file. The operating
//! system releases the lock if the builder dies. On file systems without locks every process builds
//! a separate file; the last rename wins, and all files are equal. A damaged cache is rebuilt with
//! a warning.
use super::{
    content_digests::{self, ContentDigest},
    document_reader::{self, DataFileFormat, RecordReadOptions},
    document_tokenizer::DocumentTokenizer,
    error::{DataError, TokenCacheOperation},
    file_patterns::DataFile,
    split::{Split, SplitFilter},
    token_cache::{self, CacheOpenError, TokenCache, TokenCacheWriter},
    tokenizer::TextTokenizer,
};
use diagnostic::{Diagnostic, codes::data as codes};
use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

/// The longest time that a process waits while another process builds the token cache that both
/// need. After it, the waiting process builds the cache, too.
const LOCK_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Time between two attempts to acquire the lock of a token cache.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The number of token caches that a cleanup keeps in a cache directory, namely the most recently
/// used ones. The least recently used ones beyond this number are deleted.
const MAX_KEPT_CACHES: usize = 16;

/// Everything that determines the content of a token cache: the data files, the options for reading
/// their records, the tokenizer, and whether training or held-out data is selected.
pub(crate) struct TokenCacheInputs<'a> {
    /// The files in order, without empty ones.
    pub(crate) files: &'a [DataFile],
    /// The digest of each file's content, in the order of `files`.
    pub(crate) digests: &'a [ContentDigest],
    /// The options with which records are converted to text.
    pub(crate) format: RecordReadOptions<'a>,
    /// The tokenizer that encodes the text.
    pub(crate) tokenizer: &'a TextTokenizer,
    /// Selects whether training data, held-out data or both are tokenized.
    pub(crate) filter: SplitFilter,
}

impl TokenCacheInputs<'_> {
    /// Returns whether some tokens of the token cache do not count for the loss.
    fn has_loss_mask(&self) -> bool {
        self.format.chat_template.is_some_and(|c| c.has_loss_mask())
    }

    /// Computes the key that names a token cache file: a hash of everything that determines the
    /// file's content. Equal keys imply equal tokens.
    pub(crate) fn compute_key(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 token cache key v1");
        hasher.update(&token_cache::FORMAT_VERSION.to_le_bytes());
        hasher.update(&self.tokenizer.digest());
        if let Some(template) = self.format.chat_template {
            hasher.update(&[1]).update(template.digest());
        }
        match self.filter {
            SplitFilter::All => hasher.update(&[0]),
            SplitFilter::Only(Split::Train, share) => {
                hasher.update(&[1]).update(&share.to_bits().to_le_bytes())
            }
            SplitFilter::Only(Split::HeldOut, share) => {
                hasher.update(&[2]).update(&share.to_bits().to_le_bytes())
            }
        };
        for (file, digest) in self.files.iter().zip(self.digests) {
            match DataFileFormat::from_path(&file.path) {
                DataFileFormat::Text => hasher.update(&[0]),
                format => {
                    let field = self.format.field;
                    hasher.update(&[if format == DataFileFormat::JsonLines { 1 } else { 2 }]);
                    hasher.update(&(field.len() as u64).to_le_bytes()).update(field.as_bytes())
                }
            };
            hasher.update(digest);
        }
        *hasher.finalize().as_bytes()
    }
}

/// Opens the token cache for the data files and the tokenizer in `inputs`, after building a missing
/// or damaged cache in `directory`. Adds a warning to `warnings` if the file is damaged. Blocks
/// while another process builds the cache.
pub(crate) fn open_or_build_cache(
    inputs: &TokenCacheInputs,
    directory: &Path,
    warnings: &mut Vec<Diagnostic>,
) -> Result<TokenCache, DataError> {
    let key = inputs.compute_key();
    let stem = blake3::Hash::from_bytes(key).to_hex()[..32].to_string();
    let path = directory.join(format!("{stem}.tokens"));
    if let Some(cache) = open_intact_cache(&path, &key, Some(&mut *warnings))? {
        // The time of modification is the time of last use; a read-only directory is acceptable.
        let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
        return Ok(cache);
    }
    create_cache_directory(directory)?;
    let lock_path = directory.join(format!("{stem}.lock"));
    let lock = match wait_for_build_lock(&lock_path, || open_intact_cache(&path, &key, None))? {
        BuildLockOutcome::AlreadyBuilt(cache) => return Ok(*cache),
        BuildLockOutcome::MustBuild(lock) => lock,
    };
    remove_stale_cache_files(directory, &stem, lock.is_some());
    build_cache(inputs, key, directory, &stem, &path).inspect_err(|e| {
        if let DataError::ChangedWhileRead { .. } = e {
            // The index of digests may hold a wrong digest; the next start must hash the files
            // again.
            content_digests::delete_digest_index(directory);
        }
    })?;
    drop(lock);
    TokenCache::open(&path, &key).map_err(|e| match e {
        CacheOpenError::Io(source) => DataError::cache_unusable(&path, TokenCacheOperation::Read, source),
        CacheOpenError::Damaged(damage) => DataError::CacheCorrupt { path, damage },
    })
}

/// Returns the open token cache at `path`, or `None` if the file does not exist or is damaged. Adds
/// a warning to `warnings` if the file is damaged.
fn open_intact_cache(
    path: &Path,
    key: &[u8; 32],
    warnings: Option<&mut Vec<Diagnostic>>,
) -> Result<Option<TokenCache>, DataError> {
    match TokenCache::open(path, key) {
        Ok(cache) => Ok(Some(cache)),
        Err(CacheOpenError::Io(e)) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(CacheOpenError::Damaged(damage)) => {
            if let Some(warnings) = warnings {
                let message = format!("rebuilding the damaged token cache {}", path.display());
                warnings.push(
                    Diagnostic::warning(codes::TOKEN_CACHE_CORRUPT, message)
                        .with_subject("train.data.cache")
                        .with_field("path", path.display().to_string())
                        .with_cause(&damage),
                );
            }
            Ok(None)
        }
        Err(CacheOpenError::Io(source)) => {
            Err(DataError::cache_unusable(path, TokenCacheOperation::Read, source))
        }
    }
}

/// Creates the directory of the token caches, and a .gitignore in it that excludes all files.
fn create_cache_directory(directory: &Path) -> Result<(), DataError> {
    let error = |source| DataError::cache_unusable(directory, TokenCacheOperation::Create, source);
    fs::create_dir_all(directory).map_err(error)?;
    let ignore = directory.join(".gitignore");
    if !ignore.exists() {
        fs::write(ignore, "*\n").map_err(error)?;
    }
    Ok(())
}

/// The result of waiting for another process that builds a token cache: the finished cache, or the
/// task to build it in this process.
enum BuildLockOutcome {
    /// Another process has built the cache.
    AlreadyBuilt(Box<TokenCache>),
    /// This process must build the cache while it holds the lock file. The lock is absent if the
    /// file system has no locks or the wait timed out.
    MustBuild(Option<File>),
}

/// Waits for the lock of a token cache until the lock is free or [`LOCK_TIMEOUT`] has passed, and
/// returns the cache if another process has built it meanwhile. In the second case this process
/// must build the cache without the lock. `path` is the lock file. `open` opens the finished cache,
/// and returns `None` if there is none.
fn wait_for_build_lock(
    path: &Path,
    mut open: impl FnMut() -> Result<Option<TokenCache>, DataError>,
) -> Result<BuildLockOutcome, DataError> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|source| DataError::cache_unusable(path, TokenCacheOperation::Lock, source))?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match file.try_lock() {
            // The previous holder of the lock may have built the cache.
            Ok(()) => {
                return Ok(match open()? {
                    Some(cache) => BuildLockOutcome::AlreadyBuilt(Box::new(cache)),
                    None => BuildLockOutcome::MustBuild(Some(file)),
                });
            }
            Err(TryLockError::Error(_)) => return Ok(BuildLockOutcome::MustBuild(None)),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                return Ok(BuildLockOutcome::MustBuild(None));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_POLL_INTERVAL),
        }
    }
}

/// Deletes temporary files that killed processes left in the cache directory, and the least
/// recently used token caches if there are too many. Ignores errors, because stale files only take
/// disk space.
///
/// `current_stem` is the file name of this process's cache without extension. This cache is never
/// removed. `is_locked` states whether this process holds the lock of this cache.
fn remove_stale_cache_files(directory: &Path, current_stem: &str, is_locked: bool) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut caches = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let Some((stem, suffix)) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.split_once('.'))
        else {
            continue;
        };
        let has_builder = if stem == current_stem { !is_locked } else { !is_cache_unlocked(directory, stem) };
        if suffix.ends_with("tmp") && !has_builder {
            let _ = fs::remove_file(&path);
        }
        if suffix == "tokens" && stem != current_stem {
            caches.push((entry.metadata().and_then(|m| m.modified()).ok(), path));
        }
    }
    caches.sort_by(|a, b| b.cmp(a));
    for (_, path) in caches.into_iter().skip(MAX_KEPT_CACHES - 1) {
        let _ = fs::remove_file(path.with_extension("lock"));
        let _ = fs::remove_file(path);
    }
}

/// Returns whether no process holds the lock file `{stem}.lock` of a token cache in `directory`.
/// Returns false if the cache has no lock file.
fn is_cache_unlocked(directory: &Path, stem: &str) -> bool {
    File::open(directory.join(format!("{stem}.lock"))).is_ok_and(|f| f.try_lock().is_ok())
}

/// Tokenizes all data files into a temporary file in `directory`, and then renames this file to
/// `path`, the final path of the token cache.
fn build_cache(
    inputs: &TokenCacheInputs,
    key: [u8; 32],
    directory: &Path,
    stem: &str,
    path: &Path,
) -> Result<(), DataError> {
    static TEMPORARY_FILE_COUNT: AtomicU32 = AtomicU32::new(0);
    let number = TEMPORARY_FILE_COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = TemporaryFile(directory.join(format!("{stem}.{}-{number}.tmp", std::process::id())));
    let error = |source| DataError::cache_unusable(path, TokenCacheOperation::Write, source);
    let file = File::options().write(true).create(true).truncate(true).open(&temporary.0).map_err(error)?;
    let tokenizer = inputs.tokenizer;
    let writer =
        TokenCacheWriter::new(file, tokenizer.vocab_size(), tokenizer.eod_token(), inputs.has_loss_mask());
    let writer = tokenize_files(inputs, writer.map_err(error)?, path)?;
    writer.finish(key).map_err(error)?;
    fs::rename(&temporary.0, path).map_err(error)?;
    File::open(directory).and_then(|d| d.sync_all()).map_err(error)
}

/// Guard that removes a temporary file when dropped. After a rename there is no file to remove.
struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Tokenizes all data files of `inputs` in order, writes the tokens to the token cache writer
/// `writer`, and returns the writer. `path` is the path of the cache file for error messages. Fails
/// if a file no longer matches its digest.
fn tokenize_files(
    inputs: &TokenCacheInputs,
    writer: TokenCacheWriter,
    path: &Path,
) -> Result<TokenCacheWriter, DataError> {
    let mut documents = DocumentTokenizer::new(inputs.tokenizer, inputs.format, inputs.filter, writer, path);
    for (file, digest) in inputs.files.iter().zip(inputs.digests) {
        let hash = tokenize_file(inputs, &file.path, &mut documents).or_else(|error| {
            // A record before the one that cannot be read may be invalid, too.
            documents.finish_pending_documents()?;
            Err(error)
        })?;
        if hash.as_bytes() != digest {
            return Err(DataError::ChangedWhileRead { path: file.path.clone() });
        }
    }
    documents.finish_pending_documents()?;
    Ok(documents.into_writer())
}

/// Tokenizes the data file at `path` into a token cache, and returns the hash of the file's
/// content.
fn tokenize_file(
    inputs: &TokenCacheInputs,
    path: &Path,
    documents: &mut DocumentTokenizer,
) -> Result<blake3::Hash, DataError> {
    let data = document_reader::open_data_file(path, inputs.format)?;
    if data.format == DataFileFormat::Parquet {
        documents.finish_pending_documents()?;
        documents.tokenize_parquet_file(&data.file, path)?;
        let hash = document_reader::hash_file(&data.file);
        return hash.map_err(|source| DataError::unreadable(path, source));
    }
    let shared_path: Arc<Path> = path.into();
    let mut push = |part, position| documents.push(part, &shared_path, position);
    document_reader::read_documents(data, path, inputs.format, inputs.filter, &mut push)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{content_digests, file_patterns, token_cache::TokenizedDocuments};
    use std::sync::Barrier;

    /// Opens or builds the token cache of all .txt files in `dir`. Returns the cache and the
    /// warnings.
    fn open_cache_of_text_files(
        dir: &Path,
        filter: SplitFilter,
    ) -> Result<(TokenCache, Vec<Diagnostic>), DataError> {
        let files = file_patterns::expand_patterns(&["*.txt".into()], dir)?;
        let cache = dir.join("cache");
        let digests = content_digests::find_or_compute_digests(&files, &cache, SystemTime::UNIX_EPOCH)?;
        let tokenizer = TextTokenizer::new_byte_tokenizer();
        let inputs = TokenCacheInputs {
            files: &files,
            digests: &digests,
            format: RecordReadOptions { field: "text", chat_template: None },
            tokenizer: &tokenizer,
            filter,
        };
        let mut warnings = Vec::new();
        open_or_build_cache(&inputs, &cache, &mut warnings).map(|c| (c, warnings))
    }

    /// Creates a temporary directory with the files a.txt and b.txt.
    fn write_two_text_files() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.txt"), "hello").unwrap();
        fs::write(dir.path().join("b.txt"), "world!").unwrap();
        dir
    }

    /// Lists the files in the cache directory whose extension is `kind`.
    fn list_cache_files(dir: &Path, kind: &str) -> Vec<PathBuf> {
        let paths = fs::read_dir(dir.join("cache")).unwrap().map(|e| e.unwrap().path());
        paths.filter(|p| p.extension().is_some_and(|e| e == kind)).collect()
    }

    #[test]
    fn a_cache_is_built_once_and_reused() {
        let dir = write_two_text_files();
        let (cache, warnings) = open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        assert!(warnings.is_empty());
        assert_eq!((cache.document_count(), cache.header.tokens), (2, 13));
        let path = list_cache_files(dir.path(), "tokens").remove(0);
        let before = fs::metadata(&path).unwrap();
        open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        use std::os::unix::fs::MetadataExt;
        assert_eq!(fs::metadata(&path).unwrap().ino(), before.ino());
        assert!(list_cache_files(dir.path(), "tmp").is_empty());
        assert_eq!(fs::read_to_string(dir.path().join("cache/.gitignore")).unwrap(), "*\n");
    }

    #[test]
    fn the_key_depends_on_contents_and_not_on_names() {
        let dir = write_two_text_files();
        open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        fs::rename(dir.path().join("b.txt"), dir.path().join("c.txt")).unwrap();
        open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        assert_eq!(list_cache_files(dir.path(), "tokens").len(), 1);
        open_cache_of_text_files(dir.path(), SplitFilter::Only(Split::Train, 0.5)).unwrap();
        open_cache_of_text_files(dir.path(), SplitFilter::Only(Split::HeldOut, 0.5)).unwrap();
        open_cache_of_text_files(dir.path(), SplitFilter::Only(Split::HeldOut, 0.25)).unwrap();
        assert_eq!(list_cache_files(dir.path(), "tokens").len(), 4);
        fs::write(dir.path().join("a.txt"), "hullo").unwrap();
        open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        assert_eq!(list_cache_files(dir.path(), "tokens").len(), 5);
    }

    #[test]
    fn a_damaged_cache_is_rebuilt_with_a_warning() {
        let dir = write_two_text_files();
        open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        let path = list_cache_files(dir.path(), "tokens").remove(0);
        let good = fs::read(&path).unwrap();
        for bad in [&good[..10], &[&good[..good.len() - 1], b"x"].concat(), b""] {
            fs::write(&path, bad).unwrap();
            let (cache, warnings) = open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
            assert_eq!(cache.header.tokens, 13);
            let codes: Vec<_> = warnings.iter().map(Diagnostic::code).collect();
            assert_eq!(codes, [codes::TOKEN_CACHE_CORRUPT], "{warnings:?}");
            assert_eq!(fs::read(&path).unwrap(), good);
        }
    }

    #[test]
    fn concurrent_builders_open_equal_caches() {
        let dir = write_two_text_files();
        let barrier = Barrier::new(8);
        thread::scope(|scope| {
            let run = || {
                barrier.wait();
                open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap().0.header
            };
            let headers: Vec<_> = (0..8).map(|_| scope.spawn(run)).collect::<Vec<_>>();
            let headers: Vec<_> = headers.into_iter().map(|h| h.join().unwrap()).collect();
            assert!(headers.iter().all(|h| *h == headers[0]));
        });
        assert!(list_cache_files(dir.path(), "tmp").is_empty());
    }

    #[test]
    fn temporary_files_of_killed_builders_are_removed() {
        let dir = write_two_text_files();
        open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        let path = list_cache_files(dir.path(), "tokens").remove(0);
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
        open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
        assert_eq!(list_cache_files(dir.path(), "tmp"), [dir.path().join("cache/live.7-0.tmp")]);
    }

    #[test]
    fn the_least_recently_used_caches_are_removed() {
        let dir = write_two_text_files();
        for i in 0..MAX_KEPT_CACHES + 4 {
            fs::write(dir.path().join("a.txt"), format!("text {i}")).unwrap();
            open_cache_of_text_files(dir.path(), SplitFilter::All).unwrap();
            let newest = list_cache_files(dir.path(), "tokens")
                .into_iter()
                .max_by_key(|p| fs::metadata(p).unwrap().modified().unwrap())
                .unwrap();
            // The times of last use are one day apart, and long ago.
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 * (i as u64 + 1));
            File::open(newest).unwrap().set_modified(time).unwrap();
        }
        assert_eq!(list_cache_files(dir.path(), "tokens").len(), MAX_KEPT_CACHES);
        assert_eq!(list_cache_files(dir.path(), "lock").len(), MAX_KEPT_CACHES);
    }

    #[test]
    fn an_unusable_cache_directory_is_an_error() {
        let dir = write_two_text_files();
        fs::write(dir.path().join("cache"), "a file").unwrap();
        let error = open_cache_of_text_files(dir.path(), SplitFilter::All).err().unwrap();
        assert!(
            matches!(error, DataError::CacheUnusable { operation: TokenCacheOperation::Read, .. }),
            "{error}"
        );
        let diagnostic = Diagnostic::from(error);
        assert_eq!(diagnostic.code(), codes::TOKEN_CACHE_UNUSABLE);
        assert_eq!(diagnostic.subject(), Some("train.data.cache"));
        assert_eq!(diagnostic.category(), diagnostic::Category::Cluster);
        assert_eq!(diagnostic.help().len(), 1);
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_an_error() {
        let dir = write_two_text_files();
        let files = file_patterns::expand_patterns(&["*.txt".into()], dir.path()).unwrap();
        let digests = [[0; 32]; 2];
        let tokenizer = TextTokenizer::new_byte_tokenizer();
        let inputs = TokenCacheInputs {
            files: &files,
            digests: &digests,
            format: RecordReadOptions { field: "text", chat_template: None },
            tokenizer: &tokenizer,
            filter: SplitFilter::All,
        };
        let error = open_or_build_cache(&inputs, &dir.path().join("cache"), &mut Vec::new()).err().unwrap();
        assert!(matches!(&error, DataError::ChangedWhileRead { path } if path.ends_with("a.txt")), "{error}");
        assert!(list_cache_files(dir.path(), "tmp").is_empty());
        assert!(list_cache_files(dir.path(), "tokens").is_empty());
    }

    #[test]
    fn a_wrong_digest_in_the_index_is_used_once_at_most() {
        let dir = write_two_text_files();
        let files = file_patterns::expand_patterns(&["*.txt".into()], dir.path()).unwrap();
        let cache = dir.path().join("cache");
        let later = SystemTime::now() + Duration::from_secs(60);
        content_digests::tests::write_index_with_wrong_digest(&files[0], &cache);
        let tokenizer = TextTokenizer::new_byte_tokenizer();
        let open = || {
            let digests = content_digests::find_or_compute_digests(&files, &cache, later).unwrap();
            let (files, digests) = (&files[..], &digests[..]);
            let inputs = TokenCacheInputs {
                files,
                digests,
                format: RecordReadOptions { field: "text", chat_template: None },
                tokenizer: &tokenizer,
                filter: SplitFilter::All,
            };
            open_or_build_cache(&inputs, &cache, &mut Vec::new()).map(|c| c.header.tokens)
        };
        assert!(matches!(open(), Err(DataError::ChangedWhileRead { .. })));
        assert_eq!(open().unwrap(), 13);
    }
}
