//! Patterns to files.
//!
//! A pattern is a path relative to the workdir (or absolute) in which `*`, `?` and `[a-z]` match within one name, `{a,b}` is either, and `**`
//! is any number of directories. As in a shell, wildcards never match a name that begins with a dot; write the dot. Symbolic links are
//! followed; a directory is entered once per pattern however many links lead to it, so loops end. A file that several patterns or links reach counts once.
//! The files are in the order of their paths' bytes, whatever order they were named in.
use super::error::DataError;
use globset::{GlobBuilder, GlobMatcher};
use std::{
    collections::HashSet,
    ffi::OsString,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

/// Most patterns that one pattern's braces may stand for.
const MAX_ALTERNATIVES: usize = 1024;

/// A regular file that a pattern matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
}

/// All files that the patterns match, sorted. A pattern that matches nothing is an error.
pub(crate) fn expand(patterns: &[String], workdir: &Path) -> Result<Vec<DataFile>, DataError> {
    if patterns.is_empty() {
        return Err(DataError::NoPatterns);
    }
    let mut found = Vec::new();
    for pattern in patterns {
        let before = found.len();
        expand_one(pattern, workdir, &mut found)?;
        if found.len() == before {
            return Err(DataError::NoMatch { pattern: pattern.clone(), dir: workdir.to_path_buf() });
        }
    }
    found.sort_by(|a, b| a.path.as_os_str().as_bytes().cmp(b.path.as_os_str().as_bytes()));
    let mut seen = HashSet::new();
    let mut unique = Vec::with_capacity(found.len());
    for file in found {
        let real = fs::canonicalize(&file.path).map_err(|source| read_error(&file.path, source))?;
        if seen.insert(real) {
            unique.push(file);
        }
    }
    Ok(unique)
}

fn read_error(path: &Path, source: io::Error) -> DataError {
    DataError::Read { path: path.to_path_buf(), source }
}

fn expand_one(pattern: &str, workdir: &Path, found: &mut Vec<DataFile>) -> Result<(), DataError> {
    let bad = |why: &str| DataError::BadPattern { pattern: pattern.into(), why: why.into() };
    if pattern.is_empty() || pattern.contains('\0') {
        return Err(bad("it is empty or holds a NUL byte"));
    }
    // a file of exactly this name, wildcards or not
    let exact = workdir.join(pattern);
    if let Some(meta) = metadata(&exact)? {
        if !meta.is_file() {
            return Err(DataError::NotAFile {
                pattern: pattern.into(),
                path: exact,
                directory: meta.is_dir(),
            });
        }
        found.push(DataFile { path: exact, bytes: meta.len() });
        return Ok(());
    }
    for alternative in braces(pattern).map_err(|why| bad(&why))? {
        let parts = parse(&alternative).map_err(|why| bad(&why))?;
        let base = if alternative.starts_with('/') { Path::new("/") } else { workdir };
        let mut walk = Walk { parts: &parts, entered: HashSet::new(), found };
        walk.enter(base, 0)?;
    }
    Ok(())
}

/// What a path leads to, links followed; `None` when there is nothing.
fn metadata(path: &Path) -> Result<Option<fs::Metadata>, DataError> {
    match fs::metadata(path) {
        Ok(meta) => Ok(Some(meta)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        // a link to itself leads nowhere; a name longer than any file's is no file's
        Err(e) if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENAMETOOLONG)) => Ok(None),
        Err(source) => Err(read_error(path, source)),
    }
}

/// The patterns without braces that a pattern stands for.
fn braces(pattern: &str) -> Result<Vec<String>, String> {
    let mut done = Vec::new();
    let mut todo = vec![pattern.to_string()];
    while let Some(p) = todo.pop() {
        let Some((open, close, commas)) = first_braces(&p)? else {
            done.push(p);
            continue;
        };
        let mut cuts = vec![open];
        cuts.extend(commas);
        cuts.push(close);
        for pair in cuts.windows(2) {
            todo.push(format!("{}{}{}", &p[..open], &p[pair[0] + 1..pair[1]], &p[close + 1..]));
        }
        if todo.len() + done.len() > MAX_ALTERNATIVES {
            return Err(format!("its braces stand for more than {MAX_ALTERNATIVES} patterns"));
        }
    }
    Ok(done)
}

/// Byte positions of the first `{`, its `}`, and the commas directly between them.
fn first_braces(p: &str) -> Result<Option<(usize, usize, Vec<usize>)>, String> {
    let (mut open, mut depth, mut commas) = (None, 0, Vec::new());
    for (i, c) in p.bytes().enumerate() {
        match (c, open) {
            (b'{', None) => (open, depth) = (Some(i), 1),
            (b'{', Some(_)) => depth += 1,
            (b',', Some(_)) if depth == 1 => commas.push(i),
            (b'}', None) => return Err("`}` without `{`".into()),
            (b'}', Some(o)) => {
                depth -= 1;
                if depth == 0 {
                    return Ok(Some((o, i, commas)));
                }
            }
            _ => {}
        }
    }
    open.map_or(Ok(None), |_| Err("`{` without `}`".into()))
}

/// One name of a pattern.
enum Part {
    Name(OsString),
    /// Wildcards, and whether they begin with a dot.
    Wild(GlobMatcher, bool),
    /// `**`
    AnyDirectories,
}

fn parse(pattern: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    for name in pattern.split('/').filter(|n| !n.is_empty() && *n != ".") {
        parts.push(match name {
            "**" => Part::AnyDirectories,
            _ if name.contains("**") => return Err("`**` stands alone between slashes".into()),
            _ if name.contains(['*', '?', '[', '\\']) => {
                let glob = GlobBuilder::new(name).literal_separator(true).backslash_escape(true).build();
                Part::Wild(glob.map_err(|e| e.kind().to_string())?.compile_matcher(), name.starts_with('.'))
            }
            _ => Part::Name(name.into()),
        });
    }
    Ok(parts)
}

/// Walks one pattern.
struct Walk<'a> {
    parts: &'a [Part],
    /// (device, inode, part) that were entered: each directory once per part, so links can't lead in circles.
    entered: HashSet<(u64, u64, usize)>,
    found: &'a mut Vec<DataFile>,
}

impl Walk<'_> {
    /// Matches `parts[at..]` below `dir`.
    fn enter(&mut self, dir: &Path, at: usize) -> Result<(), DataError> {
        let Some(meta) = metadata(dir)?.filter(fs::Metadata::is_dir) else { return Ok(()) };
        if !self.entered.insert((meta.dev(), meta.ino(), at)) {
            return Ok(());
        }
        let parts = self.parts;
        let last = at + 1 == parts.len();
        match parts.get(at) {
            None => Ok(()),
            Some(Part::Name(name)) => self.take(dir.join(name), last, at + 1),
            Some(Part::Wild(glob, dotted)) => {
                for name in names(dir)? {
                    if (*dotted || !hidden(&name)) && glob.is_match(Path::new(&name)) {
                        self.take(dir.join(name), last, at + 1)?;
                    }
                }
                Ok(())
            }
            Some(Part::AnyDirectories) => {
                if !last {
                    self.enter(dir, at + 1)?;
                }
                for name in names(dir)?.into_iter().filter(|n| !hidden(n)) {
                    self.take(dir.join(name), last, at)?;
                }
                Ok(())
            }
        }
    }

    /// `path` matched: a file counts if it was the pattern's last part, a directory is entered.
    fn take(&mut self, path: PathBuf, last: bool, next: usize) -> Result<(), DataError> {
        match metadata(&path)? {
            Some(meta) if meta.is_file() && last => self.found.push(DataFile { path, bytes: meta.len() }),
            Some(meta) if meta.is_dir() => self.enter(&path, next)?,
            _ => {}
        }
        Ok(())
    }
}

fn hidden(name: &OsString) -> bool {
    name.as_bytes().starts_with(b".")
}

/// The names in a directory, sorted.
fn names(dir: &Path) -> Result<Vec<OsString>, DataError> {
    let entries = fs::read_dir(dir).and_then(|entries| entries.map(|e| e.map(|e| e.file_name())).collect());
    let mut names: Vec<OsString> = entries.map_err(|source| read_error(dir, source))?;
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for f in files {
            let path = dir.path().join(f);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, f).unwrap();
        }
        dir
    }

    fn matched(dir: &tempfile::TempDir, patterns: &[&str]) -> Result<Vec<String>, DataError> {
        let patterns: Vec<String> = patterns.iter().map(|p| p.to_string()).collect();
        let files = expand(&patterns, dir.path())?;
        Ok(files
            .iter()
            .map(|f| {
                assert_eq!(f.bytes, fs::metadata(&f.path).unwrap().len());
                f.path.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_string()
            })
            .collect())
    }

    const FILES: &[&str] = &[
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
    fn wildcards() {
        let dir = tree(FILES);
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
            assert_eq!(matched(&dir, patterns).unwrap(), *want, "{patterns:?}");
        }
        let dotted = matched(&dir, &["./docs//c.md", "docs/deep/../e.rs"]).unwrap();
        assert_eq!(dotted.len(), 2);
    }

    #[test]
    fn absolute_and_outside() {
        let dir = tree(FILES);
        let absolute = dir.path().join("docs/*.md").to_str().unwrap().to_string();
        assert_eq!(matched(&dir, &[&absolute]).unwrap(), ["docs/c.md"]);
        let files = expand(&["../a.md".into(), "../*.txt".into()], &dir.path().join("docs")).unwrap();
        assert_eq!(files.len(), 2);
    }

    #[test]
    fn links_are_followed_once() {
        let dir = tree(&["real/a.md", "real/sub/b.md"]);
        let at = |p: &str| dir.path().join(p);
        symlink(at("real"), at("link")).unwrap();
        symlink(at("real"), at("real/sub/up")).unwrap();
        symlink(dir.path(), at("real/root")).unwrap();
        symlink(at("real/a.md"), at("copy.md")).unwrap();
        symlink(at("nowhere"), at("dangling.md")).unwrap();
        symlink(at("self.md"), at("self.md")).unwrap();
        let all = matched(&dir, &["**/*.md"]).unwrap();
        assert_eq!(all.len(), 2, "{all:?}");
        // the links' own names also reach it
        assert_eq!(matched(&dir, &["link/*.md"]).unwrap(), ["link/a.md"]);
        assert_eq!(matched(&dir, &["real/sub/up/sub/*.md"]).unwrap(), ["real/sub/up/sub/b.md"]);
        assert_eq!(matched(&dir, &["**/real/*.md"]).unwrap().len(), 1);
    }

    #[test]
    fn wildcards_in_a_files_own_name() {
        let dir = tree(&["a[1].md", "{x}.md", "a1.md"]);
        assert_eq!(matched(&dir, &["a[1].md"]).unwrap(), ["a[1].md"]);
        assert_eq!(matched(&dir, &["{x}.md"]).unwrap(), ["{x}.md"]);
        assert_eq!(matched(&dir, &[r"a\[1\].md"]).unwrap(), ["a[1].md"]);
    }

    proptest! {
        #[test]
        fn any_pattern_is_read_or_refused(pattern in "[a-b*?\\[\\]{},\\\\/!^.-]{0,24}") {
            if let Ok(alternatives) = braces(&pattern) {
                prop_assert!(!alternatives.is_empty());
                for a in alternatives {
                    let braced = a.contains(['{', '}']);
                    prop_assert!(!braced);
                    let _ = parse(&a);
                }
            }
        }
    }

    #[test]
    fn errors_name_the_pattern() {
        let dir = tree(FILES);
        let said = |p: &str| {
            let e = matched(&dir, &["a.md", p]).unwrap_err();
            assert!(e.hint().is_some(), "{e}");
            e.to_string()
        };
        let root = dir.path().display().to_string();
        assert_eq!(said("nothing/*.md"), format!("`nothing/*.md` matches no file in {root}"));
        assert_eq!(said("gone.txt"), format!("`gone.txt` matches no file in {root}"));
        assert_eq!(said("docs"), format!("{root}/docs is a directory, not a file"));
        assert!(said("do[cs").contains("`do[cs` is not a valid pattern"));
        assert!(said("{a,b").contains("`{` without `}`"));
        assert!(said("a**b").contains("stands alone"));
        assert!(said(&"{a,b}".repeat(11)).contains("more than 1024"));
        assert!(said("").contains("empty"));
        assert!(said(&"x".repeat(5000)).contains("matches no file"));
        assert!(matches!(expand(&[], dir.path()), Err(DataError::NoPatterns)));
    }
}
