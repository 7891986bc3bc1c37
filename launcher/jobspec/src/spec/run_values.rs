//! Creates the parsers and printers ([`ValueType`]) for the keys `run.command` and `run.pass_env`.
use crate::{
    keys::{
        collections::described_list_type,
        text::{formatted_text_type, verbatim_text_type},
        value_type::{ReadResult, ValueType, out_of_range_error, wrong_type_error},
    },
    yaml::{
        tree::{YamlNode, YamlValue, make_excerpt},
        value_error::ValueError,
    },
};
use diagnostic::codes::job as codes;
use serde_json::json;

/// Returns the parser and printer ([`ValueType`]) for `run.command`, which is a list of texts: the
/// program and its arguments. The items are not interpreted.
pub(crate) fn command_type() -> ValueType<Vec<String>> {
    let words = || described_list_type("list of text", EXPECTED_COMMAND, verbatim_text_type());
    let schema = json!({"type": "array", "items": verbatim_text_type().schema, "minItems": 1});
    ValueType::new("list of text", schema, read_command, move |list| words().print(list))
}

/// The phrase by which messages describe the values of `run.command`.
const EXPECTED_COMMAND: &str = "a list: the program and its arguments";

/// Reads a value of `run.command` from YAML.
fn read_command(node: &YamlNode) -> ReadResult<Vec<String>> {
    if let YamlValue::Text = node.value {
        let words: Vec<&str> = node.raw.split_whitespace().collect();
        let help = format!("write [{}]", make_excerpt(&words.join(", ")));
        return Err(wrong_type_error(EXPECTED_COMMAND, node).with_help(help));
    }
    let words = described_list_type("list of text", EXPECTED_COMMAND, verbatim_text_type()).read(node)?;
    match words.first() {
        None => Err(out_of_range_error(EXPECTED_COMMAND, node)),
        Some(program) if program.is_empty() => {
            Err(ValueError::new(codes::JOB_VALUE_FORMAT, node.span, "has an empty program name"))
        }
        Some(_) => Ok(words),
    }
}

/// Returns the parser and printer ([`ValueType`]) for an item of `run.pass_env`: a pattern of names
/// of environment variables. A pattern consists of letters, digits, `_`, `*` for any text and `?`
/// for any character.
pub(crate) fn variable_pattern_type() -> ValueType<String> {
    formatted_text_type(
        "pattern",
        "a name or a pattern such as `HF_*`",
        "^[A-Za-z0-9_*?]{1,200}$",
        |pattern| {
            let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '*' || c == '?';
            pattern.chars().all(fits) && pattern.len() <= 200
        },
    )
}
