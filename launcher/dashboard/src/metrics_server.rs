//! [`serve_metrics`]: serves only the metrics of runs, without the page and without a token.
use crate::{
    access::is_loopback_name,
    dashboard::Dashboard,
    request::Request,
    response::Response,
    routes::{METRICS_PATH, answer_metrics_request},
    server::{receive_request, send_response},
};
use std::{
    io, net::TcpListener as StdTcpListener, os::unix::net::UnixListener as StdUnixListener, sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::{Semaphore, oneshot},
    task::spawn_blocking,
    time::sleep,
};

/// The largest number of connections that the metrics server has open at the same time. Further
/// connections are closed.
const MAX_CONNECTIONS: usize = 8;
/// How long the metrics server waits before it accepts connections again after an error of
/// `accept`, such as too many open files.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(200);

/// The socket at which a monitoring system such as Prometheus requests the metrics: a TCP port of a
/// loopback address, or a Unix socket.
#[derive(Debug)]
pub enum MetricsListener {
    /// A port of a loopback address. Every user of the machine can connect.
    Port(StdTcpListener),
    /// A Unix socket, whose permissions decide who can connect.
    Socket(StdUnixListener),
}

/// A connection of a client such as Prometheus to the metrics server, over TCP or over a Unix
/// socket.
trait Connection: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Connection for T {}

/// The socket at which the metrics server accepts connections, as an asynchronous Tokio listener.
enum AsyncListener {
    Port(TcpListener),
    Socket(UnixListener),
}

impl AsyncListener {
    /// Converts a blocking listener to a Tokio listener, which belongs to the event loop of the
    /// calling thread.
    fn new(listener: MetricsListener) -> io::Result<AsyncListener> {
        match listener {
            MetricsListener::Port(listener) => {
                listener.set_nonblocking(true)?;
                TcpListener::from_std(listener).map(AsyncListener::Port)
            }
            MetricsListener::Socket(listener) => {
                listener.set_nonblocking(true)?;
                UnixListener::from_std(listener).map(AsyncListener::Socket)
            }
        }
    }

    async fn accept(&self) -> io::Result<Box<dyn Connection>> {
        Ok(match self {
            AsyncListener::Port(listener) => Box::new(listener.accept().await?.0),
            AsyncListener::Socket(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

/// Serves the metrics of the runs of `dashboard` at the path `/metrics` until `stop` receives a
/// value or is dropped. Fails if the event loop cannot be started.
pub fn serve_metrics(
    dashboard: Arc<Dashboard>,
    listener: MetricsListener,
    mut stop: oneshot::Receiver<()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(1)
        .build()?;
    runtime.block_on(async move {
        let is_port = matches!(listener, MetricsListener::Port(_));
        let listener = AsyncListener::new(listener)?;
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let accepted = tokio::select! {
                _ = &mut stop => return Ok(()),
                accepted = listener.accept() => accepted,
            };
            let Ok(stream) = accepted else {
                sleep(ACCEPT_ERROR_PAUSE).await;
                continue;
            };
            // Without a permit, the connection is closed when `stream` is dropped.
            let Ok(permit) = connections.clone().try_acquire_owned() else { continue };
            let dashboard = dashboard.clone();
            tokio::spawn(async move {
                // A client that closes the connection gets no answer.
                _ = serve_connection(stream, dashboard, is_port).await;
                drop(permit);
            });
        }
    })
}

/// Reads the HTTP request of one connection, and sends the response.
async fn serve_connection(
    mut stream: Box<dyn Connection>,
    dashboard: Arc<Dashboard>,
    is_port: bool,
) -> io::Result<()> {
    let Some(request) = receive_request(&mut stream).await? else { return Ok(()) };
    let has_body = request.method != "HEAD";
    let response = match check_request(&request, is_port) {
        Some(rejection) => rejection,
        None => spawn_blocking(move || answer_metrics_request(&dashboard, &request))
            .await
            .unwrap_or_else(|_| Response::error(500, "internal error")),
    };
    send_response(&mut stream, &response, has_body).await
}

/// Returns the error response to an HTTP request that must be rejected, because of a wrong path,
/// method or `Host` header; `None` for a valid request.
fn check_request(request: &Request, is_port: bool) -> Option<Response> {
    if is_port && !request.host.as_deref().is_some_and(is_loopback_name) {
        return Some(Response::error(403, "the header `Host` names no loopback address"));
    }
    match (request.method.as_str(), request.path.as_str()) {
        ("GET" | "HEAD", METRICS_PATH) => None,
        ("GET" | "HEAD", _) => Some(Response::error(404, "the metrics are at /metrics")),
        _ => Some(Response::error(405, "only GET and HEAD are allowed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::build_dashboard;
    use std::{
        io::{Read, Write},
        net::{Ipv4Addr, TcpStream},
        os::unix::net::UnixStream,
        thread,
    };

    /// Sends a request, and returns the status and the body of the response.
    fn ask(mut stream: impl Read + Write, request: &str) -> (u16, String) {
        stream.write_all(request.as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("received");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        (head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status"), body.to_owned())
    }

    #[test]
    fn only_the_metrics_are_served_until_the_server_is_stopped() {
        let (_directory, dashboard) = build_dashboard("job");
        let listener = StdTcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        let (stop, stopped) = oneshot::channel();
        let dashboard = Arc::new(dashboard);
        let server =
            thread::spawn(move || serve_metrics(dashboard, MetricsListener::Port(listener), stopped));
        let ask = |text: &str| ask(TcpStream::connect(address).expect("connected"), text);
        let host = format!("Host: {address}\r\n\r\n");
        let (status, body) = ask(&format!("GET /metrics HTTP/1.1\r\n{host}"));
        assert!(status == 200 && body.contains("\nlaunch_loss{") && !body.contains("# EOF"), "{body}");
        let open = format!("GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n{host}");
        assert!(ask(&open).1.ends_with("# EOF\n"));
        assert_eq!(ask(&format!("HEAD /metrics HTTP/1.1\r\n{host}")), (200, String::new()));
        for (target, status) in [("GET /", 404), ("GET /api/runs", 404), ("POST /metrics", 405)] {
            assert_eq!(ask(&format!("{target} HTTP/1.1\r\n{host}")).0, status, "{target}");
        }
        assert_eq!(ask("GET /metrics HTTP/1.1\r\nHost: example.com\r\n\r\n").0, 403);
        assert_eq!(ask("nonsense\r\n\r\n").0, 400);
        drop(stop);
        server.join().expect("no panic").expect("no error");
        assert!(TcpStream::connect(address).is_err(), "the port is free");
    }

    #[test]
    fn requests_at_a_socket_may_have_any_host() {
        let (directory, dashboard) = build_dashboard("job");
        let path = directory.path().join("metrics.sock");
        let listener = StdUnixListener::bind(&path).expect("a socket");
        let (_stop, stopped) = oneshot::channel();
        let dashboard = Arc::new(dashboard);
        thread::spawn(move || serve_metrics(dashboard, MetricsListener::Socket(listener), stopped));
        let stream = UnixStream::connect(&path).expect("connected");
        let (status, body) = ask(stream, "GET /metrics HTTP/1.1\r\nHost: anything\r\n\r\n");
        assert!(status == 200 && body.contains("\nlaunch_loss{"), "{body}");
    }
}
