//! [`MicroBatch`]: the tokens and labels of one forward pass.

/// The inputs and labels of one micro-batch, which is processed in one forward pass. Each vector
/// has one element per token, sequence after sequence.
#[derive(Clone, Debug, Default)]
pub struct MicroBatch {
    /// The number of sequences.
    pub sequences: usize,
    /// The number of tokens per sequence.
    pub seq_len: usize,
    /// The input tokens, each below the vocabulary size.
    pub tokens: Vec<u32>,
    /// The target token of each position, or [`device::ops::IGNORE_LABEL`] for no loss.
    pub labels: Vec<u32>,
    /// For each token, the first position of its sequence to which the token attends. This is the
    /// beginning of the token's document.
    pub starts: Vec<u32>,
    /// For each token, the first position to which the token attends in sliding-window layers.
    /// Empty if the model has no sliding-window layers.
    pub window_starts: Vec<u32>,
    /// In training, the number of the first sequence within the run, which selects the dropout
    /// masks. `None` disables dropout.
    pub first_sample: Option<u64>,
}

impl MicroBatch {
    /// Returns the number of tokens, which is the number of rows of every activation.
    pub fn row_count(&self) -> usize {
        self.sequences * self.seq_len
    }

    /// Computes for each token the first position to which it attends in layers where attention
    /// covers only the last `window` tokens, including the token itself.
    pub fn set_window_starts(&mut self, window: usize) {
        let seq_len = self.seq_len.max(1);
        let window_start =
            |(i, &start): (usize, &u32)| start.max((i % seq_len + 1).saturating_sub(window) as u32);
        self.window_starts.clear();
        self.window_starts.extend(self.starts.iter().enumerate().map(window_start));
    }

    /// Counts the positions of the micro-batch whose label counts for the loss.
    pub fn count_targets(&self) -> u64 {
        self.labels.iter().filter(|&&l| l != device::ops::IGNORE_LABEL).count() as u64
    }
}
