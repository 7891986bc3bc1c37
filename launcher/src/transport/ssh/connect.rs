//! From a target to a session: a TCP connection (perhaps through other hosts), keys agreed, the host known, the user let in.
use super::{
    auth,
    known_hosts::{self, Judgement, Known, encode, fingerprint, takes_new},
    progress::{Progress, Stage},
    pump,
    target::Target,
};
use crate::transport::Refusal;
use nix::sys::socket::{setsockopt, sockopt};
use ssh2::{ErrorCode, HashType, HostKeyType, MethodType, Session};
use std::{
    io,
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::{fd::OwnedFd, unix::net::UnixStream},
    thread,
    time::{Duration, Instant},
};

/// Elliptic curves first: a fraction of the work of the others.
const KEX: &str = "curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256,ecdh-sha2-nistp384,\
    ecdh-sha2-nistp521,diffie-hellman-group-exchange-sha256,diffie-hellman-group16-sha512,diffie-hellman-group14-sha256";
/// Authenticated ciphers first: AES has instructions of its own.
const CIPHERS: &str = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr,aes192-ctr,aes256-ctr";
const HOST_KEYS: &str = "ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,rsa-sha2-512,rsa-sha2-256,ssh-rsa";
/// A dead way is noticed when nothing was acknowledged for this long, milliseconds.
const USER_TIMEOUT: u32 = 30_000;
/// Between two signs of life to a host that has nothing to say, seconds.
pub(super) const KEEPALIVE: u32 = 15;
/// Times that a server which hangs up before its greeting (it has too many callers) is called again.
const CALLS: u32 = 6;
/// Before the second call; doubled each time.
const CALL_PAUSE: Duration = Duration::from_millis(200);

/// The way to a host's SSH server.
enum Wire {
    Tcp(TcpStream),
    /// The near end of a bridge over a jump host.
    Bridge(UnixStream),
}

impl Wire {
    fn duplicate(&self) -> io::Result<OwnedFd> {
        match self {
            Wire::Tcp(stream) => stream.try_clone().map(OwnedFd::from),
            Wire::Bridge(stream) => stream.try_clone().map(OwnedFd::from),
        }
    }
}

/// A session with a host that is known, as a user who was let in. It blocks, with the target's timeout.
pub(super) fn connect(target: &Target, progress: &Progress) -> Result<Session, Refusal> {
    let mut way: Option<(Session, &Target)> = None;
    for hop in target.jumps.iter().chain([target]) {
        let session = call(target, hop, way.take(), progress)?;
        way = Some((session, hop));
    }
    let (session, _) = way.ok_or_else(|| refuse(target, "there is no way to it", None))?;
    Ok(session)
}

/// One hop, called again where its server hangs up at once.
fn call(
    target: &Target,
    hop: &Target,
    over: Option<(Session, &Target)>,
    progress: &Progress,
) -> Result<Session, Refusal> {
    let mut over = over;
    let mut pause = CALL_PAUSE;
    for calls in 1.. {
        progress.check(&target.name)?;
        let wire = match over.take() {
            None => Wire::Tcp(dial(hop, progress)?),
            Some((session, from)) => Wire::Bridge(bridge(session, from, hop)?),
        };
        let bridged = matches!(wire, Wire::Bridge(_));
        progress.watch(&wire.duplicate().map_err(|e| refuse(hop, &format!("no descriptors: {e}"), None))?);
        progress.at(Stage::HostKey);
        let known = hop.known().map_err(|e| refuse(hop, &e, None))?;
        match greet(hop, wire, &known) {
            Err(Greeting::HungUp(_)) if calls < CALLS && !bridged => {
                thread::sleep(pause);
                pause *= 2;
            }
            Err(Greeting::HungUp(why) | Greeting::Failed(why)) => {
                return Err(refuse(
                    hop,
                    &why,
                    Some("is it an SSH server, and does it allow more connections (MaxStartups)?"),
                ));
            }
            Ok(session) => {
                verify(hop, &session, &known)?;
                progress.at(Stage::Authentication);
                auth::authenticate(hop, &session)?;
                session.set_keepalive(true, KEEPALIVE);
                return Ok(session);
            }
        }
    }
    Err(refuse(hop, "it can't be called", None))
}

pub(super) fn refuse(target: &Target, what: &str, hint: Option<&str>) -> Refusal {
    Refusal { message: format!("{}: {what}", target.name), hint: hint.map(str::to_owned) }
}

fn dial(target: &Target, progress: &Progress) -> Result<TcpStream, Refusal> {
    progress.at(Stage::Name);
    let (host, port) = (target.hostname.as_str(), target.port);
    let addresses: Vec<SocketAddr> =
        (host, port).to_socket_addrs().map_err(|e| unresolved(target, &e))?.collect();
    progress.at(Stage::Tcp);
    let until = Instant::now() + target.timeout;
    let mut last = None;
    for address in &addresses {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => {
                _ = stream.set_nodelay(true);
                _ = setsockopt(&stream, sockopt::TcpUserTimeout, &USER_TIMEOUT);
                return Ok(stream);
            }
            Err(error) => last = Some((error, address)),
        }
    }
    Err(match last {
        Some((error, address)) => unreached(target, &error, *address),
        None => refuse(target, &format!("the name `{host}` has no address"), None),
    })
}

fn unresolved(target: &Target, error: &io::Error) -> Refusal {
    let what = format!("the name `{}` can't be resolved ({})", target.hostname, plain(error));
    refuse(
        target,
        &what,
        Some("is it spelled right, and does `getent hosts` know it here? An address works too"),
    )
}

/// The system's words without Rust's frame.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" (os error").map_or(text.as_str(), |(text, _)| text);
    text.strip_prefix("failed to lookup address information: ").unwrap_or(text).to_owned()
}

fn unreached(target: &Target, error: &io::Error, address: SocketAddr) -> Refusal {
    let (what, hint) = match error.kind() {
        io::ErrorKind::ConnectionRefused => (
            "the connection was refused".to_owned(),
            "the host is up, but no SSH server listens there: is sshd running, and is the port right?",
        ),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => (
            format!("no answer within {} s", target.timeout.as_secs_f64()),
            "is the host up? A firewall that drops packets looks the same; `cluster.ssh.connect_timeout` is the wait",
        ),
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            ("no route to the host".to_owned(), "is the host up and in a network that this machine reaches?")
        }
        _ => (plain(error), "can `ssh` reach it from here?"),
    };
    refuse(target, &format!("{what} (TCP, {address})"), Some(hint))
}

/// A way to `hop` through a session with another host. The bridge ends with either side.
fn bridge(session: Session, from: &Target, hop: &Target) -> Result<UnixStream, Refusal> {
    let channel = session.channel_direct_tcpip(&hop.hostname, hop.port, None).map_err(|e| {
        let what = format!(
            "the jump host {} can't connect to {}:{}: {}",
            from.name,
            hop.hostname,
            hop.port,
            e.message()
        );
        refuse(
            hop,
            &what,
            Some("does the jump host reach it, and allow TCP forwarding (AllowTcpForwarding)?"),
        )
    })?;
    let own = |e: io::Error| refuse(hop, &format!("no descriptors for the jump host: {e}"), None);
    let (near, far) = UnixStream::pair().map_err(own)?;
    let run = move || _ = pump::pump(&session, channel, &far, None, Vec::new());
    thread::Builder::new().name("ssh-jump".into()).stack_size(super::STACK).spawn(run).map_err(own)?;
    Ok(near)
}

/// Why no session came of a wire.
enum Greeting {
    /// The server closed it before it had said who it is.
    HungUp(String),
    Failed(String),
}

/// Greetings, and keys agreed.
fn greet(target: &Target, wire: Wire, known: &Known) -> Result<Session, Greeting> {
    let failed = |e: ssh2::Error| match e.code() {
        ErrorCode::Session(-9 | -37) => {
            Greeting::Failed(format!("no SSH greeting within {} s", target.timeout.as_secs_f64()))
        }
        ErrorCode::Session(-13 | -43) => {
            Greeting::HungUp("the server closed the connection before its greeting".to_owned())
        }
        _ => Greeting::Failed(format!("SSH can't be spoken with it: {}", e.message())),
    };
    let mut session = Session::new().map_err(failed)?;
    session.set_timeout(u32::try_from(target.timeout.as_millis()).unwrap_or(u32::MAX));
    match wire {
        Wire::Tcp(stream) => session.set_tcp_stream(stream),
        Wire::Bridge(stream) => session.set_tcp_stream(stream),
    }
    for (method, names) in
        [(MethodType::Kex, KEX), (MethodType::CryptCs, CIPHERS), (MethodType::CryptSc, CIPHERS)]
    {
        session.method_pref(method, names).map_err(failed)?;
    }
    session.method_pref(MethodType::HostKey, &host_keys(&known.kinds(&target.known_as))).map_err(failed)?;
    session.handshake().map_err(failed)?;
    Ok(session)
}

/// The algorithms to ask for: first those of the keys that are known.
fn host_keys(known: &[&str]) -> String {
    let of = |name: &&str| known.contains(name) || (name.starts_with("rsa-") && known.contains(&"ssh-rsa"));
    let (mut first, rest): (Vec<&str>, Vec<&str>) = HOST_KEYS.split(',').partition(of);
    first.extend(rest);
    first.join(",")
}

/// Is it the host that is meant?
fn verify(target: &Target, session: &Session, known: &Known) -> Result<(), Refusal> {
    let shown = session.host_key().zip(session.host_key_hash(HashType::Sha256));
    let ((blob, kind), hash) = shown.ok_or_else(|| refuse(target, "it shows no host key", None))?;
    let (kind, print, key) = (kind_name(kind), fingerprint(hash), encode(blob));
    let (name, files) = (&target.known_as, files(target));
    let (what, hint) = match known.judge(name, kind, &key) {
        Judgement::Known => return Ok(()),
        Judgement::Unknown if takes_new(target.policy) => {
            let kept = known_hosts::add(&target.new_keys, name, kind, &key);
            return kept.map_err(|e| {
                let what = format!("its new host key can't be kept in {}: {e}", target.new_keys.display());
                refuse(
                    target,
                    &what,
                    Some("make the file writable, or add the key yourself and use `strict`"),
                )
            });
        }
        Judgement::Unknown => (
            format!("unknown host: it shows the {kind} key {print}, and {files} has no key of `{name}`"),
            format!(
                "compare the fingerprint with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub), then connect once with `ssh -p {} {}`, or set `cluster.ssh.known_hosts: accept_new`",
                target.port, target.hostname
            ),
        ),
        Judgement::Changed => (
            format!(
                "the host key has changed: it shows the {kind} key {print}, and {files} has another one of `{name}`"
            ),
            format!(
                "either the host was installed anew, or someone else answers in its place. Find out which; then `ssh-keygen -R '{name}'` forgets the old key"
            ),
        ),
        Judgement::OtherTypes => (
            format!("it shows the {kind} key {print}, and {files} has only keys of other types of `{name}`"),
            format!(
                "compare the fingerprint with the host's own, then add the key, or forget the old ones with `ssh-keygen -R '{name}'`"
            ),
        ),
        Judgement::Revoked => (
            format!("its {kind} key {print} is marked as revoked in {files}"),
            "someone who had the key may answer in the host's place: give the host a new key".to_owned(),
        ),
    };
    Err(refuse(target, &what, Some(&hint)))
}

fn files(target: &Target) -> String {
    target.known_hosts.first().map_or_else(|| "known_hosts".to_owned(), |f| f.display().to_string())
}

fn kind_name(kind: HostKeyType) -> &'static str {
    match kind {
        HostKeyType::Rsa => "ssh-rsa",
        HostKeyType::Dss => "ssh-dss",
        HostKeyType::Ecdsa256 => "ecdsa-sha2-nistp256",
        HostKeyType::Ecdsa384 => "ecdsa-sha2-nistp384",
        HostKeyType::Ecdsa521 => "ecdsa-sha2-nistp521",
        HostKeyType::Ed25519 => "ssh-ed25519",
        HostKeyType::Unknown => "unknown",
    }
}
