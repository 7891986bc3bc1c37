//! Splits Rust source into comments, string literals and code.

/// A comment, a string literal or a part of the code of a source. `line` is the number of the first
/// line, from 1.
pub(crate) enum SourcePiece {
    Comment {
        line: usize,
        text: String,
    },
    /// The content of a string literal.
    StringLiteral {
        line: usize,
        text: String,
    },
    /// Code between comments and literals, at most one line.
    Code {
        line: usize,
        text: String,
    },
}

/// Splits a source into comments, string literals and code, in order.
pub(crate) fn split_source(source: &str) -> Vec<SourcePiece> {
    let mut reader = SourceSplitter { rest: source, line: 1, code: String::new(), pieces: Vec::new() };
    while !reader.rest.is_empty() {
        reader.read_next();
    }
    reader.push_code();
    reader.pieces
}

/// The state of [`split_source`]: the rest of the source, and the pieces that were split off so
/// far.
struct SourceSplitter<'s> {
    rest: &'s str,
    line: usize,
    code: String,
    pieces: Vec<SourcePiece>,
}

impl<'s> SourceSplitter<'s> {
    /// Consumes a comment, a string or character literal, or one character of code.
    fn read_next(&mut self) {
        let rest = self.rest;
        if rest.starts_with("//") {
            let end = rest.find('\n').unwrap_or(rest.len());
            let text = rest[..end].trim_start_matches('/').trim_start_matches('!');
            self.push_code();
            self.pieces.push(SourcePiece::Comment { line: self.line, text: text.to_owned() });
            self.advance(end);
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |at| at + 2);
            let text = rest[2..end].trim_end_matches("*/").to_owned();
            self.push_code();
            self.pieces.push(SourcePiece::Comment { line: self.line, text });
            self.advance(end);
        } else if let Some(hashes) = count_raw_string_hashes(rest, &self.code) {
            let open = rest.find('"').unwrap_or(0) + 1;
            let close = format!("\"{}", "#".repeat(hashes));
            let length = rest[open..].find(&close).unwrap_or(rest.len() - open);
            self.push_string_literal(open, length, close.len());
        } else if let Some(quoted) = rest.strip_prefix('"') {
            let length = measure_quoted_text(quoted);
            self.push_string_literal(1, length, 1);
        } else if let Some(length) = measure_char_literal(rest) {
            self.code.push_str("' '");
            self.advance(length);
        } else {
            let c = rest.chars().next().unwrap_or('\n');
            if c == '\n' {
                self.push_code();
            } else {
                self.code.push(c);
            }
            self.advance(c.len_utf8());
        }
    }

    /// Records and consumes a string literal. Its content has `length` bytes and starts at offset
    /// `open` of `rest`. Its closing delimiter has `close` bytes.
    fn push_string_literal(&mut self, open: usize, length: usize, close: usize) {
        let text = self.rest[open..open + length].to_owned();
        self.push_code();
        self.pieces.push(SourcePiece::StringLiteral { line: self.line, text });
        self.advance((open + length + close).min(self.rest.len()));
    }

    /// Records as a piece the code since the previous comment or literal, if it is not blank.
    fn push_code(&mut self) {
        if !self.code.trim().is_empty() {
            let text = std::mem::take(&mut self.code);
            self.pieces.push(SourcePiece::Code { line: self.line, text });
        }
        self.code.clear();
    }

    /// Consumes `bytes` bytes and counts their line breaks.
    fn advance(&mut self, bytes: usize) {
        self.line += self.rest[..bytes].matches('\n').count();
        self.rest = &self.rest[bytes..];
    }
}

/// Returns the number of `#` of the raw string literal at the beginning of `rest`, or `None` if
/// there is no raw string literal. `before` is the code before `rest`.
fn count_raw_string_hashes(rest: &str, before: &str) -> Option<usize> {
    let after = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let hashes = after.len() - after.trim_start_matches('#').len();
    let starts = !before.chars().next_back().is_some_and(word);
    (starts && after[hashes..].starts_with('"')).then_some(hashes)
}

/// Returns the length of a string literal's content in bytes. `text` is the source after the
/// opening quote. If the literal is not closed, returns the length of `text`.
fn measure_quoted_text(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length in bytes of the character literal at the beginning of `rest`. Returns `None`
/// for a lifetime or other text.
fn measure_char_literal(rest: &str) -> Option<usize> {
    let inside = rest.strip_prefix('\'')?;
    let mut chars = inside.char_indices();
    let (_, first) = chars.next()?;
    if first == '\\' {
        return inside[2..].find('\'').map(|at| at + 4);
    }
    let (at, next) = chars.next()?;
    (next == '\'').then_some(at + 2)
}
