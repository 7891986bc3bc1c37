//! `train:` — what the built-in runtime trains.
use super::{
    DataSource,
    decode::{Decoder, Table},
    experts::{self, ExpertsSpec},
    lora::{self, LoraSpec},
    optimizer::{OptimizerSpec, ScheduleSpec, optimizer, schedule},
    read::{Read, boolean, choice, expected, int, int32, list, number, text, word, word_or},
    sections::path,
    tree::{Node, Value},
    tune::{self, share},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What the built-in runtime trains.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainSpec {
    pub model: ModelSpec,
    #[serde(default)]
    pub experts: ExpertsSpec,
    pub data: DataSpec,
    pub zero: ZeroSpec,
    pub precision: Precision,
    /// Are there fp32 master weights beside those that are computed with? Without them the weights in bf16 are the only ones
    /// (`Bf16` and `Fp8`).
    #[serde(default = "kept")]
    pub master_weights: bool,
    /// `Fp16` only.
    #[serde(default)]
    pub loss_scale: LossScaleSpec,
    pub batch: BatchSpec,
    pub optimizer: OptimizerSpec,
    pub schedule: ScheduleSpec,
    /// Global L2 norm limit; `None`: no clipping.
    pub clip_norm: Option<f64>,
    /// Optimizer steps in all, counted from step 0 of the first run.
    pub steps: u64,
    pub seed: u64,
    pub recompute: Recompute,
    #[serde(default)]
    pub numerics: Numerics,
    #[serde(default)]
    pub attention: Attention,
    #[serde(default)]
    pub cuda_graphs: CudaGraphs,
    pub eval: Option<EvalSpec>,
    /// Patterns of parameters that are not trained.
    #[serde(default)]
    pub freeze: Vec<String>,
    /// Patterns of the only parameters that are trained; empty: all that `freeze` leaves.
    #[serde(default)]
    pub train_only: Vec<String>,
    /// Low-rank adapters, which then are all that is trained.
    #[serde(default)]
    pub lora: Option<LoraSpec>,
}

/// What jobs without the key mean.
fn kept() -> bool {
    true
}

impl TrainSpec {
    /// Are the weights in 16 bits the only ones?
    pub fn rounds_stochastically(&self) -> bool {
        self.precision.is_bf16() && !self.master_weights
    }
}

/// `model:` — the family and its numbers, by their Hugging Face names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// A Hugging Face folder whose config.json says everything here and whose weights training begins with; relative
    /// to the workdir.
    #[serde(default)]
    pub from: Option<PathBuf>,
    /// All rates of dropout, instead of those of the folder's config.json; in a new model `None` is 0.
    #[serde(default)]
    pub dropout: Option<f64>,
    /// A name of the families table, e.g. `llama`.
    pub family: String,
    /// 0: the tokenizer's size.
    pub vocab_size: u32,
    pub hidden_size: u32,
    pub intermediate_size: u32,
    pub num_hidden_layers: u32,
    pub num_attention_heads: u32,
    pub num_key_value_heads: u32,
    /// Default hidden_size / num_attention_heads.
    pub head_dim: u32,
    /// Experts of a layer; `None`: 8 in a family with experts.
    #[serde(default)]
    pub num_experts: Option<u32>,
    /// Experts that a token goes to; `None`: 2 in a family with experts.
    #[serde(default)]
    pub num_experts_per_tok: Option<u32>,
    /// Width inside an expert; `None`: `intermediate_size`.
    #[serde(default)]
    pub moe_intermediate_size: Option<u32>,
    /// 0: `data.seq_len`.
    pub max_position_embeddings: u32,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    pub initializer_range: f64,
}

impl ModelSpec {
    /// The same with `from` as it is found from the workdir.
    pub fn at(&self, workdir: &Path) -> ModelSpec {
        ModelSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}

/// `data:` — text to samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSpec {
    /// Where text comes from, at least one; the only one of `data.files` has no name.
    pub sources: Vec<DataSource>,
    /// A Jinja template for chats, relative to the workdir. Default the tokenizer's own.
    pub chat_template: Option<PathBuf>,
    pub tokenizer: Tokenizer,
    /// Tokens per sample that get a loss.
    pub seq_len: u32,
    /// Several documents per sample, none attending to another; else one document (or piece of one) per sample.
    pub pack: bool,
    pub shuffle: bool,
    /// Share of documents kept out of training, 0.0..1.0; used by `eval` without files of its own.
    pub held_out: f64,
    /// Where token caches lie. Default `.launch-cache` in the workdir.
    pub cache: PathBuf,
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tokenizer {
    /// 256 byte values and one end-of-document token, 256.
    Bytes,
    /// A Hugging Face tokenizer.json.
    File(PathBuf),
}

/// `zero:` — sharding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ZeroSpec {
    /// 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are sharded.
    pub stage: u8,
    /// Blocks gathered ahead of use in stage 3 (0: none).
    pub prefetch: u32,
    /// Elements of gathered parameters that may stay between two uses in a step (stage 3).
    #[serde(default)]
    pub max_live_parameters: u64,
    /// Where the optimizer's states lie when not in the memory that computes.
    #[serde(default)]
    pub offload: Option<Offload>,
}

/// A place of optimizer states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "PathBuf", into = "PathBuf")]
pub enum Offload {
    /// The host's memory, with GPUs.
    Cpu,
    /// Files of this directory; relative to the workdir.
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

/// `precision:`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    Fp32,
    /// bfloat16 weights and activations; fp32 master weights, optimizer states, gradients' sums and statistics.
    Bf16,
    /// As `Bf16` with IEEE halves, and the loss scaled ([`LossScaleSpec`]).
    Fp16,
    /// As `Bf16`, with the products of the layers' matrices in fp8: E4M3 for weights and activations, E5M2 for gradients.
    Fp8,
}

impl Precision {
    /// Are weights and activations bfloat16?
    pub fn is_bf16(self) -> bool {
        matches!(self, Precision::Bf16 | Precision::Fp8)
    }

    /// As job.yaml says it.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
            Precision::Fp8 => "fp8",
        }
    }
}

/// `loss_scale:` — with `precision: fp16`, by DeepSpeed's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaleSpec {
    /// The first scale is 2 to this.
    pub initial_scale_power: u32,
    /// Steps without overflow after which it doubles.
    pub loss_scale_window: u64,
    /// It doesn't fall below this.
    pub min_loss_scale: f64,
}

impl Default for LossScaleSpec {
    fn default() -> Self {
        LossScaleSpec { initial_scale_power: 16, loss_scale_window: 2000, min_loss_scale: 1.0 }
    }
}

/// `batch:` — samples per optimizer step and per forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSpec {
    /// Samples per optimizer step over all workers; a multiple of `micro`.
    pub global: u32,
    /// Samples per forward: one logical slot (docs/numerics.md).
    pub micro: u32,
}

/// `numerics:` — what the bits of sums may depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Numerics {
    /// On nothing but the job: the same bits for any number of workers.
    #[default]
    Reproducible,
    /// On the number of workers, since gradients are added up as they come, and on GPUs on the clock: of each product the
    /// library's algorithm is taken that was the fastest on this host, and attention is cuDNN's where that is faster.
    Fast,
}

impl Numerics {
    /// As job.yaml says it.
    pub fn name(self) -> &'static str {
        match self {
            Numerics::Reproducible => "reproducible",
            Numerics::Fast => "fast",
        }
    }
}

/// `attention:` — whose kernels compute attention on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attention {
    /// launch's; with `numerics: fast` cuDNN's, where it is there and faster.
    #[default]
    Auto,
    /// launch's.
    Flash,
    /// cuDNN's alone.
    Cudnn,
}

impl Attention {
    /// As job.yaml says it.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Auto => "auto",
            Attention::Flash => "flash",
            Attention::Cudnn => "cudnn",
        }
    }
}

/// `cuda_graphs:` — is a GPU asked for its work by graphs? Never a matter of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CudaGraphs {
    /// Where the clock says that it is faster.
    #[default]
    Auto,
    Always,
    Never,
}

impl CudaGraphs {
    /// As job.yaml says it.
    pub fn name(self) -> &'static str {
        match self {
            CudaGraphs::Auto => "auto",
            CudaGraphs::Always => "true",
            CudaGraphs::Never => "false",
        }
    }
}

/// `recompute:` — what is computed again in the backward pass instead of kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recompute {
    None,
    /// Keep only each block's input.
    Block,
}

/// `eval:` — held-out loss while training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalSpec {
    /// Optimizer steps between evaluations.
    pub every: u64,
    /// Empty: the held-out share of `data.files`.
    pub files: Vec<String>,
    /// At most this many samples.
    pub samples: u32,
    /// What the model makes of a prompt, shown after each evaluation.
    #[serde(default)]
    pub sample: Option<SampleSpec>,
}

/// `eval.sample:` — a text that the model goes on with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleSpec {
    pub prompt: String,
    /// How many tokens it goes on for, unless it ends the document.
    pub tokens: u32,
    /// 0: always the likeliest token.
    pub temperature: f64,
}

/// Names of `precision`.
const PRECISIONS: &[(&str, Precision)] = &[
    ("fp32", Precision::Fp32),
    ("bf16", Precision::Bf16),
    ("fp16", Precision::Fp16),
    ("fp8", Precision::Fp8),
];

/// Decodes `train:`.
pub(crate) fn decode(d: &mut Decoder, t: &Table<'_>) -> TrainSpec {
    let model = model(d, t);
    let optimizer = optimizer(d, t);
    // Without a step, what is left of a run is the conversion of given weights.
    let least = u64::from(model.from.is_none());
    let steps = d.get(t, "train.steps", int(least..=u64::MAX));
    TrainSpec {
        data: data(d, t, model.from.as_deref()),
        model,
        experts: experts::decode(d, t),
        zero: zero(d, t),
        precision: d.get(t, "train.precision", choice(PRECISIONS, &[])),
        master_weights: d.get(t, "train.master_weights", boolean),
        loss_scale: loss_scale(d, t),
        batch: batch(d, t),
        schedule: schedule(d, t, optimizer.lr, steps),
        optimizer,
        clip_norm: d.get(t, "train.clip_norm", word_or("off", None, |n| positive(n).map(Some))),
        steps,
        seed: d.get(t, "train.seed", int(0..=u64::MAX)),
        recompute: d.get(
            t,
            "train.recompute",
            choice(&[("none", Recompute::None), ("block", Recompute::Block)], &[]),
        ),
        numerics: d.get(
            t,
            "train.numerics",
            choice(&[("reproducible", Numerics::Reproducible), ("fast", Numerics::Fast)], &[]),
        ),
        attention: d.get(
            t,
            "train.attention",
            choice(
                &[("auto", Attention::Auto), ("flash", Attention::Flash), ("cudnn", Attention::Cudnn)],
                &[],
            ),
        ),
        cuda_graphs: d.get(
            t,
            "train.cuda_graphs",
            word_or("auto", CudaGraphs::Auto, |node| {
                boolean(node).map(|on| if on { CudaGraphs::Always } else { CudaGraphs::Never })
            }),
        ),
        eval: eval(d, t),
        freeze: d.opt(t, "train.freeze", list("a list of patterns", text)).unwrap_or_default(),
        train_only: d.opt(t, "train.train_only", tune::patterns).unwrap_or_default(),
        lora: lora::decode(d, t),
    }
}

pub(super) fn positive(node: &Node) -> Read<f64> {
    // Kernels compute in f32: it must neither vanish nor overflow there.
    number("a number above 0", |x| x as f32 > 0.0 && (x as f32).is_finite())(node)
}

/// The family with learned positions, LayerNorm and a tied head, whose defaults differ.
pub(super) const GPT2: &str = "gpt2";

fn model(d: &mut Decoder, train: &Table<'_>) -> ModelSpec {
    let t = d.section(train, "train.model");
    let auto = |range| word_or("auto", 0, int32(range));
    let hidden_size = d.get(&t, "train.model.hidden_size", int32(1..=1 << 20));
    let heads = d.get(&t, "train.model.num_attention_heads", int32(1..=1 << 16));
    let family = d.get(&t, "train.model.family", text);
    let gpt2 = family == GPT2;
    let tied = gpt2 || family.starts_with("gemma");
    ModelSpec {
        from: d.opt(&t, "train.model.from", path),
        dropout: d.opt(&t, "train.model.dropout", share("a number from 0 to below 1")),
        family,
        vocab_size: d.get(&t, "train.model.vocab_size", auto(1..=1 << 24)),
        hidden_size,
        intermediate_size: d.opt(&t, "train.model.intermediate_size", int32(1..=1 << 22)).unwrap_or_else(
            || match gpt2 {
                true => 4 * hidden_size,
                false => (hidden_size * 8).div_ceil(3).next_multiple_of(16),
            },
        ),
        num_hidden_layers: d.get(&t, "train.model.num_hidden_layers", int32(1..=4096)),
        num_attention_heads: heads,
        num_key_value_heads: d
            .opt(&t, "train.model.num_key_value_heads", int32(1..=1 << 16))
            .unwrap_or(heads),
        head_dim: d.opt(&t, "train.model.head_dim", int32(1..=1 << 16)).unwrap_or(hidden_size / heads),
        num_experts: d.opt(&t, "train.model.num_experts", int32(1..=1 << 16)),
        num_experts_per_tok: d.opt(&t, "train.model.num_experts_per_tok", int32(1..=1 << 16)),
        moe_intermediate_size: d.opt(&t, "train.model.moe_intermediate_size", int32(1..=1 << 22)),
        max_position_embeddings: d.get(&t, "train.model.max_position_embeddings", auto(1..=1 << 24)),
        rms_norm_eps: d.get(&t, "train.model.rms_norm_eps", positive),
        rope_theta: d.get(&t, "train.model.rope_theta", number("a number above 0", |x| x > 0.0)),
        tie_word_embeddings: d.opt(&t, "train.model.tie_word_embeddings", boolean).unwrap_or(tied),
        initializer_range: d.get(&t, "train.model.initializer_range", positive),
    }
}

/// `from`: the folder that the model comes from, whose tokenizer is used unless another one is named.
fn data(d: &mut Decoder, train: &Table<'_>, from: Option<&Path>) -> DataSpec {
    let t = d.section(train, "train.data");
    DataSpec {
        sources: super::sources::sources(d, &t),
        chat_template: d.opt(&t, "train.data.chat_template", path),
        tokenizer: tokenizer(d, &t, from),
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

fn tokenizer(d: &mut Decoder, data: &Table<'_>, from: Option<&Path>) -> Tokenizer {
    let given = d.opt(data, "train.data.tokenizer", |node| {
        Ok(match text(node)?.as_str() {
            "bytes" => Tokenizer::Bytes,
            path => Tokenizer::File(path.into()),
        })
    });
    let default = || from.map_or(Tokenizer::Bytes, |folder| Tokenizer::File(folder.join("tokenizer.json")));
    given.unwrap_or_else(default)
}

fn zero(d: &mut Decoder, train: &Table<'_>) -> ZeroSpec {
    let t = d.section(train, "train.zero");
    ZeroSpec {
        stage: d.get(&t, "train.zero.stage", int32(0..=3)) as u8,
        prefetch: d.get(&t, "train.zero.prefetch", int32(0..=64)),
        max_live_parameters: d.get(&t, "train.zero.max_live_parameters", int(0..=u64::MAX)),
        offload: d.get(&t, "train.zero.offload", word_or("none", None, |n| offload(n).map(Some))),
    }
}

/// `{optimizer: cpu}` or `{optimizer: path}`
fn offload(node: &Node) -> Read<Offload> {
    const WHAT: &str = "`{optimizer: cpu}` or `{optimizer: path}`";
    match &node.value {
        Value::Map(entries) => match entries.as_slice() {
            [only] if only.key == "optimizer" => path(&only.value).map(Offload::from),
            _ => Err(expected(WHAT, node)),
        },
        _ => Err(expected(WHAT, node)),
    }
}

fn loss_scale(d: &mut Decoder, train: &Table<'_>) -> LossScaleSpec {
    let t = d.section(train, "train.loss_scale");
    LossScaleSpec {
        initial_scale_power: d.get(&t, "train.loss_scale.initial_scale_power", int32(0..=32)),
        loss_scale_window: d.get(&t, "train.loss_scale.loss_scale_window", int(1..=u64::MAX)),
        min_loss_scale: d.get(&t, "train.loss_scale.min_loss_scale", positive),
    }
}

fn batch(d: &mut Decoder, train: &Table<'_>) -> BatchSpec {
    let t = d.section(train, "train.batch");
    BatchSpec {
        global: d.get(&t, "train.batch.global", int32(1..=1 << 20)),
        micro: d.get(&t, "train.batch.micro", int32(1..=1 << 16)),
    }
}

fn eval(d: &mut Decoder, train: &Table<'_>) -> Option<EvalSpec> {
    if d.absent(train, "train.eval") {
        return None;
    }
    let t = d.section(train, "train.eval");
    Some(EvalSpec {
        every: d.get(&t, "train.eval.every", int(1..=u64::MAX)),
        files: d.get(&t, "train.eval.files", list("a list of files and globs", text)),
        samples: d.get(&t, "train.eval.samples", int32(1..=1 << 20)),
        sample: sample(d, &t),
    })
}

fn sample(d: &mut Decoder, eval: &Table<'_>) -> Option<SampleSpec> {
    const SAMPLE: &str = "train.eval.sample";
    if d.absent(eval, SAMPLE) {
        return None;
    }
    let t = d.section(eval, SAMPLE);
    let prompt = d.opt(&t, "train.eval.sample.prompt", word).unwrap_or_default();
    if prompt.is_empty() && d.clean(&[SAMPLE, "train.eval.sample.prompt"]) {
        d.refuse(
            SAMPLE,
            format!("`{SAMPLE}` has no prompt"),
            "give `prompt`, a text that the model goes on with",
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
