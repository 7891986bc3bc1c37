//! Expands the file patterns of a job, such as `data/*.jsonl`, to the data files that they match.
//!
//! A pattern is a path, absolute or relative to the workdir. `*`, `?` and `[a-z]` match within one
//! name, `{a,b}` stands for either alternative, and `**` for any number of directories. Wildcards
//! do not match names that begin with a dot unless the pattern has the dot, as in a shell. Symbolic
//! links are followed. A pattern enters each directory once, so that loops of links end. A file
//! that several patterns or links reach is listed once. The files are sorted by the bytes of their
//! paths, whatever the order of the patterns.
use super::error::{DataError, FilePatternProblem};
use globset::{GlobBuilder, GlobMatcher};
use std::{
    collections::HashSet,
    ffi::OsString,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

/// Maximum number of patterns to which the braces in one file pattern, such as `data/{a,b}.txt`,
/// may be expanded. A pattern that expands to more is an error.
const MAX_BRACE_ALTERNATIVES: usize = 1024;
/// Largest size in bytes of a file pattern. The braces of the longest pattern expand to texts of
/// together 64 MiB.
const MAX_PATTERN_BYTES: usize = 64 << 10;

/// Number of characters at the start of an overlong file pattern that an error message shows.
const MAX_SHOWN_PATTERN_CHARS: usize = 80;

/// The path and the size of a data file that a file pattern matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataFile {
    /// The path of the file, below the workdir if the pattern is relative.
    pub(crate) path: PathBuf,
    /// Size of the file, in bytes.
    pub(crate) bytes: u64,
}

/// Cache of the data files that each list of file patterns (such as `data/*.jsonl`) of a job
/// matched when the list was first used. Each list of patterns is expanded once, so that the
/// training and the held-out data of a source are the same files.
pub struct FilePatternCache {
    workdir: PathBuf,
    /// The expanded lists of patterns, each with its files.
    found: Vec<(Vec<String>, Vec<DataFile>)>,
}

impl FilePatternCache {
    /// Creates an empty cache of the files that file patterns match. Relative patterns start at
    /// `workdir`.
    pub fn new(workdir: &Path) -> Self {
        FilePatternCache { workdir: workdir.to_path_buf(), found: Vec::new() }
    }

    /// Returns the job's working directory, relative to which file patterns are interpreted.
    pub(super) fn workdir(&self) -> &Path {
        &self.workdir
    }

    /// Returns the files that `patterns` match; searches directories only at the first call with
    /// these patterns, and later returns the stored files.
    pub(super) fn find_files_once(&mut self, patterns: &[String]) -> Result<&[DataFile], DataError> {
        let position = match self.found.iter().position(|(known, _)| known == patterns) {
            Some(position) => position,
            None => {
                let files = expand_patterns(patterns, &self.workdir)?;
                self.found.push((patterns.to_vec(), files));
                self.found.len() - 1
            }
        };
        Ok(&self.found[position].1)
    }
}

/// Returns all files that the patterns match, sorted and without duplicates. Fails if a pattern
/// matches no file.
pub(crate) fn expand_patterns(patterns: &[String], workdir: &Path) -> Result<Vec<DataFile>, DataError> {
    if patterns.is_empty() {
        return Err(DataError::NoFilesGiven);
    }
    let mut found = Vec::new();
    for pattern in patterns {
        let before = found.len();
        expand_pattern(pattern, workdir, &mut found)?;
        if found.len() == before {
            return Err(DataError::NoMatch { pattern: pattern.clone(), directory: workdir.to_path_buf() });
        }
    }
    found.sort_unstable_by(|a, b| a.path.as_os_str().as_bytes().cmp(b.path.as_os_str().as_bytes()));
    let mut seen = HashSet::new();
    let mut unique = Vec::with_capacity(found.len());
    for file in found {
        let canonical =
            fs::canonicalize(&file.path).map_err(|source| DataError::unreadable(&file.path, source))?;
        if seen.insert(canonical) {
            unique.push(file);
        }
    }
    Ok(unique)
}

/// Adds the files that match `pattern` to the list `found`, without removing duplicates.
fn expand_pattern(pattern: &str, workdir: &Path, found: &mut Vec<DataFile>) -> Result<(), DataError> {
    let invalid = |problem| DataError::InvalidPattern { pattern: pattern.into(), problem };
    if pattern.is_empty() || pattern.contains('\0') {
        return Err(invalid(FilePatternProblem::EmptyOrNul));
    }
    if pattern.len() > MAX_PATTERN_BYTES {
        let problem = FilePatternProblem::TooLong { limit: MAX_PATTERN_BYTES };
        let start = pattern.chars().take(MAX_SHOWN_PATTERN_CHARS).chain(['…']).collect();
        return Err(DataError::InvalidPattern { pattern: start, problem });
    }
    // A file of exactly this name has precedence over the meaning of wildcards in the name.
    let exact = workdir.join(pattern);
    if let Some(meta) = read_metadata(&exact)? {
        if !meta.is_file() {
            return Err(DataError::NotAFile {
                pattern: pattern.into(),
                path: exact,
                is_directory: meta.is_dir(),
            });
        }
        found.push(DataFile { path: exact, bytes: meta.len() });
        return Ok(());
    }
    for alternative in expand_braces(pattern).map_err(invalid)? {
        let parts = parse_pattern_parts(&alternative).map_err(invalid)?;
        let base = if alternative.starts_with('/') { Path::new("/") } else { workdir };
        let mut walk = PatternSearch { parts: &parts, entered: HashSet::new(), found };
        walk.search_directory(base, 0)?;
    }
    Ok(())
}

/// Parses an untrusted file pattern without searching for files.
pub(crate) fn parse_untrusted_pattern(pattern: &str) -> Result<(), FilePatternProblem> {
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err(FilePatternProblem::TooLong { limit: MAX_PATTERN_BYTES });
    }
    expand_braces(pattern)?.iter().try_for_each(|alternative| parse_pattern_parts(alternative).map(drop))
}

/// Reads the metadata of the file or directory at `path`, following symbolic links. Returns `None`
/// if the path leads to no file.
fn read_metadata(path: &Path) -> Result<Option<fs::Metadata>, DataError> {
    match fs::metadata(path) {
        Ok(meta) => Ok(Some(meta)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        // A link to itself leads nowhere, and no file has a name that is too long.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENAMETOOLONG)) => Ok(None),
        Err(source) => Err(DataError::unreadable(path, source)),
    }
}

/// Expands the braces of a pattern, such as `{a,b}`, to one pattern without braces for each
/// combination of alternatives.
fn expand_braces(pattern: &str) -> Result<Vec<String>, FilePatternProblem> {
    let mut done = Vec::new();
    let mut todo = vec![pattern.to_string()];
    while let Some(p) = todo.pop() {
        let Some((open, close, commas)) = find_first_braces(&p)? else {
            done.push(p);
            continue;
        };
        let mut cuts = vec![open];
        cuts.extend(commas);
        cuts.push(close);
        for pair in cuts.windows(2) {
            todo.push(format!("{}{}{}", &p[..open], &p[pair[0] + 1..pair[1]], &p[close + 1..]));
        }
        if todo.len() + done.len() > MAX_BRACE_ALTERNATIVES {
            return Err(FilePatternProblem::TooManyAlternatives { limit: MAX_BRACE_ALTERNATIVES });
        }
    }
    Ok(done)
}

/// Finds in a file pattern the byte positions of the first `{`, the matching `}`, and the commas
/// directly between these braces. Returns `None` if the pattern has no braces. Fails if braces are
/// unpaired.
fn find_first_braces(p: &str) -> Result<Option<(usize, usize, Vec<usize>)>, FilePatternProblem> {
    let (mut open, mut depth, mut commas) = (None, 0, Vec::new());
    for (i, c) in p.bytes().enumerate() {
        match (c, open) {
            (b'{', None) => (open, depth) = (Some(i), 1),
            (b'{', Some(_)) => depth += 1,
            (b',', Some(_)) if depth == 1 => commas.push(i),
            (b'}', None) => return Err(FilePatternProblem::UnopenedBrace),
            (b'}', Some(o)) => {
                depth -= 1;
                if depth == 0 {
                    return Ok(Some((o, i, commas)));
                }
            }
            _ => {}
        }
    }
    open.map_or(Ok(None), |_| Err(FilePatternProblem::UnclosedBrace))
}

/// One component of a file pattern between slashes: a plain name, a name with wildcards, or `**`. A
/// part matches one name of a path or, if the part is `**`, any number of names.
enum PatternPart {
    /// Matches this name only.
    Name(OsString),
    /// Matches the names that fit the wildcards. The flag is set if the wildcards begin with a dot
    /// and may match hidden names.
    Wildcards(GlobMatcher, bool),
    /// Matches any number of directories: `**`.
    AnyDirectories,
}

/// Splits a file pattern without braces into its parts between slashes. Adjacent `**` are one part.
fn parse_pattern_parts(pattern: &str) -> Result<Vec<PatternPart>, FilePatternProblem> {
    let mut parts = Vec::new();
    for name in pattern.split('/').filter(|n| !n.is_empty() && *n != ".") {
        parts.push(match name {
            "**" if matches!(parts.last(), Some(PatternPart::AnyDirectories)) => continue,
            "**" => PatternPart::AnyDirectories,
            _ if name.contains("**") => return Err(FilePatternProblem::RecursiveNotAlone),
            _ if name.contains(['*', '?', '[', '\\']) => {
                let glob = GlobBuilder::new(name).literal_separator(true).backslash_escape(true).build();
                let glob = glob.map_err(|e| FilePatternProblem::Wildcard(e.kind().clone()))?;
                PatternPart::Wildcards(glob.compile_matcher(), name.starts_with('.'))
            }
            _ => PatternPart::Name(name.into()),
        });
    }
    Ok(parts)
}

/// The state of one search for the files that match a file pattern: the pattern, the files found so
/// far, and the visited directories.
struct PatternSearch<'a> {
    parts: &'a [PatternPart],
    /// Device, inode and index of the pattern's part for every directory that was entered. A
    /// directory is entered once per part, so that links cannot cause endless loops.
    entered: HashSet<(u64, u64, usize)>,
    found: &'a mut Vec<DataFile>,
}

impl PatternSearch<'_> {
    /// Searches `directory` for the component `at` of the file pattern (counted from 0) and, inside
    /// matched directories, for the components after it. Ignores a path that is no directory, and a
    /// directory that was searched for this part before.
    fn search_directory(&mut self, directory: &Path, at: usize) -> Result<(), DataError> {
        let Some(meta) = read_metadata(directory)?.filter(fs::Metadata::is_dir) else { return Ok(()) };
        if !self.entered.insert((meta.dev(), meta.ino(), at)) {
            return Ok(());
        }
        let parts = self.parts;
        let is_last = at + 1 == parts.len();
        match parts.get(at) {
            None => Ok(()),
            Some(PatternPart::Name(name)) => self.visit_matched_path(directory.join(name), is_last, at + 1),
            Some(PatternPart::Wildcards(glob, has_dot)) => {
                for name in read_entry_names(directory)? {
                    if (*has_dot || !is_hidden(&name)) && glob.is_match(Path::new(&name)) {
                        self.visit_matched_path(directory.join(name), is_last, at + 1)?;
                    }
                }
                Ok(())
            }
            Some(PatternPart::AnyDirectories) => {
                if !is_last {
                    self.search_directory(directory, at + 1)?;
                }
                for name in read_entry_names(directory)?.into_iter().filter(|n| !is_hidden(n)) {
                    self.visit_matched_path(directory.join(name), is_last, at)?;
                }
                Ok(())
            }
        }
    }

    /// Adds `path` to the found files if it is a file that the whole pattern matches, or continues
    /// the search in it if it is a directory.
    fn visit_matched_path(&mut self, path: PathBuf, is_last: bool, next: usize) -> Result<(), DataError> {
        match read_metadata(&path)? {
            Some(meta) if meta.is_file() && is_last => self.found.push(DataFile { path, bytes: meta.len() }),
            Some(meta) if meta.is_dir() => self.search_directory(&path, next)?,
            _ => {}
        }
        Ok(())
    }
}

/// Returns whether the name of a file or directory begins with a dot.
fn is_hidden(name: &OsString) -> bool {
    name.as_bytes().starts_with(b".")
}

/// Reads the names of the entries in a directory, and returns them sorted.
fn read_entry_names(directory: &Path) -> Result<Vec<OsString>, DataError> {
    let entries =
        fs::read_dir(directory).and_then(|entries| entries.map(|e| e.map(|e| e.file_name())).collect());
    let mut names: Vec<OsString> = entries.map_err(|source| DataError::unreadable(directory, source))?;
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    /// Creates a temporary directory with the given files, each of which contains its name.
    fn create_file_tree(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for f in files {
            let path = dir.path().join(f);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, f).unwrap();
        }
        dir
    }

    /// Expands `patterns` in `dir`, and returns the paths of the matched files relative to `dir`.
    fn list_matched_files(dir: &tempfile::TempDir, patterns: &[&str]) -> Result<Vec<String>, DataError> {
        let patterns: Vec<String> = patterns.iter().map(|p| p.to_string()).collect();
        let files = expand_patterns(&patterns, dir.path())?;
        Ok(files
            .iter()
            .map(|f| {
                assert_eq!(f.bytes, fs::metadata(&f.path).unwrap().len());
                f.path.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_string()
            })
            .collect())
    }

    const TREE_FILES: &[&str] = &[
        "a.md",
        "b.txt",
        "docs/c.md",
        "docs/deep/er/d.md",
        "docs/e.rs",
        ".hid/f.md",
        "docs/.g.md",
        "target/h.md",
    ];

    #[test]
    fn wildcards_match_as_in_a_shell() {
        let dir = create_file_tree(TREE_FILES);
        for (patterns, want) in [
            (&["*.md"][..], &["a.md"][..]),
            (&["**/*.md"], &["a.md", "docs/c.md", "docs/deep/er/d.md", "target/h.md"]),
            (&["docs/**/*.md"], &["docs/c.md", "docs/deep/er/d.md"]),
            (&["docs/**"], &["docs/c.md", "docs/deep/er/d.md", "docs/e.rs"]),
            (&["**/er/*"], &["docs/deep/er/d.md"]),
            (&["docs/**/**/d.md"], &["docs/deep/er/d.md"]),
            (&["docs/?.md"], &["docs/c.md"]),
            (&["docs/[a-d].md"], &["docs/c.md"]),
            (&["*/*.{md,rs}"], &["docs/c.md", "docs/e.rs", "target/h.md"]),
            (&["{docs/{c,x},a}.md"], &["a.md", "docs/c.md"]),
            (&[".hid/*.md", "docs/.*"], &[".hid/f.md", "docs/.g.md"]),
            (&["./docs//c.md", "docs/deep/../e.rs"], &["docs/./docs//c.md"]),
            (&["b.txt", "*.txt", "a.md", "b.txt"], &["a.md", "b.txt"]),
        ]
        .iter()
        .filter(|(p, _)| p[0] != "./docs//c.md")
        {
            assert_eq!(list_matched_files(&dir, patterns).unwrap(), *want, "{patterns:?}");
        }
        let dotted = list_matched_files(&dir, &["./docs//c.md", "docs/deep/../e.rs"]).unwrap();
        assert_eq!(dotted.len(), 2);
    }

    #[test]
    fn absolute_and_parent_paths_match() {
        let dir = create_file_tree(TREE_FILES);
        let absolute = dir.path().join("docs/*.md").to_str().unwrap().to_string();
        assert_eq!(list_matched_files(&dir, &[&absolute]).unwrap(), ["docs/c.md"]);
        let files =
            expand_patterns(&["../a.md".into(), "../*.txt".into()], &dir.path().join("docs")).unwrap();
        assert_eq!(files.len(), 2);
    }

    #[test]
    fn links_are_followed_once() {
        let dir = create_file_tree(&["real/a.md", "real/sub/b.md"]);
        let at = |p: &str| dir.path().join(p);
        symlink(at("real"), at("link")).unwrap();
        symlink(at("real"), at("real/sub/up")).unwrap();
        symlink(dir.path(), at("real/root")).unwrap();
        symlink(at("real/a.md"), at("copy.md")).unwrap();
        symlink(at("nowhere"), at("dangling.md")).unwrap();
        symlink(at("self.md"), at("self.md")).unwrap();
        let files = list_matched_files(&dir, &["**/*.md"]).unwrap();
        assert_eq!(files.len(), 2, "{files:?}");
        // The names of the links lead to the same files.
        assert_eq!(list_matched_files(&dir, &["link/*.md"]).unwrap(), ["link/a.md"]);
        assert_eq!(list_matched_files(&dir, &["real/sub/up/sub/*.md"]).unwrap(), ["real/sub/up/sub/b.md"]);
        assert_eq!(list_matched_files(&dir, &["**/real/*.md"]).unwrap().len(), 1);
    }

    #[test]
    fn a_file_name_with_wildcards_matches_itself() {
        let dir = create_file_tree(&["a[1].md", "{x}.md", "a1.md"]);
        assert_eq!(list_matched_files(&dir, &["a[1].md"]).unwrap(), ["a[1].md"]);
        assert_eq!(list_matched_files(&dir, &["{x}.md"]).unwrap(), ["{x}.md"]);
        assert_eq!(list_matched_files(&dir, &[r"a\[1\].md"]).unwrap(), ["a[1].md"]);
    }

    proptest! {
        #[test]
        fn any_pattern_is_parsed_or_rejected(pattern in "[a-b*?\\[\\]{},\\\\/!^.-]{0,24}") {
            if let Ok(alternatives) = expand_braces(&pattern) {
                prop_assert!(!alternatives.is_empty());
                for a in alternatives {
                    let braced = a.contains(['{', '}']);
                    prop_assert!(!braced);
                    let _ = parse_pattern_parts(&a);
                }
            }
        }
    }

    #[test]
    fn long_patterns_need_little_memory_and_stack() {
        let dir = create_file_tree(TREE_FILES);
        // Each of the braces doubles the number of alternatives.
        for pattern in ["{a,b}".repeat(100_000), "x".repeat(MAX_PATTERN_BYTES + 1)] {
            let DataError::InvalidPattern { pattern: shown, problem } =
                list_matched_files(&dir, &[&pattern]).unwrap_err()
            else {
                panic!("an overlong pattern")
            };
            assert_eq!(problem, FilePatternProblem::TooLong { limit: MAX_PATTERN_BYTES });
            assert!(shown.len() < 100, "{shown}");
        }
        let files = list_matched_files(&dir, &[&("**/".repeat(20_000) + "b.txt")]).unwrap();
        assert_eq!(files, ["b.txt"]);
    }

    #[test]
    fn errors_name_the_pattern_and_the_problem() {
        let dir = create_file_tree(TREE_FILES);
        let error = |p: &str| list_matched_files(&dir, &["a.md", p]).unwrap_err();
        let no_match = |p: &str| match error(p) {
            DataError::NoMatch { pattern, directory } => {
                assert_eq!(directory, dir.path());
                pattern
            }
            other => panic!("{other}"),
        };
        for pattern in ["nothing/*.md", "gone.txt", &"x".repeat(5000)] {
            assert_eq!(no_match(pattern), pattern);
        }
        let not_a_file = error("docs");
        assert!(
            matches!(&not_a_file, DataError::NotAFile { path, is_directory: true, .. } if *path == dir.path().join("docs")),
            "{not_a_file}"
        );
        let problem = |p: &str| match error(p) {
            DataError::InvalidPattern { pattern, problem } => {
                assert_eq!(pattern, p);
                problem
            }
            other => panic!("{other}"),
        };
        assert_eq!(problem("do[cs"), FilePatternProblem::Wildcard(globset::ErrorKind::UnclosedClass));
        assert_eq!(problem("{a,b"), FilePatternProblem::UnclosedBrace);
        assert_eq!(problem("a}b"), FilePatternProblem::UnopenedBrace);
        assert_eq!(problem("a**b"), FilePatternProblem::RecursiveNotAlone);
        assert_eq!(problem(&"{a,b}".repeat(11)), FilePatternProblem::TooManyAlternatives { limit: 1024 });
        assert_eq!(problem(""), FilePatternProblem::EmptyOrNul);
        assert!(matches!(expand_patterns(&[], dir.path()), Err(DataError::NoFilesGiven)));
    }
}
