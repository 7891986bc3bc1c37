//! The handshake of a new control connection, in which both sides prove that they hold the shared
//! key and agree on session keys for encryption.
//!
//! The 32-byte key reaches the agents in an [`Invitation`] on their standard input, or in the terms
//! of the controller. The handshake is the pattern `NNpsk0` of the Noise Protocol Framework:
//!
//! 1. The agent sends [`PROTOCOL_MAGIC`], the length of its message, and a message with a fresh
//!    public key and the encrypted name of its host.
//! 2. The controller, which can read the message only with the key, answers with a fresh public
//!    key.
//! 3. The agent, which can read the answer only with the key, sends an empty encrypted record.
//!
//! Both fresh keys enter the keys of the connection. So no handshake can be replayed or reflected,
//! and someone who records the connection and later learns the key cannot decrypt the record.
use super::encrypted_stream::EncryptedStream;
use diagnostic::{Code, Diagnostic, codes};
use protocol::control::{JobSecretKey, MAX_ADDRESSES};
use snow::{Builder, HandshakeState};
use std::{
    fmt, io,
    net::SocketAddr,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The time limit of a whole handshake, in which two processes prove to each other that they hold
/// the same key.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The length of the longest invitation (a line with the key and the addresses of the controller),
/// in bytes without the line break. A longer line is rejected.
const MAX_INVITATION_BYTES: usize = 4096;
/// The bytes with which an agent begins every connection, and by which the controller recognizes
/// the protocol and its version.
const PROTOCOL_MAGIC: &[u8; 8] = b"launchJ2";
/// The name of the Noise protocol pattern and the algorithms that the handshake between agent and
/// controller uses.
const NOISE_PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// The length, in bytes, of a handshake message without content, which is a public key and an
/// authentication tag.
const EMPTY_MESSAGE_BYTES: usize = 48;
/// The length, in bytes, of the longest name of a host in a handshake.
const MAX_NAME_BYTES: usize = 255;
/// The first word of an agent's invitation (a line with the key and the controller's addresses),
/// which contains the protocol version.
const INVITATION_PREFIX: &str = "launch-join-1";

/// The secret key of a run, by which the controller and the agents recognize in a handshake that
/// the other side belongs to the run. It is never printed.
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

    /// Derives a handshake key from a secret text and the purpose of the key, so that keys for
    /// different purposes differ.
    pub(crate) fn derive_from_secret(purpose: &str, secret: &[u8]) -> HandshakeKey {
        HandshakeKey(blake3::derive_key(purpose, secret))
    }

    /// Converts the secret key of a run, which its controller and agents share, to a key for
    /// handshakes.
    pub(crate) fn from_job_key(key: &JobSecretKey) -> HandshakeKey {
        HandshakeKey(key.0)
    }

    /// Begins a handshake with this key, in which this process takes the part `role` (agent or
    /// controller).
    fn begin_handshake(&self, role: HandshakeRole) -> Result<HandshakeState, HandshakeError> {
        let builder = Builder::new(NOISE_PATTERN.parse()?).psk(0, &self.0)?.prologue(PROTOCOL_MAGIC)?;
        Ok(match role {
            HandshakeRole::Agent => builder.build_initiator()?,
            HandshakeRole::Controller => builder.build_responder()?,
        })
    }
}

/// One of the two sides of the handshake: the agent or the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeRole {
    /// The agent, which opens the TCP connection.
    Agent,
    /// The controller, which listens for TCP connections.
    Controller,
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
    /// The controller closed the connection before it answered.
    #[error("the other side closed the connection; it has another key, or no agent is awaited")]
    Closed,
    /// The other side does not hold the key. Holds the role of the other side.
    #[error("the {0} at the other end has another key")]
    WrongKey(HandshakeRole),
    /// The other side is not an agent of this version of launch.
    #[error("the connection does not come from an agent of this version of launch")]
    WrongProtocol,
    /// The name of the host is longer than [`MAX_NAME_BYTES`], or is not UTF-8.
    #[error("the name of the host is not valid: expected at most {MAX_NAME_BYTES} bytes of UTF-8")]
    InvalidName,
    /// The library of the handshake failed, for example because it got no random numbers.
    #[error("cannot compute the handshake: {0}")]
    Noise(#[from] snow::Error),
}

impl HandshakeError {
    /// Returns the diagnostic code of this handshake error.
    pub(crate) fn code(&self) -> Code {
        match self {
            HandshakeError::Io(_) | HandshakeError::Timeout | HandshakeError::Closed => {
                codes::host::CONTROL_CONNECTION_LOST
            }
            HandshakeError::WrongKey(_)
            | HandshakeError::WrongProtocol
            | HandshakeError::InvalidName
            | HandshakeError::Noise(_) => codes::host::HANDSHAKE_FAILED,
        }
    }
}

impl From<HandshakeError> for Diagnostic {
    fn from(error: HandshakeError) -> Self {
        Diagnostic::error(error.code(), "the handshake failed").with_cause(&error)
    }
}

/// An error in an invitation, which is the line with the key and the addresses of an agent's
/// controller. The error messages never contain the key.
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
    /// The addresses in the invitation are malformed, or their number is not from 1 to
    /// [`MAX_ADDRESSES`].
    #[error("expected 1 to {MAX_ADDRESSES} addresses of the form IP:PORT")]
    InvalidAddresses,
}

impl From<InvitationError> for Diagnostic {
    fn from(error: InvitationError) -> Self {
        Diagnostic::error(codes::host::INVITATION_INVALID, "the invitation on standard input is not valid")
            .with_cause(&error)
    }
}

/// Returns 32 random bytes from the kernel, from which secret keys are made.
fn read_random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// An agent's invitation: the key of the run and the controller's addresses, in one line that the
/// agent reads from standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Invitation {
    /// The key with which the agent proves that it belongs to the job.
    pub(crate) key: HandshakeKey,
    /// Addresses on which the controller listens, in order of preference, at most
    /// [`MAX_ADDRESSES`].
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Invitation {
    /// Formats the key of the run and the controller's addresses as the line of text that an agent
    /// reads from its standard input.
    pub(crate) fn to_line(&self) -> String {
        let key: String = self.key.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let addresses = self.addresses.iter().map(|a| format!(" {a}"));
        format!("{INVITATION_PREFIX} {key}{}\n", addresses.collect::<String>())
    }

    /// Parses an invitation (the key and the addresses of the controller) from a line of text. The
    /// line break at the end may be missing.
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

    /// Reads an invitation (the key and the addresses of the controller) from the first line of a
    /// stream. Reads no byte after the line. Fails if the line is longer than
    /// [`MAX_INVITATION_BYTES`] or is not an invitation.
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

/// Parses a handshake key of 64 hexadecimal digits. Returns `None` for any other text.
fn parse_key(hex: &str) -> Option<HandshakeKey> {
    let digits = hex.bytes().map(|b| char::from(b).to_digit(16)).collect::<Option<Vec<u32>>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect();
    (hex.len() == 64).then_some(())?;
    bytes.try_into().ok().map(HandshakeKey)
}

/// Performs the agent's part of the handshake on a new connection, up to the controller's proof
/// that it holds the key of the run. Fails if the peer does not hold the key.
///
/// An agent may perform handshakes on several connections simultaneously. The connection on which
/// the agent then calls [`VerifiedControllerStream::send_proof_of_key`] becomes the control
/// connection.
pub(crate) async fn authenticate_controller<S>(
    mut stream: S,
    key: &HandshakeKey,
    name: &str,
) -> Result<VerifiedControllerStream<S>, HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if name.len() > MAX_NAME_BYTES {
        return Err(HandshakeError::InvalidName);
    }
    let mut handshake = key.begin_handshake(HandshakeRole::Agent)?;
    let mut message = [0; EMPTY_MESSAGE_BYTES + MAX_NAME_BYTES];
    let length = handshake.write_message(name.as_bytes(), &mut message)?;
    let mut hello = Vec::from(PROTOCOL_MAGIC);
    hello.extend((length as u16).to_le_bytes());
    hello.extend(&message[..length]);
    stream.write_all(&hello).await?;
    stream.flush().await?;
    let mut answer = [0; EMPTY_MESSAGE_BYTES];
    stream.read_exact(&mut answer).await.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => HandshakeError::Closed,
        _ => error.into(),
    })?;
    let read = handshake.read_message(&answer, &mut []);
    read.map_err(|_| HandshakeError::WrongKey(HandshakeRole::Controller))?;
    Ok(VerifiedControllerStream(EncryptedStream::new(stream, handshake.into_stateless_transport_mode()?)))
}

/// A connection on which the agent has verified that the controller holds the key of the run,
/// before the agent has proved the same to the controller.
pub(crate) struct VerifiedControllerStream<S>(EncryptedStream<S>);

impl<S: AsyncWrite + Unpin> VerifiedControllerStream<S> {
    /// Sends the last message of the handshake, which proves that the agent holds the key and makes
    /// the connection the agent's control connection.
    pub(crate) async fn send_proof_of_key(mut self) -> Result<EncryptedStream<S>, HandshakeError> {
        self.0.write_empty_record().await?;
        Ok(self.0)
    }
}

/// Performs the controller's part of the handshake on a new connection, in which both sides prove
/// that they hold the key of the run. Returns the connection and the name of the host whose agent
/// connected. Fails if the peer does not hold the key. The function has no time limit, so the
/// caller must apply [`HANDSHAKE_TIMEOUT`].
///
/// A peer without the key receives no answer. The function allocates less than 1 KiB for a peer
/// that has not proved the key.
pub(crate) async fn authenticate_agent<S>(
    mut stream: S,
    key: &HandshakeKey,
) -> Result<(EncryptedStream<S>, String), HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (handshake, name) = read_agent_message(&mut stream, key).await?;
    answer_agent(stream, handshake).await.map(|stream| (stream, name))
}

/// Performs node 0's side of the handshake with a joining node, in which both nodes prove that they
/// hold the shared key. An agent that has another key receives an answer, from which it learns that
/// the keys differ. So a process that dialed the address by itself reports the cause.
pub(crate) async fn authenticate_node<S>(
    mut stream: S,
    key: &HandshakeKey,
) -> Result<(EncryptedStream<S>, String), HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match read_agent_message(&mut stream, key).await {
        Ok((handshake, name)) => answer_agent(stream, handshake).await.map(|stream| (stream, name)),
        Err(error) => {
            if matches!(error, HandshakeError::WrongKey(_)) {
                // No key decrypts this answer. An error means that the agent has ended.
                _ = stream.write_all(&[0; EMPTY_MESSAGE_BYTES]).await;
                _ = stream.flush().await;
            }
            Err(error)
        }
    }
}

/// Reads an agent's first message of the handshake, and checks that the agent holds the key of the
/// run. Returns the state of the handshake and the name of the agent's host. Fails if the agent
/// does not hold the key.
async fn read_agent_message<S>(
    stream: &mut S,
    key: &HandshakeKey,
) -> Result<(HandshakeState, String), HandshakeError>
where
    S: AsyncRead + Unpin,
{
    let mut magic = [0; PROTOCOL_MAGIC.len()];
    stream.read_exact(&mut magic).await?;
    let mut length = [0; 2];
    stream.read_exact(&mut length).await?;
    let length = usize::from(u16::from_le_bytes(length));
    let is_valid_length = (EMPTY_MESSAGE_BYTES..=EMPTY_MESSAGE_BYTES + MAX_NAME_BYTES).contains(&length);
    if magic != *PROTOCOL_MAGIC || !is_valid_length {
        return Err(HandshakeError::WrongProtocol);
    }
    let mut message = [0; EMPTY_MESSAGE_BYTES + MAX_NAME_BYTES];
    stream.read_exact(&mut message[..length]).await?;
    let mut handshake = key.begin_handshake(HandshakeRole::Controller)?;
    let mut name = [0; EMPTY_MESSAGE_BYTES + MAX_NAME_BYTES];
    let name_length = handshake
        .read_message(&message[..length], &mut name)
        .map_err(|_| HandshakeError::WrongKey(HandshakeRole::Agent))?;
    let name = str::from_utf8(&name[..name_length]).map_err(|_| HandshakeError::InvalidName)?.to_owned();
    Ok((handshake, name))
}

/// Answers the first handshake message of an agent, and verifies in the agent's reply that the
/// agent holds the key of the run.
async fn answer_agent<S>(
    mut stream: S,
    mut handshake: HandshakeState,
) -> Result<EncryptedStream<S>, HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut answer = [0; EMPTY_MESSAGE_BYTES];
    handshake.write_message(&[], &mut answer)?;
    stream.write_all(&answer).await?;
    stream.flush().await?;
    let mut stream = EncryptedStream::new(stream, handshake.into_stateless_transport_mode()?);
    match stream.read_empty_record().await? {
        true => Ok(stream),
        false => Err(HandshakeError::WrongKey(HandshakeRole::Agent)),
    }
}

/// Feeds the bytes of a fuzzer to the controller's handshake and decryption, and panics if they are
/// accepted although the sender does not have the key. The bytes are read as a handshake, and as
/// records after a handshake. Returns the error of the handshake. Panics if the handshake succeeds
/// or a record is decrypted.
pub(crate) fn fuzz_untrusted_connection(bytes: &[u8]) -> Result<(), HandshakeError> {
    /// Runs a future that never has to wait, because its streams are in memory, and returns its
    /// output without an async runtime.
    fn poll_to_completion<F: Future>(future: F) -> F::Output {
        let mut context = Context::from_waker(Waker::noop());
        match pin!(future).poll(&mut context) {
            Poll::Ready(output) => output,
            Poll::Pending => panic!("a stream in memory is always ready"),
        }
    }
    let key = HandshakeKey([7; 32]);
    let mut hello = key.begin_handshake(HandshakeRole::Agent)?;
    let mut answer = key.begin_handshake(HandshakeRole::Controller)?;
    let mut message = [0; EMPTY_MESSAGE_BYTES];
    hello.write_message(&[], &mut message)?;
    answer.read_message(&message, &mut [])?;
    answer.write_message(&[], &mut message)?;
    let stream = EncryptedStream::new(bytes, answer.into_stateless_transport_mode()?);
    let mut text = Vec::new();
    let read = poll_to_completion(stream.into_halves(|stream| (stream, ())).0.read_to_end(&mut text));
    assert!(text.is_empty() && (read.is_err() || bytes.is_empty()), "a record without the key is decrypted");
    match poll_to_completion(authenticate_agent(tokio::io::join(bytes, tokio::io::sink()), &key)) {
        Ok(_) => panic!("a peer without the key is accepted"),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
