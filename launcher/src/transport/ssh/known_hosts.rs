//! known_hosts: which keys a host may show (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT").
use super::config::matches_any;
use contract::job::KnownHosts;
use sha1::{Digest, Sha1};
use std::{
    collections::HashMap,
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

/// Largest file that is read, bytes.
const MAX_FILE: u64 = 64 << 20;

/// Most lists of files that are kept.
const MOST_LISTS: usize = 64;

/// A file's identity, size and time of change; `None` where it isn't there.
type Mark = Option<(u64, u64, u64, i64, i64)>;
/// What lists of files said when they were read last.
type Readings = HashMap<Vec<PathBuf>, (Vec<Mark>, Arc<Known>)>;

static READ: LazyLock<Mutex<Readings>> = LazyLock::new(Mutex::default);

/// What the files say; hosts that have the same files share one reading, until a file changes.
pub(super) fn known(files: &[PathBuf]) -> Result<Arc<Known>, String> {
    let marks: Vec<Mark> = files.iter().map(|file| mark(file)).collect();
    // Held while reading: whoever comes meanwhile waits for the same.
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, known)) = read.get(files).filter(|(then, _)| *then == marks) {
        return Ok(known.clone());
    }
    let known = Arc::new(Known::read(files)?);
    if read.len() >= MOST_LISTS {
        read.clear();
    }
    read.insert(files.to_vec(), (marks, known.clone()));
    Ok(known)
}

fn mark(file: &Path) -> Mark {
    let m = fs::metadata(file).ok()?;
    Some((m.dev(), m.ino(), m.size(), m.ctime(), m.ctime_nsec()))
}

/// The lines of the files, in their order.
#[derive(Debug, Default)]
pub(super) struct Known {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    names: Names,
    marker: Marker,
    /// Type and base64 of a key.
    kind: String,
    key: String,
}

#[derive(Debug)]
enum Names {
    Patterns(Vec<String>),
    /// Salt and HMAC-SHA1.
    Hashed(Vec<u8>, Vec<u8>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marker {
    None,
    Revoked,
    Authority,
}

/// What known_hosts says of a key that a host shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    Known,
    /// No key of the host is there.
    Unknown,
    /// Another key of the same type is.
    Changed,
    /// Keys of other types are.
    OtherTypes,
    Revoked,
}

impl Known {
    /// Reads the files; those that don't exist are empty.
    pub(super) fn read(files: &[PathBuf]) -> Result<Known, String> {
        let mut known = Known::default();
        for file in files {
            match read(file) {
                Ok(text) => known.entries.extend(text.lines().filter_map(entry)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(format!("known_hosts {} can't be read: {e}", file.display())),
            }
        }
        Ok(known)
    }

    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Entry> {
        self.entries.iter().filter(move |entry| entry.names.fit(name))
    }

    /// Types of the keys that are known of the host, so that it can be asked for one of them.
    pub(super) fn kinds<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        let mut kinds = Vec::new();
        for entry in self.of(name).filter(|e| e.marker == Marker::None) {
            if !kinds.contains(&entry.kind.as_str()) {
                kinds.push(entry.kind.as_str());
            }
        }
        kinds
    }

    /// Judges a key, as base64 of its wire form.
    pub(super) fn judge(&self, name: &str, kind: &str, key: &str) -> Judgement {
        let revoked = |e: &&Entry| e.marker == Marker::Revoked && e.key == key;
        if self.of(name).any(|e| revoked(&e)) {
            return Judgement::Revoked;
        }
        let own: Vec<&Entry> = self.of(name).filter(|e| e.marker == Marker::None).collect();
        match () {
            () if own.iter().any(|e| e.key == key && e.kind == kind) => Judgement::Known,
            () if own.iter().any(|e| e.kind == kind) => Judgement::Changed,
            () if own.is_empty() => Judgement::Unknown,
            () => Judgement::OtherTypes,
        }
    }
}

impl Names {
    fn fit(&self, name: &str) -> bool {
        match self {
            Names::Patterns(patterns) => matches_any(patterns, name),
            Names::Hashed(salt, hash) => {
                hmac_sha1(salt, name.to_lowercase().as_bytes()).as_slice() == hash.as_slice()
            }
        }
    }
}

fn read(file: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    fs::File::open(file)?.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(io::Error::other("it is larger than 64 MiB"));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A line; `None` for comments and for what can't be read (which can't let anybody in).
fn entry(line: &str) -> Option<Entry> {
    let mut words = line.split_whitespace();
    let mut first = words.next().filter(|w| !w.starts_with('#'))?;
    let marker = match first {
        "@revoked" => Marker::Revoked,
        "@cert-authority" => Marker::Authority,
        _ => Marker::None,
    };
    if marker != Marker::None {
        first = words.next()?;
    }
    let names = match first.strip_prefix("|1|") {
        Some(hashed) => {
            let (salt, hash) = hashed.split_once('|')?;
            Names::Hashed(decode(salt)?, decode(hash)?)
        }
        None => Names::Patterns(first.split(',').map(str::to_lowercase).collect()),
    };
    let (kind, key) = (words.next()?.to_owned(), words.next()?.to_owned());
    decode(&key)?;
    Some(Entry { names, marker, kind, key })
}

/// The name under which a host's keys are kept.
pub(super) fn name_of(host: &str, port: u16) -> String {
    let host = host.to_lowercase();
    if port == 22 { host } else { format!("[{host}]:{port}") }
}

/// Whether a key that is not known may be taken, and is to be kept.
pub(super) fn takes_new(policy: KnownHosts) -> bool {
    policy == KnownHosts::AcceptNew
}

/// Adds a host's key to the file, which is made where it is missing.
pub(super) fn add(file: &Path, name: &str, kind: &str, key: &str) -> io::Result<()> {
    /// Hosts are connected to at the same time, lines are written one after the other.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(folder) = file.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let unended = read(file).is_ok_and(|text| !text.is_empty() && !text.ends_with('\n'));
    let line = format!("{}{name} {kind} {key}\n", if unended { "\n" } else { "" });
    let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(file)?;
    file.write_all(line.as_bytes())?;
    file.sync_all()
}

/// `SHA256:…` as ssh shows it.
pub(super) fn fingerprint(sha256: &[u8]) -> String {
    format!("SHA256:{}", encode(sha256).trim_end_matches('='))
}

fn hmac_sha1(key: &[u8], text: &[u8]) -> [u8; 20] {
    let mut block = [0u8; 64];
    if key.len() > block.len() {
        block[..20].copy_from_slice(&Sha1::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let inner = Sha1::new().chain_update(block.map(|b| b ^ 0x36)).chain_update(text).finalize();
    Sha1::new().chain_update(block.map(|b| b ^ 0x5c)).chain_update(inner).finalize().into()
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Base64 with padding (RFC 4648).
pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |word, b| word << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for digit in 0..4 {
            let value = (word >> (18 - 6 * digit) & 63) as usize;
            text.push(if digit <= chunk.len() { char::from(DIGITS[value]) } else { '=' });
        }
    }
    text
}

pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if text.len() - digits.len() > 2 || digits.len() % 4 == 1 {
        return None;
    }
    let (mut bytes, mut word, mut bits) = (Vec::with_capacity(digits.len() * 3 / 4), 0u32, 0);
    for byte in digits.bytes() {
        let value = DIGITS.iter().position(|d| *d == byte)? as u32;
        (word, bits) = (word << 6 | value, bits + 6);
        if bits >= 8 {
            bits -= 8;
            bytes.push((word >> bits) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    const KEY: &str = "AAAAC3NzaC1lZDI1NTE5AAAAIJPC4rTkdsUoUBOmBSpBrbmL5b3DTuBGzlTjUe2cWeVY";
    const OTHER: &str = "AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

    fn known(text: &str) -> Known {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("k");
        fs::write(&file, text).expect("a file");
        Known::read(&[file, dir.path().join("missing")]).expect("readable")
    }

    #[test]
    fn files_are_read_again_when_they_change_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = [dir.path().join("k"), dir.path().join("missing")];
        fs::write(&files[0], format!("a ssh-ed25519 {KEY}\n")).expect("a file");
        let first = super::known(&files).expect("readable");
        assert!(Arc::ptr_eq(&first, &super::known(&files).expect("readable")));
        add(&files[0], "b", "ssh-ed25519", KEY).expect("added");
        let second = super::known(&files).expect("readable");
        assert_eq!((first.kinds("b").len(), second.kinds("b").len()), (0, 1));
        fs::write(&files[1], format!("c ssh-ed25519 {KEY}\n")).expect("a file");
        assert_eq!(super::known(&files).expect("readable").kinds("c").len(), 1);
    }

    #[test]
    fn keys_are_judged() {
        let known = known(&format!(
            "# c\na,b ssh-ed25519 {KEY} comment\n[c]:2222 ssh-ed25519 {KEY}\n*.x,!bad.x ssh-ed25519 {KEY}\n\
             @revoked * ssh-ed25519 {OTHER}\n@cert-authority d ssh-ed25519 {KEY}\nbroken line\ne ssh-rsa AAAA\n"
        ));
        use Judgement::*;
        for (name, key, expected) in [
            ("a", KEY, Known),
            ("b", KEY, Known),
            ("a", "AAAA", Changed),
            (&name_of("C", 2222), KEY, Known),
            ("c", KEY, Unknown),
            ("y.x", KEY, Known),
            ("bad.x", KEY, Unknown),
            ("a", OTHER, Revoked),
            ("d", KEY, Unknown),
            ("e", KEY, OtherTypes),
        ] {
            assert_eq!(known.judge(name, "ssh-ed25519", key), expected, "{name} {key}");
        }
        assert_eq!(known.kinds("e"), ["ssh-rsa"]);
    }

    /// Against what ssh-keygen hashes.
    #[test]
    fn hashed_names_are_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("k");
        fs::write(&file, format!("node-1 ssh-ed25519 {KEY}\n[node-2]:2222 ssh-ed25519 {KEY}\n"))
            .expect("a file");
        let hashed = Command::new("ssh-keygen").args(["-q", "-H", "-f"]).arg(&file).output();
        if !hashed.is_ok_and(|h| h.status.success()) {
            return;
        }
        assert!(fs::read_to_string(&file).expect("text").starts_with("|1|"));
        let known = Known::read(&[file]).expect("readable");
        assert_eq!(known.judge("node-1", "ssh-ed25519", KEY), Judgement::Known);
        assert_eq!(known.judge(&name_of("Node-2", 2222), "ssh-ed25519", KEY), Judgement::Known);
        assert_eq!(known.judge("node-2", "ssh-ed25519", KEY), Judgement::Unknown);
    }

    #[test]
    fn a_new_key_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("new/known_hosts");
        add(&file, "a", "ssh-ed25519", KEY).expect("added");
        fs::OpenOptions::new()
            .append(true)
            .open(&file)
            .and_then(|mut f| f.write_all(b"# end"))
            .expect("appended");
        add(&file, "[b]:7", "ssh-ed25519", KEY).expect("added");
        let known = Known::read(&[file]).expect("readable");
        assert_eq!(known.judge("a", "ssh-ed25519", KEY), Judgement::Known);
        assert_eq!(known.judge("[b]:7", "ssh-ed25519", KEY), Judgement::Known);
    }

    #[test]
    fn codes_are_the_standards() {
        // RFC 4648 10, RFC 2202 3 (cases 1 and 6)
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(encode(plain.as_bytes()), coded);
            assert_eq!(decode(coded).as_deref(), Some(plain.as_bytes()));
        }
        let hex = |bytes: [u8; 20]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(hmac_sha1(&[0x0b; 20], b"Hi There")), "b617318655057264e28bc0b6fb378c8ef146be00");
        let text = b"Test Using Larger Than Block-Size Key - Hash Key First";
        assert_eq!(hex(hmac_sha1(&[0xaa; 80], text)), "aa4ae5e15272d00e95705637ce8a3b55ed402112");
        assert_eq!(fingerprint(&[0; 3]), "SHA256:AAAA");
    }

    proptest! {
        #[test]
        fn base64_round_trips(bytes in proptest::collection::vec(any::<u8>(), 0..50)) {
            prop_assert_eq!(decode(&encode(&bytes)), Some(bytes));
        }

        #[test]
        fn any_line_does_no_harm(line in "\\PC{0,80}") {
            _ = entry(&line).map(|e| e.names.fit("a"));
        }
    }
}
