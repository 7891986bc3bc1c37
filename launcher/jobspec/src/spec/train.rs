//! `train`: the model, data and hyper-parameters of the built-in training.
use super::{
    cluster::TRAINS_ON_CPUS,
    data::DataSpec,
    experts::ExpertsSpec,
    lora::LoraSpec,
    model::ModelSpec,
    optimizer::OptimizerSpec,
    param_groups::patterns_type,
    schedule::ScheduleSpec,
    train_settings::{
        AttentionKernels, BatchSpec, CudaGraphMode, EvalSpec, LossScaleSpec, Precision, RecomputeMode,
        ZeroSpec, cuda_graph_mode_type,
    },
};
use crate::keys::{
    choice::choice_type,
    key::Key,
    key_info::{Condition, Rule},
    numbers::{boolean_type, integer_at_least_type, positive_f32_type},
    section::{inner_section, optional_inner_section, section},
};
use diagnostic::codes::job as codes;

section! {
    /// The model, data and hyper-parameters of the built-in training.
    pub struct TrainSpec at "train";
    /// The model that is trained: its config, or the directory of a pretrained model.
    pub model: ModelSpec = inner_section();
    /// The distribution of experts over ranks, and the losses of routers.
    #[serde(default)]
    pub experts: ExpertsSpec = inner_section().printed_if(|experts| *experts != ExpertsSpec::default());
    /// The training data, the tokenizer, and the division into samples.
    pub data: DataSpec = inner_section();
    /// The ZeRO stage, and the offloading of optimizer states.
    pub zero: ZeroSpec = inner_section();
    /// The element type of weights and activations.
    pub precision: Precision = Key::new(choice_type(), "fp32");
    /// Keep fp32 master weights with `bf16` and `fp8`.
    ///
    /// Otherwise the optimizer updates the bf16 weights directly.
    #[serde(default = "enabled_by_default")]
    pub master_weights: bool = Key::new(boolean_type(), "true").with_rules(MASTER_WEIGHTS_RULES);
    /// The loss scale of [`Precision::Fp16`].
    #[serde(default)]
    pub loss_scale: LossScaleSpec = inner_section();
    /// The numbers of samples per step and per forward pass.
    pub batch: BatchSpec = inner_section();
    /// The optimizer and its hyper-parameters.
    pub optimizer: OptimizerSpec = inner_section();
    /// How the learning rate changes over the steps.
    pub schedule: ScheduleSpec = inner_section();
    /// The limit of the global L2 norm of the gradients.
    ///
    /// Gradients with a larger norm are scaled down to this norm. `None` disables clipping.
    pub clip_norm: Option<f64> =
        Key::new(positive_f32_type().or_none("off"), "1.0").with_aliases(&["gradient_clipping"]);
    /// The total number of optimizer steps.
    ///
    /// Training ends after this number of steps, counted from step 0 of the first run.
    pub steps: u64 = Key::new(
        integer_at_least_type(0).described_as("integer of 1 or more, or 0 with `model.from`"),
        "200",
    ).with_rules(STEPS_RULES).into_reloadable();
    /// The seed of the initial weights and the order of the data.
    pub seed: u64 = Key::new(integer_at_least_type(0), "1234");
    /// The activations that the backward pass recomputes.
    pub recompute: RecomputeMode = Key::new(choice_type(), "none");
    /// Losses with the same bits for any number of workers.
    ///
    /// If this value is `false`, the gradients of micro-batches are summed in their order of
    /// arrival, and those of ranks in the order of NCCL. On GPUs, the algorithms for each matmul
    /// and for attention are then also timed, and the fastest ones are used.
    #[serde(rename = "numerics", default = "enabled_by_default", with = "numerics")]
    pub deterministic: bool = Key::new(boolean_type(), "true")
        .with_deprecated_name("numerics")
        .with_deprecated_values(&[("reproducible", "true"), ("fast", "false")]);
    /// The kernels that compute attention on GPUs.
    #[serde(default)]
    pub attention: AttentionKernels = Key::new(choice_type(), "auto").with_rules(ATTENTION_RULES);
    /// Submit steps to GPUs as CUDA graphs.
    #[serde(default)]
    pub cuda_graphs: CudaGraphMode = Key::new(cuda_graph_mode_type(), "auto");
    /// The settings of evaluations during training; `None` for no evaluation.
    pub eval: Option<EvalSpec> = optional_inner_section();
    /// The parameters that are not trained.
    ///
    /// Each item is a name pattern.
    #[serde(default)]
    pub freeze: Vec<String> = Key::new(patterns_type().hidden_if_empty(), "[]");
    /// The parameters that are trained, while all others are frozen; not with `freeze`.
    ///
    /// Each item is a name pattern. If the list is empty, all parameters are trained except those
    /// of `freeze`.
    #[serde(default)]
    pub train_only: Vec<String> =
        Key::computed(patterns_type().not_empty(), "all except those of `freeze`", |_, _| Vec::new());
    /// The low-rank adapters, which are the only trained parameters if they are given; `None` for
    /// no adapters.
    #[serde(default)]
    pub lora: Option<LoraSpec> = optional_inner_section();
}

/// The rules that reject `train.master_weights: false` with fp16, and warn that the key has no
/// effect with precisions other than bf16 and fp8. The range of fp16 is too small for training
/// without master weights.
const MASTER_WEIGHTS_RULES: &[Rule] = &[
    Rule::conflict(&[
        Condition::OneOf("train.precision", &["fp16"]),
        Condition::OneOf("train.master_weights", &["false"]),
    ])
    .with_message("`{key}: false` requires `train.precision: bf16` or `fp8`")
    .with_help("remove it, or set `train.precision: bf16`"),
    Rule::no_effect(&[Condition::NoneOf("train.precision", &["bf16", "fp8"])])
        .into_warning()
        .with_help("remove it, or set `train.precision: bf16`"),
];

/// The rule that rejects `train.steps: 0` in jobs without a pretrained model (`train.model.from`).
/// A run without steps converts the weights of that model.
const STEPS_RULES: &[Rule] =
    &[Rule::no_effect(&[Condition::NotGiven("train.model.from"), Condition::OneOf("train.steps", &["0"])])
        .with_code(codes::JOB_VALUE_OUT_OF_RANGE)
        .with_message("`{key}` must be an integer of 1 or more, or 0 with `model.from`, found 0")
        .with_help("")];

/// The rules that reject `attention: cudnn` in jobs that cuDNN's attention kernels do not support.
const ATTENTION_RULES: &[Rule] = &[
    Rule::conflict(&[ATTENTION_IS_CUDNN, TRAINS_ON_CPUS])
        .with_code(codes::JOB_REQUIRES_GPUS)
        .with_message("`{key}: cudnn` requires training on GPUs")
        .with_help("set `cluster.devices: cuda`, or remove the key"),
    Rule::conflict(&[ATTENTION_IS_CUDNN, Condition::NoneOf("train.precision", &["bf16", "fp8"])])
        .with_message("`{key}: cudnn` requires `train.precision: bf16` or `fp8`")
        .with_help("set `train.precision: bf16` (or `fp8`), or use `attention: auto`"),
    Rule::conflict(&[ATTENTION_IS_CUDNN, Condition::OneOf("train.deterministic", &["true"])])
        .with_message(
            "`{key}: cudnn` requires `train.deterministic: false`, because its sums have no fixed order",
        )
        .with_help("set `train.deterministic: false`, or use `attention: auto`"),
];

/// The condition that the job sets `train.attention: cudnn`, for rules that reject this value.
const ATTENTION_IS_CUDNN: Condition = Condition::OneOf("train.attention", &["cudnn"]);

/// Returns `true`, the value of keys such as `train.deterministic` in jobs that earlier releases
/// stored without these keys.
fn enabled_by_default() -> bool {
    true
}

/// Serializes `deterministic` as checkpoint manifests store it: as the field `numerics` with the
/// value `Reproducible` or `Fast`.
mod numerics {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// The JSON value by which a checkpoint manifest stores `train.deterministic`: `Reproducible`
    /// for true, `Fast` for false.
    #[derive(Serialize, Deserialize)]
    enum StoredDeterminism {
        Reproducible,
        Fast,
    }

    pub(super) fn serialize<S: Serializer>(deterministic: &bool, serializer: S) -> Result<S::Ok, S::Error> {
        if *deterministic { StoredDeterminism::Reproducible } else { StoredDeterminism::Fast }
            .serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
        StoredDeterminism::deserialize(deserializer)
            .map(|numerics| matches!(numerics, StoredDeterminism::Reproducible))
    }
}

impl TrainSpec {
    /// Returns whether updates of weights are rounded stochastically, which is so for bf16 weights
    /// without fp32 master weights.
    pub fn rounds_stochastically(&self) -> bool {
        self.precision.is_bf16() && !self.master_weights
    }
}
