//! The arguments of `launch run`, and those with which one process of launch starts the controller
//! of a run as another process.
use super::node_role::NodeArgs;
use crate::detached_controller::StartNotifier;
use clap::Args;
use diagnostic::{Diagnostic, codes::command};
use jobspec::ids::RunId;
use std::{
    ffi::OsString,
    hash::{BuildHasher, RandomState},
    io::{self, Read},
    os::fd::RawFd,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Arguments of `launch run`.
#[derive(Debug, Default, Args)]
#[command(
    override_usage = "launch [run] [OPTIONS] JOB\n       launch [run] [OPTIONS] -- PROGRAM [ARGUMENT]…"
)]
pub(crate) struct RunArgs {
    /// Job file
    #[arg(value_name = "JOB", required_unless_present = "command", conflicts_with = "command")]
    pub(crate) job: Option<PathBuf>,
    /// Set a key of the job to a YAML value, such as --set train.steps=50; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Internal: read the values of `--set` from standard input
    #[arg(long, hide = true, conflicts_with = "set")]
    pub(crate) set_from_stdin: bool,
    /// Number of workers of the program after `--`, on this machine or on each node [default: the
    /// variable PET_NPROC_PER_NODE, else 1]
    #[arg(
        long,
        visible_alias = "nproc-per-node",
        alias = "nproc_per_node",
        value_name = "N",
        conflicts_with = "job",
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub(crate) workers: Option<u32>,
    #[command(flatten)]
    pub(crate) node: NodeArgs,
    /// Program to run as workers without a job file, and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
    /// In a Slurm batch job: save and requeue the job before its time limit, and requeue the job
    /// when a node is lost; at most `slurm.requeues` times
    #[arg(long, requires = "job")]
    pub(crate) requeue: bool,
    /// Return when the workers have started; the job continues without this terminal
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) detach: bool,
    /// If the controller dies, start another one that takes over the run; the workers continue
    /// meanwhile
    #[arg(long, conflicts_with_all = ["detach", "dry_run", "pdb"])]
    pub(crate) replace_controller: bool,
    /// Internal: name of the run and descriptor of a controller that another process supervises
    #[arg(long, hide = true, value_name = "RUN:FD", conflicts_with_all = ["detach", "replace_controller"])]
    pub(crate) supervised: Option<String>,
    /// Internal: name of the run and descriptor of a detached controller
    #[arg(long, hide = true, value_name = "RUN:FD", conflicts_with = "detach")]
    pub(crate) detached: Option<String>,
    /// Give this terminal to rank 0, so that `breakpoint()` works; the same as
    /// `--set run.terminal=0`
    #[arg(long, conflicts_with_all = ["detach", "detached"])]
    pub(crate) pdb: bool,
    /// Print the plan and the job with all defaults, and start nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Returns the command-line arguments for the process of a controller that runs in the background
/// or is supervised. `option` is the internal option that passes the name of the run, and `fd`, the
/// descriptor of the pipe to or from the process that starts the controller.
pub(super) fn build_controller_args(
    args: &RunArgs,
    option: &str,
    run: &RunId,
    fd: RawFd,
    verbosity: u8,
) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["run".into()];
    words.extend((0..verbosity).map(|_| "--verbose".into()));
    words.extend((!args.set.is_empty()).then(|| "--set-from-stdin".into()));
    words.extend([option.into(), format!("{run}:{fd}").into()]);
    words.extend(args.requeue.then(|| "--requeue".into()));
    if let Some(job) = &args.job {
        // With `./` in front, a file whose name begins with a dash is not an option.
        words.push(Path::new(".").join(job).into());
        return words;
    }
    words.extend(args.workers.iter().flat_map(|n| ["--workers".into(), n.to_string().into()]));
    words.push("--".into());
    words.extend(args.command.iter().cloned());
    words
}

/// Encodes the overrides of `--set` as text for the standard input of a controller that this
/// process starts. In contrast to arguments, standard input is not shown in lists of processes.
pub(super) fn encode_overrides(overrides: &[String]) -> Vec<u8> {
    overrides.join("\0").into_bytes()
}

/// Reads the overrides of `--set` from standard input, in the process of a controller that another
/// process of launch has started.
pub(super) fn read_overrides_from_stdin(args: &RunArgs) -> diagnostic::Result<Vec<String>> {
    if !args.set_from_stdin {
        return Ok(args.set.clone());
    }
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(|error| {
        let message = "`--set-from-stdin` is an internal option of launch";
        Diagnostic::error(command::DETACHED_ARGUMENT_INVALID, message)
            .with_cause(&error)
            .with_help("use `--set`")
    })?;
    Ok(text.split('\0').map(str::to_owned).collect())
}

/// Parses the internal option `--detached RUN:FD`, with the run ID and a pipe inherited from
/// `launch run --detach`. Returns the ID of the run, and the inherited pipe through which the
/// controller reports that the job has started.
pub(super) fn parse_detached_option(text: &str) -> diagnostic::Result<(RunId, StartNotifier)> {
    parse_inherited_pipe_option(("--detached", "--detach"), text, StartNotifier::from_inherited_fd)
}

/// Parses the value `RUN:FD` of an internal option, with a run ID and an inherited pipe, which
/// `open` takes over. `options` are the internal option and the option that the user should use
/// instead.
pub(super) fn parse_inherited_pipe_option<T>(
    options: (&str, &str),
    text: &str,
    open: impl FnOnce(RawFd) -> io::Result<T>,
) -> diagnostic::Result<(RunId, T)> {
    let (internal, instead) = options;
    let invalid = || {
        let message = format!("`{internal}` is an internal option of launch");
        Diagnostic::error(command::DETACHED_ARGUMENT_INVALID, message).with_help(format!("use `{instead}`"))
    };
    let (run, fd) = text.rsplit_once(':').ok_or_else(invalid)?;
    let is_name = !run.is_empty() && run.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let fd = fd.parse().ok().filter(|_| is_name).ok_or_else(invalid)?;
    let pipe = open(fd).map_err(|e| invalid().with_cause(&e))?;
    Ok((RunId(run.to_owned()), pipe))
}

/// Creates the ID of a run from the time `now` in UTC and 16 random bits, such as
/// `20261120-223145-7f3a`.
pub(super) fn create_run_id(now: SystemTime, random: u16) -> RunId {
    let now = jiff::Timestamp::try_from(now).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    RunId(format!("{}-{random:04x}", now.strftime("%Y%m%d-%H%M%S")))
}

/// Draws 16 random bits for the ID of a run, from the random seed of the standard library's hash
/// maps.
pub(super) fn draw_random_bits() -> u16 {
    RandomState::new().hash_one(std::process::id()) as u16
}
