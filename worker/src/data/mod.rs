//! Text to samples: files → documents → tokens (kept in a cache) → samples of `seq_len` inputs with labels.
//!
//! Everything is a pure function of the files' contents and the job: a [`Dataset`] is the same in every process that opens it, sample s is the same however it is
//! asked for, and [`Order`] says which sample comes at which place of the run. So the whole data cursor is the number of samples consumed.
mod build;
mod byte_tokenizer;
mod cache;
mod contents;
mod documents;
mod error;
mod files;
mod order;
mod pack;
mod peek;
mod tokenize;

pub use documents::Split;
pub use error::DataError;
pub use order::Order;
pub use pack::IGNORE;
pub use peek::{DataFacts, count_files, estimate};
pub use tokenize::TextTokenizer;

use cache::TokenCache;
use contract::job::DataSpec;
use documents::Choice;
use pack::{Packer, SampleOut};
use std::{path::Path, time::SystemTime};

/// One side of a job's data, ready to be asked for samples.
pub struct Dataset {
    cache: TokenCache,
    packer: Packer,
    seq_len: usize,
    digest: String,
    notices: Vec<String>,
}

impl Dataset {
    /// Opens (and if need be tokenizes) one side of the data. `HeldOut` is `eval_files` when there are any, whole; else the held-out share of
    /// `spec.files`. `Train` is `spec.files` without that share. Relative paths are relative to `workdir`.
    ///
    /// Blocks while another process builds the same cache. At least one sample or an error.
    pub fn open(
        spec: &DataSpec,
        eval_files: Option<&[String]>,
        split: Split,
        workdir: &Path,
    ) -> Result<Self, DataError> {
        check_settings(spec)?;
        let eval_files = eval_files.filter(|f| !f.is_empty());
        let (patterns, choice) = match (split, eval_files) {
            (Split::HeldOut, Some(files)) => (files, Choice::All),
            (Split::HeldOut, None) if spec.held_out == 0.0 => return Err(DataError::NothingHeldOut),
            (Split::Train, _) if spec.held_out == 0.0 => (&spec.files[..], Choice::All),
            _ => (&spec.files[..], Choice::Side(split, spec.held_out)),
        };
        let mut files = files::expand(patterns, workdir)?;
        files.retain(|f| f.bytes > 0);
        let tokenizer = TextTokenizer::open(&spec.tokenizer, workdir)?;
        let dir = workdir.join(&spec.cache);
        let digests = contents::digests(&files, &dir, SystemTime::now())?;
        let inputs = build::Inputs {
            files: &files,
            digests: &digests,
            field: &spec.field,
            tokenizer: &tokenizer,
            choice,
        };
        let mut notices = Vec::new();
        let cache = build::open_or_build(&inputs, &dir, &mut notices)?;
        Self::over(cache, spec, split, notices)
    }

    fn over(
        cache: TokenCache,
        spec: &DataSpec,
        split: Split,
        notices: Vec<String>,
    ) -> Result<Self, DataError> {
        let packer = Packer::new(&cache, spec.seq_len, spec.pack, cache.header.eod);
        if packer.len() == 0 {
            return Err(DataError::TooLittle {
                held_out: split == Split::HeldOut,
                documents: cache.header.documents,
                tokens: cache.header.tokens,
                needed: if spec.pack { spec.seq_len.into() } else { 2 },
            });
        }
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 data set v1");
        hasher.update(&cache.header.body);
        for word in [cache.header.vocab_size, cache.header.eod, spec.seq_len, spec.pack.into()] {
            hasher.update(&word.to_le_bytes());
        }
        let digest = hasher.finalize().to_hex().to_string();
        Ok(Dataset { cache, packer, seq_len: spec.seq_len as usize, digest, notices })
    }

    /// Number of samples in an epoch, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a data set is never empty")]
    pub fn len(&self) -> u64 {
        self.packer.len()
    }

    /// The order in which a run visits these samples.
    pub fn order(&self, seed: u64, shuffle: bool) -> Order {
        Order::new(seed, self.len(), shuffle)
    }

    /// Tokens of the stream, end-of-document tokens included.
    pub fn tokens(&self) -> u64 {
        self.cache.header.tokens
    }

    /// Documents of the stream.
    pub fn documents(&self) -> u64 {
        self.cache.header.documents
    }

    /// Every token id is below it.
    pub fn vocab_size(&self) -> u32 {
        self.cache.header.vocab_size
    }

    /// Identity of the samples (64 hex digits): equal digests give equal samples. Kept in checkpoints, so that a resume on other data is noticed.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// What the user should know of the opening, e.g. that a damaged cache was built again.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Writes the `micro` samples at places `first_global_index ..` of the run: inputs, labels (the next token, or [`IGNORE`]), and for each input where in its
    /// sample its document's piece begins. Each slice has shape `[micro, seq_len]`. `order` must be of this data set (else a panic).
    pub fn fill(
        &self,
        order: &Order,
        first_global_index: u64,
        micro: usize,
        tokens: &mut [u32],
        labels: &mut [u32],
        starts: &mut [u32],
    ) {
        assert_eq!(order.epoch_len(), self.len(), "the order is of another data set");
        let n = self.seq_len;
        assert_eq!([tokens.len(), labels.len(), starts.len()], [micro * n; 3]);
        let rows = tokens.chunks_exact_mut(n).zip(labels.chunks_exact_mut(n)).zip(starts.chunks_exact_mut(n));
        for (place, ((tokens, labels), starts)) in (first_global_index..).zip(rows) {
            let (_, sample) = order.sample(place);
            self.packer.fill(&self.cache, sample, SampleOut { tokens, labels, starts });
        }
    }

    /// Number of labels that are not [`IGNORE`] in the samples at places `first_global_index .. + count` of the run, without reading them.
    pub fn count_targets(&self, order: &Order, first_global_index: u64, count: u64) -> u64 {
        (first_global_index..first_global_index + count)
            .map(|place| self.packer.targets(&self.cache, order.sample(place).1))
            .sum()
    }
}

/// What of a data section can be wrong by itself.
fn check_settings(spec: &DataSpec) -> Result<(), DataError> {
    let refuse = |key, why: String| Err(DataError::Setting { key, why });
    if spec.seq_len == 0 {
        return refuse("train.data.seq_len", "it must be at least 1".into());
    }
    if !(0.0..1.0).contains(&spec.held_out) {
        return refuse(
            "train.data.held_out",
            format!("{} is not a share: 0.0 up to but not 1.0", spec.held_out),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
