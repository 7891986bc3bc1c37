//! The command line: arguments only.
use crate::cmd::ckpt::CkptArgs;
use clap::{Args, CommandFactory, Parser, Subcommand, error::ErrorKind};
use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

/// Runs a training job from its job.yaml to resumable, usable weights.
#[derive(Debug, Parser)]
#[command(
    name = "launch",
    version,
    override_usage = "launch JOB [--set PATH=VALUE]… [--dry-run] [--detach] [--json]\n       launch run [--workers N] -- PROGRAM …\n       launch COMMAND …",
    after_help = "`launch job.yaml` is short for `launch run job.yaml`. Exit codes: 0 done, 1 the job failed, 2 the command line or \
                  the job is wrong, 3 the cluster can't be had, 4 the checkpoint can't be used, 130/143 stopped by a signal after a save.",
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Data as JSON on stdout: events one a line, plans and tables as one object
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a job (the default)
    Run(RunArgs),
    /// Show what would run where: ranks, environment, memory; touches nothing
    Plan(JobArgs),
    /// Look at every host: reachable, GPUs, storage, ports; each failure with the next thing to do
    Check(JobArgs),
    /// Show running and past runs
    Ps(PsArgs),
    /// Show what the ranks of a run wrote
    Logs(LogsArgs),
    /// Show what happened in a run
    Events(EventsArgs),
    /// Ask a run to save and stop, or kill it
    Stop(StopArgs),
    /// Look at, verify and convert checkpoints
    Ckpt(CkptArgs),
    /// Submit a job to Slurm
    Sbatch(SbatchArgs),
    /// Make a job.yaml of what Accelerate, DeepSpeed or torchrun were told
    Import(ImportArgs),
    /// The agent's role; started by launch itself
    #[command(hide = true)]
    Agent(AgentArgs),
}

/// A job and changes to it.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// The job file
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,
    /// Change a key of the job, e.g. --set train.steps=50 (the value is YAML; may be given several times)
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Show all past runs, not the newest 20 alone
    #[arg(long, short)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// A run's name or its beginning, its job's name, or its directory [default: the one that runs, else the newest]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<String>,
    /// Of these ranks alone: 3, or 0-3,7
    #[arg(long, value_name = "RANKS", value_delimiter = ',', value_parser = ranks)]
    pub(crate) rank: Vec<Vec<u32>>,
    /// Go on until the run ends
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only lines that match this regular expression
    #[arg(long, value_name = "RE")]
    pub(crate) grep: Option<String>,
    /// Only what was written since then, to about a second: 30s, 10m, 2h
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) since: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// A run's name or its beginning, its job's name, or its directory [default: the one that runs, else the newest]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<String>,
    /// Go on until the run ends
    #[arg(long, short)]
    pub(crate) follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// A run's name or its beginning, its job's name, or its directory [default: the only one that runs]
    #[arg(value_name = "RUN")]
    pub(crate) run: Option<String>,
    /// Kill it, without a save
    #[arg(long)]
    pub(crate) now: bool,
    /// Don't wait for its end
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Wait at most this many seconds for its end
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) wait: u64,
}

/// Most ranks that a list may name.
const MOST_RANKS: u32 = 1 << 20;

/// `3` or `0-3`.
fn ranks(text: &str) -> Result<Vec<u32>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first), Ok(last)) if first <= last && last < MOST_RANKS => Ok((first..=last).collect()),
        _ => Err("ranks are written 3 or 0-3,7".to_owned()),
    }
}

/// In milliseconds.
fn duration(text: &str) -> Result<u64, String> {
    contract::job::duration(text).ok_or_else(|| "a duration is written 30s, 10m or 2h".to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The job file
    #[arg(value_name = "JOB", required_unless_present = "command", conflicts_with = "command")]
    pub(crate) job: Option<PathBuf>,
    /// Change a key of the job, e.g. --set train.steps=50 (the value is YAML; may be given several times)
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Workers of the program after `--`, on this machine [default: 1]
    #[arg(long, visible_alias = "nproc-per-node", alias = "nproc_per_node", value_name = "N", conflicts_with = "job", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) workers: Option<u32>,
    /// A program and its arguments to run as workers, without a job file
    #[arg(last = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
    /// In a Slurm batch job: on SIGUSR1 (the time limit is near) or when a node is lost, save, stop, and have Slurm start
    /// the job again, `slurm.requeues` times at most
    #[arg(long, requires = "job")]
    pub(crate) requeue: bool,
    /// Return when the job has started; it goes on without this terminal
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) detach: bool,
    /// The detached controller's own: the run's name and a descriptor
    #[arg(long, hide = true, value_name = "RUN:FD", conflicts_with = "detach")]
    pub(crate) detached: Option<String>,
    /// Show the plan and the whole job with its defaults, and run nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Print this on a line of its own first: what came before is not the agent's
    #[arg(long, value_name = "TEXT")]
    pub(crate) marker: Option<String>,
    /// Print the content hash of this executable, once it is safely on disk, and leave
    #[arg(long)]
    pub(crate) own_hash: bool,
    /// stdin has an invitation to connect to the controller
    #[arg(long)]
    pub(crate) join: bool,
    /// The executable is a copy for this agent alone
    #[arg(long)]
    pub(crate) remove_own_file: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SbatchArgs {
    /// The job file
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,
    /// Change a key of the job, e.g. --set slurm.nodes=4 (the value is YAML; may be given several times)
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Print the script instead of submitting it
    #[arg(long)]
    pub(crate) print: bool,
    /// More options for sbatch; they win over those of the script
    #[arg(last = true, value_name = "OPTION", conflicts_with = "print")]
    pub(crate) options: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(subcommand)]
    pub(crate) from: ImportFrom,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImportFrom {
    /// Accelerate's config, as `accelerate config` writes it
    Accelerate(ImportFile),
    /// DeepSpeed's config: a job of the built-in training, or of the program after `--`, which reads the config itself
    Deepspeed(ImportFile),
    /// torchrun's arguments, after `--`
    Torchrun(ImportTorchrun),
}

#[derive(Debug, Args)]
pub(crate) struct ImportFile {
    /// The config file
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// The hosts: a hostfile of DeepSpeed or Open MPI
    #[arg(long, value_name = "FILE")]
    pub(crate) hostfile: Option<PathBuf>,
    /// The program that the job runs, and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ImportTorchrun {
    /// The hosts: a hostfile of DeepSpeed or Open MPI
    #[arg(long, value_name = "FILE")]
    pub(crate) hostfile: Option<PathBuf>,
    /// torchrun's own arguments, the script, and the script's arguments
    #[arg(last = true, value_name = "ARGS", required = true)]
    pub(crate) arguments: Vec<String>,
}

/// What the arguments ask for.
#[derive(Debug)]
pub(crate) enum Asked {
    Command(Cli),
    /// Help or version: text for stdout.
    Show(String),
    /// What is wrong, on one line.
    Wrong(String),
}

/// Reads the arguments, the program's name first.
pub(crate) fn parse(args: impl Iterator<Item = OsString>) -> Asked {
    let args = with_command(args);
    let first = args.iter().skip(1).find(|arg| *arg != "--json").cloned();
    match Cli::try_parse_from(args) {
        Ok(cli) => Asked::Command(cli),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Asked::Show(error.to_string()),
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
                Asked::Wrong(
                    first
                        .as_deref()
                        .and_then(needs_more)
                        .unwrap_or_else(|| "what shall be launched? Name a job: launch job.yaml".to_owned()),
                )
            }
            _ => Asked::Wrong(one_line(&error.to_string())),
        },
    }
}

/// What is wrong with a command of several that was given alone.
fn needs_more(command: &OsStr) -> Option<String> {
    let all = Cli::command();
    let name = command.to_str()?;
    let kinds = all.find_subcommand(name)?.get_subcommands().filter(|c| !c.is_hide_set());
    let kinds: Vec<&str> = kinds.map(clap::Command::get_name).collect();
    (!kinds.is_empty())
        .then(|| format!("`launch {name}` needs one of {} (see launch {name} --help)", kinds.join(", ")))
}

/// `launch job.yaml …` → `launch run job.yaml …`. A word of letters alone is a command; a job file with such a name is
/// written `./name`.
fn with_command(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    let command = |arg: &OsString| arg.to_str().is_some_and(|a| a.bytes().all(|b| b.is_ascii_alphabetic()));
    let general = |arg: &OsString| ["-h", "--help", "-V", "--version"].iter().any(|g| arg == g);
    // Options may stand before the command: `launch --json plan job.yaml`.
    let first = args.iter().skip(1).find(|arg| *arg != "--json");
    if first.is_some_and(|arg| !command(arg) && !general(arg)) {
        args.insert(1, OsString::from("run"));
    }
    args
}

/// clap's message without its usage, on one line.
fn one_line(message: &str) -> String {
    let told =
        message.lines().map(str::trim).take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more"));
    let words: Vec<&str> = told.filter(|l| !l.is_empty()).collect();
    let line =
        words.join("; ").replace(":; ", ": ").replace("error: ", "").replace("tip: ", "").replace('\'', "`");
    format!("{line} (see launch --help)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(args: &[&str]) -> Asked {
        parse(std::iter::once("launch").chain(args.iter().copied()).map(OsString::from))
    }

    fn wrong(args: &[&str]) -> String {
        match asked(args) {
            Asked::Wrong(line) => line,
            other => panic!("accepted: {other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_is_the_default() {
        for args in [
            &["a.yaml", "--set", "x=1", "--dry-run"][..],
            &["run", "a.yaml", "--set", "x=1", "--dry-run"],
            &["--set", "x=1", "--dry-run", "a.yaml"],
            &["--json", "--dry-run", "--set=x=1", "a.yaml"],
        ] {
            let Asked::Command(Cli { command: Command::Run(run), json }) = asked(args) else {
                panic!("{args:?}")
            };
            assert_eq!(
                (run.job.as_deref().and_then(std::path::Path::to_str), run.set, run.dry_run),
                (Some("a.yaml"), vec!["x=1".to_owned()], true)
            );
            assert_eq!(json, args[0] == "--json");
        }
    }

    #[test]
    fn a_program_needs_no_job_file() {
        for (args, workers) in [
            (&["run", "--", "python", "train.py", "--json", "-x"][..], None),
            (&["--workers", "4", "--", "python", "train.py", "--json", "-x"], Some(4)),
            (&["run", "--workers=4", "--", "python", "train.py", "--json", "-x"], Some(4)),
        ] {
            let Asked::Command(Cli { command: Command::Run(run), json }) = asked(args) else {
                panic!("{args:?}")
            };
            assert_eq!((run.job, run.workers, json), (None, workers, false));
            assert_eq!(run.command, ["python", "train.py", "--json", "-x"]);
        }
        for (args, part) in [
            (&["run", "a.yaml", "--", "true"][..], "JOB"),
            (&["run", "a.yaml", "--workers", "2"], "JOB"),
            (&["run", "--workers", "0", "--", "true"], "1..=1024"),
            (&["run", "--"], "JOB"),
        ] {
            let line = wrong(args);
            assert!(line.contains(part), "{args:?}: {line}");
        }
    }

    #[test]
    fn other_commands() {
        assert!(matches!(
            asked(&["plan", "a.yaml", "--json"]),
            Asked::Command(Cli { command: Command::Plan(_), json: true })
        ));
        assert!(matches!(
            asked(&["--json", "plan", "a.yaml"]),
            Asked::Command(Cli { command: Command::Plan(_), json: true })
        ));
        assert!(matches!(asked(&["agent"]), Asked::Command(Cli { command: Command::Agent(_), .. })));
        let Asked::Show(version) = asked(&["--version"]) else { panic!("no version") };
        assert!(version.starts_with("launch "));
        let Asked::Show(help) = asked(&["--help"]) else { panic!("no help") };
        assert!(help.contains("plan") && !help.contains("agent"), "{help}");
    }

    #[test]
    fn what_is_wrong_is_one_line() {
        assert_eq!(wrong(&[]), "what shall be launched? Name a job: launch job.yaml");
        assert_eq!(wrong(&["--json"]), "what shall be launched? Name a job: launch job.yaml");
        let line = wrong(&["import"]);
        assert_eq!(
            line,
            "`launch import` needs one of accelerate, deepspeed, torchrun (see launch import --help)"
        );
        assert!(wrong(&["--json", "ckpt"]).starts_with("`launch ckpt` needs one of "));
        for (args, part) in [
            (&["a.yaml", "--jsno"][..], "--json"),
            (&["a.yaml", "b.yaml"], "b.yaml"),
            (&["a.yaml", "--set"], "--set"),
            (&["plan"], "JOB"),
            (&["plna", "a.yaml"], "`plan`"),
            (&["job"], "job"),
            (&["a.yaml", "--set", "x=1", "--json=3"], "--json"),
        ] {
            let line = wrong(args);
            assert!(line.contains(part) && !line.contains('\n'), "{args:?}: {line}");
        }
    }
}
