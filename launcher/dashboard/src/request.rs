//! [`Request`]: the head (request line and headers) of an HTTP request to the dashboard, parsed
//! within limits.
use std::borrow::Cow;

/// The largest size of the head (request line and headers) of an HTTP request, in bytes.
pub(crate) const MAX_HEAD_BYTES: usize = 8 << 10;
/// The largest number of headers of an HTTP request that is accepted.
const MAX_HEADERS: usize = 64;
/// The largest number of parameters in the query of an HTTP request that is accepted.
const MAX_PARAMETERS: usize = 32;

/// An HTTP request to the dashboard: its method, path, query parameters and relevant headers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// The path without the query.
    pub(crate) path: String,
    /// The decoded parameters of the query.
    parameters: Vec<(String, String)>,
    pub(crate) host: Option<String>,
    pub(crate) origin: Option<String>,
    /// The value of `Sec-Fetch-Site`: how the page that sends the request is related to this
    /// server.
    pub(crate) fetch_site: Option<String>,
    /// The token of `Authorization: Bearer`.
    pub(crate) bearer: Option<String>,
    pub(crate) accept: String,
}

/// The reasons why an HTTP request is rejected because its head is malformed or too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("the head of the request is not valid HTTP/1.1")]
    Malformed,
    #[error("the head of the request has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers")]
    TooLarge,
    #[error("requests must not have a body")]
    HasBody,
}

impl Request {
    /// Parses the head (request line and headers) of an HTTP request. Returns `None` if the head is
    /// incomplete.
    pub(crate) fn parse(head: &[u8]) -> Result<Option<Request>, RequestError> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) if head.len() >= MAX_HEAD_BYTES => {
                return Err(RequestError::TooLarge);
            }
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err(RequestError::TooLarge),
            Err(_) => return Err(RequestError::Malformed),
        }
        let (path, query) = split_target(parsed.path.unwrap_or("/"));
        let mut request = Request {
            method: parsed.method.unwrap_or_default().to_owned(),
            path: path.to_owned(),
            parameters: parse_query(query),
            ..Request::default()
        };
        for header in parsed.headers.iter() {
            let value = std::str::from_utf8(header.value).map_err(|_| RequestError::Malformed)?.trim();
            request.store_known_header(&header.name.to_ascii_lowercase(), value)?;
        }
        Ok(Some(request))
    }

    /// Stores the value of an HTTP header if the dashboard uses this header. `name` is in lower
    /// case.
    fn store_known_header(&mut self, name: &str, value: &str) -> Result<(), RequestError> {
        let single = match name {
            "host" => &mut self.host,
            "origin" => &mut self.origin,
            "sec-fetch-site" => &mut self.fetch_site,
            "authorization" => &mut self.bearer,
            "accept" => {
                self.accept = value.to_owned();
                return Ok(());
            }
            "content-length" if value != "0" => return Err(RequestError::HasBody),
            "transfer-encoding" => return Err(RequestError::HasBody),
            _ => return Ok(()),
        };
        // Two values could be read differently by two programs.
        if single.is_some() {
            return Err(RequestError::Malformed);
        }
        *single = match name {
            "authorization" => {
                let is_bearer = value.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer "));
                is_bearer.then(|| value[7..].trim().to_owned())
            }
            _ => Some(value.to_owned()),
        };
        Ok(())
    }

    /// Returns the first value of a parameter in the query of the request.
    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// Returns all values of a parameter in the query of the request.
    pub(crate) fn list_parameter_values<'r>(&'r self, name: &'r str) -> impl Iterator<Item = &'r str> {
        self.parameters.iter().filter(move |(n, _)| n == name).map(|(_, value)| value.as_str())
    }
}

/// Splits the target of an HTTP request (`/path?query`) into path and query.
fn split_target(target: &str) -> (&str, &str) {
    target.split_once('?').unwrap_or((target, ""))
}

/// Parses the query of an HTTP request (`name=value&name=value`) into pairs of name and value.
fn parse_query(query: &str) -> Vec<(String, String)> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).take(MAX_PARAMETERS);
    let split = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode_query_text(name), decode_query_text(value))
    };
    pairs.map(split).collect()
}

/// Decodes `%XX` and `+` in a name or value of an HTTP query. Replaces bytes that are not UTF-8 by
/// U+FFFD.
fn decode_query_text(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, tail)) = rest.split_first() {
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let escaped = hex.filter(|_| *first == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (escaped, first) {
            (Some(byte), _) => {
                bytes.push(byte);
                rest = &tail[2..];
                continue;
            }
            (None, b'+') => bytes.push(b' '),
            (None, byte) => bytes.push(*byte),
        }
        rest = tail;
    }
    match String::from_utf8_lossy(&bytes) {
        Cow::Borrowed(text) => text.to_owned(),
        Cow::Owned(text) => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(head: &str) -> Result<Option<Request>, RequestError> {
        Request::parse(head.as_bytes())
    }

    #[test]
    fn a_request_has_its_path_parameters_and_headers() {
        let head = "GET /api/log?run=a&run=b%2Fc&q=x+%26%zz HTTP/1.1\r\nHost: localhost:1\r\n\
                    authorization: bearer  t\r\nAccept: */*\r\n\r\n";
        let request = parse(head).expect("valid").expect("complete");
        assert_eq!((request.method.as_str(), request.path.as_str()), ("GET", "/api/log"));
        assert_eq!(request.list_parameter_values("run").collect::<Vec<_>>(), ["a", "b/c"]);
        assert_eq!((request.parameter("q"), request.bearer.as_deref()), (Some("x &%zz"), Some("t")));
        assert_eq!(request.host.as_deref(), Some("localhost:1"));
        assert_eq!(parse(&head[..40]), Ok(None));
    }

    #[test]
    fn requests_beyond_the_limits_are_rejected() {
        let with = |headers: &str| parse(&format!("GET / HTTP/1.1\r\n{headers}\r\n"));
        assert_eq!(with(&"a: b\r\n".repeat(MAX_HEADERS + 1)), Err(RequestError::TooLarge));
        assert_eq!(parse(&format!("GET /{}", "x".repeat(MAX_HEAD_BYTES))), Err(RequestError::TooLarge));
        for body in ["Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"] {
            assert_eq!(with(body), Err(RequestError::HasBody));
        }
        for malformed in ["Host: a\r\nHost: b\r\n", "a\r\n", "Host: \u{1}\r\n", ": x\r\n"] {
            assert_eq!(with(malformed), Err(RequestError::Malformed), "{malformed:?}");
        }
        for malformed in ["\0\0\0\0\r\n\r\n", "GET / HTTP/3.0\r\n\r\n", "GET\r\n\r\n"] {
            assert_eq!(parse(malformed), Err(RequestError::Malformed), "{malformed:?}");
        }
        let many = format!("GET /?{} HTTP/1.1\r\n\r\n", "a=1&".repeat(500));
        assert_eq!(parse(&many).expect("valid").expect("complete").parameters.len(), MAX_PARAMETERS);
    }
}
