//! Builds the trainer of a rank in stages. Each stage has its own type, so that nothing can be used
//! before it exists: [`ResolvedSpec`], [`BuiltModel`], [`ShardedModel`], [`ModelWithOptimizer`],
//! [`UninitializedTrainer`], [`RunningTrainer`].
use crate::{
    error::{Result, combine_train_mistakes},
    expert_layout::{self, ExpertLayout},
    model::{self, MicroBatch, Model},
    optim::{Optimizer, schedule::compute_learning_rate},
    param_groups::{self, LORA_FROM_KEY, find_first_backward_layer},
    params::{ParamInit, ParamUnit, Segment},
    rng::{Purpose, fill_normal, fill_uniform},
    train::{
        activations::MicroBatchActivations,
        loss_scale::LossScale,
        moe::MoeTrainer,
        step::{RankStepReport, SampleSource, StepOutcome, Trainer},
    },
    zero::{
        ShardingPolicy,
        collective_queue::CollectiveQueue,
        engine::{ParamDtypes, ZeroEngine},
    },
};
use ckpt::peft::AdapterConfig;
use comm::Comm;
use contract::job::{LoraSpec, LoraTargets, ModelSpec, Precision, ReloadTrain, TrainSpec};
use device::{Dtype, Ops, View, storage::Event, with_alloc_label};
use diagnostic::{Diagnostic, codes};
use std::{ops::Range, sync::Arc};

/// Build stage 1: the `train` section, completed by the tokenizer and the directories that the
/// section names.
pub struct ResolvedSpec {
    train: TrainSpec,
}

/// Build stage 2: the model and the names and shapes of its parameters, without values.
pub struct BuiltModel {
    train: TrainSpec,
    model: Box<dyn Model>,
    trained_count: u64,
}

/// Build stage 3: the model with this rank's shard of every parameter allocated and filled with
/// zeros.
pub struct ShardedModel {
    train: TrainSpec,
    model: Arc<dyn Model>,
    engine: ZeroEngine,
    ops: Arc<dyn Ops>,
    expert_layout: Option<ExpertLayout>,
}

/// Build stage 4: the model with optimizer states for the parameters that this rank updates.
pub struct ModelWithOptimizer {
    train: TrainSpec,
    trainer: Trainer,
}

/// Build stage 5: a complete trainer whose parameters have no values yet. The values are then
/// loaded from a checkpoint or initialised.
pub struct UninitializedTrainer {
    /// The state that computes the steps.
    pub trainer: Trainer,
    train: TrainSpec,
}

/// Build stage 6: a trainer with parameters and a position, which runs steps.
pub struct RunningTrainer {
    /// The state that computes the steps.
    pub trainer: Trainer,
    train: TrainSpec,
    /// The progress of the run.
    pub position: Cursor,
}

/// The progress of a run, as checkpoints store it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cursor {
    /// The number of optimizer steps done.
    pub step: u64,
    /// The number of samples consumed, which is also the number of the next step's first sample.
    pub consumed_samples: u64,
    /// The number of tokens trained on.
    pub tokens: u64,
}

/// Completes the `train.model` section with the sizes of the model directory, or with those that
/// follow from a tokenizer with `vocab` tokens and samples of `seq_len` tokens.
///
/// # Errors
///
/// Fails if the directory is unusable, or if its model is too small for the tokenizer or the
/// samples. The subject of the error is the key `train.model.from`.
pub fn resolve_model(spec: &ModelSpec, vocab: u32, seq_len: u32) -> diagnostic::Result<ModelSpec> {
    const FROM: &str = "train.model.from";
    let mut resolved = spec.clone();
    if let Some(directory) = &spec.from {
        let config = model::read_model_config_summary(directory)
            .map_err(|e| Diagnostic::from(e).with_subject(FROM))?;
        resolved.family = config.family.into();
        (resolved.vocab_size, resolved.max_position_embeddings) = (config.vocab_size, config.max_positions);
    }
    // A size is a key of the job or, with a model directory, of the directory's config.json.
    let too_small = |code, name: &str, why: String| match &spec.from {
        Some(directory) => {
            let message = format!("{name} in {} {why}", directory.join("config.json").display());
            Diagnostic::error(code, message).with_subject(FROM)
        }
        None => {
            let key = format!("train.model.{name}");
            Diagnostic::error(code, format!("`{key}` {why}")).with_subject(key)
        }
    };
    if resolved.vocab_size == 0 {
        resolved.vocab_size = vocab;
    }
    if resolved.vocab_size < vocab {
        let why = format!("is {}, but the tokenizer has {vocab} tokens", resolved.vocab_size);
        let help = match spec.from {
            Some(_) => "use the tokenizer of the model directory".to_owned(),
            None => format!("remove `train.model.vocab_size`, or set it to at least {vocab}"),
        };
        let error = too_small(codes::training::VOCAB_SIZE_TOO_SMALL, "vocab_size", why);
        return Err(error
            .with_field("vocab_size", resolved.vocab_size)
            .with_field("tokens", vocab)
            .with_help(help));
    }
    if resolved.max_position_embeddings == 0 {
        resolved.max_position_embeddings = seq_len;
    }
    if resolved.max_position_embeddings < seq_len {
        let limit = resolved.max_position_embeddings;
        let why = format!("is {limit}, but `train.data.seq_len` is {seq_len}");
        let error = too_small(codes::training::SEQUENCE_TOO_LONG, "max_position_embeddings", why);
        return Err(error
            .with_field("max_position_embeddings", limit)
            .with_field("seq_len", seq_len)
            .with_help(format!("lower `train.data.seq_len` to at most {limit}")));
    }
    Ok(resolved)
}

/// Completes the `train.lora` section with the configuration in the directory that
/// `train.lora.from` names.
///
/// # Errors
///
/// Fails if the configuration cannot be read. The subject of the error is `train.lora.from`.
pub fn resolve_lora(spec: Option<&LoraSpec>) -> diagnostic::Result<Option<LoraSpec>> {
    let Some(spec) = spec else { return Ok(None) };
    let Some(directory) = &spec.from else { return Ok(Some(spec.clone())) };
    let AdapterConfig { rank, alpha, use_rslora: rslora, dropout, targets, .. } =
        AdapterConfig::read(directory)
            .map_err(|e| crate::error::to_unreadable_adapters_error(e, LORA_FROM_KEY))?;
    let targets = LoraTargets::Names(targets);
    let dropout = spec.dropout.or(Some(dropout));
    Ok(Some(LoraSpec { from: spec.from.clone(), rank, alpha, dropout, rslora, targets }))
}

impl ResolvedSpec {
    /// Completes the `train.model` and `train.lora` sections of `train`. `vocab` is the vocabulary
    /// size of the tokenizer.
    pub fn new(train: &TrainSpec, vocab: u32) -> Result<Self> {
        let mut train = train.clone();
        train.model = resolve_model(&train.model, vocab, train.data.seq_len)?;
        train.lora = resolve_lora(train.lora.as_ref())?;
        Ok(ResolvedSpec { train })
    }

    /// Builds the model and decides which of its parameters are trained.
    pub fn build_model(self) -> Result<BuiltModel> {
        let mut model = model::build_model_with_router_losses(
            &self.train.model,
            &self.train.experts,
            self.train.data.seq_len,
        )
        .map_err(|e| Diagnostic::from(e).with_subject("train.model"))?;
        let replicated = ExpertLayout::for_replicated_experts(model.as_ref());
        let units = param_groups::build_trainable_units(model.as_mut(), replicated.as_ref(), &self.train)
            .map_err(combine_train_mistakes)?;
        let trained_count = units.iter().map(|u| u.trained_len() as u64).sum();
        Ok(BuiltModel { train: self.train, model, trained_count })
    }
}

impl BuiltModel {
    /// Returns the number of trained elements of the model.
    pub fn trained_count(&self) -> u64 {
        self.trained_count
    }

    /// Allocates this rank's shard of each unit, filled with zeros. Collective: every rank must
    /// call it.
    pub fn shard_model(self, comm: Arc<dyn Comm>, ops: Arc<dyn Ops>) -> Result<ShardedModel> {
        let train = self.train;
        let queue = CollectiveQueue::new(comm, ops.clone())
            .map_err(|e| crate::error::build_thread_start_error("communication", &e))?;
        let layers = self.model.param_units().len() - 2;
        let world = queue.comm().world();
        let expert_layout = ExpertLayout::new(&train.experts, self.model.as_ref(), layers, world)?;
        let mut units = expert_layout::build_units_with_experts(self.model.as_ref(), expert_layout.as_ref());
        param_groups::mark_trained(&mut units, &self.model.tied_weights(), &train)
            .map_err(combine_train_mistakes)?;
        let policy = ShardingPolicy::for_job(&train);
        let micro_batches = (train.batch.global / train.batch.micro) as usize;
        let (zero, weights) = (&train.zero, select_weight_dtypes(&train));
        let retention = (zero.prefetch as usize, zero.max_live_parameters);
        let engine = ZeroEngine::new(units, policy, micro_batches, retention, weights, queue, ops.clone())?;
        let mut model = self.model;
        model.move_to_device(ops.as_ref());
        Ok(ShardedModel { train, model: model.into(), engine, ops, expert_layout })
    }
}

/// Returns the element type of activations and of the weights that matmuls read.
pub fn select_compute_dtype(precision: Precision) -> Dtype {
    match precision {
        Precision::Fp32 => Dtype::F32,
        Precision::Bf16 | Precision::Fp8 => Dtype::Bf16,
        Precision::Fp16 => Dtype::F16,
    }
}

/// Returns the element types of the weights that matmuls read and of the weights that the optimizer
/// updates.
pub fn select_weight_dtypes(train: &TrainSpec) -> ParamDtypes {
    let dtype = select_compute_dtype(train.precision);
    ParamDtypes { compute: dtype, updated: if train.rounds_stochastically() { dtype } else { Dtype::F32 } }
}

/// Initialises this rank's elements of the selected parameters of unit `u`.
///
/// A value depends only on the seed and the logical element, so the weights are the same for every
/// sharding. Afterwards, a 16-bit compute copy is valid only for the selected parameters.
fn initialise_unit(engine: &ZeroEngine, ops: &dyn Ops, u: usize, seed: u64, selects: impl Fn(&str) -> bool) {
    let (unit, resident, computed) =
        (&engine.shards[u].unit, engine.resident_range(u), engine.compute_range(u));
    let longest = resident.len().max(computed.len());
    let mut buffer = ops.alloc_staging(Dtype::F32, INIT_BUFFER_ELEMENTS.min(longest));
    let is_selected = |seg: &Segment| selects(&unit.params[seg.param].name);
    for seg in unit.list_segments(resident.clone()).iter().filter(|seg| is_selected(seg)) {
        for from in seg.flat.clone().step_by(INIT_BUFFER_ELEMENTS) {
            let range = from..seg.flat.end.min(from + INIT_BUFFER_ELEMENTS);
            let values = &mut buffer.host_mut()[..range.len()];
            fill_initial_values(unit, range.clone(), seed, &selects, values);
            engine.write_resident(u, range.start - resident.start, View::from(&*values));
        }
    }
    if resident == computed {
        return engine.refresh_compute_copy(u);
    }
    // The compute copy has more elements than this rank's shard of the fp32 master weights.
    for offset in (0..computed.len()).step_by(INIT_BUFFER_ELEMENTS) {
        let values = &mut buffer.host_mut()[..INIT_BUFFER_ELEMENTS.min(computed.len() - offset)];
        values.fill(0.0);
        let from = computed.start + offset;
        fill_initial_values(unit, from..from + values.len(), seed, &selects, values);
        engine.update_compute_copy(u, offset, View::from(&*values));
    }
}

/// The number of elements of the host buffer through which initial values pass.
const INIT_BUFFER_ELEMENTS: usize = 1 << 20;

/// Writes the initial values of a flat range of a unit to `out`. Skips parameters that are not
/// selected.
fn fill_initial_values(
    unit: &ParamUnit,
    range: Range<usize>,
    seed: u64,
    selects: impl Fn(&str) -> bool,
    out: &mut [f32],
) {
    for seg in unit.list_segments(range.clone()) {
        let spec = &unit.params[seg.param];
        if !selects(&spec.name) {
            continue;
        }
        let out = &mut out[seg.flat.start - range.start..seg.flat.end - range.start];
        let first = seg.elements.start as u64;
        match spec.init {
            ParamInit::Normal(std) => fill_normal(out, seed, Purpose::Init, &spec.name, first, std),
            ParamInit::Uniform(bound) => {
                fill_uniform(out, seed, Purpose::Init, &spec.name, first, -bound, bound);
            }
            ParamInit::Ones => out.fill(1.0),
            ParamInit::Zeros => out.fill(0.0),
        }
    }
}

impl ShardedModel {
    /// Allocates optimizer states for the parameters that this rank updates, and activation
    /// buffers.
    pub fn create_optimizer(self) -> Result<ModelWithOptimizer> {
        let ShardedModel { train, model, engine, ops, expert_layout } = self;
        let units: Vec<ParamUnit> = engine.shards.iter().map(|s| s.unit.clone()).collect();
        let ranges = (0..units.len()).map(|u| engine.update_range(u));
        let offload = train.zero.offload.as_ref();
        let seed = train.rounds_stochastically().then_some(train.seed);
        let optimizer = Optimizer::new(
            ops.as_ref(),
            &train.optimizer,
            &units,
            &model.tied_weights(),
            ranges,
            offload,
            seed,
        )
        .map_err(combine_train_mistakes)?;
        let (b, t) = (train.batch.micro as usize, train.data.seq_len as usize);
        let layers = units.iter().filter(|u| !u.holds_experts()).count() - 2;
        let first = find_first_backward_layer(&units);
        let (recompute, dtype, memory) = (train.recompute, engine.param_dtypes().compute, ops.as_ref());
        let experts =
            MoeTrainer::new(&ops, model.as_ref(), expert_layout.as_ref(), &engine, b * t, recompute);
        let work =
            || MicroBatchActivations::new(memory, model.as_ref(), layers, b, t, recompute, first, dtype);
        let trainer = Trainer {
            activations: with_alloc_label("activations", work),
            batch: MicroBatch {
                sequences: b,
                seq_len: t,
                tokens: vec![0; b * t],
                labels: vec![0; b * t],
                starts: vec![0; b * t],
                window_starts: Vec::new(),
                first_sample: None,
            },
            experts,
            model,
            engine,
            optimizer,
            ops,
            micro_batch_size: b,
            recompute: train.recompute,
            clip_norm: train.clip_norm,
            update_after: Event::default(),
            loss_scale: LossScale::new(
                (train.precision == Precision::Fp16).then(|| train.loss_scale.clone()),
            ),
        };
        Ok(ModelWithOptimizer { train, trainer })
    }
}

impl ModelWithOptimizer {
    /// Completes the trainer. The learning rate of every step follows from the job's schedule.
    pub fn into_trainer(self) -> UninitializedTrainer {
        UninitializedTrainer { trainer: self.trainer, train: self.train }
    }
}

impl UninitializedTrainer {
    /// Returns the resolved `train` section.
    pub fn train_spec(&self) -> &TrainSpec {
        &self.train
    }

    /// Initialises the parameters whose names `selects` accepts.
    pub fn initialise_params(&self, selects: impl Fn(&str) -> bool) {
        let (engine, ops) = (&self.trainer.engine, self.trainer.ops.as_ref());
        for u in 0..engine.shards.len() {
            initialise_unit(engine, ops, u, self.train.seed, &selects);
        }
    }

    /// Initialises all parameters and starts at step 0.
    pub fn start_fresh(self) -> RunningTrainer {
        self.initialise_params(|_| true);
        self.start_at(Cursor::default())
    }

    /// Starts at `position` with the parameters and states that were loaded or initialised.
    pub fn start_at(self, position: Cursor) -> RunningTrainer {
        RunningTrainer { trainer: self.trainer, train: self.train, position }
    }
}

impl RunningTrainer {
    /// Runs one step. Returns its outcome and learning rate. Collective: every rank must call it.
    ///
    /// If the loss or the gradient norm is not finite, no parameter changes and the step is not
    /// counted. If the step was skipped because fp16 gradients overflowed, its samples still count
    /// as consumed, so that the next step uses other samples.
    pub fn run_step(
        &mut self,
        source: &dyn SampleSource,
        report: RankStepReport,
    ) -> Result<(StepOutcome, f64)> {
        let lr = compute_learning_rate(
            &self.train.schedule,
            self.train.optimizer.lr,
            self.train.steps,
            self.position.step,
        );
        let outcome = self.trainer.accumulate_gradients(source, self.position.consumed_samples, report)?;
        let outcome = self.trainer.update_parameters(outcome, lr, self.position.step)?;
        let samples = self.trainer.global_batch();
        // At the smallest loss scale the step is not skipped. The overflowed gradient norm is then
        // an error, as in every other precision.
        let skipped = outcome.skipped && self.trainer.loss_scale.record_overflow();
        let outcome = StepOutcome { skipped, ..outcome };
        if skipped {
            self.position.consumed_samples += samples;
        } else if outcome.loss.is_finite() && outcome.grad_norm.is_finite() {
            self.trainer.loss_scale.record_step();
            self.position.step += 1;
            self.position.consumed_samples += samples;
            self.position.tokens += samples * u64::from(self.train.data.seq_len);
        }
        Ok((outcome, lr))
    }

    /// Applies new values of the keys that may change while a job runs.
    pub fn apply_reloaded_values(&mut self, values: &ReloadTrain) {
        self.train.steps = values.steps;
        self.train.schedule.min_lr = values.min_lr;
        self.train.schedule.decay_steps = values.decay_steps;
    }

    /// Returns the resolved `train` section, with reloaded values.
    pub fn train_spec(&self) -> &TrainSpec {
        &self.train
    }
}
