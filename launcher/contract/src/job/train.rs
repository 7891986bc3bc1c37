//! `train`: the model, data and hyper-parameters of the built-in training.
use super::{
    DataSource,
    decode::{Decoder, Section},
    experts::{self, ExpertsSpec},
    lora::{self, LoraSpec},
    optimizer::{OptimizerSpec, ScheduleSpec, decode_optimizer, decode_schedule},
    read::{ReadResult, boolean, choice, int, int32, keyword_or, list, number, text, verbatim, wrong_type},
    sections::path,
    tune::{self, share},
    yaml::{YamlNode, YamlValue},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The model, data and hyper-parameters of the built-in training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainSpec {
    /// The model.
    pub model: ModelSpec,
    /// The distribution of experts and the losses of the router.
    #[serde(default)]
    pub experts: ExpertsSpec,
    /// The training data.
    pub data: DataSpec,
    /// Sharding over the workers.
    pub zero: ZeroSpec,
    /// The element type of weights and activations.
    pub precision: Precision,
    /// Whether fp32 master weights are kept. Without them the optimizer updates the bf16 weights
    /// directly (`Bf16` and `Fp8`).
    #[serde(default = "enabled")]
    pub master_weights: bool,
    /// The loss scale of `Fp16`.
    #[serde(default)]
    pub loss_scale: LossScaleSpec,
    /// Samples per step and per forward pass.
    pub batch: BatchSpec,
    /// The update rule.
    pub optimizer: OptimizerSpec,
    /// The learning rate over steps.
    pub schedule: ScheduleSpec,
    /// The largest global L2 norm of gradients; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// The total number of optimizer steps, counted from step 0 of the first run.
    pub steps: u64,
    /// The seed of the initial weights and of the order of the data.
    pub seed: u64,
    /// What the backward pass recomputes.
    pub recompute: Recompute,
    /// Whether the bits of the results are the same for any number of workers. Otherwise gradients
    /// are summed in their order of arrival, and on GPUs the fastest algorithm of each matmul and
    /// of attention is selected by measurement on the host.
    #[serde(rename = "numerics", default = "enabled", with = "numerics")]
    pub deterministic: bool,
    /// Which kernels compute attention on GPUs.
    #[serde(default)]
    pub attention: Attention,
    /// Whether a step is submitted to a GPU as CUDA graphs.
    #[serde(default)]
    pub cuda_graphs: CudaGraphs,
    /// Evaluation during training; `None` for no evaluation.
    pub eval: Option<EvalSpec>,
    /// Name patterns of the parameters that are not trained.
    #[serde(default)]
    pub freeze: Vec<String>,
    /// Name patterns of the only parameters that are trained; empty to train all except those of
    /// `freeze`.
    #[serde(default)]
    pub train_only: Vec<String>,
    /// Low-rank adapters, which are then the only trained parameters.
    #[serde(default)]
    pub lora: Option<LoraSpec>,
}

/// The default of switches that are enabled in jobs without the key.
fn enabled() -> bool {
    true
}

/// Stores `deterministic` as checkpoint manifests have it: `numerics: Reproducible` or `Fast`.
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
    /// Whether updates of the weights are rounded stochastically, because there are bf16 weights
    /// and no fp32 master weights.
    pub fn rounds_stochastically(&self) -> bool {
        self.precision.is_bf16() && !self.master_weights
    }
}

/// `train.model`: the model config, under the names of Hugging Face.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// A Hugging Face directory whose config.json replaces the settings below and whose weights are
    /// the initial ones. Relative to the workdir.
    #[serde(default)]
    pub from: Option<PathBuf>,
    /// All dropout rates; `None` for those of config.json, and 0 in a new model.
    #[serde(default)]
    pub dropout: Option<f64>,
    /// The name of the model family, e.g. `llama`.
    pub family: String,
    /// Rows of the embedding; 0 for the size of the tokenizer.
    pub vocab_size: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Width of the feed-forward network.
    pub intermediate_size: u32,
    /// Number of blocks.
    pub num_hidden_layers: u32,
    /// Number of query heads.
    pub num_attention_heads: u32,
    /// Number of key/value heads.
    pub num_key_value_heads: u32,
    /// Width of a head; by default hidden_size / num_attention_heads.
    pub head_dim: u32,
    /// Experts per layer; `None` for 8 in a family with experts.
    #[serde(default)]
    pub num_experts: Option<u32>,
    /// Experts per token; `None` for 2 in a family with experts.
    #[serde(default)]
    pub num_experts_per_tok: Option<u32>,
    /// Width of an expert; `None` for `intermediate_size`.
    #[serde(default)]
    pub moe_intermediate_size: Option<u32>,
    /// Longest sequence; 0 for `data.seq_len`.
    pub max_position_embeddings: u32,
    /// The constant that is added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the frequencies of rotary embeddings.
    pub rope_theta: f64,
    /// Whether embedding and output share one matrix.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
}

impl ModelSpec {
    /// Returns a copy in which `from` is relative to the current directory instead of the workdir.
    pub fn resolve_paths(&self, workdir: &Path) -> ModelSpec {
        ModelSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}

/// `train.data`: how text becomes samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSpec {
    /// The data sources, at least one. The source that `data.files` defines has no name.
    pub sources: Vec<DataSource>,
    /// A Jinja template for chats, relative to the workdir; `None` for that of the tokenizer.
    pub chat_template: Option<PathBuf>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Target tokens per sample.
    pub seq_len: u32,
    /// Whether a sample holds several documents, which do not attend to each other. Otherwise it
    /// holds one document or a part of one.
    pub pack: bool,
    /// Whether samples are read in random order.
    pub shuffle: bool,
    /// Share of the documents that is excluded from training, from 0 to below 1. `eval` uses it
    /// when it has no files.
    pub held_out: f64,
    /// The directory of the token caches.
    pub cache: PathBuf,
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tokenizer {
    /// 256 byte values, and 256 for the end of a document.
    Bytes,
    /// A Hugging Face tokenizer.json.
    File(PathBuf),
}

/// `train.zero`: sharding over the workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ZeroSpec {
    /// 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
    pub stage: u8,
    /// Blocks that stage 3 gathers ahead of their use; 0 for none.
    pub prefetch: u32,
    /// Elements of gathered parameters that stage 3 may keep between two uses in a step.
    #[serde(default)]
    pub max_live_parameters: u64,
    /// Where optimizer states are stored, if not in the memory of the computing device.
    #[serde(default)]
    pub offload: Option<Offload>,
}

/// Where offloaded optimizer states are stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "PathBuf", into = "PathBuf")]
pub enum Offload {
    /// The memory of the host, in training on GPUs.
    Cpu,
    /// Files in this directory; relative to the workdir.
    Files(PathBuf),
}

impl From<PathBuf> for Offload {
    fn from(place: PathBuf) -> Self {
        if place.as_os_str() == "cpu" { Offload::Cpu } else { Offload::Files(place) }
    }
}

impl From<Offload> for PathBuf {
    fn from(place: Offload) -> Self {
        match place {
            Offload::Cpu => "cpu".into(),
            Offload::Files(directory) => directory,
        }
    }
}

/// The element type of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    /// fp32.
    Fp32,
    /// bfloat16; master weights, optimizer states, sums of gradients and statistics are fp32.
    Bf16,
    /// Like `Bf16` with IEEE half precision and a loss scale ([`LossScaleSpec`]).
    Fp16,
    /// Like `Bf16` with matmuls of the layers in fp8: E4M3 for weights and activations, E5M2 for
    /// gradients.
    Fp8,
}

impl Precision {
    /// Whether weights and activations are bfloat16.
    pub fn is_bf16(self) -> bool {
        matches!(self, Precision::Bf16 | Precision::Fp8)
    }

    /// Returns the name that job.yaml uses.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
            Precision::Fp8 => "fp8",
        }
    }
}

/// `train.loss_scale`: the loss scale of `precision: fp16`, under DeepSpeed's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaleSpec {
    /// The initial scale is 2 to this power.
    pub initial_scale_power: u32,
    /// Steps without overflow after which the scale doubles.
    pub loss_scale_window: u64,
    /// The smallest scale.
    pub min_loss_scale: f64,
}

impl Default for LossScaleSpec {
    fn default() -> Self {
        LossScaleSpec { initial_scale_power: 16, loss_scale_window: 2000, min_loss_scale: 1.0 }
    }
}

/// `train.batch`: samples per step and per forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSpec {
    /// Samples per optimizer step over all workers; a multiple of `micro`.
    pub global: u32,
    /// Samples per forward pass: a micro-batch, which is also a sample slot (docs/numerics.md).
    pub micro: u32,
}

/// `train.attention`: which kernels compute attention on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attention {
    /// launch's kernels. Without `deterministic`, cuDNN's where they are available and faster.
    #[default]
    Auto,
    /// launch's kernels.
    Flash,
    /// cuDNN's kernels.
    Cudnn,
}

impl Attention {
    /// Returns the name that job.yaml uses.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Auto => "auto",
            Attention::Flash => "flash",
            Attention::Cudnn => "cudnn",
        }
    }
}

/// `train.cuda_graphs`: whether a step is submitted to a GPU as CUDA graphs. The results do not
/// depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CudaGraphs {
    /// If a measurement shows that steps are faster with graphs.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl CudaGraphs {
    /// Returns the name that job.yaml uses.
    pub fn name(self) -> &'static str {
        match self {
            CudaGraphs::Auto => "auto",
            CudaGraphs::Always => "true",
            CudaGraphs::Never => "false",
        }
    }
}

/// `train.recompute`: what the backward pass recomputes instead of reading stored activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recompute {
    /// No recomputation.
    None,
    /// Each block from its input, which is the only activation that is stored.
    Block,
}

/// `train.eval`: evaluation during training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalSpec {
    /// Optimizer steps between evaluations.
    pub every: u64,
    /// Files and globs of the evaluation text; empty for the held-out share of `data`.
    pub files: Vec<String>,
    /// The most samples of an evaluation.
    pub samples: u32,
    /// A text that is generated after each evaluation.
    #[serde(default)]
    pub sample: Option<SampleSpec>,
}

/// `train.eval.sample`: a prompt that the model continues after each evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleSpec {
    /// The prompt.
    pub prompt: String,
    /// The most tokens that are generated.
    pub tokens: u32,
    /// The temperature of sampling; 0 for the most probable token.
    pub temperature: f64,
}

/// The names of `train.precision`.
const PRECISIONS: &[(&str, Precision)] = &[
    ("fp32", Precision::Fp32),
    ("bf16", Precision::Bf16),
    ("fp16", Precision::Fp16),
    ("fp8", Precision::Fp8),
];

/// Decodes the `train` section of job.yaml. Errors are collected in `d`.
pub(crate) fn decode(d: &mut Decoder, t: &Section<'_>) -> TrainSpec {
    let model = decode_model(d, t);
    let optimizer = decode_optimizer(d, t);
    // A run without steps converts the weights of `model.from`.
    let min_steps = u64::from(model.from.is_none());
    let steps = d.get(t, "train.steps", int(min_steps..=u64::MAX));
    TrainSpec {
        data: decode_data(d, t, model.from.as_deref()),
        model,
        experts: experts::decode(d, t),
        zero: decode_zero(d, t),
        precision: d.get(t, "train.precision", choice(PRECISIONS)),
        master_weights: d.get(t, "train.master_weights", boolean),
        loss_scale: decode_loss_scale(d, t),
        batch: decode_batch(d, t),
        schedule: decode_schedule(d, t, optimizer.lr, steps),
        optimizer,
        clip_norm: d.get(t, "train.clip_norm", keyword_or("off", None, |n| positive(n).map(Some))),
        steps,
        seed: d.get(t, "train.seed", int(0..=u64::MAX)),
        recompute: d.get(
            t,
            "train.recompute",
            choice(&[("none", Recompute::None), ("block", Recompute::Block)]),
        ),
        deterministic: d.get(t, "train.deterministic", boolean),
        attention: d.get(
            t,
            "train.attention",
            choice(&[("auto", Attention::Auto), ("flash", Attention::Flash), ("cudnn", Attention::Cudnn)]),
        ),
        cuda_graphs: d.get(
            t,
            "train.cuda_graphs",
            keyword_or("auto", CudaGraphs::Auto, |node| {
                boolean(node).map(|on| if on { CudaGraphs::Always } else { CudaGraphs::Never })
            }),
        ),
        eval: decode_eval(d, t),
        freeze: d.get_optional(t, "train.freeze", list("a list of patterns", text)).unwrap_or_default(),
        train_only: d.get_optional(t, "train.train_only", tune::patterns).unwrap_or_default(),
        lora: lora::decode(d, t),
    }
}

/// Reads a positive number that is finite and not 0 as f32, in which kernels compute.
pub(super) fn positive(node: &YamlNode) -> ReadResult<f64> {
    number("a number above 0", |x| x as f32 > 0.0 && (x as f32).is_finite())(node)
}

/// The family with learned positions, LayerNorm and a tied head, whose defaults differ.
pub(super) const GPT2: &str = "gpt2";

fn decode_model(d: &mut Decoder, train: &Section<'_>) -> ModelSpec {
    let t = d.section(train, "train.model");
    let auto = |range| keyword_or("auto", 0, int32(range));
    let hidden_size = d.get(&t, "train.model.hidden_size", int32(1..=1 << 20));
    let heads = d.get(&t, "train.model.num_attention_heads", int32(1..=1 << 16));
    let family = d.get(&t, "train.model.family", text);
    let gpt2 = family == GPT2;
    let tied = gpt2 || family.starts_with("gemma");
    ModelSpec {
        from: d.get_optional(&t, "train.model.from", path),
        dropout: d.get_optional(&t, "train.model.dropout", share("a number from 0 to below 1")),
        family,
        vocab_size: d.get(&t, "train.model.vocab_size", auto(1..=1 << 24)),
        hidden_size,
        intermediate_size: d
            .get_optional(&t, "train.model.intermediate_size", int32(1..=1 << 22))
            .unwrap_or_else(|| match gpt2 {
                true => 4 * hidden_size,
                false => (hidden_size * 8).div_ceil(3).next_multiple_of(16),
            }),
        num_hidden_layers: d.get(&t, "train.model.num_hidden_layers", int32(1..=4096)),
        num_attention_heads: heads,
        num_key_value_heads: d
            .get_optional(&t, "train.model.num_key_value_heads", int32(1..=1 << 16))
            .unwrap_or(heads),
        head_dim: d
            .get_optional(&t, "train.model.head_dim", int32(1..=1 << 16))
            .unwrap_or(hidden_size / heads),
        num_experts: d.get_optional(&t, "train.model.num_experts", int32(1..=1 << 16)),
        num_experts_per_tok: d.get_optional(&t, "train.model.num_experts_per_tok", int32(1..=1 << 16)),
        moe_intermediate_size: d.get_optional(&t, "train.model.moe_intermediate_size", int32(1..=1 << 22)),
        max_position_embeddings: d.get(&t, "train.model.max_position_embeddings", auto(1..=1 << 24)),
        rms_norm_eps: d.get(&t, "train.model.rms_norm_eps", positive),
        rope_theta: d.get(&t, "train.model.rope_theta", number("a number above 0", |x| x > 0.0)),
        tie_word_embeddings: d.get_optional(&t, "train.model.tie_word_embeddings", boolean).unwrap_or(tied),
        initializer_range: d.get(&t, "train.model.initializer_range", positive),
    }
}

/// Decodes `train.data`. `from` is the directory of the model, whose tokenizer is the default.
fn decode_data(d: &mut Decoder, train: &Section<'_>, from: Option<&Path>) -> DataSpec {
    let t = d.section(train, "train.data");
    DataSpec {
        sources: super::sources::decode_sources(d, &t),
        chat_template: d.get_optional(&t, "train.data.chat_template", path),
        tokenizer: decode_tokenizer(d, &t, from),
        seq_len: d.get(&t, "train.data.seq_len", int32(1..=1 << 20)),
        pack: d.get(&t, "train.data.pack", boolean),
        shuffle: d.get(&t, "train.data.shuffle", boolean),
        held_out: d.get(
            &t,
            "train.data.held_out",
            number("a number from 0 to below 1", |x| (0.0..1.0).contains(&x)),
        ),
        cache: d.get(&t, "train.data.cache", path),
    }
}

fn decode_tokenizer(d: &mut Decoder, data: &Section<'_>, from: Option<&Path>) -> Tokenizer {
    let given = d.get_optional(data, "train.data.tokenizer", |node| {
        Ok(match text(node)?.as_str() {
            "bytes" => Tokenizer::Bytes,
            path => Tokenizer::File(path.into()),
        })
    });
    let default = || from.map_or(Tokenizer::Bytes, |folder| Tokenizer::File(folder.join("tokenizer.json")));
    given.unwrap_or_else(default)
}

fn decode_zero(d: &mut Decoder, train: &Section<'_>) -> ZeroSpec {
    let t = d.section(train, "train.zero");
    ZeroSpec {
        stage: d.get(&t, "train.zero.stage", int32(0..=3)) as u8,
        prefetch: d.get(&t, "train.zero.prefetch", int32(0..=64)),
        max_live_parameters: d.get(&t, "train.zero.max_live_parameters", int(0..=u64::MAX)),
        offload: d.get(&t, "train.zero.offload", keyword_or("none", None, |n| offload(n).map(Some))),
    }
}

/// Reads `{optimizer: cpu}` or `{optimizer: path}`.
fn offload(node: &YamlNode) -> ReadResult<Offload> {
    const WHAT: &str = "`{optimizer: cpu}` or `{optimizer: path}`";
    match &node.value {
        YamlValue::Map(entries) => match entries.as_slice() {
            [only] if only.key == "optimizer" => path(&only.value).map(Offload::from),
            _ => Err(wrong_type(WHAT, node)),
        },
        _ => Err(wrong_type(WHAT, node)),
    }
}

fn decode_loss_scale(d: &mut Decoder, train: &Section<'_>) -> LossScaleSpec {
    let t = d.section(train, "train.loss_scale");
    LossScaleSpec {
        initial_scale_power: d.get(&t, "train.loss_scale.initial_scale_power", int32(0..=32)),
        loss_scale_window: d.get(&t, "train.loss_scale.loss_scale_window", int(1..=u64::MAX)),
        min_loss_scale: d.get(&t, "train.loss_scale.min_loss_scale", positive),
    }
}

fn decode_batch(d: &mut Decoder, train: &Section<'_>) -> BatchSpec {
    let t = d.section(train, "train.batch");
    BatchSpec {
        global: d.get(&t, "train.batch.global", int32(1..=1 << 20)),
        micro: d.get(&t, "train.batch.micro", int32(1..=1 << 16)),
    }
}

fn decode_eval(d: &mut Decoder, train: &Section<'_>) -> Option<EvalSpec> {
    if d.is_absent(train, "train.eval") {
        return None;
    }
    let t = d.section(train, "train.eval");
    Some(EvalSpec {
        every: d.get(&t, "train.eval.every", int(1..=u64::MAX)),
        files: d.get(&t, "train.eval.files", list("a list of files and globs", text)),
        samples: d.get(&t, "train.eval.samples", int32(1..=1 << 20)),
        sample: decode_sample(d, &t),
    })
}

fn decode_sample(d: &mut Decoder, eval: &Section<'_>) -> Option<SampleSpec> {
    const SAMPLE: &str = "train.eval.sample";
    if d.is_absent(eval, SAMPLE) {
        return None;
    }
    let t = d.section(eval, SAMPLE);
    let prompt = d.get_optional(&t, "train.eval.sample.prompt", verbatim).unwrap_or_default();
    if prompt.is_empty() && d.is_valid(&[SAMPLE, "train.eval.sample.prompt"]) {
        d.reject(
            codes::JOB_KEY_REQUIRED,
            SAMPLE,
            format!("`{SAMPLE}` has no `prompt`"),
            "add `prompt`, the text that the model continues",
        );
    }
    Some(SampleSpec {
        prompt,
        tokens: d.get(&t, "train.eval.sample.tokens", int32(1..=4096)),
        temperature: d.get(
            &t,
            "train.eval.sample.temperature",
            number("a number of 0 or more", |x| x >= 0.0 && (x as f32).is_finite()),
        ),
    })
}
