//! [`hide_secret_values`] and [`hide_secret_arguments`]: hide secrets in text and command lines
//! before they are printed or stored.
use crate::{env::is_probable_secret_name, url_password::hide_url_passwords};
use std::borrow::Cow;

/// The prefix `run.env.` of keys that set an environment variable, such as `run.env.HF_TOKEN`,
/// whose value may be a secret.
const ENV_KEY_PREFIX: &str = "run.env.";
/// The texts by which a name is recognized as the name of a secret, compared in lower case. No key
/// of job.yaml contains one of them.
const SECRET_NAME_PARTS: [&str; 6] = ["secret", "password", "passwd", "api_key", "private_key", "credential"];

/// The endings by which a command-line option such as `--api-key` is recognized as one whose value
/// is a secret. Names are compared in upper case, with `_` for `-`.
const SECRET_OPTION_SUFFIXES: [&str; 10] = [
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
    "APIKEY",
    "_KEY",
];
/// The endings of command-line options such as `--eos-token`, whose values are special tokens of a
/// tokenizer and no secrets.
const TOKENIZER_OPTION_SUFFIXES: [&str; 10] = [
    "BOS_TOKEN",
    "CLS_TOKEN",
    "EOD_TOKEN",
    "EOS_TOKEN",
    "IMAGE_TOKEN",
    "MASK_TOKEN",
    "PAD_TOKEN",
    "SEP_TOKEN",
    "STOP_TOKEN",
    "UNK_TOKEN",
];
/// The text that replaces a secret argument in a command line that is printed.
const HIDDEN_ARGUMENT_TEXT: &str = "***";

/// Returns a copy of a command line without secrets: without the values of options such as
/// `--token`, and of variables such as `HF_TOKEN=value`. Only names are examined.
pub fn hide_secret_arguments<S: AsRef<str>>(words: &[S]) -> Vec<String> {
    let hide = |(i, word): (usize, &S)| match is_value_of_secret_option(words, i) {
        true => HIDDEN_ARGUMENT_TEXT.to_owned(),
        false => hide_secrets_in_word(word.as_ref()),
    };
    words.iter().enumerate().map(hide).collect()
}

/// Returns one argument of a command line with its secrets hidden, such as the value in
/// `--token=value`. The value of an option with `=` is the whole rest of the word.
fn hide_secrets_in_word(word: &str) -> String {
    match word.split_once('=') {
        Some((option, value)) if is_secret_option(option) && may_be_secret_argument(value) => {
            format!("{option}={HIDDEN_ARGUMENT_TEXT}")
        }
        _ => hide_secret_values(word),
    }
}

/// Finds the first option with a secret value in the command line `words`, such as `--token`, and
/// returns its name. Returns `None` if there is no such option.
pub(crate) fn find_secret_option<S: AsRef<str>>(words: &[S]) -> Option<&str> {
    let position = (0..words.len()).find(|&i| {
        let word = words[i].as_ref();
        is_value_of_secret_option(words, i + 1)
            || (word.starts_with('-') && hide_secrets_in_word(word) != *word)
    });
    position.map(|i| words[i].as_ref().split('=').next().unwrap_or_default())
}

/// Returns whether the word at `position` of a command line is a secret, because it follows an
/// option such as `--token`.
pub fn is_value_of_secret_option<S: AsRef<str>>(words: &[S], position: usize) -> bool {
    let Some(word) = words.get(position) else { return false };
    let option = position.checked_sub(1).map(|before| words[before].as_ref());
    option.is_some_and(is_secret_option) && may_be_secret_argument(word.as_ref())
}

/// Returns whether a word is an option whose value is a secret, such as `--api-key`.
fn is_secret_option(word: &str) -> bool {
    let name = word.trim_start_matches('-').replace('-', "_").to_ascii_uppercase();
    let ends_with_any = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    word.starts_with('-')
        && ends_with_any(&SECRET_OPTION_SUFFIXES)
        && !ends_with_any(&TOKENIZER_OPTION_SUFFIXES)
}

/// Returns whether the word after an option such as `--api-key` looks like a secret: not empty, no
/// other option, and no placeholder such as `$NAME`.
fn may_be_secret_argument(word: &str) -> bool {
    !word.is_empty() && !word.starts_with("--") && !is_placeholder(word)
}

/// Returns whether an argument as a whole is a variable or a placeholder: `$NAME`, `${NAME}` or
/// `{NAME}`.
fn is_placeholder(word: &str) -> bool {
    let variable = word.strip_prefix('$');
    let rest = variable.unwrap_or(word);
    let braced = rest.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let is_name = |name: &str| !name.is_empty() && name.chars().all(is_name_character);
    braced.or(variable).is_some_and(is_name)
}

/// Replaces each character of probable secrets in `text` by `*`: values after names such as
/// `HF_TOKEN` or `--token`, and passwords in URLs. Recognizes the syntax of a line of YAML, of an
/// override and of an option. The columns of other text stay the same.
pub fn hide_secret_values(text: &str) -> String {
    let mut hidden = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(name_start) = rest.find(is_name_character) {
        hidden.push_str(&rest[..name_start]);
        rest = &rest[name_start..];
        let name_end = rest.find(|c| !is_name_character(c)).unwrap_or(rest.len());
        let is_secret = is_secret_name(&rest[..name_end], hidden.ends_with(ENV_KEY_PREFIX));
        let is_option = is_secret_option(&rest[..name_end]);
        hidden.push_str(&rest[..name_end]);
        rest = &rest[name_end..];
        let value_start = match is_option {
            true => find_option_value_start(rest),
            false => find_value_start(rest).filter(|_| is_secret),
        };
        let Some(value_start) = value_start else { continue };
        hidden.push_str(&rest[..value_start]);
        rest = &rest[value_start..];
        let value_end = match is_option {
            true => measure_option_value(rest, &hidden),
            false => measure_value(rest, hidden.contains('{')),
        };
        hidden.extend(rest[..value_end].chars().map(|_| '*'));
        rest = &rest[value_end..];
    }
    hidden.push_str(rest);
    match hide_url_passwords(&hidden) {
        Cow::Borrowed(_) => hidden,
        Cow::Owned(hidden) => hidden,
    }
}

/// Returns the line `line` of a YAML text with probable secrets hidden, as [`hide_secret_values`]
/// does. Hides the whole line if it belongs to a secret that begins on an earlier line, for example
/// in a block scalar (`HF_TOKEN: |`). `before` is the text before the line.
pub(crate) fn hide_secrets_in_yaml_line(before: &str, line: &str) -> String {
    if !belongs_to_earlier_secret(before, line) {
        return hide_secret_values(line);
    }
    let start = line.find(|c| c != ' ' && c != '-').unwrap_or(line.len());
    line[..start].chars().chain(line[start..].chars().map(|_| '*')).collect()
}

/// Returns whether a line of a YAML text is a part of a secret that begins on an earlier line: of
/// the value of a secret variable, or of the value after an option such as `- --token` of a list.
/// `before` is the text before the line.
///
/// Lines of a value are indented more than its key, in block scalars as well as in quoted and plain
/// text of several lines.
fn belongs_to_earlier_secret(before: &str, line: &str) -> bool {
    if split_last_line(before).is_some_and(|(_, earlier)| ends_with_secret_option(earlier)) {
        return true;
    }
    let (mut before, mut line) = (before, line);
    'enclosing: loop {
        let indent = measure_indent(line);
        let mut is_first_sibling = true;
        while let Some((rest, earlier)) = split_last_line(before) {
            before = rest;
            match earlier.trim_start() {
                "" => continue,
                text if text.starts_with('#') => continue,
                _ => {}
            }
            let earlier_indent = measure_indent(earlier);
            if earlier_indent == indent && std::mem::take(&mut is_first_sibling) {
                if is_option_without_value(earlier) && line.trim_start().starts_with("- ") {
                    return true;
                }
            } else if earlier_indent < indent {
                if begins_secret_value(earlier, line) {
                    return true;
                }
                line = earlier;
                continue 'enclosing;
            }
        }
        return false;
    }
}

/// Splits the last line off a text that ends with a line break. Returns the text before that line,
/// and the line without its line break, or `None` if the text is empty.
fn split_last_line(text: &str) -> Option<(&str, &str)> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let start = text.rfind('\n').map_or(0, |at| at + 1);
    (!text.is_empty() || start > 0).then(|| (&text[..start], text[start..].trim_end()))
}

/// Returns the number of spaces at the start of a line.
fn measure_indent(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

/// Returns whether `line` is an item of a list in YAML that consists of an option whose value is a
/// secret, such as `- --token`.
fn is_option_without_value(line: &str) -> bool {
    let item = line.trim().strip_prefix("- ").unwrap_or_default().trim();
    is_secret_option(item.trim_matches(['"', '\'']))
}

/// Returns whether `line`, a line of a shell script that continues on the next line, ends with an
/// option whose value is a secret, as in `prog --token \\`.
fn ends_with_secret_option(line: &str) -> bool {
    let words = line.strip_suffix('\\').map(str::split_whitespace);
    words.and_then(|mut words| words.next_back()).is_some_and(is_secret_option)
}

/// Returns whether `line`, a line of a YAML text, begins with the name of a secret variable, and
/// the more indented line `inner` after it is a part of the value. The lines of a reference such as
/// `from_env: NAME` contain no secret.
fn begins_secret_value(line: &str, inner: &str) -> bool {
    let line = line.trim_start_matches([' ', '-']);
    let Some((name, value)) = line.split_once(':') else { return false };
    let is_reference_line = value.trim().is_empty() && is_reference(&format!("{{{}", inner.trim_start()));
    is_secret_name(name.trim().trim_matches(['"', '\'']), false)
        && !is_reference(value.trim_start())
        && !is_reference_line
}

/// Returns whether a character can be part of the name of a variable, key or option.
fn is_name_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

/// Returns whether the name of a variable, key or option suggests that the value after it is a
/// secret. A lower-case name that only contains `token` or `key` may be a key of job.yaml, and
/// counts as secret only if it is a variable in `run.env`.
fn is_secret_name(name: &str, is_variable: bool) -> bool {
    let name = name.replace('-', "_");
    let is_lower_case = name.chars().any(|c| c.is_ascii_lowercase());
    let is_specific = SECRET_NAME_PARTS.iter().any(|part| name.to_ascii_lowercase().contains(part));
    is_probable_secret_name(&name) && (is_variable || !is_lower_case || is_specific)
}

/// Returns the byte offset at which the value begins in `text`, which follows the name of a
/// variable or key: 1 for `=value`. Returns `None` if no value follows, or if the value is a
/// reference such as `{from_env: NAME}`.
fn find_value_start(text: &str) -> Option<usize> {
    let after_quote = text.trim_start_matches(['"', '\'']).trim_start_matches(' ');
    let value = after_quote.strip_prefix([':', '='])?.trim_start_matches(' ');
    let is_value = !value.is_empty() && !value.starts_with(['|', '>', '\n']) && !is_reference(value);
    is_value.then_some(text.len() - value.len())
}

/// Returns whether the value of a `run.env` entry begins like `{from_env: NAME}` or `{from_file:
/// path}`, which name a source and contain no secret.
fn is_reference(value: &str) -> bool {
    let inner = value.strip_prefix('{').map(str::trim_start);
    inner.is_some_and(|inner| inner.starts_with("from_env:") || inner.starts_with("from_file:"))
}

/// Returns the byte offset at which the value begins in `text`, which follows a command-line
/// option: 1 for `=value` after `--token`. Recognizes `--token=value`, `--token value`, `[--token,
/// value]` and `["--token", "value"]`.
fn find_option_value_start(text: &str) -> Option<usize> {
    let value = match text.strip_prefix('=') {
        Some(value) => value,
        None => text.trim_start_matches(['"', '\'']).trim_start_matches([',', ' ']),
    };
    // The line of a shell script may continue on the next one.
    let value = value.strip_prefix("\\\n").map_or(value, |next| next.trim_start_matches(' '));
    let value = value.trim_start_matches(['"', '\'']);
    let start = text.len() - value.len();
    let end = measure_option_value(value, &text[..start]);
    (start > 0 && may_be_secret_argument(&value[..end])).then_some(start)
}

/// Returns how many bytes at the start of `value` are the value of a command-line option such as
/// `--token`, so that they can be hidden. `before` is the text before the value. A value that is
/// quoted, alone or with its option, ends at the quote. Another value ends at a space or a quote
/// and, in a list, at the next separator.
fn measure_option_value(value: &str, before: &str) -> usize {
    let line = value.find('\n').unwrap_or(value.len());
    let before_option = before.strip_suffix('=').map(|option| option.trim_end_matches(is_name_character));
    let end = match before_option.unwrap_or(before).chars().next_back() {
        Some(quote @ ('"' | '\'')) => value.find(quote),
        _ if before.contains('[') => value.find([',', ' ', '"', '\'', ']']),
        _ => value.find([' ', '"', '\'']),
    };
    end.unwrap_or(line).min(line)
}

/// Returns how many bytes at the start of `text` are the value of a variable or key in YAML or a
/// shell, so that they can be hidden. A list or mapping, which is a mistake in place of a secret,
/// ends with its first closing bracket. In a flow mapping, a plain value ends before the next
/// separator.
fn measure_value(text: &str, in_mapping: bool) -> usize {
    let line = text.find('\n').unwrap_or(text.len());
    let quoted = text.chars().next().filter(|quote| matches!(quote, '"' | '\''));
    let end = match quoted {
        Some(quote) => text[1..].find(quote).map(|at| at + 2),
        None if text.starts_with('[') => text[..line].find(']').map(|at| at + 1),
        None if text.starts_with('{') => text[..line].find('}').map(|at| at + 1),
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
            ("--token=x", "--token=*"),
            ("sh -c 'prog --hf-token abc -v'", "sh -c 'prog --hf-token *** -v'"),
            ("command: [prog, --token, abc, -v]", "command: [prog, --token, ***, -v]"),
            ("command: [\"--db-password\", \"abc\"]", "command: [\"--db-password\", \"***\"]"),
            ("command: [prog, \"--token=a,b c\", d]", "command: [prog, \"--token=*****\", d]"),
            ("command: ['--token', 'a,b ]c', d]", "command: ['--token', '******', d]"),
            ("prog --token a,b c", "prog --token *** c"),
            ("prog --token='a, b' c", "prog --token='****' c"),
            ("db_password: \"it\" # 1", "db_password: **** # 1"),
            ("HF_TOKEN: 'unclosed", "HF_TOKEN: *********"),
            ("env: {HF_TOKEN: [a, b], B: c}", "env: {HF_TOKEN: ******, B: c}"),
            ("HF_TOKEN: {from: x}", "HF_TOKEN: *********"),
            ("HF_TOKEN: [a", "HF_TOKEN: **"),
            ("uri: https://user:abc@host/x", "uri: https://user:***@host/x"),
            ("HF_TOKEN: a\nB: c", "HF_TOKEN: *\nB: c"),
            ("prog --token \\\n  abc\nd", "prog --token \\\n  ***\nd"),
        ] {
            assert_eq!(hide_secret_values(text), expected);
        }
    }

    #[test]
    fn lines_of_a_secret_that_begins_earlier_are_hidden() {
        for (text, expected) in [
            ("env:\n  HF_TOKEN: |\n    abc", "    ***"),
            ("env:\n  HF_TOKEN: >-\n\n    abc\n      d e\n    f", "    *"),
            ("env:\n  HF_TOKEN: |\n    abc\n      d e", "      ***"),
            ("env:\n  \"HF_TOKEN\": \"abc\n    def\"", "    ****"),
            ("env:\n  HF_TOKEN:\n    # comment\n    abc", "    ***"),
            ("- HF_TOKEN: |\n    abc", "    ***"),
            ("command:\n  - a\n  - --token\n  - abc", "  - ***"),
            ("command:\n- \"--token\"\n- |\n  abc\n  def", "  ***"),
            // Lines of other values, and references.
            ("env:\n  HF_TOKEN: |\n    abc\n  B: c", "  B: c"),
            ("env:\n  HF_TOKEN: |\n    abc\nb: c", "b: c"),
            ("env:\n  HF_TOKEN:\n    from_env: X", "    from_env: X"),
            ("env:\n  HF_TOKEN: {from_env:\n    X}", "    X}"),
            ("command:\n  - --token\n  - abc\n  - d", "  - d"),
            ("command:\n  - --verbose\n  - abc", "  - abc"),
            ("command:\n  - |\n    export HF_TOKEN=abc\n    run d", "    run d"),
            ("command:\n  - |\n    export HF_TOKEN=abc", "    export HF_TOKEN=***"),
            ("a: |\n  HF_TOKEN:\n    abc", "    ***"),
            ("a: |\n  prog --token \\\n    abc", "    ***"),
            ("abc", "abc"),
        ] {
            let start = text.rfind('\n').map_or(0, |at| at + 1);
            assert_eq!(hide_secrets_in_yaml_line(&text[..start], &text[start..]), expected, "{text}");
        }
    }

    #[test]
    fn values_of_secret_options_are_hidden_in_command_lines() {
        let words =
            ["prog", "--token", "abc", "--lr", "0.1", "HF_TOKEN=x", "--api_key=y", "--password", "--v"];
        let expected =
            ["prog", "--token", "***", "--lr", "0.1", "HF_TOKEN=*", "--api_key=***", "--password", "--v"];
        assert_eq!(hide_secret_arguments(&words), expected);
        for (word, hidden) in [
            ("--password=ab,cd ef", "--password=***"),
            ("--apikey=a'b]c", "--apikey=***"),
            ("--token=$1abc$", "--token=***"),
            ("--token={a}b", "--token=***"),
            ("--token=${HF_TOKEN}", "--token=${HF_TOKEN}"),
            ("--token={resume}", "--token={resume}"),
        ] {
            assert_eq!(hide_secret_arguments(&[word]), [hidden]);
        }
        assert_eq!(find_secret_option(&words), Some("--token"));
        assert_eq!(find_secret_option(&words[3..]), Some("--api_key"));
        assert_eq!(find_secret_option(&["prog", "--token", "$X", "--secret"]), None);
        assert_eq!(find_secret_option::<&str>(&[]), None);
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
            "--token",
            "--token $HF_TOKEN",
            "--token --verbose",
            "--eos-token </s>",
            "--max-tokens 5",
            "--tokenizer path",
            "prog --token='{resume}'",
            "é ü",
        ] {
            assert_eq!(hide_secret_values(text), text);
        }
    }
}
