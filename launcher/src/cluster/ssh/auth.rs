//! Logs in to an SSH server with the keys of the SSH agent and with key files.
//!
//! Passwords and passphrases are not supported, because launch never prompts while a job starts.
use super::{known_hosts, ssh_error::build_ssh_error, target::SshTarget};
use crate::private_files::read_without_blocking;
use diagnostic::{Diagnostic, codes::ssh};
use ssh2::{Agent, ErrorCode, PublicKey, Session};
use std::{
    io,
    path::{Path, PathBuf},
};

/// The largest number of user keys that are offered to one SSH server at a login. Further keys are
/// skipped, because OpenSSH's server disconnects after six rejected keys.
const MAX_OFFERED_KEYS: usize = 5;
/// The largest number of bytes that are read from an SSH key file of the user. The rest of a longer
/// file is ignored.
const MAX_KEY_BYTES: u64 = 64 << 10;

/// Logs in to the SSH server of `target` as the configured user, first with the keys of the SSH
/// agent (`ssh-agent`) and then with key files. Blocks. Fails if no key is accepted. The error
/// lists the result of each key.
pub(super) fn log_in(target: &SshTarget, session: &Session) -> diagnostic::Result<()> {
    let mut attempts = LoginAttempts::default();
    let agent = connect_ssh_agent_and_list_keys(target, session, &mut attempts);
    let public_keys: Vec<Option<String>> = target.keys.iter().map(|key| read_public_key(key)).collect();
    if let Some((agent, identities)) = &agent {
        // Keys that the configuration names are offered first.
        let is_configured = |key: &&PublicKey| {
            public_keys.iter().flatten().any(|public| *public == known_hosts::encode_base64(key.blob()))
        };
        let (configured, others): (Vec<&PublicKey>, Vec<&PublicKey>) =
            identities.iter().partition(is_configured);
        let others = if target.configured_keys_only { Vec::new() } else { others };
        for key in configured.into_iter().chain(others) {
            let name = format!("the key `{}` of the SSH agent", escape_comment(key.comment()));
            if attempts.offer_key(name, || agent.userauth(&target.user, key)) {
                return Ok(());
            }
        }
    }
    let is_in_agent = |public_key: &Option<String>| {
        let identities = agent.iter().flat_map(|(_, keys)| keys);
        public_key.as_ref().is_some_and(|public| {
            identities.into_iter().any(|key| known_hosts::encode_base64(key.blob()) == *public)
        })
    };
    for (key, _) in target.keys.iter().zip(&public_keys).filter(|(_, public)| !is_in_agent(public)) {
        match inspect_key_file(key) {
            KeyFileState::Missing => attempts.record_result(format!("{} does not exist", key.display())),
            KeyFileState::Unreadable(error) => {
                attempts.record_result(format!("{} cannot be read: {error}", key.display()));
            }
            KeyFileState::Damaged => attempts.record_result(format!("{} is damaged", key.display())),
            KeyFileState::NotAKey => {
                attempts.record_result(format!("{} is not a private key", key.display()))
            }
            KeyFileState::Locked => {
                attempts.locked_key.get_or_insert_with(|| key.clone());
                attempts.record_result(format!("{} has a passphrase", key.display()));
            }
            KeyFileState::Usable => {
                let login = || session.userauth_pubkey_file(&target.user, None, key, None);
                if attempts.offer_key(key.display().to_string(), login) {
                    return Ok(());
                }
            }
        }
    }
    Err(attempts.into_login_error(target, session))
}

/// The results of one login to an SSH server: which of the user's keys were offered or skipped, and
/// why each failed.
#[derive(Default)]
struct LoginAttempts {
    /// The number of keys that were offered to the server.
    offered: usize,
    /// The result of each key, for the error message.
    results: Vec<String>,
    /// The first key file that has a passphrase.
    locked_key: Option<PathBuf>,
}

impl LoginAttempts {
    /// Tries to log in to the SSH server with the key called `name` by calling `login`, and records
    /// why the key failed. Skips the key if [`MAX_OFFERED_KEYS`] keys were offered already. Returns
    /// whether the login succeeded.
    fn offer_key(&mut self, name: String, login: impl FnOnce() -> Result<(), ssh2::Error>) -> bool {
        if self.offered >= MAX_OFFERED_KEYS {
            self.record_result(format!("{name} was not tried (at most {MAX_OFFERED_KEYS} keys are)"));
            return false;
        }
        self.offered += 1;
        match login() {
            Ok(()) => return true,
            // LIBSSH2_ERROR_AUTHENTICATION_FAILED, LIBSSH2_ERROR_PUBLICKEY_UNVERIFIED
            Err(e) if matches!(e.code(), ErrorCode::Session(-18 | -19)) => {
                self.record_result(format!("{name} was rejected"));
            }
            Err(e) => self.record_result(format!("{name}: {}", e.message())),
        }
        false
    }

    /// Records why a key did not lead to a login to the SSH server, for the error message.
    fn record_result(&mut self, result: String) {
        self.results.push(result);
    }

    /// Builds the error that the SSH server of the host `target` did not accept any of the user's
    /// keys, with the result of each key.
    fn into_login_error(self, target: &SshTarget, session: &Session) -> Diagnostic {
        let methods = session.auth_methods(&target.user).unwrap_or_default().to_owned();
        let no_publickey = !methods.is_empty() && !methods.split(',').any(|m| m == "publickey");
        let (code, help) = match &self.locked_key {
            Some(key) => (
                ssh::SSH_KEY_LOCKED,
                format!("add the key to the SSH agent first: `ssh-add {}`", key.display()),
            ),
            None if no_publickey => (
                ssh::SSH_PUBLICKEY_UNSUPPORTED,
                format!(
                    "the server accepts {methods}, and launch logs in with public keys only; \
                     enable `PubkeyAuthentication` in its sshd_config"
                ),
            ),
            None => (
                ssh::SSH_LOGIN_FAILED,
                format!(
                    "make `ssh -p {} {}@{}` work without a password, for example with `ssh-copy-id`; \
                     `cluster.ssh.user` and `cluster.ssh.key` select the user and the key",
                    target.port, target.user, target.hostname
                ),
            ),
        };
        let results =
            if self.results.is_empty() { "no key was found".to_owned() } else { self.results.join(", ") };
        let message =
            format!("authentication on host {} failed for user `{}`: {results}", target.name, target.user);
        build_ssh_error(target, code, message)
            .with_field("user", target.user.as_str())
            .with_field("attempts", self.results)
            .with_help(help)
    }
}

/// Connects to the SSH agent (`ssh-agent`) of the user and lists its keys. Returns `None` if there
/// is no SSH agent, or if it does not answer.
fn connect_ssh_agent_and_list_keys(
    target: &SshTarget,
    session: &Session,
    attempts: &mut LoginAttempts,
) -> Option<(Agent, Vec<PublicKey>)> {
    let socket = match &target.agent {
        Some(None) => return None,
        Some(Some(socket)) => Some(socket.clone()),
        None => std::env::var_os(jobspec::env::SSH_AUTH_SOCK).filter(|s| !s.is_empty()).map(PathBuf::from),
    }?;
    let mut agent = session.agent().ok()?;
    let connected = agent.set_identity_path(&socket).and_then(|()| agent.connect());
    let identities = connected.and_then(|()| agent.list_identities()).and_then(|()| agent.identities());
    match identities {
        Ok(identities) => Some((agent, identities)),
        Err(error) => {
            attempts.record_result(format!(
                "the SSH agent at {} does not answer ({})",
                socket.display(),
                error.message()
            ));
            None
        }
    }
}

/// Returns the first 80 characters of an SSH key's comment, with control characters escaped.
fn escape_comment(comment: &str) -> String {
    comment.chars().take(80).flat_map(char::escape_debug).collect()
}

/// Reads the public SSH key that is stored next to a private key file (`FILE.pub`). Returns the key
/// as base64, or `None` if the file cannot be read or holds no key.
fn read_public_key(private_key: &Path) -> Option<String> {
    let mut name = private_key.as_os_str().to_owned();
    name.push(".pub");
    let text = read_key_file(Path::new(&name)).ok()?;
    text.split_whitespace().nth(1).map(str::to_owned)
}

/// Reads an SSH key file of the user as text. Ignores everything after the first [`MAX_KEY_BYTES`].
fn read_key_file(file: &Path) -> io::Result<String> {
    let bytes = read_without_blocking(file, MAX_KEY_BYTES)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// The state of an SSH key file: usable without a passphrase, or the reason why launch cannot use
/// the key in it.
#[derive(Debug)]
enum KeyFileState {
    Missing,
    Unreadable(io::Error),
    Damaged,
    NotAKey,
    /// The private key has a passphrase.
    Locked,
    Usable,
}

/// Determines whether a file contains a private SSH key that launch can use without asking for a
/// passphrase.
fn inspect_key_file(file: &Path) -> KeyFileState {
    let text = match read_key_file(file) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return KeyFileState::Missing,
        Err(e) => return KeyFileState::Unreadable(e),
    };
    let mut lines = text.lines().map(str::trim);
    match lines.next() {
        Some("-----BEGIN OPENSSH PRIVATE KEY-----") => {
            let body: String = lines.take_while(|l| !l.starts_with('-')).collect();
            match parse_private_key_cipher(&body) {
                Some(cipher) if cipher == b"none" => KeyFileState::Usable,
                Some(_) => KeyFileState::Locked,
                None => KeyFileState::Damaged,
            }
        }
        Some("-----BEGIN ENCRYPTED PRIVATE KEY-----") => KeyFileState::Locked,
        Some(first) if first.starts_with("-----BEGIN ") && first.ends_with("PRIVATE KEY-----") => {
            if text.contains("ENCRYPTED") { KeyFileState::Locked } else { KeyFileState::Usable }
        }
        _ => KeyFileState::NotAKey,
    }
}

/// Parses the name of the cipher with which a private key in OpenSSH's format is encrypted. The
/// cipher `none` means that the key has no passphrase. Returns `None` if the key is malformed.
fn parse_private_key_cipher(base64: &str) -> Option<Vec<u8>> {
    let bytes = known_hosts::decode_base64(base64)?;
    let rest = bytes.strip_prefix(b"openssh-key-v1\0")?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    rest.get(..u32::from_be_bytes(*length) as usize).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, process::Command};

    #[test]
    fn keys_with_a_passphrase_are_recognized() {
        let dir = tempfile::tempdir().expect("a directory");
        let generate = |name: &str, arguments: &[&str]| {
            let file = dir.path().join(name);
            let output = Command::new("ssh-keygen").args(["-q", "-f"]).arg(&file).args(arguments).output();
            output.is_ok_and(|o| o.status.success()).then_some(file)
        };
        for (name, arguments, locked) in [
            ("open", &["-t", "ed25519", "-N", ""][..], false),
            ("locked", &["-t", "ed25519", "-N", "secret"], true),
            ("pem", &["-t", "rsa", "-m", "PEM", "-N", ""], false),
            ("locked-pem", &["-t", "rsa", "-m", "PEM", "-N", "secret"], true),
            ("pkcs8", &["-t", "ecdsa", "-m", "PKCS8", "-N", "secret"], true),
        ] {
            if let Some(file) = generate(name, arguments) {
                let key = inspect_key_file(&file);
                assert!(
                    if locked {
                        matches!(key, KeyFileState::Locked)
                    } else {
                        matches!(key, KeyFileState::Usable)
                    },
                    "{name}: {key:?}"
                );
                assert!(read_public_key(&file).is_some(), "{name}");
            }
        }
    }

    #[test]
    fn files_without_a_usable_key_are_recognized() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("k");
        assert!(matches!(inspect_key_file(&file), KeyFileState::Missing));
        for text in ["", "ssh-ed25519 AAAA"] {
            fs::write(&file, text).expect("a file");
            assert!(matches!(inspect_key_file(&file), KeyFileState::NotAKey), "{text}");
        }
        fs::write(&file, "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\n-----END").expect("a file");
        assert!(matches!(inspect_key_file(&file), KeyFileState::Damaged));
        // The length of the cipher's name reaches beyond the end.
        let key = known_hosts::encode_base64(b"openssh-key-v1\0\xff\xff\xff\xffnone");
        assert_eq!(parse_private_key_cipher(&key), None);
    }
}
