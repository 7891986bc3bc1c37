//! The table that `launch gpu-check` prints, row by row.
use super::message::ResultRow;
use std::time::Instant;

/// Prints the result table of `launch gpu-check` row by row, each with the time since the start of
/// the check.
pub(super) struct ResultTable {
    began: Instant,
    /// Whether the next row needs the header of the table.
    needs_header: bool,
}

impl ResultTable {
    /// Creates a table whose elapsed times count from `began`.
    pub(super) fn new(began: Instant) -> ResultTable {
        ResultTable { began, needs_header: true }
    }

    /// Prints one row of the result table, with the elapsed time and the name `part` of the
    /// GPU-check part that sent the row.
    pub(super) fn print_row(&mut self, part: &str, row: &ResultRow) {
        if std::mem::take(&mut self.needs_header) {
            println!("| at, s | part | subject | values | result |\n|---|---|---|---|---|");
        }
        let result = match &row.cause {
            Some(cause) => format!("{}: {cause}", row.result.label()),
            None => row.result.label().to_owned(),
        };
        let [subject, values, result] = [&row.subject, &row.values, &result].map(|text| to_table_cell(text));
        let elapsed = self.began.elapsed().as_secs_f64();
        println!("| {elapsed:.1} | {part} | {subject} | {values} | {result} |");
    }

    /// Prints a paragraph of text, such as an explanation of a failure, between rows of the result
    /// table.
    pub(super) fn print_paragraph<S: AsRef<str>>(&mut self, lines: impl IntoIterator<Item = S>) {
        println!();
        for line in lines {
            println!("{}", diagnostic::terminal_text::filter_line(line.as_ref()));
        }
        println!();
        self.needs_header = true;
    }
}

/// The number of characters after which the text of a cell in the printed result table is cut off.
const MAX_CELL_CHARS: usize = 400;

/// Converts a text to the content of a table cell: one line without control characters and with a
/// limited length. The end of a long text, which the JSON file contains, is cut off.
fn to_table_cell(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = diagnostic::terminal_text::filter_line(&line).replace('|', "/");
    match line.char_indices().nth(MAX_CELL_CHARS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
