//! [`AccelerateConversion`]: converts the options and the program of an `accelerate launch` command
//! line to keys of a job.yaml.
use super::{
    TPU_KEYS,
    arguments::{ACCELERATE_OPTIONS, find_section},
    distributed_type::DistributedType,
    merged_config::MergedConfig,
    worker_environment::set_worker_environment,
};
use crate::import::{
    command_line::CommandLine,
    drop_in::{
        DropInContext, OptionEffect::NoEffect, OptionRule, ProgramForm, apply_option_rules,
        build_env_command, check_worker_count, create_several_machines_error,
        create_unsupported_option_error, set_console_ranks, set_local_job_keys, set_thread_count,
    },
    import_options::{ImportErrors, set_hostfile},
    job_draft::{ImportedNodes, JobDraft},
    remaining_keys::RemainingKeys,
};
use diagnostic::Diagnostic;
use jobspec::{
    DocumentItem, DocumentValue, env,
    hosts::{NodeCount, RendezvousAddress},
    quote_yaml,
};
use std::path::PathBuf;

/// The name of the command `accelerate launch` in messages about a converted command line.
pub(super) const PROGRAM_NAME: &str = "accelerate launch";

/// The variables, such as `RANK`, that are removed from a single worker's environment because
/// `accelerate launch` does not set them for a single process.
const UNSET_SINGLE_PROCESS_VARIABLES: [&str; 19] = [
    env::RANK,
    env::LOCAL_RANK,
    env::WORLD_SIZE,
    env::LOCAL_WORLD_SIZE,
    env::MASTER_ADDR,
    env::MASTER_PORT,
    env::GROUP_RANK,
    env::GROUP_WORLD_SIZE,
    env::ROLE_RANK,
    env::ROLE_WORLD_SIZE,
    env::ROLE_NAME,
    env::NODE_RANK,
    env::LOCAL_SIZE,
    env::CROSS_RANK,
    env::CROSS_SIZE,
    env::TORCHELASTIC_RUN_ID,
    env::TORCHELASTIC_RESTART_COUNT,
    env::TORCHELASTIC_MAX_RESTARTS,
    env::TORCHELASTIC_USE_AGENT_STORE,
];

/// The options that have no effect if `accelerate launch` starts a single process, such as
/// `--max_restarts`, each with a note for the user.
const SINGLE_PROCESS_RULES: &[OptionRule] = &[
    ("tee", &["0"], NoEffect("Accelerate ignores it for a single process")),
    ("log_dir", &[], NoEffect("Accelerate ignores it for a single process")),
    ("role", &["default"], NoEffect("Accelerate ignores it for a single process")),
    ("max_restarts", &["0"], NoEffect("Accelerate ignores it for a single process")),
];

/// What a command line of `accelerate launch` starts: the kind of job, such as a single process or
/// DeepSpeed, and whether `--cpu` was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchKind {
    /// The kind of job; [`DistributedType::Single`] for a single process.
    pub(super) distributed: DistributedType,
    /// Whether `--cpu` was given.
    pub(super) cpu: bool,
    /// Whether the settings of `parallelism_config` apply.
    pub(super) parallelism: bool,
}

/// The numbers of worker processes that an `accelerate launch` command line requests in total and
/// starts on each host, with mpirun's hostfile if there is one.
#[derive(Debug)]
pub(super) struct ProcessCount {
    /// The value of `num_processes`; 0 if there is none.
    requested: i64,
    /// The number of workers on each host.
    workers: i64,
    /// The hostfile of mpirun, if mpirun starts the processes.
    hostfile: Option<PathBuf>,
    /// Whether the user starts the command line on several machines.
    pub(super) is_joining: bool,
}

/// The inputs for converting a command line of `accelerate launch` to a job.yaml, such as the kind
/// of launch and the user's environment.
pub(super) struct AccelerateConversion<'a> {
    pub(super) kind: LaunchKind,
    /// Whether there is a configuration file.
    pub(super) has_config: bool,
    pub(super) context: &'a DropInContext<'a>,
}

impl AccelerateConversion<'_> {
    /// Returns whether `accelerate launch` starts a single process or mpirun, without torchrun.
    fn is_single_process_or_mpirun(&self) -> bool {
        self.kind.distributed == DistributedType::Single
    }

    /// Moves options from the command line of `accelerate launch` to Accelerate's configuration,
    /// where each replaces the value from the file. Removes the sections that do not apply to the
    /// job, and adds a note for each option of such a section.
    pub(super) fn merge_options(
        &self,
        draft: &mut JobDraft,
        merged: &mut MergedConfig,
        given: &mut CommandLine,
    ) -> Result<(), Diagnostic> {
        for key in ["mixed_precision", "num_processes", "num_machines", "gpu_ids", "main_process_port"] {
            if let Some(value) = given.take_last_value(key) {
                merged.set_option(find_option_name(key), &value)?;
            }
        }
        if given.take_flag("debug") {
            merged.set_option("debug", "")?;
        }
        let precision = merged.value_of_key("mixed_precision").map(|item| item.text.to_lowercase());
        let applies = |section: &str| match section {
            "deepspeed_config" => self.kind.distributed == DistributedType::DeepSpeed,
            "fsdp_config" => self.kind.distributed == DistributedType::Fsdp,
            "megatron_lm_config" => self.kind.distributed == DistributedType::Megatron,
            "parallelism_config" => self.kind.parallelism && !self.is_single_process_or_mpirun(),
            "dynamo_config" => self.kind.distributed != DistributedType::DeepSpeed,
            "fp8_config" => precision.as_deref() == Some("fp8"),
            _ => true,
        };
        let names = ACCELERATE_OPTIONS.values.iter().chain(ACCELERATE_OPTIONS.flags);
        for (name, section) in names.filter_map(|name| Some((*name, find_section(name)?.0))) {
            let Some(value) = given.take_last_value(name) else { continue };
            match applies(section) {
                true => merged.set_option(name, &value)?,
                false => {
                    let reason = format!("the job does not use the settings of `{section}`");
                    draft.add_key_note(&format!("--{name}"), reason, "");
                }
            }
        }
        for section in [
            "deepspeed_config",
            "fsdp_config",
            "megatron_lm_config",
            "parallelism_config",
            "dynamo_config",
            "fp8_config",
        ] {
            if !applies(section) {
                merged.remove_key(section);
            }
        }
        if self.kind.parallelism && !self.has_config && merged.value_of_key("parallelism_config").is_none() {
            merged.set_option("parallelism_config_tp_size", "1")?;
        }
        // These settings apply to several machines only.
        let hosts = [
            "deepspeed_hostfile",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
            "deepspeed_multinode_launcher",
        ];
        merged.remove_from_section("deepspeed_config", &hosts);
        Ok(())
    }

    /// Determines how many worker processes `accelerate launch` would start, and on which hosts,
    /// from its options and configuration. Fails if there are too few for the kind of job.
    pub(super) fn count_processes(
        &self,
        merged: &MergedConfig,
        given: &CommandLine,
    ) -> Result<ProcessCount, Diagnostic> {
        /// The name of the option of `accelerate launch` for the number of processes, for use in
        /// error messages.
        const OPTION_NAME: &str = "--num_processes";
        let reject = |reason: &str, help: &str| {
            Err(create_unsupported_option_error(PROGRAM_NAME, OPTION_NAME, reason, help))
        };
        let requested = match merged.value_of_key("num_processes") {
            Some(item) => parse_quoted_integer(item).unwrap_or_default(),
            None if !self.has_config => self.context.gpus as i64,
            None if merged
                .value_of_key("distributed_type")
                .is_some_and(|item| item.text.eq_ignore_ascii_case("no")) =>
            {
                1
            }
            None => -1,
        };
        if requested == -1 && self.has_config {
            return reject("the configuration file does not contain the number", "give `--num_processes`");
        }
        let machines = merged.value_of_key("num_machines").and_then(parse_quoted_integer).unwrap_or(1).max(1);
        let hostfile = given.last_value("mpirun_hostfile").map(PathBuf::from).or_else(|| {
            let DocumentValue::Map(entries) = &merged.value_of_key("mpirun_config")?.value else {
                return None;
            };
            let (_, file) = entries.iter().find(|(name, _)| name == "mpirun_hostfile")?;
            (!matches!(file.value, DocumentValue::Null)).then(|| PathBuf::from(&file.text))
        });
        let hostfile = hostfile.filter(|_| self.is_single_process_or_mpirun());
        let workers = match (self.is_single_process_or_mpirun(), &hostfile) {
            (true, None) => 1,
            (true, Some(_)) => (requested / machines).max(1),
            (false, _) if requested % machines != 0 => {
                let reason = format!("{requested} processes do not divide evenly among {machines} machines");
                return reject(&reason, "give a multiple of `--num_machines`");
            }
            (false, _) => requested / machines,
        };
        if self.kind.distributed == DistributedType::Gpu && requested < 2 && !self.has_config {
            return reject(
                "`--multi_gpu` requires at least 2 processes",
                "give the number, or remove `--multi_gpu`",
            );
        }
        if workers == 0 {
            return reject("this machine has no GPU, so the number is 0", "give the number");
        }
        check_worker_count(PROGRAM_NAME, OPTION_NAME, workers)?;
        Ok(ProcessCount {
            requested,
            workers,
            hostfile,
            is_joining: machines > 1 && !self.is_single_process_or_mpirun(),
        })
    }

    /// Removes options such as `--machine_rank` from an `accelerate launch` command line, and
    /// returns the number of machines, this machine's number and the first machine's address.
    /// Returns `None` if neither the command line nor the configuration states the number of
    /// machines. Fails if a value is not valid, or if Accelerate would not start the processes of
    /// several machines.
    pub(super) fn take_node_options(
        &self,
        given: &mut CommandLine,
        merged: &MergedConfig,
    ) -> Result<Option<ImportedNodes>, Diagnostic> {
        let configured = |name: &'static str| merged.value_of_key(name).map(|item| item.text.clone());
        let [rank, address] = ["machine_rank", "main_process_ip"]
            .map(|name| given.last_value(name).map(str::to_owned).or_else(|| configured(name)));
        let Some(machines) = merged.value_of_key("num_machines").and_then(parse_quoted_integer) else {
            return Ok(None);
        };
        let is_mpi = self.is_single_process_or_mpirun() && merged.value_of_key("mpirun_config").is_some();
        if machines <= 1 || is_mpi {
            let count = NodeCount::from_exact_count(1);
            return Ok(Some(ImportedNodes { count, node_rank: None, rendezvous: None }));
        }
        if self.is_single_process_or_mpirun() {
            let reason =
                format!("Accelerate starts one process on each of {machines} machines without torchrun");
            return Err(create_several_machines_error(PROGRAM_NAME, "--num_machines", &reason));
        }
        ["machine_rank", "main_process_ip", "same_network"]
            .iter()
            .for_each(|name| _ = given.take_last_value(name));
        let Ok(count) = machines.to_string().parse::<NodeCount>() else {
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                "--num_machines",
                format!("{machines} is too large"),
                "",
            ));
        };
        let rank = rank.as_deref().map_or(Some(0), |rank| rank.trim().parse().ok());
        let reason = || format!("the rank is not a number below {machines}");
        let rank = rank.filter(|rank| *rank < count.max);
        let rank = rank
            .ok_or_else(|| create_unsupported_option_error(PROGRAM_NAME, "--machine_rank", reason(), ""))?;
        let mut rendezvous: Option<RendezvousAddress> = None;
        if let Some(text) = address {
            let reason = format!("`{}` is not a host", text.escape_debug());
            rendezvous = Some(text.parse().map_err(|_| {
                create_unsupported_option_error(PROGRAM_NAME, "--main_process_ip", reason, "")
            })?);
        }
        let port =
            merged.value_of_key("main_process_port").and_then(parse_quoted_integer).filter(|port| *port > 0);
        if let (Some(rendezvous), Some(port)) =
            (&mut rendezvous, port.and_then(|port| u16::try_from(port).ok()))
        {
            rendezvous.port = port;
        }
        Ok(Some(ImportedNodes { count, node_rank: Some(rank), rendezvous }))
    }

    /// Sets the command, the number and the hosts of the workers in the new job.yaml, from the
    /// command line of `accelerate launch`.
    pub(super) fn set_program(
        &self,
        draft: &mut JobDraft,
        given: &mut CommandLine,
        merged: &MergedConfig,
        processes: &ProcessCount,
    ) -> Result<(), Diagnostic> {
        let (module, no_python) = (given.take_flag("module"), given.take_flag("no_python"));
        if module && no_python {
            let reason = "it contradicts `--no_python`, as in Accelerate";
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                "--module",
                reason,
                "remove one of them",
            ));
        }
        let form = ProgramForm { module, no_python, unbuffered: !self.is_single_process_or_mpirun() };
        let mut command = form.build_command(self.context.python, &given.program);
        let port = merged.value_of_key("main_process_port").and_then(parse_quoted_integer);
        if self.is_single_process_or_mpirun() {
            given.take_last_value("mpirun_hostfile");
            apply_option_rules(draft, &mut Vec::new(), PROGRAM_NAME, given, SINGLE_PROCESS_RULES);
        }
        if self.is_single_process_or_mpirun() && processes.hostfile.is_none() {
            let mut set = Vec::new();
            if processes.requested > 1 {
                let reason = "Accelerate starts one process on CPUs without mpirun";
                let help = "`launch torchrun --nproc-per-node N` starts several";
                draft.add_key_note("--num_processes", reason, help);
                let address = given.last_value("main_process_ip").unwrap_or("127.0.0.1");
                set.push((env::MASTER_ADDR, address.to_owned()));
                set.push((env::MASTER_PORT, port.unwrap_or(29500).to_string()));
            }
            command = build_env_command(command, self.context, &UNSET_SINGLE_PROCESS_VARIABLES, &set);
        } else if let Some(port) = port.filter(|port| *port > 0 && !processes.is_joining) {
            draft.set_imported_key("--main_process_port", "cluster.master_port", port.to_string());
        }
        if let Some(role) = given.take_last_value("role").filter(|role| role != "default") {
            command = build_env_command(command, self.context, &[], &[(env::ROLE_NAME, role)]);
        }
        set_local_job_keys(draft, &given.program, &command, processes.workers);
        if let Some(file) = &processes.hostfile {
            set_hostfile(draft, "--mpirun_hostfile", file);
        }
        if let Some(restarts) = given.take_last_value("max_restarts").filter(|n| n != "0") {
            draft.set_imported_key("--max_restarts", "run.restarts", restarts);
        }
        if let Some(dir) = given.take_last_value("log_dir") {
            let dir = format!("{}/{{name}}/{{run}}", dir.trim_end_matches('/'));
            draft.set_imported_key("--log_dir", "run.logs.dir", quote_yaml(&dir));
        }
        let tee = given.take_last_value("tee");
        set_console_ranks(draft, PROGRAM_NAME, processes.workers, [tee.as_deref(), None, None])?;
        self.set_gpus(draft, merged)
    }

    /// Converts `gpu_ids`, Accelerate's selection of GPUs, to the job.yaml key `cluster.devices`.
    fn set_gpus(&self, draft: &mut JobDraft, merged: &MergedConfig) -> Result<(), Diagnostic> {
        /// The name of the option of `accelerate launch` that selects GPUs, for use in error
        /// messages.
        const OPTION_NAME: &str = "--gpu_ids";
        let Some(ids) =
            merged.value_of_key("gpu_ids").map(|item| item.text.as_str()).filter(|ids| *ids != "all")
        else {
            return Ok(());
        };
        let numbers: Option<Vec<u32>> = ids.split(',').map(|id| id.trim().parse().ok()).collect();
        let Some(numbers) = numbers else {
            let reason = format!("`{}` is not a list of numbers", ids.escape_debug());
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                OPTION_NAME,
                reason,
                "set CUDA_VISIBLE_DEVICES instead",
            ));
        };
        if numbers.len() < 2 && self.kind.distributed == DistributedType::Gpu && self.has_config {
            let reason = "a job on several GPUs requires at least two";
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                OPTION_NAME,
                reason,
                "list more, or use `--gpu_ids all`",
            ));
        }
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        draft.set_imported_key(OPTION_NAME, "cluster.devices", format!("[{}]", numbers.join(", ")));
        Ok(())
    }

    /// Sets, in the new job.yaml `draft`, the environment variables that Accelerate's library reads
    /// in a worker. Fails if the configuration contains invalid or unknown keys.
    pub(super) fn set_worker_env_variables(
        &self,
        draft: &mut JobDraft,
        given: &mut CommandLine,
        merged: &MergedConfig,
        deepspeed_fields: &str,
        processes: &ProcessCount,
    ) -> Result<(), ImportErrors> {
        let document = merged.document();
        let mut keys = RemainingKeys::from_document(document)?;
        let use_cpu = keys.take_boolean("use_cpu").unwrap_or(false);
        // Accelerate's launcher reads this option on the command line only.
        keys.take("enable_cpu_affinity");
        for key in TPU_KEYS.iter().chain(&SEPARATELY_CONVERTED_KEYS) {
            keys.take(key);
        }
        let cpu = self.kind.cpu || use_cpu && self.is_single_process_or_mpirun();
        set_worker_environment(draft, &mut keys, self.kind.distributed, cpu);
        if given.take_flag("enable_cpu_affinity") {
            draft.set_env("--enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY", "1");
        }
        let threads = given.take_last_value("num_cpu_threads_per_process");
        if self.kind.distributed == DistributedType::DeepSpeed {
            draft.set_env("deepspeed_config", "ACCELERATE_CONFIG_DS_FIELDS", deepspeed_fields);
            let path = self.context.user_env_variable(env::PYTHONPATH).unwrap_or_default();
            let parts = path.split(':').filter(|part| !part.is_empty()).chain([self.context.directory]);
            draft.set_env("--use_deepspeed", env::PYTHONPATH, &parts.collect::<Vec<_>>().join(":"));
            if processes.workers > 1 {
                set_thread_count(draft, self.context, 1);
            }
        } else {
            let uses_cpu = if self.has_config { use_cpu } else { self.kind.cpu };
            let threads = threads.unwrap_or_else(|| self.count_threads(uses_cpu, processes.requested));
            draft.set_env("--num_cpu_threads_per_process", env::OMP_NUM_THREADS, threads.trim());
        }
        let (unknown, errors) = keys.into_unconverted_keys();
        for (key, value) in unknown {
            draft.add_not_converted_note(&key, format!("launch does not know this key (value: {value})"), "");
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Returns how many CPU threads `accelerate launch` would give each process by default
    /// (`num_cpu_threads_per_process`).
    fn count_threads(&self, uses_cpu: bool, processes: i64) -> String {
        let user = self.context.user_env_variable(env::OMP_NUM_THREADS);
        if let Some(threads) = user.filter(|text| text.trim().parse::<i64>().is_ok_and(|n| n > 0)) {
            return threads.trim().to_owned();
        }
        let share = match uses_cpu && processes >= 1 {
            true => self.context.cores as i64 / processes,
            false => 1,
        };
        share.max(1).to_string()
    }
}

/// Keys of Accelerate's configuration, such as `num_processes`, that become no environment
/// variables because other functions convert or report them.
/// [`AccelerateConversion::set_worker_env_variables`] must not report them as unknown.
const SEPARATELY_CONVERTED_KEYS: [&str; 13] = [
    "compute_environment",
    "distributed_type",
    "num_processes",
    "num_machines",
    "machine_rank",
    "gpu_ids",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "same_network",
    "main_training_function",
    "mpirun_config",
    "use_cpu",
];

/// Returns the option of [`ACCELERATE_OPTIONS`] with the name `name` as a static string, or an
/// empty string if no option has this name.
fn find_option_name(name: &str) -> &'static str {
    ACCELERATE_OPTIONS.values.iter().find(|known| **known == name).copied().unwrap_or_default()
}

/// Parses a value of Accelerate's configuration as an integer, whether or not the value is written
/// in quotes.
fn parse_quoted_integer(item: &DocumentItem) -> Option<i64> {
    item.text.trim().parse().ok()
}
