//! [`Response`]: an HTTP response of the dashboard, with headers that protect the page from other
//! sites.

/// The value of the HTTP header `Content-Security-Policy`, by which browsers load scripts, styles
/// and data of the dashboard's page only from the dashboard's own server.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                                       img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// An HTTP response of the dashboard: status, content type and body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) body: Vec<u8>,
}

impl Response {
    /// Creates a response with status 200, the content type `content_type` and the body `body`.
    pub(crate) fn new(content_type: &'static str, body: impl Into<Vec<u8>>) -> Response {
        Response { status: 200, content_type, body: body.into() }
    }

    /// Creates an HTTP response with the error status `status`, and `message` as its text.
    pub(crate) fn error(status: u16, message: impl std::fmt::Display) -> Response {
        let body = format!("{message}\n").into_bytes();
        Response { status, content_type: "text/plain; charset=utf-8", body }
    }

    /// Creates an HTTP response whose body is `value` as JSON.
    pub(crate) fn json(value: &impl serde::Serialize) -> Response {
        match serde_json::to_vec(value) {
            Ok(body) => Response::new("application/json", body),
            Err(error) => Response::error(500, error),
        }
    }

    /// Formats the head (status line and headers) of an HTTP response. Without `length`, the body
    /// ends with the connection.
    pub(crate) fn format_head(status: u16, content_type: &str, length: Option<usize>) -> String {
        let reason = match status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        let length = length.map(|n| format!("Content-Length: {n}\r\n")).unwrap_or_default();
        let challenge = if status == 401 { "WWW-Authenticate: Bearer\r\n" } else { "" };
        format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\n{length}{challenge}Connection: close\r\n\
             Cache-Control: no-store\r\nContent-Security-Policy: {CONTENT_SECURITY_POLICY}\r\n\
             Cross-Origin-Opener-Policy: same-origin\r\nCross-Origin-Resource-Policy: same-origin\r\n\
             Referrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n\r\n"
        )
    }
}
