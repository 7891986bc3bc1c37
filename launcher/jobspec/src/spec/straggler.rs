//! `run.straggler`: when a rank that slows down the others is reported.
use crate::keys::{
    key::Key,
    numbers::{integer, share},
    section::section,
    value_type::ValueType,
};
use serde_json::json;

/// The largest value of `run.straggler.steps`.
const MAX_STEPS: u64 = 10_000;

section! {
    /// When a rank that slows down the others is reported.
    pub struct StragglerSpec at "run.straggler";
    /// The share of the step time that a [slow rank](observability.md#slow-ranks) must cost.
    pub share: Option<f64> = Key::new(positive_share().or_none("off"), "0.1");
    /// The number of steps for which the rank must be slow.
    pub steps: u32 = Key::new(integer(1..=MAX_STEPS), "10");
}

/// Returns a [`ValueType`] that accepts numbers above 0 and below 1.
fn positive_share() -> ValueType<f64> {
    let schema = json!({"exclusiveMinimum": 0});
    share()
        .limited("a number above 0 and below 1", schema, |share| *share > 0.0)
        .documented_as("number above 0 and below 1")
}

impl Default for StragglerSpec {
    /// Returns the values of stored jobs of earlier versions, which do not have the section.
    fn default() -> Self {
        StragglerSpec { share: Some(0.1), steps: 10 }
    }
}
