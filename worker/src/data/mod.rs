//! Text to samples: files → documents → tokens (kept in a cache) → samples of `seq_len` inputs with labels.
//!
//! Everything is a pure function of the files' contents and the job: a [`Dataset`] is the same in every process that opens it, sample s is the same however it is
//! asked for, and [`Order`] says which sample comes at which place of the run. So the whole data cursor is the number of samples consumed.
mod build;
mod byte_tokenizer;
mod cache;
mod chat;
mod contents;
mod documents;
mod error;
mod files;
mod mix;
mod order;
mod pack;
mod parquet;
mod peek;
mod records;
mod tokenize;

pub use documents::Split;
pub use error::DataError;
pub use mix::Order;
pub use pack::IGNORE;
pub use peek::{DataFacts, estimate, look_at_held_out};
pub use tokenize::TextTokenizer;

use cache::TokenCache;
use chat::ChatTemplate;
use contract::job::{DataSource, DataSpec, Format};
use documents::{Choice, Reading};
use mix::Mix;
use order::Permutation;
use pack::{Packer, SampleOut};
use std::{path::Path, time::SystemTime};

/// One side of a job's data, ready to be asked for samples.
pub struct Dataset {
    sources: Vec<Source>,
    mix: Mix,
    seq_len: usize,
    digest: String,
    notices: Vec<String>,
}

/// The samples of one source.
struct Source {
    name: String,
    cache: TokenCache,
    packer: Packer,
}

impl Dataset {
    /// Opens (and if need be tokenizes) one side of the data. `HeldOut` is `eval_files` when there are any, whole; else the held-out share of
    /// each source. `Train` is the sources without that share. Relative paths are relative to `workdir`.
    ///
    /// Blocks while another process builds the same cache. At least one sample of each source or an error.
    pub fn open(
        spec: &DataSpec,
        eval_files: Option<&[String]>,
        split: Split,
        workdir: &Path,
    ) -> Result<Self, DataError> {
        check_settings(spec)?;
        let eval_files = eval_files.filter(|f| !f.is_empty());
        let (sources, choice) = match (split, eval_files) {
            (Split::HeldOut, Some(files)) => (vec![eval_source(spec, files)?], Choice::All),
            (Split::HeldOut, None) if spec.held_out == 0.0 => return Err(DataError::NothingHeldOut),
            (Split::Train, _) if spec.held_out == 0.0 => (spec.sources.clone(), Choice::All),
            _ => (spec.sources.clone(), Choice::Side(split, spec.held_out)),
        };
        let tokenizer = TextTokenizer::open(&spec.tokenizer, workdir)?;
        let mut notices = Vec::new();
        let mut open = |source: &DataSource| {
            let cache = open_cache(spec, source, choice, &tokenizer, workdir, &mut notices)?;
            Source::over(source.name.clone(), cache, spec, split)
        };
        let opened = sources.iter().map(|source| open(source).map_err(|e| e.of_source(&source.name)));
        let opened = opened.collect::<Result<Vec<Source>, DataError>>()?;
        let weights: Vec<f64> = sources.iter().map(|s| s.weight).collect();
        Ok(Self::of(opened, Mix::new(&weights), spec, notices))
    }

    fn of(sources: Vec<Source>, mix: Mix, spec: &DataSpec, notices: Vec<String>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 data set v1");
        for (i, source) in sources.iter().enumerate() {
            if !source.name.is_empty() {
                let length = source.name.len() as u64;
                hasher.update(&length.to_le_bytes()).update(source.name.as_bytes());
                hasher.update(&mix.counts()[i].to_le_bytes());
            }
            let header = &source.cache.header;
            hasher.update(&header.body);
            for word in [header.vocab_size, header.eod, spec.seq_len, spec.pack.into()] {
                hasher.update(&word.to_le_bytes());
            }
        }
        let digest = hasher.finalize().to_hex().to_string();
        Dataset { sources, mix, seq_len: spec.seq_len as usize, digest, notices }
    }

    /// Number of samples of all sources, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a data set is never empty")]
    pub fn len(&self) -> u64 {
        self.sources.iter().map(|s| s.packer.len()).sum()
    }

    /// The order in which a run visits these samples.
    pub fn order(&self, seed: u64, shuffle: bool) -> Order {
        let permutation = |s: &Source| Permutation::new(seed, &s.name, s.packer.len(), shuffle);
        Order::new(self.mix.clone(), self.sources.iter().map(permutation).collect())
    }

    /// Tokens of the streams, end-of-document tokens included.
    pub fn tokens(&self) -> u64 {
        self.sources.iter().map(|s| s.cache.header.tokens).sum()
    }

    /// Documents of the streams.
    pub fn documents(&self) -> u64 {
        self.sources.iter().map(|s| s.cache.header.documents).sum()
    }

    /// Every token id is below it.
    pub fn vocab_size(&self) -> u32 {
        self.sources[0].cache.header.vocab_size
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
        let own = self.sources.iter().map(|s| s.packer.len());
        assert!(order.lengths().eq(own), "the order is of another data set");
        let n = self.seq_len;
        assert_eq!([tokens.len(), labels.len(), starts.len()], [micro * n; 3]);
        let rows = tokens.chunks_exact_mut(n).zip(labels.chunks_exact_mut(n)).zip(starts.chunks_exact_mut(n));
        for (place, ((tokens, labels), starts)) in (first_global_index..).zip(rows) {
            let (source, _, sample) = order.sample(place);
            let Source { cache, packer, .. } = &self.sources[source];
            packer.fill(cache, sample, SampleOut { tokens, labels, starts });
        }
    }

    /// Number of labels that are not [`IGNORE`] in the samples at places `first_global_index .. + count` of the run.
    pub fn count_targets(&self, order: &Order, first_global_index: u64, count: u64) -> u64 {
        let targets = |place| {
            let (source, _, sample) = order.sample(place);
            let Source { cache, packer, .. } = &self.sources[source];
            packer.targets(cache, sample)
        };
        (first_global_index..first_global_index + count).map(targets).sum()
    }
}

impl Source {
    fn over(name: String, cache: TokenCache, spec: &DataSpec, split: Split) -> Result<Self, DataError> {
        let packer = Packer::new(&cache, spec.seq_len, spec.pack, cache.header.eod);
        if packer.len() == 0 {
            return Err(DataError::TooLittle {
                held_out: split == Split::HeldOut,
                documents: cache.header.documents,
                tokens: cache.header.tokens,
                needed: if spec.pack { spec.seq_len.into() } else { 2 },
            });
        }
        Ok(Source { name, cache, packer })
    }
}

/// The token cache of one source, built if need be.
fn open_cache(
    spec: &DataSpec,
    source: &DataSource,
    choice: Choice,
    tokenizer: &TextTokenizer,
    workdir: &Path,
    notices: &mut Vec<String>,
) -> Result<TokenCache, DataError> {
    let mut files = files::expand(&source.files, workdir)?;
    files.retain(|f| f.bytes > 0);
    let chat = chat_template(spec, source, tokenizer, workdir)?;
    let dir = workdir.join(&spec.cache);
    let digests = contents::digests(&files, &dir, SystemTime::now())?;
    let inputs = build::Inputs {
        files: &files,
        digests: &digests,
        reading: Reading { field: &source.field, chat: chat.as_ref() },
        tokenizer,
        choice,
    };
    build::open_or_build(&inputs, &dir, notices)
}

/// What writes the chats of a source; nothing where its records are text.
fn chat_template(
    spec: &DataSpec,
    source: &DataSource,
    tokenizer: &TextTokenizer,
    workdir: &Path,
) -> Result<Option<ChatTemplate>, DataError> {
    match source.format {
        Format::Text => Ok(None),
        Format::Chat => {
            ChatTemplate::open(spec.chat_template.as_deref(), tokenizer, source.loss_on, workdir).map(Some)
        }
    }
}

/// `eval.files` are read as the sources are; all must be read in one way.
fn eval_source(spec: &DataSpec, files: &[String]) -> Result<DataSource, DataError> {
    let way = |s: &DataSource| (s.format, s.field.clone(), s.loss_on);
    let first = &spec.sources[0];
    if spec.sources.iter().any(|s| way(s) != way(first)) {
        let why = "the sources of the mixture are read in different ways, so it isn't known which is meant for these;                    use train.data.held_out instead";
        return Err(DataError::Setting { key: "train.eval.files", why: why.into() });
    }
    Ok(DataSource { name: String::new(), weight: 1.0, files: files.to_vec(), ..first.clone() })
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
mod golden_tests;
#[cfg(test)]
mod tests;
