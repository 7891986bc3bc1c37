//! [`connect_to_any`]: opens a TCP connection to the first address of a host that answers (happy
//! eyeballs, RFC 8305).
use std::{
    collections::VecDeque,
    io,
    net::{SocketAddr, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// The time after which a connection attempt to the next address of a host is started, if the
/// attempts so far have had no result (RFC 8305, section 5).
const NEXT_ADDRESS_DELAY: Duration = Duration::from_millis(250);

/// The stack size, in bytes, of the thread that tries to connect to one address.
const STACK_BYTES: usize = 64 << 10;

/// An address of a host, and the result of trying to connect to it.
type ConnectAttempt = (SocketAddr, io::Result<TcpStream>);

/// Connects over TCP to several addresses of a host in parallel, and returns the first connection
/// that succeeds. Tries the next address as soon as one has failed, or after
/// [`NEXT_ADDRESS_DELAY`], while the earlier ones are still tried. Returns the last error and its
/// address if no address accepts a connection before `deadline`, and `None` without addresses.
pub(super) fn connect_to_any(
    addresses: Vec<SocketAddr>,
    deadline: Instant,
) -> Result<TcpStream, Option<(io::Error, SocketAddr)>> {
    if let [address] = addresses[..] {
        // A duration of zero is not a valid time limit.
        let limit = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        return TcpStream::connect_timeout(&address, limit).map_err(|error| Some((error, address)));
    }
    let mut waiting = VecDeque::from(alternate_address_families(addresses));
    let (results, attempts) = mpsc::sync_channel::<ConnectAttempt>(waiting.len());
    let (mut running, mut last_error) = (0, None);
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if let Some(address) = waiting.pop_front().filter(|_| !remaining.is_zero()) {
            running += 1;
            last_error.get_or_insert((io::ErrorKind::TimedOut.into(), address));
            start_connect_attempt(address, remaining, results.clone());
        } else if running == 0 || remaining.is_zero() {
            return Err(last_error);
        }
        let pause = if waiting.is_empty() { remaining } else { NEXT_ADDRESS_DELAY.min(remaining) };
        match attempts.recv_timeout(pause) {
            Ok((_, Ok(stream))) => return Ok(stream),
            Ok((address, Err(error))) => {
                running -= 1;
                last_error = Some((error, address));
            }
            // The next address is due, or the deadline has passed.
            Err(_) => {}
        }
    }
}

/// Starts a thread that tries to connect to `address` for at most the time `limit`, and sends the
/// result to the channel `results`. The thread ends after `limit` at the latest.
fn start_connect_attempt(address: SocketAddr, limit: Duration, results: mpsc::SyncSender<ConnectAttempt>) {
    let attempt = move |results: mpsc::SyncSender<ConnectAttempt>| {
        // An error means that another address was faster.
        _ = results.send((address, TcpStream::connect_timeout(&address, limit)));
    };
    let on_thread = results.clone();
    let started =
        thread::Builder::new().name("dial".into()).stack_size(STACK_BYTES).spawn(move || attempt(on_thread));
    if started.is_err() {
        attempt(results);
    }
}

/// Orders the IP addresses of a host so that IPv4 and IPv6 alternate, beginning with the family of
/// the first one (RFC 8305, section 4).
fn alternate_address_families(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let is_first_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == is_first_v6);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut ordered = Vec::new();
    loop {
        let pair = [first.next(), second.next()];
        if pair == [None, None] {
            return ordered;
        }
        ordered.extend(pair.into_iter().flatten());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn families_alternate_and_begin_with_that_of_the_first_address() {
        let parse = |texts: &[&str]| -> Vec<SocketAddr> {
            texts.iter().map(|text| text.parse().expect("an address")).collect()
        };
        let given = parse(&["[::1]:1", "[::2]:1", "[::3]:1", "10.0.0.1:1", "10.0.0.2:1"]);
        let expected = parse(&["[::1]:1", "10.0.0.1:1", "[::2]:1", "10.0.0.2:1", "[::3]:1"]);
        assert_eq!(alternate_address_families(given), expected);
    }

    #[test]
    fn an_address_that_does_not_answer_does_not_use_up_the_time() {
        // A listener whose queue is full answers no further connection.
        let silent = TcpListener::bind("127.0.0.1:0").expect("a listener");
        // SAFETY: `listen` on a listening socket only changes the length of its queue.
        unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&silent), 0) };
        let silent = (silent.local_addr().expect("an address"), silent);
        let limit = Duration::from_millis(300);
        let queued: Vec<_> = (0..4).map(|_| TcpStream::connect_timeout(&silent.0, limit)).collect();
        assert!(queued.last().is_some_and(Result::is_err), "the queue is full");
        let working = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let addresses = vec![silent.0, working.local_addr().expect("an address")];
        let began = Instant::now();
        let stream = connect_to_any(addresses.clone(), began + Duration::from_secs(20));
        let peer = stream.expect("a connection").peer_addr().expect("an address");
        assert_eq!(peer, addresses[1]);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }

    #[test]
    fn an_address_that_rejects_connections_does_not_delay_the_others() {
        let closed = TcpListener::bind("127.0.0.1:0").expect("a listener").local_addr().expect("an address");
        let deadline = Instant::now() + Duration::from_secs(20);
        let error = connect_to_any(vec![closed], deadline).expect_err("no listener");
        let (error, address) = error.expect("an error of the address");
        assert_eq!((error.kind(), address), (io::ErrorKind::ConnectionRefused, closed));
        assert!(connect_to_any(Vec::new(), deadline).expect_err("no address").is_none());
        let working = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = working.local_addr().expect("an address");
        assert!(connect_to_any(vec![closed, address], deadline).is_ok());
    }
}
