//! Who we are: keys of the agent and keys in files. No passwords: nobody is asked while a job starts.
use super::{connect::refuse, known_hosts, target::Target};
use crate::transport::Refusal;
use ssh2::{Agent, ErrorCode, PublicKey, Session};
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Keys that are shown to one server (OpenSSH's hangs up after six).
const MAX_TRIES: usize = 5;
/// Most of a key file that is read, bytes.
const MAX_KEY: u64 = 64 << 10;

/// Lets the user in, or says what was tried.
pub(super) fn authenticate(target: &Target, session: &Session) -> Result<(), Refusal> {
    let mut tried = Tried::default();
    let agent = agent(target, session, &mut tried);
    let own: Vec<Option<String>> = target.keys.iter().map(|key| public(key)).collect();
    if let Some((agent, identities)) = &agent {
        // first those that the configuration names, then the others
        let named =
            |key: &&PublicKey| own.iter().flatten().any(|own| *own == known_hosts::encode(key.blob()));
        let (first, rest): (Vec<&PublicKey>, Vec<&PublicKey>) = identities.iter().partition(named);
        let rest = if target.keys_only { Vec::new() } else { rest };
        for key in first.into_iter().chain(rest) {
            let what = format!("the agent's key `{}`", shown(key.comment()));
            if tried.attempt(what, || agent.userauth(&target.user, key)) {
                return Ok(());
            }
        }
    }
    let in_agent = |public: &Option<String>| {
        let listed = agent.iter().flat_map(|(_, keys)| keys);
        public
            .as_ref()
            .is_some_and(|own| listed.into_iter().any(|key| known_hosts::encode(key.blob()) == *own))
    };
    for (key, _) in target.keys.iter().zip(&own).filter(|(_, public)| !in_agent(public)) {
        match usable(key) {
            Key::Missing => tried.said.push(format!("{} is not there", key.display())),
            Key::Unreadable(why) => tried.said.push(format!("{} {why}", key.display())),
            Key::Locked => {
                tried.locked.get_or_insert_with(|| key.clone());
                tried.said.push(format!("{} has a passphrase", key.display()));
            }
            Key::Open => {
                let attempt = || session.userauth_pubkey_file(&target.user, None, key, None);
                if tried.attempt(key.display().to_string(), attempt) {
                    return Ok(());
                }
            }
        }
    }
    Err(tried.refusal(target, session))
}

#[derive(Default)]
struct Tried {
    attempts: usize,
    said: Vec<String>,
    locked: Option<PathBuf>,
}

impl Tried {
    fn attempt(&mut self, what: String, show: impl FnOnce() -> Result<(), ssh2::Error>) -> bool {
        if self.attempts >= MAX_TRIES {
            self.said.push(format!("{what} was not tried any more"));
            return false;
        }
        self.attempts += 1;
        match show() {
            Ok(()) => return true,
            Err(e) if matches!(e.code(), ErrorCode::Session(-18 | -19)) => {
                self.said.push(format!("{what} was refused"));
            }
            Err(e) => self.said.push(format!("{what}: {}", e.message())),
        }
        false
    }

    fn refusal(self, target: &Target, session: &Session) -> Refusal {
        let offers = session.auth_methods(&target.user).unwrap_or_default().to_owned();
        let hint = match &self.locked {
            Some(key) => format!("add the key to the agent first: ssh-add {}", key.display()),
            None if !offers.is_empty() && !offers.split(',').any(|m| m == "publickey") => {
                format!(
                    "the server takes {offers}, and launch has keys only: let it take public keys (PubkeyAuthentication)"
                )
            }
            None => format!(
                "let `ssh -p {} {}@{}` in without a question first: ssh-copy-id puts a key there; `cluster.ssh.user` and `cluster.ssh.key` say who and with what",
                target.port, target.user, target.hostname
            ),
        };
        let said =
            if self.said.is_empty() { "there is no key to show".to_owned() } else { self.said.join(", ") };
        refuse(target, &format!("authentication failed for the user `{}`: {said}", target.user), Some(&hint))
    }
}

/// The agent with what it has; `None` where there is none.
fn agent(target: &Target, session: &Session, tried: &mut Tried) -> Option<(Agent, Vec<PublicKey>)> {
    let socket = match &target.agent {
        Some(None) => return None,
        Some(Some(socket)) => Some(socket.clone()),
        None => std::env::var_os(contract::env::SSH_AUTH_SOCK).filter(|s| !s.is_empty()).map(PathBuf::from),
    }?;
    let mut agent = session.agent().ok()?;
    let asked = agent.set_identity_path(&socket).and_then(|()| agent.connect());
    let asked = asked.and_then(|()| agent.list_identities()).and_then(|()| agent.identities());
    match asked {
        Ok(identities) => Some((agent, identities)),
        Err(error) => {
            tried.said.push(format!(
                "the agent at {} does not answer ({})",
                socket.display(),
                error.message()
            ));
            None
        }
    }
}

fn shown(comment: &str) -> String {
    comment.chars().take(80).flat_map(char::escape_debug).collect()
}

/// The public key beside a private one, as base64.
fn public(key: &Path) -> Option<String> {
    let mut name = key.as_os_str().to_owned();
    name.push(".pub");
    let text = read(Path::new(&name)).ok()?;
    text.split_whitespace().nth(1).map(str::to_owned)
}

fn read(file: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(file)?.take(MAX_KEY).read_to_string(&mut text)?;
    Ok(text)
}

#[derive(Debug, PartialEq, Eq)]
enum Key {
    Missing,
    Unreadable(String),
    Locked,
    Open,
}

/// Can the key in this file be used without asking somebody?
fn usable(file: &Path) -> Key {
    let text = match read(file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Key::Missing,
        Err(e) => return Key::Unreadable(format!("can't be read: {e}")),
    };
    let mut lines = text.lines().map(str::trim);
    match lines.next() {
        Some("-----BEGIN OPENSSH PRIVATE KEY-----") => {
            let body: String = lines.take_while(|l| !l.starts_with('-')).collect();
            match openssh_cipher(&body) {
                Some(cipher) if cipher == b"none" => Key::Open,
                Some(_) => Key::Locked,
                None => Key::Unreadable("is damaged".to_owned()),
            }
        }
        Some("-----BEGIN ENCRYPTED PRIVATE KEY-----") => Key::Locked,
        Some(first) if first.starts_with("-----BEGIN ") && first.ends_with("PRIVATE KEY-----") => {
            if text.contains("ENCRYPTED") { Key::Locked } else { Key::Open }
        }
        _ => Key::Unreadable("is not a private key".to_owned()),
    }
}

/// The name of the cipher in an OpenSSH key: magic, then a string.
fn openssh_cipher(base64: &str) -> Option<Vec<u8>> {
    let bytes = known_hosts::decode(base64)?;
    let rest = bytes.strip_prefix(b"openssh-key-v1\0")?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    rest.get(..u32::from_be_bytes(*length) as usize).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, process::Command};

    #[test]
    fn keys_that_ask_for_a_passphrase_are_seen() {
        let dir = tempfile::tempdir().expect("a directory");
        let make = |name: &str, more: &[&str]| {
            let file = dir.path().join(name);
            let made = Command::new("ssh-keygen").args(["-q", "-f"]).arg(&file).args(more).output();
            made.is_ok_and(|m| m.status.success()).then_some(file)
        };
        for (name, more, expected) in [
            ("open", &["-t", "ed25519", "-N", ""][..], Key::Open),
            ("locked", &["-t", "ed25519", "-N", "secret"], Key::Locked),
            ("pem", &["-t", "rsa", "-m", "PEM", "-N", ""], Key::Open),
            ("locked-pem", &["-t", "rsa", "-m", "PEM", "-N", "secret"], Key::Locked),
            ("pkcs8", &["-t", "ecdsa", "-m", "PKCS8", "-N", "secret"], Key::Locked),
        ] {
            if let Some(file) = make(name, more) {
                assert_eq!(usable(&file), expected, "{name}");
                assert!(public(&file).is_some(), "{name}");
            }
        }
    }

    #[test]
    fn what_is_no_key_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("k");
        assert_eq!(usable(&file), Key::Missing);
        for text in ["", "ssh-ed25519 AAAA", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\n-----END"] {
            fs::write(&file, text).expect("a file");
            assert!(matches!(usable(&file), Key::Unreadable(_)), "{text}");
        }
        // a length that reaches beyond the end
        assert_eq!(openssh_cipher(&known_hosts::encode(b"openssh-key-v1\0\xff\xff\xff\xffnone")), None);
    }
}
