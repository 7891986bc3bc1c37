//! [`find_openssh_requirement`]: finds a setting of a host in the SSH configuration that only
//! OpenSSH's client supports, and not launch's built-in client.
use super::supervised_child::SupervisedChild;
use crate::{
    cluster::ssh::{
        known_hosts::{KnownHosts, decode_base64},
        ssh_config::SshHostSettings,
    },
    private_files::read_without_blocking,
};
use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

/// The number of bytes of an SSH key file that are read to determine the type of the key.
const MAX_KEY_BYTES: u64 = 16 << 10;
/// The time limit of the program `klist`, by which launch determines whether the user has a
/// Kerberos ticket.
const KLIST_TIMEOUT: Duration = Duration::from_secs(2);
/// The SSH key types for private keys that are stored on a hardware key (FIDO).
const HARDWARE_KEY_TYPES: [&str; 2] = ["sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"];
/// The names of the key files in `~/.ssh` for keys on hardware keys (FIDO) that OpenSSH's client
/// tries without configuration.
const DEFAULT_HARDWARE_KEYS: [&str; 2] = ["id_ecdsa_sk", "id_ed25519_sk"];

/// The keywords of the SSH configuration that only OpenSSH's client supports, and not launch's
/// built-in client. Each one is given in lower case and as documented, with the values that require
/// nothing.
const OPENSSH_ONLY_KEYWORDS: &[(&str, &str, &[&str])] = &[
    ("controlpath", "ControlPath", &["none"]),
    ("certificatefile", "CertificateFile", &["none"]),
    ("hostbasedauthentication", "HostbasedAuthentication", &["no", "false"]),
    ("pubkeyauthentication", "PubkeyAuthentication", &["yes", "true", "unbound", "host-bound"]),
    ("pkcs11provider", "PKCS11Provider", &["none"]),
    ("securitykeyprovider", "SecurityKeyProvider", &["internal", "none"]),
    ("knownhostscommand", "KnownHostsCommand", &["none"]),
    ("revokedhostkeys", "RevokedHostKeys", &["none"]),
    ("verifyhostkeydns", "VerifyHostKeyDNS", &["no", "false", "ask"]),
    ("bindaddress", "BindAddress", &[]),
    ("bindinterface", "BindInterface", &[]),
    ("addressfamily", "AddressFamily", &["any"]),
];

/// The reason for which launch connects to a host through OpenSSH's client: a setting or file of
/// the host that the built-in client does not support.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cluster::ssh) struct OpenSshRequirement {
    /// The setting as in the configuration, or the path of the file with its meaning.
    pub(in crate::cluster::ssh) option: String,
}

impl OpenSshRequirement {
    /// Creates an [`OpenSshRequirement`] from the text of the setting or the name of the file that
    /// the built-in SSH client does not support.
    pub(in crate::cluster::ssh) fn new(option: impl Into<String>) -> OpenSshRequirement {
        OpenSshRequirement { option: option.into() }
    }
}

/// The paths of the SSH key files and known_hosts files that apply to a host, which may contain
/// entries that the built-in SSH client does not support.
pub(in crate::cluster::ssh) struct HostSshFiles<'a> {
    /// The files of private keys.
    pub(in crate::cluster::ssh) keys: &'a [PathBuf],
    /// Whether `keys` are the default ones.
    pub(in crate::cluster::ssh) has_default_keys: bool,
    /// The directory `.ssh` of the user.
    pub(in crate::cluster::ssh) user_directory: &'a Path,
    pub(in crate::cluster::ssh) known_hosts: Option<&'a KnownHosts>,
    /// The name of the host in known_hosts.
    pub(in crate::cluster::ssh) known_hosts_name: &'a str,
}

/// Finds the first setting or file of a host that only OpenSSH's client supports, and not the
/// built-in client. Proxies are not considered. May run `klist`.
pub(in crate::cluster::ssh) fn find_openssh_requirement(
    settings: &SshHostSettings,
    files: &HostSshFiles<'_>,
) -> Option<OpenSshRequirement> {
    find_openssh_only_keyword(settings)
        .or_else(|| find_openssh_only_key(files))
        .or_else(|| {
            let known_hosts = files.known_hosts?;
            let has_authority = known_hosts.has_certificate_authority(files.known_hosts_name);
            let option = || format!("@cert-authority in known_hosts for {}", files.known_hosts_name);
            has_authority.then(|| OpenSshRequirement::new(option()))
        })
        .or_else(|| {
            let uses_kerberos =
                settings.other.get("gssapiauthentication").is_some_and(|v| is_setting_switched_on(v));
            let option = "GSSAPIAuthentication yes, with a Kerberos ticket";
            (uses_kerberos && has_kerberos_ticket()).then(|| OpenSshRequirement::new(option))
        })
}

/// Returns whether a value in the SSH configuration, such as `yes`, switches its setting on.
fn is_setting_switched_on(value: &str) -> bool {
    ["yes", "true"].iter().any(|yes| value.eq_ignore_ascii_case(yes))
}

/// Finds the first keyword in the SSH configuration of a host that only OpenSSH's client supports.
fn find_openssh_only_keyword(settings: &SshHostSettings) -> Option<OpenSshRequirement> {
    let requires = |(keyword, name, harmless): &(&str, &str, &[&str])| {
        let value = settings.other.get(*keyword)?;
        let is_harmless = harmless.iter().any(|harmless| value.eq_ignore_ascii_case(harmless));
        (!is_harmless).then(|| OpenSshRequirement::new(format!("{name} {value}")))
    };
    let methods = settings.other.get("preferredauthentications");
    let excludes_keys = methods.filter(|list| !list.split(',').any(|method| method == "publickey"));
    OPENSSH_ONLY_KEYWORDS.iter().find_map(requires).or_else(|| {
        excludes_keys.map(|list| OpenSshRequirement::new(format!("PreferredAuthentications {list}")))
    })
}

/// Finds an SSH key file that the built-in SSH client cannot use, because a certificate belongs to
/// the key or the key is on a hardware key.
fn find_openssh_only_key(files: &HostSshFiles<'_>) -> Option<OpenSshRequirement> {
    for key in files.keys {
        let mut certificate = key.as_os_str().to_owned();
        certificate.push("-cert.pub");
        let certificate = PathBuf::from(certificate);
        if certificate.exists() {
            return Some(OpenSshRequirement::new(format!("the certificate {}", certificate.display())));
        }
        if is_hardware_key(key) {
            return Some(OpenSshRequirement::new(format!("the hardware key {}", key.display())));
        }
    }
    let defaults = DEFAULT_HARDWARE_KEYS.iter().filter(|_| files.has_default_keys);
    let mut existing = defaults.map(|name| files.user_directory.join(name)).filter(|key| key.exists());
    existing.next().map(|key| OpenSshRequirement::new(format!("the hardware key {}", key.display())))
}

/// Returns whether the private key of an SSH key file is stored on a hardware key.
fn is_hardware_key(key: &Path) -> bool {
    let Ok(bytes) = read_without_blocking(key, MAX_KEY_BYTES) else { return false };
    let Ok(text) = String::from_utf8(bytes) else { return false };
    // The public key at the beginning of the file is not encrypted.
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('-'));
    let Some(bytes) = decode_base64(&lines.collect::<String>()) else { return false };
    let has = |name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
    HARDWARE_KEY_TYPES.iter().any(|name| has(name))
}

/// Returns whether the user has a Kerberos ticket, with which OpenSSH's client can log in. The
/// result is determined once.
fn has_kerberos_ticket() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let klist = SupervisedChild::run_to_end(Command::new("klist").arg("-s"), KLIST_TIMEOUT);
        klist.is_ok_and(|output| output.status.success())
    })
}

#[cfg(test)]
mod tests {
    use super::{super::client_options::read_settings, *};

    /// Finds the requirement of the host `a` with this SSH configuration, and with keys in the
    /// directory `dir`.
    fn find(config: &str, dir: &Path, keys: &[&str]) -> Option<String> {
        let keys: Vec<PathBuf> = keys.iter().map(|key| dir.join(key)).collect();
        let files = HostSshFiles {
            keys: &keys,
            has_default_keys: keys.is_empty(),
            user_directory: dir,
            known_hosts: None,
            known_hosts_name: "a",
        };
        find_openssh_requirement(&read_settings(config, "a"), &files).map(|found| found.option)
    }

    #[test]
    fn keywords_of_openssh_require_its_client() {
        let dir = tempfile::tempdir().expect("a directory");
        for (config, expected) in [
            ("CertificateFile ~/c.pub", Some("CertificateFile ~/c.pub")),
            ("ControlPath ~/.ssh/%C", Some("ControlPath ~/.ssh/%C")),
            ("PKCS11Provider /usr/lib/p.so", Some("PKCS11Provider /usr/lib/p.so")),
            ("HostbasedAuthentication yes", Some("HostbasedAuthentication yes")),
            ("PubkeyAuthentication no", Some("PubkeyAuthentication no")),
            ("AddressFamily inet6", Some("AddressFamily inet6")),
            ("PreferredAuthentications gssapi-with-mic", Some("PreferredAuthentications gssapi-with-mic")),
            ("PreferredAuthentications gssapi-with-mic,publickey", None),
            ("ControlPath none\nControlMaster auto\nPubkeyAuthentication yes\nAddressFamily any", None),
            ("Host b\nCertificateFile ~/c.pub", None),
            ("KexAlgorithms curve25519-sha256\nStrictHostKeyChecking no\nPort 5", None),
        ] {
            assert_eq!(find(config, dir.path(), &["k"]).as_deref(), expected, "{config}");
        }
    }

    #[test]
    fn certificates_and_hardware_keys_require_openssh() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
        write("plain", "-----BEGIN OPENSSH PRIVATE KEY-----\nc3NoLWVkMjU1MTk=\n-----END\n");
        assert_eq!(find("", dir.path(), &["plain", "missing"]), None);
        // openssh-key-v1 … sk-ssh-ed25519@openssh.com
        write("sk", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAAc2stc3NoLWVkMjU1MTlAb3BlbnNzaC5jb20=\n");
        assert!(find("", dir.path(), &["plain", "sk"]).is_some_and(|f| f.starts_with("the hardware key")));
        write("id_ed25519_sk", "");
        assert!(find("", dir.path(), &[]).is_some_and(|f| f.ends_with("id_ed25519_sk")));
        assert_eq!(find("", dir.path(), &["plain"]), None, "another key is configured");
        write("plain-cert.pub", "");
        assert!(find("", dir.path(), &["plain"]).is_some_and(|f| f.starts_with("the certificate")));
    }
}
