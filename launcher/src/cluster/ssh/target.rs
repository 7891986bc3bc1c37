//! [`TargetResolver`]: determines how a host is reached over SSH. The settings come from the job,
//! then from the SSH configuration, then from OpenSSH's defaults.
use super::{
    known_hosts::{self, KnownHosts, format_known_hosts_name},
    openssh::{ClientOptions, HostSshFiles, OpenSshRequirement, SupervisedChild, find_openssh_requirement},
    ssh_config::{SshConfigLines, SshHostSettings, UnsupportedSshKeyword, expand_tilde},
};
use diagnostic::{Diagnostic, codes::ssh};
use jobspec::{
    KnownHosts as KnownHostsPolicy, SshClient, SshConfig, SshSpec,
    hosts::{HostAddress, parse_hosts},
};
use nix::unistd::{Uid, User};
use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

/// The largest number of jump hosts that may be configured for the connection to one host. More
/// jump hosts are an error.
const MAX_JUMP_HOSTS: usize = 4;
/// The time limit of the command `ssh -G`, which prints the settings of a host and may run the
/// commands of `Match exec`.
const SSH_G_TIMEOUT: Duration = Duration::from_secs(30);
/// The names of the key files in `~/.ssh` with which launch tries to log in if no key is
/// configured. OpenSSH tries them, too.
const DEFAULT_KEY_FILES: [&str; 3] = ["id_ed25519", "id_ecdsa", "id_rsa"];

/// Everything that is needed to connect to a host over SSH, such as its address, user, keys and
/// jump hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SshTarget {
    /// The host's name in the job.
    pub(super) name: String,
    pub(super) hostname: String,
    pub(super) port: u16,
    pub(super) user: String,
    /// The name of the host in known_hosts.
    pub(super) known_hosts_name: String,
    pub(super) host_key_policy: HostKeyPolicy,
    pub(super) known_hosts_files: Vec<PathBuf>,
    /// The known_hosts file that receives new host keys; `None` if they are not stored.
    pub(super) new_keys_file: Option<PathBuf>,
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
    /// How OpenSSH's client reaches the host; `None` if the built-in client does. If it is set,
    /// the fields about keys and jump hosts are empty.
    pub(super) client: Option<ClientOptions>,
}

/// The policy on which keys of an SSH server are accepted (`StrictHostKeyChecking`). A revoked key
/// never is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostKeyPolicy {
    /// Keys that known_hosts contains.
    Strict,
    /// Also the key of a host that has no key in known_hosts. The key is stored.
    AcceptNew,
    /// Every key. A new key is stored.
    AcceptAny,
}

impl HostKeyPolicy {
    /// Chooses whether unknown SSH host keys are accepted, from the job's setting or, if the job
    /// has none, from the SSH configuration.
    fn choose_policy(spec: Option<KnownHostsPolicy>, configured: Option<&str>) -> HostKeyPolicy {
        match (spec, configured.map(str::to_ascii_lowercase).as_deref()) {
            (Some(KnownHostsPolicy::Strict), _) => HostKeyPolicy::Strict,
            (Some(KnownHostsPolicy::AcceptNew), _) | (None, Some("accept-new")) => HostKeyPolicy::AcceptNew,
            (None, Some("no" | "off" | "false")) => HostKeyPolicy::AcceptAny,
            // `ask` cannot ask.
            (None, _) => HostKeyPolicy::Strict,
        }
    }
}

/// Determines by which address, user, keys and jump hosts each host of a job is reached over SSH.
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
    /// Reads the SSH configuration files that the job's SSH settings `spec` select, and creates a
    /// resolver that uses them. Relative paths in `spec` are relative to `base`.
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

    /// Determines by which address, user, keys, jump hosts and SSH client a host of the job is
    /// reached. May run `ssh -G` and `klist`. Fails if the job requires the built-in client, and
    /// the configuration OpenSSH's.
    pub(super) fn resolve_target(&self, host: &HostAddress) -> diagnostic::Result<SshTarget> {
        let settings = self.find_host_settings(host)?;
        let resolved = match self.spec.client {
            SshClient::OpenSsh => return Ok(self.build_openssh_target(host, &settings, None)),
            SshClient::Auto | SshClient::Builtin => self.resolve_builtin_target(host, &settings),
        };
        match resolved {
            Err(TargetResolveError::Requirement(requirement)) if self.spec.client == SshClient::Auto => {
                Ok(self.build_openssh_target(host, &settings, Some(requirement)))
            }
            Err(TargetResolveError::Path(path, _)) if self.spec.client == SshClient::Auto => {
                let requirement = OpenSshRequirement::new(format!("the path {path}"));
                Ok(self.build_openssh_target(host, &settings, Some(requirement)))
            }
            resolved => resolved.map_err(|error| error.into_diagnostic(host, &settings)),
        }
    }

    /// Determines the address, user, keys, known_hosts files and jump hosts with which launch's
    /// built-in SSH client connects to a host. Fails if that client cannot follow the
    /// configuration.
    fn resolve_builtin_target(
        &self,
        host: &HostAddress,
        settings: &SshHostSettings,
    ) -> Result<SshTarget, TargetResolveError> {
        let is_set = |value: &&String| !value.eq_ignore_ascii_case("none");
        if let Some(command) = settings.proxy_command.as_ref().filter(is_set)
            && self.spec.jump.is_none()
        {
            return Err(TargetResolveError::Requirement(OpenSshRequirement::new(format!(
                "ProxyCommand {command}"
            ))));
        }
        let mut target = self.resolve_hop(host, settings, &self.spec)?;
        let jump = self.spec.jump.as_ref().or(settings.proxy_jump.as_ref());
        if let Some(jump) = jump.filter(is_set) {
            target.jumps = self.resolve_jumps(&target, jump)?;
        }
        Ok(target)
    }

    /// Determines the address and `ssh` options with which OpenSSH's client reaches a host.
    /// `requirement` is the setting that needs this client, or `None` if the job chose it.
    fn build_openssh_target(
        &self,
        host: &HostAddress,
        settings: &SshHostSettings,
        requirement: Option<OpenSshRequirement>,
    ) -> SshTarget {
        let mut target = self.build_target_without_keys(host, settings, &self.spec);
        let config_file = self.config_file.as_deref();
        target.client = Some(ClientOptions::new(host, &self.spec, settings, config_file, requirement));
        target
    }

    /// Resolves `text`, a comma-separated list of jump hosts, in the order in which the connection
    /// passes through them. Leaves out the target itself. Fails if there are more than
    /// [`MAX_JUMP_HOSTS`].
    fn resolve_jumps(&self, target: &SshTarget, text: &str) -> Result<Vec<SshTarget>, TargetResolveError> {
        let text = text.strip_prefix("ssh://").unwrap_or(text);
        let invalid = |reason: String| {
            let message = format!("the jump hosts `{text}` of host {} are not valid: {reason}", target.name);
            Diagnostic::error(ssh::SSH_JUMP_INVALID, message).with_subject(&target.name)
        };
        let hosts = parse_hosts(text).map_err(|error| invalid(error.to_string()))?;
        if hosts.len() > MAX_JUMP_HOSTS {
            return Err(invalid(format!("at most {MAX_JUMP_HOSTS} are supported")).into());
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

    /// Returns the settings that the SSH configuration contains for a host. Runs `ssh -G` if the
    /// configuration has keywords that only OpenSSH evaluates.
    fn find_host_settings(&self, host: &HostAddress) -> diagnostic::Result<SshHostSettings> {
        match &self.config.unsupported {
            None => Ok(self.config.find_settings(&host.host)),
            Some(keyword) => {
                query_settings_with_ssh_g(host, self.config_file.as_deref(), &self.spec, keyword)
            }
        }
    }

    /// Determines the address, port, user and connection time limit for one host from the job and
    /// the SSH configuration, but no keys.
    fn build_target_without_keys(
        &self,
        host: &HostAddress,
        settings: &SshHostSettings,
        spec: &SshSpec,
    ) -> SshTarget {
        let hostname = settings.hostname.clone().unwrap_or_else(|| host.host.clone());
        let hostname = hostname.replace("%h", &host.host).replace("%%", "%");
        let user = host.user.clone().or_else(|| spec.user.clone()).or_else(|| settings.user.clone());
        let port = host.port.or(spec.port).or(settings.port).unwrap_or(22);
        let alias = settings.host_key_alias.as_ref().map(|alias| alias.to_lowercase());
        SshTarget {
            name: host.name_with_port(),
            known_hosts_name: alias.unwrap_or_else(|| format_known_hosts_name(&hostname, port)),
            hostname,
            port,
            user: user.unwrap_or_else(|| self.local_user.clone()),
            host_key_policy: HostKeyPolicy::choose_policy(
                spec.known_hosts,
                settings.strict_host_key_checking.as_deref(),
            ),
            known_hosts_files: Vec::new(),
            new_keys_file: None,
            keys: Vec::new(),
            configured_keys_only: spec.key.is_some() || settings.identities_only == Some(true),
            agent: None,
            jumps: Vec::new(),
            timeout: Duration::from_millis(spec.connect_timeout_ms),
            client: None,
        }
    }

    /// Determines the address, user, keys and known_hosts files for the built-in SSH client's
    /// connection to one machine, a host or a jump host. Does not resolve the jump hosts before it.
    /// Fails if that client cannot follow the configuration.
    fn resolve_hop(
        &self,
        host: &HostAddress,
        settings: &SshHostSettings,
        spec: &SshSpec,
    ) -> Result<SshTarget, TargetResolveError> {
        let mut target = self.build_target_without_keys(host, settings, spec);
        let (hostname, port, user) = (target.hostname.clone(), target.port, target.user.clone());
        let tokens = PathTokens { typed: &host.host, hostname: &hostname, port, user: &user };
        let path = |text: &String| {
            let expanded = self.expand_path_tokens(text, &tokens);
            expanded.map_err(|error| TargetResolveError::Path(text.clone(), error))
        };
        let paths =
            |texts: &[String]| texts.iter().filter(|t| *t != "none").map(path).collect::<Result<Vec<_>, _>>();
        let user_files = ["~/.ssh/known_hosts".to_owned(), "~/.ssh/known_hosts2".to_owned()];
        let system_files = ["/etc/ssh/ssh_known_hosts".to_owned(), "/etc/ssh/ssh_known_hosts2".to_owned()];
        target.known_hosts_files = paths(settings.user_known_hosts.as_deref().unwrap_or(&user_files))?;
        target.new_keys_file = target.known_hosts_files.first().cloned();
        let system_files = settings.global_known_hosts.as_deref().unwrap_or(&system_files);
        target.known_hosts_files.extend(paths(system_files)?);
        let has_default_keys = spec.key.is_none() && settings.identity_files.is_empty();
        target.keys = match &spec.key {
            Some(key) => vec![key.clone()],
            None if has_default_keys => {
                DEFAULT_KEY_FILES.iter().map(|k| self.home.join(".ssh").join(k)).collect()
            }
            None => paths(&settings.identity_files)?,
        };
        target.agent = match settings.identity_agent.as_deref() {
            None | Some("SSH_AUTH_SOCK") => None,
            Some("none") => Some(None),
            Some(socket) => Some(Some(path(&socket.to_owned())?)),
        };
        // An unreadable file is an error when the key of the host is verified.
        let known_hosts = target.load_known_hosts().ok();
        let files = HostSshFiles {
            keys: &target.keys,
            has_default_keys,
            user_directory: &self.home.join(".ssh"),
            known_hosts: known_hosts.as_deref(),
            known_hosts_name: &target.known_hosts_name,
        };
        match find_openssh_requirement(settings, &files) {
            None => Ok(target),
            Some(requirement) => Err(TargetResolveError::Requirement(requirement)),
        }
    }

    /// Replaces a leading `~/` and tokens such as `%h` (see ssh_config(5)) in a path from the SSH
    /// configuration by their values. Fails if the path contains an unknown token or an environment
    /// variable.
    fn expand_path_tokens(&self, text: &str, tokens: &PathTokens<'_>) -> Result<PathBuf, PathTokenError> {
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

/// The values for the tokens `%n`, `%h`, `%p` and `%r` (host names, port and user) in a path from
/// the SSH configuration.
struct PathTokens<'a> {
    /// The host's name in the job (token `%n`).
    typed: &'a str,
    hostname: &'a str,
    port: u16,
    user: &'a str,
}

/// The error that a path of the SSH configuration contains a token that cannot be expanded.
#[derive(Debug, thiserror::Error)]
enum PathTokenError {
    #[error("the token `%{0}` is not supported")]
    UnknownToken(String),
    #[error("environment variables are not supported")]
    Variable,
}

/// The reason why launch's built-in SSH client cannot reach a host.
enum TargetResolveError {
    /// Only OpenSSH's client can follow the configuration.
    Requirement(OpenSshRequirement),
    /// A path of the configuration cannot be expanded.
    Path(String, PathTokenError),
    Other(Diagnostic),
}

impl From<Diagnostic> for TargetResolveError {
    fn from(error: Diagnostic) -> TargetResolveError {
        TargetResolveError::Other(error)
    }
}

impl TargetResolveError {
    /// Converts the reason why the built-in SSH client cannot reach the host `host` to a
    /// diagnostic.
    fn into_diagnostic(self, host: &HostAddress, settings: &SshHostSettings) -> Diagnostic {
        const HELP: &str =
            "set `cluster.ssh.client: auto` or `openssh`, or another file as `cluster.ssh.config`";
        let error = match self {
            TargetResolveError::Other(error) => return error,
            TargetResolveError::Path(path, error) => {
                let message = format!("the path `{path}` in the SSH configuration of host {host}: {error}");
                return Diagnostic::error(ssh::SSH_CONFIG_TOKEN_UNKNOWN, message)
                    .with_subject(host.name_with_port())
                    .with_field("path", path)
                    .with_help("set `cluster.ssh.key`, or another file as `cluster.ssh.config`");
            }
            TargetResolveError::Requirement(OpenSshRequirement { option }) => {
                let message = format!(
                    "the SSH configuration of host {host} requires OpenSSH's client (`{option}`), and \
                     `cluster.ssh.client` is `builtin`"
                );
                let is_proxy = option.starts_with("ProxyCommand ");
                let code = if is_proxy { ssh::SSH_PROXY_UNSUPPORTED } else { ssh::SSH_OPTION_UNSUPPORTED };
                Diagnostic::error(code, message).with_field("option", option)
            }
        };
        let error = match &settings.proxy_command {
            Some(command) => error.with_field("proxy_command", command.as_str()),
            None => error,
        };
        error.with_subject(host.name_with_port()).with_help(HELP)
    }
}

impl SshTarget {
    /// Returns whether launch connects to this host directly, without a jump host or a proxy
    /// command in between.
    pub(super) fn is_direct(&self) -> bool {
        self.jumps.is_empty() && self.openssh_proxy().is_none()
    }

    /// Returns the jump hosts or the proxy command through which OpenSSH's client connects to this
    /// host, if there are any.
    pub(super) fn openssh_proxy(&self) -> Option<&str> {
        self.client.as_ref()?.proxy.as_deref()
    }

    /// Returns an `ssh` command with which the user can connect to this host, for error messages.
    pub(super) fn format_ssh_command_for_user(&self) -> String {
        match &self.client {
            Some(options) => options.shown_command.clone(),
            None => format!("ssh -p {} {}@{}", self.port, self.user, self.hostname),
        }
    }

    /// Reads the known_hosts files that apply to this host, and returns their entries. Returns the
    /// cached content if the files have not changed since they were read.
    pub(super) fn load_known_hosts(&self) -> diagnostic::Result<Arc<KnownHosts>> {
        known_hosts::read_known_hosts_cached(&self.known_hosts_files)
            .map_err(|error| error.with_subject(&self.name))
    }
}

/// Runs the command `ssh -G` for a host, and returns the settings of OpenSSH for this host that the
/// command prints. Blocks.
fn query_settings_with_ssh_g(
    host: &HostAddress,
    config_file: Option<&Path>,
    spec: &SshSpec,
    keyword: &UnsupportedSshKeyword,
) -> diagnostic::Result<SshHostSettings> {
    let mut command = Command::new("ssh");
    command.arg("-G");
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
    let reason = match SupervisedChild::run_to_end(command.arg("--").arg(&host.host), SSH_G_TIMEOUT) {
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
        assert_eq!(target.new_keys_file, Some(PathBuf::from("/kh")));
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
        let config = "Host b\nUser x\nHost c\nProxyJump me@b,d:7\nHost q\nProxyJump none\n";
        let (_dir, resolver) = create_resolver(config, |_| ());
        let jumps = resolver.resolve_target(&parse_host("c")).expect("a target").jumps;
        let shown: Vec<_> = jumps.iter().map(|t| (t.user.as_str(), t.hostname.as_str(), t.port)).collect();
        assert_eq!(shown[0], ("me", "b", 22));
        assert_eq!((shown[1].1, shown[1].2), ("d", 7));
        assert!(resolver.resolve_target(&parse_host("q")).expect("a target").jumps.is_empty());
    }

    #[test]
    fn the_configuration_of_a_host_decides_about_the_client() {
        let config = "Host p\nProxyCommand nc %h %p\nHost c\nCertificateFile /c\nHost t\nIdentityFile /%C\n\
                      Host j\nProxyJump c\n";
        let clients = |client: SshClient, host: &str| {
            let (_dir, resolver) = create_resolver(config, |s| s.client = client);
            resolver.resolve_target(&parse_host(host)).map(|target| target.client)
        };
        for (host, option) in
            [("p", "ProxyCommand nc %h %p"), ("c", "CertificateFile /c"), ("j", "CertificateFile /c")]
        {
            let options = clients(SshClient::Auto, host).expect("a target").expect("OpenSSH's client");
            assert_eq!(options.requirement, Some(OpenSshRequirement::new(option)), "{host}");
            let error = clients(SshClient::Builtin, host).expect_err("not supported");
            let is_proxy = host == "p";
            let code = if is_proxy { ssh::SSH_PROXY_UNSUPPORTED } else { ssh::SSH_OPTION_UNSUPPORTED };
            assert!(error.code() == code && error.message().contains(option), "{host}: {error}");
            assert_eq!(error.field("option"), Some(&option.into()));
        }
        assert_eq!(clients(SshClient::Auto, "a").expect("a target"), None);
        assert_eq!(clients(SshClient::Builtin, "a").expect("a target"), None);
        let required = clients(SshClient::OpenSsh, "a").expect("a target").expect("OpenSSH's client");
        assert_eq!(required.requirement, None);
        // OpenSSH's client expands more tokens.
        assert!(clients(SshClient::OpenSsh, "t").is_ok_and(|client| client.is_some()));
        assert!(clients(SshClient::Auto, "t").is_ok_and(|client| client.is_some()));
    }

    #[test]
    fn the_job_decides_before_the_configuration_about_host_keys() {
        use HostKeyPolicy::*;
        for (config, expected) in [
            ("", Strict),
            ("StrictHostKeyChecking ask", Strict),
            ("StrictHostKeyChecking yes", Strict),
            ("StrictHostKeyChecking accept-new", AcceptNew),
            ("StrictHostKeyChecking no", AcceptAny),
            ("StrictHostKeyChecking OFF", AcceptAny),
        ] {
            for (spec, overridden) in [
                (None, expected),
                (Some(KnownHostsPolicy::Strict), Strict),
                (Some(KnownHostsPolicy::AcceptNew), AcceptNew),
            ] {
                let (_dir, resolver) = create_resolver(config, |s| s.known_hosts = spec);
                let target = resolver.resolve_target(&parse_host("a")).expect("a target");
                assert_eq!(target.host_key_policy, overridden, "{config} {spec:?}");
            }
        }
        let (_dir, resolver) = create_resolver("UserKnownHostsFile none", |_| ());
        assert_eq!(resolver.resolve_target(&parse_host("a")).expect("a target").new_keys_file, None);
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
            let (_dir, resolver) = create_resolver(text, |s| s.client = SshClient::Builtin);
            let error = resolver.resolve_target(&parse_host("a")).expect_err(text);
            assert_eq!(error.code(), ssh::SSH_CONFIG_TOKEN_UNKNOWN);
        }
    }
}
