//! [`TargetResolver`]: determines how a host is reached over SSH. The settings come from the job,
//! then from the SSH configuration, then from OpenSSH's defaults.
use super::{
    config::{SshConfigLines, SshHostSettings, UnsupportedSshKeyword, expand_tilde},
    known_hosts::{self, KnownHosts, format_known_hosts_name},
};
use diagnostic::{Diagnostic, codes::ssh};
use jobspec::{
    KnownHosts as KnownHostsPolicy, SshConfig, SshSpec,
    hosts::{HostAddress, parse_hosts},
};
use nix::unistd::{Uid, User};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

/// The largest number of jump hosts on the way to one host. More jump hosts are an error.
const MAX_JUMPS: usize = 4;
/// The names of the key files in `~/.ssh` that are tried if no key is configured. OpenSSH tries
/// them, too.
const DEFAULT_KEYS: [&str; 3] = ["id_ed25519", "id_ecdsa", "id_rsa"];

/// Everything that is needed to connect to a host over SSH.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SshTarget {
    /// The host's name in the job.
    pub(super) name: String,
    pub(super) hostname: String,
    pub(super) port: u16,
    pub(super) user: String,
    /// The name of the host in known_hosts.
    pub(super) known_hosts_name: String,
    /// Whether the key of a host that has no key in known_hosts is accepted and stored.
    pub(super) host_key_policy: KnownHostsPolicy,
    pub(super) known_hosts_files: Vec<PathBuf>,
    /// The known_hosts file that receives new host keys.
    pub(super) new_keys_file: PathBuf,
    /// The files of private keys to try, in order.
    pub(super) keys: Vec<PathBuf>,
    /// Whether only those keys of the SSH agent are offered that are also in `keys`
    /// (`IdentitiesOnly`).
    pub(super) configured_keys_only: bool,
    /// The socket of the SSH agent. `None` stands for the socket that the environment names, and
    /// `Some(None)` for no agent.
    pub(super) agent: Option<Option<PathBuf>>,
    /// The jump hosts on the way to the host, in the order in which the connection passes through
    /// them.
    pub(super) jumps: Vec<SshTarget>,
    /// The time limit for opening the TCP connection, and for each blocking operation of the SSH
    /// handshake and login.
    pub(super) timeout: Duration,
}

/// Resolves how the hosts of a job are reached over SSH.
#[derive(Debug)]
pub(super) struct TargetResolver {
    spec: SshSpec,
    config: SshConfigLines,
    /// The argument of `-F` for `ssh -G`; `None` for OpenSSH's default files.
    config_file: Option<PathBuf>,
    home: PathBuf,
    /// The name of the user who runs launch on this machine.
    local_user: String,
}

impl TargetResolver {
    /// Creates a resolver and reads the SSH configuration files that `spec` selects. Relative paths
    /// in `spec` are relative to `base`.
    pub(super) fn new(spec: &SshSpec, base: &Path) -> diagnostic::Result<TargetResolver> {
        let account = User::from_uid(Uid::current()).ok().flatten();
        let home = std::env::home_dir().or_else(|| account.as_ref().map(|a| a.dir.clone()));
        let home = home.unwrap_or_else(|| PathBuf::from("/"));
        let local_user = account.map_or_else(|| Uid::current().to_string(), |a| a.name);
        let default_files = [home.join(".ssh/config"), PathBuf::from("/etc/ssh/ssh_config")];
        let (files, config_file) = match &spec.config {
            SshConfig::Default => (default_files.to_vec(), None),
            SshConfig::None => (Vec::new(), Some(PathBuf::from("none"))),
            SshConfig::File(path) => {
                let path = base.join(expand_tilde(&path.to_string_lossy(), &home));
                (vec![path.clone()], Some(path))
            }
        };
        let required = matches!(spec.config, SshConfig::File(_));
        let config = SshConfigLines::read_files(&files, required, &home).map_err(|error| {
            error.with_help("`cluster.ssh.config` names the file that is read; `none` reads no file")
        })?;
        let mut spec = spec.clone();
        spec.key = spec.key.map(|key| base.join(expand_tilde(&key.to_string_lossy(), &home)));
        Ok(TargetResolver { spec, config, config_file, home, local_user })
    }

    /// Resolves how this host is reached, including its jump hosts.
    pub(super) fn resolve_target(&self, host: &HostAddress) -> diagnostic::Result<SshTarget> {
        let settings = self.find_host_settings(host)?;
        let mut target = self.resolve_hop(host, &settings, &self.spec)?;
        let is_set = |value: &String| !value.eq_ignore_ascii_case("none");
        if let Some(command) = settings.proxy_command.filter(is_set)
            && self.spec.jump.is_none()
        {
            let message = format!(
                "the SSH configuration reaches host {host} through `ProxyCommand {command}`, \
                 which is not supported"
            );
            return Err(Diagnostic::error(ssh::SSH_PROXY_UNSUPPORTED, message)
                .with_subject(host.name_with_port())
                .with_field("proxy_command", command)
                .with_help(
                    "if the command only passes through another host, use `ProxyJump` or `cluster.ssh.jump`",
                ));
        }
        let jump = self.spec.jump.clone().or(settings.proxy_jump);
        if let Some(jump) = jump.filter(is_set) {
            target.jumps = self.resolve_jumps(&target, &jump)?;
        }
        Ok(target)
    }

    /// Resolves the comma-separated jump hosts in `text`, in the order in which the connection
    /// passes through them. Leaves out the target itself. Fails if there are more than
    /// [`MAX_JUMPS`].
    fn resolve_jumps(&self, target: &SshTarget, text: &str) -> diagnostic::Result<Vec<SshTarget>> {
        let text = text.strip_prefix("ssh://").unwrap_or(text);
        let invalid = |reason: String| {
            let message = format!("the jump hosts `{text}` of host {} are not valid: {reason}", target.name);
            Diagnostic::error(ssh::SSH_JUMP_INVALID, message).with_subject(&target.name)
        };
        let hosts = parse_hosts(text).map_err(|error| invalid(error.to_string()))?;
        if hosts.len() > MAX_JUMPS {
            return Err(invalid(format!("at most {MAX_JUMPS} are supported")));
        }
        // The user and port of the job apply to its hosts only. The key of the job applies to jump
        // hosts, too.
        let spec = SshSpec { user: None, port: None, ..self.spec.clone() };
        let resolve = |host: &HostAddress| self.resolve_hop(host, &self.find_host_settings(host)?, &spec);
        hosts
            .iter()
            .filter(|host| host.host != target.hostname && host.host != target.name)
            .map(resolve)
            .collect()
    }

    /// Returns the settings of a host in the SSH configuration. Runs `ssh -G` if the configuration
    /// has keywords that only OpenSSH evaluates.
    fn find_host_settings(&self, host: &HostAddress) -> diagnostic::Result<SshHostSettings> {
        match &self.config.unsupported {
            None => Ok(self.config.find_settings(&host.host)),
            Some(keyword) => query_openssh(host, self.config_file.as_deref(), &self.spec, keyword),
        }
    }

    /// Determines how one host, which may be a jump host, is reached. Does not resolve the jump
    /// hosts before it.
    fn resolve_hop(
        &self,
        host: &HostAddress,
        settings: &SshHostSettings,
        spec: &SshSpec,
    ) -> diagnostic::Result<SshTarget> {
        let hostname = settings.hostname.clone().unwrap_or_else(|| host.host.clone());
        let hostname = hostname.replace("%h", &host.host).replace("%%", "%");
        let user = host.user.clone().or_else(|| spec.user.clone()).or_else(|| settings.user.clone());
        let user = user.unwrap_or_else(|| self.local_user.clone());
        let port = host.port.or(spec.port).or(settings.port).unwrap_or(22);
        let tokens = PathTokens { typed: &host.host, hostname: &hostname, port, user: &user };
        let path = |text: &String| {
            self.expand_path(text, &tokens).map_err(|error| {
                let message = format!("the path `{text}` in the SSH configuration of host {host}: {error}");
                Diagnostic::error(ssh::SSH_CONFIG_TOKEN_UNKNOWN, message)
                    .with_subject(host.name_with_port())
                    .with_field("path", text.as_str())
                    .with_help("set `cluster.ssh.key`, or another file as `cluster.ssh.config`")
            })
        };
        let paths = |texts: &[String]| {
            texts.iter().filter(|t| *t != "none").map(path).collect::<diagnostic::Result<Vec<_>>>()
        };
        let user_files = ["~/.ssh/known_hosts".to_owned(), "~/.ssh/known_hosts2".to_owned()];
        let system_files = ["/etc/ssh/ssh_known_hosts".to_owned(), "/etc/ssh/ssh_known_hosts2".to_owned()];
        let mut known_hosts_files = paths(settings.user_known_hosts.as_deref().unwrap_or(&user_files))?;
        let new_keys_file =
            known_hosts_files.first().cloned().unwrap_or_else(|| self.home.join(".ssh/known_hosts"));
        known_hosts_files.extend(paths(settings.global_known_hosts.as_deref().unwrap_or(&system_files))?);
        let keys = match &spec.key {
            Some(key) => vec![key.clone()],
            None if !settings.identity_files.is_empty() => paths(&settings.identity_files)?,
            None => DEFAULT_KEYS.iter().map(|key| self.home.join(".ssh").join(key)).collect(),
        };
        let alias = settings.host_key_alias.as_ref().map(|alias| alias.to_lowercase());
        let agent = match settings.identity_agent.as_deref() {
            None | Some("SSH_AUTH_SOCK") => None,
            Some("none") => Some(None),
            Some(socket) => Some(Some(path(&socket.to_owned())?)),
        };
        Ok(SshTarget {
            name: host.name_with_port(),
            known_hosts_name: alias.unwrap_or_else(|| format_known_hosts_name(&hostname, port)),
            hostname,
            port,
            user,
            host_key_policy: spec.known_hosts,
            known_hosts_files,
            new_keys_file,
            keys,
            configured_keys_only: spec.key.is_some() || settings.identities_only == Some(true),
            agent,
            jumps: Vec::new(),
            timeout: Duration::from_millis(spec.connect_timeout_ms),
        })
    }

    /// Expands the tokens in a path (ssh_config(5), "TOKENS") and a leading `~/`. Fails if the path
    /// contains an unknown token or an environment variable.
    fn expand_path(&self, text: &str, tokens: &PathTokens<'_>) -> Result<PathBuf, PathTokenError> {
        let mut path = String::new();
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match (c, if c == '%' { chars.next() } else { None }) {
                ('%', Some('%')) => path.push('%'),
                ('%', Some('d')) => path.push_str(&self.home.to_string_lossy()),
                ('%', Some('h')) => path.push_str(tokens.hostname),
                ('%', Some('n')) => path.push_str(tokens.typed),
                ('%', Some('p')) => path.push_str(&tokens.port.to_string()),
                ('%', Some('r')) => path.push_str(tokens.user),
                ('%', Some('u')) => path.push_str(&self.local_user),
                ('%', other) => {
                    return Err(PathTokenError::UnknownToken(other.map_or(String::new(), String::from)));
                }
                _ => path.push(c),
            }
        }
        if path.contains("${") {
            return Err(PathTokenError::Variable);
        }
        Ok(expand_tilde(&path, &self.home))
    }
}

/// The values that replace the tokens `%n`, `%h`, `%p` and `%r` in a path of the SSH configuration.
struct PathTokens<'a> {
    /// The host's name in the job (token `%n`).
    typed: &'a str,
    hostname: &'a str,
    port: u16,
    user: &'a str,
}

/// An error in a path of the SSH configuration, whose tokens cannot be expanded.
#[derive(Debug, thiserror::Error)]
enum PathTokenError {
    #[error("the token `%{0}` is not supported")]
    UnknownToken(String),
    #[error("environment variables are not supported")]
    Variable,
}

impl SshTarget {
    /// Reads the known_hosts files of this target. Returns the cached content if the files have not
    /// changed since they were read.
    pub(super) fn load_known_hosts(&self) -> diagnostic::Result<Arc<KnownHosts>> {
        known_hosts::read_cached(&self.known_hosts_files).map_err(|error| error.with_subject(&self.name))
    }
}

/// Runs `ssh -G`, which prints the settings of a host as OpenSSH's client evaluates them. Blocks.
fn query_openssh(
    host: &HostAddress,
    config_file: Option<&Path>,
    spec: &SshSpec,
    keyword: &UnsupportedSshKeyword,
) -> diagnostic::Result<SshHostSettings> {
    let mut command = Command::new("ssh");
    command.arg("-G").stdin(Stdio::null());
    if let Some(file) = config_file {
        command.arg("-F").arg(file);
    }
    for (option, value) in
        [("-l", host.user.clone().or_else(|| spec.user.clone())), ("-p", host.port.map(|p| p.to_string()))]
    {
        if let Some(value) = value {
            command.args([option, &value]);
        }
    }
    let reason = match command.arg("--").arg(&host.host).output() {
        Ok(output) if output.status.success() => {
            return Ok(SshHostSettings::from_ssh_g(&String::from_utf8_lossy(&output.stdout)));
        }
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => format!("cannot start `ssh`: {error}"),
    };
    let UnsupportedSshKeyword { keyword, file, line } = keyword;
    let message = format!(
        "the SSH configuration of host {host} uses `{keyword}` ({file}:{line}), which only `ssh -G` \
         evaluates: {reason}"
    );
    Err(Diagnostic::error(ssh::SSH_CONFIG_UNSUPPORTED, message)
        .with_subject(host.name_with_port())
        .with_field("keyword", keyword.as_str())
        .with_help("install OpenSSH's client on this machine, or set `cluster.ssh.config` to another file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Creates a resolver for the SSH configuration `config`. `spec` modifies the default settings
    /// of `cluster.ssh`. Also returns the temporary directory that holds the configuration.
    fn create_resolver(config: &str, spec: impl FnOnce(&mut SshSpec)) -> (tempfile::TempDir, TargetResolver) {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("config"), config).expect("a file");
        let mut ssh = crate::testing::sample_job().cluster.ssh;
        ssh.config = SshConfig::File("config".into());
        spec(&mut ssh);
        let resolver = TargetResolver::new(&ssh, dir.path()).expect("a configuration");
        (dir, resolver)
    }

    /// Parses one host of a job, such as `user@name:port`.
    fn parse_host(text: &str) -> HostAddress {
        parse_hosts(text).expect(text).remove(0)
    }

    #[test]
    fn the_host_takes_precedence_over_the_job_and_the_job_over_the_configuration() {
        let config = "Host a\nHostName %h.lan\nUser cfg\nPort 7\nIdentityFile /k/%r@%h:%p\nUserKnownHostsFile /kh\nIdentitiesOnly yes\n";
        let (_dir, plain) = create_resolver(config, |_| ());
        let target = plain.resolve_target(&parse_host("a")).expect("a target");
        assert_eq!((target.hostname.as_str(), target.port, target.user.as_str()), ("a.lan", 7, "cfg"));
        assert_eq!(target.keys, [PathBuf::from("/k/cfg@a.lan:7")]);
        assert_eq!((target.known_hosts_name.as_str(), target.configured_keys_only), ("[a.lan]:7", true));
        assert_eq!(target.new_keys_file, PathBuf::from("/kh"));
        let (dir, job) = create_resolver(config, |s| {
            (s.user, s.port, s.key) = (Some("job".into()), Some(8), Some("key".into()))
        });
        let target = job.resolve_target(&parse_host("a")).expect("a target");
        assert_eq!(
            (target.port, target.user.as_str(), &target.keys),
            (8, "job", &vec![dir.path().join("key")])
        );
        let target = job.resolve_target(&parse_host("own@a:9")).expect("a target");
        assert_eq!((target.port, target.user.as_str()), (9, "own"));
    }

    #[test]
    fn jump_hosts_come_from_the_configuration() {
        let config = "Host b\nUser x\nHost c\nProxyJump me@b,d:7\nHost p\nProxyCommand nc %h %p\nHost q\nProxyJump none\n";
        let (_dir, resolver) = create_resolver(config, |_| ());
        let jumps = resolver.resolve_target(&parse_host("c")).expect("a target").jumps;
        let shown: Vec<_> = jumps.iter().map(|t| (t.user.as_str(), t.hostname.as_str(), t.port)).collect();
        assert_eq!(shown[0], ("me", "b", 22));
        assert_eq!((shown[1].1, shown[1].2), ("d", 7));
        assert!(resolver.resolve_target(&parse_host("q")).expect("a target").jumps.is_empty());
        let error = resolver.resolve_target(&parse_host("p")).expect_err("a command");
        assert_eq!(error.code(), ssh::SSH_PROXY_UNSUPPORTED);
        assert_eq!(error.field("proxy_command"), Some(&"nc %h %p".into()));
    }

    #[test]
    fn match_blocks_are_evaluated_by_ssh_g() {
        let (_dir, resolver) = create_resolver("Match host a\nUser matched\nPort 5\n", |_| ());
        match resolver.resolve_target(&parse_host("a")) {
            Ok(target) => assert_eq!((target.user.as_str(), target.port), ("matched", 5)),
            // OpenSSH's client is not installed.
            Err(error) => assert_eq!(error.code(), ssh::SSH_CONFIG_UNSUPPORTED),
        }
    }

    #[test]
    fn unknown_tokens_are_rejected() {
        for text in ["IdentityFile /%Z", "IdentityFile ${X}/k", "UserKnownHostsFile /%"] {
            let (_dir, resolver) = create_resolver(text, |_| ());
            let error = resolver.resolve_target(&parse_host("a")).expect_err(text);
            assert_eq!(error.code(), ssh::SSH_CONFIG_TOKEN_UNKNOWN);
        }
    }
}
