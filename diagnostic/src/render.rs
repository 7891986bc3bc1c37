//! Diagnostics as text for people: code, message, source line with a caret, causes, help.
use crate::{Diagnostic, Location, Severity};
use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use std::fmt::Write;

/// Longest source line that is shown under a message, characters.
const MAX_LINE: usize = 400;
/// Most diagnostics that are rendered; the rest is counted.
const MAX_SHOWN: usize = 40;

/// One diagnostic with its details; ends with a line break. A diagnostic that summarizes a single
/// detail shows only that detail. Control characters are made visible.
pub fn render(diagnostic: &Diagnostic, color: bool) -> String {
    let details = diagnostic.details();
    let mut text = render_all(details, color);
    if details.len() != 1 {
        if !details.is_empty() {
            text.push('\n');
        }
        text.push_str(&render_one(diagnostic, color));
        return text;
    }
    append_notes(&mut text, diagnostic);
    text
}

/// Several diagnostics with an empty line between two; ends with a line break when not empty.
pub fn render_all(diagnostics: &[Diagnostic], color: bool) -> String {
    let mut text = String::new();
    for (i, diagnostic) in diagnostics.iter().take(MAX_SHOWN).enumerate() {
        if i > 0 {
            text.push('\n');
        }
        text.push_str(&render_one(diagnostic, color));
    }
    if diagnostics.len() > MAX_SHOWN {
        _ = writeln!(text, "\n… and {} more", diagnostics.len() - MAX_SHOWN);
    }
    text
}

fn render_one(diagnostic: &Diagnostic, color: bool) -> String {
    match diagnostic.location() {
        Some(location) => with_source(diagnostic, location, color),
        None => without_source(diagnostic, color),
    }
}

fn without_source(diagnostic: &Diagnostic, color: bool) -> String {
    let (name, style) = match diagnostic.severity() {
        Severity::Error => ("error", "\x1b[1;31m"),
        Severity::Warning => ("warning", "\x1b[1;33m"),
        Severity::Note => ("note", "\x1b[1;32m"),
    };
    let (style, reset) = if color { (style, "\x1b[0m") } else { ("", "") };
    let (code, message) = (diagnostic.code().name(), visible(diagnostic.message()));
    let mut text = format!("{style}{name}[{code}]{reset}: {message}\n");
    append_notes(&mut text, diagnostic);
    text
}

/// The causes and help of a diagnostic, one a line.
fn append_notes(text: &mut String, diagnostic: &Diagnostic) {
    for cause in diagnostic.causes() {
        _ = writeln!(text, "  caused by: {}", visible(cause));
    }
    for help in diagnostic.help() {
        _ = writeln!(text, "  help: {}", visible(help));
    }
}

/// Replaces control characters other than line breaks by `·`, so that a message cannot control the
/// terminal.
fn visible(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '·' } else { c }).collect()
}

fn with_source(diagnostic: &Diagnostic, location: &Location, color: bool) -> String {
    let renderer = if color { Renderer::styled() } else { Renderer::plain() };
    let level = match diagnostic.severity() {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
        Severity::Note => Level::NOTE,
    };
    let title = level.primary_title(diagnostic.message()).id(diagnostic.code().name());
    let mut group = match location {
        Location::File { file } => title.element(Origin::path(file)),
        Location::Line { file, line, column, text, .. } if text.chars().count() > MAX_LINE => {
            title.element(Origin::path(file).line(*line as usize).char_column(*column as usize))
        }
        Location::Line { file, line, column, width, text } => title.element(
            Snippet::source(text)
                .path(file)
                .line_start(*line as usize)
                .annotation(AnnotationKind::Primary.span(byte_range(text, *column, *width))),
        ),
        Location::Override { text, .. } if text.chars().count() > MAX_LINE => {
            title.element(Origin::path("--set"))
        }
        Location::Override { column, width, text } => {
            let argument = format!("--set {text}");
            let span = byte_range(&argument, *column + 6, *width);
            title.element(
                Snippet::source(argument)
                    .line_numbering(false)
                    .annotation(AnnotationKind::Primary.span(span)),
            )
        }
    };
    for cause in diagnostic.causes() {
        group = group.element(Level::NOTE.message(format!("caused by: {cause}")));
    }
    for help in diagnostic.help() {
        group = group.element(Level::HELP.message(help));
    }
    format!("{}\n", renderer.render(&[group]))
}

/// The byte range of the `width` characters that begin at the 1-based `column`, clamped to the
/// text.
fn byte_range(text: &str, column: u32, width: u32) -> std::ops::Range<usize> {
    let at = |chars: usize| text.char_indices().nth(chars).map_or(text.len(), |(byte, _)| byte);
    let first = column.saturating_sub(1) as usize;
    at(first)..at(first + width as usize)
}
