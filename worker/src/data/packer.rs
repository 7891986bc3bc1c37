//! [`Packer`]: cuts a token stream into samples of `seq_len` inputs.
//!
//! Each sample is a pure function of the stream and the sample's number.
//!
//! In the stream, one end-of-document token (EOD) follows each document. The label of an input is
//! the next token of its document. An EOD has the label [`IGNORE_INDEX`], so that the end of a
//! document does not predict the beginning of the next. `starts[i]` is the position in the sample
//! at which the document of input `i` begins: input `i` attends to `starts[i] ..= i`.
//!
//! - **Packed**: the inputs of sample `s` are the tokens `s * seq_len .. (s + 1) * seq_len` of the
//!   stream. A sample may contain several documents, and a document may span several samples. Every
//!   token is an input exactly once per epoch, except the last `tokens % seq_len` tokens.
//! - **Not packed**: each sample is one document, or one of the consecutive pieces of a document
//!   that is longer. Its EOD is the last label and not an input; every other token is an input
//!   exactly once. The sample is padded with EODs that have no label and attend only to themselves.
//!
//! A token without loss is an input like any other, but the label that it would be is
//! [`IGNORE_INDEX`].
//!
//! A binary search over the documents locates a sample; nothing is stored per epoch.
use super::token_cache::{NO_LOSS, TokenStream};

/// The label of an input that does not count for the loss; `ignore_index` of PyTorch's cross
/// entropy.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// Number of documents between two entries of the index of unpacked samples.
const INDEX_STRIDE: u64 = 128;

/// Cuts a token stream into samples.
#[derive(Debug)]
pub(crate) struct Packer {
    seq_len: u64,
    eod: u32,
    samples: u64,
    /// For unpacked samples, the number of samples before document `i * INDEX_STRIDE`.
    index: Option<Vec<u64>>,
}

/// The buffers of one sample, each of `seq_len` elements.
pub(crate) struct SampleBuffers<'a> {
    /// The inputs.
    pub(crate) tokens: &'a mut [u32],
    /// The next token of each input, or [`IGNORE_INDEX`].
    pub(crate) labels: &'a mut [u32],
    /// The position at which the document of each input begins.
    pub(crate) starts: &'a mut [u32],
}

impl Packer {
    /// Packs the documents of `stream` if `pack` is set. `seq_len` is at least 1.
    pub(crate) fn new(stream: &impl TokenStream, seq_len: u32, pack: bool, eod: u32) -> Self {
        let (documents, seq_len) = (stream.documents(), u64::from(seq_len));
        if pack {
            return Packer { seq_len, eod, samples: stream.offset(documents) / seq_len, index: None };
        }
        let (mut index, mut samples) = (Vec::new(), 0);
        for d in 0..documents {
            if d.is_multiple_of(INDEX_STRIDE) {
                index.push(samples);
            }
            samples += count_pieces(stream, d, seq_len);
        }
        Packer { seq_len, eod, samples, index: Some(index) }
    }

    /// Number of samples in an epoch.
    pub(crate) fn len(&self) -> u64 {
        self.samples
    }

    /// Writes sample `s` to the buffers.
    pub(crate) fn fill(&self, stream: &impl TokenStream, s: u64, out: SampleBuffers) {
        let SampleBuffers { tokens, labels, starts } = out;
        let raw = SampleBuffers { tokens: &mut *tokens, labels: &mut *labels, starts };
        match &self.index {
            None => self.fill_packed(stream, s * self.seq_len, raw),
            Some(index) => self.fill_unpacked(stream, self.piece_range(stream, index, s), raw),
        }
        if stream.has_loss_mask() {
            tokens.iter_mut().for_each(|t| *t &= !NO_LOSS);
            labels.iter_mut().filter(|l| **l & NO_LOSS != 0).for_each(|l| *l = IGNORE_INDEX);
        }
    }

    /// Number of inputs of sample `s` that have a label.
    pub(crate) fn count_targets(&self, stream: &impl TokenStream, s: u64) -> u64 {
        if stream.has_loss_mask() {
            let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![0; self.seq_len as usize]);
            let out = SampleBuffers { tokens: &mut tokens, labels: &mut labels, starts: &mut starts };
            self.fill(stream, s, out);
            return labels.iter().filter(|&&l| l != IGNORE_INDEX).count() as u64;
        }
        match &self.index {
            None => {
                let (from, to) = (s * self.seq_len, (s + 1) * self.seq_len);
                self.seq_len - (documents_ended(stream, to) - documents_ended(stream, from))
            }
            Some(index) => {
                let (from, to) = self.piece_range(stream, index, s);
                to - from
            }
        }
    }

    /// Writes the packed sample whose first input is token `base` of the stream.
    fn fill_packed(&self, stream: &impl TokenStream, base: u64, out: SampleBuffers) {
        let length = out.tokens.len();
        stream.read(base, out.tokens);
        let mut document = documents_ended(stream, base);
        let mut from = 0;
        while from < length {
            let end = stream.offset(document + 1) - base;
            let to = end.min(length as u64) as usize;
            out.starts[from..to].fill(from as u32);
            out.labels[from..to - 1].copy_from_slice(&out.tokens[from + 1..to]);
            out.labels[to - 1] =
                if end > length as u64 { read_token(stream, base + to as u64) } else { IGNORE_INDEX };
            from = to;
            document += 1;
        }
    }

    /// Writes the unpacked sample whose inputs are the tokens `from..to` of the stream, at least
    /// one, in one document.
    fn fill_unpacked(&self, stream: &impl TokenStream, (from, to): (u64, u64), out: SampleBuffers) {
        let n = (to - from) as usize;
        stream.read(from, &mut out.tokens[..n]);
        out.labels[..n - 1].copy_from_slice(&out.tokens[1..n]);
        out.labels[n - 1] = read_token(stream, to);
        out.starts[..n].fill(0);
        out.tokens[n..].fill(self.eod);
        out.labels[n..].fill(IGNORE_INDEX);
        for (i, start) in out.starts.iter_mut().enumerate().skip(n) {
            *start = i as u32;
        }
    }

    /// The range of the stream's tokens that are the inputs of the unpacked sample `s`.
    fn piece_range(&self, stream: &impl TokenStream, index: &[u64], s: u64) -> (u64, u64) {
        let entry = index.partition_point(|&before| before <= s) - 1;
        let mut document = entry as u64 * INDEX_STRIDE;
        let mut within = s - index[entry];
        loop {
            let n = count_pieces(stream, document, self.seq_len);
            if within < n {
                break;
            }
            within -= n;
            document += 1;
        }
        let from = stream.offset(document) + within * self.seq_len;
        (from, (from + self.seq_len).min(stream.offset(document + 1) - 1))
    }
}

/// Number of unpacked samples of document `d`, whose EOD is not an input.
fn count_pieces(stream: &impl TokenStream, d: u64, seq_len: u64) -> u64 {
    (stream.offset(d + 1) - 1 - stream.offset(d)).div_ceil(seq_len)
}

/// Number of documents that end at or before token `at`. For a token within the stream, this is the
/// number of its document.
fn documents_ended(stream: &impl TokenStream, at: u64) -> u64 {
    let (mut low, mut high) = (0, stream.documents());
    while low < high {
        let middle = low + (high - low) / 2;
        if stream.offset(middle + 1) <= at { low = middle + 1 } else { high = middle }
    }
    low
}

fn read_token(stream: &impl TokenStream, at: u64) -> u32 {
    let mut one = [0];
    stream.read(at, &mut one);
    one[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A token stream in memory.
    struct MemoryStream {
        tokens: Vec<u32>,
        offsets: Vec<u64>,
    }

    const EOD: u32 = 99;

    impl MemoryStream {
        /// Documents of these lengths (without EOD); every token but EOD is unique.
        fn new(lengths: &[usize]) -> Self {
            let (mut tokens, mut offsets) = (Vec::new(), vec![0]);
            for &n in lengths {
                let from = 1000 + tokens.len() as u32;
                tokens.extend((0..n as u32).map(|i| from + i));
                tokens.push(EOD);
                offsets.push(tokens.len() as u64);
            }
            MemoryStream { tokens, offsets }
        }
    }

    impl TokenStream for MemoryStream {
        fn has_loss_mask(&self) -> bool {
            false
        }
        fn documents(&self) -> u64 {
            self.offsets.len() as u64 - 1
        }
        fn offset(&self, d: u64) -> u64 {
            self.offsets[d as usize]
        }
        fn read(&self, from: u64, out: &mut [u32]) {
            out.copy_from_slice(&self.tokens[from as usize..from as usize + out.len()]);
        }
    }

    type Sample = [Vec<u32>; 3];

    fn sample(packer: &Packer, stream: &MemoryStream, s: u64) -> Sample {
        let n = packer.seq_len as usize;
        let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![7_777_777; n]);
        packer.fill(
            stream,
            s,
            SampleBuffers { tokens: &mut tokens, labels: &mut labels, starts: &mut starts },
        );
        [tokens, labels, starts]
    }

    fn every_sample(stream: &MemoryStream, seq_len: u32, pack: bool) -> Vec<Sample> {
        let packer = Packer::new(stream, seq_len, pack, EOD);
        (0..packer.len())
            .map(|s| {
                let sample = sample(&packer, stream, s);
                let targets = sample[1].iter().filter(|&&l| l != IGNORE_INDEX).count() as u64;
                assert_eq!(packer.count_targets(stream, s), targets);
                sample
            })
            .collect()
    }

    #[test]
    fn packed_samples_equal_hand_written_ones() {
        let stream = MemoryStream::new(&[2, 1, 5]);
        // 1000 1001 E | 1003 E | 1005 1006 1007 1008 1009 E
        let i = IGNORE_INDEX;
        assert_eq!(
            every_sample(&stream, 4, true),
            [
                [vec![1000, 1001, EOD, 1003], vec![1001, EOD, i, EOD], vec![0, 0, 0, 3]],
                [vec![EOD, 1005, 1006, 1007], vec![i, 1006, 1007, 1008], vec![0, 1, 1, 1]],
            ]
        );
        let packer = Packer::new(&stream, 12, true, EOD);
        assert_eq!(packer.len(), 0);
        assert_eq!(every_sample(&stream, 11, true).len(), 1);
    }

    #[test]
    fn unpacked_samples_equal_hand_written_ones() {
        let stream = MemoryStream::new(&[2, 1, 5]);
        let i = IGNORE_INDEX;
        assert_eq!(
            every_sample(&stream, 4, false),
            [
                [vec![1000, 1001, EOD, EOD], vec![1001, EOD, i, i], vec![0, 0, 2, 3]],
                [vec![1003, EOD, EOD, EOD], vec![EOD, i, i, i], vec![0, 1, 2, 3]],
                [vec![1005, 1006, 1007, 1008], vec![1006, 1007, 1008, 1009], vec![0, 0, 0, 0]],
                [vec![1009, EOD, EOD, EOD], vec![EOD, i, i, i], vec![0, 1, 2, 3]],
            ]
        );
    }

    #[test]
    fn an_empty_stream_has_no_samples() {
        for pack in [true, false] {
            assert!(every_sample(&MemoryStream::new(&[]), 4, pack).is_empty());
        }
    }

    /// Checks every input against the definitions above, which hold for packed and unpacked
    /// samples.
    fn check_inputs(stream: &MemoryStream, sample: &Sample) {
        let [tokens, labels, starts] = sample;
        for i in 0..tokens.len() {
            let start = starts[i] as usize;
            assert!(start <= i);
            // The inputs from `start` to `i` belong to one document.
            assert!(tokens[start..i].iter().all(|&t| t != EOD));
            assert!(starts[start..=i].iter().all(|&s| s as usize == start));
            if tokens[i] == EOD {
                assert_eq!(labels[i], IGNORE_INDEX);
            } else {
                // Tokens are unique, so a token determines its position in the stream.
                assert_eq!(labels[i], stream.tokens[(tokens[i] - 1000) as usize + 1]);
            }
            if i > 0 && start == i {
                // A start follows an EOD, or is padding after the last input of a document.
                assert!(tokens[i - 1] == EOD || (labels[i - 1] == EOD && tokens[i] == EOD));
            }
        }
    }

    proptest! {
        #[test]
        fn every_token_is_an_input_exactly_once(
            lengths in proptest::collection::vec(prop_oneof![1usize..4, 1usize..80], 0..400),
            seq_len in 1u32..40,
        ) {
            let stream = MemoryStream::new(&lengths);
            let packed = every_sample(&stream, seq_len, true);
            packed.iter().for_each(|s| check_inputs(&stream, s));
            let inputs: Vec<u32> = packed.iter().flat_map(|s| s[0].clone()).collect();
            let whole = stream.tokens.len() / seq_len as usize * seq_len as usize;
            prop_assert_eq!(&inputs[..], &stream.tokens[..whole]);

            let single = every_sample(&stream, seq_len, false);
            single.iter().for_each(|s| check_inputs(&stream, s));
            let without_eod = |t: &u32| *t != EOD;
            let inputs: Vec<u32> = single.iter().flat_map(|s| s[0].clone()).filter(without_eod).collect();
            let want: Vec<u32> = stream.tokens.iter().copied().filter(without_eod).collect();
            prop_assert_eq!(inputs, want);
            prop_assert!(single.iter().all(|s| s[1][0] != IGNORE_INDEX));
        }
    }
}
