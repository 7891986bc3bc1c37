//! [`LossMaskedText`]: a text of which only parts count for the loss.
use std::ops::Range;

/// A text with the byte ranges that count for the loss, in rising order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LossMaskedText {
    /// The complete text.
    pub(crate) text: String,
    /// Byte ranges of `text`.
    pub(crate) loss_ranges: Vec<Range<usize>>,
}
