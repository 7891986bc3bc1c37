//! Creates the parsers and printers ([`ValueType`]) for job.yaml keys whose values are integers,
//! other numbers or booleans.
use super::value_type::{ReadResult, ValueType, out_of_range_error, wrong_type_error};
use crate::yaml::{
    format::format_number,
    tree::{YamlNode, YamlValue},
    value_error::ValueError,
};
use diagnostic::codes::job as codes;
use serde_json::json;
use std::{fmt::Display, ops::RangeInclusive};

/// An unsigned integer type that the value of a key of job.yaml can have.
pub(crate) trait Integer: TryFrom<u64> + Display + Copy + 'static {
    /// The largest value of the integer type.
    const LARGEST: u64;
}

impl Integer for u8 {
    const LARGEST: u64 = u8::MAX as u64;
}

impl Integer for u16 {
    const LARGEST: u64 = u16::MAX as u64;
}

impl Integer for u32 {
    const LARGEST: u64 = u32::MAX as u64;
}

impl Integer for u64 {
    const LARGEST: u64 = u64::MAX;
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept integers in a
/// range, such as from 1 to 8.
pub(crate) fn integer_type<T: Integer>(range: RangeInclusive<u64>) -> ValueType<T> {
    let (low, high) = (*range.start(), *range.end());
    let expected = format!("an integer from {low} to {high}");
    let accepts = format!("integer from {low} to {high}");
    build_integer_type(
        low,
        high,
        accepts,
        expected,
        json!({"type": "integer", "minimum": low, "maximum": high}),
    )
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept integers from `low`
/// up to the largest value of the type `T`.
pub(crate) fn integer_at_least_type<T: Integer>(low: u64) -> ValueType<T> {
    let accepts = format!("integer of {low} or more");
    let expected = match T::LARGEST {
        u64::MAX => format!("an integer of {low} or more"),
        high => format!("an integer from {low} to {high}"),
    };
    let schema = json!({"type": "integer", "minimum": low, "maximum": T::LARGEST});
    build_integer_type(low, T::LARGEST, accepts, expected, schema)
}

/// Builds the parser and printer ([`ValueType`]) for job.yaml keys that accept integers from `low`
/// to `high`.
fn build_integer_type<T: Integer>(
    low: u64,
    high: u64,
    accepts: String,
    expected: String,
    schema: serde_json::Value,
) -> ValueType<T> {
    let message = expected.clone();
    let read = move |node: &YamlNode| {
        let value = match node.value {
            YamlValue::Int(n) => u64::try_from(n).ok().filter(|n| (low..=high).contains(n)),
            _ => None,
        };
        value.and_then(|n| T::try_from(n).ok()).ok_or_else(|| integer_error(&message, node))
    };
    ValueType::new_single_line(accepts, schema, read, T::to_string).with_expected_phrase(expected)
}

/// Creates the error that a YAML value is not an accepted integer, with the integer that the user
/// probably meant. `expected` describes the accepted ones.
fn integer_error(expected: &str, node: &YamlNode) -> ValueError {
    let code = match node.value {
        YamlValue::Int(_) => codes::JOB_VALUE_OUT_OF_RANGE,
        _ => codes::JOB_VALUE_TYPE,
    };
    let error = ValueError::unexpected(code, expected, node);
    match guess_intended_integer(node) {
        Some(n) => error.with_help(format!("write `{n}`")),
        None => error,
    }
}

/// Returns the integer that the user most likely meant by a wrong value such as `1e3`, `1_000`,
/// `"8"` or `4.0`; `None` for other values.
fn guess_intended_integer(node: &YamlNode) -> Option<u64> {
    match node.value {
        YamlValue::Float(x) if x.fract() == 0.0 && (0.0..1e15).contains(&x) => Some(x as u64),
        YamlValue::Text => node.raw.replace(['_', ',', ' '], "").parse().ok(),
        _ => None,
    }
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept finite numbers for
/// which the function `fits` returns true. `accepts` describes them, and `schema` has the keywords
/// of JSON Schema for their range.
fn number_type(accepts: &'static str, schema: serde_json::Value, fits: fn(f64) -> bool) -> ValueType<f64> {
    let expected = format!("a {accepts}");
    let read = move |node: &YamlNode| {
        let x = match node.value {
            YamlValue::Int(n) => n as f64,
            YamlValue::Float(x) => x,
            _ => return Err(wrong_type_error(expected.as_str(), node)),
        };
        if x.is_finite() && fits(x) { Ok(x) } else { Err(out_of_range_error(expected.as_str(), node)) }
    };
    ValueType::new_single_line(accepts, schema, read, |x| format_number(*x))
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept numbers above 0.
pub(crate) fn positive_number_type() -> ValueType<f64> {
    number_type("number above 0", json!({"type": "number", "exclusiveMinimum": 0}), |x| x > 0.0)
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept positive numbers
/// within the range of f32, the type with which kernels compute.
pub(crate) fn positive_f32_type() -> ValueType<f64> {
    number_type("number above 0", json!({"type": "number", "exclusiveMinimum": 0}), |x| {
        x as f32 > 0.0 && (x as f32).is_finite()
    })
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept numbers of 0 or
/// more.
pub(crate) fn non_negative_number_type() -> ValueType<f64> {
    number_type("number of 0 or more", json!({"type": "number", "minimum": 0}), |x| x >= 0.0)
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept numbers of 0 or
/// more within the range of f32.
pub(crate) fn non_negative_f32_type() -> ValueType<f64> {
    number_type("number of 0 or more", json!({"type": "number", "minimum": 0}), |x| {
        x >= 0.0 && (x as f32).is_finite()
    })
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept numbers of 0 or
/// less.
pub(crate) fn non_positive_number_type() -> ValueType<f64> {
    number_type("number of 0 or less", json!({"type": "number", "maximum": 0}), |x| x <= 0.0)
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept shares: numbers
/// from 0 to below 1.
pub(crate) fn fraction_type() -> ValueType<f64> {
    let schema = json!({"type": "number", "minimum": 0, "exclusiveMaximum": 1});
    number_type("number from 0 to below 1", schema, |x| (0.0..1.0).contains(&x))
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept `true` and `false`.
pub(crate) fn boolean_type() -> ValueType<bool> {
    ValueType::new_single_line("`true` or `false`", json!({"type": "boolean"}), read_boolean, bool::to_string)
}

/// Reads a YAML value that must be `true` or `false`. For another spelling, such as `yes` or `0`,
/// the error suggests the right one.
fn read_boolean(node: &YamlNode) -> ReadResult<bool> {
    match node.value {
        YamlValue::Bool(b) => Ok(b),
        _ => {
            let error = wrong_type_error("`true` or `false`", node);
            Err(match node.raw.to_ascii_lowercase().as_str() {
                "yes" | "on" | "y" | "1" | "true" => error.with_help("write `true`"),
                "no" | "off" | "n" | "0" | "false" => error.with_help("write `false`"),
                _ => error,
            })
        }
    }
}
