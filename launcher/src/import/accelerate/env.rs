//! The environment that Accelerate's library reads.
use super::{
    super::{Draft, hostfile, keys::Keys, wording},
    Kind,
};
use std::path::Path;

/// A variable: its name, the key, what it is when the key isn't there, and whether its letters become small.
struct Variable(&'static str, &'static str, Option<&'static str>, bool);

const DYNAMO: &[Variable] = &[
    Variable("ACCELERATE_DYNAMO_MODE", "mode", Some("default"), false),
    Variable("ACCELERATE_DYNAMO_USE_FULLGRAPH", "use_fullgraph", Some("False"), false),
    Variable("ACCELERATE_DYNAMO_USE_DYNAMIC", "use_dynamic", Some("False"), false),
    Variable("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "use_regional_compilation", Some("False"), false),
];

const FSDP: &[Variable] = &[
    Variable("FSDP_VERSION", "version", Some("1"), false),
    Variable("FSDP_SHARDING_STRATEGY", "sharding_strategy", Some("FULL_SHARD"), false),
    Variable("FSDP_RESHARD_AFTER_FORWARD", "reshard_after_forward", Some("true"), true),
    Variable("FSDP_OFFLOAD_PARAMS", "offload_params", Some("false"), true),
    Variable("FSDP_MIN_NUM_PARAMS", "min_num_params", Some("100000000"), false),
    Variable("FSDP_AUTO_WRAP_POLICY", "auto_wrap_policy", None, false),
    Variable("FSDP_TRANSFORMER_CLS_TO_WRAP", "transformer_layer_cls_to_wrap", None, false),
    Variable("FSDP_BACKWARD_PREFETCH", "backward_prefetch", None, false),
    Variable("FSDP_STATE_DICT_TYPE", "state_dict_type", None, false),
    Variable("FSDP_FORWARD_PREFETCH", "forward_prefetch", Some("false"), true),
    Variable("FSDP_USE_ORIG_PARAMS", "use_orig_params", Some("true"), true),
    Variable("FSDP_CPU_RAM_EFFICIENT_LOADING", "cpu_ram_efficient_loading", Some("true"), true),
    Variable("FSDP_SYNC_MODULE_STATES", "sync_module_states", Some("true"), true),
    Variable("FSDP_ACTIVATION_CHECKPOINTING", "activation_checkpointing", Some("false"), true),
    Variable(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "activation_checkpointing_offload",
        Some("false"),
        true,
    ),
    Variable("FSDP_IGNORED_MODULES", "ignored_modules", None, false),
];

const DEEPSPEED: &[Variable] = &[
    Variable("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", None, false),
    Variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", None, false),
    Variable("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", None, true),
    Variable("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer_device", None, true),
    // Accelerate's library reads these two, and its launcher forgets to set them
    Variable("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "offload_optimizer_nvme_path", None, false),
    Variable("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "offload_param_nvme_path", None, false),
    Variable("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_param_device", None, true),
    Variable("ACCELERATE_DEEPSPEED_ZERO3_INIT", "zero3_init_flag", None, true),
    Variable("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "zero3_save_16bit_model", None, true),
    Variable("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed_config_file", None, false),
    Variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "deepspeed_moe_layer_cls_names", None, false),
];

const PARALLEL: &[Variable] = &[
    Variable("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "dp_replicate_size", Some("1"), false),
    Variable("PARALLELISM_CONFIG_DP_SHARD_SIZE", "dp_shard_size", Some("1"), false),
    Variable("PARALLELISM_CONFIG_TP_SIZE", "tp_size", Some("1"), false),
    Variable("PARALLELISM_CONFIG_CP_SIZE", "cp_size", Some("1"), false),
    Variable("PARALLELISM_CONFIG_CP_BACKEND", "cp_backend", Some("torch"), false),
    Variable("PARALLELISM_CONFIG_SP_SIZE", "sp_size", Some("1"), false),
    Variable("PARALLELISM_CONFIG_SP_BACKEND", "sp_backend", Some("deepspeed"), false),
];

/// Only with context parallelism, and only with sequence parallelism.
const CONTEXT: &[Variable] =
    &[Variable("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "cp_comm_strategy", Some("allgather"), false)];
const SEQUENCE: &[Variable] = &[
    Variable("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "sp_seq_length", Some("None"), false),
    Variable(
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        "sp_seq_length_is_variable",
        Some("True"),
        false,
    ),
    Variable("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sp_attn_implementation", Some("sdpa"), false),
];

/// Megatron's keys become variables of the same name; these are there without being given.
const MEGATRON_DEFAULTS: &[(&str, &str)] = &[
    ("tp_degree", "1"),
    ("use_custom_fsdp", "False"),
    ("no_load_optim", "False"),
    ("eod_mask_loss", "False"),
    ("no_save_optim", "False"),
    ("optimizer_cpu_offload", "False"),
    ("use_precision_aware_optimizer", "False"),
    ("overlap_cpu_optimizer_d2h_h2d", "False"),
    ("pp_degree", "1"),
    ("gradient_clipping", "1.0"),
];
/// And these are there when they are given.
const MEGATRON: &[&str] = &[
    "decoder_last_pipeline_num_layers",
    "num_micro_batches",
    "sequence_parallelism",
    "recompute_activations",
    "use_distributed_optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
];

/// Keys of `fp8_config`: the variable's end, and the names that it goes by.
const FP8: &[(&str, &[&str], &str)] = &[
    ("BACKEND", &["backend"], ""),
    ("USE_AUTOCAST_DURING_EVAL", &["use_autocast_during_eval"], "False"),
    ("MARGIN", &["margin"], "0"),
    ("INTERVAL", &["interval"], "1"),
    ("FORMAT", &["fp8_format", "format"], "HYBRID"),
    ("AMAX_HISTORY_LEN", &["amax_history_len", "amax_history_length"], "1024"),
    ("AMAX_COMPUTE_ALGO", &["amax_compute_algo", "amax_compute_algorithm"], "most_recent"),
    ("OPT_LEVEL", &["opt_level", "optimization_level"], "O2"),
    ("ENABLE_FSDP_FLOAT8_ALL_GATHER", &["enable_fsdp_float8_all_gather"], "1"),
    ("PAD_INNER_DIM", &["pad_inner_dim"], "1"),
];

/// All variables of a config. Does a section of it name the hosts?
pub(super) fn environment(draft: &mut Draft, keys: &mut Keys<'_>, kind: Kind, cpu: bool) -> bool {
    let simple = matches!(kind, Kind::One | Kind::Cpu);
    if simple {
        draft.env("use_cpu", "ACCELERATE_USE_CPU", if cpu { "True" } else { "False" });
    }
    if keys.boolean("debug") == Some(true) {
        draft.env("debug", "ACCELERATE_DEBUG_MODE", "true");
    }
    if simple && cpu {
        draft.env("use_cpu", "KMP_AFFINITY", "granularity=fine,compact,1,0");
        draft.env("use_cpu", "KMP_BLOCKTIME", "1");
    }
    let precision = precision(draft, keys);
    if keys.boolean("enable_cpu_affinity") == Some(true) {
        // Accelerate's launcher takes it from its command line alone.
        let why = "launch binds workers to CPUs itself (`run.bind`)";
        draft.not_carried(
            "enable_cpu_affinity",
            why,
            "set `ACCELERATE_CPU_AFFINITY` in `run.env` for Accelerate's own",
        );
    }
    let mut named = false;
    if kind == Kind::DeepSpeed {
        named = deepspeed(draft, keys, precision.is_some());
        unused(draft, keys, "dynamo_config", "with DeepSpeed Accelerate doesn't pass it on either");
        keys.take("dynamo_backend");
    } else {
        dynamo(draft, keys);
        unused(draft, keys, "deepspeed_config", "`distributed_type` isn't DEEPSPEED");
    }
    match kind {
        Kind::Fsdp => fsdp(draft, keys),
        _ => unused(draft, keys, "fsdp_config", "`distributed_type` isn't FSDP"),
    }
    match kind {
        Kind::Megatron => megatron(draft, keys),
        _ => unused(draft, keys, "megatron_lm_config", "`distributed_type` isn't MEGATRON_LM"),
    }
    match kind {
        Kind::One | Kind::Cpu => {
            unused(draft, keys, "parallelism_config", "it has an effect with FSDP alone")
        }
        _ => parallelism(draft, keys),
    }
    named
}

/// A section of another kind of job.
fn unused(draft: &mut Draft, keys: &mut Keys<'_>, section: &str, why: &str) {
    let Some(part) = keys.section(section) else { return };
    if !part.names().is_empty() {
        draft.not_carried(section, why, "");
    }
}

/// The precision, when the config says it.
fn precision(draft: &mut Draft, keys: &mut Keys<'_>) -> Option<String> {
    let fp16 = keys.boolean("fp16");
    let given = keys.text("mixed_precision");
    let word = match &given {
        // `no` without quotes is a boolean to Accelerate's reader of YAML
        Some(word) if word == "False" => "no".to_owned(),
        Some(word) => word.to_lowercase(),
        None if fp16 == Some(true) => "fp16".to_owned(),
        None => "no".to_owned(),
    };
    if !["no", "fp16", "bf16", "fp8"].contains(&word.as_str()) {
        draft.not_carried(
            "mixed_precision",
            format!("Accelerate knows no `{}`", word.escape_debug()),
            "use no, fp16, bf16 or fp8",
        );
        return given;
    }
    draft.env("mixed_precision", "ACCELERATE_MIXED_PRECISION", &word);
    match word.as_str() {
        "fp8" => fp8(draft, keys),
        _ => unused(draft, keys, "fp8_config", "`mixed_precision` isn't fp8"),
    }
    given.or_else(|| fp16.filter(|yes| *yes).map(|_| word))
}

fn fp8(draft: &mut Draft, keys: &mut Keys<'_>) {
    let mut part = keys.section("fp8_config");
    for (end, names, default) in FP8 {
        let spellings = names.iter().flat_map(|name| [(*name).to_owned(), format!("fp8_{name}")]);
        let given: Vec<String> = spellings.filter_map(|name| part.as_mut()?.text(&name)).collect();
        let value = given.first().map_or(*default, String::as_str);
        if !value.is_empty() {
            draft.env("fp8_config", &format!("ACCELERATE_FP8_{end}"), value);
        }
    }
    let ends = ["FPROP", "DGRAD", "WGRAD"].map(|end| format!("ACCELERATE_FP8_OVERRIDE_{end}"));
    for end in &ends {
        draft.env("fp8_config", end, "False");
    }
    let Some(mut part) = part else { return };
    for name in ["override_linear_precision", "fp8_override_linear_precision"] {
        let Some(item) = part.take(name) else { continue };
        match &item.value {
            contract::job::ItemValue::List(three) if three.len() == 3 => {
                for (end, item) in ends.iter().zip(three) {
                    draft.env(name, end, &wording::python(item));
                }
            }
            _ => part.refuse(name, item, "a list of three"),
        }
    }
    finish(draft, keys, part);
}

fn finish(draft: &mut Draft, keys: &mut Keys<'_>, part: Keys<'_>) {
    let (rest, problems) = part.rest();
    keys.problems.extend(problems);
    for (key, value) in rest {
        draft.not_carried(&key, format!("launch doesn't know this key (it is {value})"), "");
    }
}

/// The variables of a section whose keys may begin with `prefix`.
fn variables(draft: &mut Draft, part: &mut Keys<'_>, prefix: &str, table: &[Variable]) {
    for Variable(name, key, default, small) in table {
        let own = part.text(&format!("{prefix}{key}"));
        let given = if prefix.is_empty() { own } else { own.or_else(|| part.text(key)) };
        let Some(mut value) = given.or_else(|| default.map(str::to_owned)) else { continue };
        if *small {
            value.make_ascii_lowercase();
        }
        draft.env(&part.path(key), name, &value);
    }
}

fn dynamo(draft: &mut Draft, keys: &mut Keys<'_>) {
    let old = keys.text("dynamo_backend");
    let Some(mut part) = keys.section("dynamo_config") else {
        let backend = old.unwrap_or_else(|| "no".to_owned()).to_uppercase();
        let backend = if backend == "FALSE" { "NO".to_owned() } else { backend };
        draft.env("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", &backend);
        for Variable(name, key, default, _) in DYNAMO {
            draft.env(key, name, default.unwrap_or_default());
        }
        return;
    };
    let backend = part.text("dynamo_backend").or_else(|| part.text("backend")).or(old);
    let backend = backend.unwrap_or_else(|| "no".to_owned()).to_uppercase();
    draft.env("dynamo_config.dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", &backend);
    variables(draft, &mut part, "dynamo_", DYNAMO);
    finish(draft, keys, part);
}

fn fsdp(draft: &mut Draft, keys: &mut Keys<'_>) {
    draft.env("distributed_type", "ACCELERATE_USE_FSDP", "true");
    let Some(mut part) = keys.section("fsdp_config") else {
        for Variable(name, key, default, _) in FSDP {
            if let Some(value) = default {
                draft.env(key, name, value);
            }
        }
        return;
    };
    variables(draft, &mut part, "fsdp_", FSDP);
    finish(draft, keys, part);
}

fn megatron(draft: &mut Draft, keys: &mut Keys<'_>) {
    draft.env("distributed_type", "ACCELERATE_USE_MEGATRON_LM", "true");
    let mut part = keys.section("megatron_lm_config");
    let names = MEGATRON_DEFAULTS.iter().map(|(name, value)| (*name, Some(*value)));
    for (name, default) in names.chain(MEGATRON.iter().map(|name| (*name, None))) {
        let given = part.as_mut().and_then(|part| part.text(&format!("megatron_lm_{name}")));
        if let Some(value) = given.or_else(|| default.map(str::to_owned)) {
            let variable = format!("MEGATRON_LM_{}", name.to_uppercase());
            draft.env(&format!("megatron_lm_config.megatron_lm_{name}"), &variable, &value);
        }
    }
    if let Some(part) = part {
        finish(draft, keys, part);
    }
}

fn parallelism(draft: &mut Draft, keys: &mut Keys<'_>) {
    let Some(mut part) = keys.section("parallelism_config") else { return };
    if part.names().is_empty() {
        return;
    }
    const PREFIX: &str = "parallelism_config_";
    draft.env("parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", "true");
    let above_one =
        |size: &str| part.peek(&format!("{PREFIX}{size}")).or(part.peek(size)).is_some_and(|n| n > 1);
    let (context, sequence) = (above_one("cp_size"), above_one("sp_size"));
    variables(draft, &mut part, PREFIX, PARALLEL);
    for (used, table) in [(context, CONTEXT), (sequence, SEQUENCE)] {
        if used {
            variables(draft, &mut part, PREFIX, table);
        }
    }
    finish(draft, keys, part);
}

/// DeepSpeed through Accelerate. Does it name the hosts?
fn deepspeed(draft: &mut Draft, keys: &mut Keys<'_>, precision: bool) -> bool {
    draft.env("distributed_type", "ACCELERATE_USE_DEEPSPEED", "true");
    let Some(mut part) = keys.section("deepspeed_config") else {
        let fields = if precision { "mixed_precision" } else { "" };
        draft.env("deepspeed_config", "ACCELERATE_CONFIG_DS_FIELDS", fields);
        return false;
    };
    let mut fields = part.names();
    if precision {
        fields.push("mixed_precision");
    }
    draft.env("deepspeed_config", "ACCELERATE_CONFIG_DS_FIELDS", &fields.join(",").to_lowercase());
    variables(draft, &mut part, "", DEEPSPEED);
    let named = where_it_runs(draft, &mut part);
    finish(draft, keys, part);
    named
}

/// What the DeepSpeed section says of hosts. Does it name them?
fn where_it_runs(draft: &mut Draft, part: &mut Keys<'_>) -> bool {
    let launcher = part.text("deepspeed_multinode_launcher");
    let file = part.text("deepspeed_hostfile");
    if let Some(launcher) = &launcher {
        let why = match launcher.as_str() {
            "slurm" => "inside an allocation launch uses Slurm by itself".to_owned(),
            other => format!("`{}`: launch reaches hosts by SSH itself", other.escape_debug()),
        };
        draft.not_carried(&part.path("deepspeed_multinode_launcher"), why, "");
    }
    match &file {
        Some(file) => {
            hostfile(draft, &part.path("deepspeed_hostfile"), Path::new(file));
            // the hosts' slots say how many
            for (key, path) in
                [("deepspeed_inclusion_filter", "include"), ("deepspeed_exclusion_filter", "exclude")]
            {
                if let Some(filter) = part.text(key) {
                    let yaml = wording::list(&[filter]);
                    draft.wish(&part.path(key), &format!("cluster.{path}"), yaml);
                }
            }
        }
        None => {
            for key in ["deepspeed_inclusion_filter", "deepspeed_exclusion_filter"] {
                if part.text(key).is_some() {
                    let todo = "name the hosts in `cluster.hosts` and filter there";
                    draft.not_carried(&part.path(key), "there is no hostfile to filter", todo);
                }
            }
        }
    }
    file.is_some()
}
