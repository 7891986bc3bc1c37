//! Reports conflicts between the keys of the section `train` of job.yaml, such as a
//! `train.batch.global` that is not a multiple of `train.batch.micro`.
use crate::{
    keys::decoder::JobDecoder,
    spec::{
        data::TokenizerSpec,
        experts::{ExpertPlacement, ExpertsSpec},
        families::has_learned_positions,
        model::{FAMILY_HELP, ModelSpec},
        optimizer::OptimizerName,
        schedule::{ScheduleName, ScheduleSpec},
        train::TrainSpec,
        train_settings::{EvalSpec, Precision},
    },
};
use diagnostic::codes::job as codes;

/// The number of tokens of the built-in byte tokenizer: 256 bytes and the end-of-document token.
const BYTE_TOKENIZER_VOCAB_SIZE: u32 = 257;

/// Reports conflicts between the keys of the section `train` of job.yaml, such as a global batch
/// size that is not a multiple of the micro-batch size. Errors and warnings are reported to `d`.
pub(super) fn check_train(d: &mut JobDecoder, train: &TrainSpec) {
    check_batch(d, train);
    check_loss_scale(d, train);
    if train.model.from.is_none() {
        check_learned_position_heads(d, &train.model);
        check_heads(d, &train.model);
    }
    check_experts(d, &train.experts);
    check_vocabulary_and_positions(d, train);
    check_prompt(d, train);
    check_schedule(d, train);
    check_trained_params(d, train);
}

/// Checks that `train.batch.global` is a multiple of `train.batch.micro`.
fn check_batch(d: &mut JobDecoder, train: &TrainSpec) {
    const GLOBAL_KEY: &str = "train.batch.global";
    const MICRO_KEY: &str = "train.batch.micro";
    let (global, micro) = (train.batch.global, train.batch.micro);
    if d.are_keys_valid(&[GLOBAL_KEY, MICRO_KEY]) && !global.is_multiple_of(micro) {
        let (below, above) = (global / micro * micro, global.div_ceil(micro) * micro);
        let nearest = if below == 0 { format!("{above}") } else { format!("{below} and {above}") };
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            if d.sources.is_key_given(GLOBAL_KEY) { GLOBAL_KEY } else { MICRO_KEY },
            format!("`{GLOBAL_KEY}` ({global}) is not a multiple of `{MICRO_KEY}` ({micro})"),
            &format!("the nearest multiples are {nearest}"),
        );
    }
}

/// Checks that the smallest loss scale of fp16 is not larger than the initial one.
fn check_loss_scale(d: &mut JobDecoder, train: &TrainSpec) {
    const POWER_KEY: &str = "train.loss_scale.initial_scale_power";
    const MIN_KEY: &str = "train.loss_scale.min_loss_scale";
    if !d.are_keys_valid(&["train.precision"]) || train.precision != Precision::Fp16 {
        return;
    }
    let scale = &train.loss_scale;
    let first = f64::from(scale.initial_scale_power).exp2();
    if d.are_keys_valid(&[POWER_KEY, MIN_KEY]) && scale.min_loss_scale > first {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            if d.sources.is_key_given(MIN_KEY) { MIN_KEY } else { POWER_KEY },
            format!("`{MIN_KEY}` ({}) is larger than the initial scale ({first})", scale.min_loss_scale),
            "lower it, or raise `initial_scale_power`",
        );
    }
}

/// Rejects values of `head_dim` and `num_key_value_heads` that a model family with learned
/// positions, such as GPT-2, cannot have.
fn check_learned_position_heads(d: &mut JobDecoder, m: &ModelSpec) {
    if !has_learned_positions(&m.family) {
        return;
    }
    let head_dim = m.hidden_size.checked_div(m.num_attention_heads);
    for (path, is_wrong) in [
        ("train.model.num_key_value_heads", m.num_key_value_heads != m.num_attention_heads),
        ("train.model.head_dim", head_dim != Some(m.head_dim)),
    ] {
        if is_wrong && d.sources.is_key_given(path) && d.are_keys_valid(&[path]) {
            let message = format!("`{path}` does not apply to `train.model.family: {}`", m.family);
            d.report_error(codes::JOB_KEYS_CONFLICT, path, message, FAMILY_HELP);
        }
    }
}

/// Checks that `hidden_size`, the numbers of heads and `head_dim` of a new model fit together.
fn check_heads(d: &mut JobDecoder, m: &ModelSpec) {
    const HIDDEN_KEY: &str = "train.model.hidden_size";
    const HEADS_KEY: &str = "train.model.num_attention_heads";
    const KV_HEADS_KEY: &str = "train.model.num_key_value_heads";
    const HEAD_DIM_KEY: &str = "train.model.head_dim";
    let (heads, kv) = (m.num_attention_heads, m.num_key_value_heads);
    if d.are_keys_valid(&[HEADS_KEY, KV_HEADS_KEY]) && !heads.is_multiple_of(kv) {
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            KV_HEADS_KEY,
            format!("`{HEADS_KEY}` ({heads}) is not a multiple of `{KV_HEADS_KEY}` ({kv})"),
            "each key/value head serves the same number of query heads",
        );
    }
    if !d.are_keys_valid(&[HIDDEN_KEY, HEADS_KEY, HEAD_DIM_KEY]) {
        return;
    }
    let dim_given = d.sources.is_key_given(HEAD_DIM_KEY);
    if !dim_given && !m.hidden_size.is_multiple_of(heads) {
        let path = if d.sources.is_key_given(HEADS_KEY) { HEADS_KEY } else { HIDDEN_KEY };
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            path,
            format!("`{HIDDEN_KEY}` ({}) is not a multiple of `{HEADS_KEY}` ({heads})", m.hidden_size),
            &format!("change one of them, or set `{HEAD_DIM_KEY}`"),
        );
    } else if !m.head_dim.is_multiple_of(2) && !has_learned_positions(&m.family) {
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            if dim_given { HEAD_DIM_KEY } else { HEADS_KEY },
            format!("`{HEAD_DIM_KEY}` ({}) is odd", m.head_dim),
            "rotary embeddings rotate pairs of values, so the width of a head must be even",
        );
    }
}

/// Checks that the ranks in `train.experts.placement` are less than the size of an expert-parallel
/// group. The numbers of the experts are checked later, when the model is known.
fn check_experts(d: &mut JobDecoder, e: &ExpertsSpec) {
    const PLACEMENT_KEY: &str = "train.experts.placement";
    const SIZE_KEY: &str = "train.experts.expert_parallel_size";
    if !d.are_keys_valid(&["train.experts", PLACEMENT_KEY, SIZE_KEY]) {
        return;
    }
    let outside = |ranks: &std::collections::BTreeMap<u32, u32>| {
        ranks.iter().find(|(_, rank)| **rank >= e.expert_parallel_size).map(|(expert, rank)| (*expert, *rank))
    };
    let first_outside = match &e.placement {
        ExpertPlacement::Balanced => None,
        ExpertPlacement::Experts(ranks) => outside(ranks),
        ExpertPlacement::Layers(layers) => layers.values().find_map(outside),
    };
    if let Some((expert, rank)) = first_outside {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            PLACEMENT_KEY,
            format!(
                "`{PLACEMENT_KEY}` puts expert {expert} on rank {rank} of a group of {} ranks",
                e.expert_parallel_size
            ),
            &format!("ranks of an expert group are numbered from 0 to `{SIZE_KEY}` - 1"),
        );
    }
}

/// Checks that the vocabulary of a new model has all tokens of the byte tokenizer, and that the
/// model has at least `seq_len` positions. Also checks the held-out share.
fn check_vocabulary_and_positions(d: &mut JobDecoder, train: &TrainSpec) {
    const VOCAB_KEY: &str = "train.model.vocab_size";
    const POSITIONS_KEY: &str = "train.model.max_position_embeddings";
    let (vocab, positions) = (train.model.vocab_size, train.model.max_position_embeddings);
    let bytes = train.data.tokenizer == TokenizerSpec::Bytes && d.are_keys_valid(&["train.data.tokenizer"]);
    if bytes && d.are_keys_valid(&[VOCAB_KEY]) && (1..BYTE_TOKENIZER_VOCAB_SIZE).contains(&vocab) {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            VOCAB_KEY,
            format!("`{VOCAB_KEY}` ({vocab}) is smaller than the {BYTE_TOKENIZER_VOCAB_SIZE} tokens of the byte tokenizer"),
            "remove it, or raise it",
        );
    }
    let seq_len = train.data.seq_len;
    if d.are_keys_valid(&[POSITIONS_KEY, "train.data.seq_len"]) && positions != 0 && positions < seq_len {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            POSITIONS_KEY,
            format!("`{POSITIONS_KEY}` ({positions}) is smaller than `train.data.seq_len` ({seq_len})"),
            "a sample needs a position for each of its tokens",
        );
    }
    check_held_out(d, train);
}

/// Checks that a job with evaluations (`train.eval`) has held-out text to evaluate on. Warns if no
/// evaluation uses the held-out share.
fn check_held_out(d: &mut JobDecoder, train: &TrainSpec) {
    const HELD_OUT_KEY: &str = "train.data.held_out";
    let share = train.data.held_out;
    if !d.are_keys_valid(&[HELD_OUT_KEY, "train.eval", "train.eval.files"]) {
        return;
    }
    match &train.eval {
        Some(EvalSpec { files, .. }) if files.is_empty() && share == 0.0 => d.report_error(
            codes::JOB_KEY_REQUIRED,
            "train.eval",
            "`train.eval` requires `train.eval.files` or `train.data.held_out`",
            "name files in `train.eval.files`, or hold out a share of the data with `train.data.held_out: 0.05`",
        ),
        Some(EvalSpec { files, .. }) if !files.is_empty() && share > 0.0 => d.report_warning(
            codes::JOB_KEY_HAS_NO_EFFECT,
            HELD_OUT_KEY,
            "the held-out share of the data is not used, because `train.eval.files` is given",
            "remove one of them",
        ),
        None if share > 0.0 => d.report_warning(
            codes::JOB_KEY_HAS_NO_EFFECT,
            HELD_OUT_KEY,
            "the held-out share of the data is not used, because the job has no `train.eval`",
            "add `train.eval`, or remove `held_out`",
        ),
        _ => {}
    }
}

/// Checks that a job that generates text after evaluations (`train.eval.sample`) has a prompt.
fn check_prompt(d: &mut JobDecoder, train: &TrainSpec) {
    const SAMPLE_KEY: &str = "train.eval.sample";
    let sample = train.eval.as_ref().and_then(|eval| eval.sample.as_ref());
    let is_missing = sample.is_some_and(|sample| sample.prompt.is_empty());
    if is_missing && d.are_keys_valid(&["train.eval", SAMPLE_KEY, "train.eval.sample.prompt"]) {
        let help = "add `prompt`, the text that the model continues";
        d.report_error(codes::JOB_KEY_REQUIRED, SAMPLE_KEY, format!("`{SAMPLE_KEY}` has no `prompt`"), help);
    }
}

/// Reports conflicts between the keys that select trained parameters, such as `train.freeze`
/// together with `train.train_only` or `train.lora`.
fn check_trained_params(d: &mut JobDecoder, train: &TrainSpec) {
    const FREEZE_KEY: &str = "train.freeze";
    const TRAIN_ONLY_KEY: &str = "train.train_only";
    const GROUPS_KEY: &str = "train.optimizer.groups";
    if !train.freeze.is_empty() && d.sources.is_key_given(TRAIN_ONLY_KEY) {
        let message = format!("`{FREEZE_KEY}` and `{TRAIN_ONLY_KEY}` are both given");
        d.report_error(codes::JOB_KEYS_CONFLICT, FREEZE_KEY, message, "keep one of them");
    }
    check_lora(d, train);
    let name = train.optimizer.name;
    for (i, g) in train.optimizer.groups.iter().enumerate() {
        let settings =
            [("betas", g.betas.is_some()), ("eps", g.eps.is_some()), ("momentum", g.momentum.is_some())];
        for (key, is_given) in settings {
            if is_given && !name.has_hyper_parameter(key) {
                let message = format!(
                    "item {} of `{GROUPS_KEY}` has `{key}`, which does not apply to this optimizer",
                    i + 1
                );
                d.report_error(codes::JOB_KEY_HAS_NO_EFFECT, GROUPS_KEY, message, "remove it");
            }
        }
        if name == OptimizerName::Sgd
            && g.momentum.is_some_and(|m| (m == 0.0) != (train.optimizer.momentum == 0.0))
        {
            let message = format!(
                "item {} of `{GROUPS_KEY}` and `train.optimizer.momentum` must both be 0 or both above 0",
                i + 1
            );
            let help = "SGD keeps momentum for all parameters or for none: set `train.optimizer.momentum`";
            d.report_error(codes::JOB_KEYS_CONFLICT, GROUPS_KEY, message, help);
        }
    }
}

/// Rejects keys that conflict with `train.lora`, such as `train.freeze`, because only the adapters
/// are trained.
fn check_lora(d: &mut JobDecoder, train: &TrainSpec) {
    if train.lora.is_none() {
        return;
    }
    for key in ["train.freeze", "train.train_only"] {
        if d.sources.is_key_given(key) {
            let message = format!("`{key}` and `train.lora` are both given");
            let help = "remove it; only the adapters are trained, and the model is frozen";
            d.report_error(codes::JOB_KEYS_CONFLICT, key, message, help);
        }
    }
    if train.model.from.is_none() && d.are_keys_valid(&["train.model.from"]) {
        let message = "`train.lora` trains adapters of a new model, whose random weights stay frozen";
        let help = "name the directory of a trained model in `train.model.from`";
        d.report_warning(codes::JOB_LORA_WITHOUT_BASE, "train.lora", message, help);
    }
}

/// Reports a warm-up or decay of the learning rate that does not fit into `train.steps`, and a
/// `train.schedule.min_lr` above `train.optimizer.lr`.
fn check_schedule(d: &mut JobDecoder, train: &TrainSpec) {
    const WARMUP_KEY: &str = "train.schedule.warmup_steps";
    const DECAY_KEY: &str = "train.schedule.decay_steps";
    const MIN_LR_KEY: &str = "train.schedule.min_lr";
    let ScheduleSpec { name, warmup_steps, min_lr, decay_steps } = train.schedule;
    let steps = train.steps;
    if !d.are_keys_valid(&["train.schedule.name"]) {
        return;
    }
    let is_valid = d.are_keys_valid(&[WARMUP_KEY, "train.steps"]);
    if is_valid && warmup_steps > steps {
        d.report_warning(
            codes::JOB_SCHEDULE_TRUNCATED,
            WARMUP_KEY,
            format!(
                "training ends within the warm-up: `{WARMUP_KEY}` ({warmup_steps}) is more than `train.steps` ({steps})"
            ),
            "shorten the warm-up, or train for more steps",
        );
    } else if is_valid
        && name == ScheduleName::Wsd
        && d.are_keys_valid(&[DECAY_KEY])
        && decay_steps > steps - warmup_steps
    {
        d.report_warning(
            codes::JOB_SCHEDULE_TRUNCATED,
            DECAY_KEY,
            format!(
                "warm-up ({warmup_steps} steps) and decay ({decay_steps} steps) overlap: `train.steps` is {steps}"
            ),
            "shorten one of them, or train for more steps",
        );
    }
    if name != ScheduleName::Constant
        && d.are_keys_valid(&[MIN_LR_KEY, "train.optimizer.lr"])
        && min_lr > train.optimizer.lr
    {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            MIN_LR_KEY,
            format!("`{MIN_LR_KEY}` ({min_lr}) is larger than `train.optimizer.lr` ({})", train.optimizer.lr),
            "lower `min_lr`, with which the schedule ends",
        );
    }
}
