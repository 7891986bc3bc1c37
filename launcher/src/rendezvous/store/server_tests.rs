//! Tests of the rendezvous store's server, with clients that connect over TCP.
use super::{super::wire::tests::encode_request, *};
use std::net::Ipv4Addr;
use std::{
    io::{Read, Write},
    net::TcpStream as Socket,
};

/// The time limit of a read from a socket in these tests. Every operation of the server takes much
/// less time.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Starts a server on any free port of the loopback address. The receiver gets the server's
/// warnings for the user.
fn start_server() -> (StoreServer, mpsc::Receiver<String>) {
    let (sender, messages) = mpsc::channel(16);
    (start_on_port(0, sender).expect("a server"), messages)
}

/// Connects a client to the server and sends the handshake of the protocol.
fn connect_client(server: &StoreServer) -> Socket {
    let mut socket = Socket::connect((Ipv4Addr::LOCALHOST, server.port())).expect("connected");
    socket.set_read_timeout(Some(READ_TIMEOUT)).expect("limit");
    socket.write_all(&encode_request(&StoreRequest::Validate)).expect("sent");
    socket
}

/// Encodes a request and sends it to the server.
fn send_request(socket: &mut Socket, sent: StoreRequest) {
    socket.write_all(&encode_request(&sent)).expect("sent");
}

/// Reads as many bytes as `expected` has, and panics if they differ from `expected`.
#[track_caller]
fn expect_bytes(socket: &mut Socket, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    socket.read_exact(&mut bytes).expect("an answer");
    assert_eq!(bytes, expected);
}

/// Waits until the server has handled all earlier requests of the client: sends a ping and reads
/// the reply.
fn wait_until_handled(socket: &mut Socket) {
    send_request(socket, StoreRequest::Ping(9));
    expect_bytes(socket, &9u32.to_le_bytes());
}

/// Converts a text to the bytes of a key or value.
fn to_bytes(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

/// Encodes a key or value to the bytes that the server sends: its length as a u64, then its bytes.
fn encode_value(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Encodes a number to the bytes that the server sends: eight bytes, little-endian.
fn encode_number(n: i64) -> Vec<u8> {
    n.to_le_bytes().to_vec()
}

#[test]
fn every_operation_works_over_a_socket() {
    use StoreRequest::*;
    let (server, _messages) = start_server();
    let mut client = connect_client(&server);
    for (request, answer) in [
        (Ping(0xdead), 0xdeadu32.to_le_bytes().to_vec()),
        (Set(to_bytes("/a"), to_bytes("1")), vec![]),
        (Get(to_bytes("/a")), encode_value("1")),
        (Add(to_bytes("init/"), 1), encode_number(1)),
        (CompareSet(to_bytes("/a"), to_bytes("1"), to_bytes("two")), encode_value("two")),
        (Check(vec![to_bytes("/a"), to_bytes("/b")]), vec![1]),
        (Check(vec![to_bytes("/a")]), vec![0]),
        (Wait(vec![to_bytes("/a")]), vec![0]),
        (CountKeys, encode_number(2)),
        (ListKeys, [encode_number(2), encode_value("/a"), encode_value("init/")].concat()),
        (Append(to_bytes("/a"), to_bytes("+")), vec![]),
        (SetMany(vec![(to_bytes("/b"), to_bytes("2"))]), vec![]),
        (GetMany(vec![to_bytes("/a"), to_bytes("/b")]), [encode_value("two+"), encode_value("2")].concat()),
        (Delete(to_bytes("/b")), encode_number(1)),
        (Push(to_bytes("/q"), to_bytes("x")), vec![]),
        (QueueLength(to_bytes("/q")), encode_number(1)),
        (Pop(to_bytes("/q")), [encode_number(1), encode_value("x")].concat()),
        (Pop(to_bytes("/q")), encode_number(0)),
        (Barrier(to_bytes("/bar"), 1), vec![0]),
        (CancelWait, vec![1]),
    ] {
        send_request(&mut client, request);
        expect_bytes(&mut client, &answer);
    }
    wait_until_handled(&mut client);
}

#[test]
fn a_wait_ends_when_another_client_sets_the_key() {
    let (server, _messages) = start_server();
    let (mut waiting, mut other) = (connect_client(&server), connect_client(&server));
    send_request(&mut waiting, StoreRequest::Wait(vec![to_bytes("/a"), to_bytes("/b")]));
    wait_until_handled(&mut waiting);
    send_request(&mut other, StoreRequest::Set(to_bytes("/b"), to_bytes("")));
    send_request(&mut other, StoreRequest::Set(to_bytes("/a"), to_bytes("")));
    expect_bytes(&mut waiting, &[0]);

    send_request(&mut waiting, StoreRequest::Wait(vec![to_bytes("/c")]));
    send_request(&mut waiting, StoreRequest::CancelWait);
    expect_bytes(&mut waiting, &[1]);
    send_request(&mut other, StoreRequest::Set(to_bytes("/c"), to_bytes("")));
    wait_until_handled(&mut other);
    wait_until_handled(&mut waiting);
}

#[test]
fn a_barrier_holds_until_the_last_client_arrives() {
    let (server, _messages) = start_server();
    let mut clients: Vec<Socket> = (0..20).map(|_| connect_client(&server)).collect();
    for client in &mut clients {
        send_request(client, StoreRequest::Barrier(to_bytes("/b"), 20));
    }
    for client in &mut clients {
        expect_bytes(client, &[0]);
    }
}

#[test]
fn requests_may_arrive_in_pieces_and_many_at_once() {
    let (server, _messages) = start_server();
    let mut client = connect_client(&server);
    for byte in encode_request(&StoreRequest::Set(to_bytes("/slow"), to_bytes("value"))) {
        client.write_all(&[byte]).expect("sent");
    }
    let large = vec![7; crate::rendezvous::store::limits::MAX_VALUE_BYTES as usize];
    send_request(&mut client, StoreRequest::Set(to_bytes("/large"), large.clone()));
    let many: Vec<u8> =
        (0..1000).flat_map(|_| encode_request(&StoreRequest::Get(to_bytes("/slow")))).collect();
    client.write_all(&many).expect("sent");
    for _ in 0..1000 {
        expect_bytes(&mut client, &encode_value("value"));
    }
    send_request(&mut client, StoreRequest::Get(to_bytes("/large")));
    expect_bytes(&mut client, &(large.len() as u64).to_le_bytes());
    expect_bytes(&mut client, &large);
}

#[test]
fn a_client_with_another_protocol_is_disconnected_and_others_are_not() {
    let (server, mut messages) = start_server();
    let mut good = connect_client(&server);
    let (mut lines, mut source) = (Vec::new(), 1);
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &encode_request(&StoreRequest::Get(to_bytes("/no magic"))),
        &[encode_request(&StoreRequest::Validate), vec![99]].concat(),
        &[encode_request(&StoreRequest::Validate), vec![1], u64::MAX.to_le_bytes().to_vec()].concat(),
    ] {
        source += 1;
        let mut bad = connect_from(Ipv4Addr::new(127, 0, 0, source), &server);
        bad.write_all(bytes).expect("sent");
        let mut rest = Vec::new();
        // The server resets a connection that it closes without reading all input.
        assert!(bad.read_to_end(&mut rest).is_err() || rest.is_empty(), "answered {rest:?}");
        lines.push(messages.blocking_recv().expect("a message"));
        wait_until_handled(&mut good);
    }
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"127\.0\.0\.\d+:\d+", "127.0.0.1:PORT");
    settings.bind(|| insta::assert_snapshot!(lines.join("\n")));
}

#[test]
fn a_client_that_waits_and_leaves_is_forgotten() {
    let (server, _messages) = start_server();
    let (mut leaving, mut staying) = (connect_client(&server), connect_client(&server));
    for client in [&mut leaving, &mut staying] {
        send_request(client, StoreRequest::Wait(vec![to_bytes("/q")]));
        wait_until_handled(client);
    }
    leaving.shutdown(std::net::Shutdown::Both).expect("shut down");
    let mut other = connect_client(&server);
    // If an item wakes a client that leaves at that moment, the item stays in the queue, and the
    // next push wakes the other client.
    for _ in 0..2 {
        send_request(&mut other, StoreRequest::Push(to_bytes("/q"), to_bytes("item")));
    }
    expect_bytes(&mut staying, &[0]);
}

#[test]
fn the_port_is_held_until_the_server_is_dropped() {
    let (server, _messages) = start_server();
    let port = server.port();
    let (sender, _other_messages) = mpsc::channel(1);
    let error = start_on_port(port, sender.clone()).expect_err("taken");
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    let mut client = connect_client(&server);
    wait_until_handled(&mut client);
    drop(server);
    let mut rest = Vec::new();
    assert_eq!(client.read_to_end(&mut rest).expect("closed"), 0);
    start_on_port(port, sender).expect("free again");
}

/// Starts a server at `port` of the loopback address, for clients on this machine only.
fn start_on_port(port: u16, messages: mpsc::Sender<String>) -> io::Result<StoreServer> {
    StoreServer::start(Ipv4Addr::LOCALHOST.into(), port, &[], messages)
}

/// Connects a client from the loopback address `source`. Warnings are limited by address, so a test
/// with a separate address gets all of its warnings.
fn connect_from(source: Ipv4Addr, server: &StoreServer) -> Socket {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
    let socket =
        socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    let raw = std::os::fd::AsRawFd::as_raw_fd(&socket);
    let [a, b, c, d] = source.octets();
    bind(raw, &SockaddrIn::new(a, b, c, d, 0)).expect("bound");
    connect(raw, &SockaddrIn::new(127, 0, 0, 1, server.port())).expect("connected");
    let socket = Socket::from(socket);
    socket.set_read_timeout(Some(READ_TIMEOUT)).expect("limit");
    socket
}

#[test]
fn a_client_without_a_handshake_is_closed_in_time() {
    let (sender, mut messages) = mpsc::channel(16);
    let timeout = Duration::from_millis(300);
    let server = StoreServer::start_with_timeout(Ipv4Addr::LOCALHOST.into(), 0, &[], sender, timeout);
    let server = server.expect("a server");
    let mut valid = connect_client(&server);
    let mut idle = connect_from(Ipv4Addr::new(127, 0, 0, 2), &server);
    let mut again = connect_from(Ipv4Addr::new(127, 0, 0, 2), &server);
    let mut rest = Vec::new();
    assert_eq!(idle.read_to_end(&mut rest).expect("closed"), 0);
    assert_eq!(again.read_to_end(&mut rest).expect("closed"), 0);
    wait_until_handled(&mut valid);
    let warning = messages.blocking_recv().expect("a warning");
    assert!(
        warning.starts_with("launch: rendezvous store: closed the connection of 127.0.0.2:"),
        "{warning}"
    );
    drop(server);
    assert_eq!(messages.blocking_recv(), None, "an address gets one warning per minute");
}

/// Checks that a client of another user of this machine cannot write a key. Does nothing without
/// root, because only root can start a process as another user.
#[test]
fn a_client_of_another_user_is_rejected() {
    use std::os::unix::process::CommandExt;
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (server, mut messages) = start_server();
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    let request = hex([
        encode_request(&StoreRequest::Validate),
        encode_request(&StoreRequest::Set(to_bytes("/key"), to_bytes("other"))),
    ]
    .concat());
    // The last client closes its socket at once, so that the socket has no owner.
    for ending in ["cat <&3", "exec 3>&-"] {
        let script =
            format!("exec 3<>/dev/tcp/127.0.0.1/{}; printf '{request}' >&3; {ending}", server.port());
        let mut command = std::process::Command::new("bash");
        let output = command.arg("-c").arg(script).uid(65_534).output().expect("bash");
        assert_eq!(output.stdout, b"");
    }
    let warning = messages.blocking_recv().expect("a warning");
    let expected = "launch: rendezvous store: rejected a connection from 127.0.0.1: \
                    its process belongs to another user (uid 65534)";
    assert_eq!(warning, expected);
    let mut client = connect_client(&server);
    send_request(&mut client, StoreRequest::Check(vec![to_bytes("/key")]));
    expect_bytes(&mut client, &[1]);
}

#[test]
fn a_low_limit_of_open_files_is_rejected() {
    assert_eq!(check_open_file_limit(10_000, 16_384), Ok(()));
    for (ranks, open_files) in [(10_000, 4096), (70_000, 1 << 20)] {
        let error = check_open_file_limit(ranks, open_files).expect_err("rejected");
        assert_eq!(error.code(), run::RENDEZVOUS_TOO_MANY_RANKS);
        assert_eq!(error.field("ranks"), Some(&ranks.into()));
        assert_eq!(error.field("open_files"), Some(&open_files.into()));
    }
}

#[test]
fn unread_replies_count_until_their_connection_closes() {
    let (server, _messages) = start_server();
    let mut greedy = connect_client(&server);
    let large = vec![7; crate::rendezvous::store::limits::MAX_VALUE_BYTES as usize];
    send_request(&mut greedy, StoreRequest::Set(to_bytes("/large"), large));
    wait_until_handled(&mut greedy);
    // Each client requests 8 MiB and reads nothing. If the server did not release these bytes, it
    // would reject the next requests.
    for _ in 0..20 {
        let mut idle = connect_client(&server);
        send_request(&mut idle, StoreRequest::Get(to_bytes("/large")));
        wait_until_handled(&mut greedy);
    }
    for _ in 0..200 {
        let mut client = connect_client(&server);
        send_request(&mut client, StoreRequest::Get(to_bytes("/large")));
        let mut length = [0; 8];
        client.read_exact(&mut length).expect("closed connections free their buffers");
    }
}
