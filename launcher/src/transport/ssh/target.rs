//! Where and how a host is reached: the job, then the SSH configuration, then the usual.
use super::{
    config::{Config, Settings, tilde},
    known_hosts::{self, Known, name_of},
};
use crate::transport::Refusal;
use contract::{
    hosts::{Host, parse_hosts},
    job::{KnownHosts, SshConfig, SshSpec},
};
use nix::unistd::{Uid, User};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

/// Most hosts that are passed on the way to one.
const MAX_JUMPS: usize = 4;
/// Keys that are tried when nothing else is said, as ssh does.
const USUAL_KEYS: [&str; 3] = ["id_ed25519", "id_ecdsa", "id_rsa"];

/// All that connecting to a host needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// As the job names it.
    pub(super) name: String,
    pub(super) hostname: String,
    pub(super) port: u16,
    pub(super) user: String,
    /// Names in known_hosts.
    pub(super) known_as: String,
    pub(super) policy: KnownHosts,
    pub(super) known_hosts: Vec<PathBuf>,
    /// Where a new key is kept.
    pub(super) new_keys: PathBuf,
    pub(super) keys: Vec<PathBuf>,
    /// Keys of the agent that aren't in `keys` are not used.
    pub(super) keys_only: bool,
    /// Socket of the agent, where the environment's isn't meant; `None` in `Some`: no agent.
    pub(super) agent: Option<Option<PathBuf>>,
    pub(super) jumps: Vec<Target>,
    pub(super) timeout: Duration,
}

/// What is the same for all hosts of a job.
#[derive(Debug)]
pub(super) struct Resolver {
    spec: SshSpec,
    config: Config,
    /// `-F` of the `ssh -G` that may have to be asked.
    file: Option<PathBuf>,
    home: PathBuf,
    user: String,
}

impl Resolver {
    /// Reads the SSH configuration; relative paths of the job are relative to `base`.
    pub(super) fn new(spec: &SshSpec, base: &Path) -> Result<Resolver, Refusal> {
        let account = User::from_uid(Uid::current()).ok().flatten();
        let home = std::env::home_dir().or_else(|| account.as_ref().map(|a| a.dir.clone()));
        let home = home.unwrap_or_else(|| PathBuf::from("/"));
        let user = account.map_or_else(|| Uid::current().to_string(), |a| a.name);
        let usual = [home.join(".ssh/config"), PathBuf::from("/etc/ssh/ssh_config")];
        let (files, file) = match &spec.config {
            SshConfig::Usual => (usual.to_vec(), None),
            SshConfig::None => (Vec::new(), Some(PathBuf::from("none"))),
            SshConfig::File(path) => {
                let path = base.join(tilde(&path.to_string_lossy(), &home));
                (vec![path.clone()], Some(path))
            }
        };
        let required = matches!(spec.config, SshConfig::File(_));
        let config = Config::read(&files, required, &home).map_err(|message| Refusal {
            message,
            hint: Some("`cluster.ssh.config` says which file is read; `none` reads none".to_owned()),
        })?;
        let mut spec = spec.clone();
        spec.key = spec.key.map(|key| base.join(tilde(&key.to_string_lossy(), &home)));
        Ok(Resolver { spec, config, file, home, user })
    }

    /// How to reach this host.
    pub(super) fn target(&self, host: &Host) -> Result<Target, Refusal> {
        let settings = self.settings(host)?;
        let mut target = self.direct(host, &settings, &self.spec)?;
        if let Some(command) =
            settings.proxy_command.filter(|c| !c.eq_ignore_ascii_case("none") && self.spec.jump.is_none())
        {
            return Err(Refusal {
                message: format!(
                    "{host}: the SSH configuration reaches it by `ProxyCommand {command}`, which can't be done"
                ),
                hint: Some(
                    "where it only passes another host, say so with `ProxyJump` or `cluster.ssh.jump`"
                        .to_owned(),
                ),
            });
        }
        let jump = self.spec.jump.clone().or(settings.proxy_jump);
        if let Some(jump) = jump.filter(|j| !j.eq_ignore_ascii_case("none")) {
            target.jumps = self.jumps(&target, &jump)?;
        }
        Ok(target)
    }

    /// The hosts on the way, nearest first.
    fn jumps(&self, target: &Target, text: &str) -> Result<Vec<Target>, Refusal> {
        let text = text.strip_prefix("ssh://").unwrap_or(text);
        let hosts = parse_hosts(text).map_err(|f| Refusal {
            message: format!("{}: the jump host `{text}` {}", target.name, f.message),
            hint: None,
        })?;
        if hosts.len() > MAX_JUMPS {
            let message = format!("{}: more than {MAX_JUMPS} jump hosts", target.name);
            return Err(Refusal { message, hint: None });
        }
        // What the job says is of its hosts; a jump host has its own user and port, but is shown the same key.
        let spec = SshSpec { user: None, port: None, ..self.spec.clone() };
        let own = |host: &Host| self.settings(host).and_then(|settings| self.direct(host, &settings, &spec));
        hosts
            .iter()
            .filter(|host| host.host != target.hostname && host.host != target.name)
            .map(own)
            .collect()
    }

    fn settings(&self, host: &Host) -> Result<Settings, Refusal> {
        match &self.config.beyond {
            None => Ok(self.config.settings(&host.host)),
            Some(beyond) => ask_ssh(host, self.file.as_deref(), &self.spec, beyond),
        }
    }

    fn direct(&self, host: &Host, settings: &Settings, spec: &SshSpec) -> Result<Target, Refusal> {
        let hostname = settings.hostname.clone().unwrap_or_else(|| host.host.clone());
        let hostname = hostname.replace("%h", &host.host).replace("%%", "%");
        let user = host.user.clone().or_else(|| spec.user.clone()).or_else(|| settings.user.clone());
        let user = user.unwrap_or_else(|| self.user.clone());
        let port = host.port.or(spec.port).or(settings.port).unwrap_or(22);
        let path = |text: &String| {
            self.path(text, &host.host, &hostname, port, &user).map_err(|message| Refusal {
                message: format!("{host}: {message}"),
                hint: Some("give `cluster.ssh.key` or another `cluster.ssh.config`".to_owned()),
            })
        };
        let paths =
            |texts: &[String]| texts.iter().filter(|t| *t != "none").map(path).collect::<Result<Vec<_>, _>>();
        let usual = ["~/.ssh/known_hosts".to_owned(), "~/.ssh/known_hosts2".to_owned()];
        let system = ["/etc/ssh/ssh_known_hosts".to_owned(), "/etc/ssh/ssh_known_hosts2".to_owned()];
        let mut known_hosts = paths(settings.user_known_hosts.as_deref().unwrap_or(&usual))?;
        let new_keys = known_hosts.first().cloned().unwrap_or_else(|| self.home.join(".ssh/known_hosts"));
        known_hosts.extend(paths(settings.global_known_hosts.as_deref().unwrap_or(&system))?);
        let keys = match &spec.key {
            Some(key) => vec![key.clone()],
            None if !settings.identity_files.is_empty() => paths(&settings.identity_files)?,
            None => USUAL_KEYS.iter().map(|key| self.home.join(".ssh").join(key)).collect(),
        };
        let alias = settings.host_key_alias.as_ref().map(|alias| alias.to_lowercase());
        let agent = match settings.identity_agent.as_deref() {
            None | Some("SSH_AUTH_SOCK") => None,
            Some("none") => Some(None),
            Some(socket) => Some(Some(path(&socket.to_owned())?)),
        };
        Ok(Target {
            name: host.name(),
            known_as: alias.unwrap_or_else(|| name_of(&hostname, port)),
            hostname,
            port,
            user,
            policy: spec.known_hosts,
            known_hosts,
            new_keys,
            keys,
            keys_only: spec.key.is_some() || settings.identities_only == Some(true),
            agent,
            jumps: Vec::new(),
            timeout: Duration::from_millis(spec.connect_timeout_ms),
        })
    }

    /// A path of the configuration with its tokens (ssh_config(5), "TOKENS").
    fn path(
        &self,
        text: &str,
        typed: &str,
        hostname: &str,
        port: u16,
        user: &str,
    ) -> Result<PathBuf, String> {
        let mut out = String::new();
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match (c, if c == '%' { chars.next() } else { None }) {
                ('%', Some('%')) => out.push('%'),
                ('%', Some('d')) => out.push_str(&self.home.to_string_lossy()),
                ('%', Some('h')) => out.push_str(hostname),
                ('%', Some('n')) => out.push_str(typed),
                ('%', Some('p')) => out.push_str(&port.to_string()),
                ('%', Some('r')) => out.push_str(user),
                ('%', Some('u')) => out.push_str(&self.user),
                ('%', other) => {
                    let token = other.map_or(String::new(), String::from);
                    return Err(format!(
                        "the SSH configuration's path `{text}` has `%{token}`, which is not known"
                    ));
                }
                _ => out.push(c),
            }
        }
        match out.contains("${") {
            true => Err(format!("the SSH configuration's path `{text}` has a variable, which is not known")),
            false => Ok(tilde(&out, &self.home)),
        }
    }
}

impl Target {
    /// What the known_hosts files say.
    pub(super) fn known(&self) -> Result<Arc<Known>, String> {
        known_hosts::known(&self.known_hosts)
    }
}

/// What OpenSSH's client says of the host.
fn ask_ssh(host: &Host, file: Option<&Path>, spec: &SshSpec, beyond: &str) -> Result<Settings, Refusal> {
    let mut command = Command::new("ssh");
    command.arg("-G").stdin(Stdio::null());
    if let Some(file) = file {
        command.arg("-F").arg(file);
    }
    for (option, value) in
        [("-l", host.user.clone().or_else(|| spec.user.clone())), ("-p", host.port.map(|p| p.to_string()))]
    {
        if let Some(value) = value {
            command.args([option, &value]);
        }
    }
    let why = match command.arg("--").arg(&host.host).output() {
        Ok(output) if output.status.success() => {
            return Ok(Settings::printed(&String::from_utf8_lossy(&output.stdout)));
        }
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => format!("ssh can't be started: {error}"),
    };
    Err(Refusal {
        message: format!("{host}: the SSH configuration has {beyond}, which only `ssh -G` can judge: {why}"),
        hint: Some("install OpenSSH's client here, or name another file as `cluster.ssh.config`".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn resolver(config: &str, spec: impl FnOnce(&mut SshSpec)) -> (tempfile::TempDir, Resolver) {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("config"), config).expect("a file");
        let mut ssh = crate::testing::job().cluster.ssh;
        ssh.config = SshConfig::File("config".into());
        spec(&mut ssh);
        let resolver = Resolver::new(&ssh, dir.path()).expect("a configuration");
        (dir, resolver)
    }

    fn host(text: &str) -> Host {
        parse_hosts(text).expect(text).remove(0)
    }

    #[test]
    fn the_host_then_the_job_then_the_configuration() {
        let config = "Host a\nHostName %h.lan\nUser cfg\nPort 7\nIdentityFile /k/%r@%h:%p\nUserKnownHostsFile /kh\nIdentitiesOnly yes\n";
        let (_dir, plain) = resolver(config, |_| ());
        let target = plain.target(&host("a")).expect("a target");
        assert_eq!((target.hostname.as_str(), target.port, target.user.as_str()), ("a.lan", 7, "cfg"));
        assert_eq!(target.keys, [PathBuf::from("/k/cfg@a.lan:7")]);
        assert_eq!((target.known_as.as_str(), target.keys_only), ("[a.lan]:7", true));
        assert_eq!(target.new_keys, PathBuf::from("/kh"));
        let (dir, job) =
            resolver(config, |s| (s.user, s.port, s.key) = (Some("job".into()), Some(8), Some("key".into())));
        let target = job.target(&host("a")).expect("a target");
        assert_eq!(
            (target.port, target.user.as_str(), &target.keys),
            (8, "job", &vec![dir.path().join("key")])
        );
        let target = job.target(&host("own@a:9")).expect("a target");
        assert_eq!((target.port, target.user.as_str()), (9, "own"));
    }

    #[test]
    fn ways_over_other_hosts() {
        let config = "Host b\nUser x\nHost c\nProxyJump me@b,d:7\nHost p\nProxyCommand nc %h %p\nHost q\nProxyJump none\n";
        let (_dir, resolver) = resolver(config, |_| ());
        let jumps = resolver.target(&host("c")).expect("a target").jumps;
        let shown: Vec<_> = jumps.iter().map(|t| (t.user.as_str(), t.hostname.as_str(), t.port)).collect();
        assert_eq!(shown[0], ("me", "b", 22));
        assert_eq!((shown[1].1, shown[1].2), ("d", 7));
        assert!(resolver.target(&host("q")).expect("a target").jumps.is_empty());
        let refusal = resolver.target(&host("p")).expect_err("a command");
        assert!(refusal.message.contains("ProxyCommand nc"), "{refusal:?}");
    }

    #[test]
    fn what_only_ssh_knows_is_asked_of_it() {
        let (_dir, resolver) = resolver("Match host a\nUser matched\nPort 5\n", |_| ());
        match resolver.target(&host("a")) {
            Ok(target) => assert_eq!((target.user.as_str(), target.port), ("matched", 5)),
            Err(refusal) => assert!(refusal.message.contains("can't be started"), "{refusal:?}"),
        }
    }

    #[test]
    fn unknown_tokens_are_refused() {
        for text in ["IdentityFile /%Z", "IdentityFile ${X}/k", "UserKnownHostsFile /%"] {
            let (_dir, resolver) = resolver(text, |_| ());
            let refusal = resolver.target(&host("a")).expect_err(text);
            assert!(refusal.message.contains("not known"), "{refusal:?}");
        }
    }
}
