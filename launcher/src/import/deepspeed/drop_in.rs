//! [`DeepSpeedCommand`]: a command line of `deepspeed`, which `launch deepspeed` converts to a
//! job.yaml and runs on this machine, as one of several nodes, or on the hosts of a hostfile.
use super::{
    arguments::{DEEPSPEED_OPTIONS, PROGRAM_NAME},
    resources::{DeepSpeedResources, LOCALHOST_NAME, read_integer_option, select_resources},
};
use crate::import::{
    command_line::{CommandLine, CommandLineError},
    drop_in::{
        DropInContext,
        OptionEffect::{NoEffect, Rejected},
        OptionRule, ProgramForm, apply_option_rules, create_unsupported_option_error, load_drop_in_job,
        set_local_job_keys,
    },
    import_options::{ImportErrors, set_hostfile},
    job_draft::{ImportedJob, JobDraft},
    value_text::format_yaml_list,
};
use diagnostic::Diagnostic;
use jobspec::{env, quote_yaml};
use std::path::Path;

/// The hostfile that DeepSpeed reads if the user names none.
const DEFAULT_HOSTFILE: &str = "/job/hostfile";
/// Patterns of the environment variables, such as `NCCL*`, that DeepSpeed passes from the user's
/// shell to workers on other hosts.
const PASSED_VARIABLES: [&str; 5] = ["MLFLOW*", "PYTHON*", "MV2*", "UCX*", "NCCL*"];

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

/// The options that have no effect if the user runs `deepspeed --no_ssh` on each node, each with a
/// note for the user.
const NODE_RULES: &[OptionRule] = &[
    ("launcher", &["pdsh", "ssh"], NoEffect("the user starts each node")),
    ("ssh_port", &[], NoEffect("the user starts each node")),
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
            draft.add_key_note(
                "--hostfile",
                "there is no regular file at this path; the job runs on this machine",
                "",
            );
        }
        if let Some(number) = given.take_last_value("num_accelerators") {
            given.insert_default("num_gpus", number);
        }
        let resources =
            select_resources(&given, files.hostfile.as_deref(), context).map_err(|error| vec![error])?;
        if let DeepSpeedResources::Local { host: Some(host), .. } = &resources {
            let reason = format!(
                "only `{}` is selected; the job runs on this machine, as with deepspeed",
                host.escape_debug()
            );
            draft.add_key_note("--hostfile", &reason, "add `--force_multi` to run the job on that host");
        }
        errors.extend(set_program(&mut draft, &mut given, &resources, context).err());
        match &resources {
            DeepSpeedResources::Local { devices, .. } | DeepSpeedResources::Node { devices, .. } => {
                set_devices(&mut draft, &mut given, devices.as_deref());
            }
            DeepSpeedResources::Hosts => {
                set_hostfile(&mut draft, "--hostfile", Path::new(&hostfile));
                errors.extend(set_hosts(&mut draft, &mut given, context).err());
                set_file_variables(&mut draft, &files.variables, &mut errors);
            }
        }
        let (nodes, rules) = match resources {
            DeepSpeedResources::Local { .. } => (None, LOCAL_JOB_RULES),
            DeepSpeedResources::Node { nodes, .. } => (Some(nodes), NODE_RULES),
            DeepSpeedResources::Hosts => (None, &[][..]),
        };
        if nodes.is_some() {
            for name in ["no_ssh", "node_rank", "master_addr", "master_port"] {
                given.take_last_value(name);
            }
        }
        apply_option_rules(&mut draft, &mut errors, PROGRAM_NAME, &mut given, rules);
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
            true => load_drop_in_job(draft, PROGRAM_NAME, errors).map(|job| ImportedJob { nodes, ..job }),
            false => Err(errors),
        }
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
    let workers = match resources {
        DeepSpeedResources::Local { workers, .. } | DeepSpeedResources::Node { workers, .. } => *workers,
        DeepSpeedResources::Hosts => 1,
    };
    set_local_job_keys(draft, &given.program, &command, workers);
    if !given.take_flag("no_local_rank") {
        draft.set_required_key("run.local_rank_argument", "true");
    }
    if given.take_flag("bind_cores_to_rank") {
        draft.set_imported_key("--bind_cores_to_rank", "run.cpu_bind", "cores");
    }
    Ok(())
}

/// Sets the GPUs of the workers on this machine, and removes the options that select hosts and
/// GPUs, which the command line's resources already contain.
fn set_devices(draft: &mut JobDraft, given: &mut CommandLine, devices: Option<&[u32]>) {
    if let Some(devices) = devices {
        let numbers: Vec<String> = devices.iter().map(u32::to_string).collect();
        draft.set_imported_key("--include", "cluster.devices", format!("[{}]", numbers.join(", ")));
    }
    for name in ["include", "exclude", "num_nodes", "num_gpus", "force_multi"] {
        given.take_last_value(name);
    }
}

/// Converts the hosts of a `deepspeed` command line for several hosts, and the environment
/// variables of its workers, to keys of job.yaml.
fn set_hosts(
    draft: &mut JobDraft,
    given: &mut CommandLine,
    context: &DropInContext<'_>,
) -> Result<(), Diagnostic> {
    given.take_flag("force_multi");
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
