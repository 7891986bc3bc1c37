//! The handshake of an agent that connects to its controller over TCP.
//!
//! Before the first control message both sides prove that they hold the same 32-byte key, which
//! reaches the agents in an [`Invitation`] on their standard input. Each side sends a fresh nonce
//! and a proof: a BLAKE3 hash, keyed with that key, of both nonces, the host's name and the role of
//! the sender. So no proof can be replayed or reflected.
//!
//! The control messages that follow are neither encrypted nor authenticated. Like MPI and NCCL, the
//! connection relies on a network in which no one modifies traffic.
use diagnostic::{Code, Diagnostic, codes};
use protocol::control::{JobKey, MAX_ADDRESSES};
use std::{fmt, io, net::SocketAddr, time::Duration};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The time limit of a whole handshake, on either side.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The length of the longest invitation, in bytes without the line break. A longer line is
/// rejected.
const MAX_INVITATION_BYTES: usize = 4096;
/// The first bytes that an agent sends on a connection: the protocol and its version.
const MAGIC: &[u8; 8] = b"launchJ1";
/// The first word of an invitation: the protocol and its version.
const INVITATION_PREFIX: &str = "launch-join-1";

/// The secret key that a controller shares with one group of agents. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct HandshakeKey([u8; 32]);

impl fmt::Debug for HandshakeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandshakeKey(…)")
    }
}

impl HandshakeKey {
    /// Generates a random key with the kernel's random number generator.
    pub(crate) fn generate() -> io::Result<HandshakeKey> {
        read_random_bytes().map(HandshakeKey)
    }

    /// Returns the key with which processes of a run prove that they belong to the run.
    pub(crate) fn from_job_key(key: &JobKey) -> HandshakeKey {
        HandshakeKey(key.0)
    }

    /// Computes the proof that the side with this role must send: a BLAKE3 hash, keyed with this
    /// key, of the role, both nonces and the host's name.
    fn compute_proof(
        &self,
        role: HandshakeRole,
        agent_nonce: &[u8; 32],
        controller_nonce: &[u8; 32],
        name: &str,
    ) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher
            .update(role.transcript_label())
            .update(agent_nonce)
            .update(controller_nonce)
            .update(name.as_bytes());
        hasher.finalize()
    }
}

/// One of the two sides of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeRole {
    /// The agent, which opens the TCP connection.
    Agent,
    /// The controller, which listens for TCP connections.
    Controller,
}

impl HandshakeRole {
    /// Returns the bytes that stand for the role in a proof.
    fn transcript_label(self) -> &'static [u8; 8] {
        match self {
            HandshakeRole::Agent => b"agent  1",
            HandshakeRole::Controller => b"control1",
        }
    }
}

impl fmt::Display for HandshakeRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HandshakeRole::Agent => "agent",
            HandshakeRole::Controller => "controller",
        })
    }
}

/// An error of the handshake between an agent and its controller.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    /// The connection failed or ended before the end of the handshake.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The handshake took longer than [`HANDSHAKE_TIMEOUT`].
    #[error("no answer within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Timeout,
    /// The other side does not hold the key. Holds the role of the other side.
    #[error("the {0} at the other end has another key")]
    WrongKey(HandshakeRole),
    /// The other side is not an agent of this version of launch.
    #[error("the connection does not come from an agent of this version of launch")]
    WrongProtocol,
    /// The name of the host is longer than 255 bytes, or is not UTF-8.
    #[error("the name of the host is not valid: expected at most 255 bytes of UTF-8")]
    InvalidName,
}

impl HandshakeError {
    /// Returns the diagnostic code of this error.
    pub(crate) fn code(&self) -> Code {
        match self {
            HandshakeError::Io(_) | HandshakeError::Timeout => codes::host::CONTROL_CONNECTION_LOST,
            HandshakeError::WrongKey(_) | HandshakeError::WrongProtocol | HandshakeError::InvalidName => {
                codes::host::HANDSHAKE_FAILED
            }
        }
    }
}

impl From<HandshakeError> for Diagnostic {
    fn from(error: HandshakeError) -> Self {
        Diagnostic::error(error.code(), "the handshake failed").with_cause(&error)
    }
}

/// An error in an invitation. The error messages never contain the key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvitationError {
    /// Standard input could not be read.
    #[error("cannot read standard input: {0}")]
    Io(#[from] io::Error),
    /// The first line of standard input is longer than [`MAX_INVITATION_BYTES`].
    #[error("the line is longer than {MAX_INVITATION_BYTES} bytes")]
    TooLong,
    /// The first line of standard input is not an invitation of this version of launch.
    #[error("expected a line that begins with `{INVITATION_PREFIX}`")]
    WrongProtocol,
    /// The key in the invitation does not have 64 hexadecimal digits.
    #[error("the key does not have 64 hexadecimal digits")]
    InvalidKey,
    /// The addresses in the invitation are malformed, or there are not 1 to [`MAX_ADDRESSES`].
    #[error("expected 1 to {MAX_ADDRESSES} addresses of the form IP:PORT")]
    InvalidAddresses,
}

impl From<InvitationError> for Diagnostic {
    fn from(error: InvitationError) -> Self {
        Diagnostic::error(codes::host::INVITATION_INVALID, "the invitation on standard input is not valid")
            .with_cause(&error)
    }
}

/// Reads 32 random bytes from the kernel.
fn read_random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// The key and addresses that an agent needs to connect to its controller. The agent gets the
/// invitation as one line of text on its standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Invitation {
    /// The key with which the agent proves that it belongs to the job.
    pub(crate) key: HandshakeKey,
    /// Addresses on which the controller listens, in order of preference, at most
    /// [`MAX_ADDRESSES`].
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Invitation {
    /// Formats the invitation as a line of text that ends with a line break.
    pub(crate) fn to_line(&self) -> String {
        let key: String = self.key.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let addresses = self.addresses.iter().map(|a| format!(" {a}"));
        format!("{INVITATION_PREFIX} {key}{}\n", addresses.collect::<String>())
    }

    /// Parses an invitation from the line that [`Self::to_line`] returned. The line break at the
    /// end may be missing.
    pub(crate) fn from_line(line: &str) -> Result<Invitation, InvitationError> {
        let mut words = line.trim_end().split(' ');
        if words.next() != Some(INVITATION_PREFIX) {
            return Err(InvitationError::WrongProtocol);
        }
        let key = words.next().and_then(parse_key).ok_or(InvitationError::InvalidKey)?;
        let addresses: Result<Vec<SocketAddr>, _> = words.map(str::parse).collect();
        match addresses {
            Ok(addresses) if (1..=MAX_ADDRESSES).contains(&addresses.len()) => {
                Ok(Invitation { key, addresses })
            }
            _ => Err(InvitationError::InvalidAddresses),
        }
    }

    /// Reads an invitation from the first line of a stream. Reads no byte after the line. Fails if
    /// the line is longer than [`MAX_INVITATION_BYTES`] or is not an invitation.
    pub(crate) fn read(stream: &mut impl io::Read) -> Result<Invitation, InvitationError> {
        let mut line = Vec::new();
        let mut byte = [0];
        while stream.read(&mut byte)? == 1 && byte != *b"\n" {
            if line.len() == MAX_INVITATION_BYTES {
                return Err(InvitationError::TooLong);
            }
            line.push(byte[0]);
        }
        Invitation::from_line(str::from_utf8(&line).map_err(|_| InvitationError::WrongProtocol)?)
    }
}

/// Parses a key of 64 hexadecimal digits. Returns `None` for any other text.
fn parse_key(hex: &str) -> Option<HandshakeKey> {
    let digits = hex.bytes().map(|b| char::from(b).to_digit(16)).collect::<Option<Vec<u32>>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect();
    (hex.len() == 64).then_some(())?;
    bytes.try_into().ok().map(HandshakeKey)
}

/// Performs the agent's side of the handshake for the host `name`, up to the proof that the peer is
/// the controller. Fails if the peer does not hold the key.
///
/// An agent may perform handshakes on several connections simultaneously. The connection on which
/// the agent then calls [`VerifiedControllerStream::send_agent_proof`] becomes the control
/// connection.
pub(crate) async fn authenticate_controller<S>(
    mut stream: S,
    key: &HandshakeKey,
    name: &str,
) -> Result<VerifiedControllerStream<S>, HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let length = u8::try_from(name.len()).map_err(|_| HandshakeError::InvalidName)?;
    let agent_nonce = read_random_bytes()?;
    let mut hello = Vec::from(MAGIC);
    hello.extend(agent_nonce);
    hello.push(length);
    hello.extend(name.as_bytes());
    stream.write_all(&hello).await?;
    let (mut controller_nonce, mut proof) = ([0; 32], [0; 32]);
    stream.read_exact(&mut controller_nonce).await?;
    stream.read_exact(&mut proof).await?;
    // `blake3::Hash` compares in constant time.
    let expected = key.compute_proof(HandshakeRole::Controller, &agent_nonce, &controller_nonce, name);
    if blake3::Hash::from_bytes(proof) != expected {
        return Err(HandshakeError::WrongKey(HandshakeRole::Controller));
    }
    let proof = key.compute_proof(HandshakeRole::Agent, &agent_nonce, &controller_nonce, name);
    Ok(VerifiedControllerStream { stream, proof })
}

/// A connection in the middle of a handshake: the controller has proved that it holds the key, and
/// the agent has not.
#[derive(Debug)]
pub(crate) struct VerifiedControllerStream<S> {
    stream: S,
    /// The proof that the agent has to send to the controller.
    proof: blake3::Hash,
}

impl<S: AsyncWrite + Unpin> VerifiedControllerStream<S> {
    /// Sends the agent's proof, which makes this connection the control connection.
    pub(crate) async fn send_agent_proof(mut self) -> Result<S, HandshakeError> {
        self.stream.write_all(self.proof.as_bytes()).await?;
        Ok(self.stream)
    }
}

/// Performs the controller's side of the handshake. Returns the name of the host whose agent
/// connected. Fails if the peer does not hold the key. The function has no time limit, so the
/// caller must apply [`HANDSHAKE_TIMEOUT`].
///
/// A peer without the key receives only a nonce and a keyed hash, from which it cannot derive the
/// key or the proof of an agent.
pub(crate) async fn authenticate_agent<S>(
    stream: &mut S,
    key: &HandshakeKey,
) -> Result<String, HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut hello = [0; MAGIC.len() + 32 + 1];
    stream.read_exact(&mut hello).await?;
    let (magic, rest) = hello.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(HandshakeError::WrongProtocol);
    }
    let mut agent_nonce = [0; 32];
    agent_nonce.copy_from_slice(&rest[..32]);
    let mut name = vec![0; usize::from(rest[32])];
    stream.read_exact(&mut name).await?;
    let name = String::from_utf8(name).map_err(|_| HandshakeError::InvalidName)?;
    let controller_nonce = read_random_bytes()?;
    stream.write_all(&controller_nonce).await?;
    let proof = key.compute_proof(HandshakeRole::Controller, &agent_nonce, &controller_nonce, &name);
    stream.write_all(proof.as_bytes()).await?;
    let mut proof = [0; 32];
    stream.read_exact(&mut proof).await?;
    if blake3::Hash::from_bytes(proof)
        != key.compute_proof(HandshakeRole::Agent, &agent_nonce, &controller_nonce, &name)
    {
        return Err(HandshakeError::WrongKey(HandshakeRole::Agent));
    }
    Ok(name)
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
