//! Opens an SSH session with the built-in client: a TCP connection (possibly through jump hosts),
//! the key exchange, the check of the host key, and the login.
use super::{
    auth, channel_relay,
    connection_progress::ConnectionProgress,
    happy_eyeballs::connect_to_any,
    known_hosts::{self, HostKeyStatus, KnownHosts, encode_base64, format_fingerprint},
    ssh_error::build_ssh_error,
    target::{HostKeyPolicy, SshTarget},
};
use crate::cluster::transport::ConnectionStage;
use diagnostic::{Diagnostic, codes::ssh};
use nix::sys::socket::{setsockopt, sockopt};
use ssh2::{ErrorCode, HashType, HostKeyType, MethodType, Session};
use std::{
    io,
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::{fd::OwnedFd, unix::net::UnixStream},
    thread,
    time::{Duration, Instant},
};

/// The stack size of the thread that handles one SSH connection, in bytes. There may be thousands
/// of threads.
pub(super) const THREAD_STACK_BYTES: usize = 512 << 10;
/// The SSH key exchange methods that launch offers to servers, in order of preference. Elliptic
/// curves are the cheapest.
const KEX_METHODS: &str = "curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256,ecdh-sha2-nistp384,\
    ecdh-sha2-nistp521,diffie-hellman-group-exchange-sha256,diffie-hellman-group16-sha512,\
    diffie-hellman-group14-sha256";
/// The SSH ciphers that launch offers to servers, in order of preference. Authenticated ciphers
/// come first, and AES comes first among them because CPUs accelerate AES.
const CIPHERS: &str = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,\
    aes128-ctr,aes192-ctr,aes256-ctr";
/// The SSH host key algorithms that launch offers to servers, in order of preference.
const HOST_KEY_ALGORITHMS: &str = "ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,\
    rsa-sha2-512,rsa-sha2-256,ssh-rsa";
/// How long, in milliseconds, data that were sent to an SSH server may stay unacknowledged before
/// the kernel closes the TCP connection.
const TCP_USER_TIMEOUT_MS: u32 = 30_000;
/// The number of attempts to connect to an SSH server that closes each connection without sending
/// its banner. A server with too many connections does so. The failure of the last attempt is an
/// error.
const MAX_CONNECT_ATTEMPTS: u32 = 6;
/// The pause before the second attempt to connect to an SSH server that has closed the connection
/// without sending its banner. The pause doubles with each further attempt.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(200);

/// The stream that carries an SSH connection: a TCP connection, or a tunnel through a jump host.
enum SshSocket {
    Tcp(TcpStream),
    /// The local end of a tunnel through a jump host.
    Tunnel(UnixStream),
}

impl SshSocket {
    /// Duplicates the file descriptor of the socket that carries the SSH connection, so that
    /// another thread can shut the socket down.
    fn duplicate_fd(&self) -> io::Result<OwnedFd> {
        match self {
            SshSocket::Tcp(stream) => stream.try_clone().map(OwnedFd::from),
            SshSocket::Tunnel(stream) => stream.try_clone().map(OwnedFd::from),
        }
    }
}

/// Opens an SSH session with the built-in client: connects to the host through its jump hosts,
/// checks the host key and logs in. Blocks.
///
/// The returned session is in blocking mode. An operation on it fails if it blocks for longer than
/// the timeout of the target.
pub(super) fn open_session(target: &SshTarget, progress: &ConnectionProgress) -> diagnostic::Result<Session> {
    let mut previous = None;
    for hop in &target.jumps {
        previous = Some((open_session_with_hop(target, hop, previous.take(), progress)?, hop));
    }
    open_session_with_hop(target, target, previous, progress)
}

/// Opens an SSH session with the server `hop`, which is the host `target` itself or a jump host on
/// the way to it. Connects through the session with the previous hop, or directly if `previous` is
/// `None`. Retries a direct connection that the server closes before its banner.
fn open_session_with_hop(
    target: &SshTarget,
    hop: &SshTarget,
    previous: Option<(Session, &SshTarget)>,
    progress: &ConnectionProgress,
) -> diagnostic::Result<Session> {
    let mut previous = previous;
    let mut delay = FIRST_RETRY_DELAY;
    let mut attempt = 1;
    loop {
        progress.check_not_aborted(&target.name)?;
        let socket = match previous.take() {
            None => SshSocket::Tcp(connect_tcp(hop, progress)?),
            Some((session, jump)) => SshSocket::Tunnel(open_tunnel(session, jump, hop)?),
        };
        let is_tunnel = matches!(socket, SshSocket::Tunnel(_));
        progress.set_socket(&socket.duplicate_fd().map_err(|error| build_resource_error(hop, &error))?);
        progress.set_stage(ConnectionStage::HostKey);
        let known_hosts = hop.load_known_hosts()?;
        match perform_handshake(hop, socket, &known_hosts) {
            Err(SshHandshakeFailure::ClosedBeforeBanner) if attempt < MAX_CONNECT_ATTEMPTS && !is_tunnel => {
                thread::sleep(delay);
                delay *= 2;
                attempt += 1;
            }
            Err(failure) => return Err(failure.into_diagnostic(hop)),
            Ok(session) => {
                verify_host_key(hop, &session, &known_hosts)?;
                progress.set_stage(ConnectionStage::Authentication);
                auth::log_in(hop, &session)?;
                return Ok(session);
            }
        }
    }
}

/// Builds the error that this machine lacks a resource for an SSH connection, such as a file
/// descriptor or a thread.
fn build_resource_error(target: &SshTarget, error: &io::Error) -> Diagnostic {
    let message = format!("cannot open an SSH connection to host {}", target.name);
    build_ssh_error(target, ssh::SSH_SESSION_LIMIT, message).with_cause(error)
}

/// Resolves the name of an SSH server and opens a TCP connection to one of its addresses, within
/// the configured time limit.
fn connect_tcp(target: &SshTarget, progress: &ConnectionProgress) -> diagnostic::Result<TcpStream> {
    progress.set_stage(ConnectionStage::Name);
    let addresses: Vec<SocketAddr> = (target.hostname.as_str(), target.port)
        .to_socket_addrs()
        .map_err(|error| build_name_error(target, &format_system_error(&error)))?
        .collect();
    progress.set_stage(ConnectionStage::Tcp);
    let stream =
        connect_to_any(addresses, Instant::now() + target.timeout).map_err(|failed| match failed {
            Some((error, address)) => build_connect_error(target, &error, address),
            None => build_name_error(target, "the name has no address"),
        })?;
    _ = stream.set_nodelay(true);
    _ = setsockopt(&stream, sockopt::TcpUserTimeout, &TCP_USER_TIMEOUT_MS);
    Ok(stream)
}

/// Builds the error that the name of an SSH server cannot be resolved.
fn build_name_error(target: &SshTarget, reason: &str) -> Diagnostic {
    let SshTarget { name, hostname, .. } = target;
    let message = format!("cannot resolve the name `{hostname}` of host {name}: {reason}");
    build_ssh_error(target, ssh::SSH_NAME_UNRESOLVED, message)
        .with_field("hostname", hostname.as_str())
        .with_help(format!("check the name with `getent hosts {hostname}`, or use an address"))
}

/// Formats an error of the operating system without the suffix `(os error N)` that Rust's standard
/// library adds.
fn format_system_error(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" (os error").map_or(text.as_str(), |(text, _)| text);
    text.strip_prefix("failed to lookup address information: ").unwrap_or(text).to_owned()
}

/// Builds the error that no TCP connection to the SSH server at `address` could be opened, with
/// advice that depends on the cause.
fn build_connect_error(target: &SshTarget, error: &io::Error, address: SocketAddr) -> Diagnostic {
    let name = &target.name;
    let (code, message, help) = match error.kind() {
        io::ErrorKind::ConnectionRefused => (
            ssh::SSH_CONNECT_REFUSED,
            format!("cannot connect to host {name}: connection refused (TCP, {address})"),
            "the host is up, but no SSH server listens there; check that sshd runs and that the port is right",
        ),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            let seconds = target.timeout.as_secs_f64();
            (
                ssh::SSH_CONNECT_TIMEOUT,
                format!("host {name} did not answer within {seconds} s (TCP, {address})"),
                "check that the host is up and that no firewall drops the packets; \
                 `cluster.ssh.connect_timeout` sets the limit",
            )
        }
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => (
            ssh::SSH_NO_ROUTE,
            format!("cannot connect to host {name}: no route to the host (TCP, {address})"),
            "check that the host is up and in a network that this machine reaches",
        ),
        _ => {
            let reason = format_system_error(error);
            (
                ssh::SSH_CONNECT_FAILED,
                format!("cannot connect to host {name}: {reason} (TCP, {address})"),
                "try `ssh` to the host from this machine",
            )
        }
    };
    build_ssh_error(target, code, message).with_field("address", address.to_string()).with_help(help)
}

/// Opens a tunnel to the SSH server `hop` through the SSH session with the jump host `jump`, and
/// starts a thread that relays the bytes of the tunnel. Returns the local end of the tunnel. The
/// tunnel ends when either side ends.
fn open_tunnel(session: Session, jump: &SshTarget, hop: &SshTarget) -> diagnostic::Result<UnixStream> {
    let SshTarget { name, hostname, port, .. } = hop;
    let channel = session.channel_direct_tcpip(hostname, *port, None).map_err(|error| {
        let message = format!(
            "jump host {} cannot connect to host {name} at {hostname}:{port}: {}",
            jump.name,
            error.message()
        );
        build_ssh_error(hop, ssh::SSH_JUMP_FAILED, message)
            .with_field("jump_host", jump.name.as_str())
            .with_help("check that the jump host reaches it and allows TCP forwarding (`AllowTcpForwarding`)")
    })?;
    let (near, far) = UnixStream::pair().map_err(|error| build_resource_error(hop, &error))?;
    let run = move || _ = channel_relay::relay_channel(&session, channel, &far, None, Vec::new());
    thread::Builder::new()
        .name("ssh-jump".into())
        .stack_size(THREAD_STACK_BYTES)
        .spawn(run)
        .map_err(|error| build_resource_error(hop, &error))?;
    Ok(near)
}

/// A failure of the SSH handshake (banners and key exchange) with a server.
#[derive(Debug, thiserror::Error)]
enum SshHandshakeFailure {
    #[error("the server closed the connection before its banner")]
    ClosedBeforeBanner,
    #[error("no SSH banner was received in time")]
    Timeout,
    #[error("{0}")]
    Protocol(String),
}

impl From<ssh2::Error> for SshHandshakeFailure {
    fn from(error: ssh2::Error) -> Self {
        match error.code() {
            // LIBSSH2_ERROR_TIMEOUT, LIBSSH2_ERROR_EAGAIN
            ErrorCode::Session(-9 | -37) => SshHandshakeFailure::Timeout,
            // LIBSSH2_ERROR_SOCKET_DISCONNECT, LIBSSH2_ERROR_SOCKET_RECV
            ErrorCode::Session(-13 | -43) => SshHandshakeFailure::ClosedBeforeBanner,
            _ => SshHandshakeFailure::Protocol(error.message().to_owned()),
        }
    }
}

impl SshHandshakeFailure {
    /// Converts the failure of the SSH handshake into a diagnostic that contains the name of the
    /// host.
    fn into_diagnostic(self, target: &SshTarget) -> Diagnostic {
        let name = &target.name;
        let (code, message) = match &self {
            SshHandshakeFailure::Timeout => (
                ssh::SSH_HANDSHAKE_TIMEOUT,
                format!("host {name} sent no SSH banner within {} s", target.timeout.as_secs_f64()),
            ),
            SshHandshakeFailure::ClosedBeforeBanner | SshHandshakeFailure::Protocol(_) => {
                (ssh::SSH_HANDSHAKE_FAILED, format!("the SSH handshake with host {name} failed: {self}"))
            }
        };
        build_ssh_error(target, code, message).with_help(
            "check that an SSH server listens on the port and allows more connections (`MaxStartups`)",
        )
    }
}

/// Performs the SSH handshake with a server over `socket` (exchanges banners and keys), and returns
/// the SSH session. Prefers host keys of the types that known_hosts contains for the host.
fn perform_handshake(
    target: &SshTarget,
    socket: SshSocket,
    known_hosts: &KnownHosts,
) -> Result<Session, SshHandshakeFailure> {
    let mut session = Session::new()?;
    session.set_timeout(u32::try_from(target.timeout.as_millis()).unwrap_or(u32::MAX));
    match socket {
        SshSocket::Tcp(stream) => session.set_tcp_stream(stream),
        SshSocket::Tunnel(stream) => session.set_tcp_stream(stream),
    }
    for (method, names) in
        [(MethodType::Kex, KEX_METHODS), (MethodType::CryptCs, CIPHERS), (MethodType::CryptSc, CIPHERS)]
    {
        session.method_pref(method, names)?;
    }
    let host_keys = order_host_key_algorithms(&known_hosts.list_key_types(&target.known_hosts_name));
    session.method_pref(MethodType::HostKey, &host_keys)?;
    session.handshake()?;
    Ok(session)
}

/// Returns the host key algorithms to request from an SSH server, as a comma-separated list in
/// order of preference. Algorithms for keys of the types in `known_types` come first.
fn order_host_key_algorithms(known_types: &[&str]) -> String {
    let is_known = |name: &&str| {
        known_types.contains(name) || (name.starts_with("rsa-") && known_types.contains(&"ssh-rsa"))
    };
    let (mut preference, others): (Vec<&str>, Vec<&str>) = HOST_KEY_ALGORITHMS.split(',').partition(is_known);
    preference.extend(others);
    preference.join(",")
}

/// Checks the key that an SSH server has presented against the known_hosts files, and fails if the
/// key is not accepted. If known_hosts has no key of the host, stores the presented key, provided
/// that the policy of the target allows it.
fn verify_host_key(
    target: &SshTarget,
    session: &Session,
    known_hosts: &KnownHosts,
) -> diagnostic::Result<()> {
    let key = session.host_key().zip(session.host_key_hash(HashType::Sha256));
    let ((blob, key_type), hash) = key.ok_or_else(|| {
        let message = format!("the SSH handshake with host {} failed: it presents no host key", target.name);
        build_ssh_error(target, ssh::SSH_HANDSHAKE_FAILED, message)
    })?;
    let (key_type, print, key) = (to_key_type_name(key_type), format_fingerprint(hash), encode_base64(blob));
    let known_name = &target.known_hosts_name;
    let status = known_hosts.check_host_key(known_name, key_type, &key);
    if status == HostKeyStatus::Known {
        return Ok(());
    }
    match (status, target.host_key_policy) {
        (HostKeyStatus::Unknown, HostKeyPolicy::AcceptNew) => {
            store_host_key(target, key_type, &key)?;
            return Ok(());
        }
        (HostKeyStatus::Unknown | HostKeyStatus::OtherTypes, HostKeyPolicy::AcceptAny) => {
            // The key is accepted anyway, also if it cannot be stored.
            _ = store_host_key(target, key_type, &key);
            return Ok(());
        }
        (HostKeyStatus::Changed, HostKeyPolicy::AcceptAny) => return Ok(()),
        _ => {}
    }
    Err(build_host_key_error(target, status, key_type, &print))
}

/// Adds the key of an SSH server that known_hosts files do not contain yet to the user's first
/// known_hosts file.
fn store_host_key(target: &SshTarget, key_type: &str, key: &str) -> diagnostic::Result<()> {
    let Some(file) = &target.new_keys_file else { return Ok(()) };
    known_hosts::append_host_key(file, &target.known_hosts_name, key_type, key).map_err(|error| {
        let file = file.display().to_string();
        let message = format!("cannot store the new key of host {} in {file}", target.name);
        build_ssh_error(target, ssh::SSH_KNOWN_HOSTS_UNWRITABLE, message)
            .with_field("file", file)
            .with_cause(&error)
            .with_help("make the file writable, or add the key yourself and use `strict`")
    })
}

/// Builds the error that the key of an SSH server is not accepted, for example because known_hosts
/// files contain another key for the host.
fn build_host_key_error(
    target: &SshTarget,
    status: HostKeyStatus,
    key_type: &str,
    fingerprint: &str,
) -> Diagnostic {
    let name = &target.name;
    let known_name = &target.known_hosts_name;
    let file = target
        .known_hosts_files
        .first()
        .map_or_else(|| "known_hosts".to_owned(), |f| f.display().to_string());
    let (code, message, help) = match status {
        HostKeyStatus::Known | HostKeyStatus::Unknown => (
            ssh::SSH_HOST_KEY_UNKNOWN,
            format!(
                "the key of host {name} is unknown: it presents the {key_type} key {fingerprint}, \
                 and {file} has no key of `{known_name}`"
            ),
            format!(
                "compare the fingerprint with the host's own \
                 (`ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub`), then connect once with \
                 `ssh -p {} {}`, or set `cluster.ssh.known_hosts: accept_new`",
                target.port, target.hostname
            ),
        ),
        HostKeyStatus::Changed => (
            ssh::SSH_HOST_KEY_CHANGED,
            format!(
                "the key of host {name} has changed: it presents the {key_type} key {fingerprint}, \
                 and {file} has another one of `{known_name}`"
            ),
            format!(
                "the host was reinstalled, or another machine answers in its place; find out which, \
                 then remove the old key with `ssh-keygen -R '{known_name}'`"
            ),
        ),
        HostKeyStatus::OtherTypes => (
            ssh::SSH_HOST_KEY_TYPE_UNKNOWN,
            format!(
                "host {name} presents the {key_type} key {fingerprint}, and {file} has only keys of \
                 other types of `{known_name}`"
            ),
            format!(
                "compare the fingerprint with the host's own, then add the key, or remove the old \
                 ones with `ssh-keygen -R '{known_name}'`"
            ),
        ),
        HostKeyStatus::Revoked => (
            ssh::SSH_HOST_KEY_REVOKED,
            format!("the {key_type} key {fingerprint} of host {name} is marked as revoked in {file}"),
            "another machine that has the key may answer in its place; give the host a new key".to_owned(),
        ),
    };
    build_ssh_error(target, code, message)
        .with_field("key_type", key_type)
        .with_field("fingerprint", fingerprint)
        .with_field("known_hosts", file)
        .with_help(help)
}

/// Returns the name, such as `ssh-ed25519`, by which known_hosts files call a type of SSH keys.
fn to_key_type_name(key_type: HostKeyType) -> &'static str {
    match key_type {
        HostKeyType::Rsa => "ssh-rsa",
        HostKeyType::Dss => "ssh-dss",
        HostKeyType::Ecdsa256 => "ecdsa-sha2-nistp256",
        HostKeyType::Ecdsa384 => "ecdsa-sha2-nistp384",
        HostKeyType::Ecdsa521 => "ecdsa-sha2-nistp521",
        HostKeyType::Ed25519 => "ssh-ed25519",
        HostKeyType::Unknown => "unknown",
    }
}
