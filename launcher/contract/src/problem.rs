//! [`Problem`]: something wrong (or worth a warning) in a job, with the place where it was written.
use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};

/// Longest source line that is shown under a problem, characters.
const LONGEST_LINE: usize = 400;
/// Most problems that are rendered; the rest is counted.
const MOST_SHOWN: usize = 40;

/// Something wrong in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The key, e.g. `train.batch.global`; empty when it is about the whole job.
    pub path: String,
    pub place: Place,
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Where something was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A file as a whole.
    File { file: String },
    /// Part of a line of a file. Line and column count from 1, in characters; `width` ≥ 1 characters are meant.
    Line { file: String, line: u32, column: u32, width: u32, text: String },
    /// Part of a `--set path=value` argument.
    Override { column: u32, width: u32, text: String },
}

impl Place {
    /// The file's name, or `--set`.
    pub fn file(&self) -> &str {
        match self {
            Place::File { file } | Place::Line { file, .. } => file,
            Place::Override { .. } => "--set",
        }
    }

    /// 1-based line; 0 for a whole file.
    pub fn line(&self) -> u32 {
        match self {
            Place::File { .. } => 0,
            Place::Line { line, .. } => *line,
            Place::Override { .. } => 1,
        }
    }

    /// 1-based column; 0 for a whole file.
    pub fn column(&self) -> u32 {
        match self {
            Place::File { .. } => 0,
            Place::Line { column, .. } | Place::Override { column, .. } => *column,
        }
    }
}

/// One line: `job.yaml:4:13: message`.
impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.place {
            Place::File { file } => write!(f, "{file}: {}", self.message),
            Place::Line { file, line, column, .. } => write!(f, "{file}:{line}:{column}: {}", self.message),
            Place::Override { text, .. } => write!(f, "--set {text}: {}", self.message),
        }
    }
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    Error,
    Warning,
}

/// The problems as text for people: message, place, the source line with a caret, hint; an empty line between two. Ends
/// with a line break when not empty. Control characters in what was written are shown, never sent to the terminal.
pub fn render(problems: &[Problem], severity: Severity, color: bool) -> String {
    let renderer = if color { Renderer::styled() } else { Renderer::plain() };
    let mut out = String::new();
    for (i, problem) in problems.iter().take(MOST_SHOWN).enumerate() {
        if i > 0 {
            out.push('\n');
        }
        out.push_str(&render_one(&renderer, problem, severity));
        out.push('\n');
    }
    if problems.len() > MOST_SHOWN {
        out.push_str(&format!("\n… and {} more\n", problems.len() - MOST_SHOWN));
    }
    out
}

fn render_one(renderer: &Renderer, problem: &Problem, severity: Severity) -> String {
    let level = match severity {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
    };
    let title = level.primary_title(&problem.message);
    let mut group = match &problem.place {
        Place::File { file } => title.element(Origin::path(file)),
        Place::Line { file, line, column, text, .. } if text.chars().count() > LONGEST_LINE => {
            title.element(Origin::path(file).line(*line as usize).char_column(*column as usize))
        }
        Place::Line { file, line, column, width, text } => {
            let span = byte_range(text, *column, *width);
            title.element(
                Snippet::source(text)
                    .path(file)
                    .line_start(*line as usize)
                    .annotation(AnnotationKind::Primary.span(span)),
            )
        }
        Place::Override { text, .. } if text.chars().count() > LONGEST_LINE => {
            title.element(Origin::path("--set"))
        }
        Place::Override { column, width, text } => {
            let shown = format!("--set {text}");
            let span = byte_range(&shown, *column + 6, *width);
            title.element(
                Snippet::source(shown).line_numbering(false).annotation(AnnotationKind::Primary.span(span)),
            )
        }
    };
    if let Some(hint) = &problem.hint {
        group = group.element(Level::HELP.message(hint));
    }
    renderer.render(&[group])
}

/// The bytes of `width` characters from the 1-based character `column`, clamped to the text.
fn byte_range(text: &str, column: u32, width: u32) -> std::ops::Range<usize> {
    let at = |chars: usize| text.char_indices().nth(chars).map_or(text.len(), |(byte, _)| byte);
    let first = column.saturating_sub(1) as usize;
    at(first)..at(first + width as usize)
}
