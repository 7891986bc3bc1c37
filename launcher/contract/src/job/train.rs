//! `train`: the model, data and hyper-parameters of the built-in training.
use super::{
    data::{DataSpec, decode_data},
    decode::{JobDecoder, JobSection},
    experts::{self, ExpertsSpec},
    lora::{self, LoraSpec},
    model::{ModelSpec, decode_model},
    optimizer::{OptimizerSpec, ScheduleSpec, decode_optimizer, decode_schedule},
    param_groups,
    readers::{
        ReadResult, choice_reader, int_reader, int32_reader, keyword_or_reader, list_reader, number_reader,
        read_boolean, read_positive, read_text, read_verbatim, wrong_type_error,
    },
    sections::read_path,
    yaml::{YamlNode, YamlValue},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `train`: the model, data and hyper-parameters of the built-in training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainSpec {
    /// The model that is trained: its config, or the directory of a pretrained model.
    pub model: ModelSpec,
    /// The distribution of experts over ranks, and the losses of routers.
    #[serde(default)]
    pub experts: ExpertsSpec,
    /// The training data, the tokenizer, and the division into samples.
    pub data: DataSpec,
    /// The ZeRO stage, and the offloading of optimizer states.
    pub zero: ZeroSpec,
    /// The element type of weights and activations.
    pub precision: Precision,
    /// Whether fp32 master weights are kept. Otherwise the optimizer updates the bf16 weights
    /// directly, which only [`Precision::Bf16`] and [`Precision::Fp8`] support.
    #[serde(default = "enabled_by_default")]
    pub master_weights: bool,
    /// The loss scale of [`Precision::Fp16`].
    #[serde(default)]
    pub loss_scale: LossScaleSpec,
    /// The numbers of samples per step and per forward pass.
    pub batch: BatchSpec,
    /// The optimizer and its hyper-parameters.
    pub optimizer: OptimizerSpec,
    /// How the learning rate changes over the steps.
    pub schedule: ScheduleSpec,
    /// The largest global L2 norm of the gradients. Gradients with a larger norm are scaled down to
    /// this norm. `None` disables clipping.
    pub clip_norm: Option<f64>,
    /// The number of optimizer steps after which training ends, counted from step 0 of the first
    /// run.
    pub steps: u64,
    /// The seed of the initial weights and of the order of the data.
    pub seed: u64,
    /// Which activations the backward pass recomputes.
    pub recompute: RecomputeMode,
    /// Whether the results have the same bits for any number of workers. If this value is `false`,
    /// the gradients of micro-batches are summed in their order of arrival. On GPUs, the algorithms
    /// for each matmul and for attention are then also timed, and the fastest ones are used.
    #[serde(rename = "numerics", default = "enabled_by_default", with = "numerics")]
    pub deterministic: bool,
    /// The kernels that compute attention on GPUs.
    #[serde(default)]
    pub attention: AttentionKernels,
    /// Whether a step is submitted to a GPU as CUDA graphs.
    #[serde(default)]
    pub cuda_graphs: CudaGraphMode,
    /// The settings of evaluations during training; `None` for no evaluation.
    pub eval: Option<EvalSpec>,
    /// Name patterns of the parameters that are not trained.
    #[serde(default)]
    pub freeze: Vec<String>,
    /// Name patterns of the parameters that are trained. If the list is empty, all parameters are
    /// trained except those of `freeze`.
    #[serde(default)]
    pub train_only: Vec<String>,
    /// The low-rank adapters, which are the only trained parameters if they are given; `None` for
    /// no adapters.
    #[serde(default)]
    pub lora: Option<LoraSpec>,
}

/// Returns `true`, the value of switches that older stored jobs do not contain.
fn enabled_by_default() -> bool {
    true
}

/// Serializes `deterministic` in the form of checkpoint manifests, as the field `numerics` with the
/// value `Reproducible` or `Fast`.
mod numerics {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    enum Numerics {
        Reproducible,
        Fast,
    }

    pub(super) fn serialize<S: Serializer>(deterministic: &bool, serializer: S) -> Result<S::Ok, S::Error> {
        if *deterministic { Numerics::Reproducible } else { Numerics::Fast }.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
        Numerics::deserialize(deserializer).map(|numerics| matches!(numerics, Numerics::Reproducible))
    }
}

impl TrainSpec {
    /// Returns whether weight updates are rounded stochastically. They are if weights are bf16 and
    /// there are no fp32 master weights.
    pub fn rounds_stochastically(&self) -> bool {
        self.precision.is_bf16() && !self.master_weights
    }
}

/// `train.zero`: the sharding of the training state over the workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ZeroSpec {
    /// The ZeRO stage. Stage 0 shards nothing, stage 1 optimizer states, stage 2 also gradients,
    /// and stage 3 also parameters.
    pub stage: u8,
    /// The number of transformer blocks whose parameters stage 3 gathers ahead of their use.
    pub prefetch: u32,
    /// The largest number of gathered parameter elements that stage 3 keeps until their next use in
    /// a step.
    #[serde(default)]
    pub max_live_parameters: u64,
    /// Where offloaded optimizer states are stored; `None` for the memory of the computing device.
    #[serde(default)]
    pub offload: Option<OffloadTarget>,
}

/// `train.zero.offload`: where offloaded optimizer states are stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "PathBuf", into = "PathBuf")]
pub enum OffloadTarget {
    /// The memory of the host. This value applies to training on GPUs.
    Cpu,
    /// Files in the directory at this path, relative to the workdir.
    Files(PathBuf),
}

impl From<PathBuf> for OffloadTarget {
    fn from(place: PathBuf) -> Self {
        if place.as_os_str() == "cpu" { OffloadTarget::Cpu } else { OffloadTarget::Files(place) }
    }
}

impl From<OffloadTarget> for PathBuf {
    fn from(place: OffloadTarget) -> Self {
        match place {
            OffloadTarget::Cpu => "cpu".into(),
            OffloadTarget::Files(directory) => directory,
        }
    }
}

/// `train.precision`: the element type of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    /// 32-bit floats (fp32) for all values.
    Fp32,
    /// bfloat16. Optimizer states, sums of gradients and statistics are fp32, and so are the master
    /// weights if they are kept.
    Bf16,
    /// IEEE half precision with a loss scale ([`LossScaleSpec`]). Master weights, optimizer states,
    /// sums of gradients and statistics are fp32.
    Fp16,
    /// bfloat16, but the matmuls of the layers use fp8: E4M3 for weights and activations, E5M2 for
    /// gradients.
    Fp8,
}

impl Precision {
    /// Returns whether weights and activations are stored as bfloat16, as with `bf16` and `fp8`.
    pub fn is_bf16(self) -> bool {
        matches!(self, Precision::Bf16 | Precision::Fp8)
    }

    /// Returns the name of the precision in job.yaml.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
            Precision::Fp8 => "fp8",
        }
    }
}

/// `train.loss_scale`: the dynamic loss scale of `precision: fp16`. Fields have DeepSpeed's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaleSpec {
    /// The base-2 logarithm of the initial loss scale.
    pub initial_scale_power: u32,
    /// The number of steps without overflow after which the scale doubles.
    pub loss_scale_window: u64,
    /// The smallest loss scale. Training fails at an overflow that would reduce the scale below
    /// this value.
    pub min_loss_scale: f64,
}

impl Default for LossScaleSpec {
    fn default() -> Self {
        LossScaleSpec { initial_scale_power: 16, loss_scale_window: 2000, min_loss_scale: 1.0 }
    }
}

/// `train.batch`: the numbers of samples per step and per forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSpec {
    /// The number of samples per optimizer step over all workers (the global batch). A multiple of
    /// `micro`.
    pub global: u32,
    /// The number of samples per forward pass of a worker (the micro-batch). Micro-batches are also
    /// the units of fixed-order sums (docs/numerics.md).
    pub micro: u32,
}

/// `train.attention`: the kernels that compute attention on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionKernels {
    /// The kernels of launch. With `deterministic: false`, the kernels of cuDNN if they are
    /// available and faster.
    #[default]
    Auto,
    /// Only the kernels of launch.
    Flash,
    /// Only the kernels of cuDNN.
    Cudnn,
}

impl AttentionKernels {
    /// Returns the name of the choice in job.yaml.
    pub fn name(self) -> &'static str {
        match self {
            AttentionKernels::Auto => "auto",
            AttentionKernels::Flash => "flash",
            AttentionKernels::Cudnn => "cudnn",
        }
    }
}

/// `train.cuda_graphs`: whether a step is submitted to a GPU as CUDA graphs. The setting does not
/// change results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CudaGraphMode {
    /// Graphs are used if a measurement shows that steps are faster with them.
    #[default]
    Auto,
    /// Graphs are always used.
    Always,
    /// Graphs are never used.
    Never,
}

impl CudaGraphMode {
    /// Returns the value of the mode in job.yaml.
    pub fn name(self) -> &'static str {
        match self {
            CudaGraphMode::Auto => "auto",
            CudaGraphMode::Always => "true",
            CudaGraphMode::Never => "false",
        }
    }
}

/// `train.recompute`: which activations the backward pass recomputes instead of reading stored
/// values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecomputeMode {
    /// No activations are recomputed. All of them are stored.
    None,
    /// The activations of each transformer block are recomputed from the block's input, which is
    /// stored.
    Block,
}

/// `train.eval`: the settings of evaluations during training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalSpec {
    /// The number of optimizer steps between evaluations.
    pub every: u64,
    /// Paths and globs of the evaluation text; empty for the held-out share of `data`.
    pub files: Vec<String>,
    /// The largest number of samples of one evaluation.
    pub samples: u32,
    /// The prompt that is continued after each evaluation; `None` for no generation.
    #[serde(default)]
    pub sample: Option<GenerationSpec>,
}

/// `train.eval.sample`: a prompt that the model continues after each evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerationSpec {
    /// The text that the model continues.
    pub prompt: String,
    /// The largest number of tokens that are generated.
    pub tokens: u32,
    /// The sampling temperature; 0 to always choose the most probable token.
    pub temperature: f64,
}

/// The names of `train.precision` in job.yaml, and what they mean.
const PRECISIONS: &[(&str, Precision)] = &[
    ("fp32", Precision::Fp32),
    ("bf16", Precision::Bf16),
    ("fp16", Precision::Fp16),
    ("fp8", Precision::Fp8),
];

/// Decodes the section `train` of job.yaml. Reports errors to `d`.
pub(crate) fn decode_train(d: &mut JobDecoder, t: &JobSection<'_>) -> TrainSpec {
    let model = decode_model(d, t);
    let optimizer = decode_optimizer(d, t);
    // A run without steps converts the weights of `model.from`.
    let min_steps = u64::from(model.from.is_none());
    let steps = d.decode_value(t, "train.steps", int_reader(min_steps..=u64::MAX));
    TrainSpec {
        data: decode_data(d, t, model.from.as_deref()),
        model,
        experts: experts::decode_experts(d, t),
        zero: decode_zero(d, t),
        precision: d.decode_value(t, "train.precision", choice_reader(PRECISIONS)),
        master_weights: d.decode_value(t, "train.master_weights", read_boolean),
        loss_scale: decode_loss_scale(d, t),
        batch: decode_batch(d, t),
        schedule: decode_schedule(d, t, optimizer.lr, steps),
        optimizer,
        clip_norm: d.decode_value(
            t,
            "train.clip_norm",
            keyword_or_reader("off", None, |n| read_positive(n).map(Some)),
        ),
        steps,
        seed: d.decode_value(t, "train.seed", int_reader(0..=u64::MAX)),
        recompute: d.decode_value(
            t,
            "train.recompute",
            choice_reader(&[("none", RecomputeMode::None), ("block", RecomputeMode::Block)]),
        ),
        deterministic: d.decode_value(t, "train.deterministic", read_boolean),
        attention: d.decode_value(
            t,
            "train.attention",
            choice_reader(&[
                ("auto", AttentionKernels::Auto),
                ("flash", AttentionKernels::Flash),
                ("cudnn", AttentionKernels::Cudnn),
            ]),
        ),
        cuda_graphs: d.decode_value(
            t,
            "train.cuda_graphs",
            keyword_or_reader("auto", CudaGraphMode::Auto, |node| {
                read_boolean(node).map(|on| if on { CudaGraphMode::Always } else { CudaGraphMode::Never })
            }),
        ),
        eval: decode_eval(d, t),
        freeze: d
            .decode_optional(t, "train.freeze", list_reader("a list of patterns", read_text))
            .unwrap_or_default(),
        train_only: d.decode_optional(t, "train.train_only", param_groups::read_patterns).unwrap_or_default(),
        lora: lora::decode_lora(d, t),
    }
}

fn decode_zero(d: &mut JobDecoder, train: &JobSection<'_>) -> ZeroSpec {
    let t = d.open_section(train, "train.zero");
    ZeroSpec {
        stage: d.decode_value(&t, "train.zero.stage", int32_reader(0..=3)) as u8,
        prefetch: d.decode_value(&t, "train.zero.prefetch", int32_reader(0..=64)),
        max_live_parameters: d.decode_value(&t, "train.zero.max_live_parameters", int_reader(0..=u64::MAX)),
        offload: d.decode_value(
            &t,
            "train.zero.offload",
            keyword_or_reader("none", None, |n| read_offload(n).map(Some)),
        ),
    }
}

/// Reads `train.zero.offload`: `{optimizer: cpu}` or `{optimizer: path}`.
fn read_offload(node: &YamlNode) -> ReadResult<OffloadTarget> {
    const WHAT: &str = "`{optimizer: cpu}` or `{optimizer: path}`";
    match &node.value {
        YamlValue::Map(entries) => match entries.as_slice() {
            [only] if only.key == "optimizer" => read_path(&only.value).map(OffloadTarget::from),
            _ => Err(wrong_type_error(WHAT, node)),
        },
        _ => Err(wrong_type_error(WHAT, node)),
    }
}

fn decode_loss_scale(d: &mut JobDecoder, train: &JobSection<'_>) -> LossScaleSpec {
    let t = d.open_section(train, "train.loss_scale");
    LossScaleSpec {
        initial_scale_power: d.decode_value(&t, "train.loss_scale.initial_scale_power", int32_reader(0..=32)),
        loss_scale_window: d.decode_value(&t, "train.loss_scale.loss_scale_window", int_reader(1..=u64::MAX)),
        min_loss_scale: d.decode_value(&t, "train.loss_scale.min_loss_scale", read_positive),
    }
}

fn decode_batch(d: &mut JobDecoder, train: &JobSection<'_>) -> BatchSpec {
    let t = d.open_section(train, "train.batch");
    BatchSpec {
        global: d.decode_value(&t, "train.batch.global", int32_reader(1..=1 << 20)),
        micro: d.decode_value(&t, "train.batch.micro", int32_reader(1..=1 << 16)),
    }
}

/// Decodes the section `train.eval`. Returns `None` if the job does not contain the section.
fn decode_eval(d: &mut JobDecoder, train: &JobSection<'_>) -> Option<EvalSpec> {
    if d.is_absent(train, "train.eval") {
        return None;
    }
    let t = d.open_section(train, "train.eval");
    Some(EvalSpec {
        every: d.decode_value(&t, "train.eval.every", int_reader(1..=u64::MAX)),
        files: d.decode_value(&t, "train.eval.files", list_reader("a list of files and globs", read_text)),
        samples: d.decode_value(&t, "train.eval.samples", int32_reader(1..=1 << 20)),
        sample: decode_sample(d, &t),
    })
}

/// Decodes the section `train.eval.sample`. Returns `None` if the job does not contain the section.
fn decode_sample(d: &mut JobDecoder, eval: &JobSection<'_>) -> Option<GenerationSpec> {
    const SAMPLE: &str = "train.eval.sample";
    if d.is_absent(eval, SAMPLE) {
        return None;
    }
    let t = d.open_section(eval, SAMPLE);
    let prompt = d.decode_optional(&t, "train.eval.sample.prompt", read_verbatim).unwrap_or_default();
    if prompt.is_empty() && d.are_valid(&[SAMPLE, "train.eval.sample.prompt"]) {
        d.report_error(
            codes::JOB_KEY_REQUIRED,
            SAMPLE,
            format!("`{SAMPLE}` has no `prompt`"),
            "add `prompt`, the text that the model continues",
        );
    }
    Some(GenerationSpec {
        prompt,
        tokens: d.decode_value(&t, "train.eval.sample.tokens", int32_reader(1..=4096)),
        temperature: d.decode_value(
            &t,
            "train.eval.sample.temperature",
            number_reader("a number of 0 or more", |x| x >= 0.0 && (x as f32).is_finite()),
        ),
    })
}
