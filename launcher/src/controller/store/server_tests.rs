use super::{super::wire::tests::request, *};
use std::net::Ipv4Addr;
use std::{
    io::{Read, Write},
    net::TcpStream as Socket,
};

/// Much longer than any operation takes.
const LIMIT: Duration = Duration::from_secs(30);

fn server() -> (StoreServer, mpsc::Receiver<String>) {
    let (sender, messages) = mpsc::channel(16);
    (start(0, sender).expect("a server"), messages)
}

fn connect(server: &StoreServer) -> Socket {
    let mut socket = Socket::connect((Ipv4Addr::LOCALHOST, server.port())).expect("connected");
    socket.set_read_timeout(Some(LIMIT)).expect("limit");
    socket.write_all(&request(&Request::Validate)).expect("sent");
    socket
}

fn send(socket: &mut Socket, sent: Request) {
    socket.write_all(&request(&sent)).expect("sent");
}

#[track_caller]
fn receive(socket: &mut Socket, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    socket.read_exact(&mut bytes).expect("an answer");
    assert_eq!(bytes, expected);
}

/// Waits until all earlier requests of the client are handled.
fn settle(socket: &mut Socket) {
    send(socket, Request::Ping(9));
    receive(socket, &9u32.to_le_bytes());
}

fn k(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

fn value(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn number(n: i64) -> Vec<u8> {
    n.to_le_bytes().to_vec()
}

#[test]
fn every_operation_works_over_a_socket() {
    use Request::*;
    let (server, _messages) = server();
    let mut client = connect(&server);
    for (request, answer) in [
        (Ping(0xdead), 0xdeadu32.to_le_bytes().to_vec()),
        (Set(k("/a"), k("1")), vec![]),
        (Get(k("/a")), value("1")),
        (Add(k("init/"), 1), number(1)),
        (CompareSet(k("/a"), k("1"), k("two")), value("two")),
        (Check(vec![k("/a"), k("/b")]), vec![1]),
        (Check(vec![k("/a")]), vec![0]),
        (Wait(vec![k("/a")]), vec![0]),
        (CountKeys, number(2)),
        (ListKeys, [number(2), value("/a"), value("init/")].concat()),
        (Append(k("/a"), k("+")), vec![]),
        (SetMany(vec![(k("/b"), k("2"))]), vec![]),
        (GetMany(vec![k("/a"), k("/b")]), [value("two+"), value("2")].concat()),
        (Delete(k("/b")), number(1)),
        (Push(k("/q"), k("x")), vec![]),
        (QueueLength(k("/q")), number(1)),
        (Pop(k("/q")), [number(1), value("x")].concat()),
        (Pop(k("/q")), number(0)),
        (Barrier(k("/bar"), 1), vec![0]),
        (CancelWait, vec![1]),
    ] {
        send(&mut client, request);
        receive(&mut client, &answer);
    }
    settle(&mut client);
}

#[test]
fn a_wait_ends_when_another_client_sets_the_key() {
    let (server, _messages) = server();
    let (mut waiting, mut other) = (connect(&server), connect(&server));
    send(&mut waiting, Request::Wait(vec![k("/a"), k("/b")]));
    settle(&mut waiting);
    send(&mut other, Request::Set(k("/b"), k("")));
    send(&mut other, Request::Set(k("/a"), k("")));
    receive(&mut waiting, &[0]);

    send(&mut waiting, Request::Wait(vec![k("/c")]));
    send(&mut waiting, Request::CancelWait);
    receive(&mut waiting, &[1]);
    send(&mut other, Request::Set(k("/c"), k("")));
    settle(&mut other);
    settle(&mut waiting);
}

#[test]
fn a_barrier_holds_until_the_last_has_come() {
    let (server, _messages) = server();
    let mut clients: Vec<Socket> = (0..20).map(|_| connect(&server)).collect();
    for client in &mut clients {
        send(client, Request::Barrier(k("/b"), 20));
    }
    for client in &mut clients {
        receive(client, &[0]);
    }
}

#[test]
fn requests_may_arrive_in_pieces_and_many_at_once() {
    let (server, _messages) = server();
    let mut client = connect(&server);
    for byte in request(&Request::Set(k("/slow"), k("value"))) {
        client.write_all(&[byte]).expect("sent");
    }
    let large = vec![7; wire::MAX_VALUE as usize];
    send(&mut client, Request::Set(k("/large"), large.clone()));
    let many: Vec<u8> = (0..1000).flat_map(|_| request(&Request::Get(k("/slow")))).collect();
    client.write_all(&many).expect("sent");
    for _ in 0..1000 {
        receive(&mut client, &value("value"));
    }
    send(&mut client, Request::Get(k("/large")));
    receive(&mut client, &(large.len() as u64).to_le_bytes());
    receive(&mut client, &large);
}

#[test]
fn a_client_with_another_protocol_is_disconnected_and_others_are_not() {
    let (server, mut messages) = server();
    let mut good = connect(&server);
    let mut lines = Vec::new();
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &request(&Request::Get(k("/no magic"))),
        &[request(&Request::Validate), vec![99]].concat(),
        &[request(&Request::Validate), vec![1], u64::MAX.to_le_bytes().to_vec()].concat(),
    ] {
        let mut bad = Socket::connect((Ipv4Addr::LOCALHOST, server.port())).expect("connected");
        bad.set_read_timeout(Some(LIMIT)).expect("limit");
        bad.write_all(bytes).expect("sent");
        let mut rest = Vec::new();
        // A connection that is closed with input unread is reset.
        assert!(bad.read_to_end(&mut rest).is_err() || rest.is_empty(), "answered {rest:?}");
        lines.push(messages.blocking_recv().expect("a message"));
        settle(&mut good);
    }
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT");
    settings.bind(|| insta::assert_snapshot!(lines.join("\n")));
}

#[test]
fn a_client_that_waits_and_leaves_is_forgotten() {
    let (server, _messages) = server();
    let (mut leaving, mut staying) = (connect(&server), connect(&server));
    for client in [&mut leaving, &mut staying] {
        send(client, Request::Wait(vec![k("/q")]));
        settle(client);
    }
    leaving.shutdown(std::net::Shutdown::Both).expect("shut down");
    let mut other = connect(&server);
    // An item for a client that leaves at that moment stays in the queue; the next push wakes the
    // other.
    for _ in 0..2 {
        send(&mut other, Request::Push(k("/q"), k("item")));
    }
    receive(&mut staying, &[0]);
}

#[test]
fn a_port_is_held_until_the_end() {
    let (server, _messages) = server();
    let port = server.port();
    let (sender, _other_messages) = mpsc::channel(1);
    let error = start(port, sender.clone()).expect_err("taken");
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    let mut client = connect(&server);
    settle(&mut client);
    drop(server);
    let mut rest = Vec::new();
    assert_eq!(client.read_to_end(&mut rest).expect("closed"), 0);
    start(port, sender).expect("free again");
}

/// A server for this machine only.
fn start(port: u16, messages: mpsc::Sender<String>) -> io::Result<StoreServer> {
    StoreServer::start(Ipv4Addr::LOCALHOST.into(), port, &[], messages)
}

#[test]
fn only_hosts_of_the_job_may_connect() {
    let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
    let peers: HashSet<IpAddr> = [ip("10.0.0.7"), ip("2001:db8::7")].into();
    for (peer, expected) in [
        ("127.0.0.1", true),
        ("::1", true),
        ("10.0.0.7", true),
        ("::ffff:10.0.0.7", true),
        ("2001:db8::7", true),
        ("10.0.0.8", false),
        ("2001:db8::8", false),
    ] {
        assert_eq!(is_allowed(&peers, SocketAddr::new(ip(peer), 1)), expected, "{peer}");
    }
}

#[test]
fn a_low_limit_of_open_files_is_rejected() {
    assert_eq!(check_file_limit(10_000, 16_384), Ok(()));
    for (ranks, open_files) in [(10_000, 4096), (70_000, 1 << 20)] {
        let error = check_file_limit(ranks, open_files).expect_err("rejected");
        assert_eq!(error.code(), run::RENDEZVOUS_TOO_MANY_RANKS);
        assert_eq!(error.field("ranks"), Some(&ranks.into()));
        assert_eq!(error.field("open_files"), Some(&open_files.into()));
    }
}

#[test]
fn unread_replies_count_until_their_connection_closes() {
    let (server, _messages) = server();
    let mut greedy = connect(&server);
    let large = vec![7; wire::MAX_VALUE as usize];
    send(&mut greedy, Request::Set(k("/large"), large));
    settle(&mut greedy);
    // Each requests 8 MiB and reads nothing. An error of accounting would show in the next
    // requests.
    for _ in 0..20 {
        let mut idle = connect(&server);
        send(&mut idle, Request::Get(k("/large")));
        settle(&mut greedy);
    }
    for _ in 0..200 {
        let mut client = connect(&server);
        send(&mut client, Request::Get(k("/large")));
        let mut length = [0; 8];
        client.read_exact(&mut length).expect("closed connections free their buffers");
    }
}
