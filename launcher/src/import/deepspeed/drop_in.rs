//! [`DeepSpeedCommand`]: a command line of `deepspeed`, which `launch deepspeed` converts to a
//! job.yaml and runs on this machine or on the hosts of a hostfile.
use super::arguments::DEEPSPEED_OPTIONS;
use crate::import::{
    command_line::{CommandLine, CommandLineError},
    drop_in::{
        DropInContext,
        OptionEffect::{NoEffect, Rejected},
        OptionRule, ProgramForm, apply_option_rules, check_worker_count, create_several_machines_error,
        create_unsupported_option_error, load_drop_in_job, set_local_job_keys,
    },
    import_options::{ImportErrors, set_hostfile},
    job_draft::{ImportedJob, JobDraft},
    value_text::format_yaml_list,
};
use diagnostic::Diagnostic;
use jobspec::{
    env,
    hosts::{HostSlots, filter_hosts, parse_hostfile},
    quote_yaml,
};
use std::path::Path;

/// The name of the command `deepspeed` in messages about a converted command line.
const PROGRAM_NAME: &str = "deepspeed";
/// The hostfile that DeepSpeed reads if the user names none.
const DEFAULT_HOSTFILE: &str = "/job/hostfile";
/// The host name that stands for this machine in DeepSpeed's options `--include` and `--exclude`.
const LOCALHOST_NAME: &str = "localhost";
/// Patterns of the environment variables, such as `NCCL*`, that DeepSpeed passes from the user's
/// shell to workers on other hosts.
const PASSED_VARIABLES: [&str; 5] = ["MLFLOW*", "PYTHON*", "MV2*", "UCX*", "NCCL*"];
/// The environment variable by which the user selects the kind of device that DeepSpeed uses.
const ACCELERATOR_VARIABLE: &str = "DS_ACCELERATOR";

/// The options of `deepspeed` that job.yaml cannot express, each with the note or error that the
/// option causes.
const UNSUPPORTED_OPTION_RULES: &[OptionRule] = &[
    (
        "autotuning",
        &[],
        Rejected("launch doesn't tune configurations", "use the original `deepspeed --autotuning`"),
    ),
    ("launcher_args", &[""], Rejected("launch starts processes itself", "remove the option")),
    (
        "venv_script",
        &[],
        Rejected("launch runs no script before the workers", "activate the environment before launch"),
    ),
    (
        "bind_core_list",
        &[],
        Rejected("launch uses all cores that it may use", "restrict launch with `taskset`"),
    ),
    (
        "elastic_training",
        &[],
        Rejected("launch has no elastic configurations of DeepSpeed", "see `run.min_hosts` in docs/job.md"),
    ),
    ("min_elastic_nodes", &["-1"], NoEffect("the option requires `--elastic_training`")),
    ("max_elastic_nodes", &["-1"], NoEffect("the option requires `--elastic_training`")),
    ("no_ssh_check", &[], NoEffect("launch checks each connection when it uses it")),
    ("log_level", &["info"], NoEffect("the option is for DeepSpeed's launcher, which does not run")),
    ("quiet", &[], NoEffect("the option is for DeepSpeed's launcher, which does not run")),
    ("node_rank", &["-1", "0"], NoEffect("launch assigns the ranks itself")),
];

/// The options that have no effect if `deepspeed` runs a job on one machine, such as `--ssh_port`,
/// each with a note for the user.
const LOCAL_JOB_RULES: &[OptionRule] = &[
    ("launcher", &["pdsh", "ssh"], NoEffect("the job runs on one machine")),
    ("ssh_port", &[], NoEffect("the job runs on one machine")),
    ("no_ssh", &[], NoEffect("the job runs on one machine")),
];

/// A parsed command line of `deepspeed`, divided into its options, the program and the program's
/// arguments.
#[derive(Debug)]
pub(crate) struct DeepSpeedCommand {
    given: CommandLine,
}

/// The texts of files that `deepspeed` reads in addition to its command line: the hostfile, and
/// files of environment variables.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeepSpeedFiles {
    /// The text of the hostfile; `None` if the file does not exist.
    pub(crate) hostfile: Option<String>,
    /// The texts of the files with variables for workers on several hosts.
    pub(crate) variables: Vec<String>,
}

/// The hosts and slots (places for workers) on which a `deepspeed` command line runs its workers.
#[derive(Debug)]
enum DeepSpeedResources {
    /// This machine, with this number of workers, the numbers of the GPUs if the command line
    /// selects GPUs, and the only host of the hostfile that the filters select, unless its name is
    /// [`LOCALHOST_NAME`].
    Local { workers: i64, devices: Option<Vec<u32>>, host: Option<String> },
    /// The hosts of the hostfile that the filters select.
    Hosts,
}

impl DeepSpeedCommand {
    /// Parses the arguments that follow `deepspeed` on the user's command line. Fails if DeepSpeed
    /// would reject them.
    pub(crate) fn parse(args: &[String]) -> Result<DeepSpeedCommand, ImportErrors> {
        let rejected = |error: CommandLineError| vec![error.into_diagnostic(PROGRAM_NAME)];
        Ok(DeepSpeedCommand { given: DEEPSPEED_OPTIONS.parse(args).map_err(rejected)? })
    }

    /// Returns the path of the hostfile that `deepspeed` would read, which may not exist.
    pub(crate) fn hostfile(&self) -> &str {
        self.given.last_value("hostfile").unwrap_or(DEFAULT_HOSTFILE)
    }

    /// Returns whether the command line requests a file with the process id of the launcher
    /// (`--save_pid`).
    pub(crate) fn requests_pid_file(&self) -> bool {
        self.given.last_value("save_pid").is_some()
    }

    /// Converts a command line of `deepspeed` to a job.yaml.
    pub(crate) fn convert(
        self,
        files: &DeepSpeedFiles,
        context: &DropInContext<'_>,
    ) -> Result<ImportedJob, ImportErrors> {
        let hostfile = self.hostfile().to_owned();
        let DeepSpeedCommand { mut given } = self;
        let mut draft = JobDraft::default();
        let mut errors = ImportErrors::new();
        given.take_flag("save_pid");
        if given.take_last_value("hostfile").is_some() && files.hostfile.is_none() {
            draft.add_key_note("--hostfile", "the file does not exist; the job runs on this machine", "");
        }
        if let Some(number) = given.take_last_value("num_accelerators") {
            given.insert_default("num_gpus", number);
        }
        let resources = select_resources(&given, files, context).map_err(|error| vec![error])?;
        if let DeepSpeedResources::Local { host: Some(host), .. } = &resources {
            let reason = format!(
                "only `{}` is selected; the job runs on this machine, as with deepspeed",
                host.escape_debug()
            );
            draft.add_key_note("--hostfile", &reason, "add `--force_multi` to run the job on that host");
        }
        errors.extend(set_program(&mut draft, &mut given, &resources, context).err());
        match &resources {
            DeepSpeedResources::Local { devices, .. } => {
                if let Some(devices) = devices {
                    let numbers: Vec<String> = devices.iter().map(u32::to_string).collect();
                    draft.set_imported_key(
                        "--include",
                        "cluster.devices",
                        format!("[{}]", numbers.join(", ")),
                    );
                }
                for name in ["include", "exclude", "num_nodes", "num_gpus", "force_multi"] {
                    given.take_last_value(name);
                }
                apply_option_rules(&mut draft, &mut errors, PROGRAM_NAME, &mut given, LOCAL_JOB_RULES);
            }
            DeepSpeedResources::Hosts => {
                set_hostfile(&mut draft, "--hostfile", Path::new(&hostfile));
                errors.extend(set_hosts(&mut draft, &mut given, context).err());
                set_file_variables(&mut draft, &files.variables, &mut errors);
            }
        }
        set_master_port_and_log_dir(&mut draft, &mut given);
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
            true => load_drop_in_job(draft, PROGRAM_NAME, errors),
            false => Err(errors),
        }
    }
}

/// Returns the value of the integer option `name` of `deepspeed`, or -1 if the option was not
/// given.
fn read_integer_option(given: &CommandLine, name: &str) -> i64 {
    given.last_value(name).and_then(|text| text.trim().parse().ok()).unwrap_or(-1)
}

/// Determines the hosts of a `deepspeed` command line and the workers on each host, from the
/// hostfile, the host filters and the requested counts.
fn select_resources(
    given: &CommandLine,
    files: &DeepSpeedFiles,
    context: &DropInContext<'_>,
) -> Result<DeepSpeedResources, Diagnostic> {
    let filter = |name: &str| given.last_value(name).filter(|text| !text.is_empty()).map(str::to_owned);
    let (mut include, exclude) = (filter("include"), filter("exclude"));
    let (nodes, gpus) = (read_integer_option(given, "num_nodes"), read_integer_option(given, "num_gpus"));
    if (nodes >= 0 || gpus >= 0) && (include.is_some() || exclude.is_some()) {
        let reason = "it contradicts `--include` and `--exclude`, as in DeepSpeed";
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--num_gpus", reason, "use one of them"));
    }
    let uses_gpus =
        context.installed_gpus > 0 && context.user_env_variable(ACCELERATOR_VARIABLE) != Some("cpu");
    let mut selects_gpus = gpus > 0 || include.is_some() || exclude.is_some();
    let pool: Vec<(String, HostSlots)> = match &files.hostfile {
        Some(text) => parse_hostfile_slots(text)?,
        None => {
            if nodes > 1 {
                let reason = "the job has several nodes, but there is no hostfile";
                return Err(create_unsupported_option_error(
                    PROGRAM_NAME,
                    "--num_nodes",
                    reason,
                    "name the hosts with `--hostfile`",
                ));
            }
            let listed = context.user_env_variable(env::CUDA_VISIBLE_DEVICES).filter(|list| !list.is_empty());
            if let Some(list) = listed.filter(|_| !selects_gpus) {
                include = Some(format!("{LOCALHOST_NAME}:{list}"));
                // The workers inherit the list.
                selects_gpus = false;
            }
            vec![(LOCALHOST_NAME.to_owned(), HostSlots::Count(count_local_slots(uses_gpus, context)))]
        }
    };
    let option = if exclude.is_some() { "--exclude" } else { "--include" };
    let include: Vec<String> = include.into_iter().collect();
    let exclude: Vec<String> = exclude.into_iter().collect();
    let mut left = filter_hosts(&pool, &include, &exclude).map_err(|error| {
        create_unsupported_option_error(PROGRAM_NAME, option, error.to_string(), "slots count from 0")
    })?;
    if nodes > 0 {
        left.truncate(nodes as usize);
    }
    let force = given.last_value("force_multi").is_some();
    if files.hostfile.is_some() && (left.len() > 1 || force) {
        return Ok(DeepSpeedResources::Hosts);
    }
    let selected = left.into_iter().next();
    let host = selected.as_ref().map(|(index, _)| pool[*index].0.clone());
    let host = host.filter(|host| host != LOCALHOST_NAME);
    let slots = match selected {
        _ if gpus > 0 => HostSlots::Count(gpus.min(i64::from(u32::MAX)) as u32),
        Some((_, slots)) => slots,
        None => HostSlots::Count(0),
    };
    let workers = i64::from(slots.count().unwrap_or(1));
    check_worker_count(PROGRAM_NAME, "--num_gpus", workers)?;
    selects_gpus |= files.hostfile.is_some();
    let devices = match slots {
        HostSlots::Selected(numbers) => Some(numbers),
        HostSlots::Count(count) => Some((0..count).collect()),
        HostSlots::Auto => None,
    };
    Ok(DeepSpeedResources::Local { workers, devices: devices.filter(|_| uses_gpus && selects_gpus), host })
}

/// Parses a hostfile into host names, each with its number of slots (places for workers). Fails if
/// the text is not valid.
fn parse_hostfile_slots(text: &str) -> Result<Vec<(String, HostSlots)>, Diagnostic> {
    match parse_hostfile(text) {
        Ok(entries) => {
            let slots = |slots: Option<u32>| slots.map_or(HostSlots::Auto, HostSlots::Count);
            Ok(entries.into_iter().map(|entry| (entry.host.to_string(), slots(entry.slots))).collect())
        }
        Err(errors) => {
            let reason =
                errors.first().map(|error| format!("line {}: {error}", error.line)).unwrap_or_default();
            Err(create_unsupported_option_error(
                PROGRAM_NAME,
                "--hostfile",
                reason,
                "a line is `host slots=N`",
            ))
        }
    }
}

/// Returns how many workers DeepSpeed starts on this machine by default: one per GPU or, without
/// GPUs, `LOCAL_SIZE` or one per NUMA node.
fn count_local_slots(uses_gpus: bool, context: &DropInContext<'_>) -> u32 {
    let given = context
        .user_env_variable(env::LOCAL_SIZE)
        .and_then(|text| text.trim().parse().ok())
        .filter(|n| *n > 0);
    match uses_gpus {
        true => context.installed_gpus as u32,
        false => given.unwrap_or(context.numa_nodes.max(1) as u32),
    }
}

/// Converts the program of a `deepspeed` command line, with the number and CPU binding of its
/// workers per host, to keys of job.yaml.
fn set_program(
    draft: &mut JobDraft,
    given: &mut CommandLine,
    resources: &DeepSpeedResources,
    context: &DropInContext<'_>,
) -> Result<(), Diagnostic> {
    let (module, no_python) = (given.take_flag("module"), given.take_flag("no_python"));
    if module && no_python {
        let reason = "it contradicts `--no_python`, as in DeepSpeed";
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--module", reason, "remove one of them"));
    }
    let form = ProgramForm { module, no_python, unbuffered: true };
    let command = form.build_command(context.python, &given.program);
    let workers = if let DeepSpeedResources::Local { workers, .. } = resources { *workers } else { 1 };
    set_local_job_keys(draft, &given.program, &command, workers);
    if !given.take_flag("no_local_rank") {
        draft.set_required_key("run.local_rank_argument", "true");
    }
    if given.take_flag("bind_cores_to_rank") {
        draft.set_imported_key("--bind_cores_to_rank", "run.cpu_bind", "cores");
    }
    Ok(())
}

/// Converts the hosts of a `deepspeed` command line for several hosts, and the environment
/// variables of its workers, to keys of job.yaml.
fn set_hosts(
    draft: &mut JobDraft,
    given: &mut CommandLine,
    context: &DropInContext<'_>,
) -> Result<(), Diagnostic> {
    given.take_flag("force_multi");
    if given.take_flag("no_ssh") {
        let reason = "`deepspeed --no_ssh` runs on each of the hosts";
        return Err(create_several_machines_error(PROGRAM_NAME, "--no_ssh", reason));
    }
    let launcher = given.take_last_value("launcher").unwrap_or_else(|| "pdsh".to_owned()).to_lowercase();
    match launcher.as_str() {
        "pdsh" | "ssh" => {}
        "slurm" => {
            let help = "remove `--launcher` and the hostfile inside an allocation, or use `launch sbatch`";
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                "--launcher slurm",
                "launch reaches the hosts over SSH",
                help,
            ));
        }
        other => {
            let option = format!("--launcher {}", other.escape_debug());
            let help = "remove `--launcher`; launch connects over SSH";
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                &option,
                "launch does not use MPI",
                help,
            ));
        }
    }
    for name in ["include", "exclude"] {
        if let Some(filter) = given.take_last_value(name).filter(|text| !text.is_empty()) {
            draft.set_imported_key(
                &format!("--{name}"),
                &format!("cluster.{name}"),
                format_yaml_list(&[filter]),
            );
        }
    }
    let (nodes, gpus) = (read_integer_option(given, "num_nodes"), read_integer_option(given, "num_gpus"));
    given.take_last_value("num_nodes");
    given.take_last_value("num_gpus");
    if nodes > 0 {
        draft.set_imported_key("--num_nodes", "cluster.use_hosts", nodes.to_string());
    }
    let workers = if gpus > 0 { gpus.to_string() } else { "auto".to_owned() };
    draft.set_required_key("cluster.workers_per_host", &workers);
    if let Some(port) = given.take_last_value("ssh_port") {
        draft.set_imported_key("--ssh_port", "cluster.ssh.port", port);
    }
    let patterns: Vec<String> = PASSED_VARIABLES.map(str::to_owned).to_vec();
    draft.set_required_key("run.pass_env", &format_yaml_list(&patterns));
    let path = match context.user_env_variable(env::PYTHONPATH) {
        Some(path) => format!("{}:{path}", context.directory),
        None => context.directory.to_owned(),
    };
    draft.set_env("--hostfile", env::PYTHONPATH, &path);
    Ok(())
}

/// Converts each line `NAME=VALUE` of DeepSpeed's environment files to an environment variable of
/// the workers. `files` are texts of [`DeepSpeedFiles`].
fn set_file_variables(draft: &mut JobDraft, files: &[String], errors: &mut ImportErrors) {
    for line in files.iter().flat_map(|text| text.lines()) {
        match line.split_once('=') {
            Some((name, value)) => draft.set_env(".deepspeed_env", name.trim(), value.trim_end()),
            None if line.trim().is_empty() => {}
            None => {
                let shown: String = line.chars().take(60).flat_map(char::escape_debug).collect();
                let reason = format!("the line `{shown}` is not `NAME=VALUE`");
                errors.push(create_unsupported_option_error(
                    PROGRAM_NAME,
                    ".deepspeed_env",
                    reason,
                    "correct the line",
                ));
            }
        }
    }
}

/// Converts DeepSpeed's options for the port of the rendezvous and for the directory of logs to
/// keys of job.yaml.
fn set_master_port_and_log_dir(draft: &mut JobDraft, given: &mut CommandLine) {
    let address = given.take_last_value("master_addr").unwrap_or_default();
    if !["", "127.0.0.1", LOCALHOST_NAME].contains(&address.as_str()) {
        draft.add_key_note("--master_addr", "`MASTER_ADDR` is the address of the first host", "");
    }
    if let Some(port) = given.take_last_value("master_port").filter(|port| port != "0") {
        draft.set_imported_key("--master_port", "cluster.master_port", port);
    }
    if let Some(dir) = given.take_last_value("enable_each_rank_log").filter(|dir| dir != "None") {
        let dir = format!("{}/{{name}}/{{run}}", dir.trim_end_matches('/'));
        draft.set_imported_key("--enable_each_rank_log", "run.logs.dir", quote_yaml(&dir));
        draft.set_imported_key("--enable_each_rank_log", "run.logs.show", "[]");
    }
}
