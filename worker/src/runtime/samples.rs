//! [`SampleSets`]: the training and evaluation samples of a run, in the order in which the run
//! reads them.
use super::{
    session::AgentSession,
    training_loop::{DecodeGeneratedText, HeldOutEval},
};
use crate::{
    consensus::exchange_values_without_queue,
    data::{Dataset, FilePatternCache, SampleOrder, Split, TextTokenizer},
    error::Result,
    model::MicroBatch,
    train::{generation::GenerationRequest, step::SampleSource},
};
use comm::Comm;
use diagnostic::{Diagnostic, codes};
use jobspec::{GenerationSpec, TrainSpec};
use protocol::{control::WorkerInit, event::Event};

/// A data set of training or evaluation samples, with the order in which the run reads them.
pub(super) struct OrderedSamples {
    data: Dataset,
    order: SampleOrder,
}

impl SampleSource for OrderedSamples {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<()> {
        let MicroBatch { sequences: b, tokens, labels, starts, .. } = batch;
        self.data.fill_samples(&self.order, first, *b, tokens, labels, starts);
        Ok(())
    }
}

/// The training samples of a run and, if the job evaluates, the samples that are held out for
/// evaluation.
pub(super) struct SampleSets {
    pub(super) train: OrderedSamples,
    eval: Option<OrderedSamples>,
    /// The digest of the training data.
    pub(super) digest: String,
}

impl SampleSets {
    /// Opens the training and evaluation data on this rank, or reuses data that all ranks have
    /// opened in an earlier attempt (start of all workers). Ranks that have opened the data in an
    /// earlier attempt use them again, if all ranks then have the same data and the same tokenizer.
    /// Otherwise all ranks open the tokenizer and the data again. Returns whether this rank opened
    /// the data in this call.
    ///
    /// Collective: every rank must call it.
    pub(super) fn open(
        opened: &mut Option<Self>,
        train: &TrainSpec,
        init: &WorkerInit,
        comm: &dyn Comm,
        tokenizer: &mut TextTokenizer,
    ) -> Result<bool> {
        let mut is_new = opened.is_none();
        let mut differing = SampleSets::open_in_turns(opened, train, init, comm, tokenizer)?;
        if differing.is_some() && init.attempt > 0 {
            // The files may have changed since the earlier attempt.
            (*opened, is_new) = (None, true);
            let reopened = TextTokenizer::open(&train.data.tokenizer, &init.workdir);
            let reopened = reopened.map(|new| *tokenizer = new);
            exchange_values_without_queue(comm, reopened.map_err(|e| Diagnostic::from(e).into()))?;
            differing = SampleSets::open_in_turns(opened, train, init, comm, tokenizer)?;
        }
        let Some(rank) = differing else { return Ok(is_new) };
        let message = format!("rank {rank} found other training or evaluation data than rank 0");
        Err(Diagnostic::error(codes::training::DATA_DIFFERS_BETWEEN_RANKS, message)
            .with_subject("train.data.files")
            .with_field("rank", rank)
            .with_help("make the files the same on all hosts; no process may write to them")
            .with_help("check that no pattern matches files that the run itself writes")
            .into())
    }

    /// Opens the training and evaluation data on rank 0 first and then on all other ranks, so that
    /// only rank 0 builds the token caches. Returns the first rank whose data differ from those of
    /// rank 0. Collective: every rank must call it.
    fn open_in_turns(
        opened: &mut Option<Self>,
        train: &TrainSpec,
        init: &WorkerInit,
        comm: &dyn Comm,
        tokenizer: &TextTokenizer,
    ) -> Result<Option<usize>> {
        for rank_0_turn in [true, false] {
            let mut result = Ok(());
            if (init.rank == 0) == rank_0_turn && opened.is_none() {
                result =
                    SampleSets::open_on_this_rank(train, init, tokenizer).map(|sets| *opened = Some(sets));
            }
            exchange_values_without_queue(comm, result)?;
        }
        let mut digest = tokenizer.digest().to_vec();
        if let Some(sets) = opened {
            let eval = sets.eval.as_ref().map_or("", |eval| eval.data.digest());
            digest.extend(format!("{} {eval}", sets.digest).bytes());
        }
        let digests = comm.all_gather_bytes(&digest)?;
        Ok(digests.iter().position(|d| *d != digests[0]))
    }

    /// Opens the training data and the held-out data on this rank, and determines in which order
    /// samples are read.
    fn open_on_this_rank(train: &TrainSpec, init: &WorkerInit, tokenizer: &TextTokenizer) -> Result<Self> {
        let (spec, mut lists) = (&train.data, FilePatternCache::new(&init.workdir));
        let mut open = |files, split| {
            Dataset::open_with_tokenizer(spec, files, split, tokenizer, &mut lists).map_err(Diagnostic::from)
        };
        let data = open(None, Split::Train)?;
        let eval = train.eval.as_ref().map(|e| {
            let files = (!e.files.is_empty()).then_some(e.files.as_slice());
            open(files, Split::HeldOut)
        });
        let eval = eval
            .transpose()?
            .map(|data| OrderedSamples { order: data.create_sample_order(train.seed, false), data });
        let digest = data.digest().to_string();
        let train = OrderedSamples { order: data.create_sample_order(train.seed, spec.shuffle), data };
        Ok(SampleSets { train, eval, digest })
    }

    /// On rank 0, sends to the controller the warnings that occurred while the data were opened.
    pub(super) fn send_data_warnings(&self, session: &AgentSession, is_leader: bool) -> Result<()> {
        if !is_leader {
            return Ok(());
        }
        let sets = [Some(&self.train), self.eval.as_ref()].into_iter().flatten();
        for warning in sets.flat_map(|samples| samples.data.warnings()) {
            session.send_event(Event::new_diagnostic_notice(Some(0), warning.to_string(), warning))?;
        }
        Ok(())
    }

    /// Returns the held-out samples with the settings for evaluating on them and generating text,
    /// or `None` if the job does not evaluate.
    pub(super) fn prepare_evaluation<'a>(
        &'a self,
        train: &'a TrainSpec,
        tokenizer: &'a TextTokenizer,
    ) -> Result<Option<HeldOutEval<'a>>> {
        let (Some(source), Some(spec)) = (self.eval.as_ref(), train.eval.as_ref()) else { return Ok(None) };
        let samples = u64::from(spec.samples).min(source.data.len());
        let micro_batches = (samples / u64::from(train.batch.micro)).max(1) as usize;
        let sample =
            spec.sample.as_ref().map(|s| build_generation_request(s, train.seed, tokenizer)).transpose()?;
        Ok(Some(HeldOutEval { source, micro_batches, every: spec.every, generation: sample }))
    }
}

/// Builds the request to generate text from the job's prompt after an evaluation, and the function
/// that converts the generated tokens to text.
///
/// Decoded text ends before the first end-of-document token.
fn build_generation_request<'a>(
    spec: &'a GenerationSpec,
    seed: u64,
    tokenizer: &'a TextTokenizer,
) -> Result<(GenerationRequest, DecodeGeneratedText<'a>)> {
    let mut prompt = Vec::new();
    tokenizer.encode(&spec.prompt, &mut prompt).map_err(Diagnostic::from)?;
    if prompt.is_empty() {
        const PROMPT: &str = "train.eval.sample.prompt";
        let message = format!("the tokenizer produces no token from `{PROMPT}`");
        return Err(Diagnostic::error(codes::training::SAMPLE_PROMPT_EMPTY, message)
            .with_subject(PROMPT)
            .with_help("set another prompt")
            .into());
    }
    let decode = move |tokens: &[u32]| {
        let end = tokens.iter().position(|t| *t == tokenizer.eod_token()).unwrap_or(tokens.len());
        let text = tokenizer.decode(&tokens[..end]).map_err(Diagnostic::from)?;
        Ok((spec.prompt.clone(), text))
    };
    Ok((GenerationRequest::new(prompt, spec.tokens, spec.temperature, seed), Box::new(decode)))
}
