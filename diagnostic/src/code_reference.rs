//! Renders the explanations of diagnostic codes as Markdown: a single one for `launch explain`, or
//! all of them for docs/errors.md.
use crate::{Category, Code, codes};
use std::fmt::Write;

/// The line width at which the paragraphs of docs/errors.md are wrapped, in characters.
const PARAGRAPH_WIDTH: usize = 100;

/// Renders the explanation of one diagnostic code as Markdown: a heading, the summary, the exit
/// code, the cause and the remedy.
pub fn render_code_entry(code: Code) -> String {
    let info = code.info();
    let mut text = format!("### {}\n\n", info.name);
    let category = match info.category {
        Category::Usage => "the command line is wrong",
        Category::Job => "the job is wrong",
        Category::Cluster => "a host, device, storage or port is not available",
        Category::Checkpoint => "the checkpoint is not usable",
        Category::Failed => "the operation failed",
    };
    push_paragraph(&mut text, info.summary);
    // A code of a warning has a category, too, but a warning does not end a command.
    let exit =
        format!("A command that fails with this code exits with {} ({category}).", info.category.exit_code());
    push_paragraph(&mut text, &exit);
    push_paragraph(&mut text, &format!("Cause: {}", info.cause));
    push_paragraph(&mut text, &format!("Remedy: {}", info.remedy));
    text
}

/// Renders the content of docs/errors.md: the explanations of all diagnostic codes, grouped under
/// headings such as "Slurm" or "Data".
pub fn render_code_reference() -> String {
    let mut text = String::from(
        "# Errors\n\nEvery error and warning of `launch` has a stable code. Messages show it in brackets\n\
         (`error[usage]: …`), `--json` prints it as `code`, and `launch explain CODE` prints the entry below.\n\
         A warning does not end a command. The exit code in its entry applies only if launch reports the same\n\
         code as an error. The tables in `diagnostic/src/codes/` are the source of this page.\n\n",
    );
    for (title, list) in codes::CODES_BY_AREA {
        _ = write!(text, "## {title}\n\n");
        for code in *list {
            text.push_str(&render_code_entry(*code));
        }
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// Appends a paragraph to `text`, wrapped at [`PARAGRAPH_WIDTH`] characters and followed by an
/// empty line.
fn push_paragraph(text: &mut String, paragraph: &str) {
    let mut column = 0;
    for word in paragraph.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > PARAGRAPH_WIDTH {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += width;
    }
    text.push_str("\n\n");
}
