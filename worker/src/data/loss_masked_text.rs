//! [`LossMaskedText`]: a text, and which parts of it count for the loss.
use super::token_cache::NO_LOSS_BIT;
use std::ops::Range;

/// A text with the byte ranges that count for the loss, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LossMaskedText {
    /// The complete text.
    pub(crate) text: String,
    /// The byte ranges of `text` that count for the loss, in rising order.
    pub(crate) loss_ranges: Vec<Range<usize>>,
}

impl LossMaskedText {
    /// Returns a function that takes a token with its byte range, and sets the bit [`NO_LOSS_BIT`]
    /// in the token if no byte of it counts for the loss. The arguments are the token and the start
    /// and end of its bytes. Tokens must be passed in the order of the text.
    pub(crate) fn create_mask(&self) -> impl FnMut(u32, usize, usize) -> u32 {
        let mut loss_ranges = self.loss_ranges.iter().peekable();
        move |token, from, to| {
            while loss_ranges.next_if(|r| r.end <= from).is_some() {}
            let is_target = loss_ranges.peek().is_some_and(|r| r.start < to && from < r.end);
            if is_target { token } else { token | NO_LOSS_BIT }
        }
    }
}
