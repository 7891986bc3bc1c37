//! The token stream cut into samples of `seq_len` inputs, each a pure function of the stream and the sample's number.
//!
//! In the stream every document is followed by one end-of-document token (EOD). The label of an input is the token after it in its document; an EOD has none
//! ([`IGNORE`]), so no document's end predicts another's beginning. `starts[i]` is the place in the sample where the piece of the document
//! that input i belongs to begins: input i attends to `starts[i] ..= i`.
//!
//! - **Packed**: sample s has the inputs `s * seq_len .. (s + 1) * seq_len` of the stream, so a sample may hold several documents and a document go over
//!   several samples; every token of the data is an input exactly once an epoch, except the last `tokens % seq_len`, which no sample holds.
//! - **Not packed**: each sample is one document or, when it is longer, one of its consecutive pieces; its EOD is the last label, not an input. Every other
//!   token is an input exactly once. The rest of a sample is EODs without a label that attend to themselves alone.
//!
//! A marked token of the stream is an input like any other but no target: what it would be the label of has [`IGNORE`] instead.
//!
//! A sample is found by binary search over the documents; nothing is stored per epoch.
use super::cache::{NO_LOSS, TokenStream};

/// Label of an input that predicts nothing.
pub const IGNORE: u32 = u32::MAX;

/// Documents between two entries of the index of samples that are not packed.
const STRIDE: u64 = 128;

/// How a stream is cut into samples.
#[derive(Debug)]
pub(crate) struct Packer {
    seq_len: u64,
    eod: u32,
    samples: u64,
    /// Not packed: the number of samples before document `i * STRIDE`.
    index: Option<Vec<u64>>,
}

/// Where one sample is written; each slice has `seq_len` elements.
pub(crate) struct SampleOut<'a> {
    pub(crate) tokens: &'a mut [u32],
    pub(crate) labels: &'a mut [u32],
    pub(crate) starts: &'a mut [u32],
}

impl Packer {
    /// `seq_len` ≥ 1.
    pub(crate) fn new(stream: &impl TokenStream, seq_len: u32, pack: bool, eod: u32) -> Self {
        let (documents, seq_len) = (stream.documents(), u64::from(seq_len));
        if pack {
            return Packer { seq_len, eod, samples: stream.offset(documents) / seq_len, index: None };
        }
        let (mut index, mut samples) = (Vec::new(), 0);
        for d in 0..documents {
            if d.is_multiple_of(STRIDE) {
                index.push(samples);
            }
            samples += pieces(stream, d, seq_len);
        }
        Packer { seq_len, eod, samples, index: Some(index) }
    }

    /// Samples in an epoch.
    pub(crate) fn len(&self) -> u64 {
        self.samples
    }

    /// Writes sample `s`.
    pub(crate) fn fill(&self, stream: &impl TokenStream, s: u64, out: SampleOut) {
        let SampleOut { tokens, labels, starts } = out;
        let raw = SampleOut { tokens: &mut *tokens, labels: &mut *labels, starts };
        match &self.index {
            None => self.fill_packed(stream, s * self.seq_len, raw),
            Some(index) => self.fill_single(stream, self.piece(stream, index, s), raw),
        }
        if stream.marked() {
            tokens.iter_mut().for_each(|t| *t &= !NO_LOSS);
            labels.iter_mut().filter(|l| **l & NO_LOSS != 0).for_each(|l| *l = IGNORE);
        }
    }

    /// Number of inputs of sample `s` that have a label.
    pub(crate) fn targets(&self, stream: &impl TokenStream, s: u64) -> u64 {
        if stream.marked() {
            let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![0; self.seq_len as usize]);
            let out = SampleOut { tokens: &mut tokens, labels: &mut labels, starts: &mut starts };
            self.fill(stream, s, out);
            return labels.iter().filter(|&&l| l != IGNORE).count() as u64;
        }
        match &self.index {
            None => {
                let (from, to) = (s * self.seq_len, (s + 1) * self.seq_len);
                self.seq_len - (documents_ended(stream, to) - documents_ended(stream, from))
            }
            Some(index) => {
                let (from, to) = self.piece(stream, index, s);
                to - from
            }
        }
    }

    /// The sample whose first input is token `base` of the stream.
    fn fill_packed(&self, stream: &impl TokenStream, base: u64, out: SampleOut) {
        let length = out.tokens.len();
        stream.read(base, out.tokens);
        let mut document = documents_ended(stream, base);
        let mut from = 0;
        while from < length {
            let end = stream.offset(document + 1) - base;
            let to = end.min(length as u64) as usize;
            out.starts[from..to].fill(from as u32);
            out.labels[from..to - 1].copy_from_slice(&out.tokens[from + 1..to]);
            out.labels[to - 1] = if end > length as u64 { token(stream, base + to as u64) } else { IGNORE };
            from = to;
            document += 1;
        }
    }

    /// The sample whose inputs are tokens `from..to` of the stream, at least one, all of one document.
    fn fill_single(&self, stream: &impl TokenStream, (from, to): (u64, u64), out: SampleOut) {
        let n = (to - from) as usize;
        stream.read(from, &mut out.tokens[..n]);
        out.labels[..n - 1].copy_from_slice(&out.tokens[1..n]);
        out.labels[n - 1] = token(stream, to);
        out.starts[..n].fill(0);
        out.tokens[n..].fill(self.eod);
        out.labels[n..].fill(IGNORE);
        for (i, start) in out.starts.iter_mut().enumerate().skip(n) {
            *start = i as u32;
        }
    }

    /// The stream's tokens that are the inputs of sample `s`, not packed.
    fn piece(&self, stream: &impl TokenStream, index: &[u64], s: u64) -> (u64, u64) {
        let entry = index.partition_point(|&before| before <= s) - 1;
        let mut document = entry as u64 * STRIDE;
        let mut within = s - index[entry];
        loop {
            let n = pieces(stream, document, self.seq_len);
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

/// Samples of document `d` when not packed: its tokens but for the EOD.
fn pieces(stream: &impl TokenStream, d: u64, seq_len: u64) -> u64 {
    (stream.offset(d + 1) - 1 - stream.offset(d)).div_ceil(seq_len)
}

/// Number of documents that end at or before token `at`; for `at` within the stream, the document that holds it.
fn documents_ended(stream: &impl TokenStream, at: u64) -> u64 {
    let (mut low, mut high) = (0, stream.documents());
    while low < high {
        let middle = low + (high - low) / 2;
        if stream.offset(middle + 1) <= at { low = middle + 1 } else { high = middle }
    }
    low
}

fn token(stream: &impl TokenStream, at: u64) -> u32 {
    let mut one = [0];
    stream.read(at, &mut one);
    one[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A stream in memory.
    struct Plain {
        tokens: Vec<u32>,
        offsets: Vec<u64>,
    }

    const EOD: u32 = 99;

    impl Plain {
        /// Documents of these lengths (without EOD); every token but EOD is unique.
        fn new(lengths: &[usize]) -> Self {
            let (mut tokens, mut offsets) = (Vec::new(), vec![0]);
            for &n in lengths {
                let from = 1000 + tokens.len() as u32;
                tokens.extend((0..n as u32).map(|i| from + i));
                tokens.push(EOD);
                offsets.push(tokens.len() as u64);
            }
            Plain { tokens, offsets }
        }
    }

    impl TokenStream for Plain {
        fn marked(&self) -> bool {
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

    fn sample(packer: &Packer, stream: &Plain, s: u64) -> Sample {
        let n = packer.seq_len as usize;
        let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![7_777_777; n]);
        packer.fill(stream, s, SampleOut { tokens: &mut tokens, labels: &mut labels, starts: &mut starts });
        [tokens, labels, starts]
    }

    fn all(stream: &Plain, seq_len: u32, pack: bool) -> Vec<Sample> {
        let packer = Packer::new(stream, seq_len, pack, EOD);
        (0..packer.len())
            .map(|s| {
                let sample = sample(&packer, stream, s);
                let targets = sample[1].iter().filter(|&&l| l != IGNORE).count() as u64;
                assert_eq!(packer.targets(stream, s), targets);
                sample
            })
            .collect()
    }

    #[test]
    fn packed_by_hand() {
        let stream = Plain::new(&[2, 1, 5]);
        // 1000 1001 E | 1003 E | 1005 1006 1007 1008 1009 E
        let i = IGNORE;
        assert_eq!(
            all(&stream, 4, true),
            [
                [vec![1000, 1001, EOD, 1003], vec![1001, EOD, i, EOD], vec![0, 0, 0, 3]],
                [vec![EOD, 1005, 1006, 1007], vec![i, 1006, 1007, 1008], vec![0, 1, 1, 1]],
            ]
        );
        let packer = Packer::new(&stream, 12, true, EOD);
        assert_eq!(packer.len(), 0);
        assert_eq!(all(&stream, 11, true).len(), 1);
    }

    #[test]
    fn single_by_hand() {
        let stream = Plain::new(&[2, 1, 5]);
        let i = IGNORE;
        assert_eq!(
            all(&stream, 4, false),
            [
                [vec![1000, 1001, EOD, EOD], vec![1001, EOD, i, i], vec![0, 0, 2, 3]],
                [vec![1003, EOD, EOD, EOD], vec![EOD, i, i, i], vec![0, 1, 2, 3]],
                [vec![1005, 1006, 1007, 1008], vec![1006, 1007, 1008, 1009], vec![0, 0, 0, 0]],
                [vec![1009, EOD, EOD, EOD], vec![EOD, i, i, i], vec![0, 1, 2, 3]],
            ]
        );
    }

    #[test]
    fn no_documents_no_samples() {
        for pack in [true, false] {
            assert!(all(&Plain::new(&[]), 4, pack).is_empty());
        }
    }

    /// What must hold of each input by the definitions above, whatever the way of packing.
    fn check_inputs(stream: &Plain, sample: &Sample) {
        let [tokens, labels, starts] = sample;
        for i in 0..tokens.len() {
            let start = starts[i] as usize;
            assert!(start <= i);
            // one document from its piece's start up to here
            assert!(tokens[start..i].iter().all(|&t| t != EOD));
            assert!(starts[start..=i].iter().all(|&s| s as usize == start));
            if tokens[i] == EOD {
                assert_eq!(labels[i], IGNORE);
            } else {
                // unique tokens tell their place
                assert_eq!(labels[i], stream.tokens[(tokens[i] - 1000) as usize + 1]);
            }
            if i > 0 && start == i {
                // after a document, or as padding after the last input of one
                assert!(tokens[i - 1] == EOD || (labels[i - 1] == EOD && tokens[i] == EOD));
            }
        }
    }

    proptest! {
        #[test]
        fn every_token_is_an_input_once(
            lengths in proptest::collection::vec(prop_oneof![1usize..4, 1usize..80], 0..400),
            seq_len in 1u32..40,
        ) {
            let stream = Plain::new(&lengths);
            let packed = all(&stream, seq_len, true);
            packed.iter().for_each(|s| check_inputs(&stream, s));
            let inputs: Vec<u32> = packed.iter().flat_map(|s| s[0].clone()).collect();
            let whole = stream.tokens.len() / seq_len as usize * seq_len as usize;
            prop_assert_eq!(&inputs[..], &stream.tokens[..whole]);

            let single = all(&stream, seq_len, false);
            single.iter().for_each(|s| check_inputs(&stream, s));
            let without_eod = |t: &u32| *t != EOD;
            let inputs: Vec<u32> = single.iter().flat_map(|s| s[0].clone()).filter(without_eod).collect();
            let want: Vec<u32> = stream.tokens.iter().copied().filter(without_eod).collect();
            prop_assert_eq!(inputs, want);
            prop_assert!(single.iter().all(|s| s[1][0] != IGNORE));
        }
    }
}
