//! Checks the language rules of docs/STYLE.md and docs/GLOSSARY.md on every tracked file.
mod source_pieces;

use regex::{Regex, RegexBuilder};
use source_pieces::{SourcePiece, split_source};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The longest allowed line of prose or of a comment, in columns.
const MAX_PROSE_COLUMNS: usize = 100;
/// The longest allowed table row, in columns.
const MAX_TABLE_ROW_COLUMNS: usize = 200;
/// The largest number of violations of the rules that a failing test lists.
const MAX_LISTED_FINDINGS: usize = 60;

// --- the rules ----------------------------------------------------------------------------------

/// A pattern that prose must not contain, and advice on what to write instead.
struct BannedPattern {
    pattern: Regex,
    replacement: String,
}

/// The words and names that docs/STYLE.md and docs/GLOSSARY.md ban.
struct LanguageRules {
    patterns: Vec<BannedPattern>,
    /// Phrases in which a banned pattern may match.
    allowed: Vec<String>,
    /// Names that types, functions, variables and fields must not have.
    identifiers: BTreeSet<String>,
}

impl LanguageRules {
    /// Reads the rules from docs/STYLE.md and docs/GLOSSARY.md.
    fn read_from_docs() -> LanguageRules {
        let style = read_text(&repository_root().join("docs/STYLE.md"));
        let patterns = extract_fenced_lines(&style, "banned").map(|line| {
            let (pattern, replacement) = line.split_once("=>").unwrap_or((line, ""));
            let pattern = RegexBuilder::new(pattern.trim()).case_insensitive(true).build();
            BannedPattern {
                pattern: pattern.unwrap_or_else(|e| panic!("docs/STYLE.md: `{line}`: {e}")),
                replacement: replacement.trim().to_owned(),
            }
        });
        let words = extract_fenced_lines(&style, "identifiers").flat_map(str::split_whitespace);
        let mut identifiers: BTreeSet<String> = words.map(str::to_owned).collect();
        identifiers
            .extend(extract_replaced_identifiers(&read_text(&repository_root().join("docs/GLOSSARY.md"))));
        LanguageRules {
            patterns: patterns.collect(),
            allowed: extract_fenced_lines(&style, "allowed").map(str::to_lowercase).collect(),
            identifiers,
        }
    }

    /// Returns the first banned match in `text` and the advice what to write in its place.
    fn find_violation<'t>(&self, text: &'t str) -> Option<(&'t str, &str)> {
        let cleaned = blank_code_spans(text);
        for banned in &self.patterns {
            for found in banned.pattern.find_iter(&cleaned) {
                let around = extract_surroundings(&cleaned, found.start(), found.end());
                if !self.allowed.iter().any(|phrase| around.contains(phrase.as_str())) {
                    return Some((&text[found.range()], &banned.replacement));
                }
            }
        }
        None
    }
}

/// Returns the non-empty lines of the fenced block that starts with "```NAME".
fn extract_fenced_lines<'t>(text: &'t str, name: &str) -> impl Iterator<Item = &'t str> {
    let fence = format!("```{name}");
    let block = text.lines().skip_while(move |line| *line != fence).skip(1);
    block.take_while(|line| !line.starts_with("```")).map(str::trim).filter(|line| !line.is_empty())
}

/// Returns the words in backticks in the last column of the glossary's tables.
fn extract_replaced_identifiers(glossary: &str) -> impl Iterator<Item = String> {
    let rows = glossary.lines().filter(|line| line.starts_with('|') && !line.starts_with("|---"));
    let last = rows.filter_map(|row| row.trim_end().strip_suffix('|')?.rsplit('|').next());
    let words = last.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    words.map(str::to_owned).collect::<Vec<_>>().into_iter()
}

/// Replaces the content of each pair of backticks by spaces of the same length, because names of
/// code, keys and files are not prose.
fn blank_code_spans(text: &str) -> String {
    let mut inside = false;
    let blank = |c: char| " ".repeat(c.len_utf8());
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '`' {
            inside = !inside;
            out.push(' ');
        } else if inside {
            out.push_str(&blank(c));
        } else {
            out.push(c);
        }
    }
    // an odd number of backticks quotes nothing
    if inside { text.replace('`', " ") } else { out }
}

/// Returns the part of `text` from byte `start` to `end`, with 20 more bytes on both sides, in
/// lower case.
fn extract_surroundings(text: &str, start: usize, end: usize) -> String {
    let mut from = start.saturating_sub(20);
    let mut to = (end + 20).min(text.len());
    while !text.is_char_boundary(from) {
        from -= 1;
    }
    while !text.is_char_boundary(to) {
        to += 1;
    }
    text[from..to].to_lowercase()
}

// --- the tests ----------------------------------------------------------------------------------

#[test]
fn prose_uses_no_banned_word() {
    let rules = LanguageRules::read_from_docs();
    let mut findings = Vec::new();
    for file in list_product_files(&["md"]) {
        // these two list the words
        if ["docs/STYLE.md", "docs/GLOSSARY.md"].contains(&file.as_str()) {
            continue;
        }
        let mut in_code = false;
        for (number, line) in read_text(&repository_root().join(&file)).lines().enumerate() {
            in_code ^= line.trim_start().starts_with("```");
            if !in_code && let Some((word, replacement)) = rules.find_violation(line) {
                findings.push(format!("{file}:{}: `{word}` (write: {replacement})", number + 1));
            }
        }
    }
    assert_no_findings(&findings, "banned words in documents");
}

#[test]
fn sources_use_no_banned_word() {
    let rules = LanguageRules::read_from_docs();
    let mut findings = Vec::new();
    for (file, text) in read_rust_sources() {
        for piece in split_source(&text) {
            let (line, text) = match &piece {
                SourcePiece::Comment { line, text } | SourcePiece::StringLiteral { line, text } => {
                    (line, text)
                }
                SourcePiece::Code { .. } => continue,
            };
            if let Some((word, replacement)) = rules.find_violation(text) {
                findings.push(format!("{file}:{line}: `{word}` (write: {replacement})"));
            }
        }
    }
    for file in list_scripts() {
        for (number, line) in read_text(&repository_root().join(&file)).lines().enumerate() {
            let comment = line.trim_start();
            let prose = ["#", "//", "*", "\"\"\""].iter().any(|start| comment.starts_with(start));
            if prose && let Some((word, replacement)) = rules.find_violation(comment) {
                findings.push(format!("{file}:{}: `{word}` (write: {replacement})", number + 1));
            }
        }
    }
    assert_no_findings(&findings, "banned words in comments and messages");
}

#[test]
fn no_name_is_one_that_the_glossary_replaces() {
    let rules = LanguageRules::read_from_docs();
    let mut findings = Vec::new();
    for (file, text) in read_rust_sources() {
        let stem = Path::new(&file).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if rules.identifiers.contains(&stem) {
            findings.push(format!("{file}: a file of this name"));
        }
        for piece in split_source(&text) {
            let SourcePiece::Code { line, text } = piece else { continue };
            for name in find_defined_names(&text) {
                if rules.identifiers.contains(name) {
                    findings.push(format!("{file}:{line}: `{name}`"));
                }
            }
        }
    }
    assert_no_findings(&findings, "names that docs/GLOSSARY.md or docs/STYLE.md replaces");
}

#[test]
fn no_line_is_too_long() {
    let mut findings = Vec::new();
    for file in list_product_files(&["md"]) {
        let mut in_code = false;
        for (number, line) in read_text(&repository_root().join(&file)).lines().enumerate() {
            in_code ^= line.trim_start().starts_with("```");
            let row = line.starts_with('|');
            let max = if row || in_code || line.starts_with("    ") {
                MAX_TABLE_ROW_COLUMNS
            } else {
                MAX_PROSE_COLUMNS
            };
            let width = line.chars().count();
            let link = line.contains("](") && line.split_whitespace().count() <= 3;
            if width > max && !link {
                findings.push(format!("{file}:{}: {width} columns of at most {max}", number + 1));
            }
        }
    }
    for (file, text) in read_rust_sources() {
        for (number, line) in text.lines().enumerate() {
            let width = line.chars().count();
            if line.trim_start().starts_with("//") && width > MAX_PROSE_COLUMNS && line.contains(' ') {
                let unbreakable = line.split_whitespace().any(|word| word.chars().count() > 60);
                if !unbreakable {
                    findings.push(format!("{file}:{}: {width} columns", number + 1));
                }
            }
        }
    }
    assert_no_findings(&findings, "lines that are too long (`scripts/wrap FILE` wraps them)");
}

/// Checks that no function outside of tests returns a text (`String` or `&str`) as its error.
/// Errors are typed values with a code.
#[test]
fn errors_are_typed() {
    let string_error = build_text_error_pattern();
    let mut findings = Vec::new();
    for (file, text) in read_rust_sources() {
        if file.contains("/tests/") || file.starts_with("tests/") || file.starts_with("fuzz/") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("").replace("->", "");
            if string_error.is_match(&code) {
                findings.push(format!("{file}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert_no_findings(&findings, "errors that are texts");
}

/// Returns a pattern of `Result` types whose error is a text. The type of the value may have
/// parameters up to three levels deep.
fn build_text_error_pattern() -> Regex {
    let mut value = r"[^<>;{}]*".to_owned();
    for _ in 0..3 {
        value = format!(r"(?:[^<>;{{}}]|<{value}>)*");
    }
    Regex::new(&format!(r"\bResult<{value},\s*(String|&'static str|&str)>")).expect("a valid expression")
}

#[test]
fn the_checker_sees_errors_that_are_texts() {
    let pattern = build_text_error_pattern();
    for code in ["Result<u8, String>", "Result<Vec<(u8, Option<&str>)>, &'static str>", "Result<(),String>"] {
        assert!(pattern.is_match(code), "{code}");
    }
    for code in ["Result<BTreeMap<String, String>>", "Result<Map<u8, String>, E>", "Result<String, E>"] {
        assert!(!pattern.is_match(code), "{code}");
    }
}

/// Checks that every code that diagnostic/src/codes/ declares is used outside of that crate.
#[test]
fn every_code_is_used() {
    let declared = Regex::new(r"(?m)^    ([A-Z][A-Z0-9_]+): \w+ = ").expect("a valid expression");
    let constant = Regex::new(r"\b[A-Z][A-Z0-9_]+\b").expect("a valid expression");
    let (declarations, others): (Vec<_>, Vec<_>) = read_rust_sources()
        .filter(|(file, _)| !file.starts_with("tests/"))
        .partition(|(file, _)| file.starts_with("diagnostic/"));
    let used: BTreeSet<&str> =
        others.iter().flat_map(|(_, text)| constant.find_iter(text)).map(|name| name.as_str()).collect();
    let mut findings = Vec::new();
    for (file, text) in declarations.iter().filter(|(file, _)| file.starts_with("diagnostic/src/codes/")) {
        for name in declared.captures_iter(text).map(|c| c.get(1).expect("a group").as_str()) {
            if !used.contains(name) {
                findings.push(format!("{file}: {name} is reported nowhere"));
            }
        }
    }
    assert_no_findings(&findings, "codes without a use");
}

#[test]
fn the_checker_sees_words_names_and_code_spans() {
    let rules = LanguageRules::read_from_docs();
    let word = |text: &str| rules.find_violation(text).map(|(word, _)| word.to_owned());
    assert_eq!(word("the run goes on from step 4").as_deref(), Some("goes on"));
    assert_eq!(word("the shard is stored on node-1"), None);
    assert_eq!(word("the key `beside` is quoted"), None);
    assert_eq!(word("connect: Connection refused (os error 111)"), None);
    let names = "pub(crate) fn of(x: Said) { let mut there = all(1); for own in x { f(|said| 1) } }";
    assert_eq!(find_defined_names(names).collect::<Vec<_>>(), ["of", "x", "there", "own"]);
    let text = "let a = \"// no comment\"; // a comment\nlet c = '\"'; /* b */ r#\"raw\"#";
    let prose: Vec<_> = split_source(text)
        .into_iter()
        .filter_map(|piece| match piece {
            SourcePiece::Comment { text, .. } => Some(format!("comment{text}")),
            SourcePiece::StringLiteral { text, .. } => Some(format!("text {text}")),
            SourcePiece::Code { .. } => None,
        })
        .collect();
    assert_eq!(prose, ["text // no comment", "comment a comment", "comment b ", "text raw"]);
}

/// Panics if there are findings, with their number and the first ones in the message. `what` names
/// the kind of finding in the plural.
fn assert_no_findings(findings: &[String], what: &str) {
    let listed = findings.iter().take(MAX_LISTED_FINDINGS).cloned().collect::<Vec<_>>().join("\n");
    assert!(findings.is_empty(), "{} {what}:\n{listed}", findings.len());
}

/// Returns the names of the types, functions, variables, fields and parameters that a piece of code
/// defines.
fn find_defined_names(code: &str) -> impl Iterator<Item = &str> {
    let keywords = ["fn", "struct", "enum", "trait", "type", "mod", "const", "static", "let", "mut", "for"];
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let starts = code
        .char_indices()
        .filter(move |(at, c)| word(*c) && !code[..*at].chars().next_back().is_some_and(word));
    starts.filter_map(move |(at, _)| {
        let name = code[at..].split(|c| !word(c)).next()?;
        let before = code[..at].trim_end();
        let keyword = before.rsplit(|c| !word(c)).next().unwrap_or("");
        let after = code[at + name.len()..].trim_start();
        let typed = after.starts_with(':') && !after.starts_with("::");
        let opened = before.ends_with(['(', ',', '{']) || keyword == "pub" || before.ends_with("pub(crate)");
        (!keywords.contains(&name) && (keywords.contains(&keyword) || (typed && opened))).then_some(name)
    })
}

// --- files --------------------------------------------------------------------------------------

/// Returns the root directory of the repository.
fn repository_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the directory of this crate is below the root")
}

/// Reads a text file. Panics with the path if the file cannot be read.
fn read_text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Lists the paths, from the repository root, of the files that have one of `extensions`. Leaves
/// out golden data.
fn list_product_files(extensions: &[&str]) -> Vec<String> {
    let is_wanted = |file: &str| {
        let extension = Path::new(file).extension().and_then(|e| e.to_str()).unwrap_or("");
        extensions.contains(&extension) && !file.contains("golden/")
    };
    let mut files: Vec<String> = list_repository_files().into_iter().filter(|f| is_wanted(f)).collect();
    files.sort();
    assert!(!files.is_empty(), "no {extensions:?} files: is this the repository?");
    files
}

/// Lists every file that git tracks or would track. Without git, lists every file outside of
/// `target`, `.git` and `runs`.
fn list_repository_files() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(repository_root())
        .output();
    match listed {
        Ok(output) if output.status.success() && !output.stdout.is_empty() => {
            let names = String::from_utf8_lossy(&output.stdout).into_owned();
            names.lines().filter(|name| repository_root().join(name).is_file()).map(str::to_owned).collect()
        }
        _ => {
            let mut files = Vec::new();
            collect_files(repository_root(), &mut files);
            files
        }
    }
}

/// Adds the paths of all files below a directory to `files`.
fn collect_files(directory: &Path, files: &mut Vec<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path: PathBuf = entry.path();
        let name = entry.file_name();
        if path.is_dir() {
            if !["target", ".git", "runs"].iter().any(|skipped| name == *skipped) {
                collect_files(&path, files);
            }
        } else if let Ok(path) = path.strip_prefix(repository_root()) {
            files.push(path.to_string_lossy().into_owned());
        }
    }
}

/// Reads every Rust source except this test, which contains the banned words. Returns path and text
/// of each.
fn read_rust_sources() -> impl Iterator<Item = (String, String)> {
    let files = list_product_files(&["rs"]).into_iter().filter(|file| !file.starts_with("tests/language"));
    files.map(|file| {
        let text = read_text(&repository_root().join(&file));
        (file, text)
    })
}

/// Lists the files other than Rust and Markdown whose language is checked: scripts, kernels,
/// configurations and the sources of test libraries.
fn list_scripts() -> Vec<String> {
    let mut files = list_product_files(&["py", "sh", "cu", "cuh", "cpp", "hpp", "c", "yaml", "toml"]);
    let in_scripts = |file: &String| file.starts_with("scripts/") && !file.contains('.');
    files.extend(list_repository_files().into_iter().filter(in_scripts));
    files.retain(|file| !file.contains("golden/") && !file.contains("/wrong/"));
    files
}
