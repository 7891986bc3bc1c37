//! What keys mean together: checks that need no data and no machine.
use super::train::GPT2;
use super::{
    Attention, Collectives, Devices, EvalSpec, ExpertPlacement, ExpertsSpec, JobSpec, ModelSpec, Numerics,
    Offload, OptimizerName, OptimizerSpec, Precision, ResumeFrom, ScheduleName, ScheduleSpec, Tokenizer,
    TrainSpec, VisibleDevices, decode::Decoder, keys::names_in,
};
use crate::env::looks_secret;

/// A key of the built-in runtime.
const SHARED: &str = "checkpoint.require_shared";
const GATHER: &str = "checkpoint.gather_16bit_weights_on_model_save";
/// Ids of the embedded byte tokenizer: 256 bytes and the end of a document.
const BYTE_TOKENS: u32 = 257;

/// Checks a whole decoded job. A check whose keys have problems already is left out.
pub(crate) fn job(d: &mut Decoder, job: &JobSpec) {
    what_runs(d, job);
    programs(d, job);
    gpus(d, job);
    secrets(d, job);
    if let Some(train) = &job.train {
        attention(d, job, train);
        batch(d, train);
        master_weights(d, train);
        loss_scale(d, train);
        model(d, &train.model);
        experts(d, &train.experts);
        data(d, train);
        optimizer(d, &train.optimizer);
        schedule(d, train);
        tune(d, train);
    }
}

/// Exactly one of `run.command` and `train`.
fn what_runs(d: &mut Decoder, job: &JobSpec) {
    let command = d.map.is_given("run.command");
    if !d.clean(&[""]) {
        return;
    }
    match (command, job.train.is_some()) {
        (false, false) => d.refuse(
            "",
            "the job doesn't say what to run",
            "give `train` for the built-in training, or `run.command` for a program of yours",
        ),
        (true, true) => d.refuse(
            "run.command",
            "`run.command` and `train` are both given",
            "`train` runs the built-in training; remove the one that isn't meant",
        ),
        (true, false) => program_resumes(d, job),
        (false, true) => {}
    }
}

/// A program saves by itself, and resumes from what launch prepares for it: of these sections it needs no other keys.
fn program_resumes(d: &mut Decoder, job: &JobSpec) {
    for key in
        ["checkpoint.every", "checkpoint.keep", "checkpoint.async", "checkpoint.parity", SHARED, GATHER]
    {
        if d.map.is_given(key) {
            let message = format!("`{key}` has no effect on a job with `run.command`");
            d.refuse(key, message, "the program saves by itself: remove the key");
        }
    }
    if !d.clean(&["resume.from", "checkpoint.dir"]) {
        return;
    }
    let auto = d.map.is_given("resume.from") && job.resume.from == ResumeFrom::Auto;
    let dir = d.map.is_given("checkpoint.dir");
    if auto && !dir {
        let hint = "give `checkpoint.dir`, the directory in which the program saves its checkpoint-N folders";
        d.refuse("resume.from", "`resume.from: auto` doesn't know where a program saves", hint);
    } else if dir && !auto {
        let message =
            "`checkpoint.dir` has an effect on a job with `run.command` only with `resume.from: auto`";
        d.refuse("checkpoint.dir", message, "the program saves by itself: remove the key");
    }
    if d.map.is_given("resume.rng") && job.resume.from == ResumeFrom::Never {
        d.refuse("resume.rng", "`resume.rng` has no effect without `resume.from`", "give `resume.from` too");
    }
}

/// Keys of `run` that only programs have, and keys that need GPUs.
fn programs(d: &mut Decoder, job: &JobSpec) {
    if !d.clean(&["run.command", "cluster.devices", "run.visible_devices"]) {
        return;
    }
    if job.run.command.is_none() {
        for key in ["run.visible_devices", "run.local_rank_argument"] {
            if d.map.is_given(key) {
                d.refuse(key, format!("`{key}` has an effect with `run.command` only"), "remove it");
            }
        }
    } else if job.cluster.devices == Devices::Cpu && job.run.visible_devices == VisibleDevices::One {
        let message = "`run.visible_devices: one` gives each worker a GPU, `cluster.devices: cpu` hides them";
        d.refuse("run.visible_devices", message, "remove one of them");
    }
}

/// Keys that only built-in workers on GPUs have.
fn gpus(d: &mut Decoder, job: &JobSpec) {
    const KEYS: [&str; 3] = ["cluster.workers_per_gpu", "cluster.collectives", "cluster.cuda_libs"];
    if !d.clean(&["run.command", "cluster.devices"]) || !d.clean(&KEYS) {
        return;
    }
    let on_gpus = job.run.command.is_none() && job.cluster.trains_on_gpus();
    for key in KEYS {
        if !on_gpus && d.map.is_given(key) {
            let message = format!("`{key}` has an effect on built-in training on GPUs only");
            d.refuse(key, message, "give `cluster.devices: cuda` too, or remove the key");
        }
    }
    if job.cluster.collectives == Collectives::Nccl && job.cluster.workers_per_gpu > 2 {
        let message = "NCCL has at most 2 workers on a GPU (from 2.30 on; before that, 1)";
        d.refuse("cluster.collectives", message, "use `auto` or `host`, or `cluster.workers_per_gpu: 2`");
    }
    if !on_gpus && job.train.as_ref().is_some_and(|t| t.zero.offload == Some(Offload::Cpu)) {
        let message = "`{optimizer: cpu}` keeps the optimizer states of GPUs in the host's memory, where those of CPUs lie anyway";
        let help = "remove it, name a directory for files, or give `cluster.devices: cuda` too";
        d.refuse("train.zero.offload", message, help);
    }
}

/// What cuDNN's attention needs of a job.
fn attention(d: &mut Decoder, job: &JobSpec, train: &TrainSpec) {
    const KEY: &str = "train.attention";
    let read = ["train.precision", "train.numerics", "cluster.devices", KEY];
    if !d.clean(&read) || train.attention != Attention::Cudnn {
        return;
    }
    let (why, help) = if !job.cluster.trains_on_gpus() {
        ("computes on GPUs only", "give `cluster.devices: cuda` too, or remove the key")
    } else if !train.precision.is_bf16() {
        ("computes in bf16 only", "set `train.precision: bf16` (or `fp8`), or use `auto`")
    } else if train.numerics != Numerics::Fast {
        (
            "adds up in an order of its own, which is not the same from run to run",
            "set `train.numerics: fast`, or use `auto`",
        )
    } else {
        return;
    };
    d.refuse(KEY, format!("cuDNN's attention {why}"), help);
}

/// A secret's place is not the job file.
fn secrets(d: &mut Decoder, job: &JobSpec) {
    for (name, _) in job.run.env.iter().filter(|(name, value)| looks_secret(name) && !value.is_empty()) {
        d.warn(
            &format!("run.env.{name}"),
            format!("`{name}` looks like a secret and is written in the job"),
            &format!("`{name}: {{from_env: {name}}}` or `{{from_file: …}}` keeps it out of files; plans show it as `***`"),
        );
    }
}

fn batch(d: &mut Decoder, train: &TrainSpec) {
    let (global, micro) = (train.batch.global, train.batch.micro);
    if d.clean(&["train.batch.global", "train.batch.micro"]) && !global.is_multiple_of(micro) {
        let (below, above) = (global / micro * micro, global.div_ceil(micro) * micro);
        let nearest = if below == 0 { format!("{above}") } else { format!("{below} or {above}") };
        d.refuse(
            if d.map.is_given("train.batch.global") { "train.batch.global" } else { "train.batch.micro" },
            format!("`train.batch.global` ({global}) is not a multiple of `train.batch.micro` ({micro})"),
            &format!("the nearest multiples are {nearest}"),
        );
    }
}

/// fp32 weights are their own masters, and fp16 has too few exponents to be the only weights.
fn master_weights(d: &mut Decoder, train: &TrainSpec) {
    const KEY: &str = "train.master_weights";
    if d.clean(&["train.precision", KEY]) && d.map.is_given(KEY) && !train.precision.is_bf16() {
        let message = format!("`{KEY}` has an effect with `train.precision: bf16` and `fp8` only");
        d.refuse(KEY, message, "remove it, or set `train.precision: bf16`");
    }
}

fn loss_scale(d: &mut Decoder, train: &TrainSpec) {
    const POWER: &str = "train.loss_scale.initial_scale_power";
    const MIN: &str = "train.loss_scale.min_loss_scale";
    if !d.clean(&["train.precision"]) {
        return;
    }
    for (_, key) in names_in("train.loss_scale").filter(|_| train.precision != Precision::Fp16) {
        if d.map.is_given(key.path) {
            let message = format!("`{}` has an effect with `train.precision: fp16` only", key.path);
            d.refuse(key.path, message, "remove it");
        }
    }
    let scale = &train.loss_scale;
    let first = f64::from(scale.initial_scale_power).exp2();
    if d.clean(&[POWER, MIN]) && scale.min_loss_scale > first {
        d.refuse(
            if d.map.is_given(MIN) { MIN } else { POWER },
            format!("`{MIN}` ({}) is more than the first scale ({first})", scale.min_loss_scale),
            "the scale falls from the first one to the smallest",
        );
    }
}

fn model(d: &mut Decoder, m: &ModelSpec) {
    const FROM: &str = "train.model.from";
    const DROPOUT: &str = "train.model.dropout";
    if m.from.is_some() {
        for (name, key) in names_in("train.model").filter(|(_, key)| ![FROM, DROPOUT].contains(&key.path)) {
            if d.map.is_given(key.path) {
                let message = format!("`{}` is given beside `{FROM}`", key.path);
                d.refuse(key.path, message, &format!("the folder's config.json says {name}: remove the key"));
            }
        }
        return;
    }
    if m.family == GPT2 {
        refuse_for_gpt2(d, m);
    }
    const HIDDEN: &str = "train.model.hidden_size";
    const HEADS: &str = "train.model.num_attention_heads";
    const KV: &str = "train.model.num_key_value_heads";
    const DIM: &str = "train.model.head_dim";
    let (heads, kv) = (m.num_attention_heads, m.num_key_value_heads);
    if d.clean(&[HEADS, KV]) && !heads.is_multiple_of(kv) {
        d.refuse(
            KV,
            format!("`{HEADS}` ({heads}) is not a multiple of `{KV}` ({kv})"),
            "each key/value head serves the same number of query heads",
        );
    }
    if !d.clean(&[HIDDEN, HEADS, DIM]) {
        return;
    }
    let asked = d.map.is_given(DIM);
    if !asked && !m.hidden_size.is_multiple_of(heads) {
        let path = if d.map.is_given(HEADS) { HEADS } else { HIDDEN };
        d.refuse(
            path,
            format!("`{HIDDEN}` ({}) is not a multiple of `{HEADS}` ({heads})", m.hidden_size),
            &format!("change one of them, or give `{DIM}`"),
        );
    } else if !m.head_dim.is_multiple_of(2) && m.family != GPT2 {
        d.refuse(
            if asked { DIM } else { HEADS },
            format!("`{DIM}` ({}) is odd", m.head_dim),
            "rotary embeddings turn pairs of values: it must be even",
        );
    }
}

/// Ranks that a placement names are ranks of the group. Which experts there are is the model's business.
fn experts(d: &mut Decoder, e: &ExpertsSpec) {
    const PLACEMENT: &str = "train.experts.placement";
    if !d.clean(&["train.experts", PLACEMENT, "train.experts.parallel"]) {
        return;
    }
    let outside = |ranks: &std::collections::BTreeMap<u32, u32>| {
        ranks.iter().find(|(_, rank)| **rank >= e.parallel).map(|(expert, rank)| (*expert, *rank))
    };
    let found = match &e.placement {
        ExpertPlacement::Balanced => None,
        ExpertPlacement::Experts(ranks) => outside(ranks),
        ExpertPlacement::Layers(layers) => layers.values().find_map(outside),
    };
    if let Some((expert, rank)) = found {
        d.refuse(
            PLACEMENT,
            format!("`{PLACEMENT}` puts expert {expert} on rank {rank} of {}", e.parallel),
            "ranks of an expert group are numbered from 0 to `train.experts.parallel` - 1",
        );
    }
}

/// What GPT-2 has no place for.
fn refuse_for_gpt2(d: &mut Decoder, m: &ModelSpec) {
    let own = m.hidden_size.checked_div(m.num_attention_heads);
    for (path, wrong) in [
        ("train.model.num_key_value_heads", m.num_key_value_heads != m.num_attention_heads),
        ("train.model.head_dim", own != Some(m.head_dim)),
        ("train.model.rms_norm_eps", true),
        ("train.model.rope_theta", true),
    ] {
        if wrong && d.map.is_given(path) && d.clean(&[path]) {
            let why = "it has LayerNorm, learned positions, and as many key as query heads of `hidden_size` / `num_attention_heads`";
            d.refuse(path, format!("`{path}` has no meaning for `family: gpt2`"), why);
        }
    }
}

fn data(d: &mut Decoder, train: &TrainSpec) {
    const VOCAB: &str = "train.model.vocab_size";
    const POSITIONS: &str = "train.model.max_position_embeddings";
    let (vocab, positions) = (train.model.vocab_size, train.model.max_position_embeddings);
    let bytes = train.data.tokenizer == Tokenizer::Bytes && d.clean(&["train.data.tokenizer"]);
    if bytes && d.clean(&[VOCAB]) && (1..BYTE_TOKENS).contains(&vocab) {
        d.refuse(
            VOCAB,
            format!("`{VOCAB}` ({vocab}) is smaller than the byte tokenizer's {BYTE_TOKENS} tokens"),
            "leave it out, or make it larger",
        );
    }
    let seq_len = train.data.seq_len;
    if d.clean(&[POSITIONS, "train.data.seq_len"]) && positions != 0 && positions < seq_len {
        d.refuse(
            POSITIONS,
            format!("`{POSITIONS}` ({positions}) is smaller than `train.data.seq_len` ({seq_len})"),
            "a sample needs a position for each of its tokens",
        );
    }
    let held_out = train.data.held_out;
    if !d.clean(&["train.data.held_out", "train.eval", "train.eval.files"]) {
        return;
    }
    match &train.eval {
        Some(EvalSpec { files, .. }) if files.is_empty() && held_out == 0.0 => d.refuse(
            "train.eval",
            "`train.eval` has no text to evaluate on",
            "give `train.eval.files`, or keep a share of the data out with `train.data.held_out: 0.05`",
        ),
        Some(EvalSpec { files, .. }) if !files.is_empty() && held_out > 0.0 => d.warn(
            "train.data.held_out",
            "the held-out share of the data is used for nothing: `train.eval.files` is given",
            "remove one of them",
        ),
        None if held_out > 0.0 => d.warn(
            "train.data.held_out",
            "the held-out share of the data is used for nothing: there is no `train.eval`",
            "add `train.eval`, or remove `held_out`",
        ),
        _ => {}
    }
}

fn optimizer(d: &mut Decoder, o: &OptimizerSpec) {
    let (other, foreign): (&str, &[&str]) = match o.name {
        OptimizerName::Adamw => ("adamw", &["train.optimizer.momentum"]),
        OptimizerName::Sgd => ("sgd", &["train.optimizer.betas", "train.optimizer.eps"]),
        OptimizerName::Lion => ("lion", &["train.optimizer.eps", "train.optimizer.momentum"]),
        OptimizerName::Muon => ("muon", &[]),
    };
    if !d.clean(&["train.optimizer.name"]) {
        return;
    }
    for &path in foreign {
        if d.map.is_given(path) {
            d.refuse(path, format!("`{path}` has no effect with the optimizer `{other}`"), "remove it");
        }
    }
}

/// One way of saying what is trained, and numbers that an optimizer has.
fn tune(d: &mut Decoder, train: &TrainSpec) {
    const FREEZE: &str = "train.freeze";
    const ONLY: &str = "train.train_only";
    if !train.freeze.is_empty() && d.map.is_given(ONLY) {
        d.refuse(
            FREEZE,
            format!("`{FREEZE}` is given beside `{ONLY}`"),
            "each says it all: keep one of them",
        );
    }
    lora(d, train);
    const GROUPS: &str = "train.optimizer.groups";
    let name = train.optimizer.name;
    for (i, g) in train.optimizer.groups.iter().enumerate() {
        let muon = name == OptimizerName::Muon;
        let (adam, sgd) = (muon || name == OptimizerName::Adamw, name == OptimizerName::Sgd);
        let has = [
            ("betas", g.betas.is_some(), !sgd),
            ("eps", g.eps.is_some(), adam),
            ("momentum", g.momentum.is_some(), sgd || muon),
        ];
        for (key, given, fits) in has {
            if given && !fits {
                let message =
                    format!("item {} of `{GROUPS}` has `{key}`, which this optimizer hasn't", i + 1);
                d.refuse(GROUPS, message, "remove it");
            }
        }
        if sgd && g.momentum.is_some_and(|m| (m == 0.0) != (train.optimizer.momentum == 0.0)) {
            let message = format!(
                "item {} of `{GROUPS}` has a momentum where the rest has none, or none where the rest has one",
                i + 1
            );
            d.refuse(
                GROUPS,
                message,
                "a state of the optimizer is kept for all or for none: set `train.optimizer.momentum`",
            );
        }
    }
}

/// Adapters are all that is trained, and a folder of adapters says everything about them.
fn lora(d: &mut Decoder, train: &TrainSpec) {
    let Some(lora) = &train.lora else { return };
    for key in ["train.freeze", "train.train_only"] {
        if d.map.is_given(key) {
            let message = format!("`{key}` is given beside `train.lora`");
            d.refuse(key, message, "the model is frozen and its adapters are trained: remove it");
        }
    }
    const FROM: &str = "train.lora.from";
    let own = [FROM, "train.lora.dropout"];
    for (name, key) in names_in("train.lora").filter(|(_, key)| !own.contains(&key.path)) {
        if lora.from.is_some() && d.map.is_given(key.path) {
            let message = format!("`{}` is given beside `{FROM}`", key.path);
            d.refuse(
                key.path,
                message,
                &format!("the folder's adapter_config.json says {name}: remove the key"),
            );
        }
    }
    if train.model.from.is_none() && d.clean(&["train.model.from"]) {
        let message =
            "`train.lora` trains adapters of a new model, whose weights are random and stay as they are";
        d.warn("train.lora", message, "name the folder of a trained model in `train.model.from`");
    }
}

fn schedule(d: &mut Decoder, train: &TrainSpec) {
    const WARMUP: &str = "train.schedule.warmup_steps";
    const DECAY: &str = "train.schedule.decay_steps";
    const MIN: &str = "train.schedule.min_lr";
    let ScheduleSpec { name, warmup_steps, min_lr, decay_steps } = train.schedule;
    let steps = train.steps;
    if !d.clean(&["train.schedule.name"]) {
        return;
    }
    let fits = d.clean(&[WARMUP, "train.steps"]);
    if fits && warmup_steps > steps {
        d.refuse(
            WARMUP,
            format!("`{WARMUP}` ({warmup_steps}) is more than `train.steps` ({steps})"),
            "the learning rate would never arrive",
        );
    } else if fits && name == ScheduleName::Wsd && d.clean(&[DECAY]) && decay_steps > steps - warmup_steps {
        d.refuse(
            DECAY,
            format!(
                "warm-up ({warmup_steps}) and decay ({decay_steps}) take more than `train.steps` ({steps})"
            ),
            "shorten one of them",
        );
    }
    if name != ScheduleName::Wsd && d.map.is_given(DECAY) {
        d.refuse(DECAY, format!("`{DECAY}` has an effect with the schedule `wsd` only"), "remove it");
    }
    if name == ScheduleName::Constant && d.map.is_given(MIN) {
        d.refuse(MIN, format!("`{MIN}` has no effect with the schedule `constant`"), "remove it");
    } else if d.clean(&[MIN, "train.optimizer.lr"]) && min_lr > train.optimizer.lr {
        d.refuse(
            MIN,
            format!("`{MIN}` ({min_lr}) is more than `train.optimizer.lr` ({})", train.optimizer.lr),
            "the schedule ends at `min_lr`",
        );
    }
}
