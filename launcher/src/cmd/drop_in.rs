//! `launch torchrun`, `launch accelerate` and `launch deepspeed`: run the command lines of these
//! three launchers as jobs of launch.
//!
//! The conversion of the arguments to a job is in [`crate::import`]. Commands of the other
//! launchers that do not start a job are passed on to the original program.
mod launcher_words;
mod original_program;
mod other_launcher;

pub(crate) use launcher_words::rewrite_launcher_command;
pub(crate) use other_launcher::{LauncherProgram, OtherLauncher};

use super::{
    context::CommandContext,
    job_preparation::discover_inventory,
    node_role::NodeArgs,
    output::{combine_mistakes, print_text},
    run::run_command_line_job,
};
use crate::{
    cluster::read_hostfile,
    import::{
        self, AccelerateCommand, DeepSpeedCommand, DeepSpeedFiles, DropInContext, ImportedJob, ImportedNodes,
        TorchProgram,
    },
    report::command_output,
};
use clap::Args;
use diagnostic::{Category, Diagnostic, codes::command, terminal_text::filter_line};
use jobspec::{AcceleratorKind, Document, DocumentSyntax, env, read_input_file};
use original_program::{exec_original_program, find_python, resolve_python};
use protocol::control::HostInventory;
use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

/// The text at the end of the help of `launch torchrun`.
pub(crate) const TORCHRUN_HELP: &str = "The options after the name of the command are those of torchrun. Options of \
    launch come before the name: `launch --json torchrun …`. An option that launch cannot honour is an error.\nOn several \
    nodes, start the command once on each node, and set LAUNCH_KEY_FILE to a file with the same key on all nodes, or set \
    LAUNCH_INSECURE=1 to use no key.\n`torchrun --help` of the original program describes the options; \
    docs/cli.md#drop-in-commands lists the differences.";
/// The text at the end of the help of `launch accelerate`.
pub(crate) const ACCELERATE_HELP: &str = "The options after `launch` are those of `accelerate launch`. Options of launch come \
    before `accelerate`: `launch --json accelerate launch …`. An option that launch cannot honour is an error.\nOn several machines, start \
    the command once on each machine, and set LAUNCH_KEY_FILE to a file with the same key on all machines, or set \
    LAUNCH_INSECURE=1 to use no key.\nOther commands, such as `accelerate config`, run the original program.\n`accelerate launch --help` of the original program describes the options; \
    docs/cli.md#drop-in-commands lists the differences.";
/// The text at the end of the help of `launch deepspeed`.
pub(crate) const DEEPSPEED_HELP: &str = "The options after the name of the command are those of deepspeed. Options of launch \
    come before the name: `launch --json deepspeed …`. An option that launch cannot honour is an error.\nWith \
    `--no_ssh`, start the command once on each node, and set LAUNCH_KEY_FILE to a file with the same key on all nodes, or \
    set LAUNCH_INSECURE=1 to use no key.\n`deepspeed --help` of the original program describes the options; \
    docs/cli.md#drop-in-commands lists the differences.";

/// The directory in which launch creates the process ID file for `deepspeed --save_pid`, as
/// DeepSpeed does.
const PID_FILE_DIRECTORY: &str = "/tmp";
/// The name of the file with environment variables for workers that `deepspeed` reads, unless
/// `DS_ENV_FILE` names another one.
const DEEPSPEED_ENV_FILE: &str = ".deepspeed_env";
/// The largest size of a file with environment variables for workers, in bytes.
const MAX_ENV_VARIABLE_FILE_BYTES: u64 = 1 << 20;

/// Returns whether `program`, the first word of a command line, is the name or path of a launcher
/// that launch replaces, such as `torchrun`.
pub fn is_other_launcher(program: &OsStr) -> bool {
    LauncherProgram::from_path(program).is_some()
}

/// Arguments of `launch torchrun`, `launch accelerate` and `launch deepspeed`.
#[derive(Debug, Args)]
pub(crate) struct DropInArgs {
    /// Internal: the path of the other launcher, if the user gave a path
    #[arg(long, hide = true, value_name = "PATH")]
    original: Option<PathBuf>,
    /// Internal: the Python of a command line `python -m MODULE`
    #[arg(long, hide = true, value_name = "PROGRAM")]
    python: Option<PathBuf>,
    /// Internal: the command line is that of the module torch.distributed.launch
    #[arg(long, hide = true)]
    legacy: bool,
    /// Options of the other launcher, the script, and the script's arguments
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// Runs the command line `args` of another launcher, such as torchrun, as a job of launch, or runs
/// the original program if no job is requested. Returns the exit code.
pub(crate) fn run(
    launcher: OtherLauncher,
    args: DropInArgs,
    context: &CommandContext,
) -> diagnostic::Result<u8> {
    let Some(arguments) = select_job_arguments(launcher, &args.arguments) else {
        return Err(exec_original_program(launcher, args.original.as_deref(), &args.arguments));
    };
    let words: Option<Vec<String>> = arguments.iter().map(|word| word.to_str().map(str::to_owned)).collect();
    let words = words.ok_or_else(|| {
        let message = format!("an argument of {} is not UTF-8 text", launcher.name());
        Diagnostic::error(command::ARGUMENT_NOT_UTF8, message)
    })?;
    if import::requests_help(&words) {
        return print_help(launcher, context);
    }
    let inventory = discover_inventory()?;
    let variables = read_environment_variables();
    let python = match &args.python {
        Some(python) => resolve_python(python)?,
        None => find_python(launcher, args.original.as_deref(), &words)?,
    };
    let directory = std::env::current_dir().map_err(|error| {
        let message = "cannot determine the current directory";
        Diagnostic::error(command::CURRENT_DIRECTORY_UNAVAILABLE, message).with_cause(&error)
    })?;
    let directory = directory.display().to_string();
    let machine = build_drop_in_context(&inventory, &variables, &python, &directory);
    let pid_file = launcher == OtherLauncher::Deepspeed && requests_pid_file(&words);
    let program = if args.legacy { TorchProgram::LegacyLaunch } else { TorchProgram::Torchrun };
    let ImportedJob { job, notes, nodes } = convert_to_job(launcher, program, &words, &machine)?;
    let node = convert_nodes_to_args(nodes);
    let lines = notes.iter().map(|note| format!("{}\n", filter_line(&note.to_string())));
    command_output::write_message(&lines.collect::<String>());
    let pid_file = if pid_file { Some(PidFile::create()?) } else { None };
    let code = run_command_line_job(job, node, context);
    drop(pid_file);
    code
}

/// Converts the `--nnodes`, `--node-rank` and rendezvous settings of another launcher's command
/// line to the corresponding options of `launch run`.
fn convert_nodes_to_args(nodes: Option<ImportedNodes>) -> NodeArgs {
    nodes.map_or_else(NodeArgs::default, |nodes| NodeArgs {
        nodes: Some(nodes.count),
        node_rank: nodes.node_rank,
        rendezvous: nodes.rendezvous,
        ..NodeArgs::default()
    })
}

/// Returns the part of another launcher's command line that starts a job, such as the words after
/// `launch` for accelerate. Returns `None` if the original program has to run the command line.
fn select_job_arguments(launcher: OtherLauncher, arguments: &[OsString]) -> Option<&[OsString]> {
    match launcher {
        OtherLauncher::Accelerate => match arguments.first().and_then(|first| first.to_str()) {
            Some("launch") => Some(&arguments[1..]),
            Some("-h" | "--help") => Some(arguments),
            _ => None,
        },
        OtherLauncher::Torchrun => {
            let options = arguments.iter().take_while(|word| word.as_encoded_bytes().starts_with(b"-"));
            let is_completion = |word: &OsString| {
                word.to_str().is_some_and(|word| word.replace('_', "-").starts_with("--print-completion"))
            };
            (!options.into_iter().any(is_completion)).then_some(arguments)
        }
        OtherLauncher::Deepspeed => Some(arguments),
    }
}

/// Prints the help of `launch torchrun`, `launch accelerate` or `launch deepspeed`.
fn print_help(launcher: OtherLauncher, context: &CommandContext) -> diagnostic::Result<u8> {
    let mut definition = (context.build_definition)();
    definition.build();
    let help =
        definition.find_subcommand_mut(launcher.name()).map(|command| command.render_help().to_string());
    print_text(&help.unwrap_or_default())
}

/// Returns the environment variables of this process whose names and values are UTF-8 text.
fn read_environment_variables() -> BTreeMap<String, String> {
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    std::env::vars_os().filter_map(text).collect()
}

/// Collects what the conversion of another launcher's command line needs to know about this
/// machine, such as its accelerators and environment variables.
fn build_drop_in_context<'a>(
    inventory: &HostInventory,
    variables: &'a BTreeMap<String, String>,
    python: &'a str,
    directory: &'a str,
) -> DropInContext<'a> {
    let kind = inventory.accelerators.first().map_or(AcceleratorKind::Cuda, |a| a.kind);
    let names = match kind {
        AcceleratorKind::Cuda | AcceleratorKind::Mig | AcceleratorKind::Rocm => {
            vec![env::CUDA_VISIBLE_DEVICES, env::HIP_VISIBLE_DEVICES]
        }
        kind => vec![kind.traits().variable],
    };
    let visible = names.iter().find_map(|name| variables.get(*name));
    // CUDA shows a process one MIG instance only.
    let installed_gpus = match inventory.accelerators.len() {
        count if kind == AcceleratorKind::Mig => count.min(1),
        count => count,
    };
    let listed = visible.map(|list| list.split(',').take_while(|id| !id.is_empty() && *id != "-1").count());
    let mut nodes: Vec<u32> = inventory.topology.cores.iter().map(|core| core.numa_node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    DropInContext {
        variables,
        python,
        directory,
        cpus: inventory.cpus.len(),
        cores: inventory.topology.cores.len(),
        numa_nodes: nodes.len(),
        kind,
        gpus: listed.unwrap_or(installed_gpus).min(installed_gpus),
        installed_gpus,
    }
}

/// Converts the arguments of another launcher's command line to a job. Reads the files that the
/// other launcher would read. For torchrun, `program` selects torchrun or its predecessor.
fn convert_to_job(
    launcher: OtherLauncher,
    program: TorchProgram,
    words: &[String],
    machine: &DropInContext<'_>,
) -> diagnostic::Result<ImportedJob> {
    let rejected = |mistakes: Vec<Diagnostic>| combine_rejections(launcher, mistakes);
    match launcher {
        OtherLauncher::Torchrun => {
            import::convert_torchrun_command(program, words, machine).map_err(rejected)
        }
        OtherLauncher::Accelerate => {
            let command = AccelerateCommand::parse(words).map_err(rejected)?;
            let (files, is_required) = command.list_config_files(machine);
            let config = read_accelerate_config(&files, is_required)?;
            command.convert(config.as_ref(), machine).map_err(rejected)
        }
        OtherLauncher::Deepspeed => {
            let command = DeepSpeedCommand::parse(words).map_err(rejected)?;
            let files = read_deepspeed_files(Path::new(command.hostfile()), machine)?;
            command.convert(&files, machine).map_err(rejected)
        }
    }
}

/// Combines the reasons why a command line of another launcher cannot be converted into one error.
fn combine_rejections(launcher: OtherLauncher, mut mistakes: Vec<Diagnostic>) -> Diagnostic {
    match mistakes.len() {
        1 => mistakes.remove(0).with_category(Category::Usage),
        _ => {
            let name = format!("the command line of {}", launcher.name());
            combine_mistakes(command::DROP_IN_UNSUPPORTED, &name, mistakes, "nothing was started")
        }
    }
}

/// Reads and parses the first existing file of `files` as a configuration file of Accelerate. If
/// `is_required` is true, a missing file is an error.
fn read_accelerate_config(files: &[PathBuf], is_required: bool) -> diagnostic::Result<Option<Document>> {
    let Some(file) = files.iter().find(|file| is_required || file.is_file()) else { return Ok(None) };
    let is_json = file.extension().is_some_and(|extension| extension == "json");
    let syntax = if is_json { DocumentSyntax::Json } else { DocumentSyntax::Yaml };
    Document::read(file, syntax).map(Some).map_err(|error| error.with_category(Category::Usage))
}

/// Reads the files that `deepspeed` reads: the hostfile, and the files with variables for workers
/// on several hosts. Files that do not exist are left out.
fn read_deepspeed_files(hostfile: &Path, machine: &DropInContext<'_>) -> diagnostic::Result<DeepSpeedFiles> {
    let mut files = DeepSpeedFiles::default();
    if hostfile.is_file() {
        let text = read_hostfile(hostfile);
        files.hostfile =
            Some(text.map_err(|error| error.with_subject("--hostfile").with_category(Category::Usage))?);
    }
    let variable = |name: &str| machine.variables.get(name).map(String::as_str);
    let name = variable(env::DS_ENV_FILE).unwrap_or(DEEPSPEED_ENV_FILE);
    for directory in [variable(env::HOME).unwrap_or_default(), "."] {
        let path = Path::new(directory).join(name);
        if path.is_file() {
            files.variables.push(read_env_variable_file(&path)?);
        }
    }
    Ok(files)
}

/// Reads a file with environment variables for workers, as `deepspeed` does. Fails if the file is
/// too large or not UTF-8 text.
fn read_env_variable_file(path: &Path) -> diagnostic::Result<String> {
    let rejected = |problem: &str| {
        let message = format!("{problem} {}", path.display());
        Diagnostic::error(command::IMPORT_VALUE_INVALID, message).with_category(Category::Usage)
    };
    let bytes = read_input_file(path, MAX_ENV_VARIABLE_FILE_BYTES)
        .map_err(|error| rejected("cannot read").with_cause(&error))?;
    if bytes.len() as u64 > MAX_ENV_VARIABLE_FILE_BYTES {
        return Err(rejected("a file of variables has more than 1 MiB:"));
    }
    String::from_utf8(bytes).map_err(|_| rejected("a file of variables is not UTF-8 text:"))
}

/// Returns whether a command line of `deepspeed` requests a file with the process ID
/// (`--save_pid`). Returns `false` for an invalid command line.
fn requests_pid_file(words: &[String]) -> bool {
    DeepSpeedCommand::parse(words).is_ok_and(|command| command.requests_pid_file())
}

/// The file with the process id of this process that `deepspeed --save_pid` requests. Dropping the
/// value removes the file.
struct PidFile {
    path: PathBuf,
}

impl PidFile {
    /// Creates the file that `deepspeed --save_pid` requests, in [`PID_FILE_DIRECTORY`], and writes
    /// the process ID of this process to it. Fails if it exists.
    fn create() -> diagnostic::Result<PidFile> {
        let pid = std::process::id();
        let path = Path::new(PID_FILE_DIRECTORY).join(format!("{pid}.deepspeed"));
        let written = OpenOptions::new().write(true).create_new(true).open(&path);
        written.and_then(|mut file| write!(file, "{pid}")).map_err(|error| {
            super::output::path_error(command::PID_FILE_FAILED, "cannot write", &path, &error)
        })?;
        Ok(PidFile { path })
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // A file that is already gone needs no removal.
        _ = fs::remove_file(&self.path);
    }
}
