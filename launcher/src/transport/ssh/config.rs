//! ssh_config(5) as far as connecting needs it. What this reader can't judge (`Match`, say) is left to `ssh -G`, which knows.
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Deepest `Include`.
const MAX_DEPTH: u32 = 8;
/// Largest file, bytes.
const MAX_FILE: u64 = 1 << 20;
/// Most lines, with those of included files.
const MAX_LINES: usize = 50_000;

/// Lines of the configuration that may matter, included files in their places.
#[derive(Debug, Default)]
pub(super) struct Config {
    lines: Vec<Line>,
    /// A construct that only OpenSSH's own client can judge, with its place.
    pub(super) beyond: Option<String>,
}

#[derive(Debug)]
enum Line {
    /// Patterns; the lines up to the next one count for hosts that they match. `depth` of `Include`.
    Host {
        patterns: Vec<String>,
        depth: u32,
    },
    /// An included file ends: what held before it holds again.
    End {
        depth: u32,
    },
    Set {
        keyword: String,
        values: Vec<String>,
    },
}

/// What the configuration says of a host. The first value counts, as in OpenSSH, except for keys, which are collected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
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
    pub(super) strict: Option<String>,
}

/// Why a configuration can't be used: one line that names the file.
pub(super) type Fault = String;

impl Config {
    /// Reads these files, one after the other; a missing one is a fault where it is `required`.
    pub(super) fn read(files: &[PathBuf], required: bool, home: &Path) -> Result<Config, Fault> {
        let mut config = Config::default();
        for file in files {
            config.file(file, required, home, 0)?;
            config.lines.push(Line::End { depth: 0 });
        }
        Ok(config)
    }

    fn file(&mut self, file: &Path, required: bool, home: &Path, depth: u32) -> Result<(), Fault> {
        let shown = file.display();
        let text = match read(file) {
            Ok(text) => text,
            Err(e) if !required && e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(format!("the SSH configuration {shown} can't be read: {e}")),
        };
        for (number, line) in text.lines().enumerate() {
            let at = || format!("{shown}:{}", number + 1);
            let Some((keyword, values)) = words(line).map_err(|m| format!("{}: {m}", at()))? else {
                continue;
            };
            if self.lines.len() >= MAX_LINES {
                return Err(format!("{}: the SSH configuration has more than {MAX_LINES} lines", at()));
            }
            match keyword.as_str() {
                "host" => self.lines.push(Line::Host { patterns: values, depth }),
                "include" => {
                    self.include(&values, file, home, depth).map_err(|m| format!("{}: {m}", at()))?
                }
                "match" | "canonicalizehostname" | "canonicaldomains" => {
                    self.beyond.get_or_insert(format!("`{keyword}` ({})", at()));
                }
                _ if values.is_empty() => return Err(format!("{}: `{keyword}` has no value", at())),
                _ => self.lines.push(Line::Set { keyword, values }),
            }
        }
        Ok(())
    }

    fn include(&mut self, patterns: &[String], from: &Path, home: &Path, depth: u32) -> Result<(), Fault> {
        if depth >= MAX_DEPTH {
            return Err(format!("`Include` is nested more than {MAX_DEPTH} deep"));
        }
        for pattern in patterns {
            let system = from.starts_with("/etc/ssh");
            let base = if system { PathBuf::from("/etc/ssh") } else { home.join(".ssh") };
            let pattern = base.join(tilde(pattern, home));
            for file in glob(&pattern) {
                self.file(&file, false, home, depth + 1)?;
                self.lines.push(Line::End { depth: depth + 1 });
            }
        }
        Ok(())
    }

    /// What holds for the host as it was typed.
    pub(super) fn settings(&self, host: &str) -> Settings {
        let mut settings = Settings::default();
        let mut holds = vec![true];
        for line in &self.lines {
            match line {
                Line::Host { patterns, depth } => {
                    let matches = matches_any(patterns, host);
                    holds.resize(*depth as usize + 1, *holds.last().unwrap_or(&true));
                    if let Some(last) = holds.last_mut() {
                        *last = matches;
                    }
                }
                Line::End { depth } => holds.truncate((*depth as usize).max(1)),
                Line::Set { keyword, values } if holds.iter().all(|h| *h) => settings.set(keyword, values),
                Line::Set { .. } => {}
            }
            if matches!(line, Line::End { depth: 0 }) {
                holds = vec![true];
            }
        }
        settings
    }
}

impl Settings {
    /// What `ssh -G` printed.
    pub(super) fn printed(text: &str) -> Settings {
        let mut settings = Settings::default();
        for (keyword, mut values) in text.lines().filter_map(|line| words(line).ok().flatten()) {
            // It prints no quotes: the whole line is the one path.
            if keyword == "identityfile" {
                values = vec![values.join(" ")];
            }
            settings.set(&keyword, &values);
        }
        settings
    }

    fn set(&mut self, keyword: &str, values: &[String]) {
        let Some(first) = values.first() else { return };
        let one = |place: &mut Option<String>| _ = place.get_or_insert_with(|| first.clone());
        let given = |value: &str| !value.eq_ignore_ascii_case("none");
        match keyword {
            "hostname" => one(&mut self.hostname),
            "user" => one(&mut self.user),
            "port" => self.port = self.port.or_else(|| first.parse().ok()),
            "hostkeyalias" => one(&mut self.host_key_alias),
            "proxyjump" if self.proxy_command.is_none() => one(&mut self.proxy_jump),
            "proxycommand" if self.proxy_jump.is_none() && self.proxy_command.is_none() => {
                self.proxy_command = Some(values.join(" "));
            }
            "identityfile" if given(first) => self.identity_files.push(first.clone()),
            "identitiesonly" => self.identities_only = self.identities_only.or(Some(first == "yes")),
            "identityagent" => one(&mut self.identity_agent),
            "userknownhostsfile" => _ = self.user_known_hosts.get_or_insert_with(|| values.to_vec()),
            "globalknownhostsfile" => _ = self.global_known_hosts.get_or_insert_with(|| values.to_vec()),
            "stricthostkeychecking" => one(&mut self.strict),
            _ => {}
        }
    }
}

fn read(file: &Path) -> io::Result<String> {
    if fs::metadata(file)?.len() > MAX_FILE {
        return Err(io::Error::other("it is larger than 1 MiB"));
    }
    fs::read_to_string(file)
}

/// A line's keyword, in lower case, and its values; quotes keep words together.
fn words(line: &str) -> Result<Option<(String, Vec<String>)>, String> {
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
    if quoted { Err("a quote is never closed".to_owned()) } else { Ok(Some((keyword, values))) }
}

/// Does one of the patterns match, and none of those with `!`?
pub(super) fn matches_any(patterns: &[String], text: &str) -> bool {
    let mut matched = false;
    for pattern in patterns {
        match pattern.strip_prefix('!') {
            Some(negated) if wildcard(negated, text) => return false,
            None if wildcard(pattern, text) => matched = true,
            _ => {}
        }
    }
    matched
}

/// `*` and `?`; case counts, as in `Host` lines.
pub(super) fn wildcard(pattern: &str, text: &str) -> bool {
    let characters = |s: &str| s.chars().collect::<Vec<_>>();
    let (pattern, text) = (characters(pattern), characters(text));
    let (mut p, mut t, mut star) = (0, 0, None);
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == '?' || *c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match &mut star {
                Some((at, from)) => {
                    *from += 1;
                    (p, t) = (*at + 1, *from);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// `~/x` below the home directory.
pub(super) fn tilde(path: &str, home: &Path) -> PathBuf {
    match path.strip_prefix("~/") {
        Some(rest) => home.join(rest),
        None if path == "~" => home.to_owned(),
        None => PathBuf::from(path),
    }
}

/// Files whose last component matches; in their order by name.
fn glob(pattern: &Path) -> Vec<PathBuf> {
    let Some(name) = pattern.file_name().and_then(|n| n.to_str()) else { return Vec::new() };
    let Some(folder) = pattern.parent().filter(|_| name.contains(['*', '?'])) else {
        return vec![pattern.to_owned()];
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let fits = |path: &PathBuf| path.file_name().and_then(|n| n.to_str()).is_some_and(|n| wildcard(name, n));
    let mut files: Vec<PathBuf> = entries.map(|e| e.path()).filter(fits).collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    fn config(files: &[(&str, &str)]) -> (tempfile::TempDir, Config) {
        let home = tempfile::tempdir().expect("a directory");
        fs::create_dir(home.path().join(".ssh")).expect("a directory");
        for (name, text) in files {
            fs::write(home.path().join(".ssh").join(name), text).expect("a file");
        }
        let config =
            Config::read(&[home.path().join(".ssh/config")], true, home.path()).expect("a configuration");
        (home, config)
    }

    const SAMPLE: &str = "# comment\nUser = first\nHost gpu-* !gpu-9\n  HostName \"%h.cluster\"  # there\n  Port=2222\n\
        IdentityFile ~/.ssh/a\n\tIdentityFile \"/b c\"\nHost gpu-?\nPort 1\nUser second\nProxyJump bastion\n\
        Host *\nidentityfile /last\nStrictHostKeyChecking accept-new\nUserKnownHostsFile /k1 /k2\n";

    #[test]
    fn values_are_openssh_s() {
        let (home, config) = config(&[("config", SAMPLE)]);
        for host in ["gpu-1", "gpu-9", "gpu-10", "other", "GPU-1"] {
            let output = Command::new("ssh")
                .arg("-F")
                .arg(home.path().join(".ssh/config"))
                .args(["-G", host])
                .output();
            let Ok(output) = output else { return };
            let theirs = Settings::printed(&String::from_utf8_lossy(&output.stdout));
            let ours = config.settings(host);
            let hostname =
                ours.hostname.clone().map_or(host.to_lowercase(), |h| h.replace("%h", &host.to_lowercase()));
            assert_eq!(Some(hostname), theirs.hostname, "{host}");
            assert_eq!(ours.port.or(Some(22)), theirs.port, "{host}");
            assert_eq!((&ours.user, &ours.proxy_jump), (&theirs.user, &theirs.proxy_jump), "{host}");
            assert_eq!(ours.identity_files, theirs.identity_files, "{host}");
            assert_eq!(ours.user_known_hosts, theirs.user_known_hosts, "{host}");
            assert_eq!(ours.strict, theirs.strict, "{host}");
        }
    }

    #[test]
    fn included_files_stand_in_their_places() {
        let (_home, config) = config(&[
            ("config", "Host a\nInclude *.inc\nUser inside\nHost *\nUser outside\nPort 7\n"),
            ("1.inc", "Port 5\nHost b\nPort 6\n"),
        ]);
        let of = |host: &str| (config.settings(host).user, config.settings(host).port);
        assert_eq!(of("a"), (Some("inside".to_owned()), Some(5)));
        assert_eq!(
            of("b"),
            (Some("outside".to_owned()), Some(7)),
            "the included file counts within `Host a` only"
        );
    }

    #[test]
    fn what_only_the_client_knows_is_noticed() {
        let (_home, config) = config(&[("config", "Host a\nUser b\nMatch user c\nPort 5\n")]);
        assert!(
            config.beyond.as_deref().is_some_and(|b| b.contains("`match`") && b.contains(":3")),
            "{config:?}"
        );
    }

    #[test]
    fn faults_name_the_place() {
        let home = tempfile::tempdir().expect("a directory");
        let file = home.path().join("config");
        for (text, part) in [("User \"a", ":1: a quote"), ("\nPort\n", ":2: `port` has no value")] {
            fs::write(&file, text).expect("a file");
            let fault = Config::read(std::slice::from_ref(&file), true, home.path()).expect_err(text);
            assert!(fault.contains(part), "{fault}");
        }
        fs::write(&file, format!("Include {}", file.display())).expect("a file");
        let fault = Config::read(std::slice::from_ref(&file), true, home.path()).expect_err("a circle");
        assert!(fault.contains("nested"), "{fault}");
    }

    proptest! {
        #[test]
        fn wildcards_match_as_a_slow_reader_does(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            fn slow(p: &[u8], t: &[u8]) -> bool {
                match (p.first(), t.first()) {
                    (None, None) => true,
                    (Some(b'*'), _) => slow(&p[1..], t) || (!t.is_empty() && slow(p, &t[1..])),
                    (Some(b'?'), Some(_)) => slow(&p[1..], &t[1..]),
                    (Some(a), Some(b)) if a == b => slow(&p[1..], &t[1..]),
                    _ => false,
                }
            }
            prop_assert_eq!(wildcard(&pattern, &text), slow(pattern.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn any_line_does_no_harm(line in "\\PC{0,80}") {
            _ = words(&line);
        }
    }
}
