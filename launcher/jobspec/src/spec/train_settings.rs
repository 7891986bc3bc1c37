//! Sections and choices of `train`: sharding, precision, batch sizes, kernels and evaluation.
use super::cluster::TRAINS_ON_CPUS;
use crate::{
    keys::{
        choice::choices,
        collections::described_list_type,
        key::Key,
        key_info::{Condition, Rule},
        numbers::{
            boolean_type, integer_at_least_type, integer_type, non_negative_f32_type, positive_f32_type,
        },
        section::{default_section, optional_inner_section, section},
        text::{path_type, text_type, verbatim_text_type},
        value_type::{ReadResult, ValueType, wrong_type_error},
    },
    yaml::{
        format::format_map,
        tree::{YamlNode, YamlValue},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;

section! {
    /// Sharding over the workers.
    pub struct ZeroSpec at "train.zero";
    /// The ZeRO stage.
    ///
    /// Stage 0 shards nothing, stage 1 optimizer states, stage 2 also gradients, and stage 3 also
    /// parameters.
    pub stage: u8 = Key::new(integer_type(0..=3), "3");
    /// The number of blocks that stage 3 gathers ahead of their use.
    pub prefetch: u32 = Key::new(integer_type(0..=64), "1");
    /// The number of elements of gathered parameters that stage 3 may keep in memory.
    ///
    /// Parameters are kept until their next use in a step.
    #[serde(default)]
    pub max_live_parameters: u64 = Key::new(integer_at_least_type(0), "0");
    /// The storage of optimizer states.
    ///
    /// `None` stands for the memory of the computing device.
    #[serde(default)]
    pub offload: Option<OffloadTarget> = Key::new(
        offload_target_type().or_none("none").documented_as("`none`, `{optimizer: cpu}` or `{optimizer: path}`"),
        "none",
    ).with_rules(OFFLOAD_RULES);
}

/// The rule that warns about offloading to host memory (`train.zero.offload`) in training on CPUs,
/// where it has no effect.
const OFFLOAD_RULES: &[Rule] =
    &[Rule::no_effect(&[TRAINS_ON_CPUS, Condition::OneOf("train.zero.offload", &["{optimizer: cpu}"])])
        .into_warning()
        .with_message(
            "`{optimizer: cpu}` has no effect in training on CPUs, whose optimizer states are in host memory",
        )
        .with_help(
            "remove it, name a directory to keep the states in files, or set `cluster.devices: cuda`",
        )];

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

/// Returns the parser and printer ([`ValueType`]) for those values of `train.zero.offload` other
/// than `none`: `{optimizer: cpu}` and `{optimizer: path}`.
fn offload_target_type() -> ValueType<OffloadTarget> {
    let schema = json!({
        "type": "object",
        "properties": {"optimizer": path_type().schema},
        "required": ["optimizer"],
        "additionalProperties": false,
    });
    ValueType::new_single_line(EXPECTED_OFFLOAD, schema, read_offload, |target| {
        format_map([("optimizer".to_owned(), path_type().print_line(&target.clone().into()))])
    })
}

/// The phrase by which error messages describe the values of `train.zero.offload` other than
/// `none`.
const EXPECTED_OFFLOAD: &str = "`{optimizer: cpu}` or `{optimizer: path}`";

/// Reads a value of `train.zero.offload` other than `none`: a mapping that names where optimizer
/// states are stored.
fn read_offload(node: &YamlNode) -> ReadResult<OffloadTarget> {
    match &node.value {
        YamlValue::Map(entries) => match entries.as_slice() {
            [only] if only.key == "optimizer" => path_type().read(&only.value).map(OffloadTarget::from),
            _ => Err(wrong_type_error(EXPECTED_OFFLOAD, node)),
        },
        _ => Err(wrong_type_error(EXPECTED_OFFLOAD, node)),
    }
}

choices! {
    /// `train.precision`: the element type of weights and activations.
    pub enum Precision {
        /// 32-bit floats (fp32) for all values.
        Fp32 = "fp32",
        /// bfloat16. Optimizer states, sums of gradients and statistics are fp32, and so are the
        /// master weights if they are kept.
        Bf16 = "bf16",
        /// IEEE half precision with a loss scale (`train.loss_scale`). Master weights, optimizer
        /// states, sums of gradients and statistics are fp32.
        Fp16 = "fp16",
        /// bfloat16, but the matmuls of the layers use fp8: E4M3 for weights and activations, E5M2
        /// for gradients.
        Fp8 = "fp8",
    }
}

impl Precision {
    /// Returns whether weights and activations are stored as bfloat16, as with `bf16` and `fp8`.
    pub fn is_bf16(self) -> bool {
        matches!(self, Precision::Bf16 | Precision::Fp8)
    }
}

section! {
    /// The dynamic loss scale of `precision: fp16`. Fields have DeepSpeed's names.
    pub struct LossScaleSpec at "train.loss_scale", rules FP16_RULES;
    /// The exponent of the initial scale, a power of two.
    pub initial_scale_power: u32 = Key::new(integer_type(0..=32), "16");
    /// The number of steps without overflow after which the scale doubles.
    pub loss_scale_window: u64 = Key::new(integer_at_least_type(1), "2000");
    /// The smallest scale.
    ///
    /// Training fails at an overflow that would reduce the scale below this value.
    pub min_loss_scale: f64 = Key::new(positive_f32_type(), "1");
}

/// The rule that warns about the keys of `train.loss_scale` in jobs with a precision other than
/// fp16.
const FP16_RULES: &[Rule] =
    &[Rule::no_effect(&[Condition::NoneOf("train.precision", &["fp16"])]).into_warning()];

impl Default for LossScaleSpec {
    fn default() -> Self {
        default_section()
    }
}

section! {
    /// The numbers of samples per step and per forward pass.
    #[derive(Copy, Eq)]
    pub struct BatchSpec at "train.batch";
    /// The number of samples per optimizer step, over all workers; a multiple of `micro`.
    pub global: u32 = Key::new(integer_type(1..=1 << 20), "64").with_aliases(&["train_batch_size"]);
    /// The number of samples of a forward pass.
    ///
    /// Micro-batches are also the units of fixed-order sums (docs/numerics.md).
    pub micro: u32 = Key::new(integer_type(1..=1 << 16), "4").with_aliases(&["train_micro_batch_size_per_gpu"]);
}

choices! {
    /// `train.attention`: the kernels that compute attention on GPUs.
    #[derive(Default)]
    pub enum AttentionKernels {
        /// The kernels of launch. With `deterministic: false`, the kernels of cuDNN if they are
        /// available and faster.
        Auto = "auto" is default,
        /// Only the kernels of launch.
        Flash = "flash",
        /// Only the kernels of cuDNN.
        Cudnn = "cudnn",
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
    /// Returns the value of `train.cuda_graphs` in job.yaml: `auto`, `true` or `false`.
    pub fn name(self) -> &'static str {
        match self {
            CudaGraphMode::Auto => "auto",
            CudaGraphMode::Always => "true",
            CudaGraphMode::Never => "false",
        }
    }
}

/// Returns the parser and printer ([`ValueType`]) for `train.cuda_graphs`: `auto`, `true` or
/// `false`.
pub(crate) fn cuda_graph_mode_type() -> ValueType<CudaGraphMode> {
    let mode = |on| if on { CudaGraphMode::Always } else { CudaGraphMode::Never };
    boolean_type()
        .convert(mode, |mode| match mode {
            CudaGraphMode::Auto => None,
            CudaGraphMode::Always => Some(true),
            CudaGraphMode::Never => Some(false),
        })
        .or_keywords(&[("auto", CudaGraphMode::Auto)])
        .documented_as("`auto`, `true` or `false`")
}

choices! {
    /// `train.recompute`: which activations the backward pass recomputes instead of reading stored
    /// values.
    pub enum RecomputeMode {
        /// No activations are recomputed. All of them are stored.
        None = "none",
        /// The activations of each transformer block are recomputed from the block's input, which
        /// is stored.
        Block = "block",
    }
}

section! {
    /// The settings of evaluations during training.
    pub struct EvalSpec at "train.eval";
    /// The number of steps between evaluations; an evaluation always follows the last step.
    pub every: u64 = Key::new(integer_at_least_type(1), "50").into_reloadable();
    /// The text for the evaluation; `[]`: the held-out share of the data.
    ///
    /// The items are paths and globs.
    pub files: Vec<String> =
        Key::new(described_list_type("list of paths and globs", "a list of files and globs", text_type()), "[]");
    /// The maximum number of samples of an evaluation.
    pub samples: u32 = Key::new(integer_type(1..=1 << 20), "64");
    /// The prompt that is continued after each evaluation; `None` for no generation.
    #[serde(default)]
    pub sample: Option<GenerationSpec> = optional_inner_section();
}

section! {
    /// A prompt that the model continues after each evaluation.
    pub struct GenerationSpec at "train.eval.sample";
    /// The text that the model continues.
    pub prompt: String = Key::required(verbatim_text_type());
    /// The maximum number of tokens; an end-of-document token ends the text earlier.
    pub tokens: u32 = Key::new(integer_type(1..=4096), "32");
    /// The sampling temperature; 0 selects the most probable token.
    pub temperature: f64 = Key::new(non_negative_f32_type(), "0");
}
