//! [`set_worker_environment`]: adds to a job.yaml the environment variables that Accelerate's
//! library reads in a worker.
use super::distributed_type::DistributedType;
use crate::import::{
    import_options::set_hostfile, job_draft::JobDraft, remaining_keys::RemainingKeys, value_text,
};
use std::path::Path;

/// A rule that converts a key of Accelerate's configuration to an environment variable of the
/// workers, with the variable's default value. The fields are: the name of the variable, the key,
/// the value that the variable gets if the key is absent (`None` to leave it unset), and whether
/// the value is converted to lower case.
struct EnvVariableRule(&'static str, &'static str, Option<&'static str>, bool);

/// The rules by which keys of Accelerate's section `dynamo_config` become environment variables of
/// the workers.
const DYNAMO_RULES: &[EnvVariableRule] = &[
    EnvVariableRule("ACCELERATE_DYNAMO_MODE", "mode", Some("default"), false),
    EnvVariableRule("ACCELERATE_DYNAMO_USE_FULLGRAPH", "use_fullgraph", Some("False"), false),
    EnvVariableRule("ACCELERATE_DYNAMO_USE_DYNAMIC", "use_dynamic", Some("False"), false),
    EnvVariableRule(
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        "use_regional_compilation",
        Some("False"),
        false,
    ),
];

/// The rules by which keys of Accelerate's section `fsdp_config` become environment variables of
/// the workers.
const FSDP_RULES: &[EnvVariableRule] = &[
    EnvVariableRule("FSDP_VERSION", "version", Some("1"), false),
    EnvVariableRule("FSDP_SHARDING_STRATEGY", "sharding_strategy", Some("FULL_SHARD"), false),
    EnvVariableRule("FSDP_RESHARD_AFTER_FORWARD", "reshard_after_forward", Some("true"), true),
    EnvVariableRule("FSDP_OFFLOAD_PARAMS", "offload_params", Some("false"), true),
    EnvVariableRule("FSDP_MIN_NUM_PARAMS", "min_num_params", Some("100000000"), false),
    EnvVariableRule("FSDP_AUTO_WRAP_POLICY", "auto_wrap_policy", None, false),
    EnvVariableRule("FSDP_TRANSFORMER_CLS_TO_WRAP", "transformer_layer_cls_to_wrap", None, false),
    EnvVariableRule("FSDP_BACKWARD_PREFETCH", "backward_prefetch", None, false),
    EnvVariableRule("FSDP_STATE_DICT_TYPE", "state_dict_type", None, false),
    EnvVariableRule("FSDP_FORWARD_PREFETCH", "forward_prefetch", Some("false"), true),
    EnvVariableRule("FSDP_USE_ORIG_PARAMS", "use_orig_params", Some("true"), true),
    EnvVariableRule("FSDP_CPU_RAM_EFFICIENT_LOADING", "cpu_ram_efficient_loading", Some("true"), true),
    EnvVariableRule("FSDP_SYNC_MODULE_STATES", "sync_module_states", Some("true"), true),
    EnvVariableRule("FSDP_ACTIVATION_CHECKPOINTING", "activation_checkpointing", Some("false"), true),
    EnvVariableRule(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "activation_checkpointing_offload",
        Some("false"),
        true,
    ),
    EnvVariableRule("FSDP_IGNORED_MODULES", "ignored_modules", None, false),
];

/// The rules by which keys of Accelerate's section `deepspeed_config` become environment variables
/// of the workers.
const DEEPSPEED_RULES: &[EnvVariableRule] = &[
    EnvVariableRule("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", None, false),
    EnvVariableRule("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", None, false),
    EnvVariableRule("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", None, true),
    EnvVariableRule("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer_device", None, true),
    // Accelerate's library reads these two variables, but its launcher does not set them.
    EnvVariableRule(
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        "offload_optimizer_nvme_path",
        None,
        false,
    ),
    EnvVariableRule("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "offload_param_nvme_path", None, false),
    EnvVariableRule("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_param_device", None, true),
    EnvVariableRule("ACCELERATE_DEEPSPEED_ZERO3_INIT", "zero3_init_flag", None, true),
    EnvVariableRule("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "zero3_save_16bit_model", None, true),
    EnvVariableRule("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed_config_file", None, false),
    EnvVariableRule("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "deepspeed_moe_layer_cls_names", None, false),
];

/// The rules by which keys of Accelerate's section `parallelism_config` become environment
/// variables of the workers.
const PARALLELISM_RULES: &[EnvVariableRule] = &[
    EnvVariableRule("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "dp_replicate_size", Some("1"), false),
    EnvVariableRule("PARALLELISM_CONFIG_DP_SHARD_SIZE", "dp_shard_size", Some("1"), false),
    EnvVariableRule("PARALLELISM_CONFIG_TP_SIZE", "tp_size", Some("1"), false),
    EnvVariableRule("PARALLELISM_CONFIG_CP_SIZE", "cp_size", Some("1"), false),
    EnvVariableRule("PARALLELISM_CONFIG_CP_BACKEND", "cp_backend", Some("torch"), false),
    EnvVariableRule("PARALLELISM_CONFIG_SP_SIZE", "sp_size", Some("1"), false),
    EnvVariableRule("PARALLELISM_CONFIG_SP_BACKEND", "sp_backend", Some("deepspeed"), false),
];

/// The rules that convert keys of Accelerate's section `parallelism_config` to variables of the
/// workers if the job uses context parallelism.
const CONTEXT_PARALLEL_RULES: &[EnvVariableRule] =
    &[EnvVariableRule("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "cp_comm_strategy", Some("allgather"), false)];
/// The rules that convert keys of Accelerate's section `parallelism_config` to variables of the
/// workers if the job uses sequence parallelism.
const SEQUENCE_PARALLEL_RULES: &[EnvVariableRule] = &[
    EnvVariableRule("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "sp_seq_length", Some("None"), false),
    EnvVariableRule(
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        "sp_seq_length_is_variable",
        Some("True"),
        false,
    ),
    EnvVariableRule(
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        "sp_attn_implementation",
        Some("sdpa"),
        false,
    ),
];

/// The keys of Accelerate's section `megatron_lm_config` that always become environment variables
/// of a Megatron-LM job's workers, each with its default value. Each becomes a variable with the
/// prefix `MEGATRON_LM_`.
const MEGATRON_KEYS_WITH_DEFAULTS: &[(&str, &str)] = &[
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
/// The keys of Accelerate's section `megatron_lm_config` that become environment variables of a
/// Megatron-LM job's workers only if the section contains them.
const MEGATRON_KEYS_WITHOUT_DEFAULTS: &[&str] = &[
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

/// The keys of Accelerate's section `fp8_config` that become environment variables of the workers.
/// Each has the end of the variable's name, the names that the key may have, and the default value.
const FP8_KEYS: &[(&str, &[&str], &str)] = &[
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

/// Sets, in the new job.yaml `draft`, the environment variables that `accelerate launch` would give
/// to workers with the configuration `keys`. `kind` and `cpu` are the values of `distributed_type`
/// and `use_cpu`. Returns whether the section `deepspeed_config` names the hosts.
pub(super) fn set_worker_environment(
    draft: &mut JobDraft,
    keys: &mut RemainingKeys<'_>,
    kind: DistributedType,
    cpu: bool,
) -> bool {
    let is_plain = matches!(kind, DistributedType::Single | DistributedType::Cpu);
    if is_plain {
        draft.set_env("use_cpu", "ACCELERATE_USE_CPU", if cpu { "True" } else { "False" });
    }
    if keys.take_boolean("debug") == Some(true) {
        draft.set_env("debug", "ACCELERATE_DEBUG_MODE", "true");
    }
    if is_plain && cpu {
        draft.set_env("use_cpu", "KMP_AFFINITY", "granularity=fine,compact,1,0");
        draft.set_env("use_cpu", "KMP_BLOCKTIME", "1");
    }
    let precision = set_precision_variable(draft, keys);
    if keys.take_boolean("enable_cpu_affinity") == Some(true) {
        // Accelerate's launcher ignores the key and reads its command line only.
        let reason = "launch binds workers to CPUs itself (`run.cpu_bind`)";
        draft.add_not_converted_note(
            "enable_cpu_affinity",
            reason,
            "set `ACCELERATE_CPU_AFFINITY` in `run.env` for Accelerate's binding",
        );
    }
    let mut named = false;
    if kind == DistributedType::DeepSpeed {
        named = set_deepspeed_variables(draft, keys, precision.is_some());
        take_unused_section_with_note(
            draft,
            keys,
            "dynamo_config",
            "Accelerate ignores the section with DeepSpeed, too",
        );
        keys.take("dynamo_backend");
    } else {
        set_dynamo_variables(draft, keys);
        take_unused_section_with_note(draft, keys, "deepspeed_config", "`distributed_type` is not DEEPSPEED");
    }
    match kind {
        DistributedType::Fsdp => set_fsdp_variables(draft, keys),
        _ => take_unused_section_with_note(draft, keys, "fsdp_config", "`distributed_type` is not FSDP"),
    }
    match kind {
        DistributedType::Megatron => set_megatron_variables(draft, keys),
        _ => take_unused_section_with_note(
            draft,
            keys,
            "megatron_lm_config",
            "`distributed_type` is not MEGATRON_LM",
        ),
    }
    match kind {
        DistributedType::Single | DistributedType::Cpu => take_unused_section_with_note(
            draft,
            keys,
            "parallelism_config",
            "the section applies only to FSDP",
        ),
        _ => set_parallelism_variables(draft, keys),
    }
    named
}

/// Removes a section that the kind of job does not use from Accelerate's configuration, with a note
/// for the user if the section is not empty. If the section is not empty, adds a note with the
/// reason `reason` for the user.
fn take_unused_section_with_note(
    draft: &mut JobDraft,
    keys: &mut RemainingKeys<'_>,
    section: &str,
    reason: &str,
) {
    let Some(part) = keys.take_section(section) else { return };
    if !part.remaining_names().is_empty() {
        draft.add_not_converted_note(section, reason, "");
    }
}

/// Sets the workers' variable for mixed precision in the new job.yaml `draft`, from Accelerate's
/// keys `mixed_precision` and `fp16`. Returns the precision, or `None` if the configuration
/// contains none.
fn set_precision_variable(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) -> Option<String> {
    let fp16 = keys.take_boolean("fp16");
    let given = keys.take_text("mixed_precision");
    let word = match &given {
        // Accelerate reads `no` without quotes as a boolean.
        Some(word) if word == "False" => "no".to_owned(),
        Some(word) => word.to_lowercase(),
        None if fp16 == Some(true) => "fp16".to_owned(),
        None => "no".to_owned(),
    };
    if !["no", "fp16", "bf16", "fp8"].contains(&word.as_str()) {
        draft.add_not_converted_note(
            "mixed_precision",
            format!("Accelerate has no precision `{}`", word.escape_debug()),
            "use no, fp16, bf16 or fp8",
        );
        return given;
    }
    draft.set_env("mixed_precision", "ACCELERATE_MIXED_PRECISION", &word);
    match word.as_str() {
        "fp8" => set_fp8_variables(draft, keys),
        _ => take_unused_section_with_note(draft, keys, "fp8_config", "`mixed_precision` is not fp8"),
    }
    given.or_else(|| fp16.filter(|yes| *yes).map(|_| word))
}

/// Converts Accelerate's section `fp8_config` to environment variables of the workers in the new
/// job.yaml `draft`. Absent keys get their default values.
fn set_fp8_variables(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    let mut part = keys.take_section("fp8_config");
    for (end, names, default) in FP8_KEYS {
        let spellings = names.iter().flat_map(|name| [(*name).to_owned(), format!("fp8_{name}")]);
        let given: Vec<String> = spellings.filter_map(|name| part.as_mut()?.take_text(&name)).collect();
        let value = given.first().map_or(*default, String::as_str);
        if !value.is_empty() {
            draft.set_env("fp8_config", &format!("ACCELERATE_FP8_{end}"), value);
        }
    }
    let ends = ["FPROP", "DGRAD", "WGRAD"].map(|end| format!("ACCELERATE_FP8_OVERRIDE_{end}"));
    for end in &ends {
        draft.set_env("fp8_config", end, "False");
    }
    let Some(mut part) = part else { return };
    for name in ["override_linear_precision", "fp8_override_linear_precision"] {
        let Some(item) = part.take(name) else { continue };
        match &item.value {
            jobspec::DocumentValue::List(three) if three.len() == 3 => {
                for (end, item) in ends.iter().zip(three) {
                    draft.set_env(name, end, &value_text::format_python_str(item));
                }
            }
            _ => part.report_wrong_type(name, item, "a list of three"),
        }
    }
    note_unknown_keys(draft, keys, part);
}

/// Adds a note for the user for each unknown key that remains in `part`, a section of Accelerate's
/// configuration. Moves the errors of `part` to `keys`, the outermost mapping of the file.
fn note_unknown_keys(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>, part: RemainingKeys<'_>) {
    let (rest, errors) = part.into_unconverted_keys();
    keys.errors.extend(errors);
    for (key, value) in rest {
        draft.add_not_converted_note(&key, format!("launch does not know this key (value: {value})"), "");
    }
}

/// Sets one environment variable of the workers for each rule of `table`, to the value of the
/// rule's key in the configuration or the rule's default. Each key is looked up with the prefix
/// `prefix` first, and then without it.
fn set_variables_by_rules(
    draft: &mut JobDraft,
    part: &mut RemainingKeys<'_>,
    prefix: &str,
    table: &[EnvVariableRule],
) {
    for EnvVariableRule(name, key, default, is_lower_case) in table {
        let prefixed = part.take_text(&format!("{prefix}{key}"));
        let given = if prefix.is_empty() { prefixed } else { prefixed.or_else(|| part.take_text(key)) };
        let Some(mut value) = given.or_else(|| default.map(str::to_owned)) else { continue };
        if *is_lower_case {
            value.make_ascii_lowercase();
        }
        draft.set_env(&part.full_path_of_key(key), name, &value);
    }
}

/// Converts Accelerate's settings of Torch Dynamo, the key `dynamo_backend` and the section
/// `dynamo_config`, to environment variables of the workers.
fn set_dynamo_variables(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    let top_level = keys.take_text("dynamo_backend");
    let Some(mut part) = keys.take_section("dynamo_config") else {
        let backend = top_level.unwrap_or_else(|| "no".to_owned()).to_uppercase();
        let backend = if backend == "FALSE" { "NO".to_owned() } else { backend };
        draft.set_env("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", &backend);
        for EnvVariableRule(name, key, default, _) in DYNAMO_RULES {
            draft.set_env(key, name, default.unwrap_or_default());
        }
        return;
    };
    let backend = part.take_text("dynamo_backend").or_else(|| part.take_text("backend")).or(top_level);
    let backend = backend.unwrap_or_else(|| "no".to_owned()).to_uppercase();
    draft.set_env("dynamo_config.dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", &backend);
    set_variables_by_rules(draft, &mut part, "dynamo_", DYNAMO_RULES);
    note_unknown_keys(draft, keys, part);
}

/// Sets the workers' variables for FSDP: one that enables FSDP in Accelerate, and those for the
/// section `fsdp_config`.
fn set_fsdp_variables(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    draft.set_env("distributed_type", "ACCELERATE_USE_FSDP", "true");
    let Some(mut part) = keys.take_section("fsdp_config") else {
        for EnvVariableRule(name, key, default, _) in FSDP_RULES {
            if let Some(value) = default {
                draft.set_env(key, name, value);
            }
        }
        return;
    };
    set_variables_by_rules(draft, &mut part, "fsdp_", FSDP_RULES);
    note_unknown_keys(draft, keys, part);
}

/// Sets the workers' variables for Megatron-LM: one that enables it in Accelerate, and those for
/// the section `megatron_lm_config`.
fn set_megatron_variables(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    draft.set_env("distributed_type", "ACCELERATE_USE_MEGATRON_LM", "true");
    let mut part = keys.take_section("megatron_lm_config");
    let names = MEGATRON_KEYS_WITH_DEFAULTS.iter().map(|(name, value)| (*name, Some(*value)));
    for (name, default) in names.chain(MEGATRON_KEYS_WITHOUT_DEFAULTS.iter().map(|name| (*name, None))) {
        let given = part.as_mut().and_then(|part| part.take_text(&format!("megatron_lm_{name}")));
        if let Some(value) = given.or_else(|| default.map(str::to_owned)) {
            let variable = format!("MEGATRON_LM_{}", name.to_uppercase());
            draft.set_env(&format!("megatron_lm_config.megatron_lm_{name}"), &variable, &value);
        }
    }
    if let Some(part) = part {
        note_unknown_keys(draft, keys, part);
    }
}

/// Converts Accelerate's section `parallelism_config` to environment variables of the workers in
/// the new job.yaml `draft`. Does nothing if the section is empty.
fn set_parallelism_variables(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    let Some(mut part) = keys.take_section("parallelism_config") else { return };
    if part.remaining_names().is_empty() {
        return;
    }
    /// The prefix `parallelism_config_`, with or without which the names of keys in Accelerate's
    /// section `parallelism_config` may be written.
    const VARIABLE_PREFIX: &str = "parallelism_config_";
    draft.set_env("parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", "true");
    let above_one = |size: &str| {
        part.peek_integer(&format!("{VARIABLE_PREFIX}{size}"))
            .or(part.peek_integer(size))
            .is_some_and(|n| n > 1)
    };
    let (context, sequence) = (above_one("cp_size"), above_one("sp_size"));
    set_variables_by_rules(draft, &mut part, VARIABLE_PREFIX, PARALLELISM_RULES);
    for (used, table) in [(context, CONTEXT_PARALLEL_RULES), (sequence, SEQUENCE_PARALLEL_RULES)] {
        if used {
            set_variables_by_rules(draft, &mut part, VARIABLE_PREFIX, table);
        }
    }
    note_unknown_keys(draft, keys, part);
}

/// Sets the workers' variables for DeepSpeed: one that enables it in Accelerate, and those for the
/// section `deepspeed_config`. `precision` states whether the configuration contains
/// `mixed_precision`. Returns whether the section `deepspeed_config` names the hosts.
fn set_deepspeed_variables(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>, precision: bool) -> bool {
    draft.set_env("distributed_type", "ACCELERATE_USE_DEEPSPEED", "true");
    let Some(mut part) = keys.take_section("deepspeed_config") else {
        let fields = if precision { "mixed_precision" } else { "" };
        draft.set_env("deepspeed_config", "ACCELERATE_CONFIG_DS_FIELDS", fields);
        return false;
    };
    let mut fields = part.remaining_names();
    if precision {
        fields.push("mixed_precision");
    }
    draft.set_env("deepspeed_config", "ACCELERATE_CONFIG_DS_FIELDS", &fields.join(",").to_lowercase());
    set_variables_by_rules(draft, &mut part, "", DEEPSPEED_RULES);
    let named = set_deepspeed_hosts(draft, &mut part);
    note_unknown_keys(draft, keys, part);
    named
}

/// Converts the hostfile and the host filters in Accelerate's section `deepspeed_config` to keys of
/// job.yaml. Returns whether the section names a hostfile.
fn set_deepspeed_hosts(draft: &mut JobDraft, part: &mut RemainingKeys<'_>) -> bool {
    let launcher = part.take_text("deepspeed_multinode_launcher");
    let file = part.take_text("deepspeed_hostfile");
    if let Some(launcher) = &launcher {
        let reason = match launcher.as_str() {
            "slurm" => "launch uses Slurm automatically inside an allocation".to_owned(),
            other => format!("`{}`: launch reaches hosts over SSH", other.escape_debug()),
        };
        draft.add_not_converted_note(&part.full_path_of_key("deepspeed_multinode_launcher"), reason, "");
    }
    match &file {
        Some(file) => {
            set_hostfile(draft, &part.full_path_of_key("deepspeed_hostfile"), Path::new(file));
            // The slots of the hosts determine the number of workers.
            for (key, path) in
                [("deepspeed_inclusion_filter", "include"), ("deepspeed_exclusion_filter", "exclude")]
            {
                if let Some(filter) = part.take_text(key) {
                    let yaml = value_text::format_yaml_list(&[filter]);
                    draft.set_imported_key(&part.full_path_of_key(key), &format!("cluster.{path}"), yaml);
                }
            }
        }
        None => {
            for key in ["deepspeed_inclusion_filter", "deepspeed_exclusion_filter"] {
                if part.take_text(key).is_some() {
                    let todo = "name the hosts in `cluster.hosts` and filter there";
                    draft.add_not_converted_note(
                        &part.full_path_of_key(key),
                        "there is no hostfile to filter",
                        todo,
                    );
                }
            }
        }
    }
    file.is_some()
}
