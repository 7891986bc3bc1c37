//! Serves the dashboard over HTTP on a loopback address of this machine.
use crate::{
    access::Token,
    dashboard::Dashboard,
    request::{MAX_HEAD_BYTES, Request},
    response::Response,
    routes::{self, STREAM_PATH},
    stream::RunStream,
};
use std::{
    io,
    net::{Ipv4Addr, TcpListener as StdListener},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// The largest number of HTTP connections that the dashboard's server has open at the same time.
/// Further connections are closed.
const MAX_CONNECTIONS: usize = 64;
/// The largest number of pages that receive server-sent events at the same time. It is below
/// [`MAX_CONNECTIONS`], so that other requests are still served.
const MAX_STREAMS: usize = 32;
/// The largest number of threads in which the dashboard's server reads the files of runs, to answer
/// requests and to fill event streams.
const MAX_FILE_READER_THREADS: usize = 8;
/// The time within which a client must send the head (request line and headers) of an HTTP request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The time within which a client must receive an HTTP response, or one message of an event stream.
const WRITE_TIMEOUT: Duration = Duration::from_secs(15);
/// The interval at which the server looks for new data of the runs that a page shows, to send it as
/// server-sent events.
const STREAM_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The number of polls without new data after which the server sends a comment on an event stream,
/// to detect that the browser has gone.
const QUIET_INTERVALS_BEFORE_COMMENT: u32 = 20;
/// The pause of the server after an error of `accept`, for example because of too many open files.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(200);

/// A server of the dashboard whose port is bound, but which serves no requests yet.
#[derive(Debug)]
pub struct BoundServer {
    listener: StdListener,
    port: u16,
    shared: ConnectionContext,
}

/// What all HTTP connections of the dashboard's server share: the dashboard, its token, and the
/// number of open event streams.
#[derive(Clone)]
struct ConnectionContext {
    dashboard: Arc<Dashboard>,
    token: Token,
    streams: Arc<Semaphore>,
}

impl std::fmt::Debug for ConnectionContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// Binds a port of the loopback address 127.0.0.1, and creates the token that requests must
/// contain. Port 0 binds a free port.
pub fn bind(dashboard: Arc<Dashboard>, port: u16) -> io::Result<BoundServer> {
    let listener = StdListener::bind((Ipv4Addr::LOCALHOST, port))?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    let streams = Arc::new(Semaphore::new(MAX_STREAMS));
    Ok(BoundServer {
        listener,
        port,
        shared: ConnectionContext { dashboard, token: Token::create()?, streams },
    })
}

impl BoundServer {
    /// Returns the URL of the dashboard's page at `path`, which contains the token. `path` begins
    /// with `/`.
    pub fn page_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}?token={}", self.port, self.shared.token.as_str())
    }

    /// Serves HTTP requests until the process ends. Fails if the event loop cannot be started.
    pub fn run(self) -> io::Result<()> {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime =
            builder.enable_io().enable_time().max_blocking_threads(MAX_FILE_READER_THREADS).build()?;
        runtime.block_on(async move {
            let listener = TcpListener::from_std(self.listener)?;
            let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    sleep(ACCEPT_ERROR_PAUSE).await;
                    continue;
                };
                // Without a permit, the connection is closed when `stream` is dropped.
                let Ok(permit) = connections.clone().try_acquire_owned() else { continue };
                let shared = self.shared.clone();
                tokio::spawn(async move {
                    // A client that closes the connection gets no answer.
                    _ = serve_connection(stream, shared).await;
                    drop(permit);
                });
            }
        })
    }
}

/// Reads the HTTP request of one connection, checks its token, and sends the response.
async fn serve_connection(mut stream: TcpStream, shared: ConnectionContext) -> io::Result<()> {
    let Some(request) = receive_request(&mut stream).await? else { return Ok(()) };
    let has_body = request.method != "HEAD";
    if let Err(error) = shared.token.check_request(&request) {
        return send_response(&mut stream, &Response::error(error.status(), error), has_body).await;
    }
    if !matches!(request.method.as_str(), "GET" | "HEAD") {
        return send_response(&mut stream, &Response::error(405, "only GET and HEAD are allowed"), has_body)
            .await;
    }
    if request.path == STREAM_PATH && has_body {
        return serve_event_stream(stream, shared, &request).await;
    }
    let answer =
        spawn_blocking(move || routes::answer_request(&shared.dashboard, &shared.token, &request)).await;
    let response = answer.unwrap_or_else(|_| Response::error(500, "internal error"));
    send_response(&mut stream, &response, has_body).await
}

/// Reads the head of an HTTP request within [`HEAD_TIMEOUT`]. Answers a request that is invalid or
/// late, and returns `None` for it. Also returns `None` if the client sends nothing.
pub(crate) async fn receive_request(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<Option<Request>> {
    let rejection = match timeout(HEAD_TIMEOUT, read_request(stream)).await {
        Ok(Ok(request)) => return Ok(request),
        Ok(Err(response)) => response,
        Err(_) => Response::error(408, "the head of the request took too long"),
    };
    send_response(stream, &rejection, true).await?;
    Ok(None)
}

/// Reads and parses the head (request line and headers) of an HTTP request. Returns `None` if the
/// client sends nothing. Fails with the answer to an invalid request.
async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<Request>, Response> {
    let (mut head, mut length) = (vec![0; MAX_HEAD_BYTES], 0);
    loop {
        let n = stream.read(&mut head[length..]).await.unwrap_or(0);
        length += n;
        if n == 0 && length < MAX_HEAD_BYTES {
            return Ok(None);
        }
        match Request::parse(&head[..length]) {
            Ok(Some(request)) => return Ok(Some(request)),
            Ok(None) => {}
            Err(error) => {
                let status = if error == crate::request::RequestError::TooLarge { 431 } else { 400 };
                return Err(Response::error(status, error));
            }
        }
    }
}

/// Sends an HTTP response to the client, and closes the connection.
pub(crate) async fn send_response(
    stream: &mut (impl AsyncWrite + Unpin),
    response: &Response,
    has_body: bool,
) -> io::Result<()> {
    let head = Response::format_head(response.status, response.content_type, Some(response.body.len()));
    write_with_timeout(stream, head.as_bytes()).await?;
    if has_body {
        write_with_timeout(stream, &response.body).await?;
    }
    stream.shutdown().await
}

/// Sends bytes to a client, and fails if the client does not receive them within [`WRITE_TIMEOUT`].
async fn write_with_timeout(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    timeout(WRITE_TIMEOUT, stream.write_all(bytes)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Sends the changes of the requested runs to a page as server-sent events, until the client closes
/// the connection.
async fn serve_event_stream(
    mut stream: TcpStream,
    shared: ConnectionContext,
    request: &Request,
) -> io::Result<()> {
    let Ok(_permit) = shared.streams.clone().try_acquire_owned() else {
        return send_response(&mut stream, &Response::error(503, "too many pages are open"), true).await;
    };
    let head = Response::format_head(200, "text/event-stream", None);
    write_with_timeout(&mut stream, head.as_bytes()).await?;
    let mut runs = RunStream::new(request.list_parameter_values("run"));
    let mut quiet = 0;
    loop {
        let dashboard = shared.dashboard.clone();
        let built = spawn_blocking(move || {
            let messages = runs.build_messages(&dashboard);
            (runs, messages)
        });
        let (returned, (messages, has_more)) = built.await.map_err(io::Error::other)?;
        runs = returned;
        quiet = if messages.is_empty() { quiet + 1 } else { 0 };
        if !messages.is_empty() {
            write_with_timeout(&mut stream, messages.as_bytes()).await?;
        } else if quiet % QUIET_INTERVALS_BEFORE_COMMENT == 0 {
            write_with_timeout(&mut stream, b":\n\n").await?;
        }
        if !has_more && is_closed_within(&mut stream, STREAM_POLL_INTERVAL).await {
            return Ok(());
        }
    }
}

/// Returns whether the client closes the connection within the time `interval`, and waits for at
/// most this time.
async fn is_closed_within(stream: &mut TcpStream, interval: Duration) -> bool {
    let mut byte = [0];
    matches!(timeout(interval, stream.read(&mut byte)).await, Ok(Ok(0) | Err(_)))
}
