//! [`TokenCacheLocks`]: makes jobs wait for their token caches, by holding the locks that a process
//! holds while it builds a cache.
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

/// The locks of token caches that a test has removed, which make jobs wait for these caches.
/// Dropping the value releases the locks.
pub(crate) struct TokenCacheLocks {
    _files: Vec<File>,
}

impl TokenCacheLocks {
    /// Removes every token cache in `directory`, and locks it as if another process were building
    /// it. Jobs must have created the caches before.
    #[track_caller]
    pub(crate) fn lock_all(directory: &Path) -> TokenCacheLocks {
        let entries = fs::read_dir(directory).expect("a directory of token caches").flatten();
        let paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        let has_extension =
            |path: &&PathBuf, extension: &str| path.extension().is_some_and(|e| e == extension);
        let lock = |path: &PathBuf| {
            let file = File::open(path).expect("a lock file");
            file.try_lock().expect("a cache that no process builds");
            file
        };
        let files: Vec<File> = paths.iter().filter(|path| has_extension(path, "lock")).map(lock).collect();
        assert!(!files.is_empty(), "no token cache in {}", directory.display());
        let caches = paths.iter().filter(|path| has_extension(path, "tokens"));
        caches.for_each(|path| fs::remove_file(path).expect("a token cache"));
        TokenCacheLocks { _files: files }
    }
}
