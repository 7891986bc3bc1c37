//! Renders diagnostics as text for the terminal: the code, the message, the source line with a
//! caret, the causes and the help.
use crate::{
    diagnostic::{Diagnostic, Severity},
    location::Location,
    terminal_text::{filter_line, filter_text},
};
use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use std::fmt::Write;

/// The longest source line that is shown with a diagnostic, in characters. A longer line is left
/// out.
const MAX_SHOWN_LINE_CHARS: usize = 400;
/// The largest number of diagnostics that are shown on the terminal at once. If there are more, a
/// last line states how many were left out.
const MAX_SHOWN_DIAGNOSTICS: usize = 40;

/// Renders a diagnostic as text for the terminal, together with its details: the separate errors
/// that it sums up, such as mistakes in a job file. The text ends with a line break.
///
/// The details come first, followed by `diagnostic` itself. If there is exactly one detail, the
/// message of `diagnostic` is left out, and only its causes and help are shown. Unprintable
/// characters are replaced.
pub fn render(diagnostic: &Diagnostic, color: bool) -> String {
    let details = diagnostic.detail_diagnostics();
    let mut text = render_all(details, color);
    if details.len() != 1 {
        if !details.is_empty() {
            text.push('\n');
        }
        text.push_str(&render_one(diagnostic, color));
        return text;
    }
    append_causes_and_help(&mut text, diagnostic);
    text
}

/// Renders several diagnostics, separated by empty lines, as text for the terminal.
///
/// At most 40 are shown, followed by the number of the others. The text ends with a line break. It
/// is empty if `diagnostics` is empty.
pub fn render_all(diagnostics: &[Diagnostic], color: bool) -> String {
    let mut text = String::new();
    for (i, diagnostic) in diagnostics.iter().take(MAX_SHOWN_DIAGNOSTICS).enumerate() {
        if i > 0 {
            text.push('\n');
        }
        text.push_str(&render_one(diagnostic, color));
    }
    if diagnostics.len() > MAX_SHOWN_DIAGNOSTICS {
        _ = writeln!(text, "\n… and {} more", diagnostics.len() - MAX_SHOWN_DIAGNOSTICS);
    }
    text
}

/// Renders one diagnostic as text for the terminal, without the separate errors that a summary such
/// as "the job has 3 errors" stands for. If the diagnostic has a location, its source line is
/// shown, too.
fn render_one(diagnostic: &Diagnostic, color: bool) -> String {
    match diagnostic.location() {
        Some(location) => render_with_source(diagnostic, location, color),
        None => render_without_source(diagnostic, color),
    }
}

/// Renders a diagnostic that has no location: its severity, code, message, causes and help.
fn render_without_source(diagnostic: &Diagnostic, color: bool) -> String {
    let (name, style) = match diagnostic.severity() {
        Severity::Error => ("error", "\x1b[1;31m"),
        Severity::Warning => ("warning", "\x1b[1;33m"),
        Severity::Note => ("note", "\x1b[1;32m"),
    };
    let (style, reset) = if color { (style, "\x1b[0m") } else { ("", "") };
    let (code, message) = (diagnostic.code().name(), filter_text(diagnostic.message()));
    let mut text = format!("{style}{name}[{code}]{reset}: {message}\n");
    append_causes_and_help(&mut text, diagnostic);
    text
}

/// Appends the causes and the help of a diagnostic to `text`, one per line.
fn append_causes_and_help(text: &mut String, diagnostic: &Diagnostic) {
    for cause in diagnostic.causes() {
        _ = writeln!(text, "  caused by: {}", filter_text(cause));
    }
    for help in diagnostic.help() {
        _ = writeln!(text, "  help: {}", filter_text(help));
    }
}

/// Renders a diagnostic together with the source line that its location points at, and a caret
/// below the mistake. The line is left out if it is longer than [`MAX_SHOWN_LINE_CHARS`], or if the
/// location lacks its text.
fn render_with_source(diagnostic: &Diagnostic, location: &Location, color: bool) -> String {
    let renderer = if color { Renderer::styled() } else { Renderer::plain() };
    let level = match diagnostic.severity() {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
        Severity::Note => Level::NOTE,
    };
    let title = level.primary_title(filter_text(diagnostic.message())).id(diagnostic.code().name());
    let location = replace_unprintable_in_location(location);
    let mut group = match &location {
        Location::File { file } => title.element(Origin::path(file)),
        Location::Argument { text } if text.chars().count() > MAX_SHOWN_LINE_CHARS => {
            title.element(Origin::path("the command line"))
        }
        Location::Argument { text } => title.element(
            Snippet::source(text)
                .line_numbering(false)
                .annotation(AnnotationKind::Primary.span(0..text.len())),
        ),
        Location::Line { file, line, column, text, .. }
            if (text.is_empty() && *column > 1) || text.chars().count() > MAX_SHOWN_LINE_CHARS =>
        {
            title.element(Origin::path(file).line(*line as usize).char_column(*column as usize))
        }
        Location::Line { file, line, column, width, text } => title.element(
            Snippet::source(text)
                .path(file)
                .line_start(*line as usize)
                .annotation(AnnotationKind::Primary.span(compute_byte_range(text, *column, *width))),
        ),
        Location::Override { text, .. } if text.chars().count() > MAX_SHOWN_LINE_CHARS => {
            title.element(Origin::path("--set"))
        }
        Location::Override { column, width, text } => {
            let argument = format!("--set {text}");
            let span = compute_byte_range(&argument, *column + 6, *width);
            title.element(
                Snippet::source(argument)
                    .line_numbering(false)
                    .annotation(AnnotationKind::Primary.span(span)),
            )
        }
    };
    for cause in diagnostic.causes() {
        group = group.element(Level::NOTE.message(filter_text(&format!("caused by: {cause}"))));
    }
    for help in diagnostic.help() {
        group = group.element(Level::HELP.message(filter_text(help)));
    }
    format!("{}\n", renderer.render(&[group]))
}

/// Returns a copy of a location with U+FFFD in place of unprintable characters, so that its file
/// name and source line can be printed on a terminal. The columns stay the same.
fn replace_unprintable_in_location(location: &Location) -> Location {
    match location {
        Location::File { file } => Location::File { file: filter_line(file) },
        Location::Line { file, line, column, width, text } => Location::Line {
            file: filter_line(file),
            line: *line,
            column: *column,
            width: *width,
            text: filter_text(text),
        },
        Location::Override { column, width, text } => {
            Location::Override { column: *column, width: *width, text: filter_text(text) }
        }
        Location::Argument { text } => Location::Argument { text: filter_text(text) },
    }
}

/// Converts a range of characters in a line, given by its first column (from 1) and its width, to a
/// range of bytes in `text`. If `text` has fewer characters, the range ends at the end of `text`.
fn compute_byte_range(text: &str, column: u32, width: u32) -> std::ops::Range<usize> {
    let at = |chars: usize| text.char_indices().nth(chars).map_or(text.len(), |(byte, _)| byte);
    let first = column.saturating_sub(1) as usize;
    at(first)..at(first + width as usize)
}
