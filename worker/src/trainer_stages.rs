//! Builds the trainer of a rank in four stages, each a separate type with only those methods that
//! are possible at this stage. The stages are [`ResolvedSpec`], [`BuiltModel`], [`ShardedModel`],
//! [`UninitializedTrainer`] and [`RunningTrainer`].
mod host_memory;
mod initial_values;
mod resolve;

pub(crate) use resolve::{resolve_lora_section, resolve_model_section};

use crate::{
    error::{Result, build_thread_start_error, combine_train_section_errors},
    expert_layout::{self, ExpertLayout},
    model::{self, MicroBatch, Model},
    optim::Optimizer,
    param_groups,
    train::{
        activations::{ActivationPlan, MicroBatchActivations},
        loss_scale::LossScale,
        moe::MoeTrainer,
        running_trainer::{Cursor, RunningTrainer},
        step::Trainer,
    },
    zero::{
        ShardingPolicy, collective_queue::CollectiveQueue, engine::ZeroEngine, param_dtypes::ParamDtypes,
    },
};
use comm::Comm;
use device::{Buf, Ops, storage::Event};
use diagnostic::Diagnostic;
use host_memory::check_parameters_fit;
use initial_values::initialise_unit;
use jobspec::{Precision, TrainSpec};
use std::sync::Arc;

/// Stage 1 of building a trainer: the job's `train` section after missing settings, such as the
/// vocabulary size, were added.
pub struct ResolvedSpec {
    train: TrainSpec,
}

/// Stage 2 of building a trainer: the model with the names and shapes of its parameters, but
/// without values.
pub struct BuiltModel {
    train: TrainSpec,
    model: Model,
    trained_count: u64,
}

/// Stage 3 of building a trainer: the model, and zeroed memory for this rank's shard of every
/// parameter.
pub struct ShardedModel {
    train: TrainSpec,
    model: Arc<Model>,
    engine: ZeroEngine,
    ops: Arc<dyn Ops>,
    expert_layout: Option<ExpertLayout>,
}

/// Stage 4 of building a trainer: a complete trainer whose parameters have no values yet. The
/// values are then loaded from a checkpoint or initialised, and the trainer becomes a
/// [`RunningTrainer`].
pub struct UninitializedTrainer {
    /// The trainer, which computes the steps.
    pub trainer: Trainer,
    train: TrainSpec,
}

impl ResolvedSpec {
    /// Returns the job's `train` section, completed with the vocabulary size and with settings from
    /// the directories of the pretrained model and LoRA adapters. `vocab` is the vocabulary size of
    /// the tokenizer.
    pub fn new(train: &TrainSpec, vocab: u32) -> Result<Self> {
        let mut train = train.clone();
        train.model = resolve_model_section(&train.model, vocab, train.data.seq_len)?;
        train.lora = resolve_lora_section(train.lora.as_ref())?;
        Ok(ResolvedSpec { train })
    }

    /// Builds the model (names and shapes of parameters, without values), and decides which of its
    /// parameters are trained.
    pub fn build_model(self) -> Result<BuiltModel> {
        let mut model = model::build_model_with_router_losses(
            &self.train.model,
            &self.train.experts,
            self.train.data.seq_len,
        )
        .map_err(|e| Diagnostic::from(e).with_subject("train.model"))?;
        let replicated = ExpertLayout::for_replicated_experts(&model);
        let units = param_groups::build_trainable_units(&mut model, replicated.as_ref(), &self.train)
            .map_err(combine_train_section_errors)?;
        let trained_count = units.iter().map(|u| u.trained_len() as u64).sum();
        Ok(BuiltModel { train: self.train, model, trained_count })
    }
}

impl BuiltModel {
    /// Returns the number of elements of all trained parameters of the model.
    pub fn trained_element_count(&self) -> u64 {
        self.trained_count
    }

    /// Allocates zeroed memory for this rank's shard of every parameter unit (tensors that are
    /// gathered together). Collective: every rank must call it.
    pub fn shard_model(self, comm: Arc<dyn Comm>, ops: Arc<dyn Ops>) -> Result<ShardedModel> {
        let train = self.train;
        let queue = CollectiveQueue::new(comm, ops.clone())
            .map_err(|e| build_thread_start_error("communication", &e))?;
        let expert_layout = ExpertLayout::new(&train.experts, &self.model, queue.comm().world_size())?;
        let mut units = expert_layout::build_units_with_experts(&self.model, expert_layout.as_ref());
        param_groups::mark_trained_params(&mut units, &self.model.tied_weights(), &train)
            .map_err(combine_train_section_errors)?;
        let policy = ShardingPolicy::for_job(&train);
        let micro_batches = (train.batch.global / train.batch.micro) as usize;
        let (zero, weights) = (&train.zero, ParamDtypes::for_job(&train));
        let retention = (zero.prefetch as usize, zero.max_live_parameters);
        if ops.is_host() {
            check_parameters_fit(&units, policy, queue.comm().world_size(), weights)?;
        }
        let engine = ZeroEngine::new(units, policy, micro_batches, retention, weights, queue, ops.clone())?;
        let mut model = self.model;
        model.move_constants_to_device(ops.as_ref());
        Ok(ShardedModel { train, model: model.into(), engine, ops, expert_layout })
    }
}

impl ShardedModel {
    /// Completes the trainer by allocating this rank's optimizer states and activation buffers, but
    /// gives the parameters no values yet.
    pub fn into_uninitialized_trainer(self) -> Result<UninitializedTrainer> {
        let ShardedModel { train, model, engine, ops, expert_layout } = self;
        let units = engine.clone_units();
        let ranges = (0..units.len()).map(|u| engine.optimizer_range(u));
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
        .map_err(combine_train_section_errors)?;
        let (b, t) = (train.batch.micro as usize, train.data.seq_len as usize);
        let experts = MoeTrainer::new(&ops, &model, expert_layout.as_ref(), &engine, b * t, train.recompute);
        let plan = ActivationPlan::new(&model, &train, &units);
        let trainer = Trainer {
            activations: MicroBatchActivations::new(ops.as_ref(), &plan),
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
            norm_staging: Buf::default(),
            loss_scale: LossScale::new(
                (train.precision == Precision::Fp16).then(|| train.loss_scale.clone()),
            ),
        };
        Ok(UninitializedTrainer { trainer, train })
    }
}

impl UninitializedTrainer {
    /// Returns the job's `train` section, completed with values that job.yaml leaves out, such as
    /// the sizes of a pretrained model.
    pub fn train_spec(&self) -> &TrainSpec {
        &self.train
    }

    /// Fills those parameters with random initial values whose names the function `selects`
    /// accepts.
    pub fn initialise_params(&self, selects: impl Fn(&str) -> bool) {
        let (engine, ops) = (&self.trainer.engine, self.trainer.ops.as_ref());
        for u in 0..engine.shards.len() {
            initialise_unit(engine, ops, u, self.train.seed, &selects);
        }
    }

    /// Fills all parameters with random initial values, and returns a trainer that begins a run at
    /// step 0.
    pub fn start_with_random_params(self) -> RunningTrainer {
        self.initialise_params(|_| true);
        self.start_at_position(Cursor::default())
    }

    /// Returns a trainer that continues a run after the steps, samples and tokens counted in
    /// `position`, from parameters that the caller has already filled.
    pub fn start_at_position(self, position: Cursor) -> RunningTrainer {
        RunningTrainer::new(self.trainer, self.train, position)
    }
}
