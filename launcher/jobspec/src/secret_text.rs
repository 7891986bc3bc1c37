//! [`hide_secret_values`]: hides the values of secret variables in text that is printed or stored.
use crate::env::looks_secret;

/// The prefix of an override's path that sets an environment variable of the job.
const ENV_PATH: &str = "run.env.";
/// Parts of names. A lower-case name that contains one of them counts as the name of a secret. No
/// key of job.yaml contains one of them.
const LOWER_CASE_PARTS: [&str; 6] = ["secret", "password", "passwd", "api_key", "private_key", "credential"];

/// Replaces each character of a value by `*` if the value follows a name that suggests a secret, as
/// in `HF_TOKEN: value` or `--set=run.env.HF_TOKEN=value`. Recognizes the syntax of a line of YAML,
/// of an override and of an option. The columns of other text stay the same.
pub fn hide_secret_values(text: &str) -> String {
    let mut hidden = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(name_start) = rest.find(is_name_character) {
        hidden.push_str(&rest[..name_start]);
        rest = &rest[name_start..];
        let name_end = rest.find(|c| !is_name_character(c)).unwrap_or(rest.len());
        let is_secret = is_secret_name(&rest[..name_end], hidden.ends_with(ENV_PATH));
        hidden.push_str(&rest[..name_end]);
        rest = &rest[name_end..];
        let Some(value_start) = find_value(rest).filter(|_| is_secret) else { continue };
        hidden.push_str(&rest[..value_start]);
        rest = &rest[value_start..];
        let value_end = find_value_end(rest, hidden.contains('{'));
        hidden.extend(rest[..value_end].chars().map(|_| '*'));
        rest = &rest[value_end..];
    }
    hidden.push_str(rest);
    hidden
}

/// Returns whether a character can be part of a name.
fn is_name_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

/// Returns whether a value after this name is a secret, so that it is hidden. A lower-case name
/// that only contains `token` or `key` may be a key of job.yaml, and counts as secret only if it is
/// a variable in `run.env`.
fn is_secret_name(name: &str, is_variable: bool) -> bool {
    let name = name.replace('-', "_");
    let is_lower_case = name.chars().any(|c| c.is_ascii_lowercase());
    let is_specific = LOWER_CASE_PARTS.iter().any(|part| name.to_ascii_lowercase().contains(part));
    looks_secret(&name) && (is_variable || !is_lower_case || is_specific)
}

/// Returns the start of the value in `text`, the text after a name. Returns `None` if no value
/// follows, or if the value is a reference such as `{from_env: NAME}`.
fn find_value(text: &str) -> Option<usize> {
    let after_quote = text.trim_start_matches(['"', '\'']).trim_start_matches(' ');
    let value = after_quote.strip_prefix([':', '='])?.trim_start_matches(' ');
    let is_value = !value.is_empty() && !value.starts_with(['{', '[', '|', '>', '\n']);
    is_value.then_some(text.len() - value.len())
}

/// Returns the end of the value at the start of `text`. In a flow mapping, a plain value ends
/// before the next separator.
fn find_value_end(text: &str, in_mapping: bool) -> usize {
    let line = text.find('\n').unwrap_or(text.len());
    let quoted = text.chars().next().filter(|quote| matches!(quote, '"' | '\''));
    let end = match quoted {
        Some(quote) => text[1..].find(quote).map(|at| at + 2),
        None if in_mapping => text.find([',', '}']),
        None => None,
    };
    end.unwrap_or(line).min(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_secret_names_are_hidden_in_place() {
        for (text, expected) in [
            ("  HF_TOKEN: abc # x", "  HF_TOKEN: *******"),
            ("env: {HF_TOKEN: abc, B: c}", "env: {HF_TOKEN: ***, B: c}"),
            ("env: {\"A_KEY\": 'a, b', B: c}", "env: {\"A_KEY\": ******, B: c}"),
            ("run.env.HF_TOKEN=a,b c", "run.env.HF_TOKEN=*****"),
            ("run.env.hf_token=é", "run.env.hf_token=*"),
            ("--set=run.env.WANDB_API_KEY=x", "--set=run.env.WANDB_API_KEY=*"),
            ("run.env={HF_TOKEN: x, B: y}", "run.env={HF_TOKEN: *, B: y}"),
            ("run={env: {HF_TOKEN: x}}", "run={env: {HF_TOKEN: *}}"),
            ("--api-key=x", "--api-key=*"),
            ("db_password: \"it\" # 1", "db_password: **** # 1"),
            ("HF_TOKEN: 'unclosed", "HF_TOKEN: *********"),
            ("HF_TOKEN: a\nB: c", "HF_TOKEN: *\nB: c"),
        ] {
            assert_eq!(hide_secret_values(text), expected);
        }
    }

    #[test]
    fn other_text_is_unchanged() {
        for text in [
            "",
            "train.data.tokenizer=path",
            "tokens: 5",
            "eos_token: x",
            "MAX_TOKENS: 5",
            "HF_TOKEN: {from_env: HF_TOKEN}",
            "HF_TOKEN: {from_file: token.txt}",
            "run.env.A=secret",
            "HF_TOKEN",
            "HF_TOKEN:",
            "cluster.ssh.identity_file=/key",
            "é ü",
        ] {
            assert_eq!(hide_secret_values(text), text);
        }
    }
}
