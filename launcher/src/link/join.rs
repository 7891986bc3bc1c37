//! How an agent that connects over TCP and the controller that waits for it prove to one another that they belong to the
//! same job, before the first control message.
//!
//! Both hold a 32-byte key that went to the agents by another way (an [`Invitation`] on their stdin). Each side sends a
//! fresh nonce and gets back a BLAKE3 hash, keyed with the job's key, over both nonces, the host's name and the role of
//! the one who answers: no answer can be replayed or reflected. Nothing after it is encrypted: like MPI's and NCCL's,
//! the connection trusts the cluster's network not to be rewritten on the way.
use std::{fmt, io, io::Read as _, net::SocketAddr, time::Duration};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// For the whole exchange, on either side.
pub(crate) const EXCHANGE: Duration = Duration::from_secs(10);
/// Most addresses in an invitation.
pub(crate) const MOST_ADDRESSES: usize = 16;
/// Longest invitation, bytes.
const LONGEST_INVITATION: usize = 4096;
/// First bytes of a connection: what it is, and the version of this exchange.
const MAGIC: &[u8; 8] = b"launchJ1";
/// First word of an invitation.
const GREETING: &str = "launch-join-1";

/// The key of one group of agents. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Key([u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Key {
    /// A new one, from the kernel.
    pub(crate) fn random() -> io::Result<Key> {
        random().map(Key)
    }

    fn answer(&self, role: Role, agent: &[u8; 32], controller: &[u8; 32], name: &str) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(role.label()).update(agent).update(controller).update(name.as_bytes());
        hasher.finalize()
    }
}

#[derive(Clone, Copy)]
enum Role {
    Agent,
    Controller,
}

impl Role {
    fn label(self) -> &'static [u8; 8] {
        match self {
            Role::Agent => b"agent  1",
            Role::Controller => b"control1",
        }
    }
}

fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// What an agent needs to find its controller: one line of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Invitation {
    pub(crate) key: Key,
    /// Where the controller listens, the best first.
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Invitation {
    /// With its line break.
    pub(crate) fn to_line(&self) -> String {
        let key: String = self.key.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let addresses = self.addresses.iter().take(MOST_ADDRESSES).map(|a| format!(" {a}"));
        format!("{GREETING} {key}{}\n", addresses.collect::<String>())
    }

    /// Reads one line, the key of which stays secret in errors.
    pub(crate) fn from_line(line: &str) -> Result<Invitation, &'static str> {
        let mut words = line.trim_end().split(' ');
        if words.next() != Some(GREETING) {
            return Err("it isn't an invitation of this version of launch");
        }
        let key = words.next().and_then(key).ok_or("its key isn't 64 hexadecimal digits")?;
        let addresses: Result<Vec<SocketAddr>, _> = words.map(str::parse).collect();
        match addresses {
            Ok(addresses) if (1..=MOST_ADDRESSES).contains(&addresses.len()) => {
                Ok(Invitation { key, addresses })
            }
            _ => Err("its addresses can't be read"),
        }
    }

    /// Reads the line from a stream, and not a byte beyond it.
    pub(crate) fn read(stream: &mut impl io::Read) -> io::Result<Invitation> {
        let mut line = Vec::new();
        let mut byte = [0];
        while stream.read(&mut byte)? == 1 && byte != *b"\n" {
            if line.len() == LONGEST_INVITATION {
                return Err(invalid("the invitation is longer than 4 KiB"));
            }
            line.push(byte[0]);
        }
        let line = str::from_utf8(&line).map_err(|_| invalid("the invitation isn't text"))?;
        Invitation::from_line(line)
            .map_err(|why| invalid(&format!("the invitation on stdin is wrong: {why}")))
    }
}

fn key(hex: &str) -> Option<Key> {
    let digits = hex.bytes().map(|b| char::from(b).to_digit(16)).collect::<Option<Vec<u32>>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect();
    (hex.len() == 64).then_some(())?;
    bytes.try_into().ok().map(Key)
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn stranger(who: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("the {who} at the other end has another key"))
}

/// The agent's side up to where it knows the controller. Several connections may be tried at once: only the one on which
/// [`Introduced::confirm`] is called becomes the control stream.
pub(crate) async fn introduce<S>(mut stream: S, key: &Key, name: &str) -> io::Result<Introduced<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let length = u8::try_from(name.len()).map_err(|_| invalid("the host's name is longer than 255 bytes"))?;
    let mine = random()?;
    let mut hello = Vec::from(MAGIC);
    hello.extend(mine);
    hello.push(length);
    hello.extend(name.as_bytes());
    stream.write_all(&hello).await?;
    let (mut theirs, mut proof) = ([0; 32], [0; 32]);
    stream.read_exact(&mut theirs).await?;
    stream.read_exact(&mut proof).await?;
    // Hashes compare in constant time.
    if blake3::Hash::from_bytes(proof) != key.answer(Role::Controller, &mine, &theirs, name) {
        return Err(stranger("controller"));
    }
    let answer = key.answer(Role::Agent, &mine, &theirs, name);
    Ok(Introduced { stream, answer })
}

/// A connection to the controller, which is known, and doesn't know us yet.
#[derive(Debug)]
pub(crate) struct Introduced<S> {
    stream: S,
    answer: blake3::Hash,
}

impl<S: AsyncWrite + Unpin> Introduced<S> {
    /// Makes this connection the control stream.
    pub(crate) async fn confirm(mut self) -> io::Result<S> {
        self.stream.write_all(self.answer.as_bytes()).await?;
        Ok(self.stream)
    }
}

/// The controller's side: the name of the host that has the key. Whoever hasn't learns nothing but a hash of its own
/// nonce. The caller limits the time.
pub(crate) async fn admit<S>(stream: &mut S, key: &Key) -> io::Result<String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut hello = [0; MAGIC.len() + 32 + 1];
    stream.read_exact(&mut hello).await?;
    let (magic, rest) = hello.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(invalid("it isn't an agent of this version of launch"));
    }
    let mut theirs = [0; 32];
    theirs.copy_from_slice(&rest[..32]);
    let mut name = vec![0; usize::from(rest[32])];
    stream.read_exact(&mut name).await?;
    let name = String::from_utf8(name).map_err(|_| invalid("the host's name isn't text"))?;
    let mine = random()?;
    stream.write_all(&mine).await?;
    stream.write_all(key.answer(Role::Controller, &theirs, &mine, &name).as_bytes()).await?;
    let mut answer = [0; 32];
    stream.read_exact(&mut answer).await?;
    if blake3::Hash::from_bytes(answer) != key.answer(Role::Agent, &theirs, &mine, &name) {
        return Err(stranger("agent"));
    }
    Ok(name)
}

#[cfg(test)]
#[path = "join_tests.rs"]
mod tests;
