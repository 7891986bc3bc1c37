//! Creates the parsers and printers ([`ValueType`]) for job.yaml keys whose values are texts or
//! paths.
use super::value_type::{ReadResult, ValueType, out_of_range_error, wrong_format_error, wrong_type_error};
use crate::yaml::{
    format::quote_yaml,
    tree::{YamlNode, YamlValue, make_excerpt},
    value_error::ValueError,
};
use diagnostic::codes::job as codes;
use serde_json::json;
use std::path::PathBuf;

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept non-empty text
/// without control characters, line breaks and tabs.
pub(crate) fn text_type() -> ValueType<String> {
    let schema = json!({"type": "string", "minLength": 1});
    ValueType::new_single_line("text", schema, read_text, |t| quote_yaml(t)).with_expected_phrase("text")
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept any scalar, and
/// read even a number or boolean as text. Arguments and values of variables may look like numbers.
/// Line breaks are allowed.
pub(crate) fn verbatim_text_type() -> ValueType<String> {
    let schema = json!({"type": ["string", "number", "boolean"]});
    let quote = |text: &String| quote_yaml(text);
    ValueType::new_single_line("text", schema, read_verbatim, quote).with_expected_phrase("text")
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept paths, which are
/// texts without control characters.
pub(crate) fn path_type() -> ValueType<PathBuf> {
    text_type().documented_as("path").convert(PathBuf::from, |path| Some(path.to_string_lossy().into_owned()))
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept texts for which the
/// function `fits` returns true. `pattern` is the regular expression of the format in JSON Schema,
/// and `fits` is the exact check. `expected` describes the format in messages.
pub(crate) fn formatted_text_type(
    accepts: &'static str,
    expected: &'static str,
    pattern: &'static str,
    fits: fn(&str) -> bool,
) -> ValueType<String> {
    let schema = json!({"type": "string", "minLength": 1, "pattern": pattern});
    let read = move |node: &YamlNode| {
        let text = read_text(node)?;
        if fits(&text) { Ok(text) } else { Err(wrong_format_error(expected, node)) }
    };
    ValueType::new_single_line(accepts, schema, read, |t| quote_yaml(t)).with_expected_phrase(expected)
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept texts which may
/// contain placeholders such as `{run}`. A placeholder that is not in `names`, and a brace without
/// a counterpart, are errors.
pub(crate) fn template_type(names: &'static [&'static str]) -> ValueType<String> {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{{{name}}}`")).collect();
    let accepts = format!("path with {}", quoted.join(" and "));
    let pattern = format!("^([^{{}}]|\\{{({})\\}})+$", names.join("|"));
    let read = move |node: &YamlNode| {
        let text = read_text(node)?;
        let Some(message) = describe_wrong_placeholder(&text, names) else { return Ok(text) };
        let noun = if names.len() == 1 { "placeholder is" } else { "placeholders are" };
        Err(ValueError::new(codes::JOB_PLACEHOLDER_INVALID, node.span, message)
            .with_help(format!("the {noun} {}", quoted.join(" and "))))
    };
    ValueType::new_single_line(accepts, json!({"type": "string", "pattern": pattern}), read, |t| {
        quote_yaml(t)
    })
}

/// Describes the first malformed or unknown placeholder such as `{run}` in a text; `None` if all
/// placeholders are among `names`.
fn describe_wrong_placeholder(text: &str, names: &[&str]) -> Option<String> {
    let mut rest = text;
    while let Some(open) = rest.find(['{', '}']) {
        let (name, after) = match rest[open..].find('}') {
            Some(close) if rest[open..].starts_with('{') => {
                (&rest[open + 1..open + close], &rest[open + close + 1..])
            }
            _ => return Some("has a brace without a counterpart".to_owned()),
        };
        if !names.contains(&name) {
            return Some(format!("has the unknown placeholder `{{{}}}`", make_excerpt(name)));
        }
        rest = after;
    }
    None
}

/// Reads a YAML value as text that is not empty and has no control characters, including line
/// breaks and tabs.
pub(crate) fn read_text(node: &YamlNode) -> ReadResult<String> {
    match node.value {
        YamlValue::Text if node.raw.is_empty() => Err(out_of_range_error("text", node)),
        YamlValue::Text => match node.raw.chars().find(|c| c.is_control()) {
            Some(c) => {
                let message = format!("contains the control character {}", c.escape_default());
                Err(ValueError::new(codes::JOB_CONTROL_CHARACTER, node.span, message))
            }
            None => Ok(node.raw.clone()),
        },
        YamlValue::Bool(_) | YamlValue::Int(_) | YamlValue::Float(_) => Err(wrong_type_error("text", node)
            .with_help(format!("put it in quotes: \"{}\"", make_excerpt(&node.raw)))),
        _ => Err(wrong_type_error("text", node)),
    }
}

/// Reads a YAML scalar, also a number or boolean, as the text that the job file contains. NUL is an
/// error.
pub(crate) fn read_verbatim(node: &YamlNode) -> ReadResult<String> {
    match node.value {
        YamlValue::List(_) | YamlValue::Map(_) => Err(wrong_type_error("text", node)),
        YamlValue::Null => Err(wrong_type_error("text", node).with_help("write \"\" for an empty text")),
        _ if node.raw.contains('\0') => {
            Err(ValueError::new(codes::JOB_CONTROL_CHARACTER, node.span, "contains a NUL character"))
        }
        _ => Ok(node.raw.clone()),
    }
}
