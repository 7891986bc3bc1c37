//! `launch explain`: prints the explanations of diagnostic codes.
use super::{context::CommandContext, output::print_text};
use clap::Args;
use diagnostic::{Code, Diagnostic, codes};
use serde_json::{Value, json};

/// The largest number of codes that are suggested for a misspelled code.
const MAX_SUGGESTIONS: usize = 3;
/// The least Jaro-Winkler similarity, from 0 to 1, between a misspelled diagnostic code and a
/// suggested one.
const MIN_SIMILARITY: f64 = 0.75;

/// Arguments of `launch explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Error code, such as ssh-host-key-unknown [default: list all codes]
    #[arg(value_name = "CODE")]
    code: Option<String>,
}

/// Runs `launch explain`: prints the explanation of one code, or the list of all codes.
pub(crate) fn run(args: ExplainArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let text = match (&args.code, context.format.json) {
        (Some(name), true) => format!("{}\n", code_to_json(find_code(name)?)),
        (Some(name), false) => format_for_terminal(find_code(name)?),
        (None, true) => {
            format!("{}\n", Value::from(codes::all_codes().map(code_to_json).collect::<Vec<_>>()))
        }
        (None, false) => {
            codes::all_codes().map(|code| format!("{code}: {}\n", code.info().summary)).collect()
        }
    };
    print_text(&text)
}

/// Formats the explanation of a diagnostic code as text. The first line is the name of the code,
/// without the `###` of a Markdown heading.
fn format_for_terminal(code: Code) -> String {
    let entry = diagnostic::render_code_entry(code);
    format!("{}\n", entry.trim_start_matches('#').trim())
}

/// Returns the explanation of a diagnostic code as a JSON object.
fn code_to_json(code: Code) -> Value {
    let info = code.info();
    json!({
        "code": info.name,
        "category": info.category,
        "exit_code": info.category.exit_code(),
        "summary": info.summary,
        "cause": info.cause,
        "remedy": info.remedy,
    })
}

/// Finds the diagnostic code with the name `name`. `name` may have upper-case letters, and
/// underscores instead of hyphens. Fails for an unknown name, with similar codes as suggestions.
fn find_code(name: &str) -> diagnostic::Result<Code> {
    let normalized = name.trim().to_ascii_lowercase().replace('_', "-");
    Code::from_name(&normalized).ok_or_else(|| {
        let message = format!("there is no code `{}`", name.escape_debug());
        let unknown = Diagnostic::error(codes::command::CODE_UNKNOWN, message).with_subject(name);
        let near = find_similar_codes(&normalized);
        if near.is_empty() {
            return unknown.with_help("`launch explain` lists all codes");
        }
        let help = format!("did you mean `{}`?", near.join("`, `"));
        unknown.with_field("suggestions", near).with_help(help)
    })
}

/// Returns the names of the diagnostic codes that are most similar to a misspelled name, sorted by
/// decreasing similarity. Returns at most [`MAX_SUGGESTIONS`] names.
fn find_similar_codes(name: &str) -> Vec<&'static str> {
    let similarity = |code: Code| (strsim::jaro_winkler(code.name(), name), code.name());
    let mut near: Vec<(f64, &str)> = codes::all_codes().map(similarity).collect();
    near.retain(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    near.into_iter().take(MAX_SUGGESTIONS).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_found_in_any_spelling() {
        for name in ["output-failed", "OUTPUT_FAILED", " output-failed "] {
            assert_eq!(find_code(name).map(Code::name), Ok("output-failed"));
        }
    }

    #[test]
    fn an_unknown_code_is_an_error_with_suggestions() {
        let error = find_code("output-failure").expect_err("misspelled");
        assert_eq!(error.code(), codes::command::CODE_UNKNOWN);
        assert_eq!(error.field("suggestions").and_then(|s| s[0].as_str()), Some("output-failed"));
        let error = find_code("zzz").expect_err("nothing like it");
        assert!(error.field("suggestions").is_none() && !error.help().is_empty());
    }

    #[test]
    fn the_json_of_a_code_has_every_part() {
        let value = code_to_json(codes::command::OUTPUT_FAILED);
        assert_eq!((&value["code"], &value["exit_code"]), (&json!("output-failed"), &json!(1)));
        assert!(["summary", "cause", "remedy"].iter().all(|key| value[key].is_string()));
    }
}
