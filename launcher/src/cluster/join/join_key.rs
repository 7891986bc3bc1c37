//! [`read_join_key`]: the secret key with which the nodes of a job prove to each other that they
//! belong to the job.
use crate::{connection::handshake::HandshakeKey, private_files::open_regular_file};
use diagnostic::{Diagnostic, codes::host};
use jobspec::JoinSpec;
use std::{io::Read, os::unix::fs::MetadataExt, path::Path};

/// The context string for deriving the key by which joining nodes authenticate each other from the
/// secret in a key file.
const KEY_FILE_CONTEXT: &str = "launch 2026 join key file";
/// The constant text from which joining nodes without a key file derive their common key, which
/// prevents only accidental connections. The key is not secret, because this text is public.
const INSECURE_KEY_CONTEXT: &str = "launch 2026 join without a key";
/// The smallest permitted length, in bytes, of the secret in the key file that the nodes of a run
/// share.
const MIN_SECRET_BYTES: usize = 32;
/// The largest permitted length, in bytes, of the key file that the nodes of a run share.
const MAX_FILE_BYTES: u64 = 4096;

/// Returns the secret key by which the nodes that join one run authenticate each other. It is
/// derived from the job's key file or, in a job with `insecure`, from a constant that everyone
/// knows.
pub(super) fn read_join_key(join: &JoinSpec) -> diagnostic::Result<HandshakeKey> {
    match &join.key_file {
        _ if join.insecure => Ok(HandshakeKey::derive_from_secret(INSECURE_KEY_CONTEXT, &[])),
        Some(file) => read_key_file(file),
        None => {
            Err(Diagnostic::error(host::JOIN_KEY_MISSING, "the nodes of the job have no key").with_remedy())
        }
    }
}

/// Reads the secret that the nodes of a run share from a key file, which only the user may be able
/// to read and write. White space at both ends of the file does not count. Fails if the file is too
/// short, or if every user of the machine can read or write it.
fn read_key_file(file: &Path) -> diagnostic::Result<HandshakeKey> {
    let invalid = |message: String| {
        Diagnostic::error(host::JOIN_KEY_INVALID, message).with_subject(file.display().to_string())
    };
    let shown = file.display();
    let cannot_read =
        |error: std::io::Error| invalid(format!("cannot read the key file {shown}")).with_cause(&error);
    let opened = open_regular_file(file).map_err(cannot_read)?;
    let mode = opened.metadata().map_err(cannot_read)?.mode();
    if mode & 0o007 != 0 {
        let message = format!(
            "every user of this machine has access to the key file {shown} (mode {:04o})",
            mode & 0o7777
        );
        return Err(invalid(message).with_help(
            "run `chmod 600` on the file; in Kubernetes, set `defaultMode: 0400` in the volume of the Secret",
        ));
    }
    let mut text = Vec::new();
    opened.take(MAX_FILE_BYTES + 1).read_to_end(&mut text).map_err(cannot_read)?;
    let secret = text.trim_ascii();
    let is_too_long = text.len() as u64 > MAX_FILE_BYTES;
    if is_too_long || secret.len() < MIN_SECRET_BYTES {
        let found =
            if is_too_long { format!("more than {MAX_FILE_BYTES}") } else { secret.len().to_string() };
        let message =
            format!("the key in {shown} has {found} bytes; expected {MIN_SECRET_BYTES} to {MAX_FILE_BYTES}");
        return Err(invalid(message).with_help("`openssl rand -hex 32` prints a key"));
    }
    Ok(HandshakeKey::derive_from_secret(KEY_FILE_CONTEXT, secret))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn a_key_needs_a_private_file_of_enough_bytes() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("key");
        let read = |text: &str, mode: u32| {
            fs::write(&file, text).expect("written");
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("set");
            read_join_key(&JoinSpec { key_file: Some(file.clone()), ..JoinSpec::default() })
        };
        let secret = "0123456789abcdef0123456789abcdef";
        let key = read(secret, 0o600).expect("a key");
        assert_eq!(read(&format!("{secret}\n"), 0o440).expect("a key"), key);
        assert_ne!(read(&secret.replace('0', "1"), 0o600).expect("a key"), key);
        for (text, mode) in [(secret, 0o604), (secret, 0o602), (&secret[1..], 0o600), ("", 0o600)] {
            let error = read(text, mode).expect_err("rejected");
            assert_eq!(error.code(), host::JOIN_KEY_INVALID, "{error}");
        }
        assert_eq!(read(&"a".repeat(5000), 0o600).expect_err("too long").code(), host::JOIN_KEY_INVALID);
        let missing = read_join_key(&JoinSpec::default()).expect_err("no key");
        assert_eq!(missing.code(), host::JOIN_KEY_MISSING);
        let insecure = JoinSpec { insecure: true, ..JoinSpec::default() };
        let no_key = read_join_key(&insecure).expect("a key");
        assert_ne!(no_key, key);
        // `--insecure` replaces the key file of the job.
        let both = JoinSpec { key_file: Some("missing".into()), ..insecure };
        assert_eq!(read_join_key(&both).expect("a key"), no_key);
    }
}
