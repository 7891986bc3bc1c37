//! [`ClientOptions`]: builds the command line with which OpenSSH's client (`ssh`) connects to one
//! host.
use super::openssh_requirement::OpenSshRequirement;
use crate::cluster::ssh::ssh_config::SshHostSettings;
use jobspec::{
    KnownHosts as KnownHostsPolicy, SshSpec,
    hosts::{HostAddress, parse_hosts},
};
use std::{path::Path, time::Duration};

/// The interval, in seconds, at which OpenSSH's client sends keepalive messages on an idle
/// connection.
const KEEPALIVE_INTERVAL_S: u32 = 15;
/// The number of unanswered keepalive messages after which OpenSSH's client closes the connection.
const MAX_UNANSWERED_KEEPALIVES: u32 = 2;

/// The options of OpenSSH's client that launch sets in the same way for every host. They override
/// the configuration where a setting would prompt, open other connections, or change what the
/// connection carries.
const FIXED_OPTIONS: [&str; 7] = [
    "BatchMode=yes",
    "ClearAllForwardings=yes",
    // A connection that others share may be used, but is never left behind.
    "ControlMaster=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "ForwardAgent=no",
    "ForwardX11=no",
];

/// The command line options with which OpenSSH's client connects to a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cluster::ssh) struct ClientOptions {
    /// The arguments before the remote command. They end with `--` and the name of the host.
    pub(super) arguments: Vec<String>,
    /// The command that the user can try.
    pub(in crate::cluster::ssh) shown_command: String,
    /// The jump hosts or the proxy command; `None` for a direct connection.
    pub(in crate::cluster::ssh) proxy: Option<String>,
    /// The time limit for connecting and logging in.
    pub(super) login_timeout: Duration,
    /// Why this client was chosen; `None` if the job requires it.
    pub(in crate::cluster::ssh) requirement: Option<OpenSshRequirement>,
}

impl ClientOptions {
    /// Builds the options with which OpenSSH's client connects to a host of the job. `settings` are
    /// those of the host in the SSH configuration, and `config_file` is the file that
    /// `cluster.ssh.config` selects.
    pub(in crate::cluster::ssh) fn new(
        host: &HostAddress,
        spec: &SshSpec,
        settings: &SshHostSettings,
        config_file: Option<&Path>,
        requirement: Option<OpenSshRequirement>,
    ) -> ClientOptions {
        let mut arguments = build_common_arguments(spec, config_file);
        arguments.extend(["-o", "LogLevel=DEBUG1"].map(str::to_owned));
        let address = HostAddress {
            user: host.user.clone().or_else(|| spec.user.clone()),
            port: host.port.or(spec.port),
            host: host.host.clone(),
        };
        let (job_jump, jump_option) = match spec.jump.as_deref() {
            None => (None, None),
            Some(jump) => match find_job_jump_host(jump, &address, settings) {
                Some(jump) => {
                    let proxy = build_proxy_command(&jump, spec, config_file);
                    (Some(jump.to_string()), Some(format!("ProxyCommand={proxy}")))
                }
                None => (None, Some("ProxyCommand=none".to_owned())),
            },
        };
        let is_set = |value: &&String| !value.eq_ignore_ascii_case("none");
        let configured = settings.proxy_jump.as_ref().or(settings.proxy_command.as_ref()).filter(is_set);
        let proxy = if spec.jump.is_some() { job_jump } else { configured.cloned() };
        let hops = match (&proxy, &spec.jump, &settings.proxy_jump) {
            (Some(proxy), None, Some(_)) => 1 + proxy.matches(',').count() as u32,
            (proxy, ..) => u32::from(proxy.is_some()),
        };
        arguments.extend(jump_option.into_iter().flat_map(|option| ["-o".to_owned(), option]));
        arguments.extend(build_destination_arguments(&address));
        ClientOptions {
            shown_command: format_ssh_command_for_user(&address, spec, config_file, &proxy),
            arguments,
            proxy,
            // Half of the limit is for the connection, and half for the login.
            login_timeout: Duration::from_millis(spec.connect_timeout_ms) * 2 * (1 + hops),
            requirement,
        }
    }
}

/// Divides the time limit for connecting to a host evenly among the host's IP addresses, and
/// returns the limit for each address in seconds. OpenSSH's client tries the addresses one after
/// another, and applies its limit to each. Returns `None` if the host has one address.
pub(super) fn divide_connect_timeout(timeout: Duration, addresses: usize) -> Option<u64> {
    (addresses > 1).then(|| (timeout.as_secs() / addresses as u64).max(1))
}

/// Builds the `ssh` arguments from the job's SSH settings that apply to the host and to the jump
/// host alike.
fn build_common_arguments(spec: &SshSpec, config_file: Option<&Path>) -> Vec<String> {
    let mut arguments: Vec<String> = vec!["-T".to_owned()];
    if let Some(file) = config_file {
        arguments.extend(["-F".to_owned(), file.to_string_lossy().into_owned()]);
    }
    let mut options: Vec<String> = FIXED_OPTIONS.map(str::to_owned).to_vec();
    options.push(format!("ConnectTimeout={}", spec.connect_timeout_ms.div_ceil(1000)));
    options.push(format!("ServerAliveInterval={KEEPALIVE_INTERVAL_S}"));
    options.push(format!("ServerAliveCountMax={MAX_UNANSWERED_KEEPALIVES}"));
    if let Some(policy) = spec.known_hosts {
        let value = match policy {
            KnownHostsPolicy::Strict => "yes",
            KnownHostsPolicy::AcceptNew => "accept-new",
        };
        options.push(format!("StrictHostKeyChecking={value}"));
    }
    if spec.key.is_some() {
        options.push("IdentitiesOnly=yes".to_owned());
    }
    arguments.extend(options.into_iter().flat_map(|option| ["-o".to_owned(), option]));
    if let Some(key) = &spec.key {
        arguments.extend(["-i".to_owned(), key.to_string_lossy().into_owned()]);
    }
    arguments
}

/// Builds the `ssh` arguments that select the user, the port and the name of the host to connect
/// to. The name cannot be taken for an option.
fn build_destination_arguments(host: &HostAddress) -> Vec<String> {
    let mut arguments = Vec::new();
    if let Some(user) = &host.user {
        arguments.extend(["-l".to_owned(), user.clone()]);
    }
    if let Some(port) = host.port {
        arguments.extend(["-p".to_owned(), port.to_string()]);
    }
    arguments.extend(["--".to_owned(), host.host.clone()]);
    arguments
}

/// Returns the address of the jump host that the job configures, or `None` if the setting `jump` is
/// `none` or names the destination host.
fn find_job_jump_host(jump: &str, host: &HostAddress, settings: &SshHostSettings) -> Option<HostAddress> {
    if jump.eq_ignore_ascii_case("none") {
        return None;
    }
    let jump = parse_hosts(jump).ok()?.into_iter().next()?;
    let is_host = jump.host == host.host || Some(&jump.host) == settings.hostname.as_ref();
    (!is_host).then_some(jump)
}

/// Builds the command (`ProxyCommand`) by which OpenSSH's client connects to a host through the
/// jump host of the job. A proxy command gets the key and the other settings of the job, which `ssh
/// -J` would not pass on.
fn build_proxy_command(jump: &HostAddress, spec: &SshSpec, config_file: Option<&Path>) -> String {
    let mut words = vec!["ssh".to_owned()];
    words.extend(build_common_arguments(spec, config_file));
    let destination = build_destination_arguments(jump);
    let quoted = |words: &[String]| words.iter().map(|word| quote_word(word)).collect::<Vec<_>>().join(" ");
    format!("{} -W '[%h]:%p' {}", quoted(&words), quoted(&destination))
}

/// Quotes a word of a `ProxyCommand` for the shell, and doubles each `%` so that `ssh` does not
/// expand it.
fn quote_word(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''").replace('%', "%%"))
}

/// Formats an `ssh` command for error messages, with which the user can repeat launch's connection
/// to a host by hand.
fn format_ssh_command_for_user(
    host: &HostAddress,
    spec: &SshSpec,
    config_file: Option<&Path>,
    proxy: &Option<String>,
) -> String {
    let mut words = vec!["ssh".to_owned()];
    if let Some(file) = config_file {
        words.extend(["-F".to_owned(), file.display().to_string()]);
    }
    if let Some(key) = &spec.key {
        words.extend(["-i".to_owned(), key.display().to_string()]);
    }
    if let (Some(_), Some(jump)) = (&spec.jump, proxy) {
        words.extend(["-J".to_owned(), jump.clone()]);
    }
    words.extend(host.port.iter().flat_map(|port| ["-p".to_owned(), port.to_string()]));
    words.push(match &host.user {
        Some(user) => format!("{user}@{}", host.host),
        None => host.host.clone(),
    });
    words.join(" ")
}

/// Returns the settings of a host in `config`, the text of an SSH configuration, for tests.
#[cfg(test)]
pub(super) fn read_settings(config: &str, host: &str) -> SshHostSettings {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("config");
    std::fs::write(&file, config).expect("a file");
    crate::cluster::ssh::ssh_config::SshConfigLines::read_files(&[file], true, dir.path())
        .expect("a configuration")
        .find_settings(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds the options for the host `host` of a job, with this SSH configuration. `change`
    /// modifies the settings of the job.
    fn build_options(host: &str, config: &str, change: impl FnOnce(&mut SshSpec)) -> ClientOptions {
        let mut spec = crate::testing::sample_job().cluster.ssh;
        change(&mut spec);
        let host = parse_hosts(host).expect("a host").remove(0);
        ClientOptions::new(&host, &spec, &read_settings(config, &host.host), Some(Path::new("/c f")), None)
    }

    /// Returns whether the arguments contain `option` followed by `value`.
    fn has(options: &ClientOptions, option: &str, value: &str) -> bool {
        options.arguments.windows(2).any(|pair| pair == [option, value])
    }

    #[test]
    fn settings_of_the_job_become_options() {
        let options = build_options("me@a:9", "", |spec| {
            spec.connect_timeout_ms = 1500;
            spec.known_hosts = Some(KnownHostsPolicy::AcceptNew);
            spec.key = Some("/k".into());
        });
        for (option, value) in [
            ("-F", "/c f"),
            ("-l", "me"),
            ("-p", "9"),
            ("-i", "/k"),
            ("-o", "BatchMode=yes"),
            ("-o", "ConnectTimeout=2"),
            ("-o", "StrictHostKeyChecking=accept-new"),
            ("-o", "IdentitiesOnly=yes"),
            ("--", "a"),
        ] {
            assert!(has(&options, option, value), "{option} {value}: {:?}", options.arguments);
        }
        assert_eq!(options.arguments.last().map(String::as_str), Some("a"));
        assert_eq!((options.proxy, options.login_timeout), (None, Duration::from_secs(3)));
        assert_eq!(options.shown_command, "ssh -F /c f -i /k -p 9 me@a");
        let plain = build_options("a", "", |_| ());
        assert!(!plain.arguments.iter().any(|a| a.contains("StrictHostKeyChecking") || a == "-l"));
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_others() {
        let timeouts = [1, 2, 3, 20].map(|n| divide_connect_timeout(Duration::from_secs(10), n));
        assert_eq!(timeouts, [None, Some(5), Some(3), Some(1)]);
    }

    #[test]
    fn proxies_of_the_configuration_are_left_to_the_client() {
        let config = "Host a\nProxyJump b,c\nHost p\nProxyCommand nc %h %p\n";
        let jump = build_options("a", config, |_| ());
        assert_eq!(jump.proxy.as_deref(), Some("b,c"));
        assert_eq!(jump.login_timeout, Duration::from_secs(60), "20 s for each of three hosts");
        let command = build_options("p", config, |_| ());
        assert_eq!(command.proxy.as_deref(), Some("nc %h %p"));
        assert!(!command.arguments.iter().any(|a| a.starts_with("Proxy")));
        let none = build_options("p", config, |spec| spec.jump = Some("none".into()));
        assert!(none.proxy.is_none() && has(&none, "-o", "ProxyCommand=none"));
    }

    #[test]
    fn the_jump_host_of_the_job_gets_the_settings_of_the_job() {
        let options = build_options("a", "Host a\nProxyJump other\n", |spec| {
            spec.jump = Some("j@b:7".into());
            spec.key = Some("/it's 5%/k".into());
        });
        let proxy = options.arguments.iter().find_map(|a| a.strip_prefix("ProxyCommand=")).expect("a proxy");
        assert!(proxy.starts_with("'ssh' '-T' '-F' '/c f' '-o' 'BatchMode=yes'"), "{proxy}");
        assert!(proxy.contains("'-i' '/it'\\''s 5%%/k'"), "{proxy}");
        assert!(proxy.ends_with("-W '[%h]:%p' '-l' 'j' '-p' '7' '--' 'b'"), "{proxy}");
        assert_eq!(options.proxy.as_deref(), Some("j@b:7"));
        let same = build_options("b", "", |spec| spec.jump = Some("b".into()));
        assert!(same.proxy.is_none(), "a host is no jump host of itself");
    }
}
