//! `run.straggler`: when a rank that slows down the others is reported.
use crate::{
    keys::{
        key::Key,
        numbers::{fraction_type, integer_type},
        section::section,
        value_type::ValueType,
    },
    yaml::{
        format::format_number,
        tree::{YamlNode, YamlValue},
    },
};
use serde_json::json;

/// The largest value of `run.straggler.steps`.
const MAX_STRAGGLER_STEPS: u64 = 10_000;

section! {
    /// When a rank that slows down the others is reported.
    pub struct StragglerSpec at "run.straggler";
    /// The smallest delay of steps for which a rank is [slow](observability.md#slow-ranks), as a
    /// share of the step time.
    pub share: Option<f64> = Key::new(positive_share_type().or_none("off"), "0.1");
    /// The number of steps for which the rank must be slow.
    pub steps: u32 = Key::new(integer_type(1..=MAX_STRAGGLER_STEPS), "10");
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept numbers above 0 and
/// below 1, and percentages such as `10%`.
fn positive_share_type() -> ValueType<f64> {
    const EXPECTED: &str = "a number above 0 and below 1, or a percentage such as `10%`";
    let schema = json!({"anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "string", "pattern": r"^[0-9]{1,2}(\.[0-9]+)?%$"},
    ]});
    let number = fraction_type().restricted_to(EXPECTED, json!({}), |share| *share > 0.0);
    let read = move |node: &YamlNode| match parse_percentage(node) {
        Some(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => number.read(node).map_err(|error| error.with_expected(EXPECTED)),
    };
    ValueType::new_single_line("number above 0 and below 1, or percentage", schema, read, |share| {
        format_number(*share)
    })
    .with_expected_phrase(EXPECTED)
}

/// Returns the number from 0 to 1 that a percentage such as `10%` stands for; `None` for other
/// text.
fn parse_percentage(node: &YamlNode) -> Option<f64> {
    let digits = node.raw.strip_suffix('%').filter(|_| matches!(node.value, YamlValue::Text))?;
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit())
        && digits.chars().all(|c| c.is_ascii_digit() || c == '.');
    digits.parse::<f64>().ok().filter(|_| is_number).map(|percent| percent / 100.0)
}

impl Default for StragglerSpec {
    /// Returns the values of the section `run.straggler` for stored jobs of earlier versions, which
    /// do not have the section.
    fn default() -> Self {
        StragglerSpec { share: Some(0.1), steps: 10 }
    }
}
