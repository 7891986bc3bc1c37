//! [`SshConfigLines`]: reads, from SSH configuration files (ssh_config(5)), the settings that
//! launch needs to connect to a host.
//!
//! `Match` and the canonicalization of host names are not evaluated here. The resolver runs `ssh
//! -G` if a file contains them.
use crate::private_files::read_without_blocking;
use diagnostic::{Diagnostic, Location, codes::ssh};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// The deepest permitted nesting of `Include` lines in SSH configuration files. A deeper `Include`
/// is an error.
const MAX_INCLUDE_DEPTH: u32 = 8;
/// The largest size of an SSH configuration file that is read, in bytes. A larger file is an error.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The largest permitted total number of lines in the SSH configuration files that apply to a user,
/// including comments and the lines of included files. More lines are an error.
const MAX_LINES: usize = 50_000;
/// The largest total size of the SSH configuration files that apply to a user, in bytes. A file
/// counts each time it is included. Larger files are an error.
const MAX_TOTAL_BYTES: u64 = 16 << 20;

/// The parsed lines of the user's SSH configuration files, in the order in which they apply. The
/// lines of an included file replace the `Include` line.
#[derive(Debug, Default)]
pub(super) struct SshConfigLines {
    lines: Vec<SshConfigLine>,
    /// The number of lines that were read, including comments and `Include` lines.
    read_lines: usize,
    /// The size in bytes of the files that were read. A file counts each time it is included.
    read_bytes: u64,
    /// The first keyword that only OpenSSH's client evaluates; `None` if there is none.
    pub(super) unsupported: Option<UnsupportedSshKeyword>,
}

/// A keyword in an SSH configuration file that only OpenSSH's client can evaluate, with its file
/// and line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnsupportedSshKeyword {
    pub(super) keyword: String,
    pub(super) file: String,
    pub(super) line: usize,
}

/// A line of an SSH configuration file after parsing (a `Host` line or a setting), or a mark for
/// the end of an included or main file.
#[derive(Debug)]
enum SshConfigLine {
    /// A `Host` line. The lines up to the next `Host` apply to hosts that match `patterns`. `depth`
    /// is the nesting depth of `Include`.
    Host { patterns: Vec<String>, depth: u32 },
    /// The end of a file at this nesting depth. After an included file, the `Host` line before the
    /// `Include` line applies again.
    EndOfFile { depth: u32 },
    /// A setting: a keyword in lower case, and its values.
    Set { keyword: String, values: Vec<String> },
}

/// The settings that the SSH configuration contains for one host, such as its address, user and
/// keys. The first value of a keyword applies, except for keys, which add up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SshHostSettings {
    pub(super) hostname: Option<String>,
    pub(super) user: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) host_key_alias: Option<String>,
    pub(super) proxy_jump: Option<String>,
    pub(super) proxy_command: Option<String>,
    pub(super) identity_files: Vec<String>,
    pub(super) identities_only: Option<bool>,
    pub(super) identity_agent: Option<String>,
    pub(super) user_known_hosts: Option<Vec<String>>,
    pub(super) global_known_hosts: Option<Vec<String>>,
    pub(super) strict_host_key_checking: Option<String>,
    /// The first value of each other keyword, by the keyword in lower case.
    pub(super) other: BTreeMap<String, String>,
}

/// A syntax error in an SSH configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum ConfigSyntaxError {
    #[error("a quote is not closed")]
    QuoteNotClosed,
    #[error("the keyword has no value")]
    ValueMissing,
    #[error("`Include` is nested more than {MAX_INCLUDE_DEPTH} deep")]
    IncludeTooDeep,
    #[error("the SSH configuration has more than {MAX_LINES} lines")]
    TooManyLines,
    #[error("the SSH configuration has more than {} MiB", MAX_TOTAL_BYTES >> 20)]
    TooLong,
}

impl ConfigSyntaxError {
    /// Converts the syntax error into a diagnostic that names the file and the line. `line` counts
    /// from 1, and `text` is the line's content.
    fn into_diagnostic(self, file: &Path, line: usize, text: &str) -> Diagnostic {
        let file = file.display().to_string();
        Diagnostic::error(ssh::SSH_CONFIG_INVALID, format!("the SSH configuration is not valid: {self}"))
            .with_subject(file.clone())
            .with_location(Location::Line {
                file,
                line: u32::try_from(line).unwrap_or(u32::MAX),
                column: 1,
                width: u32::try_from(text.chars().count()).unwrap_or(u32::MAX).max(1),
                text: text.to_owned(),
            })
    }
}

impl SshConfigLines {
    /// Reads and parses the SSH configuration files of the user and the system, one after the
    /// other. A file that does not exist is an error only if `required` is set. `home` is the
    /// user's home directory.
    pub(super) fn read_files(
        files: &[PathBuf],
        required: bool,
        home: &Path,
    ) -> diagnostic::Result<SshConfigLines> {
        let mut config = SshConfigLines::default();
        for file in files {
            config.read_file(file, required, home, 0)?;
            config.lines.push(SshConfigLine::EndOfFile { depth: 0 });
        }
        Ok(config)
    }

    /// Reads an SSH configuration file and the files that it includes, and appends all lines to the
    /// lines read before. A file that does not exist is an error only if `required` is set. `home`
    /// is the user's home directory, and `depth` the nesting depth of `Include`. Fails if the file
    /// cannot be read or a line is not valid.
    fn read_file(&mut self, file: &Path, required: bool, home: &Path, depth: u32) -> diagnostic::Result<()> {
        let name = file.display().to_string();
        let text = match read_config_text(file) {
            Ok(text) => text,
            Err(e) if !required && e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => {
                let message = format!("cannot read the SSH configuration {name}");
                return Err(Diagnostic::error(ssh::SSH_CONFIG_UNREADABLE, message)
                    .with_subject(name)
                    .with_cause(&error));
            }
        };
        self.read_bytes += text.len() as u64;
        if self.read_bytes > MAX_TOTAL_BYTES {
            return Err(ConfigSyntaxError::TooLong.into_diagnostic(file, 1, ""));
        }
        for (index, line) in text.lines().enumerate() {
            let invalid = |error: ConfigSyntaxError| error.into_diagnostic(file, index + 1, line);
            self.read_lines += 1;
            if self.read_lines > MAX_LINES {
                return Err(invalid(ConfigSyntaxError::TooManyLines));
            }
            let Some((keyword, values)) = parse_line(line).map_err(invalid)? else { continue };
            match keyword.as_str() {
                "host" => self.lines.push(SshConfigLine::Host { patterns: values, depth }),
                "include" if depth >= MAX_INCLUDE_DEPTH => {
                    return Err(invalid(ConfigSyntaxError::IncludeTooDeep));
                }
                "include" => self.include_files(&values, file, home, depth)?,
                "match" | "canonicalizehostname" | "canonicaldomains" => {
                    let file = name.clone();
                    self.unsupported.get_or_insert(UnsupportedSshKeyword { keyword, file, line: index + 1 });
                }
                _ if values.is_empty() => return Err(invalid(ConfigSyntaxError::ValueMissing)),
                _ => self.lines.push(SshConfigLine::Set { keyword, values }),
            }
        }
        Ok(())
    }

    /// Reads all files that the patterns of an `Include` line in the file `from` match, and appends
    /// the lines of these files to the configuration. Relative patterns refer to `/etc/ssh` for
    /// files there, and otherwise to `~/.ssh`.
    fn include_files(
        &mut self,
        patterns: &[String],
        from: &Path,
        home: &Path,
        depth: u32,
    ) -> diagnostic::Result<()> {
        for pattern in patterns {
            let is_system = from.starts_with("/etc/ssh");
            let base = if is_system { PathBuf::from("/etc/ssh") } else { home.join(".ssh") };
            let pattern = base.join(expand_tilde(pattern, home));
            for file in list_matching_files(&pattern) {
                self.read_file(&file, false, home, depth + 1)?;
                self.lines.push(SshConfigLine::EndOfFile { depth: depth + 1 });
            }
        }
        Ok(())
    }

    /// Returns the settings that the SSH configuration files contain for the host `host`. `Host`
    /// patterns are matched with `host`, the host's name in the job.
    pub(super) fn find_settings(&self, host: &str) -> SshHostSettings {
        let mut settings = SshHostSettings::default();
        // Whether the current `Host` matches, for each level of `Include`.
        let mut matches = vec![true];
        for line in &self.lines {
            match line {
                SshConfigLine::Host { patterns, depth } => {
                    let host_matches = matches_patterns(patterns, host);
                    matches.resize(*depth as usize + 1, *matches.last().unwrap_or(&true));
                    if let Some(last) = matches.last_mut() {
                        *last = host_matches;
                    }
                }
                SshConfigLine::EndOfFile { depth } => matches.truncate((*depth as usize).max(1)),
                SshConfigLine::Set { keyword, values } if matches.iter().all(|m| *m) => {
                    settings.apply_setting_line(keyword, values);
                }
                SshConfigLine::Set { .. } => {}
            }
            if matches!(line, SshConfigLine::EndOfFile { depth: 0 }) {
                matches = vec![true];
            }
        }
        settings
    }
}

impl SshHostSettings {
    /// Parses the settings of a host from the output of `ssh -G HOST`, with which OpenSSH prints
    /// them. Ignores lines that are not valid.
    pub(super) fn from_ssh_g(text: &str) -> SshHostSettings {
        let mut settings = SshHostSettings::default();
        for (keyword, mut values) in text.lines().filter_map(|line| parse_line(line).ok().flatten()) {
            // `ssh -G` prints no quotes, so the whole rest of the line is one path.
            if keyword == "identityfile" {
                values = vec![values.join(" ")];
            }
            settings.apply_setting_line(&keyword, &values);
        }
        settings
    }

    /// Stores the value of an SSH configuration line, such as `Port 2222`, in this collection of a
    /// host's settings unless an earlier line has set it. Ignores keywords that an earlier line has
    /// set, except for `IdentityFile`, whose values add up. Of `ProxyJump` and `ProxyCommand`, only
    /// the first one applies.
    fn apply_setting_line(&mut self, keyword: &str, values: &[String]) {
        let Some(first) = values.first() else { return };
        let set_once = |setting: &mut Option<String>| _ = setting.get_or_insert_with(|| first.clone());
        let is_set = |value: &str| !value.eq_ignore_ascii_case("none");
        match keyword {
            "hostname" => set_once(&mut self.hostname),
            "user" => set_once(&mut self.user),
            "port" => self.port = self.port.or_else(|| first.parse().ok()),
            "hostkeyalias" => set_once(&mut self.host_key_alias),
            "proxyjump" if self.proxy_command.is_none() => set_once(&mut self.proxy_jump),
            "proxycommand" if self.proxy_jump.is_none() && self.proxy_command.is_none() => {
                self.proxy_command = Some(values.join(" "));
            }
            "identityfile" if is_set(first) => self.identity_files.push(first.clone()),
            "identitiesonly" => self.identities_only = self.identities_only.or(Some(first == "yes")),
            "identityagent" => set_once(&mut self.identity_agent),
            "userknownhostsfile" => _ = self.user_known_hosts.get_or_insert_with(|| values.to_vec()),
            "globalknownhostsfile" => _ = self.global_known_hosts.get_or_insert_with(|| values.to_vec()),
            "stricthostkeychecking" => set_once(&mut self.strict_host_key_checking),
            _ => _ = self.other.entry(keyword.to_owned()).or_insert_with(|| values.join(" ")),
        }
    }
}

/// Reads an SSH configuration file as text. Fails if the file is longer than [`MAX_FILE_BYTES`] or
/// is not UTF-8.
fn read_config_text(file: &Path) -> io::Result<String> {
    let bytes = read_without_blocking(file, MAX_FILE_BYTES + 1)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other("the file is larger than 1 MiB"));
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Splits a line of an SSH configuration file into its keyword, in lower case, and its values.
/// Words in double quotes form one value. Returns `None` for empty lines and comments. Fails if a
/// quote is not closed.
fn parse_line(line: &str) -> Result<Option<(String, Vec<String>)>, ConfigSyntaxError> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let end = line.find(|c: char| c.is_whitespace() || c == '=').unwrap_or(line.len());
    let keyword = line[..end].to_ascii_lowercase();
    let rest = line[end..].trim_start();
    let rest = rest.strip_prefix('=').unwrap_or(rest);
    let (mut values, mut word, mut quoted) = (Vec::new(), None::<String>, false);
    for c in rest.chars() {
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '#' if !quoted && word.is_none() => break,
            c if c.is_whitespace() && !quoted => values.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    values.extend(word);
    if quoted { Err(ConfigSyntaxError::QuoteNotClosed) } else { Ok(Some((keyword, values))) }
}

/// Returns whether at least one of the patterns of a `Host` line matches the text and no negated
/// pattern (`!PATTERN`) does.
pub(super) fn matches_patterns(patterns: &[String], text: &str) -> bool {
    let mut matched = false;
    for pattern in patterns {
        match pattern.strip_prefix('!') {
            Some(negated) if matches_wildcard(negated, text) => return false,
            None if matches_wildcard(pattern, text) => matched = true,
            _ => {}
        }
    }
    matched
}

/// Returns whether a pattern with `*` and `?` matches the whole text. The comparison is
/// case-sensitive, as in `Host` lines.
pub(super) fn matches_wildcard(pattern: &str, text: &str) -> bool {
    let characters = |s: &str| s.chars().collect::<Vec<_>>();
    let (pattern, text) = (characters(pattern), characters(text));
    // The positions in pattern and text, and the positions at which the last `*` was tried.
    let (mut pattern_at, mut text_at, mut star) = (0, 0, None);
    while text_at < text.len() {
        match pattern.get(pattern_at) {
            Some('*') => {
                star = Some((pattern_at, text_at));
                pattern_at += 1;
            }
            Some(c) if *c == '?' || *c == text[text_at] => {
                pattern_at += 1;
                text_at += 1;
            }
            _ => match &mut star {
                Some((at, from)) => {
                    *from += 1;
                    (pattern_at, text_at) = (*at + 1, *from);
                }
                None => return false,
            },
        }
    }
    pattern[pattern_at..].iter().all(|c| *c == '*')
}

/// Replaces `~` at the start of the paths `~` and `~/…` by the directory `home`.
pub(super) fn expand_tilde(path: &str, home: &Path) -> PathBuf {
    match path.strip_prefix("~/") {
        Some(rest) => home.join(rest),
        None if path == "~" => home.to_owned(),
        None => PathBuf::from(path),
    }
}

/// Lists the existing files that match the path `pattern`, whose last component may contain the
/// wildcards `*` and `?`, sorted by name. Returns a path without wildcards unchanged, even if the
/// file does not exist.
fn list_matching_files(pattern: &Path) -> Vec<PathBuf> {
    let Some(name) = pattern.file_name().and_then(|n| n.to_str()) else { return Vec::new() };
    let Some(directory) = pattern.parent().filter(|_| name.contains(['*', '?'])) else {
        return vec![pattern.to_owned()];
    };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let matches =
        |path: &PathBuf| path.file_name().and_then(|n| n.to_str()).is_some_and(|n| matches_wildcard(name, n));
    let mut files: Vec<PathBuf> = entries.map(|e| e.path()).filter(matches).collect();
    files.sort_unstable();
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    /// Writes `files` (names and texts) to `.ssh` in a temporary home directory, and reads the file
    /// `.ssh/config`. Also returns the temporary directory.
    fn read_config(files: &[(&str, &str)]) -> (tempfile::TempDir, SshConfigLines) {
        let home = tempfile::tempdir().expect("a directory");
        fs::create_dir(home.path().join(".ssh")).expect("a directory");
        for (name, text) in files {
            fs::write(home.path().join(".ssh").join(name), text).expect("a file");
        }
        let config = SshConfigLines::read_files(&[home.path().join(".ssh/config")], true, home.path())
            .expect("a configuration");
        (home, config)
    }

    /// An SSH configuration with most forms of lines that launch evaluates.
    const SAMPLE: &str = "# comment\nUser = first\nHost gpu-* !gpu-9\n  HostName \"%h.cluster\"  # there\n  Port=2222\n\
        IdentityFile ~/.ssh/a\n\tIdentityFile \"/b c\"\nHost gpu-?\nPort 1\nUser second\nProxyJump bastion\n\
        Host *\nidentityfile /last\nStrictHostKeyChecking accept-new\nUserKnownHostsFile /k1 /k2\n";

    #[test]
    fn settings_equal_those_of_openssh() {
        let (home, config) = read_config(&[("config", SAMPLE)]);
        for host in ["gpu-1", "gpu-9", "gpu-10", "other", "GPU-1"] {
            let output = Command::new("ssh")
                .arg("-F")
                .arg(home.path().join(".ssh/config"))
                .args(["-G", host])
                .output();
            let Ok(output) = output else { return };
            let expected = SshHostSettings::from_ssh_g(&String::from_utf8_lossy(&output.stdout));
            let settings = config.find_settings(host);
            let hostname = settings
                .hostname
                .clone()
                .map_or(host.to_lowercase(), |h| h.replace("%h", &host.to_lowercase()));
            assert_eq!(Some(hostname), expected.hostname, "{host}");
            assert_eq!(settings.port.or(Some(22)), expected.port, "{host}");
            assert_eq!(
                (&settings.user, &settings.proxy_jump),
                (&expected.user, &expected.proxy_jump),
                "{host}"
            );
            assert_eq!(settings.identity_files, expected.identity_files, "{host}");
            assert_eq!(settings.user_known_hosts, expected.user_known_hosts, "{host}");
            assert_eq!(settings.strict_host_key_checking, expected.strict_host_key_checking, "{host}");
        }
    }

    #[test]
    fn settings_of_included_files_apply_within_the_including_host() {
        let (_home, config) = read_config(&[
            ("config", "Host a\nInclude *.inc\nUser inside\nHost *\nUser outside\nPort 7\n"),
            ("1.inc", "Port 5\nHost b\nPort 6\n"),
        ]);
        let user_and_port = |host: &str| (config.find_settings(host).user, config.find_settings(host).port);
        assert_eq!(user_and_port("a"), (Some("inside".to_owned()), Some(5)));
        assert_eq!(
            user_and_port("b"),
            (Some("outside".to_owned()), Some(7)),
            "the included file counts within `Host a` only"
        );
    }

    #[test]
    fn keywords_that_only_openssh_evaluates_are_reported() {
        let (_home, config) = read_config(&[("config", "Host a\nUser b\nMatch user c\nPort 5\n")]);
        let unsupported = config.unsupported.map(|u| (u.keyword, u.line));
        assert_eq!(unsupported, Some(("match".to_owned(), 3)));
    }

    #[test]
    fn syntax_errors_have_a_location() {
        let home = tempfile::tempdir().expect("a directory");
        let file = home.path().join("config");
        for (text, expected_line) in [("User \"a", 1), ("\nPort\n", 2)] {
            fs::write(&file, text).expect("a file");
            let error =
                SshConfigLines::read_files(std::slice::from_ref(&file), true, home.path()).expect_err(text);
            assert_eq!(error.code(), ssh::SSH_CONFIG_INVALID);
            assert_eq!(error.location().map(Location::line), Some(expected_line), "{error:?}");
        }
        fs::write(&file, format!("Include {}", file.display())).expect("a file");
        let error =
            SshConfigLines::read_files(std::slice::from_ref(&file), true, home.path()).expect_err("a cycle");
        assert_eq!(error.code(), ssh::SSH_CONFIG_INVALID);
    }

    #[test]
    fn endless_and_repeated_files_are_rejected() {
        let home = tempfile::tempdir().expect("a directory");
        let ssh_dir = home.path().join(".ssh");
        fs::create_dir(&ssh_dir).expect("a directory");
        let read = |text: &str| {
            let file = ssh_dir.join("config");
            fs::write(&file, text).expect("a file");
            SshConfigLines::read_files(&[file], true, home.path())
        };
        let unreadable = read("Include /dev/zero\n").expect_err("endless");
        assert_eq!(unreadable.code(), ssh::SSH_CONFIG_UNREADABLE);
        nix::unistd::mkfifo(&ssh_dir.join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        read("Include pipe /dev/null\nHost a\n").expect("both are empty");
        // Each file includes the next one many times; the last is a comment, or does not exist.
        fs::write(ssh_dir.join("one"), "Include two\n".repeat(1000)).expect("a file");
        fs::write(ssh_dir.join("two"), "Include absent\n".repeat(1000)).expect("a file");
        let message = |error: Diagnostic| format!("{error:?}");
        let error = message(read(&"Include one\n".repeat(1000)).expect_err("too many lines"));
        assert!(error.contains("more than 50000 lines"), "{error}");
        fs::write(ssh_dir.join("two"), format!("#{}\n", "x".repeat(1 << 19))).expect("a file");
        let error = message(read("Include one\n").expect_err("too long"));
        assert!(error.contains("more than 16 MiB"), "{error}");
    }

    proptest! {
        #[test]
        fn wildcards_match_like_a_recursive_matcher(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            /// Returns whether the pattern `p` matches the whole text `t`.
            fn matches_recursively(p: &[u8], t: &[u8]) -> bool {
                match (p.first(), t.first()) {
                    (None, None) => true,
                    (Some(b'*'), _) => matches_recursively(&p[1..], t) || (!t.is_empty() && matches_recursively(p, &t[1..])),
                    (Some(b'?'), Some(_)) => matches_recursively(&p[1..], &t[1..]),
                    (Some(a), Some(b)) if a == b => matches_recursively(&p[1..], &t[1..]),
                    _ => false,
                }
            }
            prop_assert_eq!(matches_wildcard(&pattern, &text), matches_recursively(pattern.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn untrusted_lines_never_panic(line in "\\PC{0,80}") {
            _ = parse_line(&line);
        }
    }
}
