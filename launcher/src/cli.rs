//! Parses the command line, and converts errors of wrong arguments to diagnostics.
use crate::cmd::{
    LaunchCommand,
    drop_in::{LauncherProgram, rewrite_launcher_command},
    output::OutputFormat,
};
use clap::{
    ArgAction, CommandFactory, Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};
use diagnostic::{Diagnostic, codes::command};
use protocol::event::EventSchema;
use std::ffi::{OsStr, OsString};

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
    /// Print events, results and errors as JSON on stdout; `logs`, `top`, `stop`, `exec`,
    /// `manifest slurm`, `gpu-check`, `completions` and `man` print only errors as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Print the debug log on stderr: -v shows decisions, -vv also messages between processes, -vvv
    /// everything; the variable LAUNCH_LOG overrides this option
    #[arg(long, short, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Schema of events with --json: 2, or the deprecated 1 of earlier releases [default: 2]
    #[arg(long, global = true, value_name = "VERSION")]
    pub(crate) json_schema: Option<EventSchema>,
}

/// A parsed command line of `launch`: the command to run, the help or version text to print, or the
/// error about wrong arguments.
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

/// Parses the command line of `launch` into the command to run, a text to print, or an error about
/// wrong arguments. The first element of `args` is the name of the program.
pub(crate) fn parse_command_line(args: impl Iterator<Item = OsString>) -> ParsedArgs {
    let args = insert_default_command(insert_drop_in_command(args.collect()).into_iter());
    let format = detect_requested_format(&args);
    let first = find_first_word_index(&args).map(|at| args[at].clone());
    let help_command = build_help_command(&args);
    let error = match Cli::try_parse_from(args) {
        Ok(cli) => return ParsedArgs::Command(Box::new(cli)),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ParsedArgs::Print(error.to_string()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            let missing = first.as_deref().and_then(build_missing_subcommand_error);
            ParsedArgs::Invalid(missing.unwrap_or_else(build_missing_job_error), format)
        }
        _ => ParsedArgs::Invalid(build_usage_error(&error, &help_command), format),
    }
}

/// Returns the command line that prints the help of the subcommand in `args`, such as
/// `launch ckpt convert --help` for `launch ckpt convert a b --to zip`.
fn build_help_command(args: &[OsString]) -> String {
    let (mut command, mut words) = (Cli::command(), vec!["launch".to_owned()]);
    for word in find_first_word_index(args).map_or(&[][..], |at| &args[at..]) {
        let Some(subcommand) = command.find_subcommand(word).cloned() else { break };
        words.push(subcommand.get_name().to_owned());
        command = subcommand;
    }
    format!("{} --help", words.join(" "))
}

/// Determines, before the arguments `args` are parsed, whether an error about them is printed as
/// JSON or as text. The format is JSON if `args` contain `--json` before `--`.
fn detect_requested_format(args: &[OsString]) -> OutputFormat {
    let options = args.iter().take_while(|arg| *arg != "--");
    OutputFormat { json: options.into_iter().any(|arg| arg == "--json"), ..OutputFormat::default() }
}

/// Creates the error that a command line has neither a job file nor a command.
fn build_missing_job_error() -> Diagnostic {
    Diagnostic::error(command::COMMAND_MISSING, "no job file given")
        .with_help("name a job, as in `launch job.yaml`, or see `launch --help`")
}

/// Creates the error that the command `word`, such as `ckpt`, was given without one of the
/// subcommands that it requires. Returns `None` if the command `word` has no subcommands.
fn build_missing_subcommand_error(word: &OsStr) -> Option<Diagnostic> {
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

/// Inserts the words that make launch parse another launcher's command line: `torchrun train.py`,
/// run through a link, becomes `launch torchrun -- train.py`. Inserts the name of the drop-in
/// command if launch was called by the name of the other launcher, and `--` before the arguments of
/// the command, so that all of them belong to the other launcher. Returns other command lines
/// unchanged.
fn insert_drop_in_command(mut args: Vec<OsString>) -> Vec<OsString> {
    if let Some(program) = args.first().and_then(|name| LauncherProgram::from_path(name)) {
        args.insert(1, OsString::from(program.name));
    }
    if let Some(at) = find_first_word_index(&args)
        && let Some(words) = rewrite_launcher_command(&args[at..])
    {
        args.truncate(at);
        args.extend(words);
    }
    args
}

/// Inserts the default command `run`, so that `launch job.yaml …` becomes `launch run job.yaml …`.
/// Returns other command lines unchanged.
///
/// A first word that consists of letters only is always a command, also if no command has this
/// name. A job file with such a name or the name of a command must be given as `./name`.
fn insert_default_command(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    let is_command = |arg: &OsString| {
        arg.to_str().is_some_and(|a| a.bytes().all(|b| b.is_ascii_alphabetic()))
            || Cli::command().find_subcommand(arg).is_some()
    };
    let is_general_option = |arg: &OsString| ["-h", "--help", "-V", "--version"].iter().any(|g| arg == g);
    if let Some(at) = find_first_word_index(&args)
        && !is_command(&args[at])
        && !is_general_option(&args[at])
    {
        args.insert(1, OsString::from("run"));
    }
    args
}

/// Returns the index in `args` of the first argument that is not a global option, such as 2 for
/// `plan` in `launch --json plan job.yaml`. Returns `None` if there is no such argument.
fn find_first_word_index(args: &[OsString]) -> Option<usize> {
    let mut at = 1;
    while let Some(arg) = args.get(at) {
        match arg.to_str() {
            Some("--json" | "--verbose") => at += 1,
            Some(arg) if is_verbosity_flag(arg) => at += 1,
            Some("--json-schema") => at += 2,
            Some(arg) if arg.starts_with("--json-schema=") => at += 1,
            _ => return Some(at),
        }
    }
    None
}

/// Returns whether an argument is `-v`, `-vv` and so on, which makes launch print more.
fn is_verbosity_flag(arg: &str) -> bool {
    arg.len() > 1 && arg.strip_prefix('-').is_some_and(|letters| letters.bytes().all(|b| b == b'v'))
}

/// Converts clap's error about wrong arguments to a diagnostic. The diagnostic's help text refers
/// to `help_command`.
fn build_usage_error(error: &clap::Error, help_command: &str) -> Diagnostic {
    let text = |kind| error.get(kind).and_then(clap_context_to_text);
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

/// Converts a value in the details of an error of clap (the command line parser) to text. Returns
/// `None` for other types of values.
fn clap_context_to_text(value: &ContextValue) -> Option<String> {
    match value {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(texts) => Some(texts.join("`, `")),
        ContextValue::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
