//! The training or evaluation samples of a job ([`Dataset`]), which are read in the order in which
//! the run uses them.
use super::{
    chat_template::ChatTemplate,
    content_digests,
    document_reader::RecordReadOptions,
    epoch_permutation::EpochPermutation,
    error::DataError,
    file_patterns::FilePatternCache,
    mixture::{MixtureSchedule, SampleOrder},
    packer::{Packer, SampleBuffers},
    split::{Split, SplitFilter},
    token_cache::TokenCache,
    token_cache_builder::{self, TokenCacheInputs},
    tokenizer::TextTokenizer,
};
use diagnostic::Diagnostic;
use jobspec::{DataSource, DataSpec, RecordFormat};
use std::{path::Path, time::SystemTime};

/// All training samples or all evaluation samples of a job, read from files that contain the tokens
/// of each data source (token caches).
pub struct Dataset {
    sources: Vec<SourceSampleReader>,
    schedule: MixtureSchedule,
    pub(super) seq_len: usize,
    digest: String,
    warnings: Vec<Diagnostic>,
}

/// Reads the samples of one data source from its token cache (the file with its tokens).
struct SourceSampleReader {
    /// The source's name in job.yaml; empty if the data are not a mixture.
    name: String,
    cache: TokenCache,
    packer: Packer,
}

impl Dataset {
    /// Opens the training or the evaluation data of a job. Reads and tokenizes the files first if
    /// no token cache exists. Relative paths start at `workdir`.
    ///
    /// `Split::Train` selects every source without its held-out share. `Split::HeldOut` selects
    /// `eval_files` if there are any, otherwise the held-out share of every source. Blocks while
    /// another process builds the same cache. Fails if a source has no sample.
    pub fn open(
        spec: &DataSpec,
        eval_files: Option<&[String]>,
        split: Split,
        workdir: &Path,
    ) -> Result<Self, DataError> {
        validate_data_settings(spec)?;
        let tokenizer = TextTokenizer::open(&spec.tokenizer, workdir)?;
        let mut files = FilePatternCache::new(workdir);
        Self::open_with_tokenizer(spec, eval_files, split, &tokenizer, &mut files)
    }

    /// Opens the training or the evaluation data of a job, with the already opened tokenizer of the
    /// job. It must be the tokenizer of the data section. Files that match the patterns of a source
    /// are searched once with the same `files`.
    pub fn open_with_tokenizer(
        spec: &DataSpec,
        eval_files: Option<&[String]>,
        split: Split,
        tokenizer: &TextTokenizer,
        files: &mut FilePatternCache,
    ) -> Result<Self, DataError> {
        validate_data_settings(spec)?;
        let eval_files = eval_files.filter(|f| !f.is_empty());
        let (sources, filter) = match (split, eval_files) {
            (Split::HeldOut, Some(files)) => (vec![create_eval_source(spec, files)?], SplitFilter::All),
            (Split::HeldOut, None) if spec.held_out == 0.0 => return Err(DataError::NoEvalData),
            (Split::Train, _) if spec.held_out == 0.0 => (spec.sources.clone(), SplitFilter::All),
            _ => (spec.sources.clone(), SplitFilter::Only(split, spec.held_out)),
        };
        let mut warnings = Vec::new();
        let mut open = |source: &DataSource| {
            let cache = open_source_cache(spec, source, filter, tokenizer, files, &mut warnings)?;
            SourceSampleReader::new(source.name.clone(), cache, spec, split)
        };
        let opened = sources.iter().map(|source| open(source).map_err(|e| e.with_source_name(&source.name)));
        let opened = opened.collect::<Result<Vec<SourceSampleReader>, DataError>>()?;
        let weights: Vec<f64> = sources.iter().map(|s| s.weight).collect();
        Ok(Self::with_sources(opened, MixtureSchedule::new(&weights), spec, warnings))
    }

    /// Creates a data set from the opened data sources, and computes a digest that identifies its
    /// samples.
    fn with_sources(
        sources: Vec<SourceSampleReader>,
        schedule: MixtureSchedule,
        spec: &DataSpec,
        warnings: Vec<Diagnostic>,
    ) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 data set v1");
        for (i, source) in sources.iter().enumerate() {
            if !source.name.is_empty() {
                let length = source.name.len() as u64;
                hasher.update(&length.to_le_bytes()).update(source.name.as_bytes());
                hasher.update(&schedule.samples_per_cycle()[i].to_le_bytes());
            }
            let header = &source.cache.header;
            hasher.update(&header.body_digest);
            for word in [header.vocab_size, header.eod, spec.seq_len, spec.pack.into()] {
                hasher.update(&word.to_le_bytes());
            }
        }
        let digest = hasher.finalize().to_hex().to_string();
        Dataset { sources, schedule, seq_len: spec.seq_len as usize, digest, warnings }
    }

    /// Returns the number of samples of all data sources together, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a data set is never empty")]
    pub fn len(&self) -> u64 {
        self.sources.iter().map(|s| s.packer.len()).sum()
    }

    /// Creates the order in which a run reads the samples of this data set, over all data sources
    /// and epochs. If `shuffle` is set, the samples of each source have another order in each
    /// epoch.
    pub fn create_sample_order(&self, seed: u64, shuffle: bool) -> SampleOrder {
        let permutation =
            |s: &SourceSampleReader| EpochPermutation::new(seed, &s.name, s.packer.len(), shuffle);
        SampleOrder::new(self.schedule.clone(), self.sources.iter().map(permutation).collect())
    }

    /// Returns the total number of tokens of all data sources, including the token that ends each
    /// document.
    pub fn token_count(&self) -> u64 {
        self.sources.iter().map(|s| s.cache.header.tokens).sum()
    }

    /// Returns the number of documents of all data sources together.
    pub fn document_count(&self) -> u64 {
        self.sources.iter().map(|s| s.cache.header.documents).sum()
    }

    /// Returns the vocabulary size of the tokenizer. Every token id is less than this size.
    pub fn vocab_size(&self) -> u32 {
        self.sources[0].cache.header.vocab_size
    }

    /// Returns the digest of all samples as 64 hex digits. Equal digests imply equal samples.
    /// Checkpoints record the digest, so that a resume with other data is detected.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the warnings from opening the data, such as a damaged token cache that was rebuilt.
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }

    /// Fills the given slices with the tokens, labels and document starts of `micro` consecutive
    /// samples of the run, beginning with sample number `first_position`.
    ///
    /// Each slice has shape `[micro, seq_len]`. `labels` are the next tokens or [`IGNORE_INDEX`].
    /// `starts` is, for each input, the position in the sample at which the input's document
    /// begins.
    ///
    /// # Panics
    ///
    /// Panics if `order` belongs to another data set or a slice has another length.
    ///
    /// [`IGNORE_INDEX`]: super::IGNORE_INDEX
    pub fn fill_samples(
        &self,
        order: &SampleOrder,
        first_position: u64,
        micro: usize,
        tokens: &mut [u32],
        labels: &mut [u32],
        starts: &mut [u32],
    ) {
        let source_lengths = self.sources.iter().map(|s| s.packer.len());
        assert!(
            order.samples_per_epoch_by_source().eq(source_lengths),
            "the order belongs to another data set"
        );
        let n = self.seq_len;
        assert_eq!([tokens.len(), labels.len(), starts.len()], [micro * n; 3]);
        let rows = tokens.chunks_exact_mut(n).zip(labels.chunks_exact_mut(n)).zip(starts.chunks_exact_mut(n));
        for (position, ((tokens, labels), starts)) in (first_position..).zip(rows) {
            let (source, _, sample) = order.locate_sample(position);
            let SourceSampleReader { cache, packer, .. } = &self.sources[source];
            packer.write_sample(cache, sample, SampleBuffers { tokens, labels, starts });
        }
    }

    /// Returns how many labels count for the loss in `count` consecutive samples of the run, from
    /// sample number `first_position` on.
    pub fn count_targets(&self, order: &SampleOrder, first_position: u64, count: u64) -> u64 {
        let targets = |position| {
            let (source, _, sample) = order.locate_sample(position);
            let SourceSampleReader { cache, packer, .. } = &self.sources[source];
            packer.count_targets(cache, sample)
        };
        (first_position..first_position + count).map(targets).sum()
    }
}

impl SourceSampleReader {
    /// Creates the reader of one data source, which divides the tokens in the source's token cache
    /// into samples of equal length. Fails if the stream is shorter than a sample.
    fn new(name: String, cache: TokenCache, spec: &DataSpec, split: Split) -> Result<Self, DataError> {
        let packer = Packer::new(&cache, spec.seq_len, spec.pack, cache.header.eod);
        if packer.len() == 0 {
            return Err(DataError::TooShort {
                split,
                documents: cache.header.documents,
                tokens: cache.header.tokens,
                required: if spec.pack { spec.seq_len.into() } else { 2 },
            });
        }
        Ok(SourceSampleReader { name, cache, packer })
    }
}

/// Opens the token cache (the file with the tokens) of one data source, and builds it first if
/// necessary.
fn open_source_cache(
    spec: &DataSpec,
    source: &DataSource,
    filter: SplitFilter,
    tokenizer: &TextTokenizer,
    lists: &mut FilePatternCache,
    warnings: &mut Vec<Diagnostic>,
) -> Result<TokenCache, DataError> {
    let mut files = lists.find_files_once(&source.files)?.to_vec();
    files.retain(|f| f.bytes > 0);
    let workdir = lists.workdir();
    let chat_template = open_chat_template(spec, source, tokenizer, workdir)?;
    let directory = workdir.join(&spec.cache);
    let digests = content_digests::find_or_compute_digests(&files, &directory, SystemTime::now())?;
    let inputs = TokenCacheInputs {
        files: &files,
        digests: &digests,
        format: RecordReadOptions { field: &source.field, chat_template: chat_template.as_ref() },
        tokenizer,
        filter,
    };
    token_cache_builder::open_or_build_cache(&inputs, &directory, warnings)
}

/// Opens the chat template that converts the chats of a data source to text. Returns `None` if the
/// records of the source are text.
pub(super) fn open_chat_template(
    spec: &DataSpec,
    source: &DataSource,
    tokenizer: &TextTokenizer,
    workdir: &Path,
) -> Result<Option<ChatTemplate>, DataError> {
    match source.format {
        RecordFormat::Text => Ok(None),
        RecordFormat::Chat => {
            ChatTemplate::load(spec.chat_template.as_deref(), tokenizer, source.loss_on, workdir).map(Some)
        }
    }
}

/// Creates the data source for the evaluation files `files`, which are read in the format of the
/// training data. Fails if the formats of the training sources differ.
pub(super) fn create_eval_source(spec: &DataSpec, files: &[String]) -> Result<DataSource, DataError> {
    let format = |s: &DataSource| (s.format, s.field.clone(), s.loss_on);
    let first = &spec.sources[0];
    if spec.sources.iter().any(|s| format(s) != format(first)) {
        return Err(DataError::AmbiguousEvalFormat);
    }
    Ok(DataSource { name: String::new(), weight: 1.0, files: files.to_vec(), ..first.clone() })
}

/// Rejects invalid values of the job's keys `train.data.seq_len` (tokens per sample) and
/// `train.data.held_out` (share of the data for evaluation). Reads no file.
pub(super) fn validate_data_settings(spec: &DataSpec) -> Result<(), DataError> {
    if spec.seq_len == 0 {
        return Err(DataError::InvalidSequenceLength);
    }
    if !(0.0..1.0).contains(&spec.held_out) {
        return Err(DataError::InvalidHeldOutShare { share: spec.held_out });
    }
    Ok(())
}
