//! Creates the parsers and printers ([`ValueType`]) for job.yaml keys whose values are durations or
//! sizes.
use super::value_type::{ValueType, wrong_format_error};
use crate::yaml::{
    format::format_duration,
    scalar::{parse_duration, parse_size},
    tree::{YamlNode, YamlValue, make_excerpt},
};
use serde_json::json;
use std::ops::RangeInclusive;

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept durations such as
/// `90s`, which are converted to milliseconds.
pub(crate) fn duration_type() -> ValueType<u64> {
    let example = "a duration such as `500ms`, `10s`, `5m`, `2h`";
    number_with_unit_type("duration", example, "ms|s|m|h|d", "s", parse_duration, format_duration)
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept durations in a
/// range, which are converted to milliseconds. `expected` describes the durations in messages.
pub(crate) fn duration_range_type(range: RangeInclusive<u64>, expected: &'static str) -> ValueType<u64> {
    duration_type().restricted_to(expected, json!({}), move |ms| range.contains(ms))
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept sizes of at least
/// `least` bytes, such as `4KiB`, which are converted to bytes. `expected` describes the sizes in
/// messages.
pub(crate) fn size_type(least: u64, expected: &'static str) -> ValueType<u64> {
    let example = "a size such as `512KiB`, `100MB`, `1GiB`";
    number_with_unit_type("size", example, "B|[kK]B|[MGT]B|[KMGT]iB", "B", parse_size, |bytes| {
        format!("{bytes}B")
    })
    .restricted_to(expected, json!({}), move |bytes| *bytes >= least)
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept a number with a
/// unit, such as `90s` or `4KiB`, and read it as an integer. `units` is a regular expression for
/// the unit. `unit` is the unit that the error for a bare number suggests.
fn number_with_unit_type(
    accepts: &'static str,
    expected: &'static str,
    units: &str,
    unit: &'static str,
    parse: fn(&str) -> Option<u64>,
    print: fn(u64) -> String,
) -> ValueType<u64> {
    let schema = json!({"type": "string", "pattern": format!(r"^([0-9]+(\.[0-9]*)?|\.[0-9]+) *({units})$")});
    let read = move |node: &YamlNode| {
        let error = || wrong_format_error(expected, node);
        match node.value {
            YamlValue::Text => parse(&node.raw).ok_or_else(error),
            YamlValue::Int(_) | YamlValue::Float(_) => {
                Err(error().with_help(format!("write the unit: `{}{unit}`", make_excerpt(&node.raw))))
            }
            _ => Err(error()),
        }
    };
    ValueType::new_single_line(accepts, schema, read, move |value| print(*value))
        .with_expected_phrase(expected)
}
