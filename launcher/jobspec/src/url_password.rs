//! [`hide_url_passwords`]: hides passwords and tokens in URLs before a text is printed or stored.
use std::borrow::Cow;

/// The text between the scheme of a URL and its authority (user, host and port).
const SCHEME_END: &str = "://";
/// The schemes whose URLs may have a token in place of a user name, as in `https://TOKEN@host/`.
/// In other URLs, such as those of SSH, a user name without a password is no secret.
const TOKEN_SCHEMES: [&str; 2] = ["http", "https"];

/// Replaces each character of passwords and tokens in the URLs of `text` by `*`, as in
/// `https://user:password@host` or `https://token@host`. The columns of other text stay the same.
pub fn hide_url_passwords(text: &str) -> Cow<'_, str> {
    let mut hidden = String::new();
    let mut copied = 0;
    for (at, _) in text.match_indices(SCHEME_END) {
        let start = at + SCHEME_END.len();
        let Some((secret_start, secret_end)) = find_secret_of_authority(&text[..at], &text[start..]) else {
            continue;
        };
        hidden.push_str(&text[copied..start + secret_start]);
        let secret = &text[start + secret_start..start + secret_end];
        hidden.extend(secret.chars().map(|_| '*'));
        copied = start + secret_end;
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    hidden.push_str(&text[copied..]);
    Cow::Owned(hidden)
}

/// Returns the byte range of the password or token in `text`, which begins after the `://` of a
/// URL. `before` is the text before `://`, which ends with the scheme.
fn find_secret_of_authority(before: &str, text: &str) -> Option<(usize, usize)> {
    let is_end = |c: char| c.is_whitespace() || matches!(c, '/' | '?' | '#' | '"' | '\'' | '`');
    let authority = &text[..text.find(is_end).unwrap_or(text.len())];
    // A password may contain an `@` that is not encoded; a host contains none.
    let user_end = authority.rfind('@')?;
    let user = &authority[..user_end];
    let start = match user.find(':') {
        Some(colon) => colon + 1,
        None => {
            let scheme_start = before.rfind(|c: char| !c.is_ascii_alphanumeric()).map_or(0, |at| at + 1);
            let is_token_scheme =
                TOKEN_SCHEMES.iter().any(|s| before[scheme_start..].eq_ignore_ascii_case(s));
            is_token_scheme.then_some(0)?
        }
    };
    (start < user_end).then_some((start, user_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_and_tokens_of_urls_are_hidden_in_place() {
        for (text, expected) in [
            ("https://user:abc@host/x", "https://user:***@host/x"),
            ("x: \"http://a:b@h\", https://c:d@h", "x: \"http://a:*@h\", https://c:*@h"),
            ("https://abc@host:80/x@y", "https://***@host:80/x@y"),
            ("git+HTTPS://abc@host", "git+HTTPS://***@host"),
            ("ssh://user@host", "ssh://user@host"),
            ("ssh://user:é@host", "ssh://user:*@host"),
            ("postgres://u:a@b:c@host", "postgres://u:*****@host"),
            ("https://host:80/a:b@c", "https://host:80/a:b@c"),
            ("https://user:@host", "https://user:@host"),
            ("://", "://"),
            ("https://a:b c@host", "https://a:b c@host"),
            ("user:password@host", "user:password@host"),
        ] {
            assert_eq!(hide_url_passwords(text), expected);
        }
    }
}
