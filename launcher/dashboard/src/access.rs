//! Decides which HTTP requests the dashboard answers: only those with its secret token whose `Host`
//! header names a loopback address or `localhost`.
use crate::request::Request;
use std::io;
use subtle::ConstantTimeEq;

/// The number of random bytes in the secret token that every request to a dashboard must contain.
const TOKEN_BYTES: usize = 32;

/// The secret that every HTTP request to the dashboard must contain, in the query or in the header
/// `Authorization`. The text of a token consists of hexadecimal digits.
#[derive(Clone)]
pub(crate) struct Token(String);

/// The reason why the dashboard rejects an HTTP request, such as a missing token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AccessError {
    /// The request is for a host name that does not mean this machine. A page of another site
    /// sends such requests if its name resolves to this machine (DNS rebinding).
    #[error("the header `Host` names neither localhost nor a loopback address")]
    OtherHost,
    /// A page of another site sends the request.
    #[error("a page of another site sent the request")]
    OtherSite,
    /// The request has no token, or a wrong one.
    #[error("the request has no valid token")]
    NoToken,
}

impl AccessError {
    /// Returns the status of the HTTP response to the rejected request.
    pub(crate) fn status(self) -> u16 {
        match self {
            AccessError::OtherHost | AccessError::OtherSite => 403,
            AccessError::NoToken => 401,
        }
    }
}

impl Token {
    /// Creates a random token for a dashboard that starts.
    pub(crate) fn create() -> io::Result<Token> {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        Ok(Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Returns the token as text, as it appears in the URL of the page.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Compares the token with a text in constant time, so that the duration reveals nothing about
    /// the token.
    fn matches(&self, text: &str) -> bool {
        self.0.as_bytes().ct_eq(text.as_bytes()).into()
    }

    /// Fails if an HTTP request lacks the dashboard's token, has a `Host` header other than a
    /// loopback name, or comes from another site's page.
    pub(crate) fn check_request(&self, request: &Request) -> Result<(), AccessError> {
        let host = request.host.as_deref().ok_or(AccessError::OtherHost)?;
        if !is_loopback_name(host) {
            return Err(AccessError::OtherHost);
        }
        let is_own_page = request.origin.as_ref().is_none_or(|origin| *origin == format!("http://{host}"));
        let is_same_site = request
            .fetch_site
            .as_deref()
            .is_none_or(|site| matches!(site, "same-origin" | "none") || request.path == "/");
        if !is_own_page || !is_same_site {
            return Err(AccessError::OtherSite);
        }
        let given = request.bearer.as_deref().or_else(|| request.parameter("token"));
        match given.is_some_and(|given| self.matches(given)) {
            true => Ok(()),
            false => Err(AccessError::NoToken),
        }
    }
}

/// Returns whether the value of an HTTP `Host` header is a loopback address or `localhost`, with or
/// without a port.
pub(crate) fn is_loopback_name(host: &str) -> bool {
    let is_port = |port: &str| (1..=5).contains(&port.len()) && port.bytes().all(|b| b.is_ascii_digit());
    ["127.0.0.1", "localhost", "[::1]"].iter().any(|name| {
        let rest = host.get(..name.len()).filter(|start| start.eq_ignore_ascii_case(name));
        rest.is_some_and(|_| match &host[name.len()..] {
            "" => true,
            port => port.strip_prefix(':').is_some_and(is_port),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(token: &Token, target: &str, headers: &str) -> Result<(), AccessError> {
        let head = format!("GET {target} HTTP/1.1\r\n{headers}\r\n");
        token.check_request(&Request::parse(head.as_bytes()).expect("valid").expect("complete"))
    }

    #[test]
    fn only_requests_with_the_token_to_this_machine_are_answered() {
        let token = Token::create().expect("random");
        let (right, t) = (format!("/?token={}", token.0), token.as_str());
        assert_eq!((t.len(), t == Token::create().expect("random").as_str()), (64, false));
        let host = "Host: 127.0.0.1:80\r\n";
        for headers in [host, "Host: localhost\r\n", "Host: LOCALHOST:9000\r\n", "Host: [::1]:1\r\n"] {
            assert_eq!(check(&token, &right, headers), Ok(()), "{headers}");
        }
        assert_eq!(check(&token, "/", &format!("{host}Authorization: Bearer {t}\r\n")), Ok(()));
        let wrong = format!("/?token={}", "0".repeat(64));
        for target in
            ["/", "/?token=", "/metrics?token=1", &wrong, &right[..right.len() - 1], &format!("{right}0")]
        {
            assert_eq!(check(&token, target, host), Err(AccessError::NoToken), "{target}");
        }
        for headers in ["", "Host: evil.example\r\n", "Host: localhost.evil\r\n", "Host: 127.0.0.1:x\r\n"] {
            assert_eq!(check(&token, &right, headers), Err(AccessError::OtherHost), "{headers}");
        }
        let origin = |origin: &str| check(&token, &right, &format!("{host}Origin: {origin}\r\n"));
        assert_eq!(origin("http://127.0.0.1:80"), Ok(()));
        for other in ["http://evil.example", "http://127.0.0.1:81", "null", "https://127.0.0.1:80"] {
            assert_eq!(origin(other), Err(AccessError::OtherSite), "{other}");
        }
        let api = format!("/api/runs?token={t}");
        let cross = format!("{host}Sec-Fetch-Site: cross-site\r\n");
        assert_eq!(check(&token, &api, &cross), Err(AccessError::OtherSite));
        assert_eq!(check(&token, &right, &cross), Ok(()), "a link in a mail");
    }
}
