//! Checks that the values of a job fit together, without reading data and without asking a host.
//!
//! A setting that cannot be honoured is an error. A setting without effect is an error if it would
//! mislead the user about the result or the safety of the run. Other settings without effect are
//! warnings.
use super::model::GPT2;
use super::{
    AttentionKernels, CommBackend, DeviceSelection, EvalSpec, ExpertPlacement, ExpertsSpec, JobSpec,
    ModelSpec, OffloadTarget, OptimizerName, OptimizerSpec, Precision, ResumeFrom, ScheduleName,
    ScheduleSpec, TokenizerSpec, TrainSpec, VisibleDevices, decode::JobDecoder, keys::list_section_keys,
};
use crate::env::looks_secret;
use diagnostic::codes::job as codes;

/// The number of tokens of the built-in byte tokenizer: 256 bytes and the end-of-document token.
const BYTE_TOKENS: u32 = 257;
/// The keys of `checkpoint` that only apply to the built-in training.
const BUILT_IN_CHECKPOINT_KEYS: [&str; 6] = [
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.async",
    "checkpoint.parity",
    "checkpoint.require_shared",
    "checkpoint.gather_16bit_weights_on_model_save",
];

/// Checks that the values of a decoded job fit together. Errors and warnings are reported to `d`. A
/// check is skipped if decoding already reported an error for a key that the check reads.
pub(crate) fn check_job(d: &mut JobDecoder, job: &JobSpec) {
    check_run_or_train(d, job);
    check_program_keys(d, job);
    check_gpu_keys(d, job);
    check_secrets(d, job);
    if let Some(train) = &job.train {
        check_attention(d, job, train);
        check_batch(d, train);
        check_master_weights(d, train);
        check_loss_scale(d, train);
        check_model(d, &train.model);
        check_experts(d, &train.experts);
        check_data(d, train);
        check_optimizer(d, &train.optimizer);
        check_schedule(d, train);
        check_trained_params(d, train);
    }
}

/// Checks that the job has exactly one of `run.command` and `train`.
fn check_run_or_train(d: &mut JobDecoder, job: &JobSpec) {
    let command = d.sources.is_given("run.command");
    if !d.are_valid(&[""]) {
        return;
    }
    match (command, job.train.is_some()) {
        (false, false) => d.report_error(
            codes::JOB_NOTHING_TO_RUN,
            "",
            "the job has neither `run.command` nor `train`",
            "add `train` for the built-in training, or `run.command` for a program",
        ),
        (true, true) => d.report_error(
            codes::JOB_KEYS_CONFLICT,
            "run.command",
            "`run.command` and `train` are both given",
            "`train` runs the built-in training; remove one of the two",
        ),
        (true, false) => check_program_checkpoints(d, job),
        (false, true) => {}
    }
}

/// Checks `checkpoint` and `resume` in a job that runs a program. The program saves its checkpoints
/// itself, so launch only uses `checkpoint.dir`, which `resume.from: auto` requires.
fn check_program_checkpoints(d: &mut JobDecoder, job: &JobSpec) {
    const DIR: &str = "checkpoint.dir";
    const FROM: &str = "resume.from";
    const RNG: &str = "resume.rng";
    for key in BUILT_IN_CHECKPOINT_KEYS {
        if d.sources.is_given(key) {
            let message = format!("`{key}` has no effect in a job with `run.command`");
            d.report_error(
                codes::JOB_KEY_HAS_NO_EFFECT,
                key,
                message,
                "remove it; the program saves its own checkpoints",
            );
        }
    }
    if !d.are_valid(&[FROM, DIR]) {
        return;
    }
    let auto = d.sources.is_given(FROM) && job.resume.from == ResumeFrom::Auto;
    let dir = d.sources.is_given(DIR);
    if auto && !dir {
        let message = "`resume.from: auto` requires `checkpoint.dir` in a job with `run.command`";
        let help =
            "set `checkpoint.dir` to the directory that contains the program's checkpoint-N directories";
        d.report_error(codes::JOB_KEY_REQUIRED, FROM, message, help);
    } else if dir && !auto {
        let message =
            "`checkpoint.dir` has no effect in a job with `run.command` without `resume.from: auto`";
        let help = "remove it; the program saves its own checkpoints";
        d.report_error(codes::JOB_KEY_HAS_NO_EFFECT, DIR, message, help);
    }
    if d.sources.is_given(RNG) && job.resume.from == ResumeFrom::Never {
        let message = "`resume.rng` has no effect without `resume.from`";
        d.report_warning(codes::JOB_KEY_HAS_NO_EFFECT, RNG, message, "set `resume.from`, or remove the key");
    }
}

/// Checks the keys of `run` that only apply to programs, such as `run.visible_devices`.
fn check_program_keys(d: &mut JobDecoder, job: &JobSpec) {
    const VISIBLE: &str = "run.visible_devices";
    if !d.are_valid(&["run.command", "cluster.devices", VISIBLE]) {
        return;
    }
    if job.run.command.is_none() {
        for key in [VISIBLE, "run.local_rank_argument"] {
            if d.sources.is_given(key) {
                let message = format!("`{key}` has no effect without `run.command`");
                d.report_warning(codes::JOB_KEY_HAS_NO_EFFECT, key, message, "remove it");
            }
        }
    } else if job.cluster.devices == DeviceSelection::Cpu && job.run.visible_devices == VisibleDevices::One {
        let message =
            "`run.visible_devices: one` gives each worker a GPU, but `cluster.devices: cpu` hides all GPUs";
        d.report_error(codes::JOB_KEYS_CONFLICT, VISIBLE, message, "remove one of them");
    }
}

/// Checks keys that only apply to built-in training on GPUs, such as `cluster.comm_backend`.
fn check_gpu_keys(d: &mut JobDecoder, job: &JobSpec) {
    const WORKERS: &str = "cluster.workers_per_gpu";
    const BACKEND: &str = "cluster.comm_backend";
    const LIBRARIES: &str = "cluster.cuda_library_paths";
    if !d.are_valid(&["run.command", "cluster.devices", WORKERS, BACKEND, LIBRARIES]) {
        return;
    }
    let on_gpus = job.run.command.is_none() && job.cluster.trains_on_gpus();
    let nccl = job.cluster.comm_backend == CommBackend::Nccl;
    for key in [WORKERS, BACKEND, LIBRARIES] {
        if on_gpus || !d.sources.is_given(key) {
            continue;
        }
        let message = format!("`{key}` has no effect except in built-in training on GPUs");
        let help = "set `cluster.devices: cuda`, or remove the key";
        // On CPUs, workers communicate through the host and need no CUDA library.
        let is_harmless = job.run.command.is_none() && (key == LIBRARIES || key == BACKEND && !nccl);
        match is_harmless {
            true => d.report_warning(codes::JOB_KEY_HAS_NO_EFFECT, key, message, help),
            false => d.report_error(codes::JOB_KEY_HAS_NO_EFFECT, key, message, help),
        }
    }
    if nccl && job.cluster.workers_per_gpu > 2 {
        let message = format!(
            "`{BACKEND}: nccl` supports at most 2 workers on a GPU (1 before NCCL 2.30), `{WORKERS}` is {}",
            job.cluster.workers_per_gpu
        );
        d.report_error(
            codes::JOB_KEYS_CONFLICT,
            BACKEND,
            message,
            "use `auto` or `host`, or `cluster.workers_per_gpu: 2`",
        );
    }
    if !on_gpus && job.train.as_ref().is_some_and(|t| t.zero.offload == Some(OffloadTarget::Cpu)) {
        let message =
            "`{optimizer: cpu}` has no effect in training on CPUs, whose optimizer states are in host memory";
        let help = "remove it, name a directory to keep the states in files, or set `cluster.devices: cuda`";
        d.report_warning(codes::JOB_KEY_HAS_NO_EFFECT, "train.zero.offload", message, help);
    }
}

/// Rejects `train.attention: cudnn` in jobs that cuDNN's attention kernels do not support.
fn check_attention(d: &mut JobDecoder, job: &JobSpec, train: &TrainSpec) {
    const KEY: &str = "train.attention";
    let keys = ["train.precision", "train.deterministic", "cluster.devices", KEY];
    if !d.are_valid(&keys) || train.attention != AttentionKernels::Cudnn {
        return;
    }
    let (code, requirement, help) = if !job.cluster.trains_on_gpus() {
        (codes::JOB_REQUIRES_GPUS, "training on GPUs", "set `cluster.devices: cuda`, or remove the key")
    } else if !train.precision.is_bf16() {
        let help = "set `train.precision: bf16` (or `fp8`), or use `attention: auto`";
        (codes::JOB_KEYS_CONFLICT, "`train.precision: bf16` or `fp8`", help)
    } else if train.deterministic {
        let requirement = "`train.deterministic: false`, because its sums have no fixed order";
        let help = "set `train.deterministic: false`, or use `attention: auto`";
        (codes::JOB_KEYS_CONFLICT, requirement, help)
    } else {
        return;
    };
    d.report_error(code, KEY, format!("`{KEY}: cudnn` requires {requirement}"), help);
}

/// Warns about variables of `run.env` that look like secrets and whose values the job contains.
fn check_secrets(d: &mut JobDecoder, job: &JobSpec) {
    for (name, _) in job.run.env.iter().filter(|(name, value)| looks_secret(name) && !value.is_empty()) {
        d.report_warning(
            codes::JOB_SECRET_IN_FILE,
            &format!("run.env.{name}"),
            format!("`{name}` looks like a secret, and its value is written in the job"),
            &format!(
                "use `{name}: {{from_env: {name}}}` or `{{from_file: path}}`; plans show the value as `***`"
            ),
        );
    }
}

/// Checks that `train.batch.global` is a multiple of `train.batch.micro`.
fn check_batch(d: &mut JobDecoder, train: &TrainSpec) {
    const GLOBAL: &str = "train.batch.global";
    const MICRO: &str = "train.batch.micro";
    let (global, micro) = (train.batch.global, train.batch.micro);
    if d.are_valid(&[GLOBAL, MICRO]) && !global.is_multiple_of(micro) {
        let (below, above) = (global / micro * micro, global.div_ceil(micro) * micro);
        let nearest = if below == 0 { format!("{above}") } else { format!("{below} and {above}") };
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            if d.sources.is_given(GLOBAL) { GLOBAL } else { MICRO },
            format!("`{GLOBAL}` ({global}) is not a multiple of `{MICRO}` ({micro})"),
            &format!("the nearest multiples are {nearest}"),
        );
    }
}

/// Checks `train.master_weights`, which only applies to bf16 and fp8. Fp32 weights need no master
/// weights, and the range of fp16 is too small for training without them.
fn check_master_weights(d: &mut JobDecoder, train: &TrainSpec) {
    const KEY: &str = "train.master_weights";
    if !d.are_valid(&["train.precision", KEY]) || !d.sources.is_given(KEY) || train.precision.is_bf16() {
        return;
    }
    let name = train.precision.name();
    let help = "remove it, or set `train.precision: bf16`";
    if train.precision == Precision::Fp16 && !train.master_weights {
        let message = format!("`{KEY}: false` requires `train.precision: bf16` or `fp8`");
        d.report_error(codes::JOB_KEYS_CONFLICT, KEY, message, help);
    } else {
        let message = format!("`{KEY}` has no effect with `train.precision: {name}`");
        d.report_warning(codes::JOB_KEY_HAS_NO_EFFECT, KEY, message, help);
    }
}

/// Checks `train.loss_scale`, which only applies to fp16.
fn check_loss_scale(d: &mut JobDecoder, train: &TrainSpec) {
    const POWER: &str = "train.loss_scale.initial_scale_power";
    const MIN: &str = "train.loss_scale.min_loss_scale";
    if !d.are_valid(&["train.precision"]) {
        return;
    }
    if train.precision != Precision::Fp16 {
        for (_, key) in list_section_keys("train.loss_scale")
            .filter(|(_, key)| d.sources.is_given(key.path))
            .collect::<Vec<_>>()
        {
            let message = format!("`{}` has no effect without `train.precision: fp16`", key.path);
            d.report_warning(codes::JOB_KEY_HAS_NO_EFFECT, key.path, message, "remove it");
        }
        return;
    }
    let scale = &train.loss_scale;
    let first = f64::from(scale.initial_scale_power).exp2();
    if d.are_valid(&[POWER, MIN]) && scale.min_loss_scale > first {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            if d.sources.is_given(MIN) { MIN } else { POWER },
            format!("`{MIN}` ({}) is larger than the initial scale ({first})", scale.min_loss_scale),
            "lower it, or raise `initial_scale_power`",
        );
    }
}

/// Checks that a job with `train.model.from` has no keys of a new model. Otherwise checks that the
/// sizes of the new model fit together.
fn check_model(d: &mut JobDecoder, m: &ModelSpec) {
    const FROM: &str = "train.model.from";
    const DROPOUT: &str = "train.model.dropout";
    if m.from.is_some() {
        for (name, key) in
            list_section_keys("train.model").filter(|(_, key)| ![FROM, DROPOUT].contains(&key.path))
        {
            if d.sources.is_given(key.path) {
                let message = format!("`{}` and `{FROM}` are both given", key.path);
                let help = format!("remove it; config.json of the directory has {name}");
                d.report_error(codes::JOB_KEYS_CONFLICT, key.path, message, &help);
            }
        }
        return;
    }
    if m.family == GPT2 {
        check_gpt2(d, m);
    }
    check_heads(d, m);
}

/// Checks that `hidden_size`, the numbers of heads and `head_dim` of a new model fit together.
fn check_heads(d: &mut JobDecoder, m: &ModelSpec) {
    const HIDDEN: &str = "train.model.hidden_size";
    const HEADS: &str = "train.model.num_attention_heads";
    const KV: &str = "train.model.num_key_value_heads";
    const DIM: &str = "train.model.head_dim";
    let (heads, kv) = (m.num_attention_heads, m.num_key_value_heads);
    if d.are_valid(&[HEADS, KV]) && !heads.is_multiple_of(kv) {
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            KV,
            format!("`{HEADS}` ({heads}) is not a multiple of `{KV}` ({kv})"),
            "each key/value head serves the same number of query heads",
        );
    }
    if !d.are_valid(&[HIDDEN, HEADS, DIM]) {
        return;
    }
    let dim_given = d.sources.is_given(DIM);
    if !dim_given && !m.hidden_size.is_multiple_of(heads) {
        let path = if d.sources.is_given(HEADS) { HEADS } else { HIDDEN };
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            path,
            format!("`{HIDDEN}` ({}) is not a multiple of `{HEADS}` ({heads})", m.hidden_size),
            &format!("change one of them, or set `{DIM}`"),
        );
    } else if !m.head_dim.is_multiple_of(2) && m.family != GPT2 {
        d.report_error(
            codes::JOB_VALUE_NOT_MULTIPLE,
            if dim_given { DIM } else { HEADS },
            format!("`{DIM}` ({}) is odd", m.head_dim),
            "rotary embeddings rotate pairs of values, so the width of a head must be even",
        );
    }
}

/// Checks that the ranks in `train.experts.placement` are less than the size of an expert-parallel
/// group. The numbers of the experts are checked when the model is known.
fn check_experts(d: &mut JobDecoder, e: &ExpertsSpec) {
    const PLACEMENT: &str = "train.experts.placement";
    const SIZE: &str = "train.experts.expert_parallel_size";
    if !d.are_valid(&["train.experts", PLACEMENT, SIZE]) {
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
            PLACEMENT,
            format!(
                "`{PLACEMENT}` puts expert {expert} on rank {rank} of a group of {} ranks",
                e.expert_parallel_size
            ),
            &format!("ranks of an expert group are numbered from 0 to `{SIZE}` - 1"),
        );
    }
}

/// Rejects keys of `train.model` that do not apply to GPT-2.
fn check_gpt2(d: &mut JobDecoder, m: &ModelSpec) {
    let head_dim = m.hidden_size.checked_div(m.num_attention_heads);
    for (path, is_wrong) in [
        ("train.model.num_key_value_heads", m.num_key_value_heads != m.num_attention_heads),
        ("train.model.head_dim", head_dim != Some(m.head_dim)),
        ("train.model.rms_norm_eps", true),
        ("train.model.rope_theta", true),
    ] {
        if is_wrong && d.sources.is_given(path) && d.are_valid(&[path]) {
            let message = format!("`{path}` does not apply to `family: gpt2`");
            let help = "remove it; gpt2 has LayerNorm, learned positions, and as many key heads as query heads, \
                        of width `hidden_size` / `num_attention_heads`";
            d.report_error(codes::JOB_KEYS_CONFLICT, path, message, help);
        }
    }
}

/// Checks that the vocabulary of a new model has all tokens of the byte tokenizer, and that the
/// model has at least `seq_len` positions. Also checks the held-out share.
fn check_data(d: &mut JobDecoder, train: &TrainSpec) {
    const VOCAB: &str = "train.model.vocab_size";
    const POSITIONS: &str = "train.model.max_position_embeddings";
    let (vocab, positions) = (train.model.vocab_size, train.model.max_position_embeddings);
    let bytes = train.data.tokenizer == TokenizerSpec::Bytes && d.are_valid(&["train.data.tokenizer"]);
    if bytes && d.are_valid(&[VOCAB]) && (1..BYTE_TOKENS).contains(&vocab) {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            VOCAB,
            format!("`{VOCAB}` ({vocab}) is smaller than the {BYTE_TOKENS} tokens of the byte tokenizer"),
            "remove it, or raise it",
        );
    }
    let seq_len = train.data.seq_len;
    if d.are_valid(&[POSITIONS, "train.data.seq_len"]) && positions != 0 && positions < seq_len {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            POSITIONS,
            format!("`{POSITIONS}` ({positions}) is smaller than `train.data.seq_len` ({seq_len})"),
            "a sample needs a position for each of its tokens",
        );
    }
    check_held_out(d, train);
}

/// Checks that `train.eval` has text to evaluate on. Warns if no evaluation uses the held-out
/// share.
fn check_held_out(d: &mut JobDecoder, train: &TrainSpec) {
    const HELD_OUT: &str = "train.data.held_out";
    let share = train.data.held_out;
    if !d.are_valid(&[HELD_OUT, "train.eval", "train.eval.files"]) {
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
            HELD_OUT,
            "the held-out share of the data is not used, because `train.eval.files` is given",
            "remove one of them",
        ),
        None if share > 0.0 => d.report_warning(
            codes::JOB_KEY_HAS_NO_EFFECT,
            HELD_OUT,
            "the held-out share of the data is not used, because the job has no `train.eval`",
            "add `train.eval`, or remove `held_out`",
        ),
        _ => {}
    }
}

/// Rejects hyper-parameters in `train.optimizer` that the chosen optimizer does not have.
fn check_optimizer(d: &mut JobDecoder, o: &OptimizerSpec) {
    let (name, inapplicable): (&str, &[&str]) = match o.name {
        OptimizerName::Adamw => ("adamw", &["train.optimizer.momentum"]),
        OptimizerName::Sgd => ("sgd", &["train.optimizer.betas", "train.optimizer.eps"]),
        OptimizerName::Lion => ("lion", &["train.optimizer.eps", "train.optimizer.momentum"]),
        OptimizerName::Muon => ("muon", &[]),
    };
    if !d.are_valid(&["train.optimizer.name"]) {
        return;
    }
    for &path in inapplicable {
        if d.sources.is_given(path) {
            let message = format!("`{path}` has no effect with the optimizer `{name}`");
            d.report_error(codes::JOB_KEY_HAS_NO_EFFECT, path, message, "remove it");
        }
    }
}

/// Checks `train.freeze`, `train.train_only`, `train.lora` and the hyper-parameters of parameter
/// groups.
fn check_trained_params(d: &mut JobDecoder, train: &TrainSpec) {
    const FREEZE: &str = "train.freeze";
    const ONLY: &str = "train.train_only";
    const GROUPS: &str = "train.optimizer.groups";
    if !train.freeze.is_empty() && d.sources.is_given(ONLY) {
        let message = format!("`{FREEZE}` and `{ONLY}` are both given");
        d.report_error(codes::JOB_KEYS_CONFLICT, FREEZE, message, "keep one of them");
    }
    check_lora(d, train);
    let name = train.optimizer.name;
    for (i, g) in train.optimizer.groups.iter().enumerate() {
        let muon = name == OptimizerName::Muon;
        let (adam, sgd) = (muon || name == OptimizerName::Adamw, name == OptimizerName::Sgd);
        let settings = [
            ("betas", g.betas.is_some(), !sgd),
            ("eps", g.eps.is_some(), adam),
            ("momentum", g.momentum.is_some(), sgd || muon),
        ];
        for (key, is_given, applies) in settings {
            if is_given && !applies {
                let message = format!(
                    "item {} of `{GROUPS}` has `{key}`, which does not apply to this optimizer",
                    i + 1
                );
                d.report_error(codes::JOB_KEY_HAS_NO_EFFECT, GROUPS, message, "remove it");
            }
        }
        if sgd && g.momentum.is_some_and(|m| (m == 0.0) != (train.optimizer.momentum == 0.0)) {
            let message = format!(
                "item {} of `{GROUPS}` and `train.optimizer.momentum` must both be 0 or both above 0",
                i + 1
            );
            let help = "SGD keeps momentum for all parameters or for none: set `train.optimizer.momentum`";
            d.report_error(codes::JOB_KEYS_CONFLICT, GROUPS, message, help);
        }
    }
}

/// Rejects keys that conflict with `train.lora`. Adapters are the only trained parameters, and the
/// directory `train.lora.from` contains the settings of its adapters.
fn check_lora(d: &mut JobDecoder, train: &TrainSpec) {
    const FROM: &str = "train.lora.from";
    let Some(lora) = &train.lora else { return };
    for key in ["train.freeze", "train.train_only"] {
        if d.sources.is_given(key) {
            let message = format!("`{key}` and `train.lora` are both given");
            let help = "remove it; only the adapters are trained, and the model is frozen";
            d.report_error(codes::JOB_KEYS_CONFLICT, key, message, help);
        }
    }
    let allowed = [FROM, "train.lora.dropout"];
    for (name, key) in list_section_keys("train.lora").filter(|(_, key)| !allowed.contains(&key.path)) {
        if lora.from.is_some() && d.sources.is_given(key.path) {
            let message = format!("`{}` and `{FROM}` are both given", key.path);
            let help = format!("remove it; adapter_config.json of the directory has {name}");
            d.report_error(codes::JOB_KEYS_CONFLICT, key.path, message, &help);
        }
    }
    if train.model.from.is_none() && d.are_valid(&["train.model.from"]) {
        let message = "`train.lora` trains adapters of a new model, whose random weights stay frozen";
        let help = "name the directory of a trained model in `train.model.from`";
        d.report_warning(codes::JOB_LORA_WITHOUT_BASE, "train.lora", message, help);
    }
}

/// Checks the keys of `train.schedule` against the name of the schedule, the number of steps and
/// the learning rate.
fn check_schedule(d: &mut JobDecoder, train: &TrainSpec) {
    const WARMUP: &str = "train.schedule.warmup_steps";
    const DECAY: &str = "train.schedule.decay_steps";
    const MIN: &str = "train.schedule.min_lr";
    let ScheduleSpec { name, warmup_steps, min_lr, decay_steps } = train.schedule;
    let steps = train.steps;
    if !d.are_valid(&["train.schedule.name"]) {
        return;
    }
    let is_valid = d.are_valid(&[WARMUP, "train.steps"]);
    if is_valid && warmup_steps > steps {
        d.report_warning(
            codes::JOB_SCHEDULE_TRUNCATED,
            WARMUP,
            format!(
                "training ends within the warm-up: `{WARMUP}` ({warmup_steps}) is more than `train.steps` ({steps})"
            ),
            "shorten the warm-up, or train for more steps",
        );
    } else if is_valid
        && name == ScheduleName::Wsd
        && d.are_valid(&[DECAY])
        && decay_steps > steps - warmup_steps
    {
        d.report_warning(
            codes::JOB_SCHEDULE_TRUNCATED,
            DECAY,
            format!(
                "warm-up ({warmup_steps} steps) and decay ({decay_steps} steps) overlap: `train.steps` is {steps}"
            ),
            "shorten one of them, or train for more steps",
        );
    }
    if name != ScheduleName::Wsd && d.sources.is_given(DECAY) {
        let message = format!("`{DECAY}` has no effect without `train.schedule.name: wsd`");
        d.report_error(codes::JOB_KEY_HAS_NO_EFFECT, DECAY, message, "remove it");
    }
    if name == ScheduleName::Constant && d.sources.is_given(MIN) {
        let message = format!("`{MIN}` has no effect with the schedule `constant`");
        d.report_error(codes::JOB_KEY_HAS_NO_EFFECT, MIN, message, "remove it");
    } else if d.are_valid(&[MIN, "train.optimizer.lr"]) && min_lr > train.optimizer.lr {
        d.report_error(
            codes::JOB_VALUES_INCONSISTENT,
            MIN,
            format!("`{MIN}` ({min_lr}) is larger than `train.optimizer.lr` ({})", train.optimizer.lr),
            "lower `min_lr`, with which the schedule ends",
        );
    }
}
