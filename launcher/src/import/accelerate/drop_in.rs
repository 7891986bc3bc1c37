//! Defines [`AccelerateCommand`], a command line of `accelerate launch`, which `launch accelerate
//! launch` converts to a job.yaml and runs.
use super::{
    arguments::ACCELERATE_OPTIONS,
    conversion::{AccelerateConversion, LaunchKind, PROGRAM_NAME},
    distributed_type::DistributedType,
    merged_config::MergedConfig,
    take_distributed_type,
};
use crate::import::{
    command_line::{CommandLine, CommandLineError},
    drop_in::{
        DropInContext, OptionEffect,
        OptionEffect::{NoEffect, Rejected},
        OptionRule, apply_option_rules, create_unsupported_option_error, load_drop_in_job,
        set_rendezvous_timeouts,
    },
    import_options::ImportErrors,
    job_draft::{ImportedJob, JobDraft},
    remaining_keys::RemainingKeys,
};
use jobspec::{Document, DocumentValue, env};
use std::path::{Path, PathBuf};

/// The error that `--tpu` and other options for TPUs cause in a command line of `accelerate
/// launch`, because launch does not run on TPUs.
const TPU_REJECTION: OptionRule =
    ("tpu", &[], Rejected("launch doesn't run on TPUs", "use `accelerate` itself"));
/// The error that options for SageMaker cause in a command line of `accelerate launch`, because
/// launch does not submit jobs to SageMaker.
const SAGEMAKER_REJECTION: OptionEffect =
    Rejected("launch doesn't submit jobs to SageMaker", "use `accelerate` itself");

/// The options of `accelerate launch` that job.yaml cannot express, each with the note or error
/// that the option causes.
const UNSUPPORTED_OPTION_RULES: &[OptionRule] = &[
    TPU_REJECTION,
    ("tpu_cluster", &[], TPU_REJECTION.2),
    ("no_tpu_cluster", &[], NoEffect("the option is for TPUs")),
    ("tpu_use_sudo", &[], TPU_REJECTION.2),
    ("vm", &[], TPU_REJECTION.2),
    ("env", &[], TPU_REJECTION.2),
    ("downcast_bf16", &[], NoEffect("the option is for TPUs")),
    ("main_training_function", &["main"], NoEffect("the option is for TPUs; launch runs the whole script")),
    ("aws_access_key_id", &[], SAGEMAKER_REJECTION),
    ("aws_secret_access_key", &[], SAGEMAKER_REJECTION),
    ("ipex", &[], Rejected("Accelerate no longer supports it", "remove the option")),
    ("use_xpu", &[], Rejected("Accelerate no longer supports it", "remove the option")),
    ("mpirun_ccl", &[], Rejected("launch starts the processes without mpirun", "remove the option")),
    ("quiet", &[], NoEffect("launch prints no stack trace")),
    ("same_network", &[], NoEffect("the job has one machine")),
    ("machine_rank", &["0"], NoEffect("the job has one machine")),
    (
        "main_process_ip",
        &["127.0.0.1", "localhost"],
        NoEffect("the ranks of one host meet at its loopback address"),
    ),
    ("rdzv_backend", &["static", "c10d"], NoEffect("launch assigns the ranks itself")),
    ("monitor_interval", &["0.1"], NoEffect("launch is notified at once when a worker ends")),
];

/// A parsed command line of `accelerate launch`, divided into its options, the program and the
/// program's arguments.
#[derive(Debug)]
pub(crate) struct AccelerateCommand {
    given: CommandLine,
}

impl AccelerateCommand {
    /// Parses the arguments that follow `accelerate launch` on the user's command line. Fails if
    /// Accelerate would reject them.
    pub(crate) fn parse(args: &[String]) -> Result<AccelerateCommand, ImportErrors> {
        let rejected = |error: CommandLineError| vec![error.into_diagnostic(PROGRAM_NAME)];
        Ok(AccelerateCommand { given: ACCELERATE_OPTIONS.parse(args).map_err(rejected)? })
    }

    /// Lists the paths at which Accelerate looks for its configuration file, in the order of
    /// precedence, and states whether the first file must exist. The first file that exists is
    /// read.
    pub(crate) fn list_config_files(&self, variables: &DropInContext<'_>) -> (Vec<PathBuf>, bool) {
        if let Some(file) = self.given.last_value("config_file") {
            return (vec![PathBuf::from(file)], true);
        }
        if self.given.last_value("cpu").is_some() {
            return (Vec::new(), false);
        }
        let home = variables.user_env_variable(env::HOME).unwrap_or_default();
        let expand = |path: &str| match path.strip_prefix("~/") {
            Some(rest) => Path::new(home).join(rest),
            None => PathBuf::from(path),
        };
        let cache = match (
            variables.user_env_variable(env::HF_HOME),
            variables.user_env_variable(env::XDG_CACHE_HOME),
        ) {
            (Some(directory), _) => expand(directory),
            (None, Some(cache)) => expand(cache).join("huggingface"),
            (None, None) => Path::new(home).join(".cache/huggingface"),
        };
        let names = ["default_config.yaml", "default_config.json"];
        (names.map(|name| cache.join("accelerate").join(name)).to_vec(), false)
    }

    /// Converts a command line of `accelerate launch` to a job.yaml. `config` is the configuration
    /// file, if there is one.
    pub(crate) fn convert(
        self,
        config: Option<&Document>,
        context: &DropInContext<'_>,
    ) -> Result<ImportedJob, ImportErrors> {
        let AccelerateCommand { mut given } = self;
        given.take_last_value("config_file");
        let kind = select_launch_kind(&mut given, config, context)?;
        let mut merged = MergedConfig::new(config)?;
        let mut draft = JobDraft::default();
        let mut errors = ImportErrors::new();
        let fields = list_deepspeed_fields(&merged, &given);
        let conversion = AccelerateConversion { kind, has_config: config.is_some(), context };
        conversion.merge_options(&mut draft, &mut merged, &mut given).map_err(|error| vec![error])?;
        let processes = conversion.count_processes(&merged, &given).map_err(|error| vec![error])?;
        let nodes = conversion.take_node_options(&mut given, &merged).unwrap_or_else(|error| {
            errors.push(error);
            None
        });
        errors.extend(conversion.set_program(&mut draft, &mut given, &merged, &processes).err());
        conversion.set_worker_env_variables(&mut draft, &mut given, &merged, &fields, &processes)?;
        set_rendezvous_timeouts(&mut draft, &mut given, "rdzv_conf", processes.is_joining);
        apply_option_rules(&mut draft, &mut errors, PROGRAM_NAME, &mut given, UNSUPPORTED_OPTION_RULES);
        for (name, _) in given.take_remaining_options() {
            errors.push(create_unsupported_option_error(
                PROGRAM_NAME,
                &format!("--{name}"),
                "launch does not handle it",
                "",
            ));
        }
        match errors.is_empty() {
            true => load_drop_in_job(draft, PROGRAM_NAME, errors).map(|job| ImportedJob { nodes, ..job }),
            false => Err(errors),
        }
    }
}

/// Selects what `accelerate launch` starts (one process, torchrun, DeepSpeed and so on) from its
/// flags and its configuration. Fails if the flags contradict each other.
fn select_launch_kind(
    given: &mut CommandLine,
    config: Option<&Document>,
    context: &DropInContext<'_>,
) -> Result<LaunchKind, ImportErrors> {
    let flags =
        ["multi_gpu", "cpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config"];
    let [multi, cpu, deepspeed, fsdp, megatron, mut parallelism] = flags.map(|name| given.take_flag(name));
    let is_tpu = given.last_value("tpu").is_some();
    if [multi, cpu, is_tpu, deepspeed, fsdp].iter().filter(|given| **given).count() > 1 {
        let reason =
            "only one of `--cpu`, `--multi_gpu`, `--tpu`, `--use_deepspeed`, `--use_fsdp` can be given";
        return Err(vec![create_unsupported_option_error(
            PROGRAM_NAME,
            "--cpu",
            reason,
            "remove the others",
        )]);
    }
    if parallelism && !fsdp {
        let reason = "it requires `--use_fsdp` and `--fsdp_version 2`";
        return Err(vec![create_unsupported_option_error(
            PROGRAM_NAME,
            "--use_parallelism_config",
            reason,
            "",
        )]);
    }
    let mut distributed = match (deepspeed, fsdp, megatron, multi) {
        (true, ..) => DistributedType::DeepSpeed,
        (_, true, ..) => DistributedType::Fsdp,
        (_, _, true, _) => DistributedType::Megatron,
        (.., true) => DistributedType::Gpu,
        _ => DistributedType::Single,
    };
    if let Some(document) = config {
        let from_config = take_distributed_type(&mut RemainingKeys::from_document(document)?, document)?;
        if distributed == DistributedType::Single && !is_tpu {
            distributed = from_config;
            parallelism = true;
        }
    } else if distributed == DistributedType::Single && context.gpus > 1 {
        let requested = given.last_value("num_processes").and_then(|n| n.trim().parse().ok());
        if requested.unwrap_or(context.gpus as i64) > 1 {
            distributed = DistributedType::Gpu;
        }
    }
    if cpu || distributed == DistributedType::Cpu {
        distributed = DistributedType::Single;
    }
    Ok(LaunchKind { distributed, cpu, parallelism })
}

/// Returns the value of the variable `ACCELERATE_CONFIG_DS_FIELDS`: the names of the DeepSpeed
/// settings in Accelerate's configuration file, with commas between them.
fn list_deepspeed_fields(file: &MergedConfig, given: &CommandLine) -> String {
    let mut fields = file.section_names("deepspeed_config");
    let in_file = file.value_of_key("mixed_precision").is_some()
        || file.value_of_key("fp16").is_some_and(|item| matches!(item.value, DocumentValue::Bool(true)));
    if in_file && given.last_value("mixed_precision").is_none() {
        fields.push("mixed_precision");
    }
    fields.join(",").to_lowercase()
}
