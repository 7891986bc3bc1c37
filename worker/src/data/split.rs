//! [`Split`]: the division of the data into training data and data that is held out for evaluation.
use serde::{Deserialize, Serialize};

/// One part of the data: training data, or data that is held out for evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Split {
    /// The data that the model is trained on.
    Train,
    /// The data that the model is evaluated on.
    HeldOut,
}

/// A filter that selects all text of a data source, only its training data, or only its held-out
/// data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum SplitFilter {
    /// Accepts every piece.
    All,
    /// Accepts only training data or only held-out data, as the first value states. The number is
    /// the held-out share, from 0 to 1.
    Only(Split, f64),
}

impl SplitFilter {
    /// Returns whether the filter selects the text `piece`, which is one record or, in a text file,
    /// a chunk of at most 16 KiB.
    pub(crate) fn accepts_piece(self, piece: &str) -> bool {
        match self {
            SplitFilter::All => true,
            SplitFilter::Only(split, share) => (split == Split::HeldOut) == is_held_out(piece, share),
        }
    }
}

/// Returns whether a piece of text is held out for evaluation, which depends on its hash, so that
/// on average the fraction `share` (0 to 1) of all pieces is held out.
pub(super) fn is_held_out(piece: &str, share: f64) -> bool {
    let digest = blake3::derive_key("launch 2026 held-out split v1", piece.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    // An f64 represents the top 53 bits exactly.
    ((u64::from_le_bytes(first) >> 11) as f64) < share * (1u64 << 53) as f64
}
