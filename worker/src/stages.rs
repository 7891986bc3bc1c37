//! The runtime is built in stages, each its own type: spec → parameters → sharded → optimizer bound → schedule bound →
//! running. What isn't built yet has no method to call.
use crate::{
    error::{Error, Fault, Result, of_job},
    experts::{self, Placement},
    model::{self, Batch, Model},
    optim::{Optimizer, schedule::lr_at},
    params::{Init, Segment, Unit},
    rng::{Purpose, fill_normal, fill_uniform},
    train::{
        experts::Experts,
        loss_scale::LossScale,
        step::{Outcome, Source, Trainer, Word},
        workspace::Workspace,
    },
    trained::{self, LORA_FROM, first_backward},
    zero::{
        Policy,
        engine::{Engine, Weights},
        queue::Queue,
    },
};
use ckpt::peft::AdapterConfig;
use comm::Comm;
use contract::job::{LoraSpec, LoraTargets, ModelSpec, Precision, ReloadTrain, TrainSpec};
use device::{Dtype, Ops, View, needed_for, storage::Event};
use std::{ops::Range, sync::Arc};

/// Stage 1: the job's numbers with those of the tokenizer filled in.
pub struct Spec {
    train: TrainSpec,
}

/// Stage 2: the model and its parameters by name and shape; no values yet.
pub struct Parameters {
    train: TrainSpec,
    model: Box<dyn Model>,
    /// Trained elements.
    count: u64,
}

/// Stage 3: this rank has memory for its part of every parameter.
pub struct Sharded {
    train: TrainSpec,
    model: Arc<dyn Model>,
    engine: Engine,
    ops: Arc<dyn Ops>,
    placement: Option<Placement>,
}

/// Stage 4: the optimizer's states exist for what this rank updates.
pub struct OptimizerBound {
    train: TrainSpec,
    trainer: Trainer,
}

/// Stage 5: the learning rate of every step is known. A checkpoint can be loaded into it.
pub struct ScheduleBound {
    /// What takes the steps.
    pub trainer: Trainer,
    train: TrainSpec,
}

/// Stage 6: takes steps.
pub struct Running {
    /// What takes the steps.
    pub trainer: Trainer,
    train: TrainSpec,
    /// Where it is.
    pub at: Cursor,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cursor {
    /// Optimizer steps done.
    pub step: u64,
    /// Samples consumed: the next step begins with this one.
    pub consumed_samples: u64,
    /// Tokens trained on.
    pub tokens: u64,
}

/// The model's numbers with those that follow from the tokenizer and the data.
pub fn resolve(spec: &ModelSpec, vocab: u32, seq_len: u32) -> std::result::Result<ModelSpec, Fault> {
    const FROM: &str = "train.model.from";
    let mut s = spec.clone();
    if let Some(folder) = &spec.from {
        let read = model::read_folder(folder).map_err(|message| Fault { key: FROM, message })?;
        (s.family, s.vocab_size, s.max_position_embeddings) = (read.0.into(), read.1, read.2);
    }
    let fault = |key, name: &str, why: String| match &spec.from {
        Some(folder) => {
            let message = format!("{name} in {}: {why}", folder.join("config.json").display());
            Fault { key: FROM, message }
        }
        None => Fault { key, message: why },
    };
    if s.vocab_size == 0 {
        s.vocab_size = vocab;
    }
    if s.vocab_size < vocab {
        let to_do = if s.from.is_some() { "use the folder's tokenizer" } else { "leave it out or raise it" };
        let why = format!("{} is smaller than the tokenizer's {vocab} tokens; {to_do}", s.vocab_size);
        return Err(fault("train.model.vocab_size", "vocab_size", why));
    }
    if s.max_position_embeddings == 0 {
        s.max_position_embeddings = seq_len;
    }
    if s.max_position_embeddings < seq_len {
        let why = format!("{} is shorter than data.seq_len {seq_len}", s.max_position_embeddings);
        return Err(fault("train.model.max_position_embeddings", "max_position_embeddings", why));
    }
    Ok(s)
}

/// Adapters with the numbers of the folder that they come from.
pub fn resolve_lora(spec: Option<&LoraSpec>) -> std::result::Result<Option<LoraSpec>, Fault> {
    let Some(spec) = spec else { return Ok(None) };
    let Some(folder) = &spec.from else { return Ok(Some(spec.clone())) };
    let fault = |e: ckpt::CkptError| Fault { key: LORA_FROM, message: e.to_string() };
    let AdapterConfig { rank, alpha, rslora, dropout, targets, .. } =
        AdapterConfig::read(folder).map_err(fault)?;
    let targets = LoraTargets::Names(targets);
    let dropout = spec.dropout.or(Some(dropout));
    Ok(Some(LoraSpec { from: spec.from.clone(), rank, alpha, dropout, rslora, targets }))
}

impl Spec {
    /// `vocab`: the tokenizer's number of tokens.
    pub fn new(train: &TrainSpec, vocab: u32) -> Result<Self> {
        let mut train = train.clone();
        train.model = resolve(&train.model, vocab, train.data.seq_len).map_err(|f| of_job(&[f]))?;
        train.lora = resolve_lora(train.lora.as_ref()).map_err(|f| of_job(&[f]))?;
        Ok(Spec { train })
    }

    /// Builds the model, lists its parameters and decides which of them are trained.
    pub fn parameters(self) -> Result<Parameters> {
        let mut model = model::build_with(&self.train.model, &self.train.experts, self.train.data.seq_len)
            .map_err(|e| Error::job(format!("train.model: {e}")))?;
        let anywhere = Placement::anywhere(model.as_ref());
        let units = trained::units(model.as_mut(), anywhere.as_ref(), &self.train).map_err(|f| of_job(&f))?;
        let count = units.iter().map(|u| u.trained_len() as u64).sum();
        Ok(Parameters { train: self.train, model, count })
    }
}

impl Parameters {
    /// Number of trained elements.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Allocates this rank's part, all zeros.
    pub fn shard(self, comm: Arc<dyn Comm>, ops: Arc<dyn Ops>) -> Result<Sharded> {
        let train = self.train;
        let queue = Queue::new(comm, ops.clone())
            .map_err(|e| Error::cluster(format!("communication thread: {e}")))?;
        let layers = self.model.units().len() - 2;
        let placement = Placement::new(&train.experts, self.model.as_ref(), layers, queue.comm().world())
            .map_err(|(key, why)| Error::job(format!("{key}: {why}")))?;
        let mut units = experts::units(self.model.as_ref(), placement.as_ref());
        trained::choose(&mut units, &self.model.ties(), &train).map_err(|f| of_job(&f))?;
        let policy = Policy::of(&train);
        let slots = (train.batch.global / train.batch.micro) as usize;
        let (zero, weights) = (&train.zero, weights_of(&train));
        let held = (zero.prefetch as usize, zero.max_live_parameters);
        let engine = Engine::new(units, policy, slots, held, weights, queue, ops.clone())?;
        let mut model = self.model;
        model.place(ops.as_ref());
        Ok(Sharded { train, model: model.into(), engine, ops, placement })
    }
}

/// Element type that a precision computes with and keeps activations in.
pub fn dtype_of(precision: Precision) -> Dtype {
    match precision {
        Precision::Fp32 => Dtype::F32,
        Precision::Bf16 | Precision::Fp8 => Dtype::Bf16,
        Precision::Fp16 => Dtype::F16,
    }
}

/// Element types of the parameters that a job trains.
pub fn weights_of(train: &TrainSpec) -> Weights {
    let dtype = dtype_of(train.precision);
    Weights { dtype, updated: if train.rounds_stochastically() { dtype } else { Dtype::F32 } }
}

/// Fills the parameters of a unit that lie here, by logical element, so that any sharding gets the same weights; those whose
/// names are meant. What is computed with in 16 bits is then right of these alone.
fn initialise(engine: &Engine, ops: &dyn Ops, u: usize, seed: u64, meant: impl Fn(&str) -> bool) {
    let (unit, resident, computed) = (&engine.shards[u].unit, engine.resident(u), engine.computed(u));
    let mut room = ops.staging(Dtype::F32, PASSING.min(resident.len().max(computed.len())));
    let named = |seg: &Segment| meant(&unit.params[seg.param].name);
    for seg in unit.segments(resident.clone()).iter().filter(|seg| named(seg)) {
        for from in seg.flat.clone().step_by(PASSING) {
            let range = from..seg.flat.end.min(from + PASSING);
            let values = &mut room.host_mut()[..range.len()];
            first_values(unit, range.clone(), seed, &meant, values);
            engine.fill_resident(u, range.start - resident.start, View::from(&*values));
        }
    }
    if resident == computed {
        return engine.refresh(u);
    }
    // More is computed with than this rank keeps in fp32.
    for at in (0..computed.len()).step_by(PASSING) {
        let values = &mut room.host_mut()[..PASSING.min(computed.len() - at)];
        values.fill(0.0);
        let from = computed.start + at;
        first_values(unit, from..from + values.len(), seed, &meant, values);
        engine.round_from(u, at, View::from(&*values));
    }
}

/// First values that exist on the host only on their way.
const PASSING: usize = 1 << 20;

/// The first values of a flat range of a unit, where they are meant.
fn first_values(unit: &Unit, range: Range<usize>, seed: u64, meant: impl Fn(&str) -> bool, out: &mut [f32]) {
    for seg in unit.segments(range.clone()) {
        let spec = &unit.params[seg.param];
        if !meant(&spec.name) {
            continue;
        }
        let out = &mut out[seg.flat.start - range.start..seg.flat.end - range.start];
        let first = seg.elements.start as u64;
        match spec.init {
            Init::Normal(std) => fill_normal(out, seed, Purpose::Init, &spec.name, first, std),
            Init::Uniform(bound) => {
                fill_uniform(out, seed, Purpose::Init, &spec.name, first, -bound, bound);
            }
            Init::Ones => out.fill(1.0),
            Init::Zeros => out.fill(0.0),
        }
    }
}

impl Sharded {
    /// Allocates optimizer states for what this rank updates.
    pub fn bind_optimizer(self) -> Result<OptimizerBound> {
        let Sharded { train, model, engine, ops, placement } = self;
        let units: Vec<Unit> = engine.shards.iter().map(|s| s.unit.clone()).collect();
        let ranges = (0..units.len()).map(|u| engine.updated(u));
        let offload = train.zero.offload.as_ref();
        let seed = train.rounds_stochastically().then_some(train.seed);
        let optimizer =
            Optimizer::bind(ops.as_ref(), &train.optimizer, &units, &model.ties(), ranges, offload, seed)
                .map_err(|f| of_job(&f))?;
        let (b, t) = (train.batch.micro as usize, train.data.seq_len as usize);
        let layers = units.iter().filter(|u| !u.holds_experts()).count() - 2;
        let first = first_backward(&units);
        let (recompute, dtype, memory) = (train.recompute, engine.weights().dtype, ops.as_ref());
        let experts = Experts::new(&ops, model.as_ref(), placement.as_ref(), &engine, b * t, recompute);
        let work = || Workspace::new(memory, model.as_ref(), layers, b, t, recompute, first, dtype);
        let trainer = Trainer {
            work: needed_for("activations", work),
            batch: Batch {
                b,
                t,
                tokens: vec![0; b * t],
                labels: vec![0; b * t],
                starts: vec![0; b * t],
                windowed: Vec::new(),
                first: None,
            },
            experts,
            model,
            engine,
            optimizer,
            ops,
            micro: b,
            recompute: train.recompute,
            clip_norm: train.clip_norm,
            copied: Event::default(),
            loss_scale: LossScale::new(
                (train.precision == Precision::Fp16).then(|| train.loss_scale.clone()),
            ),
        };
        Ok(OptimizerBound { train, trainer })
    }
}

impl OptimizerBound {
    /// Fixes the learning rate of every step.
    pub fn bind_schedule(self) -> ScheduleBound {
        ScheduleBound { trainer: self.trainer, train: self.train }
    }
}

impl ScheduleBound {
    /// The job's section, resolved.
    pub fn train(&self) -> &TrainSpec {
        &self.train
    }

    /// Gives parameters whose names are meant their first values.
    pub fn initialise(&self, meant: impl Fn(&str) -> bool) {
        let (engine, ops) = (&self.trainer.engine, self.trainer.ops.as_ref());
        for u in 0..engine.shards.len() {
            initialise(engine, ops, u, self.train.seed, &meant);
        }
    }

    /// Initialises the parameters; ready to take steps from step 0 on.
    pub fn fresh(self) -> Running {
        self.initialise(|_| true);
        self.resumed(Cursor::default())
    }

    /// Ready to take steps from `at` on, with the state that was loaded.
    pub fn resumed(self, at: Cursor) -> Running {
        Running { trainer: self.trainer, train: self.train, at }
    }
}

impl Running {
    /// Takes one step. A loss or norm that is not finite changes no parameter, and the step doesn't count. The samples of a
    /// step that was skipped for an overflow are spent all the same.
    pub fn step(&mut self, source: &dyn Source, word: Word) -> Result<(Outcome, f64)> {
        let lr = lr_at(&self.train.schedule, self.train.optimizer.lr, self.train.steps, self.at.step);
        let outcome = self.trainer.accumulate(source, self.at.consumed_samples, word)?;
        let outcome = self.trainer.update(outcome, lr, self.at.step)?;
        let samples = self.trainer.global_batch();
        // Where the loss can't be scaled less it is a norm that isn't finite, as in every precision.
        let skipped = outcome.skipped && self.trainer.loss_scale.overflow();
        let outcome = Outcome { skipped, ..outcome };
        if skipped {
            self.at.consumed_samples += samples;
        } else if outcome.loss.is_finite() && outcome.grad_norm.is_finite() {
            self.trainer.loss_scale.good_step();
            self.at.step += 1;
            self.at.consumed_samples += samples;
            self.at.tokens += samples * u64::from(self.train.data.seq_len);
        }
        Ok((outcome, lr))
    }

    /// Goes on with other values of the keys that may change while a job runs.
    pub fn reload(&mut self, values: &ReloadTrain) {
        self.train.steps = values.steps;
        self.train.schedule.min_lr = values.min_lr;
        self.train.schedule.decay_steps = values.decay_steps;
    }

    /// The job's section, resolved.
    pub fn train(&self) -> &TrainSpec {
        &self.train
    }
}
