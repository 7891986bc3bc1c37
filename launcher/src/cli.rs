//! Parses the command line, and converts errors of wrong arguments to diagnostics.
use crate::{cmd::OutputFormat, cmd::ckpt::CkptArgs};
use clap::{
    Args, CommandFactory, Parser, Subcommand,
    error::{ContextKind, ContextValue, ErrorKind},
};
use contract::event::EventSchema;
use diagnostic::{Diagnostic, codes::command};
use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

/// Run a training job from a job.yaml, and inspect its runs and checkpoints.
#[derive(Debug, Parser)]
#[command(
    name = "launch",
    version,
    override_usage = "launch JOB [--set PATH=VALUE]… [--dry-run] [--detach] [--json]\n       \
                      launch [run] [--workers N] -- PROGRAM …\n       launch COMMAND …",
    after_help = "`launch job.yaml` is short for `launch run job.yaml`.\n\n\
                  Exit codes: 0 success, 1 the job or the operation failed,\n\
                  2 the command line or the job is wrong, 3 a host, device, storage or port is\n\
                  not available, 4 the checkpoint is not usable, 130 or 143 ended by a signal.",
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: LaunchCommand,
    /// Print events, results and errors as JSON on stdout; `logs` and `stop` print only errors as
    /// JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Version of the JSON form of events: 2, or 1 for that of earlier releases [default: 2]
    #[arg(long, global = true, value_name = "VERSION")]
    pub(crate) json_schema: Option<EventSchema>,
}

/// The subcommand of `launch` with its options.
#[derive(Debug, Subcommand)]
pub(crate) enum LaunchCommand {
    /// Run a job (the default command)
    Run(RunArgs),
    /// Show the ranks, environment and memory of a job without running it
    Plan(JobArgs),
    /// Check every host of a job: connection, GPUs, storage, ports
    Check(JobArgs),
    /// Show active and past runs
    Ps(PsArgs),
    /// Show the output of the ranks of a run
    Logs(LogsArgs),
    /// Show the events of a run
    Events(EventsArgs),
    /// Save and stop a run, or kill it
    Stop(StopArgs),
    /// Inspect, verify, convert and repair checkpoints
    Ckpt(CkptArgs),
    /// Submit a job to Slurm
    Sbatch(SbatchArgs),
    /// Convert the settings of Accelerate, DeepSpeed or torchrun to a job.yaml
    Import(ImportArgs),
    /// Explain an error code, or list all codes
    Explain(ExplainArgs),
    /// Compare operations and training on a GPU with the CPU, and measure their speed
    #[command(name = GPU_CHECK, disable_help_flag = true)]
    GpuCheck(GpuCheckArgs),
    /// Internal: the agent, which the controller starts on each host
    #[command(hide = true)]
    Agent(AgentArgs),
}

/// The name of the command `gpu-check`, which crate `worker` implements. The `main` function of the
/// executable runs the command before this crate parses the command line.
const GPU_CHECK: &str = "gpu-check";

/// The job and the overrides of commands that only read a job.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// Job file
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,
    /// Change a key of the job, e.g. --set train.steps=50 (YAML value; repeatable)
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Arguments of `launch ps`.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Show all past runs instead of the newest 20
    #[arg(long = "all", short = 'a')]
    pub(crate) show_all: bool,
}

/// Arguments of `launch logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run, or the newest run if none is active]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<String>,
    /// Only these ranks: 3, or 0-3,7
    #[arg(long, value_name = "RANKS", value_delimiter = ',', value_parser = parse_ranks)]
    pub(crate) rank: Vec<Vec<u32>>,
    /// Follow until the run ends
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only lines that match this regular expression
    #[arg(long, value_name = "RE")]
    pub(crate) grep: Option<String>,
    /// Only lines of the last DURATION, such as 30s, 10m or 2h; accurate to about a second
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_ms)]
    pub(crate) since: Option<u64>,
}

/// Arguments of `launch events`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run, or the newest run if none is active]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<String>,
    /// Follow until the run ends
    #[arg(long, short)]
    pub(crate) follow: bool,
}

/// Arguments of `launch stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<String>,
    /// Kill the run without saving
    #[arg(long)]
    pub(crate) now: bool,
    /// Return without waiting for the end of the run
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Seconds to wait for the end of the run; if the run has not ended by then, the exit code is 1
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) wait: u64,
}

/// Arguments of `launch explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Error code, such as ssh-host-key-unknown [default: list all codes]
    #[arg(value_name = "CODE")]
    pub(crate) code: Option<String>,
}

/// Arguments of `launch gpu-check`, which crate `worker` parses.
#[derive(Debug, Args)]
pub(crate) struct GpuCheckArgs {
    /// Options of the command, which docs/cli.md lists
    #[arg(value_name = "OPTION", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) options: Vec<String>,
}

/// Returns the usage error for a command line in which `gpu-check` is not the first argument, such
/// as `launch --json gpu-check`.
pub(crate) fn misplaced_gpu_check_error() -> Diagnostic {
    Diagnostic::error(command::USAGE, format!("`{GPU_CHECK}` must be the first argument"))
        .with_help(format!("write `launch {GPU_CHECK} [OPTION]…`"))
}

/// The limit of ranks in a list such as `0-3,7`. Every rank must be less than the limit.
const RANK_LIMIT: u32 = 1 << 20;

/// The error of an option whose value has the wrong form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OptionValueError {
    /// The value is not a rank or a range of ranks.
    #[error("expected a rank or a range of ranks, such as 3 or 0-3,7")]
    Ranks,
    /// The value is not a duration with a unit.
    #[error("expected a duration, such as 30s, 10m or 2h")]
    Duration,
    /// The value is not a size, such as `5GB`.
    #[error("expected a size, such as 5GB, 500MB or 2GiB")]
    Size,
    /// The value is less memory than the conversion of a checkpoint needs.
    #[error("expected 64MiB or more")]
    MemoryTooSmall,
    /// The value is not a rule `PATTERN=N` that assigns parameters to an optimizer group.
    #[error("expected a pattern of names and the number of a group, such as '*norm*=1'")]
    GroupRule,
    /// The pattern of a rule is not a valid glob pattern.
    #[error("the pattern is not valid: {0}")]
    Pattern(globset::ErrorKind),
}

/// Parses one rank, such as `3`, or a range of ranks, such as `0-3`. Returns the ranks in ascending
/// order.
fn parse_ranks(text: &str) -> Result<Vec<u32>, OptionValueError> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first), Ok(last)) if first <= last && last < RANK_LIMIT => Ok((first..=last).collect()),
        _ => Err(OptionValueError::Ranks),
    }
}

/// Parses a duration with a unit, such as `30s`. Returns the duration in milliseconds.
fn parse_duration_ms(text: &str) -> Result<u64, OptionValueError> {
    contract::job::parse_duration(text).ok_or(OptionValueError::Duration)
}

/// Arguments of `launch run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Job file
    #[arg(value_name = "JOB", required_unless_present = "command", conflicts_with = "command")]
    pub(crate) job: Option<PathBuf>,
    /// Change a key of the job, e.g. --set train.steps=50 (YAML value; repeatable)
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Number of workers of the program after `--`, on this machine [default: 1]
    #[arg(
        long,
        visible_alias = "nproc-per-node",
        alias = "nproc_per_node",
        value_name = "N",
        conflicts_with = "job",
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub(crate) workers: Option<u32>,
    /// Program and arguments to run as workers, without a job file
    #[arg(last = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
    /// In a Slurm batch job: save and requeue the job before its time limit (SIGUSR1), and requeue
    /// it after the loss of a node; at most `slurm.requeues` times
    #[arg(long, requires = "job")]
    pub(crate) requeue: bool,
    /// Return when the workers have started; the job continues without this terminal
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) detach: bool,
    /// Internal: name of the run and descriptor of a detached controller
    #[arg(long, hide = true, value_name = "RUN:FD", conflicts_with = "detach")]
    pub(crate) detached: Option<String>,
    /// Show the plan and the job with all defaults, and run nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Arguments of the internal command `launch agent`.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Text that the agent prints first, on a separate line; ignore output before this text
    #[arg(long, value_name = "TEXT")]
    pub(crate) marker: Option<String>,
    /// Print the content hash of this executable once it is on disk, and exit
    #[arg(long)]
    pub(crate) own_hash: bool,
    /// Read an invitation from stdin and connect to the controller
    #[arg(long)]
    pub(crate) join: bool,
    /// Remove the executable, which is a copy for this agent
    #[arg(long)]
    pub(crate) remove_own_file: bool,
}

/// Arguments of `launch sbatch`.
#[derive(Debug, Args)]
pub(crate) struct SbatchArgs {
    /// Job file
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,
    /// Change a key of the job, e.g. --set slurm.nodes=4 (YAML value; repeatable)
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Print the script instead of submitting it
    #[arg(long)]
    pub(crate) print: bool,
    /// Additional options of sbatch, which override those of the script
    #[arg(last = true, value_name = "OPTION", conflicts_with = "print")]
    pub(crate) options: Vec<String>,
}

/// Arguments of `launch import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(subcommand)]
    pub(crate) from: ImportCommand,
}

/// The launcher whose configuration `launch import` converts.
#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Convert the file that `accelerate config` writes
    Accelerate(ImportFileArgs),
    /// Convert a DeepSpeed configuration to a job of the built-in training, or of the program after
    /// `--`
    Deepspeed(ImportFileArgs),
    /// Convert the arguments of torchrun
    Torchrun(ImportTorchrunArgs),
}

/// Arguments of `launch import accelerate` and `launch import deepspeed`.
#[derive(Debug, Args)]
pub(crate) struct ImportFileArgs {
    /// Configuration file
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Hostfile of DeepSpeed or Open MPI
    #[arg(long, value_name = "FILE")]
    pub(crate) hostfile: Option<PathBuf>,
    /// Program that the job runs, and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<String>,
}

/// Arguments of `launch import torchrun`.
#[derive(Debug, Args)]
pub(crate) struct ImportTorchrunArgs {
    /// Hostfile of DeepSpeed or Open MPI
    #[arg(long, value_name = "FILE")]
    pub(crate) hostfile: Option<PathBuf>,
    /// Options of torchrun, the script, and the script's arguments
    #[arg(last = true, value_name = "ARGS", required = true)]
    pub(crate) arguments: Vec<String>,
}

/// The result of parsing the command line.
#[derive(Debug)]
pub(crate) enum ParsedArgs {
    /// The arguments are valid and request a command.
    Command(Box<Cli>),
    /// The arguments request the help or the version, which is the text to print to stdout.
    Print(String),
    /// The arguments are invalid. Contains the error and the output format that the arguments
    /// request.
    Invalid(Diagnostic, OutputFormat),
}

/// Parses the command line of `launch`. The first element of `args` is the name of the program.
pub(crate) fn parse_command_line(args: impl Iterator<Item = OsString>) -> ParsedArgs {
    let args = insert_default_command(args);
    let format = detect_requested_format(&args);
    let first = find_first_word(&args).map(|at| args[at].clone());
    let help_command = find_help_command(&args);
    let error = match Cli::try_parse_from(args) {
        Ok(cli) => return ParsedArgs::Command(Box::new(cli)),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ParsedArgs::Print(error.to_string()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            let missing = first.as_deref().and_then(missing_subcommand_error);
            ParsedArgs::Invalid(missing.unwrap_or_else(missing_job_error), format)
        }
        _ => ParsedArgs::Invalid(usage_error(&error, &help_command), format),
    }
}

/// Returns the command line that prints the help of the subcommand in `args`, such as
/// `launch ckpt convert --help` for `launch ckpt convert a b --to zip`.
fn find_help_command(args: &[OsString]) -> String {
    let (mut command, mut words) = (Cli::command(), vec!["launch".to_owned()]);
    for word in find_first_word(args).map_or(&[][..], |at| &args[at..]) {
        let Some(subcommand) = command.find_subcommand(word).cloned() else { break };
        words.push(subcommand.get_name().to_owned());
        command = subcommand;
    }
    format!("{} --help", words.join(" "))
}

/// Returns the output format in which an error about `args` is printed: JSON if `args` contain
/// `--json` before `--`.
fn detect_requested_format(args: &[OsString]) -> OutputFormat {
    let options = args.iter().take_while(|arg| *arg != "--");
    OutputFormat { json: options.into_iter().any(|arg| arg == "--json"), ..OutputFormat::default() }
}

/// Returns the error of a command line that has neither a job file nor a command.
fn missing_job_error() -> Diagnostic {
    Diagnostic::error(command::COMMAND_MISSING, "no job file given")
        .with_help("name a job, as in `launch job.yaml`, or see `launch --help`")
}

/// Returns the error of a command that requires a subcommand, such as `launch ckpt`, but was given
/// without one. Returns `None` if the command `word` has no subcommands.
fn missing_subcommand_error(word: &OsStr) -> Option<Diagnostic> {
    let cli = Cli::command();
    let name = word.to_str()?;
    let subcommands = cli.find_subcommand(name)?.get_subcommands().filter(|c| !c.is_hide_set());
    let names: Vec<&str> = subcommands.map(clap::Command::get_name).collect();
    let message = format!("`launch {name}` requires a subcommand: {}", names.join(", "));
    (!names.is_empty()).then(|| {
        Diagnostic::error(command::COMMAND_MISSING, message)
            .with_subject(name)
            .with_field("subcommands", names)
            .with_help(format!("see `launch {name} --help`"))
    })
}

/// Inserts the default command, so that `launch job.yaml …` becomes `launch run job.yaml …`.
/// Returns other command lines unchanged.
///
/// A first word that consists of letters only is always a command. A job file with such a name must
/// be given as `./name`.
fn insert_default_command(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    let is_command = |arg: &OsString| {
        arg == GPU_CHECK || arg.to_str().is_some_and(|a| a.bytes().all(|b| b.is_ascii_alphabetic()))
    };
    let is_general_option = |arg: &OsString| ["-h", "--help", "-V", "--version"].iter().any(|g| arg == g);
    if let Some(at) = find_first_word(&args)
        && !is_command(&args[at])
        && !is_general_option(&args[at])
    {
        args.insert(1, OsString::from("run"));
    }
    args
}

/// Returns the index of the first argument after the global options, such as 2 for `plan` in
/// `launch --json plan job.yaml`. Returns `None` if there is no such argument.
fn find_first_word(args: &[OsString]) -> Option<usize> {
    let mut at = 1;
    while let Some(arg) = args.get(at) {
        match arg.to_str() {
            Some("--json") => at += 1,
            Some("--json-schema") => at += 2,
            Some(arg) if arg.starts_with("--json-schema=") => at += 1,
            _ => return Some(at),
        }
    }
    None
}

/// Converts clap's error about wrong arguments to a diagnostic. The diagnostic's help text refers
/// to `help_command`.
fn usage_error(error: &clap::Error, help_command: &str) -> Diagnostic {
    let text = |kind| error.get(kind).and_then(context_to_text);
    let argument = text(ContextKind::InvalidArg).unwrap_or_default();
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    let message = match error.kind() {
        ErrorKind::UnknownArgument if argument.starts_with('-') => format!("unknown option `{argument}`"),
        ErrorKind::UnknownArgument => format!("unexpected argument `{argument}`"),
        ErrorKind::InvalidSubcommand => {
            format!("unknown command `{}`", text(ContextKind::InvalidSubcommand).unwrap_or_default())
        }
        ErrorKind::InvalidValue if value.is_empty() => format!("`{argument}` requires a value"),
        ErrorKind::InvalidValue => {
            let valid = text(ContextKind::ValidValue).unwrap_or_default();
            format!("`{value}` is not a value of `{argument}`; expected one of `{valid}`")
        }
        ErrorKind::ValueValidation => {
            let reason = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
            format!("`{value}` is not a value of `{argument}`: {reason}")
        }
        ErrorKind::MissingRequiredArgument => format!("missing `{argument}`"),
        ErrorKind::ArgumentConflict => {
            let other = text(ContextKind::PriorArg).unwrap_or_default();
            format!("`{argument}` cannot be used with `{other}`")
        }
        ErrorKind::TooManyValues => format!("unexpected value `{value}` of `{argument}`"),
        ErrorKind::NoEquals => format!("`{argument}` requires `=` before its value"),
        ErrorKind::InvalidUtf8 => "an argument is not UTF-8 text".to_owned(),
        _ => error.kind().to_string(),
    };
    let suggestion = text(ContextKind::SuggestedArg).or_else(|| text(ContextKind::SuggestedSubcommand));
    let usage = Diagnostic::error(command::USAGE, message);
    let usage = match suggestion {
        Some(suggestion) => usage
            .with_field("suggestion", suggestion.as_str())
            .with_help(format!("did you mean `{suggestion}`?")),
        None => usage,
    };
    let usage = if argument.is_empty() { usage } else { usage.with_subject(argument) };
    usage.with_help(format!("see `{help_command}`"))
}

/// Converts a text, several texts or a number in the context of clap's error to text. Returns
/// `None` for other types of values.
fn context_to_text(value: &ContextValue) -> Option<String> {
    match value {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(texts) => Some(texts.join("`, `")),
        ContextValue::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
