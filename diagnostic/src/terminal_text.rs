//! Removes control characters from text of files, other processes and other hosts before it is
//! printed on the terminal. No other module filters text. Without the filter, such text could move
//! the cursor, hide other text, set the window title, or change the order in which characters are
//! shown.
use std::{borrow::Cow, fmt::Write};

/// The character that is printed instead of an unprintable one.
const REPLACEMENT_CHAR: char = char::REPLACEMENT_CHARACTER;
/// The terminal control sequence that resets text to the default color.
const COLOR_RESET: &str = "\x1b[0m";

/// Returns whether the character `c` could disturb a terminal, as control characters and changes of
/// the writing direction do. Such characters are C0, DEL and C1 (including line breaks and tabs),
/// line separators, bidirectional controls, deprecated format controls, annotations and tags.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
            | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Replaces all unprintable characters in `text`, including line breaks, tabs and color sequences,
/// by U+FFFD. The text stays on one line.
pub fn filter_line(text: &str) -> String {
    text.chars().map(|c| if is_unprintable(c) { REPLACEMENT_CHAR } else { c }).collect()
}

/// Replaces unprintable characters in `text`, except for line breaks and tabs, by U+FFFD.
pub fn filter_text(text: &str) -> String {
    let is_replaced = |c: char| is_unprintable(c) && !matches!(c, '\n' | '\t');
    text.chars().map(|c| if is_replaced(c) { REPLACEMENT_CHAR } else { c }).collect()
}

/// Replaces unprintable characters in `text`, except for line breaks, tabs and color sequences, by
/// U+FFFD. Resets the color at the end of each line that sets one.
pub fn filter_colored_text(text: &str) -> String {
    let mut filtered = String::with_capacity(text.len());
    for (number, line) in text.split('\n').enumerate() {
        if number > 0 {
            filtered.push('\n');
        }
        append_filtered_colored_line(line, &mut filtered);
    }
    filtered
}

/// Appends `line` to `filtered`, and replaces its unprintable characters, except for color
/// sequences, by U+FFFD.
fn append_filtered_colored_line(line: &str, filtered: &mut String) {
    let (mut rest, mut is_colored) = (line, false);
    while let Some(at) = rest.find(|c: char| is_unprintable(c) && c != '\t') {
        filtered.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = match measure_color_sequence(rest) {
            Some(length) => {
                is_colored = &rest[..length] != COLOR_RESET;
                filtered.push_str(&rest[..length]);
                length
            }
            None => {
                filtered.push(REPLACEMENT_CHAR);
                rest.chars().next().map_or(1, char::len_utf8)
            }
        };
        rest = &rest[length..];
    }
    filtered.push_str(rest);
    if is_colored {
        filtered.push_str(COLOR_RESET);
    }
}

/// Returns the length in bytes of the color sequence (SGR, `ESC [ … m`) at the start of `text`;
/// `None` if `text` does not begin with one.
fn measure_color_sequence(text: &str) -> Option<usize> {
    let body = text.strip_prefix("\x1b[")?;
    let end = body.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    body[end..].starts_with('m').then_some(2 + end + 1)
}

/// Replaces each unprintable character in the text of a JSON document by its `\uXXXX` escape, so
/// that the document can be printed and keeps its values. Keeps the line breaks and tabs between
/// values, and replaces carriage returns, which are only valid between values, by spaces.
pub fn escape_unprintable_in_json(json: &str) -> Cow<'_, str> {
    let is_escaped = |c: char| is_unprintable(c) && !matches!(c, '\n' | '\t');
    if !json.contains(is_escaped) {
        return Cow::Borrowed(json);
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if c == '\r' {
            escaped.push(' ');
        } else if is_escaped(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                _ = write!(escaped, "\\u{unit:04x}");
            }
        } else {
            escaped.push(c);
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_no_character_that_controls_the_terminal_or_the_layout() {
        assert_eq!(
            filter_line("a\tb\r\nc\x1b[1md\x7f\u{9b}é"),
            "a\u{fffd}b\u{fffd}\u{fffd}c\u{fffd}[1md\u{fffd}\u{fffd}é"
        );
        for c in
            ['\u{202a}', '\u{202e}', '\u{2066}', '\u{2069}', '\u{200f}', '\u{61c}', '\u{2028}', '\u{e0041}']
        {
            assert_eq!(filter_line(&format!("a{c}b")), "a\u{fffd}b", "{c:?}");
            assert_eq!(filter_colored_text(&format!("a{c}b")), "a\u{fffd}b", "{c:?}");
        }
        // Joiners are part of words and emoji.
        for text in ["日本語", "a\u{200d}b", "a\u{a0}b", "👩\u{200d}🚀", "שלום"] {
            assert_eq!(filter_line(text), text);
        }
        assert_eq!(filter_text("a\tb\nc\r\x1b[1m"), "a\tb\nc\u{fffd}\u{fffd}[1m");
    }

    #[test]
    fn colors_stay_and_end_with_their_line() {
        for text in ["a\tb\n", "\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m\nplain\n"] {
            assert_eq!(filter_colored_text(text), text);
        }
        assert_eq!(filter_colored_text("\x1b[31mred\nplain"), "\x1b[31mred\x1b[0m\nplain");
        assert_eq!(filter_colored_text("\x1b[2Jx\x07"), "\u{fffd}[2Jx\u{fffd}");
        assert_eq!(filter_colored_text("\x1b]0;title\x07\x1b["), "\u{fffd}]0;title\u{fffd}\u{fffd}[");
        assert_eq!(filter_colored_text("é\u{9b}31m"), "é\u{fffd}31m");
        assert_eq!(filter_colored_text("\x1b[31"), "\u{fffd}[31");
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let value = serde_json::json!({"a\u{202e}": "\x1b[1m\u{9b}\u{7f}\u{e0041}é\n"});
        let text = format!("{value:#}\n");
        let escaped = escape_unprintable_in_json(&text);
        assert!(!escaped.contains(|c| is_unprintable(c) && c != '\n'), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
        assert!(matches!(escape_unprintable_in_json("{\"a\": 1}\n"), Cow::Borrowed(_)));
        assert_eq!(escape_unprintable_in_json("{\"a\":\r\n1}\r"), "{\"a\": \n1} ");
    }
}
