//! [`Packer`]: divides a stream of tokens into samples of `seq_len` inputs.
//!
//! A sample is a pure function of the stream and the number of the sample.
//!
//! In the stream, one end-of-document token (EOD) follows each document. The label of an input is
//! the next token of its document. An EOD has the label [`IGNORE_INDEX`], so that the end of a
//! document does not predict the beginning of the next. `starts[i]` is the position in the sample
//! at which the document of input `i` begins: input `i` attends to `starts[i] ..= i`.
//!
//! - **Packed**: the inputs of sample `s` are the tokens `s * seq_len .. (s + 1) * seq_len` of the
//!   stream. A sample may contain several documents, and a document may span several samples. Every
//!   token is an input exactly once per epoch, except the last `tokens % seq_len` tokens.
//! - **Not packed**: each sample is one document, or a piece of a document with more than `seq_len`
//!   tokens. The document's EOD is the last label and not an input; every other token is an input
//!   exactly once. The sample is padded with EODs that have no label and attend only to themselves.
//!
//! A token that does not count for the loss is an input, but not a label: the label of the input
//! before it is [`IGNORE_INDEX`].
//!
//! A binary search over the documents locates a sample; nothing is stored per epoch.
use super::token_cache::{NO_LOSS_BIT, TokenizedDocuments};

/// The label of an input token that does not count for the loss. Corresponds to `ignore_index` of
/// PyTorch's cross-entropy.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// The number of documents per entry of the index that maps sample numbers to documents, used when
/// each sample contains a single document.
const INDEX_STRIDE: u64 = 128;

/// Divides the token stream of a data source into samples of `seq_len` inputs. Packed samples cross
/// the boundaries of documents, unpacked ones do not.
#[derive(Debug)]
pub(crate) struct Packer {
    /// Number of inputs of a sample.
    seq_len: u64,
    /// The end-of-document token.
    eod: u32,
    /// Number of samples in an epoch.
    samples: u64,
    /// If samples are not packed, entry `i` is the number of samples before document
    /// `i * INDEX_STRIDE`. `None` if samples are packed.
    unpacked_index: Option<Vec<u64>>,
}

/// The buffers for one sample, each with one element per token: input token, label, and the
/// position at which the token's document begins.
pub(crate) struct SampleBuffers<'a> {
    /// The input tokens.
    pub(crate) tokens: &'a mut [u32],
    /// The next token of each input, or [`IGNORE_INDEX`].
    pub(crate) labels: &'a mut [u32],
    /// For each input, the position in the sample at which the input's document begins.
    pub(crate) starts: &'a mut [u32],
}

impl Packer {
    /// Creates a packer that divides the token stream `stream` into samples of `seq_len` inputs,
    /// with several documents per sample if `pack` is set.
    pub(crate) fn new(stream: &impl TokenizedDocuments, seq_len: u32, pack: bool, eod: u32) -> Self {
        let (documents, seq_len) = (stream.document_count(), u64::from(seq_len));
        if pack {
            return Packer {
                seq_len,
                eod,
                samples: stream.document_offset(documents) / seq_len,
                unpacked_index: None,
            };
        }
        let (mut index, mut samples) = (Vec::new(), 0);
        for d in 0..documents {
            if d.is_multiple_of(INDEX_STRIDE) {
                index.push(samples);
            }
            samples += count_samples_of_document(stream, d, seq_len);
        }
        Packer { seq_len, eod, samples, unpacked_index: Some(index) }
    }

    /// Returns the number of samples per epoch, which is the number of samples into which the token
    /// stream is divided.
    pub(crate) fn len(&self) -> u64 {
        self.samples
    }

    /// Writes sample number `s` to the buffers `out`: its tokens, its labels, and for each token
    /// the position at which the token's document begins.
    pub(crate) fn write_sample(&self, stream: &impl TokenizedDocuments, s: u64, out: SampleBuffers) {
        let SampleBuffers { tokens, labels, starts } = out;
        let raw = SampleBuffers { tokens: &mut *tokens, labels: &mut *labels, starts };
        match &self.unpacked_index {
            None => self.write_packed_sample(stream, s * self.seq_len, raw),
            Some(index) => {
                self.write_unpacked_sample(stream, self.locate_unpacked_sample(stream, index, s), raw)
            }
        }
        if stream.has_loss_mask() {
            tokens.iter_mut().for_each(|t| *t &= !NO_LOSS_BIT);
            labels.iter_mut().filter(|l| **l & NO_LOSS_BIT != 0).for_each(|l| *l = IGNORE_INDEX);
        }
    }

    /// Returns how many input tokens of sample number `s` have a label other than [`IGNORE_INDEX`],
    /// and so count for the loss.
    pub(crate) fn count_targets(&self, stream: &impl TokenizedDocuments, s: u64) -> u64 {
        if stream.has_loss_mask() {
            let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![0; self.seq_len as usize]);
            let out = SampleBuffers { tokens: &mut tokens, labels: &mut labels, starts: &mut starts };
            self.write_sample(stream, s, out);
            return labels.iter().filter(|&&l| l != IGNORE_INDEX).count() as u64;
        }
        match &self.unpacked_index {
            None => {
                let (from, to) = (s * self.seq_len, (s + 1) * self.seq_len);
                self.seq_len - (count_documents_ended_by(stream, to) - count_documents_ended_by(stream, from))
            }
            Some(index) => {
                let (from, to) = self.locate_unpacked_sample(stream, index, s);
                to - from
            }
        }
    }

    /// Writes the tokens, labels and document starts of one sample, which begins at token number
    /// `base` of the stream, to the buffers `out`.
    fn write_packed_sample(&self, stream: &impl TokenizedDocuments, base: u64, out: SampleBuffers) {
        let length = out.tokens.len();
        stream.read_tokens(base, out.tokens);
        let mut document = count_documents_ended_by(stream, base);
        let mut from = 0;
        while from < length {
            let end = stream.document_offset(document + 1) - base;
            let to = end.min(length as u64) as usize;
            out.starts[from..to].fill(from as u32);
            out.labels[from..to - 1].copy_from_slice(&out.tokens[from + 1..to]);
            out.labels[to - 1] =
                if end > length as u64 { read_token(stream, base + to as u64) } else { IGNORE_INDEX };
            from = to;
            document += 1;
        }
    }

    /// Writes a sample of a single document, whose inputs are the tokens `from..to` of the stream.
    fn write_unpacked_sample(
        &self,
        stream: &impl TokenizedDocuments,
        (from, to): (u64, u64),
        out: SampleBuffers,
    ) {
        let n = (to - from) as usize;
        stream.read_tokens(from, &mut out.tokens[..n]);
        out.labels[..n - 1].copy_from_slice(&out.tokens[1..n]);
        out.labels[n - 1] = read_token(stream, to);
        out.starts[..n].fill(0);
        out.tokens[n..].fill(self.eod);
        out.labels[n..].fill(IGNORE_INDEX);
        for (i, start) in out.starts.iter_mut().enumerate().skip(n) {
            *start = i as u32;
        }
    }

    /// Returns the range of token numbers in the stream that are the inputs of sample number `s`,
    /// for data in which each sample contains a single document. `index` is the content of
    /// `unpacked_index`.
    fn locate_unpacked_sample(&self, stream: &impl TokenizedDocuments, index: &[u64], s: u64) -> (u64, u64) {
        let entry = index.partition_point(|&before| before <= s) - 1;
        let mut document = entry as u64 * INDEX_STRIDE;
        let mut within = s - index[entry];
        loop {
            let n = count_samples_of_document(stream, document, self.seq_len);
            if within < n {
                break;
            }
            within -= n;
            document += 1;
        }
        let from = stream.document_offset(document) + within * self.seq_len;
        (from, (from + self.seq_len).min(stream.document_offset(document + 1) - 1))
    }
}

/// Returns the number of samples into which document `d` is divided if documents are not packed
/// together: its length divided by `seq_len`, rounded up. The length does not include the
/// end-of-document token, which is a label but not an input.
fn count_samples_of_document(stream: &impl TokenizedDocuments, d: u64, seq_len: u64) -> u64 {
    (stream.document_offset(d + 1) - 1 - stream.document_offset(d)).div_ceil(seq_len)
}

/// Counts the documents that end at or before token number `at` of the stream. The count is also
/// the number, from 0, of the document that contains the token.
fn count_documents_ended_by(stream: &impl TokenizedDocuments, at: u64) -> u64 {
    let (mut low, mut high) = (0, stream.document_count());
    while low < high {
        let middle = low + (high - low) / 2;
        if stream.document_offset(middle + 1) <= at { low = middle + 1 } else { high = middle }
    }
    low
}

/// Reads token number `at` of the stream.
fn read_token(stream: &impl TokenizedDocuments, at: u64) -> u32 {
    let mut one = [0];
    stream.read_tokens(at, &mut one);
    one[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A stream of tokens in memory, for tests.
    struct MemoryStream {
        tokens: Vec<u32>,
        offsets: Vec<u64>,
    }

    const EOD: u32 = 99;

    impl MemoryStream {
        /// Creates documents with the given lengths, which do not include the end-of-document
        /// token. Every other token is unique.
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

    impl TokenizedDocuments for MemoryStream {
        fn has_loss_mask(&self) -> bool {
            false
        }
        fn document_count(&self) -> u64 {
            self.offsets.len() as u64 - 1
        }
        fn document_offset(&self, d: u64) -> u64 {
            self.offsets[d as usize]
        }
        fn read_tokens(&self, from: u64, out: &mut [u32]) {
            out.copy_from_slice(&self.tokens[from as usize..from as usize + out.len()]);
        }
    }

    /// One sample: its tokens, its labels, and the position at which the document of each token
    /// starts.
    type SampleVectors = [Vec<u32>; 3];

    /// Returns the tokens, labels and starts of sample `s` of a stream, as vectors.
    fn read_sample(packer: &Packer, stream: &MemoryStream, s: u64) -> SampleVectors {
        let n = packer.seq_len as usize;
        let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![7_777_777; n]);
        packer.write_sample(
            stream,
            s,
            SampleBuffers { tokens: &mut tokens, labels: &mut labels, starts: &mut starts },
        );
        [tokens, labels, starts]
    }

    /// Reads all samples of a stream, and checks that their labels are counted correctly.
    fn read_every_sample(stream: &MemoryStream, seq_len: u32, pack: bool) -> Vec<SampleVectors> {
        let packer = Packer::new(stream, seq_len, pack, EOD);
        (0..packer.len())
            .map(|s| {
                let sample = read_sample(&packer, stream, s);
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
            read_every_sample(&stream, 4, true),
            [
                [vec![1000, 1001, EOD, 1003], vec![1001, EOD, i, EOD], vec![0, 0, 0, 3]],
                [vec![EOD, 1005, 1006, 1007], vec![i, 1006, 1007, 1008], vec![0, 1, 1, 1]],
            ]
        );
        let packer = Packer::new(&stream, 12, true, EOD);
        assert_eq!(packer.len(), 0);
        assert_eq!(read_every_sample(&stream, 11, true).len(), 1);
    }

    #[test]
    fn unpacked_samples_equal_hand_written_ones() {
        let stream = MemoryStream::new(&[2, 1, 5]);
        let i = IGNORE_INDEX;
        assert_eq!(
            read_every_sample(&stream, 4, false),
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
            assert!(read_every_sample(&MemoryStream::new(&[]), 4, pack).is_empty());
        }
    }

    /// Checks that the labels and starts of a sample, packed or not, are those that follow from the
    /// stream.
    fn assert_inputs_match_stream(stream: &MemoryStream, sample: &SampleVectors) {
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
            let packed = read_every_sample(&stream, seq_len, true);
            packed.iter().for_each(|s| assert_inputs_match_stream(&stream, s));
            let inputs: Vec<u32> = packed.iter().flat_map(|s| s[0].clone()).collect();
            let whole = stream.tokens.len() / seq_len as usize * seq_len as usize;
            prop_assert_eq!(&inputs[..], &stream.tokens[..whole]);

            let single = read_every_sample(&stream, seq_len, false);
            single.iter().for_each(|s| assert_inputs_match_stream(&stream, s));
            let without_eod = |t: &u32| *t != EOD;
            let inputs: Vec<u32> = single.iter().flat_map(|s| s[0].clone()).filter(without_eod).collect();
            let want: Vec<u32> = stream.tokens.iter().copied().filter(without_eod).collect();
            prop_assert_eq!(inputs, want);
            prop_assert!(single.iter().all(|s| s[1][0] != IGNORE_INDEX));
        }
    }
}
